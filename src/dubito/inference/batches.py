"""What the user gives as data, as batches that can be gone through again and are counted right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, SequentialSampler

from dubito.model import Model
from dubito.network.examples import Batch, Data, Inputs, Targets, as_arrays, batch_size, is_array, is_pair, split_batch
from dubito.tensors import tree
from dubito.tensors.checks import require
from dubito.tensors.randomness import borrowed_generators, fork_rng, seed_global
from dubito.tensors.shares import Share


@dataclass(frozen=True)
class Arrays:
    """Tensors held in memory, cut into batches; shuffled by the global generator, which the loop has seeded."""

    x: Inputs
    y: Targets
    size: int
    shuffle: bool = True
    part: tuple[int, int] = (0, 1)  # of every batch, for which of how many processes

    @staticmethod
    def of(data: tuple[Inputs, Targets], dtype: torch.dtype, size: int, *, shuffle: bool, device: Any = None) -> Arrays:
        """Inputs and targets, checked, as tensors on a device; NumPy's floats in a dtype."""
        x, y = tree.tensors(data, dtype)
        for leaf in tree.leaves((x, y)):
            require(
                leaf.layout is torch.strided, f"a tensor of layout {leaf.layout} cannot be cut into batches: pass x.to_dense()"
            )
        counts = {len(leaf) if leaf.ndim else 0 for leaf in tree.leaves((x, y))}
        one = len(counts) == 1 and counts != {0}
        whole = (
            "; where rows depend on each other, as nodes of a graph do, say Model(..., coupled=True)" if len(counts) > 1 else ""
        )
        lists = "; a list of arrays is read as several inputs, and np.stack(x) makes it one" if isinstance(x, list) else ""
        require(one, f"inputs and targets must have the same, positive number of rows; got {sorted(counts)}{lists}{whole}")
        return Arrays(tree.move(x, device), tree.move(y, device), size, shuffle)

    def __len__(self) -> int:
        return math.ceil(batch_size(self.y) / self.size)

    def __iter__(self) -> Iterator[tuple[Inputs, Targets]]:
        n = batch_size(self.y)
        order = torch.randperm(n).to(next(iter(tree.leaves(self.y))).device) if self.shuffle else None
        for batch in evenly(n, self.size):
            part = part_of(batch, self.part)
            rows = part if order is None else order[part]
            yield _rows(self.x, rows), _rows(self.y, rows)


def evenly(n: int, size: int) -> Iterator[slice]:
    """Cut n examples into batches of nearly equal size, at most `size`: BatchNorm would fail on a last batch of one example."""
    k = math.ceil(n / size)
    return (slice(n * i // k, n * (i + 1) // k) for i in range(k))


def part_of(batch: slice, part: tuple[int, int]) -> slice:
    """The rows of a batch that a process (its rank, and how many there are) has of it."""
    share = Share.of(batch.stop - batch.start, *part).rows[0]
    return slice(batch.start + share.start, batch.start + share.stop)


class Evenly(Sampler[list[int]]):
    """The batches of a data set, by position, cut in that way."""

    def __init__(self, sampler: RandomSampler | SequentialSampler, size: int, part: tuple[int, int] = (0, 1)):
        self.sampler, self.size, self.part = sampler, size, part

    def __len__(self) -> int:
        return math.ceil(len(self.sampler) / self.size)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        for batch in evenly(len(order), self.size):
            yield order[part_of(batch, self.part)]


def _rows(value: Any, rows: slice | Tensor) -> Any:
    if isinstance(value, Tensor):
        return value[rows]
    if isinstance(value, dict):
        return {key: _rows(item, rows) for key, item in value.items()}
    return tuple(_rows(item, rows) for item in value)


class Group(NamedTuple):
    """The batches of a step; on several processes, those of this one, and which part of the common batches they are."""

    batches: Iterable[Batch]
    shares: tuple[Share, ...] | None = None


@dataclass
class Batches:
    """Re-iterable batches on the model's device, with the number of examples and of batches in one pass."""

    source: Iterable[Batch]
    n_data: int
    n_batches: int
    device: torch.device
    counted: bool  # whether n_data is our own count, which a pass must then confirm
    check: Callable[[Batch], None] | None = None  # of every batch, in the first pass over the data

    @property
    def arrays(self) -> Arrays | None:
        """All data as tensors, where they are in memory; else None."""
        return self.source if isinstance(self.source, Arrays) else None

    def check_targets(self, check: Callable[[Batch], None]) -> None:
        """Call `check` on all data: on arrays now, on other data batch by batch in the first pass, before they go to the device."""
        if self.arrays is not None:
            check((self.arrays.x, self.arrays.y))
        else:
            self.check = check

    def __iter__(self) -> Iterator[Batch]:
        if self.arrays is not None:  # on the device already
            yield from self.arrays
            return
        for i, batch in enumerate(self.source):
            leaves = list(tree.leaves(batch))
            if leaves and all(not leaf.is_nested and leaf.shape[:1] == (0,) for leaf in leaves):
                raise ValueError(
                    f"batch {i} of the data has no examples: leave out empty batches, also those that a collate_fn makes"
                )
            if self.check is not None:
                self.check(batch)
            yield tree.move(batch, self.device)
        self.check = None

    def groups(self, size: int, epoch: int) -> Iterator[Group]:
        """The batches of a pass, `size` a step."""
        iterator = iter(self)
        while group := list(islice(iterator, size)):
            yield Group(group)


def batches(model: Model, data: Data, *, n_data: int | None = None, size: int = 128, shuffle: bool = True) -> Batches:
    """Read `data`: a tuple (x, y) of tensors, arrays, lists of numbers or DataFrames, a dict of columns with labels (such as the
    `BatchEncoding` of a tokenizer), a Dataset (of torch or Hugging Face), a DataLoader, or any re-iterable of batches.

    `n_data` is the number of examples that the posterior is conditioned on, where it cannot be counted; `size` that of a batch where
    the data are cut into batches here.
    """
    data = as_columns(data, default=model.split is split_batch)
    pair = is_pair(data) and (is_array(data[1]) or isinstance(data[1], dict))
    if tree.is_graph(data) or (pair and model.coupled):  # one batch
        data = [tree.tensors(data, model.dtype)]
    elif pair:
        source = Arrays.of(data, model.dtype, size, shuffle=shuffle, device=model.device)
        return Batches(source, n_data or batch_size(source.y), len(source), model.device, n_data is None)
    if isinstance(data, Dataset) or is_hugging_face(data):
        rows: Any = data
        data = _loader(rows.with_format("torch") if is_hugging_face(rows) else rows, size, shuffle)
    _check_iterable(data)
    count = _count(model, data) if n_data is None else n_data
    require(count, "there is no data: the loader gives no example (with drop_last, not even one full batch)")
    return Batches(data, count, _length(model, data, count), model.device, n_data is None)


def as_columns(data: Data, *, default: bool) -> Data:
    """DataFrames, lists of numbers and, where batches are read in the default way, dicts of columns, as a tuple (x, y) of arrays; other
    data as they are."""
    if hasattr(data, "to_numpy"):
        raise TypeError(f"the data are one {type(data).__name__}: give a tuple, such as (frame[inputs], frame[target])")
    if isinstance(data, Mapping):
        if not default:
            raise TypeError(
                "a dict as data is read by the default split: give Model(split=...) a DataLoader or a list of batches"
            )
        data = split_batch(data)
    return tuple(as_arrays(part) for part in data) if is_pair(data) else data


def is_hugging_face(data: Data) -> bool:
    """Whether the data are a `datasets.Dataset`, by what it offers."""
    return all(hasattr(data, name) for name in ("with_format", "column_names", "__len__", "__getitem__"))


def _loader(data: Dataset, size: int, shuffle: bool) -> DataLoader:
    """A data set in batches of nearly one size; graphs are joined as PyTorch Geometric does it."""
    if isinstance(data, IterableDataset):
        return DataLoader(data, batch_size=size)
    rows: Any = data
    order = RandomSampler(rows) if shuffle and len(rows) else SequentialSampler(rows)
    join = join_graphs if len(rows) and tree.is_graph(rows[0]) else None
    return DataLoader(data, batch_sampler=Evenly(order, size), collate_fn=join)


def join_graphs(graphs: list[Any]) -> Any:
    """Graphs of PyTorch Geometric as one `Batch`."""
    from torch_geometric.data import Batch  # pyright: ignore[reportMissingImports]

    return Batch.from_data_list(graphs)


def _check_iterable(data: Data) -> None:
    """Raise for what cannot be gone through again and again."""
    if not isinstance(data, Iterable):
        raise TypeError(f"data must be a tuple (x, y), a Dataset, a DataLoader or a list of batches; got a {type(data).__name__}")
    if is_pair(data) and is_array(data[0]):
        raise TypeError(f"data as a tuple must be (x, y), with y a tensor or an array; y is a {type(data[1]).__name__}")
    if isinstance(data, str):
        raise TypeError(f"data {data!r} are text: give a tuple (x, y); dubito.fit_table reads a file by its name")
    if isinstance(data, Iterator):
        raise TypeError("data is an iterator that can be gone through only once: give a list of batches or a DataLoader")


def _length(model: Model, data: Iterable[Batch], n_data: int) -> int:
    """Batches in one pass, counted where no length can be trusted; an endless stream ends after n_data examples."""
    # each worker's shard ends with a batch that is not full; the length that torch gives counts only one of them
    sharded = isinstance(data, DataLoader) and isinstance(data.dataset, IterableDataset) and data.num_workers > 1
    if not sharded:
        try:
            return len(data)  # pyright: ignore[reportArgumentType]
        except TypeError:
            pass
    seen = count = 0
    with borrowed_generators(data), fork_rng():
        for batch in data:
            seen, count = seen + _size(model, batch), count + 1
            if seen >= n_data:
                break
    if not count:
        raise ValueError("there is no data: the loader gave no batch")
    return count


def _size(model: Model, batch: Batch) -> int:
    return batch_size(model.split(batch)[1])


def _count(model: Model, data: Iterable[Batch]) -> int:
    """Examples in one pass; what cannot be counted is refused, since the target would be scaled wrongly."""
    if isinstance(data, DataLoader) and model.coupled and not isinstance(data.dataset, IterableDataset):
        with borrowed_generators(data), fork_rng():  # one of its items may be many examples, as the nodes of a graph
            return sum(_size(model, batch) for batch in data)
    if isinstance(data, DataLoader):
        refused = "the number of examples in a pass cannot be counted for this loader: give n_data=..."
        if isinstance(data.dataset, IterableDataset):
            raise ValueError(f"a DataLoader over an IterableDataset has no length; {refused}")
        sampler = data.batch_sampler
        if isinstance(sampler, Evenly):
            return len(sampler.sampler)
        if type(sampler) is BatchSampler:
            try:
                n = len(sampler.sampler)  # pyright: ignore[reportArgumentType]
            except (TypeError, NotImplementedError):
                raise ValueError(refused) from None
            return n // sampler.batch_size * sampler.batch_size if sampler.drop_last else n
        if sampler is not None:
            with borrowed_generators(data), fork_rng():
                return sum(len(list(indices)) for indices in sampler)
    elif not hasattr(data, "__len__"):
        raise ValueError("data without a length: give n_data=..., the number of examples in one pass")
    with fork_rng():
        return sum(_size(model, batch) for batch in data)


def reseed(generators: list[torch.Generator], seed: int) -> None:
    """Seed the global generators and a loader's own, at the start of an epoch."""
    seed_global(seed)
    for generator in generators:
        generator.manual_seed(seed)
