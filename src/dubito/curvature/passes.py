r"""How an estimate of the curvature is made: how many passes over the data it takes, what each adds up, and the covariance in the end.

`SinglePass` is the plain case; `EKFAC`, `Subnetwork` and `TopEigen` may use a second pass, for which the first has prepared something.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dubito.curvature import statistics
from dubito.curvature.cotangents import monte_carlo
from dubito.curvature.layout import Layout, Part
from dubito.curvature.memory import DOUBLE, Need, evidence_matrices, least_room, refusal
from dubito.curvature.products import HessianColumns, Products
from dubito.curvature.setup import Setup, Spec, last_layer
from dubito.curvature.statistics import EigenSquares, LayerStatistic, Statistic, from_pairs
from dubito.model import Model
from dubito.model.likelihoods import NOISE
from dubito.network.examples import Batch, Inputs
from dubito.tensors import tree
from dubito.tensors.covariances import Blocks, Covariance, Dense, Diagonal, Kronecker, LowRank
from dubito.tensors.eigen import eigh
from dubito.tensors.processes import ALONE, Processes
from dubito.tensors.tree import Buffers, Params

ROUNDING = 1e-5  # what is smaller than so much of the whole may be rounding in single precision
OVERSAMPLING = 10  # directions beyond the rank that the randomized search keeps, for accuracy


@dataclass(frozen=True)
class Estimate:
    """What makes a covariance of sums: the layers, how many examples were seen of how many, the prior, the noise, the temperature."""

    layout: Layout
    seen: list[int]  # examples of each pass
    n_data: float
    prior: Mapping[str, Tensor]  # precision of every leaf
    scale: Tensor  # [G], noise precisions
    temperature: float = 1.0
    processes: Processes = ALONE  # that hold the same sums

    def factor(self, which: int) -> float:
        """What a sum of pass `which` is multiplied by, to be one over all data."""
        return self.n_data / max(1, self.seen[which])


class Passes(ABC):
    """One way to estimate the curvature."""

    count: ClassVar[int] = 1

    @abstractmethod
    def zeros(self, setup: Setup, layout: Layout, generator: torch.Generator) -> Params:
        """The sums before any data."""

    @abstractmethod
    def statistic(self, setup: Setup, sums: Params, which: int) -> tuple[Statistic, Params]:
        """What pass `which` adds up, and those of the sums that it adds to."""

    def adds(self, key: str, which: int) -> bool:
        """Whether pass `which` adds to the tensor of this name; the others stay as they are."""
        return True

    def between(self, setup: Setup, sums: Params, estimate: Estimate) -> None:  # noqa: B027 (most have one pass only)
        """Prepare the sums for the second pass."""

    @abstractmethod
    def covariance(self, setup: Setup, sums: Params, estimate: Estimate) -> Blocks:
        """The covariance, from the sums of all passes."""

    def label_draws(self, setup: Setup, layout: Layout) -> int | None:
        """How many labels are drawn for each example; None where none are: all outputs are followed, or the data's own labels."""
        return monte_carlo(setup.spec.kind, setup.spec.draws, layout.outputs)

    @abstractmethod
    def need(self, setup: Setup, layout: Layout, by: str = "layer") -> Need:
        """Bytes that this takes if prior precisions are fitted "layer" by layer, by "parameter" or as "one"."""


def _statistic(setup: Setup) -> LayerStatistic:
    return statistics.STATISTICS[setup.spec.structure](setup)


@dataclass(frozen=True)
class SinglePass(Passes):
    """Diagonal, Kronecker or dense, in one pass."""

    def zeros(self, setup: Setup, layout: Layout, generator: torch.Generator) -> Params:
        """The sums of one structure."""
        return _statistic(setup).zeros(layout)

    def statistic(self, setup: Setup, sums: Params, which: int) -> tuple[Statistic, Params]:
        """That of the structure."""
        return _statistic(setup), sums

    def label_draws(self, setup: Setup, layout: Layout) -> int | None:
        """None of the output layer alone, however many outputs it has."""
        return None if _statistic(setup).closed(layout) else super().label_draws(setup, layout)

    def covariance(self, setup: Setup, sums: Params, estimate: Estimate) -> Blocks:
        """As the structure of the sums."""
        return single_pass_covariance(setup, sums, estimate)

    def need(self, setup: Setup, layout: Layout, by: str = "layer") -> Need:
        """Sums, covariance and evidence of the structure."""
        sums = _numbers(_statistic(setup).shapes(layout)) * setup.dtype.itemsize
        groups, size, item = setup.groups(layout), setup.size, setup.dtype.itemsize
        if setup.spec.structure == "dense":
            return Need(sums, groups * size * size * item, evidence_matrices(size, groups, by) * DOUBLE)
        if setup.spec.structure == "diagonal":
            return Need(sums, groups * size * item, 4 * size * DOUBLE)
        return Need(sums, _kronecker_numbers(setup, layout, by) * item, 3 * size * DOUBLE)


@dataclass(frozen=True)
class EKFAC(Passes):
    """Kronecker, then in a second pass the mean squares along its eigenvectors."""

    count: ClassVar[int] = 2

    def _squares(self, setup: Setup) -> EigenSquares:
        return EigenSquares(setup, statistics.Kronecker(setup))

    def zeros(self, setup: Setup, layout: Layout, generator: torch.Generator) -> Params:
        """The Kronecker factors, the squares, and the eigenvectors in between."""
        squares = self._squares(setup)
        if squares.shapes(layout) and setup.groups(layout) > 1:
            raise ValueError("corrected eigenvalues are for one learned noise: use Gaussian() without outputs=, or a fixed scale")
        return {**squares.kronecker.zeros(layout), **squares.zeros(layout)}

    def statistic(self, setup: Setup, sums: Params, which: int) -> tuple[Statistic, Params]:
        """Factors first, then squares along their eigenvectors."""
        return (statistics.Kronecker(setup), self._squares(setup))[which], sums

    def adds(self, key: str, which: int) -> bool:
        """Squares in the second pass; the eigenvectors are no sums."""
        return key.endswith("|L") if which else not key.endswith(("|L", "|left", "|right"))

    def between(self, setup: Setup, sums: Params, estimate: Estimate) -> None:
        """Write the eigenvectors of the factors into the sums."""
        for block in single_pass_covariance(setup, sums, estimate).blocks:
            if isinstance(block, Kronecker):
                sums[f"{block.weight}|left"].copy_(block.left)
                sums[f"{block.weight}|right"].copy_(block.inputs)

    def covariance(self, setup: Setup, sums: Params, estimate: Estimate) -> Blocks:
        """Kronecker blocks with corrected eigenvalues."""
        plain = single_pass_covariance(setup, sums, estimate)
        if not estimate.seen[1]:
            return plain
        factor = estimate.factor(1) * float(estimate.scale[0])
        return Blocks(tuple(_corrected(b, sums, factor) if isinstance(b, Kronecker) else b for b in plain.blocks))

    def need(self, setup: Setup, layout: Layout, by: str = "layer") -> Need:
        """That of Kronecker, with both bases and the squares in them."""
        plain, item = SinglePass().need(setup, layout, by), setup.dtype.itemsize
        squares = self._squares(setup).shapes(layout)
        values = _numbers({key: shape for key, shape in squares.items() if key.endswith("|L")})
        return replace(plain, sums=plain.sums + _numbers(squares) * item, covariance=plain.covariance + values * item)


def _corrected(block: Kronecker, sums: Params, factor: float) -> Kronecker:
    """A block with the eigenvalues of the second pass, and the very eigenvectors that they were made with: found again, they could
    differ in sign or order."""
    left, right = sums[f"{block.weight}|left"], sums[f"{block.weight}|right"]
    right = right if block.warp is None else right * block.warp.unsqueeze(1)
    return replace(block, values=sums[f"{block.weight}|L"] * factor, left=left, right=right)


@dataclass(frozen=True)
class Subnetwork(Passes):
    """Dense over a few weights, picked over all layers: by magnitude in one pass, by marginal variance in two."""

    size: int
    by: Literal["variance", "magnitude"]

    @property
    def count(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Two passes where the first tells which weights to pick."""
        return 2 if self.by == "variance" else 1

    def zeros(self, setup: Setup, layout: Layout, generator: torch.Generator) -> Params:
        """The dense matrix of the picked weights, and the squares by which they are picked."""
        if self.size > setup.size:
            raise ValueError(f"a subnetwork of {self.size} weights is more than the {setup.size} there are")
        index = _largest(torch.cat([leaf.detach().abs().flatten() for leaf in setup.like.values()]), self.size)
        sums = {**statistics.Dense(setup, index).zeros(layout), "index": index}
        if self.by == "variance":
            sums |= {f"D|{name}": leaf for name, leaf in statistics.Diagonal(setup).zeros(layout).items()}
        return sums

    def statistic(self, setup: Setup, sums: Params, which: int) -> tuple[Statistic, Params]:
        """Squares of all weights first, if they are picked by variance; then products of the picked."""
        if which == 0 and self.by == "variance":
            return statistics.Diagonal(setup), _squares(sums)
        return statistics.Dense(setup, sums["index"]), {"H": sums["H"]}

    def adds(self, key: str, which: int) -> bool:
        """Squares of all weights, or products of the picked."""
        return key.startswith("D|") if which == 0 and self.by == "variance" else key == "H"

    def between(self, setup: Setup, sums: Params, estimate: Estimate) -> None:
        """Pick the weights of largest variance."""
        diagonal = replace(setup, spec=replace(setup.spec, structure="diagonal"))
        variance = single_pass_covariance(diagonal, _squares(sums), estimate).variance()
        sums["index"].copy_(_largest(torch.cat([variance[name].flatten() for name in setup.names]), self.size))

    def covariance(self, setup: Setup, sums: Params, estimate: Estimate) -> Blocks:
        """Dense over the picked weights."""
        curvature, scale = sums["H"] * estimate.factor(self.count - 1), estimate.scale.to(setup.dtype)
        prior = {name: estimate.prior[name] for name in setup.names}
        return Blocks((Dense(_lists(setup, setup.names), curvature, prior, scale, estimate.temperature, sums["index"]),))

    def need(self, setup: Setup, layout: Layout, by: str = "layer") -> Need:
        """A square of the picked weights, and a number for each weight."""
        k, groups, item = self.size, setup.groups(layout), setup.dtype.itemsize
        square, index = groups * k * k * item, k * 8
        diagonal = groups * setup.size * item if self.by == "variance" else 0
        return Need(square + diagonal + index, square + index, evidence_matrices(k, groups, by) * DOUBLE)


def _squares(sums: Params) -> Params:
    return {key[2:]: leaf for key, leaf in sums.items() if key.startswith("D|")}


@dataclass(frozen=True)
class TopEigen(Passes):
    """The main directions of the GGN or the Hessian, by a randomized range finder and its products with the curvature; outside of
    them the diagonal of the GGN, which is summed in the first pass."""

    count: ClassVar[int] = 2
    rank: int
    clip: bool = False

    def _products(self, setup: Setup) -> Products:
        return Products(setup, min(self.rank + OVERSAMPLING, setup.size))

    def zeros(self, setup: Setup, layout: Layout, generator: torch.Generator) -> Params:
        """Random orthonormal directions, and zeros for their products."""
        products = self._products(setup)
        unit = torch.randn(products.count, setup.size, generator=generator, dtype=setup.dtype, device=generator.device)
        first = tree.unflatten(_orthonormal(unit.to(setup.model.device)), setup.like)
        squares = statistics.Diagonal(setup).zeros(layout) if products.count < setup.size else {}
        first = {f"Q|{name}": leaf for name, leaf in first.items()} | {f"D|{name}": leaf for name, leaf in squares.items()}
        return products.zeros(layout) | first

    def label_draws(self, setup: Setup, layout: Layout) -> int | None:
        """None: products with the curvature take no more for many outputs than for one."""
        return None

    def statistic(self, setup: Setup, sums: Params, which: int) -> tuple[Statistic, Params]:
        """Products of the curvature with the directions, and squared gradients."""
        products = self._products(setup)
        return replace(products, squares=which == 0 and bool(_squares(sums))), sums

    def adds(self, key: str, which: int) -> bool:
        """Products, and squares in the first pass; the directions are no sums."""
        return key.startswith("Y|") or (which == 0 and key.startswith("D|"))

    def between(self, setup: Setup, sums: Params, estimate: Estimate) -> None:
        """Take an orthonormal basis of the products as directions."""
        y = tree.flatten({name: sums[f"Y|{name}"] for name in setup.names}, stacked=True)
        for name, leaf in tree.unflatten(_orthonormal(y), setup.like).items():
            sums[f"Q|{name}"].copy_(leaf)
            sums[f"Y|{name}"].zero_()

    def covariance(self, setup: Setup, sums: Params, estimate: Estimate) -> Blocks:
        """Low rank: the eigenvectors of the curvature in the span of the directions, and the diagonal of what is left."""
        factor = estimate.factor(1 if estimate.seen[1] else 0)
        q, y = (tree.flatten({name: sums[f"{key}|{name}"] for name in setup.names}, stacked=True) for key in "QY")
        small = (q @ y.mT).double()  # Q^T H Q
        values, vectors = eigh((small + small.mT) / 2)
        if float(values[0]) < -1e-3 * float(values[-1].abs()) and not self.clip:
            raise ValueError(
                f"the Hessian has negative curvature in its main directions, down to {float(values[0] * factor):.3g} (largest: "
                f"{float(values[-1] * factor):.3g}). Use curvature='ggn', or clip=True, or train on until the weights are at a maximum"
            )
        squares = _squares(sums)
        if squares and setup.spec.kind == "ggn":
            values, rows = _nystrom(values, vectors, y)
        else:
            rows = vectors.mT.to(q) @ q
        order = values.argsort(descending=True)[: self.rank]
        rows = rows[order]
        # the products hold the noise; where it is learned, the curvature is kept at unit noise
        scale = estimate.scale if len(estimate.scale) == 1 else torch.ones_like(estimate.scale[:1])
        values = (values[order].clamp_min(0) * factor / scale[0]).to(q)
        directions, remainder = tree.unflatten(rows, setup.like), None
        if squares:  # of unit noise, as the values
            weights = (estimate.scale / scale[0]).to(q) * estimate.factor(0)
            whole = {name: torch.tensordot(weights, squares[name].to(q), 1) for name in setup.names}
            captured = {name: torch.tensordot(values, leaf**2, 1) for name, leaf in directions.items()}
            left = {name: leaf - captured[name] for name, leaf in whole.items()}
            remainder = {name: torch.where(leaf > ROUNDING * whole[name], leaf, 0.0) for name, leaf in left.items()}
        made = LowRank.precision(
            directions, values, estimate.prior, scale=scale, temperature=estimate.temperature, remainder=remainder
        )  # fmt: skip
        return Blocks((made,))

    def need(self, setup: Setup, layout: Layout, by: str = "layer") -> Need:
        """Twice the directions; in the end those of the rank."""
        size, item, k = setup.size, setup.dtype.itemsize, self._products(setup).count
        rank = min(self.rank, k)
        squares = setup.groups(layout) * size * item if k < size else 0
        kept = (2 if squares else 1) * size + rank * size + rank
        return Need(2 * k * size * item + squares, kept * item, 6 * rank * size * DOUBLE)


def _nystrom(values: Tensor, vectors: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    r"""Values and orthonormal rows of :math:`H Q (Q^T H Q)^{-1} Q^T H`, the largest part of H in the range of HQ that leaves a
    semi-definite rest, for rows y of HQ and the spectrum of :math:`Q^T H Q`."""
    keep = values > ROUNDING * values[-1].clamp_min(0)
    root = (vectors[:, keep] * values[keep].rsqrt()).mT @ y.double()
    inner, turn = eigh(root @ root.mT)
    return inner.clamp_min(0), ((turn / inner.clamp_min(torch.finfo(inner.dtype).tiny).sqrt()).mT @ root).to(y)


@dataclass(frozen=True)
class Hessian(Passes):
    """The full Hessian, column by column; or its diagonal."""

    clip: bool = False

    def zeros(self, setup: Setup, layout: Layout, generator: torch.Generator) -> Params:
        """A square matrix."""
        return HessianColumns(setup).zeros(layout)

    def statistic(self, setup: Setup, sums: Params, which: int) -> tuple[Statistic, Params]:
        """Columns of the Hessian."""
        return HessianColumns(setup), sums

    def covariance(self, setup: Setup, sums: Params, estimate: Estimate) -> Blocks:
        """Dense, or its diagonal; an indefinite matrix is an error."""
        matrix = sums["H"] * estimate.factor(0)
        matrix = (matrix + matrix.mT) / 2
        if self.clip:
            values, vectors = eigh(matrix.double())
            matrix = ((vectors * values.clamp_min(0).unsqueeze(-2)) @ vectors.mT).to(matrix)
        one = torch.ones(1, dtype=setup.dtype, device=matrix.device)
        prior = {name: estimate.prior[name] for name in setup.names}
        covariance: Covariance = Dense(_lists(setup, setup.names), matrix, prior, one, estimate.temperature)
        if setup.spec.structure != "dense":
            diagonal = tree.unflatten(matrix[0].diagonal().clone().unsqueeze(0), setup.like)  # not a view of all of it
            covariance = Diagonal(diagonal, {name: leaf.to(matrix) for name, leaf in prior.items()}, one, estimate.temperature)
        covariance.logdet()  # an indefinite matrix is an error now, not at the first prediction
        return Blocks((covariance,))

    def need(self, setup: Setup, layout: Layout, by: str = "layer") -> Need:
        """A square, whatever the structure of the covariance."""
        size, item = setup.size, setup.dtype.itemsize
        square = size * size * item
        held = square if setup.spec.structure == "dense" else size * item
        return Need(square, held, max(evidence_matrices(size, 1, by) * DOUBLE, square))


# -- from sums to covariances


def single_pass_covariance(setup: Setup, sums: Params, estimate: Estimate) -> Blocks:
    """The covariance that follows from the sums of one pass, for the three structures of `Spec`."""
    scale = estimate.scale.to(next(iter(sums.values())))
    factor = estimate.factor(0)
    if setup.spec.structure == "dense":
        prior = {name: estimate.prior[name] for name in setup.names}
        part = estimate.layout.parts[0] if "pairs" in sums else None
        curvature = sums["H"] if part is None else from_pairs(sums["pairs"], setup.names, part, setup.shapes[part.names[0]][0])
        return Blocks((Dense(_lists(setup, setup.names), curvature * factor, prior, scale, estimate.temperature),))
    blocks: list[Covariance] = []
    own = _own_layers(setup, estimate)
    for part in estimate.layout.parts if setup.spec.structure == "kronecker" else ():
        blocks += _layer_covariance(setup, part, sums, estimate, scale, own=part.matrix in own)
    spectra = [leaf for block in blocks if isinstance(block, Kronecker) for leaf in block.spectrum]
    if spectra:  # those of other processes are zeros here
        estimate.processes.sum_(spectra)
    plain = [name for name in setup.names if name in sums]
    if plain:
        curvature = {name: sums[name] * factor for name in plain}
        prior = {name: estimate.prior[name].to(curvature[name]) for name in plain}
        blocks.append(Diagonal(curvature, prior, scale, estimate.temperature))
    order = {name: i for i, name in enumerate(setup.names)}
    return Blocks(tuple(sorted(blocks, key=lambda block: order[next(iter(block.shapes))])))


def _own_layers(setup: Setup, estimate: Estimate) -> set[str]:
    """The matrices of which this process finds the eigenvectors: its share of the layers, dealt out from the largest on."""

    def cost(part: Part) -> int:
        """Of its eigenvectors."""
        assert part.matrix is not None
        return sum(side**3 for side in setup.sides(part.matrix, part.bias))

    layers = sorted((part for part in estimate.layout.parts if part.matrix is not None), key=cost, reverse=True)
    return {part.matrix for part in layers[estimate.processes.rank :: estimate.processes.size] if part.matrix is not None}


def _layer_covariance(
    setup: Setup, part: Part, sums: Params, estimate: Estimate, scale: Tensor, *, own: bool
) -> list[Covariance]:
    """The block of a layer, unless its weights have squares only; with zeros for its eigenvectors unless they are this process's
    `own` to find."""
    factor, temperature = estimate.factor(0), estimate.temperature
    if (weight := part.matrix) is not None:
        left, right = sums[f"{weight}|B"] * factor, sums[f"{weight}|A"] / max(1, estimate.seen[0])
        shape = list(setup.shapes[weight])
        made = Kronecker.of(
            weight, part.bias, shape, left, right, estimate.prior,
            scale=scale, count=estimate.n_data, temperature=temperature, decompose=own,
        )  # fmt: skip
        return [made]
    if (total := sums.get(f"{part.names[0]}|H")) is None:
        return []
    prior = {name: estimate.prior[name] for name in part.names}
    return [Dense(_lists(setup, part.names), total * factor, prior, scale, temperature)]


def _lists(setup: Setup, names: tuple[str, ...]) -> dict[str, list[int]]:
    return {name: list(setup.shapes[name]) for name in names}


def curvature(
    model: Model,
    params: Params,
    data: Iterable[Batch],
    buffers: Buffers,
    *,
    names: tuple[str, ...] | None = None,
    spec: Spec | None = None,
    prior: float = 0.0,
    generator: torch.Generator | None = None,
) -> Blocks:
    """The curvature of all data at once, as the precision of a covariance under a flat prior plus `prior`.

    >>> import dubito
    >>> net = torch.nn.Linear(2, 1, bias=False)
    >>> model = dubito.Model(net, dubito.Gaussian(scale=1.0))
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    >>> covariance = curvature(model, model.parameters(), [(x, torch.zeros(2, 1))], {}, spec=Spec("dense"), prior=1.0)
    >>> torch.linalg.inv(covariance.dense()).round(decimals=3)
    tensor([[2., 0.],
            [0., 5.]])
    """
    names = names or tuple(name for name in params if ":" not in name)
    setup = Setup(model, params, buffers, names, spec or Spec())
    statistic, sums, layout, seen = _statistic(setup), {}, None, 0
    for batch in data:
        if layout is None:
            layout = setup.layout(model.split(batch)[0], anew=True)
            sums = statistic.zeros(layout)
        seen += statistic.add(sums, batch, generator=generator).examples
    if layout is None:
        raise ValueError("there is no data: the loader gave no batch")
    groups = setup.groups(layout)
    apart = setup.spec.kind in ("ggn", "fisher") and model.likelihood.noise_groups(1) is not None
    scale = noise_scale(params, groups) if apart else torch.ones(groups)
    flat = {name: torch.tensor(prior, dtype=setup.dtype, device=model.device) for name in names}
    return single_pass_covariance(setup, sums, Estimate(layout, [seen], seen, flat, scale))


def noise_scale(params: Params, groups: int) -> Tensor:
    """1 / noise^2 of every learned noise [G]; ones where the curvature holds the noise already."""
    log_scale = params.get(NOISE)
    if log_scale is None or len(log_scale) != groups:
        return torch.ones(groups)
    return (-2 * log_scale.detach()).exp()


# -- memory


def _numbers(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def _kronecker_numbers(setup: Setup, layout: Layout, by: str) -> int:
    """Numbers in a Kronecker covariance: eigenvectors and eigenvalues of both sides, and the small blocks beside."""
    groups = setup.groups(layout)
    shapes = statistics.Kronecker(setup).shapes(layout)
    total = _numbers({key: shape for key, shape in shapes.items() if not key.endswith(("|A", "|B"))})
    for part in layout.parts:
        if part.matrix is not None:
            o, i = setup.sides(part.matrix, part.bias)
            total += o * o + o + i * i + i + (groups * o * o if groups > 1 else 0)
            total += i if by == "parameter" and part.bias is not None else 0  # inputs are scaled where weight and bias differ
    return total


def alternatives(setup: Setup, x: Inputs) -> dict[str, int]:
    """Bytes that other structures need at the least, by what one would write."""
    spec = replace(setup.spec, kind="ggn" if setup.spec.kind == "hessian" else setup.spec.kind)
    layout = setup.layout(x)

    def least(structure: Literal["kronecker", "diagonal"], of: Setup, layout: Layout) -> int:
        """Bytes that one pass of a structure needs at the least."""
        return SinglePass().need(replace(of, spec=replace(spec, structure=structure)), layout).least

    sizes = {
        "structure='kronecker'": least("kronecker", setup, layout),
        "structure='diagonal'": least("diagonal", setup, layout),
        "structure='lowrank'": TopEigen(20).need(setup, layout).least,
    }
    try:
        last = replace(setup, names=last_layer(setup.model, setup.params, x, setup.buffers, setup.names))
        sizes["subset='last_layer'"] = least("kronecker", last, last.layout(x))
    except ValueError:  # it has none
        pass
    return sizes


def check_memory(passes: Passes, setup: Setup, x: Inputs, layout: Layout, what: str) -> None:
    """Raise `MemoryError` where a structure alone cannot fit."""
    needed = passes.need(setup, layout).least
    if (free := least_room(setup.model.device, needed)) is not None:
        raise MemoryError(refusal(f"{what} over {setup.size:,} weights", needed, free, alternatives(setup, x)))


def _orthonormal(rows: Tensor) -> Tensor:
    """An orthonormal basis of the span of rows [k, P]."""
    return torch.linalg.qr(rows.mT)[0].mT


def _largest(values: Tensor, k: int) -> Tensor:
    """The positions of the k largest, in order of position."""
    return values.topk(k).indices.sort().values
