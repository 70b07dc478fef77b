"""Other places to start from: the weights of a network initialized again."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dubito.network.weights import copy_network
from dubito.tensors.randomness import fork_rng
from dubito.tensors.tree import Params

if TYPE_CHECKING:
    from typing_extensions import TypeIs


def reinitialize(
    network: nn.Module, params: Params, seed: int, initialize: Callable[[nn.Module], object] | None = None
) -> Params:
    """`params` as they would be had the network been initialized again, by `initialize`, or by what its modules bring along.

    That is `reset_parameters()`, as torch's layers have it, and `_init_weights(module)`, by which the networks of transformers and timm
    initialize all of their parts. Scales and shifts of norms that have neither become 1 and 0.
    """
    network = copy_network(network)
    with fork_rng(seed), torch.no_grad():
        if initialize is not None:
            initialize(network)
        else:
            _reset_parameters(network, [name for name in params if ":" not in name])
    fresh = dict(network.named_parameters())
    return {name: fresh[name].detach().clone() if name in fresh else leaf.clone() for name, leaf in params.items()}


NORM_STARTS = {"weight": 1.0, "scale": 1.0, "gamma": 1.0, "g": 1.0, "bias": 0.0, "beta": 0.0}


def _takes_a_module(initialize: Any) -> TypeIs[Callable[[nn.Module], object]]:
    """Whether it is a function of one argument."""
    return callable(initialize) and len(inspect.signature(initialize).parameters) == 1


def _reset_parameters(network: nn.Module, wanted: list[str]) -> None:
    """Initialize every layer again; a wanted parameter that no layer initializes is an error."""
    for name, p in network.named_parameters():
        if name in wanted and p.is_floating_point():
            p.fill_(torch.nan)  # whatever is still so afterwards, nothing has initialized
    for module in reversed(list(network.modules())):  # parts before wholes, whose word is the last
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            reset()
        elif _takes_a_module(initialize := getattr(module, "_init_weights", None)):
            for part in reversed(list(module.modules())):
                initialize(part)
        elif "norm" in type(module).__name__.lower():
            for name, p in module.named_parameters(recurse=False):
                if p.isnan().any() and name in NORM_STARTS:
                    p.fill_(NORM_STARTS[name])
    missed = [name for name, p in network.named_parameters() if name in wanted and p.isnan().any()]
    if missed:
        raise ValueError(
            f"no reset_parameters() initializes {missed}, so all members would start alike there: define reset_parameters() in the "
            "module that holds them, or give Ensemble(initialize=function) that initializes a network anew"
        )
