"""The functions of a posterior, differentiable in the input, under the name that attacks have for them."""

from __future__ import annotations

from dubito.posteriors import Posterior
from dubito.posteriors.functions import Functions as Functions
from dubito.posteriors.functions import Mixed as Mixed


def functions(posterior: Posterior, *, how: str | None = None, draws: int | None = None, seed: int = 0) -> Functions | Mixed:
    """`posterior.functions(how, draws=draws, seed=seed)`."""
    return posterior.functions(how, draws=draws, seed=seed)
