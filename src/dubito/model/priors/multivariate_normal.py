"""A Gaussian prior with a structured covariance, such as an earlier posterior."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.model.priors.prior import Prior
from dubito.tensors.covariances import Covariance, Diagonal
from dubito.tensors.randomness import fresh_generator
from dubito.tensors.tree import Params


@dataclass(frozen=True, eq=False)
class MultivariateNormal(Prior):
    """N(mean, covariance) over the weights that the covariance names: what `posterior.as_prior()` gives, to continue with new data.

    >>> from dubito.tensors.covariances import Diagonal
    >>> prior = MultivariateNormal({"w": torch.ones(2)}, Diagonal.of({"w": torch.ones(2)}))
    >>> prior.gradient({"w": torch.zeros(2)})
    {'w': tensor([1., 1.])}
    """

    mean: Params
    covariance: Covariance

    @property
    def stacks(self) -> bool:
        """True."""
        return True

    def over(self, names: Iterable[str]) -> MultivariateNormal:
        """The prior of some of the weights, which are independent of the others."""
        names = [name for name in names if ":" not in name]
        if missing := [name for name in names if name not in self.mean]:
            raise ValueError(f"the prior says nothing of {missing}: the model it is for has only {list(self.mean)}; set `only`")
        lost = [name for name in self.mean if name not in names]
        if not lost:
            return self
        if not self.covariance.independent:
            raise ValueError(
                f"the prior is of {lost} and of the other weights together, and this model leaves these out: give Model the `only` "
                "that the earlier posterior had"
            )
        return MultivariateNormal({name: self.mean[name] for name in names}, self.covariance.over(names))

    def _away(self, params: Params) -> Params:
        return {name: params[name] - self.mean[name].to(params[name]) for name in self.mean}

    def log_prob(self, params: Params) -> Tensor:
        """log N(w; mean, covariance)."""
        if (own := self.over(params)) is not self:
            return own.log_prob(params)
        away = {name: leaf.unsqueeze(0) for name, leaf in self._away(params).items()}
        pulled = self._solved(away)
        quadratic = torch.stack([(away[name] * pulled[name]).sum() for name in away]).sum()
        return -0.5 * (quadratic + self.covariance.logdet().to(quadratic) + self.covariance.moving * math.log(2 * math.pi))

    def _solved(self, away: Params) -> Params:
        """In the covariance's own precision: samplers ask in float64."""
        own = {name: leaf.to(self.mean[name].dtype) for name, leaf in away.items()}
        return {name: leaf.to(away[name]) for name, leaf in self.covariance.solve(own).items()}

    def gradient(self, params: Params) -> Params:
        """-precision (w - mean)."""
        if (own := self.over(params)) is not self:
            return own.gradient(params)
        away = self._away(params)
        first = next(iter(away))
        stacked = away[first].ndim > self.mean[first].ndim
        pulled = self._solved(away if stacked else {name: leaf.unsqueeze(0) for name, leaf in away.items()})
        return {name: -(pulled[name] if stacked else pulled[name][0]) for name in params}

    def expected_log_prob(self, mean: Params, variance: Params, *, independent: bool = False) -> Tensor | None:
        """Where no weight is tied to another: by the prior, of which only the diagonal of the precision is then needed."""
        if not isinstance(self.covariance, Diagonal):
            return None
        precision = self.covariance.precision
        spread = [(leaf * precision[name].to(leaf)).sum() for name, leaf in variance.items()]
        return self.log_prob(mean) - 0.5 * torch.stack(spread).sum()

    def units(self, params: Params) -> Params:
        """Roots of the variances."""
        return {name: leaf.sqrt().to(params[name]) for name, leaf in self.over(params).covariance.variance().items()}

    def sample(self, like: Params, generator: torch.Generator | None = None) -> Params:
        """mean + a draw of the covariance."""
        drawn = self.covariance.sample(1, generator or fresh_generator(next(iter(like.values())).device))
        return {name: (self.mean[name] + drawn[name][0]).to(leaf) for name, leaf in like.items()}
