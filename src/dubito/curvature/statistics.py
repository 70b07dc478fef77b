r"""What one pass over the data adds up: for each structure of the curvature, sums over examples from which it follows.

Read `LayerStatistic.add` first: it is what happens to a batch, from the forward pass to the sums. The sums are a dict of tensors in
float32 or better, whatever the network computes in:

======================  ===========================================================================================
`name`                  [G, *shape]: squared gradients of a weight (`Diagonal`, and what has no other place below)
`weight|A`, `weight|B`  [in, in] of the inputs and [G, out, out] of the gradients of a layer (`Kronecker`)
`name|H`                [G, n, n]: outer products of the gradients of a small layer (`Kronecker`)
`weight|L`              [out, in]: squares along the eigenvectors of A and B (`EigenSquares`)
`H`                     [G, P, P]: outer products of all gradients (`Dense`, `HessianColumns`)
`pairs`                 [G, pairs, in, in]: blocks of H for pairs of outputs, where the weights are the output layer's (`Dense`)
`Q|name`, `Y|name`      [k, *shape]: directions, and the curvature times these (`Products`)
======================  ===========================================================================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from dubito.curvature.capture import Forward, batched_gradients
from dubito.curvature.cotangents import MANY, cotangents, groups_of
from dubito.curvature.generic import example_gradients
from dubito.curvature.layout import UNCLEAR, Layout, Part, passed
from dubito.curvature.output_rows import OutputRows
from dubito.curvature.rows import Layer, RepeatedLayer, add_gram, layer_rows, squared_products
from dubito.curvature.setup import Setup
from dubito.model.likelihoods import likelihood_params
from dubito.network.examples import Batch, Targets, batch_size
from dubito.tensors.covariances.propagation import pieces
from dubito.tensors.tree import Params, full_precision

SMALL = 512  # weights of a normalization, or of a bias alone, up to which they get an exact block beside Kronecker blocks

Shapes = dict[str, tuple[int, ...]]


class Observed(NamedTuple):
    """What a pass over some data tells beside the curvature: sums in float64."""

    examples: int
    log_likelihood: Tensor  # []
    errors: Tensor  # [G]: squared residuals of each learned noise
    counts: Tensor  # [G]: how many


@dataclass(frozen=True)
class Statistic(ABC):
    """Sums over examples, to which batches are added one after another."""

    setup: Setup

    @abstractmethod
    def shapes(self, layout: Layout) -> Shapes:
        """The shapes of the sums."""

    def zeros(self, layout: Layout) -> Params:
        """The sums before any data."""
        dtype, device = self.setup.dtype, self.setup.model.device
        return {key: torch.zeros(shape, dtype=dtype, device=device) for key, shape in self.shapes(layout).items()}

    @abstractmethod
    def add(
        self, sums: Params, batch: Batch, *, generator: torch.Generator | None = None, gradient: Params | None = None
    ) -> Observed:
        """Add a batch to `sums`, and to `gradient`, if given, the gradient of the log likelihood."""


# -- statistics of layers: from their inputs, and from gradients with respect to their outputs


class LayerPass:
    """A batch after its forward pass: the output, and the layers with their inputs."""

    def __init__(self, setup: Setup, batch: Batch):
        self.setup = setup
        self.x, self.y = setup.model.split(batch)
        self.size = batch_size(self.y)
        self.layout, self.forward, used = passed(setup.model, setup.params, self.x, setup.buffers, setup.names)
        examples = 1 if setup.model.coupled else self.size
        self.layers = [Layer(p, uses, examples, {n: setup.shapes[n] for n in p.names}) for p, uses in used.items() if uses]

    forward: Forward

    @cached_property
    def f(self) -> Tensor:
        """The output [B, *D, C] without its graph, in float32 or better."""
        f = self.forward.f.detach()
        return exact(f[0] if self.setup.model.coupled else f)

    @property
    def output(self) -> OutputRows:
        """The output layer, where `closed` has found it alone."""
        (layer,) = self.layers
        return OutputRows.of(self.setup, layer, self.f, self.y)

    @property
    def rows(self) -> int:
        """Examples for each that the layers have: those that are coupled are one for the layers."""
        return self.size if self.setup.model.coupled else 1

    def backward(self, s: Tensor, layers: list[Layer] | None = None) -> list[tuple[Layer, Tensor]]:
        """The layers, with gradients of <s, f> for s [B, *D, C] with respect to their outputs as rows [B, T, O]; or of coupled rows for
        cotangents [K, B, *D, C], as if the batch were K examples."""
        layers = self.layers if layers is None else layers
        edges = [use.edge for layer in layers for use in layer.uses]
        if not edges:
            return []
        output, s = self.forward.f, s.to(self.forward.f.dtype)
        if self.setup.model.coupled:
            slopes = iter(batched_gradients(output, edges, s.unsqueeze(1)))
            rows = [layer_rows(layer, [next(slopes) for _ in layer.uses], len(s)) for layer in layers]
            return [(RepeatedLayer(layer, len(s)), g.squeeze(1)) for layer, g in zip(layers, rows, strict=True)]
        slopes = iter(torch.autograd.grad(output, edges, s, retain_graph=True, allow_unused=True))
        return [(layer, layer.outputs([next(slopes) for _ in layer.uses])) for layer in layers]

    def others(self, s: Tensor) -> Params:
        """The same for the weights that belong to no known layer, [B, *shape] or [K, *shape]."""
        if not self.layout.generic:
            return {}
        setup, axis = self.setup, int(self.setup.model.coupled)  # of length 1: the cotangents, or the batch
        slopes = example_gradients(setup.model, setup.params, self.x, setup.buffers, self.layout.generic, s.unsqueeze(axis))
        return {name: leaf.squeeze(axis) for name, leaf in slopes.items()}

    def cotangents(self, generator: torch.Generator | None) -> Iterator[tuple[int, Tensor]]:
        """What is propagated back, one cotangent after another, each with the index of its noise. Where rows are coupled, each has
        cotangents of its own, zero for all others: the gradients of all rows must not be added before they are squared."""
        setup, spec = self.setup, self.setup.spec
        each = cotangents(setup.model, self.f, self.y, setup.params, spec.kind, spec.draws, generator)
        if not setup.model.coupled:
            yield from each
            return
        for group, s in each:
            rows = s.flatten(1).any(1).nonzero().squeeze(1)
            for piece in pieces(len(rows), self.layout.taps + setup.size):
                some = rows[piece]
                alone = s.new_zeros(len(some), *s.shape)
                alone[torch.arange(len(some), device=s.device), some] = s[some]
                yield group, alone

    def add_gradient(self, gradient: Params) -> None:
        """Add the gradient of the log likelihood."""
        likelihood = self.setup.model.likelihood
        s = likelihood.slope(self.f, likelihood.target(self.y, self.f), self.setup.params)
        s = s.unsqueeze(0) if self.setup.model.coupled else s
        for layer, g in self.backward(s):
            for name, leaf in layer.summed(g).items():
                gradient[name] += leaf
        for name, leaf in self.others(s).items():
            gradient[name] += leaf.sum(0)


class LayerStatistic(Statistic):
    """Sums that follow from the layers' inputs and the gradients of their outputs, in one forward pass."""

    def add(
        self, sums: Params, batch: Batch, *, generator: torch.Generator | None = None, gradient: Params | None = None
    ) -> Observed:
        """Run the network forward, with the inputs of its layers recorded; look at the likelihood; propagate cotangents back to the
        layers; and add what follows for the weights."""
        run = LayerPass(self.setup, batch)
        closed = self.fits(sums, run.layout)
        with torch.no_grad():
            told = observe(self.setup, run.f, run.y, run.size)
            if gradient is not None:
                run.add_gradient(gradient)
            if closed:
                self.add_output_layer(sums, run)
            else:
                self.add_layers(sums, run, generator)
        return told

    def fits(self, sums: Params, layout: Layout) -> bool:
        """Whether the sums are those of `add_output_layer`; sums without a place for what a batch adds are an error."""
        return self.closed(layout)

    def closed(self, layout: Layout) -> bool:
        """Whether the weights are the output layer's alone: its Jacobian is its input, and nothing is propagated back."""
        spec = self.setup.spec
        return layout.alone and spec.kind == "ggn" and not spec.draws and (layout.flat or spec.shared == "expand")

    @abstractmethod
    def add_layers(self, sums: Params, run: LayerPass, generator: torch.Generator | None) -> None:
        """Add a batch by cotangents."""

    def add_output_layer(self, sums: Params, run: LayerPass) -> None:
        """Add a batch where `closed`: the exact Fisher information of the outputs, position by position."""
        output = run.output
        for group, piece, fisher in output.fishers():
            self.add_fisher(sums, output.layer, group, piece, fisher)

    def add_fisher(self, sums: Params, layer: Layer, group: int, piece: slice, fisher: Tensor) -> None:
        """Add the Fisher information [b, C, C] of the outputs of a piece of the examples."""
        raise NotImplementedError


class _Squares:
    """Adds squared gradients. Those of layers with one position are first summed over the cotangents: one product for all."""

    def __init__(self, sums: Params):
        self.sums = sums
        self.single: dict[tuple[Layer, int], Tensor] = {}

    def add(self, layer: Layer, group: int, g: Tensor) -> None:
        """Add those of a layer."""
        if layer.part.kind == "affine" and layer.positions == 1:
            key, squared = (layer, group), g.squeeze(1) ** 2
            self.single[key] = squared if key not in self.single else self.single[key].add_(squared)
        else:
            layer.add_squares(self.sums, group, g)

    def add_others(self, group: int, slopes: Params) -> None:
        """Add those of weights in no layer."""
        for name, leaf in slopes.items():
            self.sums[name][group] += (leaf**2).sum(0)

    def finish(self) -> None:
        """Add what was kept for the end."""
        for (layer, group), squared in self.single.items():
            layer.add_single(self.sums, group, squared)


class Diagonal(LayerStatistic):
    """Squared gradients of every weight."""

    def shapes(self, layout: Layout) -> Shapes:
        """A number for each weight and noise."""
        groups = self.setup.groups(layout)
        return {name: (groups, *shape) for name, shape in self.setup.shapes.items()}

    def add_layers(self, sums: Params, run: LayerPass, generator: torch.Generator | None) -> None:
        """Add squared gradients, cotangent by cotangent."""
        squares = _Squares(sums)
        for group, s in run.cotangents(generator):
            rows = run.backward(s)
            squares.add_others(group, run.others(s))
            for layer, g in rows:
                squares.add(layer, group, g)
        squares.finish()

    def add_output_layer(self, sums: Params, run: LayerPass) -> None:
        """Add squared inputs times the diagonal of the Fisher information."""
        output = run.output
        if not output.plain:
            super().add_output_layer(sums, run)
            return
        likelihood = self.setup.model.likelihood
        output.layer.add_single(sums, 0, likelihood.fisher_diagonal(output.f, likelihood_params(self.setup.params)))

    def add_fisher(self, sums: Params, layer: Layer, group: int, piece: slice, fisher: Tensor) -> None:
        """Add squared inputs times its diagonal."""
        layer.add_single(sums, group, fisher.diagonal(dim1=1, dim2=2), piece)


class Kronecker(LayerStatistic):
    r"""For every layer with a matrix, the two factors of :math:`H \approx A \otimes B`: A of its inputs, B of the gradients.

    Normalizations and biases alone get an exact block, or squares if they are large, as do weights of unknown layers.
    """

    def shapes(self, layout: Layout) -> Shapes:
        """Those of every layer."""
        groups = self.setup.groups(layout)
        sums: Shapes = {name: (groups, *self.setup.shapes[name]) for name in layout.generic}
        for part in layout.parts:
            sums |= self._of_part(part, groups)
        return sums

    def _of_part(self, part: Part, groups: int) -> Shapes:
        """The shapes of the sums of one layer."""
        shapes = self.setup.shapes
        if part.matrix is not None:
            outputs, inputs = self.setup.sides(part.matrix, part.bias)
            return {f"{part.matrix}|A": (inputs, inputs), f"{part.matrix}|B": (groups, outputs, outputs)}
        size = sum(shapes[name].numel() for name in part.names)
        if part.kind != "lookup" and size <= SMALL:
            return {f"{part.names[0]}|H": (groups, size, size)}
        return {name: (groups, *shapes[name]) for name in part.names}

    def fits(self, sums: Params, layout: Layout) -> bool:
        """Also checks every layer: a network may do something else with these inputs than with the first."""
        closed = self.closed(layout)
        for name in layout.generic:
            if name not in sums:
                raise ValueError(_unclear(name) if layout.reasons.get(name) == UNCLEAR else _otherwise(name))
        groups = self.setup.groups(layout)
        for part in layout.parts:
            for key, shape in self._of_part(part, groups).items():
                held = sums.get(key)
                if held is None and all(name in sums for name in part.names):  # squares, as in the first batch
                    closed = False
                elif held is None or held.shape != shape:
                    raise ValueError(_otherwise(part.names[0]))
        return closed

    def add_layers(self, sums: Params, run: LayerPass, generator: torch.Generator | None) -> None:
        """Add the inputs to A, and gradients to B cotangent by cotangent."""
        self._add_inputs(sums, run)
        squares, reduce = _Squares(sums), self.setup.spec.shared == "reduce"
        for group, s in run.cotangents(generator):
            rows = run.backward(s)
            squares.add_others(group, run.others(s))
            for layer, g in rows:
                part = layer.part
                if f"{part.weight}|A" in sums:
                    add_gram(sums[f"{part.weight}|B"][group], g.sum(1, keepdim=True) if reduce else g)
                elif f"{part.names[0]}|H" in sums:
                    _add_outer(sums[f"{part.names[0]}|H"][group], layer.gradients(g), part.names, layer.batch)
                else:
                    squares.add(layer, group, g)
        squares.finish()

    def _add_inputs(self, sums: Params, run: LayerPass) -> None:
        """A: the mean over positions of a a^T, with the bias as an input that is always 1."""
        for layer in run.layers:
            if f"{layer.part.weight}|A" not in sums:  # no matrix, or it was not clear in the first batch
                continue
            total = sums[f"{layer.part.weight}|A"]
            a = layer.a.mean(1, keepdim=True) if self.setup.spec.shared == "reduce" else layer.a
            share, width = run.rows / a.shape[1], a.shape[2]
            add_gram(total[:width, :width], a, share)
            if layer.part.bias is not None:
                mean = a.sum((0, 1)) * share
                total[:width, width] += mean
                total[width, :width] += mean
                total[width, width] += layer.batch * run.rows
            del layer.a  # unfolded, the inputs of a convolution are many times what they were: those of one layer at a time

    def add_output_layer(self, sums: Params, run: LayerPass) -> None:
        """Add the inputs to A and the Fisher information to B."""
        self._add_inputs(sums, run)
        output = run.output
        if not output.plain:
            super().add_output_layer(sums, run)
            return
        fisher = self.setup.model.likelihood.fisher_sum(output.f, likelihood_params(self.setup.params))
        sums[f"{run.layers[0].part.weight}|B"][0] += fisher

    def add_fisher(self, sums: Params, layer: Layer, group: int, piece: slice, fisher: Tensor) -> None:
        """Add it to B."""
        sums[f"{layer.part.weight}|B"][group] += fisher.sum(0)


@dataclass(frozen=True)
class EigenSquares(LayerStatistic):
    """Squared gradients along the eigenvectors of a Kronecker curvature, `weight|left` and `weight|right` in the sums (EKFAC)."""

    kronecker: Kronecker

    def shapes(self, layout: Layout) -> Shapes:
        """Squares and both bases of every matrix."""
        sides = {part.matrix: self.setup.sides(part.matrix, part.bias) for part in layout.parts if part.matrix is not None}
        squares: Shapes = {}
        for weight, (o, i) in sides.items():
            squares |= {f"{weight}|L": (o, i), f"{weight}|left": (o, o), f"{weight}|right": (i, i)}
        return squares

    def fits(self, sums: Params, layout: Layout) -> bool:
        """Checks the layers; there is no shorter way for an output layer."""
        self.kronecker.fits(sums, layout)
        return False

    def add_layers(self, sums: Params, run: LayerPass, generator: torch.Generator | None) -> None:
        """Add squares in the bases, cotangent by cotangent."""
        chosen = [layer for layer in run.layers if f"{layer.part.weight}|left" in sums]
        inputs = [layer.rotated(sums[f"{layer.part.weight}|right"]) for layer in chosen]
        for _, s in run.cotangents(generator):
            for a, (layer, g) in zip(inputs, run.backward(s, chosen), strict=True):
                a = a.expand(len(g), -1, -1)
                g = g @ sums[f"{layer.part.weight}|left"]
                total = sums[f"{layer.part.weight}|L"]
                if layer.positions == 1:
                    total.addmm_((g.squeeze(1) ** 2).mT, a.squeeze(1) ** 2)
                else:
                    total += squared_products(g, a)


@dataclass(frozen=True)
class Dense(LayerStatistic):
    """Outer products of the gradients of all weights, or of those at the positions `index` in the vector of them."""

    index: Tensor | None = None

    def shapes(self, layout: Layout) -> Shapes:
        """A square matrix, or blocks for pairs of outputs."""
        groups = self.setup.groups(layout)
        if self.closed(layout):
            part = layout.parts[0]
            outputs, inputs = self.setup.sides(part.names[0], part.bias)
            return {"pairs": (groups, outputs * (outputs + 1) // 2, inputs, inputs)}
        size = self.setup.size if self.index is None else len(self.index)
        return {"H": (groups, size, size)}

    def closed(self, layout: Layout) -> bool:
        """Not with thousands of classes: there would be too many pairs."""
        return super().closed(layout) and self.index is None and layout.classes <= MANY

    def fits(self, sums: Params, layout: Layout) -> bool:
        """Whether the sums are blocks for pairs of outputs."""
        if "H" not in sums and not self.closed(layout):
            raise ValueError(_otherwise(self.setup.names[0]))
        return "H" not in sums

    def add_layers(self, sums: Params, run: LayerPass, generator: torch.Generator | None) -> None:
        """Add outer products of gradients, cotangent by cotangent."""
        setup = self.setup
        for group, s in run.cotangents(generator):
            rows = run.backward(s)
            leaves = run.others(s)
            for layer, g in rows:
                leaves |= layer.gradients(g)
            size = next(iter(leaves.values())).shape[0]
            for name in setup.names:
                if name not in leaves:  # these inputs do not use it
                    leaves[name] = s.new_zeros(size, setup.shapes[name].numel())
            _add_outer(sums["H"][group], leaves, setup.names, size, self.index)

    def add_fisher(self, sums: Params, layer: Layer, group: int, piece: slice, fisher: Tensor) -> None:
        """Add Lambda_n (x) a_n a_n^T: a block [in, in] for every pair c <= d of outputs."""
        total, a = sums["pairs"][group], layer.extended.squeeze(1)[piece]
        c, d = torch.triu_indices(fisher.shape[1], fisher.shape[1], device=a.device)
        weights = fisher[:, c, d]  # [B, pairs]
        for part in pieces(len(c), a.numel()):
            weighted = (weights[:, part].unsqueeze(-1) * a.unsqueeze(1)).flatten(1)  # [B, pairs in]
            total[part].view(-1, a.shape[1]).addmm_(weighted.mT, a)


def from_pairs(pairs: Tensor, names: tuple[str, ...], part: Part, classes: int) -> Tensor:
    """The matrices [G, P, P] of blocks [G, pairs, in, in], in the order of the names."""
    width = pairs.shape[-1]
    c, d = torch.triu_indices(classes, classes, device=pairs.device)
    whole = pairs.new_zeros(pairs.shape[0], classes, width, classes, width)
    whole[:, d, :, c] = pairs.transpose(0, 1).mT
    whole[:, c, :, d] = pairs.transpose(0, 1)
    whole = whole.reshape(-1, classes * width, classes * width)
    if part.bias is None:
        return whole
    index = torch.arange(classes * width, device=pairs.device).reshape(classes, width)
    order = {part.weight: index[:, :-1].flatten(), part.bias: index[:, -1]}
    position = torch.cat([order[name] for name in names])
    return whole[:, position.unsqueeze(1), position]


def _add_outer(total: Tensor, leaves: Params, names: tuple[str, ...], size: int, index: Tensor | None = None) -> None:
    """Add the outer products of the gradients of these weights, example by example."""
    flat = torch.cat([leaves[name].reshape(size, -1) for name in names], 1).to(total.dtype)
    flat = flat if index is None else flat[:, index]
    total.addmm_(flat.mT, flat)


# -- what all share


def observe(setup: Setup, f: Tensor, y: Targets, size: int) -> Observed:
    """The log likelihood of a batch at outputs f, and its squared residuals where a noise is learned."""
    log_likelihood = setup.model.score(f, y, setup.params).double().sum()
    groups = groups_of(setup.model, f, setup.spec.kind)
    n = 1 if groups is None else int(groups.max()) + 1
    errors, counts = (torch.zeros(n, dtype=torch.float64, device=f.device) for _ in range(2))
    if groups is not None:
        residuals = (setup.model.likelihood.target(y, f).double() - f.double()) ** 2
        by_output = residuals.reshape(-1, f.shape[-1]).sum(0)
        errors.index_add_(0, groups, by_output)
        counts.index_add_(0, groups, torch.full_like(by_output, residuals[..., 0].numel()))
    return Observed(size, log_likelihood, errors, counts)


def exact(f: Tensor) -> Tensor:
    """The same in float32 or better."""
    return full_precision(f)


def _otherwise(name: str) -> str:
    return f"{name} is used in another way than in the first batch. Curvature needs a network that does the same for all inputs"


def _unclear(name: str) -> str:
    return (
        f"in this batch it is not clear which inputs of the layer with {name} belong to which example, as it was in the first: "
        "are they all alike?"
    )


STATISTICS: dict[str, type[LayerStatistic]] = {"diagonal": Diagonal, "kronecker": Kronecker, "dense": Dense}
