r"""Prediction by linearizing the network in its weights: a Gaussian over f with mean f(x) and covariance :math:`J \Sigma J^T`.

The Jacobian J of outputs x parameters is never formed. One forward pass records every layer's inputs a; each output is
back-propagated to the layers' outputs, which gives g; and a layer with covariance :math:`L \otimes R` in its eigenbasis, variances V,
adds

.. math:: (J \Sigma J^T)_{cd} \mathrel{+}= \sum_o \tilde g_{co} \tilde g_{do} v_o, \qquad v = V \tilde a^{\circ 2},
          \qquad \tilde g = L^T g, \; \tilde a = R^T a.

Where a layer has several positions its gradients are formed example by example, layer by layer, in pieces of bounded size.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.attention import SDPBackend, sdpa_kernel

from dubito.curvature.capture import example_count, select_examples
from dubito.curvature.generic import Unrolled, along, example_gradients
from dubito.curvature.layout import Layout, Part, layout, passed
from dubito.curvature.rows import Layer, layer_rows
from dubito.model import Model
from dubito.model.likelihoods import likelihood_params
from dubito.network.examples import Inputs, check_outputs
from dubito.network.weights import in_mode
from dubito.posteriors.predict.sampled import draw_groups, read_examples
from dubito.posteriors.predictive import LatentMixture
from dubito.tensors import tree
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
        self.f = tree.full_precision(f)

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
        rows = [layer_rows(layer, [next(found) for _ in layer.uses], len(unit), self.exact) for layer in self.layers]
        noise = [(tap.axis, g) for tap, g in zip(taps, found, strict=True) if g is not None]
        whole = self.model.coupled
        noise = [g.flatten(1).unsqueeze(1) if whole else g.movedim(axis + 1, 1).flatten(2) for axis, g in noise]  # [C, B, *]
        self.noise = [gram(g) for g in noise]  # [B, C, C] each
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


GIGABYTE = 2**30
POSITIONS = 256  # outputs of an example (classes times pixels) above which draws of linearized functions take over
DRAWS = 30  # of them
COUPLED = 2**31  # the same for rows that are coupled: outputs of all rows, times numbers in the outputs of all layers


@torch.inference_mode(False)  # gradients are needed
def linearized(
    model: Model,
    x: Inputs,
    *,
    params: Params,
    buffers: Buffers,
    covariance: Covariance,
    draws: int | None = None,
    fallback: int = DRAWS,
    memory: float = 1.0,
    generator: torch.Generator | None = None,
    top: tuple[int, Tensor] | None = None,
) -> LatentMixture:
    """The predictive of the linearized network at x.

    `top` = (k, variances [B, C]): only the k largest outputs of each example are followed; the others have the variances given, and
    none of them a covariance. With `draws`, or where an example has very many outputs (segmentation: then `fallback` of them), as so
    many functions f(x) + J(x) (theta - mean) with theta from the posterior, the same functions for every x; not with `fallback=0`.
    """
    x, params, buffers = _prepared(model, x, params, buffers)
    names = tuple(covariance.shapes)
    if not model.coupled and example_count(x) == 0:
        with torch.no_grad():
            f = model.forward(params, x, tree.clone(buffers))[0].unsqueeze(0)
        return LatentMixture(model.likelihood, f, torch.diag_embed(torch.zeros_like(f)), params=likelihood_params(params))
    found = None if draws is not None else layout(model, params, x, buffers, names)
    if found is None or (fallback and _takes_draws(model, found)):
        groups = draw_groups(draws or fallback, covariance, memory)
        deltas = (covariance.draws(n, generator) for n in groups)
        means = torch.cat([functions(model, x, params=params, buffers=buffers, deltas=delta) for delta in deltas])
        check_outputs(x, means)
        return LatentMixture(model.likelihood, means, params=likelihood_params(params), how=f"linearized, {len(means)} draws")
    f, cov, root = [], [], []
    for start, step, some in _portions(model, found, params, x, top, memory):
        run = Linearization(model, params, buffers, covariance, some, found, names)
        found = run.found
        if top is not None:
            run.top = run.f.topk(top[0]).indices
            variance = run.covariances()[0].diagonal(dim1=1, dim2=2)
            cov.append(top[1][start : start + step].to(variance).scatter(1, run.top, variance))
        elif (wide := run.wide_root()) is not None:
            root.append(wide)
        else:
            cov.append(run.covariances()[0])
        f.append(run.f)
    means, whole = (_joined(parts) if model.coupled else _joined(parts).unsqueeze(0) for parts in (f, cov or root))
    check_outputs(x, means, coupled=model.coupled)
    return LatentMixture(
        model.likelihood, means, whole if cov else None, params=likelihood_params(params), root=None if cov else whole
    )


def _takes_draws(model: Model, found: Layout) -> bool:
    """Whether there are so many outputs that draws of linearized functions stand for their covariances."""
    return found.outputs * found.taps > COUPLED if model.coupled else found.outputs > POSITIONS and not found.flat


def _portions(
    model: Model, found: Layout, params: Params, x: Inputs, top: tuple[int, Tensor] | None, memory: float
) -> Iterator[tuple[int, int, Inputs]]:
    """(first, count, inputs) of as many examples at a time as fit the memory; all of them where they are coupled."""
    if model.coupled:
        yield 0, 1, x
        return
    step = _examples_at_a_time(found, params, x, top, memory)
    for start in range(0, example_count(x), step):
        yield start, step, select_examples(x, start, step)


def _examples_at_a_time(found: Layout, params: Params, x: Inputs, top: tuple[int, Tensor] | None, memory: float) -> int:
    """How many examples fit the memory: gradients of every output with respect to every layer's outputs, and those of weights that no
    rule knows."""
    size = example_count(x)
    other = 3 * found.classes * sum(params[name].numel() for name in found.generic)
    each = 4 * (found.taps * ((found.classes if top is None else top[0]) + 2) + other)  # one position at a time
    return size if found.alone else max(1, min(size, int(memory * GIGABYTE / 2 / max(1, each))))


@torch.inference_mode(False)
def sweep(
    model: Model, x: Inputs, *, params: Params, buffers: Buffers, covariance: Covariance, factors: Sequence[float]
) -> Iterator[LatentMixture]:
    """The predictives at x under multiples of the prior's precision, one after the other.

    The network runs once, forwards and backwards. What it gives is kept in the basis in which every multiple of the prior is diagonal:
    another one costs one matrix product a layer.
    """
    x, params, buffers = _prepared(model, x, params, buffers)
    names = tuple(covariance.shapes)
    found = layout(model, params, x, buffers, names)
    if _takes_draws(model, found):
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


def _prepared(model: Model, x: Inputs, params: Params, buffers: Buffers) -> tuple[Any, Params, Buffers]:
    """Inputs on the device; and all tensors fit for gradients, which those made in inference mode are not."""
    x = read_examples(model, x, params, buffers)
    x, params, buffers = (
        tree.apply_leaves(lambda leaf: leaf.clone() if leaf.is_inference() else leaf, value) for value in (x, params, buffers)
    )
    return x, params, buffers


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@torch.inference_mode(False)
def joint(model: Model, x: Inputs, *, params: Params, buffers: Buffers, covariance: Covariance) -> tuple[Tensor, Tensor]:
    """Mean [B, C] and covariance [B, C, B, C] of the linearized outputs of all inputs together."""
    x, params, buffers = _prepared(model, x, params, buffers)
    names = tuple(covariance.shapes)
    run = Linearization(model, params, buffers, covariance, x, layout(model, params, x, buffers, names), names)
    return run.f, run.joint()


@torch.inference_mode(False)
def functions(model: Model, x: Inputs, *, params: Params, buffers: Buffers, deltas: Params) -> Tensor:
    """f(x) + J(x) delta for every delta, [S, B, *D, C]: draws of the linearized function, joint over all inputs."""
    x, params, buffers = _prepared(model, x, params, buffers)
    live = {name: params[name].detach() for name in deltas}
    fixed = {name: leaf.detach() for name, leaf in params.items() if name not in live}
    buffers = {name: leaf.detach() for name, leaf in buffers.items()}

    def output(live: Params) -> Tensor:
        """The network's output, as a function of the weights that move."""
        with Unrolled():
            return model.call({**fixed, **live}, x, buffers)[0]

    def one(delta: Params) -> Tensor:
        """One linear function."""
        f, slope = along(output, live, {name: leaf.to(live[name].dtype) for name, leaf in delta.items()})
        return f + slope

    with torch.no_grad(), in_mode(model.network, False), sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own deprecated parts
        found = [one(tree.select(deltas, i)) for i in range(tree.count(deltas))]
    f = torch.stack(found)
    return tree.full_precision(f)
