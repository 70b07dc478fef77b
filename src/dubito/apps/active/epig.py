"""Expected predictive information gain: what a label tells of other predictions rather than of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dubito.apps.active.acquisition import Choice, best
from dubito.apps.active.view import Functions, View
from dubito.model.likelihoods import entropy
from dubito.tensors.checks import require
from dubito.tensors.randomness import generator as seeded

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
