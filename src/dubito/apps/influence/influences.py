"""What the training examples do to losses, predictions, weights and each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dubito.apps.influence.gradients import Gradients, Losses, Weigh
from dubito.apps.influence.inverse import Inverse, Structured, leverages
from dubito.apps.influence.ordered import Ordered, cut
from dubito.apps.network import Network
from dubito.curvature.cotangents import observed
from dubito.model.likelihoods import own
from dubito.network.examples import Inputs
from dubito.posteriors import Point
from dubito.posteriors.predict.linearized import linearized
from dubito.tensors import tree
from dubito.tensors.checks import require
from dubito.tensors.covariances.propagation import flat
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
        structured = not leverage or isinstance(self.inverse, Structured)
        require(structured, "leverage=True needs the inverse as a structure: use solver='dense', 'ekfac' or 'posterior'")
        weigh = self._left_out if leverage else None
        return torch.cat([self._along(directions, weigh) for directions in self._directions(what)])

    def self_influence(self) -> Tensor:
        r"""How much the loss of a training example rises when it is left out itself, [N]: :math:`g_n^T H^{-1} g_n`, to first order.

        It is never negative, and large where nothing but an example's own presence explains it: wrong labels, and the rare.
        With a structure it is a pass over the data; by "cg" or "lissa" every example is solved for on its own."""
        if isinstance(self.inverse, Structured):
            covariance = self.inverse.covariance
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
        """The model as if these training examples had never been there, to first order."""
        moved = {name: (self.at.params[name] + leaf).to(self.at.params[name].dtype) for name, leaf in self.shift(index).items()}
        return Point(self.at.model, {**self.at.params, **moved}, self.at.buffers)

    def on_inputs(self, what: What, index: Index) -> Tensor:
        r"""The gradient of what is asked about (the sum, if it is several) by the inputs of some training examples, [K, *shape of x]:

        .. math:: \nabla_{x_n} F = -\nabla_{x_n} \langle H^{-1} \nabla F, \nabla_\theta \ell_n \rangle.

        It tells which pixels of a training image matter; a step along it is what an attacker who may change the data would take."""
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
        seen = 0
        for batch in self.data:
            losses = self.at.losses(batch, weigh=weigh)
            seen += losses.size
            yield losses
        require(seen == self.n_data, f"every pass must see the same examples: there were {self.n_data}, and now {seen}")

    def _along(self, directions: Params, weigh: Weigh | None = None) -> Tensor:
        return torch.cat([losses.along(directions).cpu() for losses in self._pass(weigh)], 1)

    def _left_out(self, x: Inputs, f: Tensor, target: Any, slopes: Tensor) -> Tensor:
        """Slopes that make a Newton step on the other examples of what would be a step of first order."""
        assert isinstance(self.inverse, Structured)
        at, likelihood = self.at, self.at.model.likelihood
        flat_outputs = f.ndim == 2 and f.shape[-1] <= 100
        require(flat_outputs, f"leverage=True needs one vector of at most 100 outputs for each example; got {list(f.shape)}")
        p = linearized(at.model, x, params=at.params, buffers=at.buffers, covariance=self.inverse.covariance)
        fisher = likelihood.fisher(f, own(at.params))
        if (seen := observed(at.model, target, f)) is not None:
            fisher = fisher * seen.unsqueeze(-1) * seen.unsqueeze(-2)
        return leverages(fisher, p.covariances[0], slopes)

    def _index(self, index: Index) -> Tensor:
        which = torch.as_tensor([index] if isinstance(index, int) else index).reshape(-1).cpu()
        whole = which.dtype != torch.bool and not which.is_floating_point() and len(which)
        require(whole, "training examples are named by their positions in the data, at least one: 3, or [3, 17]")
        if int(which.min()) < 0 or int(which.max()) >= self.n_data:
            raise IndexError(f"there are {self.n_data} training examples, from 0 to {self.n_data - 1}; got {which.tolist()[:8]}")
        return which
