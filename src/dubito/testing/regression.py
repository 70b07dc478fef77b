r"""Bayesian linear regression, where the posterior is known in closed form: the problem that every method is held to.

With a design matrix J of all outputs, noise variances on the diagonal of S and the prior N(0, s^2 I), the posterior at temperature T is

.. math:: N(A^{-1} b,\; T A^{-1}), \qquad A = J^T S^{-1} J + I / s^2, \qquad b = J^T S^{-1} y.

The formulas here use plain linear algebra and no other part of the library, so that an error there cannot hide itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from dubito import Gaussian, Model
from dubito.model.priors import Normal

NOISES, SCALE = (0.5, 0.8), 0.4  # standard deviations: of the noise of each output, and of the prior
ROWS, BATCH = 29, 8  # the last batch of a pass has five rows
INPUTS, OUTPUTS = 2, len(NOISES)


@dataclass(frozen=True)
class Law:
    """A mean [P] and a covariance [P, P] over the flat weights of a `Regression`."""

    mean: Tensor
    covariance: Tensor


@dataclass(frozen=True)
class Shuffled:
    """Batches of so many rows in a new random order in every pass; the last batch has what is left."""

    x: Tensor
    y: Tensor
    size: int

    def __len__(self) -> int:
        return math.ceil(len(self.x) / self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.randperm(len(self.x)).split(self.size):
            yield self.x[rows], self.y[rows]


@dataclass(frozen=True)
class Regression:
    """Linear regression with two inputs, a bias, two outputs of different noise, and 29 rows, in double precision.

    >>> problem = Regression(temperature=0.3)
    >>> problem.exact.mean.shape, problem.exact.covariance.shape
    (torch.Size([6]), torch.Size([6, 6]))
    """

    temperature: float = 1.0
    scale: float = SCALE  # standard deviation of the prior
    learned: bool = False  # whether the model leaves that scale to the method
    noisy: bool = False  # whether the model learns the noise of each output
    seed: int = 1

    @cached_property
    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs [29, 2], which are correlated and not centered, and targets [29, 2]."""
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(ROWS, INPUTS, generator=generator, dtype=torch.float64)
        x[:, 1] += 0.8 * x[:, 0] + 0.4
        x *= 0.7
        truth = torch.tensor([[1.0, -0.5], [-1.2, 0.7]], dtype=torch.float64)
        noise = torch.randn(ROWS, OUTPUTS, generator=generator, dtype=torch.float64) * torch.tensor(NOISES, dtype=torch.float64)
        return x, x @ truth.mT + 0.3 + noise

    @property
    def model(self) -> Model:
        """A new `nn.Linear(2, 2)`, initialized with a fixed seed, with the likelihood and the prior of this problem."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = nn.Linear(INPUTS, OUTPUTS).double()
        noise = Gaussian(outputs=OUTPUTS) if self.noisy else Gaussian(scale=NOISES)
        return Model(network, noise, Normal(None if self.learned else self.scale))

    def batches(self, size: int = BATCH, copies: int = 1) -> Shuffled:
        """The data in shuffled batches, each row as often as `copies` says."""
        x, y = self.data
        return Shuffled(x.repeat(copies, 1), y.repeat(copies, 1), size)

    def design(self, x: Tensor) -> Tensor:
        """The matrix [N, C, P] that maps flat weights (the weight matrix row by row, then the bias) to outputs [N, C]."""
        eye = torch.eye(OUTPUTS, dtype=x.dtype)
        weight = torch.einsum("ni,cd->ncdi", x, eye).flatten(2)
        return torch.cat([weight, eye.expand(len(x), -1, -1)], -1)

    @cached_property
    def curvatures(self) -> Tensor:
        """The Hessian of the negative log likelihood of every row, [N, P, P]."""
        j = self.design(self.data[0])
        return torch.einsum("ncp,c,ncq->npq", j, torch.tensor(NOISES, dtype=j.dtype) ** -2, j)

    @cached_property
    def slopes(self) -> Tensor:
        """The gradient of the log likelihood of every row at zero weights, [N, P]."""
        x, y = self.data
        return torch.einsum("ncp,nc->np", self.design(x), y / torch.tensor(NOISES, dtype=y.dtype) ** 2)

    @cached_property
    def precision(self) -> Tensor:
        """A: the precision of the posterior at temperature 1, [P, P]."""
        total = self.curvatures.sum(0)
        return total + torch.eye(len(total), dtype=total.dtype) / self.scale**2

    @cached_property
    def exact(self) -> Law:
        """The posterior N(A^-1 b, T A^-1)."""
        return self.law(self.precision)

    @property
    def mean_field(self) -> Law:
        """The factorized Gaussian nearest to the posterior, in KL(q || p): its mean, and variances T / diag(A)."""
        return Law(self.exact.mean, self.temperature * torch.diag(1 / self.precision.diagonal()))

    @property
    def mode(self) -> Law:
        """The mode of the posterior, without any spread."""
        return Law(self.exact.mean, torch.zeros_like(self.precision))

    def law(self, precision: Tensor) -> Law:
        """The mean and covariance if A were this matrix, with b as it is."""
        return Law(torch.linalg.solve(precision, self.slopes.sum(0)), self.temperature * torch.linalg.inv(precision))

    def ridge(self, extra: Tensor) -> Law:
        """The mode under an additional penalty: 1/2 extra_c |w_c|^2 for each output [C] or weight [C, I], not for the bias."""
        weight = extra.reshape(OUTPUTS, -1).expand(OUTPUTS, INPUTS).flatten()
        penalty = torch.cat([weight, weight.new_zeros(OUTPUTS)])
        return Law(self.law(self.precision + torch.diag(penalty)).mean, torch.zeros_like(self.precision))

    @property
    def log_evidence(self) -> Tensor:
        r"""log of the integral of :math:`p(y \mid \theta)^{1/T}` under the prior raised to 1/T and normalized, N(0, T s^2 I).

        :math:`p(y \mid \theta)^{1/T}` is N(J theta, T S) times a constant, so the integral is N(0, T (S + s^2 J J^T)) times it.
        """
        x, y = self.data
        j, t = self.design(x).flatten(0, 1), self.temperature
        noise = torch.tensor(NOISES, dtype=j.dtype).square().repeat(ROWS)
        covariance = t * (torch.diag(noise) + self.scale**2 * j @ j.mT)
        marginal = torch.distributions.MultivariateNormal(torch.zeros(len(j), dtype=j.dtype), covariance)
        constant = 0.5 * ((2 * math.pi * t * noise).log() - (2 * math.pi * noise).log() / t).sum()
        return marginal.log_prob(y.flatten()) + constant

    def params(self, flat: Tensor) -> dict[str, Tensor]:
        """Flat weights [..., P] as the leaves of the network."""
        weight, bias = flat.split([INPUTS * OUTPUTS, OUTPUTS], -1)
        return {"weight": weight.reshape(*flat.shape[:-1], OUTPUTS, INPUTS), "bias": bias}

    def draws(self, n: int) -> dict[str, Tensor]:
        """n independent draws of the posterior, as leaves [n, ...]."""
        root = torch.linalg.cholesky(self.exact.covariance)
        z = torch.randn(n, len(root), generator=torch.Generator().manual_seed(5), dtype=root.dtype)
        return self.params(self.exact.mean + z @ root.mT)


def langevin_law(problem: Regression, step: float) -> Law:
    r"""The stationary law of the unadjusted Langevin algorithm with step :math:`\epsilon`, noise variance :math:`\epsilon`:
    the exact mean, and :math:`(A_T (I - \epsilon A_T / 4))^{-1}` with :math:`A_T = A / T`."""
    precision = problem.precision / problem.temperature
    eye = torch.eye(len(precision), dtype=precision.dtype)
    return Law(problem.exact.mean, torch.linalg.inv(precision @ (eye - step / 4 * precision)))


@dataclass(frozen=True)
class Step:
    """A linear step of a walk on mini-batches, of z = (weights, velocity) or of the weights alone: z' = M z + K g + H xi, where g is
    the estimated gradient of the log joint over T at the weights, and xi is standard normal noise."""

    matrix: Tensor  # M, [k, k]: how weights and velocity mix; a scalar times the identity for each pair
    kick: Tensor  # K, [k]
    heat: Tensor  # H, [k]


def sgd_step(rate: float, momentum: float = 0.0) -> Step:
    """A step of SGD: v = momentum v + g, w = w + rate v."""
    matrix = torch.tensor([[1.0, rate * momentum], [0.0, momentum]], dtype=torch.float64)
    return Step(matrix, torch.tensor([rate, 1.0], dtype=torch.float64), torch.zeros(2, dtype=torch.float64))


def sgld_step(h: float) -> Step:
    """A step of stochastic gradient Langevin dynamics: w = w + h g + sqrt(2 h) xi."""
    return Step(*(torch.tensor(entry, dtype=torch.float64) for entry in ([[1.0]], [h], [math.sqrt(2 * h)])))


def sghmc_step(h: float, momentum: float) -> Step:
    """A step of stochastic gradient HMC as a kick, half a drift, friction with its noise, and half a drift (BAOA)."""
    e = math.sqrt(2 * h / (1 + momentum))
    first, noise = torch.tensor([[1.0, e / 2], [0.0, 1.0]], dtype=torch.float64), math.sqrt(1 - momentum**2)
    friction = torch.tensor([[1.0, 0.0], [0.0, momentum]], dtype=torch.float64)
    matrix = first @ friction @ first
    return Step(
        matrix, matrix @ torch.tensor([0.0, e], dtype=torch.float64), first @ torch.tensor([0.0, noise], dtype=torch.float64)
    )


def epoch_law(problem: Regression, step: Step, *, even: bool, permutations: int = 3000) -> Law:
    r"""The stationary law, at the ends of passes over the data, of a walk of such steps on shuffled batches of 8, 8, 8 and 5 rows.

    A pass is an affine map z' = M z + v + noise that depends on the order of the rows. The mean m and the covariance S at the ends of
    passes solve the linear equations

    .. math:: m = E[M] m + E[v], \qquad S = E[M S M^T] + E[(M m + v - m)(M m + v - m)^T] + E[\mathrm{noise}],

    with expectations over random orders. With `even` a row counts the same in every batch; without, every batch stands for all data,
    so that the rows of the last, short one count more.
    """
    generator, size, width = torch.Generator().manual_seed(11), len(problem.precision), len(step.kick) * len(problem.precision)
    eye, whole = torch.eye(size, dtype=torch.float64), torch.eye(width, dtype=torch.float64)
    mix, kick, heat = (torch.kron(part.reshape(len(step.kick), -1), eye) for part in (step.matrix, step.kick, step.heat))
    orders = torch.stack([torch.randperm(ROWS, generator=generator) for _ in range(permutations)])
    matrix, noise = whole.expand(permutations, -1, -1), torch.zeros(permutations, width, width, dtype=torch.float64)
    offset = torch.zeros(permutations, width, 1, dtype=torch.float64)
    for rows in orders.split(BATCH, 1):
        share = math.ceil(ROWS / BATCH) if even else ROWS / rows.shape[1]
        hessian = (share * problem.curvatures[rows].sum(1) + eye / problem.scale**2) / problem.temperature
        slope = share * problem.slopes[rows].sum(1) / problem.temperature
        here = mix - kick @ hessian @ whole[:size]
        matrix, offset = here @ matrix, here @ offset + kick @ slope.unsqueeze(-1)
        noise = here @ noise @ here.mT + heat @ heat.mT
    mean = torch.linalg.solve(whole - matrix.mean(0), offset.mean(0))
    away = matrix @ mean + offset - mean
    pairs = torch.einsum("nij,nkl->ikjl", matrix, matrix).reshape(width**2, width**2) / permutations
    constant = (away @ away.mT + noise).mean(0)
    second = torch.linalg.solve(torch.eye(width**2, dtype=torch.float64) - pairs, constant.flatten()).reshape(width, width)
    return Law(mean[:size, 0], second[:size, :size])
