"""The rule for what has no rule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dubito.posteriors.predict.streamlined import Moments
from dubito.posteriors.predict.streamlined.program import NoRule
from dubito.posteriors.predict.streamlined.rules.sampled import by_draws


def test_moments_and_the_same_every_time(noisy):
    x = noisy(3, 4)
    found = by_draws(torch.erfinv, 2000, Moments(0.3 * torch.tanh(x.mean), 0.1 * x.var))
    again = by_draws(torch.erfinv, 2000, Moments(0.3 * torch.tanh(x.mean), 0.1 * x.var))
    assert torch.equal(found.var, again.var)
    drawn = torch.erfinv(0.3 * torch.tanh(x.mean) + (0.1 * x.var).sqrt() * torch.randn(100_000, 3, 4))
    torch.testing.assert_close(found.mean, drawn.mean(0), atol=1e-3, rtol=0.02)
    torch.testing.assert_close(found.var.sqrt(), drawn.std(0), atol=1e-3, rtol=0.1)


def test_directions_parts_and_slopes():
    u = torch.randn(2, 5)
    mean = torch.randn(5, requires_grad=True)
    first, second = by_draws(torch.split, 4000, Moments(mean.detach(), u.square().sum(0), u), [2, 3])
    torch.testing.assert_close(torch.cat([first.var, second.var]).sqrt(), u.square().sum(0).sqrt(), rtol=0.05, atol=0.01)
    found = by_draws(torch.square, 100, Moments(mean, torch.full((5,), 0.01)), adjoint=True)
    (slope,) = torch.autograd.grad(found.mean.sum(), mean)
    torch.testing.assert_close(slope, 2 * mean.detach())
    assert not found.var.requires_grad


def test_a_network_with_an_unknown_function(around):
    class Odd(nn.Module):
        def forward(self, x):
            return torch.special.i0e(x)

    posterior, x = around(nn.Sequential(nn.Linear(3, 8), Odd(), nn.Linear(8, 2))), torch.randn(4, 3)
    with pytest.raises(NoRule, match="special_i0e"):
        posterior.predict(x, "streamlined")
    truth = posterior.predict(x, "sampled", draws=20_000).f_var.sqrt()
    for how, options in (("streamlined", {"rank": 0}), ("adjoint", {})):
        found = posterior.predict(x, how, draws=400, **options).f_var.sqrt()
        assert float((found / truth).mean()) == pytest.approx(1, abs=0.05)
