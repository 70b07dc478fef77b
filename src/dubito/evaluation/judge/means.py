r"""Sums over batches that become means with their standard errors, and counts of where targets lie in their distributions.

An example is one row of a batch. With dense outputs its positions (pixels, steps) are not independent of each other, so the standard
error is that of a ratio of sums over examples: with :math:`s_i` the sum over the :math:`c_i` positions of example i,

.. math:: \bar v = \frac{\sum_i s_i}{\sum_i c_i}, \qquad
    \mathrm{se}^2 = \frac{m}{m - 1} \frac{\sum_i (s_i - \bar v c_i)^2}{(\sum_i c_i)^2}

over the m examples that have a position. With one position each it is the usual :math:`\sigma / \sqrt m`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from dubito.evaluation.metrics import QuantileCalibration
from dubito.evaluation.metrics.regression import LEVELS

SHARES = ("accuracy", "coverage")  # means of zeros and ones
ROUNDING = 1e-13  # of a sum of squares: a variance below that is rounding


class Means:
    """Means of quantities that every position has, added up batch by batch; nothing is kept of single examples.

    >>> means = Means()
    >>> means.add(torch.tensor([True, True, True]), {"loss": torch.tensor([1.0, 2.0, 6.0])})
    >>> means.values()["loss"], round(means.standard_errors()["loss"], 4)
    (3.0, 1.5275)
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}  # of s, s^2 and s c
        self._counts: Tensor | None = None  # examples that have a position, sum of c, sum of c^2

    def add(self, keep: Tensor, values: Mapping[str, Tensor], sums: Mapping[str, Tensor] | None = None) -> None:
        """Take in a batch: which positions count, [B, *D]; quantities of those that do, [n] each; others summed over them, [B] each."""
        count = keep.flatten(1).sum(1).double() if keep.ndim > 1 else keep.double()  # [B]
        sums = {} if sums is None else sums
        by_row = row_sums(torch.stack([value.double() for value in values.values()]), keep)
        by_row = torch.cat([by_row, *(one.double().unsqueeze(0) for one in sums.values())])  # [K, B]
        added = torch.stack([by_row.sum(-1), by_row.square().sum(-1), by_row @ count], -1)
        for name, one in zip([*values, *sums], added.unbind(), strict=True):
            self._sums[name] = one + self._sums.get(name, 0.0)  # on their device: nobody waits for them
        counts = torch.stack([(count > 0).double().sum(), count.sum(), count.square().sum()])
        self._counts = counts if self._counts is None else self._counts + counts

    def __contains__(self, name: str) -> bool:
        return name in self._sums

    def values(self) -> dict[str, float]:
        """The mean of every quantity over all positions."""
        n = math.nan if self._counts is None else float(self._counts[1])
        return {name: float(sums[0]) / n for name, sums in self._sums.items()}

    def standard_errors(self) -> dict[str, float]:
        """The standard error of every mean; nan for fewer than two examples.

        A share (of `SHARES`) of exactly 0 or 1 gets the standard deviation of the rule of succession, about 1 / m for m examples, since
        a share without a single exception is no certainty.
        """
        if self._counts is None or float(self._counts[0]) < 2:
            return dict.fromkeys(self._sums, math.nan)
        examples, n, squares = self._counts.tolist()
        found = {}
        for name, sums in self._sums.items():
            total, square, product = sums.tolist()
            mean = total / n
            off = square - 2 * mean * product + mean * mean * squares
            off = 0.0 if off <= ROUNDING * square else off
            found[name] = math.sqrt(examples / (examples - 1) * off) / n if math.isfinite(off) else math.nan
            if name in SHARES and mean in (0.0, 1.0):
                found[name] = math.sqrt((examples + 1) / (examples + 3)) / (examples + 2)
        return found


def row_sums(values: Tensor, keep: Tensor) -> Tensor:
    """Values [..., n] of the positions that count, `keep` [B, *D], summed over the positions of each row: [..., B]."""
    if keep.ndim == 1 and values.shape[-1] == len(keep):
        return values
    row = torch.arange(len(keep), device=keep.device).view(-1, *[1] * (keep.ndim - 1)).expand_as(keep)[keep]
    return values.new_zeros(*values.shape[:-1], len(keep)).index_add(-1, row, values)


class QuantileCounts:
    """How many PIT values lie at or below each level of 1 %, 2 %, ..., 99 %, counted batch by batch."""

    def __init__(self) -> None:
        self.n = 0
        self._below: Tensor | float = 0.0

    def add(self, pit: Tensor) -> None:
        """Count values F(y), of any shape."""
        values = pit.flatten().double()
        cuts = torch.tensor(LEVELS, dtype=torch.float64, device=values.device)
        self._below = self._below + torch.bincount(torch.bucketize(values, cuts), minlength=len(cuts) + 1)[:-1].cumsum(0).double()
        self.n += len(values)

    @property
    def calibration(self) -> QuantileCalibration:
        """The share of targets below the quantile of each level."""
        below = torch.as_tensor(self._below).cpu()
        return QuantileCalibration(torch.tensor(LEVELS, dtype=torch.float64), below / self.n, self.n)

    @property
    def histogram(self) -> Tensor:
        """Counts of PIT values in 20 equal bins."""
        below = torch.as_tensor(self._below).cpu()
        return torch.cat([below.new_zeros(1), below[4::5], below.new_full((1,), self.n)]).diff()
