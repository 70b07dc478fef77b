"""Several tasks from one network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Distribution, MultivariateNormal

from dubito.model.likelihoods.likelihood import PREFIX, Likelihood, Uncertainty
from dubito.model.likelihoods.noise import given_nodes
from dubito.tensors.checks import require
from dubito.tensors.tree import Params


class _Joint(Distribution):
    """Independent tasks side by side: a sample is [..., T], the tasks' targets one after another."""

    def __init__(self, parts: list[Distribution]):
        self.parts = parts
        super().__init__(parts[0].batch_shape, torch.Size([sum(_columns(part) for part in parts)]), validate_args=False)

    @property
    def mean(self) -> Tensor:
        """The tasks' means side by side; of classes the probabilities."""
        return torch.cat([part.probs if isinstance(part, CategoricalDistribution) else part.mean for part in self.parts], -1)

    def sample(self, sample_shape=torch.Size()) -> Tensor:
        """A draw of every task, side by side."""
        draws = [(part, part.sample(sample_shape)) for part in self.parts]
        return torch.cat([d if part.event_shape else d.unsqueeze(-1) for part, d in draws], -1)

    def log_prob(self, value: Tensor) -> Tensor:
        """The sum over the tasks."""
        columns = value.split([_columns(part) for part in self.parts], -1)
        values = [v if part.event_shape else v.squeeze(-1).long() for part, v in zip(self.parts, columns, strict=True)]
        return torch.stack([part.log_prob(v) for part, v in zip(self.parts, values, strict=True)]).sum(0)


class _Coupled(Distribution):
    """Numbers of several tasks, which hang together, beside classes that are independent of them; for its density only."""

    def __init__(self, numbers: Distribution, where: Tensor, classes: list[tuple[Distribution, slice]], columns: int):
        self.numbers, self.where, self.classes = numbers, where, classes
        super().__init__(numbers.batch_shape, torch.Size([columns]), validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """The joint density of the numbers, and that of each class."""
        score = self.numbers.log_prob(value[..., self.where])
        for part, column in self.classes:
            y = value[..., column]
            score = score + part.log_prob(y if part.event_shape else y.squeeze(-1).long())
        return score


def _columns(part: Distribution) -> int:
    return part.event_shape[0] if part.event_shape else 1


@dataclass(frozen=True)
class MultiTask(Likelihood):
    r"""Several tasks from one network, weighed by their learned noise (Kendall, Gal & Cipolla 2018).

    `tasks` maps a name to a likelihood and the number of network outputs that belong to it, in order. The log likelihood is the
    sum over tasks; a task with a learned noise level (`Gaussian()`, `Categorical(scale=None)`) finds its own weight, 1/sigma^2, with
    log sigma as the price. Targets: a dict by task name, or one tensor [..., T] with the tasks' targets side by side. `p.task(name)`
    of a predictive is the ordinary predictive of one task.

    >>> from dubito import Categorical, Gaussian
    >>> tasks = MultiTask({"depth": (Gaussian(), 1), "label": (Categorical(scale=None), 3)})
    >>> sorted(tasks.parameters())
    ['likelihood:depth.log_scale', 'likelihood:label.log_scale']
    """

    tasks: Mapping[str, tuple[Likelihood, int]] = field(default_factory=dict)

    def __post_init__(self):
        require(self.tasks, "MultiTask needs tasks: {name: (likelihood, number of outputs)}")

    @property
    def task_names(self) -> tuple[str, ...]:
        """The names of the tasks."""
        return tuple(self.tasks)

    def of(self, name: str, params: Params) -> Params:
        """The learned parameters of one task, under the names its own likelihood knows."""
        start = f"{PREFIX}{name}."
        return {PREFIX + key[len(start) :]: leaf for key, leaf in params.items() if key.startswith(start)}

    def least_noise(self, params: Params) -> Tensor | float:
        """The least of all tasks."""
        found = [likelihood.least_noise(self.of(name, params)) for name, (likelihood, _) in self.tasks.items()]
        learned = [noise for noise in found if isinstance(noise, Tensor)]
        known = min((noise for noise in found if not isinstance(noise, Tensor)), default=math.inf)
        return torch.stack(learned).amin(0).clamp(max=known) if learned else known

    def split(self, f: Tensor) -> dict[str, Tensor]:
        """The outputs of each task, by its name."""
        widths = [width for _, width in self.tasks.values()]
        if sum(widths) != f.shape[-1]:
            raise ValueError(f"the tasks take {widths} outputs, {sum(widths)} in all, but the network gives {f.shape[-1]}")
        return dict(zip(self.tasks, f.split(widths, -1), strict=True))

    def _each(self, f: Tensor, params: Params):
        for name, part in self.split(f).items():
            yield name, self.tasks[name][0], part, self.of(name, params)

    def _targets(self, y: Tensor | dict[str, Tensor], f: Tensor) -> dict[str, Tensor]:
        if isinstance(y, dict):
            missing = [name for name in self.tasks if name not in y]
            require(not missing, f"the targets lack the tasks {missing}; they have {list(y)}")
            return {
                name: self._channels_last(y[name], f) if task.dim == -1 else y[name] for name, (task, _) in self.tasks.items()
            }
        columns, y = self._columns(f), self._channels_last(y, f)
        if y.ndim != f.ndim or y.shape[-1] != sum(columns):
            raise ValueError(f"one tensor of targets for these tasks is [..., {sum(columns)}]; got {list(y.shape)}")
        return self._unstack(y, f)

    def _channels_last(self, y: Tensor, f: Tensor) -> Tensor:
        return y.movedim(self.dim, -1) if y.ndim == f.ndim else y

    def _columns(self, f: Tensor) -> list[int]:
        return [1 if part.indexed else part.width(g) for _, part, g, _ in self._each(f, {})]

    def _unstack(self, y: Tensor, f: Tensor) -> dict[str, Tensor]:
        parts = dict(zip(self.tasks, y.split(self._columns(f), -1), strict=True))
        return {n: v.squeeze(-1).long() if self.tasks[n][0].indexed else v for n, v in parts.items()}

    def target(self, y: Tensor | dict[str, Tensor], f: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The tasks' targets side by side, [..., T]."""
        y, columns = self._targets(y, f), []
        for name, likelihood, part, _ in self._each(f, {}):
            column = likelihood.target(y[name], part)
            columns.append((column.unsqueeze(-1) if likelihood.indexed else column).to(f.dtype))
        return torch.cat(columns, -1)

    def check(self, f: Tensor, y: Tensor | dict[str, Tensor]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Every task checks its targets."""
        y = self._targets(y, f)
        for name, likelihood, part, _ in self._each(f, {}):
            likelihood.check(part, y[name])

    def parameters(self, y: Tensor | dict[str, Tensor] | None = None) -> Params:
        """What the tasks learn, as `likelihood:<task>.<name>`."""
        learned = {}
        for name, (likelihood, _) in self.tasks.items():
            inner = likelihood.parameters(y.get(name) if isinstance(y, dict) else None)
            learned |= {f"{PREFIX}{name}.{key[len(PREFIX) :]}": leaf for key, leaf in inner.items()}
        return learned

    def log_prior(self, params: Params) -> Tensor:
        """The sum over the tasks."""
        parts = (part.log_prior(self.of(name, params)) for name, (part, _) in self.tasks.items())
        return sum(parts, torch.zeros(()))  # those without a prior are on the CPU, which a sum of scalars allows

    def __call__(self, f: Tensor, params: Params) -> Distribution:
        return _Joint([likelihood(part, inner) for _, likelihood, part, inner in self._each(f, params)])

    def log_prob(self, f: Tensor, y: Tensor, params: Params) -> Tensor:
        """The sum over the tasks."""
        y_parts = self._unstack(y, f)
        return torch.stack([part.log_prob(g, y_parts[n], inner) for n, part, g, inner in self._each(f, params)]).sum(0)

    def width(self, f: Tensor) -> int:
        """Numbers or class indices in a target of all tasks."""
        return sum(self._columns(f))

    def mean(self, f: Tensor, params: Params) -> Tensor:
        """The tasks' means side by side."""
        return torch.cat([likelihood.mean(part, inner) for _, likelihood, part, inner in self._each(f, params)], -1)

    def fisher(self, f: Tensor, params: Params, *, draws: int = 512) -> Tensor:
        """Block-diagonal, a block for each task."""
        full = f.new_zeros(*f.shape, f.shape[-1])
        start = 0
        for _, likelihood, part, inner in self._each(f, params):
            end = start + part.shape[-1]
            full[..., start:end, start:end] = likelihood.fisher(part, inner, draws=draws)
            start = end
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
        """The tasks' uncertainties in columns: tensors of so many axes, of which the last is that of the columns."""
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
        """Closed where only means of numbers are uncertain: their spread adds to the noise."""
        means, noise = self._exact(f_mean, params)
        diagonal = f_cov.ndim == f_mean.ndim
        spread = f_cov if diagonal else f_cov.diagonal(dim1=-2, dim2=-1)
        if not bool(means.any()) or bool(spread[..., ~means].any()):
            return None
        full = torch.diag_embed(spread[..., means]) if diagonal else f_cov[..., means, :][..., means]
        numbers = MultivariateNormal(f_mean[..., means], full + torch.diag_embed(noise), validate_args=False)
        where, classes, start = [], [], 0
        for (_, likelihood, part, inner), n in zip(self._each(f_mean, params), self._columns(f_mean), strict=True):
            column, start = slice(start, start + n), start + n
            if likelihood.mean_noise(part, inner) is not None:
                where += range(column.start, column.stop)
            else:
                classes.append((likelihood(part, inner), column))
        return _Coupled(numbers, torch.tensor(where, device=f_mean.device), classes, start)

    def resolve(self, f_mean: Tensor, f_cov: Tensor, n: int) -> tuple[Tensor, Tensor] | None:
        """Nodes over all but the means of numbers."""
        means, _ = self._exact(f_mean, {name: leaf.new_zeros(()) for name, leaf in self.parameters().items()})
        return given_nodes(f_mean, f_cov, ~means, n) if bool(means.any()) else None
