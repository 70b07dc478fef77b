"""Temporal ensembling (Laine & Aila 2017): predictions that agree with the average of earlier ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dubito.inference.semi_supervised import Consistency, ConsistencyState, View, squared
from dubito.model import Target
from dubito.model.likelihoods import likelihood_params
from dubito.tensors import tree
from dubito.tensors.checks import between, require
from dubito.tensors.randomness import hash_rows


@dataclass
class TemporalEnsemblingState(ConsistencyState):
    keys: Tensor  # [N], a hash of every labelled example seen so far, in the order in which they came
    known: int  # how many there are
    sums: Tensor  # [N + M, ...]: the moving average of the predictions for labelled and unlabelled examples, begun at zero
    seen: Tensor  # [N + M]: of how many


@dataclass(frozen=True)
class TemporalEnsembling(Consistency):
    r"""Train by `method` so that predictions agree with a moving average of the earlier ones for the same example,

    .. math:: Z \leftarrow a Z + (1 - a) z, \qquad \tilde z = Z / (1 - a^k) \text{ after } k \text{ of them}.

    One pass over each example a step is enough, and the target is less noisy than that of `PiModel`; it is older, too, as old as a pass
    over the data. An example that comes for the first time is not compared.

    `unlabelled` are inputs without targets: a tensor, or a Dataset whose targets are not looked at. An epoch is then a pass over
    those, where that is longer. `augment(x, generator)` returns inputs of the same shape: see `dubito.augment`. Labelled examples are
    recognized by their values, so they must come as they are, not augmented by their loader.

    >>> import dubito, torch
    >>> model = dubito.Model(torch.nn.Linear(2, 3), dubito.Categorical())
    >>> method = TemporalEnsembling(dubito.MAP(epochs=2), unlabelled=torch.randn(200, 2), augment=dubito.augment.Noise(0.1))
    >>> posterior = dubito.fit(model, method, (torch.randn(12, 2), torch.arange(12) % 3))
    >>> posterior.predict(torch.randn(5, 2)).mean.shape
    torch.Size([5, 3])
    """

    weight: float = field(default=30.0, kw_only=True)  # of the consistency, beside a mean log likelihood, after the ramp
    decay: float = field(default=0.6, kw_only=True)  # share of the average that a new prediction leaves as it is

    def __post_init__(self):
        super().__post_init__()
        between(0, 1, decay=self.decay, include="low")

    def begin(self, target: Target, state: ConsistencyState, x: Any, generator: torch.Generator) -> TemporalEnsemblingState:
        """Averages of zero, one for each example."""
        model = target.model
        require(
            not model.coupled,
            "TemporalEnsembling remembers what it predicted for each example, and the rows of this model are coupled: use PiModel or "
            "MeanTeacher",
        )
        with torch.no_grad():
            f, _ = model.forward(state.student.params, x, tree.clone(state.student.buffers))
            z = model.likelihood.mean(f.float() if f.dtype.itemsize < 4 else f, likelihood_params(state.student.params))
        n = target.n_data + (0 if state.stream is None else state.stream.n)
        return TemporalEnsemblingState(
            **vars(state),
            keys=torch.zeros(target.n_data, dtype=torch.int64, device=model.device),
            known=0,
            sums=z.new_zeros(n, *z.shape[1:]),
            seen=torch.zeros(n, dtype=torch.int64, device=model.device),
        )

    def teach(self, state: TemporalEnsemblingState, view: View) -> Tensor:
        """The squared difference from the average of earlier predictions, which is then updated."""
        x = tree.apply_leaves(lambda leaf: leaf[: view.labelled], view.inputs)
        keys, more, z, share = hash_rows(list(tree.leaves(x))), view.rows, view.z.detach().to(state.sums.dtype), None
        if view.shares is not None:  # all processes remember the predictions for all examples
            labelled, share = view.shares
            places, z = share.alone(torch.cat([keys, more])), share.alone(z)
            view.target.processes.sum_([places, z])
            keys, more = places[: labelled.total], places[labelled.total :]
        rows = torch.cat([self._places(state, keys), len(state.keys) + more])
        k = state.seen[rows]
        each = (-1, *[1] * (z.ndim - 1))
        before = state.sums[rows]
        told = before / (1 - self.decay ** k.clamp_min(1).double()).to(before).view(each)
        # the whole batch is written at once: an example that is in it twice counts once
        state.sums[rows] = self.decay * before + (1 - self.decay) * z
        state.seen[rows] = k + 1
        told, known = (told, k > 0) if share is None else (share.take(told), share.take(k > 0))
        return squared(view.z, told.to(view.z)) * known

    def _places(self, state: TemporalEnsemblingState, keys: Tensor) -> Tensor:
        """Where the labelled examples of a batch are kept; those that are new get a place."""
        known = state.keys[: state.known]
        new = keys[~torch.isin(keys, known)].unique()
        if len(new):
            if state.known + len(new) > len(state.keys):
                raise ValueError(
                    f"there are more than {len(state.keys)} different labelled examples, so they change from pass to pass, or n_data "
                    "is too small: give examples as they are, and `augment` to change them"
                )
            state.keys[state.known : state.known + len(new)] = new
            state.known += len(new)
        ordered, order = state.keys[: state.known].sort()
        return order[torch.searchsorted(ordered, keys)]
