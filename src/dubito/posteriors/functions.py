"""A posterior as functions of x: deterministic, and differentiable in the input.

`posterior.predict` keeps no graph. `posterior.functions` gives the same functions with one: `Functions` holds the weights, masks or
linearizations that `predict` would use with the same `how`, `draws` and `seed`, and runs them so that autograd can go back to x, and
only there. `posterior.function` is one of them, and `posterior.settings` are the weights of a few.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from dubito.curvature.generic import Unrolled, along
from dubito.model import Model
from dubito.model.likelihoods import likelihood_params
from dubito.network.weights import in_mode
from dubito.posteriors.predict.dropout import Dropout, Masks
from dubito.posteriors.predictive import LatentMixture, mix
from dubito.tensors import tree
from dubito.tensors.randomness import derive_seed, fork_rng
from dubito.tensors.tree import Buffers, Params

WAYS = ("sampled", "linearized", "point")


class Setting(NamedTuple):
    """One setting of the weights, and its share among several."""

    params: Params
    buffers: Buffers
    weight: float = 1.0


class UnequalWeights(ValueError):
    """Draws with weights of their own are used all together, so that there can be no fewer of them."""

    def __init__(self):
        super().__init__("draws with unequal weights are used all together: leave out `draws`")


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

    @property
    def shares(self) -> Tensor:
        """Their weights in the mixture, [S]."""
        return torch.full((len(self),), 1 / len(self)) if self.weights is None else self.weights.detach().cpu()

    def split(self, size: int) -> list[Functions]:
        """The same functions, at most `size` at a time."""
        cuts = [slice(i, i + size) for i in range(0, len(self), size)]
        return [
            replace(
                self,
                stacked=tree.select(self.stacked, cut),
                seeds=None if self.seeds is None else self.seeds[cut],
                weights=self.shares[cut] / self.shares[cut].sum(),
            )
            for cut in cuts
        ]

    def single(self) -> Functions:
        """The first of them, for which nothing has to be batched. Its dropout mask is one for all inputs, whatever the posterior
        predicts with: otherwise every input would have a function of its own."""
        if self.dropout is not None:
            return Masked(self.model, self.shared, {}, dropout=self.dropout, seeds=self.seeds)
        if self.tangent or not self.stacked:
            return self
        return replace(self, shared={**self.shared, **tree.select(self.stacked, 0)}, stacked={})

    def __call__(self, x: Tensor) -> LatentMixture:
        """The predictive at x, with a graph back to x."""
        shared = {name: plain(leaf) for name, leaf in self.shared.items()}
        with in_mode(self.model.network, False), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's own: operators without a batching rule, deprecated parts
            if self.dropout is not None:
                f = self._masked(x, shared)
            elif not self.stacked:
                f = self._once({}, x, shared).unsqueeze(0)
            elif self.tangent:
                f = torch.stack([self._once(tree.select(self.stacked, i), x, shared) for i in range(len(self))])
            else:
                f = self._batched(x, shared)
        learned = likelihood_params(shared if self.tangent else {**shared, **self.stacked})
        f = tree.full_precision(f)
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
            """The network's output, as a function of the weights that move."""
            with Unrolled():
                return self.model.call(live, x, fixed)[0]

        f, slope = along(output, live, {name: leaf.to(live[name].dtype) for name, leaf in varying.items()})
        return f + slope

    def _batched(self, x: Tensor, shared: Buffers) -> Tensor:
        stacked = {name: plain(leaf) for name, leaf in self.stacked.items()}

        def one(varying: Params) -> Tensor:
            """One function at x."""
            with Unrolled():
                return self._once(varying, x, shared)

        return self._each(one, stacked)

    def _masked(self, x: Tensor, shared: Buffers) -> Tensor:
        dropout, seeds = self.dropout, self.seeds
        assert dropout is not None
        assert seeds is not None

        def one(varying: Params) -> Tensor:
            """One function at x."""
            masks = Masks(dropout, shared, seed=varying["seed"] if self.consistent else None)
            with masks:
                return self._once({}, x, shared)

        with fork_rng(derive_seed(*seeds.tolist())):  # masks that are not consistent come from the global generator
            return self._each(one, {"seed": seeds})

    def _each(self, one: Callable[[Params], Tensor], stacked: Params) -> Tensor:
        """All functions in one batched pass, [S, B, *D, C]."""
        try:
            return vmap(one, randomness="different")(stacked)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # a network that vmap cannot run; an error of the network itself comes back here
            return torch.stack([one(tree.select(stacked, i)) for i in range(len(self))])


class Masked(Functions):
    """One function with one consistent mask: nothing to batch over, and no generator to lend."""

    def _masked(self, x: Tensor, shared: Buffers) -> Tensor:
        assert self.dropout is not None
        assert self.seeds is not None
        with Masks(self.dropout, shared, seed=self.seeds[0]):
            return self._once({}, x, shared).unsqueeze(0)


def plain(leaf: Tensor) -> Tensor:
    """The tensor without a graph, and not one of `torch.inference_mode`, of which autograd will have none."""
    return leaf.clone() if leaf.is_inference() else leaf.detach()


@dataclass(frozen=True)
class Mixed:
    """Functions of several posteriors of one model."""

    parts: tuple[Functions | Mixed, ...]
    weights: tuple[float, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def shares(self) -> Tensor:
        """The weights of all functions in the mixture, [S]."""
        return torch.cat([part.shares * weight for part, weight in zip(self.parts, self.weights, strict=True)])

    def split(self, size: int) -> list[Functions]:
        """The same functions, at most `size` at a time."""
        return [piece for part in self.parts for piece in part.split(size)]

    def __call__(self, x: Tensor) -> LatentMixture:
        """The predictive at x, with a graph back to x."""
        return mix([part(x) for part in self.parts], list(self.weights))


def spaced(n: int, count: int) -> Tensor:
    """At most `count` of the numbers 0 to n - 1, evenly spaced.

    >>> spaced(10, 4)
    tensor([0, 3, 6, 9])
    """
    return torch.arange(n) if n <= count else torch.linspace(0, n - 1, count).round().long()


def spaced_by_weight(weights: Tensor, count: int) -> tuple[list[int], list[float]]:
    """Draws with a weight, and their shares: all of them, or those at `count` evenly spaced points of the sum of the weights."""
    weights = weights.double().cpu() / weights.double().sum().cpu()
    which = weights.nonzero().squeeze(1)
    if len(which) <= count:
        return which.tolist(), weights[which].tolist()
    points = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    chosen, hits = torch.searchsorted(weights.cumsum(0), points).clamp(max=int(which[-1])).unique(return_counts=True)
    return chosen.tolist(), (hits.double() / count).tolist()


def on_cpu(generator: torch.Generator) -> torch.Generator:
    """A generator on the CPU, the same on every device: for choices among a few."""
    if generator.device.type == "cpu":
        return generator
    return torch.Generator().manual_seed(int(torch.randint(2**62, (1,), generator=generator, device=generator.device)))
