"""R-hat and effective draws of many quantities at once, and figures that describe them all."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dubito.posteriors.diagnostics.ess import effective_draws, effective_tail_draws
from dubito.posteriors.diagnostics.quantities import map_quantities, split_chains
from dubito.posteriors.diagnostics.rhat import rank_rhat

RHAT_GOOD = 1.01  # a quantity has converged up to this R-hat
RHAT_BAD = 1.05  # above it even the largest R-hat of many quantities is no chance
SHARE = 0.95  # of the quantities should be good

Statistic = Literal["rhat", "ess_bulk", "ess_tail"]


class Convergence(NamedTuple):
    """R-hat and effective sample sizes of every quantity, [...] each."""

    rhat: Tensor
    ess_bulk: Tensor
    ess_tail: Tensor


def convergence(draws: Tensor) -> Convergence:
    """`rhat`, `ess_bulk` and `ess_tail` of draws [chains, n, ...] together, in two thirds of the time.

    >>> result = convergence(torch.randn(4, 100, 3, 5, generator=torch.Generator().manual_seed(0)))
    >>> result.rhat.shape, bool((result.rhat < 1.1).all())
    (torch.Size([3, 5]), True)
    """

    def _all_three(x: Tensor) -> tuple[Tensor, ...]:
        value, scores = rank_rhat(split_chains(x))
        return value, effective_draws(scores), effective_tail_draws(x)

    return Convergence(*map_quantities(_all_three, draws, answers=3))


@dataclass(frozen=True, eq=False)
class Spread:
    """R-hat and effective draws of Q quantities, [Q] each. `still` counts those equal in all draws, `broken` those not finite."""

    rhat: Tensor = field(repr=False)
    ess_bulk: Tensor = field(repr=False)
    ess_tail: Tensor = field(repr=False)
    still: int = 0
    broken: int = 0

    @staticmethod
    def of(*leaves: Tensor) -> Spread:
        """The spread of draws [chains, n, ...], with the quantities of all leaves in one row."""
        results, still, broken = [], 0, 0
        for leaf in leaves:
            result = Convergence(*(value.flatten().cpu() for value in convergence(leaf)))
            missing = result.rhat.isnan().to(leaf.device)
            if missing.any():
                finite = leaf.reshape(*leaf.shape[:2], -1)[..., missing].isfinite().all(0).all(0)
                broken += int((~finite).sum())
                still += int(finite.sum()) if leaf.shape[1] >= 4 else 0
            results.append(result)
        return Spread(*(torch.cat(values) for values in zip(*results, strict=True)), still=still, broken=broken)

    def __len__(self) -> int:
        return len(self.rhat)

    def _finite(self, name: Statistic) -> Tensor:
        values: Tensor = getattr(self, name)
        return values[~values.isnan()]

    def quantile(self, name: Statistic, level: float) -> float:
        """A quantile of the values that are not nan, rounded to the worse of two neighbors; nan if there are none."""
        values = self._finite(name)
        if not len(values):
            return math.nan
        place = (len(values) - 1) * level
        return float(values.sort().values[math.ceil(place) if name == "rhat" else math.floor(place)])

    @property
    def worst(self) -> float:
        """The largest R-hat."""
        return self.quantile("rhat", 1.0)

    @property
    def agree(self) -> float:
        """The share of quantities with an R-hat of at most 1.01."""
        return float((self._finite("rhat") <= RHAT_GOOD).double().mean())

    @property
    def fewest(self) -> float:
        """The number of effective draws, in the bulk and in the tails, that 95 % of the quantities have."""
        values = [self.quantile(name, 1 - SHARE) for name in ("ess_bulk", "ess_tail")]
        return min((value for value in values if not math.isnan(value)), default=math.nan)
