"""Bayesian optimization: which input to evaluate next, where evaluations are expensive.

`expected_improvement` scores a predictive, `surrogate` wraps a posterior as a model of BoTorch (`pip install dubito[botorch]`), and
`Optimization` is the search.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from dubito.apps.network import Methods, fit_in_turn
from dubito.inference.options import FitOptions
from dubito.model import Model
from dubito.model.likelihoods import average
from dubito.network.examples import split_batch
from dubito.posteriors import Posterior
from dubito.posteriors.functions import Functions, Mixed, UnequalWeights
from dubito.posteriors.predictive import Predictive
from dubito.tensors import store
from dubito.tensors.checks import at_least, between, one_of, require
from dubito.tensors.randomness import derive_seed, generator


def expected_improvement(p: Predictive, best: float, *, maximize: bool = True) -> Tensor:
    r"""The expected improvement of f(x) over the best known value, [B]; with `maximize=False` below it.

    .. math:: E[\max(f - f^*, 0)] = \sum_s w_s \big[(\mu_s - f^*) \Phi(z_s) + \sigma_s \varphi(z_s)\big], \quad
        z_s = (\mu_s - f^*) / \sigma_s,

    exact for a weighted mixture of Gaussians over f: one for a Laplace posterior, one without variance for each member of an ensemble.
    It is about f, so the noise of observations does not enter.

    >>> import dubito
    >>> from dubito.posteriors.predictive import LatentMixture
    >>> p = LatentMixture(dubito.Gaussian(scale=0.1), torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    >>> expected_improvement(p, 0.0)                                                  # 1 / sqrt(2 pi)
    tensor([0.3989])
    """
    mixture = p.mixture
    if mixture is None:
        raise TypeError(f"expected improvement needs Gaussians over f; got {type(p).__name__}: predict with how='sampled'")
    single = not p.likelihood.discrete and p.means.ndim == 3 and p.means.shape[-1] == 1
    require(single, f"expected improvement needs a regression with a single output; got means of shape {list(p.means.shape)}")
    mean, sign = p.means.squeeze(-1), 1.0 if maximize else -1.0  # [S, B]
    gain, weights = sign * (mean - best), mixture.component_weights.to(mean)
    if mixture.certain:
        return average(gain.clamp_min(0), weights)
    scale = mixture.covariances.reshape(mean.shape).clamp_min(torch.finfo(mean.dtype).tiny).sqrt()
    z = gain / scale
    density = (-0.5 * z * z).exp() / math.sqrt(2 * math.pi)
    return average((gain * torch.special.ndtr(z) + scale * density).clamp_min(0), weights)


def greedy_improvement(values: Tensor, best: float, k: int, *, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    r"""Choose k of N inputs greedily by their joint improvement: positions [k] and the gain of each [k].

    `values` [S, N] are drawn functions at all inputs, with `weights` [S] that sum to 1 (None: equal). The improvement of a set is
    :math:`\sum_s w_s \max(\max_i f_s(x_i) - f^*, 0)`, and the gain of an input is what it adds to those before it. Inputs that are
    high in the same functions are therefore not chosen together.

    >>> values = torch.tensor([[3.0, 2.9, 0.0], [0.0, 0.0, 1.0]])
    >>> greedy_improvement(values, 0.0, 2)
    (tensor([0, 2]), tensor([1.5000, 0.5000]))
    """
    between(1, values.shape[1], k=k, include="both")
    shares = values.new_full((len(values),), 1 / len(values)) if weights is None else weights
    highest = values.new_full((len(values), 1), best)
    chosen: list[int] = []
    gains: list[Tensor] = []
    for _ in range(k):
        gain = average((values - highest).clamp_min(0), shares)
        gain[chosen] = -torch.inf
        i = int(gain.argmax())
        chosen.append(i)
        gains.append(gain[i])
        highest = torch.maximum(highest, values[:, i : i + 1])
    return torch.tensor(chosen), torch.stack(gains)


def surrogate(posterior: Posterior, *, draws: int = 64, how: str | None = None, seed: int = 0) -> Any:
    """A `botorch.models.model.Model` made of `draws` functions of the posterior, the same ones at every call.

    Its posterior at X [..., q, d] is an `EnsemblePosterior` [..., S, q, m] of f without noise, as acquisition functions expect: joint
    over the q inputs and differentiable in X. All draws of a sampler or members of an ensemble are used, up to `draws`.

        from botorch.acquisition.logei import qLogExpectedImprovement
        from botorch.optim import optimize_acqf

        model = surrogate(posterior)
        x, value = optimize_acqf(qLogExpectedImprovement(model, best_f=1.0), bounds, q=2, num_restarts=4, raw_samples=64)
    """
    try:
        from botorch.models.model import Model  # pyright: ignore[reportMissingImports]
        from botorch.posteriors.ensemble import EnsemblePosterior  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("surrogate needs BoTorch: pip install dubito[botorch]") from error
    likelihood = posterior.model.likelihood
    require(not likelihood.discrete, f"a surrogate needs a regression, such as Gaussian(); got {type(likelihood).__name__}")
    drawn = draw_functions(posterior, how=how, draws=draws, seed=seed)
    like = next(posterior.model.network.parameters())

    class Surrogate(Model):
        """The drawn functions with the interface of a BoTorch model."""

        def __init__(self):
            super().__init__()
            self.functions, self._width = drawn, 1

        @property
        def num_outputs(self) -> int:
            """The number of outputs m, as of the last call of `posterior`."""
            return self._width

        @property
        def batch_shape(self) -> torch.Size:
            """Empty: the model has no batch dimensions."""
            return torch.Size()

        def posterior(
            self,
            X: Tensor,
            output_indices: list[int] | None = None,
            observation_noise: bool | Tensor = False,
            posterior_transform: Callable | None = None,
        ) -> Posterior:
            """The values of the functions at X [..., q, d], as an `EnsemblePosterior` [..., S, q, m]."""
            if observation_noise is not False:
                raise NotImplementedError("a surrogate gives f without the noise of observations: leave out observation_noise")
            p = self.functions(X.reshape(-1, X.shape[-1]).to(like))
            values = p.means.to(X.dtype)  # [S, N, m]
            self._width = values.shape[-1]
            values = values if output_indices is None else values[..., output_indices]
            values = values.reshape(len(values), *X.shape[:-1], values.shape[-1]).movedim(0, -3)  # [..., S, q, m]
            weights = p.draw_weights.to(values)
            options = {} if torch.allclose(weights, weights.mean()) else {"weights": weights}
            if options and "weights" not in inspect.signature(EnsemblePosterior).parameters:
                raise ImportError("draws with unequal weights need a BoTorch whose EnsemblePosterior has weights: upgrade it")
            ensemble = EnsemblePosterior(values, **options)
            return ensemble if posterior_transform is None else posterior_transform(ensemble)

    return Surrogate().to(like.device)


def draw_functions(posterior: Posterior, *, draws: int, how: str | None = None, seed: int = 0) -> Functions | Mixed:
    """`draws` functions of a posterior, or all of them if they have unequal weights."""
    try:
        return posterior.functions(how, draws=draws, seed=seed)
    except UnequalWeights:
        return posterior.functions(how, seed=seed)


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
        gaussian = model.likelihood.gaussian is not None
        require(gaussian, f"the likelihood must be Gaussian(scale=s), or Gaussian() to learn the noise; got {model.likelihood!r}")
        self.bounds = torch.as_tensor(bounds, dtype=torch.float64).cpu()
        pairs = self.bounds.ndim == 2 and self.bounds.shape[1] == 2 and bool((self.bounds[:, 0] < self.bounds[:, 1]).all())
        require(pairs, f"bounds must be pairs (low, high) with low < high, one for each dimension; got {bounds}")
        require(self.bounds.isfinite().all(), f"bounds must be finite; got {bounds}")
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
            way_out = "use an Ensemble, MCDropout, or [MAP(), NeuralLinear()]"
            require(not posterior.certain, f"the posterior is a point, without uncertainty to explore by: {way_out}")
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
