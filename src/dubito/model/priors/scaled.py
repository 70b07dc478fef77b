"""What priors with inferred scales share: weights that are normal given the scale of their group."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor
from torch.func import vmap

from dubito.model.priors.groups import Groups
from dubito.model.priors.prior import PREFIX, Prior, source_for, weights
from dubito.model.priors.scales import Scale
from dubito.tensors.tree import Params, full_precision

LOCAL, OVERALL = PREFIX + "log_scale", PREFIX + "log_overall"


class Scaled(Prior):
    r""":math:`w_i \sim N(0, \tau^2 \lambda_{g(i)}^2)`: a scale :math:`\lambda` for every group, and for some one :math:`\tau` for all.

    Their free coordinates are the hyperparameters "prior:log_scale:<leaf or layer>", [G] each, and "prior:log_overall", [1].
    """

    @property
    @abstractmethod
    def local(self) -> Scale:
        """The density of a group's scale."""

    @property
    @abstractmethod
    def grouping(self) -> Groups:
        """The groups."""

    @property
    def overall(self) -> Scale | None:
        """The density of the scale of all groups, where there is one."""
        return None

    def parameters(self, weights: Params) -> Params:
        """The free coordinates of all scales, at typical values."""
        found: Params = {}
        for name, leaf in weights.items():
            number = self.grouping.rows(name, leaf).shape[0]
            found[self._key(name)] = torch.full((number,), self.local.start, device=leaf.device)
        if self.overall is not None and weights:
            found[OVERALL] = torch.full((1,), self.overall.start, device=next(iter(weights.values())).device)
        return found

    def scales(self, params: Params) -> Params:
        """The standard deviation of every weight at the hyperparameters in `params`, in the shapes of the weights."""
        spread = self.grouping.spread
        return {name: spread(name, self._log_scale(name, params).exp(), leaf) for name, leaf in weights(params).items()}

    def log_prob(self, params: Params) -> Tensor:
        """sum_i log N(w_i; 0, s_i^2) + the log densities of the scales."""
        free, first = self._hyper(params), next(iter(params.values()), torch.zeros(()))
        total = torch.zeros((), device=first.device)
        for name, leaf in weights(params).items():
            log = self._log_scale(name, params)  # [G]
            rows = self.grouping.rows(name, full_precision(leaf))  # [G, n]
            total = total - 0.5 * (rows.square().sum(1) * (-2 * log).exp()).sum() - rows.shape[1] * log.sum()
            total = total - 0.5 * leaf.numel() * math.log(2 * math.pi)
        for name, leaf in free.items():
            total = total + self._scale(name).log_prob(leaf).sum()
        return total

    def expected_log_prob(self, mean: Params, variance: Params, *, independent: bool = False) -> Tensor | None:
        r"""With :math:`\ln \tau \sim N(m, v)` independent of the weights, :math:`E[\tau^{-2}] = e^{2v - 2m}`.
        Scales of which `variance` says nothing are points."""
        free = self._hyper(mean)
        if not independent and any(name in variance for name in free):
            return None
        spread = {name: variance.get(name, torch.zeros_like(leaf)) for name, leaf in free.items()}
        total = torch.zeros((), device=next(iter(mean.values())).device)
        for name, leaf in free.items():
            part = self._scale(name).expected_log_prob(leaf, spread[name])
            if part is None and name in variance:
                return None
            total = total + (self._scale(name).log_prob(leaf) if part is None else part).sum()
        for name, leaf in weights(mean).items():
            log, doubt = self._log_scale(name, free), spread[self._key(name)]
            doubt = doubt if self.overall is None else doubt + spread[OVERALL]
            squares = self.grouping.rows(name, leaf.square() + variance[name])
            total = total - 0.5 * (squares.sum(1) * (2 * doubt - 2 * log).exp()).sum() - squares.shape[1] * log.sum()
            total = total - 0.5 * leaf.numel() * math.log(2 * math.pi)
        return total

    def log_hyper(self, params: Params) -> Tensor | float:
        """The log densities of the scales."""
        total = 0.0
        for name, leaf in self._hyper(params).items():
            part = self._scale(name).expected_log_prob(
                leaf, torch.zeros_like(leaf)
            )  # of an improper density, what it counts as there
            total = total + (self._scale(name).log_prob(leaf) if part is None else part).sum()
        return total

    def sample(self, like: Params, generator: torch.Generator | None = None) -> Params:
        """Scales from their densities, then weights from N(0, s^2)."""
        source = source_for(like, generator)
        free = {**self.parameters(weights(like)), **{name: leaf for name, leaf in like.items() if name.startswith(PREFIX)}}
        drawn = {name: self._scale(name).sample(leaf, source) for name, leaf in free.items()}
        for name, leaf in weights(like).items():
            scale = self.grouping.spread(name, self._log_scale(name, drawn).exp(), leaf).to(leaf)
            drawn[name] = torch.empty_like(leaf).normal_(generator=source) * scale
        return {name: drawn[name] for name in like}

    def resample(self, params: Params, temperature: float, generator: torch.Generator) -> Params:
        """The scales of the groups given the overall one, then that given them."""
        free, drawn = self._hyper(params), {}
        sums: dict[str, Tensor] = {}  # of squared weights, [C, G]
        counts: dict[str, int] = {}  # of weights in a group
        for name, leaf in weights(params).items():
            key, rows = self._key(name), vmap(lambda one, name=name: self.grouping.rows(name, one.double()))(leaf)  # [C, G, n]
            sums[key] = sums.get(key, 0.0) + rows.square().sum(2)
            counts[key] = counts.get(key, 0) + rows.shape[2]
        shrunk = 1.0 if self.overall is None else (-2 * self.overall.log_scale(free[OVERALL].double())).exp()  # [C, 1]
        for name, squares in sums.items():
            found = self.local.conditional(free[name], counts[name], squares * shrunk, temperature, generator)
            if found is not None:
                drawn[name] = found
        if self.overall is not None:
            logs = {name: self.local.log_scale(drawn.get(name, free[name]).double()) for name in sums}
            squares = torch.stack([(sums[name] * (-2 * log).exp()).sum(1, keepdim=True) for name, log in logs.items()]).sum(0)
            count = sum(counts[name] * squares.shape[1] for name, squares in sums.items())
            found = self.overall.conditional(free[OVERALL], count, squares, temperature, generator)
            if found is not None:
                drawn[OVERALL] = found
        return drawn

    def units(self, params: Params) -> Params:
        """The scales of the weights, and 1 for a log scale."""
        found = {name: leaf.detach().to(params[name]) for name, leaf in self.scales(params).items()}
        return {name: found[name] if name in found else torch.ones_like(leaf) for name, leaf in params.items()}

    # ---- names

    def _key(self, name: str) -> str:
        key = self.grouping.key(name)
        return f"{LOCAL}:{key}" if key else LOCAL

    def _scale(self, name: str) -> Scale:
        return self.overall if name == OVERALL and self.overall is not None else self.local

    def _hyper(self, params: Params) -> Params:
        """The hyperparameters; all of them must be there."""
        wanted = dict.fromkeys(map(self._key, weights(params)))
        wanted |= {OVERALL: None} if self.overall is not None and wanted else {}
        if missing := [name for name in wanted if name not in params]:
            raise ValueError(
                f"{type(self).__name__} infers {missing} along with the weights: add `prior.parameters(weights)`, as "
                "`Model.parameters` does"
            )
        return {name: params[name] for name in wanted}

    def _log_scale(self, name: str, params: Params) -> Tensor:
        """Of the groups of a leaf, [G]."""
        log = self.local.log_scale(params[self._key(name)])
        return log if self.overall is None else log + self.overall.log_scale(params[OVERALL])
