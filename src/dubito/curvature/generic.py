"""Gradients example by example for any weight of any network, by torch.func; what no rule knows ends here."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from dubito.curvature.capture import without_padding
from dubito.model import Model
from dubito.network.examples import Inputs
from dubito.network.recurrent import PLAIN
from dubito.network.weights import in_mode
from dubito.tensors.covariances.propagation import pieces
from dubito.tensors.tree import Buffers, Params, full_precision


class Unrolled(TorchFunctionMode):
    """Recurrent layers step by step: torch's fused ones can neither be batched nor differentiated twice, nor packed under torch.func.
    And an embedding whose padding is a constant in forward mode, too."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in PLAIN:
            return PLAIN[func](*args)
        if func is F.embedding:
            return self._embedding(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _embedding(self, input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
        return without_padding(F.embedding(input, weight, padding_idx, *args, **kwargs), input, weight, padding_idx)


Back = Callable[[Tensor], Params]  # cotangents of an output to gradients of the weights


def backward(output: Callable[[Params], Tensor], live: Params) -> tuple[Tensor, Back]:
    """f and the function from cotangents to gradients, by torch.func; or by plain autograd where the network does what torch.func
    cannot enter (an `autograd.Function` without `setup_context`)."""
    try:
        f, back, *_ = vjp(output, live)
        return f, lambda s: back(s)[0]
    except RuntimeError:  # an error of the network itself comes back here
        return _plain_backward(output, live)


def _plain_backward(output: Callable[[Params], Tensor], live: Params, *, again: bool = False) -> tuple[Tensor, Back]:
    """The same by plain autograd; `again` if the gradients are to be differentiated."""
    points = {name: leaf.detach().requires_grad_() for name, leaf in live.items()}
    with torch.enable_grad():
        f = output(points)

    def back(s: Tensor) -> Params:
        """Gradients of <s, f>, zero where there are none."""
        leaves = list(points.values())
        if not f.requires_grad:
            return {name: torch.zeros_like(leaf) for name, leaf in live.items()}
        slopes = torch.autograd.grad(
            f, leaves, s, retain_graph=True, create_graph=again, allow_unused=True, materialize_grads=True
        )
        return dict(zip(points, slopes, strict=True))

    return f.detach(), back


def along(output: Callable[[Params], Tensor], live: Params, delta: Params) -> tuple[Tensor, Tensor]:
    """f and J delta: by forward mode, or where some function has none by differentiating J^T u in u."""
    with sdpa_kernel(SDPBackend.MATH):  # torch's fast attention has neither
        with suppress(RuntimeError):
            f, slope, *_ = jvp(output, (live,), (delta,))
            return f, slope
        with suppress(RuntimeError):
            f, back, *_ = vjp(output, live)
            _, twice, *_ = vjp(lambda u: back(u)[0], torch.zeros_like(f))
            return f, twice(delta)[0]
        return _plain_along(output, live, delta)


def _plain_along(output: Callable[[Params], Tensor], live: Params, delta: Params) -> tuple[Tensor, Tensor]:
    """f and J delta by plain autograd. A backward pass that was written by hand may not be differentiable, and torch does not always
    say so: the adjoint tells."""
    f, back = _plain_backward(output, live, again=True)

    def inner(slopes: Params) -> Tensor:
        """The inner product with delta."""
        return torch.stack([(slope * delta[name]).sum() for name, slope in slopes.items()]).sum()

    with torch.enable_grad():
        u = torch.zeros_like(f).requires_grad_()
        total = inner(back(u))
    slope = torch.zeros_like(f)
    if total.requires_grad:
        slope = torch.autograd.grad(total, u, allow_unused=True, materialize_grads=True)[0]
    s = torch.linspace(1, 2, f.numel(), dtype=f.dtype, device=f.device).view_as(f)
    forwards, backwards = (s * slope).sum(), inner(back(s)).detach()
    if not torch.isclose(forwards, backwards, rtol=1e-2, atol=1e-3 * float((s * slope).abs().sum())):
        raise ValueError(
            "the backward pass of an autograd.Function in the network cannot be differentiated, as linear functions and products with "
            "the curvature need: write its setup_context and jvp, or use Laplace with structure='diagonal', 'kronecker' or 'dense'"
        )
    return f, slope


def example_gradients(
    model: Model, params: Params, x: Inputs, buffers: Buffers, names: tuple[str, ...], cotangents: Tensor
) -> Params:
    """Leaves [K, B, *shape]: gradients of <s_k, f> for cotangents [K, B, *D, C], each example on its own; or [K, 1, B, *D, C] of rows
    that are coupled, which are one example."""
    batch = cotangents.shape[1]
    live = {name: params[name].detach() for name in names}
    fixed = {name: leaf.detach() for name, leaf in params.items() if name not in live}
    buffers = {name: leaf.detach() for name, leaf in buffers.items()}
    inputs, structure = tree_flatten(x)
    # the rest is the same for all examples
    own = [isinstance(leaf, Tensor) and leaf.shape[:1] == (batch,) and not model.coupled for leaf in inputs]

    def one(inputs: list[Any], s: Tensor) -> Params:  # s [K, *D, C]
        """Gradients of one example for cotangents s [K, *D, C]."""

        def output(live: Params) -> Tensor:
            """The network's output for one example."""
            x = tree_unflatten([leaf.unsqueeze(0) if each else leaf for leaf, each in zip(inputs, own, strict=True)], structure)
            with Unrolled():
                f = model.call({**fixed, **live}, x, buffers)[0]
            return f if model.coupled else f.squeeze(0)

        f, back = backward(output, live)
        # one after another: torch's batching rule of PReLU's backward pass mixes up two batched axes of different origin
        rows = [back(one) for one in s.to(f.dtype).unbind()]
        return {name: torch.stack([row[name] for row in rows]) for name in live}

    def of(index: slice | int) -> list[Any]:
        """The inputs of some examples."""
        return [leaf[index] if each else leaf for leaf, each in zip(inputs, own, strict=True)]

    found: list[Params] = []
    size = cotangents.shape[0] * sum(leaf.numel() for leaf in live.values())
    with in_mode(model.network, False), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*performance drop because we have not yet implemented the batching rule.*")
        for piece in pieces(batch, size):
            s = cotangents[:, piece]
            try:
                dims = [0 if each else None for each in own]
                found.append(vmap(one, in_dims=(dims, 1), out_dims=1)(of(piece), s))
            except RuntimeError:  # what cannot be batched runs one after another; an error of the network itself comes back here
                rows = [one(of(i), cotangents[:, i]) for i in range(batch)[piece]]
                found.append({name: torch.stack([row[name] for row in rows], 1) for name in live})
    joined = {name: torch.cat([part[name] for part in found], 1) for name in live}
    return {name: full_precision(leaf) for name, leaf in joined.items()}
