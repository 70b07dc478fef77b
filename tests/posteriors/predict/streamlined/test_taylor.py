"""Functions to first order, at the mean: the plain network's output, with the variance of the linearised network."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import dubito
from dubito import Categorical, Gaussian, Laplace, Model, as_module

ACTIVATIONS = [nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.GELU, lambda: nn.GELU("tanh"), nn.SiLU, nn.ELU, nn.SELU, nn.CELU,
               nn.Softplus, nn.Mish, nn.Hardswish, nn.Hardsigmoid, nn.Softsign, nn.LogSigmoid, nn.ReLU6, nn.Hardtanh]  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_with_all_directions_it_is_the_linearised_network(activation, around):
    network = nn.Sequential(nn.Linear(4, 9), activation(), nn.Linear(9, 7), activation(), nn.Linear(7, 3)).double()
    posterior, x = around(network, variance=0.05), torch.randn(5, 4).double()
    exact, plain = posterior.predict(x, "linearized"), posterior.predict(x, "point").f_mean
    for how, options in (("adjoint", {}), ("streamlined", {"rank": -1})):
        p = posterior.predict(x, how, rule="taylor", **options)
        assert torch.equal(p.f_mean, plain)
        torch.testing.assert_close(p.covariances, exact.covariances, rtol=1e-9, atol=1e-12)
    moments = posterior.predict(x, "streamlined", rank=-1)
    assert not torch.allclose(moments.f_mean, plain, rtol=1e-6)
    assert posterior.predict(x, "streamlined", rank=0, rule="taylor").how == "streamlined, Taylor, variances only"
    assert p.how == "streamlined, Taylor, full covariance"


def test_variances_alone_are_those_of_the_formula(around):
    posterior, x = (
        around(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double(), variance=0.05),
        torch.randn(4, 3).double(),
    )
    w, s = posterior.params, 0.05
    h = F.linear(x, w["0.weight"], w["0.bias"])
    v = (1 - h.tanh() ** 2) ** 2 * s * (x.square().sum(-1, keepdim=True) + 1)
    expected = v @ w["2.weight"].mT ** 2 + s * (h.tanh().square().sum(-1, keepdim=True) + 1)
    torch.testing.assert_close(posterior.predict(x, "streamlined", rank=0, rule="taylor").f_var, expected)


class Everything(nn.Module):
    """Norms, maxima, quotients, powers, products and attention."""

    def __init__(self):
        super().__init__()
        self.first, self.conv, self.last = nn.Linear(3, 8), nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 2)
        self.layer, self.rms, self.group, self.batch = nn.LayerNorm(8), nn.RMSNorm(8), nn.GroupNorm(2, 8), nn.BatchNorm1d(8)
        self.attention, self.scale = nn.MultiheadAttention(8, 2, batch_first=True), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(self.first(x))
        h = h + self.attention(h, h, h)[0]
        h = self.rms(h) * self.scale.exp() / (1.5 + h.square().mean(-1, keepdim=True)).sqrt()
        c = F.max_pool1d(self.group(self.conv(h.mT)), 2)
        c = self.batch(c) + c.amax(-1, keepdim=True) * (c**3).clamp(-1, 1) - c.std(-1, keepdim=True)
        c = F.normalize(c, dim=1) * F.softmax(c, -1)
        return self.last(torch.maximum(c.sum(-1), c.mean(-1)))


@pytest.mark.parametrize("how", ["streamlined", "adjoint"])
def test_the_mean_is_the_plain_network(how, around):
    posterior, x = around(Everything().double(), variance=0.01), torch.randn(3, 6, 3).double()
    options = {"rank": 0} if how == "streamlined" else {}
    p, plain = posterior.predict(x, how, rule="taylor", **options), posterior.predict(x, "point")
    torch.testing.assert_close(p.f_mean, plain.f_mean, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(posterior.predict(x, how, **options).f_mean, plain.f_mean, rtol=1e-3)
    if how == "adjoint":
        torch.testing.assert_close(p.covariances, posterior.predict(x, "linearized").covariances, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "lowrank", "dense"])
def test_the_adjoint_keeps_every_covariance(structure):
    x, y = torch.randn(40, 3).double(), torch.randint(3, (40,))
    model = Model(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double(), Categorical())
    posterior = dubito.fit(model, Laplace(structure, check=False, optimize_evidence=False), (x, y)).with_prior(4.0)
    found, exact = posterior.predict(x[:5], "adjoint", rule="taylor"), posterior.predict(x[:5], "linearized")
    torch.testing.assert_close(found.covariances, exact.covariances)


def brute(network: nn.Module, x: Tensor, x_var: Tensor, variance: float) -> Tensor:
    """Variances of the outputs by the whole Jacobian, of weights and inputs."""
    weights = {name: leaf.detach() for name, leaf in network.named_parameters()}

    def run(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(network, weights, (x.unsqueeze(0),))[0]

    rows = []
    for one, own in zip(x, x_var, strict=True):
        of_weights, of_inputs = jacrev(run, argnums=(0, 1))(weights, one)
        rows.append(sum(variance * j.square().flatten(1).sum(1) for j in of_weights.values()) + of_inputs.square() @ own)
    return torch.stack(rows)


@pytest.mark.parametrize(("how", "options"), [("adjoint", {}), ("streamlined", {"rank": -1})])
def test_uncertain_inputs(how, options, around):
    network = nn.Sequential(nn.Linear(3, 6), nn.SiLU(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    posterior, x, x_var = around(network, variance=0.02), torch.randn(4, 3).double(), 0.1 * torch.rand(4, 3).double()
    p = posterior.predict(x, how, rule="taylor", x_var=x_var, **options)
    torch.testing.assert_close(p.f_var, brute(network, x, x_var, 0.02), rtol=1e-8, atol=0)


@pytest.mark.parametrize(("how", "options"), [("adjoint", {}), ("streamlined", {"rank": -1})])
def test_dropout(how, options):
    """Masks are noise of variance p / (1 - p) about one; the Jacobian in them tells the rest."""
    first, second, p = nn.Linear(3, 6).double(), nn.Linear(6, 2).double(), 0.3
    network = nn.Sequential(first, nn.Dropout(p), nn.Tanh(), nn.Dropout(p), second)
    x, y = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    posterior = dubito.fit(Model(network, Gaussian(scale=1.0)), dubito.MCDropout(epochs=0), (x, y))

    def run(z: Tensor, u: Tensor, one: Tensor) -> Tensor:
        return second(torch.tanh(first(one) * z) * u)

    ones = torch.ones(6).double()
    exact = torch.stack(
        [sum(p / (1 - p) * j.square().sum(-1) for j in jacrev(run, argnums=(0, 1))(ones, ones, one)) for one in x]
    ).detach()  # fmt: skip
    torch.testing.assert_close(posterior.predict(x, how, rule="taylor", **options).f_var, exact, rtol=1e-8, atol=0)


@pytest.mark.parametrize("how", ["streamlined", "adjoint"])
def test_deployed(how, around):
    network = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 2))
    posterior, x = around(network, variance=0.02), torch.randn(5, 3)
    module, p = as_module(posterior, x[:3], how=how, rule="taylor"), posterior.predict(x, how, rule="taylor")
    program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    for found in (module(x), program(x)):
        torch.testing.assert_close(found["f_mean"], p.f_mean)
        torch.testing.assert_close(found["f_cov"].diagonal(dim1=-2, dim2=-1), p.f_var, rtol=1e-4, atol=1e-6)


def test_refused_elsewhere(around):
    posterior, x = around(nn.Linear(3, 2)), torch.randn(2, 3)
    with pytest.raises(ValueError, match="rank and rule are for predictions in one pass"):
        posterior.predict(x, "linearized", rule="taylor")
    with pytest.raises(ValueError, match="rule must be"):
        posterior.predict(x, "adjoint", rule="first")
    with pytest.raises(ValueError, match="rule must be"):
        as_module(posterior, x, rule="first")
