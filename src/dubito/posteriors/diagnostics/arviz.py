"""Draws as data of ArviZ, an optional dependency: pip install dubito[arviz]."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dubito.tensors.tree import Params

# our names of a sampler's records: those of ArviZ; other names stay
NAMES = {"acceptance": "acceptance_rate", "divergent": "diverging", "gradients": "n_steps", "depth": "tree_depth"}


def to_arviz(params: Params, *, chains: int = 1, trace: Params | None = None, predictions: Tensor | None = None) -> Any:
    """Draws chain after chain, leaves [S, ...], as ArviZ's DataTree: groups `posterior` and `sample_stats`.

    `predictions` [S, ...] become the variable "f" of the posterior. Look at these rather than at weights, which are symmetric.
    """
    try:
        from arviz_base import from_dict  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError("ArviZ is not installed: pip install dubito[arviz]") from None

    def _by_chain(leaf: Tensor) -> np.ndarray:
        leaf = leaf.detach().cpu()
        leaf = leaf.float() if leaf.dtype in (torch.bfloat16, torch.float16) else leaf  # numpy has no bfloat16
        return leaf.reshape(chains, -1, *leaf.shape[1:]).numpy()

    trace = trace or {}
    stats = {NAMES.get(name, name): _by_chain(leaf) for name, leaf in trace.items()}
    if "diverging" in stats:
        stats["diverging"] = stats["diverging"] > 0
    if "log_likelihood" in trace and "log_prior" in trace:
        stats["lp"] = _by_chain(trace["log_likelihood"].double() + trace["log_prior"].double())
    posterior = {name: _by_chain(leaf) for name, leaf in params.items()}
    if predictions is not None:
        posterior["f"] = _by_chain(predictions)
    return from_dict({"posterior": posterior, **({"sample_stats": stats} if stats else {})})
