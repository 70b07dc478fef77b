"""ODIN: a high temperature, and a small step of the input towards what the network takes it for."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dubito.apps.network import Network, examples, networks, posterior_of
from dubito.apps.ood.detector import Given, required
from dubito.apps.ood.max_logit import with_logits
from dubito.model import Model
from dubito.tensors.checks import positive, require

EPSILONS = (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.03, 0.06, 0.12)


@dataclass(frozen=True)
class ODIN:
    r"""Out-of-distribution detector for neural networks (Liang, Li & Srikant 2018).

    With :math:`S(x) = \max_c \mathrm{softmax}_c(f(x) / T)` the score is :math:`-\ln S(\tilde x)`, where

    .. math:: \tilde x = x + \epsilon\, \mathrm{sign}(\nabla_x \ln S(x)) / \mathrm{std}.

    `std` is what each channel of the inputs was divided by, so that the step is the same in all of them as they were before. All
    inputs take the same step. Its size is given, or chosen among `epsilons` as that with the largest mean :math:`S(\tilde x)` of
    familiar inputs (Hsu et al. 2020), best of some that were not trained on; the unfamiliar are never looked at. At T = 1000 all S are
    within a hair of 1 / C: they are computed in float64, and as logarithms.

    Of several networks S is that of their mean probabilities. Dropout is off, and a Gaussian stands at its mean: steps of the input
    need a function that stays what it is.

    >>> net = torch.nn.Linear(1, 2, bias=False)
    >>> _ = torch.nn.init.constant_(net.weight[:1], 2.0), torch.nn.init.zeros_(net.weight[1:])
    >>> ODIN(temperature=1.0, epsilon=0.5).fit(net)(torch.tensor([[1.0]])).exp()        # 1 / S: a step to 1.5, and so 1 + exp(-3)
    tensor([1.0498], dtype=torch.float64)
    """

    temperature: float = 1000.0
    epsilon: float | None = None  # None: chosen among `epsilons`
    epsilons: tuple[float, ...] = EPSILONS
    std: tuple[float, ...] = ()  # of the channels, as inputs were normalized; () if they were not
    draws: int = 10  # networks at most, where the posterior is draws

    def __post_init__(self):
        positive(temperature=self.temperature)
        if any(not e >= 0 for e in ((*self.epsilons,) if self.epsilon is None else (self.epsilon,))) or not self.epsilons:
            raise ValueError("the size of a step, epsilon, is not negative")
        require(not any(not s > 0 for s in self.std), f"std are positive standard deviations; got {self.std}")

    def fit(self, posterior: Given, data: Any = None) -> ODINScore:
        """The score; data choose `epsilon` if it is None."""
        posterior = with_logits(posterior_of(posterior), "ODIN")
        score = ODINScore(posterior.model, networks(posterior, draws=self.draws), self, self.epsilon or 0.0)
        if self.epsilon is not None:
            return score
        required(data, "ODIN", "held out if possible, to choose its epsilon; or set epsilon")
        sums, count = torch.zeros(len(self.epsilons), dtype=torch.float64), 0
        with closing(examples(posterior.model, data)) as batches:
            for x, _ in batches:
                direction = score.direction(x)
                with torch.no_grad():
                    each = torch.stack([score.log_maximum(x + e * direction).exp().flatten() for e in self.epsilons])
                sums, count = sums + each.sum(1).cpu(), count + each.shape[1]
        require(count, "there is no data to choose the step by: the loader gave no batch")
        criterion = dict(zip(self.epsilons, (sums / count).tolist(), strict=True))
        return ODINScore(posterior.model, score.networks, self, max(criterion, key=criterion.__getitem__), criterion)


@dataclass(frozen=True)
class ODINScore:
    """-ln S after the step, [B, *D]; `criterion` is the mean S of the familiar inputs that each epsilon gave."""

    model: Model
    networks: tuple[Network, ...]
    settings: ODIN
    epsilon: float
    criterion: dict[float, float] | None = None

    def __call__(self, x: Any) -> Tensor:
        x = self.networks[0].ready(x)
        moved = x + self.epsilon * self.direction(x) if self.epsilon else x
        with torch.no_grad():
            return -self.log_maximum(moved)

    def log_maximum(self, x: Tensor) -> Tensor:
        """ln S(x), [B, *D], in float64."""
        parts = [
            math.log(one.weight) + torch.log_softmax(one(x).double() / self.settings.temperature, -1) for one in self.networks
        ]
        return (parts[0] if len(parts) == 1 else torch.stack(parts).logsumexp(0)).amax(-1)

    def direction(self, x: Tensor) -> Tensor:
        """The sign of the gradient of ln S by the input, divided by the channels' std."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise ValueError("ODIN moves the input along a gradient: it is for one tensor of real numbers, such as images")
        std = x.new_ones(1)
        if self.settings.std:
            if x.ndim < 2 or x.shape[1] != len(self.settings.std):
                raise ValueError(f"std has {len(self.settings.std)} channels for inputs {list(x.shape)}, whose axis 1 they are")
            std = x.new_tensor(self.settings.std).reshape(-1, *[1] * (x.ndim - 2))
        with torch.enable_grad():
            leaf = x.detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.log_maximum(leaf).sum(), leaf)
        return slope.sign() / std
