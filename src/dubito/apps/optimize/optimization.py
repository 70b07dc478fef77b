"""Bayesian optimization: which input to evaluate next, where evaluations are expensive."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from dubito.apps.optimize.improvement import greedy_improvement
from dubito.apps.optimize.surrogate import draw_functions
from dubito.apps.sequence import Methods, fit_in_turn
from dubito.inference.options import FitOptions
from dubito.model import Model
from dubito.model.likelihoods import Gaussian
from dubito.network.examples import split_batch
from dubito.posteriors import Point, Posterior
from dubito.tensors import store
from dubito.tensors.checks import at_least, one_of, require
from dubito.tensors.randomness import derive_seed, generator

NEAR = 0.05  # standard deviation of candidates around the best known inputs, in units of the box


class Optimization:
    """Search the maximum (or minimum) of a function in a box with few evaluations.

    `ask(k)` returns k inputs, [k, d], and `tell(x, y)` takes their values. The first `initial` inputs are a Sobol sequence. Then the
    model is fitted to all values so far, by a method, a list of methods that run one after another, or a function of the number of
    values that returns either. The `acquisition` "ei" chooses k inputs by their joint expected improvement over `draws` functions
    of the posterior; "thompson" chooses the best input of one drawn function for each of the k.

    `bounds` [d, 2] are the sides of the box. The network sees inputs scaled to [-1, 1] and standardized values; noise and prior of the
    model are in these units. The best of `candidates` inputs, half of them spread over the box and half near the best known inputs, is
    improved by `refine` steps of gradient ascent in x.

    >>> import dubito
    >>> net = torch.nn.Sequential(torch.nn.Linear(1, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
    >>> model = dubito.Model(net, dubito.Gaussian(scale=0.01), dubito.priors.Normal(scale=1.0))
    >>> method = [dubito.MAP(epochs=100, learning_rate=0.02), dubito.NeuralLinear()]
    >>> search = Optimization(model, method, [(-3.0, 5.0)], initial=5, draws=16, candidates=100)
    >>> for _ in range(10):
    ...     x = search.ask()
    ...     search.tell(x, -(x[:, 0] - 2.0) ** 2)
    >>> abs(float(search.best[0]) - 2.0) < 0.3
    True
    """

    def __init__(
        self,
        model: Model,
        method: Methods,
        bounds: ArrayLike | Tensor,
        *,
        acquisition: Literal["ei", "thompson"] = "ei",
        maximize: bool = True,
        initial: int = 5,
        draws: int = 64,
        candidates: int = 1000,
        refine: int = 20,
        batch_size: int = 128,
        seed: int = 0,
    ):
        one_of(("ei", "thompson"), acquisition=acquisition)
        require(
            isinstance(model.likelihood, Gaussian),
            f"the likelihood must be dubito.Gaussian(scale=s), or Gaussian() to learn the noise; got {model.likelihood!r}",
        )
        self.bounds = torch.as_tensor(bounds, dtype=torch.float64).cpu()
        shaped = self.bounds.ndim == 2 and self.bounds.shape[1] == 2
        require(
            shaped and bool((self.bounds[:, 0] < self.bounds[:, 1]).all()),
            f"bounds must be pairs (low, high) with low < high, one for each dimension; got {bounds}",
        )
        require(bool(self.bounds.isfinite().all()), f"bounds must be finite; got {bounds}")
        at_least(1, initial=initial, draws=draws, candidates=candidates)
        at_least(0, refine=refine)
        self.model = replace(model, split=split_batch)  # batches are pairs (x, y) made here
        self.method, self.acquisition, self.maximize = method, acquisition, maximize
        self.initial, self.draws, self.candidates, self.refine = initial, draws, candidates, refine
        self.batch_size, self.seed = batch_size, seed
        self.x = torch.zeros(0, len(self.bounds), dtype=torch.float64)  # [n, d]
        self.y = torch.zeros(0, dtype=torch.float64)  # [n]
        self.asked = 0  # inputs returned by `ask` so far
        self._fitted: tuple[int, Posterior] | None = None  # the posterior, and the number of values it is fitted to

    @property
    def best(self) -> tuple[Tensor, float]:
        """The best evaluated input, [d], and its value."""
        require(len(self.y), "no value is known yet: call tell(x, y)")
        i = int(self.y.argmax() if self.maximize else self.y.argmin())
        return self.x[i], float(self.y[i])

    def tell(self, x: ArrayLike | Tensor, y: ArrayLike | Tensor) -> None:
        """Add the values y [k] at the inputs x [k, d], which need not come from `ask`."""
        x = torch.as_tensor(x, dtype=torch.float64).detach().cpu().reshape(-1, len(self.bounds))
        y = torch.as_tensor(y, dtype=torch.float64).detach().cpu().reshape(-1)
        require(len(x) == len(y), f"y must have one value for each input; got {len(y)} for {len(x)} inputs")
        require(bool(x.isfinite().all()) and bool(y.isfinite().all()), "inputs and values must be finite; got NaN or infinity")
        inside = torch.minimum(torch.maximum(x, self.bounds[:, 0]), self.bounds[:, 1])
        # inputs from `ask` are rounded if they have been in single precision
        outside = (x - inside).abs() > 1e-6 * (self.bounds[:, 1] - self.bounds[:, 0] + self.bounds.abs().amax(1))
        if bool(outside.any()):
            raise ValueError(f"inputs must be inside the bounds; got {x[outside.any(1)][0].tolist()}, which is outside")
        self.x, self.y = torch.cat([self.x, inside]), torch.cat([self.y, y])

    @property
    def posterior(self) -> Posterior:
        """The posterior given all values so far, over functions of scaled inputs with standardized values."""
        require(len(self.y), "there is no posterior before the first value: call tell(x, y)")
        if self._fitted is None or self._fitted[0] != len(self.y):
            shift, scale = self._units()
            data = (self._scaled(self.x), ((self.y - shift) / scale).to(self._like.dtype).unsqueeze(1))
            options = FitOptions(seed=derive_seed(self.seed, "fit", len(self.y)), batch_size=self.batch_size, progress=False)
            posterior = fit_in_turn(self.model, self.method, data, options)
            require(
                not isinstance(posterior, Point),
                "the posterior of this method is a point, without uncertainty to explore by: use an Ensemble, MCDropout, or "
                "[MAP(), NeuralLinear()]",
            )
            self._fitted = len(self.y), posterior
        return self._fitted[1]

    @property
    def _like(self) -> Tensor:
        return next(self.model.network.parameters())

    def _units(self) -> tuple[float, float]:
        spread = float(self.y.std(correction=0))
        return float(self.y.mean()), spread if spread > 1e-12 * (1 + float(self.y.abs().max())) else 1.0

    def _scaled(self, x: Tensor) -> Tensor:
        low, high = self.bounds.T
        return ((2 * x - low - high) / (high - low)).to(self._like)

    def _unscaled(self, z: Tensor) -> Tensor:
        low, high = self.bounds.T
        return torch.minimum(torch.maximum(0.5 * (low + high + (high - low) * z.double().cpu()), low), high)

    def ask(self, k: int = 1) -> Tensor:
        """The next k inputs to evaluate, [k, d]."""
        at_least(1, k=k)
        before, self.asked = self.asked, self.asked + k
        if len(self.y) < self.initial:
            sobol = torch.quasirandom.SobolEngine(len(self.bounds), scramble=True, seed=derive_seed(self.seed, "initial") % 2**31)
            return self._unscaled(2 * sobol.draw(before + k, dtype=torch.float64)[before:] - 1)
        z = self._spread(generator("cpu", self.seed, "ask", before, len(self.y)))
        choose = self._by_functions if self.acquisition == "thompson" else self._by_improvement
        return self._unscaled(choose(z, k, before))

    @property
    def _sign(self) -> float:
        return 1.0 if self.maximize else -1.0

    def _by_functions(self, z: Tensor, k: int, before: int) -> Tensor:
        """Thompson sampling: the best of the candidates z by each of k drawn functions, improved by it, [k, d]."""
        chosen = []
        for i in range(before, before + k):
            f = self.posterior.function(generator(self.model.device, self.seed, len(self.y), "function", i))
            with torch.no_grad():
                top = (self._sign * f(z).means.reshape(-1)).argmax()
            chosen.append(self._climb(lambda z, f=f: self._sign * f(z).means.reshape(-1).sum(), z[top : top + 1]))
        return torch.cat(chosen)

    def _by_improvement(self, z: Tensor, k: int, before: int) -> Tensor:
        """The k candidates with the greatest joint expected improvement, improved together, [k, d]."""
        sign, (shift, scale) = self._sign, self._units()
        best = sign * (self.best[1] - shift) / scale
        f = draw_functions(self.posterior, draws=self.draws, seed=derive_seed(self.seed, "functions", before, len(self.y)))
        with torch.no_grad():
            p = f(z)
        weights = p.draw_weights
        chosen, _ = greedy_improvement(sign * p.means.squeeze(-1), best, k, weights=weights)

        def _smooth_improvement(z: Tensor) -> Tensor:
            # improvement is flat below the best value; softplus has a gradient there too
            value = (sign * f(z).means.squeeze(-1)).amax(1)  # [S], of the k inputs together
            return weights @ torch.nn.functional.softplus(value - best, beta=20.0)

        return self._climb(_smooth_improvement, z[chosen])

    def _spread(self, source: torch.Generator) -> Tensor:
        """Candidates in [-1, 1]^d: one half anywhere, one half near the five best inputs, [N, d]."""
        d, n = len(self.bounds), self.candidates
        seed = int(torch.randint(2**31, (1,), generator=source))
        anywhere = 2 * torch.quasirandom.SobolEngine(d, scramble=True, seed=seed).draw(n - n // 2, dtype=torch.float64) - 1
        top = self.y.argsort(descending=self.maximize)[:5]
        center = self._scaled(self.x).double().cpu()[top[torch.randint(len(top), (n // 2,), generator=source)]]
        near = center + 2 * NEAR * torch.randn(center.shape, generator=source, dtype=torch.float64)
        return torch.cat([anywhere, near]).clamp(-1, 1).to(self._like)

    def _climb(self, value: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
        """Gradient ascent within the box from z [k, d]; the best point on the way, z included."""
        z = z.detach().clone().requires_grad_()
        optimizer = torch.optim.Adam([z], lr=0.02, maximize=True)
        best, kept = -torch.inf, z.detach().clone()
        for step in range(self.refine + 1):
            with torch.enable_grad():
                height = value(z)
            if float(height.detach()) > best:
                best, kept = float(height.detach()), z.detach().clone()
            if step < self.refine:
                (z.grad,) = torch.autograd.grad(height, z)
                optimizer.step()
                with torch.no_grad():
                    z.clamp_(-1, 1)
        return kept

    def save(self, file: str | os.PathLike) -> None:
        """Write all inputs and values; together with the settings they determine what `ask` returns next."""
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        meta = {"kind": "optimization", "asked": self.asked, "seed": self.seed, "maximize": self.maximize}
        store.write(file, {"x": self.x, "y": self.y, "bounds": self.bounds}, meta)

    def load(self, file: str | os.PathLike) -> None:
        """Continue from a file that a search with the same settings has saved."""
        tensors, meta = store.read(file)
        same = meta.get("kind") == "optimization" and (meta["seed"], meta["maximize"]) == (self.seed, self.maximize)
        if not same or not torch.equal(tensors["bounds"], self.bounds):
            raise ValueError(f"{file} holds another search, with other bounds, direction or seed: give another file")
        self.x, self.y, self.asked, self._fitted = tensors["x"], tensors["y"], meta["asked"], None
