"""Gradients example by example for any weight of any network, by torch.func; what no rule knows ends here."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import jvp, vjp, vmap
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


def along(output: Callable[[Params], Tensor], live: Params, delta: Params) -> tuple[Tensor, Tensor]:
    """f and J delta: by forward mode, or where some function has none by differentiating J^T u in u."""
    try:
        f, slope, *_ = jvp(output, (live,), (delta,))
        return f, slope
    except NotImplementedError:
        f, back, *_ = vjp(output, live)
        _, twice, *_ = vjp(lambda u: back(u)[0], torch.zeros_like(f))
        return f, twice(delta)[0]


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

        f, back, *_ = vjp(output, live)
        # one after another: torch's batching rule of PReLU's backward pass mixes up two batched axes of different origin
        rows = [back(one)[0] for one in s.to(f.dtype).unbind()]
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
