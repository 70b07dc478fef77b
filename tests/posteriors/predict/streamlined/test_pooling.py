"""Pooling, against Monte Carlo."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dubito import Gaussian, Model
from dubito.posteriors import Gaussian as Posterior
from dubito.posteriors.predict.streamlined import Moments
from dubito.posteriors.predict.streamlined.moments import RULES
from dubito.posteriors.predict.streamlined.rules.maxima import contestants, largest

AVERAGES = {
    "1d": (F.avg_pool1d, (2, 3, 8), (2,), {}),
    "1d, padded": (F.avg_pool1d, (2, 3, 8), (3, 2, 1), {"ceil_mode": True}),
    "2d": (F.avg_pool2d, (2, 2, 6, 6), (2,), {}),
    "2d, padded": (F.avg_pool2d, (2, 2, 5, 7), ((3, 2), (2, 3), 1), {"ceil_mode": True, "count_include_pad": False}),
    "2d, divisor": (F.avg_pool2d, (2, 2, 5, 5), (2,), {"divisor_override": 3}),
    "3d": (F.avg_pool3d, (1, 2, 4, 4, 4), (2,), {"padding": 1}),
    "adaptive 1d": (F.adaptive_avg_pool1d, (2, 3, 7), (3,), {}),
    "adaptive 2d": (F.adaptive_avg_pool2d, (2, 3, 5, 6), ((2, None),), {}),
    "global": (F.adaptive_avg_pool2d, (2, 3, 4, 4), (1,), {}),
    "nearest": (F.interpolate, (1, 2, 3, 3), (), {"scale_factor": 2}),
    "linear": (F.interpolate, (1, 2, 5), (), {"size": 8, "mode": "linear"}),
    "bilinear": (F.interpolate, (1, 2, 3, 4), (), {"scale_factor": (2.0, 1.5), "mode": "bilinear"}),
    "bilinear, corners": (F.interpolate, (1, 2, 3, 4), (), {"size": (5, 6), "mode": "bilinear", "align_corners": True}),
    "bicubic": (F.interpolate, (1, 1, 4, 4), (), {"size": (6, 5), "mode": "bicubic"}),
    "area": (F.interpolate, (1, 1, 5, 5), (), {"size": (2, 3), "mode": "area"}),
    "shuffle": (torch.pixel_shuffle, (1, 4, 3, 3), (2,), {}),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_averages_are_exact(name, noisy):
    """The coefficients, from the Jacobian, squared."""
    function, shape, args, kwargs = AVERAGES[name]
    x = noisy(*shape, sd=1.0)
    found = RULES[function.__name__](x, *args, **kwargs)
    jacobian = torch.func.jacrev(lambda t: function(t, *args, **kwargs))(x.mean)
    torch.testing.assert_close(found.mean, function(x.mean, *args, **kwargs))
    torch.testing.assert_close(found.var, torch.tensordot(jacobian.square(), x.var, x.mean.ndim))
    factor = torch.randn(3, *shape)
    found = RULES[function.__name__](Moments(x.mean, factor.square().sum(0) + x.var, factor), *args, **kwargs)
    along = torch.tensordot(factor, jacobian, (list(range(1, x.mean.ndim + 1)), list(range(-x.mean.ndim, 0))))
    torch.testing.assert_close(found.factor, along)
    torch.testing.assert_close(found.var, torch.tensordot(jacobian.square(), x.var, x.mean.ndim) + along.square().sum(0))


LARGEST = {
    "1d": (F.max_pool1d, (2, 2, 8), (2,), {}),
    "2d": (F.max_pool2d, (2, 2, 6, 6), (2,), {}),
    "2d, overlapping": (F.max_pool2d, (2, 2, 7, 7), (3,), {"stride": 2, "padding": 1}),
    "2d, ragged": (F.max_pool2d, (1, 2, 5, 7), ((2, 3),), {"ceil_mode": True}),
    "2d, dilated": (F.max_pool2d, (1, 2, 7, 7), (2,), {"stride": 1, "dilation": 2}),
    "3d": (F.max_pool3d, (1, 2, 4, 4, 4), (2,), {}),
    "adaptive": (F.adaptive_max_pool2d, (1, 2, 5, 6), ((2, 3),), {}),
    "adaptive 1d": (F.adaptive_max_pool1d, (1, 2, 7), (3,), {}),
    "amax": (torch.amax, (2, 3, 4, 3), ((1, 3),), {}),
    "amin": (torch.amin, (2, 3, 4), (-1,), {"keepdim": True}),
    "max": (torch.max, (2, 3, 4), (1,), {}),
    "all": (torch.max, (2, 3, 4), (), {}),
}


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest(name, check, noisy):
    """Exact for two, and near it for many where the noise does not hide which is the largest."""
    function, shape, args, kwargs = LARGEST[name]
    many = 0.12 if name in ("all", "amax", "3d", "adaptive") else 0.08 if name in ("2d, overlapping", "2d, ragged") else 0.05
    check(function, noisy(*shape, sd=0.1), *args, sd=0.02, mean=0.02, **kwargs)
    check(function, noisy(*shape, sd=1.0), *args, sd=0.01 if name == "1d" else many, mean=0.02, **kwargs)


def test_of_two_tensors(check, noisy):
    check(torch.maximum, noisy(3, 4, sd=0.5), noisy(3, 4, sd=0.8))
    check(torch.minimum, noisy(3, 4, sd=0.5), torch.randn(4))
    check(torch.max, noisy(3, 4, sd=0.5), noisy(4, sd=0.5))


def test_of_equal_numbers_and_of_certain_ones():
    """What an arg max of the means gets wrong most: four alike, of which the largest lies 1.03 deviations higher."""
    x = Moments(torch.zeros(1, 4), torch.ones(1, 4))
    found = RULES["amax"](x, -1)
    assert float(found.mean) == pytest.approx(1.0294, abs=0.01)
    assert float(found.var) == pytest.approx(0.4917, abs=0.04)
    certain = RULES["amax"](Moments(torch.tensor([1.0, 3.0, 2.0]), torch.zeros(3)), 0)
    assert (float(certain.mean), float(certain.var)) == (3.0, pytest.approx(0, abs=1e-6))


def test_slopes_are_probabilities(noisy):
    x = noisy(3, 7, sd=0.8)
    mean = x.mean.clone().requires_grad_()
    found = largest(contestants(Moments(mean, x.var), True), True)
    (slope,) = torch.autograd.grad(found.mean.sum(), mean)
    drawn = x.mean + x.var.sqrt() * torch.randn(200_000, 3, 7)
    truth = F.one_hot(drawn.argmax(-1), 7).float().mean(0)
    torch.testing.assert_close(slope.sum(-1), torch.ones(3))
    assert float((slope - truth).abs().max()) < 0.05


def test_correlated_numbers():
    """Directions tell that two numbers move together, and then the larger one is always the same."""
    factor = torch.ones(1, 1, 2)
    found = RULES["amax"](Moments(torch.tensor([[0.0, 0.1]]), torch.ones(1, 2), factor), -1)
    assert float(found.mean) == pytest.approx(0.1, abs=1e-3)
    assert float(found.var) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.AdaptiveMaxPool2d(2), nn.AvgPool2d(2), nn.Upsample(scale_factor=2)])
def test_whole_networks(pool, around, ratio):
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), pool, nn.Flatten(), nn.LazyLinear(3))
    network(x := torch.randn(3, 1, 8, 8))
    (found,) = ratio(around(network), x, {"how": "adjoint"})
    assert found == pytest.approx(1, abs=0.03)


def test_the_largest_along_an_axis_of_a_network(around, ratio):
    class Set(nn.Module):
        def __init__(self):
            super().__init__()
            self.each, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.each(x).max(1).values)

    adjoint, forward = ratio(around(Set()), torch.randn(3, 5, 4), {"how": "adjoint"}, {"how": "streamlined", "rank": 0})
    assert adjoint == pytest.approx(1, abs=0.05)
    assert forward == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kernel", "options"), [(2, {}), (3, {"stride": 2})])
def test_positions_share_the_noise_of_a_kernel(kernel, options, bias, around, ratio):
    """Neighbours that see nearly the same patch keep their order, however large the noise."""
    network = nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=bias),
        nn.ReLU(),
        nn.MaxPool2d(kernel, **options),
        nn.Flatten(),
        nn.LazyLinear(3),
    )
    smooth = F.interpolate(torch.randn(3, 2, 3, 3), size=24, mode="bilinear")
    network(smooth)
    posterior = around(network, 0.1)
    (found,) = ratio(posterior, smooth, {"how": "adjoint"})
    assert found == pytest.approx(1, abs=0.03)
    program = posterior.streamlined.program(smooth, adjoint=True)
    assert any("kernel" in node.kwargs for node in program.graph.nodes)


def test_pooling_comes_before_functions_that_rise():
    """And not where something else reads them, nor before those that may fall."""

    class Both(nn.Module):
        def forward(self, x):
            h = torch.relu(x)
            return F.max_pool2d(h, 2) + F.avg_pool2d(h, 2)

    def order(*layers: nn.Module) -> list[str]:
        model = Model(nn.Sequential(nn.Conv2d(1, 2, 3), *layers, nn.Flatten(), nn.Linear(18, 1)), Gaussian(scale=0.1))
        posterior = Posterior.diagonal(model, {}, {"0.bias": torch.ones(2)})
        return [step.name for step in posterior.streamlined.trace(torch.randn(2, 1, 8, 8)).steps]

    assert order(nn.ReLU(), nn.MaxPool2d(2))[1:3] == ["max_pool2d", "relu"]
    assert order(nn.ReLU(inplace=True), nn.AdaptiveMaxPool2d(3))[1:3] == ["adaptive_max_pool2d", "relu"]
    assert order(nn.LeakyReLU(-1.0), nn.MaxPool2d(2))[1:3] == ["leaky_relu", "max_pool2d"]
    assert order(Both())[1:3] == ["relu", "max_pool2d"]


def test_noise_of_the_inputs_is_each_positions_own():
    """Beside which the kernel's is small: then all is as for independent numbers."""
    network = nn.Sequential(nn.Conv2d(1, 3, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(48, 2))
    posterior = Posterior.diagonal(Model(network, Gaussian(scale=0.1)), {}, {"0.weight": torch.full((3, 1, 1, 1), 1e-6)})
    x, x_var = torch.randn(2, 1, 8, 8), torch.full((2, 1, 8, 8), 0.5)
    drawn = torch.stack([network(x + x_var.sqrt() * torch.randn_like(x)) for _ in range(4000)]).detach()
    found = posterior.predict(x, "adjoint", x_var=x_var)
    torch.testing.assert_close(found.f_var.sqrt(), drawn.std(0), rtol=0.06, atol=0)
