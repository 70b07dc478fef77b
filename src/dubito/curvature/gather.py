r"""Ways to gather the curvature of all data in one or two passes, each for one kind of structure. Their state is a dict of tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dubito.curvature.capture import forward
from dubito.curvature.collect import Collector, Seen
from dubito.curvature.evidence import Evidence
from dubito.curvature.layout import Layout
from dubito.curvature.products import batch_product
from dubito.model import Model, Target
from dubito.model.likelihoods import NOISE
from dubito.model.priors import MultivariateNormal
from dubito.tensors import tree
from dubito.tensors.covariances import Blocks, Covariance, Dense, Diagonal, Kronecker, LowRank
from dubito.tensors.tree import Buffers, Params

OVERSAMPLING = 10  # directions beyond the rank that the randomised search keeps, for accuracy
COLUMNS = 256  # of a Hessian at a time


@dataclass(frozen=True)
class Found:
    """All that a covariance is made of beside the sums."""

    layout: Layout
    seen: list[int]  # examples of each pass
    n_data: float
    prior: Mapping[str, Tensor]
    scale: Tensor
    temperature: float = 1.0

    def factor(self, which: int) -> float:
        return self.n_data / max(1, self.seen[which])


class Gather(ABC):
    passes: ClassVar[int] = 1

    @abstractmethod
    def zeros(self, at: Collector, x: Any, generator: torch.Generator) -> Params:
        """The state before any data."""

    @abstractmethod
    def add(
        self, at: Collector, sums: Params, batch: Any, which: int, generator: torch.Generator, gradient: Params | None
    ) -> Seen:
        """Add a batch in pass `which`; the gradient of the log likelihood too, if wanted."""

    def between(self, at: Collector, sums: Params, found: Found) -> None:  # noqa: B027 (most have one pass only)
        """Before the second pass."""

    @abstractmethod
    def covariance(self, at: Collector, sums: Params, found: Found) -> Covariance: ...


@dataclass(frozen=True)
class Plain(Gather):
    """Diagonal, Kronecker or dense, in one pass."""

    def zeros(self, at: Collector, x: Any, generator: torch.Generator) -> Params:
        return at.zeros(x)

    def add(
        self, at: Collector, sums: Params, batch: Any, which: int, generator: torch.Generator, gradient: Params | None
    ) -> Seen:
        return at.add(sums, batch, generator=generator, gradient=gradient)

    def covariance(self, at: Collector, sums: Params, found: Found) -> Blocks:
        return at.covariance(
            sums, seen=max(1, found.seen[0]), n_data=found.n_data, prior=found.prior, scale=found.scale,
            temperature=found.temperature, found=found.layout,
        )  # fmt: skip


@dataclass(frozen=True)
class Corrected(Gather):
    """Kronecker, then in a second pass the mean squares along its eigenvectors (EKFAC)."""

    passes: ClassVar[int] = 2

    def zeros(self, at: Collector, x: Any, generator: torch.Generator) -> Params:
        sums = at.zeros(x)
        for key, leaf in list(sums.items()):
            if key.endswith("|B"):
                if leaf.shape[0] > 1:
                    raise ValueError(
                        "corrected eigenvalues are for one learned noise: use Gaussian() without outputs=, or a fixed scale"
                    )
                weight, inputs, outputs = key[:-2], sums[key[:-1] + "A"].shape[0], leaf.shape[1]
                sums |= {
                    f"{weight}|L": leaf.new_zeros(outputs, inputs),
                    f"{weight}|left": leaf.new_zeros(outputs, outputs),
                    f"{weight}|right": leaf.new_zeros(inputs, inputs),
                }
        return sums

    def add(
        self, at: Collector, sums: Params, batch: Any, which: int, generator: torch.Generator, gradient: Params | None
    ) -> Seen:
        if which == 0:
            return at.add(sums, batch, generator=generator, gradient=gradient)
        basis = {key[:-5]: (leaf, sums[key[:-4] + "right"]) for key, leaf in sums.items() if key.endswith("|left")}
        return at.add(sums, batch, generator=generator, basis=basis)

    def between(self, at: Collector, sums: Params, found: Found) -> None:
        for block in Plain().covariance(at, sums, found).blocks:
            if isinstance(block, Kronecker):
                sums[f"{block.weight}|left"].copy_(block.left)
                sums[f"{block.weight}|right"].copy_(block.inputs)

    def covariance(self, at: Collector, sums: Params, found: Found) -> Blocks:
        plain = Plain().covariance(at, sums, found)
        if not found.seen[1]:
            return plain
        return Blocks(tuple(self._corrected(block, sums, found) for block in plain.blocks))

    def _corrected(self, block: Covariance, sums: Params, found: Found) -> Covariance:
        if not isinstance(block, Kronecker):
            return block
        values = sums[f"{block.weight}|L"] * (found.factor(1) * float(found.scale[0]))
        # the very eigenvectors the sums were made with: found again, they could differ in sign or order
        left, right = sums[f"{block.weight}|left"], sums[f"{block.weight}|right"]
        right = right if block.warp is None else right * block.warp.unsqueeze(1)
        return replace(block, values=values, left=left, right=right)


@dataclass(frozen=True)
class Subnetwork(Gather):
    """Dense over a few weights, picked over all layers: by magnitude in one pass, by marginal variance in two."""

    size: int
    by: Literal["variance", "magnitude"]

    @property
    def passes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 2 if self.by == "variance" else 1

    def _diagonal(self, at: Collector) -> Collector:
        return replace(at, spec=replace(at.spec, structure="diagonal"))

    def zeros(self, at: Collector, x: Any, generator: torch.Generator) -> Params:
        total = sum(shape.numel() for shape in at.shapes.values())
        if self.size > total:
            raise ValueError(f"a subnetwork of {self.size} weights is more than the {total} there are")
        flat = torch.cat([at.params[name].detach().abs().flatten() for name in at.names])
        diagonal = {f"D|{name}": leaf for name, leaf in self._diagonal(at).zeros(x).items()}
        groups = next(iter(diagonal.values())).shape[0]
        index = _largest(flat, self.size)
        dense = torch.zeros(groups, self.size, self.size, dtype=at.dtype, device=flat.device)
        return {"H": dense, "index": index, **(diagonal if self.by == "variance" else {})}

    def add(
        self, at: Collector, sums: Params, batch: Any, which: int, generator: torch.Generator, gradient: Params | None
    ) -> Seen:
        if which == 0 and self.by == "variance":
            inner = {key[2:]: leaf for key, leaf in sums.items() if key.startswith("D|")}
            return self._diagonal(at).add(inner, batch, generator=generator, gradient=gradient)
        picked = replace(at, index=sums["index"], spec=replace(at.spec, structure="dense"))
        return picked.add({"H": sums["H"]}, batch, generator=generator, gradient=gradient)

    def between(self, at: Collector, sums: Params, found: Found) -> None:
        inner = {key[2:]: leaf for key, leaf in sums.items() if key.startswith("D|")}
        variance = Plain().covariance(self._diagonal(at), inner, found).variance()
        sums["index"].copy_(_largest(torch.cat([variance[name].flatten() for name in at.names]), self.size))

    def covariance(self, at: Collector, sums: Params, found: Found) -> Blocks:
        leaves = {name: list(shape) for name, shape in at.shapes.items()}
        prior = {name: found.prior[name] for name in at.names}
        factor = found.factor(self.passes - 1)
        return Blocks((Dense(leaves, sums["H"] * factor, prior, found.scale.to(at.dtype), found.temperature, sums["index"]),))


@dataclass(frozen=True)
class Main(Gather):
    """The main directions of the GGN or the Hessian, by a randomised range finder and its products with the curvature."""

    passes: ClassVar[int] = 2
    rank: int
    clip: bool = False

    def zeros(self, at: Collector, x: Any, generator: torch.Generator) -> Params:
        like = {name: at.params[name] for name in at.names}
        size = min(self.rank + OVERSAMPLING, tree.size(like))
        unit = torch.randn(size, tree.size(like), generator=generator, dtype=at.dtype, device=generator.device)
        first = tree.unflatten(_orthonormal(unit.to(at.model.device)), like)
        return {f"{key}|{n}": leaf if key == "Q" else torch.zeros_like(leaf) for key in "QY" for n, leaf in first.items()}

    def add(
        self, at: Collector, sums: Params, batch: Any, which: int, generator: torch.Generator, gradient: Params | None
    ) -> Seen:
        columns = {name: sums[f"Q|{name}"].to(at.params[name].dtype) for name in at.names}
        for name, leaf in batch_product(at.model, at.params, batch, at.buffers, columns, _products(at)).items():
            sums[f"Y|{name}"] += leaf
        seen = at.look(batch, gradient)
        if len(seen.counts) > 1:  # products hold the sum over several noises, which cannot be told apart afterwards
            seen = replace(seen, errors=torch.zeros_like(seen.errors), counts=torch.zeros_like(seen.counts))
        return seen

    def between(self, at: Collector, sums: Params, found: Found) -> None:
        like = {name: at.params[name] for name in at.names}
        y = tree.flatten({name: sums[f"Y|{name}"] for name in like}, stacked=True)
        for name, leaf in tree.unflatten(_orthonormal(y), like).items():
            sums[f"Q|{name}"].copy_(leaf)
            sums[f"Y|{name}"].zero_()

    def covariance(self, at: Collector, sums: Params, found: Found) -> Blocks:
        like = {name: at.params[name] for name in at.names}
        factor = found.factor(1 if found.seen[1] else 0)
        q, y = (tree.flatten({name: sums[f"{key}|{name}"] for name in like}, stacked=True) for key in "QY")
        small = (q @ y.mT).double()  # Q^T H Q
        values, vectors = torch.linalg.eigh((small + small.mT) / 2)
        if float(values[0]) < -1e-3 * float(values[-1].abs()) and not self.clip:
            raise ValueError(
                f"the Hessian has negative curvature in its main directions, down to {float(values[0] * factor):.3g} (largest: "
                f"{float(values[-1] * factor):.3g}). Use curvature='ggn', or clip=True, or train on until the weights are at a maximum"
            )
        order = values.argsort(descending=True)[: self.rank]
        rows = vectors[:, order].mT.to(q) @ q
        # the products hold the noise; where it is learned, the curvature is kept at unit noise
        scale = found.scale if len(found.scale) == 1 else torch.ones_like(found.scale[:1])
        values = (values[order].clamp_min(0) * factor / scale[0]).to(q)
        directions = tree.unflatten(rows, like)
        return Blocks((LowRank.precision(directions, values, found.prior, scale=scale, temperature=found.temperature),))


@dataclass(frozen=True)
class Hessian(Gather):
    """The full Hessian, column by column; or its diagonal."""

    clip: bool = False

    def zeros(self, at: Collector, x: Any, generator: torch.Generator) -> Params:
        size = sum(shape.numel() for shape in at.shapes.values())
        return {"H": torch.zeros(1, size, size, dtype=at.dtype, device=at.model.device)}

    def add(
        self, at: Collector, sums: Params, batch: Any, which: int, generator: torch.Generator, gradient: Params | None
    ) -> Seen:
        like = {name: at.params[name] for name in at.names}
        size = tree.size(like)
        for start in range(0, size, COLUMNS):
            columns = torch.zeros(min(COLUMNS, size - start), size, dtype=at.dtype, device=at.model.device)
            columns[:, start:].fill_diagonal_(1)
            columns = {name: leaf.to(at.params[name].dtype) for name, leaf in tree.unflatten(columns, like).items()}
            rows = batch_product(at.model, at.params, batch, at.buffers, columns, "hessian")
            sums["H"][0, start : start + COLUMNS] += tree.flatten(rows, stacked=True)
        return at.look(batch, gradient)

    def covariance(self, at: Collector, sums: Params, found: Found) -> Blocks:
        matrix = sums["H"] * found.factor(0)
        matrix = (matrix + matrix.mT) / 2
        if self.clip:
            values, vectors = torch.linalg.eigh(matrix.double())
            matrix = ((vectors * values.clamp_min(0).unsqueeze(-2)) @ vectors.mT).to(matrix)
        one = torch.ones(1, dtype=at.dtype, device=matrix.device)
        prior = {name: found.prior[name] for name in at.names}
        if at.spec.structure == "dense":
            leaves = {name: list(shape) for name, shape in at.shapes.items()}
            made: Covariance = Dense(leaves, matrix, prior, one, found.temperature)
        else:
            like = {name: at.params[name] for name in at.names}
            diagonal = tree.unflatten(matrix[0].diagonal().clone().unsqueeze(0), like)  # not a view of all of it
            made = Diagonal(diagonal, {name: leaf.to(matrix) for name, leaf in prior.items()}, one, found.temperature)
        made.logdet()  # an indefinite matrix is told of now, not at the first prediction
        return Blocks((made,))


@dataclass
class Sums:
    """All that a pass over the data leaves behind: the state of a method that gathers curvature."""

    sums: Params
    layout: list  # packed
    gradient: Params  # of the log likelihood; empty if not wanted
    seen: list[int]  # examples of each pass
    gradient_seen: int
    log_likelihood: Tensor  # [], as all that follows in float64
    errors: Tensor  # [G]
    counts: Tensor  # [G]

    @staticmethod
    def zeros(gather: Gather, at: Collector, x: Any, generator: torch.Generator, *, gradient: bool) -> Sums:
        sums, layout = gather.zeros(at, x, generator), at.layout(x)
        zero = torch.zeros(at.groups(layout), dtype=torch.float64, device=at.model.device)
        slopes = {name: torch.zeros_like(at.params[name], dtype=at.dtype) for name in at.names} if gradient else {}
        return Sums(sums, layout.packed(), slopes, [0, 0], 0, zero[0].clone(), zero, zero.clone())

    def add(
        self, gather: Gather, at: Collector, data: Iterable[Any], which: int, generator: torch.Generator, *, gradient: bool
    ) -> Tensor:
        """Add batches; their mean log likelihood."""
        score, examples = torch.zeros((), dtype=torch.float64, device=at.model.device), 0
        for batch in data:
            seen = gather.add(at, self.sums, batch, which, generator, self.gradient if gradient else None)
            score, examples = score + seen.log_likelihood, examples + seen.examples
            self.seen[which] += seen.examples
            self.gradient_seen += seen.examples if gradient else 0
            if which == 0:
                self.log_likelihood = self.log_likelihood + seen.log_likelihood
                self.errors, self.counts = self.errors + seen.errors, self.counts + seen.counts
        return score / max(1, examples)

    def noise(self, params: Params) -> Tensor:
        """1 / noise^2 of each learned noise, or a single 1."""
        if not bool(self.counts.any()):
            return torch.ones_like(self.counts)
        return (-2 * params[NOISE].double()).exp()

    def found(self, target: Target, params: Params, prior: Mapping[str, Tensor]) -> Found:
        return Found(Layout.unpacked(self.layout), self.seen, target.n_data, prior, self.noise(params), target.temperature)

    def evidence(self, target: Target, params: Params, names: Sequence[str], prior: Params) -> Evidence:
        """What the evidence is made of, scaled from the examples seen to those there are."""
        factor = target.n_data / max(1, self.seen[0])
        earlier = target.model.prior if isinstance(target.model.prior, MultivariateNormal) else None
        deviation = {n: params[n] if earlier is None else params[n] - earlier.mean[n].to(params[n]) for n in names}
        return Evidence(
            self.log_likelihood * factor, self.errors * factor, self.counts * factor,
            {name: leaf.double() for name, leaf in prior.items()}, deviation, earlier and earlier.covariance,
        )  # fmt: skip

    def decrement(
        self, target: Target, params: Params, covariance: Covariance, prior: Params, stretch: float = 1.0
    ) -> tuple[float, float, float]:
        r""":math:`g^T \Sigma g` for the gradient g of the log joint, twice what the log joint can rise; the effective number of
        parameters :math:`\mathrm{tr}(H \Sigma)`; and what the first would be by the noise of a gradient from a part of the data."""
        factor, temperature = target.n_data / self.gradient_seen, target.temperature
        model_prior = target.model.prior
        if isinstance(model_prior, MultivariateNormal):
            pull = model_prior.gradient({name: params[name] for name in self.gradient})
        else:
            pull = {name: -prior[name].to(params[name]) * params[name] for name in self.gradient}
        slopes = {
            name: (leaf * (factor * stretch) + pull[name]).unsqueeze(0) / temperature for name, leaf in self.gradient.items()
        }
        away = covariance.product(slopes)
        rise = float(torch.stack([(slopes[n].double() * away[n].double()).sum() for n in slopes]).sum())
        if rise < 10:  # nothing to tell, and variances of a dense matrix are dear
            return rise, 1.0, 0.0
        held = sum(float((prior[n].to(v) * v).double().sum()) for n, v in covariance.variance().items()) / temperature
        effective = max(1.0, covariance.moving - held)
        return rise, effective, effective * max(0.0, factor - 1.0)


def last_layer(model: Model, params: Params, x: Any, buffers: Buffers, names: tuple[str, ...]) -> tuple[str, ...]:
    """The Bayesian weights of the last linear or convolutional layer that the network calls."""
    fixed = {name: buffers[name].detach() for name, _ in model.network.named_parameters() if name in buffers}
    wanted = {**{name: params[name].detach() for name in names}, **fixed}
    rest = {name: leaf for name, leaf in buffers.items() if name not in fixed}
    uses = [use for use in forward(model, {**params, **wanted}, x, rest, wanted=wanted).uses if use.kind == "affine"]
    if not uses:
        raise ValueError("the network's last layer is not a linear or convolutional one: name its weights with subset='...'")
    if uses[-1].weight is None:
        raise ValueError(
            "the weight of the last layer is computed from others, as a parametrisation such as weight_norm does: name those with "
            "subset='...', or remove the parametrisation"
        )
    found = tuple(name for name in (uses[-1].weight, uses[-1].bias) if name in names)
    if not found:
        raise ValueError(
            f"the last layer, with {uses[-1].weight}, is not among the Bayesian weights: mind `only`, and what is frozen"
        )
    return tuple(str(name) for name in found)


def _products(at: Collector) -> Literal["ggn", "hessian"]:
    return "hessian" if at.spec.kind == "hessian" else "ggn"


def _orthonormal(rows: Tensor) -> Tensor:
    """An orthonormal basis of the span of rows [k, P]."""
    return torch.linalg.qr(rows.mT)[0].mT


def _largest(values: Tensor, k: int) -> Tensor:
    """The positions of the k largest, in order of position."""
    return values.topk(k).indices.sort().values
