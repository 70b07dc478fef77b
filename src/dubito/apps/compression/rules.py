"""What each operation makes of units, by name. A rule gives the flows that come out, or None where there is no way through."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dubito.apps.compression.flows import DROPOUT, Flow, Flows, Result, Rule, Site, filled, layer_arguments, matrix, nothing, run
from dubito.posteriors.predict.streamlined.operations import PROBE, Arguments, Ref, Size, Step, follows_batch, slot_of
from dubito.tensors.tree import as_tuple

RESHAPES = {"view", "reshape", "unflatten", "squeeze"}
EXPANDS = {"expand", "expand_as"}
ORDERLY = {"flatten", "permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "unsqueeze", "contiguous"}
ASIDE = {"getitem", "flip", "narrow", "select", "chunk", "split", "unbind", "index_select"}  # fit for other axes as they are
AVERAGE = ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")


def has_padding(padding: Any) -> bool:
    """Whether a layer puts zeros around its input."""
    return padding not in (0, "valid") and any(as_tuple(padding))


def pool(flows: Flows, i: int, step: Step) -> Result:
    """Pooling over positions, and interpolation between them: a constant stays one, unless zeros are put around it."""
    average = step.name.startswith("avg")
    arguments = step.arguments(*(AVERAGE if average else AVERAGE[:1]))
    flow = flows.of(arguments["input"])
    if flow is None or step.result is None:
        return None
    named = step.name not in ("interpolate", "upsample")
    positions = int(step.name[-2]) if named else len(flows.shape(arguments["input"].slot)) - 2
    if -flow.axis != positions + 1:
        return None
    bordered = average and has_padding(arguments.get("padding", 0)) and arguments.get("count_include_pad", True)
    if bordered or step.name.startswith("lp") or (average and arguments.get("divisor_override") is not None):
        flow = flow._replace(const=torch.where(flow.const == 0, flow.const, math.nan))
    return flows.unchanged(i, flow)


def reduce(flows: Flows, i: int, step: Step) -> Result:
    """A mean or an extreme over positions."""
    arguments = step.arguments("input", "dim", "keepdim")
    source = arguments["input"].slot
    flow, dims = flows.flows.get(source), arguments.get("dim", arguments.get("axis"))
    if flow is None or dims is None or step.result is None:
        return None
    shape = flows.shape(source)
    dims = {int(dim) % len(shape) for dim in as_tuple(dims)}
    place = len(shape) + flow.axis
    if place in dims or 0 in dims:
        return None
    const = flow.const
    if step.name == "sum":
        fixed = all(shape[dim] == flows.second[source][dim] for dim in dims)
        const = const * math.prod(shape[dim] for dim in dims) if fixed else nothing(len(const))
    shift = 0 if arguments.get("keepdim", False) else sum(dim > place for dim in dims)
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
    for out, fewer in zip(
        *(_replay(flows, step, *shape_and_batch) for shape_and_batch in zip(shapes, PROBE, strict=True)), strict=True
    ):
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
    return list(as_tuple(step.func(*args, **kwargs)))


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
    return all(place is None or place is Ellipsis or isinstance(place, int | slice) for place in as_tuple(index))


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
    sources = [flows.flows.get(slot) for slot in slots]
    known = [flow for flow in sources if flow is not None]
    axes = {flow.axis for flow in known}
    if len(axes) != 1:
        return None
    axis = axes.pop()
    flows.edit(i, "cat", dim=dim, beside=axis == dim)
    if axis == dim:
        sides = [
            flow or flows.entering(part, dim, flows.shape(part.slot)[dim]) for flow, part in zip(sources, parts, strict=True)
        ]
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
    arguments = step.arguments("input", "pad", "mode", "value")
    flow, widths = flows.flows.get(arguments["input"].slot), list(arguments["pad"])
    if flow is None or not all(type(size) is int and size >= 0 for size in widths):
        return None
    place, value = 2 * (-flow.axis - 1), float(arguments.get("value") or 0)
    before, after = [*widths[place : place + 2], 0, 0][:2]
    plain = arguments.get("mode", "constant") == "constant"
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


NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


def linear(flows: Flows, i: int, step: Step) -> Result:
    """x W^T + b: a new unit for every row of W."""
    return _mix(flows, i, layer_arguments(step), axis=-1, row=0)


def matmul(flows: Flows, i: int, step: Step) -> Result:
    """x @ W: a new unit for every column of W."""
    arguments = step.arguments("input", "weight")
    weight = arguments.get("weight", arguments.get("other", arguments.get("mat2")))
    if not isinstance(weight, Ref) or weight.slot not in flows.values or flows.values[weight.slot].ndim != 2:
        return None
    return _mix(flows, i, {"input": arguments["input"], "weight": weight}, axis=-1, row=1, biased=False)


def convolution(flows: Flows, i: int, step: Step) -> Result:
    """A new unit for every output channel; of a depthwise convolution those of the input."""
    arguments = layer_arguments(step)
    positions, slot = int(step.name[4]), arguments["input"].slot
    weight = flows.values.get(arguments["weight"].slot)
    groups, shape = arguments.get("groups", 1), flows.shape(slot)
    if weight is None or len(shape) != positions + 2 or (groups > 1 and flows.uses[arguments["weight"].slot] > 1):
        return None
    if groups > 1 and groups == shape[1]:
        return _depthwise(flows, i, arguments, positions)
    return _mix(flows, i, arguments, axis=-positions - 1, row=0, padded=has_padding(arguments.get("padding", 0)), groups=groups)


def transposed_convolution(flows: Flows, i: int, step: Step) -> Result:
    """A new unit for every output channel; zeros are put between the inputs."""
    arguments = layer_arguments(step)
    positions = int(step.name[-2])
    if arguments.get("groups", 1) > 1 or len(flows.shape(arguments["input"].slot)) != positions + 2:
        return None
    return _mix(flows, i, arguments, axis=-positions - 1, row=1, padded=True)


def _mix(
    flows: Flows,
    i: int,
    arguments: Arguments,
    *,
    axis: int,
    row: int,
    padded: bool = False,
    groups: int = 1,
    biased: bool = True,
) -> Result:
    """A layer: a constant that it reads goes into the bias where the same number reaches all positions."""
    slot, bias = arguments["weight"].slot, slot_of(arguments.get("bias"))
    if slot not in flows.values or (bias is not None and bias not in flows.values):
        return None
    weight = matrix(flows.values[slot], row, groups)
    reads, sums = (weight != 0).any(-1), weight.double().sum(-1)
    flow = flows.entering(arguments["input"], axis, reads.shape[1])
    alone = flows.uses[slot] == 1 and (bias is None or flows.uses[bias] == 1)
    known = flow.const.isfinite() & ((flow.const == 0) | torch.tensor(not padded))
    const = torch.where(known, flow.const, 0.0)
    if (slot, row) not in flows.axes:
        flows.axes[slot, row] = flows.units.fresh(reads.shape[0])
    rows = flows.axes[slot, row]
    if groups == 1:
        flows.tie(slot, 1 - row, flow.units)
    start = _bias(flows, bias, reads.shape[0])
    if bias is not None:
        flows.tie(bias, 0, rows)
    out = torch.where((reads & ~known).any(1), math.nan, start + sums @ const)
    absorbs = known & ((const == 0) | torch.tensor(alone and biased))
    flows.sites.append(Site(i, slot, bias, row, rows, flow.units, reads, absorbs, const, alone, groups))
    flows.edit(i, "mix", site=len(flows.sites) - 1, axis=axis, biased=biased)
    return [Flow(axis, rows, out)]


def _bias(flows: Flows, slot: int | None, n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.float64) if slot is None else flows.values[slot].double()


def _depthwise(flows: Flows, i: int, arguments: Arguments, positions: int) -> Result:
    """A convolution of each channel by itself: what comes out goes with what went in."""
    slot, bias = arguments["weight"].slot, slot_of(arguments.get("bias"))
    weight = flows.values[slot].detach().double().flatten(1)
    entering = flows.shape(arguments["input"].slot)[1]
    flow, times = flows.entering(arguments["input"], -positions - 1, entering), weight.shape[0] // entering
    units = flow.units.repeat(times)
    for leaf in (slot,) if bias is None else (slot, bias):
        if leaf not in flows.values:
            return None
        flows.tie(leaf, 0, units)
    start = _bias(flows, bias, len(units))
    const = flow.const.repeat_interleave(times)
    if has_padding(arguments.get("padding", 0)):
        const = torch.where(const == 0, const, math.nan)
    const = torch.where((weight == 0).all(1), start, start + weight.sum(1) * const)
    flows.edit(i, "depthwise", input=arguments["input"].slot)
    return [Flow(flow.axis, units, const)]


def embedding(flows: Flows, i: int, step: Step) -> Result:
    """A new unit for every column of the table."""
    arguments = step.arguments("input", "weight", "padding_idx", "max_norm")
    slot = arguments["weight"].slot
    if slot not in flows.values or arguments.get("max_norm") is not None:
        return None
    weight = flows.values[slot].detach().double()
    units = flows.units.fresh(weight.shape[1])
    flows.tie(slot, 1, units)
    return flows.unchanged(i, Flow(-1, units, torch.where((weight == weight[0]).all(0), weight[0], math.nan)))


def batch_norm(flows: Flows, i: int, step: Step) -> Result:
    """The units of the input, each shifted and scaled by running statistics."""
    arguments = step.arguments(*NORM)
    flow = flows.of(arguments["input"])
    if flow is None or arguments.get("training") or flow.axis != 1 - len(flows.shape(arguments["input"].slot)):
        return None
    vectors = {name: arguments[name].slot for name in NORM[1:5] if isinstance(arguments.get(name), Ref)}
    if not {"running_mean", "running_var"} <= set(vectors) or not set(vectors.values()) <= set(flows.values):
        return None
    for slot in vectors.values():
        flows.tie(slot, 0, flow.units)
    at = {name: flows.values[slot].double() for name, slot in vectors.items()}
    unit = (flow.const - at["running_mean"]) / (at["running_var"] + arguments.get("eps", 1e-5)).sqrt()
    scale, shift = at.get("weight"), at.get("bias", torch.zeros(()))
    const = unit * (1.0 if scale is None else scale) + shift
    if scale is not None:
        const = torch.where(scale == 0, shift.expand_as(const), const)
    return flows.unchanged(i, flow._replace(const=const))


def prelu(flows: Flows, i: int, step: Step) -> Result:
    """The units of the input, with a slope of each."""
    slope, flow = step.argument(1, "weight").slot, flows.of(step.args[0])
    if flow is None or slope not in flows.values or flow.axis != 1 - len(flows.shape(step.args[0].slot)):
        return None
    if flows.values[slope].numel() > 1:
        flows.tie(slope, 0, flow.units)
    return flows.unchanged(
        i, flow._replace(const=torch.where(flow.const < 0, flow.const * flows.values[slope].double(), flow.const))
    )


POINTWISE = {
    "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "tanh", "sigmoid", "softplus", "softsign",
    "hardtanh", "hardswish", "hardsigmoid", "hardshrink", "softshrink", "tanhshrink", "logsigmoid", "threshold", "erf", "exp",
    "expm1", "log1p", "neg", "negative", "square", "sqrt", "abs", "sign", "sin", "cos", "clamp", "clamp_min", "clamp_max",
    "pow", "rpow", "add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide", "rdiv", "maximum",
    "minimum", "addcmul", "lerp", "clone", "float", "double", "half", "bfloat16", "to", "type_as", "detach",
}  # fmt: skip
PRODUCTS = {"mul", "multiply"}


def pointwise(flows: Flows, i: int, step: Step) -> Result:
    """An activation, a sum, a product: place by place, with broadcasting."""
    known = [flows.flows[slot] for slot in step.inputs if slot in flows.flows]
    if step.result is None or not known:
        return None
    axis = known[0].axis
    n = flows.shape(step.result)[axis]
    main = next((flow for flow in known if flow.axis == axis and len(flow.units) == n), None)
    if main is None:
        return None
    const: dict[int, Tensor] = {}
    for slot in step.inputs:
        value = _operand(flows, slot, main)
        if value is None:
            return None
        const[slot] = value
    return flows.unchanged(i, Flow(axis, main.units, _constant(step, const, n)))


def _operand(flows: Flows, slot: int, main: Flow) -> Tensor | None:
    """Constants [n] of one argument, whose units are joined with the main ones; None where its places do not fit to theirs."""
    axis, n, shape, flow = main.axis, len(main.units), flows.shape(slot), flows.flows.get(slot)
    size = shape[axis] if len(shape) >= -axis else 1
    if flow is not None and flow.axis == axis and size == n:
        flows.units.join(main.units, flow.units)
        return flow.const
    if slot in flows.values and size in (1, n):
        if size == n and n > 1:
            flows.tie(slot, len(shape) + axis, main.units)
        value = flows.values[slot]
        return value.double().reshape(-1).expand(n) if value.numel() == size else nothing(n)
    if size != 1:
        return None
    if flow is not None:  # the same number for all places
        flows.units.pin(flow.units)
    return nothing(n)


def _constant(step: Step, const: dict[int, Tensor], n: int) -> Tensor:
    """What an operation makes of constants."""
    if follows_batch((step.args, step.kwargs)):  # a number of examples, which is another each time
        return nothing(n)
    args, kwargs = filled((step.args, step.kwargs), lambda slot: const[slot].clone(), 0)
    try:
        with torch.no_grad():
            result = run(step.func, step.name, args, kwargs).double().expand(n).clone()
    except Exception:  # an operation that minds the shape: then it is no constant
        return nothing(n)
    for value in const.values():
        result[value.isnan()] = math.nan
    if step.name in PRODUCTS:
        for value in const.values():
            result[value == 0] = 0
    return torch.where(result.isfinite(), result, math.nan)


def dropout(flows: Flows, i: int, step: Step) -> Result:
    """Dropout that is on: another value each time, but for zero."""
    flow = flows.of(step.args[0])
    if flow is None:
        return None
    return flows.unchanged(i, flow._replace(const=torch.where(flow.const == 0, 0.0, math.nan).double()))


RULES: dict[str, Rule] = {
    **dict.fromkeys(POINTWISE, pointwise),
    **dict.fromkeys(DROPOUT, dropout),
    **{f"{kind}_pool{d}d": pool for kind in ("max", "avg", "lp", "adaptive_avg", "adaptive_max") for d in (1, 2, 3)},
    **dict.fromkeys(("interpolate", "upsample"), pool),
    **dict.fromkeys(("mean", "sum", "amax", "amin"), reduce),
    **dict.fromkeys(RESHAPES | ORDERLY | ASIDE | EXPANDS, move),
    **dict.fromkeys(("cat", "concat", "concatenate"), cat),
    **{f"conv{d}d": convolution for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": transposed_convolution for d in (1, 2, 3)},
    **dict.fromkeys(("matmul", "mm"), matmul),
    "batch_norm": batch_norm,
    "prelu": prelu,
    "pad": pad,
    "linear": linear,
    "embedding": embedding,
}
