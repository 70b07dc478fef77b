"""The protocol of priors p(theta) over the network's weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dubito.tensors.randomness import fresh_generator
from dubito.tensors.tree import Params

if TYPE_CHECKING:
    from dubito.model.priors.correlated import MultivariateNormal
    from dubito.model.priors.normal import Normal

PREFIX = "prior:"


def prior_params(params: Params) -> Params:
    """The leaves that a prior is about: weights and its own hyperparameters, without what a likelihood learns."""
    return {name: leaf for name, leaf in params.items() if ":" not in name or name.startswith(PREFIX)}


def weights(params: Params) -> Params:
    """The network's weights alone."""
    return {name: leaf for name, leaf in params.items() if ":" not in name}


def zero(params: Params) -> Tensor:
    """0 on the device of the weights, the start of a sum of log densities."""
    return torch.zeros((), device=next(iter(params.values())).device) if params else torch.zeros(())


def added(parts: Sequence[Tensor | None], like: Params) -> Tensor | None:
    """The sum of all entries of the parts; None if a part is None, which has no closed form."""
    known = [part.sum() for part in parts if part is not None]
    return sum(known, zero(like)) if len(known) == len(parts) else None


def source_for(like: Params, generator: torch.Generator | None) -> torch.Generator:
    """The generator, or if there is none a fresh one on the device of the weights."""
    return generator or fresh_generator(next(iter(like.values()), torch.zeros(())).device)


class Prior(ABC):
    """A prior over the Bayesian weights of a network. One must give `log_prob`; a prior with a density one can draw from
    gives `sample`, and one with a known slope gives `gradient`, which the methods use instead of autograd.

    A prior may have hyperparameters that are inferred along with the weights, such as a scale. They are leaves of their own, named
    "prior:..." and free of constraints (a log scale); `log_prob` then has the density of weights and hyperparameters together, in
    these coordinates. All methods treat them as they treat weights.
    """

    @property
    def normal(self) -> Normal | None:
        """The prior, if it is a `Normal` of independent weights; else None."""
        return None

    @property
    def joint(self) -> MultivariateNormal | None:
        """The prior, if it is one Gaussian over all weights (`MultivariateNormal`), as an earlier posterior is; else None."""
        return None

    @property
    def stacks(self) -> bool:
        """Whether `gradient` takes stacked leaves [S, ...]. If not, `torch.func.vmap` maps it over them, and must be able to."""
        return False

    @abstractmethod
    def log_prob(self, params: Params) -> Tensor:
        """Log density of all weights (and hyperparameters) together, a scalar."""

    @abstractmethod
    def sample(self, like: Params, generator: torch.Generator | None = None) -> Params:
        """One draw in the shapes of `like`, including the hyperparameters if `like` holds them."""

    def parameters(self, weights: Params) -> Params:
        """Initial values of the hyperparameters that are inferred along with these weights, named "prior:..."."""
        return {}

    def log_hyper(self, params: Params) -> Tensor | float:
        """The log density of the hyperparameters alone. `log_prob` minus it is the log density of the weights given them."""
        return 0.0

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of parameter names in its arguments; each must match some parameter of the network."""
        return ()

    @property
    def improper(self) -> bool:
        """Whether the density of the weights (given the hyperparameters, if there are any) cannot be normalized."""
        return False

    def gradient(self, params: Params) -> Params:
        """Gradient of `log_prob`. Where `stacks` says so, leaves may be stacked [S, ...]."""
        slopes = torch.func.grad(self.log_prob)({name: leaf.detach() for name, leaf in params.items()})
        return {name: slope.detach() for name, slope in slopes.items()}

    def add_gradient(self, gradient: Params, params: Params, factor: float = 1.0) -> None:
        """Add `factor` times the gradient of `log_prob` to `gradient`, in place."""
        if slopes := self.gradient(params):
            torch._foreach_add_([gradient[name] for name in slopes], list(slopes.values()), alpha=factor)

    def expected_log_prob(self, mean: Params, variance: Params, *, independent: bool = False) -> Tensor | None:
        r""":math:`E_q[\log p(\theta)]` for a Gaussian q with these means and marginal variances, differentiable in both, where it has a
        closed form; else None. Hyperparameters of which `variance` says nothing are points.

        `independent` says that under q all leaves' entries are independent. A prior that ties weights together, or that has
        hyperparameters (they are Gaussian in their free coordinates), has a closed form for such a q only.
        """
        return None

    def resample(self, params: Params, temperature: float, generator: torch.Generator) -> Params:
        """A draw of the hyperparameters given the weights (and each other), for C chains with leaves [C, ...], from the conditional
        distribution of the density raised to 1 / temperature, if that has a closed form; else {}."""
        return {}

    def units(self, params: Params) -> Params:
        """A typical size of each coordinate under the prior, in the shapes of `params`; samplers measure their steps in it."""
        return {name: torch.ones_like(leaf) for name, leaf in params.items()}
