"""Mean teacher (Tarvainen & Valpola 2017): predictions that agree with those of a moving average of the weights."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dubito.inference.semi_supervised import Consistency, ConsistencyState, View, squared
from dubito.model import Target
from dubito.posteriors import Posterior
from dubito.tensors import store, tree
from dubito.tensors.checks import between
from dubito.tensors.tree import Buffers, Params


@dataclass
class MeanTeacherState(ConsistencyState):
    teacher: Params
    buffers: Buffers  # the teacher's own: running statistics of its passes


@dataclass(frozen=True)
class MeanTeacher(Consistency):
    r"""Train by `method` so that predictions agree with those of a teacher, the moving average of the weights,

    .. math:: \tilde\theta_s = a_s \tilde\theta_{s-1} + (1 - a_s) \theta_s, \quad a_s = \min(\mathrm{decay},\, 1 - 1/(s + 1)),

    so that it is the plain average of all steps at first. Student and teacher see views of the inputs of their own (`augment`), with
    their own dropout, in train mode; no gradient goes into the teacher. The posterior is that of `method` at the teacher's weights.

    `unlabelled` are inputs without targets: a tensor, or a Dataset whose targets are not looked at. An epoch is then a pass over
    those, where that is longer. `augment(x, generator)` returns inputs of the same shape: see `dubito.augment`.

    >>> import dubito, torch
    >>> model = dubito.Model(torch.nn.Linear(2, 3), dubito.Categorical())
    >>> method = MeanTeacher(dubito.MAP(epochs=2), unlabelled=torch.randn(200, 2), augment=dubito.augment.Noise(0.1))
    >>> posterior = dubito.fit(model, method, (torch.randn(12, 2), torch.arange(12) % 3))
    >>> posterior.predict(torch.randn(5, 2)).mean.shape
    torch.Size([5, 3])
    """

    decay: float = field(default=0.99, kw_only=True)  # of the average, at most; 0.999 for runs of many thousand steps

    def __post_init__(self):
        super().__post_init__()
        between(0, 1, decay=self.decay, include="low")

    def begin(self, target: Target, state: ConsistencyState, x: Any, generator: torch.Generator) -> MeanTeacherState:
        """A teacher at the student's weights."""
        student = state.student
        return MeanTeacherState(**vars(state), teacher=tree.clone(student.params), buffers=tree.clone(student.buffers))

    def teach(self, state: MeanTeacherState, view: View) -> Tensor:
        """The squared difference from the teacher's predictions."""
        with torch.no_grad():
            _, z, state.buffers = view.target.predicted(state.teacher, view.augmented(), state.buffers)
        return squared(view.z, z)

    def follow(self, state: MeanTeacherState) -> None:
        """Move the teacher's weights towards the student's."""
        keep = min(self.decay, 1 - 1 / (state.step + 1))
        with torch.no_grad():
            torch._foreach_lerp_(list(state.teacher.values()), list(state.student.params.values()), 1 - keep)

    def posterior(self, target: Target, state: Any, draws: store.Draws) -> Posterior:
        """That of the method inside, at the teacher's weights."""
        return self._inner.posterior(target, replace(state.student, params=state.teacher, buffers=state.buffers), draws)
