r"""Curvature summed over data, batch by batch, in a structure.

Every statistic is a sum over examples, held in float32 or better whatever the network computes in; `Collector.add` adds a batch, and
`Collector.covariance` turns the sums and a prior into a covariance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from dubito.curvature.capture import Forward
from dubito.curvature.cotangents import MANY, Kind, cotangents, groups_of, observed
from dubito.curvature.generic import example_gradients
from dubito.curvature.layout import UNCLEAR, Layout, Part, layout, passed
from dubito.curvature.rows import Layer, add_gram, squared_products
from dubito.model import Model
from dubito.model.likelihoods import own
from dubito.network.examples import batch_size
from dubito.tensors import tree
from dubito.tensors.covariances import Blocks, Covariance, Dense, Diagonal, Kronecker
from dubito.tensors.covariances.propagation import pieces
from dubito.tensors.tree import Buffers, Params

Structure = Literal["diagonal", "kronecker", "dense"]
SMALL = 512  # weights of a normalisation or a bias on its own that get an exact block of their own beside Kronecker blocks


@dataclass(frozen=True)
class Spec:
    """Which curvature."""

    structure: Structure = "kronecker"
    kind: Kind = "ggn"
    draws: int | None = None  # Monte Carlo draws; None is exact
    shared: Literal["expand", "reduce"] = "expand"  # KFAC's two forms for weights shared over positions


@dataclass
class Seen:
    """What a pass over some data tells beside the curvature: sums in float64."""

    examples: int
    log_likelihood: Tensor  # []
    errors: Tensor  # [G]: squared residuals of each noise group
    counts: Tensor  # [G]: numbers behind them


@dataclass(frozen=True)
class Collector:
    """Collects the curvature of `model` at `params` over the weights `names`.

    `index` restricts a dense structure to picked positions in the vector of those weights.
    """

    model: Model
    params: Params
    buffers: Buffers
    names: tuple[str, ...]
    spec: Spec = field(default_factory=Spec)
    index: Tensor | None = None

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: self.params[name].shape for name in self.names}

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.params[self.names[0]].dtype, torch.float32)

    def layout(self, x: Any, *, anew: bool = False) -> Layout:
        return layout(self.model, self.params, x, self.buffers, self.names, anew=anew)

    # -- the sums, before any data

    def zeros(self, x: Any) -> Params:
        """All sums at zero; `x` is an example batch of inputs."""
        found = self.layout(x, anew=True)  # a flag of the network may have changed since it was last looked at
        n, device = self.groups(found), self.model.device
        return {key: torch.zeros(shape, dtype=self.dtype, device=device) for key, shape in self._shapes(found, n).items()}

    def _shapes(self, found: Layout, groups: int) -> dict[str, tuple[int, ...]]:
        shapes = self.shapes
        if self.spec.structure == "dense" and self._closed(found):
            weight = shapes[found.parts[0].names[0]]
            width = weight.numel() // weight[0] + (found.parts[0].bias is not None)
            return {"pairs": (groups, weight[0] * (weight[0] + 1) // 2, width, width)}
        if self.spec.structure == "dense":
            size = sum(shape.numel() for shape in shapes.values()) if self.index is None else len(self.index)
            return {"H": (groups, size, size)}
        if self.spec.structure == "diagonal":
            return {name: (groups, *shape) for name, shape in shapes.items()}
        sums: dict[str, tuple[int, ...]] = {name: (groups, *shapes[name]) for name in found.generic}
        for part in found.parts:
            sums |= self._kronecker(part, shapes, groups)
        return sums

    def _kronecker(self, part: Part, shapes: Mapping[str, torch.Size], groups: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the sums of one layer."""
        if _has_matrix(part):
            assert part.weight is not None
            outputs = shapes[part.weight][0]
            inputs = shapes[part.weight].numel() // outputs + (part.bias is not None)
            return {f"{part.weight}|A": (inputs, inputs), f"{part.weight}|B": (groups, outputs, outputs)}
        if self._small(part):
            size = sum(shapes[name].numel() for name in part.names)
            return {f"{part.names[0]}|H": (groups, size, size)}
        return {name: (groups, *shapes[name]) for name in part.names}

    def groups(self, found: Layout) -> int:
        """How many noises the curvature is kept apart by."""
        groups = None if self.spec.kind in ("empirical", "hessian") else self.model.likelihood.noise_groups(found.classes)
        return 1 if groups is None else int(groups.max()) + 1

    def _small(self, part: Part) -> bool:
        return part.kind != "lookup" and sum(self.shapes[name].numel() for name in part.names) <= SMALL

    # -- a batch

    def add(
        self,
        sums: Params,
        batch: Any,
        *,
        generator: torch.Generator | None = None,
        gradient: Params | None = None,
        basis: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    ) -> Seen:
        """Add a batch to `sums`; to `gradient`, if given, the gradient of the log likelihood.

        With `basis`, matrices for the outputs and the inputs of some layers, the sums are of squares in that basis, `weight|L`
        [out, in] (EKFAC)."""
        x, y = self.model.split(batch)
        size = batch_size(y)
        found, done, used = passed(self.model, self.params, x, self.buffers, self.names)
        closed = self._fits(sums, found)
        shapes = self.shapes
        layers = [Layer(p, uses, size, {n: shapes[n] for n in p.names}) for p, uses in used.items() if uses]
        with torch.no_grad():
            seen = self._seen(done.f, y, size)
            if gradient is not None:
                self._add_gradient(gradient, done, layers, found, x, y)
            if basis is not None:
                self._add_corrections(sums, basis, done, layers, x, y, generator)
            elif closed:
                self._add_closed(sums, layers[0], done.f, y)
            else:
                self._add_all(sums, done, layers, found, x, y, generator)
        return seen

    def _fits(self, sums: Params, found: Layout) -> bool:
        """Whether the sums are of the output layer alone. Sums that have no place for what a batch adds are refused."""
        shapes, closed = self.shapes, self._closed(found)
        if self.spec.structure == "diagonal":
            return closed
        if self.spec.structure == "dense":
            if "H" not in sums and not closed:
                raise ValueError(_otherwise(self.names[0]))
            return "H" not in sums
        for name in found.generic:
            if name not in sums:
                raise ValueError(
                    f"in this batch it is not clear which inputs of the layer with {name} belong to which example, as it was in "
                    "the first: are they all alike?"
                    if found.reasons.get(name) == UNCLEAR
                    else _otherwise(name)
                )
        for part in found.parts:
            for key, shape in self._kronecker(part, shapes, self.groups(found)).items():
                held = sums.get(key)
                if held is None and all(name in sums for name in part.names):  # squares, as in the first batch
                    closed = False
                elif held is None or held.shape != shape:
                    raise ValueError(_otherwise(part.names[0]))
        return closed

    def look(self, batch: Any, gradient: Params | None) -> Seen:
        """What a batch tells beside the curvature; adds the gradient of the log likelihood, if wanted."""
        x, y = self.model.split(batch)
        if gradient is not None:
            live = {name: self.params[name].detach().requires_grad_() for name in self.names}
            with torch.enable_grad():
                value = self.model.log_likelihood({**self.params, **live}, batch, self.buffers)[0].sum()
            slopes = torch.autograd.grad(value, list(live.values()), allow_unused=True, materialize_grads=True)
            for name, slope in zip(live, slopes, strict=True):
                gradient[name] += slope
        with torch.no_grad():
            f = self.model.forward(self.params, x, tree.clone(self.buffers))[0]
            return self._seen(f, y, f.shape[0])

    def _seen(self, f: Tensor, y: Any, size: int) -> Seen:
        f = f.detach()
        f = f.float() if f.dtype.itemsize < 4 else f
        log_likelihood = self.model.score(f, y, self.params).double().sum()
        groups = groups_of(self.model, f, self.spec.kind)
        n = 1 if groups is None else int(groups.max()) + 1
        errors, counts = (torch.zeros(n, dtype=torch.float64, device=f.device) for _ in range(2))
        if groups is not None:
            residuals = (self.model.likelihood.target(y, f).double() - f.double()) ** 2
            by_output = residuals.reshape(-1, f.shape[-1]).sum(0)
            errors.index_add_(0, groups, by_output)
            counts.index_add_(0, groups, torch.full_like(by_output, residuals[..., 0].numel()))
        return Seen(size, log_likelihood, errors, counts)

    def _backward(self, done: Forward, layers: list[Layer], s: Tensor) -> list[Tensor]:
        """Gradients of <s, f> with respect to every layer's outputs, as rows [B, T, O]."""
        edges = [use.edge for layer in layers for use in layer.uses]
        if not edges:
            return []
        found = iter(torch.autograd.grad(done.f, edges, s.to(done.f.dtype), retain_graph=True, allow_unused=True))
        return [layer.outputs([next(found) for _ in layer.uses]) for layer in layers]

    def _add_gradient(self, gradient: Params, done: Forward, layers: list[Layer], found: Layout, x: Any, y: Any) -> None:
        f = done.f.detach()
        f = f.float() if f.dtype.itemsize < 4 else f
        s = self.model.likelihood.slope(f, self.model.likelihood.target(y, f), self.params)
        for layer, g in zip(layers, self._backward(done, layers, s), strict=True):
            for name, leaf in layer.summed(g).items():
                gradient[name] += leaf
        for name, leaf in self._generic(found, x, s.unsqueeze(0)).items():
            gradient[name] += leaf[0].sum(0)

    def _generic(self, found: Layout, x: Any, s: Tensor) -> Params:
        if not found.generic:
            return {}
        return example_gradients(self.model, self.params, x, self.buffers, found.generic, s)

    def _add_all(
        self, sums: Params, done: Forward, layers: list[Layer], found: Layout, x: Any, y: Any, generator: torch.Generator | None
    ) -> None:
        spec = self.spec
        if spec.structure == "kronecker":
            self._add_inputs(sums, layers)
        single: dict[tuple[int, int], Tensor] = {}  # squared gradients of layers with one position, summed over cotangents
        for group, s in cotangents(self.model, done.f, y, self.params, spec.kind, spec.draws, generator):
            rows = self._backward(done, layers, s)
            others = {name: leaf[0] for name, leaf in self._generic(found, x, s.unsqueeze(0)).items()}  # [B, *shape]
            if spec.structure == "dense":
                leaves = dict(others)
                for layer, g in zip(layers, rows, strict=True):
                    leaves |= layer.gradients(g)
                size = next(iter(leaves.values())).shape[0]
                flat = torch.cat(
                    [
                        leaves[n].reshape(size, -1) if n in leaves else s.new_zeros(size, self.shapes[n].numel())
                        for n in self.names
                    ],
                    1,
                ).to(self.dtype)
                flat = flat if self.index is None else flat[:, self.index]
                sums["H"][group].addmm_(flat.mT, flat)
                continue
            for name, leaf in others.items():
                sums[name][group] += (leaf**2).sum(0)
            for i, (layer, g) in enumerate(zip(layers, rows, strict=True)):
                part = layer.part
                if f"{part.weight}|A" in sums:
                    add_gram(sums[f"{part.weight}|B"][group], g.sum(1, keepdim=True) if spec.shared == "reduce" else g)
                elif f"{part.names[0]}|H" in sums:
                    leaves = layer.gradients(g)
                    flat = torch.cat([leaves[name].reshape(layer.batch, -1) for name in part.names], 1)
                    sums[f"{part.names[0]}|H"][group].addmm_(flat.mT, flat)
                elif part.kind == "affine" and layer.positions == 1:
                    key, squared = (i, group), g.squeeze(1) ** 2
                    single[key] = squared if key not in single else single[key].add_(squared)
                else:
                    layer.add_squares(sums, group, g)
        for (i, group), squared in single.items():
            layers[i].add_single(sums, group, squared)

    def _add_inputs(self, sums: Params, layers: list[Layer]) -> None:
        """A: the mean over positions of a a^T, with the bias as an input that is always 1."""
        for layer in layers:
            if f"{layer.part.weight}|A" not in sums:  # no matrix, or it was not clear in the first batch
                continue
            total = sums[f"{layer.part.weight}|A"]
            a = layer.a.mean(1, keepdim=True) if self.spec.shared == "reduce" else layer.a
            share, width = 1 / a.shape[1], a.shape[2]
            add_gram(total[:width, :width], a, share)
            if layer.part.bias is not None:
                mean = a.sum((0, 1)) * share
                total[:width, width] += mean
                total[width, :width] += mean
                total[width, width] += layer.batch
            del layer.a  # unfolded, the inputs of a convolution are many times what they were: those of one layer at a time

    def _add_corrections(
        self,
        sums: Params,
        basis: Mapping[str, tuple[Tensor, Tensor]],
        done: Forward,
        layers: list[Layer],
        x: Any,
        y: Any,
        generator: Any,
    ) -> None:
        chosen = [layer for layer in layers if layer.part.weight in basis]
        inputs = [layer.rotated(basis[layer.part.weight][1]) for layer in chosen if layer.part.weight is not None]
        for _, s in cotangents(self.model, done.f, y, self.params, self.spec.kind, self.spec.draws, generator):
            for layer, a, g in zip(chosen, inputs, self._backward(done, chosen, s), strict=True):
                assert layer.part.weight is not None
                g = g @ basis[layer.part.weight][0]
                total = sums[f"{layer.part.weight}|L"]
                if layer.positions == 1:
                    total.addmm_((g.squeeze(1) ** 2).mT, a.squeeze(1) ** 2)
                else:
                    total += squared_products(g, a)

    # -- the output layer alone: its Jacobian is its input, and nothing is back-propagated

    def _closed(self, found: Layout) -> bool:
        """Exact without any cotangent; for a dense structure of thousands of classes there would be too many blocks."""
        few = self.spec.structure != "dense" or found.outputs <= MANY
        return found.alone and self.index is None and self.spec.kind == "ggn" and self.spec.draws is None and few

    def _add_closed(self, sums: Params, layer: Layer, f: Tensor, y: Any) -> None:
        part = layer.part
        assert part.weight is not None
        f = f.detach()
        f = f.float() if f.dtype.itemsize < 4 else f
        if self.spec.structure == "kronecker":
            self._add_inputs(sums, [layer])
        target = self.model.likelihood.target(y, f)
        seen = observed(self.model, target, f)
        groups = groups_of(self.model, f, self.spec.kind)
        if groups is None and seen is None and self.spec.structure != "dense":  # no matrix for each example
            if self.spec.structure == "kronecker":
                sums[f"{part.weight}|B"][0] += self.model.likelihood.fisher_sum(f, own(self.params))
                return
            layer.add_single(sums, 0, self.model.likelihood.fisher_diagonal(f, own(self.params)))
            return
        extended = layer.extended.squeeze(1)
        for piece in pieces(len(f), f.shape[1] ** 2):
            if groups is None:
                fisher = self.model.likelihood.fisher(f[piece], own(self.params))
            else:
                fisher = torch.eye(f.shape[1], dtype=f.dtype, device=f.device).expand(len(f[piece]), -1, -1)
            if seen is not None:
                fisher = fisher * seen[piece].unsqueeze(-1) * seen[piece].unsqueeze(-2)
            for group in range(1 if groups is None else int(groups.max()) + 1):
                mine = fisher if groups is None else fisher * (groups == group).to(fisher)
                if self.spec.structure == "diagonal":
                    layer.add_single(sums, group, mine.diagonal(dim1=1, dim2=2), piece)
                elif self.spec.structure == "kronecker":
                    sums[f"{part.weight}|B"][group] += mine.sum(0)
                else:
                    add_pairs(sums["pairs"][group], mine, extended[piece])

    # -- the result

    def covariance(
        self,
        sums: Params,
        *,
        seen: float,
        n_data: float,
        prior: Mapping[str, Tensor],
        scale: Tensor,
        temperature: float = 1.0,
        found: Layout,
    ) -> Blocks:
        """The covariance of n_data examples like the `seen` ones, under a prior."""
        factor = n_data / seen
        scale = scale.to(next(iter(sums.values())))
        blocks: list[Covariance] = []
        if self.spec.structure == "dense":
            shapes = {name: list(shape) for name, shape in self.shapes.items()}
            mine = {name: prior[name] for name in self.names}
            if "pairs" in sums:
                part = found.parts[0]
                sums = {"H": from_pairs(sums["pairs"], self.names, part, self.shapes[part.names[0]][0])}
            return Blocks((Dense(shapes, sums["H"] * factor, mine, scale, temperature, self.index),))
        plain = [name for name in self.names if name in sums]
        for part in found.parts if self.spec.structure == "kronecker" else ():
            if _has_matrix(part):
                assert part.weight is not None
                left, right = sums[f"{part.weight}|B"] * factor, sums[f"{part.weight}|A"] / seen
                shape = list(self.shapes[part.weight])
                block = Kronecker.of(
                    part.weight, part.bias, shape, left, right, prior, scale=scale, count=n_data, temperature=temperature
                )
                blocks.append(block)
            elif f"{part.names[0]}|H" in sums:
                shapes = {name: list(self.shapes[name]) for name in part.names}
                mine = {name: prior[name] for name in part.names}
                blocks.append(Dense(shapes, sums[f"{part.names[0]}|H"] * factor, mine, scale, temperature))
        if plain:
            curvature = {name: sums[name] * factor for name in plain}
            blocks.append(Diagonal(curvature, {name: prior[name].to(curvature[name]) for name in plain}, scale, temperature))
        order = {name: i for i, name in enumerate(self.names)}
        return Blocks(tuple(sorted(blocks, key=lambda block: order[next(iter(block.shapes))])))


def add_pairs(total: Tensor, fisher: Tensor, a: Tensor) -> None:
    """sum_n Lambda_n (x) a_n a_n^T: a block [width, width] for every pair c <= d of outputs."""
    c, d = torch.triu_indices(fisher.shape[1], fisher.shape[1], device=a.device)
    weights = fisher[:, c, d]  # [B, pairs]
    for piece in pieces(len(c), a.numel()):
        weighted = (weights[:, piece].unsqueeze(-1) * a.unsqueeze(1)).flatten(1)  # [B, pairs width]
        total[piece].view(-1, a.shape[1]).addmm_(weighted.mT, a)


def from_pairs(pairs: Tensor, names: tuple[str, ...], part: Part, classes: int) -> Tensor:
    """The matrices [G, P, P] of blocks [G, pairs, width, width], in the order of the names."""
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


def _otherwise(name: str) -> str:
    return f"{name} is used in another way than in the first batch: curvature needs a network that does the same for all inputs"


def _has_matrix(part: Part) -> bool:
    return part.kind == "affine" and part.weight is not None


def curvature(
    model: Model,
    params: Params,
    data: Iterable[Any],
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
    >>> found = curvature(model, model.parameters(), [(x, torch.zeros(2, 1))], {}, spec=Spec("dense"), prior=1.0)
    >>> torch.linalg.inv(found.dense()).round(decimals=3)
    tensor([[2., 0.],
            [0., 5.]])
    """
    names = names or tuple(name for name in params if ":" not in name)
    collector = Collector(model, params, buffers, names, spec or Spec())
    sums: Params | None = None
    seen, found = 0, None
    for batch in data:
        x = model.split(batch)[0]
        if sums is None:
            sums, found = collector.zeros(x), collector.layout(x)
        seen += collector.add(sums, batch, generator=generator).examples
    if sums is None or found is None:
        raise ValueError("there is no data: the loader gave no batch")
    groups = next(leaf.shape[0] for key, leaf in sums.items() if not key.endswith("|A"))
    apart = collector.spec.kind in ("ggn", "fisher") and model.likelihood.noise_groups(1) is not None
    scale = noise_scale(params, groups) if apart else torch.ones(groups)
    flat = {name: torch.tensor(prior, dtype=collector.dtype, device=model.device) for name in names}
    return collector.covariance(sums, seen=seen, n_data=seen, prior=flat, scale=scale, found=found)


def noise_scale(params: Params, groups: int) -> Tensor:
    """1 / noise^2 of every learned noise [G]; a single 1 where the curvature holds the noise already."""
    log_scale = params.get("likelihood:log_scale")
    if log_scale is None or len(log_scale) != groups:
        return torch.ones(groups)
    return (-2 * log_scale.detach()).exp()
