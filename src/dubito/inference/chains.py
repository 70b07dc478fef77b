"""What samplers with several chains share: where the chains begin, and their draws as a posterior."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from dubito.inference.method import Start
from dubito.model import Model, Target
from dubito.model.priors import Prior, prior_params
from dubito.network.inspect import layers_of
from dubito.network.reinitialize import reinitialize
from dubito.posteriors import Posterior, Samples
from dubito.tensors import store, tree
from dubito.tensors.checks import require
from dubito.tensors.tree import Buffers, Params

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
TRACE, BUFFER = "trace:", "buffer:"  # names of a draw that are no weights: what was noted of it, and buffers that differ


def check_precision(params: Params) -> None:
    """Raise for weights in half precision, in which the small steps of a sampler, and draws near a mean, are lost."""
    require(
        all(leaf.dtype.itemsize >= 4 for leaf in params.values()),
        "weights in half precision lose small steps and small differences between draws: keep the network in float32, and give "
        'fit(precision="bfloat16") to run it in half precision',
    )


def batching_pays(model: Model) -> bool:
    """Whether chains or members run faster in one batched pass than one after another.

    They do where launching many small operations costs more than doing them: not for convolutions or wide layers on a CPU, whose
    batched kernels are slower, nor for recurrent layers and weight norm, which have no batched kernel.
    """
    if layers_of(model.network, nn.RNNBase) or any(type(module).__name__ == "_WeightNorm" for module in model.network.modules()):
        return False
    small = sum(p.numel() for p in model.network.parameters()) <= 100_000
    return model.device.type != "cpu" or (small and not layers_of(model.network, CONVOLUTIONS))


def samples(target: Target, draws: store.Draws, buffers: Buffers, sampler: dict[str, Any]) -> Posterior:
    """Draws with leaves [chains, ...], and what was noted of them, as a posterior; its draws come chain after chain."""
    stacked = draws.stacked()  # [n, chains, ...]
    chains = next(iter(stacked.values())).shape[1]
    flat = {name: leaf.transpose(0, 1).flatten(0, 1) for name, leaf in stacked.items()}
    trace = {name.removeprefix(TRACE): leaf for name, leaf in flat.items() if name.startswith(TRACE)}
    apart = {name.removeprefix(BUFFER): leaf for name, leaf in flat.items() if name.startswith(BUFFER)}
    params = {name: leaf for name, leaf in flat.items() if not name.startswith((TRACE, BUFFER))}
    shared = {name: leaf for name, leaf in buffers.items() if name not in apart}
    return Samples(target.model, params, shared, apart, chains=chains, trace=trace, sampler=sampler)


def starts(target: Target, start: Start, chains: int, generator: torch.Generator) -> Params:
    """Where the chains begin, leaves [C, ...].

    At the starts that were given, or all at the one; otherwise the first at the network's weights and the others at newly initialized
    ones. Starts that lie far apart make agreement between the chains meaningful.
    """
    if start.draws is not None:
        count = tree.count(start.draws)
        require(
            count >= chains,
            f"start holds {count} settings of the weights for {chains} chains: give one for each, or chains={count}",
        )
        return tree.select(start.draws, _evenly(count, chains))
    if start.given or chains == 1:
        return tree.repeat(start.params, chains)
    seeds = torch.randint(2**62, (chains - 1,), generator=generator, device=generator.device).tolist()
    try:
        others = [reinitialize(target.model.network, start.params, seed) for seed in seeds]
    except ValueError:  # some parameter has no initialization of its own
        believed = prior_params(start.params)
        others = [{**start.params, **target.model.prior.sample(believed, generator)} for _ in seeds]
    return tree.stack([start.params, *others])


def own_buffers(start: Start, chains: int) -> Buffers:
    """The buffers that the settings in `start` have for themselves, of those at which the chains begin, leaves [C, ...]."""
    return tree.select(start.own, _evenly(tree.count(start.own), chains)) if start.own else {}


def _evenly(count: int, chains: int) -> Tensor:
    """Which of `count` settings are for the chains, [C]."""
    return torch.linspace(0, count - 1, chains).round().long()


def has_density(prior: Prior, params: Params) -> bool:
    """Whether the prior has a density there."""
    with torch.no_grad():
        return not prior.log_prob(tree.apply(Tensor.double, prior_params(params))).isneginf()


def move_into_support(prior: Prior, stacked: Params, generator: torch.Generator) -> Params:
    """Starts where the prior has a density.

    Networks are initialized without regard to it: leaves of a chain that lie outside its support become draws of the prior, and all
    others stay as they are.
    """
    chains = [tree.select(stacked, number) for number in range(tree.count(stacked))]
    for chain in chains:
        with suppress(NotImplementedError, ValueError):  # it cannot be drawn from: `Chains.begin` says what is wrong
            _move_inside(prior, chain, generator)
    return tree.stack(chains)


def _move_inside(prior: Prior, params: Params, generator: torch.Generator) -> None:
    """Replace leaves outside the prior's support, in place."""
    for _ in range(10):  # a draw may be rounded to the edge of the support
        if has_density(prior, params):
            return
        drawn = prior.sample(prior_params(params), generator)
        if has_density(prior, drawn):
            params |= {name: leaf for name, leaf in drawn.items() if not has_density(prior, {**drawn, name: params[name]})}


def units(target: Target, params: Params) -> Tensor:
    """The prior's standard deviation of every coordinate, [P], at the target's temperature: the length in which steps are measured."""
    prior, scales = target.model.prior, {name: torch.ones_like(leaf) for name, leaf in params.items()}
    if prior.normal is not None:
        weights = {name: leaf for name, leaf in params.items() if ":" not in name}
        scales |= {name: leaf**-0.5 for name, leaf in prior.normal.precision(weights).items()}
    else:
        scales |= prior.units(prior_params(params))
    return tree.flatten(scales) * math.sqrt(target.temperature)
