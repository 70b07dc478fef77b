"""The grid: cells that are made once, kept whole, taken up again, and counted right."""

import io
import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from dubito.methods.mc_dropout import dropout_precision
from rich.console import Console
from scipy.stats import pearsonr, spearmanr, ttest_rel

from dubito import data, fit, metrics
from dubito.apps import failure, ood
from dubito.cli.compare import scoring
from dubito.cli.compare.result import Key
from dubito.cli.compare.scoring import agreement, evaluate
from dubito.cli.compare.spec import convert, training_of
from dubito.cli.compare.stacked import Task, fit_splits, inner_split, is_stackable, train
from dubito.cli.compare.summary import Mean, departures_caption, describe, differ, scores, table, table_caption
from dubito.cli.program import main
from dubito.compare import Grid, Result, Spec, Split, of_table, parse_spec, problem
from dubito.compare import grid as grid_module
from dubito.evaluation.problems import Problem, perceptron, resized
from dubito.likelihoods import PREFIX
from dubito.methods import IVON, MAP, Ensemble, Laplace, MCDropout
from dubito.posteriors import Point
from dubito.priors import Normal
from dubito.report import Column, Report, Section, Table


@pytest.fixture(scope="module")
def digits() -> Problem:
    given = problem("digits").limited(120, 80)
    return replace(given, training=given.training._replace(epochs=3), build=perceptron((16, 16)), hidden=(16, 16))


def small(given: Problem, folder: Path, *specs: str, seeds: tuple[int, ...] = (0, 1)) -> Grid:
    return Grid(given, tuple(parse_spec(spec, given) for spec in specs), seeds, folder)


# Entries


def test_options_reach_the_method_what_it_wraps_and_what_comes_before(digits):
    made = parse_spec("ensemble:mc_dropout,size=3,rate=0.3", digits)
    assert isinstance(made.method, Ensemble)
    assert isinstance(made.method.method, MCDropout)
    assert (made.method.size, made.method.method.rate, made.method.method.epochs) == (3, 0.3, 3)
    assert made.label == "Ensemble of 3 MC dropout (size=3, rate=0.3)"
    after = parse_spec("laplace,structure=diagonal,start.epochs=7", digits)
    assert isinstance(after.method, Laplace)
    assert isinstance(after.start, MAP)
    assert (after.method.structure, after.start.epochs) == ("diagonal", 7)
    wrapped = parse_spec("ensemble:laplace", digits)
    assert wrapped.start is None
    assert isinstance(wrapped.method, Ensemble)
    assert isinstance(wrapped.method.start, MAP)
    assert isinstance(parse_spec("ivon,epochs=4", digits).method, IVON)
    both = parse_spec("mc_dropout,weight_decay=1e-6,length_scale=0.01", digits).method  # refused one without the other
    assert isinstance(both, MCDropout)
    assert both.weight_decay == 1e-6


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("dropout", "did you mean 'mc_dropout'"),
        ("map,epoch=3", "did you mean 'epochs'"),
        ("map,epochs=many", "'many' is not of type int"),
        ("map,epochs", "name=value"),
        ("map,learning_rate=-1", "learning_rate must be positive"),
        ("laplace:map", "only ensemble wraps"),
        ("neural_linear", "does not support classification"),
        ("map,noise=shared", "only a regression"),
        ("map,start.epochs=3", "nothing is trained before"),
    ],
)
def test_what_cannot_be_run_is_refused_in_words(digits, spec, words):
    with pytest.raises(ValueError, match=words):
        parse_spec(spec, digits)


def test_values_have_the_types_of_their_fields():
    assert convert("0.5", float | None) == 0.5
    assert convert("5", int) == 5
    assert convert("False", bool) is False
    with pytest.raises(ValueError, match="is not of type int"):
        convert("0.5", int)


def test_dropout_goes_where_the_network_has_it_or_before_all_layers_but_the_first(digits):
    assert training_of(digits).dropout_at == "^(hidden2|output)$"
    own = replace(digits, build=lambda shape, outputs: torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Linear(64, outputs)))
    assert training_of(own).dropout_at is None


# Cells and the grid


@pytest.mark.filterwarnings("ignore:the weights are not at an optimum")  # after three epochs
def test_cells_are_made_once_and_only_what_changed_is_made_anew(digits, tmp_path, monkeypatch):
    made = []
    real = grid_module.fit
    monkeypatch.setattr(grid_module, "fit", lambda model, method, *a, **k: made.append(method) or real(model, method, *a, **k))
    before = torch.get_rng_state()
    first = small(digits, tmp_path, "map", "laplace").run(progress=False)
    assert torch.equal(before, torch.get_rng_state())
    assert [(c.key.label, c.key.seed) for c in first.results] == [("MAP", 0), ("MAP", 1), ("Laplace", 0), ("Laplace", 1)]
    made.clear()
    said: list[str] = []
    again = small(digits, tmp_path, "map", "laplace").run(progress=False, say=said.append)
    assert made == []
    assert said == ["4 of 4 results are already there"]
    for one, two in zip(first.results, again.results, strict=True):
        assert one.scores == pytest.approx(two.scores)
        assert torch.equal(one.arrays["probs"], two.arrays["probs"])
    more = small(digits, tmp_path, "map,epochs=2", "laplace", seeds=(0, 1, 2)).run(progress=False)
    assert len(more.results) == 6
    wanted = [method for method in made if not (isinstance(method, MAP) and method.epochs == 1)]  # without the warm-up
    assert [type(m).__name__ for m in wanted] == ["MAP", "MAP", "MAP", "MAP", "Laplace"]  # seed 2 has a start for Laplace, too
    other = replace(digits, split=lambda seed: digits.split(seed)._replace(x_test=1 - digits.split(seed).x_test))
    assert small(other, tmp_path, "map")._key(
        parse_spec("map", other), 0, other.split(0), other.split(0).checksum
    ).digest not in {cell.key.digest for cell in first.results}


def test_a_method_that_fails_is_noted_and_tried_again(digits, tmp_path, monkeypatch):
    real = grid_module.fit

    def fail(model, method, *args, seed=0, **more):
        if isinstance(method, MCDropout) and seed == 1:
            raise FloatingPointError("the steps are\ntoo large")
        return real(model, method, *args, seed=seed, **more)

    monkeypatch.setattr(grid_module, "fit", fail)
    outcome = small(digits, tmp_path, "mc_dropout", "map").run(progress=False)
    bad = [cell for cell in outcome.results if cell.error]
    assert [(cell.key.label, cell.key.seed) for cell in bad] == [("MC dropout", 1)]
    assert bad[0].error.startswith("FloatingPointError: the steps are too large (test_compare.py")
    assert json.loads(bad[0].key.path(tmp_path).read_text())["error"] == bad[0].error
    assert len(outcome.results) == 4
    monkeypatch.setattr(grid_module, "fit", real)
    assert not any(cell.error for cell in small(digits, tmp_path, "mc_dropout", "map").run(progress=False).results)


def test_an_interrupt_keeps_what_was_done_and_the_run_goes_on(digits, tmp_path, monkeypatch):
    real, calls = grid_module.fit, []

    def interrupted(*args, **more):
        calls.append(1)
        if len(calls) == 4:  # the warm-up comes first
            raise KeyboardInterrupt
        return real(*args, **more)

    monkeypatch.setattr(grid_module, "fit", interrupted)
    outcome = small(digits, tmp_path, "map", "mc_dropout").run(progress=False)
    assert outcome.interrupted
    assert [(c.key.label, c.key.seed) for c in outcome.results] == [("MAP", 0), ("MC dropout", 0)]  # all methods of a seed first
    monkeypatch.setattr(grid_module, "fit", real)
    said: list[str] = []
    rest = small(digits, tmp_path, "map", "mc_dropout").run(progress=False, say=said.append)
    assert said[0] == "2 of 4 results are already there"
    assert (len(rest.results), rest.interrupted, len(said)) == (4, False, 3)


def test_damaged_and_foreign_cells_are_made_again(tmp_path):
    key = Key("a", 0, {"x": 1})
    Result(key, {"nll": 1.0, "ece": math.nan}, 2.0, arrays={"y": torch.arange(3)}).write(tmp_path)
    read = Result.read(tmp_path, key)
    assert read is not None
    assert read.scores["nll"] == 1.0
    assert math.isnan(read.scores["ece"])
    assert Result.read(tmp_path, Key("a", 0, {"x": 2})) is None
    path = key.path(tmp_path)
    path.write_text(path.read_text()[:-20])
    assert Result.read(tmp_path, key) is None
    Result(key, {"nll": 1.0}, 2.0, arrays={"y": torch.arange(3)}).write(tmp_path)
    path.write_text(path.read_text().replace('"nll": 1.0', '"nll": {}'))
    assert Result.read(tmp_path, key) is None
    path.write_text(json.dumps({**json.loads(path.read_text()), "scores": None}))
    assert Result.read(tmp_path, key) is None
    Result(key, {"nll": 1.0}, 2.0, arrays={"y": torch.arange(3)}).write(tmp_path)
    path.with_suffix(".safetensors").unlink()
    assert Result.read(tmp_path, key) is None


def test_a_changed_bit_of_a_cell_is_noticed(tmp_path):
    key = Key("a", 0, {"x": 1})
    shift = {"noise": {1: {"nll": 0.3}, 10: {"nll": 0.4}}}
    Result(key, {"nll": 1.25}, 2.0, choice={"damping": 10.0}, shift=shift, arrays={"y": torch.arange(3)}).write(tmp_path)
    assert Result.read(tmp_path, key) is not None
    path = key.path(tmp_path)
    content = path.read_bytes()
    for bit in range(0, 8 * len(content), 13):
        path.write_bytes(content[: bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1 :])
        assert Result.read(tmp_path, key) is None, bit
    path.write_text(json.dumps({name: value for name, value in json.loads(content).items() if name != "checksum"}))
    assert Result.read(tmp_path, key) is not None, "files of version 0.1 have no checksum"


def test_a_grid_that_makes_no_sense_is_refused(digits, tmp_path):
    with pytest.raises(ValueError, match="duplicate method MAP"):
        small(digits, tmp_path, "map", "map")
    with pytest.raises(ValueError, match="nothing to compare"):
        small(digits, tmp_path)
    with pytest.raises(ValueError, match="duplicate seed"):
        small(digits, tmp_path, "map", seeds=(0, 0))
    with pytest.raises(ValueError, match="did you mean 'energy'"):
        replace(small(digits, tmp_path, "map"), detectors=("enrgy",))
    with pytest.raises(ValueError, match="2 published splits"):
        small(replace(digits, splits=2), tmp_path, "map", seeds=(0, 1, 2))


# Scores


def test_scores_are_those_of_the_metrics(digits):
    split = digits.split(0)
    noise = torch.rand(30, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    split = split._replace(unfamiliar={"noise": noise})
    made: Spec = parse_spec("mc_dropout,draws=5", digits)
    posterior = fit(made.model(digits, (1, 8, 8)), made.method, (split.x_train, split.y_train), progress=False)
    found = evaluate(posterior, digits, split, seed=0, corruptions=("contrast",), severities=(5,))
    p = posterior.predict(split.x_test)
    assert found.scores["nll"] == pytest.approx(float(metrics.nll(p, split.y_test)))
    wrong = p.mean.argmax(-1) != split.y_test
    assert found.scores["errors aurc"] == pytest.approx(float(metrics.aurc(p, wrong)))
    both = torch.cat([p.uncertainty.total, posterior.predict(noise).uncertainty.total])
    assert found.scores["noise auroc total"] == pytest.approx(float(metrics.auroc(both, torch.arange(110) >= 80)), abs=1e-6)
    assert set(found.shift["contrast"]) == {"0", "5"}
    assert found.shift["contrast"]["0"]["nll"] == pytest.approx(found.scores["nll"])
    assert found.scores["shifted nll"] == found.shift["contrast"]["5"]["nll"]
    torch.testing.assert_close(found.arrays["total"], found.arrays["aleatoric"] + found.arrays["epistemic"])


def test_detectors_and_confidence_learn_from_the_training_part_alone(digits, monkeypatch):
    monkeypatch.setattr(scoring, "ConfidNet", partial(failure.ConfidNet, (8,), epochs=2, tune_epochs=0))
    split = digits.split(0)._replace(unfamiliar={"noise": torch.rand(30, 1, 8, 8, generator=torch.Generator().manual_seed(0))})
    asked = {"detectors": ("mahalanobis", "msp"), "confidence": ("entropy", "confidnet")}
    train = (split.x_train, split.y_train)
    point, several = (
        fit((made := parse_spec(spec, digits)).model(digits, (1, 8, 8)), made.method, train, progress=False)
        for spec in ("map", "ensemble,size=2,epochs=1")
    )
    found = evaluate(point, digits, split, seed=0, **asked).scores
    score = ood.Mahalanobis().fit(point, train)
    expected = ood.detection(score(split.x_test), score(split.unfamiliar["noise"]))
    assert found["noise auroc mahalanobis"] == pytest.approx(expected.auroc)
    assert found["noise fpr95 mahalanobis"] == pytest.approx(expected.fpr95)
    p = point.predict(split.x_test)
    assert found["errors auroc by entropy"] == pytest.approx(
        failure.failures(p, split.y_test, names=["entropy"])["entropy"].auroc
    )
    learned = failure.ConfidNet((8,), epochs=2, tune_epochs=0).fit(point, train, seed=0, progress=False)
    wrong = failure.errors(p, split.y_test)
    assert found["errors aurc by confidnet"] == pytest.approx(failure.failure(learned(split.x_test), wrong).aurc)
    assert math.isnan(evaluate(several, digits, split, seed=0, confidence=("confidnet",)).scores["errors auroc by confidnet"])
    main = [score.key for score in scores([Result(Key("a", 0, {}), found)], "classification")[0]]
    assert {"noise auroc mahalanobis", "errors auroc by confidnet"} <= set(main)
    assert "noise auroc epistemic" not in main


def test_what_is_not_finite_is_a_failure_and_no_better_mean(digits):
    model = parse_spec("map", digits).model(digits, (1, 8, 8))
    lost = Point(model, {name: leaf * math.nan for name, leaf in model.parameters().items()}, {})
    with pytest.raises(FloatingPointError, match="not finite"):
        evaluate(lost, digits, digits.split(0), seed=0)


def test_nothing_of_a_table_is_cut_off_on_a_narrow_terminal():
    given = [cell("Ensemble of 5 MC dropout", seed, 0.9 + 0.01 * seed) for seed in range(2)]
    more = {f"{name} auroc total": 0.123456 for name in ("fashion-mnist", "kmnist", "notmnist", "cifar10")}
    given = [replace(one, scores={**one.scores, **more}) for one in given]
    why = Table("What failed", (Column("method"), Column("reason")), (("MAP", "the reason is so long that it is wrapped " * 3),))
    for cells in (given, given[:1]):
        main, _ = scores(cells, "classification")
        file = io.StringIO()
        Report("t", (Section("s", tables=(table("t", cells, main, seeds=len(cells)), why)),)).print(Console(file=file, width=60))
        assert "…" not in file.getvalue()
        assert file.getvalue().count("0.1235") == 4
        assert file.getvalue().count("wrapped") == 3


def test_correlation_with_people_is_that_of_scipy():
    a = torch.tensor([0.3, 0.1, 0.1, 0.9, 0.4, 0.0])
    b = torch.tensor([0.0, 0.0, 0.2, 0.5, 0.5, 0.1])
    found = agreement(a, b)
    assert found["human spearman"] == pytest.approx(spearmanr(a, b).statistic)
    assert found["human pearson"] == pytest.approx(pearsonr(a, b).statistic, abs=1e-6)
    assert math.isnan(agreement(torch.zeros(3), torch.rand(3))["human spearman"])


def test_a_difference_is_told_apart_as_by_a_paired_t_test():
    g = np.random.default_rng(0)
    for shift in (0.0, 0.3, 0.6, 1.0):
        a, b = g.normal(size=6), g.normal(size=6) * 0.5
        b = a + shift + 0.4 * b
        expected = bool(ttest_rel(a, b).pvalue < 0.05)
        assert differ(dict(enumerate(a)), dict(enumerate(b))) is expected
    assert differ({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0}) is False
    assert differ({0: 1.0, 1: 2.0}, {0: 2.0, 1: 3.0}) is True  # the same difference each time
    assert differ({0: 1.0}, {1: 2.0}) is None


def cell(label: str, seed: int, value: float | None) -> Result:
    error = None if value is not None else "ValueError: no"
    return Result(Key(label, seed, {}), {} if value is None else {"accuracy": value, "nll": 1 - value}, 1.0, error=error)


def test_the_table_has_means_errors_the_best_and_what_is_like_it():
    given = {"a": (0.90, 0.92, 0.91), "b": (0.91, 0.90, 0.925), "c": (0.5, 0.52, 0.51), "d": (0.9, None, None), "e": (None,) * 3}
    cells = [cell(label, seed, value) for label, row in given.items() for seed, value in enumerate(row)]
    main, more = scores(cells, "classification")
    assert [score.key for score in main] == ["accuracy", "nll", "seconds"]
    assert more == []
    made = table("t", cells, main, seeds=3)
    assert made.rows[0][1] == pytest.approx(0.91)
    assert made.errors[0][1] == pytest.approx(np.std([0.90, 0.92, 0.91], ddof=1) / 3**0.5)
    assert {place for place in made.best if place[1] < 3} == {(1, 1), (1, 2)}
    assert made.alike == {(0, 1), (0, 2), (3, 1), (3, 2)}  # c is worse; of d too little is known to tell, and of e nothing
    assert "d (1 of 3), e (0 of 3)" in table_caption(cells, 3, splits=False)
    assert "Not all" not in table_caption(cells[:9], 3, splits=False)
    assert [made.text(4, j) for j in range(3)] == ["e", "–", "–"]
    assert "±" not in made.text(3, 1)
    assert table("t", cells[::3], main, seeds=1).errors == ()


def intervals(label: str, coverage: float, width: float, *, targets: int, seeds: int = 3) -> list[Result]:
    """The results of a method with such intervals; later seeds are a little wider."""
    made = {"nll": 1.0, "ece": 0.1, "quantile_error": 0.1 - coverage / 10, "coverage": coverage}
    return [
        Result(
            Key(label, seed, {}),
            {**made, "width": width + 0.01 * seed, "sharpness": width / 3 + 0.01 * seed},
            1.0,
            arrays={"y": torch.zeros(targets, 1)},
        )
        for seed in range(seeds)
    ]


@pytest.mark.parametrize(
    ("coverage", "targets", "fair"),
    [
        (0.2, 1000, False),
        (0.86, 1000, False),  # 3 % too few
        (0.88, 1000, True),
        (0.86, 30, True),  # two standard errors of 90 targets are 6 %
        (0.83, 30, False),
        (0.94, 1000, False),  # too many is no calibration either
        (math.nan, 1000, False),
    ],
)
def test_narrow_intervals_are_the_best_only_if_they_cover(coverage, targets, fair):
    made = [*intervals("narrow", coverage, 0.1, targets=targets), *intervals("honest", 0.9, 1.0, targets=targets)]
    main, more = scores(made, "regression")
    columns = [score.key for score in (*main, *more)]
    shown = table("t", made, (*main, *more), seeds=3)
    bold = {(columns[j - 1], i) for i, j in shown.best}
    marked = bold | {(columns[j - 1], i) for i, j in shown.alike}
    for width in ("width", "sharpness"):
        assert {i for name, i in marked if name == width} == ({0} if fair else {1})
        assert {i for name, i in bold if name == width} == ({0} if fair else {1})
    assert not {name for name, _ in marked} & {"coverage", "quantile_error", "ece"}
    html = Report("t", (Section("s", tables=(shown,)),)).html()
    assert html.count('class="best"') == len(shown.best)
    file = io.StringIO()
    Report("t", (Section("s", tables=(shown,)),)).print(Console(file=file, width=400))
    assert file.getvalue().split("Mean")[0].count("*") == len(shown.best)


def test_where_no_interval_covers_none_is_the_best():
    made = [*intervals("narrow", 0.2, 0.1, targets=1000), *intervals("wide", 1.0, 9.0, targets=1000)]
    main, _ = scores(made, "regression")
    place = 1 + [score.key for score in main].index("width")
    shown = table("t", made, main, seeds=3)
    assert place not in {j for _, j in (*shown.best, *shown.alike)}


def test_means_leave_out_what_is_not_known():
    assert Mean.of([1.0, math.nan, 3.0]) == Mean(2.0, 1.0, 2)
    assert Mean.of([]).n == 0


@pytest.mark.parametrize(
    "key",
    [
        "accuracy",
        "errors fpr95",
        "errors aurc by confidnet",
        "human pearson",
        "shifted nll",
        "kmnist auroc total",
        "kmnist auroc relative_mahalanobis",
        "kmnist fpr95",
        "kmnist fpr95 energy",
        "errors auroc total",  # of a file that is called errors, and so on
        "shifted auroc total",
        "human fpr95",
        "seconds",
    ],
)
def test_every_score_has_a_name_a_direction_and_a_meaning(key):
    found = describe(key)
    assert found.name
    assert found.better in ("higher", "lower")
    assert found.meaning


# Problems


def test_tables_are_standardised_by_their_training_rows_and_judged_in_their_own_units():
    g = torch.Generator().manual_seed(0)
    x, y = 5 + 3 * torch.randn(50, 3, generator=g), 100 + 20 * torch.randn(50, 1, generator=g)
    strange = 9 + torch.randn(4, 3, generator=g)
    given = of_table("t.csv", data.Table(x, y, ("a", "b", "c"), ("price",), ()), unfamiliar={"far": strange})
    one, other = given.split(0), given.split(1)
    assert one.x_train.shape == (40, 3)
    torch.testing.assert_close(one.x_train.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    assert one.scale is not None
    torch.testing.assert_close(one.y_train.std(0, correction=0), torch.ones(1))
    assert float(one.y_test.mean()) > 50
    assert one.unfamiliar["far"].abs().max() < 10
    assert one.checksum == given.split(0).checksum != other.checksum
    assert given.outputs == ("price",)
    with pytest.raises(ValueError, match="must leave both training and test rows"):
        of_table("t.csv", data.Table(x, y, (), ("y",), ()), held_out=1.0)


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_a_table_keeps_its_digits_until_it_is_standardised(tmp_path, kind):
    path = tmp_path / "t.csv"
    path.write_text("t,y\n" + "".join(f"{1_700_000_000 + i},{10**9 + i % 2}\n" for i in range(50)))
    split = of_table("t.csv", data.table(path, kind=kind, dtype=torch.float64)).split(0)
    assert split.x_train.dtype == split.x_test.dtype == torch.float32
    assert len(split.x_train.unique()) == 40
    if kind == "classification":
        return
    assert split.y_train.dtype == torch.float32
    assert len(split.y_train.unique()) == len(split.y_test.unique()) == 2
    assert split.shift is not None
    assert float(split.shift) == pytest.approx(1e9 + 0.5, abs=0.5)


@pytest.mark.filterwarnings("ignore:the weights are not at an optimum")  # after twenty epochs
@pytest.mark.parametrize(("name", "kind"), [("map", "regression"), ("laplace", "classification"), ("swag", "regression")])
def test_compare_fits_what_fit_fits(name, kind, tmp_path, monkeypatch):
    """With seed 0 also on the same rows, so that the scores are the same."""
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).normal(size=(80, 2))
    y = x[:, 0] + np.sin(3 * x[:, 1]) if kind == "regression" else (x[:, 0] > 0.3 * x[:, 1]).astype(int)
    Path("t.csv").write_text("a,b,y\n" + "".join(f"{a},{b},{c}\n" for (a, b), c in zip(x, y, strict=True)))
    ours = ["--epochs", "20", "--start.epochs", "20"] if name == "swag" else ["--epochs", "20"]
    assert main(["fit", name, "t.csv", "--target", "y", "--out", "fitted", "--batch-size", "16", *ours]) == 0
    fitted = json.loads(Path("fitted/fit.json").read_text())
    given = of_table("t.csv", data.table("t.csv", kind=kind, dtype=torch.float64), batch_size=16)
    given = replace(given, training=given.training._replace(epochs=20))
    (made,) = small(given, tmp_path, f"{name},epochs=20" if name == "swag" else name, seeds=(0,)).run(progress=False).results
    assert fitted["training"]["batch_size"] == given.training.batch_size == 16
    shared = {key: value for key, value in fitted["metrics"].items() if key in made.scores}
    assert len(shared) > 3
    assert {key: made.scores[key] for key in shared} == pytest.approx(shared, rel=1e-4)


def test_limits_and_sizes(digits):
    split = digits.split(3)
    assert (len(split.x_train), len(split.x_test)) == (120, 80)
    assert digits.split(3).checksum == split.checksum
    # rows come sorted by their class in many a file
    ordered = of_table("t.csv", data.Table(torch.randn(90, 2), torch.arange(90) // 30, ("a", "b"), ("y",), ("0", "1", "2")))
    few = replace(ordered, people=torch.arange(18.0)).limited(None, 9)
    assert len(few.split(0).y_test.unique()) == 3
    assert torch.equal(few.people, torch.arange(18.0)[(ordered.split(0).x_test[:, None] == few.split(0).x_test).all(-1).any(1)])
    with pytest.raises(ValueError, match="is a table, and kmnist has other inputs"):
        problem("uci:yacht", unfamiliar=("kmnist",))
    assert resized(torch.rand(2, 1, 28, 28), (3, 32, 32)).shape == (2, 3, 32, 32)
    with pytest.raises(ValueError, match="no data set is called 'mnits'"):
        problem("mnits")
    with pytest.raises(ValueError, match="no image set"):
        problem("digits", unfamiliar=("letters",)).split(0)


# Fits in one stack


@pytest.fixture(scope="module")
def splits() -> Problem:
    """A table with three published splits, so to say."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2, generator=g)
    y = 3 + 2 * (x[:, :1] - x[:, 1:].sin()) + 0.3 * torch.randn(60, 1, generator=g)
    made = of_table("uci:yacht", data.Table(x, y, ("a", "b"), ("y",), ()))
    return replace(made, splits=3, hidden=(64, 64), training=made.training._replace(epochs=4))


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_stack_makes_what_fit_makes(splits, clip):
    made = parse_spec("map,epochs=6", splits)
    model = made.model(splits, (2,))
    parts = [splits.split(seed) for seed in range(2)]
    method = replace(made.method, clip=clip)
    tasks = [Task(split.x_train, split.y_train, seed, prior=model.prior) for seed, split in enumerate(parts)]
    # one batch is all of the data, so that the order of the rows does not matter
    start = train(model, tasks, method, epochs=0, batch_size=1000, tell=lambda share: None)
    found = train(model, tasks, method, epochs=6, batch_size=1000, tell=lambda share: None)
    for i, split in enumerate(parts):
        own = {name: leaf[i] for name, leaf in start.items()}
        alone = fit(model, method, (split.x_train, split.y_train), start=own, batch_size=1000, progress=False)
        for name, leaf in alone.params.items():
            torch.testing.assert_close(found[name][i], leaf, atol=2e-5, rtol=1e-4)


def test_a_stack_of_dropout_has_the_noise_and_the_prior_of_the_paper(splits):
    made = parse_spec("mc_dropout", splits)
    model, split = made.model(splits, (2,)), splits.split(0)
    n, decay = len(split.x_train), 1e-3
    method = replace(made.method, epochs=5, rate=0.0, length_scale=0.5, weight_decay=decay)
    precision = dropout_precision(length_scale=0.5, keep=1.0, n_data=n, weight_decay=decay)
    task = Task(split.x_train, split.y_train, 0, precision=precision, prior=Normal(scale=2.0))
    start = train(model, [task], method, epochs=0, batch_size=1000, tell=lambda share: None)
    found = train(model, [task], method, epochs=5, batch_size=1000, tell=lambda share: None)
    own = {name: leaf[0] for name, leaf in start.items()}
    alone = fit(model, method, (split.x_train, split.y_train), start=own, batch_size=1000, progress=False)
    for name, leaf in alone.params.items():
        torch.testing.assert_close(found[name][0], leaf, atol=2e-5, rtol=1e-4)
    assert float(found[PREFIX + "log_scale"][0]) == pytest.approx(-0.5 * math.log(precision))


def test_splits_and_grid_points_are_fitted_together_and_the_test_part_chooses_nothing(splits):
    parts = {seed: splits.split(seed) for seed in range(3)}
    for spec, size in (("mc_dropout,draws=20", 12), ("ensemble,size=2", 6), ("map", 3)):
        made = parse_spec(spec, splits)
        assert is_stackable(made, splits)
        assert len(made.grid) == size
    assert not is_stackable(parse_spec("laplace", splits), splits)
    assert not is_stackable(parse_spec("ensemble,size=2,bagging=yes", splits), splits)
    shares: list[float] = []
    made = parse_spec("ensemble,size=2", splits)
    found = fit_splits(made, splits, parts, tell=shares.append)
    assert shares == sorted(shares)
    assert set(found) == {0, 1, 2}
    for seed in parts:
        wide = 2 if found[seed].choice["heteroscedastic"] else 1
        assert found[seed].posterior.predict(parts[seed].x_test).means.shape == (2, 12, wide)
    assert parse_spec("ensemble,noise=heteroscedastic,epochs=3", splits).noise == "heteroscedastic"
    blind = {
        seed: split._replace(x_test=split.x_test * math.nan, y_test=split.y_test * math.nan) for seed, split in parts.items()
    }
    again = fit_splits(made, splits, blind)
    for seed in parts:
        assert again[seed].choice == found[seed].choice
        torch.testing.assert_close(again[seed].posterior.params, found[seed].posterior.params)
    inner = inner_split(parts[0], 0)
    assert (len(inner.x_train), len(inner.x_test)) == (39, 9)


def test_a_split_that_runs_away_takes_no_other_along(splits, tmp_path):
    """And a point of the grid that does is not chosen."""

    def split(seed: int) -> Split:
        own = splits.split(seed)
        return own._replace(y_train=own.y_train * math.inf) if seed == 1 else own

    lost = replace(splits, split=split)
    made = parse_spec("map", lost)
    grid = Grid(lost, (made,), (0, 1, 2), tmp_path)
    outcome = grid.run(progress=False)
    assert [cell.error is None for cell in outcome.results] == [True, False, True]
    assert "no longer finite" in outcome.results[1].error


def test_the_grid_of_a_uci_set_is_filled_by_stacks(data_root, tmp_path):
    yacht = problem("uci:yacht")
    assert (yacht.splits, yacht.hidden, yacht.split(1).x_train.shape) == (20, (50,), (277, 6))
    yacht = replace(yacht, training=yacht.training._replace(epochs=2))
    grid = Grid(yacht, (parse_spec("mc_dropout,draws=10", yacht), parse_spec("map", yacht)), (0, 1), tmp_path)
    outcome = grid.run(progress=False)
    assert [cell.error for cell in outcome.results] == [None] * 4
    assert set(outcome.results[0].choice) == {"rate", "precision"}
    assert outcome.results[0].scores["rmse"] > 1  # in metres a second, not standardised


def test_rows_that_leave_the_posterior_or_are_tuned_say_so(digits, splits):
    assert parse_spec("laplace", digits).title == "Laplace"
    assert parse_spec("laplace,damping=10", digits).title == "Laplace (damping=10) [generalized]"
    assert parse_spec("ensemble:variational,kl_weight=0.1", digits).title.endswith("[tempered]")
    assert parse_spec("map", splits).title == "MAP [tuned]"
    caption = departures_caption([parse_spec("laplace,damping=10", digits), parse_spec("map", splits)])
    assert "Laplace (damping=10): generalized (damping = 10)" in caption
    assert "Tuned on held-out training rows: MAP." in caption
    assert departures_caption([parse_spec("map", digits)]) == ""
