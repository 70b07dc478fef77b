"""Products and convolutions, against Monte Carlo."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dubito import Gaussian, Laplace, Model, fit
from dubito.posteriors.predict.streamlined import Moments, Weight
from dubito.posteriors.predict.streamlined.moments import RULES


def test_products(check, noisy):
    check(torch.matmul, noisy(2, 3, 4, sd=0.3), noisy(2, 4, 5, sd=0.3))
    check(torch.bmm, torch.randn(2, 3, 4), noisy(2, 4, 5, sd=0.3))
    check(torch.baddbmm, noisy(2, 3, 5), noisy(2, 3, 4), torch.randn(2, 4, 5), alpha=0.5, beta=2)
    check(torch.addmm, torch.randn(5), noisy(3, 4), noisy(4, 5))
    check(lambda x, y: torch.einsum("bij,bjk->bik", x, y), noisy(2, 3, 4), noisy(2, 4, 5), name="matmul")
    found = RULES["einsum"]("bij,bjk->bik", noisy(2, 3, 4), torch.randn(2, 4, 5))
    assert found.var.shape == (2, 3, 5)
    with pytest.raises(ValueError, match="einsum"):
        RULES["einsum"]("bii->bi", noisy(2, 3, 3))


def test_directions_of_both_factors():
    """x times x itself, both along one direction: to first order what the direction does to the product."""
    mean, u = torch.randn(2, 3, 3), 0.02 * torch.randn(1, 2, 3, 3)
    x = Moments(mean, u.square().sum(0), u)
    found = RULES["matmul"](x, x)
    drawn = mean + torch.randn(50_000, 1, 1, 1) * u
    torch.testing.assert_close(found.var.sqrt(), (drawn @ drawn).std(0), rtol=0.03, atol=0.002)


def test_convolutions(check, noisy):
    weights = noisy(4, 3, 3, 3, kind=Weight), noisy(4, kind=Weight)
    check(F.conv2d, noisy(2, 3, 5, 5), *weights, padding=1)
    check(F.conv1d, torch.randn(2, 4, 6), noisy(4, 2, 3, kind=Weight), groups=2, stride=2)
    check(F.conv_transpose2d, noisy(2, 3, 3, 3), noisy(3, 2, 2, 2, kind=Weight), noisy(2, kind=Weight), stride=2)


@pytest.mark.parametrize("bias", [True, False])
def test_a_convolution_with_a_kronecker_posterior_is_exact(bias):
    """Weights of a kernel that are not independent, for certain inputs."""
    network = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, stride=2, bias=bias), nn.Flatten())
    model = Model(network, Gaussian(scale=1.0))
    smooth = torch.randn(40, 2, 1, 1) + 0.2 * torch.randn(40, 2, 6, 6)
    posterior = fit(model, Laplace(optimize_evidence=False, check=False), [(smooth, torch.randn(40, 27))], seed=0)
    x = smooth[:2]
    found = posterior.predict(x, "streamlined", rank=0).f_var.sqrt()
    truth = posterior.predict(x, "linearized").f_var.sqrt()  # exact, as the network is linear in its weights
    torch.testing.assert_close(found, truth, rtol=1e-3, atol=1e-5)
    marginal = F.conv2d(x * x, posterior.covariance.variance()["0.weight"], padding=1, stride=2).flatten(1).sqrt()
    assert float((marginal / truth - 1).abs().max()) > 0.2
