"""Move maximum pooling before functions that only rise: the largest of relu(x) is the relu of the largest x.

The network is the same, and cheaper. The largest of Gaussians is nearer to a Gaussian than that of what a function has made of them,
and the pooling then comes right after the convolution that tells it what its numbers share.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from dubito.posteriors.predict.streamlined.operations import Ref, Step, Trace

POOLS = {f"{kind}max_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3)}
RISING = {"relu", "relu6", "tanh", "sigmoid", "elu", "selu", "softplus", "softsign", "logsigmoid", "erf"}


def pool_first(trace: Trace) -> Trace:
    """The same function, with poolings moved up."""
    readers: Counter[int | None] = Counter(slot for step in trace.steps for slot in step.inputs)
    steps, shapes, axes = list(trace.steps), dict(trace.shapes), dict(trace.axes)
    for i, pool in enumerate(steps):
        j = next((j for j in range(i) if steps[j].result == pool.source), None) if _pools(pool) else None
        if j is None or not _rises(steps[j]) or readers[pool.source] > 1 or pool.source == trace.output:
            continue
        function, new = steps[j], Ref(max(shapes) + 1)
        shapes[new.slot] = shapes[pool.out.slot]
        if pool.out.slot in axes:
            axes[new.slot] = axes[pool.out.slot]
        steps[j] = replace(pool, args=(function.args[0], *pool.args[1:]), out=new)
        steps[i] = replace(function, args=(new, *function.args[1:]), out=pool.out)
    return replace(trace, steps=steps, shapes=shapes, axes=axes)


def _pools(step: Step) -> bool:
    return step.name in POOLS and step.result is not None and step.source is not None


def _rises(step: Step) -> bool:
    """With its usual settings; with others it may fall."""
    plain = all(isinstance(value, bool) for value in step.args[1:]) and step.kwargs.keys() <= {"inplace"}
    return step.name in RISING and plain and step.source is not None
