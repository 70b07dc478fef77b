"""What every variational family can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from dubito.model.priors import Prior
from dubito.posteriors.families.reparametrized import Estimator, Reparametrized
from dubito.tensors.covariances import Covariance
from dubito.tensors.tree import Params


class Family(ABC):
    r"""A set of distributions q over the weights: a frozen dataclass of options, and functions of its parameters.

    The parameters are a flat dict, `leaves`, named "kind/weight", such as "mean/0.weight". A draw is a differentiable function of them
    and of noise that does not depend on them. A family that knows its entropy, its marginal moments or its density says so by
    giving them; the KL divergence to a prior is put together from what there is.
    """

    @abstractmethod
    def leaves(self, start: Params, scale: Params) -> Params:
        """The parameters at the beginning: around the weights `start`, with the standard deviations `scale`."""

    def opened(self, leaves: Params) -> Params:
        """The leaves as the functions below take them as well, computed from them once a step; gradients are taken there."""
        return leaves

    def closed(self, leaves: Params, slopes: Params) -> Params:
        """The gradient in the leaves, of the gradient in what was opened."""
        return slopes

    def bounded(self, leaves: Params) -> None:  # noqa: B027  (most have none)
        """Put leaves that a step took out of their bounds back to them, in place."""

    @abstractmethod
    def noise(self, leaves: Params, generator: torch.Generator) -> Params:
        """What a draw is made of."""

    @abstractmethod
    def draw(self, leaves: Params, noise: Params) -> Params:
        """Weights, differentiable in the leaves."""

    def sampled(self, leaves: Params, noise: Params) -> Params:
        """A draw of the posterior, where that is not what training draws."""
        return self.draw(leaves, noise)

    def pull(self, leaves: Params, noise: Params, drawn: Params, slopes: Params) -> None:
        """Add to the gradients of the leaves what the gradient in a draw, which this may consume, comes to there."""
        torch.autograd.backward(list(drawn.values()), list(slopes.values()), inputs=list(leaves.values()))

    local: ClassVar[bool] = False  # whether `outputs` can draw the outputs of layers in the place of their weights

    def outputs(
        self, leaves: Params, layers: dict[str, str | None], estimator: Estimator, generator: torch.Generator
    ) -> tuple[Params, Reparametrized]:
        """What stands in the network in the place of the weights of some layers, and what draws their outputs. A family that ties
        layers together is only asked where these are all there is."""
        raise NotImplementedError(f"{type(self).__name__} draws weights only")

    def moments(self, leaves: Params) -> tuple[Params, Params] | None:
        """Mean and variance of every weight, where q is Gaussian; a closed form of the expected log prior may rest on them."""
        return None

    def entropy(self, leaves: Params) -> Tensor | None:
        """Entropy of q in nats, or None."""
        return None

    def log_prob(self, leaves: Params, params: Params) -> Tensor | None:
        """Log density of some weights, or None where it is not known."""
        return None

    def divergence(self, leaves: Params, noise: Params, prior: Prior, hyper: Params) -> Tensor | None:
        """KL(q || p), a bound of it, or an estimate from a draw's noise, where it is more than entropy and expected log prior.

        `hyper` are hyperparameters of the prior that are learned.
        """
        return None

    def weight_moments(self, leaves: Params) -> tuple[Params, Params] | None:
        """Mean and variance of every weight, Gaussian or not."""
        return self.moments(leaves)

    def units(self, leaves: Params) -> Params | None:
        """How little each unit is needed, where units have factors."""
        return None

    def covariance(self, leaves: Params) -> Covariance | None:
        """Where q is Gaussian and the library has a form for its covariance."""
        return None


def kind(leaves: Params, name: str) -> Params:
    """The leaves of one kind, by the weight they belong to.

    >>> kind({"mean/0.weight": torch.zeros(1), "rho/0.weight": torch.ones(1)}, "rho")
    {'0.weight': tensor([1.])}
    """
    return {key.split("/", 1)[1]: leaf for key, leaf in leaves.items() if key.split("/", 1)[0] == name}


def of_kind(name: str, tree: Params) -> Params:
    """The inverse: weights' names with their kind."""
    return {f"{name}/{key}": leaf for key, leaf in tree.items()}


def inverse_softplus(scale: Tensor) -> Tensor:
    r"""The :math:`\rho` of which :math:`\ln(1 + e^\rho)` is the scale.

    >>> torch.nn.functional.softplus(inverse_softplus(torch.tensor([0.01, 3.0])))
    tensor([0.0100, 3.0000])
    """
    return scale + torch.log(-torch.expm1(-scale))
