"""The neural linear model: exact Bayesian regression on the features of a trained network."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dubito.curvature.evidence import highest
from dubito.inference.method import Info, Start, Traits
from dubito.model import Target
from dubito.model.likelihoods import Gaussian
from dubito.model.priors import Normal
from dubito.network.examples import Batch
from dubito.posteriors import Conjugate, Posterior
from dubito.posteriors.predict.conjugate import INSTEAD, Head, features, find
from dubito.tensors import store
from dubito.tensors.checks import between
from dubito.tensors.eigen import eigh
from dubito.tensors.tree import Buffers, Params

WIDE = 25.0  # how far from the features' own scale, in log, a prior precision is looked for


@dataclass
class NeuralLinearState:
    params: Params
    buffers: Buffers
    weight: str  # names of the last layer's parameters
    bias: str | None
    gram: Tensor  # [d, d]: sum of phi phi^T, in float64 like the others
    cross: Tensor  # [d, C]: sum of phi y^T
    square: Tensor  # [C]: sum of y^2
    rows: float  # positions seen
    seen: int  # examples seen


@dataclass(frozen=True)
class NeuralLinear:
    r"""The last layer exactly, all before it a point: Bayesian linear regression on the features :math:`\phi(x)` of the network.

    The network comes trained (its own weights, or `start=`), and one pass over the data collects :math:`\Phi^T \Phi`,
    :math:`\Phi^T y` and :math:`y^T y`. With :math:`y = \phi^T w + \epsilon`, :math:`\epsilon \sim N(0, \sigma^2)`,
    :math:`w \mid \sigma^2 \sim N(0, \sigma^2 / \lambda)` and :math:`\sigma^2 \sim \mathrm{InvGamma}(a_0, b_0)` the posterior is

    .. math:: \Lambda = \Phi^T \Phi + \lambda I, \quad m = \Lambda^{-1} \Phi^T y, \quad a = a_0 + \tfrac{n}{2}, \quad
        b = b_0 + \tfrac12 (y^T y - m^T \Lambda m),

    and the predictive a Student-t. `Gaussian(scale=s)` is a known noise, whose predictive is Gaussian; `Gaussian()` learns one for all
    outputs, `Gaussian(outputs=C)` one for each, and `Gaussian(prior=Gamma(a0, b0))` stands above the fields `a0` and `b0`. These
    weigh like 2 a0 observations of the variance b0 / a0: next to nothing, for targets that are standardized.

    The precision :math:`\lambda`, in units of the noise's, is `prior_precision` if given. Else the model's prior decides:
    `Normal(scale=s)` makes it :math:`\hat\sigma^2 / s^2`, so that at the noise which the data show, :math:`\hat\sigma^2 = b / a`
    (or the known one), weights have the standard deviation s; for `Normal()` it maximizes the evidence, which is
    :math:`\sum_j \ln \frac{\lambda}{e_j + \lambda} / 2 - a \ln b` and constants, in the eigenvalues :math:`e_j` of :math:`\Phi^T \Phi`.

    >>> import dubito, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
    >>> x = torch.linspace(-1, 1, 50).unsqueeze(1)
    >>> posterior = dubito.fit(dubito.Model(net, dubito.Gaussian()), NeuralLinear(), (x, torch.sin(3 * x)))
    >>> p = posterior.predict(torch.tensor([[0.0], [9.0]]))
    >>> bool(p.uncertainty.epistemic[0] < p.uncertainty.epistemic[1])
    True
    """

    prior_precision: float | None = field(default=None, kw_only=True)  # in units of the noise's; None: as the prior says
    optimize_evidence: bool = field(default=True, kw_only=True)  # fit a prior scale that is not given; False leaves it at 1
    a0: float = field(default=1e-3, kw_only=True)  # prior of the noise, InvGamma(a0, b0): worth 2 a0 observations
    b0: float = field(default=1e-3, kw_only=True)  # of variance b0 / a0

    traits: ClassVar[Traits] = Traits(post_hoc=True, alone=None)

    def __post_init__(self):
        between(0, math.inf, prior_precision=self.prior_precision, a0=self.a0, b0=self.b0)

    @property
    def data(self) -> Literal["batches", "full"]:
        """A mini-batch a step."""
        return "batches"

    def steps(self, n_batches: int) -> int:
        """One pass over the data."""
        return n_batches  # one pass

    def init(self, target: Target, start: Start, batch: Batch, generator: torch.Generator, *, steps: int) -> NeuralLinearState:
        """Empty sums over the features of the last layer."""
        self._check(target)
        head = find(target.model, start.params, start.buffers, target.model.split(batch)[0])
        like = start.params[head.weight]
        c, d = like.shape[0], like.shape[1] + (head.bias in start.params)
        zeros = [like.new_zeros(shape, dtype=torch.float64) for shape in ((d, d), (d, c), (c,))]
        return NeuralLinearState(start.params, start.buffers, head.weight, head.bias, *zeros, rows=0.0, seen=0)

    def _check(self, target: Target) -> None:
        """What cannot be exact is refused."""
        model, likelihood = target.model, target.model.likelihood.gaussian
        if likelihood is None:
            raise ValueError(
                f"NeuralLinear is exact for regression with Gaussian noise; for {type(model.likelihood).__name__} use "
                "Laplace(subset='last_layer', structure='dense')"
            )
        if likelihood.prior is not None and not isinstance(likelihood.prior, torch.distributions.Gamma):
            raise ValueError(
                "the noise's conjugate prior is a Gamma of its precision: Gaussian(prior=torch.distributions.Gamma(a, b))"
            )
        if model.prior.normal is None:
            raise ValueError(f"NeuralLinear needs a Normal prior; for {type(model.prior).__name__} sample, {INSTEAD}")
        if target.temperature != 1:
            raise ValueError("NeuralLinear gives the posterior itself: leave out temperature, or sample the tempered one")
        if target.precision is not None:
            raise ValueError("NeuralLinear needs the features as they will be when predicting: leave out precision")

    def step(
        self, target: Target, state: NeuralLinearState, data: Iterable[Batch], generator: torch.Generator
    ) -> tuple[NeuralLinearState, Info]:
        """Add a batch to the sums."""
        if target.adversary is not None:
            raise ValueError("the last layer's exact posterior has no place for adversarial neighbors: leave out adversarial")
        head = Head(state.weight, state.bias)
        data, rows = list(data), state.square.new_zeros(1)
        sums = [torch.zeros_like(leaf) for leaf in (state.gram, state.cross, state.square)]
        for i, batch in enumerate(data):
            if target.shares is not None and target.shares[i].idle:
                continue
            x, y = target.model.split(batch)
            phi, f = features(target.model, state.params, state.buffers, x, head)
            y = target.model.likelihood.target(y, f.double()) - head.offset(state.buffers, state.gram)
            count = y.new_ones(y.shape[:-1])
            if target.weights is not None:  # how often each example counts
                count = count * target.weights[i].to(count).reshape(-1, *[1] * (count.ndim - 1))
            phi, y, count = phi.double().flatten(0, -2), y.flatten(0, -2), count.reshape(-1, 1)
            sums[0] += phi.mT @ (count * phi)
            sums[1] += phi.mT @ (count * y)
            sums[2] += (count * y * y).sum(0)
            rows += count.sum()
        target.processes.sum_([*sums, rows])
        for leaf, more in zip((state.gram, state.cross, state.square), sums, strict=True):
            leaf += more
        state.rows, state.seen = state.rows + float(rows), state.seen + target.examples(data)
        return state, {"rows": state.rows}

    def draw(self, state: NeuralLinearState) -> Params | None:
        """None: the posterior has a closed form."""
        return None

    def posterior(self, target: Target, state: NeuralLinearState, draws: store.Draws) -> Posterior:
        """The exact posterior of the last layer."""
        if not all(bool(torch.isfinite(leaf).all()) for leaf in (state.gram, state.cross, state.square)):
            raise FloatingPointError(
                "the features or the targets hold NaN or infinite values: look at the data, and at the network"
            )
        model, scale = target.model, target.n_data / state.seen
        prior, likelihood = model.prior.normal, model.likelihood.gaussian
        assert prior is not None
        assert likelihood is not None
        names = [state.weight] * state.params[state.weight].shape[1]
        names += [state.bias] if state.bias is not None and state.bias in state.params else []
        # a bias may have a prior scale of its own: in units of it, all weights are alike
        first = prior.scale_of(state.weight)
        units = state.gram.new_tensor([prior.scale_of(name) / first for name in names]).unsqueeze(-1)  # [d, 1]
        values, vectors = eigh(scale * units * state.gram * units.mT)
        values, cross = values.clamp_min(0), vectors.mT @ (scale * units * state.cross)
        data = Rotated(values, cross, scale * state.square, scale * state.rows, *self._noise(likelihood, cross))
        precision = self._precision(data, prior, first)  # [K]
        mean = (units * vectors @ (cross / (values.unsqueeze(-1) + precision))).mT  # [C, d]
        root = units * vectors * (values + precision.unsqueeze(-1)).rsqrt().unsqueeze(-2)  # [K, d, d]
        mean, root = (leaf.clone(memory_format=torch.contiguous_format) for leaf in (mean, root))  # as in a file: the same bits
        shape, rate = (data.shape, data.rate(precision)) if data.noise is None else (None, None)
        head, known = (state.weight, state.bias), (data.evidence(precision), precision)
        return Conjugate(model, state.params, state.buffers, *head, mean, root, shape, rate, *known).centered()

    def _noise(self, likelihood: Gaussian, like: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """The noise's variance [K] where it is known, and its prior (a0, b0), each [G] for G noises that are learned."""

        def flat(value: Any) -> Tensor:
            """A number or tensor as a vector like the sums."""
            return torch.as_tensor(value, dtype=like.dtype, device=like.device).reshape(-1)

        prior = (self.a0, self.b0)
        if isinstance(likelihood.prior, torch.distributions.Gamma):
            prior = (likelihood.prior.concentration, likelihood.prior.rate)
        a0, b0 = (flat(value).expand(likelihood.outputs) for value in prior)
        return (None if likelihood.scale is None else flat(likelihood.scale).square()), a0, b0

    def _precision(self, data: Rotated, prior: Normal, scale: float) -> Tensor:
        """The prior precision in units of the noise's, [K]."""
        if self.prior_precision is not None:
            return data.values.new_tensor([self.prior_precision])
        unit = data.values.new_ones(1) if data.noise is None else data.noise
        if prior.learned and self.optimize_evidence:
            centre = math.log(float(data.values.mean() / unit.mean()) or 1.0)
            return math.exp(highest(lambda log: data.evidence(math.exp(log) * unit), centre - WIDE, centre + WIDE)) * unit
        if data.noise is not None:
            return data.noise / scale**2
        # Where b / a = lambda s^2. It lies between a perfect fit and none; b is concave in lambda, so there is only one.
        low, high = (math.log(float((rate / data.shape).mean()) / scale**2) for rate in (data.b0, data.rate(unit * torch.inf)))
        for _ in range(100):
            middle = (low + high) / 2
            noise = float((data.rate(math.exp(middle) * unit) / data.shape).mean())
            low, high = (middle, high) if noise > math.exp(middle) * scale**2 else (low, middle)
        return math.exp(high) * unit


@dataclass(frozen=True)
class Rotated:
    """The sums of a regression in the eigenbasis of Phi^T Phi, where any prior precision [K] costs only O(d C)."""

    values: Tensor  # e, [d]
    cross: Tensor  # [d, C]
    square: Tensor  # [C]
    rows: float
    noise: Tensor | None  # the known variance, [1] or [C]
    a0: Tensor  # [G]: G = 1 for a noise that all outputs share, else C
    b0: Tensor  # [G]

    @property
    def shape(self) -> Tensor:
        """a of the noise's posterior, InvGamma(a, b), [G]."""
        return self.a0 + 0.5 * self.rows * len(self.square) / len(self.a0)

    def misfit(self, precision: Tensor) -> Tensor:
        """The least squared error plus precision times squared weights, [C]."""
        return (self.square - (self.cross**2 / (self.values.unsqueeze(-1) + precision)).sum(0)).clamp_min(0)

    def rate(self, precision: Tensor) -> Tensor:
        """b of the noise's posterior, InvGamma(a, b), [G]."""
        return self.b0 + 0.5 * self.misfit(precision).reshape(len(self.b0), -1).sum(-1)

    def evidence(self, precision: Tensor) -> float:
        """ln p(D), the weights and the noise integrated out."""
        volume = 0.5 * (precision.log() - (self.values.unsqueeze(-1) + precision).log()).sum(0).expand_as(self.square).sum()
        if self.noise is not None:
            score = self.rows * (2 * math.pi * self.noise).log() + self.misfit(precision) / self.noise  # [C]
            return float(volume - 0.5 * score.sum())
        score = (
            self.a0 * self.b0.log() - self.shape * self.rate(precision).log() + torch.lgamma(self.shape) - torch.lgamma(self.a0)
        )
        return float(volume + score.sum() - 0.5 * self.rows * len(self.square) * math.log(2 * math.pi))
