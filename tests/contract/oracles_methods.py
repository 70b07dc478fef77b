"""Definitions of methods that their law on linear regression does not show."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import dubito
from dubito import MAP, Gaussian, MeanTeacher, Model


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
    """Linearized predictions have the covariance J C J^T, with J by autograd, for linear layers and for layers over positions."""
    networks = {
        (3,): nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        (2, 4): nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 2)),
    }
    for shape, network in networks.items():
        source = torch.Generator().manual_seed(0)
        x, y = (torch.randn(7, *size, generator=source, dtype=torch.float64) for size in (shape, (2,)))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            network = network.double().apply(lambda layer: getattr(layer, "reset_parameters", lambda: None)())
        model = Model(network, Gaussian(scale=0.3), dubito.priors.Normal(1.0))
        posterior = dubito.fit(model, dubito.Laplace(structure, check=False), (x, y))
        leaves = jacrev(lambda params, net=network, x=x: functional_call(net, params, (x,)))(posterior.params)
        rows = torch.cat([leaves[name].flatten(2) for name in posterior.covariance.shapes], -1)
        torch.testing.assert_close(posterior.predict(x).cov[0], rows @ posterior.covariance.dense() @ rows.mT)


FURTHER: dict[str, Callable[[], None]] = {
    "teacher average": teacher_average,
    **{f"linearized, {structure}": partial(linearized, structure) for structure in ("kronecker", "dense", "diagonal")},
}
