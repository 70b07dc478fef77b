"""A posterior as a model of BoTorch, for its acquisition functions and optimizers (`pip install dubito[botorch]`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dubito.posteriors import Posterior
from dubito.posteriors.functions import Functions, Mixed, UnequalWeights
from dubito.tensors.checks import require


def surrogate(posterior: Posterior, *, draws: int = 64, how: str | None = None, seed: int = 0) -> Any:
    """A `botorch.models.model.Model` made of `draws` functions of the posterior, the same ones at every call.

    Its posterior at X [..., q, d] is an `EnsemblePosterior` [..., S, q, m] of f without noise, as acquisition functions expect: joint
    over the q inputs and differentiable in X. All draws of a sampler or members of an ensemble are used, up to `draws`.

        from botorch.acquisition.logei import qLogExpectedImprovement
        from botorch.optim import optimize_acqf

        model = surrogate(posterior)
        x, value = optimize_acqf(qLogExpectedImprovement(model, best_f=1.0), bounds, q=2, num_restarts=4, raw_samples=64)
    """
    try:
        from botorch.models.model import Model  # pyright: ignore[reportMissingImports]
        from botorch.posteriors.ensemble import EnsemblePosterior  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("surrogate needs BoTorch: pip install dubito[botorch]") from error
    likelihood = posterior.model.likelihood
    require(
        not likelihood.discrete, f"a surrogate needs a regression; got {type(likelihood).__name__}: use a Gaussian likelihood"
    )
    drawn = draw_functions(posterior, how=how, draws=draws, seed=seed)
    like = next(posterior.model.network.parameters())

    class Surrogate(Model):
        """The drawn functions with the interface of a BoTorch model."""

        def __init__(self):
            super().__init__()
            self.functions, self._width = drawn, 1

        @property
        def num_outputs(self) -> int:
            """The number of outputs m, as of the last call of `posterior`."""
            return self._width

        @property
        def batch_shape(self) -> torch.Size:
            """Empty: the model has no batch dimensions."""
            return torch.Size()

        def posterior(
            self,
            X: Tensor,
            output_indices: list[int] | None = None,
            observation_noise: bool | Tensor = False,
            posterior_transform: Callable | None = None,
        ) -> Posterior:
            """The values of the functions at X [..., q, d], as an `EnsemblePosterior` [..., S, q, m]."""
            if observation_noise is not False:
                raise NotImplementedError("a surrogate gives f without the noise of observations: leave out observation_noise")
            p = self.functions(X.reshape(-1, X.shape[-1]).to(like))
            values = p.means.to(X.dtype)  # [S, N, m]
            self._width = values.shape[-1]
            values = values if output_indices is None else values[..., output_indices]
            values = values.reshape(len(values), *X.shape[:-1], values.shape[-1]).movedim(0, -3)  # [..., S, q, m]
            weights = p.draw_weights.to(values)
            options = {} if torch.allclose(weights, weights.mean()) else {"weights": weights}
            if options and "weights" not in inspect.signature(EnsemblePosterior).parameters:
                raise ImportError("draws with unequal weights need a BoTorch whose EnsemblePosterior has weights: upgrade it")
            ensemble = EnsemblePosterior(values, **options)
            return ensemble if posterior_transform is None else posterior_transform(ensemble)

    return Surrogate().to(like.device)


def draw_functions(posterior: Posterior, *, draws: int, how: str | None = None, seed: int = 0) -> Functions | Mixed:
    """`draws` functions of a posterior, or all of them if they have unequal weights."""
    try:
        return posterior.functions(how, draws=draws, seed=seed)
    except UnequalWeights:
        return posterior.functions(how, seed=seed)
