"""A Bayesian model is three parts: a network, a likelihood and a prior."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dubito.model.likelihoods import Likelihood, likelihood_params
from dubito.model.priors import Normal, Prior
from dubito.network.examples import (
    Batch,
    Inputs,
    Targets,
    arguments,
    batch_size,
    explain,
    is_one_example,
    outputs_last,
    pick_output,
    split_batch,
)
from dubito.network.inspect import (
    EMBEDDINGS,
    check_embeddings,
    close,
    layers_of,
    run_backward,
    run_batch,
    warn_of_gradient_hooks,
)
from dubito.network.weights import exclusive, in_mode, with_weights
from dubito.tensors import randomness, tree
from dubito.tensors.checks import of_type, require
from dubito.tensors.tree import Buffers, Params

SCALE_OF_NUMBERS, SCALE_OF_CLASSES = 2.0, 3.0  # of the default prior


class Inspection(NamedTuple):
    """What `Model.check` found out about a network that passed."""

    output: Tensor  # for the batch, in eval mode, [B, *D, C]
    doubtful: (
        bool  # two examples alone may have other outputs than in the batch: the network is random, mixes examples, or took no two
    )


def _matches(pattern: str, names: list[str]) -> bool:
    return any(re.search(pattern, name) for name in names)


@dataclass(frozen=True)
class Model:
    """A network, what its output means, and what is believed of its weights beforehand.

    Where no prior is given, a weight with n inputs has N(0, s^2 / n), so that the size of functions does not depend on the width of the
    network, and a bias has N(0, 1): `Normal.fan_in(network, s, bias=1.0, learned=True)`. s is 2 for numbers and 3 for classes, whose
    logits are larger than standardized targets (docs/priors.md has the evidence).

    `only` picks the Bayesian parameters by `re.search` over their names; the rest, and what is frozen (`requires_grad=False`), stay as
    they start. BatchNorm statistics follow the data in training all the same. `split` reads a batch as
    (x, y); x is a tensor for `net(x)`, a tuple for `net(*x)` or a dict for `net(**x)`. `output` picks the tensor from what the
    network returns.

    With `coupled` the rows of a batch may depend on each other (nodes of a graph, attention among rows): a batch is a whole that is
    never cut, and its inputs need not have as many rows as its outputs.

    >>> import dubito
    >>> model = Model(nn.Linear(2, 1), dubito.Gaussian(scale=0.1), only="weight")
    >>> list(model.parameters())
    ['weight']
    """

    network: nn.Module
    likelihood: Likelihood
    prior: Prior = None  # pyright: ignore[reportAssignmentType]  # replaced before anyone sees it
    only: str = ""
    split: Callable[[Batch], tuple[Inputs, Targets]] = field(default=split_batch, kw_only=True)
    output: Callable[[Any], Tensor] = field(default=pick_output, kw_only=True)
    coupled: bool = field(default=False, kw_only=True)

    def __post_init__(self):
        of_type(nn.Module, "a torch.nn.Module", network=self.network)
        if isinstance(self.network, nn.parallel.DistributedDataParallel):
            object.__setattr__(self, "network", self.network.module)
            warnings.warn(
                "The network is taken out of DistributedDataParallel: fit adds up the gradients of all processes itself.",
                stacklevel=3,  # the call of Model
            )
        of_type(Likelihood, "an object such as dubito.Categorical() or dubito.Gaussian()", likelihood=self.likelihood)
        names = [name for name, _ in self.network.named_parameters()]
        every = [name for name, _ in self.network.named_parameters(remove_duplicate=False)]  # tied ones by all their names
        listed = f"{names[:8]}{'...' if names[8:] else ''}"
        require(names, "the network has no parameters, so there is nothing to infer")
        lazy = [name for name, p in self.network.named_parameters() if nn.parameter.is_lazy(p)]
        require(not lazy, f"{lazy[:8]} have no shapes yet: call the network on a batch before you make a model of it")
        scale = SCALE_OF_CLASSES if self.likelihood.discrete else SCALE_OF_NUMBERS
        prior = Normal.fan_in(self.network, scale, bias=1.0, learned=True) if self.prior is None else self.prior
        of_type(Prior, "an object such as dubito.priors.Normal(scale=1.0)", prior=prior)
        object.__setattr__(self, "prior", prior if prior.normal is None else prior.normal.of(self.network))
        patterns = [p for p in self.prior.patterns if p not in ("weight", "bias")]  # which a network may do without
        unmatched = [pattern for pattern in patterns if not _matches(pattern, names)]
        require(
            not unmatched, f"the prior's pattern {(unmatched or [''])[0]!r} matches no parameter of the network; it has {listed}"
        )
        require(_matches(self.only, every), f"only={self.only!r} matches no parameter of the network; it has {listed}")

    @property
    def device(self) -> torch.device:
        """Where the network's parameters are."""
        return next(self.network.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the network's parameters, to which NumPy's float64 inputs are converted; of complex ones that of their parts."""
        return next(self.network.parameters()).dtype.to_real()

    def parameters(self, y: Targets = None) -> Params:
        """Copies of the Bayesian parameters as they stand, and what likelihood and prior learn at its start."""
        with exclusive(self.network):
            bayesian = self._bayesian()
            weights: Params = {name: p for name, p in self.network.named_parameters() if name in bayesian}
        if not weights:
            raise ValueError(
                "all parameters of the network (that `only` names) are frozen: set requires_grad_() on those to infer"
            )
        if imaginary := [name for name, leaf in weights.items() if leaf.is_complex()]:
            raise ValueError(
                f"the parameters {imaginary} are complex, but priors and posteriors are over real numbers: keep real and imaginary "
                "parts as one real parameter [..., 2] and use torch.view_as_complex in forward, or leave them out by only=..."
            )
        if any(leaf.is_meta for leaf in weights.values()):
            raise ValueError(
                "the network is on the meta device, where weights have no values: network.to_empty(device='cpu'), then load them"
            )
        found = {**self.likelihood.parameters(y), **self.prior.parameters(tree.apply(torch.detach, weights))}
        # noise levels and prior scales are learned in the precision of the weights, but never in half precision
        learned: Params = tree.move(found, self.device, self.dtype if self.dtype.itemsize > 4 else None)
        return tree.clone({**weights, **learned})

    def buffers(self) -> Buffers:
        """Copies of all that is not Bayesian: the network's buffers, and the parameters that `only` leaves out."""
        with exclusive(self.network):
            bayesian = self._bayesian()
            fixed = {name: p for name, p in self.network.named_parameters() if name not in bayesian}
            return tree.clone({**dict(self.network.named_buffers()), **fixed})

    def padding(self) -> dict[str, int]:
        """Rows of embeddings that stand for padding, by the name of the weight: torch holds their gradients at zero, so data say
        nothing of them, and they are constants rather than weights. Not of one that is tied to a layer which uses the row."""
        with exclusive(self.network):
            every, rows = list(self.network.named_parameters(remove_duplicate=False)), {}
            for module in layers_of(self.network, EMBEDDINGS).values():
                if module.padding_idx is not None:
                    rows[id(module.weight)] = module.padding_idx
        places = Counter(id(p) for _, p in every)
        return {name: rows[id(p)] for name, p in every if id(p) in rows and places[id(p)] == 1}

    def _bayesian(self) -> set[str]:
        """The names of what is inferred. A tied weight goes by its first name, and is meant by any."""
        every = self.network.named_parameters(remove_duplicate=False)
        meant = {id(p) for name, p in every if p.requires_grad and re.search(self.only, name)}
        return {name for name, p in self.network.named_parameters() if id(p) in meant}

    def forward(self, params: Params, x: Inputs, buffers: Buffers, *, train: bool = False) -> tuple[Tensor, Buffers]:
        """f with C last, [B, *D, C], and the buffers after the pass. In train mode the buffers given may change in place."""
        with in_mode(self.network, train):
            return self.call(params, x, buffers)

    def call(self, params: Params, x: Inputs, buffers: Buffers) -> tuple[Tensor, Buffers]:
        """`forward` in the mode the network is in."""
        weights = {**buffers, **{name: leaf for name, leaf in params.items() if ":" not in name}}
        args, kwargs = arguments(x)
        with with_weights(self.network, weights):
            try:
                out = self.output(self.network(*args, **kwargs))
            except (RuntimeError, TypeError) as error:
                explain(x, self.dtype, error)
                raise
        f = outputs_last(out, self.likelihood.dim)
        if out.ndim == 1 and len(out) > 1 and not self.coupled and is_one_example(x, len(out)):
            raise ValueError(
                f"the network gives {len(out)} numbers without a batch axis for one example, which could as well be {len(out)} "
                "examples: use squeeze(-1), not squeeze()"
            )
        return f, {name: weights[name] for name in buffers}

    def log_likelihood(self, params: Params, batch: Batch, buffers: Buffers, *, train: bool = False) -> tuple[Tensor, Buffers]:
        """log p(y | x, theta) of every example, [B], and the buffers after the pass; dense outputs are summed over positions."""
        x, y = self.split(batch)
        f, buffers = self.forward(params, x, buffers, train=train)
        return self.score(f, y, params), buffers

    def score(self, f: Tensor, y: Targets, params: Params) -> Tensor:
        """log p(y | f) of every example, [B]."""
        f = f.float() if f.dtype.itemsize < 4 else f  # a sum of log probabilities needs more than half precision
        score = self.likelihood.objective(f, self.likelihood.target(y, f), likelihood_params(params))  # [B, *D]
        return score.flatten(1).sum(1) if score.ndim > 1 else score

    def check(self, params: Params, batch: Batch, buffers: Buffers) -> Inspection:
        """Run the network on a batch, and forwards and backwards on two of its examples (on all of them if they are coupled); raise an
        error that says what to change where network, likelihood and data do not fit together."""
        x, y = self.split(batch)

        def run(params: Params, x: Inputs) -> Tensor:
            """f in the mode the network is in."""
            return self.call(params, x, tree.clone(buffers))[0]

        with exclusive(self.network):  # its own parameters are compared with those that are used
            check_embeddings(self.network, params)
            before = randomness.positions()
            f = run_batch(self.network, run, params, x)
            drew = before != randomness.positions()
            if f.shape[0] != batch_size(y):
                raise ValueError(
                    f"the network gives {f.shape[0]} outputs for {batch_size(y)} targets: the first axis must be the batch"
                )
            self.likelihood.check(f, y)
            again = run_backward(self.network, run, params, x, whole=self.coupled)
        warn_of_gradient_hooks(self.network, params)
        return Inspection(f, doubtful=drew or again is None or not close(again, f if self.coupled else f[:2].flip(0)))
