"""An independent answer for every one-pass rule: Monte Carlo over independent Gaussian inputs.

A rule takes the means and variances of what goes into an operation to those of what comes out. An entry holds the operation on plain
tensors, the shape of its random input, and its other arguments. Where a rule is an approximation by design (a maximum, a normalization,
a product of attention), the entry says how far it may be off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.posteriors.predict.streamlined import Moments, Weight
from dubito.posteriors.predict.streamlined.moments import RULES
from dubito.testing import require

DOUBLE, DRAWS = torch.float64, 6000


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Rule:
    """An operation, and what is random in it."""

    function: Callable[..., Any]  # on plain tensors
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] = (3, 4)  # of the random input
    shift: float = 0.0  # added to the means
    spread: float = 0.5  # standard deviation of the input
    slack: float = 0.0  # of the approximation, in standard deviations of the output
    second: tuple[int, ...] | None = None  # the shape of a second random input
    place: Callable[..., tuple[Any, ...]] = lambda *inputs: inputs  # where the inputs stand among the arguments

    def check(self, name: str) -> None:
        """The rule's moments are those of the operation on draws."""
        mean, var = self.shift + numbers(*self.shape), self.spread**2 * (0.5 + numbers(*self.shape, seed=1).square().clamp(max=1))
        inputs = [(mean, var)]
        if self.second is not None:
            inputs.append((numbers(*self.second, seed=2), self.spread**2 * torch.ones(self.second, dtype=DOUBLE)))
        found = RULES[name](*self.place(*(Moments(*pair) for pair in inputs)), *self.args, **self.options)
        draws = [m + v.sqrt() * numbers(DRAWS, *m.shape, seed=3 + i) for i, (m, v) in enumerate(inputs)]
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            values = torch.vmap(
                lambda *row: self.function(*self.place(*row), *self.args, **self.options), randomness="different"
            )(*draws)
        if isinstance(values, Tensor):
            found, values = [found], [values]
        for moments, out in zip(found, values, strict=name not in ("max", "min")):  # these give places too
            compare(name, moments, out.double(), self.slack)


def compare(name: str, found: Any, out: Tensor, slack: float) -> None:
    """Means within their standard errors, variances within theirs, both up to the slack."""
    require(
        found.mean.shape == out.shape[1:], f"{name}: the mean has the shape {list(found.mean.shape)}, not {list(out.shape[1:])}"
    )
    center, spread = out.mean(0), out.std(0)
    unit = spread.clamp_min(0.02)
    fourth = ((out - center) / unit).pow(4).mean(0).sqrt()
    off = ((found.mean - center).abs() / unit - 5 / len(out) ** 0.5 - slack).max()
    require(float(off) <= 1e-6, f"{name}: the mean is off by {float(off):.3f} standard deviations more than allowed")
    var = found.var.expand_as(spread)
    off = ((var / unit.square() - 1).abs() - 6 * fourth / len(out) ** 0.5 - 2 * slack)[spread > 0.02]
    worst = float(off.max()) if off.numel() else 0.0
    require(worst <= 1e-6, f"{name}: the variance is off by {worst:.3f} of itself more than allowed")
    require(bool((var[spread <= 1e-9] < 1e-4).all()), f"{name}: what is certain has a variance")


MASK = numbers(3, 4, seed=5) > 0
W, B = numbers(2, 4, seed=8), numbers(2, seed=9)
IMAGE = (2, 2, 4, 4)
NCL, NCHW, NCDHW = (2, 2, 6), (2, 2, 4, 4), (1, 2, 3, 3, 3)


def on(function: Callable[..., Any], *args: Any, **rest: Any) -> Rule:
    """An operation on a matrix [3, 4]."""
    keys = ("shape", "shift", "spread", "slack", "second", "place")
    own = {key: value for key, value in rest.items() if key in keys}
    return Rule(function, args, {key: value for key, value in rest.items() if key not in keys}, **own)


ELEMENTWISE = {
    "abs": torch.abs,
    "celu": F.celu,
    "cos": torch.cos,
    "elu": F.elu,
    "erf": torch.erf,
    "exp": torch.exp,
    "gelu": F.gelu,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "leaky_relu": F.leaky_relu,
    "logsigmoid": F.logsigmoid,
    "mish": F.mish,
    "relu": F.relu,
    "relu6": F.relu6,
    "selu": F.selu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "sin": torch.sin,
    "softplus": F.softplus,
    "softsign": F.softsign,
    "square": torch.square,
    "tanh": torch.tanh,
    "neg": torch.neg,
    "negative": torch.negative,
}
POSITIVE = {
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "reciprocal": torch.reciprocal,
    "rsqrt": torch.rsqrt,
    "sqrt": torch.sqrt,
}
SHAPES = {
    "broadcast_to": on(torch.broadcast_to, (2, 3, 4)),
    "chunk": on(torch.chunk, 2, 1),
    "clone": on(torch.clone),
    "contiguous": on(Tensor.contiguous),
    "detach": on(Tensor.detach),
    "diagonal": on(torch.diagonal, shape=(2, 3, 3), dim1=1, dim2=2),
    "expand": on(Tensor.expand, 2, 3, 4),
    "expand_as": on(Tensor.expand_as, torch.zeros(2, 3, 4)),
    "flatten": on(torch.flatten),
    "flip": on(torch.flip, (1,)),
    "getitem": on(lambda x, i: x[i], (slice(None), 1)),
    "get_T": on(lambda x: x.T),
    "get_mT": on(lambda x: x.mT),
    "get_data": on(torch.clone),
    "index_select": on(torch.index_select, 1, torch.tensor([2, 0])),
    "moveaxis": on(torch.movedim, 0, 1),
    "movedim": on(torch.movedim, 0, 1),
    "narrow": on(torch.narrow, 1, 1, 2),
    "permute": on(torch.permute, (1, 0)),
    "repeat": on(Tensor.repeat, 2, 1),
    "reshape": on(torch.reshape, (4, 3)),
    "roll": on(torch.roll, 1, 1),
    "select": on(torch.select, 1, 2),
    "split": on(torch.split, 2, 1),
    "squeeze": on(torch.squeeze, shape=(3, 1, 4)),
    "swapaxes": on(torch.swapaxes, 0, 1),
    "swapdims": on(torch.swapdims, 0, 1),
    "t": on(torch.t),
    "tensor_split": on(torch.tensor_split, 2, 1),
    "tile": on(torch.tile, (2, 1)),
    "transpose": on(torch.transpose, 0, 1),
    "unbind": on(torch.unbind, 1),
    "unflatten": on(torch.unflatten, 1, (2, 2)),
    "unsqueeze": on(torch.unsqueeze, 1),
    "view": on(Tensor.view, 4, 3),
    "view_as": on(Tensor.view_as, torch.zeros(4, 3)),
    "reshape_as": on(Tensor.reshape_as, torch.zeros(4, 3)),
    "pixel_shuffle": on(F.pixel_shuffle, 2, shape=(1, 4, 2, 2)),
    "pixel_unshuffle": on(F.pixel_unshuffle, 2, shape=IMAGE),
    "channel_shuffle": on(F.channel_shuffle, 2, shape=(1, 4, 2, 2)),
    "gather": on(torch.gather, 1, torch.tensor([[0, 2], [1, 1], [3, 0]])),
    "repeat_interleave": on(torch.repeat_interleave, 2, dim=1),
    "pad": on(F.pad, (1, 2)),
}
ROWS = torch.tensor([2, 0, 2])
PLACES = torch.tensor([[0, 2], [1, 3], [3, 0]])
CERTAIN = numbers(3, 4, seed=5)
GROUPS, LOW = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1], [1, 0, 0, 0]]), torch.full((3, 2), -9.0, dtype=DOUBLE)


def written(x: Tensor, index: Any, value: Any) -> Tensor:
    """A copy of x with x[index] = value."""
    x = x.clone()
    x[index] = value
    return x


PLACINGS = {
    "setitem": on(written, second=(3, 2), place=lambda x, y: (x, (slice(None), slice(1, 3)), y)),
    "index_put": on(torch.index_put, second=(2, 4), place=lambda x, y: (x, (torch.tensor([2, 0]),), y)),
    "index_add": on(torch.index_add, second=(3, 4), place=lambda x, y: (x, 0, ROWS, y), alpha=0.5),
    "scatter_add": on(torch.scatter_add, second=(3, 2), place=lambda x, y: (x, 1, PLACES, y)),
    "scatter": on(torch.scatter, second=(3, 2), place=lambda x, y: (x, 1, PLACES, y)),
    "cumsum": on(torch.cumsum, 1),
    "scatter_reduce": on(torch.scatter_reduce, place=lambda x: (LOW, 1, GROUPS, x, "amax"), slack=0.1),
}
CASTS = {
    "double": on(Tensor.double),
    "float": on(Tensor.float),
    "half": on(Tensor.half, slack=0.01),
    "bfloat16": on(Tensor.bfloat16, slack=0.05),
    "to": on(Tensor.to, torch.float32),
    "type_as": on(Tensor.type_as, torch.zeros(1)),
}
ARITHMETIC = {
    "hardtanh": on(F.hardtanh, -1.0, 1.0),
    "add": on(torch.add, second=(3, 4)),
    "sub": on(torch.sub, second=(3, 4)),
    "subtract": on(torch.subtract, 2.0),
    "mul": on(torch.mul, second=(3, 4)),
    "multiply": on(torch.multiply, 3.0),
    "div": on(torch.div, 3.0),
    "divide": on(torch.divide, numbers(4, seed=5)),
    "true_divide": on(torch.true_divide, 2.0),
    "pow": on(torch.pow, 2),
    "rsub": on(torch.rsub, 1.0),
    "rdiv": on(lambda x, y: y / x, 2.0, shift=6.0, slack=0.02),
    "sum": on(torch.sum, 1),
    "mean": on(torch.mean, 1),
    "lerp": on(torch.lerp, numbers(3, 4, seed=5), 0.3),
    "addcmul": on(torch.addcmul, numbers(3, 4, seed=5), numbers(3, 4, seed=6), value=0.5),
    "where": on(torch.where, second=(3, 4), place=lambda x, y: (MASK, x, y)),
    "masked_fill": on(torch.masked_fill, MASK, 0.7),
    "maximum": on(torch.maximum, second=(3, 4), slack=0.01),
    "minimum": on(torch.minimum, second=(3, 4), slack=0.01),
    "clamp": on(torch.clamp, -0.5, 0.8),
    "clip": on(torch.clip, -0.5, 0.8),
}


def pooling(kind: str, name: str, *args: Any, slack: float = 0.0) -> dict[str, Rule]:
    """A pooling over one, two and three axes."""
    shapes = {1: NCL, 2: NCHW, 3: NCDHW}
    return {f"{name}{n}d": on(getattr(F, f"{name}{n}d"), *args, shape=shapes[n], slack=slack) for n in (1, 2, 3)}


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Scaled dot-product attention by its formula."""
    return torch.softmax(query @ key.mT / query.shape[-1] ** 0.5, -1) @ value


def convolutions() -> dict[str, Rule]:
    made = {}
    for n, shape in {1: NCL, 2: NCHW, 3: NCDHW}.items():
        made[f"conv{n}d"] = on(getattr(F, f"conv{n}d"), numbers(3, 2, *[2] * n, seed=6), numbers(3, seed=7), 1, 1, shape=shape)
        made[f"conv_transpose{n}d"] = on(
            getattr(F, f"conv_transpose{n}d"), numbers(2, 3, *[2] * n, seed=6), numbers(3, seed=7), 2, shape=shape
        )
        made[f"dropout{n}d"] = on(getattr(F, f"dropout{n}d"), 0.3, True, shape=shape)
    return made


NORM: dict[str, Any] = {"spread": 0.1, "slack": 0.15}
MATRICES = {
    "linear": on(F.linear, W, B),
    "mm": on(torch.mm, numbers(4, 2, seed=5)),
    "matmul": on(torch.matmul, second=(4, 2)),
    "mv": on(torch.mv, second=(4,)),
    "dot": on(torch.dot, shape=(4,), second=(4,)),
    "vdot": on(torch.vdot, numbers(4, seed=5), shape=(4,)),
    "_weight_norm": on(lambda v, g: g * v / v.norm(dim=1, keepdim=True), shift=2.0, spread=0.1, slack=0.1, second=(3, 1)),
    "rmatmul": on(lambda b, a: a @ b, numbers(2, 3, seed=5)),
    "bmm": on(torch.bmm, shape=(2, 3, 4), second=(2, 4, 2)),
    "addmm": on(torch.addmm, numbers(3, 5, seed=5), numbers(5, 4, seed=6), beta=0.5, alpha=2.0),
    "baddbmm": on(torch.baddbmm, numbers(2, 3, 5, seed=5), numbers(2, 5, 4, seed=6), shape=(2, 3, 4), alpha=2.0),
    "einsum": on(torch.einsum, numbers(4, 2, seed=5), place=lambda x: ("bi,ij->bj", x)),
    "cat": on(torch.cat, 1, second=(3, 2), place=lambda x, y: ([x, y],)),
    "concat": on(torch.concat, 1, place=lambda x: ([x, W[:1].expand(3, 4)],)),
    "concatenate": on(torch.concatenate, 0, second=(2, 4), place=lambda x, y: ([x, y],)),
    "stack": on(torch.stack, 1, second=(3, 4), place=lambda x, y: ([x, y],)),
    "dropout": on(F.dropout, 0.3, True),
    "alpha_dropout": on(F.alpha_dropout, 0.3, False),
    "feature_alpha_dropout": on(F.feature_alpha_dropout, 0.3, False),
    "batch_norm": on(F.batch_norm, numbers(4, seed=5), numbers(4, seed=6).square() + 0.5, numbers(4, seed=7), numbers(4, seed=8)),
    "layer_norm": on(F.layer_norm, (4,), numbers(4, seed=7), numbers(4, seed=8), **NORM),
    "rms_norm": on(F.rms_norm, (4,), numbers(4, seed=7), **NORM),
    "group_norm": on(F.group_norm, 1, numbers(2, seed=7), numbers(2, seed=8), shape=NCL, **NORM),
    "instance_norm": on(F.instance_norm, shape=NCL, **NORM),
    "normalize": on(F.normalize, **NORM),
    "max": on(lambda *a: (torch.max(*a).values,), 1, slack=0.1),
    "min": on(lambda *a: (torch.min(*a).values,), 1, slack=0.1),
    "amax": on(torch.amax, 1, slack=0.1),
    "amin": on(torch.amin, 1, slack=0.1),
    "softmax": on(torch.softmax, -1, spread=0.3, slack=0.1),
    "log_softmax": on(torch.log_softmax, -1, spread=0.3, slack=0.15),
    "std": on(torch.std, 1, spread=0.2, slack=0.1),
    "var": on(torch.var, 1, slack=0.05),
    "interpolate": on(F.interpolate, shape=IMAGE, scale_factor=2, mode="bilinear"),
    "upsample": on(F.interpolate, shape=IMAGE, scale_factor=2),
    "scaled_dot_product_attention": on(
        attention, shape=(1, 1, 3, 4), spread=0.2, slack=0.1, place=lambda x: (KEYS, KEYS.flip(2), x)
    ),
}
KEYS = numbers(1, 1, 3, 4, seed=5)


def embedding() -> None:
    """Rows of a random table."""
    mean, var, ids = numbers(5, 3), 0.1 + numbers(5, 3, seed=1).square(), torch.tensor([[0, 4], [2, 2]])
    found = RULES["embedding"](ids, Weight.of(mean, var))
    require(torch.equal(found.mean, mean[ids]) and torch.allclose(found.var, var[ids]), "embedding: other rows")


def random_linear() -> None:
    """A random weight times a random input: Var[w x] = m_w^2 v_x + v_w (m_x^2 + v_x), summed."""
    weight, var = W, 0.3 * numbers(2, 4, seed=3).square()
    x, v = numbers(3, 4), numbers(3, 4, seed=4).square()
    found = RULES["linear"](Moments(x, v), Weight.of(weight, var), B)
    require(torch.allclose(found.mean, x @ weight.mT + B), "linear: the mean is off")
    exact = v @ weight.square().mT + (x.square() + v) @ var.mT
    require(torch.allclose(found.var, exact), "linear: the variance is off")


TABLE: dict[str, Rule] = {
    **{name: on(function) for name, function in ELEMENTWISE.items()},
    **{name: on(function, shift=4.0, spread=0.1, slack=0.01) for name, function in POSITIVE.items()},
    **SHAPES,
    **PLACINGS,
    **CASTS,
    **ARITHMETIC,
    **MATRICES,
    **convolutions(),
    **pooling("avg", "avg_pool", 2),
    **pooling("max", "max_pool", 2, slack=0.1),
    **pooling("avg", "adaptive_avg_pool", 2),
    **pooling("max", "adaptive_max_pool", 2, slack=0.1),
}
ONE_PASS: dict[str, Callable[[], None]] = {
    **{name: partial(entry.check, name) for name, entry in TABLE.items()},
    "embedding": embedding,
}
FURTHER: dict[str, Callable[[], None]] = {"random weights of a linear layer": random_linear, **{
    f"{name} of one random tensor": partial(entry.check, name)
    for name, entry in {
        "setitem": on(written, (slice(None), 1), 2.0),
        "scatter": on(torch.scatter, place=lambda x: (CERTAIN, 1, PLACES, x), shape=(3, 2)),
        "index_add": on(torch.index_add, place=lambda x: (CERTAIN, 0, ROWS, x)),
    }.items()
}}  # fmt: skip
