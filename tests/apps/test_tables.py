"""Tables: reading any column, cross-fitting, calibration, odd rows, files."""

import datetime
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.base import is_classifier
from sklearn.ensemble import ExtraTreesRegressor, HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.gaussian_process import GaussianProcessRegressor, kernels

import dubito
from dubito.apps.tables import TableModel, fit_table
from dubito.apps.tables.calibration import Scales, at_least, mixture, stretch, temperature
from dubito.apps.tables.cells import date_format, missing, numbers, seconds, words
from dubito.apps.tables.columns import BUCKETS, LEVELS, Encoder, describe
from dubito.apps.tables.deadline import in_time
from dubito.apps.tables.fit import _heavy, _shares, prepare
from dubito.apps.tables.forest import TREES, Forest
from dubito.apps.tables.frames import as_frame, with_targets
from dubito.apps.tables.model import Design
from dubito.apps.tables.network import TableNetwork
from dubito.apps.tables.process import Process, covariance
from dubito.apps.tables.training import CrossFit, Training, best_weights, deal
from dubito.apps.tables.trees import ROUNDS, Trees, below, from_scikit_learn
from dubito.evaluation.judge import score
from dubito.model.likelihoods import Categorical, HeteroscedasticGaussian
from dubito.posteriors.predictive import LatentMixture
from dubito.tensors.randomness import derive_seed


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr("dubito.apps.tables.fit._steps", lambda network, settings, rows: 60)


def people(n=120, seed=0):
    """A table with all kinds of columns, and a target that depends on some."""
    source = np.random.default_rng(seed)
    age, city = source.uniform(20, 60, n), source.choice(["Rome", "Oslo", "Lima"], n)
    day = [datetime.date(2023, 1, 1) + datetime.timedelta(days=int(d)) for d in source.integers(0, 700, n)]
    pay = 1000 + 30 * age + 200 * (city == "Rome") + source.normal(size=n) * 20
    return {
        "id": np.arange(n), "age": age, "city": city.tolist(), "day": [str(d) for d in day],
        "share": [f"{v:.1f} %" for v in source.uniform(0, 100, n)], "again": age, "same": ["x"] * n, "pay": pay,
    }  # fmt: skip


# Cells and columns


def test_numbers_however_they_are_written():
    cells = ["12.5%", "1,234,567", "€ 3.50", "-2e3", "", "NA", "many", "1e99", "7"]
    found = numbers(cells)
    assert found[:4].tolist() == [0.125, 1234567, 3.5, -2000]
    assert np.isnan(found[4:8]).all()
    assert found[8] == 7
    assert missing(cells).tolist() == [False] * 4 + [True] * 2 + [False] * 3


@pytest.mark.parametrize(
    ("cells", "form", "day"),
    [
        (["2024-02-28", "2024-03-01 12:30"], "iso", 2),
        (["28.02.2024", "01.03.2024"], "%d.%m.%Y", 2),
        (["02/28/2024", "03/01/2024"], "%m/%d/%Y", 2),
        (["28/02/2024 10:00", "01/03/2024 10:00"], "%d/%m/%Y %H:%M", 2),
        (["Feb 28, 2024", "Mar 01, 2024"], "%b %d, %Y", 2),
    ],
)
def test_dates_however_they_are_written(cells, form, day):
    assert date_format(cells) == form
    times = seconds(cells, form)
    assert (times[1] - times[0]) // 86400 == day
    assert math.isnan(seconds(["soon"], form)[0])


def test_what_is_no_date():
    assert date_format(["12-34", "a"]) is None
    assert date_format(["1.5", "2.5"]) is None
    assert date_format(np.zeros(2)) is None


def test_durations_are_numbers_of_seconds_however_they_are_written():
    spans = [
        datetime.timedelta(days=1, seconds=3),
        datetime.timedelta(days=-1, seconds=7),
        datetime.timedelta(seconds=5.25),
        None,
    ]
    expected = [86403, -86393, 5.25]
    pandas_cells = ["1 days 00:00:03", "-1 days +00:00:07.000000", "0 days 00:00:05.250000", ""]  # of its CSV files
    array = np.array(["NaT" if span is None else span for span in spans], dtype="timedelta64[ms]")
    for column in (spans, array, pandas_cells, [str(span) for span in spans]):
        found = numbers(as_frame({"a": column})["a"])
        assert found[:3].tolist() == expected
        assert np.isnan(found[3])
    assert numbers(["2 days", "12:30:00"]).tolist() == [172800, 45000]
    assert np.isnan(numbers(["days", " ", "1:2", "12:30", "3:4:5", "2 days ago", "1 2:00:00 days"])).all()
    assert describe("wait", as_frame({"wait": array})["wait"]).kind == "number"


def test_words():
    assert words(["Yes", "yes", " NA".strip(), "01", "1.0"]) == ["yes", "yes", "", "1", "1"]


def test_every_column_is_described_once():
    frame = people()
    del frame["pay"]
    encoder = Encoder.fit(as_frame(frame))
    assert [column.name for column in encoder.columns] == ["age", "city", "day", "share"]
    assert encoder.left_out == {
        "id": "an ID: the number of the row", "again": "the same as age", "same": "every row has the same value",
    }  # fmt: skip
    x, notes = encoder.encode(as_frame(frame))
    assert x.shape == (120, encoder.width)
    assert encoder.n_numbers == 3
    assert not any(notes)
    assert np.abs(x).max() <= 3
    again = Encoder.from_json(encoder.to_json())
    assert again == encoder


def test_ids_and_what_looks_like_them():
    n = 50
    source = np.random.default_rng(0)
    frame = {
        "code": [f"k{i * 37 % 101}" for i in range(n)], "user_id": source.permutation(9000)[:n].astype(float),
        "income": source.permutation(9000)[:n].astype(float), "year": np.arange(n) + 1950.0,
        "text": [f"a word {i}" for i in range(n)],
    }  # fmt: skip
    encoder = Encoder.fit(frame)
    assert set(encoder.left_out) == {"code", "user_id"}
    assert {column.name for column in encoder.columns} == {"income", "year", "text"}


def test_many_words_share_inputs_by_their_hash():
    cells = [f"street {i % 90}" for i in range(300)]
    column = describe("street", cells)
    assert column is not None
    assert len(column.levels) <= LEVELS
    assert column.hashed
    encoder = Encoder((column,))
    x, notes = encoder.encode({"street": ["street 3", "street 4", "elsewhere"]})
    assert x.shape[1] == len(column.levels) + BUCKETS
    assert not np.array_equal(x[0], x[1])
    assert not any(notes)


def test_missing_cells_in_training_are_an_input_and_no_oddity():
    encoder = Encoder.fit({"a": ["1", "", "3", "4"], "b": ["x", "y", "NA", "x"]})
    x, notes = encoder.encode({"a": [""], "b": [""]})
    assert notes == [""]
    assert x.sum() == 2  # two indicators; the number is the median
    assert x[0, 0] == 0


def test_odd_cells_are_answered_and_noted():
    encoder = Encoder.fit({"a": np.arange(30.0) ** 1.5, "b": ["x", "y"] * 15})
    _, notes = encoder.encode({"a": ["1", "", "1e6", "1"], "b": ["x", "x", "", "z"]})
    assert notes[0] == ""
    assert "a is missing or unreadable" in notes[1]
    assert "a is far outside the training rows' 0 to 156" in notes[2]
    assert "b is missing" in notes[2]
    assert notes[3] == "b 'z' is new"


def test_absent_column_is_an_error():
    encoder = Encoder.fit({"a": np.arange(30.0) ** 1.5, "b": np.arange(30.0) ** 2})
    with pytest.raises(ValueError, match="the table has no column b; needed are a, b"):
        encoder.encode({"a": np.zeros(2)})
    with pytest.raises(ValueError, match="no column is left"):
        Encoder.fit({"a": ["x"] * 30})


def test_many_columns_do_not_take_quadratic_time():
    source = np.random.default_rng(0)
    frame = {f"c{i}": column for i, column in enumerate(source.normal(size=(5000, 4)))}
    assert Encoder.fit(frame).encode(frame).x.shape == (4, 5000)


# What users give


def test_frames():
    for table in ({"a": [1, 2], "b": ["x", None]}, {"a": torch.tensor([1, 2]), "b": np.array(["x", ""])}):
        frame = as_frame(table)
        assert np.array_equal(frame["a"], [1.0, 2.0])
        assert frame["b"] == ["x", ""]
    assert list(as_frame(torch.zeros(3, 2))) == ["x0", "x1"]
    assert as_frame({"d": [datetime.date(2024, 1, 2)], "t": [True]}) == {"d": ["2024-01-02"], "t": ["True"]}
    with pytest.raises(ValueError, match="same, positive number of rows"):
        as_frame({"a": [1], "b": [1, 2]})
    with pytest.raises(ValueError, match="a table is a DataFrame"):
        as_frame(np.zeros((2, 2, 2)))


COLUMNS = {"a": [1, None, 3], "b": ["x", None, "z"], "d": [datetime.date(2024, 1, 2), None, None], "t": [True, None, False]}


def check_frame(frame):
    assert np.array_equal(frame["a"], [1, np.nan, 3], equal_nan=True)
    assert frame["b"] == ["x", "", "z"]
    assert [cell[:10] for cell in frame["d"]] == ["2024-01-02", "", ""]
    assert frame["t"] == ["True", "", "False"]


def test_commas_are_read_as_in_training_whatever_else_a_file_holds(tmp_path):
    source = np.random.default_rng(0)
    size, pay = source.normal(size=60), source.uniform(1000, 9999, size=60)

    def line(a: float | str, b: float) -> str:
        cells = (a if isinstance(a, str) else f"{a:.3f}", f"{b:,.2f}", f"{2 + a:.2f}" if not isinstance(a, str) else "")
        return ";".join(cell.translate(str.maketrans(",.", ".,")) for cell in cells)

    (tmp_path / "a.csv").write_text("\n".join(["size;pay;y", *map(line, size, pay)]))
    training = prepare(tmp_path / "a.csv", "y", "auto", ())
    assert training.y[:, 0] == pytest.approx(2 + size, abs=0.006)
    (tmp_path / "b.csv").write_text("\n".join(["size;pay;y", line(0.126, 6203.26), line("n/k", 1234.5), line(1.234, 9000.0)]))
    found = training.encoder.encode(as_frame(tmp_path / "b.csv", training.encoder.commas))
    assert ["size" in note for note in found.notes] == [False, True, False]
    plain = training.encoder.encode({"size": np.array([0.126, np.nan, 1.234]), "pay": np.array([6203.26, 1234.5, 9000.0])})
    assert np.array_equal(found.x, plain.x)
    one = {"size": ["1,234"], "pay": ["6.203"]}  # alone, 1,234 might be a thousand
    assert as_frame(one, training.encoder.commas) == {"size": ["1.234"], "pay": ["6203"]}
    assert Encoder.from_json(training.encoder.to_json()) == training.encoder


def test_commas_between_thousands_and_before_decimals():
    thousands = as_frame({"a": ["1,234", "950"], "b": ["1,234.5", "0.5"]})
    assert numbers(thousands["a"]).tolist() == [1234, 950]
    assert numbers(thousands["b"]).tolist() == [1234.5, 0.5]
    decimals = as_frame({"a": ["1,234", "950"], "b": ["0,5", "odd"], "c": ["€ 1.234,5", "-"], "d": ["a, b", "1"]})
    assert numbers(decimals["a"]).tolist() == [1.234, 950]
    assert numbers(decimals["b"])[0] == 0.5
    assert numbers(decimals["c"])[0] == 1234.5
    assert decimals["d"] == ["a, b", "1"]


def test_a_tab_does_not_make_thousands_decimals(tmp_path):
    (tmp_path / "a.tsv").write_text("a\tb\n1,250\tx\n950\ty\n")
    assert numbers(as_frame(tmp_path / "a.tsv")["a"]).tolist() == [1250, 950]
    (tmp_path / "a.csv").write_text("a;b\n1,250;x\n950;y\n")
    assert numbers(as_frame(tmp_path / "a.csv")["a"]).tolist() == [1.25, 950]


def test_polars():
    check_frame(as_frame(pytest.importorskip("polars").DataFrame(COLUMNS)))


def test_pandas():
    pandas = pytest.importorskip("pandas")
    spans = pandas.Series(pandas.to_timedelta(["1h", "-2 days", None]))
    assert np.allclose(as_frame(pandas.DataFrame({"a": spans}))["a"], [3600, -172800, np.nan], equal_nan=True)
    check_frame(as_frame(pandas.DataFrame(COLUMNS)))
    check_frame(as_frame(pandas.DataFrame(COLUMNS).convert_dtypes()))
    check_frame(as_frame(pandas.DataFrame(COLUMNS).astype({"d": "datetime64[ns]", "b": "category"})))


def test_npz_tables(tmp_path):
    path = tmp_path / "t.npz"
    np.savez(path, x=np.zeros((3, 2)), y=np.arange(3), other=np.zeros(2))
    assert list(as_frame(path)) == ["x0", "x1", "y"]
    np.savez(path, x=np.zeros((3, 2, 2)), y=np.arange(3))
    with pytest.raises(ValueError, match="for images and the like choose a method"):
        as_frame(path)
    with pytest.raises(ValueError, match="a table is a DataFrame"):
        as_frame(tmp_path / "t.xlsx")


def test_targets_by_name_and_beside_the_table():
    frame = as_frame({"a": [1.0, 2.0], "b": [3.0, 4.0]})
    inputs, targets = with_targets(frame, "b")
    assert list(inputs) == ["a"]
    assert targets["b"].tolist() == [3, 4]
    inputs, targets = with_targets(frame, np.zeros((2, 3)))
    assert (list(inputs), list(targets)) == (["a", "b"], ["y0", "y1", "y2"])
    with pytest.raises(ValueError, match="did you mean 'aa'"):
        with_targets(as_frame({"aa": [1.0], "b": [1.0]}), "a")
    with pytest.raises(ValueError, match="the table has 2 rows and the target 3"):
        with_targets(frame, np.zeros(3))


# Training


def test_folds_are_equal_and_stratified():
    y = torch.tensor([0] * 40 + [1] * 10)
    fold = deal(y, 5, torch.Generator().manual_seed(0))
    assert fold.bincount().tolist() == [10] * 5
    assert fold[40:].bincount(minlength=5).tolist() == [2] * 5


def test_no_member_learns_from_the_rows_that_it_holds_out():
    source = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 3, generator=source), torch.randn(60, 1, generator=source)
    model = dubito.Model(TableNetwork(3, 3, 2), HeteroscedasticGaussian(), dubito.priors.Normal(scale=3.0))
    runs = [Training(CrossFit(repeats=1), model, x, y) for _ in range(2)]
    runs[1].y = torch.where(runs[1].held[0].unsqueeze(1), y + 9, y)
    for run in runs:
        optimizer, _ = run.optimizer()
        run.step(optimizer, torch.arange(60))
    before, after = (run.params["last.bias"] for run in runs)
    assert torch.equal(before[0], after[0])
    assert (before[1:] != after[1:]).any(1).all()
    assert (runs[0].held.sum(0) == 1).all()  # every row is held out once in a repeat


def test_out_of_fold_outputs_are_of_the_members_that_held_the_rows_out():
    source = torch.Generator().manual_seed(0)
    x, y = torch.randn(43, 3, generator=source), torch.randn(43, 1, generator=source)
    model = dubito.Model(TableNetwork(3, 3, 2), HeteroscedasticGaussian(), dubito.priors.Normal(scale=3.0))
    run = Training(CrossFit(repeats=2, steps=20), model, x, y)
    fitted = run.run()
    f = fitted.posterior.predict(x).means  # [S, N, C]
    assert fitted.outputs.shape == (2, 43, 2)
    for repeat, held in enumerate(run.held.view(2, 5, 43)):
        for k, rows in enumerate(held):
            assert torch.allclose(fitted.outputs[repeat, rows], f[5 * repeat + k, rows], atol=1e-5)
    weights = fitted.posterior.weights
    assert weights is not None
    assert torch.allclose(fitted.predictive.component_weights, weights.view(2, 5).sum(1))


def test_weights_of_a_mixture():
    scores = torch.stack([torch.zeros(500), torch.full((500,), -3.0)])
    assert best_weights(scores)[0] > 0.95
    assert best_weights(torch.zeros(2, 50)).tolist() == pytest.approx([0.5, 0.5])


# The process


def test_the_process_is_that_of_scikit_learn():
    source = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 4, generator=source, dtype=torch.float64), torch.randn(30, 2, generator=source, dtype=torch.float64)
    logs = {"length": torch.full((4,), 0.3), "scale": 0.2, "linear": -0.4, "alpha": 0.7, "noise": -1.1}
    hyper = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in logs.items()}
    p = Process(x, y, torch.arange(30), hyper).predict(x[:5] + 0.1)
    rough = kernels.ConstantKernel(math.exp(0.4)) * kernels.RationalQuadratic(math.exp(0.3), math.exp(0.7))
    linear = kernels.ConstantKernel(math.exp(-0.8) / 4) * kernels.DotProduct(0.0, "fixed")
    peer = GaussianProcessRegressor(rough + linear, alpha=math.exp(-2.2), optimizer=None).fit(x.numpy(), y.numpy())
    mean, deviation = peer.predict(x[:5].numpy() + 0.1, return_std=True)
    assert np.allclose(p.mean, mean, atol=1e-4)
    assert np.allclose(p.uncertainty.epistemic.sqrt(), deviation, atol=1e-4)
    assert torch.allclose(p.uncertainty.aleatoric, torch.tensor(math.exp(-2.2)))


def test_the_process_predicts_a_fold_as_if_it_had_not_seen_it():
    source = torch.Generator().manual_seed(0)
    x = torch.randn(40, 2, generator=source)
    y, fold = x[:, :1].sin() + 0.1 * torch.randn(40, 1, generator=source), torch.arange(40) % 5
    process, found = Process.fit(x, y, fold)
    for k in range(5):
        kept = fold[process.rows] != k
        rest = replace(process, x=process.x[kept], y=process.y[kept])
        p = rest.predict(x[fold == k])
        assert torch.allclose(found.means[:, fold == k], p.means, atol=1e-4)
        assert torch.allclose(found.covariances[:, fold == k], p.covariances, atol=1e-4)


def test_the_process_finds_the_noise_and_what_matters():
    source = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, generator=source)
    y = (2 * x[:, :1]).sin() + 0.2 * torch.randn(200, 1, generator=source)
    process, _ = Process.fit(x, y, torch.arange(200) % 5)
    assert float(process.noise.sqrt()) == pytest.approx(0.2, rel=0.2)
    assert process.hyper["length"][0] < process.hyper["length"][1:].min() - 1


# The trees


def boosters():
    source = np.random.default_rng(0)
    x = source.normal(size=(300, 4)).astype(np.float32)
    y = x[:, 0] + (x[:, 1] > 0.3)
    yield HistGradientBoostingRegressor(), x, y
    yield HistGradientBoostingClassifier(), x, y > 0.5
    yield HistGradientBoostingClassifier(max_iter=30), x, np.digitize(y, (0, 0.5, 1))


@pytest.mark.parametrize(("booster", "x", "y"), list(boosters()), ids=["numbers", "two classes", "four classes"])
def test_the_trees_are_those_of_scikit_learn(booster, x, y):
    booster.fit(x, y)
    fresh = np.random.default_rng(1).normal(size=(300, 4)).astype(np.float32)
    f = from_scikit_learn(booster).outputs(torch.from_numpy(fresh))[0].double()
    if is_classifier(booster):
        assert np.allclose(f.softmax(-1), booster.predict_proba(fresh), atol=1e-6, rtol=0)
    else:
        assert np.allclose(f[:, 0], booster.predict(fresh), atol=1e-6, rtol=0)


def test_thresholds_split_at_the_same_place_in_float32():
    thresholds = np.random.default_rng(0).normal(size=2000)
    near = thresholds.astype(np.float32)
    for side in (-np.inf, 0, np.inf):
        x = near if side == 0 else np.nextafter(near, np.float32(side))
        assert np.array_equal(x <= below(thresholds), x.astype(np.float64) <= thresholds)


def test_no_booster_learns_from_the_rows_that_it_predicts_out_of_fold():
    source = torch.Generator().manual_seed(0)
    x = torch.randn(150, 3, generator=source)
    y = (x[:, :2] > 0).float() + 0.3 * torch.randn(150, 2, generator=source)
    fold = torch.arange(150) % 3
    trees, p = Trees.fit(x, y, fold)
    f, out = trees.outputs(x), p.means[0]  # [3, N, C] and [N, C]
    assert (f.shape, out.shape) == ((3, 150, 4), (150, 4))
    for k in range(3):
        held = fold == k
        assert torch.equal(out[held], f[k, held])
        for target in range(2):
            rounds = int((trees.output == 4 * k + target).sum())
            assert 0 < rounds < ROUNDS
            alone = HistGradientBoostingRegressor(max_iter=rounds, early_stopping=False).fit(x[~held], y[~held, target])
            assert np.allclose(f[k, :, target], alone.predict(x), atol=1e-6)


def test_the_trees_find_the_noise():
    source = torch.Generator().manual_seed(0)
    x = torch.rand(900, 2, generator=source)
    deviation = torch.where(x[:, :1] > 0.5, 1.0, 0.2)
    _, p = Trees.fit(x, deviation * torch.randn(900, 1, generator=source), torch.arange(900) % 2)
    widths = (p.means[0, :, 1] / 2).exp()
    for true in (0.2, 1.0):
        assert float(widths[deviation.flatten() == true].median()) == pytest.approx(true, rel=0.25)


def test_no_trees_without_a_class_in_every_training():
    y = torch.tensor([0] * 30 + [1] * 19 + [2])
    model = fit_table(torch.randn(50, 2), y, kind="classification")
    assert not model.experts


def test_a_table_without_trees(monkeypatch, tmp_path):
    monkeypatch.setattr("dubito.apps.tables.trees.LARGEST", 39)
    x = torch.linspace(-1, 1, 40).unsqueeze(1)
    model = fit_table(x, x.flatten().sin())
    assert not model.shares.keys() & {"trees", "forest"}
    model.save(tmp_path / "t.safetensors")
    assert not any(name.startswith(("trees", "forest")) for name in dubito.tensors.store.read(tmp_path / "t.safetensors")[0])
    assert torch.equal(TableModel.load(tmp_path / "t.safetensors").predict(x).mean, model.predict(x).mean)


@pytest.mark.parametrize("classes", [0, 3])
def test_the_forest_is_that_of_scikit_learn(classes):
    source = np.random.default_rng(0)
    x = torch.from_numpy(source.normal(size=(200, 3)).astype(np.float32))
    y = x[:, :1] + 0.1 * torch.from_numpy(source.normal(size=(200, 1)).astype(np.float32))
    y = torch.bucketize(y[:, 0], torch.tensor([-0.5, 0.5])) if classes else y
    fold = torch.arange(200) % 2
    forest, p = Forest.fit(x, y, fold, classes)
    held = fold == 1
    values = torch.nn.functional.one_hot(y, classes).float() if classes else y
    theirs = ExtraTreesRegressor(TREES, random_state=derive_seed(0, "forest", 1) % 2**32).fit(x[~held], values[~held].squeeze(1))
    if classes:
        shares = torch.from_numpy(theirs.predict(x[held])).float()
        expected = (shares + 0.5 / TREES) / (1 + 0.5 / TREES * classes)
        assert torch.allclose(p.mean[held], expected, atol=1e-5)
        assert torch.allclose(forest.predict(x, Categorical()).mean.sum(-1), torch.ones(200), atol=1e-5)
    else:
        assert np.allclose(
            p.mean[held, 0], theirs.predict(x[held]), atol=0.03
        )  # twenty quantiles stand for the values of the trees
        assert torch.equal(
            forest.predict(x, p.likelihood).mean[:3], Forest.of(forest.tensors()).predict(x, p.likelihood).mean[:3]
        )


def test_the_spread_of_a_forest_is_noise():
    source = torch.Generator().manual_seed(0)
    x = torch.rand(600, 5, generator=source)
    _, p = Forest.fit(x, torch.randn(600, 1, generator=source), torch.arange(600) % 10)
    split = p.uncertainty
    assert torch.allclose(split.aleatoric, split.total, rtol=1e-4)
    assert float(split.total.mean()) == pytest.approx(1, rel=0.3)
    apart = mixture([p, p.rescaled(5.0, 1.0)], [0.5, 0.5]).uncertainty  # two functions that disagree by 5
    assert torch.allclose(apart.epistemic, torch.full((600, 1), 6.25), rtol=0.02)
    assert torch.allclose(stretch(p, 2.0).uncertainty.aleatoric, 4 * split.aleatoric, rtol=1e-3)


def gaussian(mean, variance=1.0):
    f = torch.stack([mean, torch.full_like(mean, math.log(variance))], -1)
    return LatentMixture(HeteroscedasticGaussian(), f.unsqueeze(0))


def test_shares_of_experts():
    source = torch.Generator().manual_seed(0)
    truth = torch.randn(400, generator=source)
    y = (truth + 0.3 * torch.randn(400, generator=source)).unsqueeze(1)
    good, poor = gaussian(truth, 0.1), gaussian(torch.zeros(400))
    assert _shares({"networks": good, "process": poor, "trees": poor}, y) == {"networks": 1.0}
    shares = _shares({"networks": poor, "process": poor, "trees": good}, y)
    assert set(shares) == {"networks", "trees"}
    assert shares["trees"] > 0.9
    classes = (truth > 0).long()
    sure, even = (LatentMixture(Categorical(), torch.stack([-f, f], -1).unsqueeze(0)) for f in (3 * truth, 0 * truth))
    assert _shares({"networks": sure, "trees": even}, classes) == {"networks": 1.0}
    assert _shares({"networks": even, "trees": sure}, classes)["trees"] > 0.9


# Calibration


@pytest.mark.parametrize(("true", "low", "high"), [(0.5, 0.4, 0.6), (3.0, 2.4, 3.6)])
def test_scales_mend_the_width(true, low, high):
    source = torch.Generator().manual_seed(0)
    p = LatentMixture(HeteroscedasticGaussian(), torch.zeros(1, 2000, 2))
    y = true * torch.randn(2000, 1, generator=source)
    fixed = Scales.fit(p, y)(p)
    assert low < float(fixed.uncertainty.total[0].sqrt()) < high
    assert score(fixed, y)["coverage"] == pytest.approx(0.9, abs=0.02)


def test_scales_mend_the_tails():
    source = torch.Generator().manual_seed(0)
    p = LatentMixture(HeteroscedasticGaussian(), torch.zeros(1, 4000, 2))
    y = torch.randn(4000, 1, generator=source) / torch.rand(4000, 1, generator=source).clamp_min(0.01).sqrt()
    fixed = Scales.fit(p, y)(p)
    assert score(fixed, y)["coverage"] == pytest.approx(0.9, abs=0.015)
    assert float(fixed.log_prob(y).mean()) > float(dubito.recalibrate.Variance().fit(p, y)(p).log_prob(y).mean()) + 0.1


def test_scales_keep_the_mean_and_the_shares_of_the_uncertainty():
    means = torch.tensor([[[0.0, 0.0]], [[2.0, 1.0]]])
    p = LatentMixture(HeteroscedasticGaussian(), means, weights=torch.tensor([0.25, 0.75]))
    fixed = Scales((0.5, 2.0), (0.3, 0.7), 10)(p)
    assert torch.allclose(fixed.mean, p.mean)
    share = [q.uncertainty.epistemic / q.uncertainty.total for q in (p, fixed)]
    assert torch.allclose(*share)


def test_temperature_is_kept_near_one_by_few_rows():
    sure = LatentMixture(Categorical(), torch.tensor([[[2.0, 0.0]] * 10]))
    assert 0.5 < temperature(sure, torch.zeros(10, dtype=torch.long)).temperature < 1
    many = LatentMixture(Categorical(), torch.tensor([[[4.0, 0.0]] * 4000]))
    y = (torch.arange(4000) % 4 == 0).long()
    assert temperature(many, y).temperature == pytest.approx(3.641, abs=0.1)


def test_odd_rows_are_at_least_as_uncertain_as_asked():
    p = LatentMixture(HeteroscedasticGaussian(), torch.zeros(1, 3, 2))
    q = at_least(p, torch.tensor([4.0]), torch.tensor([False, True, True]))
    assert q.uncertainty.total.flatten().tolist() == pytest.approx([1, 4, 4])
    classes = dubito.recalibrate.Tempered(1.0, 1)(
        LatentMixture(Categorical(), torch.tensor([[[5.0, 0.0], [5.0, 0.0], [0.1, 0.0]]]))
    )
    r = at_least(classes, torch.tensor(0.5), torch.tensor([False, True, True]))
    assert r.uncertainty.total[0] == classes.uncertainty.total[0]
    assert float(r.uncertainty.total[1]) == pytest.approx(0.5, abs=1e-4)
    assert float(r.uncertainty.total[2]) == pytest.approx(float(classes.uncertainty.total[2]), abs=1e-6)


# The model


@pytest.fixture(scope="module")
def regression():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dubito.apps.tables.fit._steps", lambda network, settings, rows: 150)
        return fit_table(people(), "pay")


@pytest.fixture(scope="module")
def classification():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dubito.apps.tables.fit._steps", lambda network, settings, rows: 150)
        frame = people()
        frame["rich"] = np.where(frame.pop("pay") > 2250, "yes", "no").tolist()
        return fit_table(frame, "rich")


def test_a_regression_learns(regression):
    fresh = people(seed=1)
    y = torch.from_numpy(fresh["pay"]).unsqueeze(1)
    found = score(regression.predict(fresh), y)
    assert found["rmse"] < 0.4 * float(y.std())
    assert 0.75 < found["coverage"] <= 1
    assert regression.kind == "regression"
    assert "column id was left out: an ID: the number of the row" in regression.remarks
    assert regression.scores["coverage"] > 0.8
    assert "Note: column again was left out: the same as age" in regression.summary()


def test_classes_are_learned(classification):
    fresh = people(seed=1)
    y = torch.from_numpy((fresh.pop("pay") > 2250).astype(np.int64))
    assert classification.classes == ("no", "yes")
    assert score(classification.predict(fresh), y)["accuracy"] > 0.8


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_odd_rows_are_not_more_certain(kind, request):
    model = request.getfixturevalue(kind)
    fresh = people(40, seed=2)
    usual = model.predict(fresh).uncertainty.total.flatten()
    assert not any(model.notes(fresh))
    for changes in ({"age": [""] * 40}, {"age": np.full(40, 1e7)}, {"city": ["Mars"] * 40}, {"day": ["never"] * 40}):
        odd = {**fresh, **changes}
        assert all(model.notes(odd))
        total = model.predict(odd).uncertainty.total.flatten()
        assert float(total.min()) >= float(usual.median())
        assert float(total.mean()) >= float(usual.mean())


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_saved_and_loaded(kind, request, tmp_path):
    model, fresh = request.getfixturevalue(kind), people(7, seed=3)
    model.save(tmp_path / "t.safetensors")
    same = TableModel.load(tmp_path / "t.safetensors")
    assert torch.equal(same.predict(fresh).mean, model.predict(fresh).mean)
    assert torch.equal(same.out_of_fold.uncertainty, model.out_of_fold.uncertainty)
    assert (same.scores, same.remarks, same.encoder) == (dict(model.scores), model.remarks, model.encoder)
    assert same.summary() == model.summary()
    dubito.save(model.posterior, tmp_path / "p.safetensors")
    with pytest.raises(dubito.tensors.store.FileError, match="not a fitted table"):
        TableModel.load(tmp_path / "p.safetensors")


def test_heavy_tails_are_seen():
    source = torch.Generator().manual_seed(0)
    p = LatentMixture(HeteroscedasticGaussian(), torch.zeros(1, 1000, 2))
    normal = torch.randn(1000, 1, generator=source)
    student = normal / torch.rand(1000, 1, generator=source).log().neg().sqrt()  # of two degrees of freedom
    assert _heavy(p, student)
    assert not _heavy(p, normal)
    assert not _heavy(p, 3 * normal)


def test_the_better_tails_are_kept(monkeypatch, tmp_path):
    monkeypatch.setattr("dubito.apps.tables.fit._heavy", lambda p, y: True)
    x = torch.linspace(-1, 1, 40).unsqueeze(1)
    for scores, kept in (((1.0, 0.0), True), ((0.0, 1.0), False)):
        given = iter(scores)  # of the Student-t, and of the Gaussian
        monkeypatch.setattr("dubito.apps.tables.fit._calibrated_score", lambda p, data, given=given: next(given))
        model = fit_table(x, x.flatten().sin())
        assert model.design.tails == kept
        assert isinstance(model.posterior.model.likelihood, dubito.HeteroscedasticStudentT) == kept
        model.save(tmp_path / "t.safetensors")
        assert torch.equal(TableModel.load(tmp_path / "t.safetensors").predict(x).mean, model.predict(x).mean)


def test_the_posterior_before_the_map(regression):
    fresh = people(5, seed=4)
    x = regression.inputs(fresh)
    before, after = regression.before(x), regression.predict(fresh)
    assert {"networks", "process"} < set(regression.shares)
    assert sum(regression.shares.values()) == pytest.approx(1)
    likelihood = HeteroscedasticGaussian()
    means = {name: one.predict(x, likelihood).mean for name, one in regression.experts.items()}
    means["networks"] = regression.posterior.predict(x).mean
    mixed = sum(share * means[name][:, 0] for name, share in regression.shares.items())
    assert torch.allclose(mixed, before.mean[:, 0], atol=1e-3)
    assert torch.allclose(regression.shift + regression.scale * before.mean[:, :1].double(), after.mean, rtol=1e-4)
    shares = [p.uncertainty.epistemic / p.uncertainty.total for p in (before, after)]
    assert torch.allclose(shares[0].double(), shares[1], atol=1e-4)


def test_classes_are_a_mixture_of_probabilities(classification):
    x = classification.inputs(people(5, seed=4))
    before = classification.before(x)
    assert classification.shares.keys() == {"networks", "trees", "forest"}
    parts = {name: one.predict(x, Categorical()).mean for name, one in classification.experts.items()}
    parts["networks"] = classification.posterior.predict(x).mean
    assert torch.allclose(sum(share * parts[name] for name, share in classification.shares.items()), before.mean, atol=1e-5)
    assert (before.uncertainty.epistemic > 0).all()


def test_rows_without_a_target_are_left_out_aloud():
    frame = people(40)
    frame["pay"][3] = np.nan
    model = fit_table(frame, "pay")
    assert "1 rows without a target were left out" in model.remarks
    assert len(model.out_of_fold.y) == 39
    assert any("few" in remark for remark in model.remarks)


def test_several_targets_and_seeds():
    x = torch.linspace(-1, 1, 40).unsqueeze(1)
    y = torch.cat([x, 2 - x], 1)
    model = fit_table(x, y, seed=3)
    assert model.targets == ("y0", "y1")
    assert model.predict(x).mean.shape == (40, 2)
    assert torch.equal(fit_table(x, y, seed=3).predict(x).mean, model.predict(x).mean)


def test_budget_ends_the_training_aloud(monkeypatch):
    assert "budget" not in " ".join(fit_table(people(), "pay", budget=600.0).remarks)
    monkeypatch.setattr("dubito.apps.tables.fit._steps", lambda network, settings, rows: 10**6)
    x = torch.linspace(-1, 1, 40).unsqueeze(1)
    model = fit_table(x, x.flatten(), budget=0.3)
    assert any("the budget ended the training" in remark for remark in model.remarks)


def test_budget_bounds_the_other_experts_too(monkeypatch):
    monkeypatch.setattr("dubito.apps.tables.fit._steps", lambda network, settings, rows: 10**6)
    monkeypatch.setattr("dubito.apps.tables.fit.TRAINING", 1.0)  # so that no time is left after the networks
    x = torch.linspace(-1, 1, 40).unsqueeze(1)
    model = fit_table(x, x.flatten(), budget=0.3)
    assert list(model.shares) == ["networks"]
    assert any("no time for a Gaussian process, boosted trees, a forest of random trees:" in r for r in model.remarks)
    with pytest.raises(TimeoutError):
        Trees.fit(x, x, torch.arange(40).unsqueeze(0) % 5, end=0.0)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still, in a list, until someone moves it."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_work_ends_as_soon_as_it_is_clear_that_it_is_too_long(clock):
    with pytest.raises(TimeoutError):
        [moved(clock, item) for item in in_time(range(100), end=1050.0)]
    assert clock[0] == 1010  # a tenth of the work took 10 of 50 seconds
    assert [moved(clock, item) for item in in_time(range(50), end=1060.0)] == list(range(50))


def test_an_expert_that_takes_too_long_leaves_its_time_to_the_others(monkeypatch, clock):
    def slow(hyper, x):
        clock[0] += 0.1  # 100 times
        return covariance(hyper, x)

    monkeypatch.setattr("dubito.apps.tables.process.covariance", slow)
    x = torch.linspace(-1, 1, 100).unsqueeze(1)
    model = fit_table(x, (x > 0).float().flatten() + 0.1 * x.flatten(), budget=6.0)
    assert any("no time for a Gaussian process: a larger" in remark for remark in model.remarks)
    assert clock[0] == pytest.approx(1001.0)
    assert set(model.shares) - {"networks"}
    assert "process" not in model.shares


def test_predictions_and_forests_of_many_rows_end_in_time(monkeypatch, clock):
    monkeypatch.setattr("dubito.apps.tables.process.ROWS", 5)
    x = torch.randn(100, 2)
    process, _ = Process.fit(x, x[:, :1], torch.arange(100) % 5)
    kernel = dubito.apps.tables.process.kernel
    monkeypatch.setattr("dubito.apps.tables.process.kernel", lambda *args: moved(clock, kernel(*args)))
    with pytest.raises(TimeoutError):
        process.out_of_fold(x, torch.arange(100) % 5, end=1010.0)
    assert clock[0] == 1002  # two of twenty blocks
    grow = ExtraTreesRegressor.fit
    monkeypatch.setattr(ExtraTreesRegressor, "fit", lambda *args: moved(clock, grow(*args)))
    with pytest.raises(TimeoutError):
        Forest.fit(x, x[:, :1], torch.arange(100) % 5, end=1004.0)
    assert clock[0] == 1003  # one of four portions of the first forest


def test_the_training_leaves_time_for_its_last_look(monkeypatch, clock):
    step, outputs = Training.step, Training.held_out_outputs
    monkeypatch.setattr(Training, "step", lambda *args: moved(clock, step(*args)))
    monkeypatch.setattr(Training, "held_out_outputs", lambda *args: moved(clock, moved(clock, outputs(*args))))
    x = torch.linspace(-1, 1, 40).unsqueeze(1)
    fitted = CrossFit(budget=20.0, steps=6000).fit(Design(1, 1, 2).model("regression"), x, x)
    assert clock[0] == 1020  # a look, sixteen steps and a look
    assert fitted.done == 16 / 6000


def moved(clock, result):
    clock[0] += 1
    return result


@pytest.mark.parametrize(
    ("table", "target", "options", "message"),
    [
        ({"a": [1.0] * 3, "y": [1.0, 2.0, 3.0]}, "y", {}, "at least 10 rows with a target are needed; got 3"),
        ({"a": np.arange(20.0) ** 2, "y": np.ones(20)}, "y", {"kind": "regression"}, "all rows have the same target"),
        ({"a": np.arange(20.0) ** 2, "y": ["x"] * 20}, "y", {}, "every row of y is of the one class x"),
        ({"a": np.arange(20.0), "y": np.arange(20.0)}, "y", {"ignore": ("b",)}, "the table has no column 'b'"),
        ({"y": np.arange(20.0)}, "y", {}, "no column is left for the inputs"),
        ({"a": np.arange(20.0)}, "b", {}, "no column is called 'b'"),
        ({"a": np.arange(20.0) ** 2, "y": [f"2024-01-{i:02d}" for i in range(1, 21)]}, "y", {}, "20 different values in 20 rows"),
        ({"a": np.arange(20.0) ** 2, "y": ["x", "z"] * 10}, "y", {"kind": "regression"}, "the target y holds text, such as 'x'"),
        ({"a": np.arange(20.0) ** 2, "y": np.arange(20.0)}, "y", {"budget": "5m"}, "a number of seconds; got '5m'"),
    ],
)
def test_what_cannot_be_fitted(table, target, options, message):
    with pytest.raises(ValueError, match=message):
        fit_table(table, target, **options)


def test_what_is_no_table_is_told():
    class Repeated:
        columns = ("a", "a")

    class Row:
        def to_frame(self): ...

    with pytest.raises(ValueError, match="two columns are called 'a'"):
        as_frame(Repeated())
    with pytest.raises(TypeError, match="a Row is one row or one column: give a table of one row"):
        as_frame(Row())
    for cell in (1.5, "Rome"):
        with pytest.raises(TypeError, match=f"column 'a' must hold a cell for every row; got {cell!r}. For one row"):
            as_frame({"a": cell})


def test_top_level_name():
    assert dubito.fit_table is fit_table
    assert dubito.TableModel is TableModel
