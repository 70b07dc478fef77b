"""What each operation makes of units, one rule a kind. A rule gives the flows that come out, or None where there is no way through."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dubito.apps.compression.flows import (
    CONVOLUTION,
    DROPOUT,
    TRANSPOSED,
    Edit,
    Flow,
    Flows,
    Found,
    Rule,
    Site,
    arguments,
    filled,
    matrix,
    nothing,
    run,
)
from dubito.posteriors.predict.streamlined.operations import PROBE, Ref, Size, Step, follows_batch, refs

POINTWISE = {
    "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "tanh", "sigmoid", "softplus", "softsign",
    "hardtanh", "hardswish", "hardsigmoid", "hardshrink", "softshrink", "tanhshrink", "logsigmoid", "threshold", "erf", "exp",
    "expm1", "log1p", "neg", "negative", "square", "sqrt", "abs", "sign", "sin", "cos", "clamp", "clamp_min", "clamp_max",
    "pow", "rpow", "add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide", "rdiv", "maximum",
    "minimum", "addcmul", "lerp", "clone", "float", "double", "half", "bfloat16", "to", "type_as", "detach",
}  # fmt: skip
PRODUCTS = {"mul", "multiply"}
RESHAPES = {"view", "reshape", "unflatten", "squeeze"}
ORDERLY = {"flatten", "permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "unsqueeze", "contiguous"}
ASIDE = {"getitem", "flip", "narrow", "select", "chunk", "split", "unbind", "index_select"}  # fit for other axes as they are
NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


def _pointwise(flows: Flows, i: int, step: Step) -> Found:
    """An activation, a sum, a product: place by place, with broadcasting."""
    if not isinstance(step.out, Ref):
        return None
    tensors = [ref.slot for ref in refs((step.args, step.kwargs))]
    known = [flows.flows[slot] for slot in tensors if slot in flows.flows]
    if not known:
        return None
    shape = flows.shape(step.out.slot)
    axis = known[0].axis
    n = shape[axis]
    main = next((flow for flow in known if flow.axis == axis and len(flow.units) == n), None)
    if main is None:
        return None
    const: dict[int, Tensor] = {}
    for slot in tensors:
        own = flows.shape(slot)
        size = own[axis] if len(own) >= -axis else 1
        flow = flows.flows.get(slot)
        if flow is not None and flow.axis == axis and size == n:
            flows.units.join(main.units, flow.units)
            const[slot] = flow.const
        elif slot in flows.values and size in (1, n):
            value = flows.values[slot]
            if size == n and n > 1:
                flows.tie(slot, len(own) + axis, main.units)
            flat = value.numel() == size
            const[slot] = value.double().reshape(-1).expand(n) if flat else nothing(n)
        elif size == 1:  # the same number for all places
            if flow is not None:
                flows.units.pin(flow.units)
            const[slot] = nothing(n)
        else:
            return None
    flows.edits[i] = Edit("same")
    return [Flow(axis, main.units, _constant(step, const, n))]


def _constant(step: Step, const: dict[int, Tensor], n: int) -> Tensor:
    """What an operation makes of constants."""
    if follows_batch((step.args, step.kwargs)):  # a number of examples, which is another each time
        return nothing(n)
    args, kwargs = (filled(part, lambda slot: const[slot].clone(), 0) for part in (step.args, step.kwargs))
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


def _dropout(flows: Flows, i: int, step: Step) -> Found:
    """Dropout that is on: another value each time, but for zero."""
    flow = flows.flows.get(step.args[0].slot)
    if flow is None:
        return None
    flows.edits[i] = Edit("same")
    return [flow._replace(const=torch.where(flow.const == 0, 0.0, math.nan).double())]


def _batch_norm(flows: Flows, i: int, step: Step) -> Found:
    given = arguments(step, NORM)
    flow = flows.flows.get(given["input"].slot)
    if flow is None or given.get("training") or flow.axis != 1 - len(flows.shape(given["input"].slot)):
        return None
    vectors = {name: given[name].slot for name in NORM[1:5] if isinstance(given.get(name), Ref)}
    if not {"running_mean", "running_var"} <= set(vectors) or not set(vectors.values()) <= set(flows.values):
        return None
    for slot in vectors.values():
        flows.tie(slot, 0, flow.units)
    at = {name: flows.values[slot].double() for name, slot in vectors.items()}
    unit = (flow.const - at["running_mean"]) / (at["running_var"] + given.get("eps", 1e-5)).sqrt()
    scale, shift = at.get("weight"), at.get("bias", torch.zeros(()))
    const = unit * (1.0 if scale is None else scale) + shift
    if scale is not None:
        const = torch.where(scale == 0, shift.expand_as(const), const)
    flows.edits[i] = Edit("same")
    return [flow._replace(const=const)]


def _prelu(flows: Flows, i: int, step: Step) -> Found:
    slope = arguments(step, ("input", "weight"))["weight"]
    flow = flows.flows.get(step.args[0].slot)
    if flow is None or slope.slot not in flows.values or flow.axis != 1 - len(flows.shape(step.args[0].slot)):
        return None
    if flows.values[slope.slot].numel() > 1:
        flows.tie(slope.slot, 0, flow.units)
    flows.edits[i] = Edit("same")
    return [flow._replace(const=torch.where(flow.const < 0, flow.const * flows.values[slope.slot].double(), flow.const))]


def _pool(flows: Flows, i: int, step: Step) -> Found:
    """Pooling over positions, and interpolation between them: a constant stays one, unless zeros are put around it."""
    names = ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
    given = arguments(step, names if step.name.startswith("avg") else names[:1])
    flow = flows.flows.get(given["input"].slot) if isinstance(given["input"], Ref) else None
    positions = len(flows.shape(given["input"].slot)) - 2 if step.name in ("interpolate", "upsample") else int(step.name[-2])
    if flow is None or not isinstance(step.out, Ref) or -flow.axis != positions + 1:
        return None
    const = flow.const
    if step.name.startswith("lp"):
        const = torch.where(const == 0, const, math.nan)
    elif step.name.startswith("avg"):
        bordered = _pads(given.get("padding", 0)) and given.get("count_include_pad", True)
        if bordered or given.get("divisor_override") is not None:
            const = torch.where(const == 0, const, math.nan)
    flows.edits[i] = Edit("same")
    return [flow._replace(const=const)]


def _reduce(flows: Flows, i: int, step: Step) -> Found:
    """A mean or an extreme over positions."""
    given = arguments(step, ("input", "dim", "keepdim"))
    source = given["input"].slot
    flow, dims = flows.flows.get(source), given.get("dim", given.get("axis"))
    if flow is None or dims is None or not isinstance(step.out, Ref):
        return None
    ndim = len(flows.shape(source))
    dims = {int(dim) % ndim for dim in (dims if isinstance(dims, tuple | list) else (dims,))}
    place = ndim + flow.axis
    if place in dims or 0 in dims:
        return None
    const = flow.const
    if step.name == "sum":
        count = math.prod(flows.shape(source)[dim] for dim in dims)
        const = const * count if all(flows.shape(source)[d] == flows.second[source][d] for d in dims) else nothing(len(const))
    flows.edits[i] = Edit("same")
    shift = 0 if given.get("keepdim", False) else sum(dim > place for dim in dims)
    return [Flow(flow.axis + shift, flow.units, const)]


def _move(flows: Flows, i: int, step: Step) -> Found:
    """What only moves numbers: where they go is seen by moving their places."""
    source = step.args[0]
    flow = flows.flows.get(source.slot) if isinstance(source, Ref) else None
    others = {ref.slot for ref in refs((step.args[1:], step.kwargs))}
    if flow is None or len(flow.units) == 1 or not others <= set(flows.values):
        return None
    shape, n = flows.shape(source.slot), len(flow.units)
    stride = math.prod(shape[flow.axis :][1:])
    roots = torch.from_numpy(flows.units.roots(flow.units))

    def moved(shape: tuple[int, ...], batch: int) -> list[Tensor]:
        places = torch.arange(math.prod(shape)).reshape(shape)
        args, kwargs = (
            filled(part, lambda slot: places if slot == source.slot else flows.values[slot], batch)
            for part in (step.args, step.kwargs)
        )
        result = step.func(*args, **kwargs)
        return list(result) if isinstance(result, tuple | list) else [result]

    places = torch.arange(math.prod(shape)).reshape(shape)
    first, second = moved(shape, PROBE[0]), moved(flows.second[source.slot], PROBE[1])
    found, kinds, edits = [], set(), []
    for out, fewer in zip(first, second, strict=True):
        channel = out // stride % n
        axis = _axis(roots[channel])
        if axis is None or out.shape[axis] != fewer.shape[axis]:
            return None
        index = _along(channel, axis)
        const = flow.const[index]
        if not _equal(flow.const[channel], const, axis):
            const = nothing(len(index))
        found.append(Flow(axis - out.ndim, flow.units[index.numpy()], const))
        whole = len(index) == n and bool((index == torch.arange(n)).all())
        sizes = [Size.between(a, b) for a, b in zip(out.shape, fewer.shape, strict=True)]
        simple = step.name != "getitem" or _simple(step.args[1])
        if step.name in RESHAPES | {"expand", "expand_as"}:
            name = "reshape" if step.name in RESHAPES else "expand"
            if name == "expand" and not whole:
                return None
            kinds.add(name)
            edits.append({"sizes": sizes, "axis": axis})
        elif step.name in ORDERLY:
            kinds.add("same")
        elif out.ndim == len(shape) and torch.equal(out, places.index_select(flow.axis, index)):
            kinds.add("select")
            edits.append({"index": index.numpy()})
        elif whole and step.name in ASIDE and simple and not others:
            kinds.add("same")
        else:
            return None
    if len(kinds) != 1 or not found:
        return None
    flows.edits[i] = Edit(kinds.pop(), {"parts": edits})
    return found


def _simple(index: Any) -> bool:
    """Slices and whole numbers only."""
    return all(
        isinstance(one, int | slice) or one is None or one is Ellipsis
        for one in (index if isinstance(index, tuple) else (index,))
    )


def _along(x: Tensor, axis: int) -> Tensor:
    """The numbers along an axis, at the first place of all others."""
    return x[tuple(slice(None) if d == axis else 0 for d in range(x.ndim))]


def _equal(x: Tensor, along: Tensor, axis: int) -> bool:
    along = along.reshape([-1 if d == axis else 1 for d in range(x.ndim)])
    return bool(
        ((x == along) | (x.isnan() & along.isnan() if x.is_floating_point() else torch.zeros((), dtype=torch.bool))).all()
    )


def _axis(x: Tensor) -> int | None:
    """The only axis along which x changes."""
    if 0 in x.shape or not x.ndim:
        return None
    found = [d for d in range(x.ndim) if x.shape[d] > 1 and _equal(x, _along(x, d), d)]
    return found[0] if len(found) == 1 else None


def _cat(flows: Flows, i: int, step: Step) -> Found:
    parts = step.args[0]
    dim = step.args[1] if len(step.args) > 1 else step.kwargs.get("dim", step.kwargs.get("axis", 0))
    if not isinstance(step.out, Ref) or not all(isinstance(part, Ref) for part in parts):
        return None
    ndim = len(flows.shape(step.out.slot))
    dim, given = (dim - ndim if dim >= 0 else dim), [flows.flows.get(part.slot) for part in parts]
    known = [flow for flow in given if flow is not None]
    if not known or not all(flow.axis == known[0].axis for flow in known):
        return None
    axis = known[0].axis
    flows.edits[i] = Edit("cat", {"dim": dim, "beside": axis == dim})
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


def _pad(flows: Flows, i: int, step: Step) -> Found:
    given = arguments(step, ("input", "pad", "mode", "value"))
    flow, pad = flows.flows.get(given["input"].slot), list(given["pad"])
    if flow is None or not all(isinstance(size, int) and size >= 0 for size in pad):
        return None
    place, value = 2 * (-flow.axis - 1), float(given.get("value") or 0)
    before, after = [*pad[place : place + 2], 0, 0][:2]
    plain = given.get("mode", "constant") == "constant"
    around = any(size for j, size in enumerate(pad) if j not in (place, place + 1))
    const = torch.where(flow.const == value, flow.const, math.nan) if around and plain else flow.const
    if not before and not after:
        flows.edits[i] = Edit("same")
        return [flow._replace(const=const)]
    if not plain:
        return None
    new = flows.units.fresh(before), flows.units.fresh(after)
    flows.edits[i] = Edit("pad", {"pad": pad, "place": place, "value": value, "new": new})
    flows.anchors.append((np.concatenate(new), flow.units))
    ends = [torch.full((len(side),), value, dtype=torch.float64) for side in new]
    return [Flow(flow.axis, np.concatenate([new[0], flow.units, new[1]]), torch.cat([ends[0], const, ends[1]]))]


def _pads(padding: Any) -> bool:
    if isinstance(padding, str):
        return padding != "valid"
    return any(padding) if isinstance(padding, tuple | list) else bool(padding)


def _linear(flows: Flows, i: int, step: Step) -> Found:
    given = arguments(step, ("input", "weight", "bias"))
    return _mixed(flows, i, given, axis=-1, row=0)


def _matmul(flows: Flows, i: int, step: Step) -> Found:
    """x @ W."""
    given = arguments(step, ("input", "weight"))
    weight = given.get("weight", given.get("other", given.get("mat2")))
    if not isinstance(weight, Ref) or weight.slot not in flows.values or flows.values[weight.slot].ndim != 2:
        return None
    return _mixed(flows, i, {"input": given["input"], "weight": weight}, axis=-1, row=1, biased=False)


def _convolution(flows: Flows, i: int, step: Step) -> Found:
    given = arguments(step, CONVOLUTION)
    positions, slot = int(step.name[4]), given["input"].slot
    weight = flows.values.get(given["weight"].slot)
    if weight is None or len(flows.shape(slot)) != positions + 2:
        return None
    groups, entering = given.get("groups", 1), flows.shape(slot)[1]
    if groups > 1 and flows.uses[given["weight"].slot] > 1:
        return None
    if groups > 1 and groups == entering:
        return _depthwise(flows, i, given, positions)
    return _mixed(flows, i, given, axis=-positions - 1, row=0, padded=_pads(given.get("padding", 0)), groups=groups)


def _transposed(flows: Flows, i: int, step: Step) -> Found:
    given = arguments(step, TRANSPOSED)
    positions = int(step.name[-2])
    if given.get("groups", 1) > 1 or len(flows.shape(given["input"].slot)) != positions + 2:
        return None
    return _mixed(flows, i, given, axis=-positions - 1, row=1, padded=True)


def _mixed(
    flows: Flows,
    i: int,
    given: dict[str, Any],
    *,
    axis: int,
    row: int,
    padded: bool = False,
    groups: int = 1,
    biased: bool = True,
) -> Found:
    """A layer: a constant that it reads goes into the bias where the same number reaches all positions."""
    slot, bias = given["weight"].slot, given.get("bias")
    if slot not in flows.values or (isinstance(bias, Ref) and bias.slot not in flows.values):
        return None
    weight = matrix(flows.values[slot], row, groups)
    reads, total = (weight != 0).any(-1), weight.double().sum(-1)
    flow = flows.entering(given["input"], axis, reads.shape[1])
    alone = flows.uses[slot] == 1 and (not isinstance(bias, Ref) or flows.uses[bias.slot] == 1)
    known = flow.const.isfinite() & ((flow.const == 0) | torch.tensor(not padded))
    const = torch.where(known, flow.const, 0.0)
    if (slot, row) not in flows.axes:
        flows.axes[slot, row] = flows.units.fresh(reads.shape[0])
    rows = flows.axes[slot, row]
    if groups == 1:
        flows.tie(slot, 1 - row, flow.units)
    start = flows.values[bias.slot].double() if isinstance(bias, Ref) else torch.zeros(reads.shape[0], dtype=torch.float64)
    if isinstance(bias, Ref):
        flows.tie(bias.slot, 0, rows)
    out = torch.where((reads & ~known).any(1), math.nan, start + total @ const)
    absorbs = known & ((const == 0) | torch.tensor(alone and biased))
    where = bias.slot if isinstance(bias, Ref) else None
    flows.sites.append(Site(i, slot, where, row, rows, flow.units, reads, absorbs, const, alone, groups))
    flows.edits[i] = Edit("mix", {"site": len(flows.sites) - 1, "axis": axis, "biased": biased})
    return [Flow(axis, rows, out)]


def _depthwise(flows: Flows, i: int, given: dict[str, Any], positions: int) -> Found:
    """A convolution of each channel by itself: what comes out goes with what went in."""
    slot, bias = given["weight"].slot, given.get("bias")
    weight = flows.values[slot].detach().double().flatten(1)
    entering = flows.shape(given["input"].slot)[1]
    flow, times = flows.entering(given["input"], -positions - 1, entering), weight.shape[0] // entering
    units = flow.units.repeat(times)
    for one in (slot, *((bias.slot,) if isinstance(bias, Ref) else ())):
        if one not in flows.values:
            return None
        flows.tie(one, 0, units)
    start = flows.values[bias.slot].double() if isinstance(bias, Ref) else torch.zeros(len(units), dtype=torch.float64)
    const = flow.const.repeat_interleave(times)
    if _pads(given.get("padding", 0)):
        const = torch.where(const == 0, const, math.nan)
    const = torch.where((weight == 0).all(1), start, start + weight.sum(1) * const)
    flows.edits[i] = Edit("depthwise", {"input": given["input"].slot})
    return [Flow(flow.axis, units, const)]


def _embedding(flows: Flows, i: int, step: Step) -> Found:
    given = arguments(step, ("input", "weight", "padding_idx", "max_norm"))
    slot = given["weight"].slot
    if slot not in flows.values or given.get("max_norm") is not None:
        return None
    weight = flows.values[slot].detach().double()
    units = flows.units.fresh(weight.shape[1])
    flows.tie(slot, 1, units)
    flows.edits[i] = Edit("same")
    return [Flow(-1, units, torch.where((weight == weight[0]).all(0), weight[0], math.nan))]


RULES: dict[str, Rule] = {
    **dict.fromkeys(POINTWISE, _pointwise),
    **dict.fromkeys(DROPOUT, _dropout),
    **{f"{kind}_pool{d}d": _pool for kind in ("max", "avg", "lp", "adaptive_avg", "adaptive_max") for d in (1, 2, 3)},
    **dict.fromkeys(("interpolate", "upsample"), _pool),
    **dict.fromkeys(("mean", "sum", "amax", "amin"), _reduce),
    **dict.fromkeys(RESHAPES | ORDERLY | ASIDE | {"expand", "expand_as"}, _move),
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    **{f"conv{d}d": _convolution for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": _transposed for d in (1, 2, 3)},
    **dict.fromkeys(("matmul", "mm"), _matmul),
    "batch_norm": _batch_norm,
    "prelu": _prelu,
    "pad": _pad,
    "linear": _linear,
    "embedding": _embedding,
}
