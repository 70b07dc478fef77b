r"""The posterior as a function of flat vectors, one row a chain: what full-batch samplers walk on.

:math:`\log p(\theta \mid D) = (\sum_n \log p(y_n \mid x_n, \theta) + \log p(\theta)) / T` up to a constant, and its gradient, at C
positions [C, P] at once. The network is run once under a tracer that writes down its forward and backward operations; after that
no Python of the network, of autograd or of vmap runs any more, which for small networks is nearly all the time a gradient takes.
Values are summed over the data in float64, and the likelihood and the prior are kept apart: their differences between two positions
decide on acceptance, and would drown in the rounding of their sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.func import vmap
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from dubito.inference.batches import Batches, reseed
from dubito.inference.kernels import mlp, mlp_cpu, trajectories_cpu
from dubito.model import Target
from dubito.model.likelihoods import own
from dubito.model.priors import Normal
from dubito.model.priors.factorized import Factorised
from dubito.network.cuda_graphs import usable
from dubito.network.weights import mode
from dubito.tensors import tree
from dubito.tensors.randomness import forked, lent
from dubito.tensors.tree import Buffers, Params

HELD = {"cpu": 2**32, "cuda": 2**35}  # bytes of data that are kept at hand; what is larger is read anew for every gradient
WORKING = {"cpu": 2**27, "cuda": 2**33}  # bytes that the intermediate results of a chunk of the data may take
TRACED = 64  # shapes of batches for which a trace is kept


class Value(NamedTuple):
    """The log density at C positions: its gradient, tempered, and its two parts, which are not."""

    gradient: Tensor  # [C, P]
    log_likelihood: Tensor  # [C], float64
    log_prior: Tensor  # [C], float64


class Density:
    """The log posterior of `target` on `data`, for positions [C, P] that hold the leaves of `like` one after another.

    `compile` hands the traced operations to torch's compiler, which takes a minute and pays in long runs.

    >>> import dubito
    >>> model = dubito.Model(torch.nn.Linear(1, 1, bias=False), dubito.Gaussian(scale=1.0))
    >>> x, y = torch.ones(4, 1), torch.ones(4, 1)
    >>> density = Density(Target(model, 4), [(x, y)], model.parameters(), model.buffers())
    >>> density(torch.tensor([[0.0], [1.0]])).gradient  # 4 (1 - w) - w
    tensor([[ 4.],
            [-1.]])
    """

    def __init__(self, target: Target, data: Iterable[Any], like: Params, buffers: Buffers, *, compile: bool = False):
        self.target, self.like, self.buffers, self.compile = (
            target,
            {n: leaf.detach() for n, leaf in like.items()},
            buffers,
            compile,
        )
        self.size, self.dtype = tree.size(like), tree.flatten(self.like).dtype
        self.kind = target.model.device.type
        self.chunks: list[Any] | None = None
        self.data, self.seen = data, 0
        self.kernel: Any = None  # a hand-written kernel for networks of this kind, where there is one
        self.hand: mlp_cpu.Field | None = None  # the likelihood of all the data and its gradient, derived by hand
        self._traced: dict[Any, Callable] = {}
        self._prepared: dict[int, list[tuple[Callable, Any]]] = {}
        self._loops: dict[str, Loop] = {}
        self.vectorized = True
        self.precision, self.constant = self._independent()
        self._gather()

    def __call__(self, position: Tensor) -> Value:
        slope, likelihood = None, None
        for run, batch in self._runs(position):
            value, part = run(position, batch)
            slope = part if slope is None else slope + part
            likelihood = value if likelihood is None else likelihood + value
        assert slope is not None
        assert likelihood is not None
        prior, pull = (
            self._plain(position) if self.precision is not None else self._ready(self._prior, position, ())(position, ())
        )
        if (share := self.target.n_data / self.seen) != 1:
            slope, likelihood = slope * share, likelihood * share
        gradient = slope + pull
        if self.target.temperature != 1:
            gradient = gradient / self.target.temperature
        return Value(gradient, likelihood, prior)

    def values(self, position: Tensor) -> Value:
        """As a call, without the gradient, which is left as zeros."""
        likelihood = sum(self._scores(position, batch) for batch in self._batches())
        assert isinstance(likelihood, Tensor)
        with torch.no_grad():
            prior = self._plain(position)[0] if self.precision is not None else self._prior(position, ())[0]
        return Value(torch.zeros_like(position), likelihood * (self.target.n_data / self.seen), prior)

    def unflatten(self, position: Tensor) -> Params:
        """Positions [C, P] as weights, leaves [C, ...], each in its own dtype."""
        return {name: leaf.to(self.like[name].dtype) for name, leaf in tree.unflatten(position, self.like).items()}

    def outputs(self, position: Tensor) -> Iterator[tuple[Tensor, Any]]:
        """f [C, B, ..., K] and the targets of every chunk of the data, without gradients: what conjugate moves condition on."""
        for batch in self._batches():
            x, y = self.target.model.split(batch)
            with self._passing(), torch.no_grad():  # and no longer: what is done with them is not to be in half precision
                f = self._each(lambda row, x=x: self.target.model.call(self.unflatten(row), x, self.buffers)[0], position)
            yield f, y

    def loop(self, name: str, function: Callable[..., tuple[Tensor, ...]]) -> Loop:
        """`function`, which calls this density, to be repeated many times; a GPU records it once and plays it back."""
        if name not in self._loops:
            self._loops[name] = Loop(function, record=self.kind == "cuda" and self.chunks is not None, compile=self.compile)
            if self.chunks is not None and len(self.chunks) > 1:  # long already: nothing is gained by recording 32 of them
                self._loops[name].RECORDED = (1,)
        return self._loops[name]

    # ---- the data

    def _batches(self) -> Iterable[Any]:
        if self.chunks is not None:
            yield from self.chunks
            return
        with _same_order(self.data):
            for batch in self.data:
                yield tree.move(batch, self.target.model.device)

    def _gather(self) -> None:
        """Keep the data at hand if they fit, in chunks as large as memory allows: a small network wants them all at once."""
        held, limit = [], HELD.get(self.kind, HELD["cuda"])
        with _same_order(self.data):
            bytes_held = 0
            for batch in self.data:
                self.seen += self.target._size(batch)
                bytes_held += sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(batch))
                if bytes_held <= limit:
                    held.append(batch)
        if not self.seen:
            raise ValueError("there is no data: the loader gave no batch")
        if bytes_held <= limit:
            self.chunks = held

    def fit_chunks(self, chains: int) -> None:
        """Cut the data that are at hand into as few chunks as memory allows, for so many chains."""
        if self.chunks is None:
            return
        joined = self.chunks[0] if len(self.chunks) == 1 else _joined(self.chunks, self.target)
        if joined is None or self._by_hand(joined) or len(self.chunks) == 1:
            return
        first = self.chunks[0]
        position = torch.zeros(chains, self.size, dtype=self.dtype, device=self.target.model.device)
        used = self._footprint(position, first) / self.target._size(first)
        rows = max(1, int(WORKING.get(self.kind, WORKING["cuda"]) / max(1.0, used)))
        if rows < self.target._size(first):
            return
        parts = math.ceil(self.seen / rows)
        rows = math.ceil(self.seen / parts)
        self._prepared.clear()
        self.chunks = [tree.apply_leaves(lambda leaf, i=i: leaf[i : i + rows], joined) for i in range(0, self.seen, rows)]

    def _by_hand(self, batch: Any) -> bool:
        """Whether a gradient derived by hand can take over, for networks that are known, if it gives what autograd gives."""
        if self.kind == "cuda" and self._in_one_kernel(batch):
            return True
        found = mlp_cpu.field(self.target, batch, self.like) if self.kind == "cpu" and not self.compile else None
        if found is None:
            return False
        near = self._near()
        if not _same(found(near), self._likelihood(near, batch)):
            return False
        self.hand, self.chunks = found, [batch]
        prior = trajectories_cpu.Prior.of(self.target, self.like)
        if prior is not None and self.target.n_data == self.seen:
            self.kernel = trajectories_cpu.Trajectories(found, prior, self.target.temperature)
        return True

    def _in_one_kernel(self, batch: Any) -> bool:
        """Whether a GPU can run whole trajectories without leaving its chip."""
        plan = None if self.compile else mlp.recognise(self.target, batch, self.like)
        if plan is None or self.target.n_data != self.seen:
            return False
        x, y = self.target.model.split(batch)
        self.chunks, near = [batch], self._near()
        if not _same(plan.gradient(x, y, near), self(near)):
            return False
        self.kernel = mlp.Trajectories(plan, x, y, self.target.temperature)
        return True

    def _near(self) -> Tensor:
        """Two places around the start, at which a kernel is compared with autograd."""
        noise = torch.randn(2, self.size, dtype=self.dtype, generator=torch.Generator().manual_seed(0))
        start = tree.flatten(self.like)
        return start + 0.1 * noise.to(start.device)

    def _footprint(self, position: Tensor, batch: Any) -> int:
        """Bytes of all intermediate results of one gradient, from the traced operations."""
        run = self._ready(self._likelihood, position, batch)
        if not isinstance(run, _Traced):
            return 4 * sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(batch)) * position.shape[0]
        return run.bytes

    # ---- values and gradients, as plain functions that are traced

    def _likelihood(self, position: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Sum of log likelihoods [C] in float64, and its gradient [C, P]."""
        with self._passing():
            return self._differentiated(partial(self._score, batch), position)

    def _scores(self, position: Tensor, batch: Any) -> Tensor:
        """`_likelihood` without the gradient."""
        with self._passing(), torch.no_grad():
            return self._each(partial(self._score, batch), position)

    def _score(self, batch: Any, row: Tensor) -> Tensor:
        model, params = self.target.model, self.unflatten(row)
        x, y = model.split(batch)
        with nullcontext() if self.target.around is None else self.target.around({**self.buffers, **params}):
            f, _ = model.call(params, x, self.buffers)
        return model.score(f, y, params).double().sum()

    @contextmanager
    def _passing(self) -> Iterator[None]:
        precision = self.target.precision
        with mode(self.target.model.network, False), torch.autocast(self.kind, precision) if precision else nullcontext():
            yield

    def _prior(self, position: Tensor, _: Any) -> tuple[Tensor, Tensor]:
        def one(row: Tensor) -> Tensor:
            return self.target.log_prior(tree.unflatten(row.double(), self.like)).double()

        if (found := self._elementwise(position)) is not None:
            return found
        with _unchecked(self.target.model.likelihood):
            return self._differentiated(one, position)

    def _elementwise(self, position: Tensor) -> tuple[Tensor, Tensor] | None:
        """`_prior` where all weights have the same density, independently: of all leaves at once, with the slope in closed form."""
        prior = self.target.model.prior
        if not isinstance(prior, Factorised) or any(":" in name for name in self.like):
            return None
        return self.constant + prior.density(position.double()).sum(1), prior.slope(position)

    def _independent(self) -> tuple[Tensor | None, float]:
        """The precisions [P] of a prior of independent normals, and the constant of its log density: it needs no tracing."""
        model = self.target.model
        live = {name: leaf.detach().clone().requires_grad_() for name, leaf in own(self.like).items()}
        if type(model.prior) is not Normal or model.likelihood.log_prior(live).requires_grad:
            return None, 0.0 if live else float(model.likelihood.log_prior({}))
        weights = {name: leaf for name, leaf in self.like.items() if ":" not in name}
        scales = {
            name: leaf.new_full(leaf.shape, model.prior.scale_of(name), dtype=torch.float64) for name, leaf in weights.items()
        }
        none = {name: torch.zeros_like(leaf, dtype=torch.float64) for name, leaf in self.like.items() if ":" in name}
        precision = {name: scales[name] ** -2 if name in scales else none[name] for name in self.like}
        at_zero = model.prior.log_prob({name: torch.zeros_like(leaf, dtype=torch.float64) for name, leaf in weights.items()})
        return tree.flatten(precision), float(at_zero) + float(model.likelihood.log_prior(own(self.like)))

    def _plain(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """`_prior` for independent normals."""
        assert self.precision is not None
        pull = position * self.precision
        return self.constant - 0.5 * (pull * position).sum(1), -pull.to(position.dtype)

    def _differentiated(self, one: Callable[[Tensor], Tensor], position: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            live = position.detach().requires_grad_()
            value = self._each(one, live)
            (slope,) = torch.autograd.grad(value.sum(), live, allow_unused=True)
        return value.detach(), torch.zeros_like(position) if slope is None else slope.detach()

    def _each(self, one: Callable[[Tensor], Tensor], position: Tensor) -> Tensor:
        if len(position) == 1 or not self.vectorized:
            return torch.stack([one(row) for row in position.unbind(0)])
        return vmap(one)(position)

    # ---- tracing

    def _runs(self, position: Tensor) -> Iterable[tuple[Callable, Any]]:
        """What computes the likelihood of every chunk of the data. Chunks at hand are looked up once: that takes as long as a layer."""
        if self.chunks is None:
            return ((self._ready(self._likelihood, position, batch), batch) for batch in self._batches())
        if self.hand is not None:
            return ((self.hand, self.chunks[0]),)
        if (found := self._prepared.get(len(position))) is None:
            found = [(self._ready(self._likelihood, position, batch), batch) for batch in self.chunks]
            self._prepared[len(position)] = found
        return found

    def _ready(self, function: Callable, position: Tensor, batch: Any) -> Callable:
        shapes = tuple((tuple(leaf.shape), leaf.dtype) for leaf in tree.leaves(batch))
        key = (function.__name__, tuple(position.shape), shapes, repr(_others(batch)))
        if key not in self._traced:
            if len(self._traced) >= TRACED:  # batches that are all different: a trace for each would cost more than it saves
                return function
            self._traced[key] = self._trace(function, position, batch)
        return self._traced[key]

    def _trace(self, function: Callable, position: Tensor, batch: Any) -> Callable:
        try:
            if not all(isinstance(value, bool | int | float | str) for value in _others(batch)):
                raise TypeError("there may be tensors in this batch that a tracer would take for constants")
            # on a GPU whole steps are compiled, with the updates around the gradient
            return _Traced(
                function, position, batch, compile=self.compile and self.kind != "cuda", half=self.target.precision is not None
            )
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the network looks at values, or holds what a tracer cannot see through: it runs as it is
            if self.vectorized and len(position) > 1:
                try:
                    function(position, batch)
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError:  # not even batched: one chain after another
                    self.vectorized = False
        self._steady(function, position, batch)
        return function

    def _steady(self, function: Callable, position: Tensor, batch: Any) -> None:
        """A network that gives another answer every time has no density: nothing that is accepted or rejected would mean anything."""
        (one, _), (two, _) = function(position, batch), function(position, batch)
        if not _alike(one, two, self.target.precision is not None):
            raise ValueError(
                "the network gives another output every time it is called, also in eval mode: its posterior cannot be sampled. Is "
                "there dropout or noise that does not look at `self.training`?"
            )


class Loop:
    """Repeats `function(*state, *constants) -> state`. On a GPU, where starting an operation takes longer than doing it for small
    networks, some repetitions are recorded as a CUDA graph and played back; a network that cannot be recorded runs as it is."""

    RECORDED: tuple[int, ...] = (32, 1)  # repetitions in a recording, from the longest

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], *, record: bool, compile: bool):
        self.function, self.record, self.compile = function, record, compile
        self.compiled: Callable[..., tuple[Tensor, ...]] | None = None
        self.recordings: dict[int, Any] = {}
        self.buffers: tuple[Tensor, ...] = ()

    def __call__(self, state: Sequence[Tensor], constants: Sequence[Tensor], steps: int) -> tuple[Tensor, ...]:
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

    def _play(self, state: tuple[Tensor, ...], constants: tuple[Tensor, ...], steps: int) -> tuple[Tensor, ...]:
        given = (*state, *constants)
        if not self.buffers or any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(self.buffers, given, strict=True)):
            self.buffers, self.recordings = tuple(leaf.clone() for leaf in given), {}
        for buffer, leaf in zip(self.buffers, given, strict=True):
            buffer.copy_(leaf)
        held, still = self.buffers[: len(state)], self.buffers[len(state) :]
        for size in self.RECORDED:
            repeats, steps = divmod(steps, size)
            if repeats and size not in self.recordings:
                self.recordings[size] = self._record(held, still, size)
            for _ in range(repeats):
                self.recordings[size].replay()
        return tuple(leaf.clone() for leaf in held)

    def _record(self, held: tuple[Tensor, ...], still: tuple[Tensor, ...], size: int) -> Any:
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
            for _ in range(size):
                state = function(*state, *still)
            for buffer, leaf in zip(held, state, strict=True):
                buffer.copy_(leaf)
        return graph

    def _compiled(self, held: tuple[Tensor, ...], still: tuple[Tensor, ...]) -> Callable[..., tuple[Tensor, ...]]:
        if self.compiled is None:
            graph = make_fx(self.function)(*held, *still)
            _clean(graph)
            self.compiled = torch.compile(graph, dynamic=False)
        return self.compiled


class _Traced:
    """A function of (position, batch) as the list of its operations."""

    def __init__(self, function: Callable, position: Tensor, batch: Any, *, compile: bool, half: bool = False):
        leaves = list(tree.leaves(batch))

        def flat(position: Tensor, *leaves: Tensor) -> tuple[Tensor, Tensor]:
            replacing = iter(leaves)
            return function(position, tree.apply_leaves(lambda _: next(replacing), batch))

        expected = function(position, batch)  # before the trace: some things are computed at the first call and kept
        graph = make_fx(flat)(position, *leaves)
        self.bytes = _clean(graph)
        self.module = torch.compile(graph, dynamic=False) if compile else graph
        with torch.no_grad():  # what was traced must be what the network does
            found = self.module(position, *leaves)
        if not all(_alike(a, b, half) for a, b in zip(expected, found, strict=True)):
            raise RuntimeError("the traced operations give another result than the network")

    def __call__(self, position: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return self.module(position, *tree.leaves(batch))


def _same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Within rounding. A chain that goes on starts where large terms of the gradient cancel: the largest entry is the measure.
    What is not finite cannot be compared, and so is not the same."""
    return all(
        bool(theirs.isfinite().all()) and torch.allclose(mine, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))
        for mine, theirs in zip(found, wanted, strict=True)
    )


def _alike(a: Tensor, b: Tensor, half: bool) -> bool:
    """Within rounding; in half precision as a whole, since a GPU's sums, in an order of their own, then differ by a part in 256."""
    if half:
        return bool((a - b).norm() <= 1e-2 * b.norm())
    return torch.allclose(a, b, rtol=1e-3, atol=1e-3, equal_nan=True)


def _clean(module: GraphModule) -> int:
    """Take out what computes nothing, and compute once what is the same every time; the bytes of all that is left.

    A small network's gradient is a hundred operations of a few microseconds, a third of which are views and factors of one.
    """
    aten, graph, known = torch.ops.aten, module.graph, {}
    idle = {aten.detach.default, aten.alias.default, aten.view.default, aten._unsafe_view.default, aten.expand.default}
    made = {aten.ones_like.default: 1, aten.zeros_like.default: 0}  # shapes alone decide
    # what is written to in place must be made anew every time, and must not be what it was copied from
    written = any(node.op == "call_function" and node.is_impure() for node in graph.nodes)
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor):
            continue
        first = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        was = first.meta.get("val") if first is not None else None
        same = isinstance(was, Tensor) and was.shape == value.shape and was.dtype == value.dtype
        one = node.target in (aten.mul.Scalar, aten.mul.Tensor, aten.div.Tensor) and node.args[1] in (1, 1.0)
        if same and (node.target in idle or (one and not written)):
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            continue
        if written:
            continue
        inputs = node.all_input_nodes
        if node.target in made:
            known[node] = torch.full(value.shape, made[node.target], dtype=value.dtype, device=value.device)
        elif all(item in known for item in inputs) and (inputs or node.target in (aten.zeros.default, aten.full.default)):
            known[node] = node.target(*map_arg(node.args, known.__getitem__), **map_arg(node.kwargs, known.__getitem__))
    for number, (node, value) in enumerate(known.items()):
        if any(user not in known for user in node.users):
            module.register_buffer(f"_constant_{number}", value)
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.get_attr(f"_constant_{number}"))
    graph.eliminate_dead_code()
    module.recompile()
    values = [node.meta.get("val") for node in graph.nodes]
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))


@contextmanager
def _unchecked(likelihood: Any) -> Iterator[None]:
    """The prior of a learned noise without torch's checks: they cannot be traced, and a NaN is to be a divergence, not an error."""
    prior = getattr(likelihood, "prior", None)
    parts = list(_nested(prior)) if isinstance(prior, Distribution) else []
    before = [vars(part).get("_validate_args") for part in parts]
    for part in parts:
        part._validate_args = False
    try:
        yield
    finally:
        for part, checks in zip(parts, before, strict=True):
            if checks is None:
                del part._validate_args
            else:
                part._validate_args = checks


def _nested(distribution: Distribution) -> Iterator[Distribution]:
    """A distribution and those it is made of: a log-normal one is a normal one, transformed, which checks for itself."""
    yield distribution
    for part in vars(distribution).values():
        if isinstance(part, Distribution):
            yield from _nested(part)


class _same_order:
    """A loader that shuffles is to give its batches in one order every time: the density is one function, to the last bit."""

    def __init__(self, data: Any):
        self.lent, self.forked = lent(data.source if isinstance(data, Batches) else data), forked()

    def __enter__(self) -> None:
        self.forked.__enter__()
        reseed(self.lent.__enter__(), 0)

    def __exit__(self, *error: Any) -> None:
        self.lent.__exit__(*error)
        self.forked.__exit__(*error)


def _others(value: Any) -> list[Any]:
    """What there is in a batch beside tensors, None, and plain dicts, lists and tuples of them."""
    if type(value) in (dict, list, tuple):
        return [other for item in (value.values() if type(value) is dict else value) for other in _others(item)]
    return [] if value is None or isinstance(value, Tensor) else [value]


def _joined(batches: Sequence[Any], target: Target) -> Any:
    """All batches as one, or None where they cannot be put together."""
    if any(map(_others, batches)):
        return None
    columns = [list(tree.leaves(batch)) for batch in batches]
    sizes = [target._size(batch) for batch in batches]
    for leaves, size in zip(columns, sizes, strict=True):
        same = all(a.shape[1:] == b.shape[1:] and a.dtype == b.dtype for a, b in zip(leaves, columns[0], strict=False))
        if len(leaves) != len(columns[0]) or not same or any(leaf.ndim == 0 or leaf.shape[0] != size for leaf in leaves):
            return None
    whole = iter([torch.cat(parts) for parts in zip(*columns, strict=True)])
    return tree.apply_leaves(lambda _: next(whole), batches[0])
