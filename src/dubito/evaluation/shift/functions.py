"""The functions that a posterior averages, differentiable in the input.

`posterior.predict` keeps no graph. An attack needs one, of the same functions: `Functions` holds the weights, masks or linearisations
that `predict` would use with the same `how`, `draws` and `seed`, and runs them so that autograd can go back to x, and only there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from dubito.curvature.generic import Unrolled, along
from dubito.model import Model
from dubito.model.likelihoods import own
from dubito.network.weights import mode
from dubito.posteriors import Conjugate, Drawn, Gaussian, Mixture, Point, Posterior, Samples, Stochastic, Stored
from dubito.posteriors.predict.dropout import Dropout, Masks
from dubito.posteriors.predictive import LatentMixture, mix
from dubito.tensors import tree
from dubito.tensors.randomness import derive, forked, generator
from dubito.tensors.tree import Buffers, Params

WAYS = ("sampled", "linearized", "point")
MEMBERS = 100  # draws of a conjugate last layer, where nobody says


@dataclass(frozen=True)
class Functions:
    """S functions f(x) of one model. Without `stacked` and `seeds` it is one."""

    model: Model
    shared: Buffers  # leaves that all functions have in common
    stacked: Params  # leaves [S, ...] that differ, or with `tangent`, by how much they differ from those in `shared`
    weights: Tensor | None = None  # [S]
    tangent: bool = False  # f(x) + J(x) delta in the place of f at other weights
    dropout: Dropout | None = None
    seeds: Tensor | None = None  # [S], of masks
    consistent: bool = True

    def __len__(self) -> int:
        return tree.count(self.stacked) if self.stacked else 1 if self.seeds is None else len(self.seeds)

    def __call__(self, x: Tensor) -> LatentMixture:
        """The predictive at x, with a graph back to x."""
        shared = {name: plain(leaf) for name, leaf in self.shared.items()}
        with mode(self.model.network, False), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's own: operators without a batching rule, deprecated parts
            if self.dropout is not None:
                f = self._masked(x, shared)
            elif not self.stacked:
                f = self._once({}, x, shared).unsqueeze(0)
            elif self.tangent:
                f = torch.stack([self._once(tree.select(self.stacked, i), x, shared) for i in range(len(self))])
            else:
                f = self._batched(x, shared)
        learned = own(shared if self.tangent else {**shared, **self.stacked})
        f = f.float() if f.dtype.itemsize < 4 else f
        weights = None if self.weights is None else plain(self.weights)
        return LatentMixture(
            self.model.likelihood, f, weights=weights, params={name: plain(leaf) for name, leaf in learned.items()}
        )

    def _once(self, varying: Params, x: Tensor, shared: Buffers) -> Tensor:
        network = {name: leaf for name, leaf in shared.items() if ":" not in name}
        if not self.tangent:
            return self.model.call(varying, x, network)[0]
        live, varying = {name: shared[name] for name in varying}, {name: plain(leaf) for name, leaf in varying.items()}
        fixed = {name: leaf for name, leaf in network.items() if name not in live}

        def output(live: Params) -> Tensor:
            with Unrolled():
                return self.model.call(live, x, fixed)[0]

        f, slope = along(output, live, {name: leaf.to(live[name].dtype) for name, leaf in varying.items()})
        return f + slope

    def _batched(self, x: Tensor, shared: Buffers) -> Tensor:
        stacked = {name: plain(leaf) for name, leaf in self.stacked.items()}

        def one(varying: Params) -> Tensor:
            with Unrolled():
                return self._once(varying, x, shared)

        return self._each(one, stacked)

    def _masked(self, x: Tensor, shared: Buffers) -> Tensor:
        dropout, seeds = self.dropout, self.seeds
        assert dropout is not None
        assert seeds is not None

        def one(varying: Params) -> Tensor:
            masks = Masks(dropout, shared, seed=varying["seed"] if self.consistent else None)
            with masks:
                return self._once({}, x, shared)

        with forked(derive(*seeds.tolist())):  # masks that are not consistent come from the global generator
            return self._each(one, {"seed": seeds})

    def _each(self, one: Callable[[Params], Tensor], stacked: Params) -> Tensor:
        """All functions in one batched pass, [S, B, *D, C]."""
        try:
            return vmap(one, randomness="different")(stacked)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # a network that vmap cannot run; an error of the network itself comes back here
            return torch.stack([one(tree.select(stacked, i)) for i in range(len(self))])


def plain(leaf: Tensor) -> Tensor:
    """The tensor without a graph, and not one of `torch.inference_mode`, of which autograd will have none."""
    return leaf.clone() if leaf.is_inference() else leaf.detach()


@dataclass(frozen=True)
class Mixed:
    """Functions of several posteriors of one model."""

    parts: tuple[Functions | Mixed, ...]
    weights: tuple[float, ...]

    def __call__(self, x: Tensor) -> LatentMixture:
        return mix([part(x) for part in self.parts], list(self.weights))


def functions(posterior: Posterior, *, how: str | None = None, draws: int | None = None, seed: int = 0) -> Functions | Mixed:
    """What the posterior averages: draws of its weights or masks ("sampled"), linear functions ("linearized", of a Gaussian), or the
    network at one setting of the weights, without dropout ("point"). None is the posterior's own way.

    >>> import dubito
    >>> model = dubito.Model(torch.nn.Linear(2, 1), dubito.Bernoulli())
    >>> f = functions(Point(model, model.parameters(), model.buffers()))
    >>> f(torch.zeros(3, 2, requires_grad=True)).mean.requires_grad
    True
    """
    if how is not None and how not in WAYS:
        raise ValueError(f"how is one of {', '.join(WAYS)}, or None for the posterior's own way; got {how!r}")
    if draws is not None and draws < 1:
        raise ValueError(f"draws is at least 1; got {draws}")
    for kind, read in FORMS.items():
        if isinstance(posterior, kind):
            return read(posterior, how, draws, seed)
    raise ValueError(
        f"the functions of a {type(posterior).__name__} are not known here: they are of {', '.join(k.__name__ for k in FORMS)}"
    )


def _refuse(posterior: Posterior, how: str | None, *known: str) -> None:
    if how is not None and how not in known:
        raise ValueError(
            f"of a {type(posterior).__name__} posterior the functions are how={' or '.join(map(repr, known))}; got {how!r}"
        )


def _point(posterior: Point, how: str | None, draws: int | None, seed: int) -> Functions:
    _refuse(posterior, how, "point", "sampled")
    return Functions(posterior.model, {**posterior.buffers, **posterior.params}, {})


def _gaussian(posterior: Gaussian, how: str | None, draws: int | None, seed: int) -> Functions:
    model, params, buffers = posterior.model, posterior.params, posterior.buffers
    how = posterior.how if how is None else how
    if how == "point":
        return Functions(model, {**buffers, **params}, {})
    drawn = posterior.covariance.sample(draws or posterior.draws, generator(model.device, seed, "weights"))
    if how == "linearized":
        return Functions(model, {**buffers, **params}, drawn, tangent=True)
    # ways that are not drawn (one pass) are attacked by the draws whose moments they carry
    stacked = {name: (params[name] + leaf).to(params[name].dtype) for name, leaf in drawn.items()}
    return Functions(model, {**buffers, **{name: leaf for name, leaf in params.items() if name not in stacked}}, stacked)


def _samples(posterior: Samples, how: str | None, draws: int | None, seed: int) -> Functions:
    _refuse(posterior, how, "sampled")
    stacked, weights = {**posterior.params, **posterior.own_buffers}, posterior.weights
    if draws is not None and draws < len(posterior):
        if weights is not None:
            raise ValueError("draws with unequal weights are used all together: leave out `draws`")
        stacked = tree.select(stacked, torch.linspace(0, len(posterior) - 1, draws).round().long())
    return Functions(posterior.model, posterior.buffers, stacked, weights)


def _stored(posterior: Stored, how: str | None, draws: int | None, seed: int) -> Functions:
    _refuse(posterior, how, "sampled")
    return _samples(posterior.load(), how, draws, seed)


def _stochastic(posterior: Stochastic, how: str | None, draws: int | None, seed: int) -> Functions:
    _refuse(posterior, how, "sampled", "point")
    shared = {**posterior.buffers, **posterior.params}
    if how == "point":
        return Functions(posterior.model, shared, {})
    seeds = posterior.sample(draws or posterior.draws, generator("cpu", seed, "masks"))["dropout:seed"]
    return Functions(posterior.model, shared, {}, dropout=posterior.dropout, seeds=seeds, consistent=posterior.consistent)


def _drawn(posterior: Drawn, how: str | None, draws: int | None, seed: int) -> Functions:
    _refuse(posterior, how, "sampled")
    drawn = posterior.sample(draws or posterior.draws, generator(posterior.model.device, seed, "weights"))
    stacked = {name: leaf for name, leaf in drawn.items() if name not in posterior.points}
    return Functions(posterior.model, {**posterior.buffers, **posterior.points}, stacked)


def _conjugate(posterior: Conjugate, how: str | None, draws: int | None, seed: int) -> Functions:
    _refuse(posterior, how, "sampled", "point")
    if how == "point":
        return Functions(posterior.model, {**posterior.buffers, **posterior.params}, {})
    drawn = posterior.sample(draws or MEMBERS, generator("cpu", seed, "conjugate"))
    return Functions(posterior.model, posterior.buffers, drawn)


def _mixture(posterior: Mixture, how: str | None, draws: int | None, seed: int) -> Mixed:
    each = None if draws is None else -(-draws // len(posterior.members))
    parts = [functions(member, how=how, draws=each, seed=derive(seed, i)) for i, member in enumerate(posterior.members)]
    return Mixed(tuple(parts), posterior.weights)


FORMS: dict[type[Posterior], Callable[..., Functions | Mixed]] = {
    Point: _point,
    Gaussian: _gaussian,
    Samples: _samples,
    Stored: _stored,
    Stochastic: _stochastic,
    Drawn: _drawn,
    Conjugate: _conjugate,
    Mixture: _mixture,
}
