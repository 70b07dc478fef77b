"""A measure of uncertainty as a score of the unfamiliar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dubito.apps.network import posterior_of
from dubito.apps.ood.detector import Given
from dubito.evaluation.measures import MEASURES
from dubito.model import Model
from dubito.posteriors import Posterior
from dubito.tensors.checks import one_of


@dataclass(frozen=True)
class Measured:
    r"""Any of `dubito.measures`, of the posterior's own predictive: `one_minus_max` is the maximum softmax probability (Hendrycks &
    Gimpel 2017), turned round; `predictive_entropy`, `mutual_information` and `epistemic_variance` are their Bayesian relatives.

    All draws of the posterior count: the first two are of the averaged probabilities, the others of how the draws differ (a point's
    do not, and its scores are all 0). It learns nothing, so `fit` needs no data. `how` and `draws` are as in `posterior.predict`.

    >>> import torch
    >>> net = torch.nn.Linear(1, 2, bias=False)
    >>> _ = torch.nn.init.constant_(net.weight[:1], 2.0), torch.nn.init.zeros_(net.weight[1:])
    >>> Measured("one_minus_max").fit(net)(torch.tensor([[0.0], [2.0]]))
    tensor([0.5000, 0.0180])
    """

    measure: str = "predictive_entropy"
    how: str | None = None
    draws: int | None = None
    seed: int = 0

    def __post_init__(self):
        one_of(MEASURES, measure=self.measure)

    def fit(self, posterior: Given, data: Any = None) -> MeasuredScore:
        """The score; no data are needed."""
        return MeasuredScore(posterior_of(posterior), self)


@dataclass(frozen=True)
class MeasuredScore:
    """The measure of the predictive at inputs, [B, *D]."""

    posterior: Posterior
    settings: Measured

    @property
    def model(self) -> Model:
        """The model that the posterior is of."""
        return self.posterior.model

    def __call__(self, x: Any) -> Tensor:
        one = self.settings
        return MEASURES[one.measure](self.posterior.predict(x, one.how, draws=one.draws, seed=one.seed))
