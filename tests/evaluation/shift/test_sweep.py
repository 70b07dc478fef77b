import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import dubito
from dubito import metrics
from dubito.data import digits
from dubito.posteriors import Gaussian, Point
from dubito.report.shift import boxes, details, lines, section, table
from dubito.shift import Attacks, Corruptions, Rotations, corrupt, pgd, rotate, sweep


@pytest.fixture(scope="module")
def problem():
    """Digits and a linear network with a little spread, which has learned them."""
    data = digits()
    x, y = data.x_train, data.y_train
    features = torch.cat([x.flatten(1), torch.ones(len(x), 1)], 1)
    weight = 4 * torch.linalg.lstsq(features.mT @ features + torch.eye(65), features.mT @ nn.functional.one_hot(y, 10).float())[0]
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    model = dubito.Model(net, dubito.Categorical())
    mean = {"1.weight": weight[:64].mT.contiguous(), "1.bias": weight[64]}
    posterior = Gaussian.diagonal(model, mean, {name: torch.full_like(leaf, 0.3**2) for name, leaf in mean.items()})
    return posterior, data.x_test[:120], data.y_test[:120]


def test_scores_are_the_metrics(problem):
    posterior, x, y = problem
    found = sweep(posterior, x, y, shift=["gaussian_noise", "motion_blur"], how="sampled", draws=5, seed=3, batch_size=50)
    assert found.levels == (0, 1, 2, 3, 4, 5)
    assert set(found.scores) == {(kind, level) for kind in ("gaussian_noise", "motion_blur") for level in range(6)}
    p = posterior.predict(corrupt(x, "motion_blur", severity=4, seed=3), "sampled", draws=5, seed=3)
    expected = {
        "accuracy": metrics.accuracy(p, y), "nll": metrics.nll(p, y), "ece": metrics.ece(p, y), "confidence": p.mean.amax(-1).mean(),
        "epistemic": p.uncertainty.epistemic.mean(),
    }  # fmt: skip
    assert found.scores["motion_blur", 4] == {name: pytest.approx(float(value), rel=1e-4) for name, value in expected.items()}
    assert found.scores["motion_blur", 0] == found.scores["gaussian_noise", 0]
    assert found.scores["motion_blur", 5]["accuracy"] < found.scores["motion_blur", 0]["accuracy"]
    one = found.mean("nll", 2)
    assert one == pytest.approx((found.scores["gaussian_noise", 2]["nll"] + found.scores["motion_blur", 2]["nll"]) / 2)
    assert found.mean("nll") == pytest.approx(sum(found.mean("nll", level) for level in range(1, 6)) / 5)
    assert found.rows[1] == {"kind": "gaussian_noise", "level": 1, **found.scores["gaussian_noise", 1]}


def test_the_fifteen_and_the_same_for_all(problem):
    """By default all 15; another posterior sees the same images."""
    posterior, x, y = problem
    point = Point(posterior.model, posterior.params, posterior.buffers)
    found = sweep(point, x[:20], y[:20])
    assert len(found.kinds) == 15
    assert found.scores == sweep(point, x[:20], y[:20]).scores
    assert found.mean("epistemic") == pytest.approx(0, abs=1e-6)


def test_rotations_and_transform(problem):
    """Turned before it is flattened and scaled."""
    posterior, x, y = problem
    flat = replace(posterior, model=dubito.Model(nn.Sequential(nn.Identity(), nn.Linear(64, 10)), dubito.Categorical()))
    one = sweep(flat, 2 * x, y, shift=Rotations((90, 180)), transform=lambda x: (x / 2).flatten(1))
    expected = metrics.nll(posterior.predict(rotate(x, 180)), y)
    assert one.scores["rotation", 180]["nll"] == pytest.approx(float(expected), rel=1e-4)
    assert len(sweep(posterior, x[:9], y[:9], shift="rotations").levels) == 13


def test_attacks(problem):
    """Accuracy falls with the size, and faster by many steps than by one."""
    posterior, x, y = problem
    shift = Attacks((0.02, 0.1), (0, 1), how="point", steps=5)
    found = sweep(posterior, x, y, shift=shift, how="sampled", draws=5)
    for kind in ("fgsm", "pgd"):
        assert found.scores[kind, 0.1]["accuracy"] < found.scores[kind, 0.02]["accuracy"] < found.scores[kind, 0]["accuracy"]
    moved = pgd(posterior, x, y, size=0.1, bounds=(0, 1), how="point", steps=5)
    assert found.scores["pgd", 0.1]["nll"] == pytest.approx(
        float(metrics.nll(posterior.predict(moved, "sampled", draws=5), y)), rel=1e-4
    )


def test_regression():
    torch.manual_seed(0)
    model = dubito.Model(nn.Sequential(nn.Flatten(), nn.Linear(64, 1)), dubito.Gaussian(scale=0.5))
    point = Point(model, model.parameters(), model.buffers())
    found = sweep(point, torch.rand(10, 1, 8, 8), torch.randn(10, 1), shift=["contrast"])
    assert found.metrics == ("nll", "rmse", "coverage", "epistemic")
    with pytest.raises(ValueError, match="leave it out of `metrics`"):
        sweep(point, torch.rand(10, 1, 8, 8), torch.randn(10, 1), shift=["contrast"], metrics=["confidence"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"shift": "rain"}, "'corruptions', 'rotations'"),
        ({"shift": ["rain"]}, "no corruption 'rain'"),
        ({"shift": Corruptions(("fog",), (0.5,))}, "severity is 1, 2, 3, 4 or 5; got 0.5"),
        ({"shift": Corruptions((), (1,))}, "at least one kind"),
        ({"shift": Attacks((0.1,), (0.5, 1))}, "outside `bounds`"),
        ({"metrics": ["f1"]}, "metric must be one of 'accuracy', .* got 'f1'"),
        ({"batch_size": 0}, "batch_size must be at least 1; got 0"),
        ({"shift": ["saturate"]}, "these images are gray"),
    ],
)
def test_errors(problem, more, message):
    posterior, x, y = problem
    with pytest.raises(ValueError, match=message):
        sweep(posterior, x, y, **more)


def test_other_errors(problem):
    posterior, x, y = problem
    with pytest.raises(ValueError, match="120 inputs for 119 targets"):
        sweep(posterior, x, y[1:])
    with pytest.raises(ValueError, match="kind must be one of 'fgsm', 'pgd'; got 'cw'"):
        Attacks((0.1,), None, kinds=("cw",))


@pytest.fixture(scope="module")
def sweeps(problem):
    posterior, x, y = problem
    point = Point(posterior.model, posterior.params, posterior.buffers)
    kinds = ["gaussian_noise", "motion_blur", "contrast", "fog"]
    return {
        label: sweep(one, x[:60], y[:60], shift=kinds, metrics=["accuracy", "nll"])
        for label, one in (("network", point), ("Gaussian", posterior))
    }


def test_table(sweeps):
    found = table(sweeps)
    assert [row[0] for row in found.rows] == ["network", "Gaussian"]
    assert [column.name for column in found.columns][:3] == ["method", "accuracy, clean", "accuracy, shifted"]
    assert found.rows[0][2] == pytest.approx(sweeps["network"].mean("accuracy"))
    assert all(isinstance(value, float) and math.isfinite(value) for row in found.rows for value in row[1:])
    one = details("network", sweeps["network"], "nll")
    assert [column.name for column in one.columns] == ["shift", "clean", "1", "2", "3", "4", "5"]
    assert one.rows[1][0] == "motion_blur"
    assert one.rows[1][3] == sweeps["network"].scores["motion_blur", 2]["nll"]


def test_pictures(sweeps):
    for draw in (lines, boxes):
        found = draw(sweeps, "nll")
        assert found.image.startswith("<svg")
        assert "NLL from clean inputs to severity 5" in found.alt
    page = dubito.report.Report("Shift", (section(sweeps),)).html()
    assert page.count("<svg") == 2


def test_pictures_of_what_cannot_be_compared(sweeps, problem):
    other = sweep(problem[0], problem[1][:9], problem[2][:9], shift=["fog"], metrics=["nll"])
    with pytest.raises(ValueError, match="use the same `shift` for all"):
        table({**sweeps, "other": other})
    with pytest.raises(ValueError, match="sweeps is empty: give at least one"):
        lines({}, "nll")
    assert section({"other": other}).figures[0].caption == "The mean over fog."


def test_targets_may_be_numpy_and_loaders_are_refused_in_words():
    model = dubito.Model(torch.nn.Linear(3, 4), dubito.Categorical())
    point = dubito.posteriors.Point(model, model.parameters(), model.buffers())
    x, y = torch.rand(6, 3), torch.randint(4, (6,))
    attacks = Attacks((0.1,), (0, 1))
    assert sweep(point, x, y.numpy(), shift=attacks).scores == sweep(point, x, y, shift=attacks).scores
    with pytest.raises(TypeError, match="one tensor"):
        sweep(point, [(x, y)], None, shift=attacks)
