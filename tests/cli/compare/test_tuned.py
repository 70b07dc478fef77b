"""Rows that are tuned on held-out training rows: a temperature, a scale of the noise, and the recipe for tables."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import dubito
from dubito import data, metrics, recalibrate
from dubito.cli.compare.grid import Fits
from dubito.cli.compare.recipe import TableRecipe, columns_of, joined
from dubito.cli.compare.stacked import fit_splits, inner_split
from dubito.cli.compare.summary import departures_caption
from dubito.cli.program import main
from dubito.compare import Grid, of_table, parse_spec, problem


@pytest.fixture(scope="module")
def digits():
    return problem("digits").limited(120, 80)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr("dubito.apps.tables.fit._steps", lambda network, settings, rows: 60)


def numbers(splits: int | None = None):
    """A table of numbers, which may have published splits, so to say."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(90, 2, generator=g)
    y = 3 + 2 * (x[:, :1] - x[:, 1:].sin()) + 0.3 * torch.randn(90, 1, generator=g)
    made = of_table("uci:yacht", data.Table(x, y, ("a", "b"), ("y",), ()))
    hidden = None if splits is None else (64, 64)
    return replace(made, splits=splits, hidden=hidden, training=made.training._replace(epochs=4))


def written(path: Path, rows: int = 80, seed: int = 0) -> list[list[str]]:
    """A table with words, empty cells and a class, as lines."""
    g = np.random.default_rng(seed)
    lines = [["size", "city", "kind"]]
    for _ in range(rows):
        size, city = g.normal(), g.choice(["Rome", "Oslo"])
        kind = "yes" if size + (city == "Rome") + 0.5 * g.normal() > 0.5 else "no"
        lines.append(["" if g.random() < 0.1 else f"{size:.3f}", str(city), kind])
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(lines)
    return lines


def test_rows_say_what_is_tuned(digits):
    plain, made = parse_spec("map,epochs=3", digits), parse_spec("map+temperature,epochs=3", digits)
    assert (made.label, made.title) == ("MAP + temperature (epochs=3)", "MAP + temperature (epochs=3) [tuned]")
    assert made.method == plain.method
    assert made.settings == {**plain.settings, "recalibrated": True}
    assert parse_spec("ensemble:mc-dropout+temperature", digits).label == "Ensemble of 5 MC dropout + temperature"
    assert parse_spec("ensemble+temperature", numbers()).label == "Ensemble of 5 + noise scale"
    table = parse_spec("table,budget=30", numbers())
    assert (table.title, table.method) == ("Table recipe (budget=30) [tuned]", TableRecipe(30.0))
    caption = departures_caption([plain, made, table])
    assert "MAP + temperature (epochs=3), Table recipe (budget=30)" in caption
    assert "`map+temperature`" in caption


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("map+temprature", r"only \+temperature can follow"),
        ("table+temperature", "is calibrated already"),
        ("table,epochs=3", "no option is called 'epochs'"),
        ("table,budget=-1", "budget must be positive"),
        ("table", "digits has inputs"),
        ("tabel", "did you mean 'table'"),
    ],
)
def test_what_makes_no_sense_is_refused(digits, spec, words):
    with pytest.raises(ValueError, match=words):
        parse_spec(spec, digits)


def test_a_temperature_is_that_of_held_out_training_rows(digits, tmp_path):
    digits = replace(digits, training=digits.training._replace(epochs=20))
    specs = tuple(parse_spec(text, digits) for text in ("map", "map+temperature"))
    plain, tuned = Grid(digits, specs, (0,), tmp_path).run(progress=False).results
    split = digits.split(0)
    held = inner_split(split, 0)
    other = Fits(digits, 0)(specs[0], held).posterior
    fix = recalibrate.Temperature().fit(other.predict(held.x_test), held.y_test)
    assert tuned.choice == {"temperature": pytest.approx(fix.temperature, rel=1e-4)}
    assert abs(fix.temperature - 1) > 0.01
    p = fix(Fits(digits, 0)(specs[0], split).posterior.predict(split.x_test))
    assert tuned.scores["nll"] == pytest.approx(float(metrics.nll(p, split.y_test)), rel=1e-4)
    assert tuned.scores["accuracy"] == plain.scores["accuracy"]  # the same network, fitted to all rows
    assert tuned.scores["nll"] != pytest.approx(plain.scores["nll"], rel=1e-3)
    blind = replace(digits, split=lambda seed: split._replace(y_test=split.y_test.flip(0)))
    assert Fits(blind, 0)(specs[1], blind.split(0)).choice == tuned.choice
    assert tuned.key.digest != plain.key.digest


def test_a_scale_of_the_noise_is_that_of_held_out_training_rows():
    table = numbers()
    spec = parse_spec("map+temperature,epochs=3", table)
    split = table.split(0)
    made, plain = Fits(table, 0)(spec, split), replace(spec, recalibrated=False)
    held = inner_split(split, 0)
    p = Fits(table, 0)(plain, held).posterior.predict(held.x_test)
    expected = ((held.y_test - p.mean) ** 2 / p.uncertainty.total).mean().sqrt()
    assert made.choice == {"scale": pytest.approx(float(expected), rel=1e-4)}
    before, after = (made.posterior.predict(split.x_test), made.fix(made.posterior.predict(split.x_test)))
    torch.testing.assert_close(after.mean, before.mean)
    torch.testing.assert_close(after.uncertainty.total, before.uncertainty.total * expected**2, rtol=1e-4, atol=1e-6)


def test_the_fits_of_a_stack_are_recalibrated_alike():
    table = numbers(splits=2)
    spec = parse_spec("ensemble+temperature,size=2", table)
    parts = {seed: table.split(seed) for seed in range(2)}
    found, plain = fit_splits(spec, table, parts), fit_splits(replace(spec, recalibrated=False), table, parts)
    for seed, made in found.items():
        assert {name: value for name, value in made.choice.items() if name != "scale"} == plain[seed].choice
        assert made.choice["scale"] > 0
        assert made.fix(made.posterior.predict(parts[seed].x_test)).uncertainty.total.isfinite().all()
        torch.testing.assert_close(made.posterior.params, plain[seed].posterior.params, rtol=1e-3, atol=1e-4)


def test_without_errors_a_prediction_stays_as_it_is(digits):
    spec, split = parse_spec("map,epochs=1", digits), digits.split(0)
    made = Fits(digits, 0)(spec, split)
    right = split._replace(y_test=made.posterior.predict(split.x_test).mean.argmax(-1))
    assert made.recalibrated(made.posterior, right, seed=0) == made


@pytest.mark.usefixtures("short")
def test_the_table_recipe_fits_what_fit_fits(tmp_path, monkeypatch):
    """Words, empty cells and all: the cell has the scores of `dubito fit TABLE` on a file of the training rows."""
    monkeypatch.chdir(tmp_path)
    lines = written(Path("t.csv"))
    written(Path("far.csv"), rows=7, seed=1)
    asked = ["--data", "t.csv", "--target", "kind", "--seeds", "1", "--unfamiliar", "far.csv", "--out", "out", "--quiet"]
    assert main(["compare", *asked, "--methods", "table", "map,epochs=2", "--detectors", "neighbours"]) == 0
    (path,) = Path("out/cells").glob("table*.json")
    cell = json.loads(path.read_text())
    assert cell["error"] is None

    given = of_table("t.csv", data.table("t.csv", "kind", kind="classification", dtype=torch.float64))
    rows = given.split(0).rows
    for name, part in {"train": rows.train, "test": rows.test}.items():
        with Path(f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([lines[0], *(lines[1 + i] for i in part.tolist())])
    assert main(["fit", "train.csv", "--target", "kind", "--out", "fitted"]) == 0
    model = dubito.TableModel.load("fitted/table.safetensors")
    p, far = model.predict("test.csv"), model.predict("far.csv")
    y = model.encode_targets({"kind": [lines[1 + i][2] for i in rows.test.tolist()]})
    assert cell["scores"]["nll"] == pytest.approx(float(metrics.nll(p, y)), rel=1e-4)
    assert cell["scores"]["ece"] == pytest.approx(float(metrics.ece(p, y)), rel=1e-4)
    both = torch.cat([p.uncertainty.total, far.uncertainty.total])
    assert cell["scores"]["far auroc total"] == pytest.approx(float(metrics.auroc(both, torch.arange(len(both)) >= len(y))))
    assert cell["scores"]["far auroc neighbours"] is None  # which are those of a network's features


@pytest.mark.usefixtures("short")
def test_the_table_recipe_has_new_cells_where_the_columns_change(tmp_path):
    """Also where the inputs of the networks stay as they were."""
    table = numbers()
    x = torch.cat([table.split(0).x_train, table.split(0).x_test])
    frames = [dubito.apps.tables.frames.as_frame({"a": x[:, 0] + i, "y": x[:, 1]}) for i in range(2)]
    digests = set()
    for frame in frames:
        own = replace(table, columns=lambda frame=frame: dubito.evaluation.problems.Columns(frame, ("y",)))
        grid = Grid(own, (parse_spec("table", own),), (0,), tmp_path)
        digests.add(grid._key(grid.specs[0], 0, own.split(0), "").digest)
    assert len(digests) == 2


@pytest.mark.usefixtures("short")
def test_without_a_file_the_recipe_takes_the_inputs_of_the_network():
    table = numbers()
    split = table.split(0)
    made = Fits(table, 0)(parse_spec("table", table), split)
    y = split.shift + split.scale * split.y_train
    model = dubito.fit_table(split.x_train, y, kind="regression", show=False)
    assert made.split.shift is None
    torch.testing.assert_close(made.posterior(made.split.x_test).mean, model.predict(split.x_test).mean, rtol=1e-5, atol=1e-5)
    columns, rows = columns_of(table, split)
    assert all(math.isnan(columns.cells["y0"][i]) for i in rows.test.tolist())  # which the recipe cannot see


def test_limits_keep_rows_and_inputs_together(tmp_path):
    path = tmp_path / "t.csv"
    lines = written(path)
    limited = of_table("t.csv", data.table(path, "kind", kind="classification")).limited(20, 10).split(1)
    kinds = ["no", "yes"]
    assert [lines[1 + i][2] for i in limited.rows.train.tolist()] == [kinds[k] for k in limited.y_train.tolist()]
    assert [lines[1 + i][2] for i in limited.rows.test.tolist()] == [kinds[k] for k in limited.y_test.tolist()]


def test_tables_are_joined_by_their_columns():
    below = joined([{"a": np.array([1.0]), "b": ["x"], "y": np.array([0.5])}, {"b": np.array([2.0]), "a": np.array([3.0])}])
    assert below["b"] == ["x", "2"]
    np.testing.assert_array_equal(below["a"], [1.0, 3.0])
    np.testing.assert_array_equal(below["y"], [0.5, math.nan])
