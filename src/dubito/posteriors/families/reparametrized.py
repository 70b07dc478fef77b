r"""Layers whose outputs are drawn instead of their weights: local reparametrisation and flipout, in any network, without touching it.

A `TorchFunctionMode` sees every call of a linear layer or a convolution in a forward pass, and knows the layer by its weight. With
independent Gaussian weights :math:`w \sim N(\mu, \sigma^2)` it answers with

- *local reparametrisation* (Kingma et al. 2015), outputs drawn from their own distribution given the inputs,
  :math:`N(x \mu, x^2 \sigma^2)`, anew for every example;
- *flipout* (Wen et al. 2018), one draw :math:`\Delta = \sigma \epsilon` for the batch, which random signs, one for every input and
  output of an example, make different for all: :math:`x \mu + s \circ ((x \circ r) \Delta)`.

Flipout draws, for each example, from the distribution of the weights exactly. Local reparametrisation does where a weight is used once
an example. In a convolution, or a linear layer over positions, it draws each position for itself, as if the weights were drawn
anew there: right for the variance of every output, but not for how outputs vary together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dubito.model import Model
from dubito.network.watch import Watch
from dubito.network.weights import mode
from dubito.tensors import tree
from dubito.tensors.randomness import Normals, forked
from dubito.tensors.tree import Buffers, Params

LINEAR = {F.linear}
CONVOLUTIONS = {F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d}
TINY = 1e-20  # a variance of nothing, whose root has a slope all the same

Estimator = Literal["auto", "weights", "local", "flipout"]


def _call(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor | None, tuple, dict[str, Any]]:
    """Input, weight, bias and the rest of a call of a layer."""
    named = dict(zip(("input", "weight", "bias"), args[:3], strict=False)) | {
        key: kwargs[key] for key in ("input", "weight", "bias") if key in kwargs
    }
    rest = {key: value for key, value in kwargs.items() if key not in ("input", "weight", "bias")}
    return named["input"], named["weight"], named.get("bias"), args[3:], rest


class Uses(Watch):
    """Notes which weights are those of a linear layer or a convolution that is called once, and nothing else, on inputs with the `n`
    examples along their first axis."""

    def __init__(self, weights: Params, n: int):
        super().__init__(weights)
        self.n = n
        self.layers: list[tuple[str | None, str | None]] = []
        self.other: set[str] = set()

    def call(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of a call, whose weights are noted."""
        seen = self.used((args, kwargs))
        if seen and func in LINEAR | CONVOLUTIONS:
            x, weight, bias, *_ = _call(func, args, kwargs)
            pair = self.name(weight), self.name(bias)
            known = [name for name in pair if name is not None]
            if sorted(known) == sorted(seen) and pair[0] is not None and x.shape[0] == self.n:
                self.layers.append(pair)
            else:
                self.other.update(seen)
        elif func not in (Tensor.shape.__get__, Tensor.device.__get__, Tensor.dtype.__get__, Tensor.requires_grad.__get__):  # pyright: ignore
            self.other.update(seen)
        return func(*args, **kwargs)

    @property
    def once(self) -> dict[str, str | None]:
        """Weight and bias of the layers that can be drawn by their outputs."""
        counts: dict[str, int] = {}
        for pair in self.layers:
            for name in pair:
                if name is not None:
                    counts[name] = counts.get(name, 0) + 1
        sound = {name for name, n in counts.items() if n == 1} - self.other
        return {w: b for w, b in self.layers if w in sound and (b is None or b in sound) and w is not None}


def layers(model: Model, params: Params, x: Any, buffers: Buffers) -> dict[str, str | None]:
    """The layers whose outputs can be drawn in the place of their weights, by two passes over some inputs: weight to bias.

    Every example has a draw of its own, so the examples must be along the first axis there: not positions, as where they come
    first, and not both in one. With one more example that axis must be longer by one.

    >>> import dubito
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 1, bias=False))
    >>> model = dubito.Model(net, dubito.Gaussian(scale=1.0))
    >>> layers(model, model.parameters(), torch.zeros(4, 2), {})
    {'0.weight': '0.bias', '2.weight': None}
    """
    own = {name: leaf.detach().clone() for name, leaf in params.items() if ":" not in name}
    n = len(next(iter(tree.leaves(x))))
    more = tree.apply_leaves(lambda leaf: torch.cat([leaf, leaf[:1]]) if leaf.ndim and len(leaf) == n else leaf, x)
    found: list[dict[str, str | None]] = []
    for inputs, count in ((x, n), (more, n + 1)):
        uses = Uses(own, count)
        try:
            with forked(0), torch.no_grad(), mode(model.network, True), uses:
                model.call({**params, **own}, inputs, {name: leaf.clone() for name, leaf in buffers.items()})
        except Exception:
            if inputs is x:
                raise
            return {}  # a network for one number of examples: which axis theirs is cannot be told
        found.append(uses.once)
    return {weight: bias for weight, bias in found[0].items() if weight in found[1]}


class Reparametrized(TorchFunctionMode):
    """Draws the outputs of layers. `means` holds the tensors that stand in the network, `scales` their standard deviations."""

    def __init__(
        self,
        means: Params,
        scales: Params,
        layers: Mapping[str, str | None],
        estimator: Estimator,
        generator: torch.Generator,
    ):
        super().__init__()
        self.places = {id(means[weight]): weight for weight in layers}
        self.scales, self.layers, self.estimator, self.generator = scales, layers, estimator, generator
        self.variances: dict[str, Tensor] = {}
        if estimator in ("auto", "local"):
            # leaves of their own: autograd would square, and go back, in more passes over the memory
            names = [name for pair in layers.items() for name in pair if name is not None]
            self.variances = {name: scales[name].detach().square().requires_grad_() for name in names}

    @property
    def leaves(self) -> list[Tensor]:
        """Tensors of its own that collect gradients, to be pulled back."""
        return list(self.variances.values())

    def pull(self) -> None:
        """Add to the gradients of the scales those of their squares."""
        with torch.no_grad():
            for name, variance in self.variances.items():
                if (slope := variance.grad) is not None:
                    scale = self.scales[name]
                    if scale.grad is None:
                        scale.grad = slope.mul_(scale).mul_(2)
                    else:
                        scale.grad.addcmul_(slope, scale, value=2)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in LINEAR or func in CONVOLUTIONS:
            x, weight, bias, rest, options = _call(func, args, kwargs)
            if (name := self.places.get(id(weight))) is not None:
                return self._drawn(func, name, x, weight, bias, rest, options)
        return func(*args, **kwargs)

    def _drawn(self, func, name: str, x: Tensor, weight: Tensor, bias: Tensor | None, rest: tuple, options: dict) -> Tensor:
        own = self.layers[name]
        scale, bias_scale = self.scales[name], None if own is None else self.scales[own]
        mean = func(x, weight, bias, *rest, **options)
        local = self.estimator == "local" or (self.estimator == "auto" and func in LINEAR and x.ndim == 2)
        if local:
            spread = None if own is None else self.variances[own]
            variance = func(x.square(), self.variances[name], spread, *rest, **options)
            return torch.addcmul(mean, variance.clamp_min(TINY).sqrt(), self._normal(mean))
        # signs of an example: one for each of its input and output channels, the same at all its positions
        channel = -1 if func in LINEAR else 1
        r, s = (self._signs(part, channel) for part in (x, mean))
        delta = scale * self._normal(scale)
        shift = None if bias_scale is None else bias_scale * self._normal(bias_scale)
        return torch.addcmul(mean, s, func(x * r, delta, shift, *rest, **options))

    def _normal(self, like: Tensor) -> Tensor:
        if Normals.pay([like]):
            return Normals(self.generator)(like.numel()).view(like.shape)
        return torch.empty_like(like, requires_grad=False).normal_(generator=self.generator)

    def _signs(self, like: Tensor, channel: int) -> Tensor:
        shape = [like.shape[0], *[1] * (like.ndim - 1)]
        if like.ndim > 1:
            shape[channel] = like.shape[channel]
        bits = torch.randint(0, 2, shape, generator=self.generator, device=like.device)
        return bits.to(like.dtype).mul_(2).sub_(1)
