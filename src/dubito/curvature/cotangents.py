r"""What is back-propagated: vectors in output space whose outer products make the curvature of the likelihood in f.

.. math:: \mathrm{GGN} = \sum_n J_n^T \Lambda_n J_n = \sum_n \sum_k (J_n^T s_{nk}) (J_n^T s_{nk})^T,
          \qquad \sum_k s_{nk} s_{nk}^T = \Lambda_n
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from dubito.model import Model
from dubito.model.likelihoods import likelihood_params
from dubito.network.examples import Targets
from dubito.tensors.checks import at_least, require
from dubito.tensors.covariances.covariance import normal
from dubito.tensors.shares import draw_given, draw_rows
from dubito.tensors.tree import Params, full_precision

Kind = Literal["ggn", "fisher", "empirical", "hessian"]
KINDS = ("ggn", "fisher", "empirical", "hessian")
MANY = 256  # outputs of an example (classes times pixels or tokens) up to which the GGN is exact unless draws are asked for


def monte_carlo(kind: Kind, draws: int | None, outputs: int) -> int | None:
    """How many random cotangents there will be for so many outputs of an example; None for the exact ones.

    The one rule: labels are drawn once for each example where there are more than `MANY` outputs, or `draws` times, so 0 is never.
    """
    if kind not in ("ggn", "fisher"):
        return None
    if draws is not None:
        return draws or None
    return 1 if kind == "fisher" or outputs > MANY else None


def check_draws(kind: str, draws: int | None) -> None:
    """Raise for a number of draws that `monte_carlo` has no use for."""
    at_least(0, draws=draws)
    require(kind != "fisher" or draws != 0, "curvature='fisher' draws labels, at least once; with draws=0 use curvature='ggn'")


def cotangents(
    model: Model, f: Tensor, y: Targets, params: Params, kind: Kind, draws: int | None, generator: torch.Generator | None
) -> Iterator[tuple[int, Tensor]]:
    """(noise group, s [B, *D, C]) one after another. Where the noise is learned, `s` is that of unit noise."""
    likelihood = model.likelihood
    f = f.detach()
    f = full_precision(f)
    target = likelihood.target(y, f)
    seen = observed(model, target, f, params)
    groups = groups_of(model, f, kind)

    def masked(s: Tensor) -> Tensor:
        """Zero where there is no target."""
        return s if seen is None else s * seen

    if kind == "empirical":
        slope = likelihood.slope(f, target, params)
        yield 0, slope if seen is None else slope * (seen > 0)
        return
    count = monte_carlo(kind, draws, f[0].numel())
    if groups is not None:  # unit noise: unit vectors, one group of outputs at a time
        units = torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)
        if count is None:
            for s in _everywhere(f, units):
                yield int(groups[int(s.reshape(-1, f.shape[-1]).abs().sum(0).argmax())]), s
            return
        for _ in range(count):
            noise = draw_rows(lambda shape: normal(shape, f, generator), f.shape) / count**0.5
            for group in groups.unique().tolist():
                yield group, noise * (groups == group).to(noise)
        return
    if count is None:
        for root in likelihood.fisher_root(f, likelihood_params(params)):
            for s in _positions(masked(root)):
                yield 0, s
        return
    for _ in range(count):
        slope = draw_given(lambda f: likelihood.random_slope(f, likelihood_params(params), generator), f)
        yield 0, masked(slope) / count**0.5


def observed(model: Model, target: Tensor, f: Tensor, params: Params) -> Tensor | None:
    """The factor of the root of the Fisher information, which broadcasts against f: 0 where there is no target, the root of the share
    that is seen where only an interval of it is known, and else 1; None if it is 1 everywhere."""
    share = model.likelihood.seen_share(f.detach(), target, likelihood_params(params))
    if share is not None:
        return share.sqrt()
    seen = model.likelihood.observed(target)
    return None if seen is None else (seen if seen.ndim == f.ndim else seen.unsqueeze(-1)).to(f)


def groups_of(model: Model, f: Tensor, kind: Kind) -> Tensor | None:
    """The noise of each output [C] where curvature is kept apart by noise, so that the noise can be changed afterwards."""
    if kind in ("empirical", "hessian"):
        return None
    groups = model.likelihood.noise_groups(f.shape[-1])
    return None if groups is None else groups.to(f.device)


def _positions(s: Tensor) -> Iterator[Tensor]:
    """A cotangent of every position on its own: their gradients must not be added before they are squared."""
    if s.ndim == 2:
        yield s
        return
    flat = s.reshape(s.shape[0], -1, s.shape[-1])
    for i in range(flat.shape[1]):
        one = torch.zeros_like(flat)
        one[:, i] = flat[:, i]
        yield one.reshape(s.shape)


def _everywhere(f: Tensor, units: Tensor) -> Iterator[Tensor]:
    for unit in units:
        yield from _positions(unit.expand_as(f))
