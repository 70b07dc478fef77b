"""A function of tensors as the plain list of its operations, and repetitions of one, which a GPU records as a CUDA graph.

The function runs once under torch's tracer, `make_fx`, which writes down its forward and backward operations; from then on no Python of
the network, of autograd or of vmap runs any more, which for small networks is nearly all the time that a gradient takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from dubito.network.cuda_graphs import usable
from dubito.network.examples import Batch
from dubito.tensors import tree

ATEN = torch.ops.aten
IDLE = {ATEN.detach.default, ATEN.alias.default, ATEN.view.default, ATEN._unsafe_view.default, ATEN.expand.default}
FACTORS = {ATEN.mul.Scalar, ATEN.mul.Tensor, ATEN.div.Tensor}
FILLED = {ATEN.ones_like.default: 1, ATEN.zeros_like.default: 0}  # shapes alone decide
CONSTANT = {ATEN.zeros.default, ATEN.full.default}


class Traced:
    """A function of (position, batch) as the list of its operations, for batches of one shape.

    Raises `RuntimeError` if the operations give another result than the function, as of a network that looks at values or is random.
    `bytes` is the size of all intermediate results of one call.
    """

    def __init__(self, function: Callable, position: Tensor, batch: Batch, *, compile: bool, half: bool = False):
        leaves = list(tree.leaves(batch))

        def flat(position: Tensor, *leaves: Tensor) -> tuple[Tensor, Tensor]:
            """The function of tensors alone, as the tracer wants it."""
            replacing = iter(leaves)
            return function(position, tree.apply_leaves(lambda _: next(replacing), batch))

        expected = function(position, batch)  # before the trace: some things are computed at the first call and kept
        graph = make_fx(flat)(position, *leaves)
        self.bytes = clean(graph)
        self.module = torch.compile(graph, dynamic=False) if compile else graph
        with torch.no_grad():  # what was traced must be what the network does
            result = self.module(position, *leaves)
        if not all(alike(a, b, half) for a, b in zip(expected, result, strict=True)):
            raise RuntimeError("the traced operations give another result than the network")

    def __call__(self, position: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return self.module(position, *tree.leaves(batch))


def alike(a: Tensor, b: Tensor, half: bool) -> bool:
    """Whether two results are the same within rounding.

    In half precision they are compared as a whole, since a GPU's sums, in an order of their own, then differ by a part in 256.
    """
    if half:
        return bool((a - b).norm() <= 1e-2 * b.norm())
    return torch.allclose(a, b, rtol=1e-3, atol=1e-3, equal_nan=True)


def clean(module: GraphModule) -> int:
    """Remove operations that compute nothing, and compute once what is the same every time; the bytes of all results that are left.

    A small network's gradient is a hundred operations of a few microseconds, a third of which are views and factors of one.
    """
    # what is written to in place must be made anew every time, and must not be what it was copied from
    written = any(node.op == "call_function" and node.is_impure() for node in module.graph.nodes)
    _remove_identities(module.graph, factors=not written)
    if not written:
        _fold_constants(module)
    module.graph.eliminate_dead_code()
    module.recompile()
    values = [node.meta.get("val") for node in module.graph.nodes]
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))


def _remove_identities(graph: Graph, *, factors: bool) -> None:
    """Remove views that change nothing and, with `factors`, multiplications by one."""
    for node in list(graph.nodes):
        unchanged = _unchanged_input(node, factors=factors)
        if unchanged is not None:
            node.replace_all_uses_with(unchanged)
            graph.erase_node(node)


def _unchanged_input(node: Node, *, factors: bool) -> Node | None:
    """The input that an operation gives back as it is, or None."""
    value, first = _value(node), node.args[0] if node.args else None
    if value is None or not isinstance(first, Node):
        return None
    before = first.meta.get("val")
    if not isinstance(before, Tensor) or before.shape != value.shape or before.dtype != value.dtype:
        return None
    by_one = factors and node.target in FACTORS and node.args[1] in (1, 1.0)
    return first if by_one or node.target in IDLE else None


def _fold_constants(module: GraphModule) -> None:
    """Keep results that do not depend on the inputs as buffers."""
    known: dict[Node, Tensor] = {}
    for node in module.graph.nodes:
        value, inputs = _value(node), node.all_input_nodes
        if value is None:
            continue
        if node.target in FILLED:
            known[node] = torch.full(value.shape, FILLED[node.target], dtype=value.dtype, device=value.device)
        elif all(item in known for item in inputs) and (inputs or node.target in CONSTANT):
            known[node] = _call(node, known)
    for number, (node, value) in enumerate(known.items()):
        if any(user not in known for user in node.users):
            module.register_buffer(f"_constant_{number}", value)
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(module.graph.get_attr(f"_constant_{number}"))


def _call(node: Node, known: dict[Node, Tensor]) -> Any:
    """The result of an operation on inputs that are known."""
    assert callable(node.target)
    return node.target(*map_arg(node.args, known.__getitem__), **map_arg(node.kwargs, known.__getitem__))


def _value(node: Node) -> Tensor | None:
    """What a call of a function returned under the tracer, if that is a tensor."""
    value = node.meta.get("val")
    return value if node.op == "call_function" and isinstance(value, Tensor) else None


Tensors = tuple[Tensor, ...]


class Loop:
    """Repeats `function(*state, *constants) -> state`.

    On a GPU, where for small networks starting an operation takes longer than doing it, some repetitions are recorded as a CUDA graph
    and played back; a network that cannot be recorded runs as it is. `lengths` are the repetitions in a recording, from the longest.
    """

    def __init__(
        self, function: Callable[..., Tensors], *, record: bool, compile: bool, lengths: tuple[int, ...] = (32, 1)
    ):  # fmt: skip
        self.function, self.record, self.compile, self.lengths = function, record, compile, lengths
        self.compiled: Callable[..., Tensors] | None = None
        self.recordings: dict[int, torch.cuda.CUDAGraph] = {}
        self.buffers: Tensors = ()

    def __call__(self, state: Sequence[Tensor], constants: Sequence[Tensor], steps: int) -> Tensors:
        state = tuple(state)
        if self.record and steps > 0:
            try:
                return self._play(state, tuple(constants), steps)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                self.record = False
        for _ in range(steps):
            state = self.function(*state, *constants)
        return state

    def _play(self, state: Tensors, constants: Tensors, steps: int) -> Tensors:
        inputs = (*state, *constants)
        if not self.buffers or any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(self.buffers, inputs, strict=True)):
            self.buffers, self.recordings = tuple(leaf.clone() for leaf in inputs), {}
        for buffer, leaf in zip(self.buffers, inputs, strict=True):
            buffer.copy_(leaf)
        held, still = self.buffers[: len(state)], self.buffers[len(state) :]
        for length in self.lengths:
            repeats, steps = divmod(steps, length)
            if repeats and length not in self.recordings:
                self.recordings[length] = self._record(held, still, length)
            for _ in range(repeats):
                self.recordings[length].replay()
        return tuple(leaf.clone() for leaf in held)

    def _record(self, held: Tensors, still: Tensors, length: int) -> torch.cuda.CUDAGraph:
        function = self._compiled(held, still) if self.compile else self.function
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():  # the first calls allocate and choose algorithms
            for _ in range(3):
                function(*held, *still)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with usable(stream.device), torch.cuda.graph(graph), torch.no_grad():
            state = held
            for _ in range(length):
                state = function(*state, *still)
            for buffer, leaf in zip(held, state, strict=True):
                buffer.copy_(leaf)
        return graph

    def _compiled(self, held: Tensors, still: Tensors) -> Callable[..., Tensors]:
        if self.compiled is None:
            graph = make_fx(self.function)(*held, *still)
            clean(graph)
            self.compiled = torch.compile(graph, dynamic=False)
        return self.compiled
