"""The log prior of flat vectors, one row a chain, and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributions import Distribution

from dubito.model import Target
from dubito.model.likelihoods import Likelihood, likelihood_params
from dubito.model.priors import Normal
from dubito.model.priors.factorized import Factorized
from dubito.tensors import tree
from dubito.tensors.tree import Params

Differentiate = Callable[
    [Callable[[Tensor], Tensor], Tensor], tuple[Tensor, Tensor]
]  # of one row, at [C, P]: values and gradient


class FlatPrior:
    """log p of positions [C, P] that hold the leaves of `like` one after another, in float64, and its gradient [C, P].

    `precision` [P] is set where the prior is independent normals, with nothing learned that has a prior of its own: then `normal` is
    all there is to compute, and nothing has to be traced. `differentiate` computes values and gradients of any other prior.
    """

    def __init__(self, target: Target, like: Params, differentiate: Differentiate):
        self.target, self.like, self.differentiate = target, like, differentiate
        self.precision, self.constant = self._normals()

    def __call__(self, position: Tensor) -> tuple[Tensor, Tensor]:
        if self.precision is not None:
            return self.normal(position)
        prior = self.target.model.prior
        if isinstance(prior, Factorized) and not any(":" in name for name in self.like):
            # all weights have the same density, independently: of all leaves at once, with the slope in closed form
            return self.constant + prior.density(position.double()).sum(1), prior.slope(position)
        with _unchecked(self.target.model.likelihood):
            return self.differentiate(self._row, position)

    def normal(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Value and gradient for independent normals."""
        assert self.precision is not None
        pull = position * self.precision
        return self.constant - 0.5 * (pull * position).sum(1), -pull.to(position.dtype)

    def _row(self, row: Tensor) -> Tensor:
        return self.target.log_prior(tree.unflatten(row.double(), self.like)).double()

    def _normals(self) -> tuple[Tensor | None, float]:
        """The precisions [P] of a prior of independent normals, and the constant of its log density."""
        model, zeros = self.target.model, {n: torch.zeros_like(leaf, dtype=torch.float64) for n, leaf in self.like.items()}
        live = {name: leaf.detach().clone().requires_grad_() for name, leaf in likelihood_params(self.like).items()}
        prior = model.prior
        if type(prior) is not Normal or model.likelihood.log_prior(live).requires_grad:
            return None, 0.0 if live else float(model.likelihood.log_prior({}))
        precision = {n: zero if ":" in n else torch.full_like(zero, prior.scale_of(n)) ** -2 for n, zero in zeros.items()}
        at_zero = prior.log_prob({name: zero for name, zero in zeros.items() if ":" not in name})
        return tree.flatten(precision), float(at_zero) + float(model.likelihood.log_prior(likelihood_params(self.like)))


@contextmanager
def _unchecked(likelihood: Likelihood) -> Iterator[None]:
    """The prior of a learned noise without torch's checks: they cannot be traced, and a NaN is to be a divergence, not an error."""
    prior = getattr(likelihood, "prior", None)
    checked = list(_nested(prior)) if isinstance(prior, Distribution) else []
    before = [vars(distribution).get("_validate_args") for distribution in checked]
    for distribution in checked:
        distribution._validate_args = False
    try:
        yield
    finally:
        for distribution, checks in zip(checked, before, strict=True):
            if checks is None:
                del distribution._validate_args
            else:
                distribution._validate_args = checks


def _nested(distribution: Distribution) -> Iterator[Distribution]:
    """A distribution and those it is made of: a log-normal one is a normal one, transformed, which checks for itself."""
    yield distribution
    for part in vars(distribution).values():
        if isinstance(part, Distribution):
            yield from _nested(part)
