"""What an acquisition function sees, a posterior's predictions for the candidates of a pool, and what it returns, a choice of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dubito.apps.active.pool import Pool
from dubito.model.likelihoods import Bernoulli, MultiTask, average
from dubito.network.examples import Inputs
from dubito.posteriors import Posterior
from dubito.posteriors.predictive import LatentMixture, Predictive
from dubito.tensors import tree
from dubito.tensors.checks import require

DRAWS = 100  # functions of a posterior that has no number of its own


class Functions(NamedTuple):
    """Draws of functions at some inputs: what each of them expects of y, and the noise around it."""

    values: Tensor  # [S, B, C]: class probabilities, or means
    weights: Tensor  # [S], sums to 1
    noise: Tensor | None  # [B, C], variance of y given the function, averaged over the functions; None for classes
    log_noise: Tensor | None = None  # [B, C], the mean of its logarithm; None where the functions have the same noise

    def at(self, rows: Tensor | slice) -> Functions:
        """The same functions at some of the inputs."""
        noise, log_noise = (None if part is None else part[rows] for part in (self.noise, self.log_noise))
        return Functions(self.values[:, rows], self.weights, noise, log_noise)

    @staticmethod
    def join(parts: list[Functions]) -> Functions:
        """The same functions at the inputs of all parts."""
        noises = [part.noise for part in parts if part.noise is not None]
        logs = [part.log_noise for part in parts if part.log_noise is not None]
        noise, log_noise = (torch.cat(each) if each else None for each in (noises, logs))
        return Functions(torch.cat([part.values for part in parts], 1), parts[0].weights, noise, log_noise)


@dataclass
class View:
    """A posterior and the candidates of a pool; predictions are streamed, batch by batch, and never held all at once.

    `candidates` are indices into the pool in rising order, `pending` those that have been asked for and have no label yet.
    `uncertainty` is filled in when all candidates have been gone through: their mean "total" and "epistemic" uncertainty.
    """

    posterior: Posterior
    pool: Pool
    candidates: Tensor  # [N]
    pending: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    how: str | None = None
    draws: int | None = None
    memory: float = 1.0  # gigabytes
    size: int = 500  # inputs at a time
    seed: int = 0
    uncertainty: dict[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.candidates)

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return self.posterior.model.device

    def predictions(self) -> Iterator[Predictive]:
        """The predictive of each batch of candidates, in their order."""
        sums = []
        for x in self.pool.batches(self.posterior.model, self.candidates, self.size):
            p = self._predict(self.posterior, x, self.how, self.draws)
            yield p
            sums.append(_sums(p))
        self._note(sums)

    def functions(self, indices: Tensor | None = None, *, x: Inputs = None, least: int = DRAWS) -> Iterator[Functions]:
        """Draws of functions, the same for every batch: at the candidates, at other indices of the pool, or at inputs x.

        Where a posterior predicts without draws, `least` of them are made.
        """
        posterior, way = self.posterior.with_fixed_masks(), None
        which = self.candidates if indices is None else indices
        given = [x] if x is not None else self.pool.batches(posterior.model, which, self.size)
        sums = []
        for part in given:
            way = self._way(posterior, part, least) if way is None else way
            p = self._predict(posterior, part, *way)
            yield self._read(p)
            sums.append(_sums(p))
        if indices is None and x is None:
            self._note(sums)

    def _note(self, sums: list[Tensor]) -> None:
        total, epistemic = (torch.stack(sums).sum(0) / len(self)).tolist()
        self.uncertainty = {"total": total, "epistemic": epistemic}

    def _way(self, posterior: Posterior, x: Inputs, least: int) -> tuple[str | None, int | None]:
        """The first way to predict, of those that come closest to what is wanted, that gives draws of functions."""
        one = tree.apply_leaves(lambda leaf: leaf[:1], x)
        ways = [(self.how, self.draws), (self.how, self.draws or least), ("sampled", self.draws or least)]
        for way in ways[:-1]:
            p = self._predict(posterior, one, *way)
            if isinstance(p, LatentMixture) and p.certain:
                return way
        return ways[-1]

    def _predict(self, posterior: Posterior, x: Inputs, how: str | None, draws: int | None) -> Predictive:
        return posterior.predict(x, how, draws=draws, memory=self.memory, seed=self.seed)

    def _read(self, p: Predictive) -> Functions:
        assert isinstance(p, LatentMixture)
        discrete, values = p.likelihood.discrete, p.probs
        if isinstance(p.likelihood, Bernoulli) and values.shape[-1] == 1:  # yes or no: two classes
            points = p.points
            values = torch.cat([p.likelihood.off(points.means, points.aligned_params), values], -1)
        elif discrete and not p.likelihood.indexed:
            raise ValueError(f"joint entropies need one answer an input; got {values.shape[-1]}, each yes or no: use 'bald'")
        require(values.ndim == 3, "joint entropies need one answer an input, but these outputs have positions: use 'bald'")
        if discrete:
            return Functions(values, p.draw_weights.to(values), None)
        return Functions(values, p.draw_weights.to(values), p.uncertainty.aleatoric, expected_log_noise(p))


def expected_log_noise(p: LatentMixture) -> Tensor:
    r"""The mean over the weights of the log variance that y has given them, :math:`E_\theta \ln \sigma_\theta^2`, [B, *D, C]."""
    if isinstance(p.likelihood, MultiTask):
        classes = [name for name, (task, _) in p.likelihood.tasks.items() if task.discrete]
        require(not classes, f"joint entropies are of classes or of numbers, and the tasks {classes} have classes: use 'bald'")
        return torch.cat([expected_log_noise(p.task(name)) for name in p.likelihood.tasks], -1)
    marginal, weights = p.points.marginals  # at points, what is left is noise
    return 2 * average(marginal.stddev.expand(marginal.batch_shape).log(), weights)


def _sums(p: Predictive) -> Tensor:
    """Total and epistemic uncertainty, [2], summed over inputs and the outputs of a regression; positions are averaged."""
    both = torch.stack([p.uncertainty.total, p.uncertainty.epistemic]).double()  # [2, B, *D] or [2, B, *D, C]
    both = both if p.likelihood.discrete else both.sum(-1)
    return both.reshape(2, both.shape[1], -1).mean(-1).sum(1)


class Choice(NamedTuple):
    """Which candidates to label, best first, and what each is worth by the acquisition's own score."""

    positions: Tensor  # [k], among the candidates of the view
    scores: Tensor  # [k]


class Acquisition(Protocol):
    """Settings of an acquisition function."""

    def choose(self, view: View, k: int, generator: torch.Generator) -> Choice:
        """The k candidates to label next."""
        ...


class Scored(Acquisition, Protocol):
    """An acquisition function that gives every candidate a score of its own, whatever else is chosen with it."""

    def scores(self, view: View, generator: torch.Generator) -> Tensor:
        """What each candidate is worth, [N]: larger is labelled first."""
        ...


def check_finite(scores: Tensor) -> None:
    """An error if scores hold NaN."""
    if bool(scores.isnan().any()):
        raise ValueError("the scores hold NaN, so the model's predictions are not finite: check its training")


def best(scores: Tensor, k: int, generator: torch.Generator) -> Choice:
    """The k largest scores; those that are tied are taken in random order.

    >>> best(torch.tensor([0.1, 0.9, 0.5]), 2, torch.Generator())
    Choice(positions=tensor([1, 2]), scores=tensor([0.9000, 0.5000]))
    """
    check_finite(scores)
    order = torch.randperm(len(scores), generator=generator).to(scores.device)
    top = torch.topk(scores[order], k)
    return Choice(order[top.indices], top.values)
