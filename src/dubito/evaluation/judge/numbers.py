"""Scores of predicted numbers, batch by batch."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Normal

from dubito.evaluation.judge.means import QuantileCounts
from dubito.evaluation.judge.scorer import Scorer
from dubito.evaluation.metrics import Metric
from dubito.evaluation.metrics.reading import labelled
from dubito.evaluation.metrics.regression import crps_of, interval_penalty, pit_of
from dubito.posteriors.predictive import LatentMixture, Predictive

ROOTS = {"rmse": "squares", "sharpness": "variance"}  # metrics that are the root of a mean
OF_INTERVALS = ("coverage", "width", "interval_score")


class NumberScorer(Scorer):
    """Regression. The error of an example is its squared error, summed over outputs."""

    kind, extra, score, discrete = "regression", ("uncertainty",), "total_variance", False

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.quantiles = QuantileCounts()

    @staticmethod
    def suits(metric: Metric) -> bool:
        """Whether a metric is for regression."""
        return metric.regression

    def available(self, p: Predictive, name: str) -> bool:
        """A likelihood of one's own may have no CRPS and no distribution function."""
        if isinstance(p, LatentMixture) and isinstance(p.marginals[0], Normal):
            return True
        if name == "crps":
            return hasattr(p, "crps")
        if name not in (*OF_INTERVALS, "quantile_error"):
            return True
        if not hasattr(p, "cdf"):
            return name != "quantile_error"
        with suppress(ValueError):
            p.cdf(p.mean)  # pyright: ignore[reportAttributeAccessIssue]
            return True
        return False

    def update(self, p: Predictive, y: Tensor, target: Tensor) -> None:
        """Take in a batch: y as it was given, and `target` [B, *D, C]."""
        if not target.numel():
            return
        keep = torch.ones_like(labelled(p, target))
        self.n += keep.numel()
        squares, split = (p.mean - target).double().square(), p.uncertainty
        total, aleatoric = split.total.double(), split.aleatoric.double()
        values = {"squares": squares, "variance": total}
        sums = {"total": total, "aleatoric": aleatoric, "epistemic": total - aleatoric}
        if self.wants("crps"):
            values["crps"] = crps_of(p, y).reshape(target.shape)
        if self.wants(*OF_INTERVALS):
            lower, upper = p.interval(self.level)
            values["coverage"] = (lower <= target) & (target <= upper)
            values["width"] = upper - lower
            values["interval_score"] = interval_penalty(target, lower, upper, self.level)
        each = {name: value.double().mean(-1).flatten() for name, value in values.items()}
        each |= {name: value.sum(-1).flatten() for name, value in sums.items()}
        self.means.add(keep, each, {"nll": -p.log_prob(y)} if self.wants("nll") else None)
        if self.wants("quantile_error"):
            self.quantiles.add(pit_of(p, y, "judge"))
        self.keep_decisions(p, squares.sum(-1).flatten(), {"total_variance": each["total"]}, keep)

    def values(self) -> dict[str, float]:
        """Errors, proper scores, intervals and quantiles."""
        values = self.means.values()
        values |= {name: math.sqrt(values[square]) for name, square in ROOTS.items()}
        if self.quantiles.n:
            values["quantile_error"] = float(self.quantiles.calibration.error)
        return self.in_order(values)

    def standard_errors(self) -> dict[str, float]:
        """Those of means, and of `rmse` and `sharpness` by the delta method: se / (2 root)."""
        errors, values = self.means.standard_errors(), self.values()
        roots = {name: errors[square] / (2 * values[name]) for name, square in ROOTS.items() if values.get(name)}
        return super().standard_errors() | roots  # of a root, by the delta method

    def details(self) -> dict[str, Any]:
        """Quantile calibration and the histogram of PIT values, if asked for."""
        return {"quantiles": self.quantiles.calibration, "pit": self.quantiles.histogram} if self.quantiles.n else {}
