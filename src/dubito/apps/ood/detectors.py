"""Detectors of unfamiliar inputs, and the figures by which they are compared.

`Measured` is any measure of uncertainty, `MaxLogit` and `Energy` read mean logits, and `ODIN` also moves the input by a small step.
`Mahalanobis` and `Neighbours` measure distances between features: to the classes, or to familiar inputs. A detector's `fit` returns a
score: a function of inputs, larger is less familiar.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dubito._moved import renamed, renamed_fields
from dubito.apps.network import Network, average_over, check_real, examples, last_linear, networks, posterior_of
from dubito.evaluation.judge import separation
from dubito.evaluation.measures import MEASURES
from dubito.evaluation.reservoir import Reservoir
from dubito.model import Model
from dubito.model.likelihoods import Categorical
from dubito.posteriors import Posterior
from dubito.tensors.checks import at_least, between, one_of, positive, require

Given = Posterior | Model | nn.Module  # a model, or a network that returns logits, is a point at its present weights
Score = Callable[[Any], Tensor]  # inputs -> [B], larger is less familiar; dense outputs give maps [B, *D]


class Detector(Protocol):
    """Settings of a score. `data` are familiar inputs, as `dubito.fit` takes them; a detector that learns nothing needs none."""

    def fit(self, posterior: Given, data: Any = None) -> Score:
        """The score for inputs, from the posterior and from familiar data if it learns from these."""
        ...


def require_data(data: Any, name: str, what: str) -> None:
    """Raise if there are no data for a detector that learns from data."""
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
    known, unknown = (scores.detach().flatten().to(familiar.device, torch.float64) for scores in (familiar, unfamiliar))
    return Detection(*separation(known, unknown, ("auroc", "aupr_error", "aupr_success", "fpr95")).values())


@dataclass(frozen=True)
class Measured:
    r"""Any of `dubito.measures`, of the posterior's own predictive: `one_minus_max` is one minus the maximum softmax
    probability (Hendrycks & Gimpel 2017); `predictive_entropy`, `mutual_information` and `epistemic_variance` are Bayesian measures.

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
    r"""Minus the largest logit, :math:`-\max_c \bar f_c(x)` (Hendrycks et al. 2022): unlike a probability it
    tells inputs that resemble no class from those that resemble two.

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
        return PredictionScore(with_logits(posterior, "MaxLogit"), self)

    def score(self, posterior: Posterior, x: Any) -> Tensor:
        """Minus the largest mean logit at inputs, [B, *D]."""
        return -posterior.predict(x, draws=self.draws).f_mean.amax(-1)


def with_logits(given: Given, name: str) -> Posterior:
    """The posterior, if the outputs of its network are the logits of classes."""
    posterior = posterior_of(given)
    likelihood = posterior.model.likelihood
    if not isinstance(likelihood, Categorical):
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
        return PredictionScore(with_logits(posterior, "Energy"), self)

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
        posterior = with_logits(posterior, "ODIN")
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
            math.log(network.weight) + torch.log_softmax(network(x).double() / self.settings.temperature, -1)
            for network in self.networks
        ]
        return (parts[0] if len(parts) == 1 else torch.stack(parts).logsumexp(0)).amax(-1)

    def direction(self, x: Tensor) -> Tensor:
        """The sign of the gradient of ln S by the input, divided by the channels' std."""
        check_real(x, "ODIN moves the input along a gradient, as that of images")
        std = x.new_tensor(self.settings.std or (1.0,))
        if self.settings.std:
            fits = x.ndim > 1 and x.shape[1] == len(std)
            require(fits, f"std has {len(std)} channels for inputs {list(x.shape)}, whose axis 1 they are")
            std = std.reshape(-1, *[1] * (x.ndim - 2))
        with torch.enable_grad():
            leaf = x.detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.log_maximum(leaf).sum(), leaf)
        return slope.sign() / std


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

    def fit(self, posterior: Given, data: Any = None) -> FeatureScore:
        """Means and covariances of the features of familiar data (x, y)."""
        posterior = posterior_of(posterior)
        require_data(data, "Mahalanobis", "best those it was trained on, with their labels")
        compared = not self.relative or posterior.model.likelihood.indexed
        require(compared, "relative distances compare classes with all data; without classes there is nothing to compare")
        reader = _Reader(networks(posterior, draws=self.draws), self.layer)
        sums = [_Sums() for _ in reader.networks]
        with closing(reader.read(data)) as batches:
            for outputs, y in batches:
                for total, (phi, f) in zip(sums, outputs, strict=True):
                    total.add(phi, _labels(posterior.model, f, y))
        clusters = tuple(total.clusters(self.shrinkage, relative=self.relative) for total in sums)
        return FeatureScore(posterior.model, reader.networks, reader.layer or "", clusters)


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
    if not likelihood.indexed:
        return torch.zeros(f.shape[:-1], dtype=torch.long, device=f.device)
    if y is None:
        raise ValueError("Mahalanobis needs to know the classes of familiar inputs: give batches of (x, y)")
    likelihood.check(f, y)
    target = likelihood.target(y, f)
    observed = likelihood.observed(target)
    return target if observed is None else torch.where(observed, target, -1)


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
    if bool(failed):  # features that are always zero (dead units) and no shrinkage: a negligible spread
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
class FeatureScore:
    """A distance between the features of inputs and those of familiar ones, [B, *D], averaged over the networks."""

    model: Model
    networks: tuple[Network, ...]
    layer: str
    distances: tuple[Clusters, ...] | tuple[Bank, ...]  # one for each network

    def __call__(self, x: Any) -> Tensor:
        x = self.networks[0].ready(x)
        with torch.no_grad():
            return average_over(self.networks, lambda network, i: self.distances[i].distance(network.features(x, self.layer)[0]))


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

    def fit(self, posterior: Given, data: Any = None) -> FeatureScore:
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
        return FeatureScore(posterior.model, reader.networks, reader.layer or "", tuple(Bank(bank, self) for bank in banks))

    def scaled(self, phi: Tensor) -> Tensor:
        """Features of length 1, if asked for."""
        return F.normalize(phi, dim=-1) if self.normalized else phi


@dataclass(frozen=True)
class Bank:
    """The features of familiar inputs in one network."""

    features: Tensor  # [N, d]
    settings: Neighbours

    def distance(self, phi: Tensor) -> Tensor:
        """[..., d] -> [...]: the distance to the k-th nearest."""
        phi = self.settings.scaled(phi)
        return kth_distance(phi.reshape(-1, phi.shape[-1]), self.features, self.settings.k).reshape(phi.shape[:-1])


def kth_distance(points: Tensor, bank: Tensor, k: int) -> Tensor:
    """The distance of points [B, d] to their k-th nearest of a bank [N, d], in bounded memory: [B].

    Products of matrices find the nearest features. They are taken around the mean of the bank, since they would cancel far from the
    origin, and the distance is then computed from the difference itself.

    >>> kth_distance(torch.tensor([[0.0]]), torch.tensor([[3.0], [1.0], [-2.0]]), 2)
    tensor([2.])
    """
    centre = bank.mean(0)
    bank, points = bank - centre, points - centre
    squares = bank.square().sum(-1)
    parts = []
    for batch in points.split(max(1, PAIRS // len(bank))):
        nearest = torch.topk(squares - 2 * batch @ bank.mT, k, dim=-1, largest=False).indices
        parts.append(torch.linalg.vector_norm(batch - bank[nearest[:, -1]], dim=-1))
    return torch.cat(parts) if parts else points.new_zeros(0)


__getattr__ = renamed(__name__, {"MahalanobisScore": "FeatureScore", "NeighboursScore": "FeatureScore"})
