r"""A Bayesian model is three parts, a network, a likelihood and a prior; a `Target` is the posterior they define on data.

The network is never rewritten: it runs with other weights in the places of its own, and these and its mode are put back. Meanwhile
other threads wait for it.
"""

from __future__ import annotations

import copy
import re
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.overrides import TorchFunctionMode

from dubito import tree
from dubito.likelihoods import Likelihood, own
from dubito.priors import Normal, Prior, concerned
from dubito.randomness import forked
from dubito.tree import Buffers, Params

LABELS = ("labels", "label", "targets", "target", "y")


def split_batch(batch: Any) -> tuple[Any, Any]:
    """The default reading of a batch as (inputs, targets).

    A pair is (x, y). A longer list or tuple is several inputs, then the targets. A dict, as Hugging Face collators make, has its
    targets under "labels" (or label, targets, target, y), and the rest are the network's keyword arguments.

    >>> split_batch({"input_ids": 1, "attention_mask": 2, "labels": 3})
    ({'input_ids': 1, 'attention_mask': 2}, 3)
    """
    if hasattr(batch, "keys") and hasattr(batch, "__getitem__"):
        for name in LABELS:
            if name in batch:
                return {key: batch[key] for key in batch if key != name}, batch[name]
        raise ValueError(f"a batch with the keys {list(batch)} has none of {LABELS}: give Model(split=...) that returns (x, y)")
    if isinstance(batch, list | tuple) and len(batch) >= 2:
        return (batch[0] if len(batch) == 2 else tuple(batch[:-1])), batch[-1]
    raise ValueError(f"a batch is (inputs, targets) or a dict with labels; got a {type(batch).__name__}: give Model(split=...)")


def pick_output(out: Any) -> Tensor:
    """The default reading of what a network returns: a tensor, or `.logits`, `["logits"]`, or the first of a tuple."""
    if isinstance(out, Tensor):
        return out
    if hasattr(out, "logits"):
        return out.logits
    if isinstance(out, dict) and "logits" in out:
        return out["logits"]
    if isinstance(out, list | tuple) and out and isinstance(out[0], Tensor):
        return out[0]
    raise ValueError(f"the network returns a {type(out).__name__}: give Model(output=...) that picks the tensor of outputs")


def batch_size(y: Any) -> int:
    """Examples in a batch, from its targets."""
    return next(iter(tree.leaves(y))).shape[0]


_LOCKS: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()  # pyright: ignore[reportGeneralTypeIssues]
_LOCKING = threading.Lock()


def alone(network: nn.Module) -> AbstractContextManager:
    """For one thread at a time: who runs a network with other weights or in another mode must have it for itself."""
    try:
        return _LOCKS[network]
    except KeyError:
        with _LOCKING:
            return _LOCKS.setdefault(network, threading.RLock())


@contextmanager
def mode(network: nn.Module, train: bool) -> Iterator[None]:
    """The network in train or eval mode for a while. `network.train` is called, so a module's own idea of it is respected."""
    with alone(network):
        before = [(module, module.training) for module in network.modules()]
        if all(training == train for _, training in before):
            yield
            return
        try:
            network.train(train)
            yield
        finally:
            for module, training in before:
                module.training = training


@contextmanager
def swapped(network: nn.Module, weights: Params) -> Iterator[None]:
    """The network with other tensors in the places of its own, for a while; what it makes of its buffers goes into `weights`.

    This is what `torch.func.functional_call` does, in half the time, which for small networks is a tenth of a training step. Tied
    parameters have one name, that of their first place, and are swapped in all.
    """
    names: dict[int, str] = {}
    places: list[tuple[dict[str, Any], str, Tensor, str]] = []
    recurrent: list[tuple[nn.RNNBase, Any, Any]] = []  # these keep a list of their weights
    written: list[
        tuple[dict[str, Any], dict[str, Tensor]]
    ] = []  # what hooks before a pass make of weights: pruned or normed ones
    with alone(network):
        for prefix, module in network.named_modules():
            if isinstance(module, nn.RNNBase):
                recurrent.append((module, module._flat_weights, module._flat_weight_refs))
            if module._forward_pre_hooks:
                written.append((vars(module), _made(module)))
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    if tensor is not None:
                        name = names.setdefault(id(tensor), f"{prefix}.{key}" if prefix else key)
                        if name in weights:
                            places.append((tensors, key, tensor, name))
        try:
            for tensors, key, _, name in places:
                tensors[key] = weights[name]
            with _recurrent([module for module, _, _ in recurrent]) if recurrent else nullcontext():
                yield
        finally:
            for tensors, key, tensor, name in places:
                weights[name], tensors[key] = tensors[key], tensor
            for module, flat, references in recurrent:
                module._flat_weights, module._flat_weight_refs = flat, references
            for attributes, before in written:
                attributes.update(before)


@contextmanager
def _recurrent(layers: list[nn.RNNBase]) -> Iterator[None]:
    """nn.LSTM and its kin with the weights that they have now.

    Left to themselves they lay weights that they have not seen before side by side for cuDNN, in new memory, and move the *tensors that
    were given* there: a recorded CUDA graph would go on with the old memory, which is anyone's by then. So that they do not, they are
    told that these are what they had; cuDNN then makes a copy of its own, and says so. In eval mode it keeps nothing for a backward
    pass, and refuses it: where one may come, torch's own kernels run.
    """
    cudnn = torch.backends.cudnn
    refuses = cudnn.enabled and torch.is_grad_enabled() and not all(layer.training for layer in layers)
    for layer in layers:
        layer._flat_weights = [getattr(layer, name, None) for name in layer._flat_weights_names]
        layer._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in layer._flat_weights]
    with warnings.catch_warnings(), cudnn.flags(enabled=False) if refuses else nullcontext():
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        yield


def _made(module: nn.Module) -> dict[str, Tensor]:
    """What hooks make of a module's weights, beside them: a pruned or normed one."""
    tensors = [(key, value) for key, value in vars(module).items() if isinstance(value, Tensor)]
    kept = module._parameters
    return {key: value for key, value in tensors if not value.is_leaf or f"{key}_orig" in kept or f"{key}_g" in kept}


def copied(network: nn.Module) -> nn.Module:
    """A deep copy. What pruning and old norms keep beside their weights is of a graph, which torch does not copy: it is detached."""
    made = {
        id(v): v.detach().clone() for m in network.modules() for v in vars(m).values() if isinstance(v, Tensor) and not v.is_leaf
    }
    with alone(network):
        return copy.deepcopy(network, made)


def outputs_last(f: Tensor, dim: int) -> Tensor:
    """What a network gives, with its outputs along `dim`, as [B, *D, C]."""
    if f.ndim == 0:
        raise ValueError("the network gives one number for a whole batch, of one example perhaps: use squeeze(-1), not squeeze()")
    if f.ndim == 1:
        return f.unsqueeze(-1)
    return f if dim == -1 else f.movedim(dim, -1)


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
        if out.ndim == 1 and len(out) > 1 and _is_one(x, len(out)):
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
        watch, again = _Strangers(self.network, params), set[str]()
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


class _Strangers(TorchFunctionMode):
    """Notes which of a network's own parameters, of those that are inferred, enter what has a slope: while others stand in their places
    none should. Who asks one for its size, type or device may do so."""

    def __init__(self, network: nn.Module, inferred: Params):
        super().__init__()
        self.names = {id(p): name for name, p in network.named_parameters() if name in inferred}
        self.found: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        results = out if isinstance(out, list | tuple) else (out,)
        if any(isinstance(one, Tensor) and one.requires_grad and id(one) not in self.names for one in results):
            for one in (*args, *(kwargs or {}).values()):
                for leaf in one if isinstance(one, list | tuple) else (one,):
                    if id(leaf) in self.names:
                        self.found.add(self.names[id(leaf)])
        return out


def _is_one(x: Any, n: int) -> bool:
    """Whether inputs are of one example rather than of n: by the first axis of all, or, of sequences with time first, the second."""
    leaves = [leaf for leaf in tree.leaves(x) if isinstance(leaf, Tensor) and leaf.ndim]
    later = any(leaf.ndim > 1 and leaf.shape[1] == n and (leaf.ndim > 2 or not leaf.is_floating_point()) for leaf in leaves)
    return any(leaf.ndim > 1 for leaf in leaves) and all(len(leaf) == 1 for leaf in leaves) and not later


class Evaluation(NamedTuple):
    """The gradient of the log joint at some weights, and what came along."""

    gradient: Params
    buffers: Buffers
    log_likelihood: Tensor  # [] or [S]: mean per example


@dataclass(frozen=True)
class Target:
    r"""What a method samples, maximises or approximates: :math:`(p(D \mid \theta)\, p(\theta))^{1/T}`.

    The scaling of a batch to the whole data, N / B, and the temperature live here and nowhere else. `data` is an iterable of
    batches: one for a mini-batch step, several to accumulate, all of them for a full-batch method, for which N / B is 1.

    The other fields are for combinators, which change how a method sees the data without its knowing. `members`: leaves are stacked
    [S, ...] and all S are evaluated in one batched pass. `around`: a context for every forward pass, given its weights. `weights`:
    how often each example of each batch counts, [B] or [S, B]. `adversary`: a step for every input element; each example is
    averaged with its adversarial neighbour x + step sign(d loss / dx) (fast gradient sign).
    """

    model: Model
    n_data: int
    temperature: float = 1.0
    precision: torch.dtype | None = None
    members: int | None = None
    around: Callable[[Params], AbstractContextManager] | None = None
    weights: tuple[Tensor, ...] | None = None
    adversary: Tensor | None = None

    def __post_init__(self):
        if self.n_data < 1 or not self.temperature > 0:
            raise ValueError(f"n_data must be at least 1 and the temperature positive; got {self.n_data} and {self.temperature}")

    def log_prior(self, params: Params) -> Tensor:
        """log p(theta), the prior of the weights, of its own hyperparameters and of what the likelihood learns; [S] if stacked."""

        def one(params: Params) -> Tensor:
            noise = self.model.likelihood.log_prior(own(params)).to(self.model.device)
            return self.model.prior.log_prob(concerned(params)) + noise

        return one(params) if self.members is None else vmap(one)(params)

    def log_joint(self, params: Params, data: Iterable[Any], buffers: Buffers | None = None) -> Tensor:
        """(N/B sum log p(y | x, theta) + log p(theta)) / T, without gradients; [] or [S], in float64."""
        buffers = self.model.buffers() if buffers is None else buffers
        total, seen = torch.zeros((), dtype=torch.float64, device=self.model.device), 0
        with torch.no_grad():
            for i, batch in enumerate(data):
                value, _ = self._summed(params, i, batch, buffers, train=False)
                total, seen = total + value.double(), seen + self._size(batch)
            return (self.n_data / seen * total + self.log_prior(params)) / self.temperature

    def gradient(
        self, params: Params, data: Iterable[Any], buffers: Buffers, *, train: bool = False, factor: float = 1.0
    ) -> Evaluation:
        """Gradient of `factor` times the log joint. The prior's gradient is analytic; autograd sees the likelihood only."""
        live = {name: leaf.detach().requires_grad_() for name, leaf in params.items()}
        leaves, factor = list(live.values()), factor / self.temperature
        total, seen, first = None, 0, 1
        for i, batch in enumerate(data):
            size = self._size(batch)
            first = size if total is None else first
            with torch.enable_grad():
                value, buffers = self._summed(live, i, batch, buffers, train=train)
            # The scale enters at the top of the backward pass, where it costs nothing, as if the first batch were all the data. The
            # sum builds up in `leaf.grad`, of which torch makes sure that nothing else shares it: it may be changed in place.
            torch.autograd.backward(value, torch.full_like(value, factor * self.n_data / first), inputs=leaves)
            total, seen = value.detach() if total is None else total + value.detach(), seen + size
        if total is None:
            raise ValueError("there is no data: the loader gave no batch")
        gradient = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in live.items()}
        with torch.no_grad():
            if seen != first:
                torch._foreach_mul_(list(gradient.values()), first / seen)
            self._add_prior(gradient, params, factor)
        buffers = {name: leaf.detach() for name, leaf in buffers.items()}
        return Evaluation(gradient, buffers, total / seen)

    def _size(self, batch: Any) -> int:
        return batch_size(self.model.split(batch)[1])

    def _add_prior(self, gradient: Params, params: Params, factor: float) -> None:
        """Add the gradient of `factor` times the log prior: of weights, hyperparameters, and what the likelihood learns."""
        prior, believed = self.model.prior, concerned(params)
        if self.members is None or prior.stacks:
            prior.add_gradient(gradient, believed, factor)
        else:
            for name, slope in vmap(prior.gradient)(believed).items():
                gradient[name].add_(slope, alpha=factor)
        learned = {name: leaf.detach().requires_grad_() for name, leaf in own(params).items()}
        if learned:
            with torch.enable_grad():
                value = self.model.likelihood.log_prior(learned)
                if value.requires_grad:
                    for name, slope in zip(learned, torch.autograd.grad(value, list(learned.values())), strict=True):
                        gradient[name].add_(slope, alpha=factor)

    def _summed(self, params: Params, index: int, batch: Any, buffers: Buffers, *, train: bool) -> tuple[Tensor, Buffers]:
        """Sum of log likelihoods over a batch, [] or [S], and the buffers after it."""
        x, y = self.model.split(batch)
        weights = None if self.weights is None else self.weights[index]

        def score(params: Params, x: Any, buffers: Buffers) -> tuple[Tensor, Buffers]:
            with nullcontext() if self.around is None else self.around({**buffers, **params}):
                f, buffers = self.model.call(params, x, buffers)
            return self.model.score(f, y, params), buffers

        def one(params: Params, buffers: Buffers, weights: Tensor | None) -> tuple[Tensor, Buffers]:
            scores, after = score(params, x, buffers)
            if self.adversary is not None:
                # running statistics follow the real examples only
                frozen = {name: leaf.detach() for name, leaf in params.items()}
                slope = grad(lambda x: -score(frozen, x, {n: b.clone() for n, b in after.items()})[0].sum())(x)
                near = x + self.adversary * slope.sign()
                scores = 0.5 * (scores + score(params, near, {n: b.clone() for n, b in after.items()})[0])
            return (scores if weights is None else scores * weights).sum(), after

        kind = self.model.device.type
        with mode(self.model.network, train), torch.autocast(kind, self.precision) if self.precision else nullcontext():
            if self.members is None:
                return one(params, buffers, weights)
            # Parameters that are not Bayesian are the same for all members: they are neither stacked nor returned.
            fixed = {name: leaf for name, leaf in self.model.network.named_parameters() if name in buffers}
            shared = {name: leaf for name, leaf in buffers.items() if name in fixed}
            stacked = {name: leaf for name, leaf in buffers.items() if name not in fixed}

            def member(params: Params, stacked: Buffers, weights: Tensor | None) -> tuple[Tensor, Buffers]:
                value, after = one(params, {**shared, **stacked}, weights)
                return value, {name: after[name] for name in stacked}

            in_dims = (0, 0, None if weights is None else 0)
            value, after = vmap(member, in_dims=in_dims, randomness="different")(params, stacked, weights)
            return value, {**shared, **after}
