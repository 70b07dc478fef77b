r"""Curvature times vectors, without the curvature: for low-rank structures, conjugate gradients and spectra.

:math:`G v = \sum_n J_n^T \Lambda_n J_n v` takes one forward-mode and one reverse-mode pass a batch; :math:`H v` two reverse ones.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dubito.curvature.cotangents import observed
from dubito.curvature.generic import Unrolled, along, backward
from dubito.curvature.layout import Layout
from dubito.curvature.statistics import Diagonal, Observed, Shapes, Statistic, exact, observe
from dubito.model import Model
from dubito.model.likelihoods import likelihood_params
from dubito.network.examples import Batch
from dubito.network.weights import in_mode
from dubito.tensors import tree
from dubito.tensors.tree import Buffers, Params

Product = Callable[[Params], Params]


def batch_product(
    model: Model, params: Params, batch: Batch, buffers: Buffers, v: Params, kind: Literal["ggn", "hessian"] = "ggn"
) -> Params:
    """The curvature of one batch (a sum over its examples) times v, leaves stacked [k, *shape]."""
    x, y = model.split(batch)
    live = {name: params[name].detach() for name in v}
    fixed = {name: leaf.detach() for name, leaf in params.items() if name not in live}
    buffers = {name: leaf.detach() for name, leaf in buffers.items()}
    learned = likelihood_params({**fixed, **live})

    def output(live: Params) -> Tensor:
        """The network's output, as a function of the weights."""
        with Unrolled():
            return model.call({**fixed, **live}, x, buffers)[0]

    def ggn(delta: Params) -> Params:
        """The GGN times a vector."""
        f, slope = along(output, live, delta)
        seen = observed(model, model.likelihood.target(y, f), f, learned)
        slope = slope if seen is None else slope * seen
        weighted = model.likelihood.fisher_product(f.detach(), slope, learned)
        return back(weighted if seen is None else weighted * seen)

    def hessian(delta: Params) -> Params:
        """The Hessian of the negative log likelihood times a vector."""
        points = {name: leaf.clone().requires_grad_() for name, leaf in live.items()}
        with torch.enable_grad():
            loss = -model.score(output(points), y, {**fixed, **points}).sum()
            slopes = torch.autograd.grad(
                loss, list(points.values()), create_graph=True, allow_unused=True, materialize_grads=True
            )
            inner = sum((s * delta[name]).sum() for name, s in zip(points, slopes, strict=True))
            assert isinstance(inner, Tensor)
            if not inner.requires_grad:
                return {name: torch.zeros_like(leaf) for name, leaf in live.items()}
            found = torch.autograd.grad(inner, list(points.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(points, found, strict=True))

    with in_mode(model.network, False), sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own deprecated parts
        if kind == "hessian":
            return tree.stack([hessian(tree.select(v, i)) for i in range(tree.count(v))])
        back = backward(output, live)[1]
        with torch.no_grad():
            return tree.stack([ggn(tree.select(v, i)) for i in range(tree.count(v))])


def product(
    model: Model,
    params: Params,
    data: Iterable[Batch],
    buffers: Buffers,
    *,
    kind: Literal["ggn", "hessian"] = "ggn",
    damping: float = 0.0,
) -> Product:
    """v -> (curvature over all data + damping I) v, for leaves stacked [k, *shape]; `data` is gone through for every product."""

    def times(v: Params) -> Params:
        """The matrix times stacked vectors."""
        total = {name: damping * leaf for name, leaf in v.items()}
        for batch in data:
            for name, leaf in batch_product(model, params, batch, buffers, v, kind).items():
                total[name] = total[name] + leaf
        return total

    return times


def conjugate_gradients(times: Product, b: Params, *, steps: int = 100, tolerance: float = 1e-6) -> Params:
    """The solution of A x = b for a positive definite A given by its products; leaves [*shape].

    >>> A = torch.tensor([[2.0, 0.5], [0.5, 1.0]])
    >>> x = conjugate_gradients(lambda v: {"w": v["w"] @ A}, {"w": torch.tensor([1.0, 0.0])})
    >>> torch.allclose(A @ x["w"], torch.tensor([1.0, 0.0]), atol=1e-5)
    True
    """
    x = {name: torch.zeros_like(leaf) for name, leaf in b.items()}
    r, p = dict(b), dict(b)
    size = start = _dot(r, r)
    for _ in range(steps):
        if float(size) <= tolerance**2 * float(start) or float(size) == 0:
            break
        q = tree.select(times({name: leaf.unsqueeze(0) for name, leaf in p.items()}), 0)
        curvature = _dot(p, q)
        if float(curvature) <= 0:
            raise ValueError(
                f"a direction has curvature {float(curvature):.3g}: the matrix is not positive definite; add damping, or use the GGN"
            )
        step = size / curvature
        x = {name: leaf + step.to(leaf) * p[name] for name, leaf in x.items()}
        r = {name: leaf - step.to(leaf) * q[name] for name, leaf in r.items()}
        size, before = _dot(r, r), size
        p = {name: leaf + (size / before).to(leaf) * p[name] for name, leaf in r.items()}
    return x


def _dot(a: Params, b: Params) -> Tensor:
    return torch.stack([(a[name] * b[name]).double().sum() for name in a]).sum()


COLUMNS = 256  # of a Hessian at a time


class ProductStatistic(Statistic):
    """Sums of products of the curvature with vectors; no layer is looked at."""

    @abstractmethod
    def add_products(self, sums: Params, batch: Batch) -> None:
        """Add the products of a batch."""

    def add(
        self, sums: Params, batch: Batch, *, generator: torch.Generator | None = None, gradient: Params | None = None
    ) -> Observed:
        """Add the products; then look at the likelihood, and its gradient, in passes of their own."""
        self.add_products(sums, batch)
        setup = self.setup
        x, y = setup.model.split(batch)
        if gradient is not None:
            live = {name: leaf.detach().requires_grad_() for name, leaf in setup.like.items()}
            with torch.enable_grad():
                value = setup.model.log_likelihood({**setup.params, **live}, batch, setup.buffers)[0].sum()
            slopes = torch.autograd.grad(value, list(live.values()), allow_unused=True, materialize_grads=True)
            for name, slope in zip(live, slopes, strict=True):
                gradient[name] += slope
        with torch.no_grad():
            f = setup.model.forward(setup.params, x, tree.clone(setup.buffers))[0]
            return observe(setup, exact(f.detach()), y, f.shape[0])

    def multiply(self, columns: Params, batch: Batch, kind: Literal["ggn", "hessian"]) -> Params:
        """The curvature of a batch times columns [k, *shape]."""
        setup = self.setup
        columns = {name: leaf.to(setup.params[name].dtype) for name, leaf in columns.items()}
        return batch_product(setup.model, setup.params, batch, setup.buffers, columns, kind)


@dataclass(frozen=True)
class Products(ProductStatistic):
    """The GGN or the Hessian times so many directions, which are in the sums as `Q|name`; and `squares` of the gradients, the diagonal
    of the GGN, as `D|name`."""

    count: int
    squares: bool = False

    def shapes(self, layout: Layout) -> Shapes:
        """Directions and their products."""
        return {f"{key}|{name}": (self.count, *shape) for key in "QY" for name, shape in self.setup.shapes.items()}

    def add_products(self, sums: Params, batch: Batch) -> None:
        """Add the products with the directions."""
        columns = {name: sums[f"Q|{name}"] for name in self.setup.names}
        kind = "hessian" if self.setup.spec.kind == "hessian" else "ggn"
        for name, leaf in self.multiply(columns, batch, kind).items():
            sums[f"Y|{name}"] += leaf

    def add(
        self, sums: Params, batch: Batch, *, generator: torch.Generator | None = None, gradient: Params | None = None
    ) -> Observed:
        """As every statistic of products. A product holds the sum over several noises, so that these cannot be changed afterwards:
        nothing is told of them."""
        told = super().add(sums, batch, generator=generator, gradient=gradient)
        if self.squares:
            ggn = replace(self.setup, spec=replace(self.setup.spec, structure="diagonal", kind="ggn"))
            Diagonal(ggn).add({key[2:]: leaf for key, leaf in sums.items() if key.startswith("D|")}, batch, generator=generator)
        if len(told.counts) == 1:
            return told
        return told._replace(errors=torch.zeros_like(told.errors), counts=torch.zeros_like(told.counts))


class HessianColumns(ProductStatistic):
    """The full Hessian, some columns at a time."""

    def shapes(self, layout: Layout) -> Shapes:
        """A square matrix."""
        return {"H": (1, self.setup.size, self.setup.size)}

    def add_products(self, sums: Params, batch: Batch) -> None:
        """Add the columns of the batch's Hessian."""
        setup, size = self.setup, self.setup.size
        for start in range(0, size, COLUMNS):
            columns = torch.zeros(min(COLUMNS, size - start), size, dtype=setup.dtype, device=setup.model.device)
            columns[:, start:].fill_diagonal_(1)
            rows = self.multiply(tree.unflatten(columns, setup.like), batch, "hessian")
            sums["H"][0, start : start + COLUMNS] += tree.flatten(rows, stacked=True)
