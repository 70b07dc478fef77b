"""Draws on disk are the posterior that they would be in memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dubito
from dubito import Categorical, Gaussian, Model
from dubito.posteriors import Mixture, Point, Samples, Stored
from dubito.tensors import store, tree
from dubito.tensors.store import FileError

CHAINS, DRAWS = 3, 17


def build(width: int = 8, **options) -> Model:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2))
    return Model(net, options.pop("likelihood", Gaussian()), **options)


def drawn(model: Model, folder: Path | None, *, chains: int | None = CHAINS, **options) -> store.Draws:
    """Draws in several shards of different lengths, with a noise that is learned, a trace, and buffers that differ."""
    generator = torch.Generator().manual_seed(1)
    lead = () if chains is None else (chains,)
    about = {"likelihood": repr(model.likelihood), "only": model.only, "sampler": {"method": "HMC", "adjusted": True}}
    draws = store.Draws(folder, buffers=model.buffers(), about=about, **options)
    with draws:
        for i in range(DRAWS):
            draw = {n: torch.randn(*lead, *leaf.shape, generator=generator) for n, leaf in model.parameters().items()}
            draw["buffer:1.running_mean"] = torch.randn(*lead, 8, generator=generator)
            draw["trace:energy_error"] = torch.randn(lead, generator=generator, dtype=torch.float64)
            draw["trace:energy"] = torch.randn(lead, generator=generator, dtype=torch.float64)
            draws.append(draw)
            if i in (8, 12, 15):
                draws.flush()
        draws.flush()
    return draws


def in_memory(model: Model, draws: store.Draws) -> Samples:
    """Chain after chain, by the definition."""
    stacked = draws.stacked()
    flat = {n: torch.cat([leaf[:, c] for c in range(CHAINS)]) for n, leaf in stacked.items()}
    mean = flat.pop("buffer:1.running_mean")
    trace = {name: flat.pop(f"trace:{name}") for name in ("energy_error", "energy")}
    buffers = {n: leaf for n, leaf in model.buffers().items() if n != "1.running_mean"}
    sampler = {"method": "HMC", "adjusted": True}
    return Samples(model, flat, buffers, {"1.running_mean": mean}, chains=CHAINS, trace=trace, sampler=sampler)


@pytest.fixture
def pair(tmp_path) -> tuple[Samples, Stored]:
    model = build()
    drawn(model, tmp_path / "run")
    return in_memory(model, drawn(model, None)), Stored.open(tmp_path / "run", model)


def same(a: dict, b: dict) -> bool:
    return list(a) == list(b) and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


def test_it_is_what_samples_is(pair):
    samples, stored = pair
    assert len(stored.archive.shards) > 1
    assert len(stored) == len(samples) == CHAINS * DRAWS
    assert stored.chains == CHAINS
    assert stored.sampler == samples.sampler
    assert same(stored.trace, samples.trace)
    loaded = stored.load()
    assert same(loaded.params, samples.params)
    assert same(loaded.own_buffers, samples.own_buffers)
    assert same(loaded.buffers, samples.buffers)
    assert same(loaded.trace, samples.trace)
    assert (loaded.chains, loaded.sampler) == (samples.chains, samples.sampler)
    drawn = [p.sample(20, torch.Generator().manual_seed(3)) for p in pair]
    assert same(*drawn)


@pytest.mark.parametrize("draws", [None, 1, 5, 50, 51, 500])
def test_it_predicts_the_same_bits(pair, draws):
    x = torch.randn(6, 4)
    a, b = (p.predict(x, draws=draws) for p in pair)
    assert torch.equal(a.means, b.means)
    assert torch.equal(a.mean, b.mean)
    assert torch.equal(a.uncertainty.total, b.uncertainty.total)
    assert torch.equal(a.log_prob(torch.zeros(6, 2)), b.log_prob(torch.zeros(6, 2)))


def test_in_a_stream_every_draw_comes_to_its_place(pair):
    """One draw at a time, and a few at a time: what each gives by itself, in the order of the chains."""
    samples, stored = pair
    x = torch.randn(6, 4)
    single = [
        replace(samples, params=tree.select(samples.params, [i]), own_buffers=tree.select(samples.own_buffers, [i]), chains=1)
        for i in range(len(samples))
    ]
    expected = torch.cat([one.predict(x).means for one in single])
    noise = samples.predict(x).params
    for each in (1, 2, 10, 40):
        memory = each * stored._bytes / store.GIGABYTE
        p = stored.predict(x, memory=memory)
        assert torch.equal(p.means, expected) if each <= 2 else torch.allclose(p.means, expected, rtol=1e-4, atol=1e-5)
        assert same(p.params, noise)
        few = torch.linspace(0, len(samples) - 1, 7).round().long()
        assert torch.allclose(stored.predict(x, draws=7, memory=memory).means, expected[few], rtol=1e-4, atol=1e-5)


def test_weights_are_not_kept(tmp_path, monkeypatch):
    """However many draws there are, no more than the memory allows is read at a time."""
    model = build()
    drawn(model, tmp_path)
    stored, most = Stored.open(tmp_path, model), []
    select = Stored.select
    monkeypatch.setattr(Stored, "select", lambda self, which: most.append(len(which)) or select(self, which))
    stored.predict(torch.randn(2, 4), memory=10 * stored._bytes / store.GIGABYTE)
    assert sum(most) == len(stored)
    assert max(most) == 5, "half of the memory is for the weights"


def test_a_loader_reads_the_draws_once(pair, monkeypatch):
    samples, stored = pair
    x, y = torch.randn(10, 4), torch.randn(10, 2)
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    p, targets = samples.predict_loader(loader, draws=9)
    reads, read = [], store.Archive.read
    monkeypatch.setattr(store.Archive, "read", lambda self, shard, prefix="": reads.append(shard) or read(self, shard, prefix))
    q, also = stored.predict_loader(loader, draws=9)
    assert torch.equal(p.means, q.means)
    assert torch.equal(targets, also)
    assert len(reads) <= len(stored.archive.shards)
    assert torch.equal(next(stored.predict_batches(loader, draws=9))[0].means, p.means[:, :4])
    with pytest.raises(TypeError, match="use predict"):
        stored.predict_loader((x, y))
    with pytest.raises(ValueError, match="no data"):
        stored.predict_loader([])


def test_its_summary_is_that_of_samples(pair):
    samples, stored = pair
    x = torch.randn(5, 4)
    a, b = samples.summary(x), stored.summary(x)
    assert str(a) == str(b)
    assert torch.equal(a.weights.rhat, b.weights.rhat)
    few = stored.summary(x, memory=len(stored) * 10 * 8 / store.GIGABYTE)
    assert torch.equal(few.predictions.rhat, a.predictions.rhat)
    assert 0 < len(few.weights.rhat) < 20 < len(a.weights.rhat)
    assert set(few.weights.rhat.tolist()) <= set(a.weights.rhat.tolist())
    assert few.energy_error == a.energy_error != ()


def test_it_goes_to_arviz_as_samples_do(pair, monkeypatch):
    monkeypatch.setattr("dubito.posteriors.samples.to_arviz", lambda params, **others: (params, others))
    samples, stored = pair
    (a, more), (b, others) = (posterior.to_arviz(torch.ones(2, 4)) for posterior in pair)
    assert all(torch.equal(a[name], b[name]) for name in samples.params)
    assert more["chains"] == others["chains"] == stored.chains
    assert torch.equal(more["predictions"], others["predictions"])


def test_draws_without_a_chain_axis_are_one_chain(tmp_path):
    model = build()
    drawn(model, tmp_path, chains=None)
    stored = Stored.open(tmp_path, model)
    assert (stored.chains, len(stored)) == (1, DRAWS)
    stacked = drawn(model, None, chains=None).stacked()
    assert torch.equal(stored.load().params["0.weight"], stacked["0.weight"])
    assert torch.equal(stored.trace["energy"], stacked["trace:energy"])


def test_bfloat16_on_disk_is_predicted_with_in_the_weights_own_dtype(tmp_path):
    model, x = build(), torch.randn(5, 4)
    drawn(model, tmp_path, dtype=torch.bfloat16)
    stored = Stored.open(tmp_path, model)
    exact = in_memory(model, drawn(model, None))
    rounded = replace(exact, params={n: p if ":" in n else p.bfloat16().float() for n, p in exact.params.items()})
    assert torch.equal(stored.predict(x).means, rounded.predict(x).means)
    assert same(stored.load().params, rounded.params)
    assert stored.sample(2)["0.weight"].dtype == torch.float32


def test_another_model_is_refused(tmp_path):
    model = build()
    drawn(model, tmp_path)
    with pytest.raises(FileError, match=r"0.weight is \(3, 8, 4\) there and \(16, 4\) here"):
        Stored.open(tmp_path, build(16))
    with pytest.raises(FileError, match="likelihood is 'Gaussian"):
        Stored.open(tmp_path, build(likelihood=Categorical()))
    with pytest.raises(FileError, match="only is '' in the file and '\\^0' here"):
        Stored.open(tmp_path, build(only="^0"))
    (tmp_path / "shared.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="shared.safetensors"):
        Stored.open(tmp_path, model)


def test_a_damaged_shard_can_be_left_out(pair):
    samples, stored = pair
    shard = stored.archive.shards[0]
    (stored.folder / shard.file).write_bytes(b"")
    with pytest.raises(FileError, match="truncated"):
        Stored.open(stored.folder, stored.model)
    rest = Stored.open(stored.folder, stored.model, skip_damaged=True)
    assert len(rest) == CHAINS * (DRAWS - shard.draws)
    by_chain = samples.params["0.weight"].unflatten(0, (CHAINS, DRAWS))
    assert torch.equal(rest.load().params["0.weight"].unflatten(0, (CHAINS, -1)), by_chain[:, shard.draws :])


def test_what_is_noted_is_checked_too(pair):
    _, stored = pair
    path = stored.folder / stored.archive.shards[-1].file
    content = path.read_bytes()
    energy = store.read(path)[0]["trace:energy"].numpy().tobytes()
    at = content.index(energy)
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with pytest.raises(FileError, match="checksum"):
        Stored.open(stored.folder, stored.model).trace  # noqa: B018


def test_it_opens_while_the_run_goes_on(tmp_path):
    model = build()
    draws = drawn(model, tmp_path)
    early = Stored.open(tmp_path, model)
    weights = {name: leaf + 1 for name, leaf in draws.stacked().items()}
    for i in range(3):
        draws.append(tree.select(weights, i))
    draws.flush()
    late = Stored.open(tmp_path, model)
    assert (len(early), len(late)) == (CHAINS * DRAWS, CHAINS * (DRAWS + 3))
    assert same(
        tree.select(late.load().params, slice(0, DRAWS)),
        tree.select(in_memory(model, drawn(model, None)).params, slice(0, DRAWS)),
    )


@pytest.mark.parametrize("links", [True, False], ids=["linked", "copied"])
def test_saved_it_is_a_folder_of_its_own(pair, tmp_path, links, monkeypatch):
    samples, stored = pair
    if not links:
        monkeypatch.setattr("os.link", lambda *args: (_ for _ in ()).throw(OSError("another disk")))
    sampler = {"method": "HMC", "adjusted": False}
    dubito.save(replace(stored, sampler=sampler), tmp_path / "new" / "posterior")
    for path in stored.folder.iterdir():
        path.unlink()
    again = dubito.load(tmp_path / "new" / "posterior", stored.model)
    assert isinstance(again, Stored)
    assert again.sampler == sampler
    assert same(again.load().params, samples.params)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["posterior"]
    (tmp_path / "folder").mkdir()
    assert (tmp_path / "new" / "posterior").stat().st_mode == (tmp_path / "folder").stat().st_mode
    with pytest.raises(FileExistsError, match="must be a new one"):
        dubito.save(again, tmp_path / "new")
    dubito.save(again.load(), tmp_path / "one.safetensors")
    assert same(dubito.load(tmp_path / "one.safetensors", stored.model).params, samples.params)


def test_saved_where_it_is_it_stays_there(pair):
    samples, stored = pair
    dubito.save(replace(stored, sampler={"method": "NUTS"}), stored.folder)
    again = dubito.load(stored.folder, stored.model)
    assert again.sampler == {"method": "NUTS"}
    assert same(again.load().params, samples.params)


def test_a_mixture_says_how_it_can_be_saved(pair, tmp_path):
    _, stored = pair
    with pytest.raises(TypeError, match=r"save its load\(\)"):
        dubito.save(Mixture.equal([stored, Point(stored.model, {}, {})]), tmp_path / "m")


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    """Draws are made, kept and predicted with there; the folder is the same."""
    model = build()
    here = in_memory(model, drawn(model, None))
    model = replace(model, network=model.network.cuda())
    with store.Draws(tmp_path, buffers=model.buffers()) as draws:
        by_chain = {n: leaf.unflatten(0, (CHAINS, DRAWS)) for n, leaf in {**here.params, **here.own_buffers}.items()}
        for i in range(DRAWS):
            own = {("buffer:" if n in here.own_buffers else "") + n: leaf[:, i].cuda() for n, leaf in by_chain.items()}
            draws.append(own)
            [leaf.zero_() for leaf in own.values()]
        assert draws.stacked()["0.weight"].device.type == "cuda"
    stored, x = Stored.open(tmp_path, model), torch.randn(5, 4)
    assert same({n: leaf.cpu() for n, leaf in stored.load().params.items()}, here.params)
    p = stored.predict(x, memory=9 * stored._bytes / store.GIGABYTE)
    assert p.means.device.type == "cuda"
    assert torch.allclose(p.means.cpu(), replace(here, model=build()).predict(x).means, rtol=1e-3, atol=1e-3)
