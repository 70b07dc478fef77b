"""What operations make of units that only move numbers about, put them side by side, or sum them over positions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dubito.apps.compression.flows import Flow, Flows, Result, filled, has_padding, nothing
from dubito.posteriors.predict.streamlined.operations import PROBE, Arguments, Size, Step

RESHAPES = {"view", "reshape", "unflatten", "squeeze"}
EXPANDS = {"expand", "expand_as"}
ORDERLY = {"flatten", "permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "unsqueeze", "contiguous"}
ASIDE = {"getitem", "flip", "narrow", "select", "chunk", "split", "unbind", "index_select"}  # fit for other axes as they are
AVERAGE = ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")


def pool(flows: Flows, i: int, step: Step) -> Result:
    """Pooling over positions, and interpolation between them: a constant stays one, unless zeros are put around it."""
    average = step.name.startswith("avg")
    given = step.arguments(*(AVERAGE if average else AVERAGE[:1]))
    flow = flows.of(given["input"])
    if flow is None or step.result is None:
        return None
    named = step.name not in ("interpolate", "upsample")
    positions = int(step.name[-2]) if named else len(flows.shape(given["input"].slot)) - 2
    if -flow.axis != positions + 1:
        return None
    bordered = average and has_padding(given.get("padding", 0)) and given.get("count_include_pad", True)
    if bordered or step.name.startswith("lp") or (average and given.get("divisor_override") is not None):
        flow = flow._replace(const=torch.where(flow.const == 0, flow.const, math.nan))
    return flows.unchanged(i, flow)


def reduce(flows: Flows, i: int, step: Step) -> Result:
    """A mean or an extreme over positions."""
    given = step.arguments("input", "dim", "keepdim")
    source = given["input"].slot
    flow, dims = flows.flows.get(source), given.get("dim", given.get("axis"))
    if flow is None or dims is None or step.result is None:
        return None
    shape = flows.shape(source)
    dims = {int(dim) % len(shape) for dim in (dims if isinstance(dims, tuple | list) else (dims,))}
    place = len(shape) + flow.axis
    if place in dims or 0 in dims:
        return None
    const = flow.const
    if step.name == "sum":
        fixed = all(shape[dim] == flows.second[source][dim] for dim in dims)
        const = const * math.prod(shape[dim] for dim in dims) if fixed else nothing(len(const))
    shift = 0 if given.get("keepdim", False) else sum(dim > place for dim in dims)
    return flows.unchanged(i, Flow(flow.axis + shift, flow.units, const))


def move(flows: Flows, i: int, step: Step) -> Result:
    """What only moves numbers: where they go is seen by moving their places."""
    source = step.source
    flow = None if source is None else flows.flows.get(source)
    if source is None or flow is None or len(flow.units) == 1 or not set(step.inputs) - {source} <= set(flows.values):
        return None
    roots = torch.from_numpy(flows.units.roots(flow.units))
    stride = math.prod(flows.shape(source)[flow.axis :][1:])
    moved, edits = [], []
    shapes = (flows.shape(source), flows.second[source])
    for out, fewer in zip(*(_replay(flows, step, *run) for run in zip(shapes, PROBE, strict=True)), strict=True):
        channel = out // stride % len(flow.units)
        axis = _axis(roots[channel])
        if axis is None or out.shape[axis] != fewer.shape[axis]:
            return None
        index = _along(channel, axis)
        edit = _edit(flows, step, flow, out, fewer, axis, index)
        if edit is None:
            return None
        const = flow.const[index]
        const = const if _equal(flow.const[channel], const, axis) else nothing(len(index))
        moved.append(Flow(axis - out.ndim, flow.units[index.numpy()], const))
        edits.append(edit)
    kinds = {kind for kind, _ in edits}
    if len(kinds) != 1:
        return None
    flows.edit(i, kinds.pop(), parts=[given for _, given in edits if given])
    return moved


def _replay(flows: Flows, step: Step, shape: tuple[int, ...], batch: int) -> list[Tensor]:
    """The places of numbers in a tensor of that shape, moved as the operation moves them."""
    places = torch.arange(math.prod(shape)).reshape(shape)
    args, kwargs = filled((step.args, step.kwargs), lambda slot: places if slot == step.source else flows.values[slot], batch)
    result = step.func(*args, **kwargs)
    return list(result) if isinstance(result, tuple | list) else [result]


def _edit(
    flows: Flows, step: Step, flow: Flow, out: Tensor, fewer: Tensor, axis: int, index: Tensor
) -> tuple[str, Arguments] | None:
    """How the operation is written for fewer units, if it can be."""
    assert step.source is not None
    n, shape = len(flow.units), flows.shape(step.source)
    whole = len(index) == n and bool((index == torch.arange(n)).all())
    if step.name in RESHAPES or (step.name in EXPANDS and whole):
        sizes = [Size.between(a, b) for a, b in zip(out.shape, fewer.shape, strict=True)]
        return "reshape" if step.name in RESHAPES else "expand", {"sizes": sizes, "axis": axis}
    if step.name in EXPANDS:
        return None
    if step.name in ORDERLY:
        return "same", {}
    places = torch.arange(math.prod(shape)).reshape(shape)
    if out.ndim == len(shape) and torch.equal(out, places.index_select(flow.axis, index)):
        return "select", {"index": index.numpy()}
    aside = step.name in ASIDE and len(step.inputs) == 1 and (step.name != "getitem" or _simple(step.args[1]))
    return ("same", {}) if whole and aside else None


def _simple(index: Any) -> bool:
    """Slices and whole numbers only."""
    places = index if isinstance(index, tuple) else (index,)
    return all(place is None or place is Ellipsis or isinstance(place, int | slice) for place in places)


def _along(x: Tensor, axis: int) -> Tensor:
    """The numbers along an axis, at the first place of all others."""
    return x[tuple(slice(None) if d == axis else 0 for d in range(x.ndim))]


def _equal(x: Tensor, along: Tensor, axis: int) -> bool:
    """Whether x is the same as `along` at all places of the other axes."""
    along = along.reshape([-1 if d == axis else 1 for d in range(x.ndim)]).expand_as(x)
    return bool(torch.isclose(x, along, rtol=0, atol=0, equal_nan=x.is_floating_point()).all())


def _axis(x: Tensor) -> int | None:
    """The only axis along which x changes."""
    if 0 in x.shape or not x.ndim:
        return None
    axes = [d for d in range(x.ndim) if x.shape[d] > 1 and _equal(x, _along(x, d), d)]
    return axes[0] if len(axes) == 1 else None


def cat(flows: Flows, i: int, step: Step) -> Result:
    """The units of all tensors side by side, or, along another axis, one with another."""
    parts, dim = step.args[0], step.argument(1, "dim", step.kwargs.get("axis", 0))
    slots = step.inputs
    if step.result is None or len(slots) < len(parts):
        return None
    dim = dim - len(flows.shape(step.result)) if dim >= 0 else dim
    given = [flows.flows.get(slot) for slot in slots]
    known = [flow for flow in given if flow is not None]
    axes = {flow.axis for flow in known}
    if len(axes) != 1:
        return None
    axis = axes.pop()
    flows.edit(i, "cat", dim=dim, beside=axis == dim)
    if axis == dim:
        sides = [flow or flows.entering(part, dim, flows.shape(part.slot)[dim]) for flow, part in zip(given, parts, strict=True)]
        return [Flow(axis, np.concatenate([side.units for side in sides]), torch.cat([side.const for side in sides]))]
    if len(known) < len(parts):
        return None
    const = known[0].const
    for flow in known[1:]:
        flows.units.join(known[0].units, flow.units)
        const = torch.where(const == flow.const, const, math.nan)
    return [Flow(axis, known[0].units, const)]


def pad(flows: Flows, i: int, step: Step) -> Result:
    """Padding: new units with a constant value, where it is along the axis of units."""
    given = step.arguments("input", "pad", "mode", "value")
    flow, widths = flows.flows.get(given["input"].slot), list(given["pad"])
    if flow is None or not all(isinstance(size, int) and size >= 0 for size in widths):
        return None
    place, value = 2 * (-flow.axis - 1), float(given.get("value") or 0)
    before, after = [*widths[place : place + 2], 0, 0][:2]
    plain = given.get("mode", "constant") == "constant"
    if plain and (any(widths[:place]) or any(widths[place + 2 :])):
        flow = flow._replace(const=torch.where(flow.const == value, flow.const, math.nan))
    if not before and not after:
        return flows.unchanged(i, flow)
    if not plain:
        return None
    new = flows.units.fresh(before), flows.units.fresh(after)
    flows.edit(i, "pad", pad=widths, place=place, value=value, new=new)
    flows.anchors.append((np.concatenate(new), flow.units))
    ends = [torch.full((len(side),), value, dtype=torch.float64) for side in new]
    return [Flow(flow.axis, np.concatenate([new[0], flow.units, new[1]]), torch.cat([ends[0], flow.const, ends[1]]))]
