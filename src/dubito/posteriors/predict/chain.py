r"""The adjoint of a plain chain: linear layers, with a function of single numbers between each two.

What `adjoint` does for any network, written out where it is simple, with all outputs swept back at once. A layer with input moments
(m, v) puts noise :math:`q = S (m^2 + v) + s` on its outputs; behind the function g that follows, what is a unit's own is

.. math:: d = E[g']^2\, q + \big( \mathrm{Var}[g] - E[g']^2\, \mathrm{Var}[h] \big),

and the outputs' covariance is the sum over layers of :math:`\delta\, \mathrm{diag}(d)\, \delta^T`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.posteriors.predict.streamlined.engine import Streamlined
from dubito.posteriors.predict.streamlined.moments import RULES, Moments, Value, block_of, mean_of, plus, var_of
from dubito.posteriors.predict.streamlined.operations import Step, Trace
from dubito.posteriors.predict.streamlined.rules.linear import sandwich
from dubito.tensors.covariances.propagation import Rotated

FUNCTIONS = {
    "relu", "leaky_relu", "gelu", "tanh", "sigmoid", "silu", "softplus", "elu", "selu", "celu", "mish", "erf", "relu6", "hardtanh",
    "hardswish", "logsigmoid", "softsign", "sin", "cos",
}  # fmt: skip


class Layer(NamedTuple):
    """A linear layer, and the function behind it (None behind the last)."""

    name: str  # of its weight
    weight: Value
    bias: Value | None
    block: Rotated | None  # the weights' covariance, where they are not independent
    function: Step | None

    def apply_function(self, h: Tensor, var: Tensor, one: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, variance and expected slope of the function; `one` is a direction, which comes out as the slope."""
        assert self.function is not None
        rule = RULES[self.function.name]
        return rule(Moments(h, var, one), *self.function.args[1:], **self.function.kwargs)[:3]


class Chain(NamedTuple):
    """A network whose random part is a chain of layers."""

    start: int  # slot of the first random layer's input
    layers: list[Layer]
    width: int  # of the widest layer


class Noise(NamedTuple):
    """What the way back needs of one layer."""

    layer: Layer
    energy: Tensor | None  # of a Kronecker layer: expected squares of its inputs in the eigenbasis
    own: Tensor | None  # variances that are each output's own, behind the function
    slope: Tensor | None

    def rotated(self) -> Tensor:
        """Of a Kronecker layer: variances of its outputs' noise in their eigenbasis."""
        assert self.energy is not None
        assert self.layer.block is not None
        return self.energy @ self.layer.block.variances.mT


def find_chain(engine: Streamlined, trace: Trace) -> Chain | None:
    """The chain, if the random part of the network is one and its weights are independent or Kronecker products."""
    steps = _random_steps(trace, engine.random)
    linears, functions = steps[::2], steps[1::2]
    shapes = [trace.shapes[step.result] for step in steps if step.result is not None and trace.axes.get(step.result) == 0]
    alternate = (
        len(steps) % 2 == 1
        and all(step.name == "linear" for step in linears)
        and all(step.name in FUNCTIONS and len(step.inputs) == 1 for step in functions)
        and all(before.result == after.source for before, after in pairwise(steps))
    )
    flat = len(shapes) == len(steps) and all(len(shape) == 2 for shape in shapes)
    if not alternate or not flat or steps[0].source is None or steps[-1].result != trace.output:
        return None
    layers = [_layer(engine, trace, step, after) for step, after in zip(linears, [*functions, None], strict=True)]
    known = [layer for layer in layers if layer is not None]
    if len(known) < len(layers) or not _used_once(engine, trace, linears):
        return None
    return Chain(steps[0].source, known, max(shape[-1] for shape in shapes))


def _random_steps(trace: Trace, random: tuple[str, ...]) -> list[Step]:
    """The operations on anything random."""
    uncertain = {slot for slot, name in trace.weights.items() if name in random}
    steps = []
    for step in trace.steps:
        if uncertain.intersection(step.inputs):
            steps.append(step)
            uncertain.update(step.outputs)
    return steps


def _used_once(engine: Streamlined, trace: Trace, linears: list[Step]) -> bool:
    """Whether no random weight is used again: the uses would be taken as independent."""
    names = [trace.weights[slot] for step in linears for slot in step.inputs[1:]]
    random = [name for name in names if name in engine.random]
    return len(random) == len(set(random))


def _layer(engine: Streamlined, trace: Trace, step: Step, function: Step | None) -> Layer | None:
    """A linear layer; None where its weights are computed from others, or depend on each other in another way than is known here."""
    name, shift = trace.weight_name(step.argument(1, "weight")), step.argument(2, "bias")
    bias = trace.weight_name(shift)
    if name is None or (bias is None and shift is not None):
        return None
    block = block_of(engine.weights[name])
    if block is not None and not isinstance(block, Rotated):
        return None
    alone = [name if block is None else None, None if block is not None and block.biased else bias]
    if not all(leaf is None or engine.independent(leaf) for leaf in alone):
        return None
    return Layer(name, engine.weights[name], None if bias is None else engine.weights[bias], block, function)


def sweep(engine: Streamlined, trace: Trace, chain: Chain, x: Any, x_var: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean [B, C] and covariance [B, C, C]."""
    m, v = engine.prefix(trace, chain.start, x), x_var
    one = torch.ones((), dtype=m.dtype, device=m.device)
    noises: list[Noise] = []
    for layer in chain.layers:
        h = F.linear(m, mean_of(layer.weight), mean_of(layer.bias))
        inherited = None if v is None else F.linear(v, engine.square(layer.name))  # from the layers before
        if layer.block is None:
            energy, own = None, _independent_noise(layer, m, v, h)
        else:
            energy = plus(layer.block.energy(m), None if v is None else v @ layer.block.squares)
            inherited = plus(inherited, F.linear(energy, layer.block.marginal))
            own = None if layer.block.biased else _shift(layer, h)
        if layer.function is None:
            noises.append(Noise(layer, energy, own, None))
            return h, _back(noises, h, x_var)
        m, v, slope = layer.apply_function(h, plus(own, inherited), one)
        own = v if inherited is None else v - slope * slope * inherited
        noises.append(Noise(layer, energy, own.clamp_min(0), slope))
    raise AssertionError("a chain ends with a layer that no function follows")


def _independent_noise(layer: Layer, m: Tensor, v: Tensor | None, h: Tensor) -> Tensor | None:
    """:math:`S (m^2 + v) + s`."""
    s = var_of(layer.weight)
    if s is None:
        return _shift(layer, h)
    return F.linear(m * m if v is None else torch.addcmul(v, m, m), s, var_of(layer.bias))


def _shift(layer: Layer, h: Tensor) -> Tensor | None:
    s = var_of(layer.bias)
    return None if s is None else s.expand_as(h)


def _back(noises: list[Noise], f: Tensor, x_var: Tensor | None) -> Tensor:
    """The covariance of the outputs: every layer's noise, followed to them through the expected slopes."""
    *before, last = noises
    w = mean_of(last.layer.weight)  # [C, D]
    cov = _output(last, f)
    g: Tensor = w.unsqueeze(1)  # [C, 1 or B, D]: the same for all examples up to the first function
    for i, noise in reversed(list(enumerate(before))):
        assert noise.slope is not None
        assert noise.own is not None
        if i == len(before) - 1:  # still the same for all examples; the shape would not tell, where there is one example
            cov = cov + sandwich(noise.own, w)
        else:
            rows = g.transpose(0, 1)  # [B, C, D]
            cov = torch.baddbmm(cov, rows * noise.own.unsqueeze(1), rows.mT)
        behind = g * noise.slope  # [C, B, O], behind the layer's outputs
        if noise.layer.block is not None:
            turned = (behind @ noise.layer.block.left).transpose(0, 1)
            cov = torch.baddbmm(cov, turned * noise.rotated().unsqueeze(1), turned.mT)
        if i > 0 or x_var is not None:
            g = (behind.flatten(0, 1) @ mean_of(noise.layer.weight)).unflatten(0, behind.shape[:2])
    if x_var is not None:
        rows = g.expand(len(w), len(x_var), -1).transpose(0, 1)
        cov = torch.baddbmm(cov, rows * x_var.unsqueeze(1), rows.mT)
    return cov


def _output(last: Noise, f: Tensor) -> Tensor:
    """What the output layer's own weights add."""
    cov = torch.diag_embed(torch.zeros_like(f) if last.own is None else last.own)
    if last.layer.block is None:
        return cov
    left = last.layer.block.left
    return cov + (left * last.rotated().unsqueeze(-2)) @ left.mT
