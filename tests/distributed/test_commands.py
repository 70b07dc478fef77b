"""`dubito fit` on several processes."""

import contextlib
import io

import pytest
import torch

from distributed_ranks import on_ranks
from dubito.cli import main
from dubito.cli.commands.fitted import POSTERIOR
from dubito.tensors import store


def command(rank, *args):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        return main(["fit", *map(str, args)]), out.getvalue(), err.getvalue()


@pytest.fixture
def table(tmp_path):
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    rows = [f"{a},{b},{a - 2 * b}" for a, b in x.tolist()]
    (tmp_path / "table.csv").write_text("\n".join(["a,b,y", *rows]))
    return tmp_path / "table.csv"


def test_all_processes_fit_and_the_first_prints_and_writes(table):
    given = [table, "--target", "y", "--epochs", "20", "--held-out", "0.2"]
    alone, printed, _ = command(0, "map", *given, "--out", table.parent / "alone")
    (first, told, _), (second, silent, _) = on_ranks(
        2, lambda rank: command(rank, "map", *given, "--out", table.parent / "together")
    )
    assert alone == first == second == 0
    assert told.replace("together", "alone") == printed
    assert silent == ""
    one, both = (store.read(table.parent / name / POSTERIOR)[0] for name in ("alone", "together"))
    for name, leaf in one.items():
        torch.testing.assert_close(both[name], leaf, rtol=1e-4, atol=1e-4)
    assert not list((table.parent / "together").rglob("lock.json"))


def test_what_cannot_run_gives_one_line_and_2(table):
    given = [table, "--target", "y", "--epochs", "20", "--out", table.parent]
    (first, _, told), (second, _, other) = on_ranks(2, lambda rank: command(rank, "map", *given))
    assert first == second == 2
    assert "exists: give another folder for --out" in told
    assert other.startswith("dubito: process 0 of 2 has failed: UsageError")
    given[-1] = table.parent / "ensemble"
    for code, _, said in on_ranks(2, lambda rank: command(rank, "ensemble", *given, "--size", "1")):
        assert code == 2
        assert "Ensemble cannot run on 2 processes" in said
        assert said.count("\n") == 1
