"""A softmax within groups, as graph attention writes it: exp(s) over the sum of its group, the groups told by an index; and the largest
of each group.

Numerator and denominator are not independent. The division is therefore taken as a whole, of first order in the scores as any other
softmax.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vmap

from dubito.posteriors.predict.streamlined.moments import Moments, Value, mean_of, residual, rule, still, uncertain
from dubito.posteriors.predict.streamlined.operations import OF_SHAPE, Ref, Step, Trace, slot_of
from dubito.posteriors.predict.streamlined.rules.maxima import contestants, finish, largest
from dubito.tensors.checks import require

Groups = tuple[int, int, int, int]  # slot of the scores, axis, slot of the index [E], number of groups
SUMS, MOVES = {"index_add", "scatter_add"}, {"view", "reshape", "unsqueeze", "expand", "expand_as"}


def group_softmax(x: Moments, dim: int, index: Tensor, count: int, *, adjoint: bool = False) -> Moments:
    r"""The softmax A of the means within each group, and :math:`\mathrm{Var}_i = A_i^2 [v_i (1 - 2 A_i) + \sum_j A_j^2 v_j]`."""

    def _sums(t: Tensor) -> Tensor:
        """The sum of its group, for each of the numbers."""
        shape = [count if axis == dim else size for axis, size in enumerate(t.shape)]
        return t.new_zeros(shape).index_add(dim, index, t).index_select(dim, index)

    powers = x.mean.exp()
    mean = powers / _sums(powers)
    with still(adjoint):
        a = mean.detach() if adjoint else mean
        own, square = residual(x), a * a
        var = (square * (own * (1 - 2 * a) + _sums(square * own))).clamp_min(0)
        factor = None if x.factor is None else vmap(lambda u: a * (u - _sums(a * u)))(x.factor)
        var = var if factor is None else var + factor.square().sum(0)
    return Moments(mean, var, factor)


def find_groups(trace: Trace, step: Step) -> Groups | None:
    """Of a division: the scores and their groups, if it is such a softmax."""
    makers, powers = trace.makers, slot_of(step.args[0])
    top, chosen = makers.get(powers), _without_epsilon(trace, slot_of(step.argument(1, "other")))
    if trace.dynamic or powers is None or top is None or top.name != "exp" or chosen is None:
        return None
    dim, index = _selection(chosen)
    total = _without_epsilon(trace, chosen.source)
    if index is None or total is None or total.name not in SUMS or total.kwargs or total.args[3:] != (Ref(powers),):
        return None
    base, shape, by = makers.get(total.source), trace.shapes[powers], slot_of(total.args[2])
    while by != index and by in makers and makers[by].name in MOVES:
        by = makers[by].source
    axis = dim % len(shape)
    known = base is not None and base.name in OF_SHAPE and total.args[1] % len(shape) == axis and by == index
    if not known or top.source is None or trace.shapes[index] != (shape[axis],):
        return None
    return top.source, axis, index, trace.shapes[total.out.slot][axis]


def _without_epsilon(trace: Trace, slot: int | None) -> Step | None:
    """The operation that made the slot, but for a number that is added."""
    maker = trace.makers.get(slot)
    added = maker is not None and maker.name == "add" and isinstance(maker.args[1], float)
    return trace.makers.get(maker.source) if maker is not None and added else maker


def _selection(step: Step) -> tuple[int, int | None]:
    """The axis and the slot of the index by which an operation selects; None if it does not."""
    if step.name == "getitem":
        return 0, slot_of(step.args[1])
    return (step.args[1], slot_of(step.args[2])) if step.name == "index_select" and len(step.args) == 3 else (0, None)


# -- the largest of each group


@rule("scatter_reduce")
def scatter_reduce(
    input: Value, dim: int, index: Tensor, src: Value, reduce: str, *, include_self: bool = True, adjoint: bool = False,
    axis: int | None = None, taylor: bool = False,
) -> Moments:  # fmt: skip
    """The largest, or the smallest, of the numbers that an index puts into each place, see `larger`; `input` where there is none."""
    require(
        reduce in ("amax", "amin") and not uncertain(input),
        f"scatter_reduce({reduce!r}) has a rule for one pass only as 'amax' and 'amin', into certain numbers: use scatter_add, "
        "or predict with how='sampled'",
    )
    start, sign, ndim = mean_of(input), 1.0 if reduce == "amax" else -1.0, index.ndim
    places = torch.arange(start.numel(), device=index.device).view(start.shape).gather(dim, index)
    table, absent = _members(places.flatten(), start.numel())
    low = -(torch.finfo(start.dtype).max ** 0.25)  # never wins

    def _by_place(t: Tensor) -> Tensor:
        """Numbers [..., places, members]."""
        t = t[(..., *(slice(size) for size in index.shape))].flatten(-ndim)
        return t[..., table].masked_fill(absent, 0.0)

    numbers = contestants(src, adjoint).signed(sign).map(_by_place)
    numbers = numbers._replace(mean=numbers.mean.masked_fill(absent, low))
    if include_self:
        own = (sign * start).flatten().clamp_min(low).unsqueeze(1)
        numbers = numbers.map(lambda t: torch.cat([t, torch.zeros_like(t[..., :1])], -1))
        numbers = numbers._replace(mean=torch.cat([numbers.mean[..., :-1], own], -1))
    winner = largest(numbers, adjoint, taylor).signed(sign).map(lambda t: t.unflatten(-1, start.shape))
    empty = absent.all(1).view(start.shape)
    return finish(winner._replace(mean=torch.where(empty, start, winner.mean)), adjoint, axis)


def _members(places: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Which numbers are in each of `count` places, [count, K], and where a place has fewer than K."""
    order = places.argsort(stable=True)
    sizes = torch.bincount(places, minlength=count)
    rank = torch.arange(len(places), device=places.device) - (sizes.cumsum(0) - sizes)[places[order]]
    absent = torch.arange(max(1, int(sizes.max())), device=places.device) >= sizes.unsqueeze(1)
    table = torch.zeros(absent.shape, dtype=order.dtype, device=places.device)
    table[places[order], rank] = order
    return table, absent
