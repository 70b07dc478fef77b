"""Predictions in one pass of moments, forwards (`streamlined`) or with sweeps backwards (`adjoint`): what the forms share."""

from __future__ import annotations

from torch import Tensor

from dubito.network.examples import Inputs
from dubito.posteriors.predict.adjoint import adjoint
from dubito.posteriors.predict.streamlined import Streamlined
from dubito.posteriors.predictive import LatentMixture
from dubito.tensors.checks import require

ONE_PASS = ("streamlined", "adjoint")


def one_pass(
    engine: Streamlined,
    x: Inputs,
    how: str,
    *,
    draws: int | None = None,
    memory: float = 1.0,
    seed: int = 0,
    x_var: Tensor | None = None,
    rank: int | None = None,
    top: int | None = None,
) -> LatentMixture:
    """The predictive at x; `draws` is how often an operation without a rule is drawn."""
    if how == "streamlined":
        return engine.predict(x, rank=rank, x_var=x_var, fallback=draws or 0)
    return adjoint(engine, x, x_var=x_var, memory=memory, seed=seed, fallback=draws or 0, top=top)


def refuse_one_pass_options(x_var: Tensor | None, rank: int | None, top: int | None) -> None:
    """Raise where another way to predict is given options that are for one pass."""
    unused = x_var is None and rank is None and top is None
    require(unused, 'x_var, rank and top are for predictions in one pass: how="streamlined" or how="adjoint"')
