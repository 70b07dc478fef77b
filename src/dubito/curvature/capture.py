r"""One forward pass, with the input of every layer recorded and a tap on its output.

Curvature needs, for each layer, its inputs and the gradients of cotangents of the network's output with respect to the layer's
outputs; gradients of weights, which for every example and output would be a Jacobian of outputs x parameters, are never formed.
A layer is recognized by the function it calls (`linear`, `conv2d`, `layer_norm` ...) on one of the weights, so that a network written
with functions is understood as well as one of modules. What is not recognized, or not surely, is left to `generic`.
"""

from __future__ import annotations

import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dubito.model import Model
from dubito.network.examples import Inputs
from dubito.network.weights import Watch, in_mode
from dubito.tensors import tree
from dubito.tensors.tree import Buffers, Params

CONVOLUTIONS = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
NORMS = (F.batch_norm, F.layer_norm, F.group_norm, F.instance_norm, F.rms_norm)
SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__)


class Use(NamedTuple):
    """One call of a layer in a pass."""

    kind: str  # "affine", "scale" or "lookup"
    weight: str | None  # the Bayesian ones among the call's weights
    bias: str | None
    x: Tensor  # input: of a scale the normalized input, of a lookup the indices
    version: int  # of x when it was recorded
    edge: GradientEdge  # where the gradient of the output is to be had, whatever is done to the output in place
    shape: torch.Size  # of the output
    channel: int  # the axis of channels in x and the output
    convolution: tuple | None = None  # kernel, stride, padding, dilation
    spread: Tensor | None = None  # variances of x, where x is the mean of something random


class Tap(NamedTuple):
    """A place where independent noise enters."""

    edge: GradientEdge
    var: Tensor
    axis: int


def _without_check(function: Callable) -> Callable:
    """The same Python function, which does not hand itself to the modes that are active, so that its parts are seen."""
    known = {**function.__globals__, "has_torch_function": lambda *_: False}
    copy = types.FunctionType(function.__code__, known, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


attention_forward = _without_check(F.multi_head_attention_forward)


class _Listening(threading.local):
    capture: Capture | None = None  # whom a network tells of its layers, by the functions that follow


_LISTENING = _Listening()


def heard(layer: Callable, *args: Any) -> Tensor:
    """layer(*args), of which a `Capture` that listens is told."""
    capture = _LISTENING.capture
    return layer(*args) if capture is None else capture.call(layer, args, {})


def noted(x: Tensor, var: Tensor) -> Tensor:
    """x, the input of the next layer, of which a `Capture` that listens is told how uncertain it is."""
    if (capture := _LISTENING.capture) is not None:
        capture.spreads[id(x)] = (x, var)
    return x


def tapped(h: Tensor, var: Tensor, axis: int) -> Tensor:
    """h, to which a `Capture` that listens is told to add noise of its own, with variances `var`; `axis` is that of the examples."""
    if (capture := _LISTENING.capture) is not None and h.requires_grad:
        capture.taps.append(Tap(get_gradient_edge(h), var, axis))
    return h


def tapped_inputs(h: Tensor, var: Callable[[], Tensor]) -> Tensor:
    """h, the output of a layer whose inputs and weights are both uncertain: what they add together. A `Capture` that records the layer
    knows it from `noted`; one that records noise alone is told here."""
    if (capture := _LISTENING.capture) is not None and not capture.proxies and h.requires_grad:
        with torch.no_grad():
            capture.taps.append(Tap(get_gradient_edge(h), var(), 0))
    return h


def watched() -> AbstractContextManager:
    """While what runs is the network itself: a `Capture` that listens sees all it calls."""
    return _LISTENING.capture or nullcontext()


def rescaled(x: Tensor, weight: Any, bias: Any, channel: int) -> Tensor:
    """x times a weight plus a bias of each channel, known to a `Capture` that listens as a norm's scale and shift."""
    capture = _LISTENING.capture
    return _scale(x, weight, bias, channel) if capture is None else capture.rescaled(x, weight, bias, channel)


def _scale(x: Tensor, weight: Any, bias: Any, channel: int) -> Tensor:
    shape = [1] * x.ndim
    if channel == 1:
        shape[1] = -1
    else:
        shape = list((bias if weight is None else weight).shape)
    if weight is not None:
        x = x * weight.view(shape)
    return x if bias is None else x + bias.view(shape)


class Capture(Watch):
    """Records the uses of the `named` weights; those in `skip` are left alone."""

    def __init__(self, named: Params, skip: Iterable[str] = ()):
        skip = set(skip)
        super().__init__({name: leaf for name, leaf in named.items() if name not in skip})
        # In the recorded calls, copies stand in for the weights. What else reaches the output then comes from other uses, and the
        # layer's own output has a gradient even where its input has none.
        self.proxies = {name: leaf.detach().requires_grad_() for name, leaf in named.items()}
        self.uses: list[Use] = []
        self.taps: list[Tap] = []
        self.spreads: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # by the id of an input: itself, so that the id stays its, and variances

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While a network runs that tells of its layers itself: to look at all it calls would take longer than to run it, if small."""
        before, _LISTENING.capture = _LISTENING.capture, self
        try:
            yield
        finally:
            _LISTENING.capture = before

    def call(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """What a torch function returns, with the use of a wanted weight recorded."""
        if func is F.multi_head_attention_forward:
            with self:
                return attention_forward(*args, **kwargs)
        if func is F.linear:
            return self._linear(func, *args, **kwargs)
        if func in CONVOLUTIONS:
            return self._convolution(func, *args, **kwargs)
        if func is F.embedding:
            return self._embedding(func, *args, **kwargs)
        if func in NORMS:
            return self._norm(func, args, kwargs)
        if (func in SUMS or func is Tensor.expand) and not kwargs:
            return self._shift(func, *args)
        return func(*args, **kwargs)

    def rescaled(self, x: Tensor, weight: Any, bias: Any, channel: int) -> Tensor:
        """x times a weight plus a bias of each channel, recorded as a norm's scale and shift."""
        if self.name(weight) is None and self.name(bias) is None:
            return _scale(x, weight, bias, channel)
        h = _scale(x, self._proxy(weight), self._proxy(bias), channel)
        return self._record("scale", weight, bias, x, h, channel)

    def _proxy(self, weight: Any) -> Any:
        name = self.name(weight)
        return weight if name is None else self.proxies[name]

    def _record(self, kind: str, weight: Any, bias: Any, x: Tensor, h: Tensor, channel: int, convolution: tuple | None = None):
        names = self.name(weight), self.name(bias)
        if not h.requires_grad:  # the network has turned gradients off: the output has none in these weights
            return h
        spread = self.spreads[id(x)][1] if id(x) in self.spreads else None
        edge = get_gradient_edge(_before_view(h) if kind == "affine" else h)
        self.uses.append(Use(kind, *names, x.detach(), x._version, edge, h.shape, channel, convolution, spread))
        return h

    def _linear(self, func: Callable, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.name(weight) is None and self.name(bias) is None:
            return func(input, weight, bias)
        h = func(input, self._proxy(weight), self._proxy(bias))
        return self._record("affine", weight, bias, input, h, -1)

    def _convolution(
        self, func: Callable, input: Tensor, weight: Tensor, bias: Any = None,
        stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
    ) -> Tensor:  # fmt: skip
        axes = CONVOLUTIONS[func]
        known = self.name(weight) is not None or self.name(bias) is not None
        if not known or groups != 1 or input.ndim != axes + 2:
            return func(input, weight, bias, stride, padding, dilation, groups)
        h = func(input, self._proxy(weight), self._proxy(bias), stride, padding, dilation, groups)
        kernel = tuple(weight.shape[2:])
        stride, dilation = (_tuple(value, axes) for value in (stride, dilation))
        if padding == "valid":
            padding = 0
        sides = _same(kernel, dilation) if padding == "same" else tuple((p, p) for p in _tuple(padding, axes))
        return self._record("affine", weight, bias, input, h, 1, (kernel, stride, sides, dilation))

    def _embedding(
        self, func: Callable, input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
    ) -> Tensor:  # fmt: skip
        if self.name(weight) is None:
            return func(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        if max_norm is not None:
            raise ValueError(f"{self.name(weight)} is renormalized while it is used (max_norm): curvature needs a fixed function")
        h = func(input, self._proxy(weight), None)
        return without_padding(self._record("lookup", weight, None, input, h, -1), input, weight, padding_idx)

    def _shift(self, func: Callable, *args: Any) -> Any:
        """A weight that is added to every example, or with which each begins: a table of places, a token for the class."""
        given = args if func in SUMS else args[:1]
        weights = [value for value in given if self.name(value) is not None]
        if len(weights) != 1 or not all(isinstance(value, Tensor) for value in given):
            return func(*args)
        (weight,) = weights
        shape = torch.broadcast_shapes(*(value.shape for value in given)) if func in SUMS else func(*args).shape
        own = weight.shape[next((i for i, n in enumerate(weight.shape) if n > 1), weight.ndim - 1) :]
        if not 0 < len(own) < len(shape) or shape[-len(own) :] != own:  # an example has a part of it, or more than one
            return func(*args)
        h = func(*(self._proxy(value) for value in given), *args[len(given) :])
        return self._record("scale", None, weight, h.new_zeros(()).expand(h.shape), h, -1)  # the gradient has no inputs in it

    def _norm(self, func: Callable, args: tuple, kwargs: dict) -> Tensor:
        names = _SIGNATURES[func]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if func is F.batch_norm and given.get("training"):
            raise ValueError(
                "a BatchNorm layer uses the statistics of the batch, which makes every output depend on all inputs: curvature is of "
                "the network in eval mode. Keep running statistics (track_running_stats=True), and do not override train()"
            )
        weight, bias = given.get("weight"), given.get("bias")
        if self.name(weight) is None and self.name(bias) is None:
            return func(*args, **kwargs)
        normalized = func(**{**given, "weight": None, **({"bias": None} if "bias" in names else {})})
        channel = -1 if func in (F.layer_norm, F.rms_norm) else 1
        h = _scale(normalized, self._proxy(weight), self._proxy(bias), channel)
        return self._record("scale", weight, bias, normalized, h, channel)


def _before_view(h: Tensor) -> Tensor:
    """What a layer's output is another shape of, as that of a linear layer with many positions is. A change in place gives a view
    another place in the graph; that of what is viewed is kept."""
    base = h._base
    return h if base is None or base.numel() != h.numel() or not (base.is_contiguous() and h.is_contiguous()) else base


_SIGNATURES = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    F.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps"),
    F.group_norm: ("input", "num_groups", "weight", "bias", "eps"),
    F.instance_norm: ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps"),
    F.rms_norm: ("input", "normalized_shape", "weight", "eps"),
}


def without_padding(h: Tensor, index: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
    """Looked-up rows, of which that of the padding is a constant, as it is in training; torch's forward mode forgets that."""
    if padding_idx is None:
        return h
    return torch.where((index == padding_idx % weight.shape[0]).unsqueeze(-1), h.detach(), h)


def _tuple(value: Any, n: int) -> tuple[int, ...]:
    return (int(value),) * n if isinstance(value, int) else tuple(value) if len(value) == n else tuple(value) * n


def _same(kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """What padding="same" puts on either side."""
    totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    return tuple((total // 2, total - total // 2) for total in totals)


@dataclass
class Forward:
    """The result of a pass: the output f [B, *D, C] with its graph, and the uses on the way to it. Where rows are coupled, the batch is
    one example, of which the rows are positions: [1, B, *D, C]."""

    f: Tensor
    uses: list[Use]
    taps: list[Tap]
    otherwise: set[str]  # wanted weights with a gradient that reach f by other ways than these uses


def forward(model: Model, params: Params, x: Inputs, buffers: Buffers, *, wanted: Params, skip: Iterable[str] = ()) -> Forward:
    """Run the network in eval mode at `params`, recording the uses of the `wanted` weights (leaves of `params`).

    Those of them that require a gradient are also looked for in the graph of the output, where no recorded use leaves a trace."""
    capture = Capture(wanted, skip)
    fixed = {name: leaf.detach() for name, leaf in buffers.items()}
    tells = getattr(model, "tells", False)  # a program in the place of the network, which has no mode either
    with (
        torch.enable_grad(),
        nullcontext() if tells else in_mode(model.network, False),
        capture.listening() if tells else capture,
    ):
        f, _ = model.call(params, x, fixed)
    for use in capture.uses:
        if use.x._version != use.version:
            raise ValueError(
                f"the input of the layer with {use.weight or use.bias} is changed in place after the layer has used it, which training "
                "would refuse too: write x = x + y instead of x += y there"
            )
    f = f.unsqueeze(0) if model.coupled else f
    return Forward(f, capture.uses, capture.taps, _reached(f, {id(leaf): name for name, leaf in wanted.items()}))


def _reached(f: Tensor, names: dict[int, str]) -> set[str]:
    """The names of the leaves, by their ids, that the graph of f leads back to."""
    found, known, left = set(), set(), [f.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in known:
            continue
        known.add(node)
        if before := node.next_functions:
            left += [one for one, _ in before]
        else:
            found.add(names.get(id(getattr(node, "variable", None))))
    return found - {None}


def batched_gradients(f: Tensor, edges: list[GradientEdge], cotangents: Tensor) -> list[Tensor | None]:
    """Gradients of <s, f> for cotangents [K, *f.shape], [K, ...] at each edge."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operators without a batching rule, which are looped over
        try:
            return list(torch.autograd.grad(f, edges, cotangents, retain_graph=True, allow_unused=True, is_grads_batched=True))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # an operator that cannot be batched at all
            rows = [torch.autograd.grad(f, edges, s, retain_graph=True, allow_unused=True) for s in cotangents]
    return [None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)]


def example_count(x: Inputs) -> int:
    """The number of examples in inputs x."""
    leaf = next(iter(tree.leaves(x)), None)
    if leaf is None:
        raise TypeError(
            f"the inputs hold no tensor; got a {type(x).__name__}. Inputs are a tensor, or a tuple or dict of tensors"
        )
    return leaf.shape[0]


def select_examples(x: Inputs, start: int, count: int) -> Inputs:
    """`count` examples of x from number `start` on; inputs that are not one for each example stay as they are."""
    size = example_count(x)
    return tree.apply_leaves(lambda leaf: leaf[start : start + count] if leaf.shape[:1] == (size,) else leaf, x)
