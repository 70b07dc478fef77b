"""A Bayesian model is three parts: a network, a likelihood and a prior."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dubito.model.likelihoods import Likelihood, own
from dubito.model.priors import Normal, Prior
from dubito.network.examples import batch_size, is_one_example, outputs_last, pick_output, split_batch
from dubito.network.inspect import Strangers
from dubito.network.weights import alone, mode, swapped
from dubito.tensors import tree
from dubito.tensors.randomness import forked
from dubito.tensors.tree import Buffers, Params


@dataclass(frozen=True)
class Model:
    """A network, what its output means, and what is believed of its weights beforehand.

    `only` picks the Bayesian parameters by `re.search` over their names; the rest, and what is frozen (`requires_grad=False`), stay as
    they start. BatchNorm statistics follow the data in training all the same. `split` reads a batch as
    (x, y); x is a tensor for `net(x)`, a tuple for `net(*x)` or a dict for `net(**x)`. `output` picks the tensor from what the
    network returns.

    >>> import dubito
    >>> model = Model(nn.Linear(2, 1), dubito.Gaussian(scale=0.1), only="weight")
    >>> list(model.parameters())
    ['weight']
    """

    network: nn.Module
    likelihood: Likelihood
    prior: Prior = field(default_factory=Normal)
    only: str = ""
    split: Callable[[Any], tuple[Any, Any]] = field(default=split_batch, kw_only=True)
    output: Callable[[Any], Tensor] = field(default=pick_output, kw_only=True)

    def __post_init__(self):
        if not isinstance(self.network, nn.Module):
            raise TypeError(f"the network is a torch.nn.Module; got a {type(self.network).__name__}")
        if not isinstance(self.likelihood, Likelihood):
            given = self.likelihood.__name__ if isinstance(self.likelihood, type) else type(self.likelihood).__name__
            raise TypeError(f"the likelihood is an object such as dubito.Categorical() or dubito.Gaussian(); got {given}")
        if not isinstance(self.prior, Prior):
            given = self.prior.__name__ if isinstance(self.prior, type) else type(self.prior).__name__
            raise TypeError(f"the prior is an object such as dubito.priors.Normal(scale=1.0); got {given}")
        names = [name for name, _ in self.network.named_parameters()]
        listed = f"{names[:8]}{'...' if names[8:] else ''}"
        if not names:
            raise ValueError("the network has no parameters, so there is nothing to infer")
        for pattern in self.prior.patterns:  # a slip of the pen would leave those parameters to the rest, without a word
            kind = pattern in ("weight", "bias")  # which a network may do without
            if not kind and not any(re.search(pattern, name) for name in names):
                raise ValueError(f"the prior's pattern {pattern!r} matches no parameter of the network; it has {listed}")
        if not any(re.search(self.only, name) for name, _ in self.network.named_parameters(remove_duplicate=False)):
            raise ValueError(f"only={self.only!r} matches no parameter of the network; it has {listed}")

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def parameters(self, y: Any = None) -> Params:
        """Copies of the Bayesian parameters as they stand, and what likelihood and prior learn at its start."""
        with alone(self.network):
            bayesian = self._bayesian()
            weights: Params = {name: p for name, p in self.network.named_parameters() if name in bayesian}
        if not weights:
            raise ValueError(
                "all parameters of the network (that `only` names) are frozen: set requires_grad_() on those to infer"
            )
        kind = next(self.network.parameters())
        found = {**self.likelihood.parameters(y), **self.prior.parameters(tree.apply(torch.detach, weights))}
        # noise levels and prior scales are learned in the precision of the weights, but never in half precision
        learned: Params = tree.move(found, kind.device, kind.dtype if kind.dtype.itemsize > 4 else None)
        return tree.clone({**weights, **learned})

    def buffers(self) -> Buffers:
        """Copies of all that is not Bayesian: the network's buffers, and the parameters that `only` leaves out."""
        with alone(self.network):
            bayesian = self._bayesian()
            fixed = {name: p for name, p in self.network.named_parameters() if name not in bayesian}
            return tree.clone({**dict(self.network.named_buffers()), **fixed})

    def padding(self) -> dict[str, int]:
        """Rows of embeddings that stand for padding, by the name of the weight: torch holds their gradients at zero, so data say
        nothing of them, and they are constants rather than weights. Not of one that is tied to a layer which uses the row."""
        with alone(self.network):
            every, rows = list(self.network.named_parameters(remove_duplicate=False)), {}
            for module in self.network.modules():
                if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.padding_idx is not None:
                    rows[id(module.weight)] = module.padding_idx
        places = Counter(id(p) for _, p in every)
        return {name: rows[id(p)] for name, p in every if id(p) in rows and places[id(p)] == 1}

    def _bayesian(self) -> set[str]:
        """The names of what is inferred. A tied weight goes by its first name, and is meant by any."""
        every = self.network.named_parameters(remove_duplicate=False)
        meant = {id(p) for name, p in every if p.requires_grad and re.search(self.only, name)}
        return {name for name, p in self.network.named_parameters() if id(p) in meant}

    def forward(self, params: Params, x: Any, buffers: Buffers, *, train: bool = False) -> tuple[Tensor, Buffers]:
        """f with C last, [B, *D, C], and the buffers after the pass. In train mode the buffers given may change in place."""
        with mode(self.network, train):
            return self.call(params, x, buffers)

    def call(self, params: Params, x: Any, buffers: Buffers) -> tuple[Tensor, Buffers]:
        """`forward` in the mode the network is in."""
        weights = {**buffers, **{name: leaf for name, leaf in params.items() if ":" not in name}}
        args, kwargs = ((), x) if isinstance(x, dict) else (tuple(x) if isinstance(x, list | tuple) else (x,), {})
        with swapped(self.network, weights):
            out = self.output(self.network(*args, **kwargs))
        f = outputs_last(out, self.likelihood.dim)
        if out.ndim == 1 and len(out) > 1 and is_one_example(x, len(out)):
            raise ValueError(
                f"the network gives {len(out)} numbers without a batch axis for one example, which could as well be {len(out)} "
                "examples: use squeeze(-1), not squeeze()"
            )
        return f, {name: weights[name] for name in buffers}

    def log_likelihood(self, params: Params, batch: Any, buffers: Buffers, *, train: bool = False) -> tuple[Tensor, Buffers]:
        """log p(y | x, theta) of every example, [B], and the buffers after the pass; dense outputs are summed over positions."""
        x, y = self.split(batch)
        f, buffers = self.forward(params, x, buffers, train=train)
        return self.score(f, y, params), buffers

    def score(self, f: Tensor, y: Any, params: Params) -> Tensor:
        """log p(y | f) of every example, [B]."""
        f = f.float() if f.dtype.itemsize < 4 else f  # a sum of log probabilities needs more than half precision
        score = self.likelihood.log_prob(f, self.likelihood.target(y, f), own(params))  # [B, *D]
        return score.flatten(1).sum(1) if score.ndim > 1 else score

    def check(self, params: Params, batch: Any, buffers: Buffers) -> None:
        """A pass over one batch that fails early and in words where the network, the likelihood and the data do not fit."""
        with alone(self.network):  # whose own weights are compared with those that enter
            self._check(params, batch, buffers)

    def _check(self, params: Params, batch: Any, buffers: Buffers) -> None:
        x, y = self.split(batch)
        x = tree.apply_leaves(torch.clone, x)
        versions = [leaf._version for leaf in tree.leaves(x)]
        try:
            with torch.no_grad():
                f, _ = self.forward(params, x, tree.clone(buffers))
        except RuntimeError as error:
            whole = [leaf.dtype for leaf in tree.leaves(x) if not leaf.is_floating_point()]
            if "type" not in str(error) or not whole:  # whole numbers may well be words or classes, which networks look up
                raise
            kind = str(whole[0]).removeprefix("torch.")
            raise TypeError(
                f"the inputs are {kind}, which the network does not take ({error}): give numbers with fractions, as x.float(), or of "
                "images x.float() / 255"
            ) from error
        if versions != [leaf._version for leaf in tree.leaves(x)]:
            raise ValueError(
                "the network changes its input in place, so a second pass over the same batch would see another input: write "
                "x = x - mean instead of x -= mean, and no inplace=True on the first layer"
            )
        if f.shape[0] != batch_size(y):
            raise ValueError(
                f"the network gives {f.shape[0]} outputs for {batch_size(y)} targets: the first axis must be the batch"
            )
        if f.isnan().any() and any(leaf.is_floating_point() and not leaf.isfinite().all() for leaf in tree.leaves(x)):
            raise ValueError(
                "the inputs hold NaN or infinity, and the network makes NaN of them: fill such values in, x.nan_to_num(0.0), or leave "
                "those rows out"
            )
        self.likelihood.check(f, y)
        inferred = {id(p) for name, p in self.network.named_parameters() if name in params}
        for name, module in self.network.named_modules():
            own = isinstance(module, nn.Embedding | nn.EmbeddingBag) and id(module.weight) in inferred
            if own and (module.max_norm is not None or module.scale_grad_by_freq):
                raise ValueError(
                    f"the embedding {name!r} has max_norm or scale_grad_by_freq, with which its gradient is not that of any posterior: "
                    "leave them out (a prior holds weights near zero)"
                )
        self._inspect(params, x, buffers)

    def _inspect(self, params: Params, x: Any, buffers: Buffers) -> None:
        """A pass there and back, of two examples at most, that finds what would make wrong gradients without a word."""
        if any(isinstance(m, torch.jit.ScriptModule) or hasattr(m, "_orig_mod") for m in self.network.modules()):
            return  # compiled: other sizes would compile it again, and nothing can look inside
        live = {name: leaf.detach().clone().requires_grad_(leaf.is_floating_point()) for name, leaf in params.items()}
        watch, again = Strangers(self.network, params), set[str]()
        names = {id(module): name for name, module in self.network.named_modules()}
        with warnings.catch_warnings(), forked(), torch.enable_grad(), ExitStack() as meanwhile:
            warnings.simplefilter("ignore")
            try:
                few = tree.apply_leaves(lambda leaf: leaf[:2].clone() if leaf.ndim else leaf, x)
                with watch:
                    f, _ = self.forward(live, few, tree.clone(buffers), train=True)
                listen = nn.modules.module.register_module_forward_pre_hook
                seen = listen(lambda module, _: again.add(names[id(module)]) if id(module) in names else None)
                meanwhile.callback(seen.remove)
                torch.autograd.grad(f.float().sum(), [leaf for leaf in live.values() if leaf.requires_grad], allow_unused=True)
            except Exception as error:  # it may not take so few; the whole batch it has taken
                again |= {"parts of itself"} if "torch.utils.checkpoint" in str(error) else set()
        if watch.found:
            raise ValueError(
                f"the network reaches {sorted(watch.found)} by another way than the attribute of its module (a list, a closure), where "
                "no other weights can be put: write self.layer.weight in forward, and keep lists of weights in an nn.ParameterList"
            )
        if again:
            raise ValueError(
                f"the network computes {', '.join(sorted(again))} again in the backward pass (activation checkpointing), when its "
                "own weights are back in their places: turn that off, as network.gradient_checkpointing_disable(), and take "
                "smaller batches, or fit(accumulate=...), to save memory"
            )
        hooked = [name for name, p in self.network.named_parameters() if name in params and p._backward_hooks]
        if hooked:
            warnings.warn(
                f"hooks on the gradients of {hooked} will not be called, since other tensors stand in their places: to hold some "
                "weights fixed, freeze them (requires_grad=False, or only=...) or mask them in forward",
                stacklevel=4,
            )
