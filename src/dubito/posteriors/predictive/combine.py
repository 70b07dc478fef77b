"""Several predictives as one: of consecutive inputs, or mixed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dubito.posteriors.predictive.latent_mixture import LatentMixture
from dubito.posteriors.predictive.predictive import Predictive


def concatenate(parts: Sequence[Predictive]) -> Predictive:
    """Predictives of consecutive batches, from the same draws, as one predictive of all inputs."""
    first, *others = parts
    return first.followed_by(others) if others else first


def mix(given: Sequence[Predictive], weights: Sequence[float]) -> LatentMixture:
    """Predictives of the same inputs, mixed with weights that sum to 1."""
    parts = [p.mixture for p in given if p.mixture is not None]
    if len(parts) < len(given):
        raise ValueError("predictives of other kinds than LatentMixture cannot be mixed exactly: predict with how='sampled'")
    root = _joined_roots(parts)
    stacked = [{k: v if v.ndim == 2 else v.expand(p.means.shape[0], -1) for k, v in (p.params or {}).items()} for p in parts]
    first = parts[0]
    return LatentMixture(
        first.likelihood,
        means=torch.cat([p.means for p in parts]),
        cov=_joined_covariances(parts) if root is None else None,
        root=root,
        weights=torch.cat([w * p.component_weights for p, w in zip(parts, weights, strict=True)]),
        params={k: torch.cat([s[k] for s in stacked]) for k in stacked[0]},
        quadrature=first.quadrature,
        link=first.link,
        how=first.how,
    )


def _joined_roots(parts: list[LatentMixture]) -> Tensor | None:
    """The roots of all components, if they all have one of the same shape."""
    roots = [p.root for p in parts if p.root is not None]
    return torch.cat(roots) if len(roots) == len(parts) and len({r.shape[1:] for r in roots}) == 1 else None


def _joined_covariances(parts: list[LatentMixture]) -> Tensor | None:
    """The covariances of all components, as matrices if some are: zero for points, unless all are."""
    if all(p.certain for p in parts):
        return None
    covs = [torch.zeros_like(p.means) if p.certain else p.covariances for p in parts]
    widest = max(cov.ndim for cov in covs)
    return torch.cat([cov if cov.ndim == widest else torch.diag_embed(cov) for cov in covs])
