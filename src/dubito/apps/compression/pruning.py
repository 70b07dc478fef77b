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
from dubito.tensors.checks import between, require
from dubito.tensors.covariances import Diagonal
from dubito.tensors.tree import Params

THRESHOLD = 1.0  # a mean that is within a standard deviation of zero

Threshold = float | Mapping[str, float]


def moments(posterior: Posterior) -> tuple[Params, Params]:
    """Mean and variance of every weight that has one; means only of the others."""
    if isinstance(posterior, Gaussian):
        variance = posterior.covariance.variance()
        return dict(posterior.params), {name: leaf for name, leaf in variance.items() if ":" not in name}
    other: Any = posterior
    known = None
    if isinstance(posterior, Drawn):
        known = posterior.family.weight_moments(posterior.leaves)
    elif hasattr(other, "moments"):  # a posterior of your own
        known = other.moments()
    if known is None:
        kind = f"{type(posterior.family).__name__} " if isinstance(posterior, Drawn) else ""
        raise TypeError(
            f"a {kind}{type(posterior).__name__} posterior has no mean and variance of each weight: use a Gaussian one, such as that "
            "of Laplace or Variational, or cut the network by masks with `apps.compression.cut`"
        )
    return {**getattr(other, "points", {}), **known[0]}, known[1]


def scores(posterior: Posterior) -> Params | None:
    """Of posteriors with a factor for every unit: by weight, how little each unit is needed. None for others."""
    other: Any = posterior
    if isinstance(posterior, Drawn):
        units = posterior.family.units(posterior.leaves)
    else:
        units = other.units() if hasattr(other, "units") else None
    if units is None:
        return None
    mean = moments(posterior)[0]
    return {name if name in mean else f"{name}.weight".lstrip("."): leaf for name, leaf in units.items()}


def signal_to_noise(mean: Params, variance: Params) -> Params:
    r""":math:`|\mu| / \sigma` of every weight; 0 of one that is pruned already."""
    ratios = {name: mean[name].abs() / leaf.clamp_min(0).sqrt() for name, leaf in variance.items()}
    return {name: torch.where(leaf.isnan(), 0.0, leaf) for name, leaf in ratios.items()}


def over_weights(mask: Tensor, shape: torch.Size) -> Tensor:
    """A mask of units, broadcast over their weights: the inputs of a matrix, the filters of a convolution."""
    if mask.shape == shape:
        return mask
    axis = 1 if len(shape) == 2 else 0
    return mask.reshape([-1 if d == axis else 1 for d in range(len(shape))]).expand(shape)


def masks(posterior: Posterior, *, threshold: Threshold | None = None, share: float | None = None) -> Params:
    """By weight, in its shape: True for what is pruned."""
    require(threshold is None or share is None, "weights are pruned by threshold or by share: give one of the two")
    between(0, 1, include="low", share=share)
    units, (mean, variance) = scores(posterior), moments(posterior)
    nothing = threshold is None and share is None
    if units is None:
        return _below(signal_to_noise(mean, variance), THRESHOLD if nothing else threshold, share)
    if nothing:
        quartiles = "; ".join(f"{name} {_spread(leaf)}" for name, leaf in list(units.items())[:8])
        raise ValueError(
            "units whose score is above a threshold are pruned: give threshold=..., one or {pattern: threshold}, best in a gap of the "
            "scores, or as apps.compression.thresholds(posterior, held_out) finds them; or share=... The quartiles of the scores, from "
            f"the smallest to the largest, are: {quartiles}"
        )
    gone = _below({name: -leaf for name, leaf in units.items()}, _negative(threshold), share)
    return {name: over_weights(mask, mean[name].shape) for name, mask in gone.items()}


def _negative(threshold: Threshold | None) -> Threshold | None:
    if threshold is None:
        return None
    return {k: -v for k, v in threshold.items()} if isinstance(threshold, Mapping) else -threshold


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
    require(not lost, f"the patterns {lost} match none of {list(needed)[:8]}")
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
    wide = {name: leaf.detach().float() if leaf.dtype.itemsize < 4 else leaf.detach() for name, leaf in variance.items()}
    covariance = Diagonal.of(wide)
    if isinstance(posterior, Gaussian):
        return replace(posterior, params=params, covariance=covariance, fitted=None, scale=None, temperature=1.0)
    other: Any = posterior
    known = posterior.model.parameters()
    return Gaussian(posterior.model, {**known, **params}, other.buffers, covariance, how="sampled")
