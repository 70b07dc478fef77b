r"""Many small fits as one: all published splits of a table, and all points of a grid, each with its own data.

For a network of 50 units most of the time of a training step is Python overhead. Here K networks are the rows of a stack: every step
draws a batch from the data of each, [K, B, F], and all gradients come from one batched pass (`torch.func.vmap`). For each network
the loss is that of `fit`, :math:`-\frac{1}{B} \sum_i \ln p(y_i \mid x_i, \theta) - \frac{1}{N} \ln p(\theta)`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from dubito.cli.compare.spec import LENGTH_SCALE, Noise, Spec
from dubito.evaluation.judge.stream import Predictor, predict_in_batches, predictor
from dubito.evaluation.problems import Problem, Split
from dubito.evaluation.recalibrate import Temperature, Variance
from dubito.inference.descent import Descent, advance, clip, share
from dubito.inference.methods import MAP, Ensemble, MCDropout
from dubito.model import Model
from dubito.model.likelihoods import PREFIX as LIKELIHOOD
from dubito.model.likelihoods import likelihood_params
from dubito.model.priors import Normal
from dubito.network.reinitialize import reinitialize
from dubito.network.weights import in_mode
from dubito.posteriors import Point, Posterior, Samples, Stochastic
from dubito.posteriors.predict.dropout import PREFIX as RATE
from dubito.posteriors.predict.dropout import Dropout, Masks
from dubito.posteriors.predictive import Predictive
from dubito.tensors import randomness, tree
from dubito.tensors.tree import Params

NOISE = LIKELIHOOD + "log_scale"
LARGEST = 128  # networks in one stack: more do not fit into the cache, and are no faster
FOLDS = 5  # one of this many rows of a training rows is held out to choose a point of the grid
CHOOSING = 200  # draws of dropout when points of a grid are compared
ROWS = 1024  # inputs predicted at a time
WEIGHT = 0.8  # share of the time that choosing takes, roughly

Tell = Callable[[float], object]  # is called with the share of the work that is done


class Task(NamedTuple):
    """One network to train: its data, its seed, and its settings where they differ between the networks of a stack."""

    x: Tensor
    y: Tensor
    seed: int
    rate: float = 0.0  # of dropout
    precision: float | None = None  # of the noise, fixed; None learns it
    prior: Normal = Normal()


class Chosen(NamedTuple):
    """A fitted split, the point of the grid that was chosen for it, and its share of the seconds that all splits took."""

    posterior: Any  # or, of the recipe for tables, a function from numbers of rows to a predictive
    choice: Mapping[str, float]
    seconds: float
    fix: Callable[[Predictive], Predictive] | None = None  # recalibrates the predictions
    split: Split | None = None  # on which to judge it, if not on the problem's own

    def recalibrated(self, other: Posterior | Predictor, held: Split, *, seed: int) -> Chosen:
        """The same with the temperature, or the scale of the noise, that the test rows of `held` give to an `other` fit, to the
        training rows of `held`. As it is where these have none: without an error, ever smaller ones look better."""
        p = predict_in_batches(predictor(other, seed=seed), held.x_test, ROWS)
        try:
            if p.likelihood.discrete:
                tempered = Temperature().fit(p, held.y_test)
                return self._replace(fix=tempered, choice={**self.choice, "temperature": tempered.temperature})
            stretched = Variance().fit(p, held.y_test)
        except ValueError:
            return self
        names = ["scale"] if len(stretched.factor) == 1 else [f"scale {k}" for k in range(len(stretched.factor))]
        return self._replace(fix=stretched, choice={**self.choice, **dict(zip(names, stretched.factor.tolist(), strict=True))})


class Wanted(NamedTuple):
    """A posterior to make: for a split, at a point of the grid."""

    seed: int
    point: Mapping[str, float]
    split: Split


@dataclass(frozen=True)
class Job:
    """One posterior, made of tasks that train for the same number of epochs."""

    noise: Noise
    epochs: int
    tasks: tuple[Task, ...]
    method: Descent


def is_stackable(spec: Spec, problem: Problem) -> bool:
    """Whether the fits of a row on all splits can be run as one: MAP, MC dropout and plain ensembles of MAP."""
    if not problem.stackable or spec.start is not None or spec.learns_prior:
        return False
    method = spec.method
    if isinstance(method, Ensemble):
        plain = not method.bagging and method.adversarial is None and method.initialize is None
        return plain and type(method.method) is MAP
    return type(method) is MAP or (isinstance(method, MCDropout) and not method.learn_rates)


def fit_splits(
    spec: Spec,
    problem: Problem,
    splits: Mapping[int, Split],
    *,
    device: torch.device | str | None = None,
    tell: Tell = lambda _: None,
) -> dict[int, Chosen]:
    """The posteriors of all splits (seed -> split). A split whose weights become infinite is left out.

    If there is a grid, its points are compared by the log likelihood of a fifth of each training rows, after training on the rest;
    the test rows are not used.
    """
    begin, seeds = time.monotonic(), list(splits)
    points = list(spec.grid) or [{}]
    stack = Stack(spec, problem, points, splits[seeds[0]], device)
    chosen, weight = dict.fromkeys(seeds, points[0]), 0.0
    if len(points) > 1:
        weight = WEIGHT
        chosen = _choose(stack, points, splits, tell=lambda done: tell(weight * done))
    members = 1 if stack.ensemble is None else stack.ensemble.size
    final = [Wanted(seed, chosen[seed], splits[seed]) for seed in seeds]
    held = {seed: inner_split(splits[seed], seed) for seed in seeds} if spec.recalibrated else {}
    final += [Wanted(seed, chosen[seed], split) for seed, split in held.items()]
    posteriors = stack.fit(final, members=members, tell=lambda done: tell(weight + (1 - weight) * done))
    seconds = (time.monotonic() - begin) / len(seeds)
    fitted = zip(seeds, posteriors[: len(seeds)], strict=True)
    made = {seed: Chosen(posterior, chosen[seed], seconds) for seed, posterior in fitted if _is_finite(posterior)}
    for seed, other in zip(held, posteriors[len(seeds) :], strict=True):
        if seed in made and _is_finite(other):
            made[seed] = made[seed].recalibrated(other, held[seed], seed=seed)
    return made


def _choose(
    stack: Stack, points: Sequence[Mapping[str, float]], splits: Mapping[int, Split], *, tell: Tell
) -> dict[int, Mapping[str, float]]:
    """For each split the point of the grid with the best log likelihood on the held-out fifth of its training rows."""
    tried = [Wanted(seed, point, inner_split(split, seed)) for point in points for seed, split in splits.items()]
    scores: dict[int, list[float]] = {seed: [] for seed in splits}
    for (seed, _, inner), posterior in zip(tried, stack.fit(tried, members=1, tell=tell), strict=True):
        p = posterior.predict(inner.x_test, draws=None if stack.dropout is None else CHOOSING)
        value = float(-p.to("cpu").log_prob(inner.y_test).double().mean())
        scores[seed].append(value if math.isfinite(value) else math.inf)
    return {seed: points[values.index(min(values))] for seed, values in scores.items()}


def inner_split(split: Split, seed: int) -> Split:
    """The training rows split again, with a fifth of it as test rows; standardized as before."""
    order = torch.randperm(len(split.x_train), generator=randomness.generator("cpu", seed, "choosing"))
    held, kept = order.split([len(order) // FOLDS, len(order) - len(order) // FOLDS])
    x, y = split.x_train, split.y_train
    return split._replace(x_train=x[kept], y_train=y[kept], x_test=x[held], y_test=y[held])


def _is_finite(posterior: Posterior) -> bool:
    params: Params = posterior.params  # pyright: ignore[reportAttributeAccessIssue]
    return all(bool(leaf.isfinite().all()) for leaf in params.values())


class Stack:
    """Fits the posteriors of one row of the comparison in as few stacks as their lengths allow."""

    def __init__(
        self,
        spec: Spec,
        problem: Problem,
        points: Sequence[Mapping[str, float]],
        split: Split,
        device: torch.device | str | None,
    ):
        self.spec, self.problem = spec, problem
        self.ensemble = spec.method if isinstance(spec.method, Ensemble) else None
        method = spec.method if self.ensemble is None else self.ensemble.method
        assert isinstance(method, Descent)
        self.method, self.dropout = method, method if isinstance(method, MCDropout) else None
        self.models: dict[Noise, Model] = {}
        for point in points:
            noise = self.noise(point)
            if noise not in self.models:
                self.models[noise] = _model(replace(spec, noise=noise), problem, split)
                self.models[noise].network.to(device)  # made just now; None leaves it where it is

    def noise(self, point: Mapping[str, float]) -> Noise:
        """The kind of noise, which a point of the grid may set."""
        if "heteroscedastic" not in point:
            return self.spec.noise
        return "heteroscedastic" if point["heteroscedastic"] else "shared"

    def fit(self, wanted: Sequence[Wanted], *, members: int, tell: Tell) -> list[Posterior]:
        """The posteriors that are wanted, in their order."""
        jobs = [self._job(one, members) for one in wanted]
        total = sum(job.epochs * len(job.tasks) for job in jobs) or 1
        posteriors: dict[int, Posterior] = {}
        done = 0.0
        for group in _groups(jobs, members):
            first = jobs[group[0]]
            work, before = len(group) * members * first.epochs, done
            params = train(
                self.models[first.noise],
                [task for i in group for task in jobs[i].tasks],
                first.method,
                epochs=first.epochs,
                batch_size=self.problem.training.batch_size,
                tell=lambda share, work=work, before=before: tell((before + share * work) / total),
            )
            done += work
            for k, i in enumerate(group):
                leaves = tree.clone(tree.select(params, slice(k * members, (k + 1) * members)))
                posteriors[i] = self._posterior(jobs[i], leaves)
        return [posteriors[i] for i in range(len(jobs))]

    def _job(self, wanted: Wanted, members: int) -> Job:
        seed, point, split = wanted
        noise, method = self.noise(point), self.method
        if self.ensemble is not None and noise == "heteroscedastic":
            method = replace(method, clip=None)  # where the predicted noise is small, gradients must be large
        prior = self.models[noise].prior.normal
        assert prior is not None
        task = Task(split.x_train, split.y_train, seed, prior=prior)
        if self.dropout is not None:
            method = replace(self.dropout, rate=point.get("rate", self.dropout.rate))
            task = _dropout_task(task, method, point, split)
        epochs = int(point.get("epochs", method.passes_over_data))
        return Job(noise, epochs, tuple(task._replace(seed=randomness.derive_seed(seed, k)) for k in range(members)), method)

    def _posterior(self, job: Job, leaves: Params) -> Posterior:
        model, method = self.models[job.noise], job.method
        if isinstance(method, MCDropout):
            dropout = Dropout.find(model.network, method.at, method.rate)
            return Stochastic(model, tree.select(leaves, 0), {}, dropout, method.draws, method.consistent)
        if self.ensemble is not None:
            return Samples(model, leaves, {})
        return Point(model, tree.select(leaves, 0), {})


def _dropout_task(task: Task, method: MCDropout, point: Mapping[str, float], split: Split) -> Task:
    """The task with the rate, noise and prior of MC dropout, from a point of the grid or from the method's length scale."""
    keep, precision = 1 - method.rate, point.get("precision")
    if precision is not None:  # in the original units of the targets; the network's are standardized
        assert split.scale is not None
        precision = precision * float(split.scale.square().mean())
    elif method.length_scale is not None and method.weight_decay is not None:
        precision = keep * method.length_scale**2 / (2 * len(split.x_train) * method.weight_decay)
    task = task._replace(rate=method.rate, precision=precision)
    if precision is None:
        return task
    length = method.length_scale or LENGTH_SCALE
    # as in `MCDropout` with a length scale
    return task._replace(prior=Normal(scale={"bias$": 1 / length, "": 1 / (length * math.sqrt(keep))}))


def _model(spec: Spec, problem: Problem, split: Split) -> Model:
    with randomness.fork_rng(randomness.derive_seed(0, "network")):
        model = spec.model(problem, tuple(split.x_train.shape[1:]))
    if any(True for _ in model.network.buffers()):
        raise ValueError("networks with buffers (BatchNorm) cannot be trained in one stack")
    return model


def _groups(jobs: Sequence[Job], members: int) -> Iterator[list[int]]:
    """Indices of jobs that can run in one stack: of one model, with as many epochs and rows."""
    kinds: dict[tuple[Noise, int, int], list[int]] = {}
    for i, job in enumerate(jobs):
        kinds.setdefault((job.noise, job.epochs, len(job.tasks[0].x)), []).append(i)
    size = max(1, LARGEST // members)
    for alike in kinds.values():
        for i in range(0, len(alike), size):
            yield alike[i : i + size]


def train(model: Model, tasks: Sequence[Task], method: Descent, *, epochs: int, batch_size: int, tell: Tell) -> Params:
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
    rates = {RATE + site: _logits(tasks, device) for site in dropout.sites} if dropout is not None else {}
    decay = _decay(params, tasks, n)
    optimizer = torch.optim.Adam(list(params.values()), lr=method.peak_rate, fused=True)

    def loss(weights: Params, rates: Params, x: Tensor, y: Tensor) -> Tensor:
        """Mean negative log likelihood of a batch, less the log prior of the noise."""
        with nullcontext() if dropout is None else Masks(dropout, {**weights, **rates}):
            f = model.call(weights, x, {})[0]
        prior = model.likelihood.log_prior(likelihood_params(weights)) / n
        return -model.score(f, y, weights).mean() - prior

    gradient = vmap(grad_and_value(loss), randomness="different")
    generators = [randomness.generator("cpu", t.seed, "batches") for t in tasks]
    with randomness.fork_rng(randomness.derive_seed(*(t.seed for t in tasks), "stack")), in_mode(model.network, True):
        for step in range(steps):
            if step % k == 0:
                order = torch.stack([torch.randperm(n, generator=g) for g in generators]).to(device)  # [K, N]
                tell(step / steps)
            rows = order[:, n * (step % k) // k : n * (step % k + 1) // k].unsqueeze(-1)  # pyright: ignore
            slopes, _ = gradient(
                params, rates, x.gather(1, rows.expand(-1, -1, x.shape[2])), y.gather(1, rows.expand(-1, -1, y.shape[2]))
            )
            _finish_gradients(slopes, params, decay, fixed, method.clip)
            optimizer.param_groups[0]["lr"] = method.peak_rate * share(
                step, steps, warmup=method.warmup, schedule=method.schedule
            )
            advance(optimizer, params, (slopes[name] for name in params), pace=method.pace)
    return params


def _logits(tasks: Sequence[Task], device: torch.device) -> Tensor:
    """Logits of the dropout rates, [K, 1]."""
    return torch.logit(torch.tensor([[t.rate] for t in tasks], device=device))


def _decay(params: Params, tasks: Sequence[Task], n: int) -> Params:
    """The weight decay of each parameter of the network, [K, 1, ...]: the prior's precision over the number of examples."""
    decay = {}
    for name, leaf in params.items():
        if ":" not in name:
            scales = [t.prior.scale_of(name) for t in tasks]
            shape = (-1, *[1] * (leaf.ndim - 1))
            decay[name] = torch.tensor([scale**-2 / n for scale in scales], device=leaf.device).reshape(shape)
    return decay


@torch.no_grad()
def _finish_gradients(slopes: Params, params: Params, decay: Params, fixed: Sequence[int], largest: float | None) -> None:
    """Add the prior's gradient, leave a fixed noise where it is, and clip; in place."""
    for name, factor in decay.items():
        slopes[name].addcmul_(params[name], factor)
    if fixed:
        slopes[NOISE][fixed] = 0.0
    if largest is not None:
        clip(list(slopes.values()), largest, stacked=True)
