r"""Mean probabilities, mean entropies and log scores of classes, in one pass over draws or over the nodes of Gaussian logits.

Softmax does not change if all logits move together, so a Gaussian over C logits is one over C - 1 contrasts of them; for two classes it
is an integral of one dimension. How many nodes a position needs grows with its variance: with 512 times the mean variance of the
contrasts, within the bounds below, the error of a probability is below .003 for up to ten classes with standard deviations up to 3.
The number depends on the position alone, not on the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dubito.model.likelihoods import Categorical, Classes, align, quadrature
from dubito.tensors.eigen import eigh

if TYPE_CHECKING:
    from dubito.posteriors.predictive.latent_mixture import LatentMixture

NODES = 128  # of a Gaussian, where they do not follow its spread
MANY = 2**24  # numbers that all draws or nodes may have together, so that they are all looked at in one go
CACHE = 2**16  # numbers that the softmax of all draws works on at a time, so that they stay in the cache
FEWEST, MOST = 128, 4096  # nodes of a position
WIDEST = 20  # classes up to which nodes follow the spread


class ClassTerms(NamedTuple):
    """What n positions need of the draws."""

    probs: Tensor  # [n, C], mean probabilities
    entropy: Tensor  # [n], mean entropies
    log_probs: Tensor  # of the mean probabilities: [n] of the truth where that is given, else [n, C]


def follows_spread(p: LatentMixture) -> bool:
    """Whether the Gaussians of a predictive are integrated with as many nodes as their spread asks for."""
    free = not p.certain and p.quadrature is None and p.link == "nodes"
    return free and isinstance(p.likelihood, Categorical) and 1 < p.means.shape[-1] <= WIDEST


def node_count(p: LatentMixture) -> int:
    """How many nodes stand for a Gaussian where they do not follow its spread; 1 for a draw."""
    return 1 if p.certain else p.quadrature or NODES


def in_pieces(p: LatentMixture) -> bool:
    """Whether classes are looked at a few positions at a time: with nodes that follow the spread, or where all draws or nodes of all
    positions are many numbers."""
    known = isinstance(p.likelihood, Classes) and (p.certain or p.link in ("nodes", "mc"))
    return follows_spread(p) or (known and p.means.numel() * node_count(p) > MANY)


def class_terms(p: LatentMixture, keep: Tensor | None = None, truth: Tensor | None = None) -> ClassTerms:
    """The terms of all positions, or of those in `keep` [B, *D], whose classes may be given as `truth` [n]."""
    picked = None if keep is None or bool(keep.all()) else keep.flatten().nonzero().squeeze(1)
    n = p.means[0, ..., 0].numel() if picked is None else len(picked)
    dtype, width = torch.promote_types(p.means.dtype, torch.float32), p.likelihood.width(p.means)
    shapes = (n, width), (n,), (n, width) if truth is None else (n,)
    terms = ClassTerms(*(p.means.new_empty(*shape, dtype=dtype) for shape in shapes))
    for rows, logits, weights in _logits(p, picked, n):
        found = _mixed(logits.to(dtype), weights.to(dtype), None if truth is None else truth[rows])
        for whole, some in zip(terms, found, strict=True):
            whole[rows] = some
    return terms


def _logits(p: LatentMixture, picked: Tensor | None, n: int) -> Iterator[tuple[Tensor | slice, Tensor, Tensor]]:
    """Some of the n positions, the logits or log probabilities [C, S, rows] of all draws or nodes there, and their weights [S]."""
    size = CACHE if p.means.device.type == "cpu" else 2**8 * CACHE
    yield from (_spread_logits if follows_spread(p) else _plain_logits)(p, picked, n, size)


def _plain_logits(p: LatentMixture, picked: Tensor | None, n: int, size: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Of draws, or of as many nodes everywhere. The nodes of a few positions at a time are all that is held."""
    likelihood: Any = p.likelihood
    means, cov, root = (None if t is None else t.flatten(1, p.means.ndim - 2) for t in (p.means, p.cov, p.root))
    assert means is not None
    step = max(1, size // (len(means) * node_count(p) * means.shape[-1]))
    for start in range(0, n, step):
        rows = slice(start, min(n, start + step))
        at = rows if picked is None else picked[rows]
        some = replace(
            p, means=means[:, at], cov=None if cov is None else cov[:, at], root=None if root is None else root[:, at]
        ).points
        # classes come first: over a last axis of ten, torch's softmax takes eight times as long
        logits = likelihood.logits(some.means, align(some.params or {}, some.means))
        yield rows, logits.permute(2, 0, 1).contiguous(), some.component_weights


def _spread_logits(p: LatentMixture, picked: Tensor | None, n: int, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of the nodes of Gaussian logits, as many as each position asks for."""
    likelihood: Any = p.likelihood
    means = p.means.flatten(1, -2) if picked is None else p.means.flatten(1, -2)[:, picked]  # [S, n, C]
    params = align(p.params or {}, means)
    cov = p.covariances.flatten(1, -2 if p.covariances.ndim == p.means.ndim else -3)
    cov, slope = cov if picked is None else cov[:, picked], likelihood.logits(torch.ones_like(means[..., :1]), params)[..., 0]
    roots, counts = _principal(cov, slope, dense=p.covariances.ndim > p.means.ndim)
    for count in counts.unique().tolist():
        unit, shares = quadrature(count, roots)
        step = max(1, size // (len(means) * count * means.shape[-1]))
        weights = (p.component_weights.unsqueeze(1) * shares.to(p.component_weights)).flatten()
        for rows in (counts == count).nonzero().squeeze(1).split(step):
            spread = unit @ roots[:, rows].permute(2, 0, 3, 1)  # [C, S, nodes, rows]
            f = (means[:, rows].permute(2, 0, 1).unsqueeze(2) + spread).flatten(1, 2)  # [C, S * nodes, rows]
            scaled = {name: leaf.repeat_interleave(count, 0) if leaf.ndim > 1 else leaf for name, leaf in params.items()}
            yield rows, likelihood.logits(f.movedim(0, -1), scaled).movedim(-1, 0), weights


def _principal(cov: Tensor, slope: Tensor, *, dense: bool) -> tuple[Tensor, Tensor]:
    """Roots [S, n, C, C - 1] of the covariances of logits without their mean, and how many nodes each position needs, [n].

    Softmax takes the logits times `slope` [S, n].
    """
    contrasts = _contrasts(cov.shape[-1]).to(cov)
    inner = contrasts @ (cov if dense else torch.diag_embed(cov)) @ contrasts.mT
    roots = contrasts.mT @ symmetric_root(inner)
    variance = (inner.diagonal(dim1=-2, dim2=-1).mean(-1) * slope**2).amax(0)
    return roots, _node_counts(variance, cov.shape[-1])


def _node_counts(variance: Tensor, width: int) -> Tensor:
    """How many nodes positions need, from the mean variance of what is integrated there."""
    counts = 2.0 ** (512 * variance.nan_to_num(0.0).clamp(1e-6, 1e6)).log2().ceil()
    return counts.clamp(FEWEST, min(MOST, 2 ** (width + 6))).long()


def joint_scores(p: LatentMixture, y: Tensor) -> Tensor:
    """Log scores [B, *D] of targets that depend on several outputs at a position, such as correlated labels or tasks, each with the
    nodes that its spread asks for."""
    means, shape = p.means.flatten(1, -2), p.means.shape[1:-1]  # [S, n, C]
    cov, root = (None if t is None else t.flatten(1, p.means.ndim - 2) for t in (p.cov, p.root))
    y, scores = y.flatten(0, len(shape) - 1), p.means.new_empty(shape.numel(), dtype=torch.float64)
    counts = _node_counts(p.variances.mean(-1).amax(0).flatten(), 2 * means.shape[-1])
    for count in counts.unique().tolist():
        step = max(1, 2**4 * CACHE // (len(means) * count * means.shape[-1]))
        for rows in (counts == count).nonzero().squeeze(1).split(step):
            here = (None if t is None else t[:, rows] for t in (cov, root))
            some = replace(p, means=means[:, rows], **dict(zip(("cov", "root"), here, strict=True)), quadrature=count)
            scores[rows] = some.position_scores(y[rows]).double()
    return scores.to(torch.promote_types(p.means.dtype, torch.float32)).reshape(shape)


def symmetric_root(cov: Tensor) -> Tensor:
    """The symmetric root of covariances [..., C, C]; NaN where one is not finite.

    It is defined for singular matrices, as Cholesky's is not, and does not depend on the signs and bases of eigenvectors.
    """
    finite = cov.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    values, vectors = eigh(torch.where(finite, cov, 0.0))
    return torch.where(finite, (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT, torch.nan)


def _contrasts(classes: int) -> Tensor:
    """An orthonormal basis [C - 1, C] of the vectors that sum to zero: each class against the mean of those before it (Helmert)."""
    k = torch.arange(1, classes, dtype=torch.float64).unsqueeze(1)
    rows = torch.ones(classes - 1, classes, dtype=torch.float64).tril() - torch.diag_embed(k.squeeze(1), 1)[:-1]
    return rows / (k * (k + 1)).sqrt()


def _mixed(x: Tensor, weights: Tensor, truth: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Of logits or log probabilities x [C, S, n]: the terms, see `ClassTerms`."""
    x = x - x.amax(0)
    e = x.exp()
    z = e.sum(0)
    log_z = z.log()
    mean = (e * (weights.unsqueeze(-1) / z)).sum(1)  # [C, n]
    wanted = mean if truth is None else mean.gather(0, truth.unsqueeze(0))
    tiny = wanted < 1e4 * torch.finfo(x.dtype).tiny  # where only the logarithm of the probability is a float
    logs = wanted.log()
    if bool(tiny.any()):
        each = x if truth is None else x.gather(0, truth.expand(1, *log_z.shape))
        improbable = (each - log_z).movedim(1, -1)[tiny] + weights.log()
        logs[tiny] = improbable.logsumexp(-1)
    x = x.clamp_(min=torch.finfo(x.dtype).min)  # 0 times the log of 0 is 0
    noise = weights @ (log_z - x.mul_(e).sum(0) / z)
    return mean.mT, noise, logs.squeeze(0) if truth is not None else logs.mT


def class_scores(p: LatentMixture, y: Tensor) -> Tensor:
    """Log scores [B, *D] of classes, some positions at a time; 0 where there is no target."""
    seen = p.likelihood.observed(y)
    keep = torch.ones_like(y, dtype=torch.bool) if seen is None else seen
    scores = torch.zeros(y.shape, dtype=torch.promote_types(p.means.dtype, torch.float32), device=y.device)
    scores[keep] = class_terms(p, keep, y[keep]).log_probs
    return scores


def times(root: Tensor, unit: Tensor) -> Tensor:
    """A diagonal [..., C] or dense [..., C, R] root times vectors [..., R]."""
    if root.ndim == unit.ndim:
        return root * unit
    return (root @ unit.unsqueeze(-1)).squeeze(-1)
