"""Labels that are each on or off."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Bernoulli as BernoulliDistribution
from torch.distributions import Distribution, Independent

from dubito.model.likelihoods.likelihood import PREFIX, Likelihood, Uncertainty, average, entropy, log_average, positive, tempered
from dubito.tensors.tree import Params


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    r"""Each output is a label of its own: y_c ~ Bernoulli(sigmoid f_c). One output: binary; several: multi-label.

    Uncertainty is the sum of the labels' entropies. `scale=None` learns a noise level as in `Categorical`.
    """

    scale: float | None = 1.0

    @property
    def discrete(self) -> bool:
        """True: uncertainty is an entropy."""
        return True

    def __post_init__(self):
        positive(self.scale)

    def _logits(self, f: Tensor, params: Params) -> Tensor:
        return tempered(f, self.scale, params)

    def parameters(self, y: Tensor | None = None) -> Params:
        """`likelihood:log_scale`, 0, if the noise level is learned."""
        return {PREFIX + "log_scale": torch.zeros(1)} if self.scale is None else {}

    def __call__(self, f: Tensor, params: Params) -> Distribution:
        return Independent(BernoulliDistribution(logits=self._logits(f, params), validate_args=False), 1)

    def check(self, f: Tensor, y: Tensor) -> None:
        """Targets must be 0 or 1."""
        y = self.target(y, f)
        if not bool(((y == 0) | (y == 1)).all()):
            raise ValueError("the targets of Bernoulli are 0 or 1; for classes numbered 0 to C - 1 use Categorical")

    def log_prob(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """sum_c y_c log sigmoid(f_c) + (1 - y_c) log sigmoid(-f_c)."""
        logits = self._logits(f, params)
        return -F.binary_cross_entropy_with_logits(logits, y.expand_as(logits), reduction="none").sum(-1)

    def mean(self, f: Tensor, params: Params) -> Tensor:
        """P(y = 1 | f) = sigmoid(f)."""
        return torch.sigmoid(self._logits(f, params))

    def fisher(self, f: Tensor, params: Params, *, draws: int = 512) -> Tensor:
        """diag(p (1 - p))."""
        probs = self.mean(f, params)
        return torch.diag_embed(probs * (1 - probs) * self._logits(torch.ones_like(f), params) ** 2)

    def fisher_root(self, f: Tensor, params: Params) -> Tensor:
        """The root of a diagonal matrix."""
        return self.fisher(f, params).sqrt().movedim(-1, 0)  # it is diagonal

    def linked(self, f_mean: Tensor, f_cov: Tensor, params: Params, link: str) -> Tensor:
        """Probit: f / sqrt(1 + pi Var(f) / 8)."""
        if link != "probit":
            return super().linked(f_mean, f_cov, params, link)
        slope = self._logits(torch.ones_like(f_mean), params)
        variance = slope**2 * (f_cov if f_cov.ndim == f_mean.ndim else f_cov.diagonal(dim1=-2, dim2=-1))
        return self._logits(f_mean, params) / (1 + math.pi / 8 * variance).sqrt()

    @property
    def plain(self) -> Likelihood:
        """With noise level 1."""
        return Bernoulli(dim=self.dim)

    def off(self, f: Tensor, params: Params) -> Tensor:
        """P(y = 0 | f), with the digits that 1 - `mean` loses where a label is nearly sure to be on."""
        return self.mean(-f, params)

    def log_forecasts(self, f: Tensor, weights: Tensor, params: Params) -> Tensor:
        """The log odds of the mean probabilities."""
        logits = self._logits(f, params).double()
        return log_average(F.logsigmoid(logits), weights) - log_average(F.logsigmoid(-logits), weights)

    def uncertainty(self, f: Tensor, weights: Tensor, params: Params) -> Uncertainty:
        """Entropies of the labels, summed: of the mean probabilities (total), and their mean over draws (aleatoric)."""
        probs = torch.stack([self.off(f, params), self.mean(f, params)], -1)
        return Uncertainty.of(entropy(average(probs, weights)).sum(-1), average(entropy(probs), weights).sum(-1))
