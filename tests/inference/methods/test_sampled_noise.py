"""A noise that is learned is sampled too: with the weights, or from its conditional between trajectories."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Gamma

import dubito
from dubito import HMC, MALA, MAMS, NUTS, Gaussian, Model
from dubito.diagnostics import ess_mean
from dubito.priors import Normal
from inference.methods.regression import SIGMAS, by_chain

CHAINS, PRIOR = 96, Gamma(3.0, 0.5)


def reference(x: Tensor, y: Tensor, prior: Gamma | None, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    r"""Of the log noise s on a grid: its values, their probabilities, and E[w | s]; the weights are integrated out in closed form.

    With :math:`N(y \mid Xw, \sigma^2)^{1/T} \propto \sigma^{n - n/T} N(y \mid Xw, T \sigma^2)` and X = U d V^T,

    .. math:: p(s) \propto \sigma^{n - n/T} N(y \mid 0, T (\sigma^2 I + X X^T))\, p_0(s)^{1/T}, \quad
              E[w \mid s] = V \frac{d}{d^2 + \sigma^2} U^T y
    """
    grid = torch.linspace(-3, 3, 4001, dtype=torch.float64)
    u, d, vh = torch.linalg.svd(x, full_matrices=True)
    along, n = (u.mT @ y).squeeze(1), len(y)
    spread = torch.cat([d.square(), torch.zeros(n - len(d), dtype=torch.float64)])
    variance = temperature * ((2 * grid).exp().unsqueeze(1) + spread)  # [grid, n]
    log_p = -0.5 * (variance.log() + along**2 / variance).sum(1) + n * grid - n * grid / temperature
    if prior is not None:
        log_p = log_p + (prior.log_prob((-2 * grid).exp()) - 2 * grid) / temperature
    means = (d * along[: len(d)] / (d.square() + (2 * grid).exp().unsqueeze(1))) @ vh
    return grid, log_p.softmax(0), means


CASES: dict[str, tuple[Any, Gamma | None, float]] = {
    "hmc, from its conditional": (HMC(units="posterior", chains=CHAINS, draws=20, burn_in=50), PRIOR, 2.0),
    "hmc, flat prior": (HMC(units="posterior", chains=CHAINS, draws=20, burn_in=50), None, 1.0),
    "hmc, jointly": (HMC(units="posterior", chains=CHAINS, draws=20, burn_in=50, gibbs=False), PRIOR, 2.0),
    "nuts, from its conditional": (NUTS(units="posterior", chains=CHAINS, draws=15, burn_in=40), PRIOR, 0.5),
    "nuts, jointly": (NUTS(units="posterior", chains=CHAINS, draws=15, burn_in=40, gibbs=False), None, 1.0),
    "mams, from its conditional": (MAMS(units="posterior", chains=CHAINS, draws=30, burn_in=50), None, 2.0),
    "mala, jointly": (MALA(chains=CHAINS, draws=30, burn_in=40, thin=5), PRIOR, 1.0),
}


@pytest.mark.parametrize("name", CASES)
def test_a_learned_noise_has_its_posterior(name):
    method, prior, temperature = CASES[name]
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(14, 2, generator=generator, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + 0.5 * torch.randn(14, 1, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    model = Model(nn.Linear(2, 1, bias=False).double(), Gaussian(prior=prior), Normal(scale=1.0))
    found = dubito.fit(model, method, (x, y), temperature=temperature)
    grid, p, means = reference(x, y, prior, temperature)
    mean = (p * grid).sum()
    variance = (p * (grid - mean) ** 2).sum()
    s, w = found.params["likelihood:log_scale"].view(CHAINS, -1), by_chain(found)[..., :2]
    for values, expected in (
        (s - mean, 0.0),
        ((s - mean) ** 2, float(variance)),
        *((w[..., k] - (p * means[:, k]).sum(), 0.0) for k in range(2)),
    ):
        count = float(ess_mean(values))
        assert count > 400
        assert float(values.mean()) == pytest.approx(expected, abs=SIGMAS * float(values.std()) / math.sqrt(count))
    if "conditional" in name and not isinstance(method, MAMS):
        assert float(ess_mean(s)) > 0.3 * s.numel(), "a draw from its conditional hardly remembers the last"


def test_a_noise_that_is_drawn_from_its_conditional_is_left_alone_by_the_gradient():
    """It has no unit of length, also after the others have been learned; the draws of it differ at every transition all the same."""
    states = []
    model = Model(nn.Linear(2, 1, bias=False).double(), Gaussian())
    data = (torch.randn(9, 2).double(), torch.randn(9, 1).double())
    method = HMC(units="posterior", chains=8, draws=10, burn_in=20)
    found = dubito.fit(model, method, data, callbacks=[lambda event: states.append(event.state)])
    assert states[-1].scale[-1] == 0
    assert (states[-1].scale[:-1] > 0).all()
    assert (found.params["likelihood:log_scale"].view(8, 10).diff(dim=1) != 0).all()
