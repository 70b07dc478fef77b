"""Other places to start from: the weights of a network initialized again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from dubito.network.weights import copy_network
from dubito.tensors.randomness import fork_rng
from dubito.tensors.tree import Params


def reinitialize(
    network: nn.Module, params: Params, seed: int, initialize: Callable[[nn.Module], object] | None = None
) -> Params:
    """`params` as they would be had the network been initialized again, by the `reset_parameters` of its layers or by `initialize`."""
    network = copy_network(network)
    with fork_rng(seed), torch.no_grad():
        if initialize is not None:
            initialize(network)
        else:
            _reset_parameters(network, [name for name in params if ":" not in name])
    fresh = dict(network.named_parameters())
    return {name: fresh[name].detach().clone() if name in fresh else leaf.clone() for name, leaf in params.items()}


def _reset_parameters(network: nn.Module, wanted: list[str]) -> None:
    """Initialize every layer again; a wanted parameter that no layer initializes is an error."""
    for name, p in network.named_parameters():
        if name in wanted and p.is_floating_point():
            p.fill_(torch.nan)  # whatever is still so afterwards, nothing has initialized
    for module in reversed(list(network.modules())):  # parts before wholes, whose word is the last
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            reset()
    missed = [name for name, p in network.named_parameters() if name in wanted and p.isnan().any()]
    if missed:
        raise ValueError(
            f"no reset_parameters() initializes {missed}, so all members would start alike there: define reset_parameters() in the "
            "module that holds them, or give Ensemble(initialize=function) that initializes a network anew"
        )
