"""Uncertainty as a detector of errors, over more pixels than one can keep: scores are counted, not stored."""

from __future__ import annotations

import torch
from torch import Tensor

from dubito.evaluation.metrics.decisions import Ranking
from dubito.tensors.checks import require

SHIFT = 12  # of a float32's 23 binary digits that are dropped: eleven are left
BINS = 2 ** (31 - SHIFT)  # every exponent, with those digits


class Detector:
    r"""How well a score of uncertainty, larger is less certain, tells errors from what is right.

    A score is rounded down to eleven binary digits (by less than 0.05 %), and counted there, whatever its size: memory is bounded and
    batches can be added. `precision_recall` takes errors as what is to be found: of the pixels with the largest scores, how many are
    wrong, and how many of all wrong ones are among them. `kept` is the curve of Kendall & Gal (2017): how wrong the most certain pixels
    are, for every share of them. With numbers the loss is the squared error, and only `kept` and `aurc` are for those.

    >>> found = Detector()
    >>> found.add(torch.tensor([0.1, 0.4, 0.5, 2.0]), torch.tensor([False, True, False, True]))
    >>> precision, recall = found.precision_recall()
    >>> precision.tolist(), recall.tolist()
    ([1.0, 0.5, 0.66..., 0.5], [0.5, 0.5, 1.0, 1.0])
    >>> round(found.average_precision, 4), found.auroc
    (0.8333, 0.75)
    """

    def __init__(self) -> None:
        self._size: Tensor | None = None
        self._losses: Tensor | None = None

    def add(self, score: Tensor, loss: Tensor) -> None:
        """Count scores, at least 0, and whether each is an error, or its loss."""
        score, loss = score.detach().float().flatten(), loss.detach().flatten().to(score.device, torch.float64)
        require(score.shape == loss.shape, f"there are {len(score)} scores for {len(loss)} errors: give one for each")
        require((score >= 0).all(), "scores of uncertainty must be at least 0; these hold NaN or negative numbers")
        # the bits of numbers that are not negative are ordered as the numbers are; adding 0 makes a plus of the sign of -0
        which = (score + 0.0).view(torch.int32) >> SHIFT
        size, losses = torch.bincount(which, minlength=BINS), torch.bincount(which, loss, minlength=BINS)
        self._size = size if self._size is None else self._size.to(size.device) + size
        self._losses = losses if self._losses is None else self._losses.to(size.device) + losses

    @property
    def ranking(self) -> Ranking:
        """The scores that occur, ascending, with counts and losses."""
        if self._size is None or self._losses is None:
            raise ValueError("nothing has been counted: add scores first")
        some = self._size.nonzero().squeeze(1)
        values = (some.to(torch.int32) << SHIFT).view(torch.float32)
        return Ranking(*(part.cpu() for part in (values, self._size[some], self._losses[some])))

    @property
    def n(self) -> int:
        """How many pixels were counted."""
        return 0 if self._size is None else int(self._size.sum())

    def precision_recall(self) -> tuple[Tensor, Tensor]:
        """(precision, recall), each [G] in float64: of all pixels above a score, from the most uncertain down."""
        found = self._errors()
        wrong, shown = found.losses.flip(0).cumsum(0), found.size.flip(0).cumsum(0)
        return wrong / shown, wrong / wrong[-1]

    @property
    def average_precision(self) -> float:
        """Area under the precision-recall curve of the errors."""
        return float(self._errors().average_precision())

    @property
    def auroc(self) -> float:
        """The chance that an error has a larger score than a pixel that is right."""
        return float(self._errors().auroc())

    @property
    def figures(self) -> dict[str, float]:
        """`aurc`, and `average_precision` and `auroc` if the losses are 0 or 1 and both occur."""
        ranking = self.ranking
        if not _are_errors(ranking) or not 0 < float(ranking.losses.sum()) < float(ranking.size.sum()):
            return {"aurc": self.aurc}
        return {"average_precision": self.average_precision, "auroc": self.auroc, "aurc": self.aurc}

    def _errors(self) -> Ranking:
        ranking = self.ranking
        require(_are_errors(ranking), "precision and recall are of errors that are 0 or 1: for other losses use kept() or aurc")
        require(
            float(ranking.losses.sum()), "no pixel is wrong, so there is no error to be found: precision and recall need some"
        )
        return ranking

    def kept(self) -> tuple[Tensor, Tensor]:
        """(coverage, risk), each [G] in float64: the mean loss of all pixels up to a score, from the most certain up."""
        found = self.ranking
        size = found.size.cumsum(0).double()
        return size / size[-1], found.losses.cumsum(0) / size

    @property
    def aurc(self) -> float:
        r"""The mean risk over all coverages, :math:`\frac1n \sum_k r_k`, tied scores in random order, in expectation.

        In a group of m pixels with the mean loss e, after a others with the losses L, the risks are :math:`(L + j e) / (a + j)`,
        whose sum over j is :math:`m e + (L - a e) (\psi(a + m + 1) - \psi(a + 1))`.
        """
        found = self.ranking
        size, losses = found.size.double(), found.losses
        before, lost, each = size.cumsum(0) - size, losses.cumsum(0) - losses, losses / size
        steps = torch.special.digamma(before + size + 1) - torch.special.digamma(before + 1)
        return float((losses + (lost - before * each) * steps).sum() / size.sum())


def _are_errors(ranking: Ranking) -> bool:
    """Whether the losses can be sums of zeros and ones."""
    return not bool((ranking.losses > ranking.size).any() or (ranking.losses % 1 != 0).any())
