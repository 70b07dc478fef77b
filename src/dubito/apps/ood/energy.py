"""The free energy of the logits as a score of the unfamiliar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dubito.apps.network import posterior_of
from dubito.apps.ood.detector import Given
from dubito.apps.ood.max_logit import with_logits
from dubito.model import Model
from dubito.posteriors import Posterior
from dubito.tensors.checks import positive


@dataclass(frozen=True)
class Energy:
    r"""The free energy :math:`-T \ln \sum_c \exp(\bar f_c(x) / T)` (Liu et al. 2020).

    :math:`\bar f` is the mean of the logits over the posterior. The function being convex, that of the mean is never below the mean
    of the draws' energies, and above it where the draws differ: disagreement makes an input less familiar. Averaging the energies
    would do the contrary. A linearized Laplace posterior has the logits of its point as means, and so its energies.

    >>> import torch
    >>> net = torch.nn.Linear(1, 2, bias=False)
    >>> _ = torch.nn.init.constant_(net.weight[:1], 2.0), torch.nn.init.zeros_(net.weight[1:])
    >>> Energy().fit(net)(torch.tensor([[0.0], [2.0]]))
    tensor([-0.6931, -4.0181])
    """

    temperature: float = 1.0
    draws: int | None = None

    def __post_init__(self):
        positive(temperature=self.temperature)

    def fit(self, posterior: Given, data: Any = None) -> EnergyScore:
        """The score; no data are needed."""
        return EnergyScore(with_logits(posterior_of(posterior), "Energy"), self)


@dataclass(frozen=True)
class EnergyScore:
    """The energy at inputs, [B, *D]."""

    posterior: Posterior
    settings: Energy

    @property
    def model(self) -> Model:
        """The model that the posterior is of."""
        return self.posterior.model

    def __call__(self, x: Any) -> Tensor:
        f, t = self.posterior.predict(x, draws=self.settings.draws).f_mean, self.settings.temperature
        return -t * torch.logsumexp(f / t, -1)
