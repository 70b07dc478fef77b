"""Influence functions: how the curvature is inverted, as settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from dubito.apps.influence.gradients import Gradients
from dubito.apps.influence.influences import Influences
from dubito.apps.influence.inverse import ConjugateGradients, Inverse, LiSSA, Structured, hessian
from dubito.apps.influence.ordered import Ordered
from dubito.apps.network import only_network
from dubito.inference.fit import fit
from dubito.inference.methods.laplace import Laplace
from dubito.model import Model
from dubito.model.likelihoods import Categorical
from dubito.model.priors import MultivariateNormal, Normal
from dubito.posteriors import Gaussian, Point, Posterior
from dubito.tensors.checks import at_least, one_of, positive, require

STRUCTURES = {"ekfac": "kronecker", "kfac": "kronecker", "diagonal": "diagonal", "dense": "dense"}
SOLVERS = (*STRUCTURES, "cg", "lissa", "posterior")


@dataclass(frozen=True)
class Influence:
    r"""Influence functions (Koh & Liang 2017) of a model that is trained: which examples made it what it is.

    At an optimum of the log joint, an example that weighs :math:`1 + \epsilon` moves the weights by :math:`-\epsilon H^{-1} g_n`, where

    .. math:: H = \sum_n \nabla^2 \ell_n - \nabla^2 \ln p(\theta) + \lambda I, \qquad g_n = \nabla \ell_n, \qquad
              \ell_n = -\ln p(y_n \mid x_n, \theta).

    H is a sum over the data, not a mean, and the prior (weight decay) belongs to it. `damping` :math:`\lambda` is a precision on top of
    the prior's, as it is in `Laplace`: N times as much as one that is added to a mean over N examples. `curvature` of the losses is
    the "ggn", which is never negative, or the "hessian", the same for linear models. What is learned beside the network's weights (a
    noise) stays as it is.

    | solver | H^-1 is |
    |---|---|
    | "ekfac" | Kronecker blocks, a layer each, with corrected eigenvalues: two passes, then all is cheap; for networks of any size |
    | "kfac", "diagonal" | rougher, in one pass |
    | "dense" | the whole matrix: exact, P x P numbers |
    | "cg" | conjugate gradients to `tolerance`, at most `steps`: exact for any size; up to `steps` passes for everything asked |
    | "lissa" | a random series of `depth` batches, averaged over `repeats`; the `scale` is found, if it is not given |
    | "posterior" | the covariance of a Gaussian posterior as it is, with its prior |

    >>> import dubito, torch
    >>> x = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    >>> y = torch.tensor([[0.0], [1.0], [2.0], [9.0]])                     # the last one is off the line
    >>> model = dubito.Model(torch.nn.Linear(1, 1, bias=False), dubito.Gaussian(scale=1.0), dubito.priors.Normal(scale=10.0))
    >>> best = (x * y).sum() / ((x * x).sum() + 0.01)
    >>> point = dubito.posteriors.Point(model, {"weight": best.reshape(1, 1)}, {})
    >>> found = Influence("dense").fit(point, (x, y))
    >>> found.self_influence().round(decimals=2)
    tensor([0.0000, 0.1200, 1.8800, 2.9600])
    >>> best, found.removal(lambda network: network(torch.ones(1, 1))[:, 0], leverage=True)[0, 3]         # f(1), without the last one
    (tensor(2.2841), tensor(-1.2861))
    """

    solver: Literal["ekfac", "kfac", "diagonal", "dense", "cg", "lissa", "posterior"] = "ekfac"
    damping: float = 0.0  # a precision on top of the prior's
    curvature: Literal["ggn", "hessian"] = "ggn"
    steps: int = field(default=100, kw_only=True)  # of conjugate gradients, at most
    tolerance: float = field(default=1e-5, kw_only=True)  # of their residual, relative
    depth: int = field(default=1000, kw_only=True)  # of LiSSA: batches in a series
    repeats: int = field(default=1, kw_only=True)  # of LiSSA: series that are averaged
    scale: float | None = field(default=None, kw_only=True)  # of LiSSA; None: the smallest power of ten that does not diverge
    memory: float = field(default=1.0, kw_only=True)  # gigabytes for gradients of what is asked about

    def __post_init__(self):
        one_of(SOLVERS, solver=self.solver)
        one_of(("ggn", "hessian"), curvature=self.curvature)
        fits = self.curvature == "ggn" or self.solver in ("dense", "cg", "lissa")
        require(fits, f"a Hessian has no such structure as {self.solver!r}: use 'dense', 'cg' or 'lissa', or the GGN")
        at_least(0, damping=self.damping)
        damped = self.solver == "posterior" and self.damping
        require(not damped, f"solver='posterior' takes the covariance as it is: leave out damping={self.damping}")
        at_least(1, steps=self.steps, depth=self.depth, repeats=self.repeats)
        positive(tolerance=self.tolerance, memory=self.memory, scale=self.scale)

    def fit(
        self,
        posterior: Posterior | Model | nn.Module,
        data: Any,
        *,
        n_data: int | None = None,
        batch_size: int = 128,
        seed: int = 0,
        progress: bool | None = None,
    ) -> Influences:
        """Influences of the training data (anything `dubito.fit` takes, but not shuffled) on the model that was trained on them.

        A model, or a classifier that returns logits, is taken at its present weights; so is a posterior with a center (a point, a
        Gaussian). The data must be those of the training, and the prior that of the training: of a classifier alone it is N(0, 1).
        """
        given = _point(posterior)
        network = only_network(given, "Influence")
        model, names = network.model, tuple(name for name in network.params if ":" not in name)
        if self.solver == "posterior":
            if not isinstance(given, Gaussian):
                raise ValueError(f"a {type(given).__name__} posterior has no covariance: use another solver than 'posterior'")
            names = tuple(given.covariance.shapes)
            noisy = any(":" in name for name in names)
            require(not noisy, "this posterior is also over a learned noise: use another solver than 'posterior'")
        at, rows = Gradients(model, network.params, network.buffers, names), Ordered(model, data, batch_size)
        count = rows.count() if n_data is None else n_data
        first = next(iter(rows), None)
        require(first is not None, "the data are empty: the loader gave no batch")
        model.check(at.params, first, at.buffers)
        inverse = self._inverse(given, at, rows, count, seed, progress)
        return Influences(at, rows, inverse, count, self.memory)

    def _inverse(self, given: Posterior, at: Gradients, data: Ordered, n_data: int, seed: int, progress: bool | None) -> Inverse:
        if self.solver == "cg":
            return ConjugateGradients(hessian(at, data, self.curvature, self.damping), self.steps, self.tolerance)
        if self.solver == "lissa":
            known = self.scale is not None
            scale = self.scale or 1.0
            return LiSSA(at, data, n_data, self.curvature, self.damping, self.depth, self.repeats, scale, known, seed)
        if isinstance(given, Gaussian) and self.solver == "posterior":
            covariance = given.covariance
            return Structured(covariance if given.temperature == 1 else covariance.with_temperature(1.0))
        if not isinstance(at.model.prior, Normal | MultivariateNormal):
            raise ValueError(
                f"solver={self.solver!r} needs a Normal prior, whose precision it adds to a structure; got "
                f"{type(at.model.prior).__name__}. Then use solver='cg' or 'lissa', which take the prior's Hessian"
            )
        method = Laplace(
            STRUCTURES[self.solver], self.curvature, optimize_evidence=False, corrected=self.solver == "ekfac",  # pyright: ignore[reportArgumentType]
            damping=self.damping, check=False,
        )  # fmt: skip
        start = Point(at.model, at.params, at.buffers)
        options = {"n_data": n_data, "batch_size": data.size, "seed": seed, "progress": progress}
        posterior = fit(at.model, method, data.data, start=start, **options)
        assert isinstance(posterior, Gaussian)
        return Structured(posterior.covariance)


def _point(given: Posterior | Model | nn.Module) -> Posterior:
    """A posterior as it is; a model, or a classifier that returns logits, as a point: at its Bayesian weights."""
    if isinstance(given, Posterior):
        return given
    model = Model(given, Categorical()) if isinstance(given, nn.Module) else given
    if not isinstance(model, Model):
        raise TypeError(f"Influence needs a posterior, a dubito.Model or a classifier (nn.Module); got a {type(given).__name__}")
    params = model.parameters()
    if learned := [name for name in params if ":" in name]:
        raise ValueError(f"the weights of a network do not contain {learned}: give a posterior, such as fit(model, MAP(), data)")
    return Point(model, params, model.buffers())
