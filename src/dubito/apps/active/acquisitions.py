"""Acquisition functions by name, and those that score single inputs: `Measured`, `Random`, `EPIG`, and with noise `Randomized`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor

from dubito.apps.active.batchbald import BatchBALD
from dubito.apps.active.view import Acquisition, Choice, Functions, Scored, View, best, check_finite, expected_log_noise
from dubito.evaluation import measures
from dubito.evaluation.measures import MEASURES
from dubito.model.likelihoods import MultiTask, average, entropy
from dubito.posteriors.predictive import LatentMixture, Predictive, StudentT
from dubito.tensors.checks import at_least, one_of, require
from dubito.tensors.randomness import generator as seeded


def bald(p: Predictive) -> Tensor:
    r"""What a label tells of the weights (Houlsby et al. 2011): :math:`I[y; \theta] = H[y] - E_\theta H[y \mid \theta]` in nats.

    Of classes it is `measures.mutual_information`. Of numbers it is that of a Gaussian with the predictive's variance, summed over
    the outputs: :math:`\frac12 (\ln \mathrm{Var}[y] - E_\theta \ln \sigma_\theta^2)`, exact if the predictive is Gaussian. Of several
    tasks it is the sum over the tasks.

    >>> import dubito
    >>> p = LatentMixture(dubito.Gaussian(scale=1.0), torch.zeros(1, 1, 1), cov=torch.full((1, 1, 1), 3.0))
    >>> bald(p)                                               # ln(4 / 1) / 2
    tensor([0.6931])
    """
    if isinstance(p, LatentMixture) and isinstance(p.likelihood, MultiTask):
        return torch.stack([bald(p.task(name)) for name in p.likelihood.tasks]).sum(0)
    if p.likelihood.discrete:
        return measures.mutual_information(p)
    if isinstance(p, StudentT):  # in units of a noise whose mean may be infinite
        return 0.5 * torch.log1p(p.spread[0]).sum(-1)
    # the noise differs between draws: the mean of its entropy, not the entropy of its mean
    noise = expected_log_noise(p) if isinstance(p, LatentMixture) else p.uncertainty.aleatoric.log()
    return 0.5 * (p.uncertainty.total.log() - noise).clamp_min(0).sum(-1)


def mean_std(p: Predictive) -> Tensor:
    r"""Mean standard deviation of the class probabilities over draws, :math:`\frac1C \sum_c \sqrt{\mathrm{Var}_s[p_{sc}]}`.

    >>> from dubito import Categorical
    >>> p = LatentMixture(Categorical(), torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]]]).log())  # two draws that disagree
    >>> mean_std(p)
    tensor([0.4000])
    """
    if not p.likelihood.discrete:
        return p.uncertainty.epistemic.sqrt().mean(-1)
    if not isinstance(p, LatentMixture):
        raise ValueError(f"mean_std needs draws of the network's output, which a {type(p).__name__} does not have")
    return average((p.probs - p.mean) ** 2, p.draw_weights).sqrt().mean(-1)


# the names that the literature has for them, and those of all measures
SCORES: dict[str, Callable[[Predictive], Tensor]] = {
    "entropy": measures.predictive_entropy,
    "bald": bald,
    "variation_ratio": measures.variation_ratio,
    "margin": measures.margin,
    "least_confidence": measures.one_minus_max,
    "mean_std": mean_std,
    "variance": measures.total_variance,
    **measures.MEASURES,
}


@dataclass(frozen=True)
class Measured:
    """Label first what a measure of uncertainty is largest for. Dense outputs count with the mean over their positions.

    `score` is a name ("entropy", "bald", "variation_ratio", "margin", "least_confidence", "mean_std", "variance", or any of
    `dubito.measures`), or a function of a predictive, `Predictive -> [B]`.

    >>> import dubito
    >>> from dubito.apps.active import Pool, View
    >>> model = dubito.Model(torch.nn.Linear(1, 2), dubito.Categorical())
    >>> posterior = dubito.posteriors.Gaussian.diagonal(model, {"weight": torch.zeros(2, 1), "bias": torch.zeros(2)},
    ...                                                 {"weight": torch.ones(2, 1), "bias": torch.ones(2)})
    >>> view = View(posterior, Pool(torch.tensor([[0.0], [5.0], [1.0]])), torch.arange(3))
    >>> Measured("bald").choose(view, 2, torch.Generator()).positions               # the furthest is known least
    tensor([1, 2])
    """

    score: str | Callable[[Predictive], Tensor] = "bald"

    def __post_init__(self):
        known = not isinstance(self.score, str) or self.score in SCORES
        require(known, f"there is no score {self.score!r}; there are {', '.join(SCORES)}")

    def scores(self, view: View, generator: torch.Generator) -> Tensor:
        """The measure of every candidate, [N]."""
        function = SCORES[self.score] if isinstance(self.score, str) else self.score
        parts = []
        for p in view.predictions():
            values, n = function(p), p.means.shape[1]
            require(values.shape[:1] == (n,), f"a score must give one number for each input, [{n}]; got {list(values.shape)}")
            parts.append(values.flatten(1).mean(1) if values.ndim > 1 else values)
        return torch.cat(parts)

    def choose(self, view: View, k: int, generator: torch.Generator) -> Choice:
        """The k candidates with the largest scores."""
        return best(self.scores(view, generator), k, generator)


@dataclass(frozen=True)
class Random:
    """Label anything: what the others are compared with. It looks at no prediction."""

    def scores(self, view: View, generator: torch.Generator) -> Tensor:
        """Uniform random numbers, [N]."""
        return torch.rand(len(view), generator=generator)

    def choose(self, view: View, k: int, generator: torch.Generator) -> Choice:
        """The k candidates with the largest scores."""
        return best(self.scores(view, generator), k, generator)


@dataclass(frozen=True)
class Randomized:
    r"""Draw k candidates without replacement, with probabilities that grow with their scores (Kirsch et al. 2023).

    With :math:`\epsilon_i` standard Gumbel noise, the k largest of these are taken:

    - "power": :math:`\beta \ln s_i + \epsilon_i`, :math:`P(i) \propto s_i^\beta`; what scores 0 comes last.
    - "softmax": :math:`\beta s_i + \epsilon_i`, :math:`P(i) \propto e^{\beta s_i}`.
    - "softrank": :math:`-\beta \ln r_i + \epsilon_i` with the ranks 1, 2, ..., :math:`P(i) \propto r_i^{-\beta}`.

    The best k of a score may be k copies of one input; these are not, at no cost. `coldness` is :math:`\beta`: 0 is random, infinity
    the k best.

    >>> power = Randomized(Measured("bald"), "power", coldness=2.0)
    >>> noisy = power.perturbed(torch.tensor([0.0, 1.0, 2.0]).repeat(10_000, 1), torch.Generator().manual_seed(0))
    >>> torch.bincount(noisy.argmax(1), minlength=3).div(10_000).round(decimals=1)       # in proportion to 0, 1 and 4
    tensor([0.0000, 0.2000, 0.8000])
    """

    acquisition: Scored = Measured("bald")
    how: Literal["power", "softmax", "softrank"] = "power"
    coldness: float = 1.0

    def __post_init__(self):
        one_of(("power", "softmax", "softrank"), how=self.how)
        at_least(0, coldness=self.coldness)
        if not hasattr(self.acquisition, "scores"):
            raise TypeError(f"Randomized needs scores of single inputs, such as Measured('bald'); got {self.acquisition!r}")

    def perturbed(self, scores: Tensor, generator: torch.Generator) -> Tensor:
        """Scores [..., N] after the noise."""
        values = scores.double()
        if self.coldness == math.inf:  # no noise is left, and the products below would all be infinite: ties, in random order
            return values
        if self.how == "power":
            values = values.clamp_min(0).log()
        elif self.how == "softrank":
            values = -(values.argsort(-1, descending=True).argsort(-1) + 1).double().log()
        exponential = torch.empty(scores.shape, dtype=torch.float64).exponential_(generator=generator)
        if self.coldness:  # 0 times the logarithm of 0 is to be 0
            return self.coldness * values - exponential.log().to(values.device)
        return -exponential.log().to(values.device)

    def scores(self, view: View, generator: torch.Generator) -> Tensor:
        """Scores of the candidates after the noise, [N]."""
        return self.perturbed(self.acquisition.scores(view, generator), generator)

    def choose(self, view: View, k: int, generator: torch.Generator) -> Choice:
        """The k candidates with the largest scores after the noise, and their scores without it."""
        plain = self.acquisition.scores(view, generator)
        check_finite(plain)  # ranks of NaN are numbers like all others
        chosen = best(self.perturbed(plain, generator), k, generator).positions
        return Choice(chosen, plain[chosen])


CHUNK = 2**25  # numbers of joint probabilities at a time


@dataclass(frozen=True)
class EPIG:
    r"""How much a label at x is expected to tell of the answers at the inputs that matter (Bickford Smith et al. 2023):

    .. math:: \mathrm{EPIG}(x) = E_{x_*} I[y; y_* \mid x, x_*], \qquad
        p(y, y_* \mid x, x_*) = E_\theta\, p_\theta(y \mid x)\, p_\theta(y_* \mid x_*)

    BALD also wants to know of weights that no prediction depends on, and so of odd inputs. `targets` are the inputs that matter, or how
    many to draw from the pool. Numbers are taken for jointly Gaussian, with the covariance that the draws have.

    >>> import dubito
    >>> from dubito.apps.active import Pool
    >>> model = dubito.Model(torch.nn.Linear(1, 1, bias=False), dubito.Gaussian(scale=1.0))
    >>> posterior = dubito.posteriors.Gaussian.diagonal(model, {"weight": torch.zeros(1, 1)}, {"weight": torch.ones(1, 1)})
    >>> view = View(posterior, Pool(torch.tensor([[0.0], [1.0], [-3.0]])), torch.arange(3))
    >>> EPIG(torch.tensor([[1.0]])).scores(view, torch.Generator()).argsort()         # the steepest tells most of the slope
    tensor([0, 1, 2])
    """

    targets: Any = 100  # inputs, or how many to draw from the pool
    least: int = 100  # draws of functions, where the posterior predicts without

    def __post_init__(self):
        require(not isinstance(self.targets, int) or self.targets > 0, f"targets must be at least 1; got {self.targets}")

    def scores(self, view: View, generator: torch.Generator) -> Tensor:
        """EPIG of every candidate, [N], in nats."""
        if isinstance(self.targets, int):
            # the same targets for every ask of a kind: the draw does not touch the order in which ties are taken
            source = seeded("cpu", view.seed, "targets")
            chosen = torch.randperm(len(view.pool), generator=source)[: self.targets].sort().values
            targets = Functions.join(list(view.functions(chosen, least=self.least)))
        else:
            targets = Functions.join(list(view.functions(x=self.targets, least=self.least)))
        return torch.cat([expected_gain(some, targets) for some in view.functions(least=self.least)])

    def choose(self, view: View, k: int, generator: torch.Generator) -> Choice:
        """The k candidates with the largest EPIG."""
        return best(self.scores(view, generator), k, generator)


def expected_gain(at: Functions, targets: Functions) -> Tensor:
    """The mean mutual information of y at each input and at the targets, [B], of the same draws of functions."""
    (draws, n, width), many = at.values.shape, targets.values.shape[1]
    if draws == 1:  # one function: nothing is told of others, and rounding shall not make a choice
        return 0 * at.values.sum((0, 2))
    size = max(1, CHUNK // (many * width * width))
    parts = []
    for start in range(0, n, size):
        part = at.at(slice(start, start + size))
        parts.append((_of_classes if at.noise is None else _of_numbers)(part, targets))
    return torch.cat(parts)


def _of_classes(at: Functions, targets: Functions) -> Tensor:
    draws, n, width = at.values.shape
    weighted = at.values * at.weights.reshape(-1, 1, 1)
    joint = weighted.reshape(draws, -1).mT @ targets.values.reshape(draws, -1)  # [B C, T C]
    both = torch.special.entr(joint).reshape(n, width, -1).sum((1, 2)) / targets.values.shape[1]
    mean = weighted.sum(0)
    beyond = entropy(torch.tensordot(targets.weights, targets.values, dims=1)).mean()
    return (entropy(mean) + beyond - both).clamp_min(0)


def _of_numbers(at: Functions, targets: Functions) -> Tensor:
    assert at.noise is not None
    assert targets.noise is not None
    weights = at.weights.double()

    def _center(values: Tensor) -> Tensor:
        values = values.double()
        return values - torch.tensordot(weights, values, dims=1)

    def _root(values: Tensor, noise: Tensor) -> Tensor:
        cov = torch.einsum("s,sbc,sbd->bcd", weights, values, values) + torch.diag_embed(noise.double())
        return torch.linalg.cholesky(cov)

    here, there = _center(at.values), _center(targets.values)
    a = torch.linalg.solve_triangular(_root(here, at.noise), here.permute(1, 2, 0), upper=False)  # [B, C, S], white
    b = torch.linalg.solve_triangular(_root(there, targets.noise), there.permute(1, 2, 0), upper=False)
    cross = torch.einsum("s,bcs,tds->btcd", weights, a, b)  # correlations
    eye = torch.eye(cross.shape[-1], dtype=cross.dtype, device=cross.device)
    return -0.5 * torch.linalg.slogdet(eye - cross @ cross.mT).logabsdet.mean(1).to(at.values)


ACQUISITIONS: dict[str, Callable[..., Acquisition]] = {
    "entropy": partial(Measured, "entropy"),
    "bald": partial(Measured, "bald"),
    "variation_ratio": partial(Measured, "variation_ratio"),
    "margin": partial(Measured, "margin"),
    "mean_std": partial(Measured, "mean_std"),
    "least_confidence": partial(Measured, "least_confidence"),
    "variance": partial(Measured, "variance"),
    "random": Random,
    "epig": EPIG,
    "batchbald": BatchBALD,
    "power_bald": partial(Randomized, Measured("bald"), "power"),
    "softmax_bald": partial(Randomized, Measured("bald"), "softmax"),
    "softrank_bald": partial(Randomized, Measured("bald"), "softrank"),
}


def acquisition(given: str | Acquisition | Callable[[Predictive], Tensor]) -> Acquisition:
    """An acquisition function from its name, from the name of any measure, or from a score `Predictive -> [B]` of one's own.

    >>> acquisition("margin")
    Measured(score='margin')
    """
    if isinstance(given, str):
        if given in ACQUISITIONS:
            return ACQUISITIONS[given]()
        if given in MEASURES:
            return Measured(given)
        raise ValueError(f"there is no acquisition function {given!r}; there are {', '.join([*ACQUISITIONS, *MEASURES])}")
    if isinstance(given, type):
        raise TypeError(f"an acquisition function is an object: write {given.__name__}() in the place of {given.__name__}")
    if hasattr(given, "choose"):
        return cast(Acquisition, given)
    if callable(given):
        return Measured(given)
    raise TypeError(f"an acquisition function is a name, an object with `choose` or a function of a predictive; got {given!r}")
