"""A trace turned into a program of rules: a torch.fx GraphModule, whose code can be read, compiled and exported."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from dubito.posteriors.predict.streamlined import rules as _rules  # noqa: F401 (registers them)
from dubito.posteriors.predict.streamlined.moments import Moments, Weight
from dubito.posteriors.predict.streamlined.origin import origin
from dubito.posteriors.predict.streamlined.registry import KEYWORDS, RULES
from dubito.posteriors.predict.streamlined.rules.head import head
from dubito.posteriors.predict.streamlined.trace import Ref, Size, Step, Trace, refs

NOISE = {"dropout", "dropout1d", "dropout2d", "dropout3d"}
WIDE = 100  # outputs above which their covariances are left out


class NoRule(ValueError):
    """An operation on random numbers that nobody has written a rule for."""

    def __init__(self, step: Step):
        where = f" in {step.where}" if step.where else ""
        super().__init__(
            f"there is no rule for the mean and variance of {step.name}(){where}. The ways out: write one "
            f"(`@rule({step.name!r})` of dubito.posteriors.predict.streamlined, five lines, see docs/streamlined.md); make the weights "
            "before it certain by `only=`; let it be sampled, `predict(..., draws=64)` (for this operation alone); or predict with "
            "how='linearized' or 'sampled'"
        )


def lower(
    found: Trace,
    random: Iterable[str],
    *,
    adjoint: bool = False,
    rank: int = 0,
    noisy: bool = False,
    fallback: int = 0,
    taylor: bool = False,
    fixed: Mapping[str, Any] | None = None,
) -> fx.GraphModule:
    """The program: takes the inputs, then the weights in the order of `found.weights`, and gives the moments of f.

    `random` names the weights that have a variance; `noisy` inputs have one too. Operations on what is certain stay as they are, and
    what f does not need is left out. `fixed` holds the weights: squares of those that are certain are then formed once.
    """
    random, graph, root = set(random), fx.Graph(), nn.Module()
    needed = _needed(found)
    values: dict[int, Any] = {slot: graph.placeholder(f"x{i}") for i, slot in enumerate(found.inputs)}
    for slot, name in found.weights.items():
        values[slot] = graph.placeholder("w_" + "".join(c if c.isalnum() else "_" for c in name))
    for i, (slot, tensor) in enumerate(found.constants.items()):
        if slot in needed:
            root.register_buffer(f"constant{i}", tensor, persistent=False)
            values[slot] = graph.get_attr(f"constant{i}")
    uncertain = {slot for slot, name in found.weights.items() if name in random}
    uncertain |= set(found.inputs[:1]) if noisy else set()
    batch = None
    for step in _mixed(found.steps):
        outs = [ref.slot for ref in refs(step.out)]
        if not needed & set(outs):
            continue
        if batch is None and _follows((step.args, step.kwargs)):
            first = values[found.inputs[found.batched.index(True)]]
            if noisy and found.batched.index(True) == 0:
                first = graph.call_function(getattr, (first, "mean"))
            batch = graph.call_function(operator.getitem, (graph.call_function(getattr, (first, "shape")), 0))
        args, kwargs = (_filled(part, values, graph, batch) for part in (step.args, step.kwargs))
        if _noise(step) or any(ref.slot in uncertain for ref in refs((step.args, step.kwargs))):
            last = isinstance(step.out, Ref) and step.out.slot == found.output
            given = {"adjoint": adjoint, "rank": rank or None, "taylor": taylor}
            if adjoint and isinstance(step.out, Ref):
                given["axis"] = found.axes.get(step.out.slot)
            if fixed is not None and "square" in KEYWORDS.get(step.name, ()):
                given["square"] = _square(found, step, uncertain, fixed, graph, root)
            if "origin" in KEYWORDS.get(step.name, ()):
                given["origin"] = _origin(found, step, uncertain, values, graph, root)
            if "shared" in KEYWORDS.get(step.name, ()):
                given["shared"] = _shared(found, step, uncertain, values, not noisy)
            if last and step.name == "linear" and not adjoint and found.shapes[found.output][-1] <= WIDE:
                node = graph.call_function(head, args, kwargs)
            else:
                node = _ruled(graph, step, args, kwargs, given, fallback, root)
            uncertain |= set(outs)
        else:
            node = _plain(graph, step, args, kwargs)
        _assign(graph, step.out, node, values, needed)
    graph.output(values[found.output])
    return fx.GraphModule(root, graph)


def _origin(found: Trace, step: Step, uncertain: set[int], values: dict[int, Any], graph: fx.Graph, root: nn.Module) -> Any:
    """The layer behind what an attention averages, as `Origin` has it: the third argument, or the second of a product."""
    index = 2 if step.name == "scaled_dot_product_attention" else 1
    known = origin(found, step.args[index] if len(step.args) > index else step.kwargs.get("value"), uncertain)
    if known is None:
        return None
    layer = (*known.step.args, known.step.kwargs.get("bias"))[:3]
    input, weight, bias = (values[part.slot] if isinstance(part, Ref) else None for part in layer)
    start, flat = int(known.channels.min()), known.channels.flatten()
    if torch.equal(flat, torch.arange(start, start + len(flat))):
        return (input, weight, bias, (start, *known.channels.shape), known.swapped)
    name = f"channels{sum(1 for _ in root.buffers())}"
    root.register_buffer(name, known.channels, persistent=False)  # stays on the CPU, which any device takes as an index
    return (input, weight, bias, graph.get_attr(name), known.swapped)


def _shared(found: Trace, step: Step, uncertain: set[int], values: dict[int, Any], certain: bool) -> Any:
    """The convolution behind what is pooled, whose random kernel all positions share, as `Kernel` has it; `certain`: its first inputs.
    A batch norm between the two scales every channel, which changes no correlation."""
    makers = {out.slot: maker for maker in found.steps if isinstance(out := maker.out, Ref)}
    maker = makers.get(step.args[0].slot) if step.args and isinstance(step.args[0], Ref) else None
    whole = certain and not any(_noise(one) for one in found.steps)
    if whole and maker is not None and maker.name == "batch_norm":
        maker = makers.get(maker.args[0].slot) if maker.args and isinstance(maker.args[0], Ref) else None
    if maker is None or not maker.name.startswith("conv") or maker.name[4:] not in ("1d", "2d", "3d"):
        return None
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given: dict[str, Any] = {**dict(zip(names, maker.args, strict=False)), **maker.kwargs}
    if given.get("groups", 1) != 1 or not isinstance(given["weight"], Ref) or given["weight"].slot not in uncertain:
        return None
    layer = (
        values[part.slot] if isinstance(part, Ref) else None for part in (given["input"], given["weight"], given.get("bias"))
    )
    return (*layer, given.get("stride", 1), given.get("padding", 0), given.get("dilation", 1), whole)


def _mixed(steps: list[Step]) -> list[Step]:
    """The same, with a + w (b - a), as a GRU has it, in one: its parts are not independent, since a is in both."""
    makers = {step.out.slot: step for step in steps if isinstance(step.out, Ref)}
    found = []
    for step in steps:
        last = step.args[2] if step.name == "addcmul" and len(step.args) == 3 and not step.kwargs else None
        apart = makers.get(last.slot) if isinstance(last, Ref) else None
        if apart is not None and apart.name == "sub" and not apart.kwargs and apart.args[1] == step.args[0]:
            step = Step(torch.lerp, "lerp", (step.args[0], apart.args[0], step.args[1]), {}, step.out, step.where)
        found.append(step)
    return found


def _noise(step: Step) -> bool:
    """Whether it makes random what is certain: dropout, which is written down only where it is on."""
    on = step.kwargs.get("training", step.args[2] if len(step.args) > 2 else True)
    return step.name in NOISE and bool(on)


def _square(found: Trace, step: Step, uncertain: set[int], fixed: Mapping[str, Any], graph: fx.Graph, root: nn.Module) -> Any:
    """The square of a weight that is certain, where it meets something that is not."""
    weight = step.args[1] if len(step.args) > 1 else step.kwargs.get("weight")
    if not isinstance(weight, Ref) or weight.slot in uncertain or weight.slot not in found.weights:
        return None
    name = f"square_{''.join(c if c.isalnum() else '_' for c in found.weights[weight.slot])}"
    if not hasattr(root, name):
        root.register_buffer(name, fixed[found.weights[weight.slot]].detach().square(), persistent=False)
    return graph.get_attr(name)


def _needed(found: Trace) -> set[int]:
    needed = {found.output}
    for step in reversed(found.steps):
        if any(ref.slot in needed for ref in refs(step.out)):
            needed |= {ref.slot for ref in refs((step.args, step.kwargs))}
    return needed


def _follows(value: Any) -> bool:
    if isinstance(value, Size):
        return True
    if isinstance(value, dict):
        return any(_follows(item) for item in value.values())
    if isinstance(value, slice):
        return any(_follows(item) for item in (value.start, value.stop, value.step))
    return isinstance(value, tuple | list) and not isinstance(value, Ref) and any(_follows(item) for item in value)


def _filled(value: Any, values: dict[int, Any], graph: fx.Graph, batch: Any) -> Any:
    if isinstance(value, Ref):
        return values[value.slot]
    if isinstance(value, Size):
        size = batch if value.slope == 1 else graph.call_function(operator.mul, (batch, value.slope))
        return size if value.constant == 0 else graph.call_function(operator.add, (size, value.constant))
    if isinstance(value, dict):
        return {key: _filled(item, values, graph, batch) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_filled(item, values, graph, batch) for item in (value.start, value.stop, value.step)))
    if isinstance(value, tuple | list):
        return type(value)(_filled(item, values, graph, batch) for item in value)
    return value


def _plain(graph: fx.Graph, step: Step, args: tuple, kwargs: dict) -> fx.Node:
    """The operation itself, on what is certain."""
    name = getattr(step.func, "__name__", "")
    if step.name == "setitem":
        return graph.call_function(_set, args, kwargs)
    if name == "__get__":
        return graph.call_function(getattr, (args[0], step.name[4:]))
    if getattr(torch.Tensor, name, None) is step.func and args and isinstance(args[0], fx.Node):
        return graph.call_method(name, args, kwargs)
    return graph.call_function(step.func, args, kwargs)


def _set(x: Tensor, index: Any, value: Any) -> Tensor:
    x = x.clone()
    x[index] = value
    return x


def _ruled(
    graph: fx.Graph, step: Step, args: tuple, kwargs: dict, given: dict[str, Any], fallback: int, root: nn.Module
) -> fx.Node:
    rule: Callable
    if step.name in RULES:
        rule = RULES[step.name]
        extra = {key: given[key] for key in KEYWORDS[step.name] if given.get(key) is not None and given[key] is not False}
    elif fallback:
        from dubito.posteriors.predict.streamlined.rules.sampled import Sampled

        name = f"sampled{sum(1 for _ in root.children())}"
        root.add_module(name, Sampled(step.func, fallback, bool(given["adjoint"])))
        return graph.call_module(name, args, kwargs)
    else:
        raise NoRule(step)
    return graph.call_function(rule, args, {**kwargs, **extra})


def _assign(graph: fx.Graph, out: Any, node: fx.Node, values: dict[int, Any], needed: set[int]) -> None:
    if isinstance(out, Ref):
        values[out.slot] = node
    elif isinstance(out, tuple):
        for i, part in enumerate(out):
            if part is not None and any(ref.slot in needed for ref in refs(part)):
                _assign(graph, part, graph.call_function(operator.getitem, (node, i)), values, needed)


__all__ = ["Moments", "NoRule", "Weight", "lower"]
