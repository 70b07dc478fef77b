r"""Draws of the linearized function: f(x) + J(x) delta for draws delta of the weights' departures from their mean.

Each takes one pass in forward mode, however many outputs there are, and is the same function for every x.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from dubito.curvature.generic import Unrolled, along
from dubito.model import Model
from dubito.network.examples import Inputs
from dubito.network.weights import in_mode
from dubito.posteriors.predict.sampled import Stack, draw_groups, read_examples
from dubito.tensors import tree
from dubito.tensors.covariances import Covariance
from dubito.tensors.tree import Buffers, Params

DRAWS = 30  # functions that stand for a Gaussian where outputs are too many


def prepared(model: Model, x: Inputs, params: Params, buffers: Buffers) -> tuple[Any, Params, Buffers]:
    """Inputs on the device; and all tensors fit for gradients, which those made in inference mode are not."""
    x = read_examples(model, x, params, buffers)
    x, params, buffers = (
        tree.apply_leaves(lambda leaf: leaf.clone() if leaf.is_inference() else leaf, value) for value in (x, params, buffers)
    )
    return x, params, buffers


@torch.inference_mode(False)
def functions(model: Model, x: Inputs, *, params: Params, buffers: Buffers, deltas: Params) -> Tensor:
    """f(x) + J(x) delta for every delta, [S, B, *D, C]: draws of the linearized function, joint over all inputs."""
    stack = Stack(tree.count(deltas))
    _each(model, x, params, buffers, [deltas], lambda f, slope: stack.add((f + slope).unsqueeze(0)))
    return stack.whole


@torch.inference_mode(False)
def drawn_functions(
    model: Model,
    x: Inputs,
    *,
    params: Params,
    buffers: Buffers,
    covariance: Covariance,
    draws: int,
    memory: float,
    generator: torch.Generator | None,
) -> Tensor:
    """So many draws of the linearized function, [S, B, *D, C]."""
    stack = Stack(draws)
    deltas = (covariance.draws(n, generator) for n in draw_groups(draws, covariance, memory))
    _each(model, x, params, buffers, deltas, lambda f, slope: stack.add((f + slope).unsqueeze(0)))
    return stack.whole


@torch.inference_mode(False)
def drawn_variances(
    model: Model,
    x: Inputs,
    *,
    params: Params,
    buffers: Buffers,
    covariance: Covariance,
    draws: int,
    memory: float,
    generator: torch.Generator | None,
) -> Tensor:
    """The mean square of J(x) delta over so many draws, [B, *D, C]: an unbiased estimate of the variances of f."""
    total: list[Tensor] = []

    def _add(f: Tensor, slope: Tensor) -> None:
        square = tree.full_precision(slope).square()
        total[:] = [total[0].add_(square) if total else square]

    deltas = (covariance.draws(n, generator) for n in draw_groups(draws, covariance, memory))
    _each(model, x, params, buffers, deltas, _add)
    return total[0] / draws


def _each(
    model: Model, x: Inputs, params: Params, buffers: Buffers, deltas: Iterable[Params], use: Callable[[Tensor, Tensor], None]
) -> None:
    """Hand f(x) and J(x) delta to `use`, for one delta after another of several groups."""
    x, params, buffers = prepared(model, x, params, buffers)
    buffers = {name: leaf.detach() for name, leaf in buffers.items()}
    with torch.no_grad(), in_mode(model.network, False), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own deprecated parts
        for group in deltas:
            live = {name: params[name].detach() for name in group}
            fixed = {name: leaf.detach() for name, leaf in params.items() if name not in live}

            def output(live: Params, fixed: Params = fixed) -> Tensor:
                """The network's output, as a function of the weights that move."""
                with Unrolled():
                    return model.call({**fixed, **live}, x, buffers)[0]

            for i in range(tree.count(group)):
                delta = tree.select(group, i)
                use(*along(output, live, {name: leaf.to(live[name].dtype) for name, leaf in delta.items()}))
