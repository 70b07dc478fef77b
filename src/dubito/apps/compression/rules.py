"""What each operation makes of units, by name. A rule gives the flows that come out, or None where there is no way through."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dubito.apps.compression import layers, moves
from dubito.apps.compression.flows import DROPOUT, Flow, Flows, Result, Rule, filled, nothing, run
from dubito.posteriors.predict.streamlined.operations import Step, follows_batch

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
    **{f"{kind}_pool{d}d": moves.pool for kind in ("max", "avg", "lp", "adaptive_avg", "adaptive_max") for d in (1, 2, 3)},
    **dict.fromkeys(("interpolate", "upsample"), moves.pool),
    **dict.fromkeys(("mean", "sum", "amax", "amin"), moves.reduce),
    **dict.fromkeys(moves.RESHAPES | moves.ORDERLY | moves.ASIDE | moves.EXPANDS, moves.move),
    **dict.fromkeys(("cat", "concat", "concatenate"), moves.cat),
    **{f"conv{d}d": layers.convolution for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": layers.transposed_convolution for d in (1, 2, 3)},
    **dict.fromkeys(("matmul", "mm"), layers.matmul),
    "batch_norm": layers.batch_norm,
    "prelu": layers.prelu,
    "pad": moves.pad,
    "linear": layers.linear,
    "embedding": layers.embedding,
}
