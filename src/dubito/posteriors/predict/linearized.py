r"""Prediction by linearizing the network in its weights: a Gaussian over f with mean f(x) and covariance :math:`J \Sigma J^T`.

`linearization` is the pass over some inputs; here predictions, sweeps over prior precisions and draws of functions are made of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dubito.curvature.capture import example_count
from dubito.curvature.generic import Unrolled, along
from dubito.curvature.layout import Layout, layout
from dubito.model import Model
from dubito.model.likelihoods import likelihood_params
from dubito.network.examples import Inputs
from dubito.network.weights import in_mode
from dubito.posteriors.predict.linearization import Linearization
from dubito.posteriors.predict.sampled import draw_groups
from dubito.posteriors.predictive import LatentMixture
from dubito.tensors import tree
from dubito.tensors.covariances import Covariance
from dubito.tensors.tree import Buffers, Params

GIGABYTE = 2**30
POSITIONS = 256  # outputs of an example (classes times pixels) above which draws of linearized functions take over
DRAWS = 30  # of them


@torch.inference_mode(False)  # gradients are needed
def linearized(
    model: Model,
    x: Inputs,
    *,
    params: Params,
    buffers: Buffers,
    covariance: Covariance,
    draws: int | None = None,
    fallback: int = DRAWS,
    memory: float = 1.0,
    generator: torch.Generator | None = None,
    top: tuple[int, Tensor] | None = None,
) -> LatentMixture:
    """The predictive of the linearized network at x.

    `top` = (k, variances [B, C]): only the k largest outputs of each example are followed; the others have the variances given, and
    none of them a covariance. With `draws`, or where an example has very many outputs (segmentation: then `fallback` of them), as so
    many functions f(x) + J(x) (theta - mean) with theta from the posterior, the same functions for every x; not with `fallback=0`.
    """
    x, params, buffers = _prepared(model, x, params, buffers)
    names = tuple(covariance.shapes)
    if example_count(x) == 0:
        with torch.no_grad():
            f = model.forward(params, x, tree.clone(buffers))[0].unsqueeze(0)
        return LatentMixture(model.likelihood, f, torch.diag_embed(torch.zeros_like(f)), params=likelihood_params(params))
    found = layout(model, params, x, buffers, names)
    if draws is not None or (fallback and found.outputs > POSITIONS and not found.flat):
        groups = draw_groups(draws or fallback, covariance.size, memory)
        deltas = (covariance.sample(n, generator) for n in groups)
        means = torch.cat([functions(model, x, params=params, buffers=buffers, deltas=delta) for delta in deltas])
        return LatentMixture(model.likelihood, means, params=likelihood_params(params), how=f"linearized, {len(means)} draws")
    f, cov, root = [], [], []
    step = _examples_at_a_time(found, params, x, top, memory)
    for start in range(0, example_count(x), step):
        run = Linearization(model, params, buffers, covariance, _some(x, start, step), found, names)
        found = run.found
        if top is not None:
            run.top = run.f.topk(top[0]).indices
            variance = run.covariances()[0].diagonal(dim1=1, dim2=2)
            cov.append(top[1][start : start + step].to(variance).scatter(1, run.top, variance))
        elif (wide := run.wide_root()) is not None:
            root.append(wide)
        else:
            cov.append(run.covariances()[0])
        f.append(run.f)
    means, whole = (_joined(parts).unsqueeze(0) for parts in (f, cov or root))
    return LatentMixture(
        model.likelihood, means, whole if cov else None, params=likelihood_params(params), root=None if cov else whole
    )


def _examples_at_a_time(found: Layout, params: Params, x: Inputs, top: tuple[int, Tensor] | None, memory: float) -> int:
    """How many examples fit the memory: gradients of every output with respect to every layer's outputs, and those of weights that no
    rule knows."""
    size = example_count(x)
    other = 3 * found.classes * sum(params[name].numel() for name in found.generic)
    each = 4 * (found.taps * ((found.classes if top is None else top[0]) + 2) + other)  # one position at a time
    return size if found.alone else max(1, min(size, int(memory * GIGABYTE / 2 / max(1, each))))


def _some(x: Inputs, start: int, step: int) -> Any:
    """The inputs of some examples."""
    size = example_count(x)
    return tree.apply_leaves(lambda leaf: leaf[start : start + step] if leaf.shape[:1] == (size,) else leaf, x)


@torch.inference_mode(False)
def sweep(
    model: Model, x: Inputs, *, params: Params, buffers: Buffers, covariance: Covariance, factors: Sequence[float]
) -> Iterator[LatentMixture]:
    """The predictives at x under multiples of the prior's precision, one after the other.

    The network runs once, forwards and backwards. What it gives is kept in the basis in which every multiple of the prior is diagonal:
    another one costs one matrix product a layer.
    """
    x, params, buffers = _prepared(model, x, params, buffers)
    names = tuple(covariance.shapes)
    found = layout(model, params, x, buffers, names)
    if found.outputs > POSITIONS and not found.flat:
        raise ValueError("an example has so many outputs that they are predicted by draws, which cannot be swept over")
    run = Linearization(model, params, buffers, covariance, x, found, names)
    means, learned = run.f.unsqueeze(0), likelihood_params(params)
    if run.wide_root() is not None:
        for factor in factors:
            root = run.wide_root(factor)
            assert root is not None
            yield LatentMixture(model.likelihood, means, None, params=learned, root=root.unsqueeze(0))
    else:
        for cov in run.covariances(factors):
            yield LatentMixture(model.likelihood, means, cov.unsqueeze(0), params=learned)


def _prepared(model: Model, x: Inputs, params: Params, buffers: Buffers) -> tuple[Any, Params, Buffers]:
    """Inputs on the device; and all tensors fit for gradients, which those made in inference mode are not."""
    x = tree.move(tree.tensors(x, next(model.network.parameters()).dtype), model.device)
    x, params, buffers = (
        tree.apply_leaves(lambda leaf: leaf.clone() if leaf.is_inference() else leaf, value) for value in (x, params, buffers)
    )
    return x, params, buffers


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@torch.inference_mode(False)
def joint(model: Model, x: Inputs, *, params: Params, buffers: Buffers, covariance: Covariance) -> tuple[Tensor, Tensor]:
    """Mean [B, C] and covariance [B, C, B, C] of the linearized outputs of all inputs together."""
    x, params, buffers = _prepared(model, x, params, buffers)
    names = tuple(covariance.shapes)
    run = Linearization(model, params, buffers, covariance, x, layout(model, params, x, buffers, names), names)
    return run.f, run.joint()


@torch.inference_mode(False)
def functions(model: Model, x: Inputs, *, params: Params, buffers: Buffers, deltas: Params) -> Tensor:
    """f(x) + J(x) delta for every delta, [S, B, *D, C]: draws of the linearized function, joint over all inputs."""
    x, params, buffers = _prepared(model, x, params, buffers)
    live = {name: params[name].detach() for name in deltas}
    fixed = {name: leaf.detach() for name, leaf in params.items() if name not in live}
    buffers = {name: leaf.detach() for name, leaf in buffers.items()}

    def output(live: Params) -> Tensor:
        """The network's output, as a function of the weights that move."""
        with Unrolled():
            return model.call({**fixed, **live}, x, buffers)[0]

    def one(delta: Params) -> Tensor:
        """One linear function."""
        f, slope = along(output, live, {name: leaf.to(live[name].dtype) for name, leaf in delta.items()})
        return f + slope

    with torch.no_grad(), in_mode(model.network, False), sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own deprecated parts
        found = [one(tree.select(deltas, i)) for i in range(tree.count(deltas))]
    f = torch.stack(found)
    return f.float() if f.dtype.itemsize < 4 else f
