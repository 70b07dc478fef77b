r"""Acquisition functions, by name in `ACQUISITIONS`: which inputs are worth a label.

`Measured`, `Random` and `EPIG` score single inputs, and `Randomized` adds noise to such scores. `BatchBALD` builds a batch with the
largest :math:`I[y_1, \dots, y_k; \theta]`, one label at a time: `Outcomes` is for classes, `Spread` for numbers. Both know what has
been taken so far, and give the gain of each candidate beyond it, :math:`I[y_i; \theta \mid y_1, \dots, y_j]`. Given the weights labels
are independent, so this gain can only shrink as more is taken: an earlier gain bounds a later one, and `greedy` computes only those
that can still be the largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor

from dubito.apps.active.pool import Acquisition, Choice, Functions, Scored, View, best, check_finite, expected_log_noise
from dubito.evaluation import measures
from dubito.evaluation.measures import MEASURES
from dubito.model.likelihoods import average, entropy
from dubito.posteriors.predictive import Predictive, StudentT
from dubito.tensors.checks import at_least, one_of, positive, require
from dubito.tensors.randomness import fresh_generator
from dubito.tensors.randomness import generator as seeded


def bald(p: Predictive) -> Tensor:
    r"""What a label tells of the weights (Houlsby et al. 2011): :math:`I[y; \theta] = H[y] - E_\theta H[y \mid \theta]` in nats.

    Of classes it is `measures.mutual_information`. Of numbers it is that of a Gaussian with the predictive's variance, summed over
    the outputs: :math:`\frac12 (\ln \mathrm{Var}[y] - E_\theta \ln \sigma_\theta^2)`, exact if the predictive is Gaussian. Of several
    tasks it is the sum over the tasks.

    >>> import dubito
    >>> from dubito.posteriors.predictive import LatentMixture
    >>> p = LatentMixture(dubito.Gaussian(scale=1.0), torch.zeros(1, 1, 1), cov=torch.full((1, 1, 1), 3.0))
    >>> bald(p)                                               # ln(4 / 1) / 2
    tensor([0.6931])
    """
    if tasks := p.likelihood.task_names:
        return torch.stack([bald(p.task(name)) for name in tasks]).sum(0)
    if p.likelihood.discrete:
        return measures.mutual_information(p)
    if isinstance(p, StudentT):  # in units of a noise whose mean may be infinite
        return 0.5 * torch.log1p(p.spread[0]).sum(-1)
    # the noise differs between draws: the mean of its entropy, not the entropy of its mean
    noise = p.uncertainty.aleatoric.log() if p.mixture is None else expected_log_noise(p.mixture)
    return 0.5 * (p.uncertainty.total.log() - noise).clamp_min(0).sum(-1)


def mean_std(p: Predictive) -> Tensor:
    r"""Mean standard deviation of the class probabilities over draws, :math:`\frac1C \sum_c \sqrt{\mathrm{Var}_s[p_{sc}]}`.

    >>> from dubito import Categorical
    >>> from dubito.posteriors.predictive import LatentMixture
    >>> p = LatentMixture(Categorical(), torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]]]).log())  # two draws that disagree
    >>> mean_std(p)
    tensor([0.4000])
    """
    if not p.likelihood.discrete:
        return p.uncertainty.epistemic.sqrt().mean(-1)
    if p.mixture is None:
        raise ValueError(f"mean_std needs draws of the network's output, which a {type(p).__name__} does not have")
    return average((p.mixture.probs - p.mean) ** 2, p.mixture.draw_weights).sqrt().mean(-1)


NAMES: dict[str, Callable[[Predictive], Tensor]] = {  # as the literature has them
    "entropy": measures.predictive_entropy,
    "bald": bald,
    "variation_ratio": measures.variation_ratio,
    "margin": measures.margin,
    "mean_std": mean_std,
    "least_confidence": measures.one_minus_max,
    "variance": measures.total_variance,
}
SCORES = NAMES | MEASURES


@dataclass(frozen=True)
class Measured(Scored):
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
        known = callable(self.score) or self.score in SCORES
        require(known, f"there is no score {self.score!r}; there are {', '.join(SCORES)}")

    def scores(self, view: View, generator: torch.Generator) -> Tensor:
        """The measure of every candidate, [N]."""
        function = self.score if callable(self.score) else SCORES[self.score]
        parts = []
        for p in view.predictions():
            values, n = function(p), p.means.shape[1]
            require(values.shape[:1] == (n,), f"a score must give one number for each input, [{n}]; got {list(values.shape)}")
            parts.append(values.flatten(1).mean(1) if values.ndim > 1 else values)
        return torch.cat(parts)


@dataclass(frozen=True)
class Random(Scored):
    """Label anything: what the others are compared with. It looks at no prediction."""

    def scores(self, view: View, generator: torch.Generator) -> Tensor:
        """Uniform random numbers, [N]."""
        return torch.rand(len(view), generator=generator)


@dataclass(frozen=True)
class Randomized(Scored):
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
class EPIG(Scored):
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


def expected_gain(at: Functions, targets: Functions) -> Tensor:
    """The mean mutual information of y at each input and at the targets, [B], of the same draws of functions."""
    (draws, n, width), many = at.values.shape, targets.values.shape[1]
    if draws == 1:  # one function: nothing is told of others, and rounding shall not make a choice
        return 0 * at.values.sum((0, 2))
    size = max(1, CHUNK // (many * width * width))
    parts = []
    for start in range(0, n, size):
        batch = at.at(slice(start, start + size))
        parts.append((_of_classes if at.noise is None else _of_numbers)(batch, targets))
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

    candidates, wanted = _center(at.values), _center(targets.values)
    a = torch.linalg.solve_triangular(_root(candidates, at.noise), candidates.permute(1, 2, 0), upper=False)  # [B, C, S], white
    b = torch.linalg.solve_triangular(_root(wanted, targets.noise), wanted.permute(1, 2, 0), upper=False)
    cross = torch.einsum("s,bcs,tds->btcd", weights, a, b)  # correlations
    eye = torch.eye(cross.shape[-1], dtype=cross.dtype, device=cross.device)
    return -0.5 * torch.linalg.slogdet(eye - cross @ cross.mT).logabsdet.mean(1).to(at.values)


GIGABYTE = 2**30
FIRST = 64  # candidates of the first chunk; most often the largest gain is among them


class Outcomes:
    r"""Classes: the joint distribution of the labels taken so far, as configurations c of probability q(c), with the weights that the
    draws have after seeing them, :math:`r_{cs} \propto w_s\, p_s(c)`. A candidate adds

    .. math:: \sum_c q(c)\, H\Big[\sum_s r_{cs}\, p_s(y_i)\Big] - \sum_s w_s H[p_s(y_i)].

    All configurations are kept as long as there are at most `most`: then this is exact. After that each is continued by every class and
    `most` of these are drawn, by systematic sampling, which leaves every expectation what it is.
    """

    def __init__(self, probs: Tensor, weights: Tensor, *, most: int, generator: torch.Generator, memory: float):
        self.probs, self.weights, self.most, self.generator = probs, weights, most, generator  # [N, S, C], [S]
        self.known = torch.tensordot(entropy(probs), weights, dims=1)  # [N]: entropy that stays
        self.configurations, self.shares = probs.new_ones(1), weights.unsqueeze(0)  # q [M], r [M, S]
        self.memory, self.exact = memory, True

    @property
    def chunk(self) -> int:
        """How many candidates the memory allows at a time."""
        size = 3 * len(self.configurations) * self.probs.shape[-1] * self.probs.element_size()
        return max(1, int(self.memory * GIGABYTE / 4 / size))

    def gains(self, rows: Tensor) -> Tensor:
        """What each of some candidates would add, [n]."""
        probs = self.probs[rows]  # [n, S, C]
        n, draws, width = probs.shape
        conditional = self.shares @ probs.transpose(0, 1).reshape(draws, -1)  # [M, n C]
        left = (self.configurations @ torch.special.entr(conditional)).reshape(n, width).sum(-1)
        return left - self.known[rows]

    def take(self, at: Tensor, noise: Tensor | None = None) -> None:
        """Take one more: the class probabilities there, [S, C]."""
        reached = self.shares @ at  # [M, C]: p(y | c)
        chances = (self.configurations.unsqueeze(1) * reached).flatten()  # [M C]
        if len(chances) <= self.most:
            which = chances.nonzero().squeeze(1)
            self.configurations = chances[which] / chances[which].sum()
        else:
            which = systematic(chances, self.most, self.generator)
            self.configurations, self.exact = chances.new_full((self.most,), 1 / self.most), False
        before, label = which // at.shape[-1], which % at.shape[-1]
        shares = self.shares[before] * at.mT[label]
        self.shares = shares / shares.sum(1, keepdim=True)


class Spread:
    r"""Numbers, taken for jointly Gaussian: with the draws' deviations in units of the noise, :math:`A_i` of [S, C] for each candidate
    and :math:`A_B` of all that have been taken, a candidate adds

    .. math:: \tfrac12 \ln \det (I + A_i^T P A_i), \qquad P = (I + A_B A_B^T)^{-1}.

    Where the draws have noises of their own, the unit is their mean variance, and a label also tells of the noise: :math:`\tfrac12 (\ln
    E_\theta \sigma_\theta^2 - E_\theta \ln \sigma_\theta^2)` for each output.
    """

    def __init__(self, values: Tensor, noise: Tensor, weights: Tensor, *, memory: float, log_noise: Tensor | None = None):
        self.weights, self.memory = weights.double(), memory
        log_noise = noise.log() if log_noise is None else log_noise
        self.of_noise = 0.5 * (noise.log() - log_noise).double().clamp_min(0).sum(-1)  # [N]
        self.scaled = self._deviations(values, noise)  # [N, S, C]
        self.rest = torch.eye(values.shape[1], dtype=torch.float64, device=values.device)  # P

    def _deviations(self, values: Tensor, noise: Tensor) -> Tensor:
        values = values.double()
        deviations = values - (self.weights.reshape(-1, 1) * values).sum(-2, keepdim=True)
        return deviations * self.weights.sqrt().reshape(-1, 1) / noise.double().sqrt().unsqueeze(-2)

    @property
    def chunk(self) -> int:
        """How many candidates the memory allows at a time."""
        return max(1, int(self.memory * GIGABYTE / 4 / (24 * self.scaled.shape[1] * self.scaled.shape[2])))

    def gains(self, rows: Tensor) -> Tensor:
        """What each of some candidates would add, [n]."""
        scaled = self.scaled[rows]
        inner = scaled.mT @ (self.rest @ scaled)  # [n, C, C]
        eye = torch.eye(inner.shape[-1], dtype=inner.dtype, device=inner.device)
        return 0.5 * torch.linalg.slogdet(eye + inner).logabsdet + self.of_noise[rows]

    def take(self, at: Tensor, noise: Tensor | None) -> None:
        """Take one more: the functions' values there, [S, C], and the noise, [C]."""
        assert noise is not None
        a = self._deviations(at.unsqueeze(0), noise.unsqueeze(0))[0]  # [S, C]
        pa = self.rest @ a
        eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        self.rest = self.rest - pa @ torch.linalg.solve(eye + a.mT @ pa, pa.mT)


def greedy(joint: Outcomes | Spread, at: Functions, bounds: Tensor, k: int, generator: torch.Generator) -> Choice:
    """k candidates, each with the largest gain beyond those before it. `bounds` are at least the gains, [N]."""
    n = len(bounds)
    shuffled = torch.randperm(n, generator=generator).to(bounds.device)  # what is tied comes in random order
    bounds, chosen, gains = bounds.double().clone(), [], []
    for _ in range(k):
        order = shuffled[bounds[shuffled].argsort(descending=True, stable=True)]
        top, gain, start, size = -1, -torch.inf, 0, FIRST
        while start < n and (top < 0 or float(bounds[order[start]]) > gain):
            rows = order[start : start + min(size, joint.chunk)]
            rows = rows[bounds[rows] > -torch.inf]
            if not len(rows):
                break
            bounds[rows] = joint.gains(rows).double()
            value, where = bounds[rows].max(0)
            if float(value) > gain:
                gain, top = float(value), int(rows[where])
            start, size = start + len(rows), size * 2
        chosen.append(top)
        gains.append(gain)
        bounds[top] = -torch.inf
        joint.take(at.values[:, top], None if at.noise is None else at.noise[top])
    return Choice(torch.tensor(chosen), torch.tensor(gains))


def systematic(chances: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """n indices, each drawn as often as its chance says, to within one (systematic sampling).

    >>> systematic(torch.tensor([0.5, 0.0, 0.5]), 4, torch.Generator())
    tensor([0, 0, 2, 2])
    """
    ends = chances.double().cumsum(0)
    points = (torch.arange(n, device=chances.device) + float(torch.rand((), generator=generator))) / n * float(ends[-1])
    return torch.searchsorted(ends, points, right=True).clamp_max(len(chances) - 1)


@dataclass(frozen=True)
class BatchBALD:
    r"""The batch with the largest :math:`I[y_1, \dots, y_k; \theta]`, built greedily (Kirsch, van Amersfoort & Gal 2019).

    The first is that of BALD; each further one adds most to what the others tell, so that no two are alike. This information being
    submodular, the greedy batch is worth at least 1 - 1/e of the best. All candidates must be seen by the same functions, which is so
    for every posterior here: masks are consistent, and a Gaussian gives draws of linear functions.

    Of classes the joint entropy is exact while `configurations` hold all joint outcomes (10,000: four labels of ten classes and the
    fifth's gain), and from then on estimated from so many, drawn. Numbers are taken for jointly Gaussian. What is pending counts
    as taken.

    Memory is bounded: of the candidates, those with the largest BALD are kept that fit into `memory` gigabytes. No gain is larger than
    its BALD, so that the choice is the same unless a gain falls below the BALD of one that was left out.

    >>> import dubito
    >>> from dubito.apps.active import Pool, View
    >>> model = dubito.Model(torch.nn.Linear(2, 2, bias=False), dubito.Categorical())
    >>> posterior = dubito.posteriors.Gaussian.diagonal(model, {"weight": torch.zeros(2, 2)}, {"weight": torch.ones(2, 2)})
    >>> x = torch.tensor([[5.0, 0.0], [5.0, 0.0], [0.0, 4.0]])                      # the first two are the same
    >>> sorted(BatchBALD().choose(View(posterior, Pool(x), torch.arange(3)), 2, torch.Generator()).positions.tolist())[1]
    2
    """

    configurations: int = 10_000
    memory: float = 1.0  # gigabytes
    least: int = 100  # draws of functions, where the posterior predicts without

    def __post_init__(self):
        at_least(1, configurations=self.configurations)
        at_least(2, least=self.least)
        positive(memory=self.memory)

    def choose(self, view: View, k: int, generator: torch.Generator) -> Choice:
        """The greedy batch of k candidates."""
        kept = _Kept(self.memory, k)
        for functions in view.functions(least=self.least):
            kept.add(functions)
        at, rows, singles = kept.all()
        require(len(at.values) > 1, "BatchBALD needs draws that disagree, and this posterior is one function: use 'entropy'")
        joint = self._joint(at, generator)
        if len(view.pending):
            for functions in view.functions(view.pending.sort().values, least=self.least):
                for i in range(functions.values.shape[1]):
                    joint.take(functions.values[:, i], None if functions.noise is None else functions.noise[i])
        choice = greedy(joint, at, singles, k, generator)
        return Choice(rows[choice.positions.to(rows.device)], choice.scores)

    def _joint(self, at: Functions, generator: torch.Generator) -> Outcomes | Spread:
        values = at.values.transpose(0, 1)  # [N, S, C]
        if at.noise is not None:
            return Spread(values, at.noise, at.weights, log_noise=at.log_noise, memory=self.memory)
        return Outcomes(values, at.weights, most=self.configurations, generator=generator, memory=self.memory)


def batchbald(
    probs: Tensor,
    k: int,
    *,
    weights: Tensor | None = None,
    configurations: int = 10_000,
    memory: float = 1.0,
    generator: torch.Generator | None = None,
) -> Choice:
    """The greedy batch from class probabilities of S functions at N inputs, [S, N, C]: positions, and what each adds in nats.

    >>> probs = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.8, 0.2]], [[0.0, 1.0], [0.0, 1.0], [0.6, 0.4]]])   # inputs 0 and 1 are alike
    >>> batchbald(probs, 2).scores                                              # the first tells which function it is
    tensor([0.6931, 0.0000])
    """
    fits = probs.ndim == 3 and 0 < k <= probs.shape[1]
    require(fits, f"probs must be [S, N, C], and k from 1 to N; got {list(probs.shape)} and {k}")
    weights = probs.new_full((len(probs),), 1 / len(probs)) if weights is None else weights.to(probs)
    at = Functions(probs, weights, None)
    generator = fresh_generator() if generator is None else generator
    settings = BatchBALD(configurations, memory)
    return greedy(settings._joint(at, generator), at, _single(at), k, generator)


def _single(at: Functions) -> Tensor:
    """BALD of each input on its own, [B]."""
    if at.noise is None:
        total = entropy(torch.tensordot(at.weights, at.values, dims=1))
        gain = total - torch.tensordot(at.weights, entropy(at.values), dims=1)
    else:
        joint = Spread(at.values.transpose(0, 1), at.noise, at.weights, log_noise=at.log_noise, memory=1.0)
        gain = joint.gains(torch.arange(at.values.shape[1], device=at.values.device))
    check_finite(gain)
    return gain


class _Kept:
    """The candidates with the largest BALD, as many as there is memory for."""

    def __init__(self, memory: float, least: int):
        self.memory, self.least = memory, least
        self.parts: list[tuple[Functions, Tensor, Tensor]] = []  # functions, positions, BALD
        self.seen, self.count = 0, 0

    def add(self, at: Functions) -> None:
        """Some more candidates."""
        n = at.values.shape[1]
        rows = torch.arange(self.seen, self.seen + n, device=at.values.device)
        self.parts.append((at, rows, _single(at)))
        self.seen, self.count = self.seen + n, self.count + n
        size = at.values.element_size() * at.values.shape[0] * at.values.shape[2]
        most = max(self.least, int(self.memory * GIGABYTE / 2 / size))
        if self.count > 2 * most:
            self._reduce(most)

    def _reduce(self, most: int) -> None:
        at, rows, single = self.all()
        top = single.topk(min(most, len(single))).indices.sort().values
        self.parts, self.count = [(at.at(top), rows[top], single[top])], len(top)

    def all(self) -> tuple[Functions, Tensor, Tensor]:
        """Functions, positions and BALD of all that are kept."""
        at = Functions.join([functions for functions, _, _ in self.parts])
        return at, torch.cat([rows for _, rows, _ in self.parts]), torch.cat([single for _, _, single in self.parts])


ACQUISITIONS: dict[str, Callable[..., Acquisition]] = {
    **{name: partial(Measured, name) for name in NAMES},
    "random": Random,
    "epig": EPIG,
    "batchbald": BatchBALD,
    **{f"{how}_bald": partial(Randomized, Measured("bald"), how) for how in ("power", "softmax", "softrank")},
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
