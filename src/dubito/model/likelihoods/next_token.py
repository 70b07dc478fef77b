"""Language models: every token given those before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.model.likelihoods.categorical import Categorical
from dubito.model.likelihoods.likelihood import Likelihood


@dataclass(frozen=True)
class NextToken(Categorical):
    r"""The tokens of a text, each given those before it: :math:`p(y) = \prod_{t > 1} \mathrm{softmax}(f_{t - 1})_{y_t}`.

    The network reads tokens [B, T] and gives logits [B, T, C]. The targets are the same tokens: the likelihood compares the logits at
    each position with the token that follows. Nothing follows the last one. `ignore_index` marks tokens that are not predicted, such as
    padding and prompts.

    >>> f, tokens = torch.zeros(1, 3, 4), torch.tensor([[2, 0, 3]])
    >>> NextToken().target(tokens, f)
    tensor([[   0,    3, -100]])
    """

    def target(self, y: Tensor, f: Tensor) -> Tensor:
        """The token that follows each position, and `ignore_index` at the end."""
        y = super().target(y, f)
        if y.ndim < 2 or y.shape[-1] < 2:
            raise ValueError(
                f"a text has at least two tokens; got targets of shape {list(y.shape)}, where [batch, tokens] was expected"
            )
        return torch.cat([y[..., 1:], y.new_full((*y.shape[:-1], 1), self.ignore_index)], -1)

    @property
    def plain(self) -> Likelihood:
        """With noise level 1."""
        return NextToken(dim=self.dim, ignore_index=self.ignore_index)
