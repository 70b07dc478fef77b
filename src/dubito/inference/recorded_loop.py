"""Repetitions of a function of tensors, which a GPU records as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dubito.inference.tracing import clean
from dubito.network.cuda_graphs import usable

Tensors = tuple[Tensor, ...]


class Loop:
    """Repeats `function(*state, *constants) -> state`.

    On a GPU, where for small networks starting an operation takes longer than doing it, some repetitions are recorded as a CUDA graph
    and played back; a network that cannot be recorded runs as it is. `lengths` are the repetitions in a recording, from the longest.
    """

    def __init__(
        self, function: Callable[..., Tensors], *, record: bool, compile: bool, lengths: tuple[int, ...] = (32, 1)
    ):  # fmt: skip
        self.function, self.record, self.compile, self.lengths = function, record, compile, lengths
        self.compiled: Callable[..., Tensors] | None = None
        self.recordings: dict[int, torch.cuda.CUDAGraph] = {}
        self.buffers: Tensors = ()

    def __call__(self, state: Sequence[Tensor], constants: Sequence[Tensor], steps: int) -> Tensors:
        state = tuple(state)
        if self.record and steps > 0:
            try:
                return self._play(state, tuple(constants), steps)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                self.record = False
        for _ in range(steps):
            state = self.function(*state, *constants)
        return state

    def _play(self, state: Tensors, constants: Tensors, steps: int) -> Tensors:
        inputs = (*state, *constants)
        if not self.buffers or any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(self.buffers, inputs, strict=True)):
            self.buffers, self.recordings = tuple(leaf.clone() for leaf in inputs), {}
        for buffer, leaf in zip(self.buffers, inputs, strict=True):
            buffer.copy_(leaf)
        held, still = self.buffers[: len(state)], self.buffers[len(state) :]
        for length in self.lengths:
            repeats, steps = divmod(steps, length)
            if repeats and length not in self.recordings:
                self.recordings[length] = self._record(held, still, length)
            for _ in range(repeats):
                self.recordings[length].replay()
        return tuple(leaf.clone() for leaf in held)

    def _record(self, held: Tensors, still: Tensors, length: int) -> torch.cuda.CUDAGraph:
        function = self._compiled(held, still) if self.compile else self.function
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():  # the first calls allocate and choose algorithms
            for _ in range(3):
                function(*held, *still)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with usable(stream.device), torch.cuda.graph(graph), torch.no_grad():
            state = held
            for _ in range(length):
                state = function(*state, *still)
            for buffer, leaf in zip(held, state, strict=True):
                buffer.copy_(leaf)
        return graph

    def _compiled(self, held: Tensors, still: Tensors) -> Callable[..., Tensors]:
        if self.compiled is None:
            graph = make_fx(self.function)(*held, *still)
            clean(graph)
            self.compiled = torch.compile(graph, dynamic=False)
        return self.compiled
