"""The one loop: every method is a fold over data, `init -> step -> posterior`, and this is where it is run.

The loop owns what no method should have to think of: devices, seeds, progress, mixed precision, gradient accumulation, early
stopping, draws, checkpoints and going on after a crash.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dubito.inference.batches import Arrays, Batches, batches, reseed
from dubito.inference.method import Event, Info, Method, Start, traits_of
from dubito.inference.progress import Progress
from dubito.model import Model, Target
from dubito.model.inspect import warn_if_padding_is_random, warn_if_random, warn_if_targets_are_far
from dubito.network.weights import copied
from dubito.posteriors import Posterior, Stored
from dubito.posteriors.identity import belonging, differences
from dubito.tensors import randomness, store, tree
from dubito.tensors.tree import Buffers, Params


@dataclasses.dataclass
class _Run:
    """How far a run has come: what a checkpoint holds."""

    state: Any
    generator: torch.Generator
    step: int = 0
    epoch: int = 0
    batch: int = 0  # steps made in this epoch
    draws: int = 0
    best: float = math.inf
    waited: int = 0
    stopped: bool = False
    best_state: Any = None
    random: Any = None


def fit(
    model: Model,
    method: Method,
    data: Any,
    *,
    start: Params | Posterior | None = None,
    n_data: int | None = None,
    temperature: float = 1.0,
    device: torch.device | str | None = None,
    seed: int = 0,
    batch_size: int = 128,
    accumulate: int = 1,
    precision: Literal["bfloat16"] | None = None,
    validation: Any = None,
    patience: int | None = None,
    checkpoint: str | os.PathLike | None = None,
    checkpoint_every: float = 60.0,
    resume: bool = False,
    store_dtype: Literal["bfloat16"] | None = None,
    memory: float = 4.0,
    progress: bool | None = None,
    callbacks: Sequence[Callable[[Event], object]] = (),
) -> Posterior:
    """Give a model a posterior.

    `data` is a tuple (x, y) of tensors or arrays (cut into batches of `batch_size`), a Dataset, a DataLoader or a list of batches.
    `start` (weights, or an earlier posterior) defaults to the network's weights. `n_data` is needed only where examples cannot be
    counted. `device` other than the network's own works on a copy of it. `precision="bfloat16"` runs the network in mixed precision.

    `validation` data is scored after every epoch, and the state that scored best counts; with `patience` the fit stops after so
    many epochs without improvement. `checkpoint` is a folder written every `checkpoint_every` seconds and at the end; with
    `resume=True` a run that was killed goes on from there, to the same result bit for bit. A callback that returns True stops
    the run.

    Draws go to that folder as they are made, the weights in `store_dtype` if one is given. If all of them would take more than
    `memory` gigabytes they stay there, and the posterior, `posteriors.Stored`, reads them as it needs them.

    The network, its gradients, buffers and mode, and the global random generators are as before when this returns or raises.

    >>> import dubito
    >>> net = torch.nn.Linear(1, 1)
    >>> model = dubito.Model(net, dubito.Gaussian(scale=0.1))
    >>> x = torch.linspace(-1, 1, 64).unsqueeze(1)
    >>> posterior = fit(model, dubito.MAP(epochs=50, learning_rate=0.05), (x, 2 * x), batch_size=16)
    >>> posterior.predict(torch.tensor([[0.5]])).mean.round(decimals=1)
    tensor([[1.]])
    """
    _check_parts(model, method)
    _check_arguments(accumulate, patience, validation, precision, resume, checkpoint, store_dtype)
    traits = traits_of(method)
    if start is not None and traits.starts_anew:
        raise ValueError(f"{type(method).__name__} initialises its members anew and would ignore `start`: leave it out")
    if device is not None and torch.device(device) != model.device:
        model = dataclasses.replace(model, network=copied(model.network).to(device))
    source = batches(model, data, n_data=n_data, size=batch_size, shuffle=method.data == "batches")
    held_out = None if validation is None else batches(model, validation, size=max(batch_size, 256), n_data=1, shuffle=False)
    target = Target(model, source.n_data, temperature, getattr(torch, precision) if precision else None)
    with randomness.lent(source.source) as generators, randomness.lent(validation), randomness.forked():
        reseed(generators, randomness.derive(seed, "start"))
        first = next(iter(source), None)
        if first is None:
            raise ValueError("there is no data: the loader gave no batch")
        begin = _start(model, start, model.split(first)[1], many=traits.many_starts)
        inspection = model.check(begin.params, first, begin.buffers)
        if method.data == "batches" and not traits.keeps_dropout:
            warn_if_random(model, begin.params, begin.buffers, first, inspection, rows=isinstance(source.source, Arrays))
        if traits.draws_weights:
            warn_if_padding_is_random(model)
        warn_if_targets_are_far(model, begin.params, first, inspection)
        per_epoch = math.ceil(source.n_batches / accumulate) if method.data == "batches" else 1
        steps = method.steps(per_epoch)
        generator = randomness.generator(model.device, seed, "method")
        run = _Run(method.init(target, begin, first, generator, steps=steps), generator)
        keeper = _Keeper(checkpoint, checkpoint_every)
        if checkpoint is not None:
            keeper.fingerprint = {
                **_fingerprint(model, method, target, source, held_out, first),
                "seed": seed,
                "accumulate": accumulate,
                "store_dtype": store_dtype,
                **({} if traits.length_field else {"steps": steps}),
            }
        draws = store.Draws(
            keeper.folder,
            dtype=getattr(torch, store_dtype) if store_dtype else None,
            memory=memory,
            buffers=begin.buffers,
            about=None if checkpoint is None else _about(model, method),
        )
        del first, begin, inspection
        loop = _Loop(target, method, source, held_out, accumulate, patience, seed, generators, callbacks, keeper)
        with store.locked(keeper.folder), draws:
            if keeper.folder is not None:
                run = keeper.open(run, draws, resume=resume, device=model.device, steps=steps)
            with Progress(type(method).__name__, steps, show=progress) as bar:
                run = loop(run, draws, steps, bar)
            if run.best_state is not None:
                run.state = store.unpack(run.best_state["description"], run.best_state["tensors"], run.state)
            try:
                return method.posterior(target, run.state, draws)
            except store.TooLarge:  # all draws at once, as a method asks for them, may not be in memory
                return Stored.of(model, draws)


@dataclasses.dataclass(frozen=True)
class _Loop:
    target: Target
    method: Method
    source: Batches
    held_out: Batches | None
    accumulate: int
    patience: int | None
    seed: int
    generators: list[torch.Generator]
    callbacks: Sequence[Callable[[Event], object]]
    keeper: _Keeper

    def __call__(self, run: _Run, draws: store.Draws, steps: int, bar: Progress) -> _Run:
        info: Info = {}
        resumed, before = run.random, run.step
        halted = False  # by a callback; unlike early stopping, a resumed run goes on from there
        while run.step < steps and not run.stopped and not halted:
            seen, skip = 0, run.batch
            if self.method.data == "batches" or run.epoch == 0:
                reseed(self.generators, randomness.derive(self.seed, run.epoch))
            groups = self._groups()
            for _ in range(skip):  # a checkpoint fell into this epoch: take up the same order of the data where it was left
                next(groups, None)
            if resumed is not None:
                randomness.set_global_state(resumed)
                resumed = None
            for size, group in groups:
                run.state, info = self.method.step(self.target, run.state, group, run.generator)
                run.step, run.batch, seen = run.step + 1, run.batch + 1, seen + size
                if seen > self.source.n_data:
                    self._confirm(seen)
                if (draw := self.method.draw(run.state)) is not None:
                    draws.append(draw)
                if bar.update(run.step, info):
                    _finite(info, run.step)
                self.keeper.perhaps(run, draws)
                answers = [callback(self._event(run, steps, info)) for callback in self.callbacks]
                halted = any(answer is True for answer in answers)
                if run.step >= steps or halted:
                    break
            else:
                self._confirm(seen if not skip else None)
                self._end_of_epoch(run, info)
                info = {**info, **self._validate(run, draws)}
        _finite(info, run.step)
        if resumed is not None:  # it was over already; what is still to be drawn is drawn as it was then
            randomness.set_global_state(resumed)
        # Without data to validate on, a run that ends within an epoch stays there, and can go on from there if it is to be longer.
        if run.step >= steps and run.batch and self.held_out is not None:
            self._end_of_epoch(run, info)
            self._validate(run, draws)
        if run.step > before or not before:
            self.keeper.write(run, draws)
        return run

    def _event(self, run: _Run, steps: int, info: Info) -> Event:
        return Event(run.step, steps, run.epoch, info, run.state)

    def _groups(self):
        """(number of examples, batches) for every step of an epoch."""
        if self.method.data == "full":
            yield self.source.n_data, self.source
            return
        iterator = iter(self.source)
        while group := list(islice(iterator, self.accumulate)):
            yield sum(self.target._size(batch) for batch in group), group

    def _end_of_epoch(self, run: _Run, info: Info) -> None:
        if run.batch == 0:
            raise ValueError("the data gave no batch in this pass; an iterable must give its batches again every time")
        _finite(info, run.step)
        run.epoch, run.batch = run.epoch + 1, 0

    def _confirm(self, seen: int | None) -> None:
        """A whole pass must give as many examples as were counted, or the posterior would be scaled wrongly."""
        if self.source.counted and seen is not None and seen != self.source.n_data:
            raise ValueError(
                f"a pass over the data gave {seen} examples (or more) where {self.source.n_data} were counted, so the posterior "
                "would be scaled wrongly: give n_data=..., the number of examples the posterior is to stand for"
            )

    def _validate(self, run: _Run, draws: store.Draws) -> Info:
        """Score the held-out data and keep the best state; tells the loop to stop when patience has run out."""
        if self.held_out is None:
            return {}
        if len(draws):
            raise ValueError("early stopping picks one state and would bias a set of draws: leave out `validation` for samplers")
        # scoring must not move the generators that training draws from
        with randomness.forked():
            posterior = self.method.posterior(self.target, run.state, draws)
            pairs = (self.target.model.split(batch) for batch in self.held_out)
            scores = [posterior.predict(x).log_prob(y) for x, y in pairs]
        nll = float(-torch.cat(scores).double().mean())
        if nll < run.best:
            tensors: dict[str, Tensor] = {}
            description = store.pack(run.state, tensors)
            run.best, run.waited = nll, 0
            run.best_state = {"description": description, "tensors": tree.clone(tensors)}
        else:
            run.waited += 1
            run.stopped = self.patience is not None and run.waited >= self.patience
        return {"validation_nll": nll}


def _finite(info: Info, step: int) -> None:
    value = info.get("log_likelihood")
    if isinstance(value, Tensor) and not torch.isfinite(value).all():
        raise FloatingPointError(
            f"the log likelihood is not finite after step {step}: the steps are probably too large (lower learning_rate, "
            "or set clip or preconditioner where the method has them), or the data hold NaN"
        )


class _Keeper:
    """Checkpoints: one file for the state, written whole, beside the shards of draws."""

    def __init__(self, folder: str | os.PathLike | None, every: float):
        self.folder = None if folder is None else Path(folder)
        self.every, self.fingerprint = every, {}
        self.due = time.monotonic() + every

    @property
    def path(self) -> Path:
        assert self.folder is not None
        return self.folder / "checkpoint.safetensors"

    def open(self, run: _Run, draws: store.Draws, *, resume: bool, device: torch.device, steps: int) -> _Run:
        assert self.folder is not None
        if not self.path.exists():
            there = list(self.folder.glob(store.SHARDS))
            if there and not resume:
                raise FileExistsError(f"{self.folder} holds draws of another run: give an empty folder")
            if there and len(store.Archive.open(self.folder)) > 1:  # the first draw is followed by a checkpoint at once
                raise store.FileError(
                    f"{self.folder} holds draws but no checkpoint from which a run could go on: read them with "
                    "dubito.load(folder, model), or give an empty folder"
                )
            draws.keep(0)  # killed before its first checkpoint: what it left is made again
            return run
        if not resume:
            raise FileExistsError(f"{self.folder} holds a run already: pass resume=True to go on with it, or another folder")
        tensors, meta = store.read(self.path)
        changed = [f"{what} ({how})" for what, how in differences(meta.get("fingerprint", {}), self.fingerprint)]
        if changed:
            raise ValueError(f"{self.folder} belongs to another run; different: {'; '.join(changed)}")
        made = meta["run"]["fields"]["step"]["value"]
        if made > steps:
            raise ValueError(f"{self.folder} holds {made} steps of this run already, more than the {steps} that are asked for")
        best = meta["run"]["fields"].pop("best_state")
        random = meta["run"]["fields"].pop("random")
        filled = {name: store.unpack(item, tensors, getattr(run, name)) for name, item in meta["run"]["fields"].items()}
        run = _Run(**filled, random=store.unpack(random, tensors))
        if "value" not in best:  # a nested description of its own: {"description": ..., "tensors": ...}
            run.best_state = {
                "description": meta["best"],
                "tensors": tree.move({n[5:]: t for n, t in tensors.items() if n.startswith("best:")}, device),
            }
        draws.keep(run.draws, device)
        return run

    def perhaps(self, run: _Run, draws: store.Draws) -> None:
        """When it is due; and at the first draw, so that there are no draws without a state from which to go on."""
        if self.folder is not None and (time.monotonic() > self.due or (len(draws) and not run.draws)):
            self.write(run, draws)

    def write(self, run: _Run, draws: store.Draws) -> None:
        if self.folder is not None:
            with store.telling(self.folder):
                self._write(run, draws)

    def _write(self, run: _Run, draws: store.Draws) -> None:
        draws.flush()  # before the checkpoint that counts them
        run.draws = len(draws)
        tensors: dict[str, Tensor] = {}
        best, run.best_state = run.best_state, None
        run.random = randomness.global_state()
        description = store.pack(run, tensors)
        run.random, run.best_state = None, best
        meta = {"fingerprint": self.fingerprint, "run": description}
        if best is not None:
            description["fields"]["best_state"] = {"dict": []}
            meta["best"] = best["description"]
            tensors |= {f"best:{name}": tensor for name, tensor in best["tensors"].items()}
        store.write(self.path, tensors, meta)
        self.due = time.monotonic() + self.every


def _fingerprint(model: Model, method: Method, target: Target, source: Batches, held_out: Batches | None, first: Any) -> dict:
    """What must be the same for a run to go on. Data in memory are known by all of them; others by their first batch, whose order the
    seed has fixed, and others to validate on by their being there."""
    return {
        "method": _described(method),
        "prior": store.described(model.prior),
        **belonging(model),
        "n_data": target.n_data,
        "temperature": target.temperature,
        "precision": str(target.precision),
        "batches": source.n_batches,
        "data": _checksum(first),
        "all data": _held(source.source),
        "validation": None if held_out is None else _held(held_out.source),
    }


def _held(source: Any) -> str:
    return _checksum((source.x, source.y)) if isinstance(source, Arrays) else "batches"


def _checksum(data: Any) -> str:
    return store.checksum({str(i): leaf for i, leaf in enumerate(tree.leaves(data))})


def _described(method: Method) -> str:
    """The method, without the field that only says how long a run is to be (`Traits.length_field`), where it has one."""
    length = traits_of(method).length_field
    if length is None:
        return store.described(method)
    fields = [f.name for f in dataclasses.fields(method) if f.name != length]  # pyright: ignore[reportArgumentType]
    return f"{type(method).__name__}({', '.join(f'{name}={store.described(getattr(method, name))}' for name in fields)})"


def _about(model: Model, method: Method) -> dict:
    """What draws on disk must say of themselves, so that they can be read without the run that made them."""
    traits = traits_of(method)
    known = {"adjusted": traits.adjusted, "learning_rate": traits.learning_rate}
    sampler = {"method": type(method).__name__, **{name: value for name, value in known.items() if value is not None}}
    return {**belonging(model), "sampler": sampler}


def _start(model: Model, start: Params | Posterior | None, y: Any, *, many: bool = False) -> Start:
    params, buffers = model.parameters(y), model.buffers()
    if start is None:
        return Start(params, buffers, tuple(name for name in params if ":" in name))
    if many and (several := _several(start, params)) is not None:
        draws, own = (tree.move(tree.clone(leaves), model.device) for leaves in several)
        own = {name: leaf for name, leaf in own.items() if name in buffers}
        shared = {name: leaf for name, leaf in getattr(start, "buffers", {}).items() if name in buffers}
        one = {**shared, **tree.select(own, 0), **tree.select(draws, 0)}
        return _start(model, one, y)._replace(draws=_completed(draws, params), own=own)
    given, given_buffers = (
        (start, {}) if isinstance(start, dict) else (getattr(start, "params", None), getattr(start, "buffers", {}))
    )
    if given is None or (isinstance(start, Posterior) and hasattr(start, "own_buffers")):
        raise ValueError(f"a {type(start).__name__} posterior has no single setting to start from: give one as a dict of weights")
    wrong = [name for name, leaf in given.items() if name in params and leaf.shape != params[name].shape]
    missing = [name for name in params if ":" not in name and name not in given and name not in given_buffers]
    if wrong or missing:
        raise ValueError(f"start does not fit the network: {wrong or missing} {'have other shapes' if wrong else 'are missing'}")
    known = {**given_buffers, **given}
    return Start(
        tree.move(tree.clone({name: known.get(name, leaf) for name, leaf in params.items()}), model.device),
        tree.move(tree.clone({name: known.get(name, leaf) for name, leaf in buffers.items()}), model.device),
        tuple(name for name in params if ":" in name and name not in known),
        given=True,
    )


def _several(start: Params | Posterior, params: Params) -> tuple[Params, Buffers] | None:
    """The settings of a start that holds many, leaves [K, ...]: draws of a posterior, modes of a mixture, or stacked weights; and the
    buffers that each has for itself."""
    if isinstance(start, dict):
        known = [name for name in start if name in params]
        return (start, {}) if known and all(start[name].shape[1:] == params[name].shape for name in known) else None
    if isinstance(members := getattr(start, "members", None), tuple):
        points = [point for member in members if isinstance(point := getattr(member, "params", None), dict)]
        if len(points) < len(members):
            return None
        return tree.stack(points), tree.stack([getattr(member, "buffers", {}) for member in members])
    return (start.params, start.own_buffers) if hasattr(start, "own_buffers") else None  # pyright: ignore[reportAttributeAccessIssue]


def _completed(draws: Params, params: Params) -> Params:
    """Stacked weights with what nobody has given, at its first guess."""
    n = tree.count(draws)
    return {name: draws[name] if name in draws else tree.repeat({name: leaf}, n)[name] for name, leaf in params.items()}


def _check_parts(model: Any, method: Any) -> None:
    """What is mistaken most easily: the order, a class in the place of an object, a network that no model is around."""
    if not isinstance(model, Model):
        raise TypeError(f"the first argument is a dubito.Model(network, likelihood); got {_kind(model)}")
    if isinstance(method, type) or not hasattr(method, "step") or not hasattr(method, "init"):
        raise TypeError(f"the second argument is a method such as dubito.MAP(), and the third the data; got {_kind(method)}")


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _check_arguments(
    accumulate: int, patience: int | None, validation: Any, precision: Any, resume: bool, checkpoint: Any, store_dtype: Any
) -> None:
    if accumulate < 1:
        raise ValueError(f"accumulate counts the batches of a step and is at least 1; got {accumulate}")
    if patience is not None and validation is None:
        raise ValueError("patience needs validation data to watch: give validation=...")
    if precision not in (None, "bfloat16"):
        raise ValueError(f"precision is None or 'bfloat16'; got {precision!r} (float16 would need its losses scaled)")
    if store_dtype not in (None, "bfloat16"):
        raise ValueError(f"store_dtype is None or 'bfloat16'; got {store_dtype!r}")
    if resume and checkpoint is None:
        raise ValueError("resume=True needs to know from where: give checkpoint='folder'")
