r"""Dropout that stays on, in any network, without touching the network.

A `TorchFunctionMode` sees every torch call that a forward pass makes. It answers the calls of dropout (modules or functional,
whatever the mode) with masks of ours, and puts masks on the inputs of the layers that were named, which it knows by their weights.

Masks are *consistent* (one draw is one function: the same mask for all inputs, a hash of the draw's seed and the position, so the
same on every device, batch and chunk) or *independent* (new ones for every input).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dubito.model import Model
from dubito.network.examples import Inputs
from dubito.network.inspect import layers_of
from dubito.network.recurrent import RECURRENT, unrolled
from dubito.network.weights import in_mode
from dubito.tensors.randomness import derive_seed, fork_rng
from dubito.tensors.shares import draw_rows
from dubito.tensors.tree import Params, as_tuple

PREFIX = "dropout:"
WEIGHTED = {F.linear, F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d}
ELEMENTS = {F.dropout, F.alpha_dropout}
CHANNELS = {F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3, F.feature_alpha_dropout: None}
ALPHA = {F.alpha_dropout, F.feature_alpha_dropout}
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
PLACES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.RNNBase)
SATURATION = -1.7580993408473766  # -scale * alpha of SELU: where alpha dropout sends what it drops


def _signed(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant


def hashed_uniform(seed: Tensor, site: str, shape: tuple[int, ...]) -> Tensor:
    """Uniform numbers in [0, 1) that depend on nothing but the seed, the site and the position (splitmix64)."""

    def shifted(z: Tensor, by: int) -> Tensor:  # torch's shift is arithmetic
        """A logical shift to the right."""
        return (z >> by) & ((1 << (64 - by)) - 1)

    z = torch.arange(1, math.prod(shape) + 1, device=seed.device) * _signed(0x9E3779B97F4A7C15)
    z = (seed ^ derive_seed(site)) * _signed(0xD1342543DE82EF95) + z
    z = (z ^ shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ shifted(z, 27)) * _signed(0x94D049BB133111EB)
    z = z ^ shifted(z, 31)
    return (shifted(z, 40).float() * 2.0**-24).reshape(shape)


def _all_but(names: list[str]) -> str:
    """A pattern that `re.search` finds in all names but these.

    >>> [name for name in ("embed", "head", "head2") if re.search(_all_but(["head"]), name)]
    ['embed', 'head2']
    """
    return f"^(?!({'|'.join(map(re.escape, names))})$)"


@dataclass(frozen=True)
class Dropout:
    """Where and how weights or activations are dropped.

    `sites` maps the names of layers to the rate at which their inputs are dropped (embedding: whole word types; recurrent layer:
    its input and its state, one mask for all time steps). The network's own dropout is always on. `recurrent="sequence"` draws one
    mask a sequence, `"batch"` one a batch, which runs at full speed through the recurrent weights. `batch_first` says where time and
    batch stand in a recurrent network (None: not recurrent), since there every mask is shared over time.
    """

    sites: Mapping[str, float] = field(default_factory=dict)
    words: tuple[str, ...] = ()  # the sites that are embeddings
    recurrent: Literal["sequence", "batch"] = "sequence"
    batch_first: bool | None = None

    @staticmethod
    def find(network: nn.Module, at: str | None, rate: float, recurrent: Literal["sequence", "batch"] = "sequence") -> Dropout:
        """The network's own dropout and, if `at` is given, new places: layers whose name it matches (`re.search`). For "", layers that
        share their weight are one place, with the name of the first."""
        flags = {module.batch_first for module in layers_of(network, nn.RNNBase).values()}
        if len(flags) > 1:
            raise ValueError("the network mixes recurrent layers with and without batch_first: masks cannot be shared over time")
        sites: dict[str, float] = {}
        if at is not None:
            fit = list(places(network))
            sites = {name: rate for name in fit if re.search(at, name)}
            if at == "":
                sites = {name: rate for name in sites if not _is_copy(network, name)}
            if not sites:
                raise ValueError(
                    f"at={at!r} names no layer whose input can be dropped (linear, convolution, embedding or recurrent); "
                    f"this network has {fit}"
                )
        embeddings = layers_of(network, nn.Embedding)
        words = tuple(name for name in sites if name in embeddings)
        return Dropout(sites, words, recurrent, flags.pop() if flags else None)

    def check(self, model: Model, x: Inputs) -> None:
        """Raise, with advice, if there is no dropout in the network at all, or a place where it never comes to be, or where time and
        sequences stand the other way round than in the recurrent layers."""
        own = any(drops(module) for module in model.network.modules())
        scripted = layers_of(model.network, torch.jit.ScriptModule)
        if unseen := [name for name, module in scripted.items() if "Dropout" in module.original_name]:
            raise ValueError(
                f"the dropout {unseen} is inside a ScriptModule, where masks do not reach it: give the module that it was made from"
            )
        if self.batch_first is None and not self.sites and own:
            return
        params, buffers = model.parameters(), model.buffers()
        probe = Masks(self, {**buffers, **params})
        with fork_rng(0), torch.no_grad(), in_mode(model.network, False), probe:
            model.call(params, x, buffers)
        self._check_order(probe)
        if missed := [site for site in self.sites if site not in probe.hit]:
            others = "" if len(missed) == len(self.sites) else f", as by MCDropout(at={_all_but(missed)!r})"
            raise ValueError(
                f"dropout cannot be put on the inputs of {missed}: their weights are tied, parametrized (weight norm), inside "
                f"nn.MultiheadAttention, or not used; leave them out of `at`{others}, or put nn.Dropout into the network"
            )
        if not probe.dropped and not self.sites and not own:
            fit = list(places(model.network))
            raise ValueError(
                "this network has no dropout to keep on. Either put nn.Dropout layers into it, or name the layers whose inputs are to "
                f"be dropped, as MCDropout(at={fit[-1] if fit else 'head'!r}, rate=0.1); the layers are {fit}, and at='' takes all"
            )

    def _check_order(self, probe: Masks) -> None:
        """A mask is shared over the axis of time. Where sequences stand there, all would have one mask, and every word another."""
        batch = int(self.batch_first is False)
        for site, shape in probe.laid:
            if probe.sequences is not None and shape[batch] != probe.sequences and shape[1 - batch] == probe.sequences:
                kind, other = ("sequences", "time") if self.batch_first else ("time", "sequences")
                raise ValueError(
                    f"the recurrent layers of this network have {kind} first (batch_first={self.batch_first}), but the dropout at "
                    f"{site} has {other} first, {list(shape)}, so that its masks cannot be shared over time: build the recurrent "
                    f"layers with batch_first={not self.batch_first}, or transpose before that dropout"
                )

    @property
    def plain(self) -> bool:
        """Whether training needs nothing but the network's own dropout in train mode."""
        return not self.sites and self.batch_first is None


def places(network: nn.Module) -> dict[str, nn.Module]:
    """The layers whose inputs can be dropped, by name: those of torch, and what other libraries call a `Linear` layer."""
    return {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, PLACES) or (type(module).__name__ == "Linear" and isinstance(module.weight, Tensor))
    }


def _is_copy(network: nn.Module, name: str) -> bool:
    """Whether the weight of a layer is a parameter that an earlier layer has, too, as of a head that is tied to an embedding."""
    weight = getattr(network.get_submodule(name), "weight", None)
    first = next((known for known, leaf in network.named_parameters() if leaf is weight), None)
    return first is not None and first != f"{name}.weight".lstrip(".")


def learned_rates(dropout: Dropout, weights: Params) -> Dropout:
    """The same places with the rates that were learned for them (concrete dropout), as numbers."""
    logits = {site: weights[PREFIX + site] for site in dropout.sites if PREFIX + site in weights}
    return replace(
        dropout, sites={**dropout.sites, **{site: float(torch.sigmoid(one).squeeze()) for site, one in logits.items()}}
    )


def drops(module: nn.Module) -> bool:
    """Whether a layer has dropout of its own."""
    if isinstance(module, DROPOUTS):
        return module.p > 0
    rate = getattr(module, "dropout", 0.0)  # nn.LSTM and nn.MultiheadAttention keep their rate so
    return isinstance(module, nn.RNNBase | nn.MultiheadAttention) and isinstance(rate, float) and rate > 0


@dataclass
class Folding:
    """Dropout whose consistent mask can be put on the columns of the next layer's weights, instead of on a copy of the activations
    for every draw: the layers after a dropout layer in an `nn.Sequential`, and, as a first pass has seen, the call that feeds each."""

    layers: frozenset[str] = frozenset()  # names of their weights
    calls: dict[int, str] = field(default_factory=dict)  # what is known to feed one of them, and nothing else
    seen: dict[int, str] = field(default_factory=dict)  # what a pass that is going on has shown
    shared: set[int] = field(default_factory=set)

    @staticmethod
    def of(network: nn.Module) -> Folding:
        """The dropout layers of a network whose masks can go on the weights of the layer behind them."""
        found = set()
        for prefix, module in network.named_modules():
            names = list(module._modules) if type(module) is nn.Sequential else []
            for before, after in pairwise(names):
                pair = module._modules[before], module._modules[after]
                watched = any(m is None or m._forward_hooks or m._forward_pre_hooks for m in pair)
                if type(pair[0]) is nn.Dropout and type(pair[1]) is nn.Linear and not watched:
                    found.add(f"{prefix}.{after}.weight".lstrip("."))
        return Folding(frozenset(found))


class Masks(TorchFunctionMode):
    """One forward pass with dropout on. `seed` (a scalar, maybe batched by vmap) makes masks consistent; None, independent."""

    def __init__(
        self,
        dropout: Dropout,
        weights: Params,
        *,
        seed: Tensor | None = None,
        relax: float | None = None,
        folding: Folding | None = None,
    ):
        super().__init__()
        self.dropout, self.seed, self.relax, self.calls, self.dropped = dropout, seed, relax, 0, False
        self.folding = Folding() if folding is None or seed is None else folding
        self.foldable = {id(weights[name]): name for name in self.folding.layers if name in weights}
        self.made: dict[int, tuple[Tensor, int]] = {}  # what dropout gave, and in which call
        self.waiting: dict[int, tuple[Tensor, Tensor | None]] = {}  # what is to be masked, and how; None once it has been
        self.broken = False  # whether something else than the next layer has seen it
        self.hit: set[str] = set()  # the places that a pass has come to
        self.laid: list[tuple[str, tuple[int, ...]]] = []  # where masks are shared over time, and the shapes there
        self.sequences: int | None = None  # how many the recurrent layers were given
        self.logits = {site: weights.get(PREFIX + site) for site in dropout.sites}
        names = {f"{site}.{name}".lstrip("."): site for site in dropout.sites for name in ("weight", "weight_ih_l0")}
        self.by_weight = {id(weights[name]): site for name, site in names.items() if name in weights}

    def keep(self, site: str, shape: tuple[int, ...], rate: float | Tensor, device: torch.device, batch_axis: int = 0) -> Tensor:
        """Which entries are kept; the batch axis has length 1 if masks are consistent."""
        self.dropped = True
        if self.seed is not None:
            return hashed_uniform(self.seed, site, (*shape[:batch_axis], 1, *shape[batch_axis + 1 :])) >= rate
        if isinstance(rate, Tensor):
            return draw_rows(lambda shape: torch.rand(shape, device=device), shape, batch_axis) >= rate

        def kept(shape: Sequence[int]) -> Tensor:
            """The two halves of 64-bit integers cost less than floats do, and masks are most of the work."""
            count, limit = math.prod(shape), round(rate * 2**32)
            bits = torch.randint(-(2**63), 2**63 - 1, ((count + 1) // 2,), device=device)
            return torch.cat([(bits & (2**32 - 1)) >= limit, (bits >> 32) >= limit - 2**31])[:count].reshape(shape)

        return draw_rows(kept, shape, batch_axis)

    def mask(self, site: str, shape: tuple[int, ...], rate: float | Tensor, like: Tensor, batch_axis: int = 0) -> Tensor | None:
        """Kept entries hold 1 / keep, dropped ones 0; None where nothing is dropped."""
        learned = isinstance(rate, Tensor)
        if not learned and rate in (0, 1):
            return like.new_zeros([1] * len(shape)) if rate else None
        if learned and self.relax is not None:  # concrete dropout: a smooth mask that lets the rate learn
            uniform = draw_rows(lambda shape: torch.rand(shape, device=like.device), shape, batch_axis).clamp(1e-6, 1 - 1e-6)
            drop = torch.sigmoid((torch.logit(rate) + torch.logit(uniform)) / self.relax)
            return ((1 - drop) / (1 - rate)).to(like.dtype)
        return (self.keep(site, shape, rate, like.device, batch_axis) / (1 - rate)).to(like.dtype)

    def apply(self, x: Tensor, site: str, shape: tuple[int, ...], rate: float | Tensor, batch_axis: int = 0) -> Tensor:
        """x with dropout."""
        if isinstance(rate, Tensor) or rate in (0, 1):
            mask = self.mask(site, shape, rate, x, batch_axis)
            return x if mask is None else x * mask
        # scaled before it is copied for every draw
        return x * (1 / (1 - rate)) * self.keep(site, shape, rate, x.device, batch_axis)

    def _rate(self, site: str) -> float | Tensor:
        logit = self.logits[site]
        return self.dropout.sites[site] if logit is None else torch.sigmoid(logit.squeeze(-1))

    def _tied(self, shape: torch.Size, site: str) -> tuple[tuple[int, ...], int]:
        """The shape of a mask for an activation, and its batch axis: in recurrent nets the time axis is shared."""
        batch_first = self.dropout.batch_first
        if batch_first is None or len(shape) != 3:
            return tuple(shape), 0
        self.laid.append((site, tuple(shape)))
        return ((shape[0], 1, shape[2]), 0) if batch_first else ((1, shape[1], shape[2]), 1)

    def __torch_function__(self, func: Callable, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in ELEMENTS or func in CHANNELS:
            return self._own(func, *args, **kwargs)
        if self.made or self.waiting:
            self._watch(func, args, kwargs)
        weight = id(args[1]) if args[1:] else 0
        if func in WEIGHTED and weight in self.by_weight and self.by_weight[weight] not in self.dropout.words:
            return self._placed(func, args, kwargs)
        if func is F.linear and weight in self.foldable:
            return self._folded(func, args, kwargs)
        if func is F.embedding and self.by_weight.get(weight) in self.dropout.words:
            return self._word_types(func(*args, **kwargs), args[0], args[1])
        if func in RECURRENT:
            return self._recurrent(func, args)
        if func is F.multi_head_attention_forward and len(args) > 10 and args[10] > 0:
            # torch drops attention weights inside this call, independently for every input even if masks are consistent
            wanted = kwargs.get("need_weights", True)
            out, weights = func(*args, **{**kwargs, "training": True, "need_weights": True})
            return out, weights if wanted else None
        return func(*args, **kwargs)

    def _own(self, func: Callable, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        site = f"#{self.calls}"
        self.calls += 1
        shape, batch_axis = tuple(input.shape), 0
        if func in CHANNELS:  # whole channels: every axis after them is shared
            spatial = CHANNELS[func]
            channel = input.ndim - 1 - spatial if spatial is not None else 1
            shape = (*input.shape[: channel + 1], *[1] * (input.ndim - channel - 1))
        else:
            shape, batch_axis = self._tied(input.shape, "one of its own layers")
        if func is F.dropout and self.foldable and input.ndim == 2 and 0 < p < 1:
            return self._foldable(input, site, p)
        if func not in ALPHA or p == 0:
            return self.apply(input, site, shape, p, batch_axis)
        keep = self.keep(site, shape, p, input.device, batch_axis).to(input.dtype)
        a = ((1 - p) * (1 + p * SATURATION**2)) ** -0.5
        return a * (input * keep + SATURATION * (1 - keep)) - a * SATURATION * p

    def _foldable(self, input: Tensor, site: str, p: float) -> Tensor:
        """Dropout as usual, and note what it gave; or, where it is known that the next layer takes it, leave the mask to that."""
        call = self.calls - 1
        if call not in self.folding.calls:
            out = self.apply(input, site, tuple(input.shape), p)
            self.made[id(out)] = (out, call)
        else:
            out = input * (1 / (1 - p))
            self.waiting[id(out)] = (out, self.keep(site, tuple(input.shape), p, input.device))
        return out

    def _watch(self, func: Callable, args: tuple[Any, ...], kwargs: dict) -> None:
        """Masks can be left to the next layer only if nothing else ever sees the activations: look at all that any call is given."""
        for i, value in enumerate([*args, *kwargs.values()]):
            for leaf in as_tuple(value):
                meant = i == 0 and func is F.linear and id(args[1]) in self.foldable
                if id(leaf) in self.made and not meant:
                    self.folding.shared.add(self.made[id(leaf)][1])
                if id(leaf) in self.waiting and not (meant and self.waiting[id(leaf)][1] is not None):
                    self.broken = True

    def _folded(self, func: Callable, args: tuple[Any, ...], kwargs: dict) -> Tensor:
        x, weight, *rest = args
        if id(x) in self.made:
            call = self.made[id(x)][1]
            if call in self.folding.seen:
                self.folding.shared.add(call)
            self.folding.seen[call] = self.foldable[id(weight)]
        known = self.waiting.get(id(x))
        if known is not None and known[1] is not None:
            weight, self.waiting[id(x)] = weight * known[1], (x, None)
        return func(x, weight, *rest, **kwargs)

    def close(self) -> bool:
        """At the end of a pass: learn from it, and say whether all masks found their place."""
        self.folding.calls |= {call: name for call, name in self.folding.seen.items() if call not in self.folding.shared}
        self.folding.seen.clear()
        return not self.broken and all(mask is None for _, mask in self.waiting.values())

    def _placed(self, func: Callable, args: tuple[Any, ...], kwargs: dict) -> Tensor:
        """Drop what enters a layer: features of a linear one, channels of a convolution, so that a mask is a draw of weights."""
        x, site = args[0], self.by_weight[id(args[1])]
        self.hit.add(site)
        batch_axis = 0
        if func is not F.linear:
            shape = (x.shape[0], x.shape[1], *[1] * (x.ndim - 2))
        elif self.seed is not None:  # the same for all inputs: a mask on the columns of the weights, which are fewer
            mask = self.mask(site, (1, x.shape[-1]), self._rate(site), args[1])
            return func(x, args[1] if mask is None else args[1] * mask, *args[2:], **kwargs)
        else:
            shape, batch_axis = self._tied(x.shape, f"the input of {site!r}")
        return func(self.apply(x, site, shape, self._rate(site), batch_axis), *args[1:], **kwargs)

    def _word_types(self, out: Tensor, ids: Tensor, table: Tensor) -> Tensor:
        """Drop words, not positions: every occurrence of a word in a sequence shares its fate."""
        site, batch_axis = self.by_weight[id(table)], 1 if self.dropout.batch_first is False and ids.ndim > 1 else 0
        self.hit.add(site)
        if ids.ndim == 2:
            self.laid.append((f"the words of {site!r}", tuple(ids.shape)))
        mask = self.mask(site, (ids.shape[batch_axis], table.shape[0]), self._rate(site), out)
        if mask is None:
            return out
        first = ids.movedim(batch_axis, 0)  # [B, *T]
        kept = mask.expand(first.shape[0], -1).gather(1, first.reshape(first.shape[0], -1)).reshape(first.shape)
        return out * kept.movedim(0, batch_axis).unsqueeze(-1)

    def _recurrent(self, func: Callable, args: tuple) -> Any:
        """One mask for all time steps, on the input and the state of every layer of an nn.LSTM, nn.GRU or nn.RNN."""
        where = 2 if isinstance(args[2], list) else 3  # packed sequences have one more argument before the weights
        flat, between, bidirectional = args[where], args[where + 3], args[where + 5]
        site = self.by_weight.get(id(flat[0]))
        self.hit |= {site} if site is not None else set()
        self.sequences = args[where - 1][0].shape[-2] if isinstance(args[where - 1], tuple) else args[where - 1].shape[-2]  # of h
        name = site or f"#{self.calls}"
        self.calls += 1
        placed = 0.0 if site is None else self._rate(site)

        def mask(part: str, shape: tuple[int, ...]) -> Tensor | None:
            """The mask of one part of the layer, or None where its rate is zero."""
            own = between if part.startswith("input") and part != "input0" else 0.0
            shape = (1, *shape[1:]) if self.dropout.recurrent == "batch" else shape
            return self.mask(f"{name}/{part}", shape, own or placed, flat[0])

        without = (*args[: where + 3], 0.0, *args[where + 4 :])
        if self.seed is None and self.dropout.recurrent == "sequence":
            return unrolled(RECURRENT[func], without, mask)
        # a mask shared by the batch is a mask on the columns of the weights, and torch's own kernel can run
        directions = ["", ".reverse"] if bidirectional else [""]
        step = len(flat) // (args[where + 2] * len(directions))
        masked = list(flat)
        for layer in range(args[where + 2]):
            inputs = mask(f"input{layer}", (1, flat[layer * len(directions) * step].shape[1]))
            for d, direction in enumerate(directions):
                first = (layer * len(directions) + d) * step
                state = mask(f"hidden{layer}{direction}", (1, flat[first + 1].shape[1]))
                masked[first] = flat[first] if inputs is None else flat[first] * inputs
                masked[first + 1] = flat[first + 1] if state is None else flat[first + 1] * state
        return func(*without[:where], masked, *without[where + 1 :])
