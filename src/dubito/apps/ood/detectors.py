"""Detectors that read a posterior's predictions, and the figures by which all detectors are compared.

`Measured` is any measure of uncertainty, `MaxLogit` and `Energy` read mean logits, and `ODIN` also moves the input by a small step.
A detector's `fit` returns a score: a function of inputs, larger is less familiar.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from dubito.apps.network import Network, examples, networks, posterior_of
from dubito.evaluation.judge import rank
from dubito.evaluation.measures import MEASURES
from dubito.model import Model
from dubito.model.likelihoods import Categorical
from dubito.posteriors import Posterior
from dubito.tensors.checks import one_of, positive, require

Given = Posterior | Model | nn.Module  # a model, or a network that returns logits, is a point at its present weights
Score = Callable[[Any], Tensor]  # inputs -> [B], larger is less familiar; dense outputs give maps [B, *D]


class Detector(Protocol):
    """Settings of a score. `data` are familiar inputs, as `dubito.fit` takes them; a detector that learns nothing needs none."""

    def fit(self, posterior: Given, data: Any = None) -> Score:
        """The score for inputs, from the posterior and from familiar data if it learns from these."""
        ...


def require_data(data: Any, name: str, what: str) -> None:
    """An error if there are no data for a detector that learns from some."""
    if data is None:
        raise ValueError(f"{name} learns from familiar inputs: give fit(posterior, data), {what}")


@dataclass(frozen=True)
class PredictionScore:
    """The score of a detector that reads the posterior's predictive at inputs, [B, *D]."""

    posterior: Posterior
    settings: Measured | MaxLogit | Energy

    @property
    def model(self) -> Model:
        """The model that the posterior is of."""
        return self.posterior.model

    def __call__(self, x: Any) -> Tensor:
        return self.settings.score(self.posterior, x)


def score_of_logits(settings: MaxLogit | Energy, posterior: Given) -> PredictionScore:
    """The score of a detector that needs the logits of classes."""
    return PredictionScore(with_logits(posterior_of(posterior), type(settings).__name__), settings)


class Detection(NamedTuple):
    """`auroc`; average precision with the unfamiliar, or the familiar, as what is to be found; and the share of unfamiliar inputs that
    are accepted where 95 % of the familiar are."""

    auroc: float
    aupr_out: float
    aupr_in: float
    fpr95: float


def detection(familiar: Tensor, unfamiliar: Tensor) -> Detection:
    """All figures of a score, larger is less familiar, of two sets of inputs, [N] and [M]. Average precisions depend on N / M.

    >>> detection(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.35, 0.9]))
    Detection(auroc=0.875, aupr_out=0.8333..., aupr_in=0.95, fpr95=0.5)
    """
    score = torch.cat([scores.detach().flatten().to(familiar.device, torch.float64) for scores in (familiar, unfamiliar)])
    unknown = torch.arange(len(score), device=score.device) >= familiar.numel()
    return Detection(*rank(score, unknown, ("auroc", "aupr_error", "aupr_success", "fpr95")).values())


@dataclass(frozen=True)
class Measured:
    r"""Any of `dubito.measures`, of the posterior's own predictive: `one_minus_max` is the maximum softmax probability (Hendrycks &
    Gimpel 2017), turned round; `predictive_entropy`, `mutual_information` and `epistemic_variance` are their Bayesian relatives.

    All draws of the posterior count: the first two are of the averaged probabilities, the others of how the draws differ (a point's
    do not, and its scores are all 0). It learns nothing, so `fit` needs no data. `how` and `draws` are as in `posterior.predict`.

    >>> import torch
    >>> net = torch.nn.Linear(1, 2, bias=False)
    >>> _ = torch.nn.init.constant_(net.weight[:1], 2.0), torch.nn.init.zeros_(net.weight[1:])
    >>> Measured("one_minus_max").fit(net)(torch.tensor([[0.0], [2.0]]))
    tensor([0.5000, 0.0180])
    """

    measure: str = "predictive_entropy"
    how: str | None = None
    draws: int | None = None
    seed: int = 0

    def __post_init__(self):
        one_of(MEASURES, measure=self.measure)

    def fit(self, posterior: Given, data: Any = None) -> PredictionScore:
        """The score; no data are needed."""
        return PredictionScore(posterior_of(posterior), self)

    def score(self, posterior: Posterior, x: Any) -> Tensor:
        """The measure of the predictive at inputs, [B, *D]."""
        return MEASURES[self.measure](posterior.predict(x, self.how, draws=self.draws, seed=self.seed))


@dataclass(frozen=True)
class MaxLogit:
    r"""Minus the largest logit, :math:`-\max_c \bar f_c(x)` (Hendrycks et al. 2022): unlike a probability it tells "like nothing that I
    know" from "like two classes at once".

    :math:`\bar f` is the mean of the logits over the posterior. Where draws agree that is the mean of their largest logits, and where
    they do not it is less, as it should be: the mean of the maxima would be large there, too.

    >>> import torch
    >>> net = torch.nn.Linear(1, 2, bias=False)
    >>> _ = torch.nn.init.constant_(net.weight[:1], 2.0), torch.nn.init.zeros_(net.weight[1:])
    >>> MaxLogit().fit(net)(torch.tensor([[1.0], [2.0]]))
    tensor([-2., -4.])
    """

    draws: int | None = None

    def fit(self, posterior: Given, data: Any = None) -> PredictionScore:
        """The score; no data are needed."""
        return score_of_logits(self, posterior)

    def score(self, posterior: Posterior, x: Any) -> Tensor:
        """Minus the largest mean logit at inputs, [B, *D]."""
        return -posterior.predict(x, draws=self.draws).f_mean.amax(-1)


def with_logits(posterior: Posterior, name: str) -> Posterior:
    """The posterior, if the outputs of its network are the logits of classes."""
    if not isinstance(posterior.model.likelihood, Categorical):
        likelihood = posterior.model.likelihood
        measured = "Measured('predictive_entropy'), " if likelihood.discrete else ""
        raise ValueError(
            f"{name} reads the logits of classes, and {type(likelihood).__name__} has none: use {measured}"
            "Measured('epistemic_variance'), Mahalanobis() or Neighbours()"
        )
    return posterior


@dataclass(frozen=True)
class Energy:
    r"""The free energy :math:`-T \ln \sum_c \exp(\bar f_c(x) / T)` (Liu et al. 2020).

    :math:`\bar f` is the mean of the logits over the posterior. The function being convex, that of the mean is never below the mean
    of the draws' energies, and above it where the draws differ: disagreement makes an input less familiar. Averaging the energies
    would do the contrary. A linearized Laplace posterior has the logits of its point as means, and so its energies.

    >>> import torch
    >>> net = torch.nn.Linear(1, 2, bias=False)
    >>> _ = torch.nn.init.constant_(net.weight[:1], 2.0), torch.nn.init.zeros_(net.weight[1:])
    >>> Energy().fit(net)(torch.tensor([[0.0], [2.0]]))
    tensor([-0.6931, -4.0181])
    """

    temperature: float = 1.0
    draws: int | None = None

    def __post_init__(self):
        positive(temperature=self.temperature)

    def fit(self, posterior: Given, data: Any = None) -> PredictionScore:
        """The score; no data are needed."""
        return score_of_logits(self, posterior)

    def score(self, posterior: Posterior, x: Any) -> Tensor:
        """The energy at inputs, [B, *D]."""
        f = posterior.predict(x, draws=self.draws).f_mean
        return -self.temperature * torch.logsumexp(f / self.temperature, -1)


EPSILONS = (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.03, 0.06, 0.12)


@dataclass(frozen=True)
class ODIN:
    r"""Out-of-distribution detector for neural networks (Liang, Li & Srikant 2018).

    With :math:`S(x) = \max_c \mathrm{softmax}_c(f(x) / T)` the score is :math:`-\ln S(\tilde x)`, where

    .. math:: \tilde x = x + \epsilon\, \mathrm{sign}(\nabla_x \ln S(x)) / \mathrm{std}.

    `std` is what each channel of the inputs was divided by, so that the step is the same in all of them as they were before. All
    inputs take the same step. Its size is given, or chosen among `epsilons` as that with the largest mean :math:`S(\tilde x)` of
    familiar inputs (Hsu et al. 2020), best of some that were not trained on; the unfamiliar are never looked at. At T = 1000 all S are
    within a hair of 1 / C: they are computed in float64, and as logarithms.

    Of several networks S is that of their mean probabilities. Dropout is off, and a Gaussian stands at its mean: steps of the input
    need a function that stays what it is.

    >>> net = torch.nn.Linear(1, 2, bias=False)
    >>> _ = torch.nn.init.constant_(net.weight[:1], 2.0), torch.nn.init.zeros_(net.weight[1:])
    >>> ODIN(temperature=1.0, epsilon=0.5).fit(net)(torch.tensor([[1.0]])).exp()        # 1 / S: a step to 1.5, and so 1 + exp(-3)
    tensor([1.0498], dtype=torch.float64)
    """

    temperature: float = 1000.0
    epsilon: float | None = None  # None: chosen among `epsilons`
    epsilons: tuple[float, ...] = EPSILONS
    std: tuple[float, ...] = ()  # of the channels, as inputs were normalized; () if they were not
    draws: int = 10  # networks at most, where the posterior is draws

    def __post_init__(self):
        positive(temperature=self.temperature)
        sizes = self.epsilons if self.epsilon is None else (self.epsilon,)
        require(sizes and all(size >= 0 for size in sizes), f"epsilon, the size of a step, must be at least 0; got {sizes}")
        require(all(s > 0 for s in self.std), f"std must be positive standard deviations; got {self.std}")

    def fit(self, posterior: Given, data: Any = None) -> ODINScore:
        """The score; data choose `epsilon` if it is None."""
        posterior = with_logits(posterior_of(posterior), "ODIN")
        score = ODINScore(posterior.model, networks(posterior, draws=self.draws), self, self.epsilon or 0.0)
        if self.epsilon is not None:
            return score
        require_data(data, "ODIN", "held out if possible, to choose its epsilon; or set epsilon")
        sums, count = torch.zeros(len(self.epsilons), dtype=torch.float64), 0
        with closing(examples(posterior.model, data)) as batches:
            for x, _ in batches:
                direction = score.direction(x)
                with torch.no_grad():
                    each = torch.stack([score.log_maximum(x + e * direction).exp().flatten() for e in self.epsilons])
                sums, count = sums + each.sum(1).cpu(), count + each.shape[1]
        require(count, "there is no data to choose the step by: the loader gave no batch")
        criterion = dict(zip(self.epsilons, (sums / count).tolist(), strict=True))
        return ODINScore(posterior.model, score.networks, self, max(criterion, key=criterion.__getitem__), criterion)


@dataclass(frozen=True)
class ODINScore:
    """-ln S after the step, [B, *D]; `criterion` is the mean S of the familiar inputs that each epsilon gave."""

    model: Model
    networks: tuple[Network, ...]
    settings: ODIN
    epsilon: float
    criterion: dict[float, float] | None = None

    def __call__(self, x: Any) -> Tensor:
        x = self.networks[0].ready(x)
        moved = x + self.epsilon * self.direction(x) if self.epsilon else x
        with torch.no_grad():
            return -self.log_maximum(moved)

    def log_maximum(self, x: Tensor) -> Tensor:
        """ln S(x), [B, *D], in float64."""
        parts = [
            math.log(one.weight) + torch.log_softmax(one(x).double() / self.settings.temperature, -1) for one in self.networks
        ]
        return (parts[0] if len(parts) == 1 else torch.stack(parts).logsumexp(0)).amax(-1)

    def direction(self, x: Tensor) -> Tensor:
        """The sign of the gradient of ln S by the input, divided by the channels' std."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise ValueError("ODIN moves the input along a gradient: it is for one tensor of real numbers, such as images")
        std = x.new_ones(1)
        if self.settings.std:
            if x.ndim < 2 or x.shape[1] != len(self.settings.std):
                raise ValueError(f"std has {len(self.settings.std)} channels for inputs {list(x.shape)}, whose axis 1 they are")
            std = x.new_tensor(self.settings.std).reshape(-1, *[1] * (x.ndim - 2))
        with torch.enable_grad():
            leaf = x.detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.log_maximum(leaf).sum(), leaf)
        return slope.sign() / std
