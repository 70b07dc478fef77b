"""What likelihoods of numbers share: a noise with a known or a learned scale, and a noise that the network predicts."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dubito.model.likelihoods.likelihood import NOISE, DiagonalFisher, Likelihood, halves, nodes, positive
from dubito.tensors.eigen import eigh
from dubito.tensors.tree import Params


@dataclass(frozen=True)
class Scaled(DiagonalFisher):
    """A noise whose scale does not depend on x: known, or learned as `likelihood:log_scale`, one for all outputs or one for each."""

    scale: float | tuple[float, ...] | None = None
    outputs: int = field(default=1, kw_only=True)

    def __post_init__(self):
        if self.scale is not None:
            positive(*self.scales)
            first, *others = self.scales
            object.__setattr__(self, "scale", (first, *others) if others else first)

    @property
    def scales(self) -> tuple[float, ...]:
        """The scales that are known, one or one for each output."""
        return () if self.scale is None else tuple(torch.as_tensor(self.scale, dtype=torch.float64).flatten().tolist())

    def noise(self, f: Tensor, params: Params) -> Tensor:
        """The scale of the noise, broadcasting against f."""
        if self.scale is None:
            return params[NOISE].exp()
        return torch.as_tensor(self.scale, dtype=f.dtype, device=f.device)

    def parameters(self, y: Tensor | None = None) -> Params:
        """`likelihood:log_scale`, if the noise is learned: the log of the spread of the targets."""
        if self.scale is not None:
            return {}
        spread = torch.ones(self.outputs)
        channels = y.shape[self.dim] if y is not None and y.ndim > 1 else 1
        if y is not None and y.numel() > self.outputs and self.outputs in (1, channels) and not y.is_complex():
            rows = y.movedim(self.dim, -1).reshape(-1, self.outputs) if self.outputs > 1 else y.reshape(-1, 1)
            found = rows.float().std(0).cpu()
            # targets that are all alike in the first batch say nothing of the noise, and a start at 0 would never be left
            spread = torch.where(found > 1e-3 * rows.float().abs().mean(0).cpu().clamp_min(1e-3), found, 1.0)
        return {NOISE: spread.log()}

    def least_noise(self, params: Params) -> Tensor | float:
        """The smallest scale."""
        if self.scale is None:
            return params[NOISE].amin(-1).exp()
        return min(self.scales)

    def target(self, y: Tensor, f: Tensor) -> Tensor:
        """As for all likelihoods, after a check that the number of scales fits the outputs."""
        width = len(self.scales) or self.outputs
        if width not in (1, f.shape[-1]):
            raise ValueError(
                f"there are {width} noise scales, but the network has {f.shape[-1]} outputs: give one, or one for each"
            )
        return super().target(y, f)

    def rescaled(self, shift: Tensor, scale: Tensor, params: Params) -> tuple[Likelihood, Tensor, Tensor, Params]:
        """The noise scale is multiplied by `scale`."""
        if self.scale is not None:
            noise = torch.tensor(self.scales, dtype=torch.float64) * scale.cpu().double()
            return replace(self, scale=tuple(noise.tolist())), shift, scale, params
        learned = {name: leaf + scale.log() if name == NOISE else leaf for name, leaf in params.items()}
        return replace(self, outputs=len(scale)), shift, scale, learned

    def moved(self, f: Tensor, offset: Tensor) -> Tensor | None:
        """f + offset."""
        return f + offset


@dataclass(frozen=True)
class Heteroscedastic(DiagonalFisher):
    """A noise that the network predicts: f = [means, log variances], twice as many outputs as targets.

    `missing=True` skips positions of which a target is NaN, as maps of depth have them.
    """

    missing: bool = field(default=False, kw_only=True)

    @abstractmethod
    def densities(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """The log density of every number of a target, [..., C / 2]."""

    def moments(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """The means and the log variances, each [..., C / 2]."""
        return halves(f, type(self).__name__, "a mean and a log variance for each target")

    def width(self, f: Tensor) -> int:
        """Half of the outputs are means."""
        return self.moments(f)[0].shape[-1]

    def check(self, f: Tensor, y: Tensor) -> None:
        """Targets must be finite, or NaN where `missing` allows it."""
        y = self.target(y, f)
        if self.missing and not bool((torch.isfinite(y) | y.isnan()).all()):
            raise ValueError("the targets hold infinite values: mark what is missing by NaN")
        if not self.missing and not bool(torch.isfinite(y).all()):
            raise ValueError(
                "the targets hold NaN or infinite values: remove those rows, fill them in, or have NaN skipped by missing=True"
            )

    def observed(self, y: Tensor) -> Tensor | None:
        """Where no number of a target is NaN."""
        seen = ~y.isnan().any(-1)
        return seen if self.missing and not bool(seen.all()) else None

    def log_prob(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """The sum of the log densities; 0 where a target is missing."""
        if not self.missing:
            return self.densities(f, y, params).sum(-1)
        seen = ~y.isnan().any(-1)
        y = torch.where(seen.unsqueeze(-1), y, 0.0)  # a NaN would come back through the gradient of what is left out
        return torch.where(seen, self.densities(f, y, params).sum(-1), 0.0)

    def mean(self, f: Tensor, params: Params) -> Tensor:
        """The means."""
        return self.moments(f)[0]

    def noise_variance(self, f_mean: Tensor, f_var: Tensor, params: Params) -> Tensor | None:
        """The mean of a log-normal number, e^(s + Var[s] / 2), which far from data may be more than a float holds: then half the
        largest, to which something can be added."""
        expected = (self.moments(f_mean)[1] + 0.5 * self.moments(f_var)[1]).exp()
        return expected.clamp_max(0.5 * torch.finfo(expected.dtype).max)

    def rescaled(self, shift: Tensor, scale: Tensor, params: Params) -> tuple[Likelihood, Tensor, Tensor, Params]:
        """Scaling y shifts the log variances."""
        return self, torch.cat([shift, 2 * scale.log()]), torch.cat([scale, torch.ones_like(scale)]), params

    def moved(self, f: Tensor, offset: Tensor) -> Tensor | None:
        """The means move."""
        return f + torch.cat([offset, torch.zeros_like(offset)], -1)


def given_nodes(f_mean: Tensor, f_cov: Tensor, free: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Split N(f_mean, f_cov), [S, ..., C], into n Gaussians of equal weight: the `free` outputs [C] are set to nodes, and the others
    have their conditional Gaussian given these."""
    if f_cov.ndim == f_mean.ndim:
        unit = nodes(n, f_mean[..., free]).reshape(1, n, *[1] * (f_mean.ndim - 2), -1)
        means = f_mean.unsqueeze(1).repeat(1, n, *[1] * (f_mean.ndim - 1))
        means[..., free] += f_cov[..., free].clamp_min(0).sqrt().unsqueeze(1) * unit
        return means, (f_cov * ~free).unsqueeze(1).expand_as(means)
    values, vectors = eigh(f_cov[..., free, :][..., free])
    unit = nodes(n, values).reshape(1, n, *[1] * (f_mean.ndim - 2), -1)
    known = values > 1e-12 * values.amax(-1, keepdim=True).clamp_min(1e-30)
    # symmetric roots, which do not depend on the arbitrary signs and bases of eigenvectors
    inverse = (vectors * torch.where(known, values.clamp_min(1e-30).rsqrt(), 0.0).unsqueeze(-2)) @ vectors.mT
    gain = f_cov[..., free] @ inverse  # [S, ..., C, k], covariance of all outputs with the unit nodes
    gain[..., free, :] = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT
    means = f_mean.unsqueeze(1) + (gain.unsqueeze(1) @ unit.unsqueeze(-1)).squeeze(-1)
    fixed = ~free
    left = (f_cov - gain @ gain.mT) * fixed * fixed.unsqueeze(-1)
    return means, left.unsqueeze(1).expand(*means.shape, means.shape[-1])


def known_noise(f_cov: Tensor, f_mean: Tensor, width: int) -> Tensor | None:
    """The covariance of the first `width` outputs, which determine the means, if all other variances are 0; else None."""
    diagonal = f_cov.ndim == f_mean.ndim
    spread = f_cov if diagonal else f_cov.diagonal(dim1=-2, dim2=-1)
    if bool(spread[..., width:].any()):
        return None
    return f_cov[..., :width] if diagonal else f_cov[..., :width, :width]
