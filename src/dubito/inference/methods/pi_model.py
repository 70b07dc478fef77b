"""The Pi-model (Laine & Aila 2017): two passes over every example that are to agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dubito.inference.semi_supervised import Consistency, ConsistencyState, View, squared
from dubito.model import Target
from dubito.network.weights import in_mode
from dubito.tensors import tree
from dubito.tensors.randomness import fork_rng


@dataclass(frozen=True)
class PiModel(Consistency):
    r"""Train by `method` so that two random views of an input, labelled or not, are given the same prediction,

    .. math:: \log p(D, \theta) - N\, w(t)\, \frac{1}{B C} \sum_b \lVert z_b - z'_b \rVert^2.

    Each pass has its own dropout masks and augmentation; at least one of these must make them differ. `unlabelled` are inputs
    without targets: a tensor, or a Dataset whose targets are not looked at. An epoch is then a pass over those, where that is longer.
    `augment(x, generator)` returns inputs of the same shape: see `dubito.augment`. The weight of the consistency rises over the first
    `ramp_up` of the steps as :math:`w(t) = \mathrm{weight}\; e^{-5 (1 - t)^2}`.

    >>> import dubito, torch
    >>> model = dubito.Model(torch.nn.Linear(2, 3), dubito.Categorical())
    >>> method = PiModel(dubito.MAP(epochs=2), unlabelled=torch.randn(200, 2), augment=dubito.augment.Noise(0.1))
    >>> posterior = dubito.fit(model, method, (torch.randn(12, 2), torch.arange(12) % 3))
    >>> posterior.predict(torch.randn(5, 2)).mean.shape
    torch.Size([5, 3])
    """

    def begin(self, target: Target, state: ConsistencyState, x: Any, generator: torch.Generator) -> ConsistencyState:
        """The state as it is; two passes over the same inputs must differ."""
        if self.augment is None:
            # dropout that the method inside puts on (MCDropout(at=...)) counts as well
            prepared, outputs = self._inner.prepare(target), []
            with torch.no_grad(), fork_rng(), in_mode(target.model.network, True):
                for _ in range(2):
                    weights, buffers = state.student.params, tree.clone(state.student.buffers)
                    if prepared.around is None:
                        outputs.append(target.model.call(weights, x, buffers)[0])
                    else:
                        with prepared.around({**buffers, **weights}):
                            outputs.append(target.model.call(weights, x, buffers)[0])
            if torch.equal(*outputs):
                raise ValueError(
                    "two passes of this network over the same inputs are the same, so they cannot disagree: give "
                    "augment=..., such as dubito.augment.Noise(), or a network with dropout"
                )
        return state

    def teach(self, state: ConsistencyState, view: View) -> Tensor:
        """The squared difference from a second pass, with its own augmentation and dropout."""
        # running statistics follow the first pass; gradients go through both
        _, z, _ = view.target.predicted(
            view.params, view.augmented(), {name: leaf.clone() for name, leaf in view.buffers.items()}
        )
        return squared(view.z, z)
