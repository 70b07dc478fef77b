"""Functions drawn before any data are seen."""

from __future__ import annotations

import torch

from dubito.model import Model
from dubito.model.likelihoods import likelihood_params
from dubito.model.priors import prior_params
from dubito.network.examples import Inputs
from dubito.posteriors.predict.sampled import GIGABYTE, room, sampled
from dubito.posteriors.predictive import LatentMixture
from dubito.tensors import randomness, tree


def prior_predictive(model: Model, x: Inputs, *, draws: int = 100, seed: int = 0, memory: float | None = None) -> LatentMixture:
    """What the model expects at x before it sees data: the predictive of weights drawn from its prior.

    Its `means`, [draws, B, ..., C], are the functions. Hyperparameters are drawn too; a learned noise is taken where it starts, since
    mostly it has no prior; buffers are the network's. `memory` bounds what the weights of some draws may take at a time, in gigabytes.

    >>> import dubito
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 200), torch.nn.ReLU(), torch.nn.Linear(200, 1))
    >>> model = dubito.Model(net, dubito.Gaussian(scale=0.1), dubito.priors.Normal.fan_in(net, 2**0.5, bias=0.1))
    >>> p = prior_predictive(model, torch.tensor([[0.0], [1.0], [2.0]]), draws=500)
    >>> p.means.shape, bool((p.uncertainty.epistemic.diff(dim=0) > 0).all())
    (torch.Size([500, 3, 1]), True)
    """
    if draws < 1:
        raise ValueError(f"draws are at least 1; got {draws}")
    params, generator = model.parameters(), randomness.generator(model.device, seed, "prior predictive")
    believed, shared = prior_params(params), {**model.buffers(), **likelihood_params(params)}
    size = sum(leaf.numel() * leaf.element_size() for leaf in believed.values())
    memory = room(memory, model.device)
    at_once, parts = max(1, int(memory * GIGABYTE / size)), []
    for start in range(0, draws, at_once):
        drawn = [model.prior.sample(believed, generator) for _ in range(min(at_once, draws - start))]
        weights = {name: leaf for name, leaf in tree.stack(drawn).items() if ":" not in name}
        parts.append(sampled(model, x, shared=shared, stacked=weights, memory=memory))
    means = parts[0].means if len(parts) == 1 else torch.cat([part.means for part in parts])
    return LatentMixture(model.likelihood, means, params=likelihood_params(params))
