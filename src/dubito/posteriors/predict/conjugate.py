r"""Prediction from the features before the last layer, whose weights have a conjugate posterior: one pass, no sampling.

The last layer is found by watching a forward pass: it is the linear layer whose result the network returns, reshaped at most. Its
input, with a 1 appended where the layer has a Bayesian bias, are the features :math:`\phi(x)`. The network is not touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.model import Model
from dubito.network.examples import Inputs
from dubito.network.weights import Watch, in_mode
from dubito.posteriors.predict.sampled import GIGABYTE, room
from dubito.tensors import tree
from dubito.tensors.tree import Buffers, Params

INSTEAD = "or use Laplace(subset='last_layer', structure='dense')"


@dataclass(frozen=True)
class Head:
    """The names of the last layer's parameters."""

    weight: str
    bias: str | None  # None where it has none

    def offset(self, buffers: Buffers, like: Tensor) -> Tensor:
        """What a bias that is not Bayesian adds to f, [C]; 0 where there is none."""
        return buffers[self.bias].to(like) if self.bias in buffers else like.new_zeros(())


class Call(NamedTuple):
    """A call of a linear layer."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    output: Tensor
    version: int  # of the output, which counts the changes made to it in place


class Linears(Watch):
    """Sees the calls of linear layers in a forward pass (of one layer only, if its weight is given), and who else uses weights."""

    def __init__(self, weights: Params, only: Tensor | None = None):
        super().__init__(weights)
        self.only, self.calls = only, list[Call]()
        self.uses = Counter[str]()

    def call(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of a call, whose weights are counted."""
        out = func(*args, **kwargs)
        if any(True for _ in tree.leaves(out)):  # to ask a weight for its shape or dtype is no use of it
            self.uses.update(self.used((args, kwargs)))
        if func is F.linear:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            if self.only is None or given["weight"] is self.only:
                self.calls.append(Call(given["input"], given["weight"], given.get("bias"), out, out._version))
        return out


def find(model: Model, params: Params, buffers: Buffers, x: Inputs) -> Head:
    """The last layer of a network, or an error that says why it has none of the kind that is needed."""
    watch = Linears({**buffers, **params})
    with torch.no_grad(), in_mode(model.network, False), watch:
        f, _ = model.call(params, x, buffers)
    call = next((call for call in reversed(watch.calls) if _rows(call, f) is not None), None)
    if call is None:
        raise ValueError(
            "the network's output is not that of a linear layer: end it with nn.Linear, called once, and return what that gives, "
            f"reshaped at most (do scaling or an activation outside the network), {INSTEAD}"
        )
    weight, bias = watch.names.get(id(call.weight)), None if call.bias is None else watch.names.get(id(call.bias))
    if weight is None or (call.bias is not None and bias is None):
        raise ValueError(
            "the weights of the last layer are computed from others (a parametrization such as weight norm): make them plain "
            f"parameters, by torch.nn.utils.parametrize.remove_parametrizations for instance, {INSTEAD}"
        )
    if watch.uses[weight] > 1 or (bias is not None and watch.uses[bias] > 1):
        raise ValueError(
            f"{weight!r} is used elsewhere in the network too (tied, or called twice), so the features would depend on it: give the "
            f"last layer weights of its own, {INSTEAD}"
        )
    if weight not in params:
        raise ValueError(f"the last layer's {weight!r} is not Bayesian: let Model(only=...) match it, and do not freeze it")
    return Head(weight, bias)


def features(model: Model, params: Params, buffers: Buffers, x: Inputs, head: Head) -> tuple[Tensor, Tensor]:
    """phi(x) [B, *D, d], with 1 as its last entry where the bias is Bayesian, and the network's output f [B, *D, C]."""
    watch = Linears({}, params[head.weight])
    with torch.no_grad(), in_mode(model.network, False), watch:
        f, _ = model.call(params, x, buffers)
    call = watch.calls[-1] if watch.calls else None
    rows = None if call is None else _rows(call, f)
    if call is None or rows is None or len(watch.calls) > 1:
        raise ValueError(f"for these inputs {head.weight!r} is not the last layer of the network, as it was in the fit")
    phi = call.input.reshape(-1, call.input.shape[-1])[rows]
    return (torch.cat([phi, torch.ones_like(phi[..., :1])], -1) if head.bias in params else phi), f


def _rows(call: Call, f: Tensor) -> Tensor | None:
    """Which row of a layer's result each position of f [B, *D, C] is, [B, *D]; None where f is anything but a view of that result."""
    h, width = call.output, call.output.shape[-1]
    if f.untyped_storage().data_ptr() != h.untyped_storage().data_ptr() or h._version != call.version:
        return None
    shift, strides = (
        f.storage_offset() - h.storage_offset(),
        [s if n > 1 else 0 for n, s in zip(f.shape, f.stride(), strict=True)],
    )
    if f.shape[-1] != width or not h.is_contiguous() or any(s % width for s in (shift, *strides[:-1])):
        return None
    if width > 1 and strides[-1] != 1:
        return None
    index = torch.arange(h.numel() // width, device=h.device)
    return index.as_strided(f.shape[:-1], [s // width for s in strides[:-1]], shift // width)


def conjugate(phi: Tensor, mean: Tensor, root: Tensor, *, memory: float | None = None) -> tuple[Tensor, Tensor]:
    r"""Moments of :math:`f = W \phi` in units of the noise, for rows :math:`w_c \sim N(m_c, \sigma_c^2 R_c R_c^T)`:
    the means :math:`m_c^T \phi` and :math:`q_c = \lVert R_c^T \phi \rVert^2`, both [B, *D, C].

    `mean` is [C, d]; `root` is [K, d, d], where K is C or, for one that all outputs share, 1.
    """
    rows = phi.reshape(-1, phi.shape[-1])
    size = max(1, int(room(memory, phi.device) * GIGABYTE / (24 * phi.shape[-1])))
    parts = []
    for part in rows.split(size):
        part = part.to(root)
        spread = torch.stack([(part @ one).square().sum(-1) for one in root], -1)
        parts.append((part @ mean.mT, spread.expand(-1, len(mean))))
    means, spreads = (torch.cat(each).reshape(*phi.shape[:-1], len(mean)) for each in zip(*parts, strict=True))
    return means, spreads
