r"""The most that a network can do to a distance: a bound on its Lipschitz constant, from the norms of its operations, and networks
whose layers are held to a norm while they are trained.

The operations are those that the network is seen to call on an example, whatever its Python looks like. Every tensor on the way has a
bound L on how fast it can move with the input (in Euclidean norms, of one example): a linear operation multiplies it by its norm, a
function of single numbers by its largest slope; of a sum the bounds add up, and side by side they are :math:`\sqrt{L_1^2 + L_2^2}`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import register_parametrization

from dubito.apps.network import CONVOLUTIONS, Network, call, check_real, layer_inputs, networks, posterior_of
from dubito.model import Model
from dubito.network.examples import Inputs
from dubito.network.inspect import layers_of
from dubito.network.weights import copy_network, in_mode
from dubito.posteriors import Posterior
from dubito.posteriors.predict.streamlined.operations import Size, Step, Trace, resolve, slot_of
from dubito.posteriors.predict.streamlined.trace import trace
from dubito.tensors import tree
from dubito.tensors.checks import at_least, positive, require
from dubito.tensors.eigen import eigh
from dubito.tensors.randomness import derive_seed, fork_rng
from dubito.tensors.tree import as_tuple

TOLERANCE = 1e-6
VECTORS, NUMBERS, ROUNDS = 50, 2**27, 40  # vectors that are kept, numbers they may hold, and how often it begins anew


def operator_norm(apply: Callable[[Tensor], Tensor], like: Tensor, *, tolerance: float = TOLERANCE, seed: int = 0) -> float:
    r"""The largest singular value of an affine function x -> A x + b of tensors like `like`,

    .. math:: \max_v \lVert A v \rVert / \lVert v \rVert.

    A need not be had as a matrix: vectors go through the function, and back by its gradient, and the best of all they span is kept
    (Lanczos; power iteration with a memory). It comes from below, to the relative `tolerance`. Of a convolution this is the norm of
    what it does to an image of that size; the norm of its kernel, reshaped to a matrix, is another number.

    >>> round(operator_norm(lambda x: x @ torch.diag(torch.tensor([1.0, 3.0])) + 5, torch.zeros(1, 2)), 6)
    3.0
    """
    source = torch.Generator().manual_seed(seed)
    v = torch.randn(like.shape, generator=source, dtype=torch.float64).to(like.device, like.dtype).flatten()
    with torch.enable_grad():
        x = torch.zeros_like(like).requires_grad_()
        y = apply(x)
        if not y.requires_grad:
            return 0.0
        u = torch.zeros_like(y).requires_grad_()
        (back,) = torch.autograd.grad(y, x, u, create_graph=True)  # A^T u, of which the gradient by u along v is A v

    def _twice(v: Tensor) -> Tensor:
        (ahead,) = torch.autograd.grad(back, u, v.view(like.shape), retain_graph=True)
        (again,) = torch.autograd.grad(y, x, ahead, retain_graph=True)
        return again.flatten()

    most = max(2, min(VECTORS, v.numel(), NUMBERS // v.numel()))
    square = 0.0
    for _ in range(ROUNDS):
        square, v, rest = _lanczos(_twice, v, most)
        if rest <= tolerance * square or most >= like.numel():
            break
    return max(square, 0.0) ** 0.5


def _lanczos(twice: Callable[[Tensor], Tensor], v: Tensor, most: int) -> tuple[float, Tensor, float]:
    """The largest eigenvalue of A^T A seen from v within so many products, its vector, and how far it is from being one."""
    basis = v.new_empty(most, v.numel())
    basis[0] = v / v.norm().clamp_min(torch.finfo(v.dtype).tiny)
    diagonal: list[float] = []
    beside: list[float] = []
    for k in range(1, most + 1):
        w = twice(basis[k - 1])
        diagonal.append(float(w @ basis[k - 1]))
        for _ in range(2):  # what rounding brings back of the earlier ones is taken out
            w = w - basis[:k].mT @ (basis[:k] @ w)
        length = float(w.norm())
        beside.append(length)
        if length <= 1e-12 * max(max(diagonal), torch.finfo(v.dtype).tiny) or k == most:
            break
        basis[k] = w / length
    k = len(diagonal)
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    for i in range(k - 1):
        matrix[i, i + 1] = matrix[i + 1, i] = beside[i]
    values, vectors = eigh(matrix)
    best = vectors[:, -1]
    return float(values[-1]), basis[:k].mT @ best.to(v), beside[-1] * abs(float(best[-1]))


# the steepest slopes of functions of single numbers
SLOPES = {
    "relu": 1.0, "relu6": 1.0, "tanh": 1.0, "sigmoid": 0.25, "softplus": 1.0, "logsigmoid": 1.0, "softsign": 1.0, "hardtanh": 1.0,
    "clamp": 1.0, "abs": 1.0, "sin": 1.0, "cos": 1.0, "erf": 2 / math.sqrt(math.pi), "atan": 1.0, "hardsigmoid": 1 / 6,
    "softshrink": 1.0, "tanhshrink": 1.0, "hardswish": 1.5, "gelu": 1.12905, "silu": 1.09984, "mish": 1.08870, "selu": 1.7581,
}  # fmt: skip
FACTORS = {**SLOPES, "celu": 1.0, "softmax": 0.5}
LEAKY = {"leaky_relu": ("negative_slope", 0.01), "elu": ("alpha", 1.0)}  # whose steepest slope is an argument, or 1
# they rearrange numbers, or leave some out
MOVES = {
    "flatten", "reshape", "view", "permute", "transpose", "t", "contiguous", "squeeze", "unsqueeze", "movedim", "swapaxes", "getitem",
    "unflatten", "clone", "to", "float", "double", "type", "narrow", "select", "flip", "chunk", "split", "unbind", "detach", "ravel",
    "view_as", "reshape_as", "pixel_shuffle",
}  # fmt: skip
ADDS, JOINS = {"add", "sub", "rsub"}, {"cat", "concat", "concatenate", "stack", "hstack", "vstack"}
# affine in the one tensor that depends on the input, where that comes in at one place
AFFINE = {
    "linear", "matmul", "mm", "bmm", "addmm", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "batch_norm", "mean",
    "sum", "mul", "div", "neg", "pad", "interpolate", "cumsum", "roll", "einsum", "expand", "repeat", "getitem",
}  # fmt: skip


@dataclass(frozen=True)
class Bound:
    """A bound on the Lipschitz constant of f(x), in Euclidean norms, and the factor of every operation that is not 1."""

    value: float
    factors: dict[str, float]  # by module, operation and place; of the first network, if there are several


def lipschitz_bound(given: Posterior | Model | nn.Module, x: Tensor, *, draws: int = 10) -> Bound:
    r"""A bound on :math:`\lVert f(x) - f(x') \rVert / \lVert x - x' \rVert` over all inputs shaped as one example of x.

    Norms of layers are found to seven digits; convolutions are taken as what they do to images of this size, not by their kernels.
    Of a posterior of several networks it bounds their mean output. In the network's own way of predicting: BatchNorm as it is after
    training, dropout off. A product of norms is far above what is ever seen, unless the network was trained to keep it small
    (`spectrally_normalized`). Operations that have no bound (attention, products of two tensors) are refused.

    >>> net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Sigmoid())
    >>> with torch.no_grad():
    ...     _ = net[0].weight.copy_(torch.diag(torch.tensor([4.0, 2.0])))
    >>> lipschitz_bound(net, torch.zeros(1, 2)).value
    1.0
    """
    check_real(x, "embed words first")
    require(len(x), "x must have at least one example")
    with torch.inference_mode(False):  # what is made in that mode has no gradients, by which norms are found
        bounds = [(member.weight, _bound(member, x[:1].clone())) for member in networks(posterior_of(given), draws=draws)]
    return Bound(sum(share * bound.value for share, bound in bounds), bounds[0][1].factors)


def _bound(network: Network, x: Tensor) -> Bound:
    params = {name: leaf for name, leaf in network.params.items() if ":" not in name}
    like = next(network.model.network.parameters())
    made = trace(network.model, params, x.to(like.device, like.dtype), network.buffers)
    return _Walk(made, {**network.buffers, **params}).bound()


class _Walk:
    """From operation to operation. Affine ones that follow each other are one: its norm is less than the product of theirs."""

    def __init__(self, recorded: Trace, weights: dict[str, Tensor]):
        self.trace, self.device = recorded, next(iter(weights.values())).device
        self.values: dict[int, Any] = {
            slot: weights[name].detach() for slot, name in recorded.weights.items()
        }  # the same for all x
        self.values |= recorded.constants
        self.bounds: dict[int, float] = dict.fromkeys(recorded.inputs, 1.0)
        self.waiting: dict[int, tuple[int, list[Step]]] = {}  # slots that are an affine function of another, not yet bounded
        self.factors: dict[str, float] = {}

    def bound(self) -> Bound:
        """The bound of the output."""
        for step in self.trace.steps:
            live = list(dict.fromkeys(slot for slot in step.inputs if slot in self.bounds or slot in self.waiting))
            if not live:
                self._compute(step)
            elif len(live) == 1 and step.result is not None and _affine(step, live[0]):
                base, before = self.waiting.get(live[0], (live[0], []))
                self.waiting[step.result] = base, [*before, step]
            else:
                self.bounds |= dict.fromkeys(step.outputs, self._bound(step, live))
        known = self.trace.output in self.bounds or self.trace.output in self.waiting
        return Bound(self._of(self.trace.output) if known else 0.0, self.factors)

    def _compute(self, step: Step) -> None:
        with torch.no_grad():
            made = step.func(*self._filled(step.args), **self._filled(step.kwargs))
        self.values |= dict(zip(step.outputs, tree.leaves(made), strict=True))

    def _of(self, slot: int) -> float:
        """The bound of a slot; where affine operations are waiting, they are made one."""
        if slot not in self.bounds:
            base, steps = self.waiting[slot]
            self.bounds[slot] = self._norm(base, steps) * self.bounds[base]
        return self.bounds[slot]

    def _norm(self, base: int, steps: list[Step]) -> float:
        """The norm of affine operations in a row, as one."""
        values: dict[int | None, Any] = tree.move(self.values, dtype=torch.float64)
        real = [step for step in steps if not _moves(step)]
        if not real:
            return 1.0
        matrix = values.get(slot_of(real[0].argument(1, "weight"))) if len(real) == 1 and real[0].name == "linear" else None
        if matrix is not None and all(step.name != "getitem" for step in steps):
            norm = float(torch.linalg.matrix_norm(matrix, 2))
        else:
            # the trace has several examples, which an operation treats one by one: its norm is that of any
            start = torch.zeros(self.trace.shapes[base], dtype=torch.float64, device=self.device)
            norm = operator_norm(self._composed(base, steps, values), start)
        name = " + ".join(f"{step.where or 'network'}: {step.name}" for step in real)
        self.factors[name if name not in self.factors else f"{name} ({len(self.factors)})"] = norm
        return norm

    def _composed(self, base: int, steps: list[Step], values: dict[int | None, Any]) -> Callable[[Tensor], Tensor]:
        def _call(x: Tensor) -> Tensor:
            known = {**values, base: x.clone()}  # which an operation may change in place
            for step in steps:
                func = torch.clone if step.name == "detach" else step.func  # the norm is found by gradients, which are to pass
                x = func(*self._filled(step.args, known), **self._filled(step.kwargs, known)).double()
                known[step.out.slot] = x
            return x

        return _call

    def _bound(self, step: Step, live: list[int]) -> float:
        places = [slot for slot in step.inputs if slot in live]
        bounds = [self._of(slot) for slot in places]  # what comes in twice counts twice
        if step.name in JOINS:
            return math.sqrt(sum(bound**2 for bound in bounds))
        if step.name in ADDS:
            terms = enumerate(slot_of(term) for term in (*step.args[:2], step.kwargs.get("other")))
            return sum(self._added(step, place, slot) for place, slot in terms if slot is not None and slot in live)
        factor = 1.0 if _moves(step) else self._factor(step) if len(places) == 1 else None
        if factor is None:
            place = step.where or "the network"
            raise ValueError(
                f"{place} calls {step.name}, for which there is no bound: use local_slopes for slopes at given inputs"
            )
        if factor != 1.0:
            self.factors[f"{step.where or 'network'}: {step.name} ({len(self.factors)})"] = factor
        return factor * bounds[0]

    def _added(self, step: Step, place: int, slot: int) -> float:
        """The bound of one term of a sum, which may be multiplied, and repeated along axes that the other term has."""
        times = abs(float(step.kwargs.get("alpha", 1))) if place == (0 if step.name == "rsub" else 1) else 1.0
        copies = math.prod(self.trace.shapes[step.out.slot]) / max(1, math.prod(self.trace.shapes[slot]))
        return times * math.sqrt(copies) * self._of(slot)

    def _factor(self, step: Step) -> float | None:
        """How much a function of single numbers, or a pooling, can stretch a distance; None where that is not known."""
        if step.name in FACTORS:
            return FACTORS[step.name]
        if step.name in LEAKY:
            return max(1.0, abs(step.argument(1, *LEAKY[step.name])))
        if step.name == "prelu":
            slope = self._filled(step.argument(1, "weight"))  # and not the input, whose values nobody knows
            return max(1.0, float(slope.abs().max()))
        if step.name == "log_softmax":  # steepest where one class has all the probability
            axis = step.argument(1, "dim", -1)
            return math.sqrt(self.trace.shapes[step.out.slot][-1 if axis is None else axis])
        return self._pooled(step) if step.name.startswith("max_pool") else None

    def _pooled(self, step: Step) -> float:
        """A number that is in k windows can move k of the outputs."""
        axes = int(step.name[8])
        kernel, stride, dilation = step.argument(1, "kernel_size"), step.argument(2, "stride"), step.argument(4, "dilation", 1)
        kernels = _each(kernel, axes)
        if any(d != 1 for d in _each(dilation, axes)):
            return math.sqrt(math.prod(kernels))
        return math.sqrt(math.prod(-(-k // s) for k, s in zip(kernels, _each(stride or kernel, axes), strict=True)))

    def _filled(self, value: Any, known: dict[int, Any] | None = None) -> Any:
        """Arguments with tensors in the places of references, for as many examples as the trace was made with."""
        known = self.values if known is None else known
        return resolve(value, known.__getitem__, lambda size: size.value(self.trace.batch))


def _affine(step: Step, live: int) -> bool:
    """Whether an operation is an affine function of the one tensor that depends on the input."""
    if step.name in ADDS or step.name in JOINS:
        return True
    if step.name not in AFFINE | MOVES or step.inputs.count(live) > 1:  # x * x is not
        return False
    if step.name == "batch_norm":  # by the statistics of the batch it is no function of one example
        return not step.argument(5, "training", False)
    return step.name not in ("div", "getitem") or step.source == live


def _moves(step: Step) -> bool:
    """Whether numbers are only rearranged or left out; x[:, [0, 0]] would repeat some."""
    if step.name == "getitem":
        return all(place is None or place is ... or isinstance(place, int | slice | Size) for place in as_tuple(step.args[1]))
    return step.name in MOVES


def _each(value: Any, axes: int) -> list[int]:
    values = as_tuple(value)
    return [int(value) for value in values] * (axes if len(values) == 1 else 1)


LAYERS = (nn.Linear, *CONVOLUTIONS)
FIRST = 30  # power iterations before training


def spectrally_normalized(
    network: nn.Module, x: Inputs, *, norm: float = 1.0, iterations: int = 1, at: str = "", seed: int = 0
) -> nn.Module:
    r"""A copy of a network whose linear and convolutional layers have the operator norm `norm`, whatever they are trained to.

    A layer's weight is divided by its largest singular value, which `iterations` of power iteration follow in every training step:
    of linear layers by torch's own `spectral_norm`, of convolutions on the convolution of images as they come there for inputs like x,
    not on the kernel as a matrix, whose norm is another number. With activations of slope 1 the Lipschitz constant of a chain of L
    layers is at most norm^L; `lipschitz_bound` tells what it is after training. BatchNorm is left as it is, and may undo this.
    Methods that draw other weights for every step (`Variational`, `IVON`) leave the iteration behind: norms are then above `norm`.

    `at` picks layers by `re.search` over their names; transposed convolutions are left as they are. The copy is an ordinary module:
    give it to a `dubito.Model`, and afterwards `torch.nn.utils.parametrize.remove_parametrizations` makes plain layers of it.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> held = spectrally_normalized(net, torch.zeros(1, 2))
    >>> round(float(torch.linalg.matrix_norm(held[0].weight.detach(), 2)), 3)
    1.0
    """
    positive(norm=norm)
    at_least(1, iterations=iterations)
    made = copy_network(network)
    layers = _layers(made, at)
    with fork_rng(derive_seed(seed, "spectral")):
        shapes = _shapes(made, layers, x)
        for name, layer in layers.items():
            if layer.weight.ndim == 2:
                spectral_norm(layer, n_power_iterations=iterations)
            else:
                require(name in shapes, f"the layer {name!r} is not called when the network runs on x: exclude it by `at`")
                register_parametrization(layer, "weight", ConvolutionNorm(layer, shapes[name], iterations))
            if norm != 1:
                register_parametrization(layer, "weight", Scaled(norm))
    return made


def _layers(network: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """The linear and convolutional layers whose names match, each with a weight of its own that is not zero."""
    layers = {n: layer for n, layer in layers_of(network, LAYERS).items() if re.search(pattern, n) and layer.weight.ndim > 1}
    require(layers, f"the network has no linear or convolutional layer whose name matches at={pattern!r}")
    uses = Counter(id(p) for module in network.modules() for p in module._parameters.values() if p is not None)
    tied = [name for name, layer in layers.items() if uses[id(layer.weight)] > 1]
    require(not tied, f"the weights of {tied} are shared with other layers: exclude them by `at`")
    zero = [name for name, layer in layers.items() if not bool(layer.weight.detach().any())]
    require(not zero, f"the weights of {zero} are all zero, so they have no norm: initialize them, or exclude them by `at`")
    return dict(layers)


class ConvolutionNorm(nn.Module):
    """A kernel divided by the norm of its convolution, which the vectors of a power iteration follow."""

    input: Tensor

    def __init__(self, layer: nn.Module, shape: torch.Size, iterations: int):
        super().__init__()
        assert isinstance(layer, CONVOLUTIONS)
        self.iterations = iterations
        self.padding: tuple[int, ...] = tuple(layer._reversed_padding_repeated_twice)
        self.fill = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        self.stride, self.dilation, self.groups = layer.stride, layer.dilation, layer.groups
        start = F.normalize(torch.randn(1, *shape[1:]).flatten(), dim=0).view(1, *shape[1:])
        self.register_buffer("input", start.to(layer.weight))
        self._follow(layer.weight.detach(), FIRST)

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """The convolution of the layer with that kernel, without its bias."""
        run = (F.conv1d, F.conv2d, F.conv3d)[weight.ndim - 3]
        return run(F.pad(x, self.padding, mode=self.fill), weight, None, self.stride, 0, self.dilation, self.groups)

    @torch.no_grad()
    def _follow(self, weight: Tensor, iterations: int) -> None:
        for _ in range(iterations):
            with torch.enable_grad():
                x = self.input.detach().clone().requires_grad_()
                y = self.convolve(x, weight)
                (back,) = torch.autograd.grad(y, x, y.detach())
            self.input = back / back.norm().clamp_min(torch.finfo(back.dtype).tiny)

    def forward(self, weight: Tensor) -> Tensor:
        """W / (u^T W v), with the singular vectors u and v as far as they are known."""
        if self.training:
            self._follow(weight.detach(), self.iterations)
        v = self.input.detach().clone()
        with torch.no_grad():
            ahead = self.convolve(v, weight)
            u = ahead / ahead.norm().clamp_min(torch.finfo(ahead.dtype).tiny)
        return weight / (u * self.convolve(v, weight)).sum()


class Scaled(nn.Module):
    """A weight times a number."""

    def __init__(self, norm: float):
        super().__init__()
        self.norm = norm

    def forward(self, weight: Tensor) -> Tensor:
        """norm * W."""
        return self.norm * weight


def _shapes(network: nn.Module, layers: dict[str, nn.Module], x: Inputs) -> dict[str, torch.Size]:
    """The shape of what comes into each convolution."""
    convolutions = {name: layer for name, layer in layers.items() if isinstance(layer, CONVOLUTIONS)}
    with torch.no_grad(), in_mode(network, False), layer_inputs(convolutions) as inputs:
        call(network, x)
    return {name: value.shape for name, value in inputs}
