r"""The adjoint of a plain chain: linear layers and functions of single numbers, one after another.

What `adjoint` does for any network, written out where it is simple, with all outputs swept back at once. A layer with input moments
(m, v) puts noise :math:`q = S (m^2 + v) + s` on its outputs; behind the function g that follows, what is a unit's own is

.. math:: d = E[g']^2\, q + \big( \mathrm{Var}[g] - E[g']^2\, \mathrm{Var}[h] \big),

and the outputs' covariance is the sum over layers of :math:`\delta\, \mathrm{diag}(d)\, \delta^T`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.posteriors.predict.streamlined.engine import Streamlined
from dubito.posteriors.predict.streamlined.moments import Moments, Weight, mean_of, var_of
from dubito.posteriors.predict.streamlined.registry import RULES
from dubito.posteriors.predict.streamlined.rules.head import sandwich
from dubito.posteriors.predict.streamlined.trace import Ref, Step, Trace, refs
from dubito.tensors.covariances.noise import Rotated

FUNCTIONS = {
    "relu", "leaky_relu", "gelu", "tanh", "sigmoid", "silu", "softplus", "elu", "selu", "celu", "mish", "erf", "relu6", "hardtanh",
    "hardswish", "logsigmoid", "softsign", "sin", "cos",
}  # fmt: skip


class Chain(NamedTuple):
    """The steps of a network whose random part is a chain, and what comes before."""

    start: int  # slot of the first random layer's input
    steps: list[Step]


class Pass(NamedTuple):
    """What the way back needs of one layer."""

    weight: Any
    rotated: Tensor | None  # of a Kronecker layer: expected squares of its inputs, turned
    own: Tensor | None  # variances that are each output's own, behind the function
    slope: Tensor | None


def chain(found: Trace, random: tuple[str, ...]) -> Chain | None:
    """The chain, if the random part of the network is one."""
    uncertain = {slot for slot, name in found.weights.items() if name in random}
    steps: list[Step] = []
    for step in found.steps:
        if any(ref.slot in uncertain for ref in refs((step.args, step.kwargs))):
            steps.append(step)
            uncertain |= {ref.slot for ref in refs(step.out)}
    if not steps or steps[0].name != "linear" or steps[-1].name != "linear":
        return None
    start = steps[0].args[0]
    at, used = start, set[str | None]()
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        if step.name not in FUNCTIONS | {"linear"} or not isinstance(step.out, Ref) or not step.args or step.args[0] != at:
            return None
        if step.name != "linear" and any(True for _ in refs((step.args[1:], step.kwargs))):
            return None
        if step.name == "linear" and after is not None and after.name == "linear":
            return None
        if step.name == "linear":
            own = [found.weights.get(ref.slot) for ref in refs((step.args[1:], step.kwargs))]
            if None in own or used & {name for name in own if name in random}:
                return None  # a weight that is computed, or one that is used again: the passes would be taken as independent
            used |= set(own)
        if len(found.shapes[step.out.slot]) != 2 or found.axes.get(step.out.slot) != 0:
            return None
        at = step.out
    if not isinstance(start, Ref) or not isinstance(at, Ref) or at.slot != found.output:
        return None
    return Chain(start.slot, steps)


def sweep(engine: Streamlined, found: Trace, known: Chain, x: Any, x_var: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Mean [B, C] and covariance [B, C, C]; None where a layer's weights are of another kind."""
    if x_var is not None and known.start != found.inputs[0]:
        return None
    weights = {slot: engine.weights[name] for slot, name in found.weights.items()}
    m = engine.prefix(found, known.start, x)
    v: Tensor | None = x_var
    passes: list[Pass] = []
    one = torch.ones((), dtype=m.dtype, device=m.device)  # a direction, which comes out as the expected slope
    for i, step in enumerate(known.steps):
        if step.name != "linear":
            continue
        given: tuple[Any, ...] = (*step.args, step.kwargs.get("bias"), None)
        weight, bias = (weights[ref.slot] if isinstance(ref, Ref) else None for ref in (given[1], given[2]))
        block = weight.block if isinstance(weight, Weight) else None
        if block is not None and not isinstance(block, Rotated):
            return None
        inside = isinstance(block, Rotated) and block.biased
        apart = [ref for ref, alone in ((given[1], block is None), (given[2], not inside)) if isinstance(ref, Ref) and alone]
        if not all(engine.independent(found.weights[ref.slot]) for ref in apart):
            return None
        w, s, sb = mean_of(weight), var_of(weight), var_of(bias)
        h = F.linear(m, w, mean_of(bias))
        inherited = None if v is None else F.linear(v, engine.square(found.weights[given[1].slot]))  # from the layers before
        rotated = q = None  # noise that this layer adds: in its eigenbasis; each output's own
        if block is not None:
            rotated = block.energy(m)
            if v is not None:
                rotated = rotated + v @ block.squares
            turned = F.linear(rotated, block.marginal)
            inherited = turned if inherited is None else inherited + turned
            q = sb.expand_as(h) if sb is not None and not block.biased else None
        elif s is not None:
            q = F.linear(m * m if v is None else torch.addcmul(v, m, m), s, sb)
        elif sb is not None:
            q = sb.expand_as(h)
        if i == len(known.steps) - 1:
            passes.append(Pass(weight, rotated, q, None))
            m = h
            break
        var: Any = q if inherited is None else inherited if q is None else q + inherited
        function = known.steps[i + 1]
        value, var_out, slope = RULES[function.name](Moments(h, var, one), *function.args[1:], **function.kwargs)[:3]
        own = var_out if inherited is None else var_out - slope * slope * inherited
        passes.append(Pass(weight, rotated, own.clamp_min(0), slope))
        m, v = value, var_out
    return m, _back(passes, m, x_var)


def _back(passes: list[Pass], f: Tensor, x_var: Tensor | None) -> Tensor:
    last = passes[-1]
    w = mean_of(last.weight)  # [C, D]
    classes = w.shape[0]
    cov = _output(last, f)
    g: Tensor = w.unsqueeze(1)  # [C, 1 or B, D]: the same for all examples up to the first function
    for one in reversed(passes[:-1]):
        assert one.slope is not None
        assert one.own is not None
        if one is passes[-2]:  # still the same for all examples; the shape would not tell, where there is one example
            cov = cov + sandwich(one.own, w)
        else:
            rows = g.transpose(0, 1)  # [B, C, D]
            cov = torch.baddbmm(cov, rows * one.own.unsqueeze(1), rows.mT)
        at = g * one.slope  # [C, B, O], behind the layer's outputs
        if one.rotated is not None:
            block = one.weight.block
            turned = (at @ block.left).transpose(0, 1)
            noise = one.rotated @ block.variances.mT
            cov = torch.baddbmm(cov, turned * noise.unsqueeze(1), turned.mT)
        if one is not passes[0] or x_var is not None:
            g = (at.flatten(0, 1) @ mean_of(one.weight)).unflatten(0, at.shape[:2])
    if x_var is not None:
        rows = g.expand(classes, len(x_var), -1).transpose(0, 1)
        cov = torch.baddbmm(cov, rows * x_var.unsqueeze(1), rows.mT)
    return cov


def _output(last: Pass, f: Tensor) -> Tensor:
    """What the output layer's own weights add."""
    cov = torch.diag_embed(torch.zeros_like(f) if last.own is None else last.own)
    if last.rotated is not None:
        block = last.weight.block
        cov = cov + (block.left * (last.rotated @ block.variances.mT).unsqueeze(-2)) @ block.left.mT
    return cov
