"""One pass over batches equals the metrics on everything at once."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import dubito
from dubito import Bernoulli, Categorical, Gaussian, HeteroscedasticCategorical, HeteroscedasticGaussian, MultiTask, measures
from dubito.evaluation.judge import Judge, Judgement, judge
from dubito.inference.progress import Progress
from dubito.likelihoods import Likelihood
from dubito.metrics import (
    DECISIONS,
    METRICS,
    brier_decomposition,
    pit,
    quantile_calibration,
    reliability,
    risk_coverage,
)
from dubito.posteriors.predictive import LatentMixture, StudentT

N, S = 230, 4


def spread(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(1))


def dense(likelihood, width, y):
    return LatentMixture(likelihood, 2 * spread(S, 23, 5, 2, width)), y


def missing(y):
    y[::3, 1] = -100
    return y


WEIGHTS = torch.tensor([0.1, 0.2, 0.3, 0.4])
SCALE = {"likelihood:log_scale": spread(S, 1)}
CASES = {
    "classes": lambda: (LatentMixture(Categorical(), 2 * spread(S, N, 5)), integers(5, N)),
    "classes, weights and learned noise": lambda: (
        LatentMixture(Categorical(scale=None), spread(S, N, 5), weights=WEIGHTS, params=SCALE),
        integers(5, N),
    ),
    "classes, Gaussian logits": lambda: (
        LatentMixture(Categorical(), spread(1, N, 3), spread(1, N, 3, seed=2).square(), quadrature=8),
        integers(3, N),
    ),
    "classes, probit": lambda: (
        LatentMixture(Categorical(), spread(1, N, 3), spread(1, N, 3, seed=2).square(), quadrature=8, link="probit"),
        integers(3, N),
    ),
    "noisy classes": lambda: (LatentMixture(HeteroscedasticCategorical(samples=8), spread(S, N, 6)), integers(3, N)),
    "maps of classes": lambda: dense(Categorical(dim=1), 3, missing(integers(3, 23, 5, 2))),
    "labels": lambda: (LatentMixture(Bernoulli(), spread(S, N, 3)), integers(2, N, 3)),
    "one label": lambda: (LatentMixture(Bernoulli(), spread(S, N, 1)), integers(2, N)),
    "regression": lambda: (LatentMixture(Gaussian(scale=(0.3, 0.7)), spread(S, N, 2), weights=WEIGHTS), spread(N, 2, seed=3)),
    "regression with covariances": lambda: (
        LatentMixture(Gaussian(scale=0.5), spread(S, N, 1), spread(S, N, 1, seed=2).square()),
        spread(N, seed=3),
    ),
    "heteroscedastic": lambda: (LatentMixture(HeteroscedasticGaussian(), spread(S, N, 2)), spread(N, 1, seed=3)),
    "maps of numbers": lambda: dense(Gaussian(scale=0.5, dim=1), 1, spread(23, 1, 5, 2, seed=3)),
    "Student-t": lambda: (
        StudentT(
            Gaussian(outputs=2), spread(1, 40, 2), spread(1, 40, 2, seed=2).square(), torch.tensor([2.0, 3.0]), torch.ones(2)
        ),
        spread(40, 2, seed=3),
    ),
}


def part(p, rows):
    if isinstance(p, StudentT):
        return StudentT(p.likelihood, p.means[:, rows], p.spread[:, rows], p.shape, p.rate)
    cov = None if p.cov is None else p.cov[:, rows]
    return LatentMixture(p.likelihood, p.means[:, rows], cov, p.weights, p.params, p.quadrature, link=p.link)


def fed(p, y, size=60, **options) -> Judgement:
    judged = Judge(**options)
    for start in range(0, len(y), size):
        rows = slice(start, start + size)
        judged.update(part(p, rows), y[rows])
    return judged.compute()


@pytest.mark.parametrize("case", CASES)
def test_batches_give_what_all_at_once_gives(case):
    p, y = CASES[case]()
    discrete = p.likelihood.discrete
    found = fed(p, y, size=7 if "maps" in case else 30 if "Student" in case else 60)
    for name, metric in METRICS.items():
        if metric.classes if discrete else metric.regression:
            assert found[name] == pytest.approx(float(metric.function(p, y)), rel=2e-5, abs=2e-6), name
        else:
            assert name not in found.values
    target = p.likelihood.target(y, p.f_mean)
    if discrete:
        keep = target != -100 if not isinstance(p.likelihood, Bernoulli) else torch.ones(len(target), dtype=torch.bool)
        doubt = measures.one_minus_max(p)[keep]
        if isinstance(p.likelihood, Bernoulli):
            errors = ((p.mean > 0.5) != target.bool()).any(-1)
        else:
            errors = p.mean.argmax(-1)[keep] != target[keep]
        parts = brier_decomposition(p, y)
        for name, value in parts._asdict().items():
            assert found[f"brier_{name}"] == pytest.approx(float(value), rel=1e-4, abs=1e-6)
        bins = reliability(p, y)
        assert found.reliability is not None
        torch.testing.assert_close(found.reliability.count, bins.count)
        torch.testing.assert_close(found.reliability.accuracy, bins.accuracy, equal_nan=True)
        torch.testing.assert_close(found.reliability.upper, bins.upper, equal_nan=True)
    else:
        keep = torch.ones(target.shape[:-1], dtype=torch.bool)
        doubt, errors = measures.total_variance(p)[keep], (p.mean - target).square().sum(-1)[keep]
        levels = quantile_calibration(p, y)
        assert found.quantiles is not None
        torch.testing.assert_close(found.quantiles.observed, levels.observed, atol=2e-3, rtol=0)
        values = pit(p, y).double().flatten()
        inside = [((values > k / 20) | (k == 0)).sum() - (values > (k + 1) / 20).sum() for k in range(20)]  # 0 counts, too
        assert found.pit is not None
        assert (found.pit - torch.tensor(inside)).abs().sum() <= 2
    for name, metric in DECISIONS.items():
        if metric.classes if discrete else metric.regression:
            assert found[name] == pytest.approx(float(metric.function(doubt, errors)), rel=1e-4, abs=1e-5), name
    assert found.n == int(keep.sum())
    split = p.uncertainty
    assert found["total"] == pytest.approx(float(split.total[keep].sum()) / found.n, rel=1e-4)
    assert found["epistemic"] == pytest.approx(float(split.epistemic[keep].sum()) / found.n, rel=1e-3, abs=1e-6)
    share, risk = risk_coverage(doubt, errors)
    (decision,) = found.decisions.values()
    torch.testing.assert_close(decision.coverage.float(), share)
    torch.testing.assert_close(decision.risk.float(), risk, rtol=1e-4, atol=1e-5)


def test_all_scores_of_classes():
    p, y = CASES["classes"]()
    names = list(measures.MEASURES)
    found = fed(p, y, scores=names)
    errors = p.mean.argmax(-1) != y
    for name in names:
        expected = float(DECISIONS["auroc"].function(measures.MEASURES[name](p), errors))
        assert found.decisions[name].values["auroc"] == pytest.approx(expected, abs=1e-4), name
        counts = found.decisions[name].counts
        assert counts is not None
        assert counts.wrong.sum() == errors.sum()
        assert counts.right.sum() + counts.wrong.sum() == N
    assert "by mutual_information" in str(found)


def test_impossible_classes_and_certain_ones():
    p = LatentMixture(Categorical(), torch.tensor([[[0.0, -math.inf], [1e4, -1e4]]]))
    y = torch.tensor([0, 0])
    found = fed(p, y)
    assert found["nll"] == 0
    assert found["total"] == 0
    assert found["accuracy"] == 1
    assert math.isnan(found["auroc"])
    assert fed(p, torch.tensor([1, 0]))["nll"] == math.inf
    assert found.data["values"]["auroc"] is None


def test_long_curves_are_thinned():
    p, y = LatentMixture(Categorical(), spread(1, 4321, 3)), integers(3, 4321)
    found = fed(p, y, size=4321, metrics=["aurc"])
    share, risk = risk_coverage(p, p.mean.argmax(-1) != y)
    decision = found.decisions["one_minus_max"]
    assert len(decision.coverage) == 1000
    assert decision.coverage[-1] == 1
    where = (decision.coverage * 4321).round().long() - 1
    torch.testing.assert_close(decision.risk.float(), risk[where], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(decision.coverage.float(), share[where])
    assert list(found.values) == ["aurc"]
    assert found.reliability is None


@pytest.fixture(scope="module")
def fitted():
    x, y = spread(N, 3), integers(3, N)
    model = dubito.Model(torch.nn.Linear(3, 3), Categorical())
    return dubito.fit(model, dubito.Ensemble(dubito.MAP(epochs=1), 3), (x, y)), x, y


class Stream(IterableDataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __iter__(self):
        return iter(zip(self.x, self.y, strict=True))


def test_any_data_and_any_predictor(fitted):
    posterior, x, y = fitted
    p = posterior.predict(x)
    expected = fed(p, y).values
    data = TensorDataset(x, y)
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(data, batch_size=40, shuffle=True, generator=generator)
    before = torch.get_rng_state(), generator.get_state()
    for given in (
        (x, y),
        (x.numpy(), y.numpy()),
        data,
        loader,
        Stream(x, y),
        [(x[:9], y[:9]), {"input": x[9:], "labels": y[9:]}],
    ):
        found = judge(posterior, given, size=50)
        assert found.values == pytest.approx(expected, rel=1e-4, abs=1e-6)
    found = judge(lambda x: posterior.predict(x), ((x[i : i + 50], y[i : i + 50]) for i in range(0, N, 50)))
    assert found.values == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], generator.get_state())
    assert judge(posterior, (x, y), draws=1)["epistemic"] == pytest.approx(0, abs=1e-6)


def test_the_progress_is_told(fitted, monkeypatch):
    posterior, x, y = fitted
    seen = []

    class Told(Progress):
        def update(self, done, info):
            seen.append((done, self.total, info["examples"]))
            return super().update(done, info)

    monkeypatch.setattr("dubito.evaluation.judge.stream.Progress", Told)
    judge(posterior, (x, y), size=115)
    assert seen == [(1, 2, 115), (2, 2, 230)]


def test_mistakes_are_told(fitted):
    posterior, x, y = fitted
    with pytest.raises(ValueError, match=r"metrics must be a list of names among accuracy.*got 'acuracy'"):
        judge(posterior, (x, y), metrics=["acuracy"])
    with pytest.raises(ValueError, match=r"metrics must be a list.*got 'nll'"):
        judge(posterior, (x, y), metrics="nll")
    with pytest.raises(ValueError, match=r"scores must be a list.*got 'doubt'"):
        judge(posterior, (x, y), scores=["doubt"])
    with pytest.raises(ValueError, match="rmse is not for classes, which Categorical predicts"):
        judge(posterior, (x, y), metrics=["rmse"])
    with pytest.raises(TypeError, match="got a int"):
        judge(3, (x, y))
    with pytest.raises(TypeError, match="returns a Tensor: for outputs"):
        judge(lambda x: x, (x, y))
    with pytest.raises(ValueError, match="are for posteriors"):
        judge(lambda x: x, (x, y), how="sampled")
    with pytest.raises(ValueError, match="inputs only"):
        judge(posterior, DataLoader(TensorDataset(x)))
    with pytest.raises(ValueError, match="nothing to judge"):
        judge(posterior, [])
    with pytest.raises(ValueError, match="same, positive number of rows"):
        judge(posterior, (x, y[:5]))
    with pytest.raises(TypeError, match="got a Tensor"):
        judge(posterior, x)
    with pytest.raises(ValueError, match="from 0 to 9, but the network has 3 classes"):
        judge(posterior, (x, torch.arange(N) % 10))
    tasks = LatentMixture(MultiTask({"depth": (Gaussian(scale=1.0), 1), "label": (Categorical(), 3)}), torch.zeros(2, 5, 4))
    with pytest.raises(ValueError, match=r"one task at a time: use p\.task"):
        Judge().update(tasks, torch.zeros(5, 2))
    mixed = Judge()
    mixed.update(*CASES["classes"]())
    with pytest.raises(ValueError, match="judge them apart"):
        mixed.update(*CASES["regression"]())


def test_memory_is_bounded_by_the_batch():
    """Twenty times the data takes a few bytes for each example more: its confidence, its score, and two flags."""
    judged = Judge()
    p, y = LatentMixture(Categorical(), spread(20, 500, 10)), integers(10, 500)
    for _ in range(20):
        judged.update(p, y)
    held = sum(t.untyped_storage().nbytes() for parts in judged.scorer.kept.values() for t in parts)
    assert held == 20 * 500 * (4 + 4 + 1 + 1)
    assert np.isclose(judged.compute()["nll"], float(METRICS["nll"].function(p, y)))


def reference(values, rows):
    """The standard error of a mean over positions, by the examples (rows) that they belong to: a ratio of sums."""
    sums = torch.stack([values[rows == row].sum() for row in rows.unique()]).double()
    counts = torch.stack([(rows == row).sum() for row in rows.unique()]).double()
    gaps = sums - sums.sum() / counts.sum() * counts
    return float((len(gaps) / (len(gaps) - 1) * gaps.square().sum()).sqrt() / counts.sum())


@pytest.mark.parametrize("case", ["classes", "labels", "probit", "maps of classes"])
def test_standard_errors_of_classes(case):
    p, y = CASES["classes, probit" if case == "probit" else case]()
    found = fed(p, y, size=7).standard_errors
    target = p.likelihood.target(y, p.f_mean)
    keep = torch.ones(p.mean.shape[:-1], dtype=torch.bool) if case == "labels" else target != -100
    rows = torch.arange(len(y)).view(-1, *[1] * (keep.ndim - 1)).expand_as(keep)[keep]
    probs, truth = p.mean[keep], target[keep]
    on = truth if case == "labels" else torch.nn.functional.one_hot(truth, probs.shape[-1])
    right = ((probs > 0.5) == truth.bool()).double().mean(-1) if case == "labels" else (probs.argmax(-1) == truth).double()
    chosen = torch.where(on.bool(), probs, 1 - probs).log().sum(-1) if case == "labels" else (probs * on).sum(-1).log()
    assert found["accuracy"] == pytest.approx(reference(right, rows), rel=1e-4)
    assert found["brier"] == pytest.approx(reference((probs - on).square().sum(-1), rows), rel=1e-4)
    assert found["total"] == pytest.approx(reference(p.uncertainty.total[keep], rows), rel=1e-4)
    if case != "labels":  # whose log scores are means over draws of products
        assert found["nll"] == pytest.approx(reference(-chosen, rows), rel=1e-3)
    assert not {"ece", "mce", "auroc"} & set(found)


@pytest.mark.parametrize("case", ["regression", "maps of numbers"])
def test_standard_errors_of_numbers(case):
    p, y = CASES[case]()
    found = fed(p, y, size=7)
    target = p.likelihood.target(y, p.f_mean)
    shape = target.shape[:-1]
    rows = torch.arange(len(y)).view(-1, *[1] * (len(shape) - 1)).expand(shape).flatten()
    lower, upper = p.interval(0.9)
    inside = ((lower <= target) & (target <= upper)).double().mean(-1).flatten()
    squares = (p.mean - target).square().mean(-1).flatten()
    assert found.standard_errors["coverage"] == pytest.approx(reference(inside, rows), rel=1e-6)
    assert found.standard_errors["rmse"] == pytest.approx(reference(squares, rows) / (2 * found["rmse"]), rel=1e-5)
    assert {"nll", "crps", "width", "interval_score", "sharpness", "total"} <= set(found.standard_errors)
    assert f"{found['coverage']:.4g}  ± {found.standard_errors['coverage']:.2g}" in str(found)


def test_standard_errors_say_how_often_the_truth_is_missed():
    """The error of the mean over repeated data sets is what one data set says it is."""
    g = torch.Generator().manual_seed(0)
    means, errors = [], []
    for _ in range(300):
        p = LatentMixture(Categorical(), torch.randn(1, 100, 3, generator=g))
        found = fed(p, torch.randint(3, (100,), generator=g), size=100, metrics=["nll", "accuracy"])
        means.append((found["nll"], found["accuracy"]))
        errors.append((found.standard_errors["nll"], found.standard_errors["accuracy"]))
    torch.testing.assert_close(torch.tensor(means).std(0), torch.tensor(errors).mean(0), rtol=0.1, atol=0)


def test_a_share_without_exception_is_no_certainty_and_constants_have_no_error():
    p, y = LatentMixture(Gaussian(scale=1.0), torch.zeros(1, 50, 1)), torch.zeros(50)
    found = fed(p, y)
    assert found["coverage"] == 1
    assert found.standard_errors["coverage"] == pytest.approx((51 / 53) ** 0.5 / 52)
    assert found.standard_errors["width"] == found.standard_errors["sharpness"] == 0


def test_one_example_has_no_standard_error():
    found = fed(LatentMixture(Categorical(), spread(2, 1, 3)), torch.tensor([1]), metrics=["nll", "accuracy"])
    assert all(map(math.isnan, found.standard_errors.values()))
    assert "±" not in str(found)


def test_the_words_say_which_interval():
    p, y = CASES["regression"]()
    text = str(fed(p, y, metrics=["coverage", "width"], level=0.95))
    assert "share inside the 95 % interval; 0.95 is calibrated" in text
    assert "mean width of the 95 % interval" in text
    assert "90" not in text.split("coverage", 1)[1]


def test_predictions_that_are_nan_are_told_at_once():
    p, y = LatentMixture(Categorical(), torch.full((2, 5, 3), math.nan)), integers(3, 5)
    with pytest.raises(ValueError, match="predictions are NaN, and one_minus_max cannot rank them"):
        Judge().update(p, y)
    found = fed(p, y, metrics=["nll", "ece", "mce", "brier"])
    assert all(map(math.isnan, found.values.values()))
    with pytest.raises(TypeError, match="y is a str"):
        judge(lambda x: p, (torch.zeros(5, 2), "01201"))


def test_a_truth_whose_probability_is_no_float_any_more():
    p = LatentMixture(Categorical(), torch.tensor([[[0.0, 300.0]], [[0.0, 250.0]]]))
    y = torch.tensor([0])
    assert fed(p, y, metrics=["nll"])["nll"] == pytest.approx(250 + math.log(2))


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
def test_one_prediction_that_is_nan_makes_the_accuracy_nan(likelihood):
    f, y = spread(2, 5, 3), integers(3, 5) if isinstance(likelihood, Categorical) else integers(2, 5, 3)
    f[:, 2] = math.nan
    names = ["accuracy", "nll", "brier", "ece"]
    found = fed(LatentMixture(likelihood, f), y, metrics=names)
    assert all(math.isnan(found[name]) and METRICS[name].function(LatentMixture(likelihood, f), y).isnan() for name in names)


def test_batches_without_examples_and_targets_in_lists():
    found = Judge()
    for n in (3, 0, 2):
        found.update(LatentMixture(Gaussian(scale=1.0), spread(2, n, 1)), [0.5] * n if n else torch.zeros(0))
    result = found.compute()
    assert result.n == 5
    assert all(map(math.isfinite, result.values.values()))


@dataclass(frozen=True)
class Counts(Likelihood):
    def __call__(self, f, params):
        return torch.distributions.Independent(torch.distributions.Poisson(f.exp(), validate_args=False), 1)


def test_a_likelihood_of_ones_own_without_a_cdf():
    """What has no answer is left out, and asked for by name it is an error in words."""
    f = torch.randn(3, 40, 1)
    y = torch.poisson(f[0].exp())
    found = judge(lambda x: LatentMixture(Counts(), f), (torch.zeros(40, 1), y))
    assert {"nll", "rmse", "sharpness"} <= set(found.values)
    assert not {"crps", "coverage", "quantile_error"} & set(found.values)
    with pytest.raises(ValueError, match=r"a Poisson has no cdf in torch.*p.sample\(2000\).quantile"):
        LatentMixture(Counts(), f).interval(0.9)
