r"""As many bits as the posterior allows.

A weight that is known up to a standard deviation :math:`\sigma` needs no more digits than that. All weights of a tensor are whole
multiples of one step

.. math:: \Delta = \tfrac12\, 2^{1 - t} \le s \Big( \frac1n \sum_i \sigma_i^{-2} \Big)^{-1/2},

the unit round-off of t bits, at most s standard deviations. The mean is over precisions, so that rounding n weights costs at most
:math:`n s^2 / 24` nats of log posterior density, in expectation. The shortest description of data and weights together has
:math:`s = \sqrt{12}`, where a bit saved in a weight costs as much in the error (Hinton & van Camp 1993); a network that was not trained
with noise on its weights wants finer steps to stay as good as it was.
"""

from __future__ import annotations

import math

from torch import Tensor

from dubito.tensors.tree import Params

FINEST = 23  # bits below the leading one, those of a float32


def exponents(mean: Params, variance: Params, *, step: float = 1.0) -> dict[str, int]:
    """By weight, the t of its step 2^-t. Weights that are zero do not count, unless all are, nor do those without variance. A tensor
    without any has no step: it is not to be rounded.

    >>> import torch
    >>> exponents({"w": torch.tensor([1.0, -2.0])}, {"w": torch.tensor([0.04, 0.04])})      # 2^-3 is the first below 0.2
    {'w': 3}
    """
    if not step > 0:
        raise ValueError(f"step is a positive number of posterior standard deviations; got {step}")
    found = {}
    for name, leaf in variance.items():
        value, spread = mean[name].detach().double(), leaf.detach().double()
        largest = float(value.abs().max()) if value.numel() else 0.0
        counts = (spread > 0) & ((value != 0) | (largest == 0))
        if not bool(counts.any()):
            continue
        width = step * float((1 / spread[counts]).mean()) ** -0.5
        finest = FINEST - math.floor(math.log2(largest)) if largest else 120
        found[name] = min(math.ceil(-math.log2(width) - 1e-9), finest, 120)
    return found


def whole(value: Tensor, t: int) -> Tensor:
    """The multiples of 2^-t that are nearest, as whole numbers in float64."""
    return (value.detach().double() * 2.0**t).round()


def rounded(value: Tensor, t: int) -> Tensor:
    """The nearest multiples of 2^-t.

    >>> import torch
    >>> rounded(torch.tensor([0.3, -0.6]), 1)
    tensor([ 0.5000, -0.5000])
    """
    return (whole(value, t) * 2.0**-t).to(value.dtype)


def width(value: Tensor, t: int | None) -> int:
    """Bits for each number of a tensor: a sign and the magnitude; of one that was not rounded, those of its dtype."""
    if t is None:
        return 8 * value.dtype.itemsize
    largest = int(whole(value, t).abs().max()) if value.numel() else 0
    return 1 + largest.bit_length() if largest else 0
