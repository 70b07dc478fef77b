"""Functions of the parameters of a family, a flat dict of tensors with names "kind/weight", such as "mean/0.weight"."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from dubito.tensors import tree
from dubito.tensors.randomness import draw_normals
from dubito.tensors.tree import Params

LOG_TWO_PI = math.log(2 * math.pi)


def pick(leaves: Params, kind: str) -> Params:
    """The leaves of one kind, by the name of their weight.

    >>> pick({"mean/0.weight": torch.zeros(1), "rho/0.weight": torch.ones(1)}, "rho")
    {'0.weight': tensor([1.])}
    """
    return {key.split("/", 1)[1]: leaf for key, leaf in leaves.items() if key.split("/", 1)[0] == kind}


def pick_weight(leaves: Params, name: str) -> Params:
    """The leaves of one weight, with their full names."""
    return {key: leaf for key, leaf in leaves.items() if key.split("/", 1)[1] == name}


def label(kind: str, weights: Params) -> Params:
    """The inverse of `pick`: tensors by the name of a weight, as leaves of one kind."""
    return {f"{kind}/{name}": leaf for name, leaf in weights.items()}


def inverse_softplus(scale: Tensor) -> Tensor:
    r"""The :math:`\rho` for which :math:`\ln(1 + e^\rho)` is the scale.

    >>> torch.nn.functional.softplus(inverse_softplus(torch.tensor([0.01, 3.0])))
    tensor([0.0100, 3.0000])
    """
    return scale + torch.log(-torch.expm1(-scale))


def normal_like(leaves: Params, generator: torch.Generator) -> Params:
    """Standard normal numbers in the shapes of some tensors."""
    return dict(zip(leaves, draw_normals(list(leaves.values()), generator), strict=True))


def reparametrize(means: Params, scales: Params, noise: Params) -> Params:
    """mean + scale * noise for every weight."""
    return {name: torch.addcmul(mean, scales[name], noise[name]) for name, mean in means.items()}


def total(values: Iterable[Tensor]) -> Tensor:
    """The sum of numbers that are tensors."""
    return torch.stack(list(values)).sum()


def log_scales(scales: Params) -> Tensor:
    """The sum of the logarithms of all scales."""
    return total(scale.log().sum() for scale in scales.values())


def standard_entropy(like: Params) -> float:
    r"""The entropy of one standard normal number for each entry, :math:`\frac n2 (1 + \ln 2 \pi)`."""
    return tree.size(like) * 0.5 * (1 + LOG_TWO_PI)
