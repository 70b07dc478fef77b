"""The protocol of likelihoods, the split of uncertainty, and what all likelihoods share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution

from dubito.tensors.checks import require
from dubito.tensors.eigen import eigh
from dubito.tensors.randomness import fork_rng
from dubito.tensors.tree import Params

if TYPE_CHECKING:
    from dubito.model.likelihoods.gaussian import Gaussian

PREFIX = "likelihood:"
NOISE = PREFIX + "log_scale"  # of a likelihood with a learned noise
PIECE = 2**22  # numbers in matrices that are formed at a time, where only their sum is wanted


@dataclass(frozen=True)
class Uncertainty:
    """How uncertain a prediction is, and why: `total = aleatoric + epistemic`, each at least 0.

    Classification: entropies in nats, `[B, *D]`; epistemic is the mutual information of label and weights.
    Regression: variances, `[B, *D, C]`; total is the variance of the predictive, noise included.
    """

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor

    @staticmethod
    def of(total: Tensor, aleatoric: Tensor) -> Uncertainty:
        """From total and aleatoric, so that rounding leaves no part negative and the parts add up."""
        aleatoric = torch.minimum(aleatoric, total)
        return Uncertainty(total, aleatoric, total - aleatoric)


def entropy(probs: Tensor) -> Tensor:
    r"""Shannon entropy :math:`-\sum_c p_c \ln p_c` in nats over the last axis, with 0 ln 0 = 0.

    >>> entropy(torch.tensor([0.5, 0.5]))
    tensor(0.6931)
    """
    return torch.special.entr(probs).sum(-1).clamp_min(0)  # a mean of probabilities may round to more than 1


@lru_cache(maxsize=32)
def _unit_nodes(n: int, width: int) -> Tensor:
    require(not (n < 2 or n % 2), f"the nodes come in pairs: their number is even and at least 2; got {n}")
    # They outlive this call, so they are made in a thread of their own: torch.func transforms, inference mode and the like,
    # which may surround the first call, do not reach there.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_make_nodes, n, width).result()


def _make_nodes(n: int, width: int) -> Tensor:
    if width <= torch.quasirandom.SobolEngine.MAXDIM:
        half = torch.quasirandom.SobolEngine(width, scramble=True, seed=0).draw(n // 2, dtype=torch.float64)
    else:  # a Latin hypercube: every output on its own as evenly spread as there
        source = torch.Generator().manual_seed(0)
        place, within = torch.rand(2, n // 2, width, generator=source, dtype=torch.float64)
        half = (place.argsort(0) + within) / (n // 2)
    nodes = math.sqrt(2) * torch.erfinv(2 * half.clamp(1e-9, 1 - 1e-9) - 1)
    nodes = torch.cat([nodes, -nodes])  # antithetic: all odd moments vanish
    if width > torch.quasirandom.SobolEngine.MAXDIM:
        nodes = nodes / nodes.square().mean(0).sqrt()
    if n // 2 > width:  # enough nodes to make the second moments exact as well
        factor = torch.linalg.cholesky(nodes.mT @ nodes / n)
        nodes = torch.linalg.solve_triangular(factor, nodes.mT, upper=False).mT
    return nodes


def nodes(n: int, like: Tensor) -> Tensor:
    """n equally weighted points [n, C] whose mean is 0 and covariance I (exactly, for n > 2 C): a deterministic N(0, I)."""
    return _unit_nodes(n, like.shape[-1]).to(like)


@lru_cache(maxsize=8)
def _line(n: int) -> tuple[list[float], list[float]]:
    """Nodes and weights as plain numbers. Cached tensors would hold on to torch.func transforms that surround the first call."""
    reach, finest = 8.5, 0.5
    us = [(2 * i / (n - 1) - 1) * math.asinh(reach / finest) for i in range(n)]
    z = [finest * math.sinh(u) for u in us]
    weights = [math.exp(-0.5 * x * x) * math.cosh(u) for x, u in zip(z, us, strict=True)]
    return z, [w / sum(weights) for w in weights]


def quadrature(n: int, like: Tensor) -> tuple[Tensor, Tensor]:
    r"""n points [n, C] and their weights [n]: a deterministic N(0, I), which is `nodes` with equal weights.

    In one dimension, with points to spare, they reach far into the tails, where equal weights could not: the trapezoidal rule in u for
    :math:`z = \sinh(u) / 2`, close together near 0, where the integrand may be a step, and up to 8.5 standard deviations out.

    >>> z, w = quadrature(128, torch.empty(1, dtype=torch.float64))
    >>> [round(float(w @ z[:, 0] ** k), 6) for k in (2, 4)]
    [1.0, 3.0]
    """
    kind = {"dtype": torch.promote_types(like.dtype, torch.float32), "device": like.device}
    if like.shape[-1] == 1 and n >= 32:
        z, weights = _line(n)
        return torch.tensor(z, dtype=like.dtype, device=like.device).unsqueeze(-1), torch.tensor(weights, **kind)
    return nodes(n, like), torch.full((n,), 1 / n, **kind)


def align(params: Params, f: Tensor) -> Params:
    """Reshape stacked leaves [S, K] so that they broadcast against f [S, ..., C]; leaves [K] already do."""
    return {
        name: leaf.reshape(leaf.shape[0], *[1] * (f.ndim - 2), leaf.shape[1]) if leaf.ndim == 2 else leaf
        for name, leaf in params.items()
    }


def likelihood_params(params: Params) -> Params:
    """The leaves that the likelihood learns, whose names start with "likelihood:"."""
    return {name: leaf for name, leaf in params.items() if name.startswith(PREFIX)}


def average(values: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean over the leading axis of draws."""
    return torch.tensordot(weights.to(values), values, dims=1)


def log_average(logs: Tensor, weights: Tensor) -> Tensor:
    """The logarithm of the weighted mean of exp(logs) over the leading axis of draws, in float64."""
    return (logs.double() + weights.double().log().reshape(-1, *[1] * (logs.ndim - 1))).logsumexp(0)


def positive(*scales: float) -> None:
    """Raise for a noise scale that is not a positive number."""
    for scale in scales:
        if not (scale > 0 and math.isfinite(scale)):
            raise ValueError(f"a noise scale is a positive standard deviation; got {scale}")


def halves(f: Tensor, owner: str, needs: str) -> tuple[Tensor, Tensor]:
    """The two halves of the outputs, of which the second are log variances."""
    if f.shape[-1] % 2:
        raise ValueError(f"{owner} needs {needs}, an even number of outputs; the network gives {f.shape[-1]}")
    first, log_variance = f.chunk(2, -1)
    return first, log_variance


@dataclass(frozen=True)
class Likelihood(ABC):
    """The base of all likelihoods; see the module's text for the axes."""

    dim: int = field(default=-1, kw_only=True)

    def __post_init__(self):  # noqa: B027 (those that have something to check do)
        pass

    discrete: ClassVar[bool] = False  # classes or labels rather than numbers: uncertainty is an entropy rather than a variance
    indexed: ClassVar[bool] = False  # a target is the index of a class, without an axis for outputs
    separate: ClassVar[bool] = False  # each entry of a target depends on its own output alone, as labels and counts do
    intervals: ClassVar[bool] = False  # a target is an interval: lower ends, then upper ends, [..., 2 C]

    @property
    def gaussian(self) -> Gaussian | None:
        """The likelihood, if it is a `Gaussian` (one noise for all inputs); else None."""
        return None

    @property
    def task_names(self) -> tuple[str, ...]:
        """The names of the tasks, if it is made of several."""
        return ()

    def mean_noise(self, f: Tensor, params: Params) -> Tensor | None:
        """The variance of the noise of the targets given f, [..., n], where the first n outputs are their means; else None."""
        return None

    @abstractmethod
    def __call__(self, f: Tensor, params: Params) -> Distribution:
        """p(y | f), batch shape `[...]` and event shape as one target has it."""

    def parameters(self, y: Tensor | None = None) -> Params:
        """Initial values of what is learned beside the weights; `y`, a batch of targets, may set the scale."""
        return {}

    def log_prior(self, params: Params) -> Tensor:
        """Log prior density of the learned parameters, in the coordinates in which they are learned."""
        return torch.zeros(())

    def resample(
        self,
        outputs: Iterable[tuple[Tensor, Tensor]],
        params: Params,
        share: float,
        temperature: float,
        generator: torch.Generator,
    ) -> Params:
        """Draw what is learned from its distribution given the network's outputs, if that has a closed form, for C chains; else {}.

        `outputs` holds (f, y) of every batch, with f [C, B, ..., K]; the result has leaves [C, ...]. Each example counts `share` times.
        """
        return {}

    def least_noise(self, params: Params) -> Tensor | float:
        """The smallest standard deviation of the noise of any output, in units of f: samplers need steps that are as fine. A learned
        noise gives [] from leaves [K], and [S] from stacked leaves [S, K]. 1 for likelihoods without such a noise."""
        return 1.0

    def width(self, f: Tensor) -> int:
        """How many numbers a target has at a position, or how many classes there are."""
        return f.shape[-1]

    def target(self, y: Tensor, f: Tensor) -> Tensor:
        """The targets in the layout of f, [..., C] (classes: [...]); a mismatch is an error, never a broadcast."""
        width = self.width(f)
        if y.ndim == f.ndim and self.dim != -1:
            y = y.movedim(self.dim, -1)
        if y.ndim == f.ndim - 1 and width == 1:
            y = y.unsqueeze(-1)
        if y.shape != (*f.shape[:-1], width):
            raise ValueError(
                f"targets of shape {list(y.shape)} do not fit {type(self).__name__}, which expects {[*f.shape[:-1], width]} "
                f"for this network (its output, with the channel axis last, is {list(f.shape)})"
            )
        return y.to(f.dtype)

    def check(self, f: Tensor, y: Tensor) -> None:
        """Raise for targets that cannot be right: wrong values, or a wrong shape."""
        require(
            not y.is_complex(), "the targets are complex: give real and imaginary parts as two targets, torch.view_as_real(y)"
        )
        if not torch.isfinite(self.target(y, f)).all():
            raise ValueError("the targets hold NaN or infinite values: remove those rows, or fill them in")

    def log_prob(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """log p(y | f) for every position, [...]; y is in the layout that `target` returns."""
        return self(f, params).log_prob(y)

    def objective(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """What training maximizes: `log_prob`, or its value with another gradient, which `departures` then names."""
        return self.log_prob(f, y, params)

    @property
    def departures(self) -> tuple[str, ...]:
        """In what a fit departs from the posterior of Bayes' rule."""
        return ()

    def numbers(self, y: Tensor) -> Tensor:
        """What was observed, [..., C], from targets in the layout of `target`; an error where only intervals are known."""
        return y

    def mean(self, f: Tensor, params: Params) -> Tensor:
        """E[y | f], [..., C]; for classes their probabilities."""
        return self(f, params).mean

    def off(self, f: Tensor, params: Params) -> Tensor:
        """P(y = 0 | f) of labels, [..., C]: 1 - `mean`, which a likelihood of labels gives with more digits."""
        return 1 - self.mean(f, params)

    def label_scores(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """The log probability of each entry of a target on its own, [..., C], of a likelihood that is `separate`."""
        raise ValueError(f"{type(self).__name__} has no entries that are independent of each other")

    def fisher(self, f: Tensor, params: Params, *, draws: int = 512) -> Tensor:
        r"""Expected Hessian of -log p(y | f) in f, :math:`E_y[\nabla \log p \, \nabla \log p^T]`, [..., C, C].

        Positive semi-definite by construction, unlike the Hessian at the observed y. This default is a Monte Carlo estimate.
        """
        copies = f.detach().expand(draws, *f.shape).clone().requires_grad_()  # one for each draw: one backward pass for all
        with torch.enable_grad(), fork_rng(0):
            y = self(f.detach(), params).sample((draws,))
            (g,) = torch.autograd.grad(self.log_prob(copies, y, params).sum(), copies)
        return torch.einsum("n...c,n...d->...cd", g, g) / draws

    def fisher_root(self, f: Tensor, params: Params) -> Tensor:
        r"""Cotangents :math:`s_k` with :math:`\sum_k s_k s_k^T` = `fisher`, [K, ..., C]."""
        values, vectors = eigh(self.fisher(f, params))
        return (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)).movedim(-1, 0)

    def random_slope(self, f: Tensor, params: Params, generator: torch.Generator | None = None) -> Tensor:
        """The gradient of log p(y | f) in f for a y drawn from p(y | f), [..., C]: its covariance is `fisher`."""
        device = "cpu" if generator is None else generator.device
        with fork_rng(int(torch.randint(2**62, (1,), generator=generator, device=device))):
            y = self(f.detach(), params).sample()
        return self.slope(f, y, params)

    def slope(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """The gradient of log p(y | f) in f."""
        leaf = f.detach().requires_grad_()
        with torch.enable_grad():
            value = self.log_prob(leaf, y, {name: p.detach() for name, p in likelihood_params(params).items()}).sum()
        return torch.autograd.grad(value, leaf)[0]

    def fisher_diagonal(self, f: Tensor, params: Params) -> Tensor:
        """The diagonal of `fisher`, [..., C]."""
        return self.fisher(f, params).diagonal(dim1=-2, dim2=-1)

    def fisher_sum(self, f: Tensor, params: Params) -> Tensor:
        """`fisher` summed over all positions, [C, C]."""
        rows = f.reshape(-1, f.shape[-1])
        pieces = rows.split(max(1, PIECE // f.shape[-1] ** 2))  # pixels are many, and each has a matrix
        return torch.stack([self.fisher(piece, params).sum(0) for piece in pieces]).sum(0)

    def fisher_product(self, f: Tensor, v: Tensor, params: Params) -> Tensor:
        """`fisher` times vectors v [..., C]."""
        return (self.fisher(f, params) @ v.unsqueeze(-1)).squeeze(-1)

    def noise_groups(self, width: int) -> Tensor | None:
        """The index of each output's noise in `likelihood:log_scale`, [C], if `fisher` is diag(1 / noise^2) and the noise is learned;
        else None. The curvature is then kept apart by noise."""
        return None

    def observed(self, y: Tensor) -> Tensor | None:
        """Which positions have a target, [...], for targets in the layout of `target`; None if all have. With several tasks, of which
        some may lack a target, [..., C]."""
        return None

    def seen_share(self, f: Tensor, y: Tensor, params: Params) -> Tensor | None:
        """The curvature of -log p(y | f) as a share of `fisher`, [..., C], if only intervals are known of some targets; else None."""
        return None

    def uncertainty(self, f: Tensor, weights: Tensor, params: Params) -> Uncertainty:
        """Draws of f [S, ..., C] with weights [S] to an `Uncertainty`: here the law of total variance."""
        distribution = self(f, params)
        aleatoric = average(distribution.variance, weights)
        mean = average(distribution.mean, weights)
        return Uncertainty.of(aleatoric + average((distribution.mean - mean) ** 2, weights), aleatoric)

    def log_forecasts(self, f: Tensor, weights: Tensor, params: Params) -> Tensor:
        """Draws of f [S, ..., C] with weights [S] to the logarithm of the mean probabilities, of labels to their log odds, [..., C].

        In float64, and formed in logarithms, so that what is improbable is not lost.
        """
        raise ValueError(f"{type(self).__name__} predicts no classes or labels, which have probabilities")

    def noise_variance(self, f_mean: Tensor, f_var: Tensor, params: Params) -> Tensor | None:
        """E[Var(y | f)] for f ~ N(f_mean, f_var), for each number of the target, [..., C], if it has a closed form and the first
        outputs are the means of these numbers; else None."""
        return None

    def convolve(self, f_mean: Tensor, f_cov: Tensor, params: Params) -> Distribution | None:
        """p(y) for f ~ N(f_mean, f_cov) where it has a closed form, else None; f_cov is [..., C] or [..., C, C]."""
        return None

    def linked(self, f_mean: Tensor, f_cov: Tensor, params: Params, link: str) -> Tensor:
        """Outputs f with which the likelihood `plain` has the class probabilities of Gaussian logits, by a closed approximation."""
        raise ValueError(f"{type(self).__name__} has no {link!r} approximation: use link='nodes'")

    @property
    def plain(self) -> Likelihood:
        """The likelihood of this kind whose outputs are log probabilities, or the log odds of labels; needed beside `linked`."""
        raise NotImplementedError(
            f"{type(self).__name__} gives `linked` but not `plain`, the likelihood of the outputs it returns"
        )

    def rescaled(self, shift: Tensor, scale: Tensor, params: Params) -> tuple[Likelihood, Tensor, Tensor, Params]:
        """The likelihood of shift + scale * y, each [C]: (likelihood, a, b, params), where its outputs are a + b f, each [C]."""
        raise ValueError(f"{type(self).__name__} has classes, which have no units")

    def moved(self, f: Tensor, offset: Tensor) -> Tensor | None:
        """Outputs [..., C] with which each number of the target is what it is for f, plus an offset; None where there are none."""
        return None

    def resolve(self, f_mean: Tensor, f_cov: Tensor, n: int) -> tuple[Tensor, Tensor] | None:
        """Split each Gaussian over f, [S, ...], into n Gaussians of equal weight, [S, n, ...], for which `convolve` has a closed form;
        None if there is no such split, and plain nodes are used."""
        return None


@dataclass(frozen=True)
class DiagonalFisher(Likelihood):
    """A likelihood whose Fisher information in f is a diagonal matrix."""

    @abstractmethod
    def fisher_diagonal(self, f: Tensor, params: Params) -> Tensor:
        """The diagonal of the Fisher information, [..., C]."""

    def fisher(self, f: Tensor, params: Params, *, draws: int = 512) -> Tensor:
        """The diagonal matrix of `fisher_diagonal`."""
        return torch.diag_embed(self.fisher_diagonal(f, params))

    def fisher_product(self, f: Tensor, v: Tensor, params: Params) -> Tensor:
        """`fisher_diagonal` times v."""
        return self.fisher_diagonal(f, params) * v

    def fisher_root(self, f: Tensor, params: Params) -> Tensor:
        """The root of the diagonal matrix, one column for each output."""
        return torch.diag_embed(self.fisher_diagonal(f, params).sqrt()).movedim(-1, 0)
