"""Looks at networks, embeddings and targets before a fit: warnings of what is probably not meant, and refusals of wrong targets."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dubito.model.likelihoods import NextToken
from dubito.model.model import Inspection, Model
from dubito.network.inspect import close
from dubito.tensors import randomness, tree
from dubito.tensors.tree import Buffers, Params

FAR = 100.0  # times the network's outputs: targets that training would not reach


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=6)  # the call of fit


def _targets(model: Model, batch: Any) -> Tensor | None:
    """The targets of a batch, if they are one tensor."""
    y = model.split(batch)[1]
    return y if isinstance(y, Tensor) else None


def warn_if_random(model: Model, params: Params, buffers: Buffers, batch: Any, inspection: Inspection, *, rows: bool) -> None:
    """Warn of a network that is random in eval mode and, where data are cut into batches by their `rows`, of inputs that have the
    examples along another axis too, and of examples that depend on others. The network runs again only where the inspection left a
    doubt."""
    if not inspection.doubtful:
        return
    x, f = model.split(batch)[0], inspection.output

    def run(x: Any) -> Tensor:
        """Outputs in eval mode."""
        return model.forward(params, x, tree.clone(buffers))[0]

    def change(order: Tensor) -> Any:
        """The inputs of the examples in another order."""
        return tree.apply_leaves(lambda leaf: leaf[order.to(leaf.device)] if leaf.shape[:1] == f.shape[:1] else leaf, x)

    n = len(f)
    numbers, half = torch.arange(n), max(1, n // 2)
    mixed = depends = False
    with torch.no_grad(), randomness.fork_rng():
        if rows:
            mixed = not close(run(change(numbers.flip(0))).flip(0), f)
            depends = not mixed and not close(run(change(numbers.where(numbers < half, 0)))[:half], f[:half])
        random = (mixed or depends or not rows) and not close(run(x), f)
    if random:
        _warn(
            "The network is random in eval mode: two calls on the same input differ. Look for dropout or noise that ignores "
            "self.training, such as F.dropout(x) without training=self.training."
        )
    elif depends:
        _warn(
            "The outputs of some examples depend on the others in their batch (attention among rows, a graph of neighbours, "
            "h - h.mean(0)), so mini-batches and predictions depend on which examples come together. Say Model(..., coupled=True) and "
            "pass everything as one batch, (x, y), or let each example hold all that its output depends on."
        )
    elif mixed:
        _warn(
            "Reversing the rows of x does not reverse the outputs, so examples also lie along another axis (an [N, N] adjacency "
            "matrix, for instance) and cannot be cut into mini-batches. Say Model(..., coupled=True) and pass everything as one batch, "
            "(x, y)."
        )


def warn_if_padding_is_random(model: Model) -> None:
    """Warn a method that draws weights of the padding rows of embeddings, which are then drawn too."""
    bayesian = model.parameters()
    padded = [name for name in model.padding() if name in bayesian]
    if padded:
        _warn(
            f"The padding row of {padded[0]} is drawn like any other weight and enters the network wherever there is padding, because "
            "torch only sets its gradient to zero. Multiply the embeddings by (x != padding).unsqueeze(-1) in forward, or leave them "
            "out by only=...."
        )


def warn_if_targets_are_far(model: Model, params: Params, batch: Any, inspection: Inspection) -> None:
    """Warn of targets such as 300,000, which weights that begin near 1, under their prior, do not reach; a learned noise hides it."""
    y, f = _targets(model, batch), inspection.output
    if y is None or model.likelihood.intervals or model.likelihood.noise_variance(f, torch.zeros_like(f), params) is None:
        return  # the outputs are not the means of numbers
    size = float(y.detach().double().square().nanmean().sqrt())
    if size <= FAR:
        return
    reached = float(model.likelihood.mean(f, params).double().square().mean().sqrt())
    if size > FAR * max(reached, 1.0):  # a network that was trained on them is where they are
        _warn(
            f"The targets are about {size:.2g} in size and the network's outputs about {reached:.2g}, too far apart for the usual "
            "steps and priors. Standardize the targets, fit (y - mean) / std, and go back by posterior.predict(x).rescaled(mean, std)."
        )


@dataclass(frozen=True)
class TargetCheck:
    """Checks the targets of later batches as the likelihood checks those of the first, where they have its shape.

    >>> import dubito
    >>> model = Model(torch.nn.Linear(1, 3), dubito.Categorical())
    >>> check = TargetCheck.of(model, torch.zeros(2, 3), (torch.zeros(2, 1), torch.tensor([0, 1])))
    >>> check((torch.zeros(2, 1), torch.tensor([0, 3])))
    Traceback (most recent call last):
        ...
    ValueError: the targets go from 0 to 3, but the network has 3 classes (0 to 2); an index to be skipped is given as ignore_index
    """

    model: Model
    output: Tensor  # of one example, [1, *D, C]
    shape: torch.Size | None  # of an example's targets; None: they are not one tensor

    @staticmethod
    def of(model: Model, output: Tensor, batch: Any) -> TargetCheck:
        """From the network's output for a batch."""
        y = _targets(model, batch)
        return TargetCheck(model, output[:1].clone(), None if y is None else y.shape[1:])

    def __call__(self, batch: Any) -> None:
        y = _targets(self.model, batch)
        if y is not None and y.shape[1:] == self.shape:
            self.model.likelihood.check(self.output.to(y.device).expand(len(y), *self.output.shape[1:]), y)


def refuse_copied_labels(model: Model, batch: Any) -> None:
    """Raise where the labels of a language model are its own inputs, which a network learns to copy."""
    if isinstance(model.likelihood, NextToken):
        return
    x, y = model.split(batch)[0], _targets(model, batch)
    ids = x.get("input_ids") if isinstance(x, dict) else None
    config = getattr(model.network, "config", None)
    if y is None or getattr(ids, "shape", None) != y.shape or y.ndim < 2 or y.shape[1] < 2:
        return
    keep = y != getattr(model.likelihood, "ignore_index", -100)
    if bool((ids == y)[keep].all()) and not getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"the labels are the input_ids themselves, and {type(model.likelihood).__name__} compares position with position, so the "
            "network would learn to copy: use the likelihood dubito.NextToken(), which compares each position with the next token"
        )
