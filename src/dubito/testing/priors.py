"""What every prior promises: a normalized density, its gradient, draws from it, and closed expectations, which all agree."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vmap

from dubito.model.priors import Prior
from dubito.tensors import tree
from dubito.tensors.tree import Params
from dubito.testing.moments import require

DRAWS = 1500
WEIGHTS = {"0.weight": (1, 2), "0.bias": (1,)}


def draws_of(prior: Prior, like: Params, n: int = DRAWS) -> Params:
    """n draws of weights and hyperparameters, leaves [n, ...]."""
    generator = torch.Generator().manual_seed(0)
    return tree.stack([prior.sample(like, generator) for _ in range(n)])


def gradients(prior: Prior, stacked: Params) -> Params:
    """The prior's own gradient at stacked weights."""
    return prior.gradient(stacked) if prior.stacks else vmap(prior.gradient)(tree.clone(stacked))


def check_gradient(prior: Prior, draws: Params) -> None:
    """`gradient` is the slope of `log_prob`, by differences, and `add_gradient` adds a multiple of it."""
    for row in range(3):
        params = {name: leaf[row].clone() for name, leaf in draws.items()}
        slopes = prior.gradient(params)
        for name, leaf in params.items():
            for index in range(min(3, leaf.numel())):
                step = 1e-6 * max(1e-2, abs(float(leaf.flatten()[index])))
                sides = []
                for sign in (1, -1):
                    moved = leaf.clone()
                    moved.view(-1)[index] += sign * step
                    sides.append(float(prior.log_prob({**params, name: moved})))
                found, exact = float(slopes[name].flatten()[index]), (sides[0] - sides[1]) / (2 * step)
                require(
                    abs(found - exact) < 1e-3 * (1 + abs(exact)),
                    f"the gradient of {name!r} is {found:.4g}, but differences of log_prob give {exact:.4g}",
                )
        total = tree.apply(torch.ones_like, params)
        prior.add_gradient(total, params, 0.5)
        for name, leaf in total.items():
            gap = float((leaf - 1 - 0.5 * slopes[name]).abs().max())
            require(
                gap < 1e-9 * (1 + float(slopes[name].abs().max())), f"add_gradient of {name!r} does not add factor * gradient"
            )
    several = gradients(prior, {name: leaf[:3] for name, leaf in draws.items()})
    for name, leaf in several.items():
        alone = torch.stack([prior.gradient({n: d[row] for n, d in draws.items()})[name] for row in range(3)])
        gap = float((leaf - alone).abs().max())
        require(
            gap < 1e-6 * (1 + float(alone.abs().max())), f"the gradient of stacked weights {name!r} is not that of each of them"
        )


def check_stein(prior: Prior, draws: Params) -> None:
    r"""Draws are those of the density: :math:`E[\partial_i \log p] = 0` and :math:`E[\theta_i \partial_i \log p] = -1`."""
    slopes = gradients(prior, draws)
    for name, leaf in draws.items():
        for what, values, exact in (("slope", slopes[name], 0.0), ("weight times slope", leaf * slopes[name], -1.0)):
            flat = values.reshape(len(leaf), -1)
            error = ((flat.mean(0) - exact).abs() / (flat.std(0) / len(leaf) ** 0.5 + 1e-9)).max()
            require(
                float(error) < 5,
                f"draws of {name!r} are not from the density: the average {what} is {float(error):.1f} standard errors away from "
                f"{exact:g}",
            )


def check_normalizer(prior: Prior, draws: Params, *, bounded: bool = False) -> None:
    """The density integrates to 1: for draws of p and any density q that lies inside it, the average of q / p is 1.

    q is a Gaussian, or within bounds the uniform density between the quartiles.
    """
    flat = tree.flatten(draws, stacked=True)
    low, high = (flat.quantile(level, 0) for level in (0.25, 0.75))
    middle = flat.median(0).values
    width = 0.5 * (flat.quantile(0.75, 0) - flat.quantile(0.25, 0)).clamp_min(1e-6)
    # the directions in which the draws move together, after their tails are cut
    inner = ((flat - middle) / width).clamp(-3, 3)
    root = torch.linalg.cholesky(torch.cov(inner.mT) + 1e-3 * torch.eye(flat.shape[1], dtype=flat.dtype))
    q = torch.distributions.MultivariateNormal(middle, scale_tril=0.7 * width.unsqueeze(1) * root)
    inside = ((flat > low) & (flat < high)).all(1)
    log_q = torch.where(inside, -(high - low).log().sum(), -torch.inf) if bounded else q.log_prob(flat)
    ratio = (log_q - vmap(prior.log_prob)(tree.clone(draws))).exp()
    mean, error = float(ratio.mean()), float(ratio.std() / len(ratio) ** 0.5)
    require(
        abs(mean - 1) < 5 * error + 0.005,
        f"exp(log_prob) integrates to about {1 / max(mean, 1e-9):.3f}, not to 1, or the draws are not from it: check the normalizer",
    )
    require(error < 0.1, f"the normalizer cannot be judged: the standard error is {error:.2f}")


def check_expectation(prior: Prior, like: Params) -> None:
    """Where the expected log density under a Gaussian has a closed form, it is the average over draws of that Gaussian."""
    generator = torch.Generator().manual_seed(1)

    def normal(shape: torch.Size) -> Tensor:
        """Standard normal numbers from the generator of this check."""
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    mean = {name: leaf + 0.3 * normal(leaf.shape) for name, leaf in like.items()}
    variance = {name: 0.05 + 0.1 * normal(leaf.shape).square() for name, leaf in like.items()}
    closed = prior.expected_log_prob(mean, variance, independent=True)
    if closed is None:
        return
    n = 4000
    drawn = {name: leaf + variance[name].sqrt() * normal(torch.Size([n, *leaf.shape])) for name, leaf in mean.items()}
    values = vmap(prior.log_prob)(drawn)
    error = abs(float(values.mean() - closed)) / float(values.std() / n**0.5)
    require(error < 5, f"expected_log_prob is {error:.1f} standard errors away from the average of log_prob over draws")


def check_prior(prior: Prior, like: Params | None = None, *, bounded: bool = False) -> None:
    """Hold a prior to its contract; raises an `AssertionError` that says what is wrong.

    `like` are weights in the shapes that the prior is for, a few numbers in all; by default a layer with two inputs and one output.
    `gradient` and `add_gradient` must be the slope of `log_prob`; draws must come from the density (Stein's identities), which must
    integrate to 1; `expected_log_prob`, where it is closed, must be the expectation; `units` must be positive. `bounded` is for
    priors whose density ends at a bound, where Stein's identities do not hold.

    >>> import dubito
    >>> check_prior(dubito.priors.Normal(scale=0.5))
    """
    if like is None:
        like = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in WEIGHTS.items()}
    like = {name: leaf.double() for name, leaf in {**like, **prior.parameters(like)}.items()}
    one = prior.sample(like, torch.Generator().manual_seed(0))
    for name, leaf in like.items():
        require(name in one, f"sample lacks {name!r}")
        require(one[name].shape == leaf.shape, f"a draw of {name!r} is {list(one[name].shape)}; expected {list(leaf.shape)}")
        require(one[name].dtype == leaf.dtype, f"a draw of {name!r} is {one[name].dtype}; expected {leaf.dtype}")
    again = prior.sample(like, torch.Generator().manual_seed(0))
    require(all(torch.equal(one[name], again[name]) for name in like), "sample with the same generator must give the same draw")
    units = prior.units(one)
    require(
        all((units[name] > 0).all() and units[name].shape == leaf.shape for name, leaf in like.items()),
        "units must be positive, in the shapes of the weights",
    )
    draws = draws_of(prior, like)
    check_gradient(prior, draws)
    if not bounded:
        check_stein(prior, draws)
    check_normalizer(prior, draws, bounded=bounded)
    check_expectation(prior, like)
