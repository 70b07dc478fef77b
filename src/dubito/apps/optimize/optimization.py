"""Bayesian optimisation: where to look next for the highest value of something that is costly to evaluate."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dubito.apps.optimize.improvement import greedy_improvement
from dubito.apps.optimize.surrogate import drawn
from dubito.apps.sequence import Methods, fit_in_turn
from dubito.inference.options import FitOptions
from dubito.model import Model
from dubito.model.likelihoods import Gaussian
from dubito.network.examples import split_batch
from dubito.posteriors import Point, Posterior
from dubito.tensors import store
from dubito.tensors.randomness import derive, generator

NEAR = 0.05  # how far from the best known inputs candidates are drawn, in units of the box


class Optimization:
    """The highest (or lowest) value of a function in a box, by few evaluations.

    `ask(k)` gives k inputs, [k, d], and `tell(x, y)` takes what was found there. The first `initial` inputs are spread evenly; then the
    model is fitted to all that is known, by any method (or several, one after the other, or a function of the number of
    observations), and inputs are asked for by "ei", the expected improvement of all k together over `draws` functions of the
    posterior, or by "thompson", the best input of one function for each of the k.

    `bounds` [d, 2] are the sides of the box. The network sees inputs scaled to [-1, 1] and values that are standardised: the noise and
    the prior of the model are in these units. The best of `candidates` inputs, spread over the box and drawn near the best known,
    is then improved by so many `refine` steps of gradient ascent in x.

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
        bounds: Any,
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
        if acquisition not in ("ei", "thompson"):
            raise ValueError(f"acquisition is 'ei' or 'thompson'; got {acquisition!r}")
        if not isinstance(model.likelihood, Gaussian):
            raise ValueError(
                "the values are numbers: use the likelihood dubito.Gaussian(scale=s), or Gaussian() to learn the noise"
            )
        self.bounds = torch.as_tensor(bounds, dtype=torch.float64).cpu()
        if self.bounds.ndim != 2 or self.bounds.shape[1] != 2 or not bool((self.bounds[:, 0] < self.bounds[:, 1]).all()):
            raise ValueError("bounds are pairs (low, high), one for each dimension, with low < high")
        if not bool(self.bounds.isfinite().all()):
            raise ValueError("bounds are finite numbers: where a side has no end, give the furthest that makes sense")
        if min(initial, draws, candidates) < 1 or refine < 0:
            raise ValueError("initial, draws and candidates are at least 1, and refine is not negative")
        self.model = replace(model, split=split_batch)  # the batches are pairs of ours
        self.method, self.acquisition, self.maximize = method, acquisition, maximize
        self.initial, self.draws, self.candidates, self.refine = initial, draws, candidates, refine
        self.batch_size, self.seed = batch_size, seed
        self.x = torch.zeros(0, len(self.bounds), dtype=torch.float64)  # [n, d]
        self.y = torch.zeros(0, dtype=torch.float64)  # [n]
        self.asked = 0  # inputs that were ever asked for
        self._fitted: tuple[int, Posterior] | None = None  # of how many observations

    @property
    def best(self) -> tuple[Tensor, float]:
        """The best input that was told, [d], and its value."""
        if not len(self.y):
            raise ValueError("nothing was told yet")
        i = int(self.y.argmax() if self.maximize else self.y.argmin())
        return self.x[i], float(self.y[i])

    def tell(self, x: Any, y: Any) -> None:
        """Take the values y [k] at the inputs x [k, d], which need not have been asked for."""
        x = torch.as_tensor(x, dtype=torch.float64).detach().cpu().reshape(-1, len(self.bounds))
        y = torch.as_tensor(y, dtype=torch.float64).detach().cpu().reshape(-1)
        if len(x) != len(y):
            raise ValueError(f"{len(x)} inputs have {len(x)} values; got {len(y)}")
        if not bool(torch.isfinite(x).all()) or not bool(torch.isfinite(y).all()):
            raise ValueError("an input or a value is NaN or infinite: nothing was taken in")
        inside = torch.minimum(torch.maximum(x, self.bounds[:, 0]), self.bounds[:, 1])
        # what was asked for comes back rounded, if it has been through single precision
        outside = (x - inside).abs() > 1e-6 * (self.bounds[:, 1] - self.bounds[:, 0] + self.bounds.abs().amax(1))
        if bool(outside.any()):
            raise ValueError(f"the input {x[outside.any(1)][0].tolist()} is outside of the bounds")
        self.x, self.y = torch.cat([self.x, inside]), torch.cat([self.y, y])

    @property
    def posterior(self) -> Posterior:
        """Over functions of scaled inputs, with standardised values, given all that was told."""
        if not len(self.y):
            raise ValueError("nothing was told yet, and so there is no posterior: tell(x, y)")
        if self._fitted is None or self._fitted[0] != len(self.y):
            shift, scale = self._units()
            data = (self._scaled(self.x), ((self.y - shift) / scale).to(self._like.dtype).unsqueeze(1))
            options = FitOptions(seed=derive(self.seed, "fit", len(self.y)), batch_size=self.batch_size, progress=False)
            found = fit_in_turn(self.model, self.method, data, options)
            if isinstance(found, Point):
                raise ValueError(
                    "the posterior of this method is a point: with no uncertainty nothing is looked for but what is known to be good. "
                    "Use an Ensemble, MCDropout, or [MAP(), NeuralLinear()]"
                )
            self._fitted = len(self.y), found
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
        """k inputs that are worth an evaluation, [k, d]."""
        if k < 1:
            raise ValueError(f"at least one input is asked for; got {k}")
        before, self.asked = self.asked, self.asked + k
        if len(self.y) < self.initial:
            spread = torch.quasirandom.SobolEngine(len(self.bounds), scramble=True, seed=derive(self.seed, "initial") % 2**31)
            return self._unscaled(2 * spread.draw(before + k, dtype=torch.float64)[before:] - 1)
        source = generator("cpu", self.seed, "ask", before, len(self.y))
        z = self._spread(source)
        sign, (shift, scale) = 1.0 if self.maximize else -1.0, self._units()
        best = sign * (self.best[1] - shift) / scale
        if self.acquisition == "thompson":
            found = []
            for i in range(k):
                f = self.posterior.function(self._source("function", before + i))
                with torch.no_grad():
                    top = (sign * f(z).means.reshape(-1)).argmax()
                found.append(self._climb(lambda z, f=f: sign * f(z).means.reshape(-1).sum(), z[top : top + 1]))
            return self._unscaled(torch.cat(found))
        f = drawn(self.posterior, draws=self.draws, seed=derive(self.seed, "functions", before, len(self.y)))
        with torch.no_grad():
            p = f(z)
        weights = p.draw_weights
        chosen, _ = greedy_improvement(sign * p.means.squeeze(-1), best, k, weights=weights)

        def improvement(z: Tensor) -> Tensor:
            # a little below the best, where improvement itself is flat, a smooth one still shows the way
            value = (sign * f(z).means.squeeze(-1)).amax(1)  # [S], of the k inputs together
            return weights @ torch.nn.functional.softplus(value - best, beta=20.0)

        return self._unscaled(self._climb(improvement, z[chosen]))

    def _source(self, *parts: int | str) -> torch.Generator:
        return generator(self.model.device, self.seed, len(self.y), *parts)

    def _spread(self, source: torch.Generator) -> Tensor:
        """Candidates in [-1, 1]^d: half of them anywhere, half near the five best inputs, [N, d]."""
        d, n = len(self.bounds), self.candidates
        seed = int(torch.randint(2**31, (1,), generator=source))
        anywhere = 2 * torch.quasirandom.SobolEngine(d, scramble=True, seed=seed).draw(n - n // 2, dtype=torch.float64) - 1
        top = self.y.argsort(descending=self.maximize)[:5]
        centre = self._scaled(self.x).double().cpu()[top[torch.randint(len(top), (n // 2,), generator=source)]]
        near = centre + 2 * NEAR * torch.randn(centre.shape, generator=source, dtype=torch.float64)
        return torch.cat([anywhere, near]).clamp(-1, 1).to(self._like)

    def _climb(self, value: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
        """Gradient ascent within the box, from z [k, d]; the best that was seen on the way, z included."""
        z = z.detach().clone().requires_grad_()
        optimizer = torch.optim.Adam([z], lr=0.02)
        best, kept = -torch.inf, z.detach().clone()
        for step in range(self.refine + 1):
            with torch.enable_grad():
                now = value(z)
            if float(now.detach()) > best:
                best, kept = float(now.detach()), z.detach().clone()
            if step < self.refine:
                (slope,) = torch.autograd.grad(-now, z)
                z.grad = slope
                optimizer.step()
                with torch.no_grad():
                    z.clamp_(-1, 1)
        return kept

    def save(self, file: str | os.PathLike) -> None:
        """All that was told; what is asked next depends on nothing else but the settings."""
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        meta = {"kind": "optimization", "asked": self.asked, "seed": self.seed, "maximize": self.maximize}
        store.write(file, {"x": self.x, "y": self.y, "bounds": self.bounds}, meta)

    def load(self, file: str | os.PathLike) -> None:
        """Go on where another search, made alike, was saved."""
        tensors, meta = store.read(file)
        alike = meta.get("kind") == "optimization" and (meta["seed"], meta["maximize"]) == (self.seed, self.maximize)
        if not alike or not torch.equal(tensors["bounds"], self.bounds):
            raise ValueError(f"{file} is of another search, with other bounds, direction or seed: give another file")
        self.x, self.y, self.asked, self._fitted = tensors["x"], tensors["y"], meta["asked"], None
