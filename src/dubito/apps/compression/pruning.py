r"""Which weights a posterior can do without.

With independent weights, those of small signal-to-noise ratio :math:`|\mu| / \sigma`: zero is as likely as the mean, or nearly so
(Graves 2011; Blundell et al. 2015). With a random factor for every unit, whole units (Louizos, Ullrich & Welling 2017). What is
pruned is known to be zero: its mean *and* its standard deviation are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dubito.posteriors import Drawn, Gaussian, Posterior
from dubito.tensors.covariances import Diagonal
from dubito.tensors.tree import Params

THRESHOLD = 1.0  # a mean that is within a standard deviation of zero

Threshold = float | Mapping[str, float]


def moments(posterior: Posterior) -> tuple[Params, Params]:
    """Mean and variance of every weight that has one; means only of the others."""
    if isinstance(posterior, Gaussian):
        variance = posterior.covariance.variance()
        return dict(posterior.params), {name: leaf for name, leaf in variance.items() if ":" not in name}
    own: Any = posterior
    found = None
    if isinstance(posterior, Drawn):
        found = posterior.family.weight_moments(posterior.leaves)
    elif hasattr(own, "moments"):  # a posterior of your own
        found = own.moments()
    if found is None:
        kind = f"{type(posterior.family).__name__} " if isinstance(posterior, Drawn) else ""
        raise TypeError(
            f"a {kind}{type(posterior).__name__} posterior has no mean and variance of each weight to decide by: take a Gaussian one, "
            "such as that of Laplace or Variational, or `apps.compression.cut` the network by masks of your own"
        )
    return {**getattr(own, "points", {}), **found[0]}, found[1]


def scores(posterior: Posterior) -> Params | None:
    """Of posteriors with a factor for every unit: by weight, how little each unit is needed. None for others."""
    own: Any = posterior
    if isinstance(posterior, Drawn):
        found = posterior.family.units(posterior.leaves)
    else:
        found = own.units() if hasattr(own, "units") else None
    if found is None:
        return None
    mean = moments(posterior)[0]
    return {name if name in mean else f"{name}.weight".lstrip("."): leaf for name, leaf in found.items()}


def masks(posterior: Posterior, *, threshold: Threshold | None = None, share: float | None = None) -> Params:
    """By weight, in its shape: True for what is pruned."""
    if threshold is not None and share is not None:
        raise ValueError("weights are pruned by threshold or by share: give one of the two")
    if share is not None and not 0 <= share < 1:
        raise ValueError(f"share is the part of all weights (or units) to prune, from 0 to below 1; got {share}")
    units = scores(posterior)
    mean, variance = moments(posterior)
    if units is None:
        needed = {name: mean[name].abs() / variance[name].clamp_min(0).sqrt() for name in variance}  # 0 / 0 is pruned already
        needed = {name: torch.where(leaf.isnan(), 0.0, leaf) for name, leaf in needed.items()}
        return _below(needed, threshold if threshold is not None or share is not None else THRESHOLD, share)
    if threshold is None and share is None:
        told = "; ".join(f"{name} {_spread(leaf)}" for name, leaf in list(units.items())[:8])
        raise ValueError(
            "units are pruned whose score is above a threshold: give threshold=..., one or {pattern: threshold}, best in a gap of the "
            "scores, or as apps.compression.thresholds(posterior, held_out) finds them; or share=... The quartiles of the scores, from "
            f"the smallest to the largest, are: {told}"
        )
    turned: Any = {name: -leaf for name, leaf in units.items()}
    limit = {k: -v for k, v in threshold.items()} if isinstance(threshold, Mapping) else None if threshold is None else -threshold
    gone = _below(turned, limit, share)
    found = {}
    for name, mask in gone.items():
        shape = mean[name].shape
        axis = 1 if len(shape) == 2 else 0  # inputs of a matrix, filters of a convolution
        found[name] = mask.reshape([-1 if d == axis else 1 for d in range(len(shape))]).expand(shape)
    return found


def _spread(leaf: Tensor) -> str:
    quantiles = torch.quantile(leaf.detach().double().flatten(), torch.linspace(0, 1, 5, dtype=torch.float64, device=leaf.device))
    return " ".join(f"{float(q):.3g}" for q in quantiles)


def _below(needed: Params, threshold: Threshold | None, share: float | None) -> Params:
    """What is needed less than a threshold, or the share that is needed least."""
    if share is not None:
        flat = torch.cat([leaf.detach().flatten() for leaf in needed.values()])
        gone = torch.zeros_like(flat, dtype=torch.bool)
        gone[flat.argsort(stable=True)[: round(share * len(flat))]] = True
        pieces = gone.split([leaf.numel() for leaf in needed.values()])
        return {name: piece.reshape(leaf.shape) for (name, leaf), piece in zip(needed.items(), pieces, strict=True)}
    if not isinstance(threshold, Mapping):
        return {name: leaf < float(threshold or 0) for name, leaf in needed.items()}
    lost = [pattern for pattern in threshold if not any(re.search(pattern, name) for name in needed)]
    if lost:
        raise ValueError(f"{lost} match none of {list(needed)[:8]}")
    limits = {name: next((v for p, v in threshold.items() if re.search(p, name)), -torch.inf) for name in needed}
    return {name: leaf < limits[name] for name, leaf in needed.items()}


def prune(posterior: Posterior, *, threshold: Threshold | None = None, share: float | None = None) -> Gaussian:
    r"""The posterior with the weights that it can do without at zero, for certain: their means and their variances are.

    Weights go whose signal-to-noise ratio :math:`|\mu| / \sigma` is below `threshold` (1 if nothing is given; {pattern:
    threshold} sets them by name), or the `share` with the smallest. For posteriors with a factor for every unit
    (`families.Grouped`), units go whose score is above `threshold`. The result has independent weights: correlations, if there
    were any, are left out.

    >>> import dubito
    >>> model = dubito.Model(torch.nn.Linear(2, 1, bias=False), dubito.Gaussian(scale=0.1))
    >>> posterior = Gaussian.diagonal(model, {"weight": torch.tensor([[2.0, 0.1]])}, {"weight": torch.ones(1, 2)})
    >>> pruned = prune(posterior)
    >>> pruned.params["weight"], pruned.covariance.variance()["weight"]
    (tensor([[2., 0.]]), tensor([[1., 0.]]))
    """
    gone = masks(posterior, threshold=threshold, share=share)
    mean, variance = moments(posterior)
    params = {name: leaf.masked_fill(gone[name], 0) if name in gone else leaf for name, leaf in mean.items()}
    variance = {name: leaf.masked_fill(gone[name], 0) if name in gone else leaf for name, leaf in variance.items()}
    covariance = Diagonal.of(
        {name: leaf.detach().float() if leaf.dtype.itemsize < 4 else leaf.detach() for name, leaf in variance.items()}
    )
    if isinstance(posterior, Gaussian):
        return replace(posterior, params=params, covariance=covariance, fitted=None, scale=None, temperature=1.0)
    own: Any = posterior
    known = posterior.model.parameters()
    return Gaussian(posterior.model, {**known, **params}, own.buffers, covariance, how="sampled")
