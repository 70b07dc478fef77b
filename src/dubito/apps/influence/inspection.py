"""How many wrong labels are found by looking at the examples with the largest scores first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def inspection(scores: Tensor, wrong: Tensor, shares: Sequence[float] = (0.05, 0.1, 0.2, 0.3)) -> dict[float, float]:
    r"""For every share q of the data that is inspected, the largest scores first, the share of wrong labels that is among them:

    .. math:: \mathrm{found}(q) = \frac{|\{n : w_n\} \cap \mathrm{top}_{\lceil q N \rceil}(s)|}{|\{n : w_n\}|}

    Of a random order it is q. Scores and `wrong` (bool) are [N]; equal scores count as if they were in random order.

    >>> inspection(torch.tensor([0.9, 0.1, 0.8, 0.2]), torch.tensor([True, False, False, True]), [0.25, 0.5, 0.75])
    {0.25: 0.5, 0.5: 0.5, 0.75: 1.0}
    """
    if scores.shape != wrong.shape or scores.ndim != 1 or wrong.dtype != torch.bool:
        raise ValueError(
            f"scores [N] and wrong [N], bool, are needed; got {list(scores.shape)}, {list(wrong.shape)} {wrong.dtype}"
        )
    if not bool(wrong.any()) or not bool(scores.isfinite().all()):
        raise ValueError("at least one label must be wrong, and all scores finite")
    values, wrong = scores.double(), wrong.to(scores.device)
    found = {}
    for share in shares:
        if not 0 < share <= 1:
            raise ValueError(f"a share is above 0 and at most 1; got {share}")
        count = -int(-share * len(values) // 1)
        edge = values.topk(count).values[-1]
        above, tied = values > edge, values == edge
        part = (count - int(above.sum())) / int(tied.sum())  # of those at the edge
        found[share] = (int((wrong & above).sum()) + part * int((wrong & tied).sum())) / int(wrong.sum())
    return found
