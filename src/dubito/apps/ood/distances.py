"""Detectors that measure distances between features: to the classes (`Mahalanobis`), or to familiar inputs (`Neighbours`)."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito._moved import renamed_fields
from dubito.apps.network import Network, average_over, examples, last_linear, networks, posterior_of
from dubito.apps.ood.detectors import Given, require_data
from dubito.evaluation.reservoir import Reservoir
from dubito.model import Model
from dubito.model.likelihoods import Classes
from dubito.tensors.checks import at_least, between, require

PAIRS = 2**24  # distances that are held in memory at once
INFINITE = "the features are not finite for all of the data: look for inputs or weights that are not"


@dataclass(frozen=True)
class Mahalanobis:
    r"""The Mahalanobis distance of features to the nearest class (Lee et al. 2018),

    .. math:: \min_c\; (\phi - \mu_c)^T \Sigma^{-1} (\phi - \mu_c),

    with the classes' means and the covariance that they share. `relative` takes away the distance to a single Gaussian of all data
    (Ren et al. 2021), and with it what all inputs have in common. Features are the input of `layer`, by default that of the last
    linear layer to run. Without classes (regression, labels) there is one Gaussian.

    The covariance is shrunk towards a multiple of the identity, :math:`(1 - \rho) \Sigma + \rho\, \mathrm{tr}(\Sigma) / d\; I`; if no
    `shrinkage` is given, as much as is best for Gaussian data (Chen et al. 2010, "OAS"). Each of several networks has means and a
    covariance of its own, and the distances are averaged.

    >>> _ = torch.manual_seed(0)
    >>> x, y = torch.randn(1000, 2), torch.arange(1000) % 2
    >>> x[y == 1] += 8.0
    >>> score = Mahalanobis().fit(torch.nn.Linear(2, 2), (x, y))        # features are the inputs themselves
    >>> score(torch.tensor([[0.0, 0.0], [8.0, 8.0], [4.0, 4.0]])).round()        # 2 * 4^2 for variances of 1, here a little more
    tensor([ 0.,  0., 30.], dtype=torch.float64)
    """

    relative: bool = False
    shrinkage: float | None = None  # None: by the data
    layer: str | None = None
    draws: int = 10  # networks at most, where the posterior is draws

    def __post_init__(self):
        between(0, 1, include="both", shrinkage=self.shrinkage)

    def fit(self, posterior: Given, data: Any = None) -> MahalanobisScore:
        """Means and covariances of the features of familiar data (x, y)."""
        posterior = posterior_of(posterior)
        require_data(data, "Mahalanobis", "best those it was trained on, with their labels")
        classes = isinstance(posterior.model.likelihood, Classes)
        if self.relative and not classes:
            raise ValueError("relative distances compare classes with all data; without classes there is nothing to compare")
        reader = _Reader(networks(posterior, draws=self.draws), self.layer)
        sums = [_Sums() for _ in reader.networks]
        with closing(reader.read(data)) as batches:
            for outputs, y in batches:
                for total, (phi, f) in zip(sums, outputs, strict=True):
                    total.add(phi, _labels(posterior.model, f, y))
        clusters = tuple(total.clusters(self.shrinkage, relative=self.relative) for total in sums)
        return MahalanobisScore(posterior.model, reader.networks, reader.layer or "", clusters)


@dataclass
class _Reader:
    """Reads features: the input of a layer, by default of the linear one that runs last, in each of several networks."""

    networks: tuple[Network, ...]
    layer: str | None

    def read(self, data: Any) -> Generator[tuple[list[tuple[Tensor, Tensor]], Any]]:
        """For each batch of familiar data the features and outputs of each network, and the targets."""
        empty = True
        with closing(examples(self.networks[0].model, data)) as batches:
            for x, y in batches:
                self.layer, empty = self.layer or last_linear(self.networks[0], x), False
                with torch.no_grad():
                    outputs = [network.features(x, self.layer) for network in self.networks]
                yield outputs, y
        require(not empty, "there is no data: the loader gave no batch")


def _labels(model: Model, f: Tensor, y: Any) -> Tensor:
    """A class for every position, [B, *D]; -1 where there is none; 0 for all where there are no classes."""
    likelihood = model.likelihood
    if not isinstance(likelihood, Classes):
        return torch.zeros(f.shape[:-1], dtype=torch.long, device=f.device)
    if y is None:
        raise ValueError("Mahalanobis needs to know the classes of familiar inputs: give batches of (x, y)")
    likelihood.check(f, y)
    target = likelihood.target(y, f)
    return torch.where(target == likelihood.ignore_index, -1, target)


class _Sums:
    """Counts, sums and squares of features by class, in one pass and in float64."""

    def __init__(self):
        self.origin: Tensor | None = None  # near the mean: of squares of small numbers less is lost in the difference
        self.counts = self.totals = self.squares = torch.zeros(0)

    def add(self, phi: Tensor, labels: Tensor) -> None:
        """Take in features [..., d] and labels [...]; those below 0 are left out."""
        phi, labels = phi.detach().reshape(-1, phi.shape[-1]).double(), labels.reshape(-1)
        phi, labels = phi[labels >= 0], labels[labels >= 0]
        if not len(phi):
            return
        if self.origin is None:
            self.origin = phi.mean(0)
            self.counts, self.totals = phi.new_zeros(0), phi.new_zeros(0, phi.shape[-1])
            self.squares = phi.new_zeros(phi.shape[-1], phi.shape[-1])
        more = int(labels.max()) + 1 - len(self.counts)
        if more > 0:
            self.counts = torch.cat([self.counts, phi.new_zeros(more)])
            self.totals = torch.cat([self.totals, phi.new_zeros(more, phi.shape[-1])])
        phi = phi - self.origin
        self.counts.index_add_(0, labels, torch.ones_like(phi[:, 0]))
        self.totals.index_add_(0, labels, phi)
        self.squares.addmm_(phi.mT, phi)

    def clusters(self, shrinkage: float | None, *, relative: bool) -> Clusters:
        """The Gaussians of the classes, and of all data if `relative`."""
        if self.origin is None:
            raise ValueError("there is no data: no example has a label")
        present = self.counts > 0
        counts, means = self.counts[present], self.totals[present] / self.counts[present].unsqueeze(-1)
        n = counts.sum()
        within = (self.squares - (means * counts.unsqueeze(-1)).mT @ means) / n
        mean = self.totals.sum(0, keepdim=True) / n
        root = _whitening(within, n, shrinkage)
        if not relative:
            return Clusters(self.origin, (root, means @ root.mT), None)
        whole = _whitening(self.squares / n - mean.mT @ mean, n, shrinkage)
        return Clusters(self.origin, (root, means @ root.mT), (whole, mean @ whole.mT))


def _whitening(covariance: Tensor, n: Tensor, shrinkage: float | None) -> Tensor:
    """W with W^T W the inverse of the shrunk covariance."""
    d = len(covariance)
    scale = covariance.trace() / d
    require(scale.isfinite(), INFINITE)
    require(float(scale) > 0, "the features do not vary at all: name another layer")
    if shrinkage is None:
        # Oracle approximating shrinkage: least expected squared error of the covariance of Gaussian data
        square, level = covariance.square().mean(), scale.square()
        apart = (n + 1) * (square - level / d)
        rho = torch.where(apart > 0, (square + level) / apart, 1.0).clamp(max=1.0)
    else:
        rho = torch.as_tensor(shrinkage, dtype=covariance.dtype, device=covariance.device)
    unit = torch.eye(d, dtype=covariance.dtype, device=covariance.device)
    shrunk = (1 - rho) * covariance + rho * scale * unit
    root, failed = torch.linalg.cholesky_ex(shrunk)
    if bool(failed):  # features that are always zero (dead units) and no shrinkage: a spread that is nothing to speak of
        root = torch.linalg.cholesky(shrunk + 1e-9 * scale * unit)
    return torch.linalg.solve_triangular(root, unit, upper=False)


@dataclass(frozen=True)
class Clusters:
    """Classes and, if wanted, all data as Gaussians with one covariance: (W, W mu) each, in coordinates around an origin."""

    origin: Tensor  # [d]
    classes: tuple[Tensor, Tensor]  # [d, d], [K, d]
    whole: tuple[Tensor, Tensor] | None

    def distance(self, phi: Tensor) -> Tensor:
        """[..., d] -> [...]: squared distance to the nearest class, relative to that to all data."""
        phi = phi.double() - self.origin
        near = _squared(phi, *self.classes).amin(-1)
        return near if self.whole is None else near - _squared(phi, *self.whole).squeeze(-1)


def _squared(phi: Tensor, root: Tensor, means: Tensor) -> Tensor:
    z = phi @ root.mT
    return (z.square().sum(-1, keepdim=True) + means.square().sum(-1) - 2 * z @ means.mT).clamp_min(0)  # [..., K]


@dataclass(frozen=True)
class MahalanobisScore:
    """The distance of inputs, [B, *D], in float64."""

    model: Model
    networks: tuple[Network, ...]
    layer: str
    clusters: tuple[Clusters, ...]  # one for each network

    def __call__(self, x: Any) -> Tensor:
        x = self.networks[0].ready(x)
        with torch.no_grad():
            return average_over(self.networks, lambda one, i: self.clusters[i].distance(one.features(x, self.layer)[0]))


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
        at_least(1, k=self.k)
        at_least(self.k, most=self.most)

    def fit(self, posterior: Given, data: Any = None) -> NeighboursScore:
        """Keep the features of familiar data."""
        posterior = posterior_of(posterior)
        require_data(data, "Neighbours", "best those it was trained on")
        reader = _Reader(networks(posterior, draws=self.draws), self.layer)
        kept = Reservoir(self.most, seed=self.seed)
        with closing(reader.read(data)) as batches:
            for outputs, _ in batches:
                kept.add(*(self.scaled(phi.flatten(0, -2)) for phi, _ in outputs))
        require(kept.count >= self.k, f"{kept.count} familiar inputs have no {self.k}-th nearest: give more, or a smaller k")
        banks = kept.rows()
        require(all(bank.isfinite().all() for bank in banks), INFINITE)
        return NeighboursScore(posterior.model, reader.networks, reader.layer or "", banks, self)

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
        parts.append(torch.linalg.vector_norm(part - bank[nearest[:, -1]], dim=-1))
    return torch.cat(parts) if parts else points.new_zeros(0)
