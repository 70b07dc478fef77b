"""What sets the members of an ensemble apart: bags of examples, anchors of their priors, noise on their targets."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from dubito.inference.method import Start
from dubito.model import Target
from dubito.network.examples import Batch
from dubito.tensors import tree
from dubito.tensors.checks import require
from dubito.tensors.randomness import derive_seed, hash_rows, uniforms_from
from dubito.tensors.tree import Params

FEW, FAR = (
    64,
    1.5,
)  # numbers in a tensor, and times the largest new weight, beyond which a weight is no draw of the initialization


def bag(target: Target, batch: Batch, numbers: Sequence[int]) -> Tensor:
    """How often each example counts for the members of these numbers, [S, B]: Poisson(1), from a hash of the example's own bytes."""
    keys = example_keys(target, batch)
    salts = torch.tensor([derive_seed("bag", i) for i in numbers], device=keys.device)
    uniform = uniforms_from(keys ^ salts.unsqueeze(1))
    counts = torch.zeros_like(uniform)
    cumulative = term = 0.36787944117144233  # e^-1
    for k in range(1, 12):
        counts += uniform >= cumulative
        term /= k
        cumulative += term
    return counts.float()


def example_keys(target: Target, batch: Batch) -> Tensor:
    """A hash of each example, [B]; of one whose row is coupled to others, by its place and all inputs."""
    x, y = target.model.split(batch)
    targets = list(tree.leaves(y))
    if not target.model.coupled:
        return hash_rows([*tree.leaves(x), *targets])
    whole = sum(int(hash_rows([leaf.reshape(1, -1)])) for leaf in tree.leaves(x))
    place = torch.arange(len(targets[0]), device=targets[0].device)
    return hash_rows([place, *targets]) ^ derive_seed(whole)


def held_out(target: Target, batch: Batch, numbers: Sequence[int], share: float) -> Tensor:
    """Which examples each member holds out, [S, B]: a fold of its own, by a hash of the example."""
    folds = max(2, round(1 / share))
    fold = (uniforms_from(example_keys(target, batch) ^ derive_seed("fold")) * folds).long()
    return fold == torch.tensor(numbers, device=fold.device).unsqueeze(1) % folds


def perturb(start: Start, new: set[str], seed: int, size: float | None) -> Start:
    """Add noise to weights that are not new, where a size is given, as a share of theirs."""
    if size is None:
        return start
    source = torch.Generator().manual_seed(derive_seed("perturb", seed))
    for name, leaf in start.params.items():
        if name not in new and ":" not in name:
            noise = torch.randn(leaf.shape, generator=source, dtype=leaf.dtype).to(leaf.device)
            leaf.add_(noise * leaf.square().mean().sqrt(), alpha=size)
    return start


def for_each(values: Sequence[Tensor | None], member: int | None = None) -> tuple[Tensor, ...] | None:
    """Values [S, B] of every batch for one member, or for all of them; None if there are none."""
    return tuple(value if member is None else value[member] for value in values if value is not None) or None


def draw_anchors(target: Target, start: Start, numbers: Sequence[int], generator: torch.Generator) -> Params:
    """Draws of the prior at the target's temperature, in which the priors of these members are centered, [S, ...]."""
    likelihood, prior = target.model.likelihood, target.model.prior
    require(
        prior.normal is not None and not any(":" in name for name in start.params),
        f"anchored members need a Gaussian prior and nothing learned beside the weights; got {type(prior).__name__} and "
        f"{[name for name in start.params if ':' in name]}: use Normal(), and give the noise, Gaussian(scale=...)",
    )
    require(
        likelihood.discrete or likelihood.gaussian is not None,
        f"anchored members add noise to Gaussian targets; got {type(likelihood).__name__}: leave out anchored",
    )
    draws = [prior.sample(start.params, generator) for _ in range(max(numbers) + 1)]
    return tree.apply(lambda leaf: leaf * target.temperature**0.5, tree.stack([draws[i] for i in numbers]))


def noisy_targets(target: Target, batch: Batch, numbers: Sequence[int]) -> Tensor | None:
    """Targets with noise of the likelihood's own scale for these members, [S, B, ...], from a hash of the example; None for classes."""
    likelihood, y = target.model.likelihood.gaussian, target.model.split(batch)[1]
    if likelihood is None:
        return None
    columns = y[0].numel()
    salts = torch.tensor([derive_seed("noise", i, j) for i in numbers for j in range(columns)], device=y.device)
    uniform = uniforms_from(example_keys(target, batch).unsqueeze(1) ^ salts.reshape(len(numbers), 1, columns)).clamp(
        1e-12, 1 - 1e-12
    )
    noise = (math.sqrt(2 * target.temperature) * torch.erfinv(2 * uniform - 1)).to(y.dtype).reshape(len(numbers), *y.shape)
    return y + likelihood.noise(noise, {}) * noise


def warn_if_trained(start: Start, members: list[Params], names: set[str]) -> None:
    """Warn of weights that are no draw of the initialization, which members do not take over."""
    moved = [name for name, leaf in start.buffers.items() if name.endswith("num_batches_tracked") and bool((leaf > 0).any())]
    for name in names:
        leaf, fresh = start.params[name], torch.stack([member[name] for member in members])
        constant = fresh.numel() > 1 and bool((fresh == fresh.flatten()[0]).all())
        if (constant and bool((leaf != fresh[0]).any())) or (leaf.numel() >= FEW and leaf.abs().max() > FAR * fresh.abs().max()):
            moved.append(name)
    if moved and names:
        warnings.warn(
            f"The network seems to be trained ({moved[0]} is not as initialized), and the members of an ensemble begin at new weights: "
            "keep='pattern' keeps pretrained layers, fit(start=[...]) gives each member weights of its own, and initialize=function "
            "initializes as you do (and says nothing).",
            stacklevel=6,  # the call of fit
        )
