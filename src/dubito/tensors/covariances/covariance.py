"""What every structure can do, and independent groups of leaves, each with a structure of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.tensors import tree
from dubito.tensors.covariances.propagation import Full, Gradients, LayerRows, Noise, Shift, flat, input_noise, leaves_of, pieces
from dubito.tensors.tree import Params


class Indefinite(ValueError):
    """A precision matrix that is not positive definite, told with its spectrum and the ways out."""

    def __init__(self, smallest: float, largest: float, negative: int, size: int):
        super().__init__(
            f"the precision matrix is not positive definite: {negative} of its {size} eigenvalues are not positive, the smallest is "
            f"{smallest:.3g} and the largest {largest:.3g}. Use curvature='ggn', which is positive semi-definite by construction; "
            "or train on until the weights are at a maximum; or add damping=... (a precision on top of the prior's), or "
            "clip=True, which sets negative eigenvalues of the curvature to zero"
        )


DRAWN = 2**22  # numbers that are drawn at once


class Covariance(ABC):
    r"""The covariance of a Gaussian over named leaves, mostly given by its inverse, a curvature and a prior:

    .. math:: \Sigma = T \Big( \sum_k s_k H_k + P_0 \Big)^{-1}

    `scale` holds the :math:`s_k` (noise precisions, where the noise is learned; else a single 1), `prior` the diagonal of
    :math:`P_0` leaf by leaf (a number for the whole leaf, or one for each weight), `temperature` T. Leaves that go in and come out may
    be stacked, [n, *shape].
    """

    @property
    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The leaves this is over, in order, and their shapes."""

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """n draws with mean zero, leaves [n, *shape]."""

    @property
    def drawn_at_once(self) -> int:
        """How many draws are made at once: it does not depend on how many are wanted."""
        return max(1, DRAWN // max(1, self.size))

    def draws(self, n: int, generator: torch.Generator | None = None) -> Params:
        """n draws as `sample`, the same whether they are asked for together or in groups that are multiples of `drawn_at_once`."""
        step = self.drawn_at_once
        parts = [self.sample(min(step, n - first), generator) for first in range(0, n, step)]
        return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    @abstractmethod
    def product(self, v: Params) -> Params:
        """The covariance times v; leaves [n, *shape]."""

    @abstractmethod
    def solve(self, v: Params) -> Params:
        """The precision (the inverse of the covariance) times v; leaves [n, *shape]."""

    @abstractmethod
    def logdet(self) -> Tensor:
        """Log determinant of the covariance, in float64."""

    @abstractmethod
    def variance(self) -> Params:
        """The diagonal of the covariance, leaf by leaf."""

    def log_precision(self, prior: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """log det (sum_k s_k H_k + P_0) for other priors and scales, differentiable in both; float64."""
        raise ValueError(f"a {type(self).__name__} covariance of this kind has no curvature and prior to tell apart")

    def with_prior(
        self, prior: Mapping[str, Tensor], scale: Tensor | None = None, temperature: float | None = None
    ) -> Covariance:
        """The covariance of the same curvature under another prior, other noise, another temperature."""
        raise ValueError(f"a {type(self).__name__} covariance of this kind has no curvature and prior to tell apart")

    def times(self, factor: float) -> Covariance:
        """The covariance under a multiple of the prior's precision: what a sweep goes through. No basis changes."""
        if factor == 1:
            return self
        raise ValueError(f"a {type(self).__name__} covariance of this kind has no curvature and prior to tell apart")

    def with_temperature(self, temperature: float) -> Covariance:
        """The same curvature and prior at another temperature."""
        raise ValueError(f"a {type(self).__name__} covariance of this kind has no temperature")

    def plus(self, other: Covariance) -> Covariance:
        """The covariance when the curvature of `other` is added to this one's: what is known from earlier data."""
        raise ValueError(f"the curvature of a {type(other).__name__} covariance cannot be added to a {type(self).__name__} one")

    @property
    def size(self) -> int:
        """Number of weights P."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    @property
    def moving(self) -> int:
        """How many of them move at all: fewer than P in a subnetwork."""
        return self.size

    @property
    def independent_blocks(self) -> tuple[Covariance, ...]:
        """Groups of leaves that are independent of each other, each with its covariance."""
        return (self,)

    @property
    def independent(self) -> bool:
        """Whether every weight is independent of all others, in every case."""
        return False

    @property
    def layer(self) -> tuple[str, str | None] | None:
        """The names of weight and bias, if this is a structure of one layer only."""
        return None

    def over(self, names: Iterable[str]) -> Covariance:
        """The covariance of some leaves, where they are independent of the others."""
        raise ValueError(f"a {type(self).__name__} covariance cannot be cut to some of its leaves")

    def picked(self) -> dict[str, Tensor]:
        """In a subnetwork, the positions of the weights that move in the flat vector of their leaf; no entry: all of them."""
        return {}

    def spectra(self) -> list[tuple[Covariance, Tensor]]:
        """Independent parts, each with eigenvalues h of its curvature for which log det(s H + delta) = sum log(s h + delta), if all
        leaves of the part have the prior precision delta. Empty where they are not known."""
        return []

    def propagate(self, layers: Gradients, others: Params, like: Tensor, factors: Sequence[float]) -> Tensor:
        r""":math:`J \Sigma J^T` of every example under multiples of the prior's precision, [G, B, C, C].

        `layers` are those with weights in this covariance; `others` are gradients [C, B, *shape] of weights in no layer; `like` has
        the shape of the result. This works for any structure that has `product`; those that know a shorter way override it.
        """
        total = torch.zeros_like(like)
        layers = [(layer, g.to(like.dtype)) for layer, g in layers]
        for piece in pieces(like.shape[1], like.shape[2] * self.size, like):
            leaves = {name: leaf[:, piece] for name, leaf in others.items()}
            for layer, g in layers:
                leaves |= leaves_of(layer.examples(piece), g[:, piece])
            n = piece.stop - piece.start
            rows = {name: leaves.get(name, like.new_zeros(like.shape[2], n, *shape)) for name, shape in self.shapes.items()}
            total[:, piece] = self.grams(rows, factors)
        noisy = [(layer, g) for layer, g in layers if layer.spread is not None]
        variances = [self.times(factor).variance() for factor in factors] if noisy else []
        for layer, g in noisy:
            total = total + input_noise(layer, g, variances)
        return total

    def grams(self, rows: Params, factors: Sequence[float]) -> Tensor:
        """Inner products under this covariance of rows [C, B, *shape], [G, B, C, C], for multiples of the prior's precision."""
        classes = len(next(iter(rows.values())))
        stacked = {name: leaf.flatten(0, 1) for name, leaf in rows.items()}
        grams = []
        for factor in factors:
            product = self.times(factor).product(stacked)
            pairs = [
                (flat(rows[name], 2).transpose(0, 1), flat(product[name].unflatten(0, (classes, -1)), 2).transpose(0, 1))
                for name in rows
            ]
            grams.append(torch.stack([a @ b.mT for a, b in pairs]).sum(0))
        return torch.stack(grams)

    def propagate_output(self, layer: LayerRows, classes: int, factors: Sequence[float]) -> Tensor | None:
        """The same for the output layer, whose Jacobian is its input; variances [G, B, C] where outputs are independent and many.
        None where there is no shorter way."""
        return None

    def output_variances(self, layer: LayerRows, classes: int) -> Tensor | None:
        """Variances [B, C] of the outputs of the output layer; None where there is no shorter way."""
        closed = self.propagate_output(layer, classes, (1.0,))
        return closed if closed is None else closed[0] if closed.ndim == 3 else closed[0].diagonal(dim1=1, dim2=2)

    def output_root(self, layer: LayerRows, factor: float = 1.0) -> Tensor | None:
        """A root [B, C, C] of the covariance of the output layer, where one is known."""
        return None

    def noise(self, weight: str, bias: str | None) -> Noise | None:
        """The noise that a layer with these weights adds to its output; None where it is that of independent weights."""
        names = [weight] if bias is None else [weight, bias]
        if any(name not in self.shapes for name in names):
            return None
        outputs, like = self.shapes[weight][0], next(iter(self.variance().values()))
        sizes = [torch.Size(self.shapes[name]).numel() for name in names]
        units = torch.eye(sum(sizes), dtype=like.dtype, device=like.device).split(sizes, 1)
        unit = {name: like.new_zeros(sum(sizes), *shape) for name, shape in self.shapes.items()}
        unit |= {name: rows.reshape(-1, *self.shapes[name]) for name, rows in zip(names, units, strict=True)}
        product = self.product(unit)
        columns = torch.cat([flat(product[name], 1).reshape(sum(sizes), outputs, -1) for name in names], -1)  # [n, O, in]
        order = torch.arange(sum(sizes), device=like.device).split(sizes)
        places = torch.cat([positions.reshape(outputs, -1) for positions in order], -1)  # [O, in]
        return Full(columns[places], bias is not None)

    def shift(self, bias: str) -> Shift:
        """The noise of a bias alone."""
        (outputs,), like = self.shapes[bias], next(iter(self.variance().values()))
        unit = {name: like.new_zeros(outputs, *shape) for name, shape in self.shapes.items()}
        unit[bias] = torch.eye(outputs, dtype=like.dtype, device=like.device)
        return Shift(self.product(unit)[bias])

    def dense(self) -> Tensor:
        """The whole matrix [P, P], in the order of the leaves; for small ones."""
        like = {name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()}
        first = next(iter(self.variance().values()))
        eye = torch.eye(self.size, dtype=first.dtype, device=first.device)
        product = self.product(tree.unflatten(eye, like))
        return tree.flatten({name: product[name] for name in self.shapes}, stacked=True)


def expanded(prior: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> Tensor:
    """The prior's diagonal as one vector [P]."""
    return torch.cat([prior[name].expand(shape).reshape(-1) for name, shape in shapes.items()])


def alike(leaves: Iterable[Tensor]) -> bool:
    """Whether all are one and the same number, also to a gradient."""
    first, *rest = leaves
    if first.ndim:
        return False
    return all(
        leaf is first or (leaf.ndim == 0 and not leaf.requires_grad and not first.requires_grad and bool(leaf == first))
        for leaf in rest
    )


def normal(shape: Sequence[int], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers, on the generator's device and then on that of `like`."""
    device = like.device if generator is None else generator.device
    return torch.randn(tuple(shape), generator=generator, dtype=like.dtype, device=device).to(like.device)


@dataclass(frozen=True)
class Blocks(Covariance):
    """A block-diagonal covariance, block after block."""

    blocks: tuple[Covariance, ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The leaves of all blocks, in order."""
        return {name: shape for block in self.blocks for name, shape in block.shapes.items()}

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """n draws of every block, one block after another."""
        return {name: leaf for block in self.blocks for name, leaf in block.sample(n, generator).items()}

    def product(self, v: Params) -> Params:
        """The covariance times v; leaves [n, *shape]."""
        return {name: leaf for block in self.blocks for name, leaf in block.product(v).items()}

    def solve(self, v: Params) -> Params:
        """The precision times v; leaves [n, *shape]."""
        return {name: leaf for block in self.blocks for name, leaf in block.solve(v).items()}

    def logdet(self) -> Tensor:
        """The sum over the blocks."""
        return torch.stack([block.logdet() for block in self.blocks]).sum()

    def variance(self) -> Params:
        """The diagonal of the covariance, leaf by leaf."""
        return {name: leaf for block in self.blocks for name, leaf in block.variance().items()}

    def log_precision(self, prior: Mapping[str, Tensor], scale: Tensor) -> Tensor:
        """The sum over the blocks."""
        return torch.stack([block.log_precision({n: prior[n] for n in block.shapes}, scale) for block in self.blocks]).sum()

    def with_prior(self, prior: Mapping[str, Tensor], scale: Tensor | None = None, temperature: float | None = None) -> Blocks:
        """The same curvature under another prior, noise or temperature."""
        return Blocks(tuple(block.with_prior(prior, scale, temperature) for block in self.blocks))

    def times(self, factor: float) -> Blocks:
        """The covariance under a multiple of the prior's precision."""
        return Blocks(tuple(block.times(factor) for block in self.blocks))

    def with_temperature(self, temperature: float) -> Blocks:
        """The same curvature and prior at another temperature."""
        return Blocks(tuple(block.with_temperature(temperature) for block in self.blocks))

    @property
    def independent_blocks(self) -> tuple[Covariance, ...]:
        """The blocks."""
        return self.blocks

    def picked(self) -> dict[str, Tensor]:
        """The picked positions of all blocks."""
        return {name: leaf for block in self.blocks for name, leaf in block.picked().items()}

    @property
    def moving(self) -> int:
        """The sum over the blocks."""
        return sum(block.moving for block in self.blocks)

    def plus(self, other: Covariance) -> Covariance:
        """Block by block; both must have the same blocks."""
        if not isinstance(other, Blocks) or [set(b.shapes) for b in self.blocks] != [set(b.shapes) for b in other.blocks]:
            raise ValueError(
                "the earlier posterior has another structure: fit with the same structure on the same weights, or start from scratch"
            )
        return Blocks(tuple(mine.plus(theirs) for mine, theirs in zip(self.blocks, other.blocks, strict=True)))
