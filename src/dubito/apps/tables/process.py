"""A Gaussian process beside the networks: where rows are few and the function is smooth, it is hard to beat."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dubito.apps.tables.deadline import in_time
from dubito.model.likelihoods import HeteroscedasticGaussian, Likelihood
from dubito.posteriors.predictive import LatentMixture
from dubito.tensors import tree
from dubito.tensors.randomness import generator
from dubito.tensors.tree import Params

MOST = 2000  # rows that it is conditioned on
TUNED = 500  # rows by which its hyperparameters are chosen
WIDEST, LONGEST = 200, 20_000  # inputs, and rows of a table, beyond which it is not worth its time
ROWS = 2048  # predicted at a time
STEPS, RATE = 100, 0.1  # of Adam on the hyperparameters
JITTER = 1e-6  # of the kernel's variance, for the Cholesky factor
LEAST = -8.0  # of the log noise
STARTS = {"scale": 0.0, "linear": -1.0, "alpha": 1.0, "noise": -1.0}
BELIEFS = {"length": 1.5, "scale": 1.0, "linear": 1.0, "alpha": 1.5, "noise": 2.0}  # standard deviations around the start


@dataclass(frozen=True)
class Process:
    r"""y = f(x) + noise, where f is a Gaussian process with a rational quadratic kernel, a length for every input, and a linear part:

    .. math:: k(x, x') = s^2 \Big(1 + \frac{d^2}{2 \alpha}\Big)^{-\alpha} + l^2 \frac{x \cdot x'}{F}, \qquad
        d^2 = \sum_i \frac{(x_i - x'_i)^2}{\ell_i^2}

    The hyperparameters maximize the marginal likelihood of some rows, times a weak prior.
    """

    x: Tensor  # [M, F] float64: the rows it is conditioned on
    y: Tensor  # [M, T] float64
    rows: Tensor  # [M]: which of the rows that it was fitted to these are
    hyper: Params  # logarithms: "length" [F], "scale", "linear", "alpha" and "noise" []

    @staticmethod
    def fit(x: Tensor, y: Tensor, fold: Tensor, seed: int = 0, end: float = math.inf) -> tuple[Process, LatentMixture]:
        """Condition on at most 2,000 rows, after the hyperparameters were chosen by at most 500; and the predictive of all rows [N, F],
        each without those of its own fold [N]. A TimeoutError says that `time.monotonic()` would reach the end."""
        order = torch.randperm(len(x), generator=generator("cpu", seed, "process"))[:MOST]
        rows, targets = x[order].double(), y[order].double()
        process = Process(rows, targets, order, tune(rows[:TUNED], targets[:TUNED], end))
        return process, process.out_of_fold(x, fold, end)

    @property
    def noise(self) -> Tensor:
        """The variance of the noise, []."""
        return (2 * self.hyper["noise"]).exp()

    @cached_property
    def root(self) -> Tensor:
        """The Cholesky factor of the covariance of y, [M, M]."""
        return torch.linalg.cholesky(covariance(self.hyper, self.x))

    @cached_property
    def weights(self) -> Tensor:
        """K^-1 y, [M, T]."""
        return torch.cholesky_solve(self.y, self.root)

    def tensors(self) -> dict[str, Tensor]:
        """All of it, by name."""
        return {"x": self.x, "y": self.y, "rows": self.rows, **{f"hyper.{name}": leaf for name, leaf in self.hyper.items()}}

    @staticmethod
    def of(tensors: dict[str, Tensor]) -> Process:
        """From what `tensors` gave."""
        return Process(tensors["x"], tensors["y"], tensors["rows"], tree.under(tensors, "hyper."))

    def predict(self, x: Tensor, likelihood: Likelihood | None = None, end: float = math.inf) -> LatentMixture:
        """The predictive of rows [B, F]: Gaussians, whatever the likelihood."""
        parts = [self._moments(rows) for rows in in_time(x.double().split(ROWS), end)]
        return self._predictive(torch.cat([mean for mean, _ in parts]), torch.cat([variance for _, variance in parts]))

    def _moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean [B, T] and variance [B] of f."""
        across = kernel(self.hyper, x, self.x)
        solved = torch.linalg.solve_triangular(self.root, across.mT, upper=False)
        return across @ self.weights, (prior_variance(self.hyper, x) - solved.square().sum(0)).clamp_min(0)

    def out_of_fold(self, x: Tensor, fold: Tensor, end: float = math.inf) -> LatentMixture:
        """The predictive of the rows [N, F] that it was fitted to, each without the rows of its own fold [N].

        The residuals of a fold b are :math:`[K^{-1}]_{bb}^{-1} [K^{-1} y]_b`, and their covariance is the matrix in front.
        """
        p = self.predict(x, end=end)
        means, variance = p.means[0, :, : self.y.shape[1]].double(), p.covariances[0, :, 0].double()
        inverse, folds = torch.cholesky_inverse(self.root), fold[self.rows]
        for k in folds.unique():
            which = (folds == k).nonzero().flatten()
            block = torch.linalg.inv(inverse[which][:, which])
            means[self.rows[which]] = self.y[which] - block @ self.weights[which]
            variance[self.rows[which]] = (block.diagonal() - self.noise).clamp_min(0)
        return self._predictive(means, variance)

    def _predictive(self, mean: Tensor, variance: Tensor) -> LatentMixture:
        """From means [B, T] and variances of f [B]."""
        outputs = torch.cat([mean, (2 * self.hyper["noise"]).expand_as(mean)], -1)
        spread = torch.cat([variance.unsqueeze(-1).expand_as(mean), torch.zeros_like(mean)], -1)
        return LatentMixture(HeteroscedasticGaussian(), outputs.float().unsqueeze(0), spread.float().unsqueeze(0))


def tune(x: Tensor, y: Tensor, end: float = math.inf) -> Params:
    """Hyperparameters that maximize the marginal likelihood, times a weak prior that keeps them near where they start."""
    start = {
        "length": torch.full((x.shape[1],), 0.5 * math.log(x.shape[1]), dtype=torch.float64),
        **{name: torch.tensor(value, dtype=torch.float64) for name, value in STARTS.items()},
    }
    hyper = {name: value.clone().requires_grad_() for name, value in start.items()}
    optimizer = torch.optim.Adam(hyper.values(), lr=RATE)
    for step in in_time(range(STEPS), end):
        optimizer.param_groups[0]["lr"] = RATE * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        root = torch.linalg.cholesky(covariance(hyper, x))
        solved = torch.linalg.solve_triangular(root, y, upper=False)
        loss = 0.5 * solved.square().sum() + y.shape[1] * root.diagonal().log().sum()
        loss = loss + sum(((hyper[name] - start[name]) / BELIEFS[name]).square().sum() / 2 for name in hyper)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            hyper["noise"].clamp_min_(LEAST)
    return {name: value.detach() for name, value in hyper.items()}


def kernel(hyper: Params, x: Tensor, other: Tensor) -> Tensor:
    """The covariance of f at rows [B, F] and [M, F], [B, M]."""
    a, b = x / hyper["length"].exp(), other / hyper["length"].exp()
    squares = (a.square().sum(1, keepdim=True) + b.square().sum(1) - 2 * a @ b.mT).clamp_min(0)
    alpha = hyper["alpha"].exp()
    rough = (2 * hyper["scale"]).exp() * torch.exp(-alpha * torch.log1p(squares / (2 * alpha)))
    return rough + (2 * hyper["linear"]).exp() / x.shape[1] * (x @ other.mT)


def prior_variance(hyper: Params, x: Tensor) -> Tensor:
    """The variance of f before the data, [B]."""
    return (2 * hyper["scale"]).exp() + (2 * hyper["linear"]).exp() / x.shape[1] * x.square().sum(1)


def covariance(hyper: Params, x: Tensor) -> Tensor:
    """The covariance of y, [M, M]."""
    added = (2 * hyper["noise"]).exp() + JITTER * (2 * hyper["scale"]).exp()
    return kernel(hyper, x, x) + added * torch.eye(len(x), dtype=x.dtype)
