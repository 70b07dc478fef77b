r"""The posterior as a function of flat vectors, one row a chain: what full-batch samplers walk on.

:math:`\log p(\theta \mid D) = (\sum_n \log p(y_n \mid x_n, \theta) + \log p(\theta)) / T` up to a constant, and its gradient, at C
positions [C, P] at once. The network is run once under a tracer that writes down its forward and backward operations; after that
no Python of the network, of autograd or of vmap runs any more, which for small networks is nearly all the time a gradient takes.
Values are summed over the data in float64, and the likelihood and the prior are kept apart: their differences between two positions
decide on acceptance, and would drown in the rounding of their sum.

Where several processes hold the data, each its own rows, all of them are at the same positions, and one sum over the processes makes a
gradient. The prior is added after it, once. What follows from the sums is the same everywhere, as long as all processes compute alike;
a mark of the position travels with every sum and shows where they do not.
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

from dubito.inference import kernels
from dubito.inference.batches import Batches, reseed
from dubito.inference.tracing import Loop, Traced, alike
from dubito.model import Target
from dubito.model.likelihoods import Likelihood, likelihood_params
from dubito.model.priors import Normal
from dubito.model.priors.factorized import Factorized
from dubito.network.examples import Batch
from dubito.network.weights import in_mode
from dubito.tensors import tree
from dubito.tensors.randomness import borrowed_generators, fork_rng
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
    """The log posterior of `target` on `data`, for positions [C, P] that hold the leaves of `like` one after another. Of several
    processes (`target.processes`) each gives its own rows as `data`.

    `compile` hands the traced operations to torch's compiler, which takes a minute and pays in long runs.

    >>> import dubito
    >>> model = dubito.Model(torch.nn.Linear(1, 1, bias=False), dubito.Gaussian(scale=1.0), dubito.priors.Normal(scale=1.0))
    >>> x, y = torch.ones(4, 1), torch.ones(4, 1)
    >>> density = Density(Target(model, 4), [(x, y)], model.parameters(), model.buffers())
    >>> density(torch.tensor([[0.0], [1.0]])).gradient  # 4 (1 - w) - w
    tensor([[ 4.],
            [-1.]])
    """

    def __init__(self, target: Target, data: Iterable[Batch], like: Params, buffers: Buffers, *, compile: bool = False):
        self.target, self.buffers, self.compile = target, buffers, compile
        self.like = {name: leaf.detach() for name, leaf in like.items()}
        self.size, self.dtype = tree.size(like), tree.flatten(self.like).dtype
        self.kind = target.model.device.type
        self.chunks: list[Any] | None = None
        self.processes, self.apart = target.processes, torch.zeros((), dtype=torch.bool, device=target.model.device)
        self.data, self.seen, self.here = data, 0, 0  # examples of all processes, and of this one
        self.kernel: kernels.Kernel | None = None  # whole trajectories, for networks of a kind that is known
        self.hand: Callable | None = None  # the likelihood of all the data and its gradient, derived by hand
        self._traced: dict[Any, Callable] = {}
        self._prepared: dict[int, list[tuple[Callable, Any]]] = {}
        self._loops: dict[str, Loop] = {}
        self.vectorized = True
        self.prior = FlatPrior(target, self.like, self._differentiated)
        self._gather()

    def __call__(self, position: Tensor) -> Value:
        slope, likelihood = None, None
        for run, batch in self._runs(position):
            value, part = run(position, batch)
            slope = part if slope is None else slope + part
            likelihood = value if likelihood is None else likelihood + value
        if self.processes.size > 1:
            likelihood, slope = self._summed(position, likelihood, slope)
        assert slope is not None
        assert likelihood is not None
        if self.prior.precision is not None:
            prior, pull = self.prior.normal(position)
        else:
            prior, pull = self._ready(self._prior, position, ())(position, ())
        if (share := self.target.n_data / self.seen) != 1:
            slope, likelihood = slope * share, likelihood * share
        gradient = slope + pull
        if self.target.temperature != 1:
            gradient = gradient / self.target.temperature
        return Value(gradient, likelihood, prior)

    def values(self, position: Tensor) -> Value:
        """As a call, without the gradient, which is left as zeros."""
        likelihood = None
        for batch in self._batches():
            value = self._scores(position, batch)
            likelihood = value if likelihood is None else likelihood + value
        if self.processes.size > 1:
            likelihood, _ = self._summed(position, likelihood, position[:, :0])
        assert likelihood is not None
        with torch.no_grad():
            prior, _ = self.prior(position)
        return Value(torch.zeros_like(position), likelihood * (self.target.n_data / self.seen), prior)

    def unflatten(self, position: Tensor) -> Params:
        """Positions [C, P] as weights, leaves [C, ...], each in its own dtype.

        Pairs of numbers get memory of their own: a network may read them as complex numbers, which must lie at an even place.
        """
        leaves = tree.unflatten(position, self.like)
        pairs = {name for name, leaf in self.like.items() if leaf.ndim > 1 and leaf.shape[-1] == 2}
        return {name: (leaf.clone() if name in pairs else leaf).to(self.like[name].dtype) for name, leaf in leaves.items()}

    def outputs(self, position: Tensor) -> Iterator[tuple[Tensor, Any]]:
        """f [C, B, ..., K] and the targets of every chunk of the data, without gradients: what conjugate moves condition on.

        Those of all processes, in the order of their ranks, since a move in closed form may take any function of them.
        """
        if self.processes.size == 1:
            yield from self._outputs(position)
            return
        own = [tree.apply_leaves(lambda leaf: leaf.cpu().clone(), pair) for pair in self._outputs(position)]
        for part in self.processes.gather(own):
            for pair in part:
                yield tree.move(pair, position.device)

    def loop(self, name: str, function: Callable[..., tuple[Tensor, ...]]) -> Loop:
        """`function`, which calls this density, to be repeated many times; a GPU records it once and plays it back."""
        if name not in self._loops:
            several = self.chunks is not None and len(self.chunks) > 1  # long already: nothing is gained by recording 32 of them
            record = self.kind == "cuda" and self.chunks is not None and self.processes.size == 1
            self._loops[name] = Loop(function, record=record, compile=self.compile, lengths=(1,) if several else (32, 1))
        return self._loops[name]

    def check_alike(self) -> None:
        """Raise where the processes have not all been at the same positions."""
        if self.processes.size > 1 and bool(self.apart):
            raise ValueError(
                "the processes were at different positions of the chains, so that their parts of the gradient do not belong together: "
                "they must round alike, which takes machines of one kind with one number of threads, and the same start and seed"
            )

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
                self.here += self.target.count(batch)
                bytes_held += sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(batch))
                if bytes_held <= limit:
                    held.append(batch)
        total = torch.tensor(float(self.here), dtype=torch.float64, device=self.target.model.device)
        self.processes.sum_([total])
        self.seen = int(total)
        if not self.seen:
            raise ValueError("there is no data: the loader gave no batch")
        if bytes_held <= limit:
            self.chunks = held

    def fit_chunks(self, chains: int) -> None:
        """Cut the data that are at hand into as few chunks as memory allows, for so many chains."""
        if not self.chunks:
            return
        joined = self.chunks[0] if len(self.chunks) == 1 else _joined(self.chunks, self.target)
        if joined is None or self._by_hand(joined) or len(self.chunks) == 1:
            return
        first = self.chunks[0]
        position = torch.zeros(chains, self.size, dtype=self.dtype, device=self.target.model.device)
        used = self._footprint(position, first) / self.target.count(first)
        rows = max(1, int(WORKING.get(self.kind, WORKING["cuda"]) / max(1.0, used)))
        if rows < self.target.count(first):
            return
        parts = math.ceil(self.here / rows)
        rows = math.ceil(self.here / parts)
        self._prepared.clear()
        self.chunks = [tree.apply_leaves(lambda leaf, i=i: leaf[i : i + rows], joined) for i in range(0, self.here, rows)]

    def _by_hand(self, batch: Batch) -> bool:
        """Whether a gradient derived by hand takes over, for networks that are known, if it gives what autograd gives."""
        if self.compile:
            return False
        return self._on_gpu(batch) if self.kind == "cuda" else self._on_cpu(batch)

    def _on_cpu(self, batch: Batch) -> bool:
        field = kernels.cpu_field(self.target, batch, self.like) if self.kind == "cpu" else None
        if field is None or not same(field(near := self._near()), self._likelihood(near, batch)):
            return False
        self.hand, self.chunks = field, [batch]
        self.kernel = kernels.cpu_kernel(field, self.target, self.like) if self._whole else None
        return True

    def _on_gpu(self, batch: Batch) -> bool:
        """Whether whole trajectories run without leaving the chip."""
        plan = kernels.gpu_plan(self.target, batch, self.like) if self._whole else None
        if plan is None:
            return False
        self.chunks, near = [batch], self._near()
        if not same(plan.gradient(*self.target.model.split(batch), near), self(near)):
            return False
        self.kernel = kernels.gpu_kernel(plan, self.target, batch)
        return True

    @property
    def _whole(self) -> bool:
        """Whether all data are here, each example counted once: kernels know of nothing else."""
        return self.target.n_data == self.here and self.processes.size == 1

    def _near(self) -> Tensor:
        """Two places around the start, at which a kernel is compared with autograd."""
        noise = torch.randn(2, self.size, dtype=self.dtype, generator=torch.Generator().manual_seed(0))
        start = tree.flatten(self.like)
        return start + 0.1 * noise.to(start.device)

    def _footprint(self, position: Tensor, batch: Batch) -> int:
        """Bytes of all intermediate results of one gradient, from the traced operations."""
        run = self._ready(self._likelihood, position, batch)
        if not isinstance(run, Traced):
            return 4 * sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(batch)) * position.shape[0]
        return run.bytes

    # ---- values and gradients, as plain functions that are traced

    def _summed(self, position: Tensor, likelihood: Tensor | None, slope: Tensor | None) -> tuple[Tensor, Tensor]:
        """The log likelihood and its gradient over all processes, in one sum in float64; those without data add nothing."""
        slope = torch.zeros_like(position) if slope is None else slope
        likelihood = slope.new_zeros(len(position), dtype=torch.float64) if likelihood is None else likelihood
        mark = _mark(position)
        flat = torch.cat([slope.double().flatten(), likelihood, torch.stack([mark, mark**2])])
        self.processes.sum_([flat])
        total, likelihood, marks = flat.split([slope.numel(), len(likelihood), 2])
        self.apart = self.apart | (marks[0] ** 2 != marks[1] * self.processes.size)
        return likelihood, total.view(slope.shape).to(slope.dtype)

    def _outputs(self, position: Tensor) -> Iterator[tuple[Tensor, Any]]:
        """`outputs` of the data that are here."""
        for batch in self._batches():
            x, y = self.target.model.split(batch)
            with self._passing(), torch.no_grad():  # and no longer: what is done with them is not to be in half precision
                f = self._each(lambda row, x=x: self.target.model.call(self.unflatten(row), x, self.buffers)[0], position)
            yield f, y

    def _likelihood(self, position: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum of log likelihoods [C] in float64, and its gradient [C, P]."""
        with self._passing():
            return self._differentiated(partial(self._score, batch), position)

    def _scores(self, position: Tensor, batch: Batch) -> Tensor:
        """`_likelihood` without the gradient."""
        with self._passing(), torch.no_grad():
            return self._each(partial(self._score, batch), position)

    def _score(self, batch: Batch, row: Tensor) -> Tensor:
        model, params = self.target.model, self.unflatten(row)
        x, y = model.split(batch)
        with nullcontext() if self.target.around is None else self.target.around({**self.buffers, **params}):
            f, _ = model.call(params, x, self.buffers)
        return model.score(f, y, params).double().sum()

    @contextmanager
    def _passing(self) -> Iterator[None]:
        precision = self.target.precision
        with in_mode(self.target.model.network, False), torch.autocast(self.kind, precision) if precision else nullcontext():
            yield

    def _prior(self, position: Tensor, _: Batch) -> tuple[Tensor, Tensor]:
        return self.prior(position)

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
        if (prepared := self._prepared.get(len(position))) is None:
            prepared = [(self._ready(self._likelihood, position, batch), batch) for batch in self.chunks]
            self._prepared[len(position)] = prepared
        return prepared

    def _ready(self, function: Callable, position: Tensor, batch: Batch) -> Callable:
        shapes = tuple((tuple(leaf.shape), leaf.dtype) for leaf in tree.leaves(batch))
        key = (function.__name__, tuple(position.shape), shapes, repr(_others(batch)))
        if key not in self._traced:
            if len(self._traced) >= TRACED:  # batches that are all different: a trace for each would cost more than it saves
                return function
            self._traced[key] = self._trace(function, position, batch)
        return self._traced[key]

    def _trace(self, function: Callable, position: Tensor, batch: Batch) -> Callable:
        try:
            if not all(isinstance(value, bool | int | float | str) for value in _others(batch)):
                raise TypeError("there may be tensors in this batch that a tracer would take for constants")
            # on a GPU whole steps are compiled, with the updates around the gradient
            return Traced(
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

    def _steady(self, function: Callable, position: Tensor, batch: Batch) -> None:
        """A network that gives another answer every time has no density: nothing that is accepted or rejected would mean anything."""
        (one, _), (two, _) = function(position, batch), function(position, batch)
        if not alike(one, two, self.target.precision is not None):
            raise ValueError(
                "the network gives another output every time it is called, also in eval mode: its posterior cannot be sampled. Is "
                "there dropout or noise that does not look at `self.training`?"
            )


def same(values: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Whether a kernel gives what autograd gives, within rounding, measured by the largest entry.

    A chain that goes on starts where large terms of the gradient cancel. What is not finite cannot be compared, and so is not the same.
    """
    return all(
        bool(theirs.isfinite().all()) and torch.allclose(mine, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))
        for mine, theirs in zip(values, wanted, strict=True)
    )


def _mark(position: Tensor) -> Tensor:
    """A whole number below 2^16 that changes with every bit of a position: its square, summed over a thousand processes, is exact."""
    bits = position.detach().view(torch.int64 if position.dtype.itemsize == 8 else torch.int32)
    return (bits.sum() % 2**16).double()


@contextmanager
def _same_order(data: Any) -> Iterator[None]:
    """Make a loader that shuffles give its batches in the same order every time, so that the density is one function."""
    with fork_rng(), borrowed_generators(data.source if isinstance(data, Batches) else data) as generators:
        reseed(generators, 0)
        yield


def _others(value: Any) -> list[Any]:
    """The values in a batch that are not tensors, None, or plain dicts, lists and tuples of them."""
    if type(value) in (dict, list, tuple):
        return [other for item in (value.values() if type(value) is dict else value) for other in _others(item)]
    return [] if value is None or isinstance(value, Tensor) else [value]


def _joined(batches: Sequence[Any], target: Target) -> Any:
    """All batches as one, or None where they cannot be put together."""
    if any(map(_others, batches)):
        return None
    columns = [list(tree.leaves(batch)) for batch in batches]
    sizes = [target.count(batch) for batch in batches]
    for leaves, size in zip(columns, sizes, strict=True):
        same = all(a.shape[1:] == b.shape[1:] and a.dtype == b.dtype for a, b in zip(leaves, columns[0], strict=False))
        if len(leaves) != len(columns[0]) or not same or any(leaf.ndim == 0 or leaf.shape[0] != size for leaf in leaves):
            return None
    whole = iter([torch.cat(parts) for parts in zip(*columns, strict=True)])
    return tree.apply_leaves(lambda _: next(whole), batches[0])


Differentiate = Callable[
    [Callable[[Tensor], Tensor], Tensor], tuple[Tensor, Tensor]
]  # of one row, at [C, P]: values and gradient


class FlatPrior:
    """log p of positions [C, P] that hold the leaves of `like` one after another, in float64, and its gradient [C, P].

    `precision` [P] is set where the prior is independent normals, with nothing learned that has a prior of its own: then `normal` is
    all there is to compute, and nothing has to be traced. `differentiate` computes values and gradients of any other prior.
    """

    def __init__(self, target: Target, like: Params, differentiate: Differentiate):
        self.target, self.like, self.differentiate = target, like, differentiate
        self.precision, self.constant = self._normals()

    def __call__(self, position: Tensor) -> tuple[Tensor, Tensor]:
        if self.precision is not None:
            return self.normal(position)
        prior = self.target.model.prior
        if isinstance(prior, Factorized) and not any(":" in name for name in self.like):
            # all weights have the same density, independently: of all leaves at once, with the slope in closed form
            return self.constant + prior.density(position.double()).sum(1), prior.slope(position)
        with _unchecked(self.target.model.likelihood):
            return self.differentiate(self._row, position)

    def normal(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Value and gradient for independent normals."""
        assert self.precision is not None
        pull = position * self.precision
        return self.constant - 0.5 * (pull * position).sum(1), -pull.to(position.dtype)

    def _row(self, row: Tensor) -> Tensor:
        return self.target.log_prior(tree.unflatten(row.double(), self.like)).double()

    def _normals(self) -> tuple[Tensor | None, float]:
        """The precisions [P] of a prior of independent normals, and the constant of its log density."""
        model, zeros = self.target.model, {n: torch.zeros_like(leaf, dtype=torch.float64) for n, leaf in self.like.items()}
        live = {name: leaf.detach().clone().requires_grad_() for name, leaf in likelihood_params(self.like).items()}
        prior = model.prior
        if type(prior) is not Normal or model.likelihood.log_prior(live).requires_grad:
            return None, 0.0 if live else float(model.likelihood.log_prior({}))
        precision = {n: zero if ":" in n else torch.full_like(zero, prior.scale_of(n)) ** -2 for n, zero in zeros.items()}
        at_zero = prior.log_prob({name: zero for name, zero in zeros.items() if ":" not in name})
        return tree.flatten(precision), float(at_zero) + float(model.likelihood.log_prior(likelihood_params(self.like)))


@contextmanager
def _unchecked(likelihood: Likelihood) -> Iterator[None]:
    """The prior of a learned noise without torch's checks: they cannot be traced, and a NaN is to be a divergence, not an error."""
    prior = getattr(likelihood, "prior", None)
    checked = list(_nested(prior)) if isinstance(prior, Distribution) else []
    before = [vars(distribution).get("_validate_args") for distribution in checked]
    for distribution in checked:
        distribution._validate_args = False
    try:
        yield
    finally:
        for distribution, checks in zip(checked, before, strict=True):
            if checks is None:
                del distribution._validate_args
            else:
                distribution._validate_args = checks


def _nested(distribution: Distribution) -> Iterator[Distribution]:
    """A distribution and those it is made of: a log-normal one is a normal one, transformed, which checks for itself."""
    yield distribution
    for part in vars(distribution).values():
        if isinstance(part, Distribution):
            yield from _nested(part)
