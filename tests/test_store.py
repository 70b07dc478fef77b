"""Files: whole or not at all, checked when read, and free of code."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import save_file

from dubito import store
from dubito.store import Draws, FileError, pack, read, unpack, write


@pytest.fixture
def path(tmp_path):
    write(tmp_path / "a.safetensors", {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(3)}, {"note": "ok"})
    return tmp_path / "a.safetensors"


def test_what_is_written_is_read(path):
    tensors, meta = read(path)
    assert torch.equal(tensors["w"], torch.arange(6.0).reshape(2, 3))
    assert tensors["n"].dtype == torch.int64
    assert meta["note"] == "ok"


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
    monkeypatch.setattr(store, "FORMAT", 99)
    write(tmp_path / "new", {}, {})
    monkeypatch.undo()
    with pytest.raises(FileError, match="newer dubito"):
        read(tmp_path / "new")


def test_a_failed_write_leaves_the_old_file_and_no_litter(path, monkeypatch):
    before = path.read_bytes()

    def full(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(store, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        write(path, {"w": torch.zeros(1)}, {})
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


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


def test_draws_are_flushed_once_and_those_past_a_checkpoint_are_forgotten(tmp_path):
    draws = Draws(tmp_path)
    for i in range(3):
        draws.append({"b": torch.tensor(float(i)), "a": torch.zeros(2)})
    draws.flush()
    draws.flush()
    draws.append({"b": torch.tensor(3.0), "a": torch.zeros(2)})
    draws.flush()
    assert len(list(tmp_path.iterdir())) == 2
    again = Draws(tmp_path)
    again.keep(3)
    assert list(again.stacked()) == ["b", "a"], "the order of the leaves is kept"
    assert again.stacked()["b"].tolist() == [0, 1, 2]
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(FileError, match="counts 5 draws"):
        Draws(tmp_path).keep(5)
    with pytest.raises(ValueError, match="no draws yet"):
        Draws().stacked()


def test_a_draw_is_a_copy():
    draws, w = Draws(), torch.zeros(1)
    draws.append({"w": w})
    w += 1
    assert draws.stacked()["w"].item() == 0
