r"""The inverse of the Hessian times vectors: by a structure that is inverted once, by conjugate gradients, or by LiSSA.

All are of the same matrix, the curvature of the negative log joint: :math:`H = \sum_n H_n - \nabla^2 \ln p(\theta) + \lambda I`.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from dubito.apps.influence.gradients import Gradients, Ordered
from dubito.curvature.products import Product, batch_product, conjugate_gradients, product
from dubito.model.priors import Normal, prior_params
from dubito.network.examples import batch_size
from dubito.tensors import tree
from dubito.tensors.checks import require
from dubito.tensors.covariances import Covariance
from dubito.tensors.randomness import derive_seed
from dubito.tensors.tree import Params

Kind = Literal["ggn", "hessian"]
FAR = 0.1  # of a residual, relative to what was to be solved for, that is told of
LARGEST = 1e12  # scale that LiSSA tries


class Inverse(Protocol):
    """The inverse of the Hessian as a function."""

    def __call__(self, v: Params) -> Params:
        """H^-1 v, for leaves [T, *shape]."""
        ...


@dataclass(frozen=True)
class Structured:
    """A covariance: the inverse itself, in a structure."""

    covariance: Covariance

    def __call__(self, v: Params) -> Params:
        return self.covariance.product(v)


def prior_product(at: Gradients, damping: float = 0.0) -> Product:
    """v -> (minus the Hessian of the log prior + damping I) v, for leaves stacked [k, *shape]."""
    prior = at.model.prior
    if isinstance(prior, Normal):
        precision = {name: prior.scale_of(name) ** -2 + damping for name in at.names}
        return lambda v: {name: leaf * precision[name] for name, leaf in v.items()}

    def _times(v: Params) -> Params:
        live = {name: leaf.detach().requires_grad_() for name, leaf in at.like.items()}
        rest = {name: leaf.detach() for name, leaf in at.params.items() if name not in live}
        with torch.enable_grad():
            value = prior.log_prob(prior_params({**rest, **live}))
            slopes = torch.autograd.grad(value, list(live.values()), create_graph=True, allow_unused=True, materialize_grads=True)
            inner = torch.stack([(s * v[n]).sum() for n, s in zip(live, slopes, strict=True)]).sum()
            if not inner.requires_grad:
                return {name: damping * v[name] for name in live}
            second = torch.autograd.grad(inner, list(live.values()), allow_unused=True, materialize_grads=True)
        return {name: damping * v[name] - leaf for name, leaf in zip(live, second, strict=True)}

    return lambda v: tree.stack([_times(tree.select(v, i)) for i in range(tree.count(v))])


def hessian(at: Gradients, data: Ordered, kind: Kind, damping: float) -> Product:
    """v -> H v over all data, in one pass; leaves stacked [k, *shape]."""
    prior, over = prior_product(at, damping), product(at.model, at.params, data, at.buffers, kind=kind)
    return lambda v: tree.apply(torch.add, over(v), prior(v))


@dataclass(frozen=True)
class ConjugateGradients:
    """The solution to a tolerance, in a pass over all data for every step."""

    times: Product
    steps: int
    tolerance: float

    def __call__(self, v: Params) -> Params:
        solutions = []
        for i in range(tree.count(v)):
            b = tree.select(v, i)
            x = conjugate_gradients(self.times, b, steps=self.steps, tolerance=self.tolerance)
            left = _residual(self.times, x, b)
            if left > FAR:
                warnings.warn(
                    f"conjugate gradients stopped after {self.steps} steps with a residual of {left:.0%}: use more `steps`, more "
                    "`damping`, or a network in float64",
                    stacklevel=3,
                )
            solutions.append(x)
        return tree.stack(solutions)


@dataclass
class LiSSA:
    r"""Sums the series :math:`H^{-1} = \frac{1}{N s} \sum_j (I - \bar H / s)^j`, a batch each (Agarwal, Bullins & Hazan 2017):

    .. math:: h \leftarrow v + h - \bar H_b h / s, \qquad H^{-1} v \approx h / (N s),

    where :math:`\bar H_b` is the mean curvature of a batch, with the prior's and the damping's share. It converges where no factor
    stretches anything, and then :math:`\|h_j\| \le (j + 1) \|v\|`. A scale that is to be found is the smallest power of ten with which
    this holds and no step overshoots, :math:`h^T \bar H_b h \le s\, h^T h`: a sum that diverges slowly would be seen too late.
    """

    at: Gradients
    data: Ordered
    n_data: int
    kind: Kind
    damping: float
    depth: int
    repeats: int
    scale: float
    fixed: bool  # the scale is the user's
    seed: int

    def __call__(self, v: Params) -> Params:
        return tree.stack([self._solve(tree.select(v, i)) for i in range(tree.count(v))])

    def _solve(self, b: Params) -> Params:
        while True:
            runs = []
            for repeat in range(self.repeats):
                run = self._run(b, derive_seed(self.seed, "lissa", repeat))
                if run is None:
                    break
                runs.append(run)
            else:
                mean = {name: torch.stack([run[name] for run in runs]).mean(0) for name in b}
                self._check(mean, b)
                return mean
            if self.fixed or self.scale * 10 > LARGEST:
                way_out = "leave out `scale`, and it is found" if self.fixed else "the curvature is not positive; add damping=..."
                raise ValueError(f"LiSSA diverges at scale={self.scale:g}: {way_out}")
            self.scale *= 10

    def _check(self, x: Params, b: Params) -> None:
        r"""Warn of a series that is too short. Its x then is smaller than :math:`H^{-1} b` where H is small, and :math:`x^T (b - H x)`
        is positive; the noise of batches, which goes either way, has little part in that."""
        q = hessian(self.at, self.data, self.kind, self.damping)({name: leaf.unsqueeze(0) for name, leaf in x.items()})
        whole, had = _dot(x, b), _dot(x, {name: leaf[0] for name, leaf in q.items()})
        if whole - had > FAR * whole > 0:
            warnings.warn(
                f"LiSSA's series is too short: {self.depth} batches at scale={self.scale:g} leave a residual of {1 - had / whole:.0%}, "
                "and influences are too small. Use more `depth`, more `damping`, or solver='cg'",
                stacklevel=4,
            )

    def _run(self, b: Params, seed: int) -> Params | None:
        """One sum of the series; None where it diverges."""
        prior, h, size = prior_product(self.at, self.damping), dict(b), _norm(b)
        source = self.data.endless(seed)
        for j in range(1, self.depth + 1):
            batch = next(source)
            n = batch_size(self.at.model.split(batch)[1])
            row = {name: leaf.unsqueeze(0) for name, leaf in h.items()}
            over, pull = batch_product(self.at.model, self.at.params, batch, self.at.buffers, row, self.kind), prior(row)
            curved = {name: over[name][0] / n + pull[name][0] / self.n_data for name in h}
            if not self.fixed and _dot(h, curved) > self.scale * _dot(h, h):
                return None
            h = {name: b[name] + leaf - curved[name] / self.scale for name, leaf in h.items()}
            if not _norm(h) <= (j + 1) * size * (1 + 1e-4):
                return None
        return {name: leaf / (self.scale * self.n_data) for name, leaf in h.items()}


def _dot(a: Params, b: Params) -> float:
    return sum(float((leaf.double() * b[name].double()).sum()) for name, leaf in a.items())


def _norm(v: Params) -> float:
    return math.sqrt(_dot(v, v))


def _residual(times: Product, x: Params, b: Params) -> float:
    size = _norm(b)
    if size == 0:
        return 0.0
    q = times({name: leaf.unsqueeze(0) for name, leaf in x.items()})
    return _norm({name: leaf - q[name][0] for name, leaf in b.items()}) / size


def leverages(fisher: Tensor, spread: Tensor, slopes: Tensor) -> Tensor:
    r"""Slopes [B, C] as those of examples that are left out: :math:`(I - \Lambda K)^{-1} s`, where :math:`\Lambda` is the likelihood's
    Fisher information and :math:`K = J H^{-1} J^T` the covariance of the outputs, [B, C, C] each."""
    fisher, spread, s = fisher.double(), spread.double(), slopes.double()
    values, vectors = torch.linalg.eigh(fisher)
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    largest = float(torch.linalg.eigvalsh(root.mT @ spread @ root).max())
    way_out = "use solver='dense', more damping, or leverage=False"
    require(largest < 1, f"the leverage of an example must be below 1; got {largest:.3g}: {way_out}")
    eye = torch.eye(fisher.shape[-1], dtype=fisher.dtype, device=fisher.device)
    return torch.linalg.solve(eye - fisher @ spread, s.unsqueeze(-1)).squeeze(-1).to(slopes)
