"""The loop: what it owns, and how it fails."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dubito
from contract.methods import ULA
from dubito import MAP, Categorical, Ensemble, Gaussian, Laplace, MCDropout, Model
from dubito.inference.method import Traits
from dubito.posteriors import Samples, Stored
from dubito.tensors import files, store


def net(outputs: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, outputs))


def data(n: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=g)
    return x, torch.sin(x[:, :1]) + 0.1 * torch.randn(n, 1, generator=g)


def same(a, b) -> bool:
    return all(torch.equal(a.params[n], b.params[n]) for n in a.params)


RUN = textwrap.dedent("""
    import sys, time, torch, dubito
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, generator=g)
    loader = DataLoader(TensorDataset(x, x[:, :1]), batch_size=8, shuffle=True)
    folder, method, pause = sys.argv[1], sys.argv[2], float(sys.argv[3])
    method = {
        "mc_dropout": dubito.MCDropout(epochs=12),
        "ensemble": dubito.Ensemble(dubito.MAP(epochs=12), 2),
    }[method]
    posterior = dubito.fit(
        dubito.Model(net, dubito.Gaussian()), method, loader, checkpoint=folder, checkpoint_every=0.0, resume=True, seed=5,
        validation=(x, x[:, :1]), callbacks=[lambda event: time.sleep(pause)],
    )
    dubito.save(posterior, folder + "/posterior.safetensors")
    print("done")
""")


def run(folder: Path, method: str, pause: float) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", RUN, str(folder), method, str(pause)], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("method", "delays"), [("mc_dropout", (0.2, 0.5)), ("ensemble", (0.4,))])
def test_a_killed_run_goes_on_to_the_same_bits(method, delays, tmp_path):
    kill_and_resume(method, tmp_path, delays)


@pytest.mark.slow
def test_a_run_killed_many_times_goes_on_to_the_same_bits(tmp_path):
    kill_and_resume("mc_dropout", tmp_path, tuple(0.05 + 0.03 * torch.rand(12).double().numpy()))


def kill_and_resume(method: str, tmp_path: Path, delays: tuple[float, ...]) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = run(whole, method, 0.0)
    assert "done" in process.communicate()[0]
    kills = 0
    for delay in delays:
        process = run(killed, method, 0.02)
        while not (killed / "checkpoint.safetensors").exists():  # importing torch takes its time
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
    assert kills, "the run was over before it could be killed"
    process = run(killed, method, 0.0)
    assert "done" in process.communicate()[0]
    assert not list(killed.glob(".*")) or all(f.suffix != ".safetensors" for f in killed.glob(".*"))
    a, b = (dubito.tensors.store.read(f / "posterior.safetensors")[0] for f in (whole, killed))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_writes_a_last_checkpoint(number, tmp_path):
    def end(*received: object) -> None:
        raise SystemExit(received[0])

    before = signal.signal(signal.SIGTERM, end), signal.getsignal(signal.SIGINT)
    options = {"seed": 3, "batch_size": 16, "checkpoint_every": 1e6, "progress": False}
    model, method = Model(net(), Gaussian()), MCDropout(epochs=3)
    try:
        with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
            dubito.fit(model, method, data(), checkpoint=tmp_path, callbacks=[raising(number, 3)], **options)
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == (end, before[1]), "handlers are put back"
    finally:
        signal.signal(signal.SIGTERM, before[0])
    assert step_of(tmp_path) == 4, "the step that was going on is made to its end"
    resumed = dubito.fit(model, method, data(), checkpoint=tmp_path, resume=True, **options)
    assert same(resumed, dubito.fit(model, method, data(), **options))


def raising(number: int, step: int, times: int = 1):
    def callback(event) -> None:
        for _ in range(times if event.step == step else 0):
            signal.raise_signal(number)

    return callback


def step_of(folder: Path) -> int:
    return store.read(folder / "checkpoint.safetensors")[1]["run"]["fields"]["step"]["value"]


def test_a_second_signal_does_not_wait(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        dubito.fit(
            Model(net(), Gaussian()), MAP(epochs=3), data(), checkpoint=tmp_path, callbacks=[raising(signal.SIGINT, 2, times=2)]
        )
    assert not (tmp_path / "checkpoint.safetensors").exists()


def test_a_signal_of_the_user_who_goes_on_only_writes(tmp_path):
    received = []
    before = signal.signal(signal.SIGTERM, lambda *number: received.append(step_of(tmp_path)))
    try:
        model, callbacks = Model(net(), Gaussian()), [raising(signal.SIGTERM, 2), raising(signal.SIGTERM, 3)]
        posterior = dubito.fit(model, MAP(epochs=6), data(), checkpoint=tmp_path, callbacks=callbacks)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [3, 4]
    assert same(posterior, dubito.fit(model, MAP(epochs=6), data()))


def test_signals_are_left_alone_without_a_folder_and_in_other_threads(tmp_path):
    handlers, error = [], []

    def fit(folder) -> None:
        callback = [lambda event: handlers.append(signal.getsignal(signal.SIGINT)) or None]
        try:
            dubito.fit(Model(net(), Gaussian()), MAP(epochs=1), data(), checkpoint=folder, callbacks=callback)
        except Exception as raised:
            error.append(raised)

    fit(None)
    thread = threading.Thread(target=fit, args=(tmp_path,))
    thread.start()
    thread.join()
    assert not error
    assert set(handlers) == {signal.getsignal(signal.SIGINT)}


# A sampler is started and killed again and again, by one process that forks: importing torch every time would take longer than
# all the rest. What is on disk after every kill must be the beginning of the whole run, bit for bit.
KILLS = textwrap.dedent("""
    import json, os, random, signal, sys, time, traceback
    sys.path.insert(0, sys.argv[2])
    import torch, dubito
    from contract.methods import ULA
    from dubito.testing import small_data as data, small_network as network
    torch.set_num_threads(1)
    dubito.tensors.draws.SHARD = 4_000  # 17 draws: shards are closed between checkpoints, too
    dice, kills, lengths = random.Random(int(sys.argv[4])), int(sys.argv[3]), []

    def fit(folder, every, **options):
        torch.manual_seed(0)
        model = dubito.Model(network(), dubito.Gaussian(scale=0.3))
        method = ULA(step_size=1e-4, n_draws=600, burn_in=3)
        return dubito.fit(model, method, data(), checkpoint=folder, checkpoint_every=every, seed=5, **options)

    def begin(folder, every):
        heard, tell = os.pipe()
        pid = os.fork()
        if pid:
            os.close(tell)
            return pid, heard
        try:
            fit(folder, every, resume=True, callbacks=[lambda event: os.write(tell, b".") and None])
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def end(pid, heard):
        while os.read(heard, 1000):
            pass
        os.close(heard)
        return os.waitpid(pid, 0)[1]

    def stacked(folder):
        return dubito.tensors.store.Archive.open(folder).stacked()

    whole, killed = sys.argv[1] + "/whole", sys.argv[1] + "/killed"
    fit(whole, 60.0)
    expected, done = stacked(whole), 0
    assert len(next(iter(expected.values()))) == 600
    while done < kills:
        pid, heard = begin(killed, dice.choice([0.0, 0.0, 0.02, 60.0]))
        for _ in range(dice.randrange(40) if done % 4 else 0):  # steps
            os.read(heard, 1)
        time.sleep(dice.random() * 0.02)
        os.kill(pid, signal.SIGKILL)
        assert end(pid, heard) == signal.SIGKILL, "it ended by itself, before it could be killed"
        done += 1
        if os.path.exists(killed + "/draws.json"):
            found = stacked(killed)
            n = len(next(iter(found.values())))
            assert all(torch.equal(found[name], leaf[:n]) for name, leaf in expected.items()), n
            lengths.append(n)
    assert end(*begin(killed, 60.0)) == 0
    found = stacked(killed)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], leaf) for name, leaf in expected.items())
    left = sorted(os.listdir(killed))
    assert not [name for name in left if name.startswith(".") or name.startswith("lock")], left
    print(json.dumps({"kills": done, "lengths": lengths}))
""")


def killed(tmp_path: Path, kills: int, seed: int) -> dict:
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path), tests, str(kills), str(seed)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_sampler_killed_at_any_moment_loses_and_doubles_no_draw(tmp_path):
    seen = killed(tmp_path, 24, 0)
    assert seen["kills"] == 24
    assert len(set(seen["lengths"])) > 5, "and it came further between the kills"


@pytest.mark.slow
def test_a_sampler_killed_a_hundred_times_loses_and_doubles_no_draw(tmp_path):
    for seed in range(1, 5):
        killed(tmp_path / str(seed), 30, seed)


class Crash(BaseException):
    """The power is cut."""


def test_a_crash_at_every_single_operation_on_the_disk(tmp_path, monkeypatch):
    """Renaming, deleting, syncing, writing: the run is cut before each of them in turn, and goes on to the same bits."""
    model, method = Model(nn.Linear(3, 1), Gaussian(scale=0.3)), ULA(step_size=1e-4, n_draws=7, burn_in=1)
    monkeypatch.setattr("dubito.tensors.draws.SHARD", 50)  # three draws
    whole = dubito.fit(model, method, data())
    calls = limit = 0

    def cut(module, name):
        real = getattr(module, name)

        def maybe(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == limit:
                raise Crash
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, maybe)

    cut(os, "replace")
    cut(os, "fsync")
    cut(files, "save_file")
    cut(Path, "unlink")

    def run(folder: Path):
        # a checkpoint after every other step
        wait = [lambda event: monkeypatch.setattr(time, "monotonic", lambda: float("inf") if event.step % 2 else 0.0)]
        return dubito.fit(model, method, data(), checkpoint=folder, resume=True, callbacks=wait)

    run(tmp_path / "counted")
    total, limit = calls, 0
    assert total > 30
    for limit in range(1, total + 1):
        folder, calls = tmp_path / str(limit), 0
        with pytest.raises(Crash):
            run(folder)
        calls = 10**6
        if (folder / "draws.json").exists():
            found = store.Archive.open(folder).stacked()
            assert all(torch.equal(leaf, whole.params[name][: len(leaf)]) for name, leaf in found.items())
        assert same(run(folder), whole), limit
        shutil.rmtree(folder)


def test_a_run_that_is_over_gives_its_posterior_again_at_once(tmp_path):
    model, method = Model(net(), Gaussian(scale=0.3)), ULA(n_draws=6, burn_in=1)
    first = dubito.fit(model, method, data(), checkpoint=tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}

    def refuse(event):
        raise AssertionError("no step is made")

    again = dubito.fit(model, method, data(), checkpoint=tmp_path, resume=True, callbacks=[refuse])
    assert same(first, again)
    draws = {name: time for name, time in before.items() if name != "draws.json"}
    assert draws.items() <= {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}.items()


@dataclass(frozen=True)
class Growing(ULA):
    traits: ClassVar[Traits] = Traits(length_field="n_draws")


@dataclass(frozen=True)
class MiniBatch(Growing):
    @property
    def data(self):
        return "batches"


@pytest.mark.parametrize("kind", [Growing, MiniBatch])
def test_a_longer_run_of_the_same_sampler_goes_on(kind, tmp_path):
    """A mini-batch run ends within an epoch of four steps, from where it goes on."""
    model = Model(net(), Gaussian(scale=0.3))
    whole = dubito.fit(model, kind(n_draws=21, burn_in=2, step_size=1e-4), data(), batch_size=16)
    for n in (3, 7, 21):
        method = kind(n_draws=n, burn_in=2, step_size=1e-4)
        grown = dubito.fit(model, method, data(), batch_size=16, checkpoint=tmp_path, resume=True)
        assert len(grown) == n
        assert all(torch.equal(leaf, whole.params[name][:n]) for name, leaf in grown.params.items())
    with pytest.raises(ValueError, match="holds 23 steps of this run already"):
        dubito.fit(model, kind(n_draws=20, burn_in=2, step_size=1e-4), data(), batch_size=16, checkpoint=tmp_path, resume=True)
    with pytest.raises(ValueError, match="method .*burn_in=2.*burn_in=3"):
        dubito.fit(model, kind(n_draws=30, burn_in=3, step_size=1e-4), data(), batch_size=16, checkpoint=tmp_path, resume=True)


def test_other_samplers_do_not_grow(tmp_path):
    model = Model(net(), Gaussian(scale=0.3))
    dubito.fit(model, ULA(n_draws=3, burn_in=0), data(), checkpoint=tmp_path)
    with pytest.raises(ValueError, match="n_draws=3.*n_draws=4"):
        dubito.fit(model, ULA(n_draws=4, burn_in=0), data(), checkpoint=tmp_path, resume=True)


def test_draws_that_do_not_fit_stay_on_disk(tmp_path):
    model, method, x = Model(net(), Gaussian(scale=0.3)), ULA(n_draws=9, burn_in=1, step_size=1e-4), data()[0]
    inside = dubito.fit(model, method, data(), checkpoint=tmp_path / "a")
    outside = dubito.fit(model, method, data(), checkpoint=tmp_path / "b", memory=1e-6)
    assert isinstance(inside, Samples)
    assert isinstance(outside, Stored)
    assert same(inside, outside.load())
    assert torch.equal(inside.predict(x).means, outside.predict(x).means)
    assert outside.sampler == {"method": "ULA"}
    without = dubito.fit(model, method, data(), memory=1e-6)
    assert isinstance(without, Samples), "without a folder they are in memory anyway"
    members = dubito.fit(model, Ensemble(method, 2), data(), checkpoint=tmp_path / "c", memory=1e-6)
    assert isinstance(members, Stored)
    apart = dubito.fit(model, Ensemble(method, 2), data(), checkpoint=tmp_path / "d")
    assert torch.equal(members.predict(x).means, apart.predict(x).means)


def test_a_crash_in_posterior_loses_no_draw(tmp_path):
    @dataclass(frozen=True)
    class Clumsy(ULA):
        def posterior(self, target, state, draws):
            raise RuntimeError("a mistake in the last line")

    model = Model(net(), Gaussian(scale=0.3))
    with pytest.raises(RuntimeError, match="last line"):
        dubito.fit(model, Clumsy(n_draws=5, burn_in=1), data(), checkpoint=tmp_path)
    whole = dubito.fit(model, ULA(n_draws=5, burn_in=1), data())
    assert same(dubito.load(tmp_path, model).load(), whole)


def test_draws_without_a_checkpoint_are_not_deleted(tmp_path):
    model, method = Model(net(), Gaussian(scale=0.3)), ULA(n_draws=5, burn_in=1)
    dubito.fit(model, method, data(), checkpoint=tmp_path)
    (tmp_path / "checkpoint.safetensors").unlink()
    with pytest.raises(FileExistsError, match="draws of another run"):
        dubito.fit(model, method, data(), checkpoint=tmp_path)
    with pytest.raises(store.FileError, match=r"dubito.load\(folder, model\)"):
        dubito.fit(model, method, data(), checkpoint=tmp_path, resume=True)
    assert len(dubito.load(tmp_path, model)) == 5


def test_weights_in_bfloat16_on_disk_do_not_change_the_chain(tmp_path):
    model, method = Model(net(), Gaussian(scale=0.3)), ULA(n_draws=6, burn_in=1)
    plain = dubito.fit(model, method, data())
    stop = [lambda event: event.step == 4]
    dubito.fit(model, method, data(), checkpoint=tmp_path, store_dtype="bfloat16", callbacks=stop)
    half = dubito.fit(model, method, data(), checkpoint=tmp_path, store_dtype="bfloat16", resume=True)
    assert all(torch.equal(half.params[name], leaf.bfloat16().float()) for name, leaf in plain.params.items())
    with pytest.raises(ValueError, match="store_dtype"):
        dubito.fit(model, method, data(), checkpoint=tmp_path, resume=True)
    with pytest.raises(ValueError, match="store_dtype must be None or"):
        dubito.fit(model, method, data(), store_dtype="int8")


def test_a_disk_that_is_full_stops_the_run_in_words_and_it_goes_on(tmp_path):
    import resource

    model, method = Model(net(), Gaussian(scale=0.3)), ULA(n_draws=300, burn_in=0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(event):
        if event.step == 10:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))  # no file may grow beyond from here on

    try:
        with pytest.raises(OSError, match=r"run could not be written \(File too large\).* make room"):
            dubito.fit(model, method, data(), checkpoint=tmp_path, checkpoint_every=1e-6, callbacks=[fill])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert 0 < len(dubito.load(tmp_path, model)) < 300
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    whole = dubito.fit(model, method, data())
    assert same(dubito.fit(model, method, data(), checkpoint=tmp_path, resume=True), whole)


def test_two_runs_do_not_share_a_folder(tmp_path):
    model, method = Model(net(), Gaussian(scale=0.3)), ULA(n_draws=3, burn_in=0)

    def second(event):
        with pytest.raises(FileExistsError, match="in use by another run"):
            dubito.fit(model, method, data(), checkpoint=tmp_path, resume=True)

    dubito.fit(model, method, data(), checkpoint=tmp_path, callbacks=[second])
    assert not (tmp_path / "lock.json").exists()


def test_checkpoints_belong_to_one_run(tmp_path):
    model = Model(net(), Gaussian())
    dubito.fit(model, MAP(epochs=2), data(), checkpoint=tmp_path)
    with pytest.raises(FileExistsError, match="resume=True"):
        dubito.fit(model, MAP(epochs=2), data(), checkpoint=tmp_path)
    with pytest.raises(ValueError, match="learning_rate=0.5"):
        dubito.fit(model, MAP(epochs=2, learning_rate=0.5), data(), checkpoint=tmp_path, resume=True)
    with pytest.raises(ValueError, match="seed"):
        dubito.fit(model, MAP(epochs=2), data(), checkpoint=tmp_path, resume=True, seed=1)
    with pytest.raises(ValueError, match="data"):
        dubito.fit(model, MAP(epochs=2), (data()[0] + 1, data()[1]), checkpoint=tmp_path, resume=True)
    with pytest.raises(ValueError, match="checkpoint="):
        dubito.fit(model, MAP(epochs=2), data(), resume=True)
    (tmp_path / "checkpoint.safetensors").write_bytes(b"half a file")
    with pytest.raises(dubito.tensors.store.FileError, match="truncated"):
        dubito.fit(model, MAP(epochs=2), data(), checkpoint=tmp_path, resume=True)


def _centred(value: float) -> dubito.priors.Centered:
    """Priors that differ in one of 2,000 numbers, which the words of a tensor leave out."""
    mean = torch.zeros(2000)
    mean[1000] = value
    return dubito.priors.Centered({"0.weight": torch.zeros(16, 3), "elsewhere": mean})


def _changed(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = data()
    y[rows] += 1
    return x, y


def _with(middle: nn.Module, rate: float = 0.1) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 16), middle, nn.Dropout(rate), nn.Linear(16, 1))


OTHERS = [
    ("data", dict(data=_changed(slice(60, 61)))),
    ("validation", dict(validation=_changed(slice(60, 61)))),
    ("validation", dict(validation=None)),
    ("batches", dict(batch_size=32)),
    ("prior", dict(prior=_centred(1.0))),
    ("layers", dict(network=_with(nn.Tanh()))),
    ("layers", dict(network=_with(nn.ReLU(), rate=0.8))),
    ("buffers", dict(network=_with(nn.BatchNorm1d(16, affine=False)))),
    ("dtypes", dict(network=net().double(), data=[tuple(leaf.double() for leaf in data())])),
]


@pytest.mark.parametrize(("what", "other"), OTHERS)
def test_a_run_does_not_go_on_with_anything_else(what, other, tmp_path):
    def fit(**given):
        own = dict(network=net(), prior=_centred(0.0), data=data(), validation=data(), batch_size=8, checkpoint=tmp_path)
        options = {**own, **given}
        model = Model(options.pop("network"), Gaussian(), options.pop("prior"))
        return dubito.fit(model, MAP(epochs=4), options.pop("data"), **options)

    fit(callbacks=[lambda event: event.step == 5])
    with pytest.raises(ValueError, match=rf"^.* belongs to another run; different: .*{what}.*\(.* here\)$") as refusal:
        fit(resume=True, **other)
    assert len(str(refusal.value)) < 1000
    fit(resume=True)


def test_early_stopping_keeps_the_best_state():
    x, y = data(24)
    noisy = y + 0.5 * torch.randn(24, 1, generator=torch.Generator().manual_seed(3))
    model = Model(
        nn.Sequential(nn.Linear(3, 200), nn.ReLU(), nn.Linear(200, 1)), Gaussian(scale=0.1), dubito.priors.Normal(scale=10.0)
    )
    seen: list[float] = []
    method = MAP(epochs=300, learning_rate=0.02, schedule="constant")

    def watch(event):
        seen.append(event.step)

    stopped = dubito.fit(model, method, (x, noisy), validation=data(200), patience=5, callbacks=[watch])
    full = dubito.fit(model, method, (x, noisy))
    score = [dubito.metrics.nll(p.predict(data(200)[0]), data(200)[1]) for p in (stopped, full)]
    assert score[0] < score[1]
    assert len(seen) < 300
    # the state returned is the best one, not the last: refitting for exactly so many epochs gives the same bits
    best = len(seen) - 5
    again = dubito.fit(model, MAP(epochs=best, learning_rate=0.02, schedule="constant"), (x, noisy))
    assert same(stopped, again)


@pytest.mark.parametrize("method", [MAP(epochs=4), Laplace(check=False)], ids=["MAP", "Laplace"])
def test_a_run_does_not_go_on_from_another_start(method, tmp_path):
    """It gave the posterior of the first start."""
    model = Model(net(), Gaussian(scale=0.1))
    first = model.parameters()
    other = {name: leaf + 0.1 for name, leaf in first.items()}
    done = dubito.fit(model, method, data(), start=first, checkpoint=tmp_path)
    with pytest.raises(ValueError, match=r"belongs to another run; different: start \('.*' in the file and '.*' here\)"):
        dubito.fit(model, method, data(), start=other, checkpoint=tmp_path, resume=True)
    again = dubito.fit(model, method, data(), start=first, checkpoint=tmp_path, resume=True)
    assert same(done, again)


def test_a_run_from_a_network_that_was_initialized_afresh_goes_on(tmp_path):
    """But not that of a method that only looks at the weights."""

    def fit(method, folder: str, **options):
        network = net()
        with torch.no_grad():
            for leaf in network.parameters():
                leaf.add_(torch.randn_like(leaf), alpha=0.1 * len(options))
        return dubito.fit(Model(network, Gaussian(scale=0.1)), method, data(), checkpoint=tmp_path / folder, **options)

    fit(MAP(epochs=4), "map", callbacks=[lambda event: event.step == 2])
    fit(MAP(epochs=4), "map", resume=True, seed=0)
    fit(Laplace(check=False), "laplace")
    with pytest.raises(ValueError, match="belongs to another run; different: start"):
        fit(Laplace(check=False), "laplace", resume=True)


@pytest.mark.filterwarnings("ignore:The inputs hold NaN")
@pytest.mark.parametrize("patience", [None, 3])
def test_nan_in_validation_is_told(patience):
    """Training stopped early, without a word."""
    x, y = data(20)
    x[3, 1] = torch.nan
    with pytest.raises(
        ValueError, match="the scores of 1 of 20 held-out examples are NaN after epoch 1: remove examples with NaN"
    ):
        dubito.fit(Model(net(), Gaussian()), MAP(epochs=20), data(), validation=(x, y), patience=patience)


def test_validation_does_not_change_the_training():
    model = Model(net(), Gaussian(scale=1.0))
    a = dubito.fit(model, MCDropout(epochs=3, schedule="constant"), data(), batch_size=16)
    b = dubito.fit(model, MCDropout(epochs=3, schedule="constant"), data(), batch_size=16, validation=data(10))
    assert same(a, b), "training improves all along here, so the best state is the last"


def test_accumulated_batches_are_one_large_batch():
    model = Model(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double(), Gaussian(scale=0.1))
    x, y = (t.double() for t in data())
    batches = [(x[i : i + 16], y[i : i + 16]) for i in range(0, 64, 16)]
    a = dubito.fit(model, MAP(epochs=5), batches, accumulate=4)
    b = dubito.fit(model, MAP(epochs=5), [(x, y)])
    assert all(torch.allclose(a.params[n], b.params[n], atol=1e-10) for n in a.params)


def test_uneven_accumulation_counts_examples_not_batches():
    model = Model(nn.Linear(3, 1).double(), Gaussian(scale=0.1))
    x, y = (t.double() for t in data())
    a = dubito.fit(model, MAP(epochs=5), [(x[:50], y[:50]), (x[50:], y[50:])], accumulate=2)
    b = dubito.fit(model, MAP(epochs=5), [(x, y)])
    assert all(torch.allclose(a.params[n], b.params[n], atol=1e-10) for n in a.params)


def bf16_works() -> bool:
    try:
        nn.Linear(4, 4)(torch.zeros(2, 4)).to(torch.bfloat16) @ torch.zeros(4, 4, dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


@pytest.mark.skipif(
    not bf16_works(), reason="oneDNN refuses bfloat16 on this CPU; ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 makes it run"
)
def test_mixed_precision_and_bfloat16_weights():
    model = Model(net(3), Categorical())
    x, y = data()
    labels = (y.squeeze(1) > 0).long()
    mixed = dubito.fit(model, MAP(epochs=20, learning_rate=0.01), (x, labels), precision="bfloat16")
    plain = dubito.fit(model, MAP(epochs=20, learning_rate=0.01), (x, labels))
    assert mixed.params["0.weight"].dtype == torch.float32
    assert not same(mixed, plain), "the forward pass did run in bfloat16"
    assert (mixed.predict(x).mean - plain.predict(x).mean).abs().max() < 0.1
    half = Model(net(3).bfloat16(), Categorical())
    posterior = dubito.fit(half, Ensemble(MAP(epochs=2), 2), (x.bfloat16(), labels))
    p = posterior.predict(x.bfloat16())
    assert p.mean.dtype == torch.float32, "probabilities need more than half precision"
    assert posterior.params["0.weight"].dtype == torch.bfloat16


def test_data_in_every_form_is_the_same_fit():
    x, y = data(48)
    batches = [(x[i : i + 16], y[i : i + 16]) for i in range(0, 48, 16)]
    forms = [batches, DataLoader(TensorDataset(x, y), batch_size=16), [list(b) for b in batches]]
    model = Model(nn.Linear(3, 1), Gaussian(scale=0.1))
    fits = [dubito.fit(model, MAP(epochs=2), form) for form in forms]
    assert same(fits[0], fits[1])
    assert same(fits[0], fits[2])
    arrays = dubito.fit(model, MAP(epochs=2), (x.numpy(), y.numpy()), batch_size=16)
    tensors = dubito.fit(model, MAP(epochs=2), (x, y), batch_size=16)
    dataset = dubito.fit(model, MAP(epochs=2), TensorDataset(x, y), batch_size=16)
    assert same(arrays, tensors)
    assert torch.allclose(dataset.params["weight"], tensors.params["weight"], atol=0.01)


class Augmented(Dataset):
    """Draws from all three global generators, as users' data sets do."""

    def __len__(self):
        return 32

    def __getitem__(self, i):
        import random

        x = torch.full((3,), float(i)) / 32 + 0.1 * torch.randn(3) + 0.1 * random.random() + 0.1 * np.random.rand()  # noqa: NPY002
        return x, x[:1]


@pytest.mark.parametrize("workers", [0, 1])
def test_augmentation_from_the_global_generators_is_reproducible(workers):
    def once():
        loader = DataLoader(Augmented(), batch_size=8, shuffle=True, num_workers=workers)
        return dubito.fit(Model(net(), Gaussian(scale=0.1)), MAP(epochs=2), loader)

    a = once()
    torch.manual_seed(123)
    assert same(a, once())


def test_chaining_starts_from_an_earlier_posterior():
    model = Model(net(), Gaussian(scale=0.1))
    first = dubito.fit(model, MAP(epochs=5), data())
    second = dubito.fit(model, MAP(epochs=0), data(), start=first)
    third = dubito.fit(model, MAP(epochs=0), data(), start=first.params)
    assert same(first, second)
    assert same(first, third)
    assert second.params["0.weight"].data_ptr() != first.params["0.weight"].data_ptr()
    with pytest.raises(ValueError, match="0.weight"):
        dubito.fit(model, MAP(), data(), start={**first.params, "0.weight": torch.zeros(2)})
    with pytest.raises(ValueError, match="are missing"):
        dubito.fit(model, MAP(), data(), start={"0.weight": first.params["0.weight"]})


def test_bad_input_fails_early_and_in_words():
    x, y = data()
    model = Model(net(), Gaussian())
    cases = [
        ((x, y[:10]), ValueError, "same, positive number of rows"),
        ((x, torch.full_like(y, torch.nan)), ValueError, "NaN"),
        ((x, y.expand(-1, 2)), ValueError, "do not fit Gaussian"),
        ((torch.zeros(64, 5), y), ValueError, "shapes cannot be multiplied"),
        ([], ValueError, "no data"),
        (3, TypeError, "a DataLoader"),
        ([x], ValueError, "a batch is"),
    ]
    for source, error, words in cases:
        with pytest.raises(error, match=words):
            dubito.fit(model, MAP(epochs=1), source)
    with pytest.raises(ValueError, match="0 to 2"):
        dubito.fit(Model(net(3), Categorical()), MAP(epochs=1), (x, torch.full((64,), 3)))
    with pytest.raises(FloatingPointError, match="lower learning_rate"):
        dubito.fit(model, MAP(epochs=50, learning_rate=1e20, optimizer="sgd"), (x, y))
    for wrong, words in [
        ({"accumulate": 0}, "at least 1"),
        ({"patience": 3}, "validation"),
        ({"precision": "float16"}, "bfloat16"),
    ]:
        with pytest.raises(ValueError, match=words):
            dubito.fit(model, MAP(epochs=1), (x, y), **wrong)
    with pytest.raises(ValueError, match="temperature must be positive"):
        dubito.fit(model, MAP(epochs=1), (x, y), temperature=0.0)
    for make in (
        lambda: MAP(epochs=-1),
        lambda: MAP(learning_rate=0),
        lambda: MAP(optimizer="adamw"),
        lambda: MCDropout(rate=1.0),
    ):
        with pytest.raises(ValueError, match="got"):
            make()


def test_a_loader_that_gives_other_than_it_promises_is_refused():
    class Liar(DataLoader):
        def __iter__(self):
            yield from list(super().__iter__())[:-1]

    x, y = data(48)
    with pytest.raises(ValueError, match="32 examples .* where 48 were counted"):
        dubito.fit(Model(net(), Gaussian()), MAP(epochs=2), Liar(TensorDataset(x, y), batch_size=16))


def test_callbacks_see_every_step_and_can_stop():
    events = []
    dubito.fit(Model(net(), Gaussian()), MAP(epochs=3), data(), batch_size=16, callbacks=[events.append])
    assert [e.step for e in events] == list(range(1, 13))
    assert {e.epoch for e in events} == {0, 1, 2}
    stopped = []

    def stop(event):
        stopped.append(event)
        return event.step == 2

    dubito.fit(Model(net(), Gaussian()), MAP(epochs=3), data(), batch_size=16, callbacks=[stop])
    assert len(stopped) == 2


def test_progress_is_quiet_where_nobody_looks(capsys):
    dubito.fit(Model(net(), Gaussian()), MAP(epochs=3), data())
    assert capsys.readouterr() == ("", "")


def test_progress_shows_on_request(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich draws bars on terminals only
    monkeypatch.setattr("dubito.inference.progress.PATIENCE", 0.0)
    monkeypatch.setattr("dubito.inference.progress.PERIOD", 0.0)
    dubito.fit(Model(net(), Gaussian()), MAP(epochs=30), data(), progress=True)
    assert "MAP" in capsys.readouterr().err


@pytest.mark.gpu
def test_another_device_works_on_a_copy():
    network = net()
    model = Model(network, Gaussian())
    for method in (MAP(epochs=2), MCDropout(epochs=2), Ensemble(MAP(epochs=2), 3)):
        posterior = dubito.fit(model, method, data(), device="cuda", precision="bfloat16")
        assert next(network.parameters()).device.type == "cpu"
        p = posterior.predict(data()[0])
        assert p.mean.device.type == "cuda"
        assert torch.isfinite(p.log_prob(data()[1].cuda())).all()


if os.name != "posix":
    del test_a_killed_run_goes_on_to_the_same_bits
    del test_a_sampler_killed_at_any_moment_loses_and_doubles_no_draw
    del test_a_disk_that_is_full_stops_the_run_in_words_and_it_goes_on


@pytest.mark.parametrize("method", [MAP(epochs=60), dubito.Variational(epochs=60), MCDropout(at="", rate=0.0, epochs=60)])
def test_a_learned_noise_arrives_at_the_residuals_in_a_short_fit(method):
    """Its logarithm starts 1.3 above, at the spread of the targets; 780 steps of Adam at a rate that falls from .001 make .4."""
    x, generator = torch.linspace(-2, 2, 200).unsqueeze(1), torch.Generator().manual_seed(0)
    y, network = 0.3 * x + 0.1 * torch.randn(200, 1, generator=generator), nn.Linear(1, 1)
    nn.init.constant_(network.weight, 0.3)
    nn.init.zeros_(network.bias)
    posterior = dubito.fit(Model(network, Gaussian()), method, (x, y), batch_size=16)
    noise, residual = posterior.params["likelihood:log_scale"].exp(), (posterior.predict(x).mean - y).square().mean().sqrt()
    assert 0.95 < float(noise / residual) < 1.1


def test_targets_out_of_reach_are_warned_of(recwarn):
    x = torch.linspace(-1, 1, 20).unsqueeze(1)
    price = 3e5 + 1e5 * x
    net = nn.Linear(1, 1)
    with pytest.warns(UserWarning, match="targets are about 3.1e\\+05 in size.*rescaled"):
        dubito.fit(Model(net, Gaussian()), MAP(epochs=1), (x, price))
    with torch.no_grad():
        net.weight.fill_(1e5)
        net.bias.fill_(3e5)
    dubito.fit(Model(net, Gaussian()), MAP(epochs=1, check=False), (x, price))  # the network was trained on them
    dubito.fit(Model(nn.Linear(1, 1), Gaussian()), MAP(epochs=1, check=False), (x, 30 * x))
    assert not recwarn.list


def test_arguments_in_the_wrong_place_are_told():
    net, x, y = nn.Linear(2, 2), torch.randn(8, 2), torch.zeros(8).long()
    model = Model(net, Categorical())
    with pytest.raises(TypeError, match=r"model must be a dubito.Model\(network, likelihood\); got Linear"):
        dubito.fit(net, MAP(), (x, y))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="the second argument must be a method such as .* and the third the data; got tuple"):
        dubito.fit(model, (x, y), MAP())  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="got the class MAP"):
        dubito.fit(model, MAP, (x, y))  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        TypeError, match=r"prior must be an object such as dubito.priors.Normal\(scale=1.0\); got the class Normal"
    ):
        Model(net, Categorical(), dubito.priors.Normal)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("layers", [(nn.Flatten(), nn.Linear(64, 2)), (nn.Conv2d(1, 2, 8), nn.Flatten())])
def test_images_of_bytes_are_told(layers):
    net = nn.Sequential(*layers)
    x, y = np.zeros((8, 1, 8, 8), dtype=np.uint8), np.zeros(8, dtype=np.int64)
    with pytest.raises(TypeError, match="the inputs are uint8, .* x.float\\(\\) / 255"):
        dubito.fit(Model(net, Categorical()), MAP(epochs=1), (x, y))
