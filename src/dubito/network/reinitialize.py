"""Other places to start from: the weights of a network initialized again."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

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
    initialize all of their parts. Scales and shifts of norms that have neither become 1 and 0. A parametrized weight starts as that of
    the plain layer does.
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


def _without_parametrizations(module: nn.Module) -> nn.Module:
    """A plain layer like a parametrized one, which torch makes by a class derived from the plain layer's."""
    kind = type(module).__bases__[0]
    plain: nn.Module = object.__new__(kind)
    plain.__dict__ = {name: dict(held) if isinstance(held, dict) else held for name, held in module.__dict__.items()}
    parametrized = plain._modules.pop("parametrizations")
    weights = {name: getattr(module, name) for name in parametrized} | module._parameters  # pyright: ignore
    plain._parameters = {name: leaf if leaf is None else nn.Parameter(leaf.detach().clone()) for name, leaf in weights.items()}
    return plain


def _start_as(module: nn.Module, plain: nn.Module) -> None:
    """Start a parametrized layer where the plain one does; not if that would be in its buffers (orthogonal matrices), which members
    share."""
    plain.reset_parameters()  # pyright: ignore[reportCallIssue]
    before = [buffer.clone() for buffer in module.buffers()]
    for name in module.parametrizations:  # pyright: ignore[reportGeneralTypeIssues]
        setattr(module, name, getattr(plain, name).detach())
        if not all(torch.equal(*pair) for pair in zip(before, module.buffers(), strict=True)):
            for p in module.parametrizations[name].parameters():  # pyright: ignore
                p.fill_(torch.nan)
    for name, p in module.named_parameters(recurse=False):
        p.copy_(plain.get_parameter(name))


def _reset_parameters(network: nn.Module, wanted: list[str]) -> None:
    """Initialize every layer again; a wanted parameter that no layer initializes is an error."""
    plain = {name: _without_parametrizations(module) for name, module in network.named_modules() if is_parametrized(module)}
    for name, p in network.named_parameters():
        if name in wanted and p.is_floating_point():
            p.fill_(torch.nan)  # whatever is still so afterwards, nothing has initialized
    for path, module in reversed(list(network.named_modules())):  # parts before wholes, whose word is the last
        if path in plain and callable(getattr(plain[path], "reset_parameters", None)):
            _start_as(module, plain[path])
            continue
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
