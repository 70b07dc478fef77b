"""An exact posterior of the last layer, over features that are a point."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dubito.model.likelihoods import NOISE
from dubito.network.examples import Inputs, Targets, check_outputs, read_inputs
from dubito.posteriors.functions import Functions
from dubito.posteriors.posterior import Posterior
from dubito.posteriors.predict.conjugate import Head, conjugate, features
from dubito.posteriors.predict.sampled import sampled
from dubito.posteriors.predictive import LatentMixture, StudentT
from dubito.tensors import tree
from dubito.tensors.randomness import fresh_generator, generator
from dubito.tensors.tree import Buffers, Params

DRAWS = 100  # for how="sampled", where nobody says


@dataclass(frozen=True, repr=False)
class Conjugate(Posterior):
    r"""The Normal-inverse-gamma posterior of the last layer's weights and of the noise: what the neural linear model gives.

    With features :math:`\phi(x)` and outputs c, :math:`y_c = \phi^T w_c + \epsilon_c`:

    .. math:: w_c \mid \sigma_c^2 \sim N(m_c,\; \sigma_c^2 \Lambda^{-1}), \qquad \sigma_c^2 \sim \mathrm{InvGamma}(a_c, b_c)

    or, for a known noise, the Normal part alone. It is kept as a root, :math:`\Lambda^{-1} = R R^T`, which stays one however many
    observations are added. `params` holds all Bayesian parameters, the last layer's at their mean and the noise at
    :math:`\sqrt{b/a}`; the others are a point. `evidence` is :math:`\ln p(D)` given the features and the prior precision.
    """

    params: Params
    buffers: Buffers
    weight: str  # names of the last layer's parameters
    bias: str | None  # None where it has none; one that is not Bayesian is in `buffers`
    mean: Tensor  # m, [C, d], in float64 like all that follows; d counts a Bayesian bias
    root: Tensor  # R, [K, d, d]; K = 1 if all outputs share it, else C
    shape: Tensor | None  # a, [C], or [1] for a noise that outputs share; None if the noise is known
    rate: Tensor | None  # b, likewise
    evidence: float
    prior_precision: Tensor  # of the weights, in units of the noise's: w | sigma ~ N(0, sigma^2 / prior_precision), [K]

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """n joint draws of the last layer's weights and of the noise, if it is learned; the other leaves are the same in all."""
        drawn = self._drawn(n, generator or fresh_generator(self.mean.device))
        fixed = tree.repeat({name: leaf for name, leaf in self.params.items() if name not in drawn}, n)
        return {name: drawn[name] if name in drawn else fixed[name] for name in self.params}

    def _drawn(self, n: int, source: torch.Generator) -> Params:
        unit = torch.randn((n, *self.mean.shape), generator=source, dtype=torch.float64, device=source.device).to(self.mean)
        if self.shape is None or self.rate is None:
            variance = self._known.expand(n, -1)
        else:
            precision = torch._standard_gamma(self.shape.to(source.device).expand(n, -1), generator=source)
            # a weak prior may give a precision that is 0 in floating point
            variance = self.rate / precision.clamp_min(torch.finfo(torch.float64).tiny).to(self.rate)
        moved = unit @ self.root[0].mT if len(self.root) == 1 else torch.einsum("cij,ncj->nci", self.root, unit)
        drawn = self._leaves(self.mean + variance.sqrt().unsqueeze(-1) * moved)
        if self.shape is not None:
            drawn[NOISE] = 0.5 * variance.log().to(self.params[NOISE])
        return drawn

    def _leaves(self, weights: Tensor) -> Params:
        """Weights [..., C, d] as the parameters of the layer."""
        leaves = {self.weight: weights}
        if self.bias is not None and self.bias in self.params:
            leaves = {self.weight: weights[..., :-1], self.bias: weights[..., -1]}
        return {name: leaf.to(self.params[name]).clone(memory_format=torch.contiguous_format) for name, leaf in leaves.items()}

    @property
    def _known(self) -> Tensor:
        """The known variance of the noise, [C] or [1]."""
        likelihood = self.model.likelihood.gaussian
        assert likelihood is not None
        return torch.as_tensor(likelihood.scale, dtype=self.mean.dtype, device=self.mean.device).reshape(-1).square()

    @property
    def center(self) -> tuple[Params, Buffers]:
        """The features, with the last layer at its mean."""
        return self.params, self.buffers

    def _functions(self, how: str | None, draws: int | None, seed: int) -> Functions:
        self._only(how, "sampled", "point")
        return Functions(self.model, self.buffers, self.sample(draws or DRAWS, generator("cpu", seed, "conjugate")))

    def predict(
        self, x: Inputs, how: str | None = None, *, draws: int | None = None, memory: float | None = None, seed: int = 0
    ) -> LatentMixture | StudentT:
        """In one pass, exactly ("conjugate"): a Student-t, or a Gaussian for known noise. "sampled" averages `draws` of the weights,
        "point" is the network at their mean."""
        self._only(how, "conjugate", "sampled", "point", draws=draws)
        if how == "point":
            return sampled(self.model, x, shared={**self.buffers, **self.params}, memory=memory)
        if how == "sampled":
            stacked = self._drawn(draws or DRAWS, generator("cpu", seed, "conjugate"))
            shared = {**self.buffers, **{name: leaf for name, leaf in self.params.items() if name not in stacked}}
            return sampled(self.model, x, shared=shared, stacked=stacked, memory=memory)
        x = read_inputs(x, self.model.dtype, self.model.device)
        phi, offset = self._features(x)
        kind = torch.promote_types(phi.dtype, torch.float32)
        means, spread = conjugate(phi, self.mean, self.root, memory=memory)
        means, spread = (means + offset).unsqueeze(0).to(kind), spread.unsqueeze(0)
        check_outputs(x, means)
        if self.shape is None or self.rate is None:
            return LatentMixture(self.model.likelihood, means, (self._known * spread).to(kind))
        return StudentT(self.model.likelihood, means, spread.to(kind), self.shape, self.rate)

    def _features(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """phi(x), [B, *D, d], and what a bias that is not Bayesian adds to f, [C] or []."""
        x = read_inputs(x, self.model.dtype, self.model.device)
        head = Head(self.weight, self.bias)
        phi, _ = features(self.model, self.params, self.buffers, x, head)
        return phi, head.offset(self.buffers, self.mean)

    def update(self, x: Inputs, y: Targets) -> Conjugate:
        r"""The posterior after further observations, one after another, each in :math:`O(d^2)`.

        With :math:`v = R^T \phi`, :math:`s = 1 + v^T v` and the error :math:`e = y - \phi^T m`:

        .. math:: R' = R - \frac{(R v) v^T}{s + \sqrt s}, \quad m' = m + \frac{R v}{s} e, \quad a' = a + \tfrac12, \quad
            b' = b + \frac{e^2}{2 s},

        in which nothing cancels; the evidence grows by the log of the predictive density of y. Features and prior stay as they are.
        """
        phi, shift = self._features(x)
        f = phi.new_zeros((*phi.shape[:-1], len(self.mean)), dtype=torch.float64)
        targets = self.model.likelihood.target(tree.move(tree.tensors(y), self.model.device), f) - shift
        if not bool(torch.isfinite(targets).all()) or not bool(torch.isfinite(phi).all()):
            raise ValueError("the observations hold NaN or infinite values: remove those rows")
        mean, root, shape, rate = self.mean.clone(), self.root.clone(), self.shape, self.rate
        gained = torch.zeros_like(self.mean[0, 0])
        for row, target in zip(phi.to(mean).flatten(0, -2), targets.flatten(0, -2), strict=True):
            v = row @ root  # [K, d]
            gain, s = (root @ v.unsqueeze(-1)).squeeze(-1), 1 + v.square().sum(-1)  # [K, d], [K]
            error = target - mean @ row  # [C]
            if shape is None or rate is None:
                variance = self._known * s
                gained -= 0.5 * (error.square() / variance + (2 * math.pi * variance).log()).sum()
            else:
                p = StudentT(self.model.likelihood, (mean @ row).expand(1, 1, -1), (s - 1).expand(1, 1, len(mean)), shape, rate)
                gained += p.log_prob(target.unsqueeze(0)).sum()
                together = len(mean) / len(shape)  # outputs that share a noise all tell of it
                shape, rate = shape + 0.5 * together, rate + (0.5 * error.square() / s).reshape(len(shape), -1).sum(-1)
            mean += gain / s.unsqueeze(-1) * error.unsqueeze(-1)
            root -= gain.unsqueeze(-1) * v.unsqueeze(-2) / (s + s.sqrt()).reshape(-1, 1, 1)
        evidence = self.evidence + float(gained)
        return replace(self, mean=mean, root=root, shape=shape, rate=rate, evidence=evidence).centered()

    def centered(self) -> Conjugate:
        """With `params` at the center of the posterior."""
        params = {**self.params, **self._leaves(self.mean)}
        if self.shape is not None and self.rate is not None:
            params[NOISE] = (0.5 * (self.rate / self.shape).log()).to(params[NOISE])
        return replace(self, params=params)
