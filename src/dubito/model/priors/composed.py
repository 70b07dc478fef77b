"""Priors made of other priors: different ones for different parameters, and one around known weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from dubito.model.priors.normal import Normal
from dubito.model.priors.prior import PREFIX, Prior, added, source_for, weights, zero
from dubito.tensors.tree import Params


@dataclass(frozen=True)
class ByName(Prior):
    """The first pattern found (`re.search`) in a parameter's name gives its prior; `""` matches every name and serves as the rest.

    One prior gets all leaves of its pattern together: `{"^0.": prior}` is a joint prior over a layer. Hyperparameters carry the
    pattern they come from in their names, "prior:<pattern>:...".

    >>> import dubito
    >>> prior = ByName({"weight": dubito.priors.Laplace(0.1), "": dubito.priors.Normal(scale=1.0)})
    >>> prior.sample({"0.weight": torch.zeros(2, 2), "0.bias": torch.zeros(2)})["0.bias"].shape
    torch.Size([2])
    """

    priors: Mapping[str, Prior]

    def __post_init__(self):
        wrong = [pattern for pattern, prior in self.priors.items() if not isinstance(prior, Prior)]
        if wrong or not self.priors:
            raise TypeError(
                f"ByName maps patterns to priors, such as {{'weight': Laplace(0.1), '': Normal()}}; got {self.priors!r}"
            )

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of parameter names."""
        return tuple(self.priors) + tuple(pattern for prior in self.priors.values() for pattern in prior.patterns)

    @property
    def stacks(self) -> bool:
        """Whether all of the priors take stacked leaves."""
        return all(prior.stacks for prior in self.priors.values())

    def pattern_of(self, name: str) -> str:
        """The first pattern that matches a parameter's name."""
        for pattern in self.priors:
            if re.search(pattern, name):
                return pattern
        raise ValueError(
            f"no pattern of the prior, {list(self.priors)}, matches the parameter {name!r}: add one, or '' for the rest"
        )

    def parameters(self, weights: Params) -> Params:
        """The hyperparameters of all priors, named after their patterns."""
        found = ((pattern, prior.parameters(own)) for pattern, prior, own in self._parts(weights))
        return {self._outside(pattern, name): leaf for pattern, leaves in found for name, leaf in leaves.items()}

    def log_prob(self, params: Params) -> Tensor:
        """The sum over the priors."""
        return sum((prior.log_prob(own) for _, prior, own in self._parts(params)), zero(params))

    def log_hyper(self, params: Params) -> Tensor | float:
        """The sum over the priors."""
        return sum((prior.log_hyper(own) for _, prior, own in self._parts(params)), 0.0)

    @property
    def improper(self) -> bool:
        """Whether one of the priors is improper."""
        return any(prior.improper for prior in self.priors.values())

    def gradient(self, params: Params) -> Params:
        """The gradients of all priors."""
        if not self.stacks:  # then it may be mapped over leaves, which a slope in closed form need not bear
            return super().gradient(params)
        return self._gathered(params, {pattern: prior.gradient(own) for pattern, prior, own in self._parts(params)})

    def expected_log_prob(self, mean: Params, variance: Params, *, independent: bool = False) -> Tensor | None:
        """The sum over the priors, if all have a closed form."""
        spread = {pattern: own for pattern, _, own in self._parts(variance)}
        parts = self._parts(mean)
        return added([prior.expected_log_prob(own, spread[name], independent=independent) for name, prior, own in parts], mean)

    def sample(self, like: Params, generator: torch.Generator | None = None) -> Params:
        """One draw in the shapes of `like`."""
        source = source_for(like, generator)
        return self._gathered(like, {pattern: prior.sample(own, source) for pattern, prior, own in self._parts(like)})

    def resample(self, params: Params, temperature: float, generator: torch.Generator) -> Params:
        """The draws of all priors that have a closed form."""
        found = ((pattern, prior.resample(own, temperature, generator)) for pattern, prior, own in self._parts(params))
        return {self._outside(pattern, name): leaf for pattern, leaves in found for name, leaf in leaves.items()}

    def units(self, params: Params) -> Params:
        """The units of all priors."""
        return self._gathered(params, {pattern: prior.units(own) for pattern, prior, own in self._parts(params)})

    # ---- names

    @staticmethod
    def _prefix(pattern: str) -> str:
        return f"{PREFIX}{pattern or '*'}:"

    def _outside(self, pattern: str, name: str) -> str:
        return self._prefix(pattern) + name.removeprefix(PREFIX) if name.startswith(PREFIX) else name

    def _parts(self, params: Params) -> Iterator[tuple[str, Prior, Params]]:
        """Every pattern with its prior and its leaves, under the names that the prior uses."""
        given: dict[str, Params] = {}
        for name, leaf in weights(params).items():
            given.setdefault(self.pattern_of(name), {})[name] = leaf
        for pattern, prior in self.priors.items():
            if pattern in given:
                prefix = self._prefix(pattern)
                free = {PREFIX + name.removeprefix(prefix): leaf for name, leaf in params.items() if name.startswith(prefix)}
                yield pattern, prior, {**given[pattern], **free}

    def _gathered(self, params: Params, parts: Mapping[str, Params]) -> Params:
        """The leaves of all priors under their names outside, in the order of `params`."""
        found = {self._outside(pattern, name): leaf for pattern, leaves in parts.items() for name, leaf in leaves.items()}
        return {name: found[name] for name in params}


@dataclass(frozen=True, eq=False)
class Centered(Prior):
    """The difference of the weights from `mean` has the given prior: `Centered(pretrained, Normal(scale=0.1))`.

    `mean` is a network or its weights by name; leaves it does not have are centered on zero, so a new head needs no entry. The method
    `Laplace` takes it around a `Normal`, whose scales it may learn.

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
    def centers(self) -> Mapping[str, Tensor]:
        """The weights that the prior is centered on."""
        return cast(Mapping[str, Tensor], self.mean)

    @property
    def stacks(self) -> bool:
        """As the prior of the difference."""
        return self.prior.stacks

    def _shifted(self, params: Params, sign: float) -> Params:
        moved = dict(params)
        for name, center in self.centers.items():
            if name in params:
                leaf = params[name]
                if leaf.shape[leaf.ndim - center.ndim :] != center.shape:
                    raise ValueError(
                        f"the prior is centered on a {name} of {list(center.shape)}, but the network's is {list(leaf.shape)}"
                    )
                moved[name] = leaf + sign * center.to(leaf)
        return moved

    def parameters(self, weights: Params) -> Params:
        """Those of the prior of the difference."""
        centers = list(self.centers)
        if centers and weights and not set(centers) & set(weights):
            raise ValueError(
                f"the prior is centered on {centers[:4]}, of which the network has none: its weights are {list(weights)[:4]}"
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
        """The draws of the prior, given w - mean."""
        return self.prior.resample(self._shifted(params, -1.0), temperature, generator)

    def units(self, params: Params) -> Params:
        """Those of the prior of the difference."""
        return self.prior.units(params)
