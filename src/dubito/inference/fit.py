"""`fit`: from a model, a method and data to a posterior."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch

from dubito.curvature.memory import least_room, refusal
from dubito.inference.batches import batches, reseed
from dubito.inference.checkpoint import Checkpoint, Run, about, fingerprint
from dubito.inference.loop import Loop
from dubito.inference.method import Event, Method, Start, departures, least_memory, parts_of, traits_of, unfinished, with_budget
from dubito.inference.options import FitOptions
from dubito.inference.progress import Progress
from dubito.inference.shards import agree_on_first, borrowed_epoch, divide, lay_out
from dubito.inference.spread import Divisible, fit_members
from dubito.inference.start import Weights, make_start
from dubito.model import Model, Target
from dubito.model.inspect import (
    TargetCheck,
    refuse_copied_labels,
    warn_if_padding_is_random,
    warn_if_random,
    warn_if_targets_are_far,
)
from dubito.network.examples import Batch, Data
from dubito.network.weights import copy_network
from dubito.posteriors import Posterior, Stored
from dubito.tensors import randomness, store, tree
from dubito.tensors.checks import of_type, require, type_of
from dubito.tensors.processes import Distributed, Processes, join_processes, own_device

RISE = 5.0  # nats, from which on it is said that training could have gone on
SETTINGS = ("n_data", "temperature", "accumulate", "precision", "patience", "resume", "store_dtype", "memory", "exchange_dtype")
PARALLEL = ("DistributedDataParallel", "FullyShardedDataParallel")  # which exchange gradients in their own way


def fit(
    model: Model,
    method: Method,
    data: Data,
    *,
    start: Weights | Sequence[Weights] | None = None,
    n_data: int | None = None,
    temperature: float = 1.0,
    device: torch.device | str | None = None,
    seed: int = 0,
    batch_size: int = 128,
    accumulate: int = 1,
    precision: Literal["bfloat16"] | None = None,
    validation: Data | None = None,
    patience: int | None = None,
    checkpoint: str | os.PathLike | None = None,
    checkpoint_every: float = 60.0,
    resume: bool = False,
    store_dtype: Literal["bfloat16"] | None = None,
    memory: float = 4.0,
    progress: bool | None = None,
    callbacks: Sequence[Callable[[Event], object]] = (),
    distributed: Distributed = "auto",
    exchange_dtype: Literal["bfloat16"] | None = None,
) -> Posterior:
    """Give a model a posterior.

    `data` is a tuple (x, y) of tensors, arrays, lists or DataFrames (cut into batches of `batch_size`), a dict with labels, a Dataset
    (of torch or Hugging Face), a DataLoader or a list of batches. `start` (weights, a network with the same layers, or an earlier
    posterior; for chains and members also a list of these) defaults to the network's weights. `n_data` is needed only where examples
    cannot be counted. `device` other than the network's own works on a copy of it. `precision="bfloat16"` runs the network in mixed
    precision.

    `validation` data is scored after every epoch, and the state that scored best counts; with `patience` the fit stops after so
    many epochs without improvement. `checkpoint` is a folder written every `checkpoint_every` seconds and at the end; with
    `resume=True` a run that was killed goes on from there, to the same result bit for bit. Ctrl-C and SIGTERM write it at the
    end of the step. A callback that returns True stops the run.

    Draws go to that folder as they are made, the weights in `store_dtype` if one is given. If all of them would take more than
    `memory` gigabytes they stay there, and the posterior, `posteriors.Stored`, reads them as it needs them.

    Under torchrun, or where torch.distributed has a process group, all processes fit one posterior together: `batch_size` is then that
    of all of them. `distributed` is False for a fit on each process alone, or the process group or DeviceMesh to use. With
    `exchange_dtype="bfloat16"` gradients travel between processes in half the bytes, rounded.

    The network, its gradients, buffers and mode, and the global random generators are as before when this returns or raises.

    >>> import dubito
    >>> net = torch.nn.Linear(1, 1)
    >>> model = dubito.Model(net, dubito.Gaussian(scale=0.1))
    >>> x = torch.linspace(-1, 1, 64).unsqueeze(1)
    >>> posterior = fit(model, dubito.MAP(epochs=50, learning_rate=0.05), (x, 2 * x), batch_size=16)
    >>> posterior.predict(torch.tensor([[0.5]])).mean.round(decimals=1)
    tensor([[1.]])
    """
    options = FitOptions(
        start, n_data, temperature, device, seed, batch_size, accumulate, precision, validation, patience, checkpoint,
        checkpoint_every, resume, store_dtype, memory, progress, callbacks, distributed,
        exchange_dtype,
    )  # fmt: skip
    return fit_with(model, method, data, options)


def fit_with(model: Model, method: Method, data: Data, options: FitOptions) -> Posterior:
    """`fit`, with its keyword arguments as one value."""
    _check_parts(model, method)
    traits, size, validation = traits_of(method), options.batch_size, options.validation
    device = own_device(torch.device(options.device or model.device))
    with join_processes(options.distributed, device) as processes, _quiet(processes), ExitStack() as stack:
        _check_fit(processes, model, method, options)
        model = _on_device(model, device)
        source = batches(model, data, n_data=options.n_data, size=size, shuffle=method.data == "batches")
        held_out = None if validation is None else batches(model, validation, size=max(size, 256), n_data=1, shuffle=False)
        generators = stack.enter_context(randomness.borrowed_generators(source.source))
        for context in (randomness.borrowed_generators(validation), borrowed_epoch(source.source), randomness.fork_rng()):
            stack.enter_context(context)
        reseed(generators, randomness.derive_seed(options.seed, "start"))
        first = next(iter(source), None)
        if first is None:
            raise ValueError("there is no data: the loader gave no batch")
        spread, divided = lay_out(parts_of(method), source, first, processes)
        require(
            traits.alone is None or divided.size == 1,
            f"{type(method).__name__} cannot run on {divided.size} processes: {traits.alone}; with distributed=False each process fits "
            "for itself",
        )
        source = divide(model, source, first, divided, full=method.data == "full")
        precision = torch.bfloat16 if options.precision else None
        target = Target(model, source.n_data, options.temperature, precision, processes=divided, spread=spread)
        begin = make_start(model, options.start, model.split(first)[1], many=traits.many_starts)
        if spread.size > 1 and isinstance(method, Divisible):
            return fit_members(lambda some, own: fit_with(model, some, data, own), method, model, begin, options, spread)
        _share_start(processes, begin)
        output = _inspect(model, method, begin, first, rows=source.arrays is not None)
        check = TargetCheck.of(model, output, first)
        source.check_targets(check)
        if held_out is not None:
            agree_on_first(processes, held_out, "validation data, of which each process scores a part")
            held_out.check_targets(check)
        groups = math.ceil(source.n_batches / options.accumulate) if method.data == "batches" else 1
        method = with_budget(method, groups)
        steps = method.steps(groups)
        _check_memory(method, begin, model.device)
        generator = randomness.generator(model.device, options.seed, "method")
        run = Run(method.init(target, begin, first, generator, steps=steps), generator)
        checkpoint = Checkpoint(options, processes)
        if checkpoint.folder is not None:
            known = fingerprint(target, method, options, source, held_out, first, begin, steps) if processes.first else {}
            checkpoint.fingerprint = processes.gather(known)[0]
        draws = _draws(checkpoint, options, about(target, method), begin)
        del first, begin  # not to be held during the fit
        loop = Loop(target, method, source, held_out, options, generators, checkpoint, draws, steps)
        with checkpoint.locked(), draws:
            return _run(loop, run)


def _run(loop: Loop, run: Run) -> Posterior:
    """The posterior after all steps."""
    method, target, draws, processes = loop.method, loop.target, loop.draws, loop.processes
    run = loop.checkpoint.open(run, draws, resume=loop.options.resume, device=target.model.device, steps=loop.steps)
    with Progress(type(method).__name__, loop.steps, show=loop.options.progress if processes.first else False) as bar:
        run = loop(run, bar)
    processes.barrier()  # all draws are on disk
    if run.best_state is None and run.step >= loop.steps:
        _warn_if_unfinished(unfinished(method, target, run.state))
    if run.best_state is not None:
        run.state = store.unpack(run.best_state["description"], run.best_state["tensors"], run.state)
    try:
        posterior = method.posterior(target, run.state, draws)
    except store.TooLarge:  # all draws at once, as a method asks for them, may not be in memory
        posterior = Stored.of(target.model, draws)
    return posterior.departing(*departures(target, method))


@contextmanager
def _quiet(processes: Processes) -> Iterator[None]:
    """Only the first process warns."""
    with nullcontext() if processes.first else warnings.catch_warnings():
        if not processes.first:
            warnings.simplefilter("ignore")
        yield


def _check_fit(processes: Processes, model: Model, method: Method, options: FitOptions) -> None:
    """Raise unless the method can run so, and all processes have begun the same fit."""
    traits, name = traits_of(method), type(method).__name__
    require(
        options.start is None or not traits.starts_anew or traits.many_starts,
        f"{name} initializes its members itself and would ignore `start`: leave it out",
    )
    if processes.size == 1:
        return
    processes.exchange = torch.bfloat16 if options.exchange_dtype else None
    shapes = [(name, tuple(leaf.shape), leaf.dtype) for name, leaf in model.network.named_parameters()]
    processes.agree(
        version=(sys.modules["dubito"].__version__, torch.__version__),
        network=shapes,
        likelihood=store.describe(model.likelihood),
        prior=store.describe(model.prior),
        method=store.describe(method),
        seed=options.seed,
        batch_size=options.batch_size,
        settings=[(name, getattr(options, name)) for name in SETTINGS],
    )


def _share_start(processes: Processes, begin: Start) -> None:
    """All processes begin where the first does, as the replicas of DistributedDataParallel do."""
    trees = (begin.params, begin.buffers, begin.draws or {}, begin.own or {})
    processes.broadcast_([leaf for leaves in trees for leaf in leaves.values()])


def _draws(checkpoint: Checkpoint, options: FitOptions, about: dict[str, Any], begin: Start) -> store.Draws:
    """Where draws go: to the folder of the first process, if there is one, and else into the memory of each."""
    kind = store.Draws if checkpoint.folder is None or checkpoint.processes.first else store.Followed
    return kind(
        checkpoint.folder,
        dtype=torch.bfloat16 if options.store_dtype else None,
        memory=options.memory,
        buffers=begin.buffers,
        about=None if checkpoint.folder is None else about,
    )


def _on_device(model: Model, device: torch.device | str | None) -> Model:
    """The model, or one with a copy of its network if that is elsewhere."""
    if device is None or torch.device(device) == model.device:
        return model
    return dataclasses.replace(model, network=copy_network(model.network).to(device))


def _inspect(model: Model, method: Method, begin: Start, batch: Batch, *, rows: bool) -> torch.Tensor:
    """Raise for networks that cannot be fitted, and warn of what is probably a mistake; the network's output for the batch."""
    traits = traits_of(method)
    inspection = model.check(begin.params, batch, begin.buffers)
    if method.data == "batches" and not traits.keeps_dropout:
        warn_if_random(model, begin.params, begin.buffers, batch, inspection, rows=rows)
    if traits.draws_weights:
        warn_if_padding_is_random(model)
    warn_if_targets_are_far(model, begin.params, batch, inspection)
    refuse_copied_labels(model, batch)
    return inspection.output


def _check_memory(method: Method, begin: Start, device: torch.device) -> None:
    """Raise `MemoryError` where what the method needs at least is not free."""
    needed = least_memory(method, sum(leaf.numel() * leaf.element_size() for leaf in begin.params.values()))
    free = least_room(device, needed)
    if free is not None:
        what = f"{type(method).__name__} of {tree.size(begin.params):,} weights"
        advice = "take fewer members or a smaller rank, where there are any; name fewer weights with Model(only=...)"
        raise MemoryError(refusal(what, needed, free, {}, otherwise=advice))


def _warn_if_unfinished(rise: float) -> None:
    """Warn of training that ends on its way."""
    if rise > RISE:
        warnings.warn(
            f"The training has not arrived: going on, its objective would rise by about {rise:.2g} nats. Give more epochs or a higher "
            "learning_rate, or neither, so that both follow the data (check=False says nothing).",
            stacklevel=5,  # the call of fit
        )


def _check_parts(model: Any, method: Any) -> None:
    """Raise for the usual mistakes: arguments in another order, a class instead of an object, a network without a model."""
    of_type(Model, "a dubito.Model(network, likelihood)", model=model)
    wrapped = {type(module).__name__ for module in model.network.modules()} & set(PARALLEL)
    require(
        not wrapped,
        f"the network holds a {' and a '.join(wrapped)}, but it is fit that has processes work together: give the model the network "
        "without it",
    )
    if any(isinstance(module, torch.nn.DataParallel) and len(module.device_ids) > 1 for module in model.network.modules()):
        raise ValueError(
            "nn.DataParallel runs copies of a network in threads of their own, where neither other weights nor masks reach them: give "
            "the model the network itself, network.module"
        )
    if isinstance(method, type) or not hasattr(method, "step") or not hasattr(method, "init"):
        raise TypeError(
            f"the second argument must be a method such as dubito.MAP(), and the third the data; got {type_of(method)}"
        )
