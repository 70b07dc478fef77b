"""What a GPU plays back: gradients and steps of training in which starting the operations takes longer than doing them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dubito.tensors import tree
from dubito.tensors.randomness import positions

TRIED = 3  # ordinary steps of a kind before it is recorded: they allocate, choose algorithms, and are watched
LOOKED = "synchronizing CUDA operation"  # what torch says of one that makes Python wait for a value
KEPT = 4  # recordings; the one that was not played for longest goes first


class Steps:
    """The steps of an optimizer, recorded as CUDA graphs once they repeat themselves.

    A step is repeated if it has the same `kind` (all that decides which operations it consists of, and with which numbers), a batch
    of the same shapes, and weights that are where they were. Its first times it goes the ordinary way, and is watched: where the GPU
    takes longer than Python nothing is gained, and where the network draws from a generator of the CPU (layers that are dropped by
    `random`, say) it would draw the same for ever. These are never recorded, nor is what looks at values.
    """

    def __init__(self):
        self.tried: dict[Hashable, int] = {}
        self.played: dict[Hashable, tuple[torch.cuda.CUDAGraph, list[Tensor], dict[str, Tensor]]] = {}
        self.pays = True
        self.rate: Tensor | None = None
        self.pool: Any = None
        self.stream: Any = None

    def __call__(
        self,
        optimizer: torch.optim.Optimizer,
        batch: Any,
        generator: torch.Generator,
        kind: Hashable,
        work: Callable[[Any], dict[str, Tensor]],
    ) -> dict[str, Tensor]:
        """`work(batch)`, or as if: it makes a step of the optimizer, at its learning rate, and gives tensors."""
        leaves = list(tree.leaves(batch))
        if not self.pays or not leaves or any(leaf.device.type != "cuda" for leaf in leaves):
            return work(batch)
        places = tuple(leaf.data_ptr() for group in optimizer.param_groups for leaf in group["params"])
        key = (kind, places, *((tuple(leaf.shape), leaf.dtype) for leaf in leaves))
        if key not in self.played:
            self.tried[key] = self.tried.get(key, 0) + 1
            if self.tried[key] <= TRIED:
                return self._watched(work, batch)
            self._record(key, optimizer, batch, generator, work)
            if not self.pays:
                return work(batch)
        graph, inputs, found = self.played[key] = self.played.pop(key)  # the last one that was played
        for held, leaf in zip(inputs, leaves, strict=True):
            held.copy_(leaf)
        assert self.rate is not None
        self.rate.fill_(optimizer.param_groups[0]["lr"])
        graph.replay()
        return {name: value.clone() for name, value in found.items()}

    def _watched(self, work: Callable[[Any], dict[str, Tensor]], batch: Any) -> dict[str, Tensor]:
        torch.cuda.synchronize()
        before, began, mode = positions(cuda=False), time.perf_counter(), torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                found = work(batch)
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        looked = [one for one in said if LOOKED in str(one.message)]
        for one in said:
            if one not in looked and "debug mode" not in str(one.message):
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        started = time.perf_counter()
        torch.cuda.synchronize()
        waited = time.perf_counter() - started > 0.5 * (started - began)
        if looked or before != positions(cuda=False) or (waited and max(self.tried.values()) == TRIED):
            self.pays = False
        return found

    def _record(
        self,
        key: Hashable,
        optimizer: torch.optim.Optimizer,
        batch: Any,
        generator: torch.Generator,
        work: Callable[[Any], dict[str, Tensor]],
    ) -> None:
        if self.rate is None:
            device = next(iter(tree.leaves(batch))).device
            self.rate = torch.zeros((), device=device)
            self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        while len(self.played) >= KEPT:
            self.tried.pop(oldest := next(iter(self.played)))
            del self.played[oldest]
        group, batch = optimizer.param_groups[0], tree.apply_leaves(torch.clone, batch)
        rate, group["lr"] = group["lr"], self.rate
        if "capturable" in group:
            group["capturable"] = True
        graph = torch.cuda.CUDAGraph()
        try:
            with recording(graph, self.stream, self.pool, *([generator] if generator.device.type == "cuda" else [])):
                found = work(batch)
            self.played[key] = graph, list(tree.leaves(batch)), found
        except RuntimeError:  # there is no memory for a second set of activations, or an operation that cannot be recorded
            self.pays = False
        finally:
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = False


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any, *generators: torch.Generator) -> Iterator[None]:
    """What is done here is recorded, with what it draws from `generators` and from the GPU's global one."""
    for one in generators:
        graph.register_generator_state(one)
    torch.cuda.synchronize()
    with usable(stream.device, *generators), torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


@contextmanager
def usable(device: torch.device, *generators: torch.Generator) -> Iterator[None]:
    """A recording that fails leaves the generators it draws from waiting for its end, unable to draw: after one they are as before."""
    drawn = [torch.cuda.default_generators[device.index], *generators]
    before = [one.clone_state() for one in drawn]
    try:
        yield
    except BaseException:
        for one, state in zip(drawn, before, strict=True):
            one.graphsafe_set_state(state)
        raise
