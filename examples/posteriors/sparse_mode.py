"""Under a Laplace prior the mode is sparse and the posterior is not.

The density of a Laplace prior has a kink at zero: its most probable weights are exactly zero for inputs of little use, as the lasso's.
But a mode is a point, and a posterior has no mass on it: in its draws no weight is zero.
"""

from dataclasses import dataclass

import torch
from problem import report, setting
from torch import Tensor, nn

import dubito
from dubito.diagnostics import rhat
from dubito.priors import Prior
from dubito.tensors.tree import Params


@dataclass(frozen=True)
class LaplacePrior(Prior):
    """Every weight on its own, with a density of exp(-|w| / b) / 2b."""

    b: float

    def log_prob(self, params: Params) -> Tensor:
        leaves = [leaf.abs().sum() / self.b + leaf.numel() * torch.tensor(2 * self.b).log() for leaf in params.values()]
        return -torch.stack(leaves).sum()

    def precision(self, params: Params) -> Params:
        """One over the variance, which sets the lengths in which samplers step."""
        return {name: torch.full_like(leaf, 0.5 * self.b**-2) for name, leaf in params.items()}

    def sample(self, like: Params, generator: torch.Generator | None = None) -> Params:
        zero = {name: torch.empty_like(leaf).exponential_(1 / self.b, generator=generator) for name, leaf in like.items()}
        return {
            name: leaf * torch.empty_like(leaf).bernoulli_(0.5, generator=generator).mul(2).sub(1) for name, leaf in zero.items()
        }


s = setting()
generator = torch.Generator().manual_seed(s.seed)
from sklearn.datasets import load_diabetes  # noqa: E402  (real data: ten measurements, the progression of a disease)

x, y = (torch.as_tensor(part).float() for part in load_diabetes(return_X_y=True))
x, y = (x - x.mean(0)) / x.std(0), ((y - y.mean()) / y.std()).unsqueeze(1)
noisy = torch.randn(len(x), 10, generator=generator)  # ten more that have nothing to do with it
x = torch.cat([x, noisy], 1)
model = dubito.Model(nn.Linear(20, 1, bias=False), dubito.Gaussian(scale=0.7), LaplacePrior(0.02))
# the mode, by proximal gradient descent (a step, then soft thresholding), which is exact for a linear model
w, rate, sigma = torch.zeros(20, 1), 0.5 / float(torch.linalg.eigvalsh(x.mT @ x).max()), 0.7
for _ in range(20_000):
    w = w + rate * x.mT @ (y - x @ w)
    w = w.sign() * (w.abs() - rate * sigma**2 / 0.02).clamp_min(0)
posterior = dubito.fit(model, dubito.HMC(chains=s.chains, draws=500, burn_in=300), (x, y), progress=False, batch_size=10**6)
draws = posterior.params["weight"].squeeze(1)  # [S, 20]
near = 1e-3
rows = {
    "mode": {"exactly zero": float((w == 0).float().mean()), "|w| below .001": float((w.abs() < near).float().mean())},
    "draws": {"exactly zero": float((draws == 0).float().mean()), "|w| below .001": float((draws.abs() < near).float().mean())},
    "posterior mean": {"|w| below .001": float((draws.mean(0).abs() < near).float().mean())},
}
rows["draws"]["rhat max"] = float(rhat(draws.unflatten(0, (posterior.chains, -1))).max())
report("sparse_mode", s, rows, mode=w.squeeze().tolist(), mean=draws.mean(0).tolist(), std=draws.std(0).tolist())
