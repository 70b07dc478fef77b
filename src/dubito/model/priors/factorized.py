"""What priors share under which every weight is independent of the others, and all are alike."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from dubito.model.priors.prior import Prior, source_for, zero
from dubito.tensors.tree import Params, full_precision


class Factorized(Prior):
    """A density for one weight, which is that of each. One gives `density` and `draw`; `slope` and `expected` where they are known."""

    @property
    def stacks(self) -> bool:
        """True: every weight is independent."""
        return True

    @abstractmethod
    def density(self, leaf: Tensor) -> Tensor:
        """Log density of every weight."""

    @abstractmethod
    def draw(self, leaf: Tensor, generator: torch.Generator) -> Tensor:
        """A draw for every weight."""

    def slope(self, leaf: Tensor) -> Tensor:
        """Slope of the log density at every weight."""
        with torch.enable_grad():
            live = leaf.detach().requires_grad_()
            return torch.autograd.grad(self.density(live).sum(), live)[0]

    def expected(self, mean: Tensor, variance: Tensor) -> Tensor | None:
        """E of the log density of every weight over N(mean, variance), where it has a closed form."""
        return None

    def typical(self) -> float:
        """How far a weight may go."""
        return 1.0

    def log_prob(self, params: Params) -> Tensor:
        """The sum of `density` over all weights."""
        total = zero(params)
        for leaf in params.values():
            total = total + self.density(full_precision(leaf)).sum()
        return total

    def gradient(self, params: Params) -> Params:
        """`slope` of every weight."""
        return {name: self.slope(leaf.detach()) for name, leaf in params.items()}

    def expected_log_prob(self, mean: Params, variance: Params, *, independent: bool = False) -> Tensor | None:
        """The sum of `expected` over all weights, if it is known."""
        total = zero(mean)
        for name, leaf in mean.items():
            part = self.expected(leaf, variance[name])
            if part is None:
                return None
            total = total + part.sum()
        return total

    def sample(self, like: Params, generator: torch.Generator | None = None) -> Params:
        """`draw` for every weight."""
        source = source_for(like, generator)
        return {name: self.draw(leaf, source) for name, leaf in like.items()}

    def units(self, params: Params) -> Params:
        """`typical` for every weight."""
        return {name: torch.full_like(leaf, self.typical()) for name, leaf in params.items()}
