"""Why are the best Bayesian networks fragile under corrupted inputs, and what mends it? (Izmailov et al. 2021)

Some pixels, and many directions in the space of images, hardly vary in the data. Along these the likelihood says nothing, so that draws
of the posterior keep the prior's full spread there, while training shrinks such weights to zero. An input with noise in these
directions finds all that spread. EmpCov, a prior of the first layer with the covariance of the data, is narrow exactly where the data
say nothing.
"""

from dataclasses import dataclass

import torch
from problem import load, report, setting
from torch import Tensor

from dubito.metrics import accuracy, nll
from dubito.priors import Normal, Prior
from dubito.tree import Params


@dataclass(frozen=True)
class EmpCov(Prior):
    """The rows of one layer ~ N(0, strength covariance + floor I); all other weights as in `rest`."""

    name: str
    covariance: Tensor  # [D, D], of the layer's inputs
    strength: float = 1.0
    floor: float = 1e-4
    rest: Normal = Normal(1.0)

    @property
    def _matrix(self) -> Tensor:
        return self.strength * self.covariance + self.floor * torch.eye(len(self.covariance)).to(self.covariance)

    def log_prob(self, params: Params) -> Tensor:
        rows, matrix = params[self.name], self._matrix.double()
        quadratic = (rows.double() @ torch.linalg.inv(matrix) * rows).sum()
        normal = self.rest.log_prob({name: leaf for name, leaf in params.items() if name != self.name})
        return normal - 0.5 * quadratic - 0.5 * len(rows) * torch.logdet(2 * torch.pi * matrix)

    def precision(self, params: Params) -> Params:
        """Of every weight on its own, which sets the lengths in which samplers step."""
        own = {self.name: (1 / self._matrix.diagonal()).expand_as(params[self.name])}
        return {**self.rest.precision(params), **own}

    def sample(self, like: Params, generator: torch.Generator | None = None) -> Params:
        drawn, leaf = self.rest.sample(like, generator), like[self.name]
        noise = torch.empty_like(leaf).normal_(generator=generator)
        return {**drawn, self.name: noise @ torch.linalg.cholesky(self._matrix).mT.to(leaf)}


def corrupted(x: Tensor) -> dict[str, Tensor]:
    """The test images, and what may happen to them."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(x.shape, generator=generator).to(x)
    image = x.unflatten(1, (8, 8))
    blurred = torch.nn.functional.avg_pool2d(image.unsqueeze(1), 3, 1, 1).flatten(1)
    return {
        "clean": x,
        "noise .1": x + 0.1 * noise,
        "noise .3": x + 0.3 * noise,
        "noise .6": x + 0.6 * noise,
        "blur": blurred,
        "contrast": 0.4 * x,
        "shift": image.roll(1, 2).flatten(1),
    }


s = setting()
problem = load(s)
covariance = torch.cov(problem.x.mT)
empcov = EmpCov("0.weight", covariance * (s.scale**2 / covariance.diagonal().max()), rest=Normal(s.scale))
posteriors = {
    "HMC": problem.hmc(problem.model()),
    "HMC, EmpCov prior": problem.hmc(problem.model(empcov)),
    "ensemble of 10": problem.trained(problem.model(), 10),
    "one network (MAP)": problem.trained(problem.model()),
}
rows: dict[str, dict[str, float]] = {}
for label, posterior in posteriors.items():
    rows[label] = {}
    for kind, x in corrupted(problem.x_test).items():
        p = posterior.predict(x)
        rows[label][kind] = float(accuracy(p, problem.y_test))
    rows[label]["nll, noise .6"] = float(nll(posterior.predict(corrupted(problem.x_test)["noise .6"]), problem.y_test))

# the explanation, measured: the spread of the first layer's weights along the principal directions of the data
values, directions = torch.linalg.eigh(covariance)
spread = {}
for label in ("HMC", "HMC, EmpCov prior"):
    weights = posteriors[label].params["0.weight"] @ directions.to(problem.x)  # [S, H, D]
    spread[label] = weights.std(0).mean(0).tolist()
report("corruption", s, rows, variance_of_the_data=values.tolist(), spread_of_the_weights=spread, prior_scale=s.scale)
few = spread["HMC"][:10]
print(f"spread along the 10 directions in which the data vary least: {min(few):.2f} to {max(few):.2f} (the prior's is {s.scale})")
