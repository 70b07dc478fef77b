"""A forest of random trees beside the boosted ones: where rows repeat, or the target follows no smooth law, its averages are better."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dubito.apps.tables.calibration import Experts
from dubito.apps.tables.deadline import in_time
from dubito.apps.tables.trees import CELLS, below, leaf_places
from dubito.model.likelihoods import Categorical, HeteroscedasticGaussian, Likelihood
from dubito.posteriors.predictive import LatentMixture
from dubito.tensors.randomness import derive_seed

TREES = 20  # for each fold
PORTION = 5  # trees that are grown at a time
SHAPE = 20  # Gaussians that stand for the values of all trees
SILVERMAN = 0.9  # of the width of these Gaussians, in standard deviations of the values
NARROWEST = 0.01  # width
LEAVES = 2000  # of a tree, roughly, at the most: more rows share a leaf where there are more of them


@dataclass(frozen=True)
class Forest:
    """Extremely randomized trees (Geurts et al. 2006) as plain arrays: a forest for each fold, grown from the rows of the other folds.

    A row starts at the root of every tree and goes left where its input is at most the threshold; a leaf is its own child. For classes
    a forest predicts the mean of the shares in its leaves. For numbers every leaf gives a value, and the values of all trees are the
    distribution that the forest predicts: it may have any shape (Meinshausen 2006).
    """

    feature: Tensor  # [M] int32: input that a node looks at
    threshold: Tensor  # [M] float32
    left: Tensor  # [M] int32
    right: Tensor  # [M] int32
    value: Tensor  # [M, V] float32
    root: Tensor  # [S, TREES] int32: first node of every tree

    @staticmethod
    def fit(
        x: Tensor, y: Tensor, fold: Tensor, classes: int = 0, seed: int = 0, end: float = math.inf
    ) -> tuple[Forest, LatentMixture]:
        """Forests of folds [N], and their predictive of the rows that they have not seen. A TimeoutError says that `time.monotonic()`
        would reach the end."""
        values = F.one_hot(y, classes).float() if classes else y
        forests = [
            _grow(x[fold != k], values[fold != k], derive_seed(seed, "forest", k), end)
            for k in in_time(range(int(fold.max()) + 1), end)
        ]
        sizes = [sum(len(nodes["value"]) for nodes in trees) for trees in forests]
        firsts = np.cumsum([0, *sizes[:-1]]).tolist()
        parts = [_arrays(trees, first) for trees, first in zip(forests, firsts, strict=True)]
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0] if name != "root"}
        forest = Forest(**joined, root=torch.stack([part["root"] for part in parts]))
        out = torch.empty(TREES, len(x), values.shape[1])
        for k in range(len(forests)):
            out[:, fold == k] = forest._values(x[fold == k], forest.root[k])
        return forest, _predictive(out, classes > 0)

    def predict(self, x: Tensor, likelihood: Likelihood) -> LatentMixture:
        """The predictive of rows [B, F]."""
        return _predictive(self._values(x, self.root.flatten()), likelihood.discrete)

    def _values(self, x: Tensor, root: Tensor) -> Tensor:
        """Of the leaves of trees [P] at rows [B, F], [P, B, V]."""
        parts = (self.value[leaf_places(self, root, rows)] for rows in x.split(max(1, CELLS // len(root))))
        return torch.cat(list(parts)).movedim(1, 0)

    def tensors(self) -> dict[str, Tensor]:
        """All of it, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @staticmethod
    def of(tensors: dict[str, Tensor]) -> Forest:
        """From what `tensors` gave."""
        return Forest(**tensors)


def _predictive(values: Tensor, classes: bool) -> LatentMixture:
    """Of the values of trees, [P, B, V]."""
    if classes:
        return LatentMixture(Categorical(), _logs(values.mean(0)).unsqueeze(0))
    levels = (torch.arange(SHAPE) + 0.5) / SHAPE
    means = values.quantile(levels, 0)
    width = (SILVERMAN * means.std(0) * SHAPE**-0.2).clamp_min(NARROWEST)
    f = torch.cat([means, (2 * width.log()).expand_as(means)], -1)
    return Experts(HeteroscedasticGaussian(), f, functions=torch.zeros(SHAPE, dtype=torch.long))


def _grow(x: Tensor, values: Tensor, seed: int, end: float) -> list[dict[str, Any]]:
    """The nodes of some trees, which are grown a few at a time, as a forest of many rows takes seconds."""
    from sklearn.ensemble import ExtraTreesRegressor

    least = math.ceil(len(x) / LEAVES)
    forest = ExtraTreesRegressor(min_samples_leaf=least, random_state=seed % 2**32, warm_start=True)
    for size in in_time(range(PORTION, TREES + 1, PORTION), end):
        forest.set_params(n_estimators=size).fit(x.numpy(), values.squeeze(1).numpy())
    return [_nodes(one.tree_) for one in forest.estimators_]


def _nodes(tree: Any) -> dict[str, Any]:
    leaf, here = tree.children_left < 0, np.arange(tree.node_count)
    return {
        "feature": np.where(leaf, 0, tree.feature),
        "threshold": below(tree.threshold),
        "left": np.where(leaf, here, tree.children_left),
        "right": np.where(leaf, here, tree.children_right),
        "value": tree.value[:, :, 0].astype(np.float32),
    }


def _arrays(trees: list[dict[str, Any]], first: int) -> dict[str, Tensor]:
    """The nodes of all trees of a forest in one array, which begins at the place `first`."""
    starts = first + np.cumsum([0, *(len(nodes["value"]) for nodes in trees[:-1])])
    joined = {name: np.concatenate([nodes[name] for nodes in trees]) for name in ("feature", "threshold", "value")}
    places = {
        name: np.concatenate([nodes[name] + start for nodes, start in zip(trees, starts, strict=True)])
        for name in ("left", "right")
    }
    arrays = {**joined, **places, "root": starts}
    return {name: torch.from_numpy(leaf if leaf.dtype == np.float32 else leaf.astype(np.int32)) for name, leaf in arrays.items()}


def _logs(shares: Tensor) -> Tensor:
    """Log probabilities of shares of classes, where every class has half a tree more."""
    least = 0.5 / TREES
    return ((shares + least) / (1 + least * shares.shape[-1])).log()
