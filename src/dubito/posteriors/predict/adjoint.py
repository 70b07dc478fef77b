r"""Prediction by one pass of means forwards and one sweep of expected slopes backwards for every output.

Forwards, means and variances go through the network as in `streamlined`; every function of a random number then has a mean
:math:`E[g(x)]` and an expected slope :math:`E[g'(x)]`, which is the derivative of that mean. Backwards, the output k is followed
through these slopes to every layer's output, which gives :math:`\delta_k`, and

.. math:: \mathrm{Var}_k = \sum_{\text{layers}} \delta_k^{\circ 2} \cdot \big( S\, (m^{\circ 2} + v) + s \big)
          + \sum_{\text{functions}} \delta_k^{\circ 2} \cdot \big( \mathrm{Var}[g(x)] - E[g'(x)]^2 v \big),

where the last sum is what a function makes of its input beyond its expected slope.

All correlations between units, tokens, branches and positions are kept, as in the linearized network, whose code does the work
here: the network that is linearized is that of the means. A plain chain of layers has a shorter way, `chain`. Where an example has too
many outputs for a sweep each, draws of the same Gaussian stand for it, `sketch`.

`one_pass` is what the forms call: moments forwards alone ("streamlined"), or with these sweeps backwards ("adjoint").
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from dubito.curvature.capture import Capture, example_count, select_examples, tapped, watched
from dubito.model import Model
from dubito.model.likelihoods import likelihood_params
from dubito.network.examples import Inputs, check_outputs
from dubito.posteriors.predict.chain import Chain, find_chain, sweep
from dubito.posteriors.predict.linearized import COUPLED, POSITIONS, linearized, portions
from dubito.posteriors.predict.sampled import GIGABYTE, draw_groups, room
from dubito.posteriors.predict.streamlined.engine import Streamlined
from dubito.posteriors.predict.streamlined.moments import Moments, is_moments, is_weight, mean_of
from dubito.posteriors.predict.streamlined.operations import Trace
from dubito.posteriors.predict.tangents import DRAWS
from dubito.posteriors.predictive import LatentMixture
from dubito.tensors import tree
from dubito.tensors.checks import at_least, one_of, require
from dubito.tensors.covariances import Covariance
from dubito.tensors.randomness import derive_seed, generator, uniforms_from
from dubito.tensors.tree import Buffers, Params

MANY, TOP = 100, 16  # outputs above which only the largest are swept back, and how many

SWEPT = 2**26  # outputs times numbers in all layers of an example, up to which every position is swept back


@dataclass(frozen=True)
class Means(Model):
    """A model whose network is that of the means: what it gives for x is E[f(x)]."""

    engine: Any = None
    path: Trace | None = None  # for inputs of any number; None: what the engine has for the inputs
    noisy: bool = False  # x is then (x, variances of x)
    taylor: bool = False  # the plain network, at the mean of its weights
    fallback: int = 0
    tells: ClassVar[bool] = True  # the rules tell a `Capture` of their layers

    def call(self, params: Params, x: Any, buffers: Buffers) -> tuple[Tensor, Buffers]:
        """E[f(x)], with the given means of the weights; its derivatives are expected slopes."""
        engine: Streamlined = self.engine
        inputs = x[0] if self.noisy else x
        path = engine.trace(inputs) if self.path is None else self.path
        program = engine.lowered(path, adjoint=True, noisy=self.noisy, taylor=self.taylor, fallback=self.fallback)
        weights: list[Any] = []
        means = {**buffers, **params}
        for name in path.weights.values():
            known = engine.weights[name]
            weights.append(known._replace(mean=means[name]) if is_weight(known) and not self.taylor else means[name])
        leaves: list[Any] = list(tree.leaves(inputs))
        if self.noisy:
            mean = tapped(leaves[0].detach().requires_grad_(), x[1], 0)
            leaves[0] = mean if self.taylor else Moments(mean, x[1])
        with watched() if self.taylor else nullcontext():
            f = program(*leaves, *weights)
        return mean_of(f), buffers


def adjoint(
    engine: Streamlined,
    x: Any,
    *,
    x_var: Tensor | None = None,
    memory: float | None = None,
    seed: int = 0,
    fallback: int = 0,
    top: int | None = None,
    exact: bool = False,
    taylor: bool = False,
) -> LatentMixture:
    """The predictive at x: means by the forward pass, covariances of the outputs by the sweeps backwards.

    Where an example has too many outputs at too many positions for a sweep each (large images), draws of the Gaussian that the sweeps
    would find stand for it, from `seed`, unless it is to be `exact`; `how` says so.

    `top`: only so many outputs at each position, the largest, are swept back; the others have the variances of the forward pass, and
    there are no covariances. Of one output vector with more than MANY outputs it is TOP, unless given.

    `taylor`: to first order, which is the linearized network, with noise of inputs and dropout."""
    x, memory = engine.prepare(x), room(memory, engine.model.device)
    trace = engine.trace(x)
    if x_var is not None:
        engine.refuse_decisions(trace)
        x_var = x_var.to(x).expand_as(x)
    top = _top(trace, top)
    chain = None if taylor else _known_chain(engine, trace)
    if chain is not None and top is None and (x_var is None or chain.start == trace.inputs[0]):
        with torch.no_grad():
            mean, cov = (tree.full_precision(t) for t in _in_chunks(engine, trace, chain, x, x_var, memory))
        check_outputs(x, mean.unsqueeze(0), coupled=engine.model.coupled)
        params = likelihood_params(engine.params)
        return LatentMixture(engine.model.likelihood, mean.unsqueeze(0), cov.unsqueeze(0), params=params, how="adjoint")
    with torch.inference_mode(False):
        p = _by_linearizing(engine, trace, x, x_var, memory, fallback, top, seed, exact, taylor)
        return replace(p, how=p.how.replace("adjoint", "adjoint, Taylor", 1)) if taylor else p


def _top(trace: Trace, top: int | None) -> int | None:
    """How many outputs at each position are swept back; None: all."""
    *rest, outputs = trace.shapes[trace.output]
    at_least(1, top=top)
    if top is None and len(rest) == 1 and outputs > MANY:
        top = TOP
    return None if top is None or top >= outputs else top


def _swept(trace: Trace) -> bool:
    """Whether every output at every position can be swept back."""
    shape = trace.shapes[trace.output]
    outputs = math.prod(shape[1:])
    units = sum(math.prod(trace.shapes[step.result][1:]) for step in trace.steps if step.result is not None)
    return len(shape) == 2 or outputs <= POSITIONS or outputs * units <= SWEPT


def _swept_whole(trace: Trace) -> bool:
    """The same of rows that are coupled, in which each output goes back to all."""
    numbers = sum(math.prod(trace.shapes[step.result]) for step in trace.steps if step.result is not None)
    return math.prod(trace.shapes[trace.output]) * numbers <= COUPLED


def _known_chain(engine: Streamlined, trace: Trace) -> Chain | None:
    if trace not in engine.chains:
        engine.chains[trace] = find_chain(engine, trace)
    return engine.chains[trace]


def _by_linearizing(
    engine: Streamlined, trace: Trace, x: Any, x_var: Tensor | None, memory: float, fallback: int, top: int | None, seed: int,
    exact: bool, taylor: bool,
) -> LatentMixture:  # fmt: skip
    """The long way, for any network: linearize that of the means."""
    base = engine.model
    model = Means(
        base.network, base.likelihood, base.prior, base.only, split=base.split, output=base.output, coupled=base.coupled,
        engine=engine, path=trace if trace.dynamic else None, noisy=x_var is not None, taylor=taylor,
        fallback=fallback,
    )  # fmt: skip
    x = tree.apply_leaves(lambda leaf: leaf.clone() if leaf.is_inference() else leaf, x)
    others = None
    if top is not None:
        with torch.no_grad():
            f = engine.moments(x, x_var=x_var, taylor=taylor, fallback=fallback, path=trace)
        others = f.var if is_moments(f) else f.cov.diagonal(dim1=-2, dim2=-1)
    given = x if x_var is None else (x, x_var)
    known: dict[str, Any] = {"params": engine.params, "buffers": engine.buffers, "covariance": engine.covariance}
    swept = _swept_whole(trace) if base.coupled else _swept(trace)
    if top is None and not exact and not swept:
        draws, source = fallback or DRAWS, generator(base.device, seed, "adjoint")
        f = sketch(model, given, **known, draws=draws, generator=source, memory=memory)
        return LatentMixture(base.likelihood, f, params=likelihood_params(engine.params), how=f"adjoint, {draws} draws")
    try:
        p = linearized(model, given, **known, fallback=0, memory=memory, top=top, others=others)
    except NotImplementedError as error:
        if trace.dynamic or base.coupled:
            raise
        raise ValueError(
            "the network decides by the values of each example, which the adjoint follows only where all random weights are those of "
            "known layers: make the others certain by `only=`, or predict with how='streamlined' or 'sampled'"
        ) from error
    return replace(p, how="adjoint" if top is None else f"adjoint, {top} largest outputs")


def _in_chunks(
    engine: Streamlined, trace: Trace, chain: Chain, x: Any, x_var: Tensor | None, memory: float
) -> tuple[Tensor, Tensor]:
    """The short way, some examples at a time where all together would take more memory than they may."""
    outputs = trace.shapes[trace.output][-1]
    size, step = example_count(x), max(1, int(memory * 2**30 / (16 * outputs * chain.width)))
    if size <= step or engine.model.coupled:
        return sweep(engine, trace, chain, x, x_var)
    chunks = [
        sweep(engine, trace, chain, select_examples(x, start, step), None if x_var is None else x_var[start : start + step])
        for start in range(0, size, step)
    ]
    means, covs = zip(*chunks, strict=True)
    return torch.cat(means), torch.cat(covs)


ONE_PASS = ("streamlined", "adjoint")
RULES = ("moments", "taylor")  # what a function of a random number gives: its exact moments, or those of its tangent


def one_pass(
    engine: Streamlined,
    x: Inputs,
    how: str,
    *,
    draws: int | None = None,
    memory: float | None = None,
    seed: int = 0,
    x_var: Tensor | None = None,
    rank: int | None = None,
    top: int | None = None,
    rule: str = "moments",
) -> LatentMixture:
    """The predictive at x; `draws` is how often an operation without a rule is drawn, `rule` one of RULES."""
    one_of(RULES, rule=rule)
    refuse_scripted(engine.model)
    taylor = rule == "taylor"
    if how == "streamlined":
        return engine.predict(x, rank=rank, x_var=x_var, taylor=taylor, fallback=draws or 0)
    return adjoint(
        engine, x, x_var=x_var, memory=memory, seed=seed, fallback=draws or 0, top=top, exact=draws == 0, taylor=taylor
    )


def refuse_scripted(model: Model) -> None:
    """Raise where a part of the network is a ScriptModule, whose operations cannot be seen."""
    scripted = any(isinstance(module, torch.jit.ScriptModule) for module in model.network.modules())
    require(
        not scripted,
        "one pass sees nothing of what a ScriptModule does: give the module that it was made from, or predict with how='sampled' or, "
        "a Gaussian, how='linearized'",
    )


def refuse_one_pass_options(x_var: Tensor | None, rank: int | None, top: int | None, rule: str) -> None:
    """Raise where another way to predict is given options that are for one pass."""
    unused = x_var is None and rank is None and rule == "moments"
    require(unused, 'x_var, rank and rule are for predictions in one pass: how="streamlined" or how="adjoint"')
    require(top is None, 'top is for how="linearized" or how="adjoint"')


HELD = 16  # numbers that a pass holds, for each of a layer's outputs


def sketch(
    model: Model,
    x: Inputs,
    *,
    params: Params,
    buffers: Buffers,
    covariance: Covariance,
    draws: int,
    generator: torch.Generator,
    memory: float = 1.0,
) -> Tensor:
    """Draws of f [S, B, *D, C] at x, of a model that tells a `Capture` of its noise; weights are drawn once for all examples. `memory`
    changes how many draws and examples are computed at a time, and no number."""
    first, groups, step = 0, [], _examples_at_a_time(model, x, params, buffers, memory)
    seed = int(torch.randint(2**62, (1,), generator=generator, device=generator.device))
    for n in draw_groups(draws, covariance, memory):
        deltas, parts = covariance.draws(n, generator), []
        seeds = [derive_seed(seed, first + i) for i in range(n)]
        for start, some in portions(model, x, step):
            parts.append(torch.stack(list(_draws(model, some, params, buffers, deltas, seeds, start))))
        groups.append(torch.cat(parts, 1))
        first += n
    f = torch.cat(groups)
    return tree.full_precision(f)


def _run(model: Model, x: Inputs, params: Params, buffers: Buffers) -> tuple[Tensor, Capture]:
    """The output with its graph, and the places where noise enters."""
    capture = Capture({})
    with torch.enable_grad(), capture.listening():
        f, _ = model.call(params, x, {name: leaf.detach() for name, leaf in buffers.items()})
    return f, capture


def _draws(
    model: Model, x: Inputs, params: Params, buffers: Buffers, deltas: Params, seeds: list[int], start: int
) -> Iterator[Tensor]:
    """A draw for each seed, at examples of which the first is number `start` of all."""
    live = {name: params[name].detach().requires_grad_() for name in deltas}
    f, capture = _run(model, x, {**params, **live}, buffers)
    u = torch.zeros_like(f, requires_grad=True)
    roots = [tap.var.clamp_min(0).sqrt() for tap in capture.taps]
    inputs: list[Any] = [*live.values(), *(tap.edge for tap in capture.taps)]
    slopes = torch.autograd.grad(f, inputs, u, create_graph=True, allow_unused=True)
    used = [i for i, slope in enumerate(slopes) if slope is not None and slope.requires_grad]
    for draw, seed in enumerate(seeds):
        noise = [
            root * _normals(derive_seed(seed, i), root, tap.axis, start)
            for i, (root, tap) in enumerate(zip(roots, capture.taps, strict=True))
        ]
        along = [*(deltas[name][draw].to(leaf.dtype) for name, leaf in live.items()), *noise]
        (moved,) = torch.autograd.grad(
            [slopes[i] for i in used], u, [along[i].expand_as(slopes[i]) for i in used], retain_graph=True
        )  # fmt: skip
        yield f.detach() + moved


def _normals(seed: int, like: Tensor, axis: int, start: int) -> Tensor:
    """Normals that depend on the seed, the number of the example and the place within it, whatever examples come with it."""
    shape = like.movedim(axis, 0).shape
    each = shape[1:].numel()
    keys = torch.arange(start * each, (start + shape[0]) * each, device=like.device) ^ seed
    uniform = uniforms_from(keys).clamp(1e-12, 1 - 1e-12)
    return torch.special.ndtri(uniform).to(like.dtype).view(shape).movedim(0, axis)


def _examples_at_a_time(model: Model, x: Inputs, params: Params, buffers: Buffers, memory: float) -> int:
    """How many examples fit the memory: what noise there is for one of them tells how large a pass is."""
    if model.coupled:
        return 1
    size = example_count(x)
    one = select_examples(x, 0, 1)
    live = {name: leaf.detach().requires_grad_(leaf.is_floating_point()) for name, leaf in params.items()}
    _, capture = _run(model, one, live, buffers)
    numbers = sum(tap.var.numel() for tap in capture.taps)
    return max(1, min(size, int(memory * GIGABYTE / 2 / (4 * HELD * max(1, numbers)))))
