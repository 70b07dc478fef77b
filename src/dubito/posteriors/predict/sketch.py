r"""Draws of the Gaussian that the adjoint's sweeps would find, where an example has too many outputs for a sweep each.

A draw is :math:`f + J \epsilon`, with noise :math:`\epsilon` of the weights and at every place where a function adds noise of its
own. The products :math:`J \epsilon` come from differentiating :math:`J^T u` in u: backwards, because only there variances are fixed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dubito.curvature.capture import Capture, example_count
from dubito.model import Model
from dubito.network.examples import Inputs
from dubito.posteriors.predict.sampled import GIGABYTE, draw_groups
from dubito.tensors import tree
from dubito.tensors.covariances import Covariance
from dubito.tensors.randomness import derive_seed, uniforms_from
from dubito.tensors.tree import Buffers, Params

HELD = 16  # numbers that a pass holds, for each of a layer's outputs


def sketch(
    model: Model,
    x: Inputs,
    *,
    params: Params,
    buffers: Buffers,
    covariance: Covariance,
    draws: int,
    generator: torch.Generator,
    memory: float = 1.0,
) -> Tensor:
    """Draws of f [S, B, *D, C] at x, of a model that tells a `Capture` of its noise; weights are drawn once for all examples. `memory`
    changes how many draws and examples are computed at a time, and no number."""
    size, first = example_count(x), 0
    groups, step = [], _examples_at_a_time(model, x, params, buffers, memory)
    seed = int(torch.randint(2**62, (1,), generator=generator, device=generator.device))
    for n in draw_groups(draws, covariance, memory):
        deltas, parts = covariance.draws(n, generator), []
        seeds = [derive_seed(seed, first + i) for i in range(n)]
        for start in range(0, size, step):
            some = tree.apply_leaves(lambda leaf: leaf[start : start + step] if leaf.shape[:1] == (size,) else leaf, x)  # noqa: B023
            parts.append(torch.stack(list(_draws(model, some, params, buffers, deltas, seeds, start))))
        groups.append(torch.cat(parts, 1))
        first += n
    f = torch.cat(groups)
    return f.float() if f.dtype.itemsize < 4 else f


def _run(model: Model, x: Inputs, params: Params, buffers: Buffers) -> tuple[Tensor, Capture]:
    """The output with its graph, and the places where noise enters."""
    capture = Capture({})
    with torch.enable_grad(), capture.listening():
        f, _ = model.call(params, x, {name: leaf.detach() for name, leaf in buffers.items()})
    return f, capture


def _draws(
    model: Model, x: Inputs, params: Params, buffers: Buffers, deltas: Params, seeds: list[int], start: int
) -> Iterator[Tensor]:
    """A draw for each seed, at examples of which the first is number `start` of all."""
    live = {name: params[name].detach().requires_grad_() for name in deltas}
    f, capture = _run(model, x, {**params, **live}, buffers)
    u = torch.zeros_like(f, requires_grad=True)
    roots = [tap.var.clamp_min(0).sqrt() for tap in capture.taps]
    inputs: list[Any] = [*live.values(), *(tap.edge for tap in capture.taps)]
    slopes = torch.autograd.grad(f, inputs, u, create_graph=True, allow_unused=True)
    used = [i for i, slope in enumerate(slopes) if slope is not None and slope.requires_grad]
    for draw, seed in enumerate(seeds):
        noise = [
            root * _normals(derive_seed(seed, i), root, tap.axis, start)
            for i, (root, tap) in enumerate(zip(roots, capture.taps, strict=True))
        ]
        along = [*(deltas[name][draw].to(leaf.dtype) for name, leaf in live.items()), *noise]
        (moved,) = torch.autograd.grad(
            [slopes[i] for i in used], u, [along[i].expand_as(slopes[i]) for i in used], retain_graph=True
        )  # fmt: skip
        yield f.detach() + moved


def _normals(seed: int, like: Tensor, axis: int, start: int) -> Tensor:
    """Normals that depend on the seed, the number of the example and the place within it, whatever examples come with it."""
    shape = like.movedim(axis, 0).shape
    each = shape[1:].numel()
    keys = torch.arange(start * each, (start + shape[0]) * each, device=like.device) ^ seed
    uniform = uniforms_from(keys).clamp(1e-12, 1 - 1e-12)
    return torch.special.ndtri(uniform).to(like.dtype).view(shape).movedim(0, axis)


def _examples_at_a_time(model: Model, x: Inputs, params: Params, buffers: Buffers, memory: float) -> int:
    """How many examples fit the memory: what noise there is for one of them tells how large a pass is."""
    size = example_count(x)
    one = tree.apply_leaves(lambda leaf: leaf[:1] if leaf.shape[:1] == (size,) else leaf, x)
    live = {name: leaf.detach().requires_grad_(leaf.is_floating_point()) for name, leaf in params.items()}
    _, capture = _run(model, one, live, buffers)
    numbers = sum(tap.var.numel() for tap in capture.taps)
    return max(1, min(size, int(memory * GIGABYTE / 2 / (4 * HELD * max(1, numbers)))))
