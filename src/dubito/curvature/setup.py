"""Which curvature is wanted, and of what: the network, its weights, and the names of those that the curvature is over."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch

from dubito.curvature.capture import forward
from dubito.curvature.cotangents import Kind
from dubito.curvature.layout import Layout, layout
from dubito.model import Model
from dubito.network.examples import Inputs
from dubito.tensors.tree import Buffers, Params

Structure = Literal["diagonal", "kronecker", "dense"]


@dataclass(frozen=True)
class Spec:
    """Which curvature: its structure, its kind, and how it is estimated."""

    structure: Structure = "kronecker"
    kind: Kind = "ggn"
    draws: int | None = None  # Monte Carlo draws of cotangents; 0 is exact, None too unless outputs are many
    shared: Literal["expand", "reduce"] = "expand"  # KFAC's two forms for weights shared over positions


@dataclass(frozen=True)
class Setup:
    """The curvature `spec` of `model` at `params`, over the weights `names`."""

    model: Model
    params: Params
    buffers: Buffers
    names: tuple[str, ...]
    spec: Spec = field(default_factory=Spec)

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """The shape of each of the weights."""
        return {name: self.params[name].shape for name in self.names}

    @property
    def like(self) -> Params:
        """The weights that the curvature is over, by name."""
        return {name: self.params[name] for name in self.names}

    @property
    def size(self) -> int:
        """The number of weights P."""
        return sum(shape.numel() for shape in self.shapes.values())

    @property
    def dtype(self) -> torch.dtype:
        """The precision of sums: float32 or better, whatever the network computes in."""
        return torch.promote_types(self.params[self.names[0]].dtype, torch.float32)

    def layout(self, x: Inputs, *, anew: bool = False) -> Layout:
        """Which layers hold the weights, for inputs like x; `anew` does not trust what was found before."""
        return layout(self.model, self.params, x, self.buffers, self.names, anew=anew)

    def groups(self, found: Layout) -> int:
        """The number of learned noises, by which the curvature is kept apart; 1 where the noise is part of the curvature."""
        groups = None if self.spec.kind in ("empirical", "hessian") else self.model.likelihood.noise_groups(found.classes)
        return 1 if groups is None else int(groups.max()) + 1

    def sides(self, weight: str, bias: str | None) -> tuple[int, int]:
        """Outputs and inputs of the matrix of a layer; a bias counts as one more input."""
        shape = self.shapes[weight]
        return shape[0], shape.numel() // shape[0] + (bias is not None)


def last_layer(model: Model, params: Params, x: Inputs, buffers: Buffers, names: tuple[str, ...]) -> tuple[str, ...]:
    """The Bayesian weights of the last linear or convolutional layer that the network calls."""
    fixed = {name: buffers[name].detach() for name, _ in model.network.named_parameters() if name in buffers}
    wanted = {**{name: params[name].detach() for name in names}, **fixed}
    rest = {name: leaf for name, leaf in buffers.items() if name not in fixed}
    uses = [use for use in forward(model, {**params, **wanted}, x, rest, wanted=wanted).uses if use.kind == "affine"]
    if not uses:
        raise ValueError("the network's last layer is not a linear or convolutional one: name its weights with subset='...'")
    weight, bias = uses[-1].weight, uses[-1].bias
    if weight is None:
        raise ValueError(
            "the weight of the last layer is computed from others, as a parametrization such as weight_norm does: name those with "
            "subset='...', or remove the parametrization"
        )
    chosen = tuple(name for name in (weight, bias) if name is not None and name in names)
    if not chosen:
        raise ValueError(f"the last layer, with {weight}, is not among the Bayesian weights: mind `only`, and what is frozen")
    return chosen
