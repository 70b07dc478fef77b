r"""Judge a model on data, in one pass and in bounded memory.

Batches become sums and counts as they come. Where ranks are needed (equal-mass bins, ROC and risk-coverage curves) a few numbers are
kept for every example: its confidence, its scores, and whether it was right. The results are those of `dubito.metrics` on everything
at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Normal
from torch.utils.data import DataLoader, Dataset

from dubito.evaluation.measures import MEASURES
from dubito.evaluation.metrics import DECISIONS, METRICS, QuantileCalibration, Reliability, crps
from dubito.evaluation.metrics.calibration import ClassBins
from dubito.evaluation.metrics.decisions import Ranking, oracle_aurc
from dubito.evaluation.metrics.reading import labelled, precise, targets, tensor
from dubito.evaluation.metrics.regression import LEVELS, _interval_score, _pit
from dubito.inference.batches import Arrays
from dubito.inference.progress import Progress
from dubito.model.likelihoods import Bernoulli, Categorical, Classes, align, entropy
from dubito.network.examples import split_batch
from dubito.posteriors.posterior import Posterior, inputs_of
from dubito.posteriors.predictive import LatentMixture, Predictive
from dubito.tensors import tree
from dubito.tensors.randomness import forked, lent

DECOMPOSITION = {
    "brier_reliability": "part of the Brier score: distance of forecasts from frequencies; 0 is calibrated",
    "brier_resolution": "part of the Brier score: what forecasts tell apart; higher is better",
    "brier_uncertainty": "part of the Brier score: that of the overall frequencies",
    "brier_within": "part of the Brier score: what the bins of the other parts hide",
}
SPLIT = {
    "total": "mean uncertainty, in nats for classes, a variance for numbers",
    "aleatoric": "of which noise",
    "epistemic": "of which ignorance",
}
MEANINGS = {name: metric.meaning for name, metric in (METRICS | DECISIONS).items()} | DECOMPOSITION | SPLIT
POINTS = 1000  # of a risk-coverage curve that are kept
CACHE = 2**16  # numbers that the softmax of all draws works on at a time, so that they stay in the cache
PITS = 20  # bins of the histogram of PIT values


@dataclass(frozen=True)
class Counts:
    """A histogram of two groups, or of one."""

    edges: Tensor  # [n + 1]
    right: Tensor  # [n], of successes, or of all
    wrong: Tensor  # [n], of errors


@dataclass(frozen=True)
class Decision:
    """How well a score of uncertainty tells errors from successes."""

    values: Mapping[str, float]  # as in `metrics.DECISIONS`
    coverage: Tensor = field(repr=False)  # [K], up to 1000 points of the risk-coverage curve
    risk: Tensor = field(repr=False)  # [K]
    counts: Counts | None = field(repr=False, default=None)  # of the score, over successes and errors; of classes only


@dataclass(frozen=True)
class Judgement:
    """What came out. `print` shows it; `values` holds the numbers by name, those of `decisions` for the first score.

    `reliability` is of classes, `quantiles` and `pit` (counts of PIT values in equal bins) are of regression, and None otherwise.
    """

    values: Mapping[str, float]
    n: int  # examples, or labelled positions of dense outputs
    decisions: Mapping[str, Decision]  # by score
    level: float = 0.9  # of intervals
    reliability: Reliability | None = field(repr=False, default=None)
    quantiles: QuantileCalibration | None = field(repr=False, default=None)
    pit: Tensor | None = field(repr=False, default=None)

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    @property
    def data(self) -> dict[str, Any]:
        """The numbers in plain types, for JSON: what is not finite is None."""
        decisions = {score: _plain(found.values) for score, found in self.decisions.items()}
        return {"n": self.n, "values": _plain(self.values), "decisions": decisions}

    def table(self) -> str:
        """Name, value and meaning, a line each; other scores than the first have tables of their own."""
        others = list(self.decisions.items())[1:]
        first = f" by {next(iter(self.decisions))}" if self.decisions else ""
        parts = [f"{self.n:,} examples{first}", *_lines(self.values, self.level)]
        for score, found in others:
            parts += [f"by {score}", *_lines(found.values, self.level)]
        return "\n".join(parts)

    def __str__(self) -> str:
        return self.table()


class Judge:
    r"""Collects what is needed to judge predictions, batch by batch.

    `metrics` are names from `metrics.METRICS` and `metrics.DECISIONS`, "brier_decomposition", and "uncertainty" for the means of
    total, aleatoric and epistemic; None is all that suit. `scores` are names from `measures.MEASURES` by which errors are to be found:
    by default `one_minus_max`, and `total_variance` for regression, where the error is the squared one, summed over outputs.
    With `Bernoulli` an example is an error if any of its labels is wrong.

    >>> import dubito
    >>> from dubito.posteriors.predictive import LatentMixture
    >>> found = Judge(["accuracy", "nll", "auroc"])
    >>> for logits, y in (([[2.0, 0.0], [0.0, 1.0]], [0, 0]), ([[0.0, 3.0]], [1])):
    ...     found.update(LatentMixture(dubito.Categorical(), torch.tensor([logits])), torch.tensor(y))
    >>> print(found.compute())
    3 examples by one_minus_max
      accuracy  0.6667  share of rows whose most probable class is right
      nll       0.4963  negative log likelihood of a row; lower is better
      auroc          1  how often an error is less certain than a success
    """

    def __init__(
        self,
        metrics: Sequence[str] | None = None,
        *,
        scores: Sequence[str] | None = None,
        bins: int = 15,
        level: float = 0.9,
    ):
        known = [*METRICS, *DECISIONS, "brier_decomposition", "uncertainty"]
        for given, choice, what in ((metrics, known, "metric"), (scores, MEASURES, "score")):
            wrong = [given] if isinstance(given, str) else [name for name in given or () if name not in choice]
            if wrong:
                raise ValueError(f"{wrong[0]!r} is no list of {what}s: give some of {', '.join(choice)}")
        if not 0 < level < 1:
            raise ValueError(f"the level of an interval lies between 0 and 1; got {level}")
        self.wanted, self.bins, self.level = None if metrics is None else list(metrics), bins, level
        self.scores = None if scores is None else list(scores)
        self.discrete: bool | None = None
        self.n = 0
        self._sums: dict[str, Tensor | float] = {}
        self._kept: dict[str, list[Tensor]] = {}
        self._classes: ClassBins | None = None

    @torch.no_grad()
    def update(self, p: Predictive, y: Any) -> None:
        """Take in a batch: its predictive and its targets."""
        target = targets(p, y, "judge")
        y = tensor(y).to(target.device)
        if self.discrete is None:
            self._begin(p)
        elif self.discrete != p.likelihood.discrete:
            raise ValueError("the batches are of classes and of numbers: judge them apart")
        if self.discrete:
            self._update_classes(p, y, target)
        else:
            self._update_numbers(p, y, target)

    def _begin(self, p: Predictive) -> None:
        self.discrete = p.likelihood.discrete
        kind, other = ("classes", "regression") if self.discrete else ("regression", "classes")
        suit = [name for name, metric in (METRICS | DECISIONS).items() if getattr(metric, kind)]
        suit += ["brier_decomposition", "uncertainty"] if self.discrete else ["uncertainty"]
        if self.wanted is None:
            self.wanted = [name for name in suit if self.discrete or _exists(p, name)]
        wrong = [name for name in self.wanted if name not in suit]
        if wrong:
            raise ValueError(
                f"{wrong[0]} is for {other}, and {type(p.likelihood).__name__} is not: use some of {', '.join(suit)}"
            )
        if self.scores is None:
            self.scores = ["one_minus_max" if self.discrete else "total_variance"]

    def _wants(self, *names: str) -> bool:
        return any(name in (self.wanted or ()) for name in names)

    def _add(self, **values: Tensor | float) -> None:
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value  # tensors stay on their device: nobody waits for them

    def _keep(self, **values: Tensor) -> None:
        for name, value in values.items():
            self._kept.setdefault(name, []).append(value.clone() if value._base is not None else value)

    def _update_classes(self, p: Predictive, y: Tensor, target: Tensor) -> None:
        keep = labelled(p, target)
        whole = bool(keep.all())
        truth = (target.flatten(0, keep.ndim - 1) if whole else target[keep]).long()
        found = _class_terms(p, y, truth, None if whole else keep)
        probs, several = found.probs, isinstance(p.likelihood, Bernoulli)
        self.n += len(probs)
        if several:
            off = precise(p.complement.flatten(0, -2) if whole else p.complement[keep])
            confidence = torch.maximum(probs, off)
            correct = ((probs > off) == truth.bool()) & ~confidence.isnan()
            wrong, beside = ~correct.all(-1), torch.minimum(probs, off).sum(-1)
            gone = probs - truth
        else:
            confidence, top = probs.max(-1)
            correct = (top == truth) & ~confidence.isnan()
            wrong, beside = ~correct, probs.scatter(-1, top.unsqueeze(-1), 0.0).sum(-1)
            gone = probs.scatter_add(-1, truth.unsqueeze(-1), probs.new_full((len(probs), 1), -1.0))
        right = torch.where(confidence.isnan().any(), math.nan, correct.sum(dtype=torch.float64))  # as the other metrics are NaN
        self._add(accuracy=right, choices=correct.numel(), nll=-found.log_prob)
        self._add(total=found.total.sum(dtype=torch.float64), aleatoric=found.aleatoric.sum(dtype=torch.float64))
        if self._wants("brier"):
            self._add(brier=gone.square().sum(dtype=torch.float64))
        if self._wants("classwise_ece", "brier_decomposition"):
            bins = ClassBins.of(probs, truth, bins=self.bins)
            self._classes = bins if self._classes is None else self._classes + bins
        if self._wants("ece", "ece_mass", "mce"):
            self._keep(confidence=confidence.flatten(), correct=correct.flatten())
        if self._wants(*DECISIONS):
            self._keep(errors=wrong)
            ready = {
                "one_minus_max": beside,
                "predictive_entropy": found.total,
                "expected_entropy": found.aleatoric,
                "mutual_information": found.total - found.aleatoric,
            }
            self._keep_scores(p, ready, keep)

    def _keep_scores(self, p: Predictive, ready: Mapping[str, Tensor], keep: Tensor) -> None:
        for name in self.scores or ():
            score = ready[name] if name in ready else MEASURES[name](p)[keep]
            if bool(score.isnan().any()):
                raise ValueError(
                    f"predictions are NaN, and {name} cannot rank them: look for inputs or weights that are not finite, or leave out "
                    f"{', '.join(DECISIONS)}"
                )
            self._keep(**{f"score {name}": score})

    def _update_numbers(self, p: Predictive, given: Tensor, y: Tensor) -> None:
        if not y.numel():  # the mean score of none is NaN, and would be that of all
            return
        keep = labelled(p, y)
        self.n += keep.numel()
        gone, split = (p.mean - y).double().square(), p.uncertainty
        self._add(
            entries=y.numel(), squares=gone.sum(), total=split.total.double().sum(), aleatoric=split.aleatoric.double().sum()
        )
        if self._wants("nll"):
            self._add(nll=-p.log_prob(given).double().sum())
        if self._wants("crps"):
            self._add(crps=crps(p, given).double() * y.numel())
        if self._wants("coverage", "width", "interval_score"):
            lower, upper = p.interval(self.level)
            inside = (lower <= y) & (y <= upper)
            score = _interval_score(y, lower, upper, self.level)
            self._add(coverage=inside.sum(), width=(upper - lower).double().sum(), interval_score=score.double().sum())
        if self._wants("quantile_error"):
            values = _pit(p, given, "judge").flatten().double()
            cuts = torch.tensor(sorted({*LEVELS, *_inner(PITS)}), dtype=torch.float64, device=values.device)
            self._add(below=torch.bincount(torch.bucketize(values, cuts), minlength=len(cuts) + 1).cumsum(0)[:-1])
        if self._wants(*DECISIONS):
            self._keep(errors=gone.sum(-1).flatten())
            self._keep_scores(p, {"total_variance": split.total.sum(-1).flatten()}, keep)

    def compute(self) -> Judgement:
        """The judgement of all batches so far."""
        if self.discrete is None or not self.n:
            raise ValueError("there is nothing to judge: no batch, or none with a labelled target")
        kept = {name: torch.cat(parts) for name, parts in self._kept.items()}
        sums: dict[str, Any] = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in self._sums.items()}
        values, more = self._of_classes(kept, sums) if self.discrete else self._of_numbers(sums)
        if self._wants("uncertainty"):
            total, aleatoric = sums["total"] / self.n, sums["aleatoric"] / self.n
            values |= {
                "total": total,
                "aleatoric": aleatoric,
                "epistemic": total - aleatoric if math.isfinite(total) else math.nan,
            }
        decisions: dict[str, Decision] = {}
        if self._wants(*DECISIONS):
            best = float(oracle_aurc(kept["errors"]))
            for name in self.scores or ():
                decisions[name] = self._decide(kept[f"score {name}"], kept["errors"], best)
            values |= next(iter(decisions.values())).values if decisions else {}
        return Judgement(values, self.n, decisions, self.level, **more)

    def _of_classes(self, kept: dict[str, Tensor], sums: dict[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
        values = {
            "accuracy": sums["accuracy"] / sums["choices"],
            "nll": sums["nll"] / self.n,
            "brier": sums.get("brier", 0.0) / self.n,
        }
        found = None
        if "confidence" in kept:
            found = Reliability.of(kept["confidence"], kept["correct"], bins=self.bins, level=self.level).cpu()
            values |= {"ece": float(found.ece), "mce": float(found.mce)}
            if self._wants("ece_mass"):
                values["ece_mass"] = float(Reliability.of(kept["confidence"], kept["correct"], bins=self.bins, by="mass").ece)
        if self._classes is not None:
            values["classwise_ece"] = float(self._classes.ece)
        values = {name: values[name] for name in METRICS if self._wants(name) and name in values}
        if self._classes is not None and self._wants("brier_decomposition"):
            parts = self._classes.decomposition
            values |= {f"brier_{name}": float(part) for name, part in parts._asdict().items()}
        return values, {"reliability": found}

    def _of_numbers(self, sums: dict[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
        entries, more = sums["entries"], {}
        values = {"rmse": math.sqrt(sums["squares"] / entries), "sharpness": math.sqrt(sums["total"] / entries)}
        values |= {name: sums[name] / entries for name in ("crps", "coverage", "width", "interval_score") if name in sums}
        if "nll" in sums:
            values["nll"] = sums["nll"] / self.n
        if "below" in sums:
            below = dict(zip(sorted({*LEVELS, *_inner(PITS)}), sums["below"], strict=True))
            observed = torch.tensor([below[level] for level in LEVELS], dtype=torch.float64) / entries
            more["quantiles"] = QuantileCalibration(torch.tensor(LEVELS, dtype=torch.float64), observed, entries)
            edges = torch.tensor([0, *(below[cut] for cut in _inner(PITS)), entries], dtype=torch.float64)
            more["pit"] = edges.diff()
            values["quantile_error"] = float(more["quantiles"].error)
        return {name: values[name] for name in METRICS if self._wants(name) and name in values}, more

    def _decide(self, scores: Tensor, errors: Tensor, best: float) -> Decision:
        ranking = Ranking.of(scores, errors)
        risk = ranking.risk
        values = {"aurc": float(risk.mean()), "excess_aurc": float(risk.mean()) - best}
        counts = None
        if self.discrete:
            wrong = int(errors.sum())
            if 0 < wrong < len(errors):
                opposite = ranking.reversed
                values |= {"auroc": float(ranking.auroc()), "fpr95": float(opposite.fpr_at_tpr(0.95))}
                values |= {"aupr_error": float(ranking.average_precision()), "aupr_success": float(opposite.average_precision())}
            else:
                values |= dict.fromkeys(("auroc", "fpr95", "aupr_error", "aupr_success"), math.nan)
            counts = _histogram(scores, errors)
        n = len(risk)
        at = torch.arange(n) if n <= POINTS else (torch.arange(1, POINTS + 1) * n // POINTS) - 1
        values = {name: values[name] for name in DECISIONS if self._wants(name) and name in values}
        return Decision(values, (at + 1).double() / n, risk[at.to(risk.device)].cpu(), counts)


def judge(
    posterior: Posterior | Callable[[Any], Predictive],
    data: Any,
    *,
    metrics: Sequence[str] | None = None,
    scores: Sequence[str] | None = None,
    how: str | None = None,
    draws: int | None = None,
    memory: float = 1.0,
    seed: int = 0,
    size: int = 1000,
    bins: int = 15,
    level: float = 0.9,
    progress: bool | None = None,
) -> Judgement:
    """How good a posterior's predictions are on data whose targets are known, in one pass over it.

    `data` is a DataLoader, a Dataset, a tuple (x, y) or any iterable of batches; data in memory is taken in batches of `size`. In the
    place of a posterior any function from inputs to a `Predictive` will do, such as one that recalibrates:
    `judge(lambda x: fix(posterior.predict(x)), data)`. `how`, `draws`, `memory` and `seed` are those of `predict`; `metrics`, `scores`,
    `bins` and `level` those of `Judge`, which can also be fed by hand.

    >>> import dubito
    >>> model = dubito.Model(torch.nn.Linear(3, 2), dubito.Categorical())
    >>> posterior = dubito.fit(model, dubito.MAP(epochs=1), (torch.randn(64, 3), torch.randint(2, (64,))))
    >>> found = judge(posterior, (torch.randn(100, 3), torch.randint(2, (100,))), metrics=["nll", "ece", "auroc"])
    >>> found.n, sorted(found.values), int(found.reliability.count.sum())
    (100, ['auroc', 'ece', 'nll'], 100)
    """
    known = isinstance(posterior, Posterior)
    if not known and not callable(posterior):
        raise TypeError(f"judge takes a posterior, or a function from inputs to a Predictive; got a {type(posterior).__name__}")
    if not known and (how is not None or draws is not None):
        raise ValueError("`how` and `draws` are for posteriors: a function predicts as it does")
    found = Judge(metrics, scores=scores, bins=bins, level=level)
    loader = _batches(posterior if known else None, data, size)
    total = _length(loader)
    bar = Progress("Judging", total, show=progress if total else False)
    with bar, lent(loader), forked():  # a DataLoader draws from the global generator, even unshuffled
        for i, batch in enumerate(loader):
            x, y = inputs_of(posterior.model, batch) if known else split_batch(batch)
            if y is None:
                raise ValueError("the batches hold inputs only: judging needs the targets as well")
            p = posterior.predict(x, how, draws=draws, memory=memory, seed=seed) if known else posterior(x)
            if not isinstance(p, Predictive):
                raise TypeError(
                    f"the function returns a {type(p).__name__}: for outputs f [B, C] return LatentMixture(likelihood, f[None])"
                )
            found.update(p, y)
            bar.update(i + 1, {"examples": found.n})
    return found.compute()


@dataclass(frozen=True)
class _Terms:
    probs: Tensor  # [n, C]
    log_prob: Tensor  # summed
    total: Tensor  # [n]
    aleatoric: Tensor  # [n]


def _class_terms(p: Predictive, y: Tensor, truth: Tensor, keep: Tensor | None) -> _Terms:
    """All that is needed of class probabilities, from one pass over the draws where these are at hand. `keep`: None if all count."""
    if not isinstance(p, LatentMixture) or not isinstance(p.likelihood, Classes) or p._linked is not None:
        split, score = p.uncertainty, p.log_prob(y).double().sum()
        if keep is None:
            return _Terms(precise(p.mean).flatten(0, -2), score, split.total.flatten(), split.aleatoric.flatten())
        return _Terms(precise(p.mean[keep]), score, split.total[keep], split.aleatoric[keep])
    points = p._points
    f = points.means.flatten(1, -2) if keep is None else points.means[:, keep]  # [S, n, C]
    draws, n, width = f.shape
    weights = points._weights.to(torch.promote_types(f.dtype, torch.float32))
    probs, aleatoric = (f.new_empty(*shape, dtype=weights.dtype) for shape in ((n, p.likelihood.width(f)), (n,)))
    score = torch.zeros((), dtype=torch.float64, device=f.device)
    rows = max(1, (CACHE if f.device.type == "cpu" else 2**8 * CACHE) // (draws * width))
    for i in range(0, n, rows):
        part = slice(i, i + rows)
        probs[part], aleatoric[part], log_true = _mixed(p.likelihood, f[:, part], points, truth[part], weights)
        score += log_true
    total = entropy(probs.clamp_(0, 1))  # a mean of probabilities may round to more than 1
    return _Terms(probs, score, total, torch.minimum(aleatoric, total))


def _mixed(
    likelihood: Classes, f: Tensor, points: LatentMixture, truth: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of draws f [S, n, C]: mean probabilities [n, C], mean entropies [n], and the summed log of the mean probability of the truth.

    Classes come first, so that all is done for many inputs at once: over a last axis of ten torch's softmax takes eight times as long.
    """
    params = align(points.params or {}, f)
    if isinstance(likelihood, Categorical):
        x = likelihood._logits(f, params).to(weights.dtype).permute(2, 0, 1).contiguous()  # [C, S, n]
        x -= x.amax(0)
    else:
        x = likelihood.log_probs(f, params).to(weights.dtype).permute(2, 0, 1).contiguous()
    e = x.exp()
    z = e.sum(0)
    log_z = z.log()
    mean = (e * (weights.unsqueeze(-1) / z)).sum(1)  # [C, n]
    true = mean.gather(0, truth.unsqueeze(0)).squeeze(0)
    far = true < 1e4 * torch.finfo(x.dtype).tiny  # where only logs are left of the truth's probability
    score = true.masked_fill(far, 1.0).log().sum(dtype=torch.float64)
    if bool(far.any()):
        log_true = x[:, :, far].gather(0, truth[far].expand(1, len(z), -1)).squeeze(0) - log_z[:, far]
        score = score + (log_true + weights.log().unsqueeze(-1)).logsumexp(0).sum(dtype=torch.float64)
    x.clamp_(min=torch.finfo(x.dtype).min)  # 0 times the log of 0 is 0
    noise = weights @ (log_z - x.mul_(e).sum(0) / z)
    return mean.mT, noise, score


def _histogram(scores: Tensor, errors: Tensor, *, n: int = 50) -> Counts | None:
    """Of finite scores, from the least, or 0 if that is less, to the largest."""
    scores, errors = scores.double().cpu(), errors.cpu().bool()
    some = scores.isfinite()
    scores, errors = scores[some], errors[some]
    if not len(scores):
        return None
    low, high = min(0.0, float(scores.min())), float(scores.max())
    high = high if high > low else low + 1.0
    right, wrong = (torch.histc(scores[group], n, low, high) for group in (~errors, errors))
    return Counts(torch.linspace(low, high, n + 1, dtype=torch.float64), right, wrong)


def _batches(posterior: Posterior | None, data: Any, size: int) -> Iterable[Any]:
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], Tensor | np.ndarray | dict):
        kind = next(posterior.model.network.parameters()).dtype if posterior is not None else torch.get_default_dtype()
        x, y = tree.tensors(data[0], kind), tree.tensors(data[1], kind)
        counts = {leaf.shape[0] for leaf in [*tree.leaves(x), *tree.leaves(y)]}
        if len(counts) != 1 or counts == {0}:
            raise ValueError(f"inputs and targets must have the same, positive number of rows; got {sorted(counts)}")
        return Arrays(x, y, size, shuffle=False)
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], Tensor | np.ndarray):
        raise TypeError(f"data as a tuple is (x, y), with y a tensor or an array; y is a {type(data[1]).__name__}")
    if isinstance(data, Dataset):
        return DataLoader(data, batch_size=size)
    if not isinstance(data, Iterable) or isinstance(data, Tensor):
        raise TypeError(f"data is a tuple (x, y), a Dataset, a DataLoader or batches; got a {type(data).__name__}")
    return data


def _length(loader: Iterable[Any]) -> int:
    """Batches, or 0 where nobody knows."""
    try:
        return len(loader)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return 0


def _exists(p: Predictive, name: str) -> bool:
    """Whether a score of numbers can be had of this predictive: of a likelihood of one's own there may be no CRPS or no cdf."""
    marginal = p.marginals[0] if isinstance(p, LatentMixture) else None
    if name == "crps":
        return isinstance(marginal, Normal) or hasattr(p, "crps")
    if name not in ("coverage", "width", "interval_score", "quantile_error") or isinstance(marginal, Normal):
        return True
    if not hasattr(p, "cdf"):
        return name != "quantile_error"
    try:
        p.cdf(p.mean)  # pyright: ignore[reportAttributeAccessIssue]
    except ValueError:
        return False
    return True


def _inner(n: int) -> list[float]:
    """The inner edges of n equal bins, with the same bits as the levels of quantiles have where they coincide."""
    return [round(100 * k / n) / 100 for k in range(1, n)]


def _plain(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _lines(values: Mapping[str, float], level: float) -> list[str]:
    meanings = MEANINGS | {
        "coverage": f"share inside the {100 * level:.6g} % interval; {level:.6g} is calibrated",
        "width": f"mean width of the {100 * level:.6g} % interval, in the target's units",
    }
    shown = {name: f"{value:.4g}" for name, value in values.items()}
    name_width, width = (max(map(len, words), default=0) for words in (shown, shown.values()))
    return [f"  {name:<{name_width}}  {text:>{width}}  {meanings.get(name, '')}".rstrip() for name, text in shown.items()]
