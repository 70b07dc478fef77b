"""What a pass adds up without a look at the layers: products of the curvature with vectors."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch

from dubito.curvature.layout import Layout
from dubito.curvature.products import batch_product
from dubito.curvature.statistics import Observed, Shapes, Statistic, exact, observe
from dubito.network.examples import Batch
from dubito.tensors import tree
from dubito.tensors.tree import Params

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
    """The GGN or the Hessian times so many directions, which are in the sums as `Q|name`."""

    count: int

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
