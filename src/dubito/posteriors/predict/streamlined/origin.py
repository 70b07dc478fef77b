"""Where the values of an attention come from: the layer that made them, found once in the trace.

Between a linear layer and the attention there are only operations that move numbers about: they split off q, k and v and the heads.
They are replayed on the numbers' positions, for three examples, and what comes out tells which of the layer's outputs each head has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dubito.posteriors.predict.streamlined.moments import Weight, mean_of, var_of
from dubito.posteriors.predict.streamlined.trace import Ref, Size, Step, Trace, refs
from dubito.tensors.covariances.noise import Rotated

MOVES = {
    "view", "reshape", "unflatten", "flatten", "transpose", "permute", "movedim", "swapaxes", "squeeze", "unsqueeze", "contiguous",
    "clone", "chunk", "split", "unbind", "select", "narrow", "getitem", "tensor_split",
}  # fmt: skip


class Origin(NamedTuple):
    """A linear layer with random weights, and which of its outputs are which head's."""

    input: Any  # [B, T, I], or [T, B, I]
    weight: Weight
    bias: Any
    channels: Any  # [H, D], among the layer's outputs; or (start, H, D) where they stand in order, so that no copy is made
    swapped: bool  # tokens before examples

    def parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows r [B, T, I], variances S [H, D, I] and s [H, D]: what the weights make of a sum of rows has the variance S r^2 + s."""
        m = mean_of(self.input).detach()
        rows = m.transpose(0, 1) if self.swapped else m
        block, bias = self.weight.block, var_of(self.bias)
        if not isinstance(block, Rotated):  # independent, or taken to be
            return rows, self.of(self.weight.var), None if bias is None else self.of(bias)
        basis = block.basis
        rows = torch.nn.functional.linear(rows, basis[:-1].mT, basis[-1]) if block.biased else rows @ basis
        return rows, self.of(block.marginal), None if bias is None or block.biased else self.of(bias)

    def of(self, outputs: Tensor) -> Tensor:
        """[H, D, ...] of something [O, ...] that the layer's outputs have."""
        if isinstance(self.channels, Tensor):
            return outputs[self.channels]
        start, heads, width = self.channels
        return outputs[start : start + heads * width].unflatten(0, (heads, width))


class Found(NamedTuple):
    """An origin in the trace."""

    step: Step  # the linear layer
    channels: Tensor
    swapped: bool


def origin(found: Trace, value: Any, uncertain: set[int]) -> Found | None:
    """Of the values, if it is a linear layer with random weights over tokens and the way from there is understood."""
    if not isinstance(value, Ref):
        return None
    makers = {ref.slot: step for step in found.steps for ref in refs(step.out)}
    path: list[tuple[Step, Callable[[Any], Any]]] = []
    slot = value.slot
    while (step := makers.get(slot)) is not None and step.name in MOVES:
        first = step.args[0] if step.args else None
        others = [*step.args[1:], *step.kwargs.values()]
        if not isinstance(first, Ref) or any(True for _ in refs(others)):
            return None
        path.append((step, _picked(step.out, slot)))
        slot = first.slot
    if step is None or step.name != "linear" or len(step.args) < 2 or step.args[1].slot not in uncertain:
        return None
    shape = found.shapes[slot]
    if len(shape) != 3:
        return None
    where = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for move, pick in reversed(path):
        where = pick(move.func(where, *_plain(move.args[1:], found.batch), **_plain(move.kwargs, found.batch)))
    return _understood(step, where, shape)


def _picked(out: Any, slot: int) -> Callable[[Any], Any]:
    if isinstance(out, Ref):
        return lambda value: value
    index = next(i for i, part in enumerate(out) if isinstance(part, Ref) and part.slot == slot)
    return lambda value: value[index]


def _plain(value: Any, batch: int) -> Any:
    if isinstance(value, Size):
        return value.constant + value.slope * batch
    if isinstance(value, dict):
        return {key: _plain(item, batch) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_plain(item, batch) for item in (value.start, value.stop, value.step)))
    return type(value)(_plain(item, batch) for item in value) if isinstance(value, tuple | list) else value


def _understood(step: Step, where: Tensor, shape: tuple[int, ...]) -> Found | None:
    """Positions [B, H, T, D] (or [B, T, D], or [B H, T, D]) in the layer's output, read as tokens and channels."""
    rows, channels = where // shape[-1], where % shape[-1]
    for swapped in (False, True):
        tokens, batch = (shape[0], shape[1]) if swapped else (shape[1], shape[0])
        if where.ndim < 3 or where.shape[-2] != tokens or where.shape[:-2].numel() % batch:
            continue
        row, channel = (t.reshape(batch, -1, tokens, where.shape[-1]) for t in (rows, channels))
        grid = torch.arange(batch * tokens)
        grid = grid.reshape(tokens, batch).mT if swapped else grid.reshape(batch, tokens)
        alone = channel[:1, :, :1]
        if torch.equal(row, grid[:, None, :, None].expand(row.shape)) and torch.equal(channel, alone.expand(channel.shape)):
            return Found(step, alone[0, :, 0].clone(), swapped)
    return None
