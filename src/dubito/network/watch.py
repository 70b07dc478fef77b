"""A watcher of torch calls: what a network computes, whatever its Python looks like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


class Watch(TorchFunctionMode):
    """Sees every torch function that is called inside of it, and knows weights by name. Subclasses override `call`.

    >>> import torch
    >>> class Count(Watch):
    ...     calls = 0
    ...     def call(self, func, args, kwargs):
    ...         self.calls += bool(self.used((args, kwargs)))
    ...         return func(*args, **kwargs)
    >>> layer = torch.nn.Linear(2, 2)
    >>> with Count(dict(layer.named_parameters())) as watch:
    ...     _ = layer(torch.zeros(1, 2)).relu()
    >>> watch.calls
    1
    """

    def __init__(self, weights: Mapping[str, Tensor]):
        super().__init__()
        self.names = {id(leaf): name for name, leaf in weights.items()}

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return self.call(func, args, kwargs or {})

    def call(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of a call."""
        return func(*args, **kwargs)

    def name(self, value: object) -> str | None:
        """The name of a weight; None of anything else."""
        return self.names.get(id(value))

    def used(self, value: Any) -> list[str]:
        """The names of the weights in nested arguments, in order."""
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list | tuple):
            return [name for item in value for name in self.used(item)]
        return [self.names[id(value)]] if id(value) in self.names else []
