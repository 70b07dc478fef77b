"""Run a network with other weights, in another mode, one thread at a time; then everything is as before.

`Watch` sees every torch function that a network calls, whatever its Python looks like.
"""

from __future__ import annotations

import copy
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import maybe_current_level
from torch.overrides import TorchFunctionMode

from dubito.tensors.tree import Params

_LOCKS: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()  # pyright: ignore[reportGeneralTypeIssues]
_LOCKING = threading.Lock()


def exclusive(network: nn.Module) -> AbstractContextManager:
    """For one thread at a time: who runs a network with other weights or in another mode must have it for itself."""
    try:
        return _LOCKS[network]
    except KeyError:
        with _LOCKING:
            return _LOCKS.setdefault(network, threading.RLock())


@contextmanager
def in_mode(network: nn.Module, train: bool) -> Iterator[None]:
    """The network in train or eval mode for a while. `network.train` is called, so a module's own idea of it is respected."""
    with exclusive(network):
        before = [(module, module.training) for module in network.modules()]
        if all(training == train for _, training in before):
            yield
            return
        try:
            network.train(train)
            yield
        finally:
            for module, training in before:
                module.training = training


@contextmanager
def with_weights(network: nn.Module, weights: Params) -> Iterator[None]:
    """The network with other tensors in the places of its own, for a while; what it makes of its buffers goes into `weights`.

    This is what `torch.func.functional_call` does, in half the time, which for small networks is a tenth of a training step. Tied
    parameters have one name, that of their first place, and are swapped in all.
    """
    names: dict[int, str] = {}
    places: list[tuple[dict[str, Any], str, Tensor, str]] = []
    recurrent: list[tuple[nn.RNNBase, Any, Any]] = []  # these keep a list of their weights
    written: list[
        tuple[dict[str, Any], dict[str, Tensor]]
    ] = []  # what hooks before a pass make of weights: pruned or normed ones
    with exclusive(network), _without_memory(network), as_written() if "torch._dynamo" in sys.modules else nullcontext():
        for prefix, module in network.named_modules():
            if isinstance(module, nn.RNNBase):
                recurrent.append((module, module._flat_weights, module._flat_weight_refs))
            if module._forward_pre_hooks:
                written.append((vars(module), _made(module)))
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    if tensor is not None:
                        name = names.setdefault(id(tensor), f"{prefix}.{key}" if prefix else key)
                        if name in weights:
                            places.append((tensors, key, tensor, name))
        try:
            for tensors, key, _, name in places:
                tensors[key] = weights[name]
            with _recurrent([module for module, _, _ in recurrent]) if recurrent else nullcontext():
                yield
        finally:
            for tensors, key, tensor, name in places:
                weights[name], tensors[key] = tensors[key], tensor
            for module, flat, references in recurrent:
                module._flat_weights, module._flat_weight_refs = flat, references
            for attributes, before in written:
                attributes.update(before)


@contextmanager
def as_written() -> Iterator[None]:
    """Compiled modules run as their Python is written where a mode or a transform of torch looks on: compiled code would not show its
    calls, and be compiled again for each of them."""
    modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    if modes == 0 and maybe_current_level() is None:
        yield
        return
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")
        yield


MEMORY = "_memoize_cache"  # where modules of gpytorch keep what they have computed of their weights


@contextmanager
def _without_memory(network: nn.Module) -> Iterator[None]:
    """What gpytorch has computed of other weights is not used, and what it computes meanwhile is forgotten."""
    modules = list(network.modules()) if "linear_operator" in sys.modules else []
    before = [(module, vars(module).pop(MEMORY)) for module in modules if MEMORY in vars(module)]
    try:
        yield
    finally:
        for module in modules:
            vars(module).pop(MEMORY, None)
        for module, memory in before:
            vars(module)[MEMORY] = memory


@contextmanager
def _recurrent(layers: list[nn.RNNBase]) -> Iterator[None]:
    """nn.LSTM and its kin with the weights that they have now.

    Left to themselves they lay weights that they have not seen before side by side for cuDNN, in new memory, and move the *tensors that
    were given* there: a recorded CUDA graph would go on with the old memory, which is anyone's by then. So that they do not, they are
    told that these are what they had; cuDNN then makes a copy of its own, and says so. In eval mode it keeps nothing for a backward
    pass, and refuses it: where one may come, torch's own kernels run.
    """
    cudnn = torch.backends.cudnn
    refuses = cudnn.enabled and torch.is_grad_enabled() and not all(layer.training for layer in layers)
    for layer in layers:
        layer._flat_weights = [getattr(layer, name, None) for name in layer._flat_weights_names]
        layer._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in layer._flat_weights]
    with warnings.catch_warnings(), cudnn.flags(enabled=False) if refuses else nullcontext():
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        yield


def _made(module: nn.Module) -> dict[str, Tensor]:
    """What hooks make of a module's weights, beside them: a pruned or normed one."""
    tensors = [(key, value) for key, value in vars(module).items() if isinstance(value, Tensor)]
    kept = module._parameters
    return {key: value for key, value in tensors if not value.is_leaf or f"{key}_orig" in kept or f"{key}_g" in kept}


def copy_network(network: nn.Module) -> nn.Module:
    """A deep copy. What pruning and old norms keep beside their weights is of a graph, which torch does not copy: it is detached."""
    made = {
        id(v): v.detach().clone() for m in network.modules() for v in vars(m).values() if isinstance(v, Tensor) and not v.is_leaf
    }
    with exclusive(network), _without_memory(network):
        return copy.deepcopy(network, made)


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
