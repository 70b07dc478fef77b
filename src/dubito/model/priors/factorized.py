"""Priors under which every weight is independent of the others, and all are alike: `Factorized` is what they share."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dubito.model.priors.prior import Prior, added, source_for, zero
from dubito.model.priors.scales import IMPROPER, keep_positive, positive
from dubito.tensors.checks import between, require
from dubito.tensors.tree import Params, full_precision


class Factorized(Prior):
    """Independent weights with one density. A subclass gives `density` and `draw`, and `slope` and `expected` if it can."""

    @property
    def stacks(self) -> bool:
        """True: every weight is independent."""
        return True

    @abstractmethod
    def density(self, leaf: Tensor) -> Tensor:
        """Log density of every weight."""

    @abstractmethod
    def draw(self, leaf: Tensor, generator: torch.Generator) -> Tensor:
        """A draw for every weight."""

    def slope(self, leaf: Tensor) -> Tensor:
        """Slope of the log density at every weight."""
        with torch.enable_grad():
            live = leaf.detach().requires_grad_()
            return torch.autograd.grad(self.density(live).sum(), live)[0]

    def expected(self, mean: Tensor, variance: Tensor) -> Tensor | None:
        """E of the log density of every weight over N(mean, variance), where it has a closed form."""
        return None

    def typical(self) -> float:
        """A typical size of a weight."""
        return 1.0

    def log_prob(self, params: Params) -> Tensor:
        """The sum of `density` over all weights."""
        return sum((self.density(full_precision(leaf)).sum() for leaf in params.values()), zero(params))

    def gradient(self, params: Params) -> Params:
        """`slope` of every weight."""
        return {name: self.slope(leaf.detach()) for name, leaf in params.items()}

    def expected_log_prob(self, mean: Params, variance: Params, *, independent: bool = False) -> Tensor | None:
        """The sum of `expected` over all weights, if it is known."""
        return added([self.expected(leaf, variance[name]) for name, leaf in mean.items()], mean)

    def sample(self, like: Params, generator: torch.Generator | None = None) -> Params:
        """`draw` for every weight."""
        source = source_for(like, generator)
        return {name: self.draw(leaf, source) for name, leaf in like.items()}

    def units(self, params: Params) -> Params:
        """`typical` for every weight."""
        return {name: torch.full_like(leaf, self.typical()) for name, leaf in params.items()}


def random_signs(leaf: Tensor, generator: torch.Generator) -> Tensor:
    """-1 or 1 for every weight."""
    return torch.randint(0, 2, leaf.shape, generator=generator, device=leaf.device).to(leaf) * 2 - 1


@dataclass(frozen=True)
class Laplace(Factorized):
    r""":math:`p(w) = e^{-|w| / b} / (2b)` with :math:`b = \mathrm{scale} / \sqrt 2`, so that `scale` is the standard deviation.

    Its mode is sparse (the lasso); its posterior is not.

    >>> Laplace(scale=math.sqrt(2)).log_prob({"w": torch.ones(1)})  # -1 - ln 2
    tensor(-1.6931)
    """

    scale: float = 1.0

    def __post_init__(self):
        keep_positive(self, "scale")

    @property
    def _b(self) -> float:
        return self.scale / math.sqrt(2)

    def density(self, leaf: Tensor) -> Tensor:
        """-|w| / b - log 2b."""
        return -leaf.abs() / self._b - math.log(2 * self._b)

    def slope(self, leaf: Tensor) -> Tensor:
        """-sign(w) / b."""
        return leaf.sign() / -self._b

    def draw(self, leaf: Tensor, generator: torch.Generator) -> Tensor:
        """An exponential number with a random sign."""
        signs = random_signs(leaf, generator)
        return torch.empty_like(leaf).exponential_(1 / self._b, generator=generator) * signs

    def expected(self, mean: Tensor, variance: Tensor) -> Tensor | None:
        r"""The mean of a folded normal,
        :math:`E|w| = \sigma \sqrt{2 / \pi}\, e^{-\mu^2 / 2 \sigma^2} + \mu\, \mathrm{erf}(\mu / \sqrt 2 \sigma)`."""
        scale = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
        z = mean / scale / math.sqrt(2)
        folded = scale * math.sqrt(2 / math.pi) * (-z.square()).exp() + mean * z.erf()
        return -folded / self._b - math.log(2 * self._b)

    def typical(self) -> float:
        """`scale`."""
        return self.scale


@dataclass(frozen=True)
class StudentT(Factorized):
    r""":math:`p(w) \propto (1 + w^2 / (\nu\, \mathrm{width}^2))^{-(\nu + 1) / 2}` with :math:`\nu` = `df` degrees of freedom.

    Large weights are expected now and then, so a wide network does not become a Gaussian process, and a large weight is hardly pulled
    back. `df=1` is Cauchy's. `width` is not a standard deviation, which is :math:`\sqrt{\nu / (\nu - 2)}` times as large, and infinite
    for :math:`\nu \le 2`. A normal whose variance is InverseGamma(df / 2, df width^2 / 2) has this density.

    >>> StudentT(df=1.0).log_prob({"w": torch.zeros(1)}).exp()  # 1 / pi
    tensor(0.3183)
    """

    width: float = 1.0
    df: float = field(default=3.0, kw_only=True)

    def __post_init__(self):
        keep_positive(self, "width", "df")

    def density(self, leaf: Tensor) -> Tensor:
        """Log density of every weight."""
        half = 0.5 * (self.df + 1)
        constant = math.lgamma(half) - math.lgamma(0.5 * self.df) - 0.5 * math.log(math.pi * self.df) - math.log(self.width)
        return constant - half * torch.log1p((leaf / self.width).square() / self.df)

    def slope(self, leaf: Tensor) -> Tensor:
        """Derivative of the log density at every weight."""
        return -(self.df + 1) * leaf / (self.df * self.width**2 + leaf.square())

    def draw(self, leaf: Tensor, generator: torch.Generator) -> Tensor:
        """A draw for every weight."""
        half = torch.full(leaf.shape, 0.5 * self.df, dtype=torch.float64, device=leaf.device)
        precision = torch._standard_gamma(half, generator=generator) / half
        return (self.width * torch.empty_like(precision).normal_(generator=generator) * precision.rsqrt()).to(leaf)

    def typical(self) -> float:
        """`width`: the standard deviation may be infinite."""
        return self.width


@dataclass(frozen=True)
class ScaleMixture(Factorized):
    r""":math:`p(w) = \pi N(w \mid 0, \sigma_1^2) + (1 - \pi) N(w \mid 0, \sigma_2^2)`: most weights are small, some are not.

    `share` is :math:`\pi`, `scales` are :math:`(\sigma_1, \sigma_2)`. Blundell et al. choose among :math:`\pi` of 1/4, 1/2, 3/4,
    :math:`\sigma_1` of 1, e^-1, e^-2 and :math:`\sigma_2` of e^-6, e^-7, e^-8.

    >>> ScaleMixture(share=0.5, scales=(1.0, 1.0)).log_prob({"w": torch.zeros(1)})  # two that are one
    tensor(-0.9189)
    """

    share: float = 0.5
    scales: tuple[float, float] = field(default=(1.0, math.exp(-6)), kw_only=True)

    def __post_init__(self):
        between(0, 1, share=self.share)
        first, second = self.scales
        object.__setattr__(self, "scales", (positive("first", first), positive("second", second)))

    def _logs(self, leaf: Tensor) -> tuple[Tensor, Tensor]:
        """Log densities of both normals with their shares; a narrow one may be far below what a float can exponentiate."""
        shares = (math.log(self.share), math.log1p(-self.share))
        first, second = (
            share - math.log(scale) - 0.5 * math.log(2 * math.pi) - 0.5 * (leaf / scale).square()
            for share, scale in zip(shares, self.scales, strict=True)
        )
        return first, second

    def density(self, leaf: Tensor) -> Tensor:
        """Log density of every weight."""
        return torch.logaddexp(*self._logs(leaf))

    def slope(self, leaf: Tensor) -> Tensor:
        """Derivative of the log density at every weight."""
        first, second = self._logs(leaf)
        belongs = torch.sigmoid(first - second)  # to the first
        return -leaf * (belongs * self.scales[0] ** -2 + (1 - belongs) * self.scales[1] ** -2)

    def draw(self, leaf: Tensor, generator: torch.Generator) -> Tensor:
        """A draw for every weight."""
        first = torch.rand(leaf.shape, device=leaf.device, generator=generator) < self.share
        return torch.empty_like(leaf).normal_(generator=generator) * torch.where(first, *map(leaf.new_tensor, self.scales))

    def typical(self) -> float:
        """The standard deviation."""
        return math.sqrt(self.share * self.scales[0] ** 2 + (1 - self.share) * self.scales[1] ** 2)


EULER = 0.5772156649015329
FIT = (0.63576, 1.87320, 1.48695)  # of Molchanov et al., section 4.2


@dataclass(frozen=True)
class LogUniform(Factorized):
    r""":math:`p(w) \propto 1 / |w|`, flat in :math:`\ln |w|`: a normal weight with a scale of its own under Jeffreys' prior.

    It is improper, and so is its posterior: sampling and scoring raise an error. Its expectation under a Gaussian exists, up to a
    constant, and is what sparse variational dropout uses. `bounds=(low, high)` of :math:`|w|` make it a density.

    >>> LogUniform(bounds=(math.exp(-1), math.e)).log_prob({"w": torch.ones(1)}).exp()  # 1 / 4
    tensor(0.2500)
    """

    bounds: tuple[float, float] | None = None

    def __post_init__(self):
        if self.bounds is not None and not 0 < self.bounds[0] < self.bounds[1] < math.inf:
            raise ValueError(f"the bounds of |w| are 0 < low < high; got {self.bounds}")

    @property
    def improper(self) -> bool:
        """True without bounds."""
        return self.bounds is None

    def density(self, leaf: Tensor) -> Tensor:
        """-log |w| - log(2 log(high / low)) between the bounds."""
        if self.bounds is None:
            raise ValueError(IMPROPER.format(name="the log-uniform prior", what="scored"))
        low, high = self.bounds
        inside = (leaf.abs() >= low) & (leaf.abs() <= high)
        return torch.where(inside, -leaf.abs().clamp_min(low).log() - math.log(2 * math.log(high / low)), -torch.inf)

    def draw(self, leaf: Tensor, generator: torch.Generator) -> Tensor:
        """A uniform log |w| with a random sign."""
        if self.bounds is None:
            raise ValueError(IMPROPER.format(name="the log-uniform prior", what="sampled"))
        low, high = map(math.log, self.bounds)
        log = torch.empty_like(leaf).uniform_(low, high, generator=generator)
        return log.exp() * random_signs(leaf, generator)

    def expected(self, mean: Tensor, variance: Tensor) -> Tensor | None:
        r""":math:`-E \ln |w|`, by the fit of Molchanov et al. to what depends on :math:`\alpha = \sigma^2 / \mu^2`, and exact at both
        ends of it; the error is less than 0.01 of a nat between them."""
        if self.bounds is not None:
            return None
        tiny = torch.finfo(variance.dtype).tiny
        squares = mean.square()
        log_alpha = variance.clamp_min(tiny).log() - squares.clamp_min(tiny).log()
        first, second, third = FIT
        course = first * (torch.sigmoid(second + third * log_alpha) - 1)
        return course - 0.5 * (variance + squares).clamp_min(tiny).log() + 0.5 * (EULER + math.log(2))

    def typical(self) -> float:
        """The upper bound, or 1."""
        return 1.0 if self.bounds is None else self.bounds[1]


@dataclass(frozen=True)
class Bernoulli(Factorized):
    r"""Every weight is the second of `values` with `probability`, and else the first: (0, 1), or (-1, 1) for signs.

    A discrete prior has no density, so methods that follow a gradient cannot use it and get an error; `log_mass` scores discrete
    weights. With a `temperature` :math:`\lambda` it is the binary concrete relaxation (Maddison et al. 2017), with which discrete
    weights are trained: :math:`x = \sigma((\ln \alpha + \ln u - \ln(1 - u)) / \lambda)`, :math:`\alpha = p / (1 - p)`, with the density

    .. math:: p(x) = \frac{\lambda \alpha x^{-\lambda - 1} (1 - x)^{-\lambda - 1}}{(\alpha x^{-\lambda} + (1 - x)^{-\lambda})^2}

    between the two values, and none outside. As :math:`\lambda` falls the draws approach the discrete ones.

    >>> Bernoulli(0.25, values=(-1.0, 1.0)).log_mass({"w": torch.tensor([1.0, -1.0])}).exp()
    tensor(0.1875)
    """

    probability: float = 0.5
    values: tuple[float, float] = field(default=(0.0, 1.0), kw_only=True)
    temperature: float | None = field(default=None, kw_only=True)

    def __post_init__(self):
        between(0, 1, probability=self.probability)
        require(self.values[0] < self.values[1], f"the two values are in order, such as (0, 1) or (-1, 1); got {self.values}")
        if self.temperature is not None:
            keep_positive(self, "temperature")

    @property
    def _logit(self) -> float:
        return math.log(self.probability) - math.log1p(-self.probability)

    def log_mass(self, params: Params) -> Tensor:
        """Log probability of weights that have these values exactly."""
        first, second = self.values
        log, other = math.log(self.probability), math.log1p(-self.probability)
        masses = [torch.where(leaf == second, log, torch.where(leaf == first, other, -torch.inf)) for leaf in params.values()]
        return sum((mass.sum() for mass in masses), zero(params))

    def divergence(self, logits: Params) -> Tensor:
        """KL(q || p) for q in which every weight is the second value with probability sigmoid(logit), on its own."""
        parts = []
        for leaf in logits.values():
            log, not_log = torch.nn.functional.logsigmoid(leaf), torch.nn.functional.logsigmoid(-leaf)
            there = leaf.sigmoid() * (log - math.log(self.probability))
            parts.append((there + (-leaf).sigmoid() * (not_log - math.log1p(-self.probability))).sum())
        return torch.stack(parts).sum()

    def density(self, leaf: Tensor) -> Tensor:
        """Log density of the binary concrete relaxation."""
        if self.temperature is None:
            raise ValueError(
                f"weights that are {self.values[0]:g} or {self.values[1]:g} have no density, so they cannot be sampled or trained by "
                "following a gradient. Train a relaxation of them, Bernoulli(temperature=0.5), by a variational method"
            )
        low, high = self.values
        x = (leaf - low) / (high - low)
        inside = (x > 0) & (x < 1)
        x = torch.where(inside, x, 0.5)
        log, other, t = x.log(), torch.log1p(-x), self.temperature
        value = math.log(t) + self._logit - (t + 1) * (log + other) - 2 * torch.logaddexp(self._logit - t * log, -t * other)
        return torch.where(inside, value - math.log(high - low), -torch.inf)

    def draw(self, leaf: Tensor, generator: torch.Generator) -> Tensor:
        """One of the two values, or with a temperature a number between them."""
        low, high = self.values
        u = torch.rand(leaf.shape, dtype=torch.float64, device=leaf.device, generator=generator)
        if self.temperature is None:
            x = (u < self.probability).double()
            return (low + (high - low) * x).to(leaf)
        x = low + (high - low) * ((torch.logit(u) + self._logit) / self.temperature).sigmoid()
        edge = torch.finfo(leaf.dtype).eps * max(
            abs(low), abs(high), high - low
        )  # rounded to a value, a draw would have no density
        return x.clamp(low + edge, high - edge).to(leaf)

    def typical(self) -> float:
        """The standard deviation of a discrete weight."""
        return (self.values[1] - self.values[0]) * math.sqrt(self.probability * (1 - self.probability))
