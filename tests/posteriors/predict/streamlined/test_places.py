"""Assignments, scattered sums, computed weights and bare parameters in whole networks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = torch.tensor([2, 0, 2, 1, 3, 3])


def assigned(h: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[:, ::2] = h[:, 3:]
    out[:, 1] = 0.5
    return out + h


def filled(h: Tensor) -> Tensor:
    out = h.clone()
    out[h.new_tensor([1, 0, 0, 1, 0, 1]).bool().expand(h.shape)] = 0.3
    return out * torch.full_like(h, 2.0) + h.new_ones(6)


PLACINGS = {
    "assigned": assigned,
    "filled": filled,
    "cumsum": lambda h: h.cumsum(-1),
    "index_add": lambda h: h.new_zeros(len(h), 6).index_add_(1, ROWS, h, alpha=0.5),
    "index_add to it": lambda h: torch.index_add(h, 1, ROWS, h),
    "scatter_add": lambda h: torch.zeros_like(h).scatter_add_(1, ROWS.expand(len(h), 6), h),
    "scatter": lambda h: torch.scatter(h, 1, ROWS[:2].expand(len(h), 2), h[:, 4:]),
    "scatter a number": lambda h: torch.scatter(h, 1, ROWS[:2].expand(len(h), 2), 0.7),
}


class Placed(nn.Module):
    def __init__(self, name: str):
        super().__init__()
        self.name, self.first, self.second, self.last = name, nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.last(torch.tanh(PLACINGS[self.name](h)))


ONCE = ("filled", "index_add", "scatter_add", "scatter a number")  # each number goes to one place


@pytest.mark.parametrize("name", PLACINGS)
def test_linear_in_what_is_put(name, around):
    """To first order and with all directions nothing is dropped, so that the linearised network is the reference; but a layer's own
    noise becomes directions at the next layer only, and copies of it are taken apart before."""
    posterior, x = around(Placed(name).double()), torch.randn(4, 3).double()
    exact = posterior.predict(x, "linearized")
    adjoint, forward = posterior.predict(x, "adjoint", rule="taylor"), posterior.predict(x, "streamlined", rank=-1, rule="taylor")
    torch.testing.assert_close(adjoint.covariances, exact.covariances, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(forward.f_mean, exact.f_mean)
    if name in ONCE:
        torch.testing.assert_close(forward.covariances, exact.covariances, rtol=1e-8, atol=1e-12)
    else:
        assert float(((forward.f_var / exact.f_var).sqrt() - 1).abs().max()) < 0.4
    truth = posterior.predict(x, "sampled", draws=4000)
    assert float(((posterior.predict(x, "adjoint").f_var / truth.f_var).sqrt() - 1).abs().mean()) < 0.05


class Normed(nn.Module):
    """Computed weights, and the scale of a contrastive model."""

    def __init__(self, kind: str):
        super().__init__()
        make = nn.utils.parametrizations.weight_norm if kind == "weight norm" else nn.utils.parametrizations.spectral_norm
        self.first, self.last = make(nn.Linear(3, 5)), nn.Linear(5, 2)
        self.logit_scale, self.token = nn.Parameter(torch.tensor(0.2)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) + F.layer_norm(self.token, (5,))
        return self.last(h) * self.logit_scale.exp()


@pytest.mark.parametrize("kind", ["weight norm", "spectral norm"])
def test_computed_weights_and_bare_parameters(kind, around):
    posterior, x = around(Normed(kind).double(), variance=0.001), torch.randn(4, 3).double()
    truth = posterior.predict(x, "sampled", draws=8000)
    exact = posterior.predict(x, "linearized")
    torch.testing.assert_close(
        posterior.predict(x, "adjoint", rule="taylor").covariances, exact.covariances, rtol=1e-8, atol=1e-12
    )
    for how, within in (("adjoint", 0.03), ("streamlined", 0.3)):
        p = posterior.predict(x, how)
        torch.testing.assert_close(p.f_mean, truth.f_mean, rtol=0, atol=0.1 * float(truth.f_var.max().sqrt()))
        assert float(((p.f_var / truth.f_var).sqrt() - 1).abs().mean()) < within


def test_a_token_of_its_own(around):
    """A bare parameter behind a norm and a layer: its noise is not lost."""

    class Token(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.last = nn.Parameter(torch.randn(5)), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.layer_norm(self.token, (5,))) * x.sum(-1, keepdim=True)

    posterior, x = around(Token().double(), variance=0.0005, only="token"), torch.randn(4, 3).double()
    truth = posterior.predict(x, "sampled", draws=20_000)
    for how, options in (("adjoint", {}), ("streamlined", {"rank": 0})):
        p = posterior.predict(x, how, **options)
        assert float(((p.f_var / truth.f_var).sqrt() - 1).abs().max()) < (0.03 if how == "adjoint" else 0.8)
