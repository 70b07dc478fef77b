r"""Fully connected networks on a CPU: the gradient of many chains at once, derived by hand.

Autograd and vmap make some fifty operations of a small network's gradient, each of which takes longer to start than to do. Here are
about ten, for all chains together, whose results stay in the cache: [C, H, N], N contiguous, for C chains, H units and N data.

One hidden layer of rectified units and one output, f = u . max(0, W x), has less still to do. A bias of W is a column that meets an
input of 1; a bias of u is a unit with the weights (0, ..., 0, 1). With :math:`M_{hn}` whether unit h is on at datum n, and
:math:`\delta_n = \partial \log p / \partial f_n`,

.. math:: S = (M \circ \delta) X, \qquad \nabla_W = u \circ S, \qquad \nabla_u = (W \circ S) 1,

the last since a rectified unit that is on is linear: its output is W x. `trajectories_cpu` runs whole trajectories in this layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dubito.inference.kernels.kernel import all_bayesian, is_hooked, is_plain, is_real, offsets
from dubito.model import Target
from dubito.model.likelihoods import NOISE, Categorical, Gaussian, Likelihood
from dubito.network.examples import Batch, Inputs, Targets
from dubito.tensors import tree
from dubito.tensors.tree import Params

CACHE = 200_000  # numbers in the activations of a group of chains that is run together: they should stay in a core's own cache
ACTIVATIONS = {nn.ReLU: "relu", nn.Tanh: "tanh", nn.SiLU: "silu"}
PASSED = (nn.Dropout, nn.Identity)  # do nothing to a network that is not being trained

Climb = Callable[[bool], Tensor | None]
aten = torch.ops.aten


@dataclass(frozen=True)
class Layer:
    """A linear layer: its sizes, and where its weight and bias start in the vector of a chain; -1 for a bias there is not."""

    fan_in: int
    fan_out: int
    weight: int
    bias: int


@dataclass(frozen=True)
class Network:
    """Linear layers with an activation between each two of them, under a likelihood."""

    layers: tuple[Layer, ...]
    activations: tuple[str, ...]
    likelihood: Likelihood
    noise: int  # where the logarithm of a learned noise is, or -1
    size: int


def recognize(target: Target, batch: Batch, like: Params) -> Network | None:
    """What the network of a posterior is made of, or None where it is not exactly of the kind that is known here.

    `nn.Linear` with ReLU, Tanh or SiLU between, in an `nn.Sequential` without hooks; all parameters Bayesian; Gaussian noise, known or
    learned, or classes.
    """
    model = target.model
    linear, activations = _stack(model.network)
    x, y = model.split(batch)
    if not linear or not is_plain(target) or not _known(model.likelihood) or not _fits(x, y, like):
        return None
    if not all_bayesian(like, linear):
        return None
    starts = offsets(like)
    layers = tuple(
        Layer(layer.in_features, layer.out_features, starts[f"{key}.weight"], starts.get(f"{key}.bias", -1))
        for key, layer in linear.items()
    )
    return Network(layers, activations, model.likelihood, starts.get(NOISE, -1), tree.size(like))


def _fits(x: Inputs, y: Targets, like: Params) -> bool:
    """Whether the data are plain tensors on a CPU, all in the precision of the weights."""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or x.ndim != 2 or x.device.type != "cpu":
        return False
    return is_real(x.dtype) and all(leaf.dtype == x.dtype for leaf in like.values())


def _known(likelihood: Likelihood) -> bool:
    if type(likelihood) is Categorical:
        return likelihood.dim == -1 and likelihood.scale == 1.0
    if type(likelihood) is not Gaussian:
        return False
    return likelihood.dim == -1 and (likelihood.scale is None or isinstance(likelihood.scale, float))


def _stack(network: nn.Module) -> tuple[dict[str, nn.Linear], tuple[str, ...]]:
    """The linear layers by name, and the activations between them; nothing for another network."""
    if type(network) is not nn.Sequential or any(map(is_hooked, network.modules())):
        return {}, ()
    kept = [(key, layer) for key, layer in network.named_children() if type(layer) not in PASSED]
    linear = {key: layer for key, layer in kept[::2] if type(layer) is nn.Linear}
    activations = tuple(ACTIVATIONS[type(layer)] for _, layer in kept[1::2] if type(layer) in ACTIVATIONS)
    alternate = len(kept) >= 3 and len(linear) == len(activations) + 1 and len(linear) + len(activations) == len(kept)
    joined = all(a.out_features == b.in_features for a, b in pairwise(linear.values()))
    once = len({id(layer) for layer in linear.values()}) == len(linear)
    return (linear, activations) if alternate and joined and once else ({}, ())


def field(target: Target, batch: Batch, like: Params) -> Field | None:
    """What computes the log likelihood of `batch` and its gradient, or None where this network is not known."""
    network = recognize(target, batch, like)
    if network is None:
        return None
    x, y = target.model.split(batch)
    f = x.new_empty(len(x), network.layers[-1].fan_out)
    y = network.likelihood.target(y, f)
    if network.likelihood.indexed and network.likelihood.observed(y) is not None:
        return None
    simple = len(network.layers) == 2 and network.activations == ("relu",) and f.shape[1] == 1
    return (Rectified if simple and not network.likelihood.indexed else Dense)(network, x, y)


class Field:
    """The log likelihood and its gradient at rows [C, P'], which hold the weights in the order that suits the network."""

    size: int  # P'

    def __init__(self, network: Network, x: Tensor, y: Tensor):
        self.network, self.count = network, len(x)
        widest = max(layer.fan_out for layer in network.layers) + 1
        together = max(1, CACHE // widest)  # data that one chain works on at a time
        parts = math.ceil(len(x) / together) if len(x) > 2 * together else 1
        self.blocks = [self.block(a, b) for a, b in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True)]
        self.group = max(1, CACHE // (widest * len(self.blocks[0][0])))
        self.memory = Memory(x)
        self.ready: dict[int, tuple[Tensor, Tensor, list[Climb]]] = {}

    def block(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """Some of the data, as they are used; the first [n, ...]."""
        raise NotImplementedError

    def lift(self, position: Tensor) -> Tensor:
        """Weights [C, P] as rows."""
        return position

    def raise_(self, vectors: Tensor) -> Tensor:
        """Velocities or lengths as rows: what stands for no weight has none."""
        return vectors

    def lower(self, rows: Tensor) -> Tensor:
        """Rows, or the gradient there, as weights, in memory of their own."""
        return rows.clone()

    def climber(self, q: Tensor, g: Tensor, memory: Memory) -> Climb:
        """A function that writes the gradient at rows q to g and gives the log likelihood [C], float64, if it is wanted.

        Views are taken here, once for many calls while q changes in place: to take one costs as much as a layer of one chain.
        """
        raise NotImplementedError

    def __call__(self, position: Tensor, _: Any = None) -> tuple[Tensor, Tensor]:
        """The log likelihood [C], in float64, and its gradient [C, P]."""
        with torch.no_grad():
            q, g, climbs = self.prepared(len(position))
            q.copy_(self.lift(position))
            values = [value for climb in climbs if (value := climb(True)) is not None]
            return values[0] if len(values) == 1 else torch.cat(values), self.lower(g)

    def prepared(self, chains: int) -> tuple[Tensor, Tensor, list[Climb]]:
        """Rows, a place for the gradient there, and what computes it, for so many chains; the same every time."""
        if chains not in self.ready:
            q, g = self.memory.like.new_empty(2, chains, self.size)
            self.ready[chains] = q, g, [self.climber(q[part], g[part], self.memory) for part in self.parts(chains)]
        return self.ready[chains]

    def parts(self, chains: int, cores: int = 1) -> list[slice]:
        """Chains in groups of about one size, as many for each core, if that leaves them enough to do."""
        needed = max(1, math.ceil(chains / self.group))
        groups = max(needed, min(cores * math.ceil(needed / cores), chains // max(1, self.group // 4)))
        edges = [round(i * chains / groups) for i in range(groups + 1)]
        return [slice(a, b) for a, b in pairwise(edges)]


class Memory:
    """Where results in between are written, the same place every time: what is in the cache stays there."""

    def __init__(self, like: Tensor):
        self.like, self.held = like, {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        size = math.prod(shape)
        if name not in self.held or len(self.held[name]) < size:
            self.held[name] = self.like.new_empty(size)
        return self.held[name][:size].view(shape)


class Rectified(Field):
    """One hidden layer of rectified units and one output, under Gaussian noise."""

    def __init__(self, network: Network, x: Tensor, y: Tensor):
        first, last = network.layers
        self.units, self.width, noise = first.fan_out + 1, first.fan_in + 1, network.likelihood.gaussian
        assert noise is not None
        self.learned = noise.scale is None
        self.precision = 1.0 if noise.scale is None else float(noise.scale) ** -2  # type: ignore[arg-type]
        self.constant = -0.5 * math.log(2 * math.pi) + 0.5 * math.log(self.precision)
        places = torch.full(
            (self.units, self.width), -1
        )  # where each number of a row is in the vector of a chain; -1 for nowhere
        places[:-1, :-1] = first.weight + torch.arange(first.fan_out * first.fan_in).view(first.fan_out, first.fan_in)
        if first.bias >= 0:
            places[:-1, -1] = first.bias + torch.arange(first.fan_out)
        outer = [*range(last.weight, last.weight + first.fan_out), last.bias, *([network.noise] if self.learned else [])]
        into = torch.cat([places.flatten(), torch.tensor(outer)])
        self.size, real = len(into), into >= 0
        self.into, self.real = into.clamp(min=0), real.to(x.dtype)
        self.constants = torch.zeros_like(self.real)
        self.constants[self.units * self.width - 1] = 1  # the unit that is always on
        self.back = torch.empty(network.size, dtype=torch.long)
        self.back[into[real]] = torch.arange(self.size)[real]
        super().__init__(network, x, y)

    def block(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """Inputs with a column of ones, these transposed with their weights and without, and targets, all padded to whole vector
        registers."""
        rows = math.ceil(len(x) / 16) * 16  # whole vector registers: what is added is 0, to which any network here answers 0
        inputs, targets = x.new_zeros(rows, self.width), y.new_zeros(1, 1, rows)
        inputs[: len(x), :-1], inputs[: len(x), -1], targets[0, 0, : len(x)] = x, 1.0, y.reshape(-1)
        turned = inputs.mT.contiguous()
        return inputs, turned * self.precision, turned, targets

    def lift(self, position: Tensor) -> Tensor:
        """Weights as rows, with a unit that is always on for the last bias."""
        return torch.addcmul(self.constants, position.index_select(1, self.into), self.real)

    def raise_(self, vectors: Tensor) -> Tensor:
        """Velocities as rows; constants have none."""
        return vectors.index_select(1, self.into) * self.real

    def lower(self, rows: Tensor) -> Tensor:
        """Rows as weights."""
        return rows.index_select(1, self.back)

    def views(self, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """W [C, H, D], u [C, H] and the log noise [C, 0 or 1] of rows."""
        inner = self.units * self.width
        return (
            q[:, :inner].view(len(q), self.units, self.width),
            q[:, inner : inner + self.units],
            q[:, inner + self.units :],
        )

    def climber(self, q: Tensor, g: Tensor, memory: Memory) -> Climb:
        """The gradient of one hidden layer, by the formulas at the top of this module."""
        chains = len(q)
        (w, u, s), (gw, gu, gs) = self.views(q), self.views(g)
        products = memory("products", chains, self.units, self.width)
        sums = memory(
            "sums", self.width, chains * self.units
        )  # S transposed: MKL is up to three times as fast at X^T A^T as at A X
        slopes = sums.view(self.width, chains, self.units).permute(1, 2, 0)
        across, along = u.unsqueeze(1), u.unsqueeze(2)
        blocks = []
        for i, (x, weighted, turned, y) in enumerate(self.blocks):
            a = memory("a", chains, self.units, len(x))
            r = memory(f"r{i}", chains, 1, len(x))
            spread = r.expand_as(a)
            columns = a.view(chains * self.units, len(x)).mT
            blocks.append((weighted, turned.expand(chains, -1, -1), y.expand(chains, -1, -1), a, columns, r, spread))
        bmm, baddbmm, mm, mask = torch.bmm, torch.baddbmm, torch.mm, aten.threshold_backward.grad_input
        learned, count, nothing = self.learned, self.count, torch.zeros((), dtype=torch.float64)

        def run(valued: bool) -> Tensor | None:
            """One gradient of all chains."""
            tau, total = s.mul(-2).exp_() if learned else s, nothing
            for i, (x, turned, y, a, columns, r, spread) in enumerate(blocks):
                bmm(w, turned, out=a)
                a.relu_()
                baddbmm(y, across, a, alpha=-1, out=r)  # what the network leaves of y
                if learned:
                    total = total + r.square().sum(2, dtype=torch.float64)
                    r.mul_(tau.unsqueeze(2))
                mask(spread, a, 0, grad_input=a)
                if i:
                    sums.addmm_(x, columns)
                else:
                    mm(x, columns, out=sums)
            torch.mul(slopes, along, out=gw)
            torch.mul(slopes, w, out=products)
            torch.sum(products, 2, out=gu)
            if learned:
                weighed = total * tau
                torch.sub(weighed, count, out=gs)
                return (weighed * -0.5 - s.double() * count).squeeze(1) + count * self.constant if valued else None
            if not valued:
                return None
            for *_, r, _ in blocks:
                total = total + r.square().sum((1, 2), dtype=torch.float64)
            return total * (-0.5 * self.precision) + count * self.constant

        return run


class Dense(Field):
    """Any number of layers and outputs."""

    def __init__(self, network: Network, x: Tensor, y: Tensor):
        self.size, self.classes = network.size, network.likelihood.indexed
        super().__init__(network, x, y)

    def block(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """Inputs, also transposed, and targets."""
        return x.contiguous(), x.mT.contiguous(), y.view(1, 1, -1) if self.classes else y.mT.contiguous()

    def climber(self, q: Tensor, g: Tensor, memory: Memory) -> Climb:
        """The gradient by a forward and a backward pass through all layers."""
        weights, slopes = self._leaves(q), self._leaves(g)
        noise = self.network.noise
        width = 0 if noise < 0 else self.network.likelihood.outputs  # type: ignore[attr-defined]
        s, gs = (q[:, noise : noise + width].unsqueeze(2), g[:, noise : noise + width]) if width else (None, None)

        def run(valued: bool) -> Tensor | None:
            """One gradient of all chains."""
            total = None
            for i, (x, turned, y) in enumerate(self.blocks):
                below, f = self._forward(weights, turned.expand(len(q), -1, -1))
                value, delta, risen = self._score(f, y, s, valued)
                if gs is not None and risen is not None:
                    gs.add_(risen) if i else gs.copy_(risen)
                self._backward(weights, slopes, below, delta, x.expand(len(q), -1, -1), add=i > 0)
                total = value if total is None or value is None else total + value
            return total

        return run

    def _leaves(self, q: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        leaves = []
        for layer in self.network.layers:
            w = q[:, layer.weight : layer.weight + layer.fan_in * layer.fan_out].view(len(q), layer.fan_out, layer.fan_in)
            leaves.append((w, q[:, layer.bias : layer.bias + layer.fan_out].unsqueeze(2) if layer.bias >= 0 else None))
        return leaves

    def _forward(self, weights: Sequence[tuple[Tensor, Tensor | None]], h: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """(what goes into an activation where its slope needs it, what comes out) of every activation, and f [C, K, N]."""
        below, a = [], h
        for (w, b), kind in zip(weights, (*self.network.activations, None), strict=True):
            a = torch.bmm(w, h) if b is None else torch.baddbmm(b, w, h)
            if kind is not None:
                h = a.relu_() if kind == "relu" else a.tanh_() if kind == "tanh" else torch.nn.functional.silu(a)
                below.append((a, h))
        return below, a

    def _backward(
        self,
        weights: Sequence[tuple[Tensor, Tensor | None]],
        slopes: Sequence[tuple[Tensor, Tensor | None]],
        below: list[tuple[Tensor, Tensor]],
        delta: Tensor,
        x: Tensor,
        *,
        add: bool,
    ) -> None:
        """Write, or add, the gradients of all layers, from delta [C, K, N], the gradient in f."""
        for i in range(len(weights) - 1, -1, -1):
            slope_of_weight = torch.bmm(delta, below[i - 1][1].mT if i else x)
            for slope, new in zip(slopes[i], (slope_of_weight, delta.sum(2, keepdim=True)), strict=True):
                if slope is not None:
                    slope.add_(new) if add else slope.copy_(new)
            if i:
                w = weights[i][0].mT
                up = w * delta if delta.shape[1] == 1 else torch.bmm(w, delta)
                delta = self._slope(self.network.activations[i - 1], up, *below[i - 1])

    @staticmethod
    def _slope(kind: str, up: Tensor, a: Tensor, h: Tensor) -> Tensor:
        if kind == "relu":
            return aten.threshold_backward(up, h, 0)
        return aten.tanh_backward(up, h) if kind == "tanh" else aten.silu_backward(up, a)

    def _score(self, f: Tensor, y: Tensor, s: Tensor | None, valued: bool) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """The log likelihood [C], its gradient in f [C, K, N], and its gradient in the log noise."""
        if self.classes:
            scores = f.log_softmax(1)
            index = y.expand(len(f), -1, -1)
            value = scores.gather(1, index).sum((1, 2), dtype=torch.float64) if valued else None
            delta = scores.exp_().neg_()
            return value, delta.scatter_add_(1, index, delta.new_ones(()).expand(index.shape)), None
        left, (_, outputs, count) = y - f, f.shape
        constant = -0.5 * math.log(2 * math.pi) * outputs * count
        if s is None:
            precision = self.network.likelihood.scale**-2  # type: ignore[attr-defined]
            value = None
            if valued:
                value = left.square().sum((1, 2), dtype=torch.float64) * (-0.5 * precision)
                value = value + (constant + 0.5 * outputs * count * math.log(precision))
            return value, left.mul_(precision), None
        tau = (-2 * s).exp_()
        weighed = left.square().sum(2, dtype=torch.float64) * tau.squeeze(2)  # [C, K]
        if s.shape[1] == 1:
            weighed, count = weighed.sum(1, keepdim=True), count * outputs
        value = (-0.5 * weighed - count * s.squeeze(2).double()).sum(1) + constant if valued else None
        return value, left.mul_(tau), weighed - count
