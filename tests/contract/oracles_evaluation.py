"""An independent answer for every measure and metric, by plain NumPy, SciPy or scikit-learn."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import numpy as np
import sklearn.metrics
import torch
from scipy import optimize, stats

from dubito import Bernoulli, Categorical, Gaussian, measures, metrics
from dubito.posteriors.predictive import LatentMixture
from dubito.testing import require

Oracle = Callable[[], None]
WEIGHTS = np.array([0.2, 0.3, 0.5])


def agree(found: object, exact: object, tolerance: float = 1e-6) -> None:
    gap = np.max(np.abs(np.asarray(found, dtype=float) - np.asarray(exact, dtype=float)))
    require(gap <= tolerance, f"off by {gap:.3g}")


@lru_cache
def classified(n: int = 60) -> tuple[LatentMixture, np.ndarray, np.ndarray]:
    """A mixture of three draws over four classes, their probabilities [S, n, C], and targets."""
    source = np.random.default_rng(0)
    f = source.normal(size=(3, n, 4)) + 1.5 * source.normal(size=(1, n, 4))
    probs = np.exp(f) / np.exp(f).sum(-1, keepdims=True)
    p = LatentMixture(Categorical(), torch.from_numpy(f), weights=torch.from_numpy(WEIGHTS))
    return p, probs, source.integers(0, 4, n)


@lru_cache
def labelled(n: int = 40) -> tuple[LatentMixture, np.ndarray, np.ndarray]:
    """The same with three labels."""
    source = np.random.default_rng(1)
    f = source.normal(size=(3, n, 3))
    p = LatentMixture(Bernoulli(), torch.from_numpy(f), weights=torch.from_numpy(WEIGHTS))
    return p, 1 / (1 + np.exp(-f)), source.integers(0, 2, (n, 3))


@lru_cache
def regressed(n: int = 50) -> tuple[LatentMixture, np.ndarray, np.ndarray]:
    """Three draws of two numbers with noise 0.3 and 0.7, and targets."""
    source = np.random.default_rng(2)
    f = source.normal(size=(3, n, 2))
    p = LatentMixture(Gaussian(scale=(0.3, 0.7)), torch.from_numpy(f), weights=torch.from_numpy(WEIGHTS))
    return p, f, f.mean(0) + source.normal(size=(n, 2)) * [0.5, 1.0]


NOISE = np.array([0.3, 0.7])


def entropy(p: np.ndarray) -> np.ndarray:
    return -(p * np.log(p)).sum(-1)


def mixed(values: np.ndarray) -> np.ndarray:
    return np.tensordot(WEIGHTS, values, 1)


# ---- measures: of classes, and of labels as choices between two, summed


def measured(name: str, formula: Callable[[np.ndarray], np.ndarray]) -> Oracle:
    """`formula` maps probabilities of draws [S, n, K] to a measure [n]."""

    def check() -> None:
        p, probs, _ = classified()
        agree(getattr(measures, name)(p), formula(probs))
        q, probs, _ = labelled()
        pairs = np.stack([1 - probs, probs], -1)  # [S, n, L, 2]
        exact = sum(formula(pairs[:, :, label]) for label in range(3))
        half = 0.5 if name.endswith("variance") else 1.0  # a label's variance is p (1 - p), once
        agree(getattr(measures, name)(q), half * exact)

    return check


def ratio(probs: np.ndarray) -> np.ndarray:
    votes = np.eye(probs.shape[-1])[probs.argmax(-1)]
    return 1 - mixed(votes).max(-1)


def margin(probs: np.ndarray) -> np.ndarray:
    top = np.sort(mixed(probs), -1)
    return 1 - (top[..., -1] - top[..., -2])


def variances(name: str, formula: Callable[[np.ndarray], np.ndarray], numbers: Callable[[np.ndarray], np.ndarray]) -> Oracle:
    def check() -> None:
        measured(name, formula)()
        p, f, _ = regressed()
        agree(getattr(measures, name)(p), numbers(f))

    return check


def aleatoric(p: np.ndarray) -> np.ndarray:
    return mixed((p * (1 - p)).sum(-1))


def total(p: np.ndarray) -> np.ndarray:
    return (mixed(p) * (1 - mixed(p))).sum(-1)


def spread(f: np.ndarray) -> np.ndarray:
    return mixed((f - mixed(f)) ** 2).sum(-1)


def variation_ratio() -> None:
    """A draw whose best classes are tied votes for each of them by an equal share."""
    measured("variation_ratio", ratio)()
    tied = torch.tensor([[[2.0, 2.0, 0.0]], [[0.0, 1.0, 0.0]]], dtype=torch.float64)
    p = LatentMixture(Categorical(), tied, weights=torch.tensor([0.6, 0.4], dtype=torch.float64))
    agree(measures.variation_ratio(p), [1 - (0.6 / 2 + 0.4)])


MEASURES: dict[str, Oracle] = {
    "predictive_entropy": measured("predictive_entropy", lambda p: entropy(mixed(p))),
    "expected_entropy": measured("expected_entropy", lambda p: mixed(entropy(p))),
    "mutual_information": measured("mutual_information", lambda p: entropy(mixed(p)) - mixed(entropy(p))),
    "variation_ratio": variation_ratio,
    "one_minus_max": measured("one_minus_max", lambda p: 1 - mixed(p).max(-1)),
    "margin": measured("margin", margin),
    "total_variance": variances("total_variance", total, lambda f: spread(f) + (NOISE**2).sum()),
    "aleatoric_variance": variances("aleatoric_variance", aleatoric, lambda f: np.full(f.shape[1], (NOISE**2).sum())),
    "epistemic_variance": variances("epistemic_variance", lambda p: total(p) - aleatoric(p), spread),
}


# ---- metrics of classes


def scored(name: str, formula: Callable[[np.ndarray, np.ndarray], float]) -> Oracle:
    def check() -> None:
        p, probs, y = classified()
        agree(metrics.METRICS[name].function(p, torch.from_numpy(y)), formula(mixed(probs), y))

    return check


def gaps(confidence: np.ndarray, right: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts and |accuracy - confidence| of every bin (low, high]."""
    counts, off = [], []
    for low, high in pairwise(edges):
        inside = (confidence > low) & (confidence <= high)
        counts.append(inside.sum())
        off.append(abs(right[inside].mean() - confidence[inside].mean()) if inside.any() else 0.0)
    return np.array(counts), np.array(off)


def calibration(p: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return gaps(p.max(-1), (p.argmax(-1) == y).astype(float), np.linspace(0, 1, 16))


def ece(p: np.ndarray, y: np.ndarray) -> float:
    counts, off = calibration(p, y)
    return float((counts * off).sum() / len(y))


def ece_mass(p: np.ndarray, y: np.ndarray) -> float:
    order = np.argsort(p.max(-1))
    parts = np.array_split(order, 15)  # 60 rows: four in each
    right = (p.argmax(-1) == y).astype(float)
    return sum(len(part) * abs(right[part].mean() - p.max(-1)[part].mean()) for part in parts) / len(y)


def classwise(p: np.ndarray, y: np.ndarray) -> float:
    total = 0.0
    for c in range(p.shape[1]):
        edges = np.linspace(0, 1, 16)
        edges[0] = -1.0
        counts, off = gaps(p[:, c], (y == c).astype(float), edges)
        total += (counts * off).sum() / len(y)
    return total / p.shape[1]


# ---- metrics of numbers, by the mixture of Gaussians itself


def cdf(f: np.ndarray, at: np.ndarray) -> np.ndarray:
    return mixed(stats.norm.cdf(at, f, NOISE))


def quantile(f: np.ndarray, level: float) -> np.ndarray:
    out = np.empty(f.shape[1:])
    for i, c in np.ndindex(*out.shape):
        out[i, c] = optimize.brentq(lambda t, i=i, c=c: WEIGHTS @ stats.norm.cdf(t, f[:, i, c], NOISE[c]) - level, -20, 20)
    return out


def regression(name: str, formula: Callable[[np.ndarray, np.ndarray], float], tolerance: float = 1e-5) -> Oracle:
    def check() -> None:
        p, f, y = regressed()
        agree(metrics.METRICS[name].function(p, torch.from_numpy(y)), formula(f, y), tolerance)

    return check


def nll() -> None:
    p, probs, y = classified()
    agree(metrics.nll(p, torch.from_numpy(y)), sklearn.metrics.log_loss(y, mixed(probs)))
    q, f, z = regressed()
    agree(metrics.nll(q, torch.from_numpy(z)), -np.log(mixed(stats.norm.pdf(z, f, NOISE).prod(-1))).mean())


def perplexity() -> None:
    p, probs, y = classified()
    agree(metrics.perplexity(p, torch.from_numpy(y)), np.exp(sklearn.metrics.log_loss(y, mixed(probs))), 1e-5)


def crps(f: np.ndarray, y: np.ndarray) -> float:
    """The integral of (F(t) - 1[t > y])^2."""
    t = np.linspace(-12, 12, 24_001)
    values = []
    for i, c in np.ndindex(8, 2):
        cumulative = WEIGHTS @ stats.norm.cdf(t, f[:, i, c, None], NOISE[c])
        values.append(np.trapezoid((cumulative - (t > y[i, c])) ** 2, t))
    return float(np.mean(values))


def check_crps() -> None:
    p, f, y = regressed()
    first = LatentMixture(p.likelihood, p.means[:, :8], weights=p.weights)
    agree(metrics.crps(first, torch.from_numpy(y[:8])), crps(f[:, :8], y[:8]), 1e-3)


def interval(f: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return quantile(f, 0.05), quantile(f, 0.95)


def inside(f: np.ndarray, y: np.ndarray) -> float:
    low, high = interval(f)
    return float(((low <= y) & (y <= high)).mean())


def penalty(f: np.ndarray, y: np.ndarray) -> float:
    low, high = interval(f)
    return float((high - low + 20 * (np.maximum(low - y, 0) + np.maximum(y - high, 0))).mean())


def levels(f: np.ndarray, y: np.ndarray) -> float:
    """The mean gap between a level and the share of targets below its quantile."""
    found = metrics.quantile_calibration(regressed()[0], torch.from_numpy(y))
    u = cdf(f, y).ravel()
    grid = np.asarray(found.levels)
    return float(np.mean([abs((u <= level).mean() - level) for level in grid]))


METRICS: dict[str, Oracle] = {
    "accuracy": scored("accuracy", lambda p, y: sklearn.metrics.accuracy_score(y, p.argmax(-1))),
    "nll": nll,
    "brier": scored("brier", lambda p, y: float(((p - np.eye(4)[y]) ** 2).sum(-1).mean())),
    "ece": scored("ece", ece),
    "ece_mass": scored("ece_mass", ece_mass),
    "classwise_ece": scored("classwise_ece", classwise),
    "mce": scored("mce", lambda p, y: float(calibration(p, y)[1].max())),
    "rmse": regression("rmse", lambda f, y: float(np.sqrt(((mixed(f) - y) ** 2).mean()))),
    "crps": check_crps,
    "coverage": regression("coverage", inside),
    "width": regression("width", lambda f, y: float((interval(f)[1] - interval(f)[0]).mean())),
    "interval_score": regression("interval_score", penalty, 1e-4),
    "quantile_error": regression("quantile_error", levels),
    "sharpness": regression("sharpness", lambda f, y: float(np.sqrt((mixed((f - mixed(f)) ** 2) + NOISE**2).mean())), 1e-5),
}


# ---- decisions: scores of uncertainty and errors


@lru_cache
def decided() -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(3)
    errors = source.random(200) < 0.3
    return source.normal(size=200) + errors, errors.astype(float)


def decision(name: str, formula: Callable[[np.ndarray, np.ndarray], float]) -> Oracle:
    def check() -> None:
        scores, errors = decided()
        agree(metrics.DECISIONS[name].function(torch.from_numpy(scores), torch.from_numpy(errors)), formula(scores, errors))

    return check


def false_positives(scores: np.ndarray, errors: np.ndarray) -> float:
    """Errors that pass at the threshold that 95 % of the successes pass."""
    right = np.sort(scores[errors == 0])
    threshold = right[int(np.ceil(0.95 * len(right))) - 1]
    return float((scores[errors == 1] <= threshold).mean())


def area(scores: np.ndarray, errors: np.ndarray) -> float:
    ordered = errors[np.argsort(scores)]
    return float((ordered.cumsum() / np.arange(1, len(ordered) + 1)).mean())


DECISIONS: dict[str, Oracle] = {
    "auroc": decision("auroc", lambda s, e: sklearn.metrics.roc_auc_score(e, s)),
    "fpr95": decision("fpr95", false_positives),
    "aupr_error": decision("aupr_error", lambda s, e: sklearn.metrics.average_precision_score(e, s)),
    "aupr_success": decision("aupr_success", lambda s, e: sklearn.metrics.average_precision_score(1 - e, -s)),
    "aurc": decision("aurc", area),
    "excess_aurc": decision("excess_aurc", lambda s, e: area(s, e) - area(e, e)),
}


# ---- functions of `dubito.metrics` that are in no table


def average_precision() -> None:
    scores, errors = decided()
    found = metrics.average_precision(torch.from_numpy(scores), torch.from_numpy(errors))
    agree(found, sklearn.metrics.average_precision_score(errors, scores))


def fpr_at_tpr() -> None:
    scores, errors = decided()
    false, true, _ = sklearn.metrics.roc_curve(errors, scores, drop_intermediate=False)
    found = metrics.fpr_at_tpr(torch.from_numpy(scores), torch.from_numpy(errors), tpr=0.8)
    agree(found, false[np.argmax(true >= 0.8)])


def risk_coverage() -> None:
    scores, errors = decided()
    coverage, risk = metrics.risk_coverage(torch.from_numpy(scores), torch.from_numpy(errors))
    agree(coverage, np.arange(1, 201) / 200)
    agree(risk, errors[np.argsort(scores)].cumsum() / np.arange(1, 201))


def pit() -> None:
    p, f, y = regressed()
    agree(metrics.pit(p, torch.from_numpy(y)), cdf(f, y), 1e-5)


def wilson() -> None:
    low, high = metrics.wilson(torch.tensor([0.3]), torch.tensor([50.0]), level=0.9)
    exact = stats.binomtest(15, 50).proportion_ci(0.9, method="wilson")
    agree([float(low), float(high)], [exact.low, exact.high])


def decomposition() -> None:
    """Reliability - resolution + uncertainty of every bin of the class probabilities, which sum to the Brier score."""
    p, _, y = classified()
    parts = metrics.brier_decomposition(p, torch.from_numpy(y), bins=None)
    counts = np.bincount(y, minlength=4) / len(y)
    agree(parts.uncertainty, (counts * (1 - counts)).sum())
    agree(parts.reliability - parts.resolution + parts.uncertainty, metrics.brier(p, torch.from_numpy(y)), 1e-5)


def reliability() -> None:
    p, probs, y = classified()
    found = metrics.reliability(p, torch.from_numpy(y))
    counts, off = calibration(mixed(probs), y)
    agree(np.asarray(found.count), counts)
    filled = counts > 0
    agree(np.abs(np.asarray(found.accuracy) - np.asarray(found.confidence))[filled], off[filled])


def threshold() -> None:
    """The largest share of inputs whose mean error is at most the risk."""
    scores, errors = decided()
    found = metrics.threshold(torch.from_numpy(scores), torch.from_numpy(errors), risk=0.1)
    order = np.argsort(scores)
    risk = errors[order].cumsum() / np.arange(1, 201)
    agree(found.coverage, (np.nonzero(risk <= 0.1)[0].max() + 1) / 200)


FUNCTIONS: dict[str, Oracle] = {
    "average_precision": average_precision,
    "fpr_at_tpr": fpr_at_tpr,
    "risk_coverage": risk_coverage,
    "pit": pit,
    "wilson": wilson,
    "brier_decomposition": decomposition,
    "perplexity": perplexity,
    "reliability": reliability,
    "threshold": threshold,
    "quantile_calibration": METRICS["quantile_error"],
}
