r"""BatchBALD: the batch of labels with the largest :math:`I[y_1, \dots, y_k; \theta]`, built up one label at a time.

`Outcomes` is for classes, `Spread` for numbers. Both know what has been taken so far, and give the gain of each candidate beyond it,
:math:`I[y_i; \theta \mid y_1, \dots, y_j]`. Given the weights labels are independent, so this gain can only shrink as more is taken: an
earlier gain bounds a later one, and `greedy` computes only those that can still be the largest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dubito.apps.active.view import Choice, Functions, View, check_finite
from dubito.model.likelihoods import entropy
from dubito.tensors.checks import at_least, positive, require
from dubito.tensors.randomness import fresh_generator

GIGABYTE = 2**30
FIRST = 64  # candidates of the first chunk; most often the largest gain is among them


class Joint(Protocol):
    """What has been taken so far."""

    def gains(self, rows: Tensor) -> Tensor:
        """What each of some candidates would add, [n]."""
        ...

    def take(self, at: Tensor, noise: Tensor | None) -> None:
        """Take one more: the functions' values there, [S, C], and the noise, [C]."""
        ...

    @property
    def chunk(self) -> int:
        """How many candidates the memory allows at a time."""
        ...


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
        one = 3 * len(self.configurations) * self.probs.shape[-1] * self.probs.element_size()
        return max(1, int(self.memory * GIGABYTE / 4 / one))

    def gains(self, rows: Tensor) -> Tensor:
        """What each of some candidates would add, [n]."""
        part = self.probs[rows]  # [n, S, C]
        n, draws, width = part.shape
        given = self.shares @ part.transpose(0, 1).reshape(draws, -1)  # [M, n C]
        left = (self.configurations @ torch.special.entr(given)).reshape(n, width).sum(-1)
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
        part = self.scaled[rows]
        inner = part.mT @ (self.rest @ part)  # [n, C, C]
        eye = torch.eye(inner.shape[-1], dtype=inner.dtype, device=inner.device)
        return 0.5 * torch.linalg.slogdet(eye + inner).logabsdet + self.of_noise[rows]

    def take(self, at: Tensor, noise: Tensor | None) -> None:
        """Take one more: the functions' values there, [S, C], and the noise, [C]."""
        assert noise is not None
        a = self._deviations(at.unsqueeze(0), noise.unsqueeze(0))[0]  # [S, C]
        pa = self.rest @ a
        eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        self.rest = self.rest - pa @ torch.linalg.solve(eye + a.mT @ pa, pa.mT)


def greedy(joint: Joint, at: Functions, bounds: Tensor, k: int, generator: torch.Generator) -> Choice:
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
        for part in view.functions(least=self.least):
            kept.add(part)
        at, rows, singles = kept.all()
        require(len(at.values) > 1, "BatchBALD needs draws that disagree, and this posterior is one function: use 'entropy'")
        joint = self._joint(at, generator)
        if len(view.pending):
            for part in view.functions(view.pending.sort().values, least=self.least):
                for i in range(part.values.shape[1]):
                    joint.take(part.values[:, i], None if part.noise is None else part.noise[i])
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
        one = at.values.element_size() * at.values.shape[0] * at.values.shape[2]
        most = max(self.least, int(self.memory * GIGABYTE / 2 / one))
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
