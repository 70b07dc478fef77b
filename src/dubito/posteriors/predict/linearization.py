r"""The network linearized in its weights at some inputs: covariances :math:`J \Sigma J^T` of its outputs.

The Jacobian J of outputs x parameters is never formed. One forward pass records every layer's inputs a; each output is
back-propagated to the layers' outputs, which gives g; and a layer with covariance :math:`L \otimes R` in its eigenbasis, variances V,
adds

.. math:: (J \Sigma J^T)_{cd} \mathrel{+}= \sum_o \tilde g_{co} \tilde g_{do} v_o, \qquad v = V \tilde a^{\circ 2},
          \qquad \tilde g = L^T g, \; \tilde a = R^T a.

Where a layer has several positions its gradients are formed example by example, layer by layer, in pieces of bounded size.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from dubito.curvature.generic import example_gradients
from dubito.curvature.layout import Layout, Part, passed
from dubito.curvature.rows import Layer
from dubito.model import Model
from dubito.network.examples import Inputs
from dubito.tensors.covariances import Covariance
from dubito.tensors.covariances.propagation import WIDE, flat, gram
from dubito.tensors.tree import Buffers, Params

SMALL = 2**18  # numbers in the outputs of all layers up to which a CPU does all cotangents at once
_UNBATCHED: WeakSet[nn.Module] = WeakSet()  # networks with an operation that cannot


class Linearization:
    """The network linearized at some inputs: one forward pass, from which gradients go back to the layers as they are asked for."""

    def __init__(
        self,
        model: Model,
        params: Params,
        buffers: Buffers,
        covariance: Covariance,
        x: Inputs,
        found: Layout,
        names: tuple[str, ...],
    ):
        self.model, self.params, self.buffers, self.x = model, params, buffers, x
        self.top: Tensor | None = None  # [B, k], outputs to follow, where these are not all
        self.blocks = covariance.independent_blocks
        self.found, self.done, used = passed(model, params, x, buffers, names, found)
        self.size = self.done.f.shape[0]
        shapes = {name: params[name].shape for name in names}
        self.layers = [
            Layer(own, uses, self.size, {n: shapes[n] for n in own.names})
            for part, uses in used.items()
            if uses
            for own in self._within(part)
        ]
        f = self.done.f.detach()
        self.f = f.float() if f.dtype.itemsize < 4 else f

    def _within(self, part: Part) -> list[Part]:
        """A layer as it is; or its matrix and its bias apart, where these are in blocks of their own."""
        if any(set(part.names) <= set(block.shapes) for block in self.blocks):
            return [part]
        return [replace(part, bias=None), replace(part, weight=None)]

    def _output(self) -> Layer | None:
        """The layer, if it is the output layer alone."""
        if len(self.layers) != 1 or self.found.generic or self.done.f.ndim != 2 or self.done.taps:
            return None
        (layer,) = self.layers
        alone = layer.part.matrix is not None and len(layer.uses) == 1
        return layer if alone and layer.uses[0].edge.node is self.done.f.grad_fn else None

    def wide_root(self, factor: float = 1.0) -> Tensor | None:
        """A root [B, C, C] of the covariance of many outputs, where the weights are the output layer's and its structure knows one."""
        if self.f.ndim != 2 or self.f.shape[-1] <= WIDE or (layer := self._output()) is None:
            return None
        with torch.no_grad():
            return self.blocks[0].output_root(layer, factor)

    def covariances(self, factors: Sequence[float] = (1.0,)) -> Tensor:
        """[G, B, *D, C, C], or without the last C where outputs are independent: for each multiple of the prior's precision."""
        with torch.no_grad():
            layer = self._output() if self.top is None else None  # whose Jacobian is its input: nothing is back-propagated
            if layer is not None:
                closed = self.blocks[0].propagate_output(layer, self.f.shape[-1], factors)
                if closed is not None:
                    return closed
            shape = self.f.shape
            found = [self._position(i, factors) for i in range(self.f[0].numel() // shape[-1])]
            outputs = found[0].shape[-1]
            return torch.stack(found, 2).reshape(len(factors), *shape[:-1], outputs, outputs)

    def _gradients(self, position: int) -> tuple[list[Tensor], Tensor]:
        """Rows [C, B, T, O] of the outputs at a position, for each layer, and the cotangents [C, B, *D, C]."""
        f, unit = self.done.f, self._units(position)
        taps = self.done.taps
        edges = [use.edge for layer in self.layers for use in layer.uses] + [tap.edge for tap in taps]
        roots = [None] * (len(edges) - len(taps)) + [tap.var.sqrt() for tap in taps]
        found = iter(self._swept(f, edges, unit, roots) if edges else ())
        rows = [_rows(layer, [next(found) for _ in layer.uses], len(unit), self.exact) for layer in self.layers]
        noise = [(tap.axis, g) for tap, g in zip(taps, found, strict=True) if g is not None]
        self.noise = [gram(g.movedim(axis + 1, 1).flatten(2)) for axis, g in noise]  # [B, C, C] each
        return rows, unit

    def _units(self, position: int) -> Tensor:
        """The cotangents [C, B, *D, C] of the outputs at a position, or [k, B, C] of the `top` ones of each example."""
        f = self.done.f
        classes = f.shape[-1]
        if self.top is not None:
            unit = torch.zeros(self.top.shape[1], *f.shape, dtype=f.dtype, device=f.device)
            return unit.scatter_(2, self.top.mT.unsqueeze(-1), 1.0)
        unit = torch.zeros(classes, self.size, f[0].numel() // classes, classes, dtype=f.dtype, device=f.device)
        for c in range(classes):
            unit[c, :, position, c] = 1
        return unit.reshape(classes, *f.shape)

    def _others(self, unit: Tensor) -> Params:
        """Gradients [C, B, *shape] of the weights that belong to no known layer."""
        if not self.found.generic:
            return {}
        return example_gradients(self.model, self.params, self.x, self.buffers, self.found.generic, unit)

    @property
    def exact(self) -> bool:
        """Whether sums are formed of numbers in full precision; on a GPU those of bfloat16 are, and sums over them are exact anyway."""
        return not (self.done.f.is_cuda and self.done.f.dtype == torch.bfloat16)

    def _swept(self, f: Tensor, edges: list[GradientEdge], unit: Tensor, by: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Gradients of every output, [C, ...], times `by`. All outputs at once where one at a time would be mostly overhead."""
        traced = isinstance(self.size, torch.SymInt)  # a batch of gradients would fix the number of examples
        small = not traced and (f.is_cuda or self.size * self.found.taps < SMALL)
        if small and self.model.network not in _UNBATCHED:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of operators without a batching rule, which are looped over
                    slopes = torch.autograd.grad(f, edges, unit, retain_graph=True, allow_unused=True, is_grads_batched=True)
                return [g if g is None or root is None else g * root for g, root in zip(slopes, by, strict=True)]
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                _UNBATCHED.add(self.model.network)
        return _swept_one_by_one(f, edges, unit, by)

    def _position(self, position: int, factors: Sequence[float]) -> Tensor:
        """The covariances [G, B, C, C] of the outputs at one position."""
        rows, unit = self._gradients(position)
        total = self.f.new_zeros(len(factors), self.size, unit.shape[0], unit.shape[0])
        left = dict(zip(self.layers, rows, strict=True))
        others = self._others(unit)
        for block in self.blocks:
            names = set(block.shapes)
            mine = [(layer, g) for layer, g in left.items() if set(layer.part.names) <= names]
            total += block.propagate(mine, {name: others[name] for name in others if name in names}, total, factors)
        for cov in self.noise:
            total += cov
        return total

    def joint(self) -> Tensor:
        """[B, C, B, C]: every block's gradients of all inputs together, times a root of its covariance."""
        if self.f.ndim != 2:
            raise ValueError("a joint covariance over inputs is for networks with one output vector an input")
        with torch.no_grad():
            rows, unit = self._gradients(0)
            leaves = self._others(unit)
            for layer, g in zip(self.layers, rows, strict=True):
                each = [layer.gradients(one.float() if one.dtype.itemsize < 4 else one) for one in g]
                leaves |= {name: torch.stack([e[name] for e in each]) for name in each[0]}
            classes, total = unit.shape[0], self.f.new_zeros(())
            for block in self.blocks:
                unused = {n: unit.new_zeros(classes, self.size, *s) for n, s in block.shapes.items() if n not in leaves}
                known = {**leaves, **unused}
                mine = {name: known[name].flatten(0, 1) for name in block.shapes}
                product = block.product(mine)
                for name, leaf in mine.items():
                    total = total + flat(leaf, 1) @ flat(product[name], 1).mT
            return total.reshape(classes, self.size, classes, self.size).permute(1, 0, 3, 2)


def _swept_one_by_one(f: Tensor, edges: list[GradientEdge], unit: Tensor, by: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Gradients of every output, [C, ...], times `by`: a pass backwards for each output."""
    whole: list[Tensor | None] = [None] * len(edges)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no current CUDA context.*")  # of torch's own threads
        for c, one in enumerate(unit):
            for i, g in enumerate(torch.autograd.grad(f, edges, one, retain_graph=True, allow_unused=True)):
                if g is None:
                    continue
                place, root = whole[i], by[i]
                if place is None:
                    place = whole[i] = g.new_empty(len(unit), *g.shape)
                place[c].copy_(g) if root is None else torch.mul(g, root, out=place[c])
    return whole


def _rows(layer: Layer, gradients: list[Tensor | None], classes: int, exact: bool) -> Tensor:
    """Gradients [C, ...] of the outputs of all uses of a layer, as rows [C, B, T, O]."""
    if all(g is None for g in gradients):
        rows = layer.outputs(gradients, exact=exact)
        return rows.expand(classes, *rows.shape)
    known = [g for g in gradients if g is not None]

    def _one(*given: Tensor) -> Tensor:
        each = iter(given)
        return layer.outputs([None if g is None else next(each) for g in gradients], exact=exact)

    return torch.func.vmap(_one)(*known)
