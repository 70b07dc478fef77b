"""The output layer alone: its Jacobian is its input, and each position is an example of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dubito.curvature.cotangents import groups_of, observed
from dubito.curvature.rows import Layer
from dubito.curvature.setup import Setup
from dubito.model.likelihoods import likelihood_params
from dubito.network.examples import Targets
from dubito.tensors.covariances.propagation import pieces


class OutputRows(NamedTuple):
    """The output layer alone in one pass. Every position with a target is an example of its own; N of them."""

    setup: Setup
    layer: Layer
    f: Tensor  # [N, C]
    seen: Tensor | None  # [N, C], see `observed`; None if all outputs have a target
    groups: Tensor | None  # [C], see `groups_of`

    @staticmethod
    def of(setup: Setup, layer: Layer, output: Tensor, y: Targets) -> OutputRows:
        """From the layer in a pass, and the network's output [B, *D, C]."""
        f = output.flatten(0, -2)
        seen = observed(setup.model, setup.model.likelihood.target(y, output), output, setup.params)
        groups = groups_of(setup.model, output, setup.spec.kind)
        if seen is None:
            return OutputRows(setup, layer.apart(), f, None, groups)
        seen = seen.expand_as(output).flatten(0, -2)
        keep = (seen > 0).any(1)
        rest = seen[keep]
        return OutputRows(setup, layer.apart(keep), f[keep], None if bool((rest == 1).all()) else rest, groups)

    @property
    def plain(self) -> bool:
        """Whether no matrix is needed for each position: the noise is part of the curvature, and every output has a target."""
        return self.groups is None and self.seen is None

    def fishers(self) -> Iterator[tuple[int, slice, Tensor]]:
        """The Fisher information [n, C, C] of the outputs for one noise after another, a piece of the positions at a time."""
        f, groups, seen = self.f, self.groups, self.seen
        for piece in pieces(len(f), f.shape[1] ** 2):
            if groups is None:
                fisher = self.setup.model.likelihood.fisher(f[piece], likelihood_params(self.setup.params))
            else:  # that of unit noise
                fisher = torch.eye(f.shape[1], dtype=f.dtype, device=f.device).expand(len(f[piece]), -1, -1)
            if seen is not None:
                fisher = fisher * seen[piece].unsqueeze(-1) * seen[piece].unsqueeze(-2)
            for group in range(1 if groups is None else int(groups.max()) + 1):
                yield group, piece, fisher if groups is None else fisher * (groups == group).to(fisher)
