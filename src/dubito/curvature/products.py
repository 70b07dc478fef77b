r"""Curvature times vectors, without the curvature: for low-rank structures, conjugate gradients and spectra.

:math:`G v = \sum_n J_n^T \Lambda_n J_n v` takes one forward-mode and one reverse-mode pass a batch; :math:`H v` two reverse ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor
from torch.func import vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

from dubito.curvature.cotangents import observed
from dubito.curvature.generic import Unrolled, along
from dubito.model import Model
from dubito.model.likelihoods import likelihood_params
from dubito.network.examples import Batch
from dubito.network.weights import in_mode
from dubito.tensors import tree
from dubito.tensors.tree import Buffers, Params

Product = Callable[[Params], Params]


def batch_product(
    model: Model, params: Params, batch: Batch, buffers: Buffers, v: Params, kind: Literal["ggn", "hessian"] = "ggn"
) -> Params:
    """The curvature of one batch (a sum over its examples) times v, leaves stacked [k, *shape]."""
    x, y = model.split(batch)
    live = {name: params[name].detach() for name in v}
    fixed = {name: leaf.detach() for name, leaf in params.items() if name not in live}
    buffers = {name: leaf.detach() for name, leaf in buffers.items()}
    learned = likelihood_params({**fixed, **live})

    def output(live: Params) -> Tensor:
        """The network's output, as a function of the weights."""
        with Unrolled():
            return model.call({**fixed, **live}, x, buffers)[0]

    def ggn(delta: Params) -> Params:
        """The GGN times a vector."""
        f, slope = along(output, live, delta)
        fisher = model.likelihood.fisher(f.detach(), learned)
        seen = observed(model, model.likelihood.target(y, f), f)
        slope = slope if seen is None else slope * seen
        weighted = (fisher @ slope.unsqueeze(-1)).squeeze(-1)
        return back(weighted if seen is None else weighted * seen)[0]

    def hessian(delta: Params) -> Params:
        """The Hessian of the negative log likelihood times a vector."""
        points = {name: leaf.clone().requires_grad_() for name, leaf in live.items()}
        with torch.enable_grad():
            loss = -model.score(output(points), y, {**fixed, **points}).sum()
            slopes = torch.autograd.grad(
                loss, list(points.values()), create_graph=True, allow_unused=True, materialize_grads=True
            )
            inner = sum((s * delta[name]).sum() for name, s in zip(points, slopes, strict=True))
            assert isinstance(inner, Tensor)
            if not inner.requires_grad:
                return {name: torch.zeros_like(leaf) for name, leaf in live.items()}
            found = torch.autograd.grad(inner, list(points.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(points, found, strict=True))

    with in_mode(model.network, False), sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own deprecated parts
        if kind == "hessian":
            return tree.stack([hessian(tree.select(v, i)) for i in range(tree.count(v))])
        back = vjp(output, live)[1]
        with torch.no_grad():
            return tree.stack([ggn(tree.select(v, i)) for i in range(tree.count(v))])


def product(
    model: Model,
    params: Params,
    data: Iterable[Batch],
    buffers: Buffers,
    *,
    kind: Literal["ggn", "hessian"] = "ggn",
    damping: float = 0.0,
) -> Product:
    """v -> (curvature over all data + damping I) v, for leaves stacked [k, *shape]; `data` is gone through for every product."""

    def times(v: Params) -> Params:
        """The matrix times stacked vectors."""
        total = {name: damping * leaf for name, leaf in v.items()}
        for batch in data:
            for name, leaf in batch_product(model, params, batch, buffers, v, kind).items():
                total[name] = total[name] + leaf
        return total

    return times


def conjugate_gradients(times: Product, b: Params, *, steps: int = 100, tolerance: float = 1e-6) -> Params:
    """The solution of A x = b for a positive definite A given by its products; leaves [*shape].

    >>> A = torch.tensor([[2.0, 0.5], [0.5, 1.0]])
    >>> x = conjugate_gradients(lambda v: {"w": v["w"] @ A}, {"w": torch.tensor([1.0, 0.0])})
    >>> torch.allclose(A @ x["w"], torch.tensor([1.0, 0.0]), atol=1e-5)
    True
    """
    x = {name: torch.zeros_like(leaf) for name, leaf in b.items()}
    r, p = dict(b), dict(b)
    size = start = _dot(r, r)
    for _ in range(steps):
        if float(size) <= tolerance**2 * float(start) or float(size) == 0:
            break
        q = tree.select(times({name: leaf.unsqueeze(0) for name, leaf in p.items()}), 0)
        curvature = _dot(p, q)
        if float(curvature) <= 0:
            raise ValueError(
                f"a direction has curvature {float(curvature):.3g}: the matrix is not positive definite; add damping, or use the GGN"
            )
        step = size / curvature
        x = {name: leaf + step.to(leaf) * p[name] for name, leaf in x.items()}
        r = {name: leaf - step.to(leaf) * q[name] for name, leaf in r.items()}
        size, before = _dot(r, r), size
        p = {name: leaf + (size / before).to(leaf) * p[name] for name, leaf in r.items()}
    return x


def _dot(a: Params, b: Params) -> Tensor:
    return torch.stack([(a[name] * b[name]).double().sum() for name in a]).sum()
