"""A target whose mini-batch gradient is recorded as a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dubito.model import Evaluation, Target
from dubito.network.cuda_graphs import recording
from dubito.tensors import tree
from dubito.tensors.tree import Buffers, Params


@dataclass(frozen=True)
class Recorded(Target):
    """A target that records its gradient as a CUDA graph, once for every place the weights are at, every shape of a batch, and every
    number of data that it may stand for.

    The weights must be changed in place, as samplers on mini-batches do. A gradient is overwritten by the next; until then it is the
    caller's. Networks with buffers, several batches to accumulate and all that is not on a GPU go the ordinary way.

    >>> import dubito
    >>> model = dubito.Model(torch.nn.Linear(1, 1, bias=False), dubito.Gaussian(scale=1.0), dubito.priors.Normal(scale=1.0))
    >>> batch = (torch.ones(4, 1), torch.ones(4, 1))
    >>> Recorded(model, 4).gradient({"weight": torch.zeros(1, 1)}, [batch], {}).gradient["weight"]
    tensor([[4.]])
    """

    recordings: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def gradient(
        self, params: Params, data: Iterable[Any], buffers: Buffers, *, train: bool = False, factor: float = 1.0
    ) -> Evaluation:
        data = list(data)
        if self.model.device.type != "cuda" or buffers or len(data) != 1 or self.weights is not None:
            return super().gradient(params, data, buffers, train=train, factor=factor)
        places = tuple((leaf.data_ptr(), *leaf.shape) for leaf in params.values())
        key = (places, *((tuple(leaf.shape), leaf.dtype) for leaf in tree.leaves(data[0])), train, self.n_data, self.temperature)
        if key not in self.recordings:
            try:
                self.recordings[key] = self._record(params, data[0], train)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # the network looks at values, or does what cannot be recorded
                self.recordings.update(dict.fromkeys([*self.recordings, key]))
        if (known := self.recordings[key]) is None:
            return super().gradient(params, data, buffers, train=train, factor=factor)
        graph, inputs, found, _ = known
        for held, leaf in zip(inputs, tree.leaves(data[0]), strict=True):
            held.copy_(leaf)
        graph.replay()
        torch._foreach_mul_(list(found.gradient.values()), factor)
        return Evaluation(found.gradient, buffers, found.log_likelihood.clone())

    def _record(self, params: Params, batch: Any, train: bool) -> tuple[Any, list[Tensor], Evaluation, Params]:
        batch = tree.apply_leaves(torch.clone, batch)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # the first passes allocate, compile and choose algorithms
            for _ in range(3):
                super().gradient(params, [batch], {}, train=train)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with recording(graph, torch.cuda.Stream(), torch.cuda.graph_pool_handle()):
            found = super().gradient(params, [batch], {}, train=train)
        return graph, list(tree.leaves(batch)), found, params  # the weights stay where the graph reads them
