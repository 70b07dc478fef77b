"""Bayesian linear regression for samplers: posteriors that are known, and moments that are compared with them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dubito import HMC, MALA, MAMS, MCLMC, NUTS, ULA, Gaussian, Metropolis, Model
from dubito.diagnostics import ess_mean
from dubito.priors import Normal
from dubito.tensors import tree
from dubito.tensors.tree import Params

SIGMAS = 4.5  # of about fifteen moments in a test, none is further off than this in 99.99 % of runs; seeds are fixed


@dataclass(frozen=True)
class Problem:
    """Bayesian linear regression: the posterior at temperature T is N(mean, T covariance)."""

    model: Model
    x: Tensor
    y: Tensor
    mean: Tensor
    covariance: Tensor

    def draws(self, n: int, temperature: float = 1.0) -> Params:
        root = torch.linalg.cholesky(temperature * self.covariance)
        z = torch.randn(n, len(self.mean), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        return {"weight": (self.mean + z @ root.mT).unsqueeze(1)}


def problem(columns: tuple[float, ...], correlation: float = 0.6, scale: float = 1.0) -> Problem:
    d, generator = len(columns), torch.Generator().manual_seed(1)
    mixed = (1 - correlation) * torch.eye(d, dtype=torch.float64) + correlation
    x = torch.randn(20, d, generator=generator, dtype=torch.float64) @ torch.linalg.cholesky(mixed).mT
    x = x * torch.tensor(columns, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + torch.randn(20, 1, generator=generator, dtype=torch.float64)
    precision = x.mT @ x + torch.eye(d, dtype=torch.float64) / scale**2
    torch.manual_seed(0)
    model = Model(nn.Linear(d, 1, bias=False).double(), Gaussian(scale=1.0), Normal(scale=scale))
    covariance = torch.linalg.inv(precision)
    return Problem(model, x, y, (covariance @ x.mT @ y).squeeze(1), covariance)


MILD, STIFF = problem((0.3, 0.4, 0.5), scale=0.7), problem((0.1, 0.5, 2.0, 22.0))


def by_chain(posterior: Any) -> Tensor:
    """All draws as [chains, n, P], in float64."""
    flat = tree.flatten(posterior.params, stacked=True).double()
    return flat.view(posterior.chains, -1, flat.shape[1])


def traced(posterior: Any, name: str) -> Tensor:
    return posterior.trace[name].view(posterior.chains, -1)


def moments(draws: Tensor, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """First and second moments of draws [chains, n, P], less what they should be, [chains, n, K]; and how far each spreads, [K]."""
    away, variance = draws - mean, covariance.diag()
    i, j = torch.triu_indices(len(mean), len(mean))
    spread = torch.cat([variance, variance[i] * variance[j] + covariance[i, j] ** 2]).sqrt()
    return torch.cat([away, away[..., i] * away[..., j] - covariance[i, j]], -1), spread


def assert_moments(draws: Tensor, mean: Tensor, covariance: Tensor, *, least: float = 500) -> None:
    """Of chains, by their effective sample sizes, of which there must be enough for a test; of chains of one draw, by their number."""
    errors, spread = moments(draws, mean, covariance)
    count = ess_mean(errors) if draws.shape[1] > 1 else torch.full_like(spread, len(draws))
    assert float(count.min()) > least, f"too few effective draws to tell: {float(count.min()):.0f}"
    z = errors.mean((0, 1)) / (spread / count.sqrt())
    assert float(z.abs().max()) < SIGMAS, f"off by {z.tolist()} standard errors"


# One of each, with a step that is not tuned and rejects a good deal.
FIXED: dict[str, Any] = {
    "metropolis": Metropolis(0.8, thin=1, tune=False),
    "ula": ULA(0.5, thin=1),
    "mala": MALA(0.6, thin=1, tune=False),
    "hmc": HMC(0.65, path_length=2.0, tune=False),
    "nuts": NUTS(0.65, tune=False),
    "mclmc": MCLMC(0.5, thin=1, tune=False),
    "mams": MAMS(1.1, path_length=2.0, tune=False),
}


def several(method: Any, n: int, transitions: int) -> Any:
    """A transition or a few of n chains, without tuning: where they start at exact draws, each is a draw of its own."""
    return replace(method, chains=n, draws=1, burn_in=0, thin=transitions, tune=False)
