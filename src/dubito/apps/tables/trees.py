"""Boosted trees beside the networks: where the target jumps with the inputs, they are hard to beat."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dubito.apps.tables.deadline import in_time
from dubito.model.likelihoods import Categorical, HeteroscedasticGaussian, Likelihood
from dubito.posteriors.predictive import LatentMixture
from dubito.tensors.randomness import derive_seed

LARGEST = 4_000_000  # inputs times rows of a table beyond which they are not worth their time
ROUNDS = 100  # of boosting at the most
OPTIONS: dict[str, Any] = {"early_stopping": False, "max_iter": ROUNDS}  # the number of rounds is chosen afterwards
NOISE = {"max_leaf_nodes": 8, "learning_rate": 0.05}  # of the trees that predict the variance
LEAST = 1e-4  # variance of the noise
PLACES = ("left", "right", "root")  # arrays of places in the nodes
CELLS = 2**17  # trees times rows that are predicted at a time

Loss = Callable[[Tensor, Tensor], Tensor]  # of outputs [..., N, C] and targets [N], [..., N]


@dataclass(frozen=True)
class Trees:
    """Boosted trees as plain arrays: one booster for each fold, fitted to the rows of the other folds.

    A row starts at the root of every tree and goes left where its input is at most the threshold. The value of the leaf where it ends
    is added to one of the outputs. The nodes of all trees stand in one array; a leaf is its own child.
    """

    feature: Tensor  # [M] int32: input that a node looks at
    threshold: Tensor  # [M] float32
    left: Tensor  # [M] int32
    right: Tensor  # [M] int32
    value: Tensor  # [M] float32
    root: Tensor  # [P] int32: first node of every tree
    output: Tensor  # [P] int32: which of the S * C outputs it adds to
    baseline: Tensor  # [S, C] float32: outputs before any tree

    @staticmethod
    def fit(
        x: Tensor, y: Tensor, fold: Tensor, classes: int = 0, seed: int = 0, end: float = math.inf
    ) -> tuple[Trees, LatentMixture]:
        """Boosters of folds [N], and their predictive of the rows that they have not seen: of classes, or Gaussians of targets [N, T].

        They have as many rounds as predict the held-out rows best. The variances are boosted in the same way, to the squared
        out-of-fold errors; the gamma loss is then that of a Gaussian. A TimeoutError says that `time.monotonic()` would reach the end.
        """
        made, out = boost_classes(x, y, fold, seed, end) if classes else boost_numbers(x, y, fold, seed, end)
        return made, LatentMixture(Categorical() if classes else HeteroscedasticGaussian(), out.unsqueeze(0))

    def outputs(self, x: Tensor) -> Tensor:
        """Of every booster for rows [B, F], [S, B, C]."""
        added = torch.zeros(len(x), self.baseline.numel(), dtype=torch.float64)
        added.index_add_(1, self.output, self.leaves(x).double())
        return added.float().unflatten(1, self.baseline.shape).movedim(0, 1) + self.baseline.unsqueeze(1)

    def leaves(self, x: Tensor) -> Tensor:
        """The value of the leaf of every tree at rows [B, F], [B, P]."""
        return torch.cat(
            [self.value[leaf_places(self, self.root, rows)] for rows in x.split(max(1, CELLS // max(1, len(self.root))))]
        )

    def predict(self, x: Tensor, likelihood: Likelihood) -> LatentMixture:
        """The predictive of rows [B, F]."""
        return LatentMixture(likelihood, self.outputs(x))

    def tensors(self) -> dict[str, Tensor]:
        """All of it, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @staticmethod
    def of(tensors: dict[str, Tensor]) -> Trees:
        """From what `tensors` gave."""
        return Trees(**tensors)


def leaf_places(nodes: Any, root: Tensor, x: Tensor) -> Tensor:
    """The leaves [B, P] in which rows [B, F] end in trees with these roots [P].

    `nodes` has the input that every node looks at, its threshold and its children, as arrays.
    """
    place = root.expand(len(x), -1)
    while True:
        lower = x.gather(1, nodes.feature[place].long()) <= nodes.threshold[place]
        step = torch.where(lower, nodes.left[place], nodes.right[place])
        if torch.equal(step, place):
            return place
        place = step


def boost_classes(x: Tensor, y: Tensor, fold: Tensor, seed: int, end: float) -> tuple[Trees, Tensor]:
    """One booster for each fold [N], and the logits of the rows that it holds out, [N, C]."""
    return boost(_classifier(seed), x, y, fold, _cross_entropy, end)


def boost_numbers(x: Tensor, y: Tensor, fold: Tensor, seed: int, end: float) -> tuple[Trees, Tensor]:
    """Boosters of the mean and the variance of every target for each fold [N], and the outputs for held-out rows, [N, 2 T]."""
    half = (time.monotonic() + end) / 2  # the variances take as long
    means = [boost(_regressor(seed, loss="squared_error"), x, t, fold, _squared_error, half) for t in in_time(y.unbind(1), half)]
    errors = [(t - out[:, 0]).square().clamp_min(LEAST) for t, (_, out) in zip(y.T, means, strict=True)]
    boosted = means + [boost(_regressor(seed, loss="gamma", **NOISE), x, e, fold, _gamma, end) for e in in_time(errors, end)]
    return side_by_side([trees for trees, _ in boosted]), torch.cat([out for _, out in boosted], -1)


def boost(make: Callable[[], Any], x: Tensor, y: Tensor, fold: Tensor, loss: Loss, end: float) -> tuple[Trees, Tensor]:
    """One booster for each fold, cut after the round that is best for the held-out rows, and the outputs for these, [N, C]."""
    boosters, losses = [], torch.zeros(ROUNDS + 1, dtype=torch.float64)
    for k in in_time(range(int(fold.max()) + 1), end):
        held = fold == k
        booster = from_scikit_learn(make().fit(x[~held].numpy(), y[~held].numpy()))
        steps = booster.leaves(x[held]).double().unflatten(1, (ROUNDS, -1)).cumsum(1).movedim(1, 0)  # [ROUNDS, n, C']
        stages = F.pad(steps, (booster.baseline.shape[1] - steps.shape[-1], 0, 0, 0, 1, 0)) + booster.baseline
        losses += loss(stages, y[held]).sum(-1)
        boosters.append(booster)
    rounds = int(losses.argmin())
    boosters = [cut(booster, rounds) for booster in boosters]
    out = torch.empty(len(x), boosters[0].baseline.shape[1])
    for k, booster in enumerate(boosters):
        out[fold == k] = booster.outputs(x[fold == k])[0]
    return one_after_another(boosters), out


def from_scikit_learn(booster: Any) -> Trees:
    """A fitted `HistGradientBoostingRegressor` or `HistGradientBoostingClassifier` over inputs in float32, none of them missing.

    Two classes have the logits 0 and what scikit-learn predicts.
    """
    trees = [tree.nodes for trees in booster._predictors for tree in trees]
    baseline = torch.from_numpy(booster._baseline_prediction).float().reshape(1, -1)
    two = hasattr(booster, "classes_") and len(booster.classes_) == 2
    starts = np.cumsum([0, *(len(nodes) for nodes in trees)])
    nodes = np.concatenate(trees)
    first, here, leaf = np.repeat(starts[:-1], np.diff(starts)), np.arange(len(nodes)), nodes["is_leaf"].astype(bool)
    return Trees(
        feature=torch.from_numpy(np.where(leaf, 0, nodes["feature_idx"]).astype(np.int32)),
        threshold=torch.from_numpy(below(nodes["num_threshold"])),
        left=torch.from_numpy(np.where(leaf, here, first + nodes["left"]).astype(np.int32)),
        right=torch.from_numpy(np.where(leaf, here, first + nodes["right"]).astype(np.int32)),
        value=torch.from_numpy(nodes["value"].astype(np.float32)),
        root=torch.from_numpy(starts[:-1].astype(np.int32)),
        output=torch.arange(len(trees), dtype=torch.int32) % baseline.shape[1] + two,
        baseline=F.pad(baseline, (1, 0)) if two else baseline,
    )


def below(thresholds: np.ndarray) -> np.ndarray:
    """The largest numbers in float32 that are not above thresholds in float64: they split numbers in float32 at the same places."""
    near = thresholds.astype(np.float32)
    return np.where(near > thresholds, np.nextafter(near, np.float32(-np.inf)), near)


def cut(booster: Trees, rounds: int) -> Trees:
    """The first rounds of one booster of `ROUNDS` rounds."""
    trees = rounds * len(booster.root) // ROUNDS
    nodes = int(booster.root[trees]) if trees < len(booster.root) else len(booster.feature)
    kept = {name: leaf[:trees] if name in ("root", "output") else leaf[:nodes] for name, leaf in booster.tensors().items()}
    return Trees(**{**kept, "baseline": booster.baseline})


def one_after_another(parts: list[Trees]) -> Trees:
    """Boosters [S_i, C] as [sum of S_i, C]."""
    baseline = torch.cat([part.baseline for part in parts])
    before = np.cumsum([0, *(part.baseline.numel() for part in parts[:-1])]).tolist()
    return _joined(parts, [part.output + n for part, n in zip(parts, before, strict=True)], baseline)


def side_by_side(parts: list[Trees]) -> Trees:
    """Boosters [S, C_i] as [S, sum of C_i]."""
    baseline = torch.cat([part.baseline for part in parts], 1)
    outputs, before = [], 0
    for part in parts:
        c = part.baseline.shape[1]
        outputs.append(part.output // c * baseline.shape[1] + part.output % c + before)
        before += c
    return _joined(parts, outputs, baseline)


def _joined(parts: list[Trees], outputs: list[Tensor], baseline: Tensor) -> Trees:
    """Their nodes in one array, with new places of the outputs."""
    starts = np.cumsum([0, *(len(part.feature) for part in parts[:-1])]).tolist()
    return Trees(
        **{name: torch.cat([getattr(part, name) for part in parts]) for name in ("feature", "threshold", "value")},
        **{name: torch.cat([getattr(part, name) + start for part, start in zip(parts, starts, strict=True)]) for name in PLACES},
        output=torch.cat(outputs),
        baseline=baseline,
    )


def _regressor(seed: int, **options: Any) -> Callable[[], Any]:
    from sklearn.ensemble import HistGradientBoostingRegressor

    return lambda: HistGradientBoostingRegressor(random_state=_state(seed), **OPTIONS, **options)


def _classifier(seed: int) -> Callable[[], Any]:
    from sklearn.ensemble import HistGradientBoostingClassifier

    return lambda: HistGradientBoostingClassifier(random_state=_state(seed), **OPTIONS)


def _state(seed: int) -> int:
    return derive_seed(seed, "trees") % 2**32


def _squared_error(f: Tensor, y: Tensor) -> Tensor:
    return (f[..., 0] - y).square()


def _gamma(f: Tensor, y: Tensor) -> Tensor:
    return f[..., 0] + y * (-f[..., 0]).exp()


def _cross_entropy(f: Tensor, y: Tensor) -> Tensor:
    return f.logsumexp(-1) - f.gather(-1, y.expand(f.shape[:-1]).unsqueeze(-1)).squeeze(-1)
