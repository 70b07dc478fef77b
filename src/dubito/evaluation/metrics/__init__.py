r"""How good predictions are, given the truth: `(Predictive, y) -> scalar`.

Dense outputs count every labelled position as an example; class targets equal to `ignore_index` are left out of
everything. `Bernoulli` counts each label on its own in `accuracy` and `ece`. Regression with several outputs averages
over them, except in `nll`, which scores all outputs of an example jointly. y is a tensor, a NumPy array or a list.

`auroc`, `fpr95`, `risk_coverage`, `aurc` and the like are for decisions made with a score of uncertainty: larger
scores should mean positives (errors, unfamiliar inputs).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

from torch import Tensor

from dubito.evaluation.metrics.calibration import Decomposition as Decomposition
from dubito.evaluation.metrics.calibration import Reliability as Reliability
from dubito.evaluation.metrics.calibration import accuracy as accuracy
from dubito.evaluation.metrics.calibration import brier as brier
from dubito.evaluation.metrics.calibration import brier_decomposition as brier_decomposition
from dubito.evaluation.metrics.calibration import classwise_ece as classwise_ece
from dubito.evaluation.metrics.calibration import ece as ece
from dubito.evaluation.metrics.calibration import mce as mce
from dubito.evaluation.metrics.calibration import nll as nll
from dubito.evaluation.metrics.calibration import perplexity as perplexity
from dubito.evaluation.metrics.calibration import reliability as reliability
from dubito.evaluation.metrics.calibration import wilson as wilson
from dubito.evaluation.metrics.decisions import Threshold as Threshold
from dubito.evaluation.metrics.decisions import aupr_error as aupr_error
from dubito.evaluation.metrics.decisions import aupr_success as aupr_success
from dubito.evaluation.metrics.decisions import aurc as aurc
from dubito.evaluation.metrics.decisions import auroc as auroc
from dubito.evaluation.metrics.decisions import average_precision as average_precision
from dubito.evaluation.metrics.decisions import excess_aurc as excess_aurc
from dubito.evaluation.metrics.decisions import fpr95 as fpr95
from dubito.evaluation.metrics.decisions import fpr_at_tpr as fpr_at_tpr
from dubito.evaluation.metrics.decisions import risk_coverage as risk_coverage
from dubito.evaluation.metrics.decisions import threshold as threshold
from dubito.evaluation.metrics.regression import QuantileCalibration as QuantileCalibration
from dubito.evaluation.metrics.regression import coverage as coverage
from dubito.evaluation.metrics.regression import crps as crps
from dubito.evaluation.metrics.regression import interval_score as interval_score
from dubito.evaluation.metrics.regression import pit as pit
from dubito.evaluation.metrics.regression import quantile_calibration as quantile_calibration
from dubito.evaluation.metrics.regression import quantile_error as quantile_error
from dubito.evaluation.metrics.regression import rmse as rmse
from dubito.evaluation.metrics.regression import sharpness as sharpness
from dubito.evaluation.metrics.regression import width as width


class Metric(NamedTuple):
    """A metric and what it is for."""

    function: Callable[..., Tensor]  # (Predictive, y) -> scalar
    classes: bool
    regression: bool
    better: Literal["higher", "lower"] | None = None
    meaning: str = ""  # how to read it

    def suits(self, discrete: bool) -> bool:
        """Whether it is for classes and labels, or for numbers."""
        return self.classes if discrete else self.regression


METRICS: dict[str, Metric] = {
    "accuracy": Metric(accuracy, True, False, "higher", "share of rows whose most probable class is right"),
    "nll": Metric(nll, True, True, "lower", "negative log likelihood of a row; lower is better"),
    "brier": Metric(brier, True, False, "lower", "squared error of the probabilities; lower is better"),
    "ece": Metric(ece, True, False, "lower", "mean gap between confidence and accuracy; 0 is calibrated"),
    "ece_mass": Metric(partial(ece, by="mass"), True, False, "lower", "the same, in bins with equally many rows"),
    "classwise_ece": Metric(classwise_ece, True, False, "lower", "the same gap for every class's probability, averaged"),
    "mce": Metric(mce, True, False, "lower", "the largest gap of any bin; large by chance where bins have few rows"),
    "rmse": Metric(rmse, False, True, "lower", "root mean squared error, in the target's units"),
    "crps": Metric(crps, False, True, "lower", "continuous ranked probability score, in the target's units; lower is better"),
    "coverage": Metric(coverage, False, True, None, "share inside the 90 % interval; 0.9 is calibrated"),
    # narrow intervals and small deviations are good only in predictives that are calibrated, so neither direction is better
    "width": Metric(
        width, False, True, None, "mean width of the 90 % interval, in the target's units; narrow is good if it covers"
    ),
    "interval_score": Metric(
        interval_score, False, True, "lower", "that width plus a penalty for targets outside; lower is better"
    ),
    "quantile_error": Metric(
        quantile_error, False, True, "lower", "average gap between nominal and observed quantile levels; 0 is calibrated"
    ),
    "sharpness": Metric(sharpness, False, True, None, "predicted standard deviation, in the target's units"),
}

# (scores [n], errors [n]) -> scalar
DECISIONS: dict[str, Metric] = {
    "auroc": Metric(auroc, True, False, "higher", "how often an error is less certain than a success"),
    "fpr95": Metric(fpr95, True, False, "lower", "share of errors accepted where 95 % of the successes are"),
    "aupr_error": Metric(aupr_error, True, False, "higher", "average precision of finding errors"),
    "aupr_success": Metric(aupr_success, True, False, "higher", "average precision of finding successes"),
    "aurc": Metric(aurc, True, True, "lower", "mean risk over all coverages; lower is better"),
    "excess_aurc": Metric(excess_aurc, True, True, "lower", "AURC above that of an oracle that knows the errors"),
}
