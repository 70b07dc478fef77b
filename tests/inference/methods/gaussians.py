r"""A posterior that is Gaussian, with gradients of which the noise is known: many means, each of its own column of data.

y_id ~ N(level_d, noise^2), level_d ~ N(0, scale^2). At temperature T every coordinate has the precision
lambda = (N / noise^2 + 1 / scale^2) / T, and a batch of B shifts its gradient by an error that does not depend on the level, of
variance s_d^2 = (N / (T noise^2))^2 Var(y_d) / B, where batches are drawn with replacement.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dubito import Gaussian, Model
from dubito.inference.sgmcmc import Langevin
from dubito.priors import Normal

NOISE, SCALE, COLUMNS = 0.5, 0.8, 200


class Level(nn.Module):
    def __init__(self):
        super().__init__()
        self.level = nn.Parameter(torch.zeros(COLUMNS, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.level.expand(len(x), COLUMNS)


@dataclass(frozen=True)
class Levels:
    n: int
    temperature: float = 1.0

    @property
    def model(self) -> Model:
        return Model(Level(), Gaussian(scale=NOISE), Normal(scale=SCALE))

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.n)
        y = 1 + NOISE * torch.randn(self.n, COLUMNS, generator=generator, dtype=torch.float64)
        return torch.zeros(self.n, 1, dtype=torch.float64), y

    @property
    def precision(self) -> float:
        return (self.n / NOISE**2 + SCALE**-2) / self.temperature

    @property
    def mean(self) -> Tensor:
        return self.data[1].sum(0) / NOISE**2 / (self.precision * self.temperature)

    def gradient_noise(self, size: int, *, replacement: bool) -> Tensor:
        """s_d^2 of batches of this size, [D]."""
        drawn = 1.0 if replacement else (self.n - size) / (self.n - 1)
        return (self.n / (self.temperature * NOISE**2)) ** 2 * self.data[1].var(0, correction=0) / size * drawn

    def start(self) -> dict[str, Tensor]:
        return {"level": self.mean}  # no burn-in is needed then, but for the variance

    def step(self, method: Langevin) -> float:
        return method.rate * self.temperature / self.n


def reshuffled(levels: Levels, size: int, transition: Tensor, kick: Tensor, heat: Tensor) -> Tensor:
    """The stationary variance [D] at the ends of epochs of z' = transition z + kick e + heat xi, in the first coordinate of z.

    All data are seen once an epoch, so the errors e of its K batches sum to zero: each has the variance s^2, each two of them the
    covariance -s^2 / (K - 1). Those of two epochs are independent.
    """
    batches = levels.n // size
    powers = [torch.linalg.matrix_power(transition, k) for k in range(batches + 1)]
    kicks = torch.stack([power @ kick for power in powers[:-1]])
    same = kicks.mT @ kicks
    if batches > 1:
        total = kicks.sum(0)
        same = same - (torch.outer(total, total) - same) / (batches - 1)
    heats = torch.stack([power @ heat for power in powers[:-1]])
    whole = torch.eye(len(kick) ** 2, dtype=torch.float64) - torch.kron(powers[-1], powers[-1])
    cold, warm = (torch.linalg.solve(whole, part.reshape(-1))[0] for part in (same, heats.mT @ heats))
    return warm + cold * levels.gradient_noise(size, replacement=False)
