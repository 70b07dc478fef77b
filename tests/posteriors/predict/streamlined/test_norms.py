"""Norms, against Monte Carlo."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dubito.posteriors.predict.streamlined import Moments, Weight
from dubito.posteriors.predict.streamlined.moments import RULES


@pytest.mark.parametrize("shape", [(8,), (3, 4)])
def test_layer_norm(check, noisy, shape):
    check(F.layer_norm, noisy(2, *shape), shape)
    check(F.layer_norm, noisy(2, *shape), shape, noisy(*shape, kind=Weight), noisy(*shape, kind=Weight))
    check(F.layer_norm, noisy(2, *shape), shape, torch.rand(shape), None)


def test_certain_input_with_random_scale(check, noisy):
    check(F.layer_norm, torch.randn(2, 6), (6,), noisy(6, kind=Weight), noisy(6, kind=Weight))
    check(F.group_norm, torch.randn(2, 4, 3), 2, noisy(4, kind=Weight), None)


def test_layer_norm_of_few_numbers_needs_the_whole_jacobian(noisy):
    x = noisy(1, 3, sd=0.05)
    found = RULES["layer_norm"](x, (3,))
    alone = x.var / x.mean.var(-1, correction=0, keepdim=True)
    assert (found.var < 0.8 * alone).any()


def test_rms_norm(check, noisy):
    check(F.rms_norm, noisy(2, 8), (8,))
    check(F.rms_norm, noisy(2, 8), (8,), noisy(8, kind=Weight))


def test_group_and_instance_norm(check, noisy):
    check(F.group_norm, noisy(2, 4, 3, 3), 2, noisy(4, kind=Weight), noisy(4, kind=Weight))
    check(F.instance_norm, noisy(2, 3, 4, 3), None, None, noisy(3, kind=Weight), None)


def test_batch_norm_by_running_statistics(check, noisy):
    mean, var = torch.randn(3), torch.rand(3) + 0.5
    check(F.batch_norm, noisy(2, 3, 4), mean, var, noisy(3, kind=Weight), noisy(3, kind=Weight))
    check(F.batch_norm, noisy(2, 3), mean, var)
    with pytest.raises(ValueError, match="statistics of the batch"):
        RULES["batch_norm"](noisy(2, 3), mean, var, training=True)


def test_normalize_var_and_std(check, noisy):
    check(F.normalize, noisy(2, 6, 3, sd=0.05))
    check(F.normalize, noisy(2, 6, sd=0.05), dim=-1)
    check(torch.var, noisy(3, 6, sd=0.2), -1, sd=0.02)
    check(torch.var, noisy(3, 6, sd=0.2), (0, 1), unbiased=False, sd=0.02)
    check(torch.std, noisy(3, 8, sd=0.05), -1, keepdim=True, sd=0.02)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_directions_go_through_the_jacobian(name):
    """All of the variance in a few directions: the same as draws along them."""
    mean, factor = torch.randn(2, 5), 0.05 * torch.randn(3, 2, 5)
    found = RULES[name](Moments(mean, factor.square().sum(0), factor), (5,))
    z = torch.randn(100_000, 3)
    truth = getattr(F, name)(mean + torch.einsum("nr,rbd->nbd", z, factor), (5,))
    torch.testing.assert_close(found.var.sqrt(), truth.std(0), rtol=0.05, atol=0.002)
    cov = torch.einsum("rbi,rbj->bij", found.factor, found.factor)
    torch.testing.assert_close(cov[0], torch.cov(truth[:, 0].T), rtol=0.1, atol=2e-3)


def residual(affine: bool = True) -> nn.Module:
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
            self.norms = nn.ModuleList([nn.BatchNorm2d(6) for _ in range(2)])
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            x = F.relu(self.norms[0](self.first(x)))
            x = F.relu(x + self.norms[1](self.second(x)))
            return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))

    return Residual()


class FilterResponse(nn.Module):
    """The norm of the published sampling study, by hand."""

    def __init__(self, channels: int):
        super().__init__()
        self.scale, self.shift, self.floor = (nn.Parameter(v * torch.ones(1, channels, 1, 1)) for v in (1.0, 0.0, 0.0))

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean((2, 3), keepdim=True) + 1e-6)
        return torch.maximum(self.scale * x + self.shift, self.floor)


NETWORKS = {
    "batch norm and residual": residual,
    "filter response norm": lambda: nn.Sequential(nn.Conv2d(1, 6, 3), FilterResponse(6), nn.Flatten(), nn.Linear(216, 3)),
    "group norm and max": lambda: nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 3)
    ),
    "instance norm": lambda: nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.InstanceNorm2d(6, affine=True), nn.SiLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(54, 3)
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_whole_networks(name, around, ratio):
    network = NETWORKS[name]()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean, module.running_var = 0.1 * torch.randn(6), 0.5 + torch.rand(6)
    (found,) = ratio(around(network), torch.randn(3, 1, 8, 8), {"how": "adjoint"})
    assert 0.95 < found < 1.05
