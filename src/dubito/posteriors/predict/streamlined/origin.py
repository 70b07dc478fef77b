"""Where the values of an attention come from: the layer that made them, found once in the trace.

Between a linear layer and the attention there are only operations that move numbers about: they split off q, k and v and the heads.
They are replayed on the numbers' positions, for three examples, and what comes out tells which of the layer's outputs each head has.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dubito.posteriors.predict.streamlined.moments import Value, Weight, mean_of, var_of
from dubito.posteriors.predict.streamlined.operations import Step, Trace, resolve, slot_of
from dubito.tensors.covariances.noise import Rotated

MOVES = {
    "view", "reshape", "unflatten", "flatten", "transpose", "permute", "movedim", "swapaxes", "squeeze", "unsqueeze", "contiguous",
    "clone", "chunk", "split", "unbind", "select", "narrow", "getitem", "tensor_split",
}  # fmt: skip


class Origin(NamedTuple):
    """A linear layer with random weights, and which of its outputs are which head's."""

    input: Value  # [B, T, I], or [T, B, I]
    weight: Weight
    bias: Value | None
    channels: (
        Tensor | tuple[int, int, int]
    )  # [H, D], among the layer's outputs; or (start, H, D) where they stand in order, so that no copy is made
    swapped: bool  # tokens before examples

    def parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows r [B, T, I], variances S [H, D, I] and s [H, D]: what the weights make of a sum of rows has the variance S r^2 + s."""
        m = mean_of(self.input).detach()
        rows = m.transpose(0, 1) if self.swapped else m
        block, bias = self.weight.block, var_of(self.bias)
        if not isinstance(block, Rotated):  # independent, or taken to be
            return rows, self.of(self.weight.var), None if bias is None else self.of(bias)
        return block.rotate(rows), self.of(block.marginal), None if bias is None or block.biased else self.of(bias)

    def of(self, outputs: Tensor) -> Tensor:
        """[H, D, ...] of something [O, ...] that the layer's outputs have."""
        if isinstance(self.channels, Tensor):
            return outputs[self.channels]
        start, heads, width = self.channels
        return outputs[start : start + heads * width].unflatten(0, (heads, width))


class LayerOutputs(NamedTuple):
    """A linear layer in the trace, and which of its outputs the values are."""

    step: Step
    channels: Tensor  # [H, D]
    swapped: bool  # tokens before examples


def find_origin(trace: Trace, slot: int | None, uncertain: set[int]) -> LayerOutputs | None:
    """Of the values in that slot, if it is a linear layer with random weights over tokens and the way from there is understood."""
    makers, path = trace.makers, []
    step = makers.get(slot)
    while step is not None and slot is not None and step.name in MOVES:
        if step.source is None or len(step.inputs) > 1:
            return None
        path.append((step, step.outputs.index(slot)))
        slot = step.source
        step = makers.get(slot)
    if step is None or step.name != "linear" or len(step.args) < 2 or slot_of(step.args[1]) not in uncertain:
        return None
    shape = trace.shapes[step.out.slot]
    return _read(step, _replay(path, shape, trace.batch), shape) if len(shape) == 3 else None


def _replay(path: list[tuple[Step, int]], shape: tuple[int, ...], batch: int) -> Tensor:
    """Positions in a tensor of that shape, moved as the steps do (the last comes first); of several results one is followed."""
    where = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for step, place in reversed(path):
        args, kwargs = resolve((step.args[1:], step.kwargs), lambda slot: slot, lambda size: size.value(batch))
        moved = step.func(where, *args, **kwargs)
        where = moved if step.result is not None else moved[place]
    return where


def _read(step: Step, where: Tensor, shape: tuple[int, ...]) -> LayerOutputs | None:
    """Positions [B, H, T, D] (or [B, T, D], or [B H, T, D]) in the layer's output, read as tokens and channels."""
    rows, channels = where // shape[-1], where % shape[-1]
    for swapped in (False, True):
        tokens, batch = (shape[0], shape[1]) if swapped else (shape[1], shape[0])
        if where.ndim < 3 or where.shape[-2] != tokens or where.shape[:-2].numel() % batch:
            continue
        row, channel = (t.reshape(batch, -1, tokens, where.shape[-1]) for t in (rows, channels))
        grid = torch.arange(batch * tokens)
        grid = grid.reshape(tokens, batch).mT if swapped else grid.reshape(batch, tokens)
        first = channel[:1, :, :1]
        if torch.equal(row, grid[:, None, :, None].expand(row.shape)) and torch.equal(channel, first.expand(channel.shape)):
            return LayerOutputs(step, first[0, :, 0].clone(), swapped)
    return None
