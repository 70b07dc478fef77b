"""The evidence where it is known in closed form, and its slopes everywhere else."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import dubito
from curvature.networks import DOUBLE, numbers
from dubito import Categorical, Gaussian, Laplace, Model
from dubito.curvature.evidence import groups, maximize
from dubito.priors import Normal

STRUCTURES = {
    "dense": Laplace("dense"),
    "diagonal": Laplace("diagonal"),
    "kronecker": Laplace("kronecker"),
    "corrected": Laplace("kronecker", corrected=True),
    "lowrank": Laplace("lowrank", rank=6),
    "subnetwork": Laplace("dense", subnetwork=7, subnetwork_by="magnitude"),
    "last layer": Laplace("kronecker", subset="last_layer"),
    "hessian": Laplace("dense", "hessian", clip=True),
}
every = pytest.mark.parametrize("name", STRUCTURES)


def fitted(model: Model, method: Laplace, data, **options):
    from dataclasses import replace

    if isinstance(data, tuple):
        options.setdefault("start", model.parameters(data[1]))  # a noise that is given, where it is learned
    return dubito.fit(model, replace(method, check=False, optimize_evidence=False), data, **options)


# --- linear regression -----------------------------------------------------------------------------------------------


class Linear:
    """Bayesian linear regression, by the book: outputs one by one, the bias as an input that is 1."""

    def __init__(self, n: int = 9, inputs: int = 3, outputs: int = 2, bias: bool = True):
        self.x, self.y = numbers(n, inputs), numbers(n, outputs)
        self.bias = bias
        self.design = torch.cat([self.x, torch.ones(n, 1)], 1) if bias else self.x

    def posterior(self, prior: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Means [C, D] and covariances [C, D, D] for prior precisions [C, D] and noise [C]."""
        precision = self.design.mT @ self.design / noise.reshape(-1, 1, 1) ** 2 + torch.diag_embed(prior)
        cov = torch.linalg.inv(precision)
        return (cov @ (self.design.mT @ self.y).mT.unsqueeze(-1) / noise.reshape(-1, 1, 1) ** 2).squeeze(-1), cov

    def evidence(self, prior: Tensor, noise: Tensor, temperature: float = 1.0) -> Tensor:
        total, n = torch.zeros((), dtype=DOUBLE), len(self.y)
        for y, p, s in zip(self.y.mT, prior, noise, strict=True):
            cov = (self.design / p) @ self.design.mT + s**2 * torch.eye(n, dtype=DOUBLE)
            total = total + MultivariateNormal(torch.zeros(n, dtype=DOUBLE), temperature * cov).log_prob(y)
            # N(y; f, s^2)^(1/T) is N(y; f, T s^2) but for a constant
            constant = 2 * math.pi * s**2
            total = total + n / 2 * (math.log(temperature * constant) - math.log(constant) / temperature)
        return total

    def start(self, prior: Tensor, noise: Tensor):
        mean, _ = self.posterior(prior, noise)
        return {"weight": mean[:, :3], **({"bias": mean[:, 3].clone()} if self.bias else {})}

    def net(self) -> nn.Module:
        return nn.Linear(3, self.y.shape[1], bias=self.bias).double()

    def dense(self, cov: Tensor) -> Tensor:
        """The covariance of weights, then biases."""
        whole, (c, d) = torch.block_diag(*cov), cov.shape[:2]
        order = torch.arange(c * d).reshape(c, d)
        order = torch.cat([order[:, :3].flatten(), order[:, 3:].flatten()])
        return whole[order][:, order]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("noise", ["fixed", "one", "each"])
@pytest.mark.parametrize("prior", ["one", "apart"])
@pytest.mark.parametrize("structure", ["dense", "kronecker", "lowrank", "corrected"])
def test_linear_regression_is_exact(structure, prior, noise, bias):
    problem = Linear(bias=bias)
    scales = torch.tensor([0.4, 0.9], dtype=DOUBLE) if noise == "each" else torch.tensor([0.4, 0.4], dtype=DOUBLE)
    likelihood = {"fixed": Gaussian(scale=0.4), "one": Gaussian(), "each": Gaussian(outputs=2)}[noise]
    scale = Normal(scale=0.7) if prior == "one" else Normal(scale={"weight": 0.7, "bias": 2.0})
    precisions = torch.full((2, problem.design.shape[1]), 0.7**-2, dtype=DOUBLE)
    if prior == "apart" and bias:
        precisions[:, 3] = 2.0**-2
    start = problem.start(precisions, scales)
    if noise != "fixed":
        start["likelihood:log_scale"] = scales.log()[: 2 if noise == "each" else 1]
    method = Laplace("kronecker", corrected=True) if structure == "corrected" else Laplace(structure, rank=8)
    model = Model(problem.net(), likelihood, scale)
    if structure == "corrected" and noise == "each":
        with pytest.raises(ValueError, match="for one learned noise"):
            fitted(model, method, (problem.x, problem.y), start=start)
        return
    posterior = fitted(model, method, (problem.x, problem.y), start=start, batch_size=4)
    _, cov = problem.posterior(precisions, scales)
    torch.testing.assert_close(posterior.covariance.dense(), problem.dense(cov), rtol=1e-10, atol=1e-12)
    for name in ("weight", "bias") if bias else ("weight",):
        assert torch.equal(posterior.params[name], start[name])
    torch.testing.assert_close(posterior.log_evidence(), problem.evidence(precisions, scales), rtol=1e-10, atol=1e-10)
    x = numbers(4, 3)
    design = torch.cat([x, torch.ones(4, 1)], 1) if bias else x
    spread = torch.einsum("nd,cde,ne->nc", design, cov, design)
    torch.testing.assert_close(posterior.predict(x).f_var, spread, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("structure", ["dense", "kronecker", "lowrank"])
@pytest.mark.parametrize("temperature", [0.3, 2.0])
def test_linear_regression_at_a_temperature(structure, temperature):
    problem = Linear()
    precisions, noise = torch.full((2, 4), 1.7, dtype=DOUBLE), torch.full((2,), 0.4, dtype=DOUBLE)
    model = Model(problem.net(), Gaussian(), Normal(scale=1.7**-0.5))
    start = {**problem.start(precisions, noise), "likelihood:log_scale": noise[:1].log()}
    posterior = fitted(model, Laplace(structure, rank=8), (problem.x, problem.y), start=start, temperature=temperature)
    exact = temperature * problem.dense(problem.posterior(precisions, noise)[1])
    torch.testing.assert_close(posterior.covariance.dense(), exact, rtol=1e-10, atol=1e-12)
    expected = problem.evidence(precisions, noise, temperature)
    torch.testing.assert_close(posterior.log_evidence(), expected, rtol=1e-10, atol=1e-10)
    cold = fitted(model, Laplace(structure, rank=8), (problem.x, problem.y), start=start)
    torch.testing.assert_close(cold.log_evidence(temperature=temperature), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(cold.with_prior(temperature=temperature).covariance.dense(), exact, rtol=1e-10, atol=1e-12)


def test_a_precision_of_every_weight():
    problem, precisions = Linear(), torch.rand(2, 4, dtype=DOUBLE) + 0.3
    noise = torch.tensor([0.4, 0.9], dtype=DOUBLE)
    start = {**problem.start(precisions, noise), "likelihood:log_scale": noise.log()}
    leaves = {"weight": precisions[:, :3], "bias": precisions[:, 3]}
    for structure in ("dense", "lowrank"):
        likelihood = Gaussian(outputs=2) if structure == "dense" else Gaussian(scale=(0.4, 0.9))
        model = Model(problem.net(), likelihood, Normal(scale=1.0))
        posterior = fitted(model, Laplace(structure, rank=8), (problem.x, problem.y), start=start)
        torch.testing.assert_close(posterior.log_evidence(leaves), problem.evidence(precisions, noise), rtol=1e-10, atol=1e-10)
        exact = problem.dense(problem.posterior(precisions, noise)[1])
        torch.testing.assert_close(posterior.with_prior(leaves).covariance.dense(), exact, rtol=1e-10, atol=1e-12)


def test_the_best_precision_and_noise_of_linear_regression_maximise_the_exact_evidence():
    """MacKay's evidence procedure, in the plane of (precision, noise): the weights are at their mode at the optimum too."""
    torch.manual_seed(3)
    problem = Linear(n=40, outputs=1)
    problem.y = problem.design @ torch.tensor([[1.0], [-2.0], [0.5], [0.3]], dtype=DOUBLE) + 0.3 * numbers(40, 1)
    logs = torch.zeros(2, dtype=DOUBLE, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [logs], max_iter=200, tolerance_grad=1e-12, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = -_evidence(problem, logs)
        value.backward()
        return value

    optimizer.step(loss)
    prior, noise = logs.detach().exp()
    precisions = prior.expand(1, 4).clone()
    start = {**problem.start(precisions, noise.reshape(1)), "likelihood:log_scale": noise.log().reshape(1)}
    for structure in ("dense", "kronecker"):
        model = Model(problem.net(), Gaussian(), Normal())
        method = Laplace(structure, optimize_noise=True, prior_groups="one")
        posterior = dubito.fit(model, method, (problem.x, problem.y), start=start)
        # around the mode of the exact optimum, the evidence of the Laplace approximation is stationary at the same place
        assert posterior.prior_precision["weight"].item() == pytest.approx(prior.item(), rel=2e-3)
        assert posterior.params["likelihood:log_scale"].exp().item() == pytest.approx(noise.item(), rel=2e-3)
        torch.testing.assert_close(posterior.log_evidence(), _evidence(problem, logs.detach()), rtol=0, atol=1e-4)


def _evidence(problem: Linear, logs: Tensor) -> Tensor:
    prior, noise = logs.exp()
    cov = problem.design @ problem.design.mT / prior + noise**2 * torch.eye(len(problem.y), dtype=DOUBLE)
    return MultivariateNormal(torch.zeros(len(problem.y), dtype=DOUBLE), cov).log_prob(problem.y[:, 0])


# --- any network -----------------------------------------------------------------------------------------------------


def problem(likelihood, prior=None) -> tuple[Model, tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.LayerNorm(3), nn.Linear(3, 2)).double()
    x = numbers(10, 2)
    y = torch.randint(2, (10,)) if likelihood.discrete else numbers(10, 2)
    return Model(net, likelihood, prior or Normal(scale=1.0)), (x, y)


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(), Gaussian(outputs=2)], ids=["classes", "one", "each"])
@every
def test_the_evidence_is_what_it_says(name, likelihood):
    """Log likelihood minus half of: log det of the precision relative to the prior's, and the squared size of the weights."""
    model, (x, y) = problem(likelihood)
    if name == "corrected" and likelihood == Gaussian(outputs=2):
        return
    posterior = fitted(model, STRUCTURES[name], (x, y), batch_size=4)
    noisy = not likelihood.discrete and name not in ("hessian",) and not (name == "lowrank" and likelihood.outputs == 2)
    prior = {n: torch.tensor(0.5 + 0.3 * i, dtype=DOUBLE) for i, n in enumerate(posterior.prior_precision)}
    if name == "corrected":
        prior = {n: torch.tensor(0.5 if n.startswith("0") else 1.1, dtype=DOUBLE) for n in posterior.prior_precision}
    noise = torch.tensor([0.6, 1.4], dtype=DOUBLE)[: len(posterior.params.get("likelihood:log_scale", []))] if noisy else None
    other = posterior.with_prior(prior, noise=noise, temperature=0.7)
    score = model.log_likelihood(other.params, (x, y), model.buffers())[0].sum()
    cov, moves = other.covariance.dense(), other.covariance.dense().diag() > 0
    shift = torch.cat([prior[n].expand(s).flatten() for n, s in other.covariance.shapes.items()])[moves]
    away = torch.cat([posterior.params[n].flatten() for n in other.covariance.shapes])[moves]
    occam = -torch.linalg.slogdet(cov[moves][:, moves] / 0.7)[1] - shift.log().sum()
    exact = score / 0.7 - 0.5 * (occam + (shift * away**2).sum() / 0.7)
    if name == "lowrank":  # a bound, below that of the Gaussian
        assert exact - 1 < other.log_evidence() <= exact
        exact = other.log_evidence()
    torch.testing.assert_close(other.log_evidence(), exact)
    torch.testing.assert_close(posterior.log_evidence(prior, noise=noise, temperature=0.7), exact)
    if noise is not None:
        torch.testing.assert_close(other.params["likelihood:log_scale"], noise.log())


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(), Gaussian(outputs=2)], ids=["classes", "one", "each"])
@pytest.mark.parametrize("by", ["layer", "parameter"])
@every
def test_slopes_of_the_evidence(name, by, likelihood):
    if name == "corrected" and (by == "parameter" or likelihood == Gaussian(outputs=2)):
        return
    model, data = problem(likelihood)
    posterior = fitted(model, STRUCTURES[name], data)
    members = groups(tuple(posterior.covariance.shapes), by)
    noisy = posterior._fitted.noisy

    def value(logs: Tensor, noise: Tensor, temperature: Tensor) -> Tensor:
        values = logs.exp().unbind()
        prior = {n: p for p, names in zip(values, members.values(), strict=True) for n in names}
        return posterior.log_evidence(prior, noise=noise.exp() if noisy else None, temperature=temperature.exp())

    start = torch.linspace(-0.4, 0.6, len(members), dtype=DOUBLE).requires_grad_()
    noise = torch.linspace(-0.3, 0.3, len(posterior._scale), dtype=DOUBLE).requires_grad_()
    temperature = torch.tensor(0.2, dtype=DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(value, (start, noise, temperature), atol=1e-5)


@pytest.mark.parametrize("by", ["one", "layer", "parameter"])
@every
def test_the_best_hyperparameters_are_a_maximum(name, by):
    if name == "corrected" and by == "parameter":
        return
    model, data = problem(Gaussian())
    posterior = fitted(model, STRUCTURES[name], data)
    best = posterior.optimized(by=by)
    value = best.log_evidence()
    assert value >= posterior.log_evidence() - 1e-9
    if by == "parameter":
        assert len({float(p) for p in best.prior_precision.values()}) > 1
    for names in groups(tuple(best.covariance.shapes), by).values():
        for factor in (0.8, 1.25):
            prior = {**best.prior_precision, **{n: best.prior_precision[n] * factor for n in names}}
            flat = 1e-4 if not 1e-9 < float(best.prior_precision[names[0]]) < 1e9 else 0.0  # at an end of what is searched
            assert best.log_evidence(prior) <= value + 1e-9 + flat
    if best._fitted.noisy:
        sigma = best.params["likelihood:log_scale"].exp()
        for factor in (0.9, 1.1):
            assert best.log_evidence(noise=sigma * factor) < value
    refitted = fitted(model, STRUCTURES[name], data, start=best.params).with_prior(best.prior_precision)
    torch.testing.assert_close(refitted.log_evidence(), value)


def test_only_what_is_asked_for_is_changed():
    model, data = problem(Gaussian())
    posterior = fitted(model, STRUCTURES["dense"], data)
    prior, noise = posterior.optimized(noise=False), posterior.optimized(prior=False)
    assert torch.equal(prior.params["likelihood:log_scale"], posterior.params["likelihood:log_scale"])
    assert prior.prior_precision["0.weight"] != 1
    assert noise.prior_precision == posterior.prior_precision
    assert not torch.equal(noise.params["likelihood:log_scale"], posterior.params["likelihood:log_scale"])
    assert all(torch.equal(prior.params[n], posterior.params[n]) for n in model.parameters()), "the weights stay"
    assert prior.log_evidence() > posterior.log_evidence()
    found, scale, value = maximize(posterior._fitted, posterior.covariance, posterior._scale, by="one", prior=False, noise=False)
    assert found == posterior.prior_precision
    assert torch.equal(scale, posterior._scale)
    torch.testing.assert_close(value, posterior.log_evidence())


def test_groups():
    names = ("weight", "0.weight", "0.bias", "a.0.weight")
    assert groups(names, "one") == {"": names}
    assert list(groups(names, "layer").values()) == [("weight",), ("0.weight", "0.bias"), ("a.0.weight",)]
    assert list(groups(names, "parameter").values()) == [(name,) for name in names]


def test_names_that_are_part_of_other_names_are_told_apart():
    """'0.weight' is found in '10.weight', too."""
    net = nn.Sequential(*[nn.Linear(2, 2) if i % 2 == 0 else nn.Tanh() for i in range(11)]).double()
    data = numbers(12, 2), numbers(12, 2)
    posterior = fitted(Model(net, Gaussian(scale=0.5)), STRUCTURES["diagonal"], data)
    precision = {name: torch.tensor(0.5 + i, dtype=DOUBLE) for i, name in enumerate(posterior.prior_precision)}
    found = posterior.with_prior(precision).prior_precision
    assert found == precision
    exact, _, value = maximize(posterior._fitted, posterior.covariance, posterior._scale, by="parameter", prior=True, noise=False)
    best = posterior.optimized(by="parameter")
    assert best.prior_precision == exact
    torch.testing.assert_close(best.log_evidence(), value)


@pytest.mark.parametrize("prior", [Normal(scale=0.6), Normal(scale={"weight": 0.6, "": 1.5})], ids=["one", "apart"])
@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(), Gaussian(outputs=2)], ids=["classes", "one", "each"])
@every
def test_another_prior_afterwards_equals_a_fit_with_it(name, likelihood, prior):
    if name == "corrected" and (likelihood == Gaussian(outputs=2) or isinstance(prior.scale, dict)):
        return
    model, data = problem(likelihood)
    posterior = fitted(model, STRUCTURES[name], data, batch_size=5)
    changed = {n: prior.scale_of(n) ** -2 for n in posterior.prior_precision}
    start = posterior.params
    if posterior._fitted.noisy:
        start = {**start, "likelihood:log_scale": torch.tensor([0.3, -0.2], dtype=DOUBLE)[: len(posterior._scale)]}
    fresh = fitted(Model(model.network, likelihood, prior), STRUCTURES[name], data, batch_size=5, start=start)
    noise = start["likelihood:log_scale"].exp() if posterior._fitted.noisy else None
    other = posterior.with_prior(changed, noise=noise)
    torch.testing.assert_close(other.covariance.dense(), fresh.covariance.dense(), rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(other.log_evidence(), fresh.log_evidence())
    torch.testing.assert_close(other.prior_precision, {n: p.double() for n, p in fresh.prior_precision.items()})
    x = numbers(3, 2)
    torch.testing.assert_close(other.predict(x).mean, fresh.predict(x).mean)


def test_settings_that_make_no_sense():
    model, data = problem(Categorical())
    posterior = fitted(model, STRUCTURES["dense"], data)
    for wrong in (0.0, -1.0, {"0": -2.0}):
        with pytest.raises(ValueError, match="prior precisions must be positive"):
            posterior.with_prior(wrong)
    with pytest.raises(ValueError, match="noise is not learned by this likelihood"):
        posterior.with_prior(noise=0.1)
    by_hand = dubito.posteriors.Gaussian.diagonal(model, posterior.params, posterior.covariance.variance())
    for call in (by_hand.log_evidence, by_hand.optimized, lambda: by_hand.with_prior(1.0), lambda: by_hand.prior_precision):
        with pytest.raises(ValueError, match="has no curvature and prior to change"):
            call()


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_the_search_over_a_large_block_by_its_histogram_is_the_search_over_all_of_it(structure, monkeypatch):
    from dubito.curvature import evidence

    net = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 3)).double()
    x = numbers(50, 20)
    model, data = Model(net, Categorical(), Normal()), (x, torch.arange(50) % 3)
    found = []
    for large in (2**18, 10):
        monkeypatch.setattr(evidence, "LARGE", large)
        found.append(dubito.fit(model, Laplace(structure, check=False), data))
    exact, quick = found
    torch.testing.assert_close(quick.log_evidence(), exact.log_evidence(), rtol=1e-7, atol=0.0)
    for name, leaf in exact.prior_precision.items():
        torch.testing.assert_close(quick.prior_precision[name], leaf, rtol=1e-3, atol=0.0)
