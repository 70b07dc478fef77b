r"""Prediction by one pass of means forwards and one sweep of expected slopes backwards for every output.

Forwards, means and variances go through the network as in `streamlined`; every function of a random number then has a mean
:math:`E[g(x)]` and an expected slope :math:`E[g'(x)]`, which is the derivative of that mean. Backwards, the output k is followed
through these slopes to every layer's output, which gives :math:`\delta_k`, and

.. math:: \mathrm{Var}_k = \sum_{\text{layers}} \delta_k^{\circ 2} \cdot \big( S\, (m^{\circ 2} + v) + s \big)
          + \sum_{\text{functions}} \delta_k^{\circ 2} \cdot \big( \mathrm{Var}[g(x)] - E[g'(x)]^2 v \big),

where the last sum is what a function makes of its input beyond its expected slope.

All correlations between units, tokens, branches and positions are kept, as in the linearised network, whose code does the work
here: the network that is linearised is that of the means. A plain chain of layers has a shorter way, `chain`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from dubito.curvature.capture import example_count, tapped
from dubito.model import Model
from dubito.model.likelihoods import own
from dubito.posteriors.predict.chain import Chain, chain, sweep
from dubito.posteriors.predict.linearized import linearized
from dubito.posteriors.predict.streamlined.engine import Streamlined
from dubito.posteriors.predict.streamlined.moments import Moments, Weight
from dubito.posteriors.predict.streamlined.trace import Trace
from dubito.posteriors.predictive import LatentMixture
from dubito.tensors import tree
from dubito.tensors.tree import Buffers, Params

MANY, TOP = 100, 16  # outputs above which only the largest are swept back, and how many


@dataclass(frozen=True)
class Means(Model):
    """A model whose network is that of the means: what it gives for x is E[f(x)]."""

    engine: Any = None
    noisy: bool = False  # x is then (x, variances of x)
    fallback: int = 0
    tells: ClassVar[bool] = True  # the rules tell a `Capture` of their layers

    def call(self, params: Params, x: Any, buffers: Buffers) -> tuple[Tensor, Buffers]:
        engine: Streamlined = self.engine
        weights: list[Any] = []
        inputs = x[0] if self.noisy else x
        program, found = engine.program(inputs, adjoint=True, noisy=self.noisy, fallback=self.fallback), engine.trace(inputs)
        for name in found.weights.values():
            known = engine.weights[name]
            mean = params[name] if name in params else buffers[name]
            weights.append(known._replace(mean=mean) if isinstance(known, Weight) else mean)
        leaves: list[Any] = list(tree.leaves(inputs))
        if self.noisy:
            leaves[0] = Moments(tapped(leaves[0].detach().requires_grad_(), x[1], 0), x[1])
        f = program(*leaves, *weights)
        return (f.mean if isinstance(f, Moments) else f), buffers


def adjoint(
    engine: Streamlined,
    x: Any,
    *,
    x_var: Tensor | None = None,
    memory: float = 1.0,
    fallback: int = 0,
    top: int | None = None,
) -> LatentMixture:
    """The predictive at x: means by the forward pass, covariances of the outputs by the sweeps backwards.

    `top`: only so many outputs of each example, the largest, are swept back; the others have the variances of the forward pass, and
    there are no covariances. Of more than MANY outputs it is TOP, unless given."""
    x = engine.prepared(x)
    base = engine.model
    if x_var is not None:
        x_var = x_var.to(x).expand_as(x)
    found = engine.trace(x)
    flat, outputs = len(found.shapes[found.output]) == 2, found.shapes[found.output][-1]
    top = TOP if top is None and flat and outputs > MANY else top
    if top is not None and not (flat and top > 0):
        raise ValueError("top is a positive number, for networks with one output vector an example")
    top = None if top is not None and top >= outputs else top
    with torch.no_grad():
        if id(found) not in engine.chains:
            engine.chains[id(found)] = chain(found, engine.random)
        known = engine.chains[id(found)]
        if known is not None and top is None and (swept := _swept(engine, found, known, x, x_var, memory)) is not None:
            mean, cov = (part.float().unsqueeze(0) if part.dtype.itemsize < 4 else part.unsqueeze(0) for part in swept)
            return LatentMixture(base.likelihood, mean, cov, params=own(engine.params), how="adjoint")
    model = Means(
        base.network, base.likelihood, base.prior, base.only, split=base.split, output=base.output,
        engine=engine, noisy=x_var is not None, fallback=fallback,
    )  # fmt: skip
    with torch.inference_mode(False):
        x = tree.apply_leaves(lambda leaf: leaf.clone() if leaf.is_inference() else leaf, x)
        given = x if x_var is None else (x, x_var)
        engine.trace(x)
        others = None
        if top is not None:
            with torch.no_grad():
                f = engine.moments(x, x_var=x_var, fallback=fallback)
            others = top, f.var if isinstance(f, Moments) else f.cov.diagonal(dim1=-2, dim2=-1)
        p = linearized(
            model, given, params=engine.params, buffers=engine.buffers, covariance=engine.covariance, memory=memory, top=others
        )
        return replace(p, how="adjoint" if top is None else f"adjoint, {top} largest outputs")


def _swept(
    engine: Streamlined, found: Trace, known: Chain, x: Any, x_var: Tensor | None, memory: float
) -> tuple[Tensor, Tensor] | None:
    """The short way, some examples at a time where all together would take more memory than they may."""
    outputs, width = found.shapes[found.output][-1], max(found.shapes[step.out.slot][-1] for step in known.steps)
    size, step = example_count(x), max(1, int(memory * 2**30 / (16 * outputs * width)))
    if size <= step:
        return sweep(engine, found, known, x, x_var)
    parts = []
    for start in range(0, size, step):
        piece = slice(start, start + step)
        part = tree.apply_leaves(lambda leaf: leaf[piece] if leaf.shape[:1] == (size,) else leaf, x)  # noqa: B023
        parts.append(sweep(engine, found, known, part, None if x_var is None else x_var[piece]))
    if any(one is None for one in parts):
        return None
    means, covs = zip(*parts, strict=True)  # pyright: ignore[reportArgumentType]
    return torch.cat(means), torch.cat(covs)
