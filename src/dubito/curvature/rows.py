r"""Layers as rows: inputs a [B, T, I] and gradients g [B, T, O] of the outputs, T positions (pixels, time, repeated uses).

The gradient of a cotangent with respect to the matrix of an affine layer is, for each example, :math:`\sum_t g_t a_t^T`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor

from dubito.curvature.capture import Use
from dubito.curvature.layout import MERGED, Part
from dubito.tensors.covariances.propagation import pieces
from dubito.tensors.tree import Params


def examples_first(value: Tensor, part: Part, batch: int) -> Tensor:
    """The same with the axis of examples first."""
    if part.axis == MERGED:
        return value.unflatten(0, (-1, batch)).transpose(0, 1)
    return value.transpose(0, 1) if part.axis == 1 else value


def rows(value: Tensor, part: Part, channel: int, batch: int) -> Tensor:
    """[B, T, C] of an input or output of a layer: examples first, channels last, all other axes are positions."""
    if channel == 1:  # [B m, C, *positions]
        value = value.flatten(2).transpose(1, 2) if value.ndim > 2 else value.unsqueeze(1)  # [B m, positions, C]
        return value if value.shape[0] == batch else value.reshape(batch, -1, value.shape[-1])
    value = examples_first(value, part, batch)
    if value.ndim == 2 and value.shape[0] == batch:
        return value.unsqueeze(1)
    return value.reshape(batch, -1, value.shape[-1])


def patches(x: Tensor, convolution: tuple) -> Tensor:
    """What a convolution sees at each of its positions, [B, positions, C prod(kernel)].

    A copy of a strided view, which takes a third of the time of `torch.nn.functional.unfold` on a CPU, where the positions come last in
    memory: so they do in x.
    """
    kernel, stride, sides, dilation = convolution
    if any(side for pair in sides for side in pair):
        x = F.pad(x, [side for pair in reversed(sides) for side in pair])
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True)):
        x = x.unfold(2 + axis, d * (k - 1) + 1, s)[..., ::d]  # the window comes last
    n = len(kernel)  # [B, C, *positions, *kernel]
    size, places, seen = x.shape[0], range(2, 2 + n), (1, *range(2 + n, 2 + 2 * n))
    positions = math.prod(x.shape[2 : 2 + n])
    if x.is_cuda:
        return x.permute(0, *places, *seen).reshape(size, positions, -1)
    return x.permute(0, *seen, *places).reshape(size, -1, positions).transpose(1, 2)


def add_gram(total: Tensor, rows: Tensor, alpha: float = 1.0) -> None:
    """Add alpha sum_bt r_bt r_bt^T for rows [B, T, C], without a copy of those that are laid out channels first."""
    if rows.is_contiguous() or rows.shape[1] == 1 or rows.is_cuda:  # there a copy costs less than a product for every example
        flat = rows.flatten(0, 1)
        total.addmm_(flat.mT, flat, alpha=alpha)
    else:
        total.addbmm_(rows.mT, rows, alpha=alpha)


class Layer:
    """A part in one pass: its inputs, and what follows from gradients of its outputs."""

    def __init__(self, part: Part, uses: Sequence[Use], batch: int, shapes: dict[str, torch.Size]):
        self.part, self.uses, self.batch, self.shapes = part, uses, batch, shapes

    @cached_property
    def a(self) -> Tensor:
        """Inputs [B, T, I], the homogeneous 1 of a bias not included; indices [B, T] for a lookup."""
        return self.inputs.float() if self.inputs.is_floating_point() and self.inputs.dtype.itemsize < 4 else self.inputs

    @cached_property
    def inputs(self) -> Tensor:
        """The same in the network's own precision."""
        found = []
        for use in self.uses:
            if (
                self.part.kind == "affine" and self.part.weight is None
            ):  # a bias alone: no inputs, but as many positions as outputs
                positions = use.shape.numel() // (self.batch * use.shape[use.channel])
                found.append(use.x.new_zeros(self.batch, positions, 0))
            elif use.convolution is not None:
                value = patches(use.x, use.convolution)  # [B m, positions, I]
                found.append(value if value.shape[0] == self.batch else value.reshape(self.batch, -1, value.shape[-1]))
            elif self.part.kind == "lookup":
                found.append(examples_first(use.x, self.part, self.batch).reshape(self.batch, -1))
            elif self.part.kind == "scale" and use.channel == -1:  # the scale may have several axes
                width = math.prod(next(iter(self.shapes.values())))
                found.append(examples_first(use.x, self.part, self.batch).reshape(self.batch, -1, width))
            else:
                found.append(rows(use.x, self.part, use.channel, self.batch))
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    @cached_property
    def spread(self) -> Tensor | None:
        """Variances of the inputs of an affine layer, [B, T, I]; None where they are certain."""
        if self.part.kind != "affine" or self.part.weight is None or all(use.spread is None for use in self.uses):
            return None
        uses = [use._replace(x=torch.zeros_like(use.x) if use.spread is None else use.spread) for use in self.uses]
        return Layer(self.part, uses, self.batch, self.shapes).a

    def examples(self, piece: slice) -> Layer:
        """The same layer for some of the examples."""
        return self._with(self.a[piece])

    def _with(self, a: Tensor) -> Layer:
        """The same layer for other inputs [B, T, I]."""
        layer = Layer(self.part, self.uses, len(a), self.shapes)
        layer.a = layer.inputs = a
        return layer

    def apart(self, keep: Tensor | None = None) -> Layer:
        """The same layer with every position as an example of its own; those that a mask [B T] keeps, or all."""
        if self.positions == 1 and keep is None:
            return self
        a, spread = (None if t is None else t.flatten(0, 1).unsqueeze(1) for t in (self.a, self.spread))
        assert a is not None
        layer = self._with(a if keep is None else a[keep])
        layer.spread = spread if spread is None or keep is None else spread[keep]
        return layer

    def outputs(self, gradients: Sequence[Tensor | None], *, exact: bool = True) -> Tensor:
        """Gradients of the outputs of all uses, as rows [B, T, O]; in the network's own precision if not `exact`."""
        found = []
        for use, g in zip(self.uses, gradients, strict=True):
            if g is None:
                g = torch.zeros(use.shape, dtype=use.x.dtype if use.x.is_floating_point() else torch.float32, device=use.x.device)
            g = g.reshape(use.shape)
            if self.part.kind == "scale" and use.channel == -1:
                width = math.prod(next(iter(self.shapes.values())))
                found.append(examples_first(g, self.part, self.batch).reshape(self.batch, -1, width))
            else:
                found.append(rows(g, self.part, use.channel, self.batch))
        value = found[0] if len(found) == 1 else torch.cat(found, 1)
        return value.float() if exact and value.dtype.itemsize < 4 else value

    @property
    def positions(self) -> int:
        """The number of positions T."""
        return self.a.shape[1]

    @property
    def width(self) -> int:
        """Inputs I, the homogeneous 1 included where the bias is there too."""
        return self.a.shape[-1] + (self.part.bias is not None)

    def rotated(self, basis: Tensor) -> Tensor:
        """Inputs with their homogeneous 1 times a matrix [in, J], without putting the two together: [B, T, J]."""
        a = self.a
        if self.part.bias is None:
            return a @ basis
        return torch.addmm(basis[-1], a.reshape(-1, a.shape[-1]), basis[:-1]).reshape(*a.shape[:2], -1)

    @cached_property
    def extended(self) -> Tensor:
        """Inputs with the homogeneous 1, [B, T, I + 1]."""
        a = self.a
        return a if self.part.bias is None else torch.cat([a, a.new_ones(*a.shape[:2], 1)], -1)

    def gradients(self, g: Tensor) -> Params:
        """Gradients of the weights, example by example: leaves [B, *shape]."""
        part, found = self.part, {}
        if part.kind == "lookup":
            assert part.weight is not None
            vocabulary, width = self.shapes[part.weight]
            flat = g.new_zeros(self.batch * vocabulary, width)
            offset = torch.arange(self.batch, device=g.device).unsqueeze(1) * vocabulary
            return {
                part.weight: flat.index_add_(0, (self.a + offset).flatten(), g.reshape(-1, width)).unflatten(0, (self.batch, -1))
            }
        if part.weight is not None:
            weight = g.mT @ self.a if part.kind == "affine" else (g * self.a).sum(1)
            found[part.weight] = weight.reshape(self.batch, *self.shapes[part.weight])
        if part.bias is not None:
            found[part.bias] = g.sum(1).reshape(self.batch, *self.shapes[part.bias])
        return found

    def summed(self, g: Tensor) -> Params:
        """Gradients of the weights, summed over the examples."""
        part, found = self.part, {}
        if part.kind == "lookup":
            assert part.weight is not None
            whole = g.new_zeros(self.shapes[part.weight])
            return {part.weight: whole.index_add_(0, self.a.flatten(), g.reshape(-1, g.shape[-1]))}
        if part.weight is not None:
            weight = g.flatten(0, 1).mT @ self.a.flatten(0, 1) if part.kind == "affine" else (g * self.a).sum((0, 1))
            found[part.weight] = weight.reshape(self.shapes[part.weight])
        if part.bias is not None:
            found[part.bias] = g.sum((0, 1)).reshape(self.shapes[part.bias])
        return found

    def add_squares(self, sums: Params, group: int, g: Tensor) -> None:
        """Add squared gradients of the weights, summed over the examples, to `sums` (leaves [K, *shape])."""
        part = self.part
        if part.kind == "affine" and self.positions == 1:
            self.add_single(sums, group, (g**2).squeeze(1))
            return
        if part.kind == "lookup":
            assert part.weight is not None
            rows, _, index = self.lookups(g)
            sums[part.weight][group].index_add_(0, index, rows**2)
            return
        if part.weight is not None:
            total = sums[part.weight][group]
            found = squared_products(g, self.a) if part.kind == "affine" else ((g * self.a).sum(1) ** 2).sum(0)
            total += found.reshape(total.shape)
        if part.bias is not None:
            total = sums[part.bias][group]
            total += (g.sum(1) ** 2).sum(0).reshape(total.shape)

    def add_single(self, sums: Params, group: int, g2: Tensor, piece: slice = slice(None)) -> None:
        """The same for one position, from squared gradients [b, O] of a piece of the examples."""
        if self.part.weight is not None:
            total = sums[self.part.weight][group]
            total.view(len(total), -1).addmm_(g2.mT.to(total.dtype), self.squared[piece].to(total.dtype))
        if self.part.bias is not None:
            sums[self.part.bias][group] += g2.sum(0)

    @cached_property
    def squared(self) -> Tensor:
        """Expected squares [B, I] of the inputs of a layer with one position."""
        squared = self.a.squeeze(1) ** 2
        return squared if self.spread is None else squared + self.spread.squeeze(1)

    def energy(self, basis: Tensor) -> Tensor:
        """The same in another basis [in, J], [B, J]."""
        squared = self.rotated(basis).squeeze(1) ** 2
        return squared if self.spread is None else squared + self.spread.squeeze(1) @ basis[: self.a.shape[-1]] ** 2

    def lookups(self, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the looked-up rows [U, E], each row of each example once, with their example and their index [U]."""
        assert self.part.weight is not None
        vocabulary = self.shapes[self.part.weight][0]
        keys, inverse = self._lookup_keys
        sums = g.new_zeros(keys.shape[0], g.shape[-1]).index_add_(0, inverse, g.reshape(-1, g.shape[-1]))
        return sums, keys // vocabulary, keys % vocabulary

    @cached_property
    def _lookup_keys(self) -> tuple[Tensor, Tensor]:
        assert self.part.weight is not None
        vocabulary = self.shapes[self.part.weight][0]
        examples = torch.arange(self.batch, device=self.a.device).unsqueeze(1)
        keys = (self.a + examples * vocabulary).flatten()
        if isinstance(keys, FakeTensor):  # in a graph no size may follow the data: what occurs again adds to where it was first
            first = (self.a.unsqueeze(2) == self.a.unsqueeze(1)).int().argmax(2)
            return keys, (first + examples * self.a.shape[1]).flatten()
        return torch.unique(keys, return_inverse=True)  # pyright: ignore[reportReturnType]


class RepeatedLayer(Layer):
    """A layer of coupled rows, for several cotangents as if these were so many examples: all share its inputs."""

    def __init__(self, layer: Layer, count: int):
        super().__init__(layer.part, layer.uses, count, layer.shapes)
        self.layer = layer

    @cached_property
    def a(self) -> Tensor:
        """The inputs of the layer for each of the cotangents, without a copy."""
        return self.layer.a.expand(self.batch, -1, -1) if self.layer.a.ndim == 3 else self.layer.a.expand(self.batch, -1)


def layer_rows(layer: Layer, gradients: Sequence[Tensor | None], count: int, exact: bool = True) -> Tensor:
    """Gradients [K, ...] of the outputs of all uses of a layer for `count` cotangents, as rows [K, B, T, O]."""
    if all(g is None for g in gradients):
        rows = layer.outputs(gradients, exact=exact)
        return rows.expand(count, *rows.shape)
    known = [g for g in gradients if g is not None]

    def one(*given: Tensor) -> Tensor:
        """Those for one cotangent."""
        each = iter(given)
        return layer.outputs([None if g is None else next(each) for g in gradients], exact=exact)

    return torch.func.vmap(one)(*known)


def squared_products(g: Tensor, a: Tensor) -> Tensor:
    """sum_b (sum_t g_bt a_bt^T)^2, [O, I], in pieces of bounded size."""
    total = g.new_zeros(g.shape[-1], a.shape[-1])
    for piece in pieces(len(g), total.numel(), g):
        product = g[piece].mT @ a[piece]  # [b, O, I]
        # a GPU reads the products once for their norm
        total += torch.linalg.vector_norm(product, dim=0).square() if g.is_cuda else product.square_().sum(0)
    return total
