r"""Covariances carried from weights to outputs, :math:`J \Sigma J^T`, layer by layer, without the Jacobian J of all weights.

A layer with inputs a [B, T, I] at T positions and gradients g [C, B, T, O] of C network outputs with respect to its outputs has the
rows :math:`\sum_t g_t a_t^T` of J. How a structure uses them is in its file; this one has what they share.

The noise that correlated weights of a layer add to its output is, for given inputs, a `Noise`. Each kind has `var(m)` [..., O],
`cov(m)` [..., O, O] and `directions(m)` [O, ..., O], whose outer products add up to `cov`, for inputs m [..., I]; the bias, where there
is one, is inside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.tensors.eigen import eigh
from dubito.tensors.tree import Params, full_precision, symbolic


@dataclass(frozen=True)
class Rotated:
    """A Kronecker product, in its eigenbasis."""

    basis: Tensor  # [in, J], its last row that of the bias
    variances: Tensor  # [O, J]
    left: Tensor  # [O, O]
    marginal: Tensor  # [O, J], squares of `left` times `variances`
    biased: bool

    @cached_property
    def squares(self) -> Tensor:
        """Of the basis, without the bias: variances of inputs times these are variances in the eigenbasis."""
        return (self.basis[:-1] if self.biased else self.basis).square()

    def energy(self, m: Tensor) -> Tensor:
        """Squares of the inputs in the eigenbasis."""
        return self.rotate(m).square()

    def rotate(self, m: Tensor) -> Tensor:
        """The inputs, and the 1 of the bias, in the eigenbasis."""
        return F.linear(m, self.basis[:-1].mT, self.basis[-1]) if self.biased else m @ self.basis

    def var(self, m: Tensor) -> Tensor:
        """Variances [..., O] of the outputs for inputs m [..., I]."""
        return self.energy(m) @ self.marginal.mT

    def cov(self, m: Tensor) -> Tensor:
        """Covariances [..., O, O] of the outputs for inputs m [..., I]."""
        return (self.left * (self.energy(m) @ self.variances.mT).unsqueeze(-2)) @ self.left.mT

    def directions(self, m: Tensor) -> Tensor:
        """Columns [O, ..., O] whose outer products add up to `cov(m)`."""
        return (self.left * (self.energy(m) @ self.variances.mT).sqrt().unsqueeze(-2)).movedim(-1, 0)


@dataclass(frozen=True)
class Full:
    """All weights of the layer together."""

    sigma: Tensor  # [O, in, O, in], `in` with the bias last
    biased: bool

    def _input(self, m: Tensor) -> Tensor:
        return torch.cat([m, torch.ones_like(m[..., :1])], -1) if self.biased else m

    def var(self, m: Tensor) -> Tensor:
        """Variances [..., O] of the outputs for inputs m [..., I]."""
        a = self._input(m)
        own = self.sigma.diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # [O, in, in]
        return torch.einsum("oij,...i,...j->...o", own, a, a).clamp_min(0)

    def cov(self, m: Tensor) -> Tensor:
        """Covariances [..., O, O] of the outputs for inputs m [..., I]."""
        a = self._input(m)
        half = torch.einsum("oipj,...j->...oip", self.sigma, a)
        return torch.einsum("...oip,...i->...op", half, a)

    def directions(self, m: Tensor) -> Tensor:
        """Columns [O, ..., O] whose outer products add up to `cov(m)`."""
        return _root(self.cov(m))


@dataclass(frozen=True)
class Directions:
    """Independent weights, and directions in which they move together."""

    own: Tensor  # [O, in], may be negative where directions take away
    rows: Tensor  # [k, O, in]
    signs: Tensor  # [k], what each direction adds: 1, or -1 where it takes away
    biased: bool

    def _each(self, m: Tensor) -> tuple[Tensor, Tensor]:
        a = torch.cat([m, torch.ones_like(m[..., :1])], -1) if self.biased else m
        return a.square() @ self.own.mT, torch.einsum("koi,...i->...ko", self.rows, a)

    def var(self, m: Tensor) -> Tensor:
        """Variances [..., O] of the outputs for inputs m [..., I]."""
        own, along = self._each(m)
        return (own + (self.signs.unsqueeze(-1) * along.square()).sum(-2)).clamp_min(0)

    def cov(self, m: Tensor) -> Tensor:
        """Covariances [..., O, O] of the outputs for inputs m [..., I]."""
        own, along = self._each(m)
        return torch.diag_embed(own) + (along * self.signs.unsqueeze(-1)).mT @ along

    def directions(self, m: Tensor) -> Tensor:
        """Columns [O, ..., O] whose outer products add up to `cov(m)`."""
        return _root(self.cov(m))


@dataclass(frozen=True)
class Shift:
    """A bias whose entries move together, apart from the layer's matrix: whatever comes in, the same."""

    sigma: Tensor  # [O, O]

    def cov(self, m: Tensor) -> Tensor:
        """Covariances [..., O, O] of the outputs for inputs m [..., I]."""
        return self.sigma.expand(*m.shape[:-1], *self.sigma.shape)

    def directions(self, m: Tensor) -> Tensor:
        """Columns [O, ..., O] whose outer products add up to `cov(m)`."""
        root = _root(self.sigma)
        return root.view(len(root), *[1] * (m.ndim - 1), -1).expand(-1, *m.shape[:-1], -1)


def _root(cov: Tensor) -> Tensor:
    """Columns [O, ..., O] whose outer products add up to the covariance."""
    values, vectors = eigh(cov)
    return (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)).movedim(-1, 0)


Noise = Rotated | Full | Directions


CHUNK = 2**22  # numbers that may be formed at a time, where something is formed piece by piece
CACHE = 2**19  # numbers that a CPU's cache holds while they are formed, scaled and multiplied
PARTS = 2**8  # into which a GPU cuts long sums
TILE = 2**7  # rows that a GPU multiplies at no more cost than few of them
PAIRS = 2**6  # pairs of positions for each output up to which a GPU goes by these
LONG = 2**12  # length of rows above which it would be idle with one product for each example
WIDE = 100  # outputs above which independent ones are given by their variances alone


class Place(Protocol):
    """Where the weights of a layer are in the network."""

    @property
    def kind(self) -> str:
        """ "affine" (g a^T), "scale" (g * a) or "lookup" (rows of a table)."""
        ...

    @property
    def weight(self) -> str | None:
        """The name of the matrix, if it is there."""
        ...

    @property
    def bias(self) -> str | None:
        """The name of the bias, if it is there."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """Of both."""
        ...


class LayerRows(Protocol):
    """A layer in one pass over a batch: its inputs, and what follows from gradients of its outputs."""

    batch: int
    shapes: dict[str, torch.Size]

    @property
    def part(self) -> Place:
        """Where its weights are."""
        ...

    @cached_property
    def a(self) -> Tensor:
        """Inputs [B, T, I] without the constant 1 of a bias."""
        ...

    @cached_property
    def inputs(self) -> Tensor:
        """The same in the network's precision."""
        ...

    @cached_property
    def spread(self) -> Tensor | None:
        """Variances of the inputs, [B, T, I]; None where they are certain."""
        ...

    @property
    def positions(self) -> int:
        """T."""
        ...

    @property
    def width(self) -> int:
        """I, with the constant 1 of a bias."""
        ...

    @cached_property
    def squared(self) -> Tensor:
        """Expected squares [B, I] of the inputs, for one position."""
        ...

    @cached_property
    def extended(self) -> Tensor:
        """Inputs with the constant 1 of a bias, [B, T, I + 1]."""
        ...

    def energy(self, basis: Tensor) -> Tensor:
        """Expected squares of the inputs in another basis [in, J], [B, J], for one position."""
        ...

    def gradients(self, g: Tensor) -> Params:
        """Gradients of the weights from g [B, T, O], example by example: leaves [B, *shape]."""
        ...

    def lookups(self, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the looked-up rows [U, E], with their example and their index [U]."""
        ...

    def examples(self, piece: slice) -> LayerRows:
        """The same layer for some of the examples."""
        ...


Gradients = Sequence[tuple[LayerRows, Tensor]]  # layers with gradients [C, B, T, O] of the network's outputs


def flat(leaf: Tensor, start: int) -> Tensor:
    """The axes of a weight, those from `start` on, as one; a weight that is a single number has none, and is given one."""
    return leaf.unsqueeze(-1) if leaf.ndim == start else leaf.flatten(start)


def pieces(n: int, each: int, like: Tensor | None = None, chunk: int | None = None) -> Iterator[slice]:
    """n things in slices, so that things of `each` numbers stay within bounds, which are wider on a GPU (where `like` is)."""
    if symbolic(n):  # while it is traced for any number of them: all at a time
        return iter([slice(0, n)])
    chunk = (chunk or CHUNK) if like is None or not like.is_cuda else 64 * CHUNK
    step = max(1, chunk // max(1, each))
    return (slice(start, min(n, start + step)) for start in range(0, n, step))


def gram(rows: Tensor) -> Tensor:
    """Inner products of rows [C, B, n] as [B, C, C], summed in full precision."""
    return inner_products(rows.transpose(0, 1) if rows.is_cuda else full_precision(rows).transpose(0, 1))


def inner_products(rows: Tensor) -> Tensor:
    """Those of rows [B, C, n] of every example, [B, C, C]."""
    if not rows.is_cuda:
        return rows @ rows.mT
    size, classes, length = rows.shape
    few = not symbolic(size) and classes <= TILE and length > LONG
    return in_parts(rows) if few else _in_single(rows, rows.mT)


def in_parts(rows: Tensor) -> Tensor:
    """The same of few rows that are long, as suits a GPU: of several examples at once, part by part; only the products within an
    example are kept."""
    _, classes, length = rows.shape
    parts, found = math.gcd(length, PARTS), []
    for some in rows.split(max(1, TILE // classes)):
        short = some.flatten(0, 1).unflatten(1, (parts, -1)).transpose(0, 1)  # [parts, b C, n / parts]
        whole = _in_single(short, short.mT).sum(0).view(len(some), classes, len(some), classes)
        found.append(whole.diagonal(dim1=0, dim2=2).permute(2, 0, 1))
    return torch.cat(found)


def _in_single(a: Tensor, b: Tensor) -> Tensor:
    """Products that are summed, and given, in single precision or better."""
    return torch.bmm(a, b, out_dtype=torch.float32) if a.dtype.itemsize < 4 else torch.bmm(a, b)


def few_positions(positions: int, classes: int, like: Tensor) -> bool:
    """Whether a GPU is done sooner with `by_pairs` than with the gradients of all weights, whose numbers it would have to move."""
    return like.is_cuda and positions * positions <= PAIRS * classes


def by_pairs(a: Tensor, g: Tensor, variances: Sequence[Tensor]) -> Tensor:
    r"""Inner products of the rows :math:`\sum_t g_t a_t^T` under independent weights, [G, b, C, C], for inputs a [b, T, I], gradients
    g [C, b, T, O] and each of several variances [O, I], without the rows: :math:`\sum_{tu} g_t g_u (\sum_i v_i a_{ti} a_{ui})`."""
    parts, positions = [], a.shape[1]
    for piece in pieces(len(a), positions**2 * (a.shape[-1] + g.shape[-1]), g):
        rows, some = g[:, piece].permute(1, 3, 0, 2), a[piece]  # [b, O, C, T]
        columns = rows.mT.flatten(1, 2)  # [b, O T, C]
        products, found = (some.unsqueeze(2) * some.unsqueeze(1)).flatten(0, 2), []  # [b T T, I]
        for variance in variances:
            inner = (products @ variance.mT).view(len(some), positions, positions, -1).permute(0, 3, 1, 2)  # [b, O, T, T]
            found.append((rows @ inner).mT.flatten(1, 2).mT @ columns)
        parts.append(torch.stack(found))
    return torch.cat(parts, 1)


def input_noise(layer: LayerRows, g: Tensor, variances: Sequence[Params]) -> Tensor:
    """What independent noise of a layer's inputs adds by way of the weights' variances, for each of these: [G, B, C, C]."""
    assert layer.spread is not None
    assert layer.part.weight is not None
    weights = [v[layer.part.weight] for v in variances]
    return torch.stack([gram((g * (layer.spread @ w.reshape(w.shape[0], -1).mT).sqrt()).flatten(2)) for w in weights])


def single_position(layer: LayerRows, variance: Params) -> Tensor:
    """Variances [B, O] of the outputs of an affine layer with one position and independent weights."""
    part = layer.part
    if part.weight is None:
        assert part.bias is not None
        return variance[part.bias].expand(layer.batch, -1)
    weight = variance[part.weight]
    total = layer.squared @ weight.reshape(weight.shape[0], -1).mT
    return total if part.bias is None else total + variance[part.bias]


def weight_gradients(layer: LayerRows, g: Tensor) -> Iterator[tuple[Tensor, str, slice]]:
    """Gradients of a layer's weights [C, b, *shape], with their name, in pieces of the batch."""
    part, shapes, classes = layer.part, layer.shapes, len(g)
    if part.kind == "lookup":
        yield from _table_gradients(layer, g)
        return
    affine = part.kind == "affine"
    size = sum(shapes[name].numel() for name in part.names) * (1 if affine else layer.positions)
    for piece in pieces(layer.batch, classes * size, g, CACHE):
        rows = g[:, piece] if affine else full_precision(g[:, piece])
        if part.weight is not None and affine:  # all outputs in one product: the inputs are read once for all of them
            columns = rows.permute(1, 0, 3, 2).flatten(1, 2)  # [b, C O, T]
            product = (columns @ layer.inputs[piece].to(g.dtype)).unflatten(1, (classes, -1)).transpose(0, 1)
            yield product.unflatten(-1, shapes[part.weight][1:]), part.weight, piece
        elif part.weight is not None:
            yield (rows * layer.a[piece]).sum(2).reshape(*rows.shape[:2], *shapes[part.weight]), part.weight, piece
        if part.bias is not None:
            yield rows.sum(2).reshape(*rows.shape[:2], *shapes[part.bias]), part.bias, piece


def leaves_of(layer: LayerRows, g: Tensor) -> Params:
    """Gradients of a layer's weights, leaves [C, B, *shape]."""
    found: dict[str, list[Tensor]] = {}
    for leaf, name, _ in weight_gradients(layer, g):
        found.setdefault(name, []).append(leaf)
    return {name: parts[0] if len(parts) == 1 else torch.cat(parts, 1) for name, parts in found.items()}


def _table_gradients(layer: LayerRows, g: Tensor) -> Iterator[tuple[Tensor, str, slice]]:
    """The same for a table of which rows are looked up."""
    assert layer.part.weight is not None
    for piece in pieces(layer.batch, len(g) * layer.shapes[layer.part.weight].numel(), g, CACHE):
        each = [layer.examples(piece).gradients(full_precision(one[piece])) for one in g]
        yield torch.stack([e[layer.part.weight] for e in each]), layer.part.weight, piece


def propagate_independent(variances: Sequence[Params], layers: Gradients, others: Params, total: Tensor) -> Tensor:
    """[G, B, C, C] of independent weights, for each of several variances: added to `total`, which may change in place."""
    for name, leaf in others.items():
        total = total + torch.stack([gram(flat(leaf * v[name].sqrt(), 2)) for v in variances])
    for layer, g in layers:
        part = layer.part
        if part.kind == "affine" and layer.positions == 1:
            rows = g.squeeze(2)
            total = total + torch.stack([gram(rows * single_position(layer, v).sqrt()) for v in variances])
        elif part.kind == "lookup":
            total = _add_lookups(variances, layer, g, total)
        else:
            paired = part.kind == "affine" and part.weight is not None and few_positions(layer.positions, len(g), g)
            total = (_add_by_pairs if paired else _add_rows)(variances, layer, g, total)
            if layer.spread is not None:
                total = total + input_noise(layer, g, variances)
    return total


def _add_rows(variances: Sequence[Params], layer: LayerRows, g: Tensor, total: Tensor) -> Tensor:
    """The same by the gradients of all weights."""
    roots = {name: [v[name].sqrt().to(g.dtype) for v in variances] for name in layer.part.names}
    for leaf, name, piece in weight_gradients(layer, g):
        scaled = [leaf.mul_(roots[name][0])] if len(variances) == 1 else [leaf * root for root in roots[name]]
        total[:, piece] += torch.stack([gram(rows.flatten(2)) for rows in scaled])
    return total


def _add_by_pairs(variances: Sequence[Params], layer: LayerRows, g: Tensor, total: Tensor) -> Tensor:
    """The same by pairs of positions."""
    (weight, bias), g = (layer.part.weight, layer.part.bias), full_precision(g)
    assert weight is not None
    total = total + by_pairs(layer.a, g, [v[weight].flatten(1) for v in variances])
    if bias is not None:
        total = total + torch.stack([gram(g.sum(2) * v[bias].sqrt()) for v in variances])
    return total


def _add_lookups(variances: Sequence[Params], layer: LayerRows, g: Tensor, total: Tensor) -> Tensor:
    """The same of a table of which each example looks up some rows."""
    assert layer.part.weight is not None
    each = [layer.lookups(rows) for rows in g.to(total.dtype)]
    sums, example, index = torch.stack([rows for rows, _, _ in each]), each[0][1], each[0][2]  # sums [C, U, E]
    inner = torch.stack([gram(sums * v[layer.part.weight][index].sqrt()) for v in variances])
    return total.index_add(1, example, inner)
