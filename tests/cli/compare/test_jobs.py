"""A comparison that several processes make."""

import multiprocessing
import shutil
from dataclasses import replace
from functools import partial

import pytest

from dubito.cli.commands.compare import CompareOptions, TableOptions, TrainingOptions, make_grid
from dubito.cli.program import main

METHODS = ("map", "laplace", "swag", "mc_dropout")  # the second and third start from what the first trains


def remake(folder, *, epochs=2, methods=METHODS):
    options = CompareOptions(methods=methods, seeds=2, out=folder)
    return partial(
        make_grid, options, TableOptions(), TrainingOptions(hidden=(8,), epochs=epochs, train=120, test=80, quiet=True)
    )


def numbers(outcome):
    assert [result.error for result in outcome.results] == [None] * len(outcome.results)
    return {(result.key.label, result.key.seed): dict(result.scores) for result in outcome.results}


@pytest.mark.filterwarnings("ignore:the weights are not at an optimum")
def test_processes_make_the_same_cells_and_an_interrupt_keeps_what_is_there(tmp_path):
    alone = numbers(remake(tmp_path / "alone")().run(progress=False))
    again, said = remake(tmp_path / "apart"), []

    def stop(text):
        said.append(text)
        raise KeyboardInterrupt

    cut = again().run(say=stop, progress=False, jobs=2, remake=again)
    assert cut.interrupted
    assert 1 <= len(cut.results) < 8
    assert not multiprocessing.active_children()
    said.clear()
    shutil.rmtree(tmp_path / "apart" / "cells")  # what there is depends on who was first
    part = replace(again(), seeds=(0,)).run(progress=False)
    with pytest.warns(UserWarning, match="the weights are not at an optimum"):  # in another process
        whole = again().run(say=said.append, progress=False, jobs=2, remake=again)
    assert not whole.interrupted
    assert said[0].startswith(f"{len(part.results)} of 8 results are already there")
    apart = numbers(whole)
    assert apart.keys() == alone.keys()
    for key, scores in alone.items():
        assert apart[key] == pytest.approx(scores, rel=1e-4, abs=1e-5, nan_ok=True), key
    assert len(list((tmp_path / "apart" / "cells").glob("*.json"))) == 8


def test_a_failure_and_the_command(tmp_path, capsys):
    out = tmp_path / "out"
    given = [
        "compare",
        "--methods",
        "map",
        "swag,learning_rate=1e30",
        "--seeds",
        "1",
        "--hidden",
        "8",
        "--epochs",
        "2",
        "--train",
        "120",
    ]
    code = main([*given, "--test", "80", "--jobs", "2", "--out", str(out), "--quiet"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert (out / "report.html").exists()
    assert main(["compare", "--jobs", "0"]) == 2
    assert "--jobs must be at least 1; got 0" in capsys.readouterr().err
