"""Maximum pooling before functions that only rise: the largest of relu(x) is the relu of the largest x.

The network is the same, and cheaper. The largest of Gaussians is nearer to a Gaussian than that of what a function has made of them,
and the pooling stands right behind the convolution that tells it what its numbers share.
"""

from __future__ import annotations

from dataclasses import replace

from dubito.posteriors.predict.streamlined.trace import Ref, Step, Trace, refs

POOLS = {f"{kind}max_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3)}
RISING = {"relu", "relu6", "tanh", "sigmoid", "elu", "selu", "softplus", "softsign", "logsigmoid", "erf"}


def commuted(found: Trace) -> Trace:
    """The same function, with poolings moved up."""
    readers: dict[int, int] = {}
    for step in found.steps:
        for ref in refs((step.args, step.kwargs)):
            readers[ref.slot] = readers.get(ref.slot, 0) + 1
    steps, shapes, axes = list(found.steps), dict(found.shapes), dict(found.axes)
    for i, step in enumerate(steps):
        place = next((j for j in range(i) if steps[j].out == step.args[0]), None) if _pools(step) else None
        before = None if place is None else steps[place]
        if (
            place is None
            or before is None
            or not _rises(before)
            or readers[before.out.slot] > 1
            or before.out.slot == found.output
        ):
            continue
        pooled = Ref(max(shapes) + 1)
        shapes[pooled.slot] = shapes[step.out.slot]
        axes |= {pooled.slot: axes[step.out.slot]} if step.out.slot in axes else {}
        steps[place] = replace(step, args=(before.args[0], *step.args[1:]), out=pooled)
        steps[i] = replace(before, args=(pooled, *before.args[1:]), out=step.out)
    return replace(found, steps=steps, shapes=shapes, axes=axes)


def _pools(step: Step) -> bool:
    return step.name in POOLS and isinstance(step.out, Ref) and bool(step.args) and isinstance(step.args[0], Ref)


def _rises(step: Step) -> bool:
    """With its usual settings; with others it may fall."""
    plain = all(isinstance(value, bool) for value in step.args[1:]) and set(step.kwargs) <= {"inplace"}
    return step.name in RISING and plain and isinstance(step.out, Ref) and isinstance(step.args[0], Ref)
