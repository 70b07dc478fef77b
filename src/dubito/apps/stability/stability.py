"""The stability of a posterior: its slopes at given inputs, a bound, and its accuracy and uncertainty under attack."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dubito.apps.network import check_real
from dubito.apps.stability.bound import Bound, lipschitz_bound
from dubito.evaluation.metrics import accuracy, ece, nll
from dubito.evaluation.metrics.decisions import auroc
from dubito.evaluation.metrics.reading import labelled, targets
from dubito.evaluation.shift.attack import Bounds, Norm, check, pgd
from dubito.inference.progress import Progress
from dubito.model.likelihoods import Categorical
from dubito.network.inspect import layers_of
from dubito.posteriors import Posterior
from dubito.posteriors.predictive import Predictive, concatenate
from dubito.tensors.checks import at_least, one_of, positive, require
from dubito.tensors.randomness import generator

Transform = Callable[[Tensor], Tensor]


def local_slopes(
    posterior: Posterior,
    x: Tensor,
    *,
    of: Literal["predictions", "outputs"] = "predictions",
    steps: int = 50,
    tolerance: float = 1e-3,
    how: str | None = None,
    draws: int | None = None,
    seed: int = 0,
    transform: Transform | None = None,
    batch_size: int = 256,
    progress: bool | None = None,
) -> Tensor:
    r"""The norm of the Jacobian at every input, :math:`\lVert \partial g(x) / \partial x \rVert_2`, [B]: the local Lipschitz constant.

    g is the prediction of the whole posterior: class probabilities (or the mean of a regression), or with `of="outputs"` the mean of
    its networks' outputs. The norm is found by power iteration, with products of the Jacobian and a vector and of a vector and the
    Jacobian, for all inputs at once: `steps` at most, or until none rises by more than the `tolerance`. It comes from below. The
    functions are those of `posterior.predict` with the same `how`, `draws` and `seed`; the network is given transform(x).

    >>> import dubito
    >>> model = dubito.Model(torch.nn.Linear(2, 2, bias=False), dubito.Gaussian(scale=1.0))
    >>> point = dubito.posteriors.Point(model, {"weight": torch.diag(torch.tensor([2.0, -3.0]))}, {})
    >>> local_slopes(point, torch.zeros(4, 2)).round(decimals=2)
    tensor([3., 3., 3., 3.])
    """
    check_real(x, "divide bytes by 255, embed words")
    one_of(("predictions", "outputs"), of=of)
    at_least(1, steps=steps, batch_size=batch_size)
    positive(tolerance=tolerance)
    predict = posterior.functions(how, draws=draws, seed=seed)
    device, dtype = posterior.model.device, next(posterior.model.network.parameters()).dtype

    def _prediction(x: Tensor) -> Tensor:
        p = predict(x if transform is None else transform(x))
        return (p.mean if of == "predictions" else p.f_mean).flatten(1)

    parts = x.detach().split(batch_size)
    done: list[Tensor] = []
    with torch.inference_mode(False), _twice(posterior.model.network), Progress("slopes", len(parts), show=progress) as bar:
        for i, batch in enumerate(parts):
            place = batch.clone().to(device, dtype)
            done.append(_steepest(_prediction, place, steps, tolerance, generator("cpu", seed, "slopes", i)).to(x.device))
            bar.update(i + 1, {})
    return torch.cat(done) if done else x.new_zeros(0)


@contextmanager
def _twice(network: nn.Module) -> Iterator[None]:
    """Attention and recurrent layers by kernels that can be differentiated twice, which the fastest cannot."""
    recurrent = bool(layers_of(network, nn.RNNBase))
    cudnn = torch.backends.cudnn
    with sdpa_kernel(SDPBackend.MATH), cudnn.flags(enabled=cudnn.enabled and not recurrent):
        yield


def _steepest(function: Callable[[Tensor], Tensor], x: Tensor, steps: int, tolerance: float, source: torch.Generator) -> Tensor:
    v = torch.randn(x.shape, generator=source).to(x)
    with torch.enable_grad():
        x = x.requires_grad_()
        y = function(x)
        u = torch.zeros_like(y).requires_grad_()
        (back,) = _gradient(y, x, u, create_graph=True)
    if not back.requires_grad:
        return x.new_zeros(len(x))
    norms = x.new_zeros(len(x))
    for _ in range(steps):
        lengths = v.flatten(1).norm(dim=1).clamp_min(torch.finfo(v.dtype).tiny)
        v = v / lengths.view(-1, *[1] * (v.ndim - 1))
        (ahead,) = _gradient(back, u, v)  # J v
        before, norms = norms, ahead.flatten(1).norm(dim=1)
        if bool((norms - before <= tolerance * norms).all()):
            break
        (v,) = _gradient(y, x, ahead)  # J^T J v
    return norms.detach()


def _gradient(y: Tensor, x: Tensor, along: Tensor, *, create_graph: bool = False) -> Any:
    return torch.autograd.grad(y, x, along, retain_graph=True, create_graph=create_graph, materialize_grads=True)


@dataclass(frozen=True)
class Level:
    """Predictions where every input was moved by at most `size`, to do as badly as possible; size 0 is the inputs as they are."""

    size: float
    accuracy: float
    nll: float
    ece: float
    confidence: float  # mean probability of the most probable class
    total: float  # mean uncertainty, in nats, and its parts
    aleatoric: float
    epistemic: float
    errors: float  # AUROC of the total uncertainty at telling wrong predictions from right ones; NaN where all are alike
    noticed: float  # AUROC of the total uncertainty at telling these inputs from those as they are
    slope: float  # mean norm of the Jacobian of the probabilities
    certified: float | None  # share that is right and that no change of this size can turn, by the bound, if there is one


@dataclass(frozen=True)
class Stability:
    """How a posterior reacts to small changes. `slopes` [B] are local Lipschitz constants at the inputs as they are."""

    norm: Norm
    levels: tuple[Level, ...]
    slopes: Tensor
    bound: Bound | None  # of the outputs, in Euclidean norms
    unbounded: str = ""  # why there is no bound

    def level(self, size: float) -> Level:
        """The level of that size."""
        matching = [level for level in self.levels if level.size == size]
        require(matching, f"there is no level of size {size}; there are {', '.join(f'{level.size:g}' for level in self.levels)}")
        return matching[0]


def stability(
    posterior: Posterior,
    x: Tensor,
    y: Tensor,
    *,
    sizes: Sequence[float],
    bounds: Bounds,
    norm: Norm = "l2",
    steps: int = 10,
    restarts: int = 1,
    how: str | None = None,
    draws: int | None = None,
    seed: int = 0,
    transform: Transform | None = None,
    batch_size: int = 256,
    progress: bool | None = None,
) -> Stability:
    r"""Attack a classifier's inputs within balls of growing `sizes` (`dubito.shift.pgd`, of the whole posterior) and tell how it does.

    Next to accuracy and calibration it tells whether the posterior notices: how its uncertainty grows, and whether it is larger where
    predictions are wrong. Local slopes are norms of the Jacobian of the class probabilities (`local_slopes`). For one network (a
    posterior that is a point) with a bound L (`lipschitz_bound`) and attacks in the norm "l2", a prediction whose logits are apart by
    a margin m cannot be turned within :math:`m / (\sqrt 2 L)`: the share that is right and beyond that is `certified`, where the
    likelihood is `Categorical`, so that the class is the largest logit.

    `bounds` are the lowest and highest values that inputs may have, None for none. The network is given transform(x).

    >>> import dubito
    >>> model = dubito.Model(torch.nn.Linear(2, 2), dubito.Categorical())
    >>> x = torch.randn(20, 2)
    >>> found = stability(dubito.fit(model, dubito.MAP(epochs=2), (x, (x[:, 0] > 0).long())), x, (x[:, 0] > 0).long(), sizes=[0.1],
    ...                   bounds=None)
    >>> [level.size for level in found.levels]
    [0.0, 0.1]
    >>> found.level(0.1).accuracy <= found.level(0.0).accuracy
    True
    """
    y = torch.as_tensor(y)
    levels = sorted({0.0, *(float(size) for size in sizes)})
    _check(posterior, x, y, levels, bounds, norm)
    options: dict[str, Any] = {"how": how, "draws": draws, "seed": seed, "transform": transform, "batch_size": batch_size}
    attack: dict[str, Any] = {"bounds": bounds, "norm": norm, "steps": steps, "restarts": restarts, **options}
    bound, why = _bound(posterior, x, transform)
    made: list[Level] = []
    slopes, clean = torch.empty(0), None
    with Progress("stability", len(levels), show=progress) as bar:
        for i, size in enumerate(levels):
            moved = pgd(posterior, x, y, size=size, **attack) if size else x
            p = _predicted(posterior, moved, how, draws, seed, transform, batch_size)
            steepness = local_slopes(posterior, moved, **options, progress=False)
            if clean is None:
                clean, slopes = p, steepness
            sure = _certified(posterior, clean, y, size, norm, bound, transform)
            made.append(_level(size, p, clean, y, float(steepness.double().mean()), sure))
            bar.update(i + 1, {"accuracy": made[-1].accuracy})
    return Stability(norm, tuple(made), slopes, bound, why)


def _check(posterior: Posterior, x: Tensor, y: Tensor, levels: list[float], bounds: Bounds, norm: Norm) -> None:
    likelihood = posterior.model.likelihood
    require(likelihood.discrete, "the stability report is of classifiers; for a regression use local_slopes")
    several = not likelihood.indexed and y.ndim > 1 and y.shape[-1] > 1
    require(not several, f"the stability report needs one label for each input; got targets {list(y.shape)}")
    check(x, levels[-1], bounds, norm)
    require(levels[0] >= 0 and len(levels) > 1, f"sizes must be positive, and at least one; got {levels}")
    require(0 < len(x) == len(y), f"x and y must have the same number of rows, and at least one; got {len(x)} and {len(y)}")


def _bound(posterior: Posterior, x: Tensor, transform: Transform | None) -> tuple[Bound | None, str]:
    try:
        return lipschitz_bound(posterior, x[:1] if transform is None else transform(x[:1])), ""
    except ValueError as error:
        return None, str(error)


def _predicted(
    posterior: Posterior, x: Tensor, how: str | None, draws: int | None, seed: int, transform: Transform | None, batch_size: int
) -> Predictive:
    parts, dtype = [], next(posterior.model.network.parameters()).dtype
    for batch in x.split(batch_size):
        inputs = batch if transform is None else transform(batch)
        parts.append(posterior.predict(inputs.to(dtype), how, draws=draws, seed=seed).to("cpu"))
    return concatenate(parts)


def _level(size: float, p: Predictive, clean: Predictive, y: Tensor, slope: float, certified: float | None) -> Level:
    y = p.likelihood.target(y.cpu(), p.f_mean)
    u, was = p.uncertainty, clean.uncertainty
    wrong = p.mean.argmax(-1) != y if p.mean.shape[-1] > 1 else (p.mean.squeeze(-1) > 0.5) != (y.view(len(y)) > 0.5)
    total, before = u.total.flatten(), was.total.flatten()
    counted = labelled(p, targets(p, y, "stability")).flatten()  # of images, some pixels may have no class
    doubt, wrong = total[counted], wrong.flatten()[counted]
    mixed = bool(wrong.any()) and not bool(wrong.all())
    moved = torch.cat([torch.zeros(len(before)), torch.ones(len(total))]).bool()
    return Level(
        size,
        float(accuracy(p, y)),
        float(nll(p, y)),
        float(ece(p, y)),
        float(torch.maximum(p.mean, 1 - p.mean if p.mean.shape[-1] == 1 else p.mean).amax(-1).double().mean()),
        float(total.double().mean()),
        float(u.aleatoric.double().mean()),
        float(u.epistemic.double().mean()),
        float(auroc(doubt, wrong)) if mixed else math.nan,
        float(auroc(torch.cat([before, total]), moved)) if size else 0.5,
        slope,
        certified,
    )


def _certified(
    posterior: Posterior, clean: Predictive, y: Tensor, size: float, norm: str, bound: Bound | None, transform: Transform | None
) -> float | None:
    f, likelihood = clean.f_mean, clean.likelihood
    if bound is None or norm != "l2" or transform is not None or not posterior.certain:
        return None
    # only there is the class the largest output: noise of the logits may turn their order
    if not isinstance(likelihood, Categorical) or f.shape[-1] < 2:
        return None
    y = likelihood.target(y.cpu(), f)
    best = f.topk(2, dim=-1).values
    margin = best[..., 0] - best[..., 1]
    right = f.argmax(-1) == y
    safe = right & (margin > math.sqrt(2) * bound.value * size)
    return float(safe[labelled(clean, y)].double().mean())
