"""Products with the curvature, and what is made of products, against the matrix itself."""

from __future__ import annotations

import pytest
import torch

from curvature.networks import DOUBLE, NETWORKS, build, ggn, hessian, numbers, output, part, size, targets
from curvature.test_statistics import LIKELIHOODS, halves
from dubito import Categorical, Gaussian, HeteroscedasticGaussian, Model
from dubito.curvature.products import batch_product, conjugate_gradients, product
from dubito.tensors import tree

pytestmark = pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel lengths")  # torch, of its own accord


def weights(params):
    return {name: leaf for name, leaf in params.items() if ":" not in name}


def as_matrix(times, like) -> torch.Tensor:
    eye = torch.eye(tree.size(like), dtype=DOUBLE)
    found = times(tree.unflatten(eye, like))
    return tree.flatten({name: found[name] for name in like}, stacked=True)


@pytest.mark.parametrize("name", [n for n in NETWORKS if n != "embedding bag"])  # which torch differentiates only once
def test_products_of_every_network(name):
    net, x = build(name)
    model = Model(net, Gaussian(scale=0.6))
    params = model.parameters()
    y = targets(model, params, x) + 0.3
    v = {n: torch.randn(2, *leaf.shape, dtype=DOUBLE) for n, leaf in params.items()}
    rows = tree.flatten(v, stacked=True)
    for kind, reference in (("ggn", ggn), ("hessian", hessian)):
        if kind == "hessian" and tree.size(params) > 90:
            continue
        matrix = reference(model, params, x, y)
        found = product(model, params, halves(x, y), model.buffers(), kind=kind, damping=0.1)(v)
        torch.testing.assert_close(tree.flatten(found, stacked=True), rows @ matrix + 0.1 * rows, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_products_of_every_likelihood(name):
    likelihood, learned = LIKELIHOODS[name]
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 4)).double()
    model, x = Model(net, likelihood), numbers(6, 3)
    params = {**model.parameters(), **learned}
    y = targets(model, params, x)
    like = weights(params)
    for kind, matrix in (("ggn", ggn(model, params, x, y)), ("hessian", hessian(model, params, x, y))):
        found = as_matrix(lambda v, kind=kind: batch_product(model, params, (x, y), {}, v, kind), like)
        torch.testing.assert_close(found, matrix, rtol=1e-7, atol=1e-7)


def test_labels_that_are_missing_have_no_curvature():
    net, x = build("sequences")
    model = Model(net, Categorical(ignore_index=9))
    params = model.parameters()
    y = targets(model, params, x)
    y[0, 1] = y[2] = 9
    found = as_matrix(lambda v: batch_product(model, params, (x, y), {}, v), params)
    torch.testing.assert_close(found, ggn(model, params, x, y), rtol=1e-7, atol=1e-7)


def system(kind: str = "ggn", damping: float = 0.3):
    net, x = build("perceptron")
    model = Model(net, Categorical())
    params = model.parameters()
    y = targets(model, params, x)
    matrix = (ggn if kind == "ggn" else hessian)(model, params, x, y) + damping * torch.eye(tree.size(params), dtype=DOUBLE)
    return product(model, params, halves(x, y), {}, kind=kind, damping=damping), params, matrix


def test_conjugate_gradients_against_a_solver():
    times, params, matrix = system()
    b = {name: torch.randn_like(leaf) for name, leaf in params.items()}
    found = conjugate_gradients(times, b, tolerance=1e-10)
    torch.testing.assert_close(tree.flatten(found), torch.linalg.solve(matrix, tree.flatten(b)), rtol=1e-6, atol=1e-8)
    rough = conjugate_gradients(times, b, steps=2)
    assert not torch.allclose(tree.flatten(rough), tree.flatten(found), rtol=1e-3)
    zero = conjugate_gradients(times, {name: torch.zeros_like(leaf) for name, leaf in params.items()})
    assert all((leaf == 0).all() for leaf in zero.values())


def test_conjugate_gradients_tell_of_negative_curvature():
    times, params, matrix = system("hessian", damping=-0.5)
    assert torch.linalg.eigvalsh(matrix)[0] < 0
    with pytest.raises(ValueError, match="a direction has curvature -.*add damping"):
        conjugate_gradients(times, {name: torch.randn_like(leaf) for name, leaf in params.items()})


def test_a_heteroscedastic_hessian_is_indefinite_and_its_ggn_is_not():
    net, x = build("perceptron")
    net[2] = torch.nn.Linear(4, 2).double()
    model = Model(net, HeteroscedasticGaussian())
    params = model.parameters()
    y = output(model, params, x)[:, :1] + 3
    for kind, negative in (("ggn", False), ("hessian", True)):
        matrix = as_matrix(lambda v, kind=kind: batch_product(model, params, (x, y), {}, v, kind), params)
        assert (torch.linalg.eigvalsh(matrix)[0] < -1e-6) == negative


def test_batches_add_up():
    net, x = build("conv2d")
    model = Model(net, Categorical())
    params = model.parameters()
    y = targets(model, params, x)
    v = {n: torch.randn(1, *leaf.shape, dtype=DOUBLE) for n, leaf in params.items()}
    whole = product(model, params, [(x, y)], {})(v)
    single = product(model, params, [(part(x, slice(i, i + 1)), y[i : i + 1]) for i in range(size(x))], {})(v)
    for name in params:
        torch.testing.assert_close(single[name], whole[name])
