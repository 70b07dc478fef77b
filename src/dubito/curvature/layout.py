"""Which weights belong to which layer, and where each layer has its examples: found once for a network and a kind of input."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dubito.curvature.capture import Forward, Use, forward, select_examples
from dubito.model import Model
from dubito.network.examples import Inputs
from dubito.tensors import tree
from dubito.tensors.tree import Buffers, Params

MERGED = 2
UNCLEAR = "it is not clear which of its inputs belong to which example"


@dataclass(frozen=True)
class Part:
    """A layer: its Bayesian weights, and how its rows are to be read."""

    kind: str  # "affine", "scale", "lookup"
    weight: str | None
    bias: str | None
    axis: int  # of the examples in inputs and outputs: 0; 1 in [T, B, ...]; MERGED in [T B, ...], where the examples run faster

    @property
    def names(self) -> tuple[str, ...]:
        """Its weights, the matrix first."""
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    @property
    def matrix(self) -> str | None:
        """The name of the matrix of a linear layer or a convolution, if it is Bayesian."""
        return self.weight if self.kind == "affine" else None


@dataclass(frozen=True)
class Layout:
    parts: tuple[Part, ...]
    generic: tuple[str, ...]  # weights for which only gradients example by example are right
    reasons: dict[str, str] = field(default_factory=dict, hash=False, compare=False)
    outputs: int = 0  # numbers in the output for one example
    classes: int = 0  # C
    flat: bool = True  # one output vector an example, no positions
    alone: bool = False  # the only part is the layer whose output is the network's, at every position
    taps: int = 0  # numbers in the outputs of all recorded layers for one example

    def packed(self) -> list[list]:
        """As plain lists, for a state."""
        return [[[p.kind, p.weight, p.bias, p.axis] for p in self.parts], list(self.generic)]

    @staticmethod
    def unpacked(packed: list[list]) -> Layout:
        """The inverse of `packed`."""
        return Layout(tuple(Part(*part) for part in packed[0]), tuple(packed[1]))


_KNOWN: WeakKeyDictionary[nn.Module, dict[tuple, Layout]] = WeakKeyDictionary()


def layout(model: Model, params: Params, x: Inputs, buffers: Buffers, names: tuple[str, ...], *, anew: bool = False) -> Layout:
    """The layout of the layers that hold `names`, for inputs like x; `anew` if what is known may be out of date."""
    if model.coupled:  # its outputs are as many as x has rows, and a look costs less than one of them
        return _find(model, params, x, buffers, names)
    leaves = list(tree.leaves(x))
    kind = (type(model), names, model.output, model.likelihood.dim, *((tuple(leaf.shape[1:]), leaf.dtype) for leaf in leaves))
    kind = (*kind, *(min(leaf.shape[0], 2) for leaf in leaves if leaf.ndim))
    known = _KNOWN.setdefault(model.network, {})
    if kind in known and not anew:
        return known[kind]
    found = _find(model, params, x, buffers, names)
    if UNCLEAR not in found.reasons.values():  # these inputs may have been all alike, and the next ones tell
        known[kind] = found
    return found


def _find(model: Model, params: Params, x: Inputs, buffers: Buffers, names: tuple[str, ...]) -> Layout:
    live = {name: params[name].detach().requires_grad_() for name in names}
    everything = {**params, **live}
    done = forward(model, everything, x, buffers, wanted=live)
    batch = done.f.shape[0]
    if model.coupled:  # all rows of a layer are positions of the one example
        axes: Axes = {(use.weight, use.bias): 0 for use in done.uses}
    else:
        fewer = _with_fewer(model, everything, x, buffers, live, batch)
        _check_examples(model, everything, x, buffers, live, batch, fewer)
        if fewer is not None and not _same(done.f, fewer.f):  # the examples mix, unless the network is random
            _refuse_mixing(done.f, forward(model, everything, x, buffers, wanted=live).f)
        axes = _axes(done.uses, [] if fewer is None else fewer.uses, batch)
    reasons = _reasons(done, axes, names)
    parts: dict[tuple, Part] = {}
    for use in done.uses:
        if not {use.weight, use.bias} & set(reasons) and (axis := axes[use.weight, use.bias]) is not None:
            parts.setdefault((use.weight, use.bias), Part(use.kind, use.weight, use.bias, axis))
    taps = sum(use.shape.numel() for use in done.uses) // batch
    generic = tuple(name for name in names if name in reasons)
    alone = [part.axis for part in parts.values()] == [0] and not generic and _is_output(done)
    return Layout(tuple(parts.values()), generic, reasons, done.f[0].numel(), done.f.shape[-1], done.f.ndim == 2, alone, taps)


Axes = dict[tuple[str | None, str | None], int | None]


def _axes(uses: list[Use], fewer: list[Use], batch: int) -> Axes:
    """The axis of the examples, by the names of weight and bias; None where it is not clear in some use."""
    axes: Axes = {}
    for i, use in enumerate(uses):
        axis = _compared(use, fewer[i], batch) if len(fewer) == len(uses) else None
        if axes.setdefault((use.weight, use.bias), axis) != axis:
            axes[use.weight, use.bias] = None
    return axes


def _reasons(done: Forward, axes: Axes, names: tuple[str, ...]) -> dict[str, str]:
    """Why some weights need gradients example by example."""
    reasons = {name: "it is used otherwise than by a known layer" for name in names if name in done.otherwise}
    reasons |= _shared(done.uses)
    reasons |= {name: UNCLEAR for key, axis in axes.items() for name in key if axis is None and name is not None}
    pairs = [(weight, bias) for weight, bias in axes if weight is not None and bias is not None]
    while apart := [pair for pair in pairs if (pair[0] in reasons) != (pair[1] in reasons)]:  # a call is known as a whole
        for weight, bias in apart:
            reasons |= {weight: reasons.get(weight, ""), bias: reasons.get(bias, "")}
    used = {name for key in axes for name in key}
    return reasons | {name: "the network does not use it" for name in names if name not in used and name not in reasons}


def _is_output(done: Forward) -> bool:
    """Whether the only use is that of a matrix, and its output is the network's, with channels last."""
    if len(done.uses) != 1:
        return False
    (use,), node = done.uses, done.f.grad_fn
    if use.kind != "affine" or use.weight is None or node is None:
        return False
    if use.channel == -1:
        return use.edge.node in (node, node.next_functions[0][0] if "View" in node.name() else None)
    last = (0, *range(2, done.f.ndim), 1)  # the channels of a convolution, which `Model.call` has moved there
    return getattr(node, "_saved_dims", None) == last and node.next_functions[0][0] is use.edge.node


def _shared(uses: list[Use]) -> dict[str, str]:
    """Weights that meet different partners, or are used in different ways (an embedding that is also the output layer)."""
    partners: dict[str, set] = defaultdict(set)
    for use in uses:
        for name in (use.weight, use.bias):
            if name is not None:
                partners[name].add((use.kind, use.weight, use.bias))
    wrong = {name: "it is shared by layers of different kinds" for name, found in partners.items() if len(found) > 1}
    return wrong


def _with_fewer(model: Model, params: Params, x: Inputs, buffers: Buffers, live: Params, batch: int) -> Forward | None:
    """A pass over one example less (or over two copies of a single one), whose shapes tell the axes apart.

    The first half are the same examples; the others are copies of the first, so that it shows whether outputs depend on them.
    """

    count = _fewer(batch)

    def change(leaf: Tensor) -> Tensor:
        """The inputs of the pass, of those inputs that are one for each example."""
        if leaf.shape[:1] != (batch,):
            return leaf
        kept = leaf[: _kept(batch)]
        return torch.cat([kept, leaf[:1].expand(count - len(kept), *leaf.shape[1:])])

    try:
        return forward(model, params, tree.apply_leaves(change, x), buffers, wanted=live)
    except Exception:  # a network may insist on its number of examples, in any way
        return None


def _check_examples(
    model: Model, params: Params, x: Inputs, buffers: Buffers, live: Params, batch: int, fewer: Forward | None
) -> None:
    """Raise where the network's outputs do not follow the rows of the inputs: what is not one example with fewer of them, nor alone."""
    one, reason = fewer, None
    if fewer is None and batch > 1:
        try:
            one = forward(model, params, select_examples(x, 0, 1), buffers, wanted=live)
        except (
            RuntimeError,
            IndexError,
            ValueError,
            TypeError,
            AssertionError,
        ) as error:  # of shapes; any other is the network's own
            reason = error
    count = 1 if fewer is None else _fewer(batch)
    if (one is None and batch > 1) or (one is not None and len(one.f) != count):
        shapes = ", ".join(str(list(leaf.shape)) for leaf in tree.leaves(x))
        raise ValueError(
            f"the network gives {batch} outputs for inputs of shape {shapes}, and does not give one for one row: curvature takes "
            "the first axis of the inputs as independent examples. Where rows depend on each other, as nodes of a graph do, say "
            "Model(..., coupled=True), and pass whole batches, [(x, y)]"
        ) from reason


def _fewer(batch: int) -> int:
    """The number of examples in the pass over one less, or over two copies of a single one."""
    return batch - 1 if batch > 1 else 2


def _kept(batch: int) -> int:
    """How many of the first examples are the same in the pass over one example less."""
    return max(1, batch // 2)


def _same(whole: Tensor, fewer: Tensor) -> bool:
    """Whether the outputs of the examples that are in both passes are equal, beside rounding."""
    kept = _kept(len(whole))
    a, b = whole.detach()[:kept], fewer.detach()[:kept]
    close, largest = max(1e-3, 4 * torch.finfo(a.dtype).eps), float(whole.detach().abs().nan_to_num(0.0, 0.0).max())
    return a.shape == b.shape and torch.allclose(a, b, rtol=close, atol=close * largest, equal_nan=True)


def _refuse_mixing(first: Tensor, again: Tensor) -> None:
    """Raise for a network that gives the same outputs `again` for the same examples, but others in other company."""
    if torch.equal(first, again):
        raise ValueError(
            "the outputs of some examples depend on the others in the batch (attention among rows, a graph of neighbours, "
            "h - h.mean(0)), but curvature takes examples as independent and would be wrong. Let each example hold all that its output "
            "depends on, or say that the rows of a batch are a whole, Model(..., coupled=True), and pass such wholes, [(x, y)]"
        )


def _compared(use: Use, other: Use, batch: int) -> int | None:
    """The axis whose size follows the number of examples, where the rows of the common examples are the same; None if in doubt.

    A shape alone does not tell: a table of T positions, the same for all examples, may happen to have as many rows as there are
    examples."""
    if use.x.ndim != other.x.ndim:
        return None
    count = _fewer(batch)
    changed = [i for i, (a, b) in enumerate(zip(use.x.shape, other.x.shape, strict=True)) if a != b]
    if len(changed) != 1 or changed[0] > 1 or use.x.shape[changed[0]] * count != other.x.shape[changed[0]] * batch:
        return None
    axis, plain = changed[0], use.channel == -1 and use.convolution is None
    if use.x.shape[axis] == batch:
        return axis if (axis == 0 or plain) and _agree(use.x.movedim(axis, 0), other.x.movedim(axis, 0)) else None
    if axis == 1:
        return None
    slow = _agree(use.x.unflatten(0, (batch, -1)), other.x.unflatten(0, (count, -1)))  # [B T, ...]
    fast = _agree(
        use.x.unflatten(0, (-1, batch)).transpose(0, 1), other.x.unflatten(0, (-1, count)).transpose(0, 1)
    )  # [T B, ...]
    if slow and (batch == 1 or not fast):
        return 0
    return MERGED if fast and not slow and plain else None


def _agree(a: Tensor, b: Tensor) -> bool:
    """Whether the examples that both have are the same, beside how much examples differ: passes over batches of different sizes
    round differently."""
    shorter = _kept(a.shape[0])
    if not a.is_floating_point():
        return torch.equal(a[:shorter], b[:shorter])
    close = max(1e-3, 4 * torch.finfo(a.dtype).eps)  # half precision rounds as much
    a, b = a.double(), b.double()
    away, spread = (a[:shorter] - b[:shorter]).norm(), (a - a.mean(0)).norm()
    return bool((away <= 0.05 * spread) | (away <= close * a.norm()))


class Pass(NamedTuple):
    """A pass over some inputs, and the layout it follows."""

    found: Layout
    done: Forward
    uses: dict[Part, list[Use]]  # of each part; a part that these inputs do not use has none


def passed(
    model: Model, params: Params, x: Inputs, buffers: Buffers, names: tuple[str, ...], found: Layout | None = None
) -> Pass:
    """One pass over x, with the uses of the weights `names`.

    A network may do with these inputs what it did not do with the first of their kind (it looks at the values, or one of its flags has
    changed since): what it uses in a way that the layout does not know would have no gradient, so the layout is then found again.
    """
    found = layout(model, params, x, buffers, names) if found is None else found
    for latest in (False, True):
        # what is left to the general way needs no gradient here
        wanted = {name: params[name].detach().requires_grad_(name not in found.generic) for name in names}
        done = forward(model, {**params, **wanted}, x, buffers, wanted=wanted, skip=found.generic)
        uses: dict[Part, list[Use]] = {part: [] for part in found.parts}
        by_names = {(part.weight, part.bias): part for part in found.parts}
        strange = set(done.otherwise)
        for use in done.uses:
            part = by_names.get((use.weight, use.bias))
            if part is None or part.kind != use.kind:
                strange.add(str(use.weight or use.bias))
            else:
                uses[part].append(use)
        if found.alone and not _is_output(done):
            strange.update(names)
        if not strange:
            return Pass(found, done, uses)
        if not latest:
            found = layout(model, params, x, buffers, names, anew=True)
    raise ValueError(
        f"{min(strange)} is used in one way in one pass and in another in the next, over the same inputs: curvature needs a network "
        "that does the same every time"
    )
