"""Runs on several processes that are interrupted: by a callback, a signal or the death of a process."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import dubito
from distributed_ranks import DEAD, errors, on_ranks, outcomes
from dubito import priors
from dubito.posteriors import Stored

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(37, 3, generator=GENERATOR)
Y = torch.sin(X).sum(1, keepdim=True) + 0.1 * torch.randn(37, 1, generator=GENERATOR)
METHODS = {
    "MAP": dubito.MAP(epochs=10),
    "dropout": dubito.MCDropout(epochs=10, draws=3),
    "IVON": dubito.IVON(epochs=10, draws=3),
    "local": dubito.Variational(epochs=10, draws=3),
    "OnlineLaplace": dubito.OnlineLaplace(epochs=8, every=2),
    "SGHMC": dubito.SGHMC(draws=4, burn_in=2, thin=2),
}


def fit(method, folder=None, **options):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
    model = dubito.Model(net, dubito.Gaussian(), priors.Normal())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = dubito.fit(model, method, (X, Y), batch_size=10, checkpoint=folder, progress=False, **options)
    p = posterior.predict(X[:5])
    return {"mean": p.mean, "epistemic": p.uncertainty.epistemic, **(posterior.center or ({},))[0]}


def same(one, other, tolerance=0.0):
    for name, leaf in one.items():
        torch.testing.assert_close(other[name], leaf, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", METHODS)
def test_a_run_goes_on_to_the_same_bits_and_on_another_number_of_processes_to_the_same_numbers(name, tmp_path):
    method = METHODS[name]
    whole = on_ranks(2, lambda rank: fit(method))[0]
    on_ranks(2, lambda rank: fit(method, tmp_path / "2", callbacks=[lambda event: rank == 1 and event.step == 15]))
    for size in (1, 3):
        shutil.copytree(tmp_path / "2", tmp_path / str(size))
    for size in (2, 1, 3):
        for other in on_ranks(size, lambda rank, size=size: fit(method, tmp_path / str(size), resume=True)):
            same(whole, other, 0.0 if size == 2 else 1e-5)


def test_a_signal_to_one_process_ends_all_with_a_checkpoint(tmp_path):
    def interrupted(rank):
        def callback(event):
            if rank == 1 and event.step == 6:
                os.kill(os.getpid(), signal.SIGINT)

        fit(METHODS["MAP"], tmp_path, callbacks=[callback])

    assert errors(2, interrupted) == ["KeyboardInterrupt: "] * 2
    whole, steps = on_ranks(2, lambda rank: fit(METHODS["MAP"]))[0], []
    for other in on_ranks(
        2, lambda rank: fit(METHODS["MAP"], tmp_path, resume=True, callbacks=[lambda event: steps.append(event.step)])
    ):
        same(whole, other)


def die(folder, at, victim):
    """A fit on three processes of which one is killed."""

    def work(rank):
        def callback(event):
            if rank == victim and event.step == at:
                os.kill(os.getpid(), signal.SIGKILL)

        fit(METHODS["SGHMC"], folder, checkpoint_every=0.0, callbacks=[callback], resume=True)

    begun = time.monotonic()
    results = outcomes(3, work)
    assert time.monotonic() - begun < 30
    assert results[victim] == (False, DEAD, "")
    for rank in {0, 1, 2} - {victim}:
        assert results[rank][1].startswith("ProcessError: another of the 3 processes has ended or does not answer")


def test_a_killed_process_ends_the_others_and_nothing_is_lost(tmp_path):
    die(tmp_path, 17, 1)
    whole = on_ranks(3, lambda rank: fit(METHODS["SGHMC"]))[0]
    for other in on_ranks(3, lambda rank: fit(METHODS["SGHMC"], tmp_path, resume=True)):
        same(whole, other)


@pytest.mark.slow
def test_processes_killed_again_and_again_lose_and_double_nothing(tmp_path):
    chosen = torch.Generator().manual_seed(0)
    whole = on_ranks(3, lambda rank: fit(METHODS["SGHMC"]))[0]
    for turn in range(20):
        at = 1
        for _ in range(5):
            at += int(torch.randint(1, 8, (), generator=chosen))
            die(tmp_path / str(turn), at, int(torch.randint(3, (), generator=chosen)))
        for other in on_ranks(3, lambda rank, turn=turn: fit(METHODS["SGHMC"], tmp_path / str(turn), resume=True)):
            same(whole, other)


def test_an_error_in_a_callback_ends_all(tmp_path):
    def work(rank):
        def callback(event):
            assert rank == 0 or event.step < 3, "enough"

        fit(METHODS["MAP"], callbacks=[callback])

    first, second = errors(2, work)
    assert second.startswith("AssertionError: enough")
    assert first.startswith("ProcessError: process 1 of 2 has failed: AssertionError: enough")


def test_a_folder_that_is_not_shared_is_told(tmp_path):
    said = errors(2, lambda rank: fit(METHODS["MAP"], tmp_path / str(rank)))
    for words in said:
        assert words.startswith("ValueError: processes [1] do not see ")
        assert words.endswith("give a folder that all processes share")


def test_a_folder_that_holds_a_run_is_refused_by_all(tmp_path):
    on_ranks(2, lambda rank: fit(METHODS["MAP"], tmp_path))
    first, second = errors(2, lambda rank: fit(METHODS["MAP"], tmp_path))
    assert first.startswith("FileExistsError")
    assert "holds a run already" in second


def test_draws_on_disk_are_read_by_all(tmp_path):
    def work(rank):
        net = nn.Linear(3, 1)
        model = dubito.Model(net, dubito.Gaussian(scale=1.0))
        method = dubito.SGLD(draws=40, burn_in=2, thin=1)
        posterior = dubito.fit(model, method, (X, Y), batch_size=10, checkpoint=tmp_path, memory=1e-9, progress=False)
        assert isinstance(posterior, Stored)
        return len(posterior), posterior.predict(X[:5]).mean

    (n, first), (other, second) = on_ranks(2, work)
    assert n == other == 40
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_torchrun_runs_the_script_of_the_page(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    (tmp_path / "script.py").write_text(
        "import torch\ntorch.manual_seed(0)\n"
        + code
        + "\nprint(f\"center {float(posterior.center[0]['0.weight'].sum())}\\n\", end='')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    values = [float(value) for value in re.findall(r"center (-?[\d.]+\d)", done.stdout)]
    alone = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert len(values) == 2
    assert values == pytest.approx([float(alone.stdout.split()[1])] * 2, abs=1e-4)
