"""Scores of class probabilities, batch by batch, from one pass over the draws."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dubito.evaluation.judge.means import row_sums
from dubito.evaluation.judge.scorer import Scorer
from dubito.evaluation.metrics import Metric, Reliability
from dubito.evaluation.metrics.calibration import Binning, ClassBins
from dubito.evaluation.metrics.reading import labelled, precise
from dubito.model.likelihoods import Bernoulli, Categorical, Classes, align, entropy
from dubito.posteriors.predictive import LatentMixture, Predictive

CACHE = 2**16  # numbers that the softmax of all draws works on at a time, so that they stay in the cache


class ClassScorer(Scorer):
    """Classes, and labels that are each on or off. Kept for every choice: its confidence and whether it was right."""

    kind, extra, score, discrete = "classes", ("brier_decomposition", "uncertainty"), "one_minus_max", True
    bins_of_classes: ClassBins | None = None

    @staticmethod
    def suits(metric: Metric) -> bool:
        """Whether a metric is for classes."""
        return metric.classes

    def update(self, p: Predictive, y: Tensor, target: Tensor) -> None:
        """Take in a batch: y as it was given, and `target` [B, *D] or [B, *D, L]."""
        keep = labelled(p, target)
        whole = bool(keep.all())
        truth = (target.flatten(0, keep.ndim - 1) if whole else target[keep]).long()
        terms = class_terms(p, y, truth, keep, whole=whole)
        choice = _labels(p, terms.probs, truth, keep) if isinstance(p.likelihood, Bernoulli) else _classes(terms.probs, truth)
        self.n += len(truth)
        correct = torch.where(choice.confidence.isnan(), math.nan, choice.correct.double())  # as the other metrics are NaN
        values = {
            "accuracy": correct.flatten(1).mean(1) if correct.ndim > 1 else correct,
            "total": terms.total,
            "aleatoric": terms.aleatoric,
            "epistemic": terms.total.double() - terms.aleatoric.double(),
        }
        if self.wants("brier"):
            values["brier"] = choice.gap.square().sum(-1, dtype=torch.float64)
        self.means.add(keep, values, {"nll": -terms.log_prob})
        if self.wants("classwise_ece", "brier_decomposition"):
            bins = ClassBins.of(terms.probs, truth, bins=self.bins)
            self.bins_of_classes = bins if self.bins_of_classes is None else self.bins_of_classes + bins
        if self.wants("ece", "ece_mass", "mce"):
            self.keep(confidence=choice.confidence.flatten(), correct=choice.correct.flatten())
        ready = {
            "one_minus_max": choice.doubt,
            "predictive_entropy": terms.total,
            "expected_entropy": terms.aleatoric,
            "mutual_information": terms.total - terms.aleatoric,
        }
        self.keep_decisions(p, ~choice.correct.flatten(1).all(1) if correct.ndim > 1 else ~choice.correct, ready, keep)

    def _reliability(self, by: Binning) -> Reliability | None:
        if "confidence" not in self.kept:
            return None
        return Reliability.of(self.joined("confidence"), self.joined("correct"), bins=self.bins, by=by, level=self.level).cpu()

    def values(self) -> dict[str, float]:
        """Accuracy, proper scores, calibration errors and the parts of the Brier score."""
        values = self.means.values()
        if (bins := self._reliability("width")) is not None:
            values |= {"ece": float(bins.ece), "mce": float(bins.mce)}
        if self.wants("ece_mass") and (bins := self._reliability("mass")) is not None:
            values["ece_mass"] = float(bins.ece)
        if self.bins_of_classes is None:
            return self.in_order(values)
        values["classwise_ece"] = float(self.bins_of_classes.ece)
        parts = self.bins_of_classes.decomposition._asdict() if self.wants("brier_decomposition") else {}
        return self.in_order(values) | {f"brier_{name}": float(part) for name, part in parts.items()}

    def details(self) -> dict[str, Any]:
        """The reliability diagram, if any calibration error is asked for."""
        return {"reliability": self._reliability("width")}


@dataclass(frozen=True)
class Choices:
    """What is chosen for n positions, among classes, or on and off for each of L labels."""

    confidence: Tensor  # [n] or [n, L], the probability of what is chosen
    correct: Tensor  # the same shape
    doubt: Tensor  # [n], the probability that it is wrong; of labels, how many are expected to be wrong
    gap: Tensor  # [n, C], probabilities minus what came true


def _classes(probs: Tensor, truth: Tensor) -> Choices:
    confidence, top = probs.max(-1)
    gap = probs.scatter_add(-1, truth.unsqueeze(-1), probs.new_full((len(probs), 1), -1.0))
    doubt = probs.scatter(-1, top.unsqueeze(-1), 0.0).sum(-1)
    return Choices(confidence, (top == truth) & ~confidence.isnan(), doubt, gap)


def _labels(p: Predictive, probs: Tensor, truth: Tensor, keep: Tensor) -> Choices:
    off = precise(p.complement[keep])
    confidence = torch.maximum(probs, off)
    correct = ((probs > off) == truth.bool()) & ~confidence.isnan()
    return Choices(confidence, correct, torch.minimum(probs, off).sum(-1), probs - truth)


@dataclass(frozen=True)
class Terms:
    """What n positions with a target need of the draws."""

    probs: Tensor  # [n, C]
    log_prob: Tensor  # [B], of the truth, summed over the positions of each row
    total: Tensor  # [n]
    aleatoric: Tensor  # [n]


def class_terms(p: Predictive, y: Tensor, truth: Tensor, keep: Tensor, *, whole: bool) -> Terms:
    """The terms of all positions of `keep` [B, *D], in one pass over the draws where these are at hand; `whole`: all of them count."""
    if not isinstance(p, LatentMixture) or not isinstance(p.likelihood, Classes) or p.linked_points is not None:
        split = p.uncertainty
        return Terms(precise(p.mean[keep]), p.log_prob(y), split.total[keep], split.aleatoric[keep])
    points = p.points
    f = points.means.flatten(1, -2) if whole else points.means[:, keep]  # [S, n, C]
    draws, n, width = f.shape
    weights = points.component_weights.to(torch.promote_types(f.dtype, torch.float32))
    shapes = ((n, p.likelihood.width(f)), (n,), (n,))
    probs, aleatoric, log_prob = (f.new_empty(*shape, dtype=weights.dtype) for shape in shapes)
    rows = max(1, (CACHE if f.device.type == "cpu" else 2**8 * CACHE) // (draws * width))
    for i in range(0, n, rows):
        block = slice(i, i + rows)
        mixed = _mixed(p.likelihood, f[:, block], points, truth[block], weights)
        probs[block], aleatoric[block], log_prob[block] = mixed
    total = entropy(probs.clamp_(0, 1))  # a mean of probabilities may round to more than 1
    return Terms(probs, row_sums(log_prob.double(), keep), total, torch.minimum(aleatoric, total))


def _mixed(
    likelihood: Classes, f: Tensor, points: LatentMixture, truth: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of draws f [S, n, C]: mean probabilities [n, C], mean entropies [n], and the log of the mean probability of the truth [n].

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
    tiny = true < 1e4 * torch.finfo(x.dtype).tiny  # where only the logarithm of the truth's probability is a float
    log_true = true.log()
    if bool(tiny.any()):
        each = x[:, :, tiny].gather(0, truth[tiny].expand(1, len(z), -1)).squeeze(0) - log_z[:, tiny]
        log_true[tiny] = (each + weights.log().unsqueeze(-1)).logsumexp(0)
    x.clamp_(min=torch.finfo(x.dtype).min)  # 0 times the log of 0 is 0
    noise = weights @ (log_z - x.mul_(e).sum(0) / z)
    return mean.mT, noise, log_true
