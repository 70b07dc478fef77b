"""The horseshoe (Carvalho, Polson & Scott 2010)."""

from __future__ import annotations

from dataclasses import dataclass, field

from dubito.model.priors.groups import Groups
from dubito.model.priors.scaled import Scaled
from dubito.model.priors.scales import HalfCauchy, Scale, keep_positive


@dataclass(frozen=True)
class Horseshoe(Scaled):
    r"""Most weights are next to nothing, and a few are left alone:

    .. math:: w_i \mid \tau, \lambda \sim N(0, \tau^2 \lambda_{g(i)}^2), \quad \lambda_g \sim C^+(0, 1), \quad
              \tau \sim C^+(0, \mathrm{width})

    By default every weight has its :math:`\lambda`; with `groups="row"` a unit or filter, with "column" an input (the group horseshoe).
    `width` is about the share of groups that matter. HMC and its kin draw all scales from their conditionals at temperature 1.

    >>> import torch
    >>> list(Horseshoe(width=0.1, groups="row").parameters({"w": torch.zeros(3, 2)}))
    ['prior:log_scale:w', 'prior:log_overall']
    """

    width: float = 1.0
    groups: str | Groups = field(default="weight", kw_only=True)

    def __post_init__(self):
        keep_positive(self, "width")
        Groups.of(self.groups)

    @property
    def local(self) -> Scale:
        """C+(0, 1)."""
        return HalfCauchy(1.0)

    @property
    def overall(self) -> Scale:
        """C+(0, width)."""
        return HalfCauchy(self.width)

    @property
    def grouping(self) -> Groups:
        """The groups of weights that share a scale."""
        return Groups.of(self.groups)
