"""Look at a network before a fit, in two runs of it, and refuse what would go wrong later without an error.

The first run is on a whole batch in eval mode (`run_batch`). The second is forwards and backwards (`run_backward`) on two of its
examples, in reversed order: it finds weights that cannot be replaced and layers that are computed again in the backward pass, and its
outputs tell whether the network is random or mixes the examples of a batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from dubito.network.weights import Watch, in_mode
from dubito.tensors import tree
from dubito.tensors.randomness import fork_rng
from dubito.tensors.tree import Params

Run = Callable[[Params, Any], Tensor]  # (weights, inputs) to outputs [B, *D, C], in the mode the network is in
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
TOLERANCE = 1e-2  # relative difference between outputs that count as equal


Layer = TypeVar("Layer", bound=nn.Module)


def layers_of(network: nn.Module, kinds: type[Layer] | tuple[type[Layer], ...]) -> dict[str, Layer]:
    """The layers of some kinds by name, in the order of the network.

    >>> layers_of(nn.Sequential(nn.Linear(1, 2), nn.ReLU()), nn.ReLU)
    {'1': ReLU()}
    """
    return {name: module for name, module in network.named_modules() if isinstance(module, kinds)}


def run_batch(network: nn.Module, run: Run, params: Params, x: Any) -> Tensor:
    """The outputs for a whole batch in eval mode, without gradients. Inputs that the network does not take, or changes in place, are
    an error."""
    x = tree.apply_leaves(torch.clone, x)
    versions, sums = [leaf._version for leaf in tree.leaves(x)], _sums(params)
    with torch.no_grad(), in_mode(network, False):
        f = run(params, x)
    if versions != [leaf._version for leaf in tree.leaves(x)]:
        raise ValueError(
            "the network changes its input in place, so a second pass over the same batch would see another input: write "
            "x = x - mean instead of x -= mean, and no inplace=True on the first layer"
        )
    if written := [name for name, after in _sums(params).items() if after != sums[name] and after == after]:
        raise ValueError(
            f"the network writes into its own weights when it is called ({', '.join(written[:3])}), so that it keeps none that it is "
            "given: if it does so in its first call only, call it on a batch before you make a model of it; else make them buffers"
        )
    if f.isnan().any() and any(leaf.is_floating_point() and not leaf.isfinite().all() for leaf in tree.leaves(x)):
        raise ValueError(
            "the inputs hold NaN or infinity, and the network turns them into NaN: replace such values, x.nan_to_num(0.0), or drop "
            "those rows"
        )
    return f


def _sums(params: Params) -> dict[str, float]:
    """The sum of every leaf, in which a change shows that `leaf.data` hides from torch's count of versions."""
    with torch.no_grad():
        return {name: float(leaf.sum(dtype=torch.float64)) for name, leaf in params.items()}


def run_backward(network: nn.Module, run: Run, params: Params, x: Any, *, whole: bool = False) -> Tensor | None:
    """The outputs for the second and the first example of a batch, in this order, or for the `whole` batch, after a pass forwards and
    backwards.

    The network is in train mode, as some use activation checkpointing only there, except for torch's own layers, which are
    deterministic in eval mode. None if the network does not take so few examples, or is compiled: other sizes would compile it again.
    """
    if any(isinstance(m, torch.jit.ScriptModule) or hasattr(m, "_orig_mod") for m in network.modules()):
        return None
    live = {name: leaf.detach().clone().requires_grad_(leaf.is_floating_point()) for name, leaf in params.items()}
    uses, repeated, output, blocked = DirectUses(network, params), set[str](), None, list[str]()
    with warnings.catch_warnings(), fork_rng(), torch.enable_grad(), in_mode(network, True), _torch_layers_in_eval_mode(network):
        warnings.simplefilter("ignore")
        try:
            x = x if whole else tree.apply_leaves(lambda leaf: leaf[:2].flip(0) if leaf.ndim else leaf, x)
            with uses:
                f = run(live, x)
            output, reached = f.detach(), {n: leaf for n, leaf in live.items() if leaf.requires_grad and ":" not in n}
            if f.requires_grad:
                with _recording_calls(network, repeated):
                    slopes = torch.autograd.grad(f.float().sum(), list(reached.values()), allow_unused=True)
                reached = {name: leaf for (name, leaf), slope in zip(reached.items(), slopes, strict=True) if slope is None}
            if reached:  # not used, or used without a gradient
                moved = {name: leaf.detach() + 1 for name, leaf in reached.items()}
                same = close(run({**live, **moved}, x).detach(), output) or not close(run(live, x).detach(), output)
                blocked = [] if same else list(reached)
        except Exception as error:  # it may not take so few; the whole batch it has taken
            repeated |= {"parts of itself"} if "torch.utils.checkpoint" in str(error) else set()
    if uses.names_used:
        raise ValueError(
            f"the network uses {sorted(uses.names_used)} by a reference of its own (a list, a closure), so that it would keep "
            "the weights that it has now: write self.layer.weight in forward, and keep lists of weights in an nn.ParameterList"
        )
    if repeated:
        raise ValueError(
            f"the network computes {', '.join(sorted(repeated))} again in the backward pass (activation checkpointing), when its "
            "original weights are back in place: turn that off, as network.gradient_checkpointing_disable(), and use smaller "
            "batches, or fit(accumulate=...), to save memory"
        )
    if blocked:
        warnings.warn(
            f"The outputs depend on {blocked[:5]} but have no gradient there (detach, no_grad, item() or a comparison in forward), "
            "so methods that follow gradients learn nothing of these weights. Leave them out by only=..., or remove what cuts the "
            "gradient.",
            stacklevel=6,  # the call of fit
        )
    return output


def check_embeddings(network: nn.Module, params: Params) -> None:
    """Refuse embeddings among `params` whose gradients are not those of a function: with `max_norm` or `scale_grad_by_freq`."""
    inferred = {id(p) for name, p in network.named_parameters() if name in params}
    for name, module in layers_of(network, EMBEDDINGS).items():
        if id(module.weight) in inferred and (module.max_norm is not None or module.scale_grad_by_freq):
            raise ValueError(
                f"the embedding {name!r} has max_norm or scale_grad_by_freq, with which its gradient is not that of any posterior: "
                "leave them out (a prior holds weights near zero)"
            )


def warn_of_gradient_hooks(network: nn.Module, params: Params) -> None:
    """Warn of hooks on the gradients of `params`, which are never called."""
    hooked = [name for name, p in network.named_parameters() if name in params and p._backward_hooks]
    if hooked:
        warnings.warn(
            f"hooks on the gradients of {hooked} will not be called, because other tensors take the place of these parameters: to hold "
            "some weights fixed, freeze them (requires_grad=False, or only=...) or mask them in forward",
            stacklevel=4,  # of who calls `fit`, which calls `Model.check`
        )


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two outputs are equal up to 1 % of the value or of the largest value."""
    if a.shape != b.shape:
        return False
    largest = float(b.detach().abs().nan_to_num(0.0).max())
    return torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE * largest, equal_nan=True)


class DirectUses(Watch):
    """Notes which of a network's own parameters, of those that are inferred, enter a computation with gradients: while other weights
    are in their place none should. Reading a parameter's size, type or device is fine."""

    def __init__(self, network: nn.Module, inferred: Params):
        super().__init__({name: p for name, p in network.named_parameters() if name in inferred})
        self.names_used: set[str] = set()

    def call(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of a call, whose weights are noted."""
        out = func(*args, **kwargs)
        if any(result.requires_grad and id(result) not in self.names for result in tree.leaves(out)):
            self.names_used.update(self.used((args, kwargs)))
        return out


@contextmanager
def _torch_layers_in_eval_mode(network: nn.Module) -> Iterator[None]:
    """Dropout, batch normalization and the like in eval mode, the user's own modules as they are."""
    layers = [(m, m.training) for m in network.modules() if type(m).__module__.startswith("torch.nn.")]
    try:
        for layer, _ in layers:
            layer.training = False
        yield
    finally:
        for layer, training in layers:
            layer.training = training


@contextmanager
def _recording_calls(network: nn.Module, names: set[str]) -> Iterator[None]:
    """Add the name of every module of the network that is called meanwhile."""
    known = {id(module): name for name, module in network.named_modules()}
    handle = register_module_forward_pre_hook(lambda module, _: names.add(known[id(module)]) if id(module) in known else None)
    try:
        yield
    finally:
        handle.remove()
