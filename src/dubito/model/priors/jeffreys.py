"""Normal weights with Jeffreys' prior of their scales."""

from __future__ import annotations

from dataclasses import dataclass, field

from dubito.model.priors.groups import Groups
from dubito.model.priors.scaled import Scaled
from dubito.model.priors.scales import Flat, Scale


@dataclass(frozen=True)
class Jeffreys(Scaled):
    r"""The scale of every group has the density :math:`p(\tau) \propto 1 / \tau`, which knows no size (normal-Jeffreys):

    .. math:: w_i \mid \tau \sim N(0, \tau_{g(i)}^2), \qquad p(w_g) \propto \lVert w_g \rVert^{-n}

    It is improper, and so is its posterior; asked to sample or to score it says so. `bounds=(low, high)` of the scales make it a
    density. Without them it is for variational methods, which need it in expectation only, and whose bound is then none on the
    evidence (Hron et al. 2018); with the scales as points it is empirical Bayes, that is, no prior of the scales at all.

    >>> import torch
    >>> Jeffreys(bounds=(0.1, 10.0)).parameters({"w": torch.zeros(2)})
    {'prior:log_scale:w': tensor([0.])}
    """

    bounds: tuple[float, float] | None = None
    groups: str | Groups = field(default="tensor", kw_only=True)

    def __post_init__(self):
        Flat(self.bounds)
        Groups.of(self.groups)

    @property
    def local(self) -> Scale:
        """1 / tau, between the bounds if there are some."""
        return Flat(self.bounds)

    @property
    def grouping(self) -> Groups:
        """The groups of weights that share a scale."""
        return Groups.of(self.groups)
