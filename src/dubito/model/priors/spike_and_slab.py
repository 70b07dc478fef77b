"""Weights that are either in use or next to 0 (Mitchell & Beauchamp 1988, George & McCulloch 1993)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from dubito.model.priors.prior import PREFIX, Prior, source_for, weights, zero
from dubito.model.priors.scales import keep_positive, plain, positive
from dubito.tensors.checks import require
from dubito.tensors.tree import Params, full_precision

LOGIT = PREFIX + "logit_share"


@dataclass(frozen=True)
class SpikeAndSlab(Prior):
    r"""A weight is in the slab :math:`N(0, \mathrm{scale}^2)` with probability :math:`\pi`, and else in the spike
    :math:`N(0, \mathrm{spike}^2)`.

    `share` is :math:`\pi`, or (a, b) for one that is inferred, :math:`\pi \sim \mathrm{Beta}(a, b)`, as the hyperparameter
    "prior:logit_share". With `spike=0` the weights of the spike are exactly 0: one can draw from it, but it has no density, so no
    method that follows a gradient can use it.

    >>> prior = SpikeAndSlab(0.5, spike=0.01)
    >>> prior.inclusion({"w": torch.tensor([0.0, 1.0])})["w"]
    tensor([0.0099, 1.0000])
    """

    share: float | tuple[float, float] = 0.5
    scale: float = field(default=1.0, kw_only=True)
    spike: float = field(default=0.01, kw_only=True)

    def __post_init__(self):
        keep_positive(self, "scale")
        object.__setattr__(self, "spike", plain(self.spike))
        require(0 <= self.spike < self.scale, f"the spike is narrower than the slab: 0 <= spike < {self.scale}; got {self.spike}")
        if self.beta is not None:
            object.__setattr__(self, "share", tuple(positive(name, value) for name, value in zip("ab", self.beta, strict=True)))
            return
        require(0 < self.fixed < 1, f"share is a probability between 0 and 1, or (a, b) of its Beta prior; got {self.share}")

    @property
    def beta(self) -> tuple[float, float] | None:
        """(a, b) of the Beta prior, if the share is inferred."""
        return self.share if isinstance(self.share, tuple) else None

    @property
    def fixed(self) -> float:
        """The share, if it is not inferred."""
        return cast(float, self.share)

    @property
    def stacks(self) -> bool:
        """Whether the share of the slab is fixed."""
        return self.beta is None

    def parameters(self, weights: Params) -> Params:
        """The logit of the share, if it is inferred."""
        if self.beta is None or not weights:
            return {}
        start = math.log(self.beta[0] / self.beta[1])
        return {LOGIT: torch.full((1,), start, device=next(iter(weights.values())).device)}

    def log_prob(self, params: Params) -> Tensor:
        """sum_i log(pi N(w_i; 0, scale^2) + (1 - pi) N(w_i; 0, spike^2))."""
        if self.spike == 0:
            raise ValueError(
                "a spike that is exactly 0 has no density: one can draw from this prior, but not score weights or follow a gradient. "
                "Give it a width, as SpikeAndSlab(spike=0.01)"
            )
        both = (self._both(full_precision(leaf), self._logit(params)) for leaf in weights(params).values())
        return sum((torch.logaddexp(slab, spike).sum() for slab, spike in both), zero(params)) + self.log_hyper(params)

    def log_hyper(self, params: Params) -> Tensor | float:
        """Beta(a, b), and with the slope of the logistic function pi^a (1 - pi)^b."""
        if self.beta is None:
            return 0.0
        (a, b), logit, log = self.beta, self._logit(params), torch.nn.functional.logsigmoid
        return (a * log(logit) + b * log(-logit)).sum() + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)

    def inclusion(self, params: Params) -> Params:
        """The probability of every weight to be in the slab, given its value."""
        logit, found = self._logit(params), {}
        for name, leaf in weights(params).items():
            if self.spike == 0:
                found[name] = (leaf != 0).to(leaf)
            else:
                slab, spike = self._both(leaf, logit)
                found[name] = torch.sigmoid(slab - spike)
        return found

    def sample(self, like: Params, generator: torch.Generator | None = None) -> Params:
        """One draw in the shapes of `like`."""
        source = source_for(like, generator)
        drawn: Params = {}
        if self.beta is None:
            share = self.fixed
        else:
            both = torch.tensor(self.beta, dtype=torch.float64, device=next(iter(like.values())).device)
            logit = -torch._standard_gamma(both, generator=source).log().diff()
            drawn[LOGIT], share = logit, float(logit.sigmoid())
        for name, leaf in weights(like).items():
            there = torch.rand(leaf.shape, device=leaf.device, generator=source) < share
            drawn[name] = torch.empty_like(leaf).normal_(generator=source) * torch.where(
                there, leaf.new_tensor(self.scale), leaf.new_tensor(self.spike)
            )
        return {name: drawn[name].to(leaf) for name, leaf in like.items()}

    def units(self, params: Params) -> Params:
        """`scale` for every weight, and 1 for the logit."""
        return {name: torch.full_like(leaf, 1.0 if ":" in name else self.scale) for name, leaf in params.items()}

    def _logit(self, params: Params) -> Tensor:
        if self.beta is None:
            return torch.tensor(math.log(self.fixed) - math.log1p(-self.fixed))
        require(LOGIT in params, f"SpikeAndSlab infers [{LOGIT!r}] along with the weights: add `prior.parameters(weights)`")
        return params[LOGIT]

    def _both(self, leaf: Tensor, logit: Tensor) -> tuple[Tensor, Tensor]:
        """The log densities of slab and spike, each plus the log of its share."""
        log, logit = torch.nn.functional.logsigmoid, logit.to(leaf)
        constant = -0.5 * math.log(2 * math.pi)
        return (
            log(logit) + constant - math.log(self.scale) - 0.5 * (leaf / self.scale).square(),
            log(-logit) + constant - math.log(self.spike) - 0.5 * (leaf / self.spike).square(),
        )
