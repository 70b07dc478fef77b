r"""Prediction by sampling: the network is run with S draws of its weights, or with S draws of its dropout masks.

All draws run in one batched pass (`torch.func.vmap`), where only what depends on a draw is computed S times: layers before the first
random one run once. When the draws do not fit in memory they run in chunks, and the common part is remembered between the chunks.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.func import vmap
from torch.overrides import TorchFunctionMode

from dubito.curvature.memory import available
from dubito.model import Model
from dubito.model.likelihoods import likelihood_params
from dubito.network.examples import Inputs, are_vectors, check_outputs, read_inputs
from dubito.network.recurrent import PLAIN
from dubito.network.weights import in_mode
from dubito.posteriors.predict.dropout import Dropout, Folding, Masks
from dubito.posteriors.predictive import LatentMixture
from dubito.tensors import tree
from dubito.tensors.covariances import Covariance
from dubito.tensors.randomness import derive_seed, fork_rng
from dubito.tensors.tree import Buffers, Params

GIGABYTE = 2**30
IN_PLACE = re.compile(r"[^_]_$|^__i(?!n)\w+__$|^__setitem__$")  # relu_, __iadd__, __setitem__


def room(memory: float | None, device: torch.device) -> float:
    """Gigabytes that a prediction may take beside its result: as it is asked for; if nothing is, 1, or on a GPU an eighth of its
    memory, but at most half of what is free."""
    if memory is not None or device.type != "cuda":
        return 1.0 if memory is None else memory
    eighth, free = torch.cuda.get_device_properties(device).total_memory / 8, available(device)
    return min(eighth, eighth if free is None else free / 2) / GIGABYTE


def _batched(value: Any) -> bool:
    """Whether a tensor anywhere in a call's arguments differs between draws."""
    return any(map(is_batchedtensor, tree.leaves(value)))


def _bytes(value: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(value) if is_batchedtensor(leaf))


@dataclass
class Known:
    """What earlier predictions of the same kind have shown of a network."""

    folding: Folding
    peak: int = 0  # bytes that one draw needs


# by network, then by the shapes of the inputs and what is random
_KNOWN: WeakKeyDictionary[nn.Module, dict[tuple, Known]] = WeakKeyDictionary()


class Common(TorchFunctionMode):
    """Remembers, call by call, what a pass computed that is the same for all draws, and gives it back in the next pass.

    Also measures the memory that one draw needs, and unrolls recurrent layers, for which torch has no batching rule.
    """

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[Callable, Any]] = []
        self.replay = self.diverged = self.seen = False
        self.position = self.peak = 0

    def again(self) -> Common:
        """Itself, at the start of another pass, in which what is known is not computed again."""
        self.replay, self.position, self.seen = bool(self.calls) and not self.diverged, 0, False
        return self

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if _batched(args) or _batched(kwargs):
            self.seen = True
            result = PLAIN[func](*args) if func in PLAIN else func(*args, **kwargs)
            if not self.replay:
                self.peak = max(self.peak, _bytes(args) + _bytes(result))
            return result
        if self.replay and self.position < len(self.calls) and self.calls[self.position][0] == func:
            self.position += 1
            return self.calls[self.position - 1][1]
        result = func(*args, **kwargs)
        if self.seen and IN_PLACE.search(getattr(func, "__name__", "")):
            self.diverged = True  # it may change what an earlier, random call has read: nothing is reused
        if not any(True for _ in tree.leaves(result)) or _batched(result):
            return result
        if self.replay:  # the pass took another way than the first one: from here on nothing is reused
            self.replay, self.diverged = False, True
            return result
        self.calls.append((func, result))
        return result


class Stack:
    """Tensors [n, ...] put one after another into one of known length, so that they are not held twice; in full precision, which
    probabilities and variances need."""

    def __init__(self, count: int):
        self.count, self.done = count, 0
        self.whole = torch.empty(0)

    def add(self, part: Tensor) -> None:
        """The next n."""
        part = tree.full_precision(part)
        if not self.done:
            self.whole = part if len(part) >= self.count else part.new_empty(self.count, *part.shape[1:])
        if part is not self.whole:
            self.whole[self.done : self.done + len(part)] = part
        self.done += len(part)


def draw_groups(draws: int, covariance: Covariance, memory: float) -> list[int]:
    """The sizes of groups of draws of the weights, each of which takes a third of the memory in gigabytes. They do not depend on x,
    and whole portions of `Covariance.draws` are in a group, so that all x and all memories see the same functions."""
    step = covariance.drawn_at_once
    group = step * max(1, int(memory * GIGABYTE / 3 / (4 * max(1, covariance.size))) // step)
    return [min(group, draws - first) for first in range(0, draws, group)]


def read_examples(model: Model, x: Inputs, params: Params, buffers: Buffers) -> Inputs:
    """Inputs as tensors on the model's device. A vector may be one example without its batch axis, which a pass through the network
    tells."""
    x = read_inputs(x, model.dtype, model.device)
    if are_vectors(x) and not model.coupled:
        with torch.no_grad():
            f = model.forward(params, x, tree.clone(buffers))[0].unsqueeze(0)
        check_outputs(x, f)
        _refuse_one_example(model, x, f, {**buffers, **params})
    return x


def _refuse_one_example(model: Model, x: Inputs, f: Tensor, weights: Params) -> None:
    """Raise for a vector that is one example without its batch axis, of as many numbers as the network gives: a network of examples
    that are numbers takes the first one alone."""
    if not are_vectors(x) or model.coupled or f.shape[1] < 2 or f.shape[2:] != (1,):
        return
    params = {name: leaf for name, leaf in weights.items() if ":" not in name}
    try:
        with torch.no_grad():
            model.forward({}, tree.apply_leaves(lambda leaf: leaf[:1], x), params)
    except (RuntimeError, ValueError):
        raise ValueError(
            f"the inputs are one example without its batch axis, {f.shape[1]} numbers: for a single example add that axis, x[None]"
        ) from None


def sampled(
    model: Model,
    x: Inputs,
    *,
    shared: Buffers,
    stacked: Params | None = None,
    dropout: Dropout | None = None,
    seeds: Tensor | None = None,
    consistent: bool = True,
    weights: Tensor | None = None,
    memory: float | None = None,
    stack: Stack | None = None,
) -> LatentMixture:
    """The predictive of S draws.

    `stacked` holds the leaves that differ between draws, [S, ...]; `shared` all others. With `dropout`, `seeds` [S] stand for the
    draws of masks. `memory` bounds what the draws may take at a time, in gigabytes, beside the outputs, which go to a `stack` if there
    is one.
    """
    stacked, x, memory = stacked or {}, read_inputs(x, model.dtype, model.device), room(memory, model.device)
    varying = {**stacked} if seeds is None else {**stacked, "dropout:seed": seeds}
    draws = tree.count(varying) if varying else 1
    kind = (*((leaf.shape, leaf.dtype) for leaf in tree.leaves(x)), consistent, frozenset(stacked), dropout is None)
    known = _KNOWN.setdefault(model.network, {}).setdefault(kind, Known(Folding.of(model.network)))

    def once(varying: Params, common: Common | None) -> Tensor:
        """The output f for one draw, or for stacked ones under vmap."""
        params = {name: leaf for name, leaf in varying.items() if name != "dropout:seed"}
        # `shared` may hold learned quantities too ("dropout:..."), which are not the network's
        buffers = {name: leaf for name, leaf in shared.items() if ":" not in name}
        if dropout is None:
            with common or nullcontext():
                return model.call(params, x, buffers)[0]
        masks = Masks(dropout, {**shared, **params}, seed=varying["dropout:seed"] if consistent else None, folding=known.folding)
        with common or nullcontext(), masks:
            f = model.call(params, x, buffers)[0]
        if not masks.close():  # the network took another way than before, and a mask has no place: again, without folding
            known.folding = Folding()
            return once(varying, common and common.again())
        return f

    seed = derive_seed(*seeds.tolist()) if seeds is not None else 0
    stack = stack or Stack(draws)
    start = stack.done
    with torch.no_grad(), in_mode(model.network, False), fork_rng(seed) if dropout is not None else nullcontext():
        if draws == 1:
            stack.add(once({name: leaf[0] for name, leaf in varying.items()}, None).unsqueeze(0))
        else:
            _add_draws(stack, once, varying, draws, x, memory * GIGABYTE, known)
    learned = likelihood_params({**shared, **stacked})
    f = stack.whole[start : stack.done]
    check_outputs(x, f, coupled=model.coupled)
    _refuse_one_example(model, x, f, {**shared, **tree.select(stacked, 0)})
    return LatentMixture(model.likelihood, f, weights=weights, params=learned)


def _add_draws(stack: Stack, once: Callable, varying: Params, draws: int, x: Inputs, budget: float, known: Known) -> None:
    """The outputs of all draws to the stack, some draws at a time."""
    inputs = sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(x))
    sizes = sum(leaf.numel() * leaf.element_size() for leaf in varying.values())
    common, before = Common(), stack.done

    def chunk(start: int, size: int) -> Tensor:
        """The outputs of `size` draws in one batched pass."""
        part = tree.select(varying, slice(start, start + size))
        return vmap(lambda one: once(one, common.again()), randomness="different")(part)

    # A pass with one draw measures what a draw costs and fills the common part; cheap networks do without.
    first = draws if draws * inputs + sizes < budget / 64 or (2 * known.peak * draws < budget and known.peak) else 1
    try:
        with warnings.catch_warnings():
            # an operator without a batching rule is looped over by vmap itself, which costs less than looping over the network
            warnings.filterwarnings(
                "ignore", message=".*performance drop because we have not yet implemented the batching rule.*"
            )
            part = chunk(0, first)
            known.peak = max(known.peak, common.peak)
            size = max(1, int(budget / max(1, 2 * known.peak)))
            if first < draws <= size:  # all at once after all: doing one draw again costs less than putting the parts together
                first, part = draws, chunk(0, draws)
            stack.add(part)
            for start in range(first, draws, size):
                stack.add(chunk(start, min(size, draws - start)))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        # A network that vmap cannot run (Python control flow on values, operators without a rule): one draw after another.
        # An error of the network itself comes back here, with its own message.
        stack.done = before
        for i in range(draws):
            stack.add(once(tree.select(varying, i), None).unsqueeze(0))
