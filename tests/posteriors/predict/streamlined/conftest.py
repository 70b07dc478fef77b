"""Monte Carlo to hold the rules against."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dubito import Gaussian, Model
from dubito.posteriors import Gaussian as Posterior
from dubito.posteriors.predict.streamlined import Moments, Weight
from dubito.posteriors.predict.streamlined.moments import RULES

DRAWS, CHUNK = 100_000, 20_000


def _random(value: Any) -> bool:
    return isinstance(value, Moments | Weight)


def simulated(function: Callable[..., Tensor], args: list[Any], kwargs: dict, draws: int = DRAWS) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of a function of independent Gaussians."""
    values = [*args, *kwargs.values()]
    random = [i for i, value in enumerate(values) if _random(value)]

    def one(*drawn: Tensor) -> Tensor:
        filled = [drawn[random.index(i)] if i in random else value for i, value in enumerate(values)]
        found = function(*filled[: len(args)], **dict(zip(kwargs, filled[len(args) :], strict=True)))
        return found[0] if isinstance(found, tuple) else found

    total, square, center = torch.zeros(()), torch.zeros(()), None
    for _ in range(draws // CHUNK):
        drawn = [values[i].mean + values[i].var.sqrt() * torch.randn(CHUNK, *values[i].mean.shape) for i in random]
        with sdpa_kernel(SDPBackend.MATH):  # the others are not batched
            found = torch.func.vmap(one)(*drawn)
        center = found.mean(0) if center is None else center
        total, square = total + (found - center).sum(0), square + (found - center).square().sum(0)
    mean = total / draws
    assert center is not None
    return center + mean, (square / draws - mean**2).sqrt()


@pytest.fixture
def check():
    """check(function, *args, name=, sd=, mean=): the rule's mean within `mean` standard deviations of the truth, and its standard
    deviations within a share `sd` of it (in the mean square over all numbers; single ones within three times that)."""

    def compare(function: Callable, *args: Any, name: str = "", sd: float = 0.01, mean: float = 0.02, **kwargs: Any) -> Moments:
        found = RULES[name or function.__name__](*args, **kwargs)
        found = found if isinstance(found, Moments) else found[0]
        truth, spread = simulated(function, list(args), kwargs)
        assert found.mean.shape == found.var.shape == truth.shape
        scale = spread.square().mean().sqrt()
        assert float((found.mean - truth).abs().max() / scale) < 3 * mean
        error = (found.var.sqrt() - spread) / scale
        assert float(error.square().mean().sqrt()) < sd, f"standard deviations are off by {error.square().mean().sqrt():.4f}"
        assert float(error.abs().max()) < 3 * sd
        return found

    return compare


@pytest.fixture
def noisy():
    """noisy(*shape, sd=): random means, and variances that differ."""

    def make(*shape: int, sd: float = 0.1, kind: Any = Moments, scale: float = 1.0) -> Any:
        mean, var = scale * torch.randn(shape), (sd * (0.5 + torch.rand(shape))) ** 2
        return Weight.of(1 + 0.3 * mean, var) if kind is Weight else Moments(mean, var)

    return make


@pytest.fixture
def around():
    """A Gaussian with the same variance for every weight, or for those that `only` names."""

    def make(network: nn.Module, variance: float = 0.004, only: str = "") -> Posterior:
        model = Model(network.eval(), Gaussian(scale=0.1), only=only)
        mean = {name: leaf for name, leaf in model.parameters().items() if ":" not in name and re.search(only, name)}
        return Posterior.diagonal(model, mean, {name: torch.full_like(leaf, variance) for name, leaf in mean.items()})

    return make


@pytest.fixture
def ratio():
    """ratio(posterior, x, how, ...): standard deviations over those of 20,000 draws of the weights, averaged over all outputs."""

    def compare(posterior: Posterior, x: Any, *ways: dict, draws: int = 20_000) -> list[float]:
        truth = posterior.predict(x, "sampled", draws=draws).f_var.sqrt()
        return [float((posterior.predict(x, **way).f_var.sqrt() / truth).mean()) for way in ways]

    return compare
