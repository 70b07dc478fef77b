"""Comparisons of a posterior, or of draws, with a law that is known."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dubito.posteriors import Gaussian, Point, Posterior, Samples, Stochastic, Stored
from dubito.posteriors.diagnostics import ess_mean
from dubito.tensors import tree
from dubito.testing.regression import Law, Regression

SIGMAS = 4.5  # of the thirty moments in a check, none is further off in 99.98 % of correct runs; seeds are fixed besides
ENOUGH = 200  # effective draws that a check needs
MANY = 32  # chains from which on the error is told by the chains' averages
DRAWS = 20_000  # of forms that can be drawn from at will


def require(condition: object, message: str) -> None:
    """Raise an `AssertionError` with this message unless the condition holds."""
    if not bool(condition):
        raise AssertionError(message)


def errors(draws: Tensor, law: Law) -> tuple[Tensor, Tensor]:
    """First and second moments of draws [chains, n, P] less those of the law, [chains, n, K]; and the standard deviation of each
    moment over one independent draw of a Gaussian with this law, [K]."""
    away, covariance = draws - law.mean, law.covariance
    variance = covariance.diagonal()
    i, j = torch.triu_indices(len(law.mean), len(law.mean))
    spread = torch.cat([variance, variance[i] * variance[j] + covariance[i, j] ** 2]).sqrt()
    return torch.cat([away, away[..., i] * away[..., j] - covariance[i, j]], -1), spread


def check_draws(draws: Tensor, law: Law, *, bias: float = 0.0, least: float = ENOUGH, shared: bool = False) -> None:
    """Draws [chains, n, P] have the mean and covariance of a law, within what their effective sample size allows.

    `bias` is how far a moment may be off besides, in standard deviations of that moment over one draw. `shared` is for chains that
    are not independent, since they see the same mini-batches: the standard error is then that of the average over the chains.
    """
    require(draws.isfinite().all(), "the draws are not finite: the sampler has diverged")
    found, spread = errors(draws, law)
    if shared:
        found = found.mean(0, keepdim=True)
        error = found.std((0, 1)) / ess_mean(found).clamp(max=found.shape[1]).sqrt()
    elif len(draws) >= MANY:  # chains are independent, so their averages tell the error
        error = found.mean(1).std(0) / len(draws) ** 0.5
    else:
        error = spread / ess_mean(found).clamp(max=draws.shape[0] * draws.shape[1]).sqrt()
    count = (spread / error) ** 2  # of independent draws that would do as well
    require(
        float(count.min()) >= least,
        f"there are {float(count.min()):.0f} effective draws of some moment, too few to judge (at least {least}): the sampler "
        "hardly moves, or it needs more draws or more chains",
    )
    away = found.mean((0, 1)) / spread
    z = (away.abs() - bias).clamp_min(0) * count.sqrt()
    worst, size = int(z.argmax()), draws.shape[-1]
    name = (
        f"mean of weight {worst}"
        if worst < size
        else "covariance of weights {} and {}".format(*torch.triu_indices(size, size)[:, worst - size].tolist())
    )
    require(
        float(z.max()) < SIGMAS,
        f"the draws are not those of the known law: the {name} is off by {float(z.max()):.1f} standard errors (at most {SIGMAS}), "
        f"{float(away[worst]):.3f} standard deviations",
    )


def check_numbers(found: Law, law: Law, tolerance: float) -> None:
    """A mean and a covariance equal those of a law, to a tolerance in standard deviations of the posterior."""
    unit = law.covariance.diagonal().sqrt()
    unit = torch.where(unit > 0, unit, 1.0)
    mean = float(((found.mean - law.mean) / unit).abs().max())
    require(mean <= tolerance, f"the mean is off by {mean:.2g} standard deviations (at most {tolerance:g})")
    spread = float(((found.covariance - law.covariance) / torch.outer(unit, unit)).abs().max())
    require(
        spread <= tolerance, f"the covariance is off by {spread:.2g} of the standard deviations' products (at most {tolerance:g})"
    )


def by_chain(posterior: Samples) -> Tensor:
    """All draws as [chains, n, P], in float64."""
    flat = tree.flatten(posterior.params, stacked=True).double()
    return flat.view(posterior.chains, -1, flat.shape[1])


def law_of(posterior: Posterior) -> Law:
    """The mean and covariance that a posterior has over the weights: exactly where its form holds them, else by many draws."""
    if isinstance(posterior, Point):
        mean = tree.flatten(posterior.params)
        return Law(mean, mean.new_zeros(len(mean), len(mean)))
    if isinstance(posterior, Gaussian):
        return Law(tree.flatten(posterior.params), posterior.covariance.dense())
    rows = tree.flatten(posterior.sample(DRAWS, torch.Generator().manual_seed(3)), stacked=True)
    return Law(rows.mean(0), torch.cov(rows.mT))


def check_law(posterior: Any, law: Law, *, tolerance: float = 1e-6, bias: float = 0.0) -> None:
    """A posterior over the weights of a `Regression` has the mean and covariance of `law`.

    Draws (`Samples`) are compared by a test whose errors follow from their effective sample size, up to a known `bias`; forms with a
    mean and a covariance are compared to a `tolerance`, and so are the weights of a network with dropout, whose law has no
    covariance; all other forms are compared by many draws.
    """
    posterior = posterior.load() if isinstance(posterior, Stored) else posterior
    if isinstance(posterior, Samples) and float(law.covariance.abs().max()) > 0:
        adjusted = posterior.sampler.get("learning_rate") is None
        check_draws(by_chain(posterior), law, bias=bias, shared=not adjusted, least=ENOUGH if adjusted else ENOUGH / 2)
    elif isinstance(posterior, Stochastic):
        check_numbers(Law(tree.flatten(posterior.params), torch.zeros_like(law.covariance)), law, tolerance)
    elif isinstance(posterior, Samples):
        for row in by_chain(posterior).flatten(0, 1):
            check_numbers(Law(row, torch.zeros_like(law.covariance)), law, tolerance)
    elif isinstance(posterior, Point | Gaussian):
        check_numbers(law_of(posterior), law, tolerance)
    else:
        drawn = posterior.sample(DRAWS, torch.Generator().manual_seed(3))
        check_draws(tree.flatten(drawn, stacked=True).unsqueeze(1), law, bias=max(bias, tolerance))


def check_functions(problem: Regression, posterior: Any) -> None:
    """What a posterior predicts is what its weights say: means J m, variances diag(J C J^T), and the noise on top of them."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(5, problem.data[0].shape[1], generator=generator, dtype=torch.float64)
    p, design = posterior.predict(x), problem.design(x)
    posterior = posterior.load() if isinstance(posterior, Stored) else posterior
    if isinstance(posterior, Samples):
        flat = by_chain(posterior).flatten(0, 1)
        law, draws = Law(flat.mean(0), torch.cov(flat.mT, correction=0)), 0
    else:
        law, draws = law_of(posterior), len(p.means)
    mean = design @ law.mean
    variance = torch.einsum("ncp,pq,ncq->nc", design, law.covariance, design)
    if isinstance(posterior, Point | Gaussian | Samples) and draws <= 1:
        slack, share = 1e-8, 1e-6
    else:  # draws, of the prediction or of the weights
        slack, share = 5 / min(draws, DRAWS) ** 0.5, 7 / min(draws, DRAWS) ** 0.5
    gap = float(((p.f_mean - mean).abs() - slack * variance.sqrt()).max())
    require(gap <= 1e-7, f"predict: the mean of the function is off by {gap:.2g} from that of the weights")
    gap = float(((p.f_var - variance).abs() - share * variance).max())
    require(gap <= 1e-9, f"predict: the variance of the function is off by {gap:.2g} from that of the weights")
    noise = torch.tensor(problem.model.likelihood.scale, dtype=torch.float64) ** 2  # pyright: ignore
    aleatoric = (p.uncertainty.aleatoric - noise).abs().max()
    require(float(aleatoric) < 1e-8, f"predict: the aleatoric variance is not that of the noise: off by {float(aleatoric):.2g}")
    split = (p.uncertainty.epistemic - p.f_var).abs().max()
    require(float(split) < 1e-8, f"predict: the epistemic variance is not that of the function: off by {float(split):.2g}")
