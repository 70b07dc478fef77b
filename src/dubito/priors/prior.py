"""The protocol of priors p(theta) over the network's weights."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from dubito.tree import Params


class Prior(ABC):
    """A prior over the Bayesian weights of a network. One must give `log_prob`; a prior with a density one can draw from
    gives `sample`, and one with a known slope gives `gradient`, which the methods use instead of autograd."""

    @abstractmethod
    def log_prob(self, params: Params) -> Tensor:
        """Log density of all weights together, a scalar."""

    def gradient(self, params: Params) -> Params:
        """Gradient of `log_prob`; leaves may be stacked [S, ...], since each draw's density depends on that draw alone."""
        names = list(params)
        with torch.enable_grad():
            leaves = [params[name].detach().requires_grad_() for name in names]
            grads = torch.autograd.grad(self.log_prob(dict(zip(names, leaves, strict=True))), leaves)
        return dict(zip(names, grads, strict=True))

    def add_gradient(self, gradient: Params, params: Params, factor: float = 1.0) -> None:
        """Add `factor` times the gradient of `log_prob` to `gradient`, in place."""
        if slopes := self.gradient(params):
            torch._foreach_add_([gradient[name] for name in slopes], list(slopes.values()), alpha=factor)

    @abstractmethod
    def sample(self, like: Params, generator: torch.Generator | None = None) -> Params:
        """One draw in the shapes of `like`."""
