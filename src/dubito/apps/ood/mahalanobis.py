"""Distances to the classes in the space of features, in units of their spread."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dubito.apps.network import Network, average_over, examples, last_linear, networks, posterior_of
from dubito.apps.ood.detector import Given, required
from dubito.model import Model
from dubito.model.likelihoods import Classes
from dubito.tensors.checks import require


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
        require(self.shrinkage is None or 0 <= self.shrinkage <= 1, f"shrinkage is a share from 0 to 1; got {self.shrinkage}")

    def fit(self, posterior: Given, data: Any = None) -> MahalanobisScore:
        """Means and covariances of the features of familiar data (x, y)."""
        posterior = posterior_of(posterior)
        required(data, "Mahalanobis", "best those it was trained on, with their labels")
        classes = isinstance(posterior.model.likelihood, Classes)
        if self.relative and not classes:
            raise ValueError("relative distances compare classes with all data; without classes there is nothing to compare")
        found, layer = networks(posterior, draws=self.draws), self.layer
        sums = [_Sums() for _ in found]
        with closing(examples(posterior.model, data)) as batches:
            for x, y in batches:
                layer = last_linear(found[0], x) if layer is None else layer
                for one, own in zip(found, sums, strict=True):
                    with torch.no_grad():
                        phi, f = one.features(x, layer)
                    own.add(phi, _labels(posterior.model, f, y))
        if layer is None:
            raise ValueError("there is no data: the loader gave no batch")
        clusters = tuple(own.clusters(self.shrinkage, relative=self.relative) for own in sums)
        return MahalanobisScore(posterior.model, found, layer, clusters)


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
        seen = self.counts > 0
        counts, means = self.counts[seen], self.totals[seen] / self.counts[seen].unsqueeze(-1)
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
    require(bool(scale.isfinite()), "the features are not finite for all of the data: look for inputs or weights that are not")
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
