"""Looks at a network that find, before a fit, what would go wrong in it without a word."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dubito.tensors.tree import Params


class Strangers(TorchFunctionMode):
    """Notes which of a network's own parameters, of those that are inferred, enter what has a slope: while others stand in their places
    none should. Who asks one for its size, type or device may do so."""

    def __init__(self, network: nn.Module, inferred: Params):
        super().__init__()
        self.names = {id(p): name for name, p in network.named_parameters() if name in inferred}
        self.found: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        results = out if isinstance(out, list | tuple) else (out,)
        if any(isinstance(one, Tensor) and one.requires_grad and id(one) not in self.names for one in results):
            for one in (*args, *(kwargs or {}).values()):
                for leaf in one if isinstance(one, list | tuple) else (one,):
                    if id(leaf) in self.names:
                        self.found.add(self.names[id(leaf)])
        return out
