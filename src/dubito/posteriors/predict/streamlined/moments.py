"""What flows through the network: a mean and a variance of every number, and, if wanted, directions in which they move together;
and the registry of rules, one for each operation: from the moments of what goes in to the moments of what comes out.

A rule is called as the operation is, with `Moments` (or `Weight`, where a random weight is given directly) in the place of those
tensors that are random, and returns `Moments`. It may take more keywords, which it is given where it names them: `adjoint` (variances
then carry no gradient; the mean must), `axis` (in the adjoint: that of the examples in what comes out), `rank` (whether directions are
carried: 0 none, -1 all, else how many), `taylor` (first order), `square` (of a weight that is certain, formed once), `origin`
(the layer that made the values of an attention, see `Origin`), `kernel` (the convolution before a pooling, see `Kernel`) and `groups`
(the scores of a softmax within groups).

>>> import torch
>>> from dubito.posteriors.predict.streamlined import Moments, rule
>>> from dubito.posteriors.predict.streamlined.rules.activations import by_quadrature
>>> @rule(torch.sinc)
... def sinc(x, *, adjoint=False, axis=None):
...     return by_quadrature(torch.sinc, x, adjoint=adjoint, axis=axis)
>>> sinc(Moments(torch.zeros(1), torch.full((1,), 0.01))).mean          # 1 - pi^2 0.01 / 6 + ...
tensor([0.9838])
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.func import vmap

from dubito.posteriors.predict.streamlined.operations import canonical
from dubito.tensors.covariances.propagation import Noise, Shift

if TYPE_CHECKING:
    from typing_extensions import TypeIs


class Moments(NamedTuple):
    r"""Numbers with means and variances [B, ...], of the same shape.

    `factor` [R, B, ...] holds directions in which they move together: covariances off the diagonal are those of
    :math:`\sum_r u_r u_r^T`. `var` is the whole variance, of which the directions explain a part.
    """

    mean: Tensor
    var: Tensor
    factor: Tensor | None = None


class Output(NamedTuple):
    """What the output layer gives: means [B, ..., C] and covariances [B, ..., C, C]."""

    mean: Tensor
    cov: Tensor


class Weight(NamedTuple):
    """A weight with its mean, its variance, and E[w^2] = mean^2 + variance, which is formed once.

    `block` is the covariance of a layer's matrix, or of its bias, where the entries are not independent."""

    mean: Tensor
    var: Tensor
    second: Tensor
    block: Noise | Shift | None = None

    @property
    def factor(self) -> None:
        """A weight has no directions: it is the first of its noise."""

    @staticmethod
    def of(mean: Tensor, var: Tensor, block: Noise | Shift | None = None) -> Weight:
        """A weight by its mean and variance."""
        return Weight(mean, var, torch.addcmul(var, mean, mean), block)


Value: TypeAlias = Moments | Weight | Tensor  # an argument of a rule; a tensor is certain


def uncertain(value: object) -> TypeIs[Moments | Weight]:
    """Whether a value has a variance."""
    return isinstance(value, Moments | Weight)


def is_moments(value: object) -> TypeIs[Moments]:
    """Whether a value is a random result of an operation (not a weight), which may have directions."""
    return isinstance(value, Moments)


def is_weight(value: object) -> TypeIs[Weight]:
    """Whether a value is a weight with a variance."""
    return isinstance(value, Weight)


def mean_of(value: object) -> Any:
    """The mean of a value that may be certain, or None."""
    return value.mean if uncertain(value) else value


def var_of(value: object) -> Tensor | None:
    """The variance of a value; None if it is certain."""
    return value.var if uncertain(value) else None


def factor_of(value: object) -> Tensor | None:
    """The directions of a value; None if it has none."""
    return value.factor if is_moments(value) else None


def residual_of(value: object) -> Tensor | None:
    """The variance of a value that its directions do not explain; None if it is certain."""
    return residual(value) if is_moments(value) else var_of(value)


def block_of(value: object) -> Any:
    """The covariance of a weight whose entries are not independent; None of anything else."""
    return value.block if is_weight(value) else None


def plus(a: Tensor | None, b: Tensor | None) -> Any:
    """a + b, where None is zero."""
    return b if a is None else a if b is None else a + b


def total(terms: list[Tensor], like: Tensor) -> Tensor:
    """The sum of directions of several values; where some have more, the others do not move in those."""
    return sum(widen(terms), torch.zeros((), dtype=like.dtype, device=like.device))  # pyright: ignore[reportReturnType]


def widen(factors: list[Tensor]) -> list[Tensor]:
    """Directions of several values side by side: where some have more, the others do not move in those."""
    count = max(len(one) for one in factors)
    return [one if len(one) == count else torch.cat([one, one.new_zeros(count - len(one), *one.shape[1:])]) for one in factors]


def still(adjoint: bool) -> AbstractContextManager:
    """Around what computes variances: the adjoint needs gradients of the means alone, with variances held fixed."""
    return torch.no_grad() if adjoint else nullcontext()


def linear_map(function: Callable[[Tensor], Tensor], x: Moments, *, squared: Callable[[Tensor], Tensor] | None = None) -> Moments:
    """A map that only moves numbers about, or (with `squared`, the same map with squared coefficients) adds them up."""
    factor = None if x.factor is None else vmap(function)(x.factor)
    if squared is None:
        return Moments(function(x.mean), function(x.var), factor)
    # what moves together adds up before it is squared
    var = squared(x.var) if factor is None else squared(residual(x)) + factor.square().sum(0)
    return Moments(function(x.mean), var, factor)


def residual(x: Moments | Weight) -> Tensor:
    """The part of the variance that is each number's own."""
    return x.var if x.factor is None else (x.var - x.factor.square().sum(0)).clamp_min(0)


def attached(mean: Tensor, m: Tensor, slope: Tensor) -> Tensor:
    """The same mean, whose gradient in m is the expected slope."""
    return _Attached.apply(mean, m, slope)  # pyright: ignore[reportReturnType]


class _Attached(torch.autograd.Function):
    """Nothing forwards and one product backwards, where torch's own operations would make a pass over memory for each of three."""

    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, m: Tensor, slope: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The mean itself."""
        return mean.view_as(mean)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Keep the slope."""
        ctx.save_for_backward(inputs[2])
        ctx.save_for_forward(inputs[2])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gradient times slope."""
        return None, g * ctx.saved_tensors[0], None

    @staticmethod
    def jvp(ctx: Any, mean: Any, m: Tensor, slope: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Tangent times slope."""
        return m * ctx.saved_tensors[0]


Sizes = int | Sequence[int]  # of a kernel, a stride or a padding: one number for all axes, or one for each
Dims = int | Sequence[int] | None  # axes of a reduction; None: all
RULES: dict[str, Callable[..., Any]] = {}
KEYWORDS: dict[str, frozenset[str]] = {}  # of OPTIONAL, those that a rule takes
OPTIONAL = {"adjoint", "axis", "groups", "kernel", "origin", "rank", "square", "taylor"}


def rule(*operations: Callable | str) -> Callable[[Callable], Callable]:
    """Register a rule for operations, given as functions or by name; `torch.relu`, `F.relu`, `x.relu()` and `x.relu_()` are one."""

    def _register(function: Callable) -> Callable:
        for operation in operations:
            name = operation if isinstance(operation, str) else canonical(operation)
            RULES[name] = function
            KEYWORDS[name] = frozenset(inspect.signature(function).parameters) & OPTIONAL
        return function

    return _register


def from_end(dim: Dims, ndim: int) -> tuple[int, ...]:
    """Axes counted from the end, so that they hold for directions [R, ...] too."""
    axes = range(ndim) if dim is None or dim == () else (dim,) if isinstance(dim, int) else dim
    return tuple(axis if axis < 0 else axis - ndim for axis in axes)
