"""Normal weights whose scales are inferred."""

from __future__ import annotations

from dataclasses import dataclass, field

from dubito.model.priors.groups import Groups
from dubito.model.priors.scaled import Scaled
from dubito.model.priors.scales import HalfCauchy, Scale


@dataclass(frozen=True)
class Hierarchical(Scaled):
    r"""Weights are normal given the scale of their group, and the scale has a prior of its own:

    .. math:: w_i \mid \tau \sim N(0, \tau_{g(i)}^2), \qquad \tau_g \sim \mathrm{scale}

    `scale` is a `HalfCauchy`, a `Gamma`, or an `InverseGamma` (of :math:`\tau^2`), whose draws given the weights are in closed form:
    HMC and its kin then draw the scales between trajectories, exactly. `groups` is one of the words of `Groups`.

    The mode over weights and scales together is no good estimate where scales may go to 0: under a half-Cauchy the density has no
    upper bound there. For `MAP` take an `InverseGamma`, or `StudentT`, which is the same with the scales integrated out.

    >>> import dubito, torch
    >>> model = dubito.Model(torch.nn.Linear(2, 1), dubito.Gaussian(scale=0.1), Hierarchical(HalfCauchy(1.0), groups="layer"))
    >>> list(model.parameters())
    ['weight', 'bias', 'prior:log_scale']
    """

    scale: Scale = field(default_factory=HalfCauchy)
    groups: str | Groups = field(default="tensor", kw_only=True)

    def __post_init__(self):
        if not isinstance(self.scale, Scale):
            raise TypeError(f"the scale has a density such as HalfCauchy(1.0) or InverseGamma(2.0, 2.0); got {self.scale!r}")
        Groups.of(self.groups)

    @property
    def local(self) -> Scale:
        """The density of a group's scale."""
        return self.scale

    @property
    def grouping(self) -> Groups:
        """The groups of weights that share a scale."""
        return Groups.of(self.groups)
