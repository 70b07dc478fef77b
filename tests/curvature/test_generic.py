"""Gradients of every example on its own, for any network."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from curvature.networks import DOUBLE, NETWORKS, Net, build, jacobian, numbers, output, size
from dubito import Gaussian, Model
from dubito.curvature.generic import example_gradients

pytestmark = pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel lengths")  # torch, of its own accord


def compared(model: Model, x, k: int = 3) -> None:
    """<s_k, f_n> differentiated by torch.func, and by the whole Jacobian."""
    params = model.parameters()
    names = tuple(params)
    s = torch.randn(k, *output(model, params, x).shape, dtype=DOUBLE)
    found = example_gradients(model, params, x, model.buffers(), names, s)
    rows = jacobian(model, params, x)
    flat = s.reshape(k, size(x), -1)
    exact = torch.einsum("knf,nfp->knp", flat, rows.reshape(size(x), flat.shape[-1], -1))
    together = torch.cat([found[name].reshape(*found[name].shape[:2], -1) for name in names], -1)
    torch.testing.assert_close(together, exact, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_of_every_network(name):
    net, x = build(name)
    compared(Model(net, Gaussian(scale=1.0)), x)


def test_what_cannot_be_batched_runs_one_after_another():
    net = Net(lambda s, x: s.a(x) if x.sum().item() > 0 else -s.a(x).tanh(), a=nn.Linear(3, 2)).double()
    model, x = Model(net, Gaussian(scale=1.0)), numbers(6, 3)
    params = model.parameters()
    s = torch.randn(2, 6, 2, dtype=DOUBLE)
    found = example_gradients(model, params, x, {}, ("a.weight",), s)["a.weight"]
    for i in range(6):
        rows = jacobian(model, params, x[i : i + 1], ["a.weight"])[0]
        torch.testing.assert_close(found[:, i].flatten(1), s[:, i] @ rows)


def test_an_error_of_the_network_itself_comes_through():
    def run(s, x):
        raise RuntimeError("no such thing")

    model = Model(Net(run, a=nn.Linear(3, 2)), Gaussian(scale=1.0))
    with pytest.raises(RuntimeError, match="no such thing"):
        example_gradients(model, model.parameters(), torch.zeros(2, 3), {}, ("a.weight",), torch.zeros(1, 2, 2))


def test_inputs_that_all_examples_share():
    net = Net(lambda s, x, table: s.a(x @ table), a=nn.Bilinear(2, 2, 2)).double()
    net.run = lambda s, x, table: s.a(x @ table, x @ table)
    compared(Model(net, Gaussian(scale=1.0)), (numbers(5, 3), numbers(3, 2)))
