"""The largest logit as a score of the unfamiliar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dubito.apps.network import posterior_of
from dubito.apps.ood.detector import Given
from dubito.model import Model
from dubito.model.likelihoods import Categorical
from dubito.posteriors import Posterior


@dataclass(frozen=True)
class MaxLogit:
    r"""Minus the largest logit, :math:`-\max_c \bar f_c(x)` (Hendrycks et al. 2022): unlike a probability it tells "like nothing that I
    know" from "like two classes at once".

    :math:`\bar f` is the mean of the logits over the posterior. Where draws agree that is the mean of their largest logits, and where
    they do not it is less, as it should be: the mean of the maxima would be large there, too.

    >>> import torch
    >>> net = torch.nn.Linear(1, 2, bias=False)
    >>> _ = torch.nn.init.constant_(net.weight[:1], 2.0), torch.nn.init.zeros_(net.weight[1:])
    >>> MaxLogit().fit(net)(torch.tensor([[1.0], [2.0]]))
    tensor([-2., -4.])
    """

    draws: int | None = None

    def fit(self, posterior: Given, data: Any = None) -> MaxLogitScore:
        """The score; no data are needed."""
        return MaxLogitScore(with_logits(posterior_of(posterior), "MaxLogit"), self)


@dataclass(frozen=True)
class MaxLogitScore:
    """Minus the largest mean logit at inputs, [B, *D]."""

    posterior: Posterior
    settings: MaxLogit

    @property
    def model(self) -> Model:
        """The model that the posterior is of."""
        return self.posterior.model

    def __call__(self, x: Any) -> Tensor:
        return -self.posterior.predict(x, draws=self.settings.draws).f_mean.amax(-1)


def with_logits(posterior: Posterior, name: str) -> Posterior:
    """The posterior, if the outputs of its network are the logits of classes."""
    if not isinstance(posterior.model.likelihood, Categorical):
        likelihood = posterior.model.likelihood
        measured = "Measured('predictive_entropy'), " if likelihood.discrete else ""
        raise ValueError(
            f"{name} reads the logits of classes, and {type(likelihood).__name__} has none: use {measured}"
            "Measured('epistemic_variance'), Mahalanobis() or Neighbours()"
        )
    return posterior
