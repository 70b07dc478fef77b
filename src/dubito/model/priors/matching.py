r"""Priors of weights that mean something as priors of functions: their scales are set so that a network's functions are like those of a
Gaussian process.

The two laws, of a network's outputs X and of the process' Y at random inputs, are brought together by their energy distance

.. math:: D^2 = 2\, E\lVert X - Y \rVert - E\lVert X - X' \rVert - E\lVert Y - Y' \rVert,

which is 0 only if they are one (Székely & Rizzo 2013), or by their 1-Wasserstein distance, as Tran et al. (2022) do: the least mean
distance at which draws of one can be paired with draws of the other. They approach it by a critic network that is trained within every
step; between as many draws of each it is an assignment, which is solved exactly. The energy distance is the default: its gradient from
a finite number of draws is unbiased, and that of a Wasserstein distance is not (Bellemare et al. 2017).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from dubito.model.priors.composed import ByName
from dubito.model.priors.factorized import Laplace, StudentT
from dubito.model.priors.gaussian_process import GaussianProcess
from dubito.model.priors.normal import Normal
from dubito.model.priors.prior import Prior, weights
from dubito.tensors import randomness, tree
from dubito.tensors.checks import one_of, require


class Matched(NamedTuple):
    """The prior whose functions are like those of the process, and the distances on the way."""

    prior: Prior
    distances: Tensor  # [steps]


def matching(
    model: Any,
    process: GaussianProcess,
    inputs: Tensor,
    *,
    steps: int = 300,
    draws: int = 128,
    points: int = 16,
    box: float = 0.3,
    learning_rate: float = 0.05,
    distance: Literal["energy", "wasserstein"] = "energy",
    seed: int = 0,
) -> Matched:
    """Set the scale of every parameter's prior so that functions drawn from it are like draws of `process`.

    `model` is a `dubito.Model`. Its prior is where it starts, and gives the family: `Normal`, `Laplace` or `StudentT`. Every step
    compares `draws` functions of each kind at `points` inputs, of which a share `box` is uniform in the box around `inputs` [N, d], and
    the others are some of these.

    >>> import dubito
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))
    >>> model = dubito.Model(net, dubito.Gaussian(scale=0.1), Normal(scale=1.0))
    >>> process = dubito.priors.GaussianProcess(dubito.priors.RBF(scale=1.0))
    >>> prior, distances = matching(model, process, torch.linspace(-2, 2, 50).unsqueeze(1), steps=5)
    >>> len(prior.scale), len(distances)
    (4, 5)
    """
    base, like, buffers = model.prior, weights(model.parameters()), model.buffers()
    if not isinstance(base, Normal | Laplace | StudentT):
        raise ValueError(f"the scales of a Normal, a Laplace or a StudentT can be matched; got a {type(base).__name__}")
    if inputs.ndim != 2 or steps < 1 or draws < 2 or points < 1 or not 0 <= box <= 1:
        raise ValueError("inputs are [N, d], steps and points at least 1, draws at least 2 and box a share between 0 and 1")
    one_of(DISTANCES, distance=distance)
    device = next(iter(like.values())).device
    generator, inputs = randomness.generator(device, seed, "matching"), inputs.to(device)
    low, high = inputs.min(0).values, inputs.max(0).values
    logs = {name: torch.zeros((), device=device, requires_grad=True) for name in like}
    optimizer, distances = torch.optim.Adam(list(logs.values()), lr=learning_rate), []
    for step in range(steps):
        for group in optimizer.param_groups:  # to zero, since what the draws leave to chance would otherwise stay
            group["lr"] = learning_rate * (1 - step / steps)
        x = inputs[torch.randint(len(inputs), (points,), generator=generator, device=device)]
        anywhere = low + (high - low) * torch.rand(x.shape, generator=generator, device=device).to(x)
        x = torch.where(torch.rand(points, 1, generator=generator, device=device) < box, anywhere, x)
        unit = tree.stack([base.sample(like, generator) for _ in range(draws)])
        drawn = {name: leaf * logs[name].exp().to(leaf) for name, leaf in unit.items()}
        f = vmap(lambda one, x=x: model.call(one, x, buffers)[0], randomness="different")(drawn)  # [S, points, C]
        wanted = process.sample(x, draws * f.shape[-1], generator).reshape(f.shape[-1], draws, points).movedim(0, 2)
        apart = DISTANCES[distance](f.flatten(1), wanted.flatten(1).to(f))
        optimizer.zero_grad()
        apart.backward()
        optimizer.step()
        distances.append(apart.detach())
    return Matched(_scaled(base, {name: float(log.detach().exp()) for name, log in logs.items()}), torch.stack(distances))


def energy_distance(x: Tensor, y: Tensor) -> Tensor:
    """The squared energy distance of the laws of which x [S, D] and y [T, D] are draws, without bias: it may be below 0.

    >>> energy_distance(torch.zeros(3, 1), torch.ones(3, 1))
    tensor(2.)
    """
    within = [torch.cdist(z, z).sum() / (len(z) * (len(z) - 1)) for z in (x, y)]
    return 2 * torch.cdist(x, y).mean() - within[0] - within[1]


def wasserstein_distance(x: Tensor, y: Tensor) -> Tensor:
    r"""The 1-Wasserstein distance of draws x [S, D] from as many draws y [S, D]: :math:`\min_\pi \frac1S \sum_s |x_s - y_{\pi(s)}|`.

    >>> wasserstein_distance(torch.tensor([[0.0], [5.0]]), torch.tensor([[6.0], [0.0]]))
    tensor(0.5000)
    """
    from scipy.optimize import linear_sum_assignment

    require(x.shape == y.shape, f"draws are paired: give as many of both; got {list(x.shape)} and {list(y.shape)}")
    apart = torch.cdist(x, y)
    rows, columns = linear_sum_assignment(apart.detach().double().cpu().numpy())
    return apart[torch.from_numpy(rows).to(x.device), torch.from_numpy(columns).to(x.device)].mean()


DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"energy": energy_distance, "wasserstein": wasserstein_distance}


def _scaled(base: Normal | Laplace | StudentT, factors: dict[str, float]) -> Prior:
    """The same family with a scale for every parameter."""
    names = {name: f"^{re.escape(name)}$" for name in factors}
    if isinstance(base, Normal):
        return Normal(scale={names[name]: factor * base.scale_of(name) for name, factor in factors.items()})
    field = "scale" if isinstance(base, Laplace) else "width"
    return ByName({names[name]: replace(base, **{field: factor * getattr(base, field)}) for name, factor in factors.items()})
