"""The interface of a variational family, and functions of its parameters: a flat dict of tensors with names "kind/weight"."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.model.priors import Prior
from dubito.posteriors.families.reparametrized import Estimator, Layers, Reparametrized
from dubito.tensors import tree
from dubito.tensors.covariances import Covariance
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


Drawing: TypeAlias = tuple[Params, Reparametrized]


class Family(ABC):
    r"""A set of distributions q over the weights: a frozen dataclass of options, and functions of the parameters of q.

    The parameters are a flat dict, `leaves`, with names "kind/weight", such as "mean/0.weight". A draw is a differentiable function of
    them and of noise that does not depend on them (the reparametrization trick). Entropy, marginal moments and density are given
    where they have a closed form; `Variational` puts the KL divergence to the prior together from those that there are.
    """

    independent: ClassVar[bool] = False  # whether its weights are independent Gaussians
    local: ClassVar[bool] = False  # whether `outputs` can draw the outputs of layers instead of their weights

    @abstractmethod
    def leaves(self, start: Params, scale: Params) -> Params:
        """The initial parameters: a distribution around the weights `start` with the standard deviations `scale`."""

    def constrain(self, leaves: Params) -> Params:
        """The transformed leaves (scale instead of rho), computed once a step; all functions below accept these too."""
        return leaves

    def unconstrain_gradient(self, leaves: Params, slopes: Params) -> Params:
        """The gradient in the leaves, given the gradient in what `constrain` returned."""
        return slopes

    def enforce_bounds(self, leaves: Params) -> None:  # noqa: B027  (most families have no bounds)
        """Move leaves that a step took out of their bounds back to them, in place."""

    @abstractmethod
    def noise(self, leaves: Params, generator: torch.Generator) -> Params:
        """The random numbers of a draw."""

    @abstractmethod
    def draw(self, leaves: Params, noise: Params) -> Params:
        """A draw of the weights, differentiable in the leaves."""

    def sample(self, leaves: Params, noise: Params) -> Params:
        """A draw for predictions, where it differs from a draw in training."""
        return self.draw(leaves, noise)

    def backward(self, leaves: Params, noise: Params, drawn: Params, slopes: Params) -> None:
        """Add the gradient in the leaves, given the gradient `slopes` in a draw. It may overwrite noise and slopes."""
        torch.autograd.backward(list(drawn.values()), list(slopes.values()), inputs=list(leaves.values()))

    def outputs(self, leaves: Params, layers: Layers, estimator: Estimator, generator: torch.Generator) -> Drawing:
        """The tensors to put in place of the weights of `layers`, and the context in which the outputs of these layers are drawn.

        A family in which layers depend on each other supports this only if `layers` are all layers.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot draw the outputs of layers: use estimator='weights'")

    def moments(self, leaves: Params) -> tuple[Params, Params] | None:
        """Mean and variance of every weight if q is Gaussian, for closed forms of the expected log prior; otherwise None."""
        return None

    def entropy(self, leaves: Params) -> Tensor | None:
        """The entropy of q in nats, or None if it has no closed form."""
        return None

    def log_prob(self, leaves: Params, params: Params) -> Tensor | None:
        """The log density of q at some weights, or None if it has no closed form."""
        return None

    def divergence(self, leaves: Params, noise: Params, prior: Prior, hyper: Params) -> Tensor | None:
        """KL(q || p), a bound of it, or an estimate by a draw's noise. None: it is -entropy - E[ln p], from the functions above.

        `hyper` are learned hyperparameters of the prior.
        """
        return None

    def weight_moments(self, leaves: Params) -> tuple[Params, Params] | None:
        """Mean and variance of every weight, whether q is Gaussian or not; None if they have no closed form."""
        return self.moments(leaves)

    def units(self, leaves: Params) -> Params | None:
        """A score for each unit, the larger the less the unit is needed; None if units have no factors."""
        return None

    def covariance(self, leaves: Params) -> Covariance | None:
        """The covariance of q, if q is Gaussian and the library has a structure for it; otherwise None."""
        return None


class ScaledFamily(Family):
    r"""A family with a location :math:`\mu`, "mean/...", and a scale :math:`\ln(1 + e^\rho)`, "rho/...", for every weight."""

    def leaves(self, start: Params, scale: Params) -> Params:
        r"""The locations `start`, and :math:`\rho` with :math:`\ln(1 + e^\rho)` = `scale`."""
        return {**label("mean", tree.clone(start)), **label("rho", tree.apply(inverse_softplus, scale))}

    def scales(self, leaves: Params) -> Params:
        """The scale of every weight."""
        return pick(leaves, "scale") or tree.apply(F.softplus, pick(leaves, "rho"))

    def noise(self, leaves: Params, generator: torch.Generator) -> Params:
        """A standard normal number for every weight."""
        return normal_like(pick(leaves, "mean"), generator)
