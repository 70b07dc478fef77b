r"""Every sampler with an accept step leaves the posterior of a small network as it is: two tests by simulation, exact at any length.

Weights, noise and data are drawn from the model, so the weights are an exact draw of their posterior given the data, and so must be
whatever a sampler makes of them.

Geweke (2004): over many data sets, the weights after some transitions are draws of the prior again, and the data are still as the
likelihood has them, given these weights.

Ranks (Cook, Gelman & Rubin 2006; Gandy & Scott 2020): a stationary chain of L + 1 draws is laid through the weights that made the data;
of a reversible sampler, M transitions one way and L - M the other, with M uniform. Then each of the L + 1 ranks is equally likely.

Neither needs a burn-in, or cares how slow a chain is. Quantities with known laws are held against these by chi-square tests, five in
each test, at 0.1 % for all five together.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Gamma
from torch.func import vmap

from dubito import HMC, MALA, MAMS, NUTS, Gaussian, Metropolis, Model
from dubito.inference.log_density import Density
from dubito.inference.method import Start
from dubito.likelihoods import NOISE
from dubito.model import Target
from dubito.tensors import tree
from dubito.tensors.tree import Params

LEVEL, LENGTH, REPEATS = 1e-3, 7, 10_000
X = torch.linspace(-2, 2, 6, dtype=torch.float64).unsqueeze(1)
PRIOR = Gamma(torch.tensor(4.0, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64))

SAMPLERS: dict[str, Any] = {
    "metropolis": Metropolis(0.3, thin=15),
    "mala": MALA(0.3, thin=8),
    "hmc": HMC(0.25, path_length=1.2, jitter=0.3, thin=3),
    "hmc, noise with the weights": HMC(0.25, path_length=1.2, jitter=0.3, gibbs=False, thin=3),
    "nuts": NUTS(0.25, 6, thin=2),
    "nuts, noise with the weights": NUTS(0.25, 6, gibbs=False, thin=2),
    "mams": MAMS(0.3, path_length=1.0, thin=3),
    "none": HMC(0.25, path_length=1.2, jitter=0.3, thin=3, adjusted=False),
}


class Many(Density):
    """A posterior of its own for every chain: the targets are [C, n, 1]."""

    def __init__(self, target: Target, y: Tensor, like: Params):
        super().__init__(target, [(X, y)], like, target.model.buffers())
        self.seen = len(X)

    def _each(self, one: Any, position: Tensor) -> Tensor:
        if not isinstance(one, partial):
            return super()._each(one, position)
        x, y = one.args[0]
        return vmap(lambda row, y: one.func((x, y), row))(position, y)

    def outputs(self, position: Tensor):
        assert self.chunks is not None
        for f, y in super().outputs(position):
            yield f - y, torch.zeros_like(y[0])


def network() -> Model:
    torch.manual_seed(0)
    return Model(nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1)).double(), Gaussian(prior=PRIOR))


def predicted(model: Model, params: Params, x: Tensor) -> Tensor:
    with torch.no_grad():
        return vmap(lambda one: model.forward(one, x, model.buffers())[0])(params)


def drawn(model: Model, n: int, generator: torch.Generator) -> tuple[Params, Tensor]:
    """Weights and noise from the prior, leaves [n, ...], and data from each of these."""
    wide = {name: p.detach().expand(n, *p.shape).clone() for name, p in model.network.named_parameters()}
    params = model.prior.sample(wide, generator)
    precision = torch._standard_gamma(PRIOR.concentration.expand(n, 1).contiguous(), generator=generator) / PRIOR.rate
    params[NOISE] = -0.5 * precision.log()
    f = predicted(model, params, X)
    return params, f + precision.rsqrt().unsqueeze(1) * torch.randn(f.shape, dtype=f.dtype, generator=generator)


def quantities(density: Density, position: Tensor) -> Tensor:
    """Of positions [C, P]: the log density, the noise, a prediction, a product of weights across layers, and a length, [C, 5]."""
    value, params = density.values(position), density.unflatten(position)
    f = predicted(density.target.model, params, X[:1] + 2.3).flatten()
    product = params["0.weight"][:, 0, 0] * params["2.weight"][:, 0, 0]
    columns = value.log_likelihood + value.log_prior, params[NOISE][:, 0], f, product, position.square().sum(1)
    return torch.stack(columns, 1)


class Run(NamedTuple):
    first: Tensor  # [REPEATS, P], what the data were made of
    path: Tensor  # [LENGTH, 2, REPEATS, P]: one chain each way
    density: Density
    y: Tensor  # [REPEATS, n, 1]
    accepted: float


@cache
def run(name: str) -> Run:
    method = replace(SAMPLERS[name], chains=2 * REPEATS, draws=LENGTH, burn_in=0, tune=False)
    model, generator = network(), torch.Generator().manual_seed(1)
    params, y = drawn(model, REPEATS, generator)
    twice = {name: torch.cat([leaf, leaf]) for name, leaf in params.items()}
    target, one = Target(model, len(X)), tree.select(params, 0)
    state: Any = method.init(target, Start(one, model.buffers(), given=True, draws=twice), (X, y[0]), generator, steps=LENGTH)
    state.density = density = Many(target, torch.cat([y, y]), one)
    path, accepted = [], []
    for _ in range(LENGTH):
        state, _ = method.step(target, state, [], generator)
        path.append(state.position)
        accepted.append(state.notes["accepted"].mean())
    both = torch.stack(path).unflatten(1, (2, REPEATS))
    return Run(tree.flatten(params, stacked=True), both, density, y, float(torch.stack(accepted).mean()))


def ranks(made: Run) -> Tensor:
    """The ranks [REPEATS, 5] of what the data were made of."""
    generator = torch.Generator().manual_seed(2)
    twice = torch.cat([made.first, made.first])
    first = quantities(made.density, twice)[:REPEATS]
    path = torch.stack([quantities(made.density, both.flatten(0, 1)) for both in made.path]).unflatten(1, (2, REPEATS))
    before = torch.randint(LENGTH + 1, (REPEATS, 1), generator=generator)
    place = torch.arange(LENGTH).view(-1, 1, 1)
    counted = torch.stack([place < before, place < LENGTH - before], 1)  # of each way, the transitions that are in the chain
    dice = torch.rand(path.shape, generator=generator, dtype=torch.float64)  # chains that have not moved are level
    level = (path == first) & (dice < torch.rand(first.shape, generator=generator, dtype=torch.float64))
    return (((path < first) | level) & counted).sum((0, 1))


def shares(made: Run) -> Tensor:
    """Of weights, noise and residuals after all transitions, one way: their distribution functions, [REPEATS, 5], each uniform."""
    last = made.path[-1, 0]
    params = made.density.unflatten(last)
    precision = (-2 * params[NOISE][:, 0]).exp()
    squares = (made.y - predicted(made.density.target.model, params, X)).square().sum((1, 2))
    weights = [params["0.weight"][:, 0, 0], params["2.weight"][:, 0, 0], params["2.bias"][:, 0]]
    noise = torch.special.gammainc(PRIOR.concentration.expand_as(precision), PRIOR.rate * precision)
    residual = torch.special.gammainc(torch.full_like(precision, len(X) / 2), 0.5 * precision * squares)
    return torch.stack([*(torch.special.ndtr(weight) for weight in weights), noise, residual], 1)


def probabilities(found: Tensor, bins: int) -> Tensor:
    """Of values 0 ... bins - 1 as uneven as these, if all were equally likely, for each column: chi-square tests."""
    counts = torch.stack([(found == value).sum(0) for value in range(bins)]).double()
    expected = len(found) / bins
    statistic = ((counts - expected) ** 2 / expected).sum(0)
    return torch.special.gammaincc(torch.full_like(statistic, (bins - 1) / 2), statistic / 2)


ADJUSTED = [name for name in SAMPLERS if name != "none"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ADJUSTED)
def test_draws_of_all_posteriors_together_are_draws_of_the_prior(name):
    made = run(name)
    moved = (made.path[-1, 0] - made.first).square().mean(0) / (2 * made.first.var(0))  # 1 for independent draws of the prior
    assert 0.1 < made.accepted < 0.97, "the accept step matters"
    assert float(moved.min()) > 0.1, "and the chains move"
    p = probabilities((shares(made) * 20).long(), 20)
    assert float(p.min()) > LEVEL / 5, f"not the prior: p = {p.tolist()}"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ADJUSTED if name != "mams"])  # whose chains all make the same number of steps
def test_ranks_of_the_truth_are_uniform(name):
    p = probabilities(ranks(run(name)), LENGTH + 1)
    assert float(p.min()) > LEVEL / 5, f"ranks are not uniform: p = {p.tolist()}"


@pytest.mark.slow
def test_both_tell_where_the_accept_step_is_missing():
    """They can fail: the same HMC, of which nothing is rejected."""
    made = run("none")
    assert float(probabilities((shares(made) * 20).long(), 20).min()) < 1e-12
    assert float(probabilities(ranks(made), LENGTH + 1).min()) < 1e-12
