import json
import math
import re
import sys
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score

from dubito import data, metrics
from dubito.cli import demo as package
from dubito.cli.compare import grid as grid_module
from dubito.cli.compare.grid import Fits, Grid
from dubito.cli.compare.spec import parse_spec
from dubito.cli.demo import curve, demo, digits
from dubito.inference.fit import fit
from dubito.inference.presets import preset, suiting
from dubito.inference.registry import METHODS
from dubito.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian
from dubito.methods import MAP, Laplace

pytestmark = pytest.mark.filterwarnings("ignore:the weights are not at an optimum")  # after two epochs
EFFORT = 0.03  # two epochs of digits and ten of the curve: poor, but no two methods alike


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A quick demo: its report, its path and what it may not have touched."""
    path = tmp_path_factory.mktemp("demo") / "missing" / "folder" / "demo.html"
    threads, random, settings = torch.get_num_threads(), torch.get_rng_state(), dict(mpl.rcParams)
    pyplot = "matplotlib.pyplot" in sys.modules
    report = demo(path, seed=3, effort=EFFORT)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), random)
    assert dict(mpl.rcParams) == settings
    assert ("matplotlib.pyplot" in sys.modules) == pyplot
    return report, path


@pytest.fixture(scope="module")
def again():
    """The digits once more, with the seed of `made`."""
    return digits.run(seed=3, effort=EFFORT)


def rows(path: Path, title: str) -> list[dict]:
    read = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    return next(table["rows"] for section in read["sections"] for table in section["tables"] if table["title"] == title)


def test_the_unfamiliar_classes_never_enter_training():
    split = digits.problem(seed=0).split(0)
    strange = split.unfamiliar[digits.STRANGE]
    assert split.y_train.unique().tolist() == split.y_test.unique().tolist() == list(range(8))
    whole = data.digits(seed=0, test=0.75)
    known = {
        image.tobytes() for x, y in ((whole.x_train, whole.y_train), (whole.x_test, whole.y_test)) for image in x[y < 8].numpy()
    }
    assert not known & {image.tobytes() for image in strange.numpy()}
    assert len(split.x_train) + len(split.x_test) + len(strange) == 1797
    assert not {image.tobytes() for image in split.x_train.numpy()} & {image.tobytes() for image in split.x_test.numpy()}


def test_the_page_is_whole_and_loads_nothing(made):
    report, path = made
    text = path.read_text(encoding="utf-8")
    assert text == report.html()
    loads = []

    class Links(HTMLParser):
        def handle_starttag(self, tag, attrs):
            assert tag not in ("script", "link", "iframe")
            loads.extend(value for name, value in attrs if name in ("src", "href", "xlink:href"))

        handle_startendtag = handle_starttag

    Links().feed(text)
    assert loads
    assert all(load.startswith(("#", "data:image/png;base64,")) for load in loads)
    assert not re.search(r"@import|url\((?!#)", text)
    assert len(text) < 3_000_000


def test_every_method_and_figure_is_there(made):
    report, path = made
    text = path.read_text(encoding="utf-8")
    shown = [name for name in METHODS if preset(name).shown]
    names = [name for name in shown if name != "neural_linear"]
    assert suiting(METHODS, Categorical) == suiting(METHODS, HeteroscedasticGaussian) == names
    assert suiting(METHODS, Gaussian) == shown
    for name in names:
        label = "Ensemble of 10" if name == "ensemble" else preset(name).label
        assert text.count(label) >= 8  # both tables, and reliability, histogram and two bands twice: title and alternative text
        assert {row["method"] for row in rows(path, "A curve with a gap")} >= {label}
    figures = {figure.title: figure for section in report.sections for figure in section.figures}
    n = len(names)
    assert {title.split(",")[0]: len(figure.pictures) for title, figure in figures.items()} == {
        "Reliability": n,
        "Accuracy against coverage": 2,
        "Uncertainty on 8 and 9": n,
        "The least certain images": 6,
        "The most certain images": 6,
        "What 100 draws say": 3,
        "Aleatoric and epistemic uncertainty": 2 * n,
    }
    assert all(figure.caption for figure in figures.values())
    assert {"Seed", "Versions", "Made", "Duration"} <= set(report.facts)
    assert report.facts["Not here"].startswith("Neural linear: for other likelihoods")
    assert "NUTS" in report.facts["Not here"].partition("they take longer")[0]


def test_the_same_seed_gives_the_same_table_and_others_recompute_it(made, again):
    given, outcome = again
    found, split = rows(made[1], "Handwritten digits"), given.split(0)
    assert [row["method"] for row in found] == [result.key.label for result in outcome.results]
    for row, result in zip(found, outcome.results, strict=True):
        known, y = result.arrays["probs"].double().numpy(), split.y_test.numpy()
        entropy = torch.cat([result.arrays["total"], result.arrays[f"unfamiliar {digits.STRANGE} total"]]).numpy()
        wrong = known.argmax(1) != y
        assert 0 < wrong.sum() < len(y)
        assert row["accuracy"] == pytest.approx(accuracy_score(y, known.argmax(1)))
        assert row["NLL"] == pytest.approx(log_loss(y, known / known.sum(1, keepdims=True)), rel=1e-4)
        assert row["AUROC errors"] == pytest.approx(roc_auc_score(wrong, 1 - known.max(1)), abs=1e-3)
        assert row["AUROC 8 and 9"] == pytest.approx(roc_auc_score(np.arange(len(entropy)) >= len(known), entropy), abs=1e-3)
        assert row["seconds"] > 0


def test_another_seed_gives_another_table(again):
    given, outcome = digits.run(seed=4, effort=0.01)
    assert not torch.equal(given.split(0).y_train, again[0].split(0).y_train)
    assert outcome.results[0].scores != again[1].results[0].scores


def test_each_method_is_fitted_as_compare_fits_it(tmp_path, again):
    """And as its own page says: no method is damped, tempered or given a rate of its own for the demo."""
    given, outcome = again
    specs = tuple(parse_spec(name, given) for name in ("map", "laplace", "sghmc"))
    assert [spec.departure for spec in specs] == ["", "", ""]
    assert specs[1].method == Laplace(subset="last_layer")
    assert specs[2].method.preconditioner == "none"
    compared = {result.key.label: result for result in Grid(given, specs, (3,), tmp_path).run(progress=False).results}
    for result in outcome.results:
        if result.key.label in compared:
            assert result.scores == compared[result.key.label].scores


def test_the_curve_has_uncertainty_of_both_kinds(made):
    found = {(row["method"], row["activation"]): row for row in rows(made[1], "A curve with a gap")}
    outcomes = curve.run(["map", "ensemble"], seed=3, effort=EFFORT)
    given = curve.points(seed=3)
    for label, by in outcomes.items():
        for activation, outcome in by.items():
            split = outcome.curve.p.uncertainty
            assert (split.aleatoric > 0).all()
            assert bool((split.epistemic > 0).all()) == (label != "MAP")
            row = found[label, activation]
            assert row["NLL in the gap"] == float(metrics.nll(outcome.gap, given.y_gap))
            low, high = outcome.near.interval(0.9)
            inside = ((low <= given.y_near) & (given.y_near <= high)).double().mean()
            assert row["coverage near data"] == pytest.approx(float(inside))


def test_a_method_joins_by_being_registered(monkeypatch):
    @dataclass(frozen=True)
    class Newcomer(MAP):
        epochs: int = 1

    monkeypatch.setattr(digits, "METHODS", {"newcomer": Newcomer})
    monkeypatch.setitem(METHODS, "newcomer", Newcomer)
    _, outcome = digits.run()
    assert [result.key.label for result in outcome.results] == ["Newcomer"] == [outcome.label]


def test_methods_that_need_a_trained_network_share_one(monkeypatch):
    calls = []

    def counted(model, method, data, *, start=None, **options):
        calls.append((type(method).__name__, start))
        return fit(model, method, data, start=start, **options)

    monkeypatch.setattr(grid_module, "fit", counted)
    given = digits.problem(effort=EFFORT)
    fits = Fits(given, 0)
    made = {name: fits(parse_spec(name, given), given.split(0)) for name in ("laplace", "swag", "map")}
    assert [name for name, _ in calls] == ["MAP", "Laplace", "SWAG", "MAP"]
    ((start, seconds),) = fits.trained.values()
    assert all(used is start for name, used in calls if name != "MAP")
    assert made["laplace"].seconds > seconds
    assert made["swag"].seconds > seconds


def test_a_method_without_a_preset_is_given_a_trained_network_where_it_expects_one(monkeypatch):
    @dataclass(frozen=True)
    class Newcomer(Laplace):
        check: bool = False

    monkeypatch.setitem(METHODS, "newcomer", Newcomer)
    assert preset("newcomer").after_map
    assert preset("newcomer").label == "Newcomer"


def test_what_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(digits, "run", lambda **_: pytest.fail("it began to train"))
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="the report cannot be written there"):
        demo(tmp_path / "file" / "demo.html")
    with pytest.raises(OSError, match="ends in .html"):
        demo(tmp_path / "demo.txt")
    for effort in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="effort must be positive"):
            package.demo(tmp_path / "demo.html", effort=effort)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
