"""Files: whole or not at all, checked when read, and free of code."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import save_file

from dubito.tensors import files, store
from dubito.tensors.store import Archive, Draws, FileError, TooLarge, pack, read, unpack, write


@pytest.fixture
def path(tmp_path):
    write(tmp_path / "a.safetensors", {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(3)}, {"note": "ok"})
    return tmp_path / "a.safetensors"


def test_what_is_written_is_read(path):
    tensors, meta = read(path)
    assert torch.equal(tensors["w"], torch.arange(6.0).reshape(2, 3))
    assert tensors["n"].dtype == torch.int64
    assert meta["note"] == "ok"


def test_what_was_read_does_not_change_with_the_file(path, tmp_path):
    """A map of the file would: `cp` writes into it, and cutting it short kills the process that reads on."""
    tensors, _ = read(path)
    write(tmp_path / "other", {"w": torch.zeros(2, 3), "n": torch.tensor(0)}, {"note": "ok"})
    shutil.copyfile(tmp_path / "other", path)  # in place
    assert torch.equal(tensors["w"], torch.arange(6.0).reshape(2, 3))
    assert tensors["n"] == 3
    assert all(t.untyped_storage().nbytes() == t.nbytes and t.data_ptr() % 64 == 0 for t in tensors.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.bool, torch.uint8])
def test_every_dtype_strides_aliases_and_empty_tensors(tmp_path, dtype):
    base = torch.ones(4, 4).to(dtype)
    write(tmp_path / "b", {"a": base, "alias": base, "t": base.mT[1:], "wide": base[:1].expand(3, 4), "none": base[:0]}, {})
    tensors, _ = read(tmp_path / "b")
    assert tensors["wide"].shape == (3, 4)
    assert tensors["none"].shape == (0, 4)
    assert all(t.dtype == dtype for t in tensors.values())


def test_one_element_has_the_same_checksum_whatever_its_strides(tmp_path):
    """Bytes cannot be read through a stride other than 1, which `contiguous` leaves to a tensor of one element."""
    column = torch.arange(6.0).reshape(3, 2)[:1, 1]
    odd = torch.as_strided(column, (1,), (5,))
    assert odd.is_contiguous()
    assert odd.stride() == (5,)
    assert store.checksum({"w": odd}) == store.checksum({"w": torch.ones(1)})
    write(tmp_path / "odd", {"w": odd}, {})
    assert torch.equal(read(tmp_path / "odd")[0]["w"], torch.ones(1))


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_a_truncated_file_is_an_error_in_words(path, cut):
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(FileError, match="truncated"):
        read(path)


def test_a_changed_byte_is_noticed(path):
    content = bytearray(path.read_bytes())
    content[-2] ^= 1  # in the tensors
    path.write_bytes(content)
    with pytest.raises(FileError, match="checksum"):
        read(path)


def test_a_changed_header_is_noticed(path):
    content = path.read_bytes().replace(b"ok", b"no")
    path.write_bytes(content)
    with pytest.raises(FileError, match="checksum"):
        read(path)


def test_foreign_files_run_no_code(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "exploded"), "w"))

    (tmp_path / "pickle").write_bytes(pickle.dumps(Bomb()))
    torch.save({"w": torch.zeros(2)}, tmp_path / "torch")
    for name in ("pickle", "torch"):
        with pytest.raises(FileError, match="of another kind"):
            read(tmp_path / name)
    assert not (tmp_path / "exploded").exists()
    save_file({"w": torch.zeros(2)}, tmp_path / "foreign")
    with pytest.raises(FileError, match="not one written by dubito"):
        read(tmp_path / "foreign")
    with pytest.raises(FileNotFoundError, match="no such file"):
        read(tmp_path / "nothing")


def test_a_newer_format_asks_for_an_upgrade(tmp_path, monkeypatch):
    monkeypatch.setattr("dubito.tensors.files.FORMAT", 99)
    write(tmp_path / "new", {}, {})
    monkeypatch.undo()
    with pytest.raises(FileError, match="newer dubito"):
        read(tmp_path / "new")


def test_a_failed_write_leaves_the_old_file_and_no_litter(path, monkeypatch):
    before = path.read_bytes()

    def full(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr("dubito.tensors.files.save_file", full)
    with pytest.raises(OSError, match="no space"):
        write(path, {"w": torch.zeros(1)}, {})
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


KILLED = """
import os, signal, sys
from dubito.tensors import files
files.save_file = lambda tensors, scratch, meta: (scratch.write_bytes(b"half"), os.kill(os.getpid(), signal.SIGKILL))
files.write(sys.argv[1], {}, {})
"""


def test_what_a_killed_save_leaves_is_removed_by_the_next(path):
    process = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert process.returncode < 0
    assert len(list(path.parent.iterdir())) == 2, "the file from before, and what was being written"
    write(path, {"w": torch.zeros(1)}, {})
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_what_is_being_written_stays(path):
    with store.atomic_write(path) as scratch:
        scratch.write_text("first")
        write(path.with_name("other"), {"w": torch.zeros(1)}, {})
        assert scratch.read_text() == "first"
    assert path.read_text() == "first"


def test_a_link_stays_a_link(path, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(path.name)
    write(link, {"w": torch.ones(3)}, {})
    assert link.is_symlink()
    assert torch.equal(read(path)[0]["w"], torch.ones(3))


@dataclass
class Inner:
    w: torch.Tensor
    k: int


@dataclass
class State:
    inner: list
    table: dict
    rate: float
    name: str
    nothing: object
    pair: tuple
    generator: torch.Generator


def make(seed: int) -> State:
    g = torch.Generator().manual_seed(seed)
    r = torch.randn(3, generator=g)
    return State([Inner(r, seed)], {"a": r + 1, 3: [r]}, 0.5 + seed, str(seed), None, (1, r), g)


def test_nested_states_survive_a_round_trip(tmp_path):
    state, template = make(1), make(2)
    tensors: dict[str, torch.Tensor] = {}
    description = json.loads(json.dumps(pack(state, tensors)))
    write(tmp_path / "s", tensors, {"state": description})
    tensors, meta = read(tmp_path / "s")
    same = unpack(meta["state"], tensors, template)
    assert isinstance(same.inner[0], Inner)
    assert same.inner[0].k == 1
    assert (same.rate, same.name, same.nothing, same.pair[0]) == (1.5, "1", None, 1)
    assert torch.equal(same.table[3][0], state.table[3][0])
    assert torch.equal(torch.randn(4, generator=same.generator), torch.randn(4, generator=state.generator))


def test_an_optimiser_goes_on_where_it_was():
    def make(seed):
        w = torch.full((3,), float(seed))
        return {"w": w, "optimizer": torch.optim.Adam([w], lr=0.1)}

    def step(state, n):
        for i in range(n):
            state["w"].grad = state["w"] + i
            state["optimizer"].step()

    a, b = make(1), make(2)
    step(a, 3)
    tensors: dict[str, torch.Tensor] = {}
    description = json.loads(json.dumps(pack(a, tensors)))
    b = unpack(description, {k: v.clone() for k, v in tensors.items()}, b)
    step(a, 3)
    step(b, 3)
    assert torch.equal(a["w"], b["w"])


def test_what_cannot_be_stored_is_named():
    with pytest.raises(TypeError, match="/x is a function"):
        pack({"x": print.__class__ and (lambda: 0)}, {})


def filled(folder, n: int, *, flush_every: int = 3, **options) -> Draws:
    """n draws of two chains, each of which is known by its numbers."""
    draws = Draws(folder, **options)
    with draws:
        for i in range(n):
            draws.append(numbered(i))
            if (i + 1) % flush_every == 0:
                draws.flush()
        draws.flush()
    return draws


def numbered(i: int) -> dict[str, torch.Tensor]:
    w = torch.arange(6.0).reshape(2, 3) + 100 * i + 0.001
    return {"w": w, "b": w[:, 0].double(), "trace:energy": w[:, 1].clone(), "likelihood:log_scale": w[:, :1].clone()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def shards(folder) -> list:
    return sorted(folder.glob("draws-*"))


def test_draws_past_a_checkpoint_are_forgotten(tmp_path):
    whole = filled(None, 12).stacked()
    assert list(whole) == ["w", "b", "trace:energy", "likelihood:log_scale"], "the order of the leaves is kept"
    assert same(filled(tmp_path, 12, flush_every=4).stacked(), whole)
    again = Draws(tmp_path)
    with pytest.raises(FileError, match="counts 13 draws but the folder holds 12"):
        again.keep(13)
    for n in (12, 11, 8, 3):  # at the end of a shard, within one
        again.keep(n)
        assert len(again) == n
        assert same(again.stacked(), {name: leaf[:n] for name, leaf in whole.items()})
        assert sum(shard.draws for shard in Archive.open(tmp_path).shards) == n
        assert len(shards(tmp_path)) == len(Archive.open(tmp_path).shards), "files that do not count are gone"
    for i in range(3, 12):
        again.append(numbered(i))
    assert same(again.stacked(), whole), "it goes on from there"
    again.keep(0)
    assert len(again) == 0
    assert not shards(tmp_path)
    with pytest.raises(ValueError, match="no draws yet"):
        Draws().stacked()


def test_a_thousand_flushes_do_not_make_a_thousand_files(tmp_path):
    draws, most, written = filled(None, 300).stacked(), 0, 0
    with Draws(tmp_path) as folder:
        for i in range(300):
            folder.append(numbered(i))
            before = set(shards(tmp_path))
            folder.flush()
            most = max(most, len(shards(tmp_path)))
            written += sum(json.loads(files.open_mapped(path)[1])["draws"] for path in set(shards(tmp_path)) - before)
        assert most <= 10, "at most one for every power of two"
        assert written < 300 * 10, "and every draw is written that often at most"
        assert same(folder.stacked(), draws)


def test_memory_holds_what_is_not_on_disk_yet(tmp_path, monkeypatch):
    monkeypatch.setattr("dubito.tensors.draws.SHARD", 560)  # ten draws of 56 bytes
    with Draws(tmp_path) as draws:
        for i in range(95):
            draws.append(numbered(i))
            assert sum(block.used for block in draws._blocks) <= 10
        draws._wait()
        assert len(Archive.open(tmp_path)) == 90, "a full shard is written without being asked for"
        assert len(draws) == 95
        draws.flush()
        assert not draws._blocks
        assert all(path.stat().st_size < 3000 for path in shards(tmp_path))
        assert same(draws.stacked(), filled(None, 95).stacked())


def test_what_goes_in_the_background_is_not_overtaken_by_the_next_draws(tmp_path, monkeypatch):
    """A sampler that writes into its own tensors, a slow disk, and shards of one draw."""
    monkeypatch.setattr("dubito.tensors.draws.SHARD", 1)
    slowly = files.save_file
    monkeypatch.setattr("dubito.tensors.files.save_file", lambda *args: (time.sleep(0.005), slowly(*args)))
    w = torch.zeros(5)
    with Draws(tmp_path) as draws:
        for _ in range(20):
            w += 1
            draws.append({"w": w})
        assert draws.stacked()["w"][:, 0].tolist() == list(range(1, 21))


def test_weights_may_be_kept_in_bfloat16(tmp_path):
    exact = filled(None, 7).stacked()
    for folder in (None, tmp_path):
        half = filled(folder, 7, dtype=torch.bfloat16).stacked()
        assert {name: leaf.dtype for name, leaf in half.items()} == {name: leaf.dtype for name, leaf in exact.items()}
        assert torch.equal(half["w"], exact["w"].bfloat16().float())
        assert torch.equal(half["b"], exact["b"].bfloat16().double())
        assert torch.equal(half["trace:energy"], exact["trace:energy"]), "what is noted stays as it is"
        assert torch.equal(half["likelihood:log_scale"], exact["likelihood:log_scale"])
    assert next(Archive.open(tmp_path).parts())[1]["w"].dtype == torch.bfloat16


def test_a_column_is_one_members_draws(tmp_path):
    inside, outside = filled(None, 8), filled(tmp_path, 8)
    for draws in (inside, outside):
        one = draws.column(1)
        assert len(one) == 8
        assert same(one.stacked(), {name: leaf[:, 1] for name, leaf in inside.stacked().items()})


def test_draws_that_would_not_fit_are_not_stacked(tmp_path):
    assert filled(None, 8, memory=1e-9).fits, "what is in memory already fits"
    draws = filled(tmp_path, 8, memory=1e-9)
    assert not draws.fits
    with pytest.raises(TooLarge, match="8 draws take"):
        draws.stacked()
    assert len(draws.archive) == 8


def test_a_draw_is_like_the_first_one():
    draws = Draws()
    draws.append({"w": torch.zeros(3), "b": torch.zeros(1)})
    for other in ({"w": torch.zeros(3)}, {"w": torch.zeros(1), "b": torch.zeros(1)}, {"w": torch.zeros(3), "c": torch.zeros(1)}):
        with pytest.raises(ValueError, match="same names and shapes"):
            draws.append(other)


def test_draws_of_another_run_are_not_written_over(tmp_path):
    filled(tmp_path, 4)
    with pytest.raises(OSError, match="draws of another run"):
        filled(tmp_path, 2)
    assert len(Archive.open(tmp_path)) == 4


@pytest.mark.parametrize("damage", ["missing", "half", "empty", "nonsense", "changed"])
def test_without_its_index_a_folder_is_known_by_its_shards(tmp_path, damage):
    whole = filled(tmp_path, 13).stacked()
    index = tmp_path / "draws.json"
    content = index.read_text()
    if damage == "missing":
        index.unlink()
    else:
        index.write_text(
            {"half": content[: len(content) // 2], "empty": "", "nonsense": "[1]", "changed": content.replace("13", "12")}[damage]
        )
    assert same(Archive.open(tmp_path).stacked(), whole)
    draws = Draws(tmp_path)
    draws.keep(10)
    assert same(draws.stacked(), {name: leaf[:10] for name, leaf in whole.items()})
    assert len(json.loads(index.read_text())["index"]["shards"]) == len(shards(tmp_path)), "and the index is there again"


@pytest.mark.parametrize("name", ["../other", "draws-00000001.txt", "/tmp/draws-00000001.safetensors"])
def test_an_index_names_no_other_files(name, tmp_path):
    folder, other = tmp_path / "draws", tmp_path / "other"
    filled(folder, 3, flush_every=3)
    index = json.loads((folder / "draws.json").read_text())["index"]
    other.write_bytes((folder / index["shards"][0][0]).read_bytes())
    index["shards"][0][0] = name
    (folder / "draws.json").write_text(json.dumps({"index": index, "checksum": store.checksum({}, json.dumps(index))}))
    with pytest.raises(FileError, match="no file of draws: delete the index"):
        Draws(folder).keep(3)
    (folder / "draws.json").unlink()
    assert len(Archive.open(folder)) == 3
    assert other.exists()


def test_a_damaged_shard_is_an_error_in_words_and_can_be_left_out(tmp_path):
    whole = filled(tmp_path, 13).stacked()
    last = Archive.open(tmp_path).shards[-1]
    path, left = tmp_path / last.file, 13 - last.draws
    content = path.read_bytes()
    changed = bytearray(content)
    changed[-3] ^= 1
    for damage, words in [(content[:-5], "truncated"), (None, "is missing"), (bytes(changed), "checksum")]:
        path.unlink() if damage is None else path.write_bytes(damage)
        with pytest.raises(FileError, match=words) as error:
            Archive.open(tmp_path).stacked()
        assert last.file in str(error.value)
        sound = Archive.open(tmp_path, skip_damaged=True)
        assert same(sound.stacked(), {name: leaf[:left] for name, leaf in whole.items()})
        if damage != bytes(changed):
            with pytest.raises(FileError, match=words):
                Draws(tmp_path).keep(13)
        # what is past the checkpoint is made again anyway
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path, copy)
        before = Draws(copy)
        before.keep(left)
        assert same(before.stacked(), {name: leaf[:left] for name, leaf in whole.items()})
        shutil.rmtree(copy)
        path.write_bytes(content)
    (tmp_path / "draws.json").unlink()
    path.write_bytes(content[:50])
    with pytest.raises(FileError, match="move it away"):
        Archive.open(tmp_path)
    for first in shards(tmp_path)[:-1]:
        first.unlink()
    path.write_bytes(content)
    with pytest.raises(FileError, match="draws from number 0 to"):
        Archive.open(tmp_path)
    with pytest.raises(FileError, match="no draws here"):
        Archive.open(tmp_path / "nowhere")


def test_a_shard_that_goes_while_it_is_read_is_an_error_in_words(tmp_path):
    filled(tmp_path, 3)
    archive = Archive.open(tmp_path)
    shards(tmp_path)[0].unlink()
    with pytest.raises(FileError, match="open it again"):
        archive.stacked()


def test_a_full_disk_loses_nothing_that_was_written(tmp_path, monkeypatch):
    draws = filled(tmp_path, 5)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    for place in ("files.save_file", "archive.atomic_write"):
        monkeypatch.setattr(f"dubito.tensors.{place}", full)
        draws.append(numbered(5))
        with pytest.raises(OSError, match="make room") as error:
            draws.flush()
        assert error.value.errno == errno.ENOSPC
        with pytest.raises(OSError, match="make room"):  # and not as if nothing had been
            draws.flush()
        monkeypatch.undo()
        assert same(Archive.open(tmp_path).stacked(), filled(None, 5).stacked())
        assert not list(tmp_path.glob(".*"))
        draws = Draws(tmp_path)
        draws.keep(5)
    draws.append(numbered(5))
    assert same(draws.stacked(), filled(None, 6).stacked())


def test_one_run_at_a_time(tmp_path):
    (tmp_path / "lock.json").write_text('{"pid": 1, "host": "here"}')  # left behind by one that was killed
    holder = "from dubito import store\nwith store.lock_folder({!r}): print('held', flush=True); input()"
    with (
        store.lock_folder(tmp_path),
        pytest.raises(FileExistsError, match="another run in this process"),
        store.lock_folder(tmp_path),
    ):
        pass
    assert not (tmp_path / "lock.json").exists()
    process = subprocess.Popen(
        [sys.executable, "-c", holder.format(str(tmp_path))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    with pytest.raises(FileExistsError, match=f"in use by process {process.pid} on") as error, store.lock_folder(tmp_path):
        pass
    assert "give another folder" in str(error.value)
    process.kill()
    process.communicate()
    assert (tmp_path / "lock.json").exists()
    with store.lock_folder(tmp_path):
        pass
    with store.lock_folder(None):
        pass


def test_a_draw_is_a_copy():
    draws, w = Draws(), torch.zeros(1)
    draws.append({"w": w})
    w += 1
    assert draws.stacked()["w"].item() == 0


if os.name != "posix":
    del test_one_run_at_a_time
