"""Weights that are normal given the scale of their group, where the scales are inferred: `Scaled` is what these priors share."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.func import vmap

from dubito.model.priors.prior import PREFIX, Prior, added, source_for, weights, zero
from dubito.model.priors.scales import Flat, HalfCauchy, InverseGamma, Scale, keep_positive
from dubito.tensors.checks import of_type, require
from dubito.tensors.tree import Params, full_precision

By = Literal["all", "layer", "tensor", "row", "column", "kernel", "gate", "weight"]
RECURRENT = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")  # of which the rows are those of the gates, one after another


@dataclass(frozen=True)
class Groups:
    """A partition of the weights into groups, for priors whose weights share a scale within a group.

    "all" weights together; the leaves of a "layer" (a module: its weight and bias) together; every "tensor", "row" (an output unit, or
    the filter of a convolution), "column" (an input unit or channel), "kernel" (the spatial weights from one channel to another),
    "gate" (of an LSTM, or with `gates=3` of a GRU; leaves that are not of a recurrent layer are one group), or "weight" on its own. Of
    a transposed convolution, whose inputs come first, rows and columns are the other way round.

    >>> import torch
    >>> Groups("column").rows("weight", torch.arange(6.0).reshape(2, 3))
    tensor([[0., 3.],
            [1., 4.],
            [2., 5.]])
    """

    by: By = "tensor"
    gates: int = 4

    def __post_init__(self):
        words = get_args(By)
        require(self.by in words, f"weights are grouped by one of {', '.join(words)}; got {self.by!r}")

    @staticmethod
    def of(value: str | Groups) -> Groups:
        """The value itself, or the groups that a word names."""
        return value if isinstance(value, Groups) else Groups(value)  # pyright: ignore[reportArgumentType]

    def key(self, name: str) -> str:
        """The name of a leaf's groups; leaves with the same name share them."""
        return {"all": "", "layer": name.rpartition(".")[0]}.get(self.by, name)

    def rows(self, name: str, leaf: Tensor) -> Tensor:
        """The weights of a leaf by group, [G, n]."""
        if self.by == "weight" or (self.by == "kernel" and leaf.ndim < 3):
            return leaf.reshape(-1, 1)
        if self.by == "kernel":
            return leaf.reshape(leaf.shape[0] * leaf.shape[1], -1)
        if self.by == "row" and leaf.ndim:
            return leaf.reshape(leaf.shape[0], -1)
        if self.by == "column" and leaf.ndim > 1:
            return leaf.movedim(1, 0).reshape(leaf.shape[1], -1)
        if self.by == "gate" and any(word in name for word in RECURRENT):
            self._check_gates(name, leaf)
            return leaf.reshape(self.gates, -1)
        return leaf.reshape(1, -1)

    def _check_gates(self, name: str, leaf: Tensor) -> None:
        # a state has as many units as each gate has rows, or fewer where it is projected: a GRU's rows may be four parts, too
        short = "weight_hh" in name and leaf.shape[0] < self.gates * leaf.shape[1]
        if leaf.shape[0] % self.gates or short:
            raise ValueError(
                f"{name} has {leaf.shape[0]} rows, which are not {self.gates} gates: give Groups('gate', gates=...), 3 for a GRU"
            )

    def spread(self, name: str, values: Tensor, leaf: Tensor) -> Tensor:
        """Repeat a value of every group, [G], for every weight of the leaf, in its shape: the inverse of `rows`."""
        wide = values.unsqueeze(1).expand(len(values), leaf.numel() // len(values))
        if self.by == "column" and leaf.ndim > 1:
            return wide.reshape(leaf.shape[1], leaf.shape[0], *leaf.shape[2:]).movedim(0, 1)
        return wide.reshape(leaf.shape)


LOCAL, OVERALL = PREFIX + "log_scale", PREFIX + "log_overall"


class Scaled(Prior):
    r""":math:`w_i \sim N(0, \tau^2 \lambda_{g(i)}^2)`: a scale :math:`\lambda` for every group, and for some one :math:`\tau` for all.

    Their free coordinates are the hyperparameters "prior:log_scale:<leaf or layer>", [G] each, and "prior:log_overall", [1].
    """

    scale: Scale
    groups: str | Groups

    @abstractmethod
    def __post_init__(self):
        Groups.of(self.groups)

    @property
    def local(self) -> Scale:
        """The density of a group's scale."""
        return self.scale

    @property
    def grouping(self) -> Groups:
        """The groups of weights that share a scale."""
        return Groups.of(self.groups)

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
        scales = [self._scale(name).log_prob(leaf).sum() for name, leaf in self._hyper(params).items()]
        return sum(scales, self._given_scales(params, {}, {}))

    def expected_log_prob(self, mean: Params, variance: Params, *, independent: bool = False) -> Tensor | None:
        r"""With :math:`\ln \tau \sim N(m, v)` independent of the weights, :math:`E[\tau^{-2}] = e^{2v - 2m}`.
        Scales of which `variance` says nothing are points."""
        doubts = {name: variance[name] for name in self._hyper(mean) if name in variance}
        if doubts and not independent:
            return None
        scales = added([self._expected(name, leaf, doubts.get(name)) for name, leaf in self._hyper(mean).items()], mean)
        return None if scales is None else scales + self._given_scales(mean, variance, doubts)

    def log_hyper(self, params: Params) -> Tensor | float:
        """The log densities of the scales; of an improper density, what its expectation counts as."""
        return added([self._expected(name, leaf, None) for name, leaf in self._hyper(params).items()], params)  # pyright: ignore[reportReturnType]  # none of them is None

    def _expected(self, name: str, leaf: Tensor, variance: Tensor | None) -> Tensor | None:
        """E of the log density of a scale; of a point, its log density, or what the expectation of an improper one counts as."""
        scale = self._scale(name)
        found = scale.expected_log_prob(leaf, torch.zeros_like(leaf) if variance is None else variance)
        return scale.log_prob(leaf) if found is None and variance is None else found

    def _given_scales(self, params: Params, variance: Params, doubts: Params) -> Tensor:
        """E log N(w; 0, s^2) of all weights, with these variances of weights and of free coordinates of the scales."""
        total = zero(params)
        for name, leaf in weights(params).items():
            log, squares = self._log_scale(name, params), full_precision(leaf).square()  # [G], and as the leaf
            rows = self.grouping.rows(name, squares + variance[name] if name in variance else squares)  # [G, n]
            doubt = doubts.get(self._key(name), 0.0) + doubts.get(OVERALL, 0.0)
            total = total - 0.5 * (rows.sum(1) * (2 * doubt - 2 * log).exp()).sum() - rows.shape[1] * log.sum()
            total = total - 0.5 * leaf.numel() * math.log(2 * math.pi)
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
        """Draw the scales of the groups given the overall scale, then the overall scale given them."""
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
        """The hyperparameters; raise if some are missing."""
        wanted = dict.fromkeys(map(self._key, weights(params)))
        wanted |= {OVERALL: None} if self.overall is not None and wanted else {}
        if missing := [name for name in wanted if name not in params]:
            raise ValueError(
                f"{type(self).__name__} infers {missing} along with the weights: add `prior.parameters(weights)`, as "
                "`Model.parameters` does"
            )
        return {name: params[name] for name in wanted}

    def _log_scale(self, name: str, params: Params) -> Tensor:
        """The log scales of a leaf's groups, [G]."""
        log = self.local.log_scale(params[self._key(name)])
        return log if self.overall is None else log + self.overall.log_scale(params[OVERALL])


def check_scale(scale: object) -> None:
    """Raise a TypeError unless `scale` is the density of a scale."""
    of_type(Scale, "a density such as HalfCauchy(1.0) or InverseGamma(2.0, 2.0)", scale=scale)


@dataclass(frozen=True)
class Hierarchical(Scaled):
    r"""Weights are normal given the scale of their group, and the scale has a prior of its own:

    .. math:: w_i \mid \tau \sim N(0, \tau_{g(i)}^2), \qquad \tau_g \sim \mathrm{scale}

    `scale` is a `HalfCauchy`, a `Gamma`, or an `InverseGamma` (of :math:`\tau^2`), whose draws given the weights are in closed form:
    HMC and its kin then draw the scales between trajectories, exactly. `groups` is one of the words of `Groups`.

    The mode over weights and scales together is a poor estimate if scales may go to 0: under a half-Cauchy the density has no
    upper bound there. For `MAP` take an `InverseGamma`, or `StudentT`, which is the same with the scales integrated out.

    >>> import dubito, torch
    >>> model = dubito.Model(torch.nn.Linear(2, 1), dubito.Gaussian(scale=0.1), Hierarchical(HalfCauchy(1.0), groups="layer"))
    >>> list(model.parameters())
    ['weight', 'bias', 'prior:log_scale']
    """

    scale: Scale = field(default_factory=HalfCauchy)
    groups: str | Groups = field(default="tensor", kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        check_scale(self.scale)


@dataclass(frozen=True)
class ARD(Scaled):
    r"""A scale for the weights that leave each input unit, which shrinks where the input does not matter:

    .. math:: w_{oi} \mid \tau_i \sim N(0, \tau_i^2), \qquad \tau_i^2 \sim \mathrm{InvGamma}

    Leaves without an input axis, such as biases, have one scale each. To judge the inputs of a network alone, give it to the first
    layer: `ByName({"^0.weight": ARD(), "": Normal()})`.

    >>> import torch
    >>> prior = ARD()
    >>> params = {"weight": torch.ones(3, 2), "prior:log_scale:weight": torch.tensor([0.0, -1.0])}
    >>> prior.relevance(params)["weight"]
    tensor([1.0000, 0.3679])
    """

    scale: Scale = field(default_factory=lambda: InverseGamma(0.5, 0.5))

    groups: ClassVar[str] = "column"  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self):
        check_scale(self.scale)

    def relevance(self, params: Params) -> dict[str, Tensor]:
        """The scale of every input unit, [inputs] for each leaf."""
        return {name: self._log_scale(name, params).exp() for name in weights(params)}


@dataclass(frozen=True)
class Horseshoe(Scaled):
    r"""Most weights are next to nothing, and a few are left alone:

    .. math:: w_i \mid \tau, \lambda \sim N(0, \tau^2 \lambda_{g(i)}^2), \quad \lambda_g \sim C^+(0, 1), \quad
              \tau \sim C^+(0, \mathrm{width})

    By default every weight has its :math:`\lambda`; with `groups="row"` a unit or filter, with "column" an input (the group horseshoe).
    `width` is about the share of groups that matter. HMC and its kin draw all scales from their conditionals at temperature 1.

    >>> import torch
    >>> list(Horseshoe(width=0.1, groups="row").parameters({"w": torch.zeros(3, 2)}))
    ['prior:log_scale:w', 'prior:log_overall']
    """

    width: float = 1.0
    groups: str | Groups = field(default="weight", kw_only=True)

    def __post_init__(self):
        keep_positive(self, "width")
        Groups.of(self.groups)

    @property
    def local(self) -> Scale:
        """C+(0, 1)."""
        return HalfCauchy(1.0)

    @property
    def overall(self) -> Scale:
        """C+(0, width)."""
        return HalfCauchy(self.width)


@dataclass(frozen=True)
class Jeffreys(Scaled):
    r"""The scale of every group has the density :math:`p(\tau) \propto 1 / \tau`, which knows no size (normal-Jeffreys):

    .. math:: w_i \mid \tau \sim N(0, \tau_{g(i)}^2), \qquad p(w_g) \propto \lVert w_g \rVert^{-n}

    It is improper, and so is its posterior: sampling and scoring raise an error. `bounds=(low, high)` of the scales make it a
    density. Without them it is for variational methods, which need it in expectation only, and whose bound is then none on the
    evidence (Hron et al. 2018); with the scales as points it is empirical Bayes, that is, no prior of the scales at all.

    >>> import torch
    >>> Jeffreys(bounds=(0.1, 10.0)).parameters({"w": torch.zeros(2)})
    {'prior:log_scale:w': tensor([0.])}
    """

    bounds: tuple[float, float] | None = None
    groups: str | Groups = field(default="tensor", kw_only=True)

    def __post_init__(self):
        Flat(self.bounds)
        Groups.of(self.groups)

    @property
    def local(self) -> Scale:
        """1 / tau, between the bounds if there are some."""
        return Flat(self.bounds)
