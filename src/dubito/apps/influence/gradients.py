r"""Data in its order, and gradients of losses, example by example: times some directions, in a quadratic form, or a few at once.

Influences are told by the position of an example, so every pass must see the same example there. The loss of an example is
:math:`\ell_n(\theta) = -\ln p(y_n \mid x_n, \theta)`, its gradient :math:`g_n = J_n^T s_n`, where :math:`s_n` is the slope of the loss
in the network's output. One pass forward and one backward give every layer's inputs a and the gradients of its outputs; what is asked
of :math:`g_n` follows from these layer by layer, so that the N x P matrix of all gradients is never there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dubito.apps.network import Network, check_real, fetched
from dubito.curvature.generic import Unrolled, example_gradients
from dubito.curvature.layout import passed
from dubito.curvature.rows import Layer
from dubito.inference.batches import Data, batches
from dubito.model import Model
from dubito.network.examples import Batch, batch_size, is_indexed
from dubito.network.weights import in_mode
from dubito.tensors import tree
from dubito.tensors.checks import require
from dubito.tensors.covariances import Covariance, Kronecker
from dubito.tensors.covariances.propagation import flat, pieces
from dubito.tensors.tree import Buffers, Params

RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


@dataclass(frozen=True)
class Ordered:
    """Batches of what `fit` takes as data, on the model's device and in the order of the data, as often as one likes."""

    model: Model
    data: Data
    size: int = 128  # examples at a time, where nobody has cut the data into batches

    def __post_init__(self):
        if isinstance(self.data, DataLoader) and _shuffles(self.data):
            raise ValueError(
                "the loader shuffles, so positions do not name examples: give one with shuffle=False, or the data set"
            )

    def __iter__(self) -> Iterator[Batch]:
        return self._pass(shuffle=False, seed=0)

    def count(self) -> int:
        """N, the examples in a pass."""
        return batches(self.model, self.data, size=self.size, shuffle=False).n_data

    def endless(self, seed: int) -> Iterator[Batch]:
        """Pass after pass, each in another order; a loader and a list of batches keep their own."""
        while True:
            yield from self._pass(shuffle=True, seed=seed)
            seed += 1

    def picked(self, index: Tensor) -> Iterator[tuple[Tensor, Any]]:
        """Some of the examples, by position: (places in `index`, a batch of these)."""
        if is_indexed(self.data):  # only these are read
            start = 0
            for batch in Ordered(self.model, Subset(self.data, index.tolist()), self.size):
                stop = start + batch_size(self.model.split(batch)[1])
                yield torch.arange(start, stop), batch
                start = stop
            return
        start = 0
        for batch in self:
            size = batch_size(self.model.split(batch)[1])
            places = ((index >= start) & (index < start + size)).nonzero().squeeze(1)
            if len(places):
                yield places, rows(batch, size, index[places] - start)
            start += size

    def _pass(self, *, shuffle: bool, seed: int) -> Iterator[Batch]:
        dtype = next(self.model.network.parameters()).dtype
        cut = partial(batches, self.model, self.data, n_data=1, size=self.size, shuffle=shuffle)
        return (tree.tensors(batch, dtype) for batch in fetched(self.data, cut, seed=seed))


def _shuffles(loader: DataLoader) -> bool:
    """Whether its order is a random one, as far as can be seen. With a `batch_sampler` of one's own `sampler` says nothing."""
    known = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    return any(isinstance(sampler, RANDOM) or getattr(sampler, "shuffle", False) is True for sampler in known)


def rows(batch: Batch, size: int, which: Tensor) -> Any:
    """Some examples of a batch of so many; what is the same for all of them stays."""
    return tree.apply_leaves(lambda leaf: leaf[which.to(leaf.device)] if leaf.shape[:1] == (size,) else leaf, batch)


def cut(model: Model, data: Ordered, size: int) -> Iterator[Batch]:
    """The same in batches of at most `size`."""
    for batch in data:
        n = batch_size(model.split(batch)[1])
        if n <= size:  # no copy
            yield batch
            continue
        yield from (rows(batch, n, which) for which in torch.arange(n).split(size))


Weigh = Callable[[Any, Tensor, Any, Tensor], Tensor]  # (x, f, targets, slopes of the losses in f) -> cotangents in their place


@dataclass(frozen=True)
class Gradients:
    """A network at `params`, seen as a function of the weights `names`."""

    model: Model
    params: Params
    buffers: Buffers
    names: tuple[str, ...]

    @property
    def like(self) -> Params:
        """The weights whose gradients are meant."""
        return {name: self.params[name] for name in self.names}

    def losses(self, batch: Batch, *, weigh: Weigh | None = None) -> Losses:
        """The losses of a batch on their way back to the layers."""
        x, y = self.model.split(batch)
        size, like = batch_size(y), {name: leaf.detach() for name, leaf in self.like.items()}
        coverage, done, used = passed(self.model, self.params, x, self.buffers, self.names)
        layers = [Layer(p, uses, size, {n: like[n].shape for n in p.names}) for p, uses in used.items() if uses]
        with torch.no_grad():
            f = done.f.detach()
            f = f.float() if f.dtype.itemsize < 4 else f
            target = self.model.likelihood.target(y, f)
            s = -self.model.likelihood.slope(f, target, self.params)
            s = s if weigh is None else weigh(x, f, target, s)
            edges = [use.edge for layer in layers for use in layer.uses]
            back = iter(torch.autograd.grad(done.f, edges, s.to(done.f.dtype), allow_unused=True) if edges else ())
            grads = [layer.outputs([next(back) for _ in layer.uses]) for layer in layers]
            others = {}
            if coverage.generic:
                each = example_gradients(self.model, self.params, x, self.buffers, coverage.generic, s.unsqueeze(0))
                others = {name: leaf[0] for name, leaf in each.items()}
        return Losses(size, like, layers, grads, others)

    def function(self, function: Callable[[Network], Tensor]) -> Params:
        """Gradients of any function of the network that gives [T] numbers, leaves [T, *shape]."""
        live = {name: leaf.detach().requires_grad_() for name, leaf in self.like.items()}
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            value = function(Network(self.model, {**self.params, **live}, self.buffers))
            usable = isinstance(value, Tensor) and value.ndim < 2 and value.requires_grad
            require(usable, f"the function must call network(x) and return [T] numbers with gradients; got {_described(value)}")
            rows = [
                torch.autograd.grad(number, list(live.values()), retain_graph=True, allow_unused=True, materialize_grads=True)
                for number in value.reshape(-1)
            ]
        return {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(live)}

    def inputs(self, batch: Batch, direction: Params) -> Tensor:
        r""":math:`\nabla_x \langle u, \nabla_\theta \ell_n \rangle` of every example for a direction u, in the shape of x."""
        x, y = self.model.split(batch)
        check_real(x, "influence through inputs is a gradient, by numbers such as those of images")
        live = {name: leaf.detach().requires_grad_() for name, leaf in self.like.items()}
        fixed = {name: leaf.detach() for name, leaf in self.params.items() if name not in live}
        leaf = x.detach().clone().requires_grad_()
        with torch.enable_grad(), in_mode(self.model.network, False), sdpa_kernel(SDPBackend.MATH), Unrolled():
            f = self.model.call({**fixed, **live}, leaf, {name: b.detach() for name, b in self.buffers.items()})[0]
            loss = -self.model.score(f, y, {**fixed, **live}).sum()
            slopes = torch.autograd.grad(loss, list(live.values()), create_graph=True, allow_unused=True, materialize_grads=True)
            inner = torch.stack([(s * direction[n]).sum() for n, s in zip(live, slopes, strict=True)]).sum()
            return torch.autograd.grad(inner, leaf, allow_unused=True, materialize_grads=True)[0]


@dataclass(frozen=True)
class Losses:
    """The losses of B examples, with the inputs of every layer and the gradients [B, T, O] of its outputs."""

    size: int
    like: Params
    layers: list[Layer]
    rows: list[Tensor]
    others: Params  # gradients of weights that no layer is known for, leaves [B, *shape]

    def stacked(self) -> Params:
        """All gradients, leaves [B, *shape]."""
        gradients = dict(self.others)
        for layer, g in zip(self.layers, self.rows, strict=True):
            gradients |= layer.gradients(g)
        return {n: gradients[n] if n in gradients else leaf.new_zeros(self.size, *leaf.shape) for n, leaf in self.like.items()}

    def summed(self) -> Params:
        """Their sum over the examples."""
        sums = {name: leaf.sum(0) for name, leaf in self.others.items()}
        for layer, g in zip(self.layers, self.rows, strict=True):
            sums |= layer.summed(g)
        return {name: sums.get(name, torch.zeros_like(leaf)) for name, leaf in self.like.items()}

    def along(self, directions: Params) -> Tensor:
        """Inner products [T, B] with directions, leaves [T, *shape]."""
        first = next(iter(directions.values()))
        total = first.new_zeros(len(first), self.size)
        for name, leaf in self.others.items():
            total += flat(directions[name], 1) @ flat(leaf, 1).mT
        for layer, g in zip(self.layers, self.rows, strict=True):
            if layer.part.kind == "affine" and layer.part.weight is not None and layer.positions == 1:
                self._add_single(total, layer, g.squeeze(1), directions)
            elif layer.part.kind == "lookup":
                self._add_lookup(total, layer, g, directions)
            else:
                for piece, leaves in _leaves(layer, g):
                    for name, leaf in leaves.items():
                        total[:, piece] += flat(directions[name], 1) @ flat(leaf, 1).mT
        return total

    def _add_lookup(self, total: Tensor, layer: Layer, g: Tensor, directions: Params) -> None:
        """An embedding: only the rows that were looked up."""
        assert layer.part.weight is not None
        looked, example, index = layer.lookups(g)
        for piece in pieces(len(total), looked.numel(), looked):
            inner = (directions[layer.part.weight][piece][:, index] * looked).sum(-1)
            total[piece] = total[piece].index_add(1, example, inner)

    def _add_single(self, total: Tensor, layer: Layer, g: Tensor, directions: Params) -> None:
        """A layer with one position: <U, g a^T> = g . (U a), without the outer products of all examples."""
        assert layer.part.weight is not None
        a, weight = layer.a.squeeze(1), directions[layer.part.weight]
        outputs = weight.shape[1]
        for piece in pieces(len(weight), len(a) * outputs, a):
            turned = weight[piece].reshape(-1, a.shape[-1]) @ a.mT  # [t O, B]
            total[piece] += (turned.view(-1, outputs, len(a)) * g.mT).sum(1)
        if layer.part.bias is not None:
            total += directions[layer.part.bias] @ g.mT

    def quadratic(self, covariance: Covariance) -> Tensor:
        r""":math:`g_n^T \Sigma g_n` of every example, [B]."""
        blocks = covariance.independent_blocks
        total = next(iter(self.like.values())).new_zeros(self.size)
        by_weight = {layer.part.weight: (layer, g) for layer, g in zip(self.layers, self.rows, strict=True)}
        for block in blocks:
            if isinstance(block, Kronecker) and block.weight in by_weight:
                total += _kronecker(block, *by_weight[block.weight])
            elif block.independent:
                total += self._diagonal(block.variance())
            else:
                total += self._whole(block)
        return total

    def _diagonal(self, variance: Params) -> Tensor:
        first = next(iter(variance.values()))
        total = first.new_zeros(self.size)
        for name, leaf in self.others.items():
            if name in variance:
                total += flat(leaf**2 * variance[name], 1).sum(1)
        for layer, g in zip(self.layers, self.rows, strict=True):
            part = layer.part
            if not set(part.names) <= set(variance):
                continue
            if part.kind == "lookup":
                assert part.weight is not None
                looked, example, index = layer.lookups(g)
                total = total.index_add(0, example, (looked**2 * variance[part.weight][index]).sum(-1))
            else:
                for piece, leaves in _leaves(layer, g):
                    for name, leaf in leaves.items():
                        total[piece] += flat(leaf**2 * variance[name], 1).sum(1)
        return total

    def _whole(self, block: Covariance) -> Tensor:
        """Any structure over the weights of several layers: their gradients of some examples at a time."""
        forms = []
        for piece in pieces(self.size, 2 * block.size, next(iter(self.like.values()))):
            leaves = {name: leaf[piece] for name, leaf in self.others.items() if name in block.shapes}
            for layer, g in zip(self.layers, self.rows, strict=True):
                if set(layer.part.names) & set(block.shapes):
                    leaves |= layer.examples(piece).gradients(g[piece])
            n = piece.stop - piece.start
            v = {k: leaves[k] if k in leaves else self.like[k].new_zeros(n, *self.like[k].shape) for k in block.shapes}
            pulled = block.product(v)
            forms.append(torch.stack([flat(v[name] * pulled[name], 1).sum(1) for name in v]).sum(0))
        return torch.cat(forms)


def _kronecker(block: Kronecker, layer: Layer, g: Tensor) -> Tensor:
    """In the eigenbasis, where the weights of a layer are independent."""
    turned = g @ block.left
    if layer.positions == 1:
        return (turned.squeeze(1) ** 2 * (layer.energy(block.inputs) @ block.variances.mT)).sum(1)
    forms = []
    for piece in pieces(layer.batch, block.variances.numel() + layer.positions * sum(block.variances.shape), g):
        a = layer.examples(piece).rotated(block.inputs)
        forms.append(((turned[piece].mT @ a).square_() * block.variances).flatten(1).sum(1))
    return torch.cat(forms)


def _leaves(layer: Layer, g: Tensor) -> Iterator[tuple[slice, Params]]:
    """Gradients of a layer's weights [b, *shape], some examples at a time."""
    for piece in pieces(layer.batch, sum(layer.shapes[name].numel() for name in layer.part.names), g):
        yield piece, layer.examples(piece).gradients(g[piece])


def _described(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor {list(value.shape)}, {'with' if value.requires_grad else 'without'} gradients"
