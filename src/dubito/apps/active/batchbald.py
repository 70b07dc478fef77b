"""BatchBALD: a batch of labels that tells most of the weights together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.apps.active.acquisition import Choice, check_finite
from dubito.apps.active.joint import GIGABYTE, Outcomes, Spread, greedy
from dubito.apps.active.view import Functions, View
from dubito.model.likelihoods import entropy
from dubito.tensors.checks import at_least, positive, require
from dubito.tensors.randomness import fresh_generator


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
        require(
            at.values.shape[0] > 1,
            "BatchBALD needs draws that disagree, but this posterior is one function: use 'entropy' or 'margin'",
        )
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
