"""A prior around weights that are known, such as those of a pretrained network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from dubito.model.priors.normal import Normal
from dubito.model.priors.prior import Prior
from dubito.tensors.tree import Params


@dataclass(frozen=True, eq=False)
class Centered(Prior):
    """What the weights differ from `mean` by has the given prior: `Centered(pretrained, Normal(scale=0.1))`.

    `mean` is a network or its weights by name; leaves it does not have are centred on zero, so a new head needs no entry. For the
    method `Laplace`, which adds precisions, take `MultivariateNormal(mean, Diagonal.of(variances))`.

    >>> prior = Centered({"w": torch.tensor([1.0, 2.0])}, Normal(scale=0.5))
    >>> prior.gradient({"w": torch.zeros(2)})
    {'w': tensor([4., 8.])}
    """

    stored_name: ClassVar[str] = "Centred"  # in checkpoints of version 0.1

    mean: Mapping[str, Tensor] | nn.Module
    prior: Prior = field(default_factory=Normal)

    def __post_init__(self):
        given = dict(self.mean.named_parameters()) if isinstance(self.mean, nn.Module) else dict(self.mean)
        object.__setattr__(self, "mean", {name: leaf.detach().clone() for name, leaf in given.items()})

    @property
    def stacks(self) -> bool:
        """As the prior of the difference."""
        return self.prior.stacks

    def _shifted(self, params: Params, sign: float) -> Params:
        assert isinstance(self.mean, Mapping)
        moved = dict(params)
        for name, leaf in params.items():
            if name in self.mean:
                centre = self.mean[name]
                if leaf.shape[leaf.ndim - centre.ndim :] != centre.shape:
                    raise ValueError(
                        f"the prior is centred on a {name} of {list(centre.shape)}, but the network's is {list(leaf.shape)}"
                    )
                moved[name] = leaf + sign * centre.to(leaf)
        return moved

    def parameters(self, weights: Params) -> Params:
        """Those of the prior of the difference."""
        assert isinstance(self.mean, Mapping)
        if self.mean and weights and not any(name in self.mean for name in weights):
            raise ValueError(
                f"the prior is centred on {list(self.mean)[:4]}, of which the network has none: its weights are {list(weights)[:4]}"
            )
        return self.prior.parameters(self._shifted(weights, -1.0))

    def log_prob(self, params: Params) -> Tensor:
        """log p(w - mean)."""
        return self.prior.log_prob(self._shifted(params, -1.0))

    def log_hyper(self, params: Params) -> Tensor | float:
        """That of the prior of the difference."""
        return self.prior.log_hyper(params)

    @property
    def improper(self) -> bool:
        """As the prior of the difference."""
        return self.prior.improper

    def gradient(self, params: Params) -> Params:
        """The gradient of the prior at w - mean."""
        return self.prior.gradient(self._shifted(params, -1.0))

    def expected_log_prob(self, mean: Params, variance: Params, *, independent: bool = False) -> Tensor | None:
        """That of the prior, with the means shifted."""
        return self.prior.expected_log_prob(self._shifted(mean, -1.0), variance, independent=independent)

    def sample(self, like: Params, generator: torch.Generator | None = None) -> Params:
        """mean + a draw of the prior."""
        return self._shifted(self.prior.sample(like, generator), 1.0)

    def resample(self, params: Params, temperature: float, generator: torch.Generator) -> Params:
        """Given w - mean."""
        return self.prior.resample(self._shifted(params, -1.0), temperature, generator)

    def units(self, params: Params) -> Params:
        """Those of the prior of the difference."""
        return self.prior.units(params)
