"""Monte Carlo dropout (Gal & Ghahramani 2016), its recurrent form, and learned rates (concrete dropout)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import nn

from dubito.inference.descent import Descent, DescentState
from dubito.inference.method import Start, Traits
from dubito.model import Target
from dubito.model.likelihoods import PREFIX as LIKELIHOOD
from dubito.model.priors import Normal
from dubito.network.examples import Batch
from dubito.network.inspect import layers_of
from dubito.posteriors import Posterior, Stochastic
from dubito.posteriors.predict.dropout import DROPOUTS, PREFIX, Dropout, Masks
from dubito.tensors import store
from dubito.tensors.checks import at_least, between, one_of, require
from dubito.tensors.tree import Params

RELAXATION = 0.1  # temperature of the concrete distribution


def dropout_precision(*, length_scale: float, keep: float, n_data: int, weight_decay: float) -> float:
    r"""Model precision :math:`\tau = \mathrm{keep}\; l^2 / (2 N \lambda)`, the inverse noise variance that a weight decay implies.

    `keep` is the probability to keep a unit and `weight_decay` the factor of :math:`\lVert W \rVert^2` beside a squared error
    averaged over the data (with its 1/2). It is not the learning rate, as some lecture notes have it.

    >>> dropout_precision(length_scale=1.0, keep=0.5, n_data=100, weight_decay=0.01)
    0.25
    """
    return keep * length_scale**2 / (2 * n_data * weight_decay)


@dataclass(frozen=True)
class MCDropout(Descent[DescentState]):
    r"""Train with dropout, and keep it on when predicting: every mask is a draw of the function.

    The network's own dropout layers are used; `at` (a pattern over layer names, "" for all) puts dropout of `rate` on the inputs of
    further layers: features of linear layers, channels of convolutions, word types of embeddings, and for `nn.LSTM`, `nn.GRU` and
    `nn.RNN` the input and the state, with the same mask at all time steps. `recurrent="batch"` shares that mask in a batch
    while training, which runs at full speed. `learn_rates` learns the rates at those places (concrete dropout).

    `draws` and `consistent` are for prediction: consistent masks make a draw one function of all inputs; independent ones are new
    for each input. `epochs=0` takes a network that is trained already.

    With `length_scale` and `weight_decay`, both are set as in the paper: precision :math:`\tau = \mathrm{keep}\, l^2 / (2 N \lambda)`
    is the noise of the (learned) `Gaussian()` likelihood, and the prior of the weights has scale :math:`1 / (l \sqrt{\mathrm{keep}})`.

    >>> import dubito, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 3))
    >>> posterior = dubito.fit(dubito.Model(net, dubito.Categorical()), MCDropout(epochs=0), (torch.zeros(4, 2), torch.arange(4) % 3))
    >>> p = posterior.predict(torch.randn(5, 2), draws=20)
    >>> p.mean.shape, bool((p.uncertainty.epistemic > 0).all())
    (torch.Size([5, 3]), True)
    """

    at: str | None = field(default=None, kw_only=True)  # further layers to drop inputs of, by a pattern; "" takes all
    rate: float = field(default=0.1, kw_only=True)  # dropout rate at those layers
    learn_rates: bool = field(default=False, kw_only=True)  # learn the rates there (concrete dropout)
    recurrent: Literal["sequence", "batch"] = field(default="sequence", kw_only=True)  # what shares a mask in training
    draws: int = field(default=50, kw_only=True)  # masks to average when predicting
    consistent: bool = field(default=True, kw_only=True)  # a draw is one function of all inputs, not new for each
    length_scale: float | None = field(default=None, kw_only=True)  # of the prior in the paper, with weight_decay
    weight_decay: float | None = field(default=None, kw_only=True)  # of the paper: sets the noise, with length_scale

    def __post_init__(self):
        super().__post_init__()
        between(0, 1, rate=self.rate, include="low")
        at_least(1, draws=self.draws)
        one_of(("sequence", "batch"), recurrent=self.recurrent)
        require(
            not self.learn_rates or self.at is not None,
            "learned rates belong to places: name the layers whose inputs are dropped, as MCDropout(at='', ...)",
        )
        require(
            (self.length_scale is None) == (self.weight_decay is None),
            "the model precision needs both length_scale and weight_decay",
        )

    @property
    def traits(self) -> Traits:
        """Those of descent; dropout stays on when predicting."""
        return replace(super().traits, keeps_dropout=True)

    def _dropout(self, target: Target) -> Dropout:
        return Dropout.find(target.model.network, self.at, self.rate, self.recurrent)

    def prepare(self, target: Target) -> Target:
        """The target with dropout at the named places and, with the paper's settings, the prior that they imply."""
        dropout = self._dropout(target)
        if not dropout.plain:
            target = replace(target, around=lambda weights: Masks(dropout, weights, relax=RELAXATION))
        if self.length_scale is not None:
            prior = Normal(scale={"bias$": 1 / self.length_scale, "": 1 / (self.length_scale * math.sqrt(self._keep(target)))})
            target = replace(target, model=replace(target.model, prior=prior))
        return target

    def init(self, target: Target, start: Start, batch: Batch, generator: torch.Generator, *, steps: int) -> DescentState:
        """The weights, a logit for each rate that is learned, and the noise that the paper's settings imply."""
        params, noise = dict(start.params), LIKELIHOOD + "log_scale"
        self._dropout(target).check(target.model, target.model.split(batch)[0])
        if self.learn_rates:
            if target.model.prior.normal is None:
                raise ValueError("learned rates are derived for Normal priors: use Model(..., prior=Normal(...)), or fixed rates")
            like = next(iter(params.values()))
            shape = (1,) if target.members is None else (target.members, 1)
            rate = max(self.rate, 0.01)
            params |= {PREFIX + site: like.new_full(shape, math.log(rate / (1 - rate))) for site in self._dropout(target).sites}
        if self.length_scale is not None and self.weight_decay is not None:
            if noise not in params:
                raise ValueError("length_scale and weight_decay set the noise: use the likelihood Gaussian() without a scale")
            precision = dropout_precision(
                length_scale=self.length_scale,
                keep=self._keep(target),
                n_data=target.n_data,
                weight_decay=self.weight_decay,
            )
            params[noise] = torch.full_like(params[noise], -0.5 * math.log(precision))
        return super().init(target, Start(params, start.buffers), batch, generator, steps=steps)

    def adjust(self, target: Target, params: Params, gradient: Params) -> Params:
        """Hold a noise that the paper's settings imply, and add the gradient of rates that are learned (concrete dropout)."""
        if self.length_scale is not None:
            gradient[LIKELIHOOD + "log_scale"].zero_()
        if self.learn_rates:
            self._learn(target, params, gradient)
        return gradient

    def _keep(self, target: Target) -> float:
        """The probability to keep a unit, where there is only one."""
        if self.at is not None:
            return 1 - self.rate
        rates = {module.p for module in layers_of(target.model.network, DROPOUTS).values()}
        if len(rates) != 1:
            raise ValueError(f"the model precision is defined for one dropout rate; the network has {sorted(rates)}")
        return 1 - rates.pop()

    def _learn(self, target: Target, params: Params, gradient: Params) -> None:
        r"""Subtract, divided by N, the gradient of what the prior becomes with dropout at rate p on the inputs of W, for K inputs:

        .. math:: -\frac{\lVert W \rVert^2}{2 s^2 (1 - p)} + K H(p), \quad H(p) = -p \ln p - (1 - p) \ln(1 - p),

        of which :math:`-\lVert W \rVert^2 / 2 s^2` is in the log joint already. Dropped weights are W / (1 - p) or 0.
        """
        prior, stacked = target.model.prior.normal, target.members is not None
        assert prior is not None
        for site in self._dropout(target).sites:
            pattern = re.compile(rf"{re.escape(f'{site}.'.lstrip('.'))}weight(_ih_l\d+|_hh_l\d+)?(_reverse)?$")
            own = dict(target.model.network.named_parameters())  # for layers that `only` leaves out: their rate is learned too
            names = [name for name in own if pattern.match(name)]
            live = {name: params[name].detach().requires_grad_() for name in [PREFIX + site, *names] if name in params}
            with torch.enable_grad():
                drop = torch.sigmoid(live[PREFIX + site])
                entropy = -torch.xlogy(drop, drop) - torch.xlogy(1 - drop, 1 - drop)
                embedding = isinstance(target.model.network.get_submodule(site), nn.Embedding)
                inputs = sum(own[name].shape[0 if embedding else 1] for name in names)
                extra = (inputs * entropy).sum()
                for name in names:
                    weight, axis = (live[name], int(stacked)) if name in live else (own[name].detach(), 0)
                    squares = weight.pow(2).flatten(axis).sum(-1, keepdim=True) / (2 * prior.scale_of(name) ** 2)
                    extra = extra - (squares * drop / (1 - drop)).sum()
                slopes = torch.autograd.grad(extra, list(live.values()))
            for name, slope in zip(live, slopes, strict=True):
                gradient[name] -= slope / target.n_data

    def posterior(self, target: Target, state: DescentState, draws: store.Draws) -> Posterior:
        """The trained weights with their dropout: every mask is a draw."""
        return Stochastic(target.model, state.params, state.buffers, self._dropout(target), self.draws, self.consistent)
