"""Members of an ensemble that hold out different folds, trained in one batched pass and each stopped where its own fold says."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.func import vmap

from dubito.inference.progress import Progress
from dubito.model import Model, Target
from dubito.model.likelihoods import HeteroscedasticGaussian
from dubito.network.reinitialize import reinitialize
from dubito.network.weights import in_mode
from dubito.posteriors import Samples
from dubito.posteriors.predictive import LatentMixture
from dubito.tensors import tree
from dubito.tensors.checks import at_least, positive
from dubito.tensors.randomness import derive_seed, generator
from dubito.tensors.tree import Params

BATCHES = 16  # of a pass over the rows, where they are few
BATCH = (32, 256)  # the least and the most rows of a batch
CHECKS = 60  # how often the held-out rows are looked at
ROUNDS, BELIEF = 200, 10.0  # of expectation-maximization, and how many rows equal weights count as
PATIENCE = CHECKS // 3  # looks in which no member is better than before, after which the training ends
FREQUENCIES = (0.1, 0.5)  # how fast the waves of a number are at first, by repeat: for smooth functions and for rough ones


@dataclass(frozen=True)
class CrossFit:
    """Settings of the training.

    Every repeat deals the rows anew into `folds` folds, each held out by one member. So there are `folds` times `repeats` members, and
    every row is predicted by `repeats` members that have not learned from it. Repeats differ in how rough the functions are that their
    members start from; how much each repeat counts is chosen by these predictions.
    """

    folds: int = 5
    repeats: int = 2
    steps: int = 2000  # of Adam
    learning_rate: float = 0.03  # at the beginning; it falls to 0 as a cosine
    budget: float | None = None  # seconds after which the training ends, with the learning rate at 0
    seed: int = 0
    show: bool | None = field(default=None, kw_only=True)  # a progress bar; None: on a terminal

    def __post_init__(self):
        at_least(2, folds=self.folds)
        at_least(1, repeats=self.repeats, steps=self.steps)
        positive(learning_rate=self.learning_rate, budget=self.budget)

    def fit(self, model: Model, x: Tensor, y: Tensor) -> CrossFitted:
        """Train all members."""
        return Training(self, model, x, y).run()


@dataclass(frozen=True)
class CrossFitted:
    """What the training gave."""

    posterior: Samples  # all members, which count as their repeats do
    outputs: Tensor  # [R, N, C]: of the members that held a row out, one of each repeat
    done: float  # share of the steps after which the budget ended the training; 1 if it did not

    @property
    def gaussians(self) -> LatentMixture:
        """That of a regression as Gaussians with the predicted means and scales, whatever the tails that the networks believe in."""
        return gaussians(self.predictive)

    @property
    def predictive(self) -> LatentMixture:
        """The out-of-fold predictive of every row."""
        weights = self.posterior.weights
        assert weights is not None
        return LatentMixture(self.posterior.model.likelihood, self.outputs, weights=weights.reshape(len(self.outputs), -1).sum(1))


def gaussians(p: LatentMixture) -> LatentMixture:
    """Means and log squared scales as those of Gaussians."""
    return LatentMixture(HeteroscedasticGaussian(), p.means, p.cov, p.weights)


class Training:
    """The state of one training."""

    def __init__(self, settings: CrossFit, model: Model, x: Tensor, y: Tensor):
        self.settings, self.model, self.x, self.y = settings, model, x, y
        self.source = generator("cpu", settings.seed, "table")
        self.folds = torch.stack([deal(y, settings.folds, self.source) for _ in range(settings.repeats)])  # [R, N]
        members = [fold == k for fold in self.folds for k in range(settings.folds)]
        self.held = torch.stack(members)  # [S, N]
        size = int(self.held.sum(1).max())
        self.rows = self.held.float().topk(size).indices.sort(1).values  # [S, size], some of which are not held out
        self.counted = self.held.gather(1, self.rows)
        plain = model.parameters(y)
        starts = [reinitialize(model.network, plain, derive_seed(settings.seed, "member", i)) for i in range(len(self.held))]
        self.params = tree.stack(starts)
        if "embedding.frequency" in self.params:
            paces = torch.tensor([FREQUENCIES[i // settings.folds % len(FREQUENCIES)] for i in range(len(starts))])
            self.params["embedding.frequency"] *= paces.view(-1, 1, 1)
        self.best, self.score, self.idle, self.done = tree.clone(self.params), torch.full((len(self.held),), -math.inf), 0, 1.0
        self.outputs = torch.empty(0)  # of the best members for the rows that they hold out, [S, size, C]
        self.pause = 0.0  # seconds that the last look took

    def run(self) -> CrossFitted:
        """All steps, and the best state of every member."""
        settings, n, started = self.settings, len(self.x), time.monotonic()
        size = min(max(n // BATCHES, BATCH[0]), BATCH[1])
        batches = max(1, n // size)
        epochs = math.ceil(settings.steps / batches)
        optimizer, rates = self.optimizer()
        steps, done = epochs * batches, 0
        every = max(1, steps // CHECKS)
        self.look()
        with Progress("fit", steps, show=settings.show) as progress:
            while done < steps:
                for rows in torch.randperm(n, generator=self.source).tensor_split(batches):
                    elapsed = 0.0 if settings.budget is None else (time.monotonic() - started + self.pause) / settings.budget
                    share = max(done / steps, elapsed)
                    if done >= steps or share >= 1:
                        break
                    for group, rate in zip(optimizer.param_groups, rates, strict=True):
                        group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * share))
                    self.step(optimizer, rows)
                    done += 1
                    if done % every == 0:
                        self.look()
                        progress.update(done, {"held_out_score": self.score})
                late = settings.budget is not None and time.monotonic() - started + self.pause >= settings.budget
                self.done = done / steps if late else 1.0
                if late or self.idle >= PATIENCE:
                    break
        self.look()
        return self.result()

    def optimizer(self) -> tuple[torch.optim.Optimizer, list[float]]:
        """Adam, and the rate of each of its groups, one a leaf: biases learn slowly, the scales of the inputs fast."""
        rates = [self.settings.learning_rate * _pace(name) for name in self.params]
        groups = [{"params": [leaf], "lr": rate} for leaf, rate in zip(self.params.values(), rates, strict=True)]
        return torch.optim.Adam(groups, betas=(0.9, 0.95), fused=True), rates

    def step(self, optimizer: torch.optim.Optimizer, rows: Tensor) -> None:
        """A step of every member, on the rows of this batch that it does not hold out."""
        weights = (~self.held[:, rows]).float()
        target = Target(self.model, len(self.x), members=len(self.held), weights=(weights,))
        batch = [(self.x[rows], self.y[rows])]
        found = target.gradient(self.params, batch, {}, train=True, factor=-1 / len(self.x))
        for name, leaf in self.params.items():
            leaf.grad = found.gradient[name]
        optimizer.step()

    @torch.no_grad()
    def look(self) -> None:
        """Score the held-out rows, and keep the members that are better than before."""
        started = time.monotonic()
        f = self.held_out_outputs(self.params)
        scores = vmap(self.model.score)(f, self.y[self.rows], self.params)
        score = (scores * self.counted).sum(1) / self.counted.sum(1)
        better = score > self.score
        self.idle = 0 if bool(better.any()) else self.idle + 1
        self.score = torch.where(better, score, self.score)
        self.outputs = torch.where(better.view(-1, 1, 1), f, self.outputs) if len(self.outputs) else f
        for name, leaf in self.best.items():
            leaf[better] = self.params[name].detach()[better]
        self.pause = time.monotonic() - started

    def held_out_outputs(self, params: Params) -> Tensor:
        """Of every member for the rows that it holds out, [S, size, C]."""
        with in_mode(self.model.network, False):
            return vmap(lambda params, x: self.model.call(params, x, {})[0])(params, self.x[self.rows])

    @torch.no_grad()
    def result(self) -> CrossFitted:
        """The best state of every member, what it predicts for the rows that it holds out, and how much each repeat counts."""
        outputs = self.outputs.new_empty(self.settings.repeats, len(self.x), self.outputs.shape[-1])
        for i, (rows, counted) in enumerate(zip(self.rows, self.counted, strict=True)):
            outputs[i // self.settings.folds, rows[counted]] = self.outputs[i, counted]
        scores = torch.stack([self.model.score(f, self.y, {}) for f in outputs])
        weights = best_weights(scores).repeat_interleave(self.settings.folds) / self.settings.folds
        return CrossFitted(Samples(self.model, self.best, {}, weights=weights.float()), outputs, self.done)


def best_weights(scores: Tensor, believed: Tensor | None = None) -> Tensor:
    """The weights [K] of a mixture with the best log score, given those of its components [K, N], by expectation-maximization.

    `believed` [K] are the weights before the data, equal by default; they count as much as ten rows.

    >>> best_weights(torch.tensor([[0.0] * 90, [-9.0] * 90]))
    tensor([0.9500, 0.0500], dtype=torch.float64)
    """
    scores = scores.double()
    believed = torch.full((len(scores),), 1 / len(scores), dtype=torch.float64) if believed is None else believed
    weights = believed
    for _ in range(ROUNDS):
        shares = (scores + weights.log().unsqueeze(1)).softmax(0).sum(1)
        weights = (shares + BELIEF * believed) / (scores.shape[1] + BELIEF)
    return weights


def _pace(name: str) -> float:
    """How fast a leaf learns, beside the others."""
    if name == "scale":
        return 6.0
    return 0.1 if name.endswith(("bias", "phase")) else 1.0


def deal(y: Tensor, folds: int, source: torch.Generator) -> Tensor:
    """A fold for every row, [N], in each of which the targets are spread as in all.

    >>> fold = deal(torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), 2, torch.Generator().manual_seed(0))
    >>> fold[:4].sum(), fold[4:].sum()
    (tensor(2), tensor(2))
    """
    key = y if y.ndim == 1 else y[:, 0]
    order = torch.randperm(len(y), generator=source)
    order = order[key[order].argsort(stable=True)]  # by target, and in any order among equals
    blocks = [torch.randperm(folds, generator=source) for _ in range(math.ceil(len(y) / folds))]
    fold = torch.empty(len(y), dtype=torch.long)
    fold[order] = torch.cat(blocks)[: len(y)]
    return fold
