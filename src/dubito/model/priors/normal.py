"""Independent Gaussian priors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dubito.model.priors.prior import Prior, source_for, zero
from dubito.model.priors.scales import plain
from dubito.tensors.tree import Params, full_precision

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
ALONE = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm)  # layers whose weights are not summed over inputs


@dataclass(frozen=True)
class Normal(Prior):
    r"""Every weight on its own: :math:`\theta_i \sim N(0, \mathrm{scale}_i^2)`.

    `Normal(scale=0.5)`: one standard deviation for all weights. `Normal(scale={"weight": 0.1, "bias": 1.0})`: the first pattern found
    (`re.search`) in a parameter's name counts; `""` matches every name and serves as the rest. `Normal()` has scale 1. With
    `learned=True`, which is the default if no scale is given, the scale is only where methods that learn it from the evidence, such as
    Laplace, begin; for other methods, such as MAP, it is the scale.

    A model that is given no prior has `Normal.fan_in(network, ..., learned=True)`, see `dubito.Model`.

    Weight decay follows: with n data and a loss averaged over them, the gradient of the prior is theta / (n scale^2).

    >>> Normal(scale=2.0).log_prob({"w": torch.zeros(1)})
    tensor(-1.6121)
    """

    scale: float | Mapping[str, float] | None = None
    learned: bool = field(default=False, kw_only=True, repr=False)  # the evidence may set the scale
    rule: tuple[float, float] | None = field(default=None, kw_only=True, repr=False, compare=False)  # scale and bias of `fan_in`

    @property
    def normal(self) -> Normal:
        """Itself."""
        return self

    @property
    def stacks(self) -> bool:
        """True: every weight is independent."""
        return True

    def __post_init__(self):
        given = self.scale
        scale = {name: plain(value) for name, value in given.items()} if isinstance(given, Mapping) else plain(given)
        scales = scale.values() if isinstance(scale, Mapping) else [1.0 if scale is None else scale]
        if not scales or not all(isinstance(s, int | float) and s > 0 and math.isfinite(s) for s in scales):
            raise ValueError(f"a prior scale is a positive standard deviation; got {given!r}")
        object.__setattr__(self, "scale", scale)
        object.__setattr__(self, "learned", self.learned or scale is None)
        object.__setattr__(self, "_by_name", {})  # scales that were looked up before

    def __repr__(self) -> str:
        learned = ", learned=True" if self.learned and self.scale is not None else ""
        if self.rule is not None:
            return f"Normal.fan_in(scale={self.rule[0]:g}, bias={self.rule[1]:g}{learned})"
        return f"Normal(scale={self.scale!r}{learned})"

    @staticmethod
    def fan_in(network: nn.Module, scale: float = 1.0, *, bias: float | None = None, learned: bool = False) -> Normal:
        r"""The prior :math:`w \sim N(0, \mathrm{scale}^2 / n)` of weights with n inputs, under which functions keep their size however
        wide the network is, and approach a Gaussian process as it widens (`dubito.priors.NNGP`).

        n is how many products one output sums: all axes of a weight but the first; of a transposed convolution all but the second.
        Leaves with one axis (biases), and the weights of embeddings and of layer norms, which sum nothing, get N(0, `bias`^2), by
        default `scale`. It is an ordinary `Normal` with a scale for every name, so every method can use it.

        >>> Normal.fan_in(nn.Linear(4, 2)).scale
        {'^weight$': 0.5, '^bias$': 1.0}
        """
        flat, names = scale if bias is None else bias, {id(p): name for name, p in network.named_parameters()}
        fans = dict.fromkeys(names.values(), 0)  # of a weight that several layers share, the largest
        for module in network.modules():
            for p in module.parameters(recurse=False):
                fans[names[id(p)]] = max(fans[names[id(p)]], _fan_in(module, p))
        scales = {f"^{re.escape(name)}$": scale / math.sqrt(fan) if fan else flat for name, fan in fans.items()}
        return Normal(scale=scales, learned=learned, rule=(scale, flat))

    def of(self, network: nn.Module) -> Normal:
        """The same prior of another network: one made by `fan_in` has scales for its weights, any other is as it is."""
        return self if self.rule is None else Normal.fan_in(network, self.rule[0], bias=self.rule[1], learned=self.learned)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of parameter names."""
        return tuple(self.scale) if isinstance(self.scale, Mapping) else ()

    def scale_of(self, name: str) -> float:
        """The standard deviation of one parameter's weights."""
        if not isinstance(self.scale, Mapping):
            return 1.0 if self.scale is None else float(self.scale)
        known: dict[str, float] = self._by_name  # pyright: ignore[reportAttributeAccessIssue]
        if name not in known:
            pattern = next((pattern for pattern in self.scale if re.search(pattern, name)), None)
            if pattern is None:
                raise ValueError(
                    f"no pattern of the prior, {list(self.scale)}, matches the parameter {name!r}: add one, or '' for the rest"
                )
            known[name] = float(self.scale[pattern])
        return known[name]

    def precision(self, params: Params) -> Params:
        """1 / scale^2 for every weight, in the shapes of `params`."""
        return {name: torch.full_like(leaf, self.scale_of(name) ** -2) for name, leaf in params.items()}

    def log_prob(self, params: Params) -> Tensor:
        """sum_i log N(w_i; 0, scale_i^2)."""
        total = zero(params)
        for name, leaf in params.items():
            scale = self.scale_of(name)
            total = total - 0.5 * full_precision(leaf).pow(2).sum() / scale**2
            total = total - leaf.numel() * (math.log(scale) + 0.5 * math.log(2 * math.pi))
        return total

    def gradient(self, params: Params) -> Params:
        """-w / scale^2."""
        if not params:
            return {}
        slopes = [-(self.scale_of(name) ** -2) for name in params]
        return dict(zip(params, torch._foreach_mul([leaf.detach() for leaf in params.values()], slopes), strict=True))

    def add_gradient(self, gradient: Params, params: Params, factor: float = 1.0) -> None:
        """Add -factor w / scale^2, in one pass over the memory."""
        names: dict[float, list[str]] = {}
        for name in params:
            names.setdefault(self.scale_of(name), []).append(name)
        for scale, group in names.items():  # in one pass over the memory, which is what a step of a wide network waits for
            leaves = [params[name].detach() for name in group]
            torch._foreach_add_([gradient[name] for name in group], leaves, alpha=-factor * scale**-2)

    def expected_log_prob(self, mean: Params, variance: Params, *, independent: bool = False) -> Tensor | None:
        r""":math:`E_q[w^2] = \mu^2 + \sigma^2` in the place of :math:`w^2`."""
        total = self.log_prob(mean)
        for name, leaf in variance.items():
            total = total - 0.5 * full_precision(leaf).sum() / self.scale_of(name) ** 2
        return total

    def units(self, params: Params) -> Params:
        """`scale` of every weight."""
        return {name: torch.full_like(leaf, self.scale_of(name)) for name, leaf in params.items()}

    def sample(self, like: Params, generator: torch.Generator | None = None) -> Params:
        """N(0, scale^2) for every weight."""
        source = source_for(like, generator)
        return {name: torch.empty_like(leaf).normal_(0.0, self.scale_of(name), generator=source) for name, leaf in like.items()}


def _fan_in(module: nn.Module, p: Tensor) -> int:
    """How many products one output of the module sums with this parameter; 0 where each weight acts alone."""
    if p.ndim < 2 or isinstance(module, ALONE):
        return 0
    if isinstance(module, TRANSPOSED):
        return p.shape[0] * math.prod(p.shape[2:]) // module.groups
    return math.prod(p.shape[1:])
