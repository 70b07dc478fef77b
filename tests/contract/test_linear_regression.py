r"""Contract 2: on Bayesian linear regression, where the posterior is N(A^{-1} b, A^{-1}), every method is exact or has its known value.

A = X^T X / sigma^2 + I / s^2 and b = X^T y / sigma^2.

The known value of SWAG, the stationary covariance of SGD on a quadratic, is in tests/methods/test_swag.py; those of stability
training are in test_pi_model.py, test_temporal_ensembling.py and test_mean_teacher.py there.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dubito
from contract.methods import ULA
from dubito import MAP, Ensemble, Gaussian, Laplace, MCDropout, Model, NeuralLinear
from dubito.priors import Normal

NOISE, SCALE, RATE = 0.5, 0.8, 0.3


@pytest.fixture(scope="module")
def problem():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    x[:, 2] += 0.5 * x[:, 0]
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    y = y + NOISE * torch.randn(60, 1, generator=generator, dtype=torch.float64)
    model = Model(nn.Linear(3, 1, bias=False).double(), Gaussian(scale=NOISE), Normal(scale=SCALE))
    precision = x.mT @ x / NOISE**2 + torch.eye(3, dtype=torch.float64) / SCALE**2
    return model, x, y, precision, x.mT @ y / NOISE**2


def test_map_is_the_ridge_solution(problem):
    model, x, y, precision, b = problem
    found = dubito.fit(model, MAP(epochs=600, learning_rate=0.05), (x, y), batch_size=60)
    assert torch.allclose(found.params["weight"].mT, torch.linalg.solve(precision, b), atol=1e-8)
    p = found.predict(x)
    assert torch.allclose(p.uncertainty.total, torch.tensor(NOISE**2).double())


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_map_is_the_ridge_solution_with_mini_batches_learned_noise_and_temperature(problem, optimizer):
    """The optimum depends neither on the batches, nor on the temperature; learned noise is the root mean squared residual."""
    _, x, y, _, _ = problem
    model = Model(nn.Linear(3, 1, bias=False).double(), Gaussian(), Normal(scale=SCALE))
    rate = 0.02 if optimizer == "adam" else 0.01
    found = dubito.fit(model, MAP(epochs=600, learning_rate=rate, optimizer=optimizer), (x, y), batch_size=20, temperature=0.1)
    w, log_scale = found.params["weight"].mT, found.params["likelihood:log_scale"]
    noise = (y - x @ w).pow(2).mean().sqrt()
    assert torch.allclose(log_scale.exp(), noise, rtol=2e-3)
    exact = torch.linalg.solve(x.mT @ x / noise**2 + torch.eye(3) / SCALE**2, x.mT @ y / noise**2)
    assert torch.allclose(w, exact, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("vectorize", [True, False])
def test_members_of_an_ensemble_all_find_the_one_mode(problem, vectorize):
    """Its known bias: no spread, where the truth is A^{-1}."""
    model, x, y, precision, b = problem
    found = dubito.fit(model, Ensemble(MAP(epochs=600, learning_rate=0.05), 3, vectorize=vectorize), (x, y), batch_size=60)
    assert torch.allclose(found.params["weight"], torch.linalg.solve(precision, b).mT.expand(3, 1, 3), atol=1e-8)
    assert (found.predict(x).uncertainty.epistemic < 1e-12).all()


def test_dropout_is_ridge_with_a_data_dependent_penalty(problem):
    r"""Dropout at rate p on the inputs adds p/(1-p) diag(X^T X) / sigma^2 to A; the spread at x is p/(1-p) sum_j x_j^2 w_j^2."""
    model, x, y, precision, b = problem
    odds = RATE / (1 - RATE)
    exact = torch.linalg.solve(precision + odds * torch.diag((x.mT @ x).diag()) / NOISE**2, b)
    # repeated data average the noise of the masks within a step; prior and likelihood keep their proportion
    many = 100
    repeated = (x.repeat(many, 1), y.repeat(many, 1))
    found = dubito.fit(
        model, MCDropout(epochs=300, learning_rate=0.05, at="", rate=RATE), repeated, n_data=60, batch_size=60 * many
    )
    w = found.params["weight"].mT
    assert torch.allclose(w, exact, atol=0.01)
    for consistent in (True, False):
        p = found.predict(x, draws=20_000, consistent=consistent)
        spread = odds * (x**2 @ w**2)
        assert torch.allclose(p.uncertainty.epistemic, spread, rtol=0.1)
        assert torch.allclose(p.mean, x @ w, atol=4 * float(spread.max() / 20_000) ** 0.5)


@pytest.fixture(scope="module")
def trained(problem):
    """Trained to the last digits."""
    model, x, y, _, _ = problem
    return dubito.fit(model, MAP(epochs=2000, learning_rate=0.05), (x, y), batch_size=60)


# One output: the GGN of one layer is X^T X times a number, so the Kronecker form is exact, with the eigenvalues corrected or not.
EXACT = {
    "kronecker": Laplace(),
    "dense": Laplace("dense"),
    "low rank, all directions": Laplace("lowrank", rank=3),
    "corrected": Laplace(corrected=True),
    "the last layer is all": Laplace(subset="last_layer"),
    "all weights as a subnetwork": Laplace("dense", subnetwork=3),
    "hessian": Laplace("dense", "hessian"),
}


@pytest.mark.parametrize("batch_size", [60, 16])
@pytest.mark.parametrize("name", EXACT)
def test_laplace_is_exact(problem, trained, name, batch_size):
    model, x, y, precision, b = problem
    mean, covariance = torch.linalg.solve(precision, b), torch.linalg.inv(precision)
    found = dubito.fit(model, EXACT[name], (x, y), start=trained, batch_size=batch_size)
    assert torch.allclose(found.params["weight"].mT, mean, rtol=0, atol=1e-8)
    assert torch.allclose(found.covariance.dense(), covariance, rtol=1e-8, atol=1e-10)
    p = found.predict(x)
    assert torch.allclose(p.uncertainty.epistemic, (x @ covariance * x).sum(1, keepdim=True), rtol=1e-8)
    assert torch.allclose(p.uncertainty.aleatoric, torch.tensor(NOISE**2).double())
    # the evidence is exact as well: y ~ N(0, sigma^2 I + s^2 X X^T)
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(60).double(), NOISE**2 * torch.eye(60).double() + SCALE**2 * x @ x.mT
    )
    assert torch.allclose(found.log_evidence(), marginal.log_prob(y.squeeze(1)), rtol=1e-8)


def test_diagonal_laplace_has_the_known_bias_of_mean_field(problem, trained):
    """The inverse of the precision's diagonal: smaller than the diagonal of the inverse."""
    model, x, y, precision, b = problem
    found = dubito.fit(model, Laplace("diagonal"), (x, y), start=trained)
    assert torch.allclose(found.params["weight"].mT, torch.linalg.solve(precision, b), rtol=0, atol=1e-8)
    assert torch.allclose(found.covariance.dense(), torch.diag(1 / precision.diag()), rtol=1e-8, atol=1e-10)
    assert (1 / precision.diag() < torch.linalg.inv(precision).diag()).all()


@pytest.mark.parametrize("batch_size", [60, 16])
def test_neural_linear_is_exact_wherever_it_starts(problem, batch_size):
    model, x, y, precision, b = problem
    covariance = torch.linalg.inv(precision)
    found = dubito.fit(model, NeuralLinear(), (x, y), batch_size=batch_size)
    assert torch.allclose(found.mean.mT, covariance @ b, rtol=0, atol=1e-8)
    assert torch.allclose(NOISE**2 * found.root[0] @ found.root[0].mT, covariance, rtol=1e-8, atol=1e-10)
    p = found.predict(x)
    assert torch.allclose(p.mean, x @ covariance @ b, rtol=0, atol=1e-8)
    assert torch.allclose(p.uncertainty.epistemic, (x @ covariance * x).sum(1, keepdim=True), rtol=1e-8)
    drawn = found.sample(20_000, torch.Generator().manual_seed(0))["weight"].squeeze(1)
    assert torch.allclose(torch.cov(drawn.mT), covariance, rtol=0.1, atol=1e-4)


def test_the_documented_sampler_has_the_known_bias_of_its_step(problem):
    """ULA with step h has the stationary covariance (A (1 - h A / 4))^{-1}, and the exact mean."""
    model, x, y, precision, b = problem
    step, mean = 2e-3, torch.linalg.solve(precision, b)
    found = dubito.fit(model, ULA(step_size=step, n_draws=10_000, burn_in=200), (x, y), batch_size=60)
    w = found.params["weight"].squeeze(1)
    exact = torch.linalg.inv(precision @ (torch.eye(3, dtype=torch.float64) - step / 4 * precision))
    # about 10,000 h lambda / 4 independent draws in the slowest direction
    assert torch.allclose(w.mean(0), mean.squeeze(1), atol=0.01)
    assert torch.allclose(torch.cov(w.mT), exact, rtol=0.2, atol=3e-4)
    biased, right = torch.cov(w.mT).diag().sum(), torch.linalg.inv(precision).diag().sum()
    assert biased / right == pytest.approx(float(exact.diag().sum() / right), rel=0.1)
