"""Judge a model on data, in one pass and in bounded memory.

Batches become sums and counts as they come. Where ranks are needed (equal-mass bins, ROC and risk-coverage curves) a few numbers are
kept for every example: its confidence, its scores, and whether it was right. The results are those of `dubito.metrics` on everything
at once.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dubito.evaluation.judge.judgement import Judgement
from dubito.evaluation.judge.scorers import ClassScorer, NumberScorer
from dubito.evaluation.measures import MEASURES
from dubito.evaluation.metrics import DECISIONS, METRICS
from dubito.evaluation.metrics.reading import Array, targets, tensor
from dubito.inference.batches import Arrays, as_columns, is_hugging_face, reseed
from dubito.inference.progress import Progress
from dubito.model import Model
from dubito.network.division import share_batches
from dubito.network.examples import batch_size, is_array, is_pair, split_batch
from dubito.posteriors.posterior import Posterior, inputs_of
from dubito.posteriors.predictive import Predictive, concatenate
from dubito.tensors.checks import between, require
from dubito.tensors.processes import ALONE, CPU, Distributed, Processes, join_processes
from dubito.tensors.randomness import borrowed_generators, fork_rng

Predictor = Callable[[Any], Predictive]


def predictor(
    posterior: Posterior | Predictor,
    *,
    how: str | None = None,
    draws: int | None = None,
    memory: float | None = None,
    seed: int = 0,
) -> Predictor:
    """A posterior with the options of its `predict`, or any function from inputs to a `Predictive`, as such a function."""
    if isinstance(posterior, Posterior):
        return partial(posterior.predict, how=how, draws=draws, memory=memory, seed=seed)
    if not callable(posterior):
        raise TypeError(f"expected a posterior, or a function from inputs to a Predictive; got a {type(posterior).__name__}")
    require(how is None and draws is None, "`how` and `draws` are for posteriors: leave them out for a function")

    def predict(x: Any) -> Predictive:
        """The function's predictive, checked."""
        p = posterior(x)
        if not isinstance(p, Predictive):
            advice = "for outputs f [B, ..., C] return LatentMixture(likelihood, f[None])"
            raise TypeError(f"the function returns a {type(p).__name__}: {advice}")
        return p

    return predict


def model_of(posterior: Posterior | Predictor) -> Model | None:
    """The model of a posterior; None for a function."""
    return posterior.model if isinstance(posterior, Posterior) else None


def input_dtype(model: Model | None) -> torch.dtype:
    """The dtype of the network's weights, to which NumPy's float64 inputs are converted."""
    return torch.get_default_dtype() if model is None else model.dtype


def predict_in_batches(predict: Predictor, x: Tensor, size: int, transform: Callable[[Tensor], Any] | None = None) -> Predictive:
    """The predictive of all rows of x (or of transform(x)), from batches of `size`, on the CPU."""
    parts = (rows if transform is None else transform(rows) for rows in x.split(size))
    return concatenate([predict(part).to("cpu") for part in parts])


def for_each_batch(
    data: Any,
    model: Model | None,
    take: Callable[[Any, Any], int],
    *,
    size: int,
    title: str,
    unit: str,
    progress: bool | None,
    processes: Processes = ALONE,
) -> None:
    """Call take(x, y) for every batch of the data, of several processes for those of this one. It returns how many `unit`s it has seen,
    which the progress bar shows.

    `data` is a tuple (x, y), a Dataset (both in batches of `size`), a DataLoader or any iterable of batches. Global generators are
    put back at the end.
    """
    columns = as_columns(data, default=model is None or model.split is split_batch)
    whole = model is not None and model.coupled
    loader = _batches(columns, input_dtype(model), size, 1 if whole else processes.size)
    total = _length(loader) // processes.size
    bar = Progress(title, total, show=progress if total and processes.first else False)
    # a DataLoader draws from the global generator, even unshuffled
    with bar, borrowed_generators(loader) as generators, fork_rng():
        if processes.size > 1:
            reseed(generators, 0)  # one that shuffles gives the same batches to all
        for i, batch in enumerate(share_batches(loader, processes)):
            x, y = split_batch(batch) if model is None else inputs_of(model, batch)
            require(y is not None, "the batches hold inputs only: scores need the targets as well")
            bar.update(i + 1, {unit: take(x, y)})


def _batches(data: Any, dtype: torch.dtype, size: int, least: int) -> Iterable[Any]:
    """Batches of at most `size`; of data in memory `least` of them, if there are as many rows."""
    if is_pair(data) and any(map(is_array, data)):
        if not is_array(data[1]) and not isinstance(data[1], dict):
            raise TypeError(f"in data (x, y), y must be a tensor, an array or a dict of these; y is a {type(data[1]).__name__}")
        arrays = Arrays.of(data, dtype, size, shuffle=False)
        return replace(arrays, size=min(size, math.ceil(batch_size(arrays.y) / least)))
    if isinstance(data, Dataset) or is_hugging_face(data):
        rows: Any = data
        return DataLoader(rows.with_format("torch") if is_hugging_face(rows) else rows, batch_size=size)
    if not isinstance(data, Iterable) or isinstance(data, Tensor):
        raise TypeError(f"data must be a tuple (x, y), a Dataset, a DataLoader or batches; got a {type(data).__name__}")
    return data


def _length(loader: Iterable[Any]) -> int:
    """The number of batches, or 0 where it is not known."""
    try:
        return len(loader)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return 0


MIXED = "some batches are of classes and some of numbers: judge them apart"
NAMES = (*METRICS, *DECISIONS, "brier_decomposition", "uncertainty")


class Judge:
    r"""Collects what is needed to judge predictions, batch by batch.

    `metrics` are names from `metrics.METRICS` and `metrics.DECISIONS`, "brier_decomposition", and "uncertainty" for the means of
    total, aleatoric and epistemic; None takes all that suit. `scores` are names from `measures.MEASURES` by which errors are to be
    found: by default `one_minus_max`, and `total_variance` for regression, where the error is the squared one, summed over outputs.
    With `Bernoulli` an example is an error if any of its labels is wrong. The ± of a mean is its standard error over examples.

    >>> import dubito
    >>> from dubito.posteriors.predictive import LatentMixture
    >>> judge = Judge(["accuracy", "nll", "auroc"])
    >>> for logits, y in (([[2.0, 0.0], [0.0, 1.0]], [0, 0]), ([[0.0, 3.0]], [1])):
    ...     judge.update(LatentMixture(dubito.Categorical(), torch.tensor([logits])), torch.tensor(y))
    >>> print(judge.compute())
    3 examples by one_minus_max
      accuracy  0.6667  ± 0.33  share of rows whose most probable class is right
      nll       0.4963  ± 0.41  negative log likelihood of a row; lower is better
      auroc          1          how often an error is less certain than a success
    """

    def __init__(
        self,
        metrics: Sequence[str] | None = None,
        *,
        scores: Sequence[str] | None = None,
        bins: int = 15,
        level: float = 0.9,
    ):
        check_names(NAMES, metrics=metrics)
        check_names(MEASURES, scores=scores)
        between(0, 1, level=level)
        self.options = (None if metrics is None else list(metrics), None if scores is None else list(scores), bins, level)
        self.scorer: ClassScorer | NumberScorer | None = None

    @property
    def n(self) -> int:
        """Examples so far, or labelled positions of dense outputs."""
        return 0 if self.scorer is None else self.scorer.n

    @torch.no_grad()
    def update(self, p: Predictive, y: Array) -> None:
        """Take in a batch: its predictive and its targets."""
        target = targets(p, y, "judge")
        if self.scorer is None:
            self.scorer = (ClassScorer if p.likelihood.discrete else NumberScorer)(p, *self.options)
        require(self.scorer.discrete == p.likelihood.discrete, MIXED)
        self.scorer.update(p, tensor(y).to(target.device), target)

    def gather(self, processes: Processes) -> None:
        """Take in what the other processes have taken in, batch by batch in turn: afterwards all of them have the same, on the CPU."""
        if processes.size == 1:
            return
        memory = io.BytesIO()
        torch.save(self.scorer, memory)
        scorers = [torch.load(io.BytesIO(one), "cpu", weights_only=False) for one in processes.gather(memory.getvalue())]
        scorers = [scorer for scorer in scorers if scorer is not None]
        require(len({type(scorer) for scorer in scorers}) < 2, MIXED)
        self.scorer = scorers[0] if scorers else None
        if self.scorer is not None:
            self.scorer.merge(scorers[1:])

    def compute(self) -> Judgement:
        """The judgement of all batches so far."""
        scorer = self.scorer
        if scorer is None or not scorer.n:
            raise ValueError("there is nothing to judge: no batch, or none with a labelled target")
        decisions = scorer.decisions()
        values = scorer.values() | scorer.split()
        values |= next(iter(decisions.values())).values if decisions else {}
        errors = scorer.standard_errors()
        return Judgement(values, scorer.n, decisions, scorer.level, standard_errors=errors, **scorer.details())


def judge(
    posterior: Posterior | Predictor,
    data: Any,
    *,
    metrics: Sequence[str] | None = None,
    scores: Sequence[str] | None = None,
    how: str | None = None,
    draws: int | None = None,
    memory: float | None = None,
    seed: int = 0,
    size: int = 1000,
    bins: int = 15,
    level: float = 0.9,
    progress: bool | None = None,
    distributed: Distributed = False,
) -> Judgement:
    """How good a posterior's predictions are on data whose targets are known, in one pass over it.

    `data` is a DataLoader, a Dataset, a tuple (x, y) or any iterable of batches; data in memory is taken in batches of `size`. In the
    place of a posterior any function from inputs to a `Predictive` will do, such as one that recalibrates:
    `judge(lambda x: fix(posterior.predict(x)), data)`. `how`, `draws`, `memory` and `seed` are those of `predict`; `metrics`, `scores`,
    `bins` and `level` those of `Judge`, which can also be fed by hand.

    With `distributed="auto"` (or a process group or DeviceMesh, as in `fit`) all processes judge together, each some of the batches of
    data that are the same on all of them, or batches of its own; each has the judgement of all examples in the end.

    >>> import dubito
    >>> model = dubito.Model(torch.nn.Linear(3, 2), dubito.Categorical())
    >>> posterior = dubito.fit(model, dubito.MAP(epochs=1), (torch.randn(64, 3), torch.randint(2, (64,))))
    >>> found = judge(posterior, (torch.randn(100, 3), torch.randint(2, (100,))), metrics=["nll", "ece", "auroc"])
    >>> found.n, sorted(found.values), int(found.reliability.count.sum())
    (100, ['auroc', 'ece', 'nll'], 100)
    """
    predict = predictor(posterior, how=how, draws=draws, memory=memory, seed=seed)
    judging, model = Judge(metrics, scores=scores, bins=bins, level=level), model_of(posterior)

    def take(x: Any, y: Any) -> int:
        """Judge a batch; returns the examples so far."""
        judging.update(predict(x), y)
        return judging.n

    with join_processes(distributed, CPU if model is None else model.device) as processes:
        processes.agree(metrics=judging.options, prediction=(how, draws, seed), size=size)
        shown = {"title": "Judging", "unit": "examples", "progress": progress}
        for_each_batch(data, model, take, size=size, processes=processes, **shown)
        judging.gather(processes)
        return judging.compute()


def standard_errors(p: Predictive, y: Array, metrics: Sequence[str] | None = None) -> dict[str, float]:
    """The standard errors of those metrics of a predictive that are means over examples, by name.

    >>> from dubito import Gaussian
    >>> from dubito.posteriors.predictive import LatentMixture
    >>> p = LatentMixture(Gaussian(scale=1.0), torch.zeros(1, 4, 1))
    >>> standard_errors(p, torch.tensor([0.0, 1.0, 2.0, 0.0]), ["coverage"])        # 3 of 4 targets inside
    {'coverage': 0.25}
    """
    judging = Judge(metrics)
    judging.update(p, y)
    return dict(judging.compute().standard_errors)


def check_names(choices: Collection[str], **arguments: Sequence[str] | None) -> None:
    """Every argument must be a list of names among the choices, or None."""
    for argument, names in arguments.items():
        wrong = [names] if isinstance(names, str) else [name for name in names or () if name not in choices]
        require(not wrong, f"{argument} must be a list of names among {', '.join(choices)}; got {wrong[0] if wrong else ''!r}")
