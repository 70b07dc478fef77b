"""What every likelihood promises: a normalized density, and closed forms that agree with sums and integrals over the targets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from dubito.model.likelihoods import Likelihood
from dubito.posteriors.predictive import LatentMixture
from dubito.tensors.tree import Params
from dubito.testing.moments import require

DRAWS, NODES = 20_000, 33
ROWS = 3  # outputs f that a likelihood is tried at


@dataclass(frozen=True)
class Targets:
    """All targets of a likelihood at outputs f [B, C], with weights: the sum of weight times density is an integral over them."""

    likelihood: Likelihood
    f: Tensor
    params: Params

    @cached_property
    def draws(self) -> Tensor:
        """Targets drawn from p(y | f), [n, B, ...]."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.distribution.sample((DRAWS,))

    @cached_property
    def distribution(self) -> Distribution:
        """p(y | f) as a distribution of torch."""
        return self.likelihood(self.f, self.params)

    @cached_property
    def whole(self) -> bool:
        """Whether targets are whole numbers."""
        return bool((self.draws == self.draws.round()).all())

    @cached_property
    def grid(self) -> tuple[Tensor, Tensor]:
        """Targets [G, B, ...] and their weights [G, B]: every whole number there is, or nodes of a quadrature."""
        event = self.draws.shape[2:]
        size = event.numel() if event else 1
        require(size <= 2, f"targets of {size} numbers are too many to integrate over: pass fewer outputs")
        if self.whole:
            upper = int(self.draws.max())
            upper += 1 if self.likelihood.discrete else 60 + upper  # counts have no end
            if self.likelihood.discrete:
                upper = self.likelihood.width(self.f) if not event else 2
            axis = torch.arange(upper, dtype=torch.float64)
            points = torch.tensor(list(product(axis.tolist(), repeat=size)), dtype=torch.float64)
            grid = points.unsqueeze(1).expand(-1, len(self.f), -1)
            weights = torch.ones(grid.shape[:2], dtype=torch.float64)
        else:
            # y = m + s tan(u), which reaches far into the tails
            u, w = (torch.from_numpy(part) for part in np.polynomial.legendre.leggauss(161))
            if size == 1:  # fine enough for outputs of very different scales, such as times
                u, w = (torch.arange(4000, dtype=torch.float64) + 0.5) / 2000 - 1, torch.full((4000,), 1 / 2000).double()
            u, w = u * np.pi / 2, w * np.pi / 2
            rows = self.draws[:4000].double().reshape(4000 * len(self.f), -1)
            middle = rows.median(0).values
            width = (rows.quantile(0.84, 0) - middle).clamp_min(1e-6)
            picks = torch.tensor(list(product(range(len(u)), repeat=size)))
            grid = (middle + width * u.tan()[picks]).unsqueeze(1).expand(-1, len(self.f), -1)
            weights = (width * (w / u.cos() ** 2)[picks]).prod(-1, keepdim=True).expand(-1, len(self.f))
        grid = grid if event else grid.squeeze(-1)
        return (grid if event and not self.whole else grid.to(self.draws.dtype)), weights

    def log_prob(self, f: Tensor) -> Tensor:
        """The log density [G, B] of all targets at other outputs f [B, C]."""
        y, _ = self.grid
        return self.likelihood.log_prob(f.expand(len(y), *f.shape), y, self.params)

    def numbers(self) -> Tensor:
        """The targets as vectors [G, B, K]: numbers as they are, classes as one-hot vectors."""
        y, _ = self.grid
        if self.likelihood.discrete and y.ndim == 2:
            return torch.nn.functional.one_hot(y.long(), self.likelihood.width(self.f)).double()
        return y.double() if y.ndim == 3 else y.double().unsqueeze(-1)

    def expected(self, values: Tensor, f: Tensor | None = None) -> Tensor:
        """E[values] over y ~ p(y | f), of values [G, B, ...]."""
        mass = self.log_prob(self.f if f is None else f).exp() * self.grid[1]
        return (values * mass.reshape(*mass.shape, *[1] * (values.ndim - 2))).sum(0)


def check_normalized(targets: Targets) -> None:
    """The density sums or integrates to 1, and is that of the distribution that the likelihood gives."""
    total = targets.expected(torch.ones_like(targets.grid[1]))
    worst = float((total - 1).abs().max())
    require(worst < 1e-3, f"exp(log_prob) integrates to {float(total[0]):.4f} over all targets, not to 1: check the normalizer")
    y = targets.draws[:20]
    own = targets.likelihood.log_prob(targets.f.expand(len(y), *targets.f.shape), y, targets.params)
    gap = float((own - targets.distribution.log_prob(y)).abs().max())
    require(gap < 1e-5, f"log_prob differs by {gap:.2g} from the log density of the distribution that the likelihood returns")


def check_mean(targets: Targets) -> None:
    """`mean` is the expectation of y, and so is the average of draws."""
    exact = targets.expected(targets.numbers())
    found = targets.likelihood.mean(targets.f, targets.params)
    gap = float((found - exact).abs().max())
    require(gap < 1e-3 * (1 + float(exact.abs().max())), f"mean differs by {gap:.2g} from the integral of y p(y | f)")
    y = targets.draws
    drawn = torch.nn.functional.one_hot(y.long(), exact.shape[-1]).double() if y.ndim == 2 and exact.shape[-1] > 1 else y.double()
    drawn = drawn if drawn.ndim == 3 else drawn.unsqueeze(-1)
    error = float(((drawn.mean(0) - exact).abs() / (drawn.std(0) / DRAWS**0.5).clamp_min(1e-9)).max())
    require(error < 5, f"the average of draws is {error:.1f} standard errors away from the mean")


def check_slopes(targets: Targets) -> None:
    """`slope` is the derivative of `log_prob` in f, by differences."""
    likelihood, f, params, step = targets.likelihood, targets.f, targets.params, 1e-5
    y = targets.draws[0]
    slope = likelihood.slope(f, y, params)
    for c in range(f.shape[-1]):
        shift = torch.zeros_like(f)
        shift[..., c] = step
        difference = (likelihood.log_prob(f + shift, y, params) - likelihood.log_prob(f - shift, y, params)) / (2 * step)
        gap = float(((difference - slope[..., c]).abs() / (1 + difference.abs())).max())
        require(gap < 1e-5, f"the slope of log_prob in output {c} is off by {gap:.2g}")


def check_fisher(targets: Targets) -> None:
    """`fisher` is the expected outer product of slopes; its root, diagonal, sum and random slopes agree with it."""
    likelihood, f, params = targets.likelihood, targets.f, targets.params
    y, _ = targets.grid
    copies = f.expand(len(y), *f.shape).clone().requires_grad_()
    with torch.enable_grad():
        (slopes,) = torch.autograd.grad(likelihood.log_prob(copies, y, params).sum(), copies)
    exact = targets.expected(slopes.unsqueeze(-1) * slopes.unsqueeze(-2))
    size = float(exact.abs().max())
    monte_carlo = type(likelihood).fisher is Likelihood.fisher  # the default is an estimate from 512 draws
    found = likelihood.fisher(f, params)
    gap = float((found - exact).abs().max()) / size
    require(gap < (0.35 if monte_carlo else 2e-3), f"fisher is off by {gap:.2g} of its size from E[slope slope^T]")
    root = likelihood.fisher_root(f, params)
    for name, other in (
        ("fisher_root", torch.einsum("k...c,k...d->...cd", root, root)),
        ("fisher_diagonal", torch.diag_embed(likelihood.fisher_diagonal(f, params))),
        ("fisher_sum", likelihood.fisher_sum(f, params)),
    ):
        own = (
            found.sum(0)
            if name == "fisher_sum"
            else torch.diag_embed(found.diagonal(dim1=1, dim2=2))
            if "diag" in name
            else found
        )
        require(float((other - own).abs().max()) < 1e-6 * size + 1e-9, f"{name} does not agree with fisher")
    v = slopes[0]
    product = (found @ v.unsqueeze(-1)).squeeze(-1)
    away = float((likelihood.fisher_product(f, v, params) - product).abs().max())
    require(away < 1e-6 * float(product.abs().max()) + 1e-9, "fisher_product does not agree with fisher")
    many = f[:1].expand(4000, -1)
    random = likelihood.random_slope(many, params, torch.Generator().manual_seed(0))
    squares = random.unsqueeze(-1) * random.unsqueeze(-2)
    error = float(((squares.mean(0) - exact[0]).abs() / (squares.std(0) / 4000**0.5 + 1e-6 * size)).max())
    require(error < 5, f"the covariance of random_slope is {error:.1f} standard errors away from fisher")


def check_split(targets: Targets) -> None:
    """`uncertainty` of a mixture over f: entropies of classes or labels, variances of numbers, by sums over all targets."""
    likelihood, params = targets.likelihood, targets.params
    shares = torch.tensor([0.3, 0.7], dtype=torch.float64)
    both = torch.stack([targets.f, targets.f.roll(1, 0) + 0.2])
    found = likelihood.uncertainty(both, shares, params)
    means = torch.stack([targets.expected(targets.numbers(), f) for f in both])
    mixed = torch.einsum("s,sbk->bk", shares, means)
    if likelihood.discrete:

        def entropy(p: Tensor) -> Tensor:
            """The entropy of class probabilities, summed over labels where there are several."""
            value = torch.special.entr(p)
            labels = targets.draws.ndim == 3
            return (value + torch.special.entr(1 - p) if labels else value).sum(-1)

        total, aleatoric = entropy(mixed), torch.einsum("s,sb->b", shares, entropy(means))
    else:
        seconds = torch.stack([targets.expected(targets.numbers().square(), f) for f in both])
        total = torch.einsum("s,sbk->bk", shares, seconds) - mixed.square()
        aleatoric = torch.einsum("s,sbk->bk", shares, seconds - means.square())
    for name, exact in (("total", total), ("aleatoric", aleatoric), ("epistemic", total - aleatoric)):
        gap = float((getattr(found, name) - exact).abs().max()) / float(total.max())
        require(gap < 2e-3, f"the {name} uncertainty of a mixture is off by {gap:.2g} of the total")


def gaussian_nodes(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Points [n, B, C] and weights [n] of Gauss-Hermite quadrature for N(mean, covariance), of up to four outputs."""
    size = mean.shape[-1]
    count = NODES if size < 4 else 15
    z, w = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(count))
    rows = torch.tensor(list(product(range(count), repeat=size)))
    weights = (w / w.sum())[rows].prod(-1)
    keep = weights > 1e-12
    root = torch.linalg.cholesky(covariance)
    return mean + torch.einsum("bcd,nd->nbc", root, z[rows][keep]), weights[keep]


def check_predictive(targets: Targets) -> None:
    """The density, mean and noise of a prediction with Gaussian outputs are integrals over these outputs."""
    likelihood, params, f = targets.likelihood, targets.params, targets.f
    size = f.shape[-1]
    if size > 4 or (size > 3 and likelihood.discrete):
        return  # too many for a quadrature
    covariance = 0.1 * torch.eye(size, dtype=f.dtype) + 0.05
    full = covariance.expand(len(f), size, size)
    points, weights = gaussian_nodes(f, full)
    y = targets.draws[:4]
    inside = likelihood.log_prob(points.unsqueeze(1).expand(-1, len(y), -1, -1), y, params)
    exact = (inside + weights.log()[:, None, None]).logsumexp(0)
    convolved = likelihood.convolve(f, full, params)
    if convolved is not None:
        gap = float((convolved.log_prob(y) - exact).abs().max())
        require(gap < 1e-3, f"convolve: the log density is off by {gap:.2g} from the integral over f")
    noise = likelihood.noise_variance(f, full.diagonal(dim1=1, dim2=2), params)
    if noise is not None:
        values = torch.stack([likelihood(point, params).variance for point in points])
        gap = float((noise - torch.tensordot(weights, values, 1)).abs().max() / noise.max())
        require(gap < 1e-3, f"noise_variance is off by {gap:.2g} of itself from E[Var(y | f)]")
    known = torch.arange(size) < likelihood.width(f)  # of a likelihood that predicts its noise, only the means are uncertain
    partly = full * known * known.unsqueeze(-1)
    convolved = likelihood.convolve(f, partly, params)
    if convolved is not None and not bool(known.all()):
        near, shares = gaussian_nodes(f, partly + 1e-24 * torch.eye(size, dtype=f.dtype))
        inside = likelihood.log_prob(near.unsqueeze(1).expand(-1, len(y), -1, -1), y, params)
        gap = float((convolved.log_prob(y) - (inside + shares.log()[:, None, None]).logsumexp(0)).abs().max())
        require(gap < 1e-3, f"convolve with a known noise: the log density is off by {gap:.2g} from the integral over f")
    p = LatentMixture(likelihood, f.unsqueeze(0), full.unsqueeze(0), params={name: leaf[None] for name, leaf in params.items()})
    gap = float((torch.stack([p.log_prob(one) for one in y]) - exact).abs().max())
    require(gap < 0.1, f"the log density of a prediction is off by {gap:.2g} from the integral over f")
    mean = torch.tensordot(weights, torch.stack([likelihood.mean(point, params) for point in points]), 1)
    gap = float((p.mean - mean).abs().max() / (1 + mean.abs().max()))
    require(gap < 0.02, f"the mean of a prediction is off by {gap:.2g} from the integral over f")
    exact_split = likelihood.uncertainty(points, weights, params)
    for name in ("total", "aleatoric", "epistemic"):
        gap = float((getattr(p.uncertainty, name) - getattr(exact_split, name)).abs().max() / exact_split.total.max())
        require(gap < 0.03, f"the {name} uncertainty of a prediction is off by {gap:.2g} of the total from the integral over f")


def check_units(targets: Targets) -> None:
    """In other units, shift + scale y, densities are divided by the scale."""
    likelihood, params, f = targets.likelihood, targets.params, targets.f
    if targets.whole:
        return
    y = targets.draws[0]
    shift, scale = (torch.linspace(low, high, y.shape[-1], dtype=f.dtype) for low, high in ((1.0, -2.0), (0.5, 3.0)))
    shift = shift * (targets.draws <= 0).any()  # positive numbers, such as times, have units but no other origin
    other, a, b, learned = likelihood.rescaled(shift, scale, params)
    moved = other.log_prob(a + b * f, shift + scale * y, learned)
    gap = float((moved + scale.log().sum() - likelihood.log_prob(f, y, params)).abs().max())
    require(gap < 1e-6, f"rescaled: the log density in other units is off by {gap:.2g}")


def check_learned(likelihood: Likelihood, params: Params) -> None:
    """A prior of one learned number is a density in the coordinate in which it is learned."""
    if len(params) != 1 or float(likelihood.log_prior(params)) == 0:
        return
    (name, leaf), line = next(iter(params.items())), torch.linspace(-12, 12, 4801, dtype=torch.float64)
    if leaf.numel() == 1:
        density = torch.stack([likelihood.log_prior({name: value.reshape(leaf.shape)}) for value in line]).exp()
        total = float(torch.trapezoid(density, line))
        require(abs(total - 1) < 1e-3, f"log_prior integrates to {total:.4f} over {name!r}, not to 1")


def check_likelihood(likelihood: Likelihood, outputs: int = 1) -> None:
    """Hold a likelihood to its contract; raises an `AssertionError` that says what is wrong.

    At a few random outputs f of the network, of which `outputs` says how many there are: `log_prob` is normalized and that of the
    distribution; `mean`, `slope`, `fisher` and its kin, `uncertainty`, and where they are given `convolve`, `noise_variance`,
    `rescaled` and `log_prior`, agree with sums and integrals over all targets. Targets may have up to two numbers.

    >>> import dubito
    >>> check_likelihood(dubito.Categorical(), outputs=3)
    """
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(ROWS, outputs, generator=generator, dtype=torch.float64)
    params = {name: leaf.double() - 0.3 for name, leaf in likelihood.parameters().items()}
    targets = Targets(likelihood, f, params)
    y = likelihood.numbers(likelihood.target(targets.draws[0].to(f.dtype) if not likelihood.discrete else targets.draws[0], f))
    require(
        y.shape == targets.draws[0].shape, f"target gives the shape {list(y.shape)} to targets {list(targets.draws[0].shape)}"
    )
    for check in (check_normalized, check_mean, check_slopes, check_fisher, check_split, check_predictive, check_units):
        check(targets)
    check_learned(likelihood, params)
