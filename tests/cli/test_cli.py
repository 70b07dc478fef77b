"""The command line, from end to end on real tables."""

import csv
import dataclasses
import json
import math
import os
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes, load_digits, load_iris, load_wine

import dubito
from dubito.cli.commands.fitted import Reading
from dubito.cli.commands.flags import headline
from dubito.cli.commands.notes import notes
from dubito.cli.commands.options import PlainStartFlags, parse_options
from dubito.cli.commands.predict import _text
from dubito.cli.commands.recipe import Scaling, _contrast
from dubito.cli.program import main
from dubito.inference.descent import Descent
from dubito.inference.presets import chain, preset, table_training
from dubito.inference.registry import METHODS
from dubito.posteriors import Samples
from dubito.tensors import store

QUICK = ["--hidden", "16", "--learning-rate", "0.01"]
PROGRAM = [sys.executable, "-c", "import sys; from dubito.cli import main; sys.exit(main())"]


def write(path: Path, x, y, names, target: str) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*names, target])
        writer.writerows([*map(float, row), label] for row, label in zip(x, y, strict=True))
    return path


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> Path:
    """A folder with real tables: iris (classes by name), wine (by number), diabetes (a regression), digits (images)."""
    folder = tmp_path_factory.mktemp("tables")
    iris, wine, diabetes, digits = load_iris(), load_wine(), load_diabetes(scaled=False), load_digits()
    write(folder / "iris.csv", iris.data, iris.target_names[iris.target], ["a", "b", "c", "d"], "species")
    write(folder / "wine.csv", wine.data, wine.target, wine.feature_names, "cultivar")
    write(folder / "diabetes.csv", diabetes.data, diabetes.target, diabetes.feature_names, "progression")
    np.savez(folder / "digits.npz", x=digits.images[:200, None].astype(np.float32), y=digits.target[:200])
    return folder


@pytest.fixture
def cli(capsys):
    """Runs the command line in this process: (exit code, standard output, standard error)."""

    def run(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def ok(cli):
    """Runs the command line, which must succeed and be silent on standard error; returns standard output."""

    def run(*args: object) -> str:
        code, out, err = cli(*args)
        assert (code, err) == (0, "")
        return out

    return run


@pytest.fixture
def refused(cli):
    """Runs the command line, which must refuse its input in one line; returns the line."""

    def run(*args: object) -> str:
        code, _, err = cli(*args)
        assert code == 2
        assert err.startswith("dubito: ")
        assert err.count("\n") == 1
        assert err.endswith("\n")
        return err

    return run


@pytest.fixture(scope="module")
def fitted(tables, tmp_path_factory) -> Path:
    """A small fit of iris."""
    folder = tmp_path_factory.mktemp("fitted") / "iris"
    args = ["fit", "map", tables / "iris.csv", "--target", "species", "--out", folder, "--epochs", "20", *QUICK]
    assert main([str(arg) for arg in args]) == 0
    return folder


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


def column(predictions: list[dict[str, str]], name: str) -> np.ndarray:
    return np.array([float(row[name]) for row in predictions])


def test_classes_that_look_like_formulas_are_escaped(ok, tmp_path):
    data = write(tmp_path / "a.csv", [[0.0], [1.0]] * 4, ["=A1+1", "-1"] * 4, ["x"], "y")
    ok("fit", "map", data, "--target", "y", "--out", tmp_path / "out", "--epochs", 30, *QUICK)
    predictions = rows(ok("predict", tmp_path / "out", data))
    assert {row["class"] for row in predictions} == {"'=A1+1", "-1"}
    assert {"p_=A1+1", "p_-1"} < set(predictions[0])


@pytest.mark.parametrize("module", ["dubito", "dubito.cli"])
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_run_as_a_module(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dubito", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code == 0
    assert dubito.__version__ in capsys.readouterr().out


# Round trips


def test_regression_round_trip(ok, tables, tmp_path):
    data, folder = tables / "diabetes.csv", tmp_path / "out"
    out = ok("fit", "map", data, "--target", "progression", "--out", folder, "--epochs", 40, *QUICK)
    assert "442 rows, 10 inputs" in out
    assert "progression: regression (whole numbers, 214 different ones; otherwise give --kind classification)" in out
    assert "354 training rows, 88 held-out rows" in out
    assert sorted(path.name for path in folder.iterdir()) == ["fit.json", "posterior.safetensors"]

    predictions = rows(ok("predict", folder, data))
    truth = column(rows(data.read_text()), "progression")
    mean, total = column(predictions, "mean"), column(predictions, "total")
    assert list(predictions[0]) == ["mean", "lower", "upper", "total", "aleatoric", "epistemic"]
    assert len(predictions) == 442
    np.testing.assert_allclose(total, column(predictions, "aleatoric") + column(predictions, "epistemic"), rtol=1e-5)
    np.testing.assert_allclose(column(predictions, "upper") - mean, 1.644854 * np.sqrt(total), rtol=1e-4)  # 90 %

    scores = json.loads(ok("evaluate", folder, data, "--json"))
    rmse = np.sqrt(np.mean((mean - truth) ** 2))
    assert scores["rows"] == 442
    assert scores["rmse"] == pytest.approx(rmse, rel=1e-4)
    assert rmse < 0.75 * truth.std()
    nll = np.mean(0.5 * (mean - truth) ** 2 / total + 0.5 * np.log(2 * math.pi * total))
    assert scores["nll"] == pytest.approx(nll, rel=1e-4)
    assert 0.8 < scores["coverage"] <= 1
    table = ok("evaluate", folder, data)
    assert all(name in table for name in ("nll", "rmse", "crps", "coverage", "width"))


def test_units_are_those_of_the_target(ok, tables, tmp_path):
    diabetes = load_diabetes(scaled=False)
    scale = 1024.0  # a power of two: the standardised targets are the same bits
    data = write(tmp_path / "big.csv", diabetes.data, diabetes.target * scale, diabetes.feature_names, "progression")
    scores, means = [], []
    for path in (tables / "diabetes.csv", data):
        folder = tmp_path / path.stem
        ok("fit", "ensemble", path, "--target", "progression", "--out", folder, "--epochs", 5, "--size", 2, *QUICK)
        scores.append(json.loads((folder / "fit.json").read_text())["metrics"])
        means.append(column(rows(ok("predict", folder, path)), "mean"))
    small, big = scores
    for name in ("rmse", "crps", "width"):
        assert big[name] == pytest.approx(scale * small[name], rel=1e-4)
    assert big["coverage"] == small["coverage"]
    assert big["nll"] == pytest.approx(small["nll"] + math.log(scale), rel=1e-5)
    np.testing.assert_allclose(means[1], scale * means[0], rtol=1e-5)


@pytest.mark.parametrize(("offset", "scale"), [(0.0, 1.0), (1e9, 1.0), (0.0, 1e28)])
def test_columns_far_from_zero_keep_their_digits(ok, tmp_path, offset, scale):
    step = np.arange(200)
    truth = offset + scale * (step * 0.5 + 0.25)
    data, folder = tmp_path / "t.csv", tmp_path / "out"
    data.write_text("t,price\n" + "".join(f"{1_700_000_000 + i},{float(y)!r}\n" for i, y in zip(step, truth, strict=True)))
    ok("fit", "map", data, "--target", "price", "--out", folder, "--epochs", 60, *QUICK)
    predictions = rows(ok("predict", folder, data))
    mean, lower, upper, total = (column(predictions, name) for name in ("mean", "lower", "upper", "total"))
    assert np.sqrt(np.mean((mean - truth) ** 2)) < 2 * scale  # the deviation of the targets is 29
    np.testing.assert_allclose(upper - lower, 2 * 1.644854 * np.sqrt(total), rtol=1e-4)
    assert np.isfinite(total).all()
    scores = json.loads(ok("evaluate", folder, data, "--json"))
    assert scores["rmse"] == pytest.approx(np.sqrt(np.mean((mean - truth) ** 2)), rel=1e-4)
    assert math.isfinite(scores["nll"])


def test_scaling():
    x = torch.stack(
        [1.7e9 + torch.arange(4).double(), torch.tensor([0.1 + 0.2, 0.3, 0.3, 0.3]).double(), torch.ones(4).double()], 1
    )
    scaling = Scaling.of(x)
    assert scaling.mean[0] == 1.7e9 + 1.5
    assert scaling.scale[1:] == (1, 1)  # constants, but for their rounding
    assert scaling.apply(x).dtype == torch.float32
    torch.testing.assert_close(scaling.apply(x)[:, 0], (torch.arange(4) - 1.5) / 1.25**0.5)
    assert Scaling.of(torch.tensor([[1e-200], [2e-200]], dtype=torch.float64)).scale == (1,)


def test_digits_tell_lower_from_upper():
    assert _text(1.5, 1.25, 1.75, 1 / 3) == ["1.5", "1.25", "1.75", "0.3333333"]
    assert _text(1e9 + 1 / 3, 1e9, 1e9 + 1) == ["1000000000.333333", "1000000000", "1000000001"]
    assert _text(1.0, 1.0, 1.0) == ["1", "1", "1"]
    assert _text(1.0, -math.inf, math.inf, math.inf) == ["1", "-inf", "inf", "inf"]
    assert _text(math.nan, math.nan, math.nan) == ["nan", "nan", "nan"]


def test_classification_round_trip_with_names_of_classes(ok, tables, tmp_path):
    data, folder, predictions = tables / "iris.csv", tmp_path / "deep" / "out", tmp_path / "p" / "predictions.csv"
    out = ok("fit", "map", data, "--target", "species", "--out", folder, "--epochs", 30, *QUICK)
    assert "species: classification with 3 classes (text; otherwise give --kind regression)" in out
    assert main(["predict", str(folder), str(data), "--out", str(predictions)]) == 0
    found, truth = rows(predictions.read_text()), [row["species"] for row in rows(data.read_text())]
    assert list(found[0]) == ["class", "p_setosa", "p_versicolor", "p_virginica", "total", "aleatoric", "epistemic"]
    probs = np.stack([column(found, f"p_{name}") for name in ("setosa", "versicolor", "virginica")], 1)
    np.testing.assert_allclose(probs.sum(1), 1, rtol=1e-5)
    np.testing.assert_allclose(column(found, "total"), -(probs * np.log(probs)).sum(1), rtol=1e-3, atol=1e-6)
    scores = json.loads(ok("evaluate", folder, data, "--json"))
    accuracy = np.mean([row["class"] == label for row, label in zip(found, truth, strict=True)])
    assert scores["accuracy"] == pytest.approx(accuracy)
    assert accuracy > 0.85


def test_the_order_of_columns_and_further_ones_do_not_matter(ok, fitted, tables, tmp_path):
    original = rows((tables / "iris.csv").read_text())
    with (tmp_path / "new.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["d", "note", "b", "a", "c"])
        writer.writeheader()
        writer.writerows({key: row.get(key, "text") for key in ("d", "note", "b", "a", "c")} for row in original)
    assert ok("predict", fitted, tmp_path / "new.csv") == ok("predict", fitted, tables / "iris.csv")


def test_text_and_missing_cells(ok, refused, tmp_path):
    lines = [f"{'' if i % 5 == 0 else i % 7},{('Oslo', 'Rome', 'NA')[i % 3]},{1e5 * (i % 3)}" for i in range(60)]
    (tmp_path / "train.csv").write_text("\n".join(["size,city,price", *lines]))
    out = ok(
        "fit",
        "map",
        tmp_path / "train.csv",
        "--target",
        "price",
        "--kind",
        "regression",
        "--out",
        tmp_path / "f",
        "--epochs",
        "200",
        *QUICK,
    )
    assert "5 inputs\ncolumns made from text and from missing cells: size=?, city=Oslo, city=Rome, city=?\n" in out
    (tmp_path / "new.csv").write_text("city,size\nOslo,\nRome,3\n,3\n")
    means = column(rows(ok("predict", tmp_path / "f", tmp_path / "new.csv")), "mean")
    assert means == pytest.approx([0, 1e5, 2e5], abs=2e4)
    (tmp_path / "far.csv").write_text("city,size\nParis,3\n")
    out = ok(
        "fit", "map", tmp_path / "train.csv", "--target", "price", "--ignore", "city", "--out", tmp_path / "g", "--epochs", "1"
    )
    assert "2 inputs\ncolumns made from text and from missing cells: size=?\n" in out
    assert "'Paris' is not one of the known texts, Oslo, Rome" in refused("predict", tmp_path / "f", tmp_path / "far.csv")


def test_kind_can_be_overridden(ok, tables, tmp_path):
    out = ok("fit", "map", tables / "wine.csv", "--target", "cultivar", "--out", tmp_path / "a", "--epochs", 1)
    assert "cultivar: classification with 3 classes (whole numbers, 3 different ones;" in out
    args = ("--kind", "regression", "--epochs", 1, "--held-out", 0)
    out = ok("fit", "map", tables / "wine.csv", "--target", "cultivar", "--out", tmp_path / "b", *args)
    assert "cultivar: regression (as given by --kind)" in out
    assert "178 training rows, 0 held-out rows" in out
    assert json.loads((tmp_path / "b" / "fit.json").read_text())["metrics"] == {}


def test_several_targets(ok, tables, tmp_path):
    data = tables / "diabetes.csv"
    ok("fit", "map", data, "--target", "progression", "--target", "bmi", "--out", tmp_path / "out", "--epochs", 5, *QUICK)
    found = rows(ok("predict", tmp_path / "out", data))
    assert list(found[0])[:2] == ["progression_mean", "progression_lower"]
    assert list(found[0])[6] == "bmi_mean"
    assert abs(column(found, "bmi_mean").mean() - 26.4) < 1  # each in its own units
    assert abs(column(found, "progression_mean").mean() - 152) < 20


def test_images_from_npz(ok, tables, tmp_path):
    data = tables / "digits.npz"
    out = ok("fit", "map", data, "--target", "y", "--out", tmp_path / "out", "--epochs", 5, *QUICK)
    assert "1x8x8 inputs" in out
    assert len(rows(ok("predict", tmp_path / "out", data))) == 200
    scores = json.loads(ok("evaluate", tmp_path / "out", data, "--json"))
    assert scores["accuracy"] > 0.5


NAMES = [*METHODS, "ensemble:mc_dropout", "ensemble:laplace", "ensemble:neural_linear", "ensemble:swag", "mc-dropout"]

POST_HOC = ("laplace", "neural_linear")  # methods that do not train, so that --epochs is of what trains before them
POINTS = ("map", "pi_model", "temporal_ensembling", "mean_teacher")  # methods that end at one setting of the weights


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in NAMES for kind in ("classes", "numbers") if "neural_linear" not in name or kind == "numbers"],
)
def test_every_method(ok, tables, tmp_path, name, kind):
    inner = preset(name.replace("-", "_").split(":")[-1])
    parts = [type(method) for method in chain(name.replace("-", "_"), table_training(100)).values()]
    checks = any(field.name == "check" for part in parts for field in dataclasses.fields(part))
    parts += [dubito.MAP] if name.split(":")[-1] in POST_HOC else []
    known = {field.name for part in parts for field in dataclasses.fields(part)}
    short = {"epochs": 4, "draws": 4, "burn_in": 10, "chains": 2, "max_steps": 5, "max_depth": 3}
    samples = "chains" in known  # of other methods, `draws` is how many predict
    quick = ["--epochs", 4] if "epochs" in known else []
    if samples:
        quick = [part for key, value in short.items() if key in known for part in (f"--{key.replace('_', '-')}", value)]
    quick += ["--start.epochs", 4] if inner.after_map and name.split(":")[-1] not in POST_HOC else []
    quick += ["--no-check"] if checks else []  # four epochs end far from an optimum
    folder, file, target = tmp_path / "out", *{"classes": ("iris", "species"), "numbers": ("diabetes", "progression")}[kind]
    data = tables / f"{file}.csv"
    out = ok("fit", name, data, "--target", target, "--out", folder, "--dropout", 0.2, "--hidden", 16, *quick)
    assert ("after map" in out) == (inner.after_map and not name.startswith("ensemble"))
    assert sorted(path.name for path in folder.iterdir()) == ["fit.json", "posterior.safetensors"]
    found = rows(ok("predict", folder, data, "--draws", 5))
    assert (column(found, "epistemic") > 0).any() == (name not in POINTS)
    assert (column(found, "aleatoric") > 0).all()
    assert json.loads((folder / "fit.json").read_text())["method"].startswith(parts[0].__name__)
    assert math.isfinite(json.loads(ok("evaluate", folder, data, "--json"))["nll"])


@pytest.mark.parametrize("name", ["laplace", "neural_linear"])
def test_methods_for_trained_networks_go_on_from_map(ok, tables, tmp_path, name):
    """The same network as `fit map` trains, in the target's units, with ignorance on top."""
    data, args = tables / "diabetes.csv", ("--target", "progression", "--target", "bmi", "--epochs", 60, *QUICK)
    found = {}
    for method in ("map", name):
        out = ok("fit", method, data, "--out", tmp_path / method, *args)
        found[method] = rows(ok("predict", tmp_path / method, data))
    assert "by neural_linear after map" in out or "by laplace after map" in out
    weights = {m: store.read(tmp_path / m / "posterior.safetensors")[0] for m in found}
    hidden = next(key for key in weights["map"] if "hidden1.weight" in key)
    assert torch.equal(weights["map"][hidden], weights[name][hidden])
    for target in ("progression", "bmi"):
        mean, plain = column(found[name], f"{target}_mean"), column(found["map"], f"{target}_mean")
        if name == "laplace":  # linearised, its mean is the network's
            np.testing.assert_allclose(mean, plain, rtol=1e-4)
        total, aleatoric, epistemic = (column(found[name], f"{target}_{part}") for part in ("total", "aleatoric", "epistemic"))
        np.testing.assert_allclose(total, aleatoric + epistemic, rtol=1e-4)
        assert (epistemic > 0).all()
        assert 0.7 < np.median(aleatoric) / np.median(column(found["map"], f"{target}_aleatoric")) < 1.5
        truth = column(rows(data.read_text()), target)
        lower, upper = column(found[name], f"{target}_lower"), column(found[name], f"{target}_upper")
        assert 0.85 < np.mean((lower <= truth) & (truth <= upper)) <= 1
    recipe = json.loads((tmp_path / name / "fit.json").read_text())
    assert "after MAP(epochs=60, learning_rate=0.01," in recipe["method"]
    scores = json.loads(ok("evaluate", tmp_path / name, data, "--json"))
    assert math.isfinite(scores["crps"])


def test_a_network_that_is_not_trained_is_remarked_on(ok, tables, tmp_path):
    args = ("--target", "species", "--out", tmp_path / "out", "--epochs", 0, *QUICK)
    assert "Note: the weights are not at an optimum" in ok("fit", "laplace", tables / "iris.csv", *args)


def test_a_curvature_that_makes_no_covariance_is_refused(refused, tables, tmp_path):
    kind = ("--structure", "dense", "--curvature", "hessian", "--prior-scale", 10.0, "--epochs", 1, "--hidden", 8)
    line = refused("fit", "laplace", tables / "iris.csv", "--target", "species", "--out", tmp_path / "out", *kind)
    assert "the precision matrix is not positive definite" in line


def test_early_stopping_ends_the_training_and_the_method_follows(ok, tables, tmp_path):
    args = ("--target", "species", "--out", tmp_path / "out", "--epochs", 200, "--patience", 1, "--learning-rate", 0.1)
    out = ok("fit", "laplace", tables / "iris.csv", *args, "--no-check")
    assert "These rows also decided when to stop" in out
    assert (column(rows(ok("predict", tmp_path / "out", tables / "iris.csv")), "epistemic") > 0).any()


WORDS = ("data.csv", "--target", "y", "--out", "out")


def test_the_wrapped_method_has_its_flags():
    training = table_training(100)._replace(dropout_at="hidden")
    method, start = parse_options("ensemble:mc_dropout", [*WORDS, "--epochs", "7"], about="", training=training).configuration
    assert method == dubito.Ensemble(
        dubito.MCDropout(epochs=7, learning_rate=training.learning_rate, at="hidden", rate=0.1, draws=100)
    )
    assert start is None


def test_the_training_before_a_method_has_its_flags():
    words = [*WORDS, "--epochs", "7", "--clip-gradient", "2"]
    first = dubito.MAP(epochs=7, learning_rate=1e-3, clip=2.0)
    assert parse_options("laplace", words, about="").configuration == (dubito.Laplace(), first)
    assert parse_options("ensemble:laplace", words, about="").configuration == (
        dubito.Ensemble(dubito.Laplace(), start=first),
        None,
    )
    method, start = parse_options("swag", [*WORDS, "--epochs", "7", "--start.epochs", "3"], about="").configuration
    assert (method.epochs, start.epochs) == (7, 3)


def test_early_stopping(ok, tables, tmp_path):
    args = ("--target", "species", "--out", tmp_path / "out", "--epochs", 200, "--patience", 1, "--learning-rate", 0.1)
    out = ok("fit", "map", tables / "iris.csv", *args)
    assert "These rows also decided when to stop" in out


def test_same_seed_same_bits(ok, tables, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        args = ("--target", "species", "--out", tmp_path / name, "--epochs", 1, "--seed", seed)
        ok("fit", "map", tables / "iris.csv", *args)
    a, b, c = (store.read(tmp_path / name / "posterior.safetensors")[0] for name in "abc")
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not any(torch.equal(a[key], c[key]) for key in a)


# Interruptions


def test_resume_continues_bit_for_bit(cli, ok, refused, tables, tmp_path, monkeypatch):
    def command(name: str, *more: object) -> list[object]:
        data = tables / "iris.csv"
        return ["fit", "map", data, "--target", "species", "--out", tmp_path / name, "--epochs", 10, "--hidden", 8, *more]

    ok(*command("whole"))
    step, left = Descent.step, [17]

    def interrupted(*args):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return step(*args)

    monkeypatch.setattr(Descent, "step", interrupted)
    told = f"Interrupted: the same command with --resume continues from the last checkpoint in {tmp_path / 'cut'}\n"
    assert cli(*command("cut", "--checkpoint-every", 0))[0::2] == (130, told)
    monkeypatch.undo()

    assert "not finished; continue it" in refused("predict", tmp_path / "cut", tables / "iris.csv")
    assert "continue the run in it with --resume" in refused(*command("cut"))
    assert "different: training.seed (was 0, is 1)" in refused(*command("cut", "--resume", "--seed", 1))
    assert "different: prior_scale (was None, is 1.0)" in refused(*command("cut", "--resume", "--prior-scale", 1))
    changed = refused(*command("cut", "--resume", "--no-record"))
    assert "different: method (was ...record=True), is ...record=False))" in changed
    ok(*command("cut", "--resume"))
    assert not (tmp_path / "cut" / "checkpoint").exists()
    whole, cut = (store.read(tmp_path / name / "posterior.safetensors")[0] for name in ("whole", "cut"))
    assert all(torch.equal(whole[key], cut[key]) for key in whole)
    assert "this fit is finished" in refused(*command("cut", "--resume"))
    ok(*command("new", "--resume"))  # nothing there yet: from the beginning


@pytest.mark.parametrize("cut", [17, 51])  # in the training, and in the pass of the method
def test_resume_in_either_stage(cli, ok, tables, tmp_path, monkeypatch, cut):
    def command(name: str, *more: object) -> list[object]:
        data = tables / "iris.csv"
        quick = ("--epochs", 12, "--hidden", 8, "--no-check")
        return ["fit", "laplace", data, "--target", "species", "--out", tmp_path / name, *quick, *more]

    ok(*command("whole"))  # 48 steps of training and 4 of the method
    left = [cut]

    def interrupted(step):
        def counted(*args):
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            return step(*args)

        return counted

    for kind in (Descent, dubito.Laplace):
        monkeypatch.setattr(kind, "step", interrupted(kind.step))
    assert cli(*command("cut", "--checkpoint-every", 0))[0] == 130
    monkeypatch.undo()
    ok(*command("cut", "--resume"))
    assert not (tmp_path / "cut" / "checkpoint").exists()
    whole, found = (store.read(tmp_path / name / "posterior.safetensors")[0] for name in ("whole", "cut"))
    assert all(torch.equal(whole[key], found[key]) for key in whole)


def test_a_refused_run_leaves_nothing_behind(refused, tables, tmp_path):
    args = ("--target", "progression", "--out", tmp_path / "out", "--learning-rate", 1e30, "--optimizer", "sgd")
    for method in ("map", "laplace"):  # whose training has a folder of its own
        assert "not finite" in refused("fit", method, tables / "diabetes.csv", *args)
        assert not (tmp_path / "out").exists()


def test_an_interrupt_before_the_first_checkpoint_is_told(cli, tables, tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Descent, "step", interrupted)
    code, _, err = cli("fit", "map", tables / "iris.csv", "--target", "species", "--out", tmp_path / "out")
    assert code == 130
    assert err.startswith(f"Interrupted: nothing was saved yet, so {tmp_path / 'out'} is removed")
    assert not (tmp_path / "out").exists()


def test_an_interrupt_elsewhere_is_told(cli, fitted, tables, monkeypatch):
    def interrupted(p, y):
        raise KeyboardInterrupt

    monkeypatch.setattr("dubito.cli.commands.evaluate.score", interrupted)
    assert cli("evaluate", fitted, tables / "iris.csv")[0::2] == (130, "Interrupted\n")


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such limit")
def test_a_full_disk_is_told_in_words(tables, tmp_path):
    def run(blocks: int, *more: str) -> subprocess.CompletedProcess:
        args = ["fit", "map", str(tables / "iris.csv"), "--target", "species", "--out", str(tmp_path / "out"), "--epochs", "2"]
        limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({blocks} * 1024, resource.RLIM_INFINITY))"
        code = f"{limit}; import sys; from dubito.cli import main; sys.exit(main())"
        return subprocess.run([sys.executable, "-c", code, *args, *more], capture_output=True, text=True, timeout=120)

    for blocks in (8, 1):  # no room for a checkpoint, nor for what the run is
        full = run(blocks)
        assert full.returncode == 2
        assert full.stderr.startswith("dubito: ")
        assert full.stderr.count("\n") == 1
        assert "File too large" in full.stderr
        assert "Errno" not in full.stderr
    assert "make room, and go on with --resume" in run(8, "--resume").stderr
    assert run(10**6, "--resume").returncode == 0


def test_what_cannot_be_written_at_the_end_goes_on_later(ok, refused, tables, tmp_path, monkeypatch):
    args = ("fit", "map", tables / "iris.csv", "--target", "species", "--out", tmp_path / "out", "--epochs", 2)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dubito.cli.commands.fit.io.save", full)
    line = refused(*args)
    assert "out: the run could not be written (No space left on device)" in line
    assert "go on with --resume" in line
    monkeypatch.undo()
    ok(*args, "--resume")


def test_a_folder_in_use_is_refused_and_left_alone(cli, tables, tmp_path, monkeypatch):
    command = ["fit", "map", tables / "iris.csv", "--target", "species", "--out", tmp_path / "out", "--epochs", 3, "--hidden", 8]
    step, other = Descent.step, []

    def meanwhile(*args):
        if not other:
            other.append(None)
            other.append(main([str(arg) for arg in (*command, "--resume")]))
        return step(*args)

    monkeypatch.setattr(Descent, "step", meanwhile)
    code, _, err = cli(*command)
    assert (code, other[1]) == (0, 2)
    assert f"dubito: {tmp_path / 'out'} is in use by another run" in err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["fit.json", "posterior.safetensors"]


# Remarks


def test_what_is_no_better_than_a_constant_is_remarked_on(ok, tables, tmp_path):
    out = ok("fit", "map", tables / "diabetes.csv", "--target", "progression", "--out", tmp_path / "a", "--epochs", 0)
    words = " ".join(out.split())
    assert "Note: on the held-out rows the fit is no better than always predicting the mean of the training rows (rmse " in words
    assert "try more --epochs or another --learning-rate" in words
    out = ok("fit", "map", tables / "iris.csv", "--target", "species", "--out", tmp_path / "b", "--epochs", 20, *QUICK)
    assert "Note" not in out


def test_notes():
    y, held = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 1, 1])
    flags = {"epochs", "learning_rate"}
    assert not list(notes({"accuracy": 0.75, "nll": 9.0}, y, held, flags))
    assert not list(notes({"accuracy": 0.5, "nll": 0.6}, y, held, flags))  # as good a guess, but surer where it should be
    (note,) = notes({"accuracy": 0.5, "nll": 0.9}, y, held, flags)
    assert note.endswith("the most frequent class (accuracy 0.5): try more --epochs or another --learning-rate")
    assert list(notes({"accuracy": 0.25, "nll": 0.1}, y, held, flags))
    assert list(notes({"accuracy": float(torch.tensor(1 / 3)), "nll": 2.0}, y, held[1:], flags))  # in single precision
    (note,) = notes({"rmse": 2.0, "coverage": 0.9}, torch.ones(4, 1), torch.zeros(9, 1), {"step_size", "burn_in"})
    assert note.endswith("(rmse 1): try another --step-size or a longer --burn-in")
    for n, coverage, told in ((50, 0.6, "60% of the"), (50, 1.0, "too large"), (50, 0.8, ""), (50, 0.98, ""), (49, 0.1, "")):
        found = list(notes({"rmse": 0.5, "coverage": coverage}, torch.ones(4, 1), torch.zeros(n, 1), flags))
        assert len(found) == bool(told)
        assert told in "".join(found)


def test_calibration_is_remarked_on(ok, tables, tmp_path):
    args = ("--target", "progression", "--out", tmp_path / "out", "--epochs", 300, "--hidden", 64, "--prior-scale", 100)
    out = ok("fit", "map", tables / "diabetes.csv", *args, "--learning-rate", 0.01)  # the training rows by heart
    assert re.search(
        r"Note: the 90 % intervals contain \d+% of the held-out targets: the predicted uncertainty is too small", out
    )


def test_a_bug_of_ours_shows_a_traceback(fitted, tables, monkeypatch):
    monkeypatch.setattr("dubito.cli.commands.evaluate.score", lambda p, y: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["evaluate", str(fitted), str(tables / "iris.csv")])


# A network of one's own


NETWORK = """
import torch
from torch import nn

def make(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))

def wide(inputs, outputs):
    return nn.Linear(inputs, outputs + 1)

def deaf(inputs, outputs):
    return nn.Linear(inputs + 1, outputs)

def broken(inputs, outputs):
    raise RuntimeError("no idea")

def function(inputs, outputs):
    return torch.relu

def empty(inputs, outputs):
    return nn.ReLU()

def narrow(inputs):
    return nn.Linear(inputs, 1)

number = 3
"""


@pytest.fixture
def own_network(tmp_path, monkeypatch):
    """The module ownnets in the current folder."""
    (tmp_path / "ownnets.py").write_text(NETWORK)
    (tmp_path / "unfit.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("ownnets", "unfit"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("own_network")
def test_own_network(ok, refused, tables):
    data = tables / "diabetes.csv"
    out = ok("fit", "map", data, "--target", "progression", "--out", "out", "--epochs", 1, "--network", "ownnets:make")
    assert "ownnets:make, 97 weights" in out
    assert len(rows(ok("predict", "out", data, "--network", "ownnets:make"))) == 442

    sys.modules.pop("ownnets")
    line = refused("predict", "out", data)
    assert "give --network ownnets:make again" in line
    assert "ownnets" not in sys.modules  # a file does not choose code to run
    assert "the posterior of another model" in refused("evaluate", "out", data, "--network", "ownnets:wide")


@pytest.mark.usefixtures("own_network")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ownnets", "must have the form package.module:factory"),
        ("nowhere:make", "cannot import nowhere: ModuleNotFoundError: No module named 'nowhere'"),
        ("unfit:make", "cannot import unfit: ZeroDivisionError: division by zero (unfit.py, line 1)"),
        ("ownnets:missing", "has no function missing"),
        ("ownnets:number", "has a int, not a function"),
        ("ownnets:broken", "calling it with (4, 3) failed: RuntimeError: no idea (ownnets.py, line 15)"),
        ("ownnets:narrow", "failed: TypeError: narrow() takes 1 positional argument but 2 were given"),
        ("ownnets:function", "must return a torch.nn.Module; got a builtin_function_or_method"),
        ("ownnets:empty", "has no parameters"),
        ("ownnets:wide", "the output for 2 rows has the shape [2, 4]; needed [2, 3]"),
        (
            "ownnets:deaf",
            "the network fails on inputs of shape [2, 4]: ValueError: the network does not take inputs of shape [2, 4]",
        ),
    ],
)
def test_wrong_factory(refused, tables, name, message):
    line = refused("fit", "map", tables / "iris.csv", "--target", "species", "--out", "out", "--network", name)
    assert f"--network {name}: " in line
    assert message in line
    assert not Path("out").exists()


# Bad input


def test_bad_data(refused, tables, tmp_path):
    def line(text: str, *more: object) -> str:
        (tmp_path / "bad.csv").write_text(text)
        return refused("fit", "map", tmp_path / "bad.csv", "--target", "y", "--out", tmp_path / "out", *more)

    assert "bad.csv: no column is called 'y'; choose from a, b" in line("a,b\n1,2\n3,4\n")
    assert "column 'y', row 1 (line 2): the class is missing" in line("a,y\n1,\n3,yes\n4,no\n")
    assert "column 'y': the cell is empty" in line("a,y\n1,\n3,0.5\n4,1.5\n")
    assert "every row is of the one class 'yes'" in line("a,y\n1,yes\n2,yes\n")
    assert "every row is of the one class '1'" in line("a,y\n1,1\n2,1\n")
    assert "all rows have the same value of y" in line("a,y\n1,0.5\n2,0.5\n")
    assert "0.5 is a number, not a class" in line("a,y\n1,0.5\n2,1.5\n", "--kind", "classification")
    assert "'no' is not a number" in line("a,y\n1,no\n2,yes\n", "--kind", "regression")
    assert "3 cells, the header has 2" in line("a,y\n1,2,3\n")
    assert "--held-out 0.2 of 2 rows must leave both" in line("a,y\n1,no\n2,yes\n")
    for name, arrays, message in (
        ("flat", {"x": np.zeros(3), "y": np.arange(3)}, "x must be [N, F]"),
        ("uneven", {"x": np.zeros((3, 2)), "y": np.arange(4)}, "x has 3 rows, but y has the shape (4,)"),
        ("cube", {"x": np.zeros((3, 2)), "y": np.zeros((3, 2, 2))}, "y must have the shape [N] or [N, C]; got [3, 2, 2]"),
        ("nan", {"x": np.full((3, 2), np.nan), "y": np.arange(3)}, "x[0, 0]: nan stands for a missing value"),
        ("other", {"x": np.zeros((3, 2)), "z": np.arange(3)}, "no array is called 'y'"),
    ):
        np.savez(tmp_path / f"{name}.npz", **arrays)
        assert message in refused("fit", "map", tmp_path / f"{name}.npz", "--target", "y", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["fti"], "no command is called 'fti'; did you mean 'fit'? choose from demo, fit, predict, evaluate"),
        (["fit", "svm"], "no method is called 'svm'; choose from map, "),
        (["fit", "laplac"], "did you mean 'laplace'?"),
        (["fit", "esemble"], "did you mean 'ensemble'?"),
        (["fit", "DATA"], "name the column to predict: --target COLUMN"),
        (["fit", "no.csv", "--target", "species"], "no.csv: there is no such file"),
        (["fit", "--target", "species"], "Missing from dubito fit: TABLE"),
        (["fit", "DATA", "--target", "species", "--out", "TAKEN"], "exists: give another folder for --out"),
        (["fit", "DATA", "--target", "speces", "--out", "OUT"], "did you mean 'species'?"),
        (
            ["fit", "DATA", "--target", "species", "--budget", "soon", "--out", "OUT"],
            "--budget soon: give a time such as 30s or 5m",
        ),
        (["fit", "map:ensemble", "DATA"], "map does not wrap another method"),
        (["fit", "ensemble:ensemble", "DATA"], "a method cannot wrap itself"),
        (["fit", "map"], "Missing from dubito fit map: DATA --out FOLDER (see dubito fit map --help)"),
        (["fit", "map", "DATA", "--out", "OUT"], "name the column to predict: --target COLUMN"),
        (["fit", "map", "no.csv", "--target", "species", "--out", "OUT"], "no.csv: there is no such file"),
        (
            ["fit", "map", "no.txt", "--target", "species", "--out", "OUT"],
            "only .csv, .tsv (also compressed, .gz), .parquet and .npz files can be read",
        ),
        (["fit", "map", "DATA", "--target", "speces", "--out", "OUT"], "did you mean 'species'?"),
        (["fit", "map", "DATA", "--target", "species", "--out", "TAKEN"], "exists: give another folder for --out"),
        (["FIT", "--epoch", "3"], "Unrecognized options: --epoch, 3; Perhaps you meant: --epochs INT"),
        (["FIT", "--epochs", "x"], "Error parsing --epochs: invalid literal for int() with base 10: 'x'"),
        (["FIT", "--optimizer", "lion"], "invalid choice 'lion' for argument '--optimizer'"),
        (["FIT", "--epochs", "-1"], "epochs must be at least 0; got -1"),
        (["FIT", "--hidden", "0"], "--hidden must be positive widths; got 0"),
        (["FIT", "--dropout", "1"], "--dropout must be at least 0 and below 1; got 1.0"),
        (["FIT", "--network", "a:b", "--dropout", "0.1"], "--network replaces the MLP"),
        (["FIT", "--held-out", "1.5"], "--held-out 1.5 of 150 rows must leave both training and held-out rows"),
        (["FIT", "--held-out", "0", "--patience", "3"], "--patience needs held-out rows"),
        (["FIT", "--patience", "0"], "--patience must be at least 1; got 0"),
        (["FIT", "--batch-size", "0"], "--batch-size must be at least 1; got 0"),
        (["FIT", "--prior-scale", "-1"], "--prior-scale must be positive; got -1"),
        (["FIT", "--device", "abacus"], "--device abacus: this device cannot be used"),
        (["FIT", "--device", "meta"], "--device meta: this device cannot be used"),
        (["FIT:pi_model"], "pi_model needs dropout in the network: give --dropout 0.1"),
        (["FIT:ensemble:pi_model:map"], "pi_model needs dropout in the network: give --dropout 0.1"),
        (["FIT", "--target", "species"], "duplicate --target species"),
        (["compare", "--data", "DATA", "--target", "species", "--out", "WINE"], "wine.csv is a file, not a folder"),
        (["label", "--data", "digits", "--out", "WINE"], "wine.csv is a file, not a folder"),
        (["label", "--port", "99999"], "--port must lie between 0 and 65535; got 99999"),
        (["label", "--port", "-5"], "--port must lie between 0 and 65535; got -5"),
        (
            ["FIT:neural_linear"],
            "neural_linear needs a regression; for classes use laplace --subset last_layer --structure dense",
        ),
        (["FIT:ensemble:neural_linear"], "neural_linear needs a regression"),
        (["FIT:ensemble:laplace", "--patience", "3"], "--patience might end the run while members are still being trained"),
        (["FIT:laplace", "--subset", "nothing"], "subset='nothing' matches no Bayesian parameter"),
        (["FIT:laplace", "--structure", "lowrank", "--curvature", "fisher"], "a low-rank structure is of the exact curvature"),
        (["FIT:laplace:map"], "laplace does not wrap another method"),
        (["FIT:ensemble", "--size", "0"], "size must be at least 1; got 0"),
        (["predict"], "Missing from dubito predict: FOLDER DATA (see dubito predict --help)"),
        (["predict", "nowhere", "DATA"], "nowhere: there is no such folder"),
        (["predict", "TAKEN", "DATA"], "not a folder that `dubito fit` wrote"),
        (["predict", "FITTED", "no.csv"], "no.csv: there is no such file"),
        (["predict", "FITTED", "WINE"], "no column is called 'a'"),
        (["predict", "FITTED", "DIGITS"], "x has the shape (200, 1, 8, 8), where [N, 4] is needed"),
        (["predict", "FITTED", "DATA", "--level", "1"], "--level must lie between 0 and 1"),
        (["predict", "FITTED", "DATA", "--draws", "0"], "--draws must be at least 1"),
        (["predict", "FITTED", "DATA", "--network", "a:b"], "this folder holds an MLP"),
        (["predict", "FITTED", "DATA", "--out", "TAKEN"], "TAKEN is a folder; give the name of a file"),
        (["evaluate", "FITTED", "UNKNOWN"], "'tulip' is not one of the known classes, setosa, versicolor, virginica"),
        (["evaluate", "FITTED", "DATA", "--json=3"], "dubito evaluate"),
    ],
)
def test_bad_arguments(refused, tables, fitted, tmp_path, args, message):
    taken, out = tmp_path / "TAKEN", tmp_path / "OUT"
    taken.mkdir()
    (taken / "mine.txt").write_text("do not touch")
    (tmp_path / "unknown.csv").write_text("a,b,c,d,species\n1,2,3,4,tulip\n")
    places = {"DATA": tables / "iris.csv", "WINE": tables / "wine.csv", "DIGITS": tables / "digits.npz"}
    places |= {"TAKEN": taken, "OUT": out, "FITTED": fitted, "UNKNOWN": tmp_path / "unknown.csv"}
    if args[0].startswith("FIT"):
        method = args[0].partition(":")[2] or "map"
        args = ["fit", method, "DATA", "--target", "species", "--out", "OUT", *args[1:]]
    assert message in refused(*(places.get(arg, arg) for arg in args))
    assert not out.exists()
    assert [path.name for path in taken.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "fit.json").unlink(), "it has no fit.json"),
        (lambda folder: (folder / "fit.json").write_text("{"), "fit.json: damaged, or not written by `dubito fit`"),
        (lambda folder: (folder / "fit.json").write_text("[]"), "fit.json: damaged, or not written by `dubito fit`"),
        (lambda folder: (folder / "fit.json").write_bytes(b"\xff\xfe"), "fit.json: damaged, or not written by `dubito fit`"),
        (lambda folder: edit(folder, '"relu"', '"tanh"'), "the contents do not match their checksum"),
        (lambda folder: edit(folder, '"format": 1', '"format": 2'), "written by a newer dubito"),
        (lambda folder: edit(folder, '"format": 1', '"format": "x"'), "fit.json: damaged, or not written by `dubito fit`"),
        (lambda folder: (folder / "posterior.safetensors").unlink(), "posterior.safetensors: there is no such file"),
        (lambda folder: truncate(folder / "posterior.safetensors"), "it is truncated or of another kind"),
    ],
)
def test_damaged_folder(refused, fitted, tables, tmp_path, damage, message):
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in fitted.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    damage(folder)
    assert message in refused("predict", folder, tables / "iris.csv")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder is needed in which nobody can write")
def test_what_cannot_be_written_is_named_as_it_was_given(refused, fitted, tables):
    assert refused("predict", fitted, tables / "iris.csv", "--out", "/proc/x.csv").startswith("dubito: /proc/x.csv: ")


def test_long_texts_are_shown_where_they_differ():
    one = "MAP(epochs=10, " + ", ".join(f"field{i}={i}" for i in range(18)) + ")"
    rest = ", field16=16, field17=17)"
    assert _contrast(one, one.replace("field15=15", "field15=x")) == f"was ...field15=15{rest}, is ...field15=x{rest}"
    assert _contrast("(0.5, 0.25)", "(0.5, 0.75)") == "was (0.5, 0.25), is (0.5, 0.75)"
    was, now = (f"({', '.join(['0.125'] * 30)}, {end})" for end in (1, 2))
    assert _contrast(was, now) == "was ....125, 0.125, 0.125, 1), is ....125, 0.125, 0.125, 2)"
    assert _contrast(one, "None") == f"was {one[:57]}..., is None"


def edit(folder: Path, old: str, new: str) -> None:
    text = (folder / "fit.json").read_text()
    assert old in text
    (folder / "fit.json").write_text(text.replace(old, new))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


# Chains


@pytest.fixture(scope="module")
def sampled(fitted, tmp_path_factory) -> Path:
    """The fit of iris, with the draws of a sampler in the place of its weights."""
    folder = tmp_path_factory.mktemp("sampled") / "iris"
    folder.mkdir()
    (folder / "fit.json").write_bytes((fitted / "fit.json").read_bytes())
    posterior = Reading(fitted, Path()).open().posterior
    g = torch.Generator().manual_seed(0)
    params = {name: leaf + 0.1 * torch.randn(800, *leaf.shape, generator=g) for name, leaf in posterior.params.items()}
    trace = {"energy": torch.randn(800, generator=g), "divergent": torch.zeros(800), "log_prior": torch.randn(800, generator=g)}
    draws = Samples(
        posterior.model, params, posterior.buffers, chains=4, trace=trace, sampler={"method": "HMC", "adjusted": True}
    )
    dubito.save(draws, folder / "posterior.safetensors")
    return folder


def test_diagnose(ok, sampled, tables, tmp_path):
    out = ok("diagnose", sampled, tables / "iris.csv", "--out", tmp_path / "d.html", "--rows", 50)
    assert "The chains can be trusted" in " ".join(out.split())
    assert "R-hat of 150 predictions" in out  # of 50 rows and 3 classes
    assert f"Wrote {tmp_path / 'd.html'}" in out.replace("\n", "")
    page = (tmp_path / "d.html").read_text()
    assert all(word in page for word in ("The chains can be trusted", "Log score", "Energy", "iris.csv, 50 rows"))
    assert re.search(r"row \d+, (setosa|versicolor|virginica): R-hat", page)
    assert "<script" not in page
    assert json.loads((tmp_path / "d.json").read_text())["facts"]["method"] == "MAP"


def test_diagnose_with_less(ok, sampled, tables, tmp_path):
    """Without data there are weights alone; without targets there is no log score, and it says why."""
    out = ok("diagnose", sampled)
    assert "predictions" not in out.partition("found")[2].partition("weights")[0]
    assert (sampled / "diagnosis.html").is_file()
    header, *lines = (tables / "iris.csv").read_text().splitlines()
    (tmp_path / "x.csv").write_text("\n".join([header.replace("species", "other"), *lines[:40], ""]))
    out = ok("diagnose", sampled, tmp_path / "x.csv")
    assert "No log score: the targets cannot be read." in out
    assert "R-hat of 120 predictions" in out
    assert "Log score" not in (sampled / "diagnosis.html").read_text()


def test_what_is_read_is_not_written_over(refused, fitted, sampled, tables, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "labels.csv").write_bytes((tables / "iris.csv").read_bytes())
    (tmp_path / "linked.csv").symlink_to("labels.csv")
    commands = {
        tmp_path / "labels.csv": [
            ("predict", fitted, "labels.csv", "--out", tmp_path / "labels.csv"),
            ("predict", fitted, "linked.csv", "--out", "./labels.csv"),
            ("label", "--data", "labels.csv", "--classes", "a", "b", "--out", "."),  # whose labels are of that name
        ],
        fitted / "fit.json": [("predict", fitted, "labels.csv", "--out", fitted / "fit.json")],
        fitted / "posterior.safetensors": [("predict", fitted, "labels.csv", "--out", fitted / "posterior.safetensors")],
        sampled / "fit.json": [("diagnose", sampled, "--out", sampled / "fit.html")],  # whose numbers go to fit.json
    }
    for path, some in commands.items():
        before = path.read_bytes()
        for command in some:
            assert "the output would overwrite this input; give another name for --out" in refused(*command)
            assert path.read_bytes() == before


def test_diagnose_refuses(refused, fitted, sampled, tables, tmp_path):
    line = refused("diagnose", fitted, tables / "iris.csv")
    assert "was fitted by MAP, which has no chains to diagnose" in line
    assert not (fitted / "diagnosis.html").exists()
    assert "there is no such folder" in refused("diagnose", tmp_path / "none")
    assert "no.csv: there is no such file" in refused("diagnose", sampled, tmp_path / "no.csv")
    assert "ends in .html" in refused("diagnose", sampled, "--out", tmp_path / "d.png")
    assert "--rows must be at least 1" in refused("diagnose", sampled, tables / "iris.csv", "--rows", 0)
    assert "where [N, 4] is needed" in refused("diagnose", sampled, tables / "digits.npz")


# Help


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", [*METHODS, "ensemble:mc_dropout", "ensemble:laplace"])
def test_help_shows_every_field_of_a_method(ok, monkeypatch, name, width):
    monkeypatch.setenv("COLUMNS", str(width))
    out = ok("fit", name, "--help")
    flags = set(out.replace(",", " ").split())
    innermost = preset(name.split(":")[-1])
    assert ("--start.epochs" in flags) == (innermost.after_map and name not in ("laplace", "neural_linear", "ensemble:laplace"))
    parts = [
        *chain(name, table_training(100)).values(),
        *([PlainStartFlags()] if name in ("laplace", "ensemble:laplace") else []),
    ]
    for method in parts:
        for field in dataclasses.fields(method):
            flag = f"--{field.name.replace('_', '-')}"
            in_python = (
                "Callable",
                "Proposal",
                "Augmentation",
                "Unlabelled",
                "Method",
            )  # given there only, or by the name of the method
            if any(word in str(field.type) for word in in_python):
                assert flag not in flags
            elif isinstance(method, PlainStartFlags) and flag == "--clip":
                assert "--clip-gradient" in flags
            else:
                assert flag in flags
    assert {"DATA", "--target", "--out", "--kind", "--hidden", "--network", "--seed", "--resume"} <= flags
    assert max(map(len, out.splitlines())) <= width
    assert ">>>" not in out
    assert ":math:" not in out


@pytest.mark.parametrize("name", METHODS)
def test_the_first_sentence_of_a_method_stands_alone(name):
    line = headline(METHODS[name])
    assert line.endswith(".")
    assert not set(line) & set("\\{}^_=")
    assert line.rstrip(".").split()[-1] not in ("on", "by", "with", "of", "to", "probability")


def test_overviews(ok):
    for out in (ok(), ok("--help"), ok("-h")):
        assert all(command in out for command in ("demo", "fit", "predict", "evaluate", "diagnose", "--version"))
    for out in (ok("fit"), ok("fit", "--help")):
        assert all(name in out for name in METHODS)
    assert "--level" in ok("predict", "--help")
    assert "--json" in ok("evaluate", "--help")
    assert "[DATA]" in ok("diagnose", "--help")
    assert ok("--version") == f"dubito {dubito.__version__}\n"


def test_demo_has_the_flags_of_its_function(ok, refused, monkeypatch):
    calls = []

    def demo(out: str = "reports/demo.html", *, seed: int = 0) -> Path:
        """Write a report.

        Args:
            out: the file to write.
            seed: for everything random.
        """
        calls.append((out, seed))
        return Path(out)

    fake = types.ModuleType("dubito.cli.demo")
    fake.demo = demo  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dubito.cli.demo", fake)
    ok("demo", "--seed", 3)
    assert calls == [("reports/demo.html", 3)]
    assert "the file to write." in ok("demo", "--help")
    assert "Unrecognized options: --sed" in refused("demo", "--sed", 3)


# As a program


def test_as_a_program(tables, fitted, tmp_path):
    failed = subprocess.run([*PROGRAM, "predict", str(fitted), "no.csv"], capture_output=True, text=True, timeout=120)
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr == "dubito: no.csv: there is no such file\n"

    header, *lines = (tables / "iris.csv").read_text().splitlines()
    (tmp_path / "long.csv").write_text("\n".join([header, *(lines * 40), ""]))
    arguments = [*PROGRAM, "predict", str(fitted), str(tmp_path / "long.csv")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline().startswith(b"class,")
        process.stdout.close()  # as `| head -1` does
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 0


def test_plan_takes_the_command_of_a_fit_and_writes_nothing(tables, ok, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = ok("plan", "laplace", tables / "wine.csv", "--target", "cultivar", *QUICK)
    assert [line for line in out.splitlines() if line in ("MAP", "Laplace")] == ["MAP", "Laplace"]
    assert "peak of the fit" in out
    assert "exchange" not in out
    out = ok("plan", "ivon", tables / "wine.csv", "--target", "cultivar", "--out", "w", "--processes", "4", *QUICK)
    assert out.count("a step, by each of 4 processes") == 2
    assert os.listdir(tmp_path) == []
    for args, words in (
        (["plan", "nothing", tables / "wine.csv"], "no method is called 'nothing'"),
        (["plan"], "dubito plan METHOD TABLE"),
        (["plan", "map", tables / "wine.csv", "--target", "cultivar", "--processes", "0"], "must be at least 1"),
        (["plan", "map", tables / "wine.csv", "--target", "cultivar", "--processes", "x"], "invalid int value"),
    ):
        code, _, err = cli(*args)
        assert (code, words in err, err.count("\n")) == (2, True, 1)
    assert "dubito plan" in ok("plan", "--help")
