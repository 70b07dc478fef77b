"""Warnings before a fit: of networks, embeddings and targets that can be fitted, but probably not as they were meant."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from dubito.model.likelihoods import Gaussian, HeteroscedasticGaussian
from dubito.model.model import Inspection, Model
from dubito.network.inspect import close
from dubito.tensors import randomness, tree
from dubito.tensors.tree import Buffers, Params

FAR = 100.0  # times the network's outputs: targets that training would not reach


def warn_if_random(model: Model, params: Params, buffers: Buffers, batch: Any, inspection: Inspection, *, rows: bool) -> None:
    """Warn of a network that is random in eval mode and, where data are cut into batches by their `rows`, of inputs that have the
    examples along another axis too. The network runs again only where the inspection left a doubt."""
    if not inspection.doubtful:
        return
    x, f = model.split(batch)[0], inspection.output

    def run(x: Any) -> Tensor:
        """Outputs in eval mode."""
        return model.forward(params, x, tree.clone(buffers))[0]

    with torch.no_grad(), randomness.fork_rng():
        if not rows:
            random, mixed = not close(run(x), f), False
        else:
            mixed = not close(
                run(tree.apply_leaves(lambda leaf: leaf.flip(0) if leaf.shape[:1] == f.shape[:1] else leaf, x)).flip(0), f
            )
            random = mixed and not close(run(x), f)
    if random:
        warnings.warn(
            "The network is random in eval mode: two calls on the same input differ. Look for dropout or noise that ignores "
            "self.training, such as F.dropout(x) without training=self.training.",
            stacklevel=5,  # the call of fit
        )
    elif mixed:
        warnings.warn(
            "Reversing the rows of x does not reverse the outputs, so examples also lie along another axis (an [N, N] adjacency "
            "matrix, for instance) and cannot be cut into mini-batches. Pass everything as one batch: [(x, y)].",
            stacklevel=5,  # the call of fit
        )


def warn_if_padding_is_random(model: Model) -> None:
    """Warn a method that draws weights of the padding rows of embeddings, which are then drawn too."""
    bayesian = model.parameters()
    padded = [name for name in model.padding() if name in bayesian]
    if padded:
        warnings.warn(
            f"The padding row of {padded[0]} is drawn like any other weight and enters the network wherever there is padding, because "
            "torch only sets its gradient to zero. Multiply the embeddings by (x != padding).unsqueeze(-1) in forward, or leave them "
            "out by only=....",
            stacklevel=5,  # the call of fit
        )


def warn_if_targets_are_far(model: Model, params: Params, batch: Any, inspection: Inspection) -> None:
    """Warn of targets such as 300,000, which weights that begin near 1, under their prior, do not reach; a learned noise hides it."""
    y = model.split(batch)[1]
    if not isinstance(model.likelihood, Gaussian | HeteroscedasticGaussian) or not isinstance(y, Tensor):
        return
    size = float(y.detach().double().square().nanmean().sqrt())
    if size <= FAR:
        return
    reached = float(model.likelihood.mean(inspection.output, params).double().square().mean().sqrt())
    if size > FAR * max(reached, 1.0):  # a network that was trained on them is where they are
        warnings.warn(
            f"The targets are about {size:.2g} in size and the network's outputs about {reached:.2g}, too far apart for the usual "
            "steps and priors. Standardize the targets, fit (y - mean) / std, and go back by posterior.predict(x).rescaled(mean, std).",
            stacklevel=5,  # the call of fit
        )
