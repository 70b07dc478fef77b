"""What belongs to the user, before and after a call: a fit or a prediction must leave all of it as it was."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

from dubito import Model
from dubito.testing.moments import require


def tensors(held: Any) -> list[torch.Tensor]:
    """Every tensor that a posterior holds: its weights, and all that is in its covariance, its evidence and its members."""
    if isinstance(held, torch.Tensor):
        return [held]
    if isinstance(held, Mapping):
        held = list(held.values())
    elif is_dataclass(held):
        held = [getattr(held, entry.name) for entry in fields(held) if entry.name != "model"]
    return [leaf for item in held for leaf in tensors(item)] if isinstance(held, list | tuple) else []


def same_bits(first: Any, second: Any) -> bool:
    """Whether two posteriors hold the same tensors, bit for bit."""
    one, other = tensors(first), tensors(second)
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def snapshot(model: Model) -> dict[str, list[Any]]:
    """All that is the user's: weights, buffers, gradients, modes, flags, hooks, attributes, and the global random generators."""
    net = model.network
    state = random.getstate()
    return {
        "weights and buffers": copy.deepcopy(list(net.state_dict().values())),
        "identity of the weights": [id(p) for p in net.parameters()] + [id(b) for b in net.buffers()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in net.parameters()],
        "requires_grad": [p.requires_grad for p in net.parameters()],
        "train or eval modes": [m.training for m in net.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()],
        "attributes of the modules": [sorted(m.__dict__) for m in net.modules()],
        "torch's random state": [torch.get_rng_state()],
        "NumPy's random state": [torch.from_numpy(np.random.get_state()[1].astype(np.int64))],  # noqa: NPY002  # pyright: ignore
        "Python's random state": [state],
    }


def check_same(before: Mapping[str, list[Any]], after: Mapping[str, list[Any]], when: str = "a fit and predictions") -> None:
    """Two snapshots are equal."""
    for key, values in before.items():
        require(len(values) == len(after[key]), f"{when} changed the number of {key}")
        for old, new in zip(values, after[key], strict=True):
            same = torch.equal(old, new) if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) else old == new
            require(same, f"{when} changed {key}")
