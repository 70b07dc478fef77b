"""The operations of a trace, written into a torch.fx graph."""

from __future__ import annotations

import operator

from torch import Tensor, fx, nn

from dubito.posteriors.predict.streamlined.operations import Arguments, Nested, Ref, Size, Step, Trace, refs, resolve


class GraphWriter:
    """A graph while it is written: `nodes` are its values, by slot of the trace."""

    def __init__(self, trace: Trace):
        self.trace, self.graph, self.needed = trace, fx.Graph(), trace.needed
        self.nodes: dict[int, fx.Node] = {}
        self.batch: fx.Node | None = None

    def node(self, slot: int) -> fx.Node:
        """The value of a slot."""
        return self.nodes[slot]

    def examples(self, place: int) -> fx.Node:
        """The input at that place, as a tensor."""
        return self.nodes[self.trace.inputs[place]]

    def size(self, size: Size) -> fx.Node:
        """constant + slope * B, where B is the number of examples."""
        call = self.graph.call_function
        if self.batch is None:
            first = self.examples(self.trace.batched.index(True))
            self.batch = call(operator.getitem, (call(getattr, (first, "shape")), 0))
        product = self.batch if size.slope == 1 else call(operator.mul, (self.batch, size.slope))
        return product if size.constant == 0 else call(operator.add, (product, size.constant))

    def fill(self, value: Nested) -> Nested:
        """A nested value with nodes in the place of every `Ref` and `Size`."""
        return resolve(value, self.node, self.size)

    def call(self, step: Step, args: tuple, kwargs: Arguments) -> fx.Node:
        """The operation itself, nothing in place: what it reads may be read by others."""
        name = getattr(step.func, "__name__", "")
        if step.name == "setitem":
            return self.graph.call_function(set_item, args, kwargs)
        if name == "__get__":
            return self.graph.call_function(getattr, (args[0], step.name[4:]))
        if kwargs.get("inplace"):
            kwargs = {**kwargs, "inplace": False}
        if getattr(Tensor, name, None) is step.func and args and isinstance(args[0], fx.Node):
            return self.graph.call_method(_out_of_place(name, step.name), args, kwargs)
        return self.graph.call_function(step.func, args, kwargs)

    def assign(self, out: Nested, node: fx.Node) -> None:
        """The node, or its items, become the values of the slots in `out`."""
        if isinstance(out, Ref):
            self.nodes[out.slot] = node
            return
        for i, item in enumerate(out):
            if any(ref.slot in self.needed for ref in refs(item)):
                self.assign(item, self.graph.call_function(operator.getitem, (node, i)))


def _out_of_place(name: str, canonical: str) -> str:
    """The method that does the same and changes nothing: `add` for `add_`, `__add__` for `__iadd__`."""
    plain = f"__{canonical}__" if name.startswith("__i") else name if name.endswith("__") else name.removesuffix("_")
    return plain if hasattr(Tensor, plain) else name


def set_item(x: Tensor, index: Nested, value: Tensor | float) -> Tensor:
    """A copy of x with x[index] = value."""
    x = x.clone()
    x[index] = value
    return x


def add_tensor(root: nn.Module, name: str, tensor: Tensor, *, parameter: bool = False, persistent: bool = False) -> None:
    """Register a tensor under a dotted name; its gradient is wanted if it is a parameter."""
    path, _, leaf = name.rpartition(".")
    place = root
    for part in path.split(".") if path else ():
        if part not in place._modules:
            place.add_module(part, nn.Module())
        place = place.get_submodule(part)
    if parameter:
        place.register_parameter(leaf, nn.Parameter(tensor, requires_grad=tensor.requires_grad))
    else:
        place.register_buffer(leaf, tensor, persistent=persistent)
