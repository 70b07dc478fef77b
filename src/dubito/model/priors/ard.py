"""Automatic relevance determination (MacKay 1994, Neal 1996)."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from dubito.model.priors.groups import Groups
from dubito.model.priors.prior import weights
from dubito.model.priors.scaled import Scaled
from dubito.model.priors.scales import InverseGamma, Scale
from dubito.tensors.tree import Params


@dataclass(frozen=True)
class ARD(Scaled):
    r"""A scale for the weights that leave each input unit, which shrinks where the input does not matter:

    .. math:: w_{oi} \mid \tau_i \sim N(0, \tau_i^2), \qquad \tau_i^2 \sim \mathrm{InvGamma}

    Leaves without an input axis, such as biases, have one scale each. To judge the inputs of a network alone, give it to the first
    layer: `ByName({"^0.weight": ARD(), "": Normal()})`.

    >>> import torch
    >>> prior = ARD()
    >>> params = {"weight": torch.ones(3, 2), "prior:log_scale:weight": torch.tensor([0.0, -1.0])}
    >>> prior.relevance(params)["weight"]
    tensor([1.0000, 0.3679])
    """

    scale: Scale = field(default_factory=lambda: InverseGamma(0.5, 0.5))

    @property
    def local(self) -> Scale:
        """The density of a group's scale."""
        return self.scale

    @property
    def grouping(self) -> Groups:
        """The weights that leave an input unit."""
        return Groups("column")

    def relevance(self, params: Params) -> dict[str, Tensor]:
        """The scale of every input unit, [inputs] for each leaf."""
        return {name: self._log_scale(name, params).exp() for name in weights(params)}
