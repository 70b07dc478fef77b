"""A posterior as a model of BoTorch, for its acquisition functions and optimisers (`pip install dubito[botorch]`)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from dubito.posteriors import Posterior
from dubito.posteriors.functions import Functions, Mixed, UnequalWeights


def surrogate(posterior: Posterior, *, draws: int = 64, how: str | None = None, seed: int = 0) -> Any:
    """A `botorch.models.model.Model` made of `draws` functions of the posterior, the same at every call.

    Its posterior at X [..., q, d] is an `EnsemblePosterior` [..., S, q, m]: joint over the q inputs, differentiable in X, and of f
    without noise, as acquisition functions want it. All draws of a sampler or members of an ensemble are used if there are no more.

        from botorch.acquisition.logei import qLogExpectedImprovement
        from botorch.optim import optimize_acqf

        model = surrogate(posterior)
        x, value = optimize_acqf(qLogExpectedImprovement(model, best_f=1.0), bounds, q=2, num_restarts=4, raw_samples=64)
    """
    try:
        from botorch.models.model import Model  # pyright: ignore[reportMissingImports]
        from botorch.posteriors.ensemble import EnsemblePosterior  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("a surrogate needs BoTorch: pip install dubito[botorch]") from error
    if posterior.model.likelihood.discrete:
        raise ValueError("a surrogate is of numbers, and this model has classes: use a Gaussian likelihood")
    found = drawn(posterior, how=how, draws=draws, seed=seed)
    like = next(posterior.model.network.parameters())

    class Surrogate(Model):
        """What BoTorch asks of a model."""

        @property
        def num_outputs(self) -> int:
            return self._width

        @property
        def batch_shape(self) -> torch.Size:
            return torch.Size()

        def __init__(self):
            super().__init__()
            self.functions, self._width = found, 1

        def posterior(
            self,
            X: Tensor,
            output_indices: list[int] | None = None,
            observation_noise: bool | Tensor = False,
            posterior_transform: Any = None,
        ) -> Any:
            if observation_noise is not False:
                raise NotImplementedError("a surrogate is of f, without the noise of observations: leave out observation_noise")
            p = self.functions(X.reshape(-1, X.shape[-1]).to(like))
            values = p.means.to(X.dtype)  # [S, N, m]
            self._width = values.shape[-1]
            values = values if output_indices is None else values[..., output_indices]
            values = values.reshape(len(values), *X.shape[:-1], values.shape[-1]).movedim(0, -3)  # [..., S, q, m]
            weights = p.draw_weights.to(values)
            if torch.allclose(weights, weights.mean()):
                made = EnsemblePosterior(values)
            elif "weights" in inspect.signature(EnsemblePosterior).parameters:
                made = EnsemblePosterior(values, weights=weights)
            else:
                raise ImportError("draws with unequal weights need a BoTorch whose EnsemblePosterior has weights: upgrade it")
            return made if posterior_transform is None else posterior_transform(made)

    made = Surrogate()
    made.to(like.device)
    return made


def drawn(posterior: Posterior, *, draws: int, how: str | None = None, seed: int = 0) -> Functions | Mixed:
    """So many functions of a posterior; of draws with weights of their own, all."""
    try:
        return posterior.functions(how, draws=draws, seed=seed)
    except UnequalWeights:
        return posterior.functions(how, seed=seed)
