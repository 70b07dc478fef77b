"""What every structure can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from dubito.tensors import tree
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
