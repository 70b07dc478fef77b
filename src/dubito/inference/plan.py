"""Memory and time, before running.

Sizes of covariances follow from the layout of the network. What a step takes is measured: the method makes one on the batch given, and
nothing of it remains.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import singledispatch
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dubito.curvature import Setup
from dubito.curvature.layout import Layout
from dubito.curvature.memory import Need, available, refusal, written
from dubito.curvature.passes import Passes, SinglePass, Subnetwork, alternatives
from dubito.inference.method import Method, Start, traits_of, with_budget
from dubito.inference.methods import SWAG, Ensemble, Laplace, MCDropout, OnlineLaplace
from dubito.inference.methods.swag import batch_norms, statistic_names
from dubito.inference.start import make_start
from dubito.model import Model, Target
from dubito.network.examples import Batch, batch_size
from dubito.tensors import store, tree
from dubito.tensors.checks import at_least, require
from dubito.tensors.processes import Rehearsal
from dubito.tensors.randomness import fork_rng, generator
from dubito.tensors.shares import Share
from dubito.tensors.text import TextTable

GIGABYTE = 10**9


@dataclass(frozen=True)
class Plan:
    """What a fit will need. Bytes come on top of the network and the data, which are there already."""

    method: str
    parameters: int  # the Bayesian ones
    posterior: int | None  # bytes; None for samplers, whose draws are not counted
    peak: int  # bytes, the most that are needed at once while fitting
    state: int  # bytes that are held between steps
    prediction: int  # bytes for each input of a batch
    step: float | None = None  # seconds; None where it would not fit and was not tried
    steps: int | None = None  # of the whole fit, if n_data is given
    total: float | None = None  # seconds of all steps; decompositions at the end come on top
    free: int | None = None  # bytes, as given or as measured; None where nothing tells
    advice: str = ""  # what would fit
    curvature: str = ""  # what it is made of; empty for methods without
    processes: int = 1
    exchanged: int = 0  # bytes that each process gives to sums over all of them in a step

    @property
    def fits(self) -> bool:
        """Whether the peak is within the memory that is free."""
        return self.free is None or self.peak <= self.free

    def check(self) -> None:
        """Raise `MemoryError`, with advice, if it does not fit."""
        if not self.fits:
            raise MemoryError(self.advice)

    def __str__(self) -> str:
        rows = {"parameters": f"{self.parameters:,}"}
        rows["posterior"] = "grows with the draws" if self.posterior is None else written(self.posterior)
        rows["peak of the fit"] = written(self.peak) + ("" if self.free is None else f", of {written(self.free)} that are free")
        if self.curvature:
            rows["curvature"] = self.curvature
        rows["prediction"] = f"{written(self.prediction)} an input"
        if self.step is not None:
            rows["step"] = _duration(self.step) + (", without the exchange" if self.processes > 1 else "")
        if self.processes > 1:
            rows["exchange"] = f"{written(self.exchanged)} a step, by each of {self.processes} processes"
        if self.total is not None:
            rows["all steps"] = f"{_duration(self.total)}, {self.steps:,} steps"
        table = str(TextTable(list(rows.items()), title=self.method))
        return table if self.fits else f"{table}\n{self.advice}"


def plan(
    model: Model, method: Method, batch: Batch, *, n_data: int | None = None, memory: float | None = None, processes: int = 1
) -> Plan:
    """What `fit(model, method, data)` will need in memory and time, for data that come in batches like `batch`.

    With `n_data`, the size of the data, the time of all steps is told, too. `memory` is what there is, in gigabytes; None takes what is
    free where the network is. A plan that does not fit says so and what would: `plan(...).check()` raises.

    With several `processes`, which share every batch, it is the plan of one of them, with the bytes that it exchanges with the others.
    What chains and members exchange that are spread over processes is in the docs (distributed.md).

    >>> import dubito
    >>> model = dubito.Model(torch.nn.Linear(100, 10), dubito.Categorical())
    >>> estimate = plan(model, dubito.Laplace("dense"), (torch.randn(8, 100), torch.arange(8)), n_data=60_000)
    >>> estimate.parameters, estimate.posterior                      # the weights, and a matrix of 1010 x 1010 numbers
    (1010, 4084440)
    >>> estimate.fits, estimate.steps
    (True, 7500)
    """
    at_least(1, processes=processes)
    alone, spread = traits_of(method).alone, method.data == "full" or isinstance(method, Ensemble)
    require(
        processes == 1 or not spread,
        f"{type(method).__name__} has chains or members that are spread over the processes, each as in a process alone: plan it with "
        "processes=1",
    )
    require(processes == 1 or alone is None, f"{type(method).__name__} cannot run on {processes} processes: {alone}")
    batch = tree.move(tree.tensors(batch, model.dtype), model.device)
    size = batch_size(model.split(batch)[1])
    free = available(model.device)
    limit = free if memory is None else int(memory * GIGABYTE)
    batches = math.ceil((n_data or size) / size)
    with fork_rng():
        estimate = _plan(_Case(model, with_budget(method, batches), batch, batches, limit, free, processes))
    return estimate if n_data is not None else replace(estimate, steps=None, total=None)


class _Case(NamedTuple):
    model: Model
    method: Method
    batch: Batch
    batches: int  # in a pass over the data
    limit: int | None
    free: int | None
    processes: int = 1

    @property
    def x(self) -> Any:
        """The inputs of the batch."""
        return self.model.split(self.batch)[0]

    def start(self) -> Start:
        """The network's weights as a start."""
        # whether a noise has to be given does not matter for sizes
        return make_start(self.model, None, self.model.split(self.batch)[1])._replace(unset=())


def _plan(case: _Case) -> Plan:
    if isinstance(case.method, Ensemble):
        return _ensemble(case, case.method)
    method, start = case.method, case.start()
    costs = _costs(method, case, start)
    known = [size for size in (case.limit, case.free) if size is not None]
    if costs.need is not None and known and costs.need.least > min(known):
        measured = _Measured(costs.end, _bytes(start) + costs.need.sums)  # what cannot fit is not tried
    else:
        measured = _measure(case, costs)
    steps = method.steps(case.batches)
    total = None if measured.step is None else steps * measured.step * (case.batches if method.data == "full" else 1)
    estimate = Plan(
        type(method).__name__, tree.size({name: leaf for name, leaf in start.params.items() if ":" not in name}),
        measured.posterior if costs.posterior is None else costs.posterior, max(measured.peak, costs.end), measured.state,
        _prediction(case, costs, start), measured.step, steps, total, case.limit, "", costs.curvature, case.processes,
        measured.exchanged,
    )  # fmt: skip
    return estimate if estimate.fits else replace(estimate, advice=_advice(case, costs, estimate, _bytes(start)))


def _advice(case: _Case, costs: _Costs, estimate: Plan, point: int) -> str:
    assert estimate.free is not None
    if costs.setup is None:
        what = f"{estimate.method} of {estimate.parameters:,} weights"
        return refusal(what, estimate.peak, estimate.free, {}, otherwise=costs.advice)
    over = sum(shape.numel() for shape in costs.setup.shapes.values())
    others = {name: point + size for name, size in alternatives(costs.setup, case.x).items()}
    return refusal(f"structure={costs.structure!r} over {over:,} weights", estimate.peak, estimate.free, others)


def _ensemble(case: _Case, method: Ensemble) -> Plan:
    """So many members, all held at once and trained one after another; in one batched pass they may be faster."""
    stages = [_plan(case._replace(method=stage)) for stage in method.methods]
    last, n = stages[-1], method.size
    state = n * max(stage.state for stage in stages)
    peak = max(stage.peak - stage.state for stage in stages) + state
    step = [stage.step for stage in stages if stage.step is not None]
    total = [stage.total for stage in stages if stage.total is not None]
    tried = len(step) == len(stages)
    estimate = Plan(
        f"{n} x {' and '.join(stage.method for stage in stages)}", last.parameters,
        None if last.posterior is None else n * last.posterior, peak, state,
        last.prediction * (1 if isinstance(method.method, Laplace | OnlineLaplace) else n),
        n * max(step) if tried else None, method.steps(case.batches), n * sum(total) if tried else None, case.limit,
        "", last.curvature,
    )  # fmt: skip
    if estimate.fits:
        return estimate
    assert estimate.free is not None
    advice = next((stage.advice for stage in stages if stage.advice), "")
    return replace(estimate, advice=advice or refusal(estimate.method, peak, estimate.free, {}, otherwise="take fewer members"))


# -- what is known of a method


class _Costs(NamedTuple):
    """The costs of a method that are known before a step is made; the rest is measured."""

    end: int = 0  # bytes, the peak after the last step
    posterior: int | None = None  # bytes; None: to be measured
    draws: int = 1  # passes through the network for a prediction
    advice: str = "smaller batches, with accumulate=..., hold fewer activations"
    setup: Setup | None = None  # what curvature is gathered over, and in which structure
    structure: str = ""
    need: Need | None = None  # of the curvature
    curvature: str = ""  # in words
    later: Callable[[Any], None] | None = None  # takes a state to where steps of another kind begin
    share: float = 0.0  # of all steps that are of that kind


@singledispatch
def _costs(method: Any, case: _Case, start: Start) -> _Costs:
    """The costs of a method; of most nothing is known beforehand."""
    return _Costs()


@_costs.register
def _(method: MCDropout, case: _Case, start: Start) -> _Costs:
    return _Costs(draws=method.draws)


@_costs.register
def _(method: SWAG, case: _Case, start: Start) -> _Costs:
    weights, norms = _bytes(start.params), batch_norms(case.model.network)
    if norms:  # draws, with statistics of their own
        own = sum(_bytes(start.buffers[name]) for prefix in norms for name in statistic_names(prefix))
        posterior = method.draws * (weights + own) + _bytes(start.buffers) - own
    else:
        held = min(method.rank, method.passes_over_data - int(method.collect_after * method.passes_over_data))
        posterior = _bytes(start) + (weights * (1 + held) + 4 * held if method.rank else 2 * weights)
    return _Costs(method.memory(weights), posterior, method.draws, "take a smaller rank, or smaller batches with accumulate=...")


@_costs.register
def _(method: Laplace, case: _Case, start: Start) -> _Costs:
    target, prior = Target(case.model, 1), case.model.prior.normal
    setup = method.setup(target, start.params, start.buffers, method.names(target, start, case.batch))
    passes = method.passes
    need = passes.need(setup, setup.layout(case.x), by=method.prior_groups)
    evidence = method.optimize_evidence and (method.optimize_noise or (prior is not None and prior.learned))
    costs = _curvature_costs(case, start, setup, method.structure, passes, need, evidence=evidence)

    def later(state: Any) -> None:
        """The second pass of a subnetwork is the dense one."""
        state.step = state.steps // 2

    two = isinstance(passes, Subnetwork) and passes.count == 2
    return costs._replace(later=later, share=0.5) if two else costs


@_costs.register
def _(method: OnlineLaplace, case: _Case, start: Start) -> _Costs:
    setup = method.setup(Target(case.model, 1), start.params, start.buffers)
    need = SinglePass().need(setup, setup.layout(case.x), by=method.prior_groups)

    def later(state: Any) -> None:
        """The first pass that gathers curvature."""
        state.made = method.first * state.period

    costs = _curvature_costs(case, start, setup, method.structure, SinglePass(), need, evidence=True)
    return costs._replace(later=later, share=1 - method.passes_over_data / method.passes)


def _curvature_costs(
    case: _Case, start: Start, setup: Setup, structure: str, passes: Passes, need: Need, *, evidence: bool
) -> _Costs:
    """The costs of a method that gathers curvature, and perhaps maximizes the evidence in the end."""
    point = _bytes(start)
    end = point + need.least + (need.evidence if evidence else 0)
    words = _curvature_words(setup, passes, setup.layout(case.x))
    return _Costs(end, point + need.covariance, setup=setup, structure=structure, need=need, curvature=words)


def _curvature_words(setup: Setup, passes: Passes, layout: Layout) -> str:
    """What the curvature is made of."""
    kind, draws = setup.spec.kind, passes.label_draws(setup, layout)
    if draws is None:
        return {"ggn": "exact GGN", "empirical": "empirical Fisher", "hessian": "Hessian"}[kind]
    times = {1: "once", 2: "twice"}.get(draws, f"{draws} times")
    return f"GGN of labels drawn {times} for each example of {layout.outputs:,} outputs"


def _prediction(case: _Case, costs: _Costs, start: Start) -> int:
    """Bytes for an input: linearized, a gradient of every output at a position for each layer's outputs; else a pass for each draw."""
    peak = _peak(case.model.device)
    with peak, torch.no_grad():
        case.model.forward(start.params, case.x, tree.clone(start.buffers))
    forward = math.ceil(peak.peak / batch_size(case.model.split(case.batch)[1]))
    if costs.setup is not None:
        layout = costs.setup.layout(case.x)
        return forward + layout.taps * (layout.classes + 2) * costs.setup.dtype.itemsize
    return forward * costs.draws


def _bytes(value: Any) -> int:
    """Bytes of all tensors in a nested value, each storage once; single numbers are not counted."""
    sizes = {leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes() for leaf in _tensors(value) if leaf.numel() > 1}
    return sum(sizes.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
    elif is_dataclass(value) and not isinstance(value, type | Model):
        for item in fields(value):
            yield from _tensors(getattr(value, item.name))


# -- what is measured


class _Measured(NamedTuple):
    peak: int
    state: int  # bytes that stay between steps
    posterior: int | None = None
    step: float | None = None  # seconds, the mean over steps of all kinds
    exchanged: int = 0  # bytes


def _measure(case: _Case, costs: _Costs) -> _Measured:
    """Make a step, and another one for the time, which the first one spends on warming up."""
    model, method = case.model, case.method
    size = batch_size(model.split(case.batch)[1])
    target, batch, processes = Target(model, case.batches * size), case.batch, Rehearsal(0, case.processes)
    if case.processes > 1:
        share = Share.of(size, 0, case.processes)
        batch = tree.apply_leaves(lambda leaf: leaf[: share.count] if leaf.shape[:1] == (size,) else leaf, batch)
        target = replace(target, processes=processes, shares=(share,))
    source, peak = generator(model.device, "plan"), _peak(model.device)

    def step(state: Any) -> tuple[Any, float]:
        """One step, measured."""
        with peak:
            state, _ = method.step(target, state, [batch], source)
        return state, _seconds(model.device, lambda: method.step(target, state, [batch], source))

    with peak:
        state = method.init(target, case.start(), batch, source, steps=method.steps(case.batches))
    processes.bytes = 0
    state, seconds = step(state)
    exchanged = processes.bytes // 2
    held, posterior = peak.now, None
    if costs.later is not None:
        costs.later(state)
        state, other = step(state)
        seconds += costs.share * (other - seconds)
    if costs.posterior is None:
        with suppress(ValueError):  # of samplers, which have no draws yet
            posterior = _bytes(method.posterior(target, state, store.Draws()))
    return _Measured(peak.peak, held, posterior, seconds, exchanged)


def _seconds(device: torch.device, run: Callable[[], object]) -> float:
    def wait() -> None:
        """Wait for the device."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    begin = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - begin


class _Tracked(TorchDispatchMode):
    """Counts the bytes of all live tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given: set[int] | None = None
        for leaf in tree.leaves(out):
            memory = leaf.untyped_storage()
            key = memory._cdata
            if key in self.live:
                continue
            if given is None:  # a view of what was there before, or that itself, changed in place, takes nothing
                given = {item.untyped_storage()._cdata for item in tree.leaves((args, kwargs))}
            if key not in given:
                self.live[key] = memory.nbytes()
                self.now += self.live[key]
                self.peak = max(self.peak, self.now)
                weakref.finalize(memory, self._gone, key)
        return out

    def _gone(self, key: int) -> None:
        self.now -= self.live.pop(key)


class _Allocated:
    """The same on a GPU, whose allocator knows."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.peak = device, 0
        self.before = torch.cuda.memory_allocated(device)

    def __enter__(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def now(self) -> int:
        """Bytes allocated since the beginning."""
        return torch.cuda.memory_allocated(self.device) - self.before

    def __exit__(self, *_: object) -> None:
        self.peak = max(self.peak, torch.cuda.max_memory_allocated(self.device) - self.before)


def _peak(device: torch.device) -> _Tracked | _Allocated:
    return _Allocated(device) if device.type == "cuda" else _Tracked()


def _duration(seconds: float) -> str:
    """A time, to be read."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    for size, unit in ((3600 * 24, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
