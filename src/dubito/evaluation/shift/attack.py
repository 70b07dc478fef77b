r"""Inputs made to be misread: the worst within a small distance of x, found by the gradient of the score.

The score is that of the whole posterior, :math:`-\ln \frac1S \sum_s p(y \mid f_s(x))`: one x for all functions together, since a
posterior whose members are fooled one by one, each at a place of its own, may still be right on average. The functions are those
of `posterior.predict` with the same `how`, `draws` and `seed`, and the same at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from dubito.evaluation.metrics.reading import Array
from dubito.evaluation.shift.filters import normal, uniform
from dubito.posteriors import Posterior
from dubito.posteriors.functions import Functions, Mixed, plain
from dubito.tensors.checks import at_least, one_of, positive, require
from dubito.tensors.randomness import generator

Norm = Literal["linf", "l2"]
Bounds = tuple[float | Tensor, float | Tensor] | None
Transform = Callable[[Tensor], Tensor]


def fgsm(
    posterior: Posterior,
    x: Tensor,
    y: Array,
    *,
    size: float,
    bounds: Bounds,
    norm: Norm = "linf",
    how: str | None = None,
    draws: int | None = None,
    seed: int = 0,
    transform: Transform | None = None,
    batch_size: int = 256,
) -> Tensor:
    r"""One step of length `size` up the gradient g of the score (fast gradient sign; Goodfellow et al., 2015).

    .. math:: x + \epsilon\, \mathrm{sign}(g) \quad (\text{norm "linf"}), \qquad x + \epsilon\, g / \lVert g \rVert \quad (\text{"l2"})

    Then every number is brought back into `bounds`, (lowest, highest), as numbers or tensors that go with x; None is no bounds. The
    network is given transform(x): normalised, flattened or the like. Where the score is linear this is the worst x there is.

    >>> import dubito
    >>> model = dubito.Model(torch.nn.Linear(2, 1, bias=False), dubito.Bernoulli())
    >>> point = dubito.posteriors.Point(model, {"weight": torch.tensor([[2.0, -1.0]])}, {})
    >>> fgsm(point, torch.tensor([[0.5, 0.5]]), torch.tensor([1.0]), size=0.1, bounds=(0, 1))
    tensor([[0.4000, 0.6000]])
    """
    check(x, size, bounds, norm)

    def one(x: Tensor, score: Callable[[Tensor], Tensor], i: int) -> Tensor:
        """One step for a batch."""
        return _within(x + size * _steepest(_slope(score, x)[1], norm), bounds, x)

    return _attacked(one, posterior.functions(how, draws=draws, seed=seed), posterior, x, y, transform, batch_size)


def pgd(
    posterior: Posterior,
    x: Tensor,
    y: Array,
    *,
    size: float,
    bounds: Bounds,
    norm: Norm = "linf",
    steps: int = 10,
    step_size: float | None = None,
    restarts: int = 1,
    random_start: bool = True,
    how: str | None = None,
    draws: int | None = None,
    seed: int = 0,
    transform: Transform | None = None,
    batch_size: int = 256,
) -> Tensor:
    r"""Projected gradient ascent (Madry et al., 2018): several steps, each followed by the way back into the ball of radius `size`
    around x and into `bounds`.

    Steps are `step_size` long, by default 2.5 size / steps, from a random point of the ball, `restarts` times. Each example keeps the
    worst place that any step has come to, x itself included, so that no example ends with a better score than it started with. The
    other arguments are those of `fgsm`; `seed` is that of the random starts as well.

    >>> import dubito
    >>> model = dubito.Model(torch.nn.Linear(2, 1, bias=False), dubito.Bernoulli())
    >>> point = dubito.posteriors.Point(model, {"weight": torch.tensor([[3.0, -4.0]])}, {})
    >>> pgd(point, torch.tensor([[0.5, 0.5]]), torch.tensor([1.0]), size=0.1, bounds=(0, 1), norm="l2", random_start=False)
    tensor([[0.4400, 0.5800]])
    """
    check(x, size, bounds, norm)
    at_least(1, steps=steps, restarts=restarts)
    positive(step_size=step_size)
    length = 2.5 * size / steps if step_size is None else step_size

    def one(x: Tensor, score: Callable[[Tensor], Tensor], i: int) -> Tensor:
        """All steps for a batch."""
        source = generator("cpu", seed, "attack", i)
        with torch.no_grad():
            worst, most = x.clone(), score(x)

        def note(place: Tensor, value: Tensor) -> None:
            """Keep the places that are worse than any before."""
            worse = value > most
            worst[worse], most[worse] = place[worse], value[worse]

        for _ in range(restarts):
            place = _within(x + _inside(x, size, norm, source), bounds, x) if random_start else x
            for _ in range(steps):
                value, slope = _slope(score, place)
                note(place, value)
                place = _within(x + _projected(place + length * _steepest(slope, norm) - x, size, norm), bounds, x)
            with torch.no_grad():
                note(place, score(place))
        return worst

    return _attacked(one, posterior.functions(how, draws=draws, seed=seed), posterior, x, y, transform, batch_size)


def check(x: Tensor, size: float, bounds: Bounds, norm: str) -> None:
    """Raise a ValueError, in words, where there is nothing to attack."""
    dtype = getattr(x, "dtype", type(x).__name__)
    real = getattr(dtype, "is_floating_point", False)
    require(real, f"x must be one tensor of real numbers; got {dtype}: divide bytes by 255, embed words")
    at_least(0, size=size)
    one_of(("linf", "l2"), norm=norm)
    if bounds is not None:
        low, high = bounds
        outside = (x.detach() < torch.as_tensor(low).to(x)) | (x.detach() > torch.as_tensor(high).to(x))
        if bool(outside.any()):
            raise ValueError(
                f"{int(outside.sum())} numbers of x lie outside `bounds`: give the bounds of x itself, before `transform`"
            )


def _attacked(
    one: Callable[[Tensor, Callable[[Tensor], Tensor], int], Tensor],
    functions: Functions | Mixed,
    posterior: Posterior,
    x: Tensor,
    y: Array,
    transform: Transform | None,
    batch_size: int,
) -> Tensor:
    """All examples, some at a time."""
    y = torch.as_tensor(y)
    require(len(x) == len(y), f"there are {len(x)} inputs for {len(y)} targets: give one for each")
    at_least(1, batch_size=batch_size)
    device, dtype = posterior.model.device, posterior.model.dtype
    done = []
    with torch.inference_mode(False):
        for i, (part, target) in enumerate(zip(x.detach().split(batch_size), y.split(batch_size), strict=True)):

            def score(x: Tensor, target: Tensor = plain(target).to(device)) -> Tensor:
                """-ln p(y | x, D) of a batch, [B]."""
                inputs = x if transform is None else transform(x)
                return -functions(inputs.to(device, dtype)).log_prob(target)

            done.append(one(part.clone().to(device), score, i).detach().to(x.device))
    return torch.cat(done) if done else x.clone()


def _slope(score: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """The score of every example, [B], and its gradient in x. Nothing else gets one."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        value = score(x)
        if not value.requires_grad:
            raise ValueError("the prediction has no gradient with respect to x: make `transform` of torch functions")
        (slope,) = torch.autograd.grad(value.sum(), x)
    return value.detach(), slope


def _lengths(away: Tensor) -> Tensor:
    """The length of every example's vector, shaped to divide it by."""
    return away.flatten(1).norm(dim=1).view(-1, *[1] * (away.ndim - 1))


def _steepest(slope: Tensor, norm: Norm) -> Tensor:
    """The direction of length 1 in that norm in which a linear function grows most."""
    return slope.sign() if norm == "linf" else slope / _lengths(slope).clamp_min(torch.finfo(slope.dtype).tiny)


def _projected(away: Tensor, size: float, norm: Norm) -> Tensor:
    """The nearest vector in the ball."""
    if norm == "linf":
        return away.clamp(-size, size)
    return away * (size / _lengths(away).clamp_min(max(size, torch.finfo(away.dtype).tiny)))


def _inside(x: Tensor, size: float, norm: Norm, source: torch.Generator) -> Tensor:
    """A random vector, uniform in the ball."""
    if norm == "linf":
        return uniform(tuple(x.shape), x, source, -size, size)
    away = normal(tuple(x.shape), x, source)
    radius = uniform((len(x),), x, source).view(-1, *[1] * (x.ndim - 1)) ** (1 / x[0].numel())
    return size * radius * away / _lengths(away)


def _within(moved: Tensor, bounds: Bounds, x: Tensor) -> Tensor:
    """Back into the bounds. As x is inside, every number comes closer to it, and stays in the ball."""
    if bounds is None:
        return moved
    low, high = (torch.as_tensor(end).to(x) for end in bounds)
    return torch.minimum(torch.maximum(moved, low), high)


def functions(posterior: Posterior, *, how: str | None = None, draws: int | None = None, seed: int = 0) -> Functions | Mixed:
    """`posterior.functions(how, draws=draws, seed=seed)`."""
    return posterior.functions(how, draws=draws, seed=seed)
