r"""Prediction by linearizing the network in its weights: a Gaussian over f with mean f(x) and covariance :math:`J \Sigma J^T`.

The Jacobian J of outputs x parameters is never formed. One forward pass records every layer's inputs a; each output is
back-propagated to the layers' outputs, which gives g; and a layer with covariance :math:`L \otimes R` in its eigenbasis, variances V,
adds

.. math:: (J \Sigma J^T)_{cd} \mathrel{+}= \sum_o \tilde g_{co} \tilde g_{do} v_o, \qquad v = V \tilde a^{\circ 2},
          \qquad \tilde g = L^T g, \; \tilde a = R^T a.

Where a layer has several positions its gradients are formed example by example, layer by layer, in pieces of bounded size.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from dubito.curvature.capture import example_count, select_examples
from dubito.curvature.generic import example_gradients
from dubito.curvature.layout import Layout, Part, layout, passed
from dubito.curvature.rows import Layer, layer_rows
from dubito.model import Model
from dubito.model.likelihoods import likelihood_params
from dubito.network.examples import Inputs, check_outputs
from dubito.posteriors.predict.sampled import GIGABYTE, Stack, room
from dubito.posteriors.predict.tangents import DRAWS, drawn_functions, drawn_variances, prepared
from dubito.posteriors.predictive import LatentMixture
from dubito.tensors import tree
from dubito.tensors.covariances import Covariance, Dense, Diagonal, Kronecker
from dubito.tensors.covariances.propagation import WIDE, flat, gram
from dubito.tensors.tree import Buffers, Params

SMALL = 2**18  # numbers in the outputs of all layers up to which a CPU does all cotangents at once
_UNBATCHED: WeakSet[nn.Module] = WeakSet()  # networks with an operation that cannot


class Linearization:
    """The network linearized at some inputs: one forward pass, from which gradients go back to the layers as they are asked for.

    `memory` bounds, in gigabytes, what the gradients of some outputs may take at a time.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        buffers: Buffers,
        covariance: Covariance,
        x: Inputs,
        found: Layout,
        names: tuple[str, ...],
        memory: float = math.inf,
    ):
        self.model, self.params, self.buffers, self.x = model, params, buffers, x
        self.blocks, self.memory = covariance.independent_blocks, memory
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
        self.f = tree.full_precision(f)

    def _within(self, part: Part) -> list[Part]:
        """A layer as it is; or its matrix and its bias apart, where these are in blocks of their own."""
        if any(set(part.names) <= set(block.shapes) for block in self.blocks):
            return [part]
        return [replace(part, bias=None), replace(part, weight=None)]

    def _output(self) -> Layer | None:
        """The layer, if it is the output layer alone, with every position as an example of its own."""
        return self.layers[0].apart() if self.found.alone and len(self.layers) == 1 and not self.done.taps else None

    def wide_root(self, factor: float = 1.0) -> Tensor | None:
        """A root [B, *D, C, C] of the covariance of many outputs, where the weights are the output layer's and its structure knows
        one."""
        if self.f.shape[-1] <= WIDE or (layer := self._output()) is None:
            return None
        with torch.no_grad():
            root = self.blocks[0].output_root(layer, factor)
            return None if root is None else root.unflatten(0, self.f.shape[:-1])

    def spread(self, others: Tensor | None, top: int | None) -> tuple[Tensor, bool]:
        """Variances of all outputs, exact ones of the `top` largest; or without `top` the covariances or a root of them; and whether
        it is a root."""
        if top is not None:
            return self.variances(others, top), False
        root = self.wide_root()
        return (self.covariances()[0], False) if root is None else (root, True)

    def covariances(self, factors: Sequence[float] = (1.0,)) -> Tensor:
        """[G, B, *D, C, C], or without the last C where outputs are independent: for each multiple of the prior's precision."""
        shape = self.f.shape
        with torch.no_grad():
            if (layer := self._output()) is not None:  # whose Jacobian is its input: nothing is back-propagated
                closed = self.blocks[0].propagate_output(layer, shape[-1], factors)
                if closed is not None:
                    return closed.unflatten(1, shape[:-1])
            positions = shape[1:-1].numel()
            if positions == 1:
                return self._position(0, factors).reshape(len(factors), *shape, shape[-1])
            whole = self.f.new_empty(len(factors), self.size, positions, shape[-1], shape[-1])
            for i in range(positions):
                whole[:, :, i] = self._position(i, factors)
            return whole.reshape(len(factors), *shape, shape[-1])

    def variances(self, rough: Tensor | None, top: int) -> Tensor:
        """Variances [B, *D, C]: exact ones of all outputs, where the weights are the output layer's and its structure knows them, or
        where there are no rough ones; else of the `top` largest at each position."""
        with torch.no_grad():
            layer = self._output()
            known = None if layer is None else self.blocks[0].output_variances(layer, self.f.shape[-1])
        if known is not None:
            return known.unflatten(0, self.f.shape[:-1])
        return self._with_exact(rough, top) if rough is not None else self.covariances()[0].diagonal(dim1=-2, dim2=-1)

    def _with_exact(self, rough: Tensor, top: int) -> Tensor:
        """Rough variances, with those of the `top` largest outputs at each position by back-propagation."""
        f, variance = self.f.flatten(1, -2) if self.f.ndim > 2 else self.f.unsqueeze(1), rough.to(self.f).clone()
        largest, flat = f.topk(top).indices, variance.view_as(f)  # [B, positions, k]
        with torch.no_grad():
            for i in range(f.shape[1]):
                for some in largest[:, i].split(self._at_once(top), 1):
                    exact = self._block(i, some, (1.0,))[0].diagonal(dim1=1, dim2=2)
                    flat[:, i].scatter_(1, some, exact)
        return variance

    def _at_once(self, outputs: int) -> int:
        """How many outputs at a position are followed at a time: their cotangents, the gradients of layers, and those of weights."""
        if math.isinf(self.memory):
            return outputs
        each = self.size * numbers_of_output(self.found, self.params) + 3 * self._rows()
        budget = _budget(self.memory, self.f.dtype) - self.size * numbers_of_pass(self.found)
        return max(1, min(outputs, int(budget / max(1, each))))

    def _rows(self) -> int:
        """How many numbers of an output's gradient in the weights are formed at a time, for an example."""
        whole = [block.size for block in self.blocks if not isinstance(block, Diagonal | Kronecker)]
        shared = [layer for layer in self.layers if layer.part.kind == "affine" and layer.positions > 1]
        return max([sum(shape.numel() for shape in layer.shapes.values()) for layer in shared] + whole, default=0)

    def _swept_rows(self, unit: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """For cotangents [n, B, *D, C]: rows [n, B, T, O] of each layer, and what noise of no layer adds, [B, n, n] each."""
        f, taps = self.done.f, self.done.taps
        edges = [use.edge for layer in self.layers for use in layer.uses] + [tap.edge for tap in taps]
        roots = [None] * (len(edges) - len(taps)) + [tap.var.sqrt() for tap in taps]
        found = iter(self._swept(f, edges, unit, roots) if edges else ())
        rows = [layer_rows(layer, [next(found) for _ in layer.uses], len(unit), self.exact) for layer in self.layers]
        noise = [(tap.axis, g) for tap, g in zip(taps, found, strict=True) if g is not None]
        whole = self.model.coupled
        noise = [g.reshape(len(g), 1, -1) if whole else g.movedim(axis + 1, 1).flatten(2) for axis, g in noise]  # [C, B, *]
        return rows, [gram(g) for g in noise]

    def _units(self, position: int, outputs: Tensor) -> Tensor:
        """The cotangents [n, B, *D, C] of `outputs` [B, n] at a position."""
        f = self.done.f
        unit = torch.zeros(outputs.shape[1], self.size, f.shape[1:-1].numel(), f.shape[-1], dtype=f.dtype, device=f.device)
        unit[:, :, position].scatter_(2, outputs.mT.unsqueeze(-1), 1.0)
        return unit.reshape(-1, *f.shape)

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
        traced = tree.symbolic(self.size)  # a batch of gradients would fix the number of examples
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
        """The covariances [G, B, C, C] of the outputs at one position. Where they are too many at a time, pair by pair of portions."""
        classes = self.f.shape[-1]
        every, step = torch.arange(classes, device=self.f.device), self._at_once(classes)
        if step >= classes:
            return self._block(position, every.expand(self.size, -1), factors)
        total = self.f.new_empty(len(factors), self.size, classes, classes)
        for pair in combinations(every.split(max(1, step // 2)), 2):
            some = torch.cat(pair)
            total[:, :, some.unsqueeze(1), some] = self._block(position, some.expand(self.size, -1), factors)
        return total

    def _block(self, position: int, outputs: Tensor, factors: Sequence[float]) -> Tensor:
        """The covariances [G, B, n, n] of some `outputs` [B, n] at one position."""
        unit = self._units(position, outputs)
        rows, noise = self._swept_rows(unit)
        total = self.f.new_zeros(len(factors), self.size, len(unit), len(unit))
        left = dict(zip(self.layers, rows, strict=True))
        others = self._others(unit)
        for block in self.blocks:
            names = set(block.shapes)
            mine = [(layer, g) for layer, g in left.items() if set(layer.part.names) <= names]
            total += block.propagate(mine, {name: others[name] for name in others if name in names}, total, factors)
        for cov in noise:
            total += cov
        return total

    def joint(self) -> Tensor:
        """[B, C, B, C]: every block's gradients of all inputs together, times a root of its covariance."""
        if self.f.ndim != 2:
            raise ValueError("a joint covariance over inputs is for networks with one output vector an input")
        with torch.no_grad():
            unit = self._units(0, torch.arange(self.f.shape[-1], device=self.f.device).expand(self.size, -1))
            (rows, _), leaves = self._swept_rows(unit), self._others(unit)
            for layer, g in zip(self.layers, rows, strict=True):
                each = [layer.gradients(tree.full_precision(one)) for one in g]
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


POSITIONS = 256  # outputs of an example (classes times pixels) up to which every one is swept back
SWEPT = 2**24  # outputs times numbers in all layers of an example, up to which every one is swept back, too
MATRICES = 2**24  # numbers in all covariances of an example, above which draws stand for them
COUPLED = 2**31  # the same for rows that are coupled: outputs of all rows, times numbers in the outputs of all layers


def drawn(model: Model, found: Layout, covariance: Covariance) -> bool:
    """Whether an example has so many outputs that draws of linear functions stand for their Gaussian."""
    if model.coupled:
        return found.outputs * found.taps > COUPLED
    closed = _closed(found, covariance)
    swept = closed or found.flat or found.outputs <= POSITIONS or found.outputs * found.taps <= SWEPT
    variances = closed and found.classes > WIDE and covariance.independent_blocks[0].independent  # and no matrices
    return not swept or (found.outputs * found.classes > MATRICES and not variances)


def _closed(found: Layout, covariance: Covariance) -> bool:
    """Whether only the output layer's weights are random, and their structure gives the outputs' covariance without a sweep."""
    blocks = covariance.independent_blocks
    return found.alone and len(blocks) == 1 and isinstance(blocks[0], Diagonal | Kronecker | Dense) and not blocks[0].picked()


@torch.inference_mode(False)
def linearized(
    model: Model,
    x: Inputs,
    *,
    params: Params,
    buffers: Buffers,
    covariance: Covariance,
    draws: int | None = None,
    fallback: int = DRAWS,
    memory: float | None = None,
    generator: torch.Generator | None = None,
    top: int | None = None,
    others: Tensor | None = None,
) -> LatentMixture:
    """The predictive of the linearized network at x.

    With `draws`, or where an example has very many outputs (segmentation: then `fallback` of them), as so many functions
    f(x) + J(x) (theta - mean) with theta from the posterior, the same functions for every x; `draws=0` draws none, and nor does
    `fallback=0`. `memory` bounds, in gigabytes, what is needed beside the result.

    `top`: only so many outputs at each position, the largest, have exact variances; the rest have `others` [B, *D, C], or without
    them the mean squares of draws. There are no covariances. Of the output layer alone all variances are exact.
    """
    x, params, buffers = prepared(model, x, params, buffers)
    memory = room(memory, model.device)
    known: dict[str, Any] = {"params": params, "buffers": buffers, "covariance": covariance}
    learned = likelihood_params(params)
    if count(model, x) == 0:
        f = model.forward(params, x, tree.clone(buffers))[0].detach().unsqueeze(0)
        return LatentMixture(model.likelihood, f, torch.diag_embed(torch.zeros_like(f)), params=learned)
    found = layout(model, params, x, buffers, tuple(covariance.shapes)) if top or not draws else None
    top = None if found is None or top is None or top >= found.classes else top
    falls_back = draws is None and fallback > 0 and found is not None and drawn(model, found, covariance)
    if found is None or (top is None and (draws or falls_back)):
        means = drawn_functions(model, x, **known, draws=draws or fallback, memory=memory, generator=generator)
        check_outputs(x, means, coupled=model.coupled)
        return LatentMixture(model.likelihood, means, params=learned, how=f"linearized, {len(means)} draws")
    how = ""
    if top is not None:
        others, how = _others(model, x, known, found, top, others, draws or fallback or DRAWS, memory, generator)
    f, spread, rooted = _propagated(model, x, known, found, top, others, memory)
    check_outputs(x, f, coupled=model.coupled)
    cov, root = (None, spread) if rooted else (spread, None)
    return LatentMixture(model.likelihood, f, cov, params=learned, root=root, how=how)


def _others(
    model: Model, x: Inputs, known: dict[str, Any], found: Layout, top: int, others: Tensor | None, draws: int, memory: float,
    generator: torch.Generator | None,
) -> tuple[Tensor | None, str]:  # fmt: skip
    """Variances of the outputs that are not among the `top` largest, by draws if they are neither given nor known, and `how`."""
    if _closed(found, known["covariance"]):
        return others, "linearized, variances alone"
    how = f"linearized, {top} largest outputs"
    if others is not None:
        return others, how
    rough = drawn_variances(model, x, **known, draws=draws, memory=memory, generator=generator)
    return rough, f"{how}, others by {draws} draws"


def count(model: Model, x: Inputs) -> int:
    """The number of examples; coupled rows are one."""
    return 1 if model.coupled else example_count(x)


def portions(model: Model, x: Inputs, step: int) -> Iterator[tuple[int, Inputs]]:
    """So many examples at a time, with the place of the first; coupled rows, which are one example, all together."""
    if model.coupled:
        yield 0, x
        return
    for start in range(0, example_count(x), step):
        yield start, select_examples(x, start, step)


def _propagated(
    model: Model, x: Inputs, known: dict[str, Any], found: Layout, top: int | None, others: Tensor | None, memory: float
) -> tuple[Tensor, Tensor, bool]:
    """f [1, B, *D, C], its spread (see `Linearization.spread`), and whether that is a root; as many examples at a time as fit the
    memory."""
    size, covariance = count(model, x), known["covariance"]
    means, spread, rooted = Stack(size), Stack(size), False
    step = _examples_at_a_time(found, known["params"], x, covariance, top, memory)
    for start, some in portions(model, x, step):
        run = Linearization(model, **known, x=some, found=found, names=tuple(covariance.shapes), memory=memory)
        found = run.found
        rough = others if others is None else others.unsqueeze(0) if model.coupled else others[start : start + step]
        part, rooted = run.spread(rough, top)
        means.add(run.f)
        spread.add(part)
    f, whole = (each.whole if model.coupled else each.whole.unsqueeze(0) for each in (means, spread))
    return f, whole, rooted


def _budget(memory: float, dtype: torch.dtype) -> float:
    """How many numbers there is room for, beside as many that are formed on the way."""
    return memory * GIGABYTE / 2 / max(4, dtype.itemsize)


def numbers_of_output(found: Layout, params: Params) -> int:
    """Numbers that an output of an example needs: its cotangent, the gradients of all layers, and those of weights that no rule
    knows."""
    return found.outputs + found.taps + 3 * sum(params[name].numel() for name in found.generic)


def numbers_of_pass(found: Layout) -> int:
    """Numbers that a forward pass over an example holds for the way back, about."""
    return found.outputs + 2 * found.taps


def _examples_at_a_time(found: Layout, params: Params, x: Inputs, covariance: Covariance, top: int | None, memory: float) -> int:
    """How many examples fit the memory, with all outputs at a position."""
    budget = _budget(memory, next(iter(params.values())).dtype)
    if found.alone:  # inputs of the layer, and two matrices at each position
        weights = sum(torch.Size(shape).numel() for shape in covariance.shapes.values())
        each = found.outputs * (2 * found.classes + 4) + 2 * found.outputs // found.classes * (weights // found.classes)
    else:
        outputs = top or found.classes
        each = outputs * numbers_of_output(found, params) + numbers_of_pass(found)
        budget = max(budget / 2, budget - 3 * outputs * _numbers_of_rows(found, params))
    return max(1, min(example_count(x), int(budget / max(1, each))))


def _numbers_of_rows(found: Layout, params: Params) -> int:
    """Numbers in an output's gradient in the weights of the largest layer, of which some are formed beside all else."""
    return max([sum(params[name].numel() for name in part.names) for part in found.parts if part.kind == "affine"], default=0)


@torch.inference_mode(False)
def sweep(
    model: Model, x: Inputs, *, params: Params, buffers: Buffers, covariance: Covariance, factors: Sequence[float]
) -> Iterator[LatentMixture]:
    """The predictives at x under multiples of the prior's precision, one after the other.

    The network runs once, forwards and backwards. What it gives is kept in the basis in which every multiple of the prior is diagonal:
    another one costs one matrix product a layer.
    """
    x, params, buffers = prepared(model, x, params, buffers)
    names = tuple(covariance.shapes)
    found = layout(model, params, x, buffers, names)
    if drawn(model, found, covariance):
        raise ValueError("an example has so many outputs that they are predicted by draws, which cannot be swept over")
    run = Linearization(model, params, buffers, covariance, x, found, names)
    means, learned = run.f if model.coupled else run.f.unsqueeze(0), likelihood_params(params)
    if run.wide_root() is not None:
        for factor in factors:
            root = run.wide_root(factor)
            assert root is not None
            yield LatentMixture(model.likelihood, means, None, params=learned, root=root.unsqueeze(0))
    else:
        for cov in run.covariances(factors):
            yield LatentMixture(model.likelihood, means, cov if model.coupled else cov.unsqueeze(0), params=learned)


@torch.inference_mode(False)
def joint(model: Model, x: Inputs, *, params: Params, buffers: Buffers, covariance: Covariance) -> tuple[Tensor, Tensor]:
    """Mean [B, C] and covariance [B, C, B, C] of the linearized outputs of all inputs together."""
    x, params, buffers = prepared(model, x, params, buffers)
    names = tuple(covariance.shapes)
    run = Linearization(model, params, buffers, covariance, x, layout(model, params, x, buffers, names), names)
    return run.f, run.joint()
