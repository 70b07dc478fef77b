"""A softmax within groups, as graph attention writes it: exp(s) over the sum of its group, the groups told by an index.

Numerator and denominator are not independent. The division is therefore taken as a whole, of first order in the scores as any other
softmax.
"""

from __future__ import annotations

from torch import Tensor
from torch.func import vmap

from dubito.posteriors.predict.streamlined.moments import Moments, residual, still
from dubito.posteriors.predict.streamlined.operations import OF_SHAPE, Ref, Step, Trace, slot_of

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
