"""How steep a posterior's prediction is at given inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dubito.inference.progress import Progress
from dubito.posteriors import Posterior
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
    real = isinstance(x, Tensor) and x.is_floating_point()
    require(real, "x must be one tensor of real numbers: divide bytes by 255, embed words")
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
        for i, part in enumerate(parts):
            place = part.clone().to(device, dtype)
            done.append(_steepest(_prediction, place, steps, tolerance, generator("cpu", seed, "slopes", i)).to(x.device))
            bar.update(i + 1, {})
    return torch.cat(done) if done else x.new_zeros(0)


@contextmanager
def _twice(network: nn.Module) -> Iterator[None]:
    """Attention and recurrent layers by kernels that can be differentiated twice, which the fastest cannot."""
    recurrent = any(isinstance(module, nn.RNNBase) for module in network.modules())
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
