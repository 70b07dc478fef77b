r"""Influence functions: the settings, the influences of training examples, how well scores find wrong labels, and the solvers.

A solver multiplies vectors by the inverse of the curvature of the negative log joint, :math:`H = \sum_n H_n - \nabla^2 \ln p(\theta) +
\lambda I`: by a structure that is inverted once (`Structured`), by `ConjugateGradients`, or by `LiSSA`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from dubito.apps.influence.gradients import Gradients, Losses, Ordered, Weigh, cut
from dubito.apps.network import Network, model_of, only_network
from dubito.curvature.cotangents import observed
from dubito.curvature.products import Product, batch_product, conjugate_gradients, product
from dubito.inference.fit import fit
from dubito.inference.methods.laplace import Laplace
from dubito.model import Model
from dubito.model.likelihoods import likelihood_params
from dubito.model.priors import prior_params
from dubito.network.examples import Inputs, batch_size
from dubito.posteriors import Gaussian, Point, Posterior
from dubito.posteriors.predict.linearized import linearized
from dubito.tensors import tree
from dubito.tensors.checks import at_least, between, one_of, positive, require
from dubito.tensors.covariances import Covariance
from dubito.tensors.covariances.propagation import flat
from dubito.tensors.eigen import eigh
from dubito.tensors.randomness import derive_seed
from dubito.tensors.tree import Params

GIGABYTE = 2**30
What = Callable[[Network], Tensor] | Any  # a function of a network that gives [T] numbers; or test data, for their T losses
Index = int | Sequence[int] | Tensor


@dataclass(frozen=True)
class Influences:
    r"""Influences of N training examples, at the weights :math:`\theta^*` of a model.

    With the gradients :math:`g_n` of the training losses and the curvature H of the negative log joint (sums over the data, prior
    included), a weight :math:`1 + \epsilon` instead of 1 for example n moves the optimum by :math:`-\epsilon H^{-1} g_n`.

    What is asked about is test data, anything that `fit` takes, and then its losses are meant; or a function that takes a network,
    calls it on inputs and gives [T] numbers: `lambda network: network(x)[:, 3]`. Results are on the CPU, training examples in the
    order of the data.
    """

    at: Gradients
    data: Ordered
    inverse: Inverse
    n_data: int
    memory: float = 1.0  # gigabytes that gradients of what is asked about may take at a time

    def of(self, what: What) -> Tensor:
        r"""The derivative by the weight of every training example, [T, N]: :math:`-\nabla F_t^T H^{-1} g_n` (up-weighting).

        Of a loss: positive is harmful (more of this example, and the loss rises), negative helpful."""
        return torch.cat([-self._along(directions) for directions in self._directions(what)])

    def removal(self, what: What, *, leverage: bool = False) -> Tensor:
        r"""How much it changes when each training example alone is left out, [T, N]: to first order
        :math:`\nabla F_t^T H^{-1} g_n`, the negative of `of`.

        With `leverage` it is a whole Newton step on the other examples, :math:`(H - J_n^T \Lambda_n J_n)^{-1} g_n`, at the cost of a
        linearized prediction of each: better for examples that few others resemble. It needs a solver with a structure."""
        structured = not leverage or self.inverse.covariance is not None
        require(structured, "leverage=True needs the inverse as a structure: use solver='dense', 'ekfac' or 'posterior'")
        weigh = self._left_out if leverage else None
        return torch.cat([self._along(directions, weigh) for directions in self._directions(what)])

    def self_influence(self) -> Tensor:
        r"""How much the loss of a training example rises when it is left out itself, [N]: :math:`g_n^T H^{-1} g_n`, to first order.

        It is never negative, and large where nothing but an example's own presence explains it: wrong labels, and the rare.
        With a structure it is a pass over the data; by "cg" or "lissa" every example is solved for on its own."""
        if (covariance := self.inverse.covariance) is not None:
            return torch.cat([losses.quadratic(covariance).cpu() for losses in self._pass()])
        parts = []
        for v in self._gradients(self.data.data):
            solved = self.inverse(v)
            parts.append(torch.stack([flat(v[name] * solved[name], 1).sum(1) for name in v]).sum(0).cpu())
        return torch.cat(parts)

    def shift(self, index: Index) -> Params:
        r"""How the weights change when these training examples are left out together: :math:`H^{-1} \sum_n g_n`, to first order."""
        total = {name: torch.zeros_like(leaf) for name, leaf in self.at.like.items()}
        for _, batch in self.data.picked(self._index(index).unique()):  # nothing can be left out twice
            total = tree.apply(torch.add, total, self.at.losses(batch).summed())
        return tree.select(self.inverse({name: leaf.unsqueeze(0) for name, leaf in total.items()}), 0)

    def without(self, index: Index) -> Point:
        """The model that would result without these training examples, to first order."""
        moved = {name: (self.at.params[name] + leaf).to(self.at.params[name].dtype) for name, leaf in self.shift(index).items()}
        return Point(self.at.model, {**self.at.params, **moved}, self.at.buffers)

    def on_inputs(self, what: What, index: Index) -> Tensor:
        r"""The gradient of what is asked about (the sum, if it is several) by the inputs of some training examples, [K, *shape of x]:

        .. math:: \nabla_{x_n} F = -\nabla_{x_n} \langle H^{-1} \nabla F, \nabla_\theta \ell_n \rangle.

        It shows which pixels of a training image matter; an attacker who may change the data would take a step along it."""
        total: Params | None = None
        for gradients in self._gradients(what):
            summed = {name: leaf.sum(0, keepdim=True) for name, leaf in gradients.items()}
            total = summed if total is None else tree.apply(torch.add, total, summed)
        if total is None:
            raise ValueError("the test data are empty")
        direction, index = tree.select(self.inverse(total), 0), self._index(index)
        result: Tensor | None = None
        for places, batch in self.data.picked(index):
            slopes = -self.at.inputs(batch, direction).cpu()
            result = slopes.new_zeros(len(index), *slopes.shape[1:]) if result is None else result
            result[places] = slopes
        assert result is not None
        return result

    # -- passes

    def _gradients(self, what: What) -> Iterator[Params]:
        """Gradients of what is asked about, leaves [t, *shape], as many at a time as the memory holds."""
        if callable(what) and not hasattr(what, "__iter__") and not hasattr(what, "__getitem__"):
            function: Any = what
            yield self.at.function(function)
            return
        at_a_time = max(1, int(self.memory * GIGABYTE / (12 * tree.size(self.at.like))))
        model = self.at.model
        for batch in cut(model, Ordered(model, what, min(at_a_time, 512)), at_a_time):
            yield self.at.losses(batch).stacked()

    def _directions(self, what: What) -> Iterator[Params]:
        empty = True
        for gradients in self._gradients(what):
            empty = False
            yield self.inverse(gradients)
        require(not empty, "the test data are empty")

    def _pass(self, weigh: Weigh | None = None) -> Iterator[Losses]:
        """The training losses, a batch at a time."""
        count = 0
        for batch in self.data:
            losses = self.at.losses(batch, weigh=weigh)
            count += losses.size
            yield losses
        require(count == self.n_data, f"every pass must see the same examples: there were {self.n_data}, and now {count}")

    def _along(self, directions: Params, weigh: Weigh | None = None) -> Tensor:
        return torch.cat([losses.along(directions).cpu() for losses in self._pass(weigh)], 1)

    def _left_out(self, x: Inputs, f: Tensor, target: Any, slopes: Tensor) -> Tensor:
        """Slopes that make a Newton step on the other examples of what would be a step of first order."""
        assert self.inverse.covariance is not None
        at, likelihood = self.at, self.at.model.likelihood
        flat_outputs = f.ndim == 2 and f.shape[-1] <= 100
        require(flat_outputs, f"leverage=True needs one vector of at most 100 outputs for each example; got {list(f.shape)}")
        p = linearized(at.model, x, params=at.params, buffers=at.buffers, covariance=self.inverse.covariance)
        fisher = likelihood.fisher(f, likelihood_params(at.params))
        if (labelled := observed(at.model, target, f, at.params)) is not None:
            fisher = fisher * labelled.unsqueeze(-1) * labelled.unsqueeze(-2)
        return leverages(fisher, p.covariances[0], slopes)

    def _index(self, index: Index) -> Tensor:
        which = torch.as_tensor(index).reshape(-1).cpu()
        whole = which.dtype != torch.bool and not which.is_floating_point() and len(which)
        require(whole, "training examples are named by their positions in the data, at least one: 3, or [3, 17]")
        if int(which.min()) < 0 or int(which.max()) >= self.n_data:
            raise IndexError(f"there are {self.n_data} training examples, from 0 to {self.n_data - 1}; got {which.tolist()[:8]}")
        return which


def inspection(scores: Tensor, wrong: Tensor, shares: Sequence[float] = (0.05, 0.1, 0.2, 0.3)) -> dict[float, float]:
    r"""For every share q of the data that is inspected, the largest scores first, the share of wrong labels that is among them:

    .. math:: \mathrm{found}(q) = \frac{|\{n : w_n\} \cap \mathrm{top}_{\lceil q N \rceil}(s)|}{|\{n : w_n\}|}

    Of a random order it is q. Scores and `wrong` (bool) are [N]; equal scores count as if they were in random order.

    >>> inspection(torch.tensor([0.9, 0.1, 0.8, 0.2]), torch.tensor([True, False, False, True]), [0.25, 0.5, 0.75])
    {0.25: 0.5, 0.5: 0.5, 0.75: 1.0}
    """
    fits = scores.shape == wrong.shape and scores.ndim == 1 and wrong.dtype == torch.bool
    got = f"{list(scores.shape)} and {list(wrong.shape)} {wrong.dtype}"
    require(fits, f"scores must be [N], and wrong [N] and bool; got {got}")
    require(wrong.any() and scores.isfinite().all(), "at least one label must be wrong, and all scores must be finite")
    values, wrong = scores.double(), wrong.to(scores.device)
    return {share: _share_found(values, wrong, share) for share in shares}


def _share_found(values: Tensor, wrong: Tensor, share: float) -> float:
    """The share of wrong labels among the largest values."""
    between(0, 1, include="high", share=share)
    count = -int(-share * len(values) // 1)
    edge = values.topk(count).values[-1]
    above, tied = values > edge, values == edge
    share_at_edge = (count - int(above.sum())) / int(tied.sum())  # of those at the edge
    return (int((wrong & above).sum()) + share_at_edge * int((wrong & tied).sum())) / int(wrong.sum())


STRUCTURES = {"ekfac": "kronecker", "kfac": "kronecker", "diagonal": "diagonal", "dense": "dense"}
SMALL = 1000  # weights up to which a dense matrix is the default
SOLVERS = (*STRUCTURES, "cg", "lissa", "posterior")


@dataclass(frozen=True)
class Influence:
    r"""Influence functions (Koh & Liang 2017) of a trained model: how much each training example contributed to it.

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
    | "lissa" | a random series of `depth` batches, averaged over `repeats`; `scale` is chosen if it is not given |
    | "posterior" | the covariance of a Gaussian posterior as it is, with its prior |
    | None | "dense" up to 1,000 weights, where it costs next to nothing, otherwise "ekfac" |

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

    solver: Literal["ekfac", "kfac", "diagonal", "dense", "cg", "lissa", "posterior"] | None = None
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
        fits = self.curvature == "ggn" or self.solver in (None, "dense", "cg", "lissa")
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
        fitted = _point(posterior)
        network = only_network(fitted, "Influence")
        require(not network.model.coupled, "influence is that of independent examples, and the rows of this model are coupled")
        model, names = network.model, tuple(name for name in network.params if ":" not in name)
        if self.solver == "posterior":
            if not isinstance(fitted, Gaussian):
                raise ValueError(f"a {type(fitted).__name__} posterior has no covariance: use another solver than 'posterior'")
            names = tuple(fitted.covariance.shapes)
            noisy = any(":" in name for name in names)
            require(not noisy, "this posterior is also over a learned noise: use another solver than 'posterior'")
        at, rows = Gradients(model, network.params, network.buffers, names), Ordered(model, data, batch_size)
        if self.solver is None:
            chosen = replace(self, solver="dense" if tree.size(at.like) <= SMALL else "ekfac")
            return chosen.fit(posterior, data, n_data=n_data, batch_size=batch_size, seed=seed, progress=progress)
        count = rows.count() if n_data is None else n_data
        first = next(iter(rows), None)
        require(first is not None, "the data are empty: the loader gave no batch")
        model.check(at.params, first, at.buffers)
        inverse = self._inverse(fitted, at, rows, count, seed, progress)
        return Influences(at, rows, inverse, count, self.memory)

    def _inverse(self, given: Posterior, at: Gradients, data: Ordered, n_data: int, seed: int, progress: bool | None) -> Inverse:
        if self.solver == "cg":
            return ConjugateGradients(hessian(at, data, self), self.steps, self.tolerance)
        if self.solver == "lissa":
            return LiSSA(at, data, n_data, self, seed)
        if isinstance(given, Gaussian) and self.solver == "posterior":
            covariance = given.covariance
            return Structured(covariance if given.temperature == 1 else covariance.with_temperature(1.0))
        if at.model.prior.normal is None and at.model.prior.joint is None:
            prior = type(at.model.prior).__name__
            raise ValueError(f"solver={self.solver!r} needs a Normal prior; got {prior}: use solver='cg' or 'lissa'")
        method = Laplace(
            STRUCTURES[self.solver or "ekfac"], self.curvature, optimize_evidence=False, corrected=self.solver == "ekfac",  # pyright: ignore[reportArgumentType]
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
    model = model_of(given)
    params = model.parameters()
    if learned := [name for name in params if ":" in name]:
        raise ValueError(f"the weights of a network do not contain {learned}: give a posterior, such as fit(model, MAP(), data)")
    return Point(model, params, model.buffers())


FAR = 0.1  # of a residual, relative to what was to be solved for, that is told of
LARGEST = 1e12  # scale that LiSSA tries


class Inverse(Protocol):
    """The inverse of the Hessian as a function, and as a covariance if it is one."""

    @property
    def covariance(self) -> Covariance | None:
        """The inverse in a structure; None where it is only known by its products."""
        ...

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
    if (normal := prior.normal) is not None:
        precision = {name: normal.scale_of(name) ** -2 + damping for name in at.names}
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


def hessian(at: Gradients, data: Ordered, settings: Influence) -> Product:
    """v -> H v over all data, in one pass; leaves stacked [k, *shape]."""
    prior = prior_product(at, settings.damping)
    over = product(at.model, at.params, data, at.buffers, kind=settings.curvature)
    return lambda v: tree.apply(torch.add, over(v), prior(v))


@dataclass(frozen=True)
class ConjugateGradients:
    """The solution to a tolerance, in a pass over all data for every step."""

    times: Product
    steps: int
    tolerance: float
    covariance: None = field(default=None, init=False)

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
    settings: Influence
    seed: int
    covariance: None = field(default=None, init=False)

    def __post_init__(self):
        self.scale = self.settings.scale or 1.0

    def __call__(self, v: Params) -> Params:
        return tree.stack([self._solve(tree.select(v, i)) for i in range(tree.count(v))])

    def _solve(self, b: Params) -> Params:
        while True:
            runs = []
            for repeat in range(self.settings.repeats):
                run = self._run(b, derive_seed(self.seed, "lissa", repeat))
                if run is None:
                    break
                runs.append(run)
            else:
                mean = {name: torch.stack([run[name] for run in runs]).mean(0) for name in b}
                self._check(mean, b)
                return mean
            if self.settings.scale or self.scale * 10 > LARGEST:
                advice = "leave out `scale` to have it chosen"
                way_out = advice if self.settings.scale else "the curvature is not positive; add damping=..."
                raise ValueError(f"LiSSA diverges at scale={self.scale:g}: {way_out}")
            self.scale *= 10

    def _check(self, x: Params, b: Params) -> None:
        r"""Warn of a series that is too short. Its x then is smaller than :math:`H^{-1} b` where H is small, and :math:`x^T (b - H x)`
        is positive; the noise of batches, which goes either way, has little part in that."""
        q = hessian(self.at, self.data, self.settings)({name: leaf.unsqueeze(0) for name, leaf in x.items()})
        whole, had = _dot(x, b), _dot(x, {name: leaf[0] for name, leaf in q.items()})
        if whole - had > FAR * whole > 0:
            warnings.warn(
                f"LiSSA's series is too short: {self.settings.depth} batches at scale={self.scale:g} leave a residual of "
                f"{1 - had / whole:.0%}, and influences are too small. Use more `depth`, more `damping`, or solver='cg'",
                stacklevel=4,
            )

    def _run(self, b: Params, seed: int) -> Params | None:
        """One sum of the series; None where it diverges."""
        prior, h, size = prior_product(self.at, self.settings.damping), dict(b), _norm(b)
        source = self.data.endless(seed)
        for j in range(1, self.settings.depth + 1):
            batch = next(source)
            n = batch_size(self.at.model.split(batch)[1])
            row = {name: leaf.unsqueeze(0) for name, leaf in h.items()}
            over, pull = (
                batch_product(self.at.model, self.at.params, batch, self.at.buffers, row, self.settings.curvature),
                prior(row),
            )
            curved = {name: over[name][0] / n + pull[name][0] / self.n_data for name in h}
            if not self.settings.scale and _dot(h, curved) > self.scale * _dot(h, h):
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
    values, vectors = eigh(fisher)
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    largest = float(torch.linalg.eigvalsh(root.mT @ spread @ root).max())
    way_out = "use solver='dense', more damping, or leverage=False"
    require(largest < 1, f"the leverage of an example must be below 1; got {largest:.3g}: {way_out}")
    eye = torch.eye(fisher.shape[-1], dtype=fisher.dtype, device=fisher.device)
    return torch.linalg.solve(eye - fisher @ spread, s.unsqueeze(-1)).squeeze(-1).to(slopes)
