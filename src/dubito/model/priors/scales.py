r"""Densities of a scale (a standard deviation), for priors that infer it: in its logarithm, in which it is free of constraints.

With :math:`s = \ln \tau` a density p(tau) becomes :math:`p(s) = p(\tau)\, \tau`; that factor is included throughout.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

IMPROPER = (
    "{name} is improper: it cannot be {what}, and since the likelihood does not vanish where the weights are 0, nor can its posterior "
    "(Hron et al. 2018). Give bounds=(low, high), take another prior, or use a variational method, which knows it in expectation"
)


def plain(value: Any) -> Any:
    """A number of NumPy or torch as a Python number, so that priors can be compared and printed; anything else as it is."""
    constant = isinstance(value, Tensor) and value.ndim == 0 and not value.requires_grad  # one to be trained would stand still
    return float(value) if constant or (isinstance(value, Real) and type(value) not in (int, bool)) else value


def positive(name: str, value: Any) -> float:
    """`value` as a plain number, if it is positive."""
    number = plain(value)
    if not (isinstance(number, int | float) and number > 0 and math.isfinite(number)):
        raise ValueError(f"{name} must be a positive number; got {value!r}")
    return number


def keep_positive(owner: object, *names: str) -> None:
    """Check that these fields of a frozen dataclass are positive, and keep them as plain numbers."""
    for name in names:
        object.__setattr__(owner, name, positive(name, getattr(owner, name)))


class Scale(ABC):
    """The density of a scale."""

    @property
    @abstractmethod
    def start(self) -> float:
        """A typical value of the free coordinate."""

    @abstractmethod
    def log_prob(self, free: Tensor) -> Tensor:
        """Log density of the free coordinate, element by element."""

    @abstractmethod
    def sample(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """A draw of the free coordinate for every element."""

    def log_scale(self, free: Tensor) -> Tensor:
        """The logarithm of the scale as a function of its free coordinate; by default the same."""
        return free

    def expected_log_prob(self, mean: Tensor, variance: Tensor) -> Tensor | None:
        """E of `log_prob` over N(mean, variance) of the free coordinate, element by element, where that is the log scale and the
        expectation has a closed form."""
        return None

    def conditional(
        self, free: Tensor, count: int, squares: Tensor, temperature: float, generator: torch.Generator
    ) -> Tensor | None:
        """Draw the free coordinate given `count` normal weights of this scale whose squares sum to `squares` (shaped as `free`), from
        the density raised to 1 / temperature, if that has a closed form; else None. The draw may depend on the current value."""
        return None


@dataclass(frozen=True)
class HalfCauchy(Scale):
    r""":math:`p(\tau) = 2 / (\pi w (1 + \tau^2 / w^2))`: half of the mass is below `width`, and much is far above (Gelman 2006).

    >>> HalfCauchy(1.0).log_prob(torch.zeros(())).exp()  # 1 / pi
    tensor(0.3183)
    """

    width: float = 1.0

    def __post_init__(self):
        keep_positive(self, "width")

    @property
    def start(self) -> float:
        """log width."""
        return math.log(self.width)

    def log_prob(self, free: Tensor) -> Tensor:
        """Log density of log tau."""
        away = free - math.log(self.width)
        return math.log(2 / math.pi) + away - torch.nn.functional.softplus(2 * away)

    def sample(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """The log of a draw of tau."""
        normals = torch.empty(2, *like.shape, dtype=torch.float64, device=like.device).normal_(generator=generator)
        return (self.width * normals[0] / normals[1]).abs().log().to(like)

    def conditional(
        self, free: Tensor, count: int, squares: Tensor, temperature: float, generator: torch.Generator
    ) -> Tensor | None:
        """Through tau^2 | v ~ InvGamma(1/2, 1/v), v ~ InvGamma(1/2, 1/w^2) (Makalic & Schmidt 2016): v given tau, tau given v."""
        if temperature != 1:
            return None
        rate = (-2 * free.double()).exp() + self.width**-2
        helper = rate / torch.empty_like(rate).exponential_(generator=generator)
        return _inverse_gamma(0.5 * (1 + count), 1 / helper + 0.5 * squares.double(), generator).to(free)


@dataclass(frozen=True)
class ShapeAndRate(Scale):
    """A density with a shape and a rate."""

    shape: float = 2.0
    rate: float = 2.0

    def __post_init__(self):
        keep_positive(self, "shape", "rate")

    @property
    def normalizer(self) -> float:
        """shape ln rate - ln Gamma(shape)."""
        return self.shape * math.log(self.rate) - math.lgamma(self.shape)


@dataclass(frozen=True)
class Gamma(ShapeAndRate):
    r""":math:`\tau \sim \mathrm{Gamma}(\mathrm{shape}, \mathrm{rate})`, with mean shape / rate.

    >>> Gamma(1.0, 1.0).log_prob(torch.zeros(()))
    tensor(-1.)
    """

    @property
    def start(self) -> float:
        """The log of the mean."""
        return math.log(self.shape / self.rate)

    def log_prob(self, free: Tensor) -> Tensor:
        """Log density of log tau."""
        return self.normalizer + self.shape * free - self.rate * free.exp()

    def sample(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """The log of a draw of tau."""
        shape = torch.full(like.shape, self.shape, dtype=torch.float64, device=like.device)
        return (torch._standard_gamma(shape, generator=generator) / self.rate).log().to(like)

    def expected_log_prob(self, mean: Tensor, variance: Tensor) -> Tensor | None:
        """The expectation of `log_prob`, with E[e^(k s)] = e^(k m + k^2 v / 2)."""
        return self.normalizer + self.shape * mean - self.rate * (mean + 0.5 * variance).exp()


@dataclass(frozen=True)
class InverseGamma(ShapeAndRate):
    r""":math:`\tau^2 \sim \mathrm{InvGamma}(\mathrm{shape}, \mathrm{rate})`, conjugate to normal weights.

    A weight with a scale of its own is then Student-t, with 2 shape degrees of freedom and width :math:`\sqrt{\mathrm{rate} /
    \mathrm{shape}}`; so are, together, all weights that share one.

    >>> InverseGamma(1.0, 1.0).log_prob(torch.zeros(())).exp()  # 2 / e
    tensor(0.7358)
    """

    @property
    def start(self) -> float:
        """The log of the width of the Student-t."""
        return 0.5 * math.log(self.rate / self.shape)

    def log_prob(self, free: Tensor) -> Tensor:
        """Log density of log tau."""
        return self.normalizer + math.log(2) - 2 * self.shape * free - self.rate * (-2 * free).exp()

    def sample(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """The log of a draw of tau."""
        rate = torch.full(like.shape, self.rate, dtype=torch.float64, device=like.device)
        return _inverse_gamma(self.shape, rate, generator).to(like)

    def expected_log_prob(self, mean: Tensor, variance: Tensor) -> Tensor | None:
        """The expectation of `log_prob`, with E[e^(k s)] = e^(k m + k^2 v / 2)."""
        return self.normalizer + math.log(2) - 2 * self.shape * mean - self.rate * (2 * variance - 2 * mean).exp()

    def conditional(
        self, free: Tensor, count: int, squares: Tensor, temperature: float, generator: torch.Generator
    ) -> Tensor | None:
        """InvGamma((shape + n/2) / T, (rate + sum w^2 / 2) / T)."""
        shape, rate = (self.shape + 0.5 * count) / temperature, (self.rate + 0.5 * squares.double()) / temperature
        return _inverse_gamma(shape, rate, generator).to(free)


@dataclass(frozen=True)
class Flat(Scale):
    r"""Jeffreys' density of a scale, :math:`p(\tau) \propto 1 / \tau`, flat in its logarithm. Between `bounds` it is a density; without
    them it is improper.

    >>> Flat(bounds=(0.01, 1.0)).log_scale(torch.tensor([-100.0, 0.0, 100.0])).exp()
    tensor([0.0100, 0.1000, 1.0000])
    """

    bounds: tuple[float, float] | None = None

    def __post_init__(self):
        if self.bounds is not None and not 0 < self.bounds[0] < self.bounds[1] < math.inf:
            raise ValueError(f"the bounds of a scale are 0 < low < high; got {self.bounds}")

    @property
    def start(self) -> float:
        """0, the middle of the bounds."""
        return 0.0

    def log_scale(self, free: Tensor) -> Tensor:
        """Between the bounds by a logistic function; the free coordinate itself without bounds."""
        if self.bounds is None:
            return free
        low, high = map(math.log, self.bounds)
        return low + (high - low) * free.sigmoid()

    def log_prob(self, free: Tensor) -> Tensor:
        """The density of the logistic function's argument; none without bounds."""
        if self.bounds is None:
            raise ValueError(IMPROPER.format(name="Jeffreys' prior", what="scored"))
        return torch.nn.functional.logsigmoid(free) + torch.nn.functional.logsigmoid(-free)

    def sample(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """Uniform in the log scale; refused without bounds."""
        if self.bounds is None:
            raise ValueError(IMPROPER.format(name="Jeffreys' prior", what="sampled"))
        return torch.logit(torch.rand(like.shape, dtype=torch.float64, device=like.device, generator=generator)).to(like)

    def expected_log_prob(self, mean: Tensor, variance: Tensor) -> Tensor | None:
        """0 without bounds, up to a constant."""
        return torch.zeros_like(mean) if self.bounds is None else None


def _inverse_gamma(shape: float, rate: Tensor, generator: torch.Generator) -> Tensor:
    """The logarithm of the root of a draw of InvGamma(shape, rate)."""
    gamma = torch._standard_gamma(torch.full_like(rate, shape), generator=generator)
    return 0.5 * (rate.log() - gamma.log())
