"""The predictive of classes or labels whose probabilities were recalibrated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dubito.model.likelihoods import Bernoulli, Likelihood, Uncertainty
from dubito.posteriors.predictive import LatentMixture, Predictive


@dataclass(frozen=True)
class RecalibratedClasses(Predictive):
    r"""Class probabilities softmax(logits), or probabilities sigmoid(logits) of labels, in the place of those of `before`.

    Everything about y follows from the new probabilities. A map of averaged probabilities says nothing of single draws, so the total
    uncertainty, their entropy, is split in the shares that it had before. What is said of f, the network's output, is as it was.

    >>> import dubito
    >>> before = LatentMixture(dubito.Categorical(), torch.tensor([[[2.0, 0.0]], [[0.0, 0.0]]]))
    >>> p = RecalibratedClasses(before, torch.tensor([[0.75, 0.25]]).log())
    >>> p.mean, p.log_prob(torch.tensor([0])).exp()
    (tensor([[0.7500, 0.2500]]), tensor([0.7500]))
    """

    before: Predictive
    logits: Tensor  # [B, *D, C]

    @property
    def likelihood(self) -> Likelihood:  # pyright: ignore[reportIncompatibleVariableOverride]
        """That of the predictive before."""
        return self.before.likelihood

    @property
    def means(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Outputs of the network, as before."""
        return self.before.means

    @cached_property
    def _after(self) -> LatentMixture:
        """The same probabilities as those of a plain network."""
        return LatentMixture(self.before.likelihood.plain, self.logits.unsqueeze(0))

    @property
    def mean(self) -> Tensor:
        """The new probabilities, [B, *D, C]."""
        return self._after.mean

    @property
    def complement(self) -> Tensor:
        """One minus the new probabilities, without the rounding."""
        return self._after.complement

    @cached_property
    def uncertainty(self) -> Uncertainty:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The entropy of the new probabilities, split in the shares that it had before."""
        total, old = self._after.uncertainty.total, self.before.uncertainty
        share = torch.where(old.total > 0, old.aleatoric / torch.where(old.total > 0, old.total, 1.0), 1.0)
        return Uncertainty.of(total, total * share.to(total))

    @property
    def f_mean(self) -> Tensor:
        """As before."""
        return self.before.f_mean

    @property
    def f_var(self) -> Tensor:
        """As before."""
        return self.before.f_var

    def log_prob(self, y: Tensor) -> Tensor:
        """ln p(y | x, D) of the new probabilities, [B]."""
        return self._after.log_prob(y)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n draws of y from the new probabilities."""
        return self._after.sample(n, generator)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Classes have none: an error that says so."""
        return self._after.interval(level)  # which says that there are none

    def to(self, device: torch.device | str) -> RecalibratedClasses:
        """The same predictive on another device."""
        return replace(self, before=self.before.to(device), logits=self.logits.to(device))


def recalibrated(before: Predictive, logits: Tensor) -> RecalibratedClasses:
    """With logits in the precision of the network's own outputs; class logits as log probabilities."""
    logits = logits if isinstance(before.likelihood, Bernoulli) else logits.log_softmax(-1)
    return RecalibratedClasses(before, logits.to(torch.promote_types(before.means.dtype, torch.float32)))
