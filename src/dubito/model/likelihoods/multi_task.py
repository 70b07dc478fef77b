"""Several tasks from one network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal

from dubito.model.likelihoods.likelihood import PREFIX, Likelihood, Uncertainty
from dubito.model.likelihoods.noise import given_nodes
from dubito.tensors.checks import require
from dubito.tensors.tree import Params


class _Joint(Distribution):
    """Independent distributions, each of some columns of a target: numbers, or the index of a class, which is a single column."""

    def __init__(self, parts: list[tuple[Distribution, list[int]]]):
        self.parts = parts
        super().__init__(parts[0][0].batch_shape, torch.Size([sum(len(columns) for _, columns in parts)]), validate_args=False)

    @property
    def mean(self) -> Tensor:
        """The means side by side; of classes the probabilities."""
        return torch.cat([part.mean if part.event_shape else part.probs for part, _ in self.parts], -1)  # pyright: ignore[reportAttributeAccessIssue]

    def sample(self, sample_shape=torch.Size()) -> Tensor:
        """A draw of every task, side by side."""
        draws = [part.sample(sample_shape) for part, _ in self.parts]
        return torch.cat([d if part.event_shape else d.unsqueeze(-1) for d, (part, _) in zip(draws, self.parts, strict=True)], -1)

    def log_prob(self, value: Tensor) -> Tensor:
        """The sum over the parts."""
        columns = [(part, value[..., at]) for part, at in self.parts]
        scores = [part.log_prob(y if part.event_shape else y.squeeze(-1).long()) for part, y in columns]
        return torch.stack(scores).sum(0)


@dataclass(frozen=True)
class MultiTask(Likelihood):
    r"""Several tasks from one network, weighted by their learned noise (Kendall, Gal & Cipolla 2018).

    `tasks` maps a name to a likelihood and the number of network outputs that belong to it, in order. The log likelihood is the
    sum over tasks; a task with a learned noise level (`Gaussian()`, `Categorical(scale=None)`) gets the weight 1/sigma^2 in the
    loss, and log sigma keeps sigma from growing. Targets: a dict by task name, or one tensor [..., T] with the tasks' targets side by
    side. `p.task(name)` of a predictive is the ordinary predictive of one task.

    >>> from dubito import Categorical, Gaussian
    >>> tasks = MultiTask({"depth": (Gaussian(), 1), "label": (Categorical(scale=None), 3)})
    >>> sorted(tasks.parameters())
    ['likelihood:depth.log_scale', 'likelihood:label.log_scale']
    """

    tasks: Mapping[str, tuple[Likelihood, int]] = field(default_factory=dict)

    def __post_init__(self):
        require(self.tasks, "MultiTask needs tasks: {name: (likelihood, number of outputs)}")
        censored = [name for name, (likelihood, _) in self.tasks.items() if likelihood.intervals]
        require(not censored, f"the targets of {censored} are intervals, which have no place beside those of other tasks")

    @property
    def task_names(self) -> tuple[str, ...]:
        """The names of the tasks."""
        return tuple(self.tasks)

    def of(self, name: str, params: Params) -> Params:
        """The learned parameters of one task, under the names its own likelihood knows."""
        start = f"{PREFIX}{name}."
        return {PREFIX + key[len(start) :]: leaf for key, leaf in params.items() if key.startswith(start)}

    def least_noise(self, params: Params) -> Tensor | float:
        """The smallest noise of all tasks."""
        found = [torch.as_tensor(likelihood.least_noise(self.of(name, params))) for name, (likelihood, _) in self.tasks.items()]
        return reduce(torch.minimum, found)

    def split(self, f: Tensor) -> dict[str, Tensor]:
        """The outputs of each task, by its name."""
        widths = [width for _, width in self.tasks.values()]
        if sum(widths) != f.shape[-1]:
            raise ValueError(f"the tasks take {widths} outputs, {sum(widths)} in all, but the network gives {f.shape[-1]}")
        return dict(zip(self.tasks, f.split(widths, -1), strict=True))

    def _each(self, f: Tensor, params: Params) -> Iterator[tuple[str, Likelihood, Tensor, Params]]:
        for name, part in self.split(f).items():
            yield name, self.tasks[name][0], part, self.of(name, params)

    def _by_name(self, y: Tensor | dict[str, Tensor] | None) -> dict[str, Tensor]:
        """Targets that are given by the names of the tasks; none if they are a tensor."""
        return y if isinstance(y, dict) else {}

    def _targets(self, y: Tensor | dict[str, Tensor], f: Tensor) -> dict[str, Tensor]:
        def channels_last(y: Tensor) -> Tensor:
            """The columns of the tasks as the last axis."""
            return y.movedim(self.dim, -1) if y.ndim == f.ndim else y

        if named := self._by_name(y):
            missing = [name for name in self.tasks if name not in named]
            require(not missing, f"the targets lack the tasks {missing}; they have {list(named)}")
            return {name: named[name] if task.dim != -1 else channels_last(named[name]) for name, (task, _) in self.tasks.items()}
        whole, width = channels_last(cast(Tensor, y)), self.width(f)
        fits = whole.ndim == f.ndim and whole.shape[-1] == width
        require(fits, f"one tensor of targets for these tasks is [..., {width}]; got {list(whole.shape)}")
        return self._unstack(whole, f)

    def _columns(self, f: Tensor) -> list[list[int]]:
        """The columns of each task in a target of all."""
        widths = [1 if part.indexed else part.width(g) for _, part, g, _ in self._each(f, {})]
        ends = list(accumulate(widths))
        return [list(range(end - width, end)) for end, width in zip(ends, widths, strict=True)]

    def _unstack(self, y: Tensor, f: Tensor) -> dict[str, Tensor]:
        parts = dict(zip(self.tasks, y.split([len(columns) for columns in self._columns(f)], -1), strict=True))
        return {n: v.squeeze(-1).long() if self.tasks[n][0].indexed else v for n, v in parts.items()}

    def target(self, y: Tensor | dict[str, Tensor], f: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The tasks' targets side by side, [..., T]."""
        y, columns = self._targets(y, f), []
        for name, likelihood, part, _ in self._each(f, {}):
            column = likelihood.target(y[name], part)
            columns.append((column.unsqueeze(-1) if likelihood.indexed else column).to(f.dtype))
        return torch.cat(columns, -1)

    def check(self, f: Tensor, y: Tensor | dict[str, Tensor]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Let each task check its targets."""
        y = self._targets(y, f)
        for name, likelihood, part, _ in self._each(f, {}):
            likelihood.check(part, y[name])

    def parameters(self, y: Tensor | dict[str, Tensor] | None = None) -> Params:
        """What the tasks learn, as `likelihood:<task>.<name>`."""
        learned = {}
        for name, (likelihood, _) in self.tasks.items():
            inner = likelihood.parameters(self._by_name(y).get(name))
            learned |= {f"{PREFIX}{name}.{key[len(PREFIX) :]}": leaf for key, leaf in inner.items()}
        return learned

    def log_prior(self, params: Params) -> Tensor:
        """The sum over the tasks."""
        parts = (part.log_prior(self.of(name, params)) for name, (part, _) in self.tasks.items())
        return sum(parts, torch.zeros(()))  # those without a prior are on the CPU, which a sum of scalars allows

    def __call__(self, f: Tensor, params: Params) -> Distribution:
        parts = [likelihood(part, inner) for _, likelihood, part, inner in self._each(f, params)]
        return _Joint(list(zip(parts, self._columns(f), strict=True)))

    def log_prob(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """The sum over the tasks."""
        y_parts = self._unstack(y, f)
        return torch.stack([part.log_prob(g, y_parts[n], inner) for n, part, g, inner in self._each(f, params)]).sum(0)

    def width(self, f: Tensor) -> int:
        """Numbers or class indices in a target of all tasks."""
        return sum(map(len, self._columns(f)))

    def mean(self, f: Tensor, params: Params) -> Tensor:
        """The tasks' means side by side."""
        return torch.cat([likelihood.mean(part, inner) for _, likelihood, part, inner in self._each(f, params)], -1)

    def fisher(self, f: Tensor, params: Params, *, draws: int = 512) -> Tensor:
        """Block-diagonal, a block for each task."""
        full, start = f.new_zeros(*f.shape, f.shape[-1]), 0
        for _, likelihood, part, inner in self._each(f, params):
            block = slice(start, start + part.shape[-1])
            full[..., block, block], start = likelihood.fisher(part, inner, draws=draws), block.stop
        return full

    def observed(self, y: Tensor) -> Tensor | None:
        """For every output, whether the target of its task is there."""
        f = y.new_empty(*y.shape[:-1], sum(width for _, width in self.tasks.values()))
        seen = {name: self.tasks[name][0].observed(part) for name, part in self._unstack(y, f).items()}
        if all(part is None for part in seen.values()):
            return None
        whole = torch.ones_like(f, dtype=torch.bool)
        masks = [m if seen[n] is None else m & seen[n].unsqueeze(-1) for n, m in self.split(whole).items()]  # pyright: ignore[reportOptionalMemberAccess]
        return torch.cat(masks, -1)

    def uncertainty(self, f: Tensor, weights: Tensor, params: Params) -> Uncertainty:
        """The tasks' own, side by side [..., T]: entropies for classes, variances for numbers."""
        return self.beside([part.uncertainty(g, weights, inner) for _, part, g, inner in self._each(f, params)], f.ndim - 1)

    def beside(self, parts: list[Uncertainty], ndim: int) -> Uncertainty:
        """Put the uncertainties of the tasks side by side, as tensors with `ndim` axes."""
        as_columns = [[v if v.ndim == ndim else v.unsqueeze(-1) for v in (u.total, u.aleatoric)] for u in parts]
        return Uncertainty.of(*(torch.cat(column, -1) for column in zip(*as_columns, strict=True)))

    def _exact(self, f: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        """Which outputs are means of numbers, [C], and the variance of their noise given all others, [..., n]."""
        means, noises = [], []
        for _, likelihood, part, inner in self._each(f, params):
            noise = likelihood.mean_noise(part, inner)
            n = 0 if noise is None else noise.shape[-1]
            means += [True] * n + [False] * (part.shape[-1] - n)
            noises += [] if noise is None else [noise]
        return torch.tensor(means, device=f.device), torch.cat(noises, -1) if noises else f[..., :0]

    def convolve(self, f_mean: Tensor, f_cov: Tensor, params: Params) -> Distribution | None:
        """A closed form if only the means of numbers are uncertain: their covariance adds to the noise."""
        means, noise = self._exact(f_mean, params)
        diagonal = f_cov.ndim == f_mean.ndim
        spread = f_cov if diagonal else f_cov.diagonal(dim1=-2, dim2=-1)
        if not bool(means.any()) or bool(spread[..., ~means].any()):
            return None
        full = torch.diag_embed(spread[..., means]) if diagonal else f_cov[..., means, :][..., means]
        numbers = MultivariateNormal(f_mean[..., means], full + torch.diag_embed(noise), validate_args=False)
        where, others = [], []
        for (_, likelihood, part, inner), columns in zip(self._each(f_mean, params), self._columns(f_mean), strict=True):
            if likelihood.mean_noise(part, inner) is not None:
                where += columns
            else:
                others.append((likelihood(part, inner), columns))
        return _Joint([(numbers, where), *others])

    def resolve(self, f_mean: Tensor, f_cov: Tensor, n: int) -> tuple[Tensor, Tensor] | None:
        """Nodes over all but the means of numbers."""
        means, _ = self._exact(f_mean, {name: leaf.new_zeros(()) for name, leaf in self.parameters().items()})
        return given_nodes(f_mean, f_cov, ~means, n) if bool(means.any()) else None
