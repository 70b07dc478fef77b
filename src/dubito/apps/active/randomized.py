"""Batches with noise on the scores: cheap, and less alike than the k best."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dubito.apps.active.acquisition import Choice, Scored, best, check_finite
from dubito.apps.active.measured import Measured
from dubito.apps.active.view import View
from dubito.tensors.checks import at_least, one_of


@dataclass(frozen=True)
class Randomized:
    r"""Draw k candidates without replacement, with probabilities that grow with their scores (Kirsch et al. 2023).

    With :math:`\epsilon_i` standard Gumbel noise, the k largest of these are taken:

    - "power": :math:`\beta \ln s_i + \epsilon_i`, :math:`P(i) \propto s_i^\beta`; what scores 0 comes last.
    - "softmax": :math:`\beta s_i + \epsilon_i`, :math:`P(i) \propto e^{\beta s_i}`.
    - "softrank": :math:`-\beta \ln r_i + \epsilon_i` with the ranks 1, 2, ..., :math:`P(i) \propto r_i^{-\beta}`.

    The best k of a score may be k copies of one input; these are not, at no cost. `coldness` is :math:`\beta`: 0 is random, infinity
    the k best.

    >>> power = Randomized(Measured("bald"), "power", coldness=2.0)
    >>> noisy = power.perturbed(torch.tensor([0.0, 1.0, 2.0]).repeat(10_000, 1), torch.Generator().manual_seed(0))
    >>> torch.bincount(noisy.argmax(1), minlength=3).div(10_000).round(decimals=1)       # in proportion to 0, 1 and 4
    tensor([0.0000, 0.2000, 0.8000])
    """

    acquisition: Scored = Measured("bald")
    how: Literal["power", "softmax", "softrank"] = "power"
    coldness: float = 1.0

    def __post_init__(self):
        one_of(("power", "softmax", "softrank"), how=self.how)
        at_least(0, coldness=self.coldness)
        if not hasattr(self.acquisition, "scores"):
            raise TypeError(
                f"Randomized needs an acquisition with scores of single inputs, such as Measured('bald'); got {self.acquisition!r}"
            )

    def perturbed(self, scores: Tensor, generator: torch.Generator) -> Tensor:
        """Scores [..., N] after the noise."""
        values = scores.double()
        if self.coldness == math.inf:  # no noise is left, and the products below would all be infinite: ties, in random order
            return values
        if self.how == "power":
            values = values.clamp_min(0).log()
        elif self.how == "softrank":
            values = -(values.argsort(-1, descending=True).argsort(-1) + 1).double().log()
        exponential = torch.empty(scores.shape, dtype=torch.float64).exponential_(generator=generator)
        if self.coldness:  # 0 times the logarithm of 0 is to be 0
            return self.coldness * values - exponential.log().to(values.device)
        return -exponential.log().to(values.device)

    def scores(self, view: View, generator: torch.Generator) -> Tensor:
        """Scores of the candidates after the noise, [N]."""
        return self.perturbed(self.acquisition.scores(view, generator), generator)

    def choose(self, view: View, k: int, generator: torch.Generator) -> Choice:
        """The k candidates with the largest scores after the noise, and their scores without it."""
        plain = self.acquisition.scores(view, generator)
        check_finite(plain)  # ranks of NaN are numbers like all others
        chosen = best(self.perturbed(plain, generator), k, generator).positions
        return Choice(chosen, plain[chosen])
