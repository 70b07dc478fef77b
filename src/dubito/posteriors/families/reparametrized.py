r"""Draw the outputs of layers instead of their weights: local reparametrization and flipout, in any network, without changing it.

A `TorchFunctionMode` intercepts the calls of linear layers and convolutions in a forward pass and recognizes a layer by its weight.
With independent Gaussian weights :math:`w \sim N(\mu, \sigma^2)` it returns one of the following.

- *Local reparametrization* (Kingma et al. 2015): outputs drawn from their distribution given the inputs,
  :math:`N(x \mu, x^2 \sigma^2)`, for every example.
- *Flipout* (Wen et al. 2018): one draw :math:`\Delta = \sigma \epsilon` for the batch, with random signs r and s for every input and
  output of an example: :math:`x \mu + s \circ ((x \circ r) \Delta)`.

Flipout draws each example exactly from the distribution of the weights. Local reparametrization does so where an example uses a weight
once. In a convolution, or a linear layer over positions, it draws each position independently, as if the weights were drawn again
there: the variance of every output is right, the covariance between outputs is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dubito._moved import renamed
from dubito.model import Model
from dubito.network.weights import Watch, in_mode
from dubito.tensors import tree
from dubito.tensors.randomness import Normals, fork_rng
from dubito.tensors.shares import draw_rows
from dubito.tensors.tree import Buffers, Params

LINEAR = {F.linear}
LAYERS = LINEAR | {F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d}
ATTRIBUTES = {getattr(Tensor, name).__get__ for name in ("shape", "device", "dtype", "requires_grad")}  # reading them is no use
ARGUMENTS = ("input", "weight", "bias")
TINY = 1e-20  # smallest variance: at 0 its root has no finite slope

Estimator = Literal["auto", "weights", "local", "flipout"]
Layers: TypeAlias = Mapping[str, str | None]  # names: weight to bias, None if the layer has no Bayesian bias


class LayerCall(NamedTuple):
    """A call of a linear layer or a convolution."""

    function: Callable[..., Tensor]
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    rest: tuple[Any, ...]
    options: dict[str, Any]

    @staticmethod
    def of(function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LayerCall:
        """The call with the given arguments."""
        named = {**dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
        options = {key: value for key, value in kwargs.items() if key not in ARGUMENTS}
        return LayerCall(function, named["input"], named["weight"], named.get("bias"), args[3:], options)

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The layer with another input, weight and bias."""
        return self.function(x, weight, bias, *self.rest, **self.options)

    @property
    def linear(self) -> bool:
        """Whether it is a linear layer; otherwise it is a convolution."""
        return self.function in LINEAR

    @property
    def channel(self) -> int:
        """The axis of the channels."""
        return -1 if self.linear else 1

    def spread(self, values: Tensor, ndim: int) -> Tensor:
        """Values [B, C] in a shape that broadcasts over the positions of a tensor with `ndim` axes."""
        shape = [len(values), *[1] * (ndim - 1)]
        shape[self.channel] = values.shape[1]
        return values.view(shape)


class LayerUses(Watch):
    """Records which weights are used by nothing but one call of a linear layer or a convolution, on inputs with n rows."""

    def __init__(self, weights: Params, n: int):
        super().__init__(weights)
        self.n = n
        self.layers: list[tuple[str, str | None]] = []
        self.other: set[str] = set()

    def call(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Record the weights among the arguments, and call the function."""
        used = self.used((args, kwargs))
        if used and func not in ATTRIBUTES:
            pair = self._layer(func, args, kwargs)
            if pair is not None and sorted(filter(None, pair)) == sorted(used):
                self.layers.append(pair)
            else:
                self.other.update(used)
        return func(*args, **kwargs)

    def _layer(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[str, str | None] | None:
        """The names of weight and bias, if the call is one of a layer with a Bayesian weight."""
        if func not in LAYERS:
            return None
        call = LayerCall.of(func, args, kwargs)
        weight = self.name(call.weight)
        return None if weight is None or len(call.x) != self.n else (weight, self.name(call.bias))

    @property
    def single(self) -> dict[str, str | None]:
        """The layers whose outputs can be drawn: weight to bias."""
        counts = Counter(name for pair in self.layers for name in pair)
        usable = {name for name, n in counts.items() if n == 1 and name not in self.other} | {None}
        return {weight: bias for weight, bias in self.layers if weight in usable and bias in usable}


def drawable_layers(model: Model, params: Params, x: Any, buffers: Buffers) -> dict[str, str | None]:
    """The layers whose outputs can be drawn instead of their weights, weight to bias, found by two passes over some inputs.

    Every example has its own draw, so examples must lie along the first axis of a layer's input, alone. In the second pass there is
    one more example, and that axis must be longer by one.

    >>> import dubito
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 1, bias=False))
    >>> model = dubito.Model(net, dubito.Gaussian(scale=1.0))
    >>> drawable_layers(model, model.parameters(), torch.zeros(4, 2), {})
    {'0.weight': '0.bias', '2.weight': None}
    """
    weights = {name: leaf.detach().clone() for name, leaf in params.items() if ":" not in name}
    n = len(next(iter(tree.leaves(x))))

    def _single(inputs: Any, count: int) -> dict[str, str | None]:
        uses = LayerUses(weights, count)
        with fork_rng(0), torch.no_grad(), in_mode(model.network, True), uses:
            model.call({**params, **weights}, inputs, {name: leaf.clone() for name, leaf in buffers.items()})
        return uses.single

    more = tree.apply_leaves(lambda leaf: torch.cat([leaf, leaf[:1]]) if leaf.ndim and len(leaf) == n else leaf, x)
    layers = _single(x, n)
    try:
        confirmed = _single(more, n + 1)
    except Exception:
        return {}  # the network accepts one number of examples only, so their axis cannot be found
    return {weight: bias for weight, bias in layers.items() if weight in confirmed}


def names_in(layers: Layers) -> list[str]:
    """The names of all weights and biases of some layers."""
    return [name for pair in layers.items() for name in pair if name is not None]


class Reparametrized(TorchFunctionMode):
    """Draws the outputs of layers. `means` holds the tensors that are in the network, `scales` their standard deviations."""

    def __init__(self, means: Params, scales: Params, layers: Layers, estimator: Estimator, generator: torch.Generator):
        super().__init__()
        self.places = {id(means[weight]): weight for weight in layers}
        self.scales, self.layers, self.estimator, self.generator = scales, layers, estimator, generator
        self.variances: dict[str, Tensor] = {}
        if estimator in ("auto", "local"):
            # separate leaves: squaring within autograd would need more passes over the memory
            self.variances = {name: scales[name].detach().square().requires_grad_() for name in names_in(layers)}

    @property
    def leaves(self) -> list[Tensor]:
        """The variances, which collect gradients for `collect_gradients`."""
        return list(self.variances.values())

    def collect_gradients(self) -> None:
        """Add to the gradients of the scales those of the variances: 2 * scale * gradient."""
        with torch.no_grad():
            for name, variance in self.variances.items():
                slope, scale = variance.grad, self.scales[name]
                if slope is not None and scale.grad is None:
                    scale.grad = slope.mul_(scale).mul_(2)
                elif slope is not None and scale.grad is not None:
                    scale.grad.addcmul_(slope, scale, value=2)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in LAYERS:
            call = LayerCall.of(func, args, kwargs)
            if (name := self.places.get(id(call.weight))) is not None:
                return self._draw(call, name)
        return func(*args, **kwargs)

    def _draw(self, call: LayerCall, name: str) -> Tensor:
        """The drawn output of the layer with the weight `name`."""
        x, bias = call.x, self.layers[name]
        mean = call.run(x, call.weight, call.bias)
        if self.estimator == "local" or (self.estimator == "auto" and call.linear and x.ndim == 2):
            variance = call.run(x.square(), self.variances[name], None if bias is None else self.variances[bias])
            noise = draw_rows(lambda shape: self._normal(mean.detach().new_empty(shape)), mean.shape)
            return torch.addcmul(mean, variance.clamp_min(TINY).sqrt(), noise)
        # one sign for each input and output channel of an example, the same at all its positions
        r, s = self._signs(x, call.channel), self._signs(mean, call.channel)
        delta = self.scales[name] * self._normal(self.scales[name])
        shift = None if bias is None else self.scales[bias] * self._normal(self.scales[bias])
        return torch.addcmul(mean, s, call.run(x * r, delta, shift))

    def _normal(self, like: Tensor) -> Tensor:
        if Normals.pay([like]):
            return Normals(self.generator)(like.numel()).view(like.shape)
        return torch.empty_like(like, requires_grad=False).normal_(generator=self.generator)

    def _signs(self, like: Tensor, channel: int) -> Tensor:
        shape = [like.shape[0], *[1] * (like.ndim - 1)]
        if like.ndim > 1:
            shape[channel] = like.shape[channel]
        bits = draw_rows(lambda shape: torch.randint(0, 2, shape, generator=self.generator, device=like.device), shape)
        return bits.to(like.dtype).mul_(2).sub_(1)


__getattr__ = renamed(__name__, {"layers": "drawable_layers", "Uses": "LayerUses"})
