"""`dubito compare` from end to end, and its page in a browser."""

import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes

from browser import Browser, program
from dubito.cli.program import main
from dubito.compare import grid as grid_module
from dubito.report import Report, Section

QUICK = ["--train", "100", "--test", "60", "--epochs", "3", "--hidden", "16"]
METHODS = ["mc_dropout,draws=10", "map"]
LABELS = ["MC dropout (draws=10)", "MAP"]
TABLE = """import torch
def make(inputs, outputs):
    return torch.nn.Sequential(torch.nn.Linear(inputs, 8), torch.nn.Linear(8, outputs))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A small comparison on digits, with noise as the unfamiliar, and a corruption."""
    folder = tmp_path_factory.mktemp("compare")
    noise = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0)).numpy()
    np.savez(folder / "noise.npz", x=noise)
    more = ["--unfamiliar", str(folder / "noise.npz"), "--corruptions", "contrast", "--severities", "5", "--seeds", "2"]
    assert main(["compare", "--out", str(folder / "out"), *QUICK, *more, "--methods", *METHODS]) == 0
    return folder / "out"


@pytest.fixture(scope="module")
def browser():
    program()  # or skip
    with Browser() as one:
        yield one


def names(browser: Browser, table: int = 0) -> list[str]:
    rows = f"[...document.querySelectorAll('table.sortable')[{table}].tBodies[0].rows]"
    return browser.run(f"{rows}.filter(row => !row.hidden).map(row => row.cells[0].textContent)")


def column(browser: Browser, place: int) -> list[float]:
    rows = "[...document.querySelectorAll('table.sortable')[0].tBodies[0].rows]"
    return browser.run(f"{rows}.map(row => Number(row.cells[{place}].dataset.value))")


def test_the_folder_has_a_page_its_numbers_and_a_file_a_cell(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["cells", "report.html", "report.json"]
    cells = [json.loads(path.read_text()) for path in (folder / "cells").glob("*.json")]
    assert sorted((cell["method"], cell["seed"]) for cell in cells) == sorted(
        (label, seed) for label in LABELS for seed in (0, 1)
    )
    assert {"torch", "dubito", "python"} <= set(cells[0]["versions"])
    assert {"accuracy", "nll", "ece", "noise auroc total", "shifted nll"} <= set(cells[0]["scores"])
    data = json.loads((folder / "report.json").read_text())
    made = data["sections"][0]["tables"][0]
    assert [row["method"] for row in made["rows"]] == LABELS
    by_seed = [cell["scores"]["nll"] for cell in cells if cell["method"] == "MAP"]
    assert made["rows"][1]["NLL"] == pytest.approx(np.mean(by_seed))
    assert made["standard_errors"][1]["NLL"] == pytest.approx(np.std(by_seed, ddof=1) / 2**0.5)
    titles = [section["title"] for section in data["sections"]]
    assert titles == ["Scores", "Calibration", "Successes and errors", "The unfamiliar", "Shift", "Images", "To reproduce"]


def test_the_page_loads_without_a_network_or_a_complaint(browser, folder):
    browser.open(folder / "report.html")
    assert browser.complaints == []
    assert all(url.startswith(("file://", "data:")) for url in browser.requests)
    assert browser.run("document.title") == "Methods compared on digits"
    assert browser.run("document.querySelectorAll('svg[role=img]').length") > 15
    ids = browser.run("[...document.querySelectorAll('[id]')].map(part => part.id)")
    assert len(ids) == len(set(ids))
    assert browser.run("[...document.querySelectorAll('nav a')].every(link => document.querySelector(link.getAttribute('href')))")


def test_a_click_on_a_header_sorts_the_rows(browser, folder):
    browser.open(folder / "report.html")
    assert names(browser) == LABELS
    head = "document.querySelectorAll('table.sortable')[0].tHead.rows[0].cells"
    browser.run(f"{head}[1].querySelector('button').click()")  # accuracy: the best first
    assert browser.run(f"{head}[1].getAttribute('aria-sort')") == "descending"
    assert column(browser, 1) == sorted(column(browser, 1), reverse=True)
    browser.run(f"{head}[1].querySelector('button').click()")
    assert column(browser, 1) == sorted(column(browser, 1))
    browser.run(f"{head}[2].querySelector('button').click()")  # NLL: the best is the least
    assert column(browser, 2) == sorted(column(browser, 2))
    assert browser.run(f"{head}[1].getAttribute('aria-sort')") is None
    browser.run(f"{head}[0].querySelector('button').click()")
    assert names(browser) == sorted(LABELS, key=str.lower)
    assert names(browser, 1) == LABELS  # each table on its own
    assert browser.complaints == []


def test_the_box_filters_rows_pictures_and_commands(browser, folder):
    browser.open(folder / "report.html")
    shown = "document.querySelectorAll('[data-label]:not([hidden])').length"
    everything = browser.run(shown)
    kind = "(text => { const box = document.querySelector('.filter input'); box.value = text; box.dispatchEvent(new Event('input')); })"
    browser.run(f"{kind}('DROP out')")
    assert names(browser) == names(browser, 1) == [LABELS[0]]
    assert browser.run("document.querySelector('.filter output').textContent") == "1 of 2 rows"
    assert 0 < browser.run(shown) == everything // 2
    assert browser.run("[...document.querySelectorAll('svg[data-label]')].filter(p => p.checkVisibility()).length") > 3
    browser.run(f"{kind}('nothing like it')")
    assert names(browser) == []
    browser.run(f"{kind}('')")
    assert names(browser) == LABELS
    assert browser.run(shown) == everything
    assert browser.complaints == []


def test_a_command_can_be_copied(browser, folder):
    browser.open(folder / "report.html")
    browser.run("document.querySelector('.copy').click()")
    assert browser.run("new Promise(done => setTimeout(() => done(document.querySelector('.copy').textContent), 100))") in (
        "Copied",
        "Selected",
    )
    assert browser.run("document.querySelector('.snippet code').textContent").startswith("dubito compare --data digits")
    assert browser.complaints == []


@pytest.mark.parametrize("dark", [False, True])
def test_it_can_be_read_in_both_themes_and_on_a_phone(browser, folder, dark):
    browser.open(folder / "report.html", width=390, dark=dark)
    page, ink = (browser.run(f"getComputedStyle(document.body).{name}") for name in ("backgroundColor", "color"))
    light = [sum(map(int, re.findall(r"\d+", colour)[:3])) / 765 for colour in (page, ink)]
    assert (light[0] < light[1]) == dark
    assert abs(light[0] - light[1]) > 0.6
    assert browser.run("document.documentElement.scrollWidth") <= 390  # wide tables scroll by themselves
    assert browser.complaints == []


def test_a_table_of_numbers_and_a_network_of_ones_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mynets.py").write_text(TABLE)
    x, y = load_diabetes(return_X_y=True, scaled=False)
    rows = [",".join([*(f"{i}" for i in "abcdefghij"), "progression"])]
    rows += [",".join(map(str, [*row, target])) for row, target in zip(x[:90], y[:90], strict=True)]
    Path("d.csv").write_text("\n".join(rows))
    args = ["compare", "--data", "d.csv", "--target", "progression", "--network", "mynets:make", "--epochs", "2", "--seeds", "1"]
    assert main([*args, "--methods", "map"]) == 0
    out = capsys.readouterr().out
    assert "progression: regression" in out
    assert "One seed, so there are no standard errors" in out
    report = json.loads(Path("reports/compare-d-csv/report.json").read_text())
    assert report["sections"][1]["figures"][0]["title"] == "Quantiles"
    assert report["sections"][0]["tables"][0]["rows"][0]["RMSE"] > 10
    command = report["sections"][-1]["snippets"]["MAP"]
    assert "--target progression --network mynets:make" in command

    # the command of a row makes the same cell, by name: the name holds the hash of all settings
    first = {path.name: path.read_text() for path in Path("reports/compare-d-csv/cells").glob("map-*.json")}
    monkeypatch.setattr("dubito.cli.compare.page", lambda *args, **more: Report("t", (Section("s"),)))
    assert main([*shlex.split(command)[1:], "--out", "again"]) == 0
    again = {path.name: path.read_text() for path in Path("again/cells").glob("*.json")}
    assert again.keys() == first.keys()
    assert [json.loads(text)["scores"] for text in again.values()] == [json.loads(text)["scores"] for text in first.values()]
    # and another network, even of the same shape, another cell
    Path("mynets.py").write_text(TABLE + "# changed\n")
    monkeypatch.delitem(sys.modules, "mynets")
    importlib.invalidate_caches()
    assert main([*shlex.split(command)[1:], "--out", "again"]) == 0
    assert len(list(Path("again/cells").glob("*.json"))) == 2


def test_an_interrupt_leaves_a_report_of_what_there_is(tmp_path, monkeypatch, capsys):
    real, calls = grid_module.fit, []

    def interrupted(*args, **more):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args, **more)

    monkeypatch.setattr(grid_module, "fit", interrupted)
    args = ["compare", *QUICK, "--seeds", "2", "--methods", "map", "--out", str(tmp_path / "out")]
    np.savez(tmp_path / "t.npz", x=np.random.default_rng(0).normal(size=(30, 2)), y=np.arange(30) % 2)
    args += ["--data", str(tmp_path / "t.npz"), "--target", "y", "--kind", "classification"]
    drawn = sys.modules["dubito.cli.compare.page"]  # pictures take a while, and are not what this is about
    monkeypatch.setattr(drawn, "_quality", lambda *args, **more: [])
    assert main(args) == 130
    assert "The run was interrupted" in json.loads((tmp_path / "out" / "report.json").read_text())["summary"]
    monkeypatch.setattr(grid_module, "fit", real)
    capsys.readouterr()
    assert main(args) == 0
    assert "1 of 2 results are already there" in capsys.readouterr().out
    assert main([*args, "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("Report: ")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--methods", "mapp"], "did you mean 'map'"),
        (["--data", "nowhere"], "no data set is called 'nowhere'"),
        (["--data", "nowhere.csv", "--target", "y"], "there is no such file"),
        (["--target", "y"], "are for CSV and NPZ files"),
        (["--data", "."], "only .csv and .npz files can be read"),
        (["--corruptions", "rain"], "there is no corruption 'rain'"),
        (["--seeds", "0"], "--seeds must be at least 1"),
        (["--epochs", "0"], "--epochs must be positive"),
        (["--hidden", "4", "--network", "a:b"], "leave out --hidden"),
        (["--severities", "6", "--corruptions", "fog"], "between 1 and 5"),
        (["--detectors", "energy"], "--detectors needs --unfamiliar"),
        (["--confidence", "entropi"], "did you mean 'entropy'"),
        (["--data", "uci:yacht", "--unfamiliar", "kmnist"], "give an NPZ file of such inputs"),
        (["--unfamiliar", "a/x.npz", "b/x.npz"], "two sets called x"),
        (["--network", "torch.nn:LazyLinear"], "the network fails on [2, 1, 8, 8] inputs"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_line(args, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *args]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1
    assert not list(tmp_path.iterdir())
