"""The distance to the nearest familiar inputs in the space of features."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito._moved import renamed_fields
from dubito.apps.network import Network, average_over, examples, last_linear, networks, posterior_of
from dubito.apps.ood.detector import Given, required
from dubito.evaluation.reservoir import Reservoir
from dubito.model import Model

PAIRS = 2**24  # distances that are held in memory at once


@renamed_fields(normalised="normalized")
@dataclass(frozen=True)
class Neighbours:
    r"""The distance of features to the k-th nearest of familiar inputs (Sun et al. 2022), all scaled to length 1 if `normalized`.

    Features are the input of `layer`, by default that of the last linear layer to run. Labels are not used. `most` keeps a random part
    of the data, which are held in memory. Each of several networks has neighbours of its own, and the distances are averaged.

    >>> x = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]])
    >>> score = Neighbours(k=2).fit(torch.nn.Linear(2, 2), (x, torch.zeros(3, dtype=torch.long)))
    >>> score(torch.tensor([[5.0, 0.0], [-1.0, 0.0]]))                # two lie in its direction; none in the other one's
    tensor([0., 2.])
    """

    k: int = 50
    normalized: bool = True
    most: int | None = None
    layer: str | None = None
    draws: int = 10  # networks at most, where the posterior is draws
    seed: int = 0

    def __post_init__(self):
        if self.k < 1 or (self.most is not None and self.most < self.k):
            raise ValueError(f"there are k >= 1 neighbours, and `most` is no less; got k={self.k}, most={self.most}")

    def fit(self, posterior: Given, data: Any = None) -> NeighboursScore:
        """Keep the features of familiar data."""
        posterior = posterior_of(posterior)
        required(data, "Neighbours", "best those it was trained on")
        found, layer = networks(posterior, draws=self.draws), self.layer
        kept = Reservoir(self.most, seed=self.seed)
        with closing(examples(posterior.model, data)) as batches:
            for x, _ in batches:
                layer = name = last_linear(found[0], x) if layer is None else layer
                with torch.no_grad():
                    phis = [one.features(x, name)[0].flatten(0, -2) for one in found]
                    kept.add(*(self.scaled(phi) for phi in phis))
        if layer is None or not kept.count:
            raise ValueError("there is no data: the loader gave no batch")
        if kept.count < self.k:
            raise ValueError(f"{kept.count} familiar inputs have no {self.k}-th nearest: give more of them, or a smaller k")
        banks = kept.rows()
        if not all(bool(bank.isfinite().all()) for bank in banks):
            raise ValueError("the features are not finite for all of the data: look for inputs or weights that are not")
        return NeighboursScore(posterior.model, found, layer, banks, self)

    def scaled(self, phi: Tensor) -> Tensor:
        """Features of length 1, if asked for."""
        return F.normalize(phi, dim=-1) if self.normalized else phi


@dataclass(frozen=True)
class NeighboursScore:
    """The distance of inputs to their k-th neighbour, [B, *D]."""

    model: Model
    networks: tuple[Network, ...]
    layer: str
    banks: tuple[Tensor, ...]  # [N, d] for each network
    settings: Neighbours

    def __call__(self, x: Any) -> Tensor:
        x = self.networks[0].ready(x)

        def distance(one: Network, i: int) -> Tensor:
            """The distances in the feature space of one network."""
            phi = self.settings.scaled(one.features(x, self.layer)[0])
            return kth_distance(phi.reshape(-1, phi.shape[-1]), self.banks[i], self.settings.k).reshape(phi.shape[:-1])

        with torch.no_grad():
            return average_over(self.networks, distance)


def kth_distance(points: Tensor, bank: Tensor, k: int) -> Tensor:
    """The distance of points [B, d] to their k-th nearest of a bank [N, d], in bounded memory: [B].

    Who is nearest is found by products of matrices, around the middle of the bank, since far from the origin they would cancel; that
    distance is then computed without them.

    >>> kth_distance(torch.tensor([[0.0]]), torch.tensor([[3.0], [1.0], [-2.0]]), 2)
    tensor([2.])
    """
    centre = bank.mean(0)
    bank, points = bank - centre, points - centre
    squares = bank.square().sum(-1)
    parts = []
    for part in points.split(max(1, PAIRS // len(bank))):
        nearest = torch.topk(squares - 2 * part @ bank.mT, k, dim=-1, largest=False).indices
        found = torch.linalg.vector_norm(part.unsqueeze(1) - bank[nearest[:, -1:]], dim=-1)
        parts.append(found.squeeze(1))
    return torch.cat(parts) if parts else points.new_zeros(0)
