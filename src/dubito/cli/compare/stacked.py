r"""Fits of many small networks as one: all published splits of a table, and all points of a grid, with data of their own.

One network of 50 units leaves most of a step to Python. Here K of them are the rows of a stack: every step draws a batch of each
one's own data, [K, B, F], and all gradients come from one batched pass (`torch.func.vmap`). What is minimised is for each what
`fit` minimises, :math:`-\frac{1}{B} \sum_i \ln p(y_i \mid x_i, \theta) - \frac{1}{N} \ln p(\theta)`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from dubito.cli.compare.spec import LENGTH_SCALE, Entry, Noise, unclipped
from dubito.evaluation.problems import Part, Problem
from dubito.inference.descent import Descent, advance, clip, share
from dubito.inference.method import Method
from dubito.inference.methods import MAP, Ensemble, MCDropout
from dubito.model import Model
from dubito.model.likelihoods import PREFIX as LIKELIHOOD
from dubito.model.likelihoods import own
from dubito.network.reinitialize import reinitialize
from dubito.network.weights import mode
from dubito.posteriors import Point, Posterior, Samples, Stochastic
from dubito.posteriors.predict.dropout import PREFIX as RATE
from dubito.posteriors.predict.dropout import Dropout, Masks
from dubito.tensors import randomness, tree
from dubito.tensors.tree import Params

NOISE = LIKELIHOOD + "log_scale"
TOGETHER = 128  # networks in one stack: more do not fit into the cache, and are no faster
HELD = 5  # one of so many rows of a training part is for choosing
CHOOSING = 200  # draws of dropout when points of a grid are compared


class Task(NamedTuple):
    """One network to train: its data, its start, and what is its own among the settings."""

    x: Tensor
    y: Tensor
    seed: int
    rate: float = 0.0  # of dropout
    precision: float | None = None  # of the noise, fixed; None learns it
    prior: float = 1.0  # scale of the weights' prior
    biases: float = 1.0  # and of the biases'


class Chosen(NamedTuple):
    """A fitted split, with what was chosen for it and the seconds it took: an equal part of the time of all."""

    posterior: Posterior
    choice: Mapping[str, float]
    seconds: float


def suits(entry: Entry, problem: Problem) -> bool:
    """Whether the fits of an entry on all splits can be run as one."""
    method = entry.method
    inner = method.method if isinstance(method, Ensemble) else method
    plain = not isinstance(method, Ensemble) or (not method.bagging and method.adversarial is None and method.initialize is None)
    simple = type(inner) is MAP or (isinstance(inner, MCDropout) and not isinstance(method, Ensemble) and not inner.learn_rates)
    return problem.stackable and plain and simple and entry.start is None and not entry.learns_prior


def fits(
    entry: Entry,
    problem: Problem,
    parts: Mapping[int, Part],
    *,
    device: torch.device | str | None = None,
    tell: Callable[[float], object] = lambda share: None,
) -> dict[int, Chosen]:
    """The posteriors of all splits (seed -> part). Where there is a grid, its points are compared by the log likelihood of a fifth
    of each training part, which the others of it were trained without; the test part is not looked at. A split whose fit runs away
    is left out."""
    begin, seeds = time.monotonic(), list(parts)
    points = list(entry.grid) or [{}]
    models: dict[Noise, Model] = {
        _noise(entry, point): _model(replace(entry, noise=_noise(entry, point)), problem, parts[seeds[0]]) for point in points
    }
    for model in models.values():
        model.network.to(device)  # our own, made just now; None leaves it where it is
    choosing = len(points) > 1
    chosen = dict.fromkeys(seeds, points[0])
    weight = 0.8 if choosing else 0.0  # of the time that the choice takes, roughly
    if choosing:
        tried = [(seed, point, _inner(parts[seed], seed)) for point in points for seed in seeds]
        found = _all(entry, problem, models, tried, members=1, tell=lambda done: tell(weight * done))
        scores: dict[int, list[float]] = {seed: [] for seed in seeds}
        for (seed, _, inner), posterior in zip(tried, found, strict=True):
            p = posterior.predict(inner.x_test, draws=CHOOSING if isinstance(posterior, Stochastic) else None)
            value = float(-p.to("cpu").log_prob(inner.y_test).double().mean())
            scores[seed].append(value if math.isfinite(value) else math.inf)  # what ran away is not chosen
        chosen = {seed: points[scores[seed].index(min(scores[seed]))] for seed in seeds}
    members = entry.method.size if isinstance(entry.method, Ensemble) else 1
    final = [(seed, chosen[seed], parts[seed]) for seed in seeds]
    made = _all(entry, problem, models, final, members=members, tell=lambda done: tell(weight + (1 - weight) * done))
    seconds = (time.monotonic() - begin) / len(seeds)
    found = zip(seeds, made, strict=True)
    return {seed: Chosen(posterior, chosen[seed], seconds) for seed, posterior in found if _finite(posterior)}


def _finite(posterior: Any) -> bool:
    return all(bool(leaf.isfinite().all()) for leaf in posterior.params.values())


def _noise(entry: Entry, point: Mapping[str, float]) -> Noise:
    """A point of the grid may say what kind of noise it has."""
    return entry.noise if "heteroscedastic" not in point else "heteroscedastic" if point["heteroscedastic"] else "shared"


def _model(entry: Entry, problem: Problem, part: Part) -> Model:
    with randomness.forked(randomness.derive(0, "network")):
        model = entry.model(problem, tuple(part.x_train.shape[1:]))
    if any(True for _ in model.network.buffers()):
        raise ValueError("networks with buffers (BatchNorm) are not trained in one stack")
    return model


def _inner(part: Part, seed: int) -> Part:
    """A fifth of the training part in the place of the test part, standardised as all of it is."""
    order = torch.randperm(len(part.x_train), generator=randomness.generator("cpu", seed, "choosing"))
    held, kept = order.split([len(order) // HELD, len(order) - len(order) // HELD])
    x, y = part.x_train, part.y_train
    return part._replace(x_train=x[kept], y_train=y[kept], x_test=x[held], y_test=y[held])


@dataclass(frozen=True)
class _Job:
    """A posterior to make of `members` tasks that have the same epochs."""

    index: int
    noise: Noise
    epochs: int
    tasks: tuple[Task, ...]
    method: Method


def _all(
    entry: Entry,
    problem: Problem,
    models: Mapping[Noise, Model],
    wanted: Sequence[tuple[int, Mapping[str, float], Part]],
    *,
    members: int,
    tell: Callable[[float], object],
) -> list[Posterior]:
    """A posterior for each (seed, point of the grid, part), trained in as few stacks as their lengths allow."""
    jobs = []
    for i, (seed, point, part) in enumerate(wanted):
        noise, whole = _noise(entry, point), entry.method
        if isinstance(whole, Ensemble):
            method = (unclipped(whole) if noise == "heteroscedastic" else whole).method
        else:
            method = whole
        assert isinstance(method, Descent)
        wide = problem.training.prior_scale or 1.0
        task = Task(part.x_train, part.y_train, seed, prior=wide, biases=wide)
        if isinstance(method, MCDropout):
            method = replace(method, rate=point.get("rate", method.rate))
            keep = 1 - method.rate
            precision = point.get("precision")
            if precision is not None:  # in the targets' own units, and the network's are standardised
                assert part.scale is not None
                precision = precision * float(part.scale.square().mean())
            elif method.length_scale is not None and method.weight_decay is not None:
                precision = keep * method.length_scale**2 / (2 * len(part.x_train) * method.weight_decay)
            length = method.length_scale or LENGTH_SCALE
            task = task._replace(rate=method.rate, precision=precision)
            if precision is not None:  # as `MCDropout` has it with a length scale and a weight decay
                task = task._replace(prior=1 / (length * math.sqrt(keep)), biases=1 / length)
        epochs = int(point.get("epochs", method.epochs))
        tasks = tuple(task._replace(seed=randomness.derive(seed, k)) for k in range(members))
        jobs.append(_Job(i, noise, epochs, tasks, method))
    made: dict[int, Posterior] = {}
    total = sum(job.epochs * len(job.tasks) for job in jobs) or 1
    done = 0.0
    for group in _groups(jobs, members):
        size, before = sum(len(job.tasks) for job in group), done
        model = models[group[0].noise]
        params = _train(
            model,
            [task for job in group for task in job.tasks],
            group[0].method,
            epochs=group[0].epochs,
            batch_size=problem.training.batch_size,
            tell=lambda share, size=size, group=group, before=before: tell((before + share * size * group[0].epochs) / total),
        )
        done += size * group[0].epochs
        for k, job in enumerate(group):
            stack = tree.clone(tree.select(params, slice(k * members, (k + 1) * members)))
            made[job.index] = _posterior(entry, model, job.method, stack)
    return [made[i] for i in range(len(jobs))]


def _groups(jobs: Sequence[_Job], members: int) -> Iterator[list[_Job]]:
    """Jobs that can run side by side: of one model, as long, and of as many rows."""
    kinds: dict[tuple[Noise, int, int], list[_Job]] = {}
    for job in jobs:
        kinds.setdefault((job.noise, job.epochs, len(job.tasks[0].x)), []).append(job)
    size = max(1, TOGETHER // members)
    for alike in kinds.values():
        for i in range(0, len(alike), size):
            yield alike[i : i + size]


def _train(
    model: Model, tasks: Sequence[Task], method: Any, *, epochs: int, batch_size: int, tell: Callable[[float], object]
) -> Params:
    """The weights of all tasks after training, leaves [K, ...]."""
    device = model.device
    x, y = torch.stack([t.x for t in tasks]).to(device), torch.stack([t.y for t in tasks]).to(device)  # [K, N, F], [K, N, C]
    params = tree.stack([reinitialize(model.network, model.parameters(t.y), t.seed) for t in tasks])
    fixed = [i for i, t in enumerate(tasks) if t.precision is not None]
    for i in fixed:
        params[NOISE][i] = -0.5 * math.log(tasks[i].precision)  # pyright: ignore[reportArgumentType]
    n, k = x.shape[1], math.ceil(x.shape[1] / batch_size)
    steps = epochs * k
    dropout = Dropout.find(model.network, method.at, 0.1) if isinstance(method, MCDropout) else None
    rates = (
        {}
        if dropout is None
        else {RATE + site: torch.logit(torch.tensor([[t.rate] for t in tasks], device=device)) for site in dropout.sites}
    )
    decay = {}
    for name, leaf in params.items():
        if ":" not in name:
            scales = [t.biases if name.endswith("bias") else t.prior for t in tasks]
            decay[name] = torch.tensor([scale**-2 / n for scale in scales], device=device).reshape(-1, *[1] * (leaf.ndim - 1))
    leaves = list(params.values())
    optimizer = torch.optim.Adam(leaves, lr=method.learning_rate, fused=True)

    def loss(weights: Params, rates: Params, x: Tensor, y: Tensor) -> Tensor:
        if dropout is None:
            f = model.call(weights, x, {})[0]
        else:
            with Masks(dropout, {**weights, **rates}):
                f = model.call(weights, x, {})[0]
        prior = model.likelihood.log_prior(own(weights)) / n
        return -model.score(f, y, weights).mean() - prior

    gradient = vmap(grad_and_value(loss), randomness="different")
    generators = [randomness.generator("cpu", t.seed, "batches") for t in tasks]
    with randomness.forked(randomness.derive(*(t.seed for t in tasks), "stack")), mode(model.network, True):
        for step in range(steps):
            if step % k == 0:
                order = torch.stack([torch.randperm(n, generator=g) for g in generators]).to(device)  # [K, N]
                tell(step / steps)
            part = order[:, n * (step % k) // k : n * (step % k + 1) // k]  # pyright: ignore[reportPossiblyUnboundVariable]
            rows = part.unsqueeze(-1)
            slopes, _ = gradient(
                params, rates, x.gather(1, rows.expand(-1, -1, x.shape[2])), y.gather(1, rows.expand(-1, -1, y.shape[2]))
            )
            with torch.no_grad():
                for name, leaf in params.items():
                    if name in decay:
                        slopes[name].addcmul_(leaf, decay[name])
                if fixed:
                    slopes[NOISE][fixed] = 0.0
                if method.clip is not None:
                    clip(list(slopes.values()), method.clip, stacked=True)
            optimizer.param_groups[0]["lr"] = method.learning_rate * share(
                step, steps, warmup=method.warmup, schedule=method.schedule
            )
            advance(optimizer, params, (slopes[name] for name in params), pace=method.pace)
    return params


def _posterior(entry: Entry, model: Model, method: Any, stack: Params) -> Posterior:
    if isinstance(method, MCDropout):
        dropout = Dropout.find(model.network, method.at, method.rate)
        return Stochastic(model, tree.select(stack, 0), {}, dropout, method.draws, method.consistent)
    return Samples(model, stack, {}) if isinstance(entry.method, Ensemble) else Point(model, tree.select(stack, 0), {})
