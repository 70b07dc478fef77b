"""How many wrong labels are found by looking at the examples with the largest scores first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dubito.tensors.checks import between, require


def inspection(scores: Tensor, wrong: Tensor, shares: Sequence[float] = (0.05, 0.1, 0.2, 0.3)) -> dict[float, float]:
    r"""For every share q of the data that is inspected, the largest scores first, the share of wrong labels that is among them:

    .. math:: \mathrm{found}(q) = \frac{|\{n : w_n\} \cap \mathrm{top}_{\lceil q N \rceil}(s)|}{|\{n : w_n\}|}

    Of a random order it is q. Scores and `wrong` (bool) are [N]; equal scores count as if they were in random order.

    >>> inspection(torch.tensor([0.9, 0.1, 0.8, 0.2]), torch.tensor([True, False, False, True]), [0.25, 0.5, 0.75])
    {0.25: 0.5, 0.5: 0.5, 0.75: 1.0}
    """
    fits = scores.shape == wrong.shape and scores.ndim == 1 and wrong.dtype == torch.bool
    got = f"{list(scores.shape)} and {list(wrong.shape)} {wrong.dtype}"
    require(fits, f"scores must be [N], and wrong [N] and bool; got {got}")
    require(
        bool(wrong.any()) and bool(scores.isfinite().all()), "at least one label must be wrong, and all scores must be finite"
    )
    values, wrong = scores.double(), wrong.to(scores.device)
    return {share: _found(values, wrong, share) for share in shares}


def _found(values: Tensor, wrong: Tensor, share: float) -> float:
    """The share of wrong labels among the largest values."""
    between(0, 1, include="high", share=share)
    count = -int(-share * len(values) // 1)
    edge = values.topk(count).values[-1]
    above, tied = values > edge, values == edge
    part = (count - int(above.sum())) / int(tied.sum())  # of those at the edge
    return (int((wrong & above).sum()) + part * int((wrong & tied).sum())) / int(wrong.sum())
