"""Definitions of methods that their law on linear regression does not show."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import dubito
from dubito import MAP, Gaussian, MeanTeacher, Model
from dubito.posteriors.predict.linearized import sweep


def teacher_average() -> None:
    """The teacher follows the student by a_s = min(decay, 1 - 1 / (s + 1)), from the weights at the start."""
    torch.manual_seed(0)
    network, data = nn.Linear(2, 1), (torch.randn(20, 2), torch.randn(20, 1))
    expected: dict[str, Tensor] = {name: leaf.detach().clone() for name, leaf in network.named_parameters()}

    def follow(event) -> None:
        keep = min(0.7, 1 - 1 / (event.step + 1))
        for name, leaf in event.state.student.params.items():
            expected[name] = keep * expected[name] + (1 - keep) * leaf

    method = MeanTeacher(MAP(epochs=3, learning_rate=0.3), weight=1.0, decay=0.7)
    posterior = dubito.fit(Model(network, Gaussian(scale=1.0)), method, data, batch_size=8, callbacks=[follow], progress=False)
    torch.testing.assert_close(posterior.params, expected)


def linearized(structure: str) -> None:
    """Linearized predictions have the covariance J C J^T, with J by autograd, also for several multiples of the prior at a time."""
    networks = [
        ((3,), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))),
        ((3,), nn.Sequential(nn.Linear(3, 2, bias=False))),
        ((2, 4), nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 2))),
    ]
    for shape, network in networks:
        source = torch.Generator().manual_seed(0)
        x, y = (torch.randn(7, *size, generator=source, dtype=torch.float64) for size in (shape, (2,)))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            network = network.double().apply(lambda layer: getattr(layer, "reset_parameters", lambda: None)())
        model = Model(network, Gaussian(scale=0.3), dubito.priors.Normal(1.0))
        posterior = dubito.fit(model, dubito.Laplace(structure, check=False), (x, y))
        leaves = jacrev(lambda params, net=network, x=x: functional_call(net, params, (x,)))(posterior.params)
        covariance = posterior.covariance
        rows = torch.cat([leaves[name].flatten(2) for name in covariance.shapes], -1)
        torch.testing.assert_close(posterior.predict(x).cov[0], rows @ covariance.dense() @ rows.mT)
        swept = sweep(model, x, params=posterior.params, buffers=posterior.buffers, covariance=covariance, factors=(0.5, 4.0))
        for factor, predictive in zip((0.5, 4.0), swept, strict=True):
            torch.testing.assert_close(predictive.cov[0], rows @ covariance.times(factor).dense() @ rows.mT)


def uncertain_inputs(structure: str) -> None:
    r"""Through a linear network one pass is exact: :math:`J_w C J_w^T + \sum_i v_i (j_i j_i^T + G_i C G_i^T)` for inputs of variance v.

    Its slopes are :math:`j_i = \partial f / \partial x_i` and :math:`G_i = \partial j_i / \partial w`. Patches do not overlap.
    """
    source = torch.Generator().manual_seed(0)
    x, y, x_var = (torch.randn(5, *size, generator=source, dtype=torch.float64) for size in ((2, 6), (2,), (2, 6)))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv1d(2, 3, 2, stride=2), nn.Flatten(), nn.Linear(9, 2)).double()
    model = Model(network, Gaussian(scale=0.3), dubito.priors.Normal(1.0), only=r"^0\.")
    posterior = dubito.fit(model, dubito.Laplace(structure, check=False), (x, y))
    params = posterior.params

    def output(params, x: Tensor) -> Tensor:
        return functional_call(network, params, (x.unsqueeze(0),)).squeeze(0)

    for i, predicted in enumerate(posterior.predict(x, "adjoint", x_var=x_var.square()).cov[0]):
        by_input = jacrev(output, argnums=1)
        slopes, leaves = by_input(params, x[i]).flatten(1), jacrev(output)(params, x[i])
        rows = torch.cat([leaves[name].flatten(1) for name in posterior.covariance.shapes], -1)  # [C, P]
        mixed = jacrev(by_input)(params, x[i])
        mixed = torch.cat([mixed[name].flatten(3).flatten(1, 2) for name in posterior.covariance.shapes], -1)  # [C, I, P]
        cov, v = posterior.covariance.dense(), x_var[i].square().flatten()
        exact = rows @ cov @ rows.mT + (slopes * v) @ slopes.mT + torch.einsum("cip,pq,diq,i->cd", mixed, cov, mixed, v)
        torch.testing.assert_close(predicted, exact)


FURTHER: dict[str, Callable[[], None]] = {
    "teacher average": teacher_average,
    **{f"linearized, {structure}": partial(linearized, structure) for structure in ("kronecker", "dense", "diagonal")},
    **{f"uncertain inputs, {structure}": partial(uncertain_inputs, structure) for structure in ("kronecker", "diagonal")},
}
