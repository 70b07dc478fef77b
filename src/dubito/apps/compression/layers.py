"""What layers make of units: they read those of their input, and make new ones."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dubito.apps.compression.flows import CONVOLUTION, TRANSPOSED, Flow, Flows, Result, Site, matrix
from dubito.posteriors.predict.streamlined.operations import Arguments, Ref, Step, slot_of

NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


def linear(flows: Flows, i: int, step: Step) -> Result:
    """x W^T + b: a new unit for every row of W."""
    return _mix(flows, i, step.arguments("input", "weight", "bias"), axis=-1, row=0)


def matmul(flows: Flows, i: int, step: Step) -> Result:
    """x @ W: a new unit for every column of W."""
    given = step.arguments("input", "weight")
    weight = given.get("weight", given.get("other", given.get("mat2")))
    if not isinstance(weight, Ref) or weight.slot not in flows.values or flows.values[weight.slot].ndim != 2:
        return None
    return _mix(flows, i, {"input": given["input"], "weight": weight}, axis=-1, row=1, biased=False)


def convolution(flows: Flows, i: int, step: Step) -> Result:
    """A new unit for every output channel; of a depthwise convolution those of the input."""
    given = step.arguments(*CONVOLUTION)
    positions, slot = int(step.name[4]), given["input"].slot
    weight = flows.values.get(given["weight"].slot)
    groups, shape = given.get("groups", 1), flows.shape(slot)
    if weight is None or len(shape) != positions + 2 or (groups > 1 and flows.uses[given["weight"].slot] > 1):
        return None
    if groups > 1 and groups == shape[1]:
        return _depthwise(flows, i, given, positions)
    return _mix(flows, i, given, axis=-positions - 1, row=0, padded=has_padding(given.get("padding", 0)), groups=groups)


def transposed_convolution(flows: Flows, i: int, step: Step) -> Result:
    """A new unit for every output channel; zeros are put between the inputs."""
    given = step.arguments(*TRANSPOSED)
    positions = int(step.name[-2])
    if given.get("groups", 1) > 1 or len(flows.shape(given["input"].slot)) != positions + 2:
        return None
    return _mix(flows, i, given, axis=-positions - 1, row=1, padded=True)


def has_padding(padding: Any) -> bool:
    """Whether a layer puts zeros around its input."""
    if isinstance(padding, str):
        return padding != "valid"
    return any(padding) if isinstance(padding, tuple | list) else bool(padding)


def _mix(
    flows: Flows,
    i: int,
    given: Arguments,
    *,
    axis: int,
    row: int,
    padded: bool = False,
    groups: int = 1,
    biased: bool = True,
) -> Result:
    """A layer: a constant that it reads goes into the bias where the same number reaches all positions."""
    slot, bias = given["weight"].slot, slot_of(given.get("bias"))
    if slot not in flows.values or (bias is not None and bias not in flows.values):
        return None
    weight = matrix(flows.values[slot], row, groups)
    reads, sums = (weight != 0).any(-1), weight.double().sum(-1)
    flow = flows.entering(given["input"], axis, reads.shape[1])
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


def _depthwise(flows: Flows, i: int, given: Arguments, positions: int) -> Result:
    """A convolution of each channel by itself: what comes out goes with what went in."""
    slot, bias = given["weight"].slot, slot_of(given.get("bias"))
    weight = flows.values[slot].detach().double().flatten(1)
    entering = flows.shape(given["input"].slot)[1]
    flow, times = flows.entering(given["input"], -positions - 1, entering), weight.shape[0] // entering
    units = flow.units.repeat(times)
    for leaf in (slot,) if bias is None else (slot, bias):
        if leaf not in flows.values:
            return None
        flows.tie(leaf, 0, units)
    start = _bias(flows, bias, len(units))
    const = flow.const.repeat_interleave(times)
    if has_padding(given.get("padding", 0)):
        const = torch.where(const == 0, const, math.nan)
    const = torch.where((weight == 0).all(1), start, start + weight.sum(1) * const)
    flows.edit(i, "depthwise", input=given["input"].slot)
    return [Flow(flow.axis, units, const)]


def embedding(flows: Flows, i: int, step: Step) -> Result:
    """A new unit for every column of the table."""
    given = step.arguments("input", "weight", "padding_idx", "max_norm")
    slot = given["weight"].slot
    if slot not in flows.values or given.get("max_norm") is not None:
        return None
    weight = flows.values[slot].detach().double()
    units = flows.units.fresh(weight.shape[1])
    flows.tie(slot, 1, units)
    return flows.unchanged(i, Flow(-1, units, torch.where((weight == weight[0]).all(0), weight[0], math.nan)))


def batch_norm(flows: Flows, i: int, step: Step) -> Result:
    """The units of the input, each shifted and scaled by running statistics."""
    given = step.arguments(*NORM)
    flow = flows.of(given["input"])
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
