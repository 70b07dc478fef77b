"""Every structure against the dense matrix it stands for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from dubito.tensors import tree
from dubito.tensors.covariances import STRUCTURES, Blocks, Covariance, Dense, Diagonal, Indefinite, Kronecker, LowRank

DOUBLE = torch.float64
SHAPES = {"w": (3, 2, 2), "b": (3,)}
LIKE = {name: torch.empty(shape, device="meta") for name, shape in SHAPES.items()}
SIZE = 15


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE)


def positive(n: int, rank: int | None = None) -> Tensor:
    root = numbers(n, rank or n + 2)
    return root @ root.mT


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=DOUBLE)


ONE, APART = {"w": number(0.7), "b": number(0.7)}, {"w": number(0.7), "b": number(2.5)}
EACH = {"w": torch.rand(3, 2, 2, dtype=DOUBLE) + 0.5, "b": torch.rand(3, dtype=DOUBLE) + 0.5}


class Case:
    """A structure, and the curvature [P, P] that it was made of, noise by noise."""

    def __init__(self, covariance: Covariance, parts: Tensor, index: Tensor | None = None):
        self.covariance, self.parts = covariance, parts
        self.index = torch.arange(len(parts[0])) if index is None else index

    def precision(self, prior, scale: Tensor, temperature: float = 1.0) -> Tensor:
        """By definition, over the weights that move."""
        shift = torch.cat([prior[name].expand(shape).reshape(-1) for name, shape in self.covariance.shapes.items()])
        return (torch.tensordot(scale, self.parts, 1) + torch.diag(shift))[self.index][:, self.index] / temperature

    def dense(self, *args) -> Tensor:
        whole = torch.zeros(len(self.parts[0]), len(self.parts[0]), dtype=DOUBLE)
        whole[self.index.unsqueeze(1), self.index] = torch.linalg.inv(self.precision(*args))
        return whole


def case(kind: str, prior=ONE, scale: Tensor | None = None, temperature: float = 1.3) -> Case:
    scale = torch.tensor([0.6], dtype=DOUBLE) if scale is None else scale
    k = len(scale)
    if kind == "diagonal":
        curvature = {name: torch.rand(k, *shape, dtype=DOUBLE) for name, shape in SHAPES.items()}
        return Case(
            Diagonal(curvature, prior, scale, temperature),
            torch.stack([torch.diag(tree.flatten(tree.select(curvature, i))) for i in range(k)]),
        )
    if kind in ("dense", "subnetwork"):
        parts = torch.stack([positive(SIZE, 4) for _ in range(k)])
        index = torch.tensor([1, 4, 5, 13]) if kind == "subnetwork" else None
        stored = parts if index is None else parts[:, index][:, :, index]
        leaves = {name: list(shape) for name, shape in SHAPES.items()}
        return Case(Dense(leaves, stored, prior, scale, temperature, index), parts, index)
    if kind == "lowrank":
        rows = torch.linalg.qr(numbers(SIZE, 4))[0].mT
        values = torch.tensor([900.0, 5.0, 0.3, 0.0], dtype=DOUBLE)
        made = LowRank.precision(tree.unflatten(rows, LIKE), values, prior, scale=scale, temperature=temperature)
        return Case(made, (rows.mT * values @ rows).unsqueeze(0))
    if kind == "lowrank, remainder":
        rows, rest = torch.linalg.qr(numbers(SIZE, 4))[0].mT, torch.rand(SIZE, dtype=DOUBLE)
        values, left = torch.tensor([900.0, 5.0, 0.3, 0.0], dtype=DOUBLE), tree.unflatten(rest, LIKE)
        made = LowRank.precision(
            tree.unflatten(rows, LIKE), values, prior, scale=scale, temperature=temperature, remainder=left
        )  # fmt: skip
        return Case(made, (rows.mT * values @ rows + torch.diag(rest)).unsqueeze(0))
    if kind == "blocks":
        first, second = case("dense", prior, scale, temperature), case("kronecker, no bias", prior, scale, temperature)
        assert isinstance(first.covariance, Dense)
        assert isinstance(second.covariance, Kronecker)
        moved = replace(second.covariance, weight="v")
        both = Blocks((first.covariance, moved))
        return Case(both, torch.stack([torch.block_diag(a, b) for a, b in zip(first.parts, second.parts, strict=True)]))
    bias = None if kind == "kronecker, no bias" else "b"
    a, b = positive(4 + (bias is not None), 3), torch.stack([positive(3) for _ in range(k)])
    made = Kronecker.of("w", bias, [3, 2, 2], b, a, prior, scale=scale, count=10, temperature=temperature)
    order = torch.arange(3 * len(a)).reshape(3, -1)
    order = torch.cat([order[:, :4].flatten(), order[:, 4:].flatten()])
    parts = torch.stack([torch.kron(part, a)[order][:, order] for part in b])
    if kind == "ekfac":
        values = torch.rand(3, 5, dtype=DOUBLE)
        basis = torch.kron(made.left, made.inputs)[order]
        inverse = torch.linalg.inv(basis)  # of columns that are not orthogonal where the bias has a precision of its own
        parts = (inverse.mT * values.flatten() @ inverse).unsqueeze(0)
        if made.warp is not None:  # the values are squares of gradients times `inputs`: curvature in the coordinates warp * theta
            undone = torch.kron(torch.eye(3, dtype=DOUBLE), torch.diag(made.warp))[order][:, order]
            rotation = torch.kron(made.left, made.right)[order]
            parts = (undone @ (rotation * values.flatten() @ rotation.mT) @ undone).unsqueeze(0)
        made = replace(made, values=values * scale[0])
    return Case(made, parts)


TWO = torch.tensor([0.6, 2.0], dtype=DOUBLE)
CASES = {
    "diagonal": lambda: case("diagonal"),
    "diagonal, a precision each": lambda: case("diagonal", EACH),
    "diagonal, two noises": lambda: case("diagonal", APART, TWO),
    "dense": lambda: case("dense"),
    "dense, a precision each": lambda: case("dense", EACH),
    "dense, two noises": lambda: case("dense", APART, TWO),
    "subnetwork": lambda: case("subnetwork", EACH),
    "kronecker": lambda: case("kronecker"),
    "kronecker, no bias": lambda: case("kronecker, no bias"),
    "kronecker, bias apart": lambda: case("kronecker", APART),
    "kronecker, two noises": lambda: case("kronecker", ONE, TWO),
    "kronecker, two noises, bias apart": lambda: case("kronecker", APART, TWO),
    "ekfac": lambda: case("ekfac"),
    "ekfac, bias apart": lambda: case("ekfac", APART),
    "lowrank": lambda: case("lowrank"),
    "lowrank, a precision each": lambda: case("lowrank", EACH),
    "lowrank, remainder": lambda: case("lowrank, remainder"),
    "blocks": lambda: case("blocks", {**APART, "v": number(0.7)}),
}
every = pytest.mark.parametrize("name", CASES)


def prior_of(name: str):
    if "each" in name or name == "subnetwork":
        return EACH
    apart = "apart" in name or name in ("blocks", "diagonal, two noises", "dense, two noises")
    return {**APART, "v": number(0.7)} if apart else ONE


PRIORS = {name: prior_of(name) for name in CASES}


def scale_of(name: str) -> Tensor:
    return TWO if "two noises" in name else TWO[:1]


def rows_of(covariance: Covariance, v) -> Tensor:
    return tree.flatten({name: v[name] for name in covariance.shapes}, stacked=True)


def like(covariance: Covariance):
    return {name: torch.empty(shape, device="meta") for name, shape in covariance.shapes.items()}


@every
def test_against_the_dense_matrix(name):
    one = CASES[name]()
    cov = one.covariance
    precision = one.precision(PRIORS[name], scale_of(name), 1.3)
    exact = one.dense(PRIORS[name], scale_of(name), 1.3)
    torch.testing.assert_close(cov.dense(), exact)
    torch.testing.assert_close(cov.logdet(), -torch.linalg.slogdet(precision)[1])
    torch.testing.assert_close(tree.flatten({n: cov.variance()[n] for n in cov.shapes}), exact.diag())
    assert {n: leaf.shape for n, leaf in cov.variance().items()} == {n: torch.Size(s) for n, s in cov.shapes.items()}
    assert cov.size == len(exact)
    assert cov.moving == len(one.index)
    v = tree.unflatten(numbers(3, cov.size), like(cov))
    torch.testing.assert_close(rows_of(cov, cov.product(v)), rows_of(cov, v) @ exact)
    kept = torch.zeros(cov.size, dtype=DOUBLE).index_fill(0, one.index, 1.0)
    torch.testing.assert_close(rows_of(cov, cov.solve(cov.product(v))), rows_of(cov, v) * kept)
    torch.testing.assert_close(rows_of(cov, cov.product(cov.solve(v))), rows_of(cov, v) * kept)
    torch.testing.assert_close(rows_of(cov, cov.solve(v))[:, one.index], rows_of(cov, v)[:, one.index] @ precision)


@every
def test_draws_have_the_moments_of_the_covariance(name):
    cov = CASES[name]().covariance
    n = 40_000
    rows = rows_of(cov, cov.sample(n, torch.Generator().manual_seed(0)))
    exact = cov.dense()
    deviation = exact.diag().clamp_min(1e-12).sqrt()
    assert (rows.mean(0).abs() <= 5 * deviation / n**0.5 + 1e-12).all()
    error = (torch.cov(rows.mT) - exact) / deviation / deviation.unsqueeze(1)
    assert error.abs().max() < 6 / n**0.5 * 2**0.5


@every
def test_draws_follow_the_generator(name):
    cov = CASES[name]().covariance
    first, again, other = (rows_of(cov, cov.sample(2, torch.Generator().manual_seed(s))) for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])


@every
def test_another_prior_noise_and_temperature(name):
    one = CASES[name]()
    cov, old = one.covariance, PRIORS[name]
    same_ratio = {n: 3 * leaf for n, leaf in old.items()}
    scale = scale_of(name) * torch.linspace(0.5, 2.0, len(scale_of(name)))
    cases = [(old, scale_of(name), 1.3), (same_ratio, scale, 0.4)]
    if "ekfac" not in name:
        cases += [({n: number(1.1) for n in old}, scale, 1.0), ({**APART, "v": number(0.2)}, scale, 1.0)]
    for prior, s, temperature in cases:
        found = cov.with_prior(prior, s, temperature)
        torch.testing.assert_close(found.dense(), one.dense(prior, s, temperature))
        exact = torch.linalg.slogdet(one.precision(prior, s))[1]
        if "remainder" in name:  # a bound from above
            assert float(cov.log_precision(prior, s)) >= float(exact)
            torch.testing.assert_close(found.log_precision(prior, s), cov.log_precision(prior, s))
        elif ("kronecker" not in name and "ekfac" not in name) or all(leaf.ndim == 0 for leaf in prior.values()):
            torch.testing.assert_close(cov.log_precision(prior, s), exact)
            torch.testing.assert_close(found.log_precision(prior, s), exact)
        back = found.with_prior(old, scale_of(name), 1.3)
        torch.testing.assert_close(back.dense(), cov.dense(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(cov.with_temperature(2.6).dense(), 2 * cov.dense())
    torch.testing.assert_close(cov.with_temperature(1.0).with_temperature(1.3).dense(), cov.dense())
    assert type(cov.with_prior(old)) is type(cov)
    torch.testing.assert_close(cov.with_prior(old).dense(), cov.dense())


@every
def test_gradients_of_the_log_determinant(name):
    """In the logarithms of the precisions and the noise, against finite differences."""
    one = CASES[name]()
    names, k = list(one.covariance.shapes), len(scale_of(name))
    shared = "ekfac" in name  # whose weight and bias have one precision, or keep their ratio
    if name == "ekfac, bias apart":
        return

    def value(logs: Tensor, log_scale: Tensor) -> Tensor:
        values = logs.exp().unbind()
        prior = {n: values[0 if shared else i] for i, n in enumerate(names)}
        return one.covariance.log_precision(prior, log_scale.exp())

    start = torch.linspace(-0.5, 0.8, len(names), dtype=DOUBLE).requires_grad_()
    noise = torch.linspace(-0.2, 0.4, k, dtype=DOUBLE).requires_grad_()
    assert torch.autograd.gradcheck(value, (start, noise), atol=1e-6)
    alone = torch.tensor(0.3, dtype=DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda log: one.covariance.log_precision(dict.fromkeys(names, log.exp()), noise.detach().exp()), alone
    )


PAIRS = {"diagonal": APART, "dense": EACH, "subnetwork": EACH, "lowrank": EACH, "lowrank, remainder": EACH}


@pytest.mark.parametrize("kind", PAIRS)
def test_curvatures_add_up(kind):
    prior = PAIRS[kind]
    early, late = case(kind, prior, TWO[:1], 1.0), case(kind, ONE, TWO[1:], 1.0)
    both = late.covariance.plus(early.covariance)
    parts = torch.cat([late.parts, early.parts])
    exact = Case(both, parts, early.index).dense(prior, TWO.flip(0))
    torch.testing.assert_close(both.dense(), exact, rtol=1e-6, atol=1e-9)
    third = case(kind, ONE, TWO[:1], 1.0)
    more = third.covariance.plus(both)
    exact = Case(more, torch.cat([third.parts, parts]), early.index).dense(prior, torch.tensor([0.6, 2.0, 0.6], dtype=DOUBLE))
    torch.testing.assert_close(more.dense(), exact, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("prior", [ONE, APART])
def test_kronecker_factors_are_those_of_both_data(prior):
    """A is a mean over the data and B a sum: exact where A is the same, or B in proportion to the number of data."""
    one = torch.ones(1, dtype=DOUBLE)
    b, first, second = positive(3), positive(5), positive(5)
    early = Kronecker.of("w", "b", [3, 2, 2], 10 * b.unsqueeze(0), first, prior, scale=2 * one, count=10)
    late = Kronecker.of("w", "b", [3, 2, 2], 30 * b.unsqueeze(0), second, ONE, scale=2 * one, count=30)
    whole = Kronecker.of(
        "w", "b", [3, 2, 2], 40 * b.unsqueeze(0), (10 * first + 30 * second) / 40, prior, scale=2 * one, count=40
    )
    torch.testing.assert_close(late.plus(early).dense(), whole.dense())
    assert late.plus(early).count == 40


def test_what_cannot_be_added_is_told():
    kinds = ("diagonal", "dense", "kronecker", "lowrank")
    for a in kinds:
        for b in kinds:
            if a != b:
                with pytest.raises(
                    ValueError, match=f"curvature of a .* covariance cannot be added to a {type(case(a).covariance).__name__}"
                ):
                    case(a).covariance.plus(case(b).covariance)
    with pytest.raises(ValueError, match="eigenvalue-corrected"):
        case("kronecker").covariance.plus(case("ekfac").covariance)
    with pytest.raises(ValueError, match="another structure"):
        case("blocks", {**ONE, "v": number(1.0)}).covariance.plus(case("dense").covariance)
    with pytest.raises(ValueError, match="cannot be added"):
        case("subnetwork").covariance.plus(case("dense").covariance)


# --- low rank --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 5, 40])
def test_a_diagonal_and_columns(rank):
    diagonal, columns = (
        {n: torch.rand(s, dtype=DOUBLE) for n, s in SHAPES.items()},
        {n: numbers(rank, *s) for n, s in SHAPES.items()},
    )
    cov = LowRank.of(diagonal, columns)
    rows = tree.flatten(columns, stacked=True)
    exact = torch.diag(tree.flatten(diagonal)) + rows.mT @ rows
    torch.testing.assert_close(cov.dense(), exact)
    torch.testing.assert_close(cov.logdet(), torch.linalg.slogdet(exact)[1])
    v = tree.unflatten(numbers(2, SIZE), LIKE)
    torch.testing.assert_close(rows_of(cov, cov.solve(v)), rows_of(cov, v) @ torch.linalg.inv(exact))
    for call in (lambda: cov.with_prior(ONE), lambda: cov.log_precision(ONE, TWO[:1]), lambda: cov.plus(cov)):
        with pytest.raises(ValueError, match="not made from a curvature and a prior|cannot be added"):
            call()


def test_columns_that_repeat_and_weights_that_never_moved():
    column = torch.tensor([[0.0, 1.0, -2.0, 0.5]], dtype=DOUBLE)
    diagonal = torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=DOUBLE)
    cov = LowRank.of({"w": diagonal}, {"w": torch.cat([column, column, 0 * column])})
    torch.testing.assert_close(cov.dense(), torch.diag(diagonal) + 2 * column.mT @ column, rtol=1e-6, atol=1e-9)
    assert torch.isfinite(rows_of(cov, cov.sample(4))).all()


def test_a_curvature_far_above_the_prior_is_not_lost():
    rows = torch.linalg.qr(numbers(6, 2))[0].mT
    values = torch.tensor([1e12, 1e9], dtype=DOUBLE)
    cov = LowRank.precision({"w": rows}, values, {"w": number(1e-6)}, scale=torch.ones(1, dtype=DOUBLE))
    torch.testing.assert_close(cov.logdet(), -(values.log().sum() + 4 * number(1e-6).log()))
    again = cov.with_prior({"w": number(1.0)})
    torch.testing.assert_close(again.logdet(), -(values + 1).log().sum(), rtol=1e-9, atol=0)


def test_rounding_makes_no_variance_negative():
    """In single precision a well-known direction has a variance below the rounding error of the prior's."""
    eye = torch.eye(8)[:6] @ torch.linalg.qr(torch.randn(8, 8))[0]
    cov = LowRank.precision({"w": eye}, torch.full((6,), 1e9), {"w": torch.tensor(1.0)}, scale=torch.ones(1))
    assert (cov.variance()["w"] > 0).all()
    full = LowRank.precision(
        {"w": torch.linalg.qr(torch.randn(8, 8))[0]}, torch.full((8,), 1e9), {"w": torch.tensor(1.0)}, scale=torch.ones(1)
    )
    assert (full.variance()["w"] > 0).all()
    assert (full.variance()["w"] < 1e-6).all()


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_an_indefinite_precision_is_told_with_its_spectrum():
    matrix = torch.diag(torch.tensor([-3.0, -0.7, 4.0], dtype=DOUBLE)).unsqueeze(0)
    cov = Dense({"w": [3]}, matrix, {"w": number(0.5)}, torch.ones(1, dtype=DOUBLE))
    message = (
        r"2 of its 3 eigenvalues are not positive, the smallest is -2.5 and the largest 4.5.*curvature='ggn'.*damping.*clip=True"
    )
    for call in (cov.logdet, cov.variance, lambda: cov.sample(1)):
        with pytest.raises(Indefinite, match=message):
            call()
    diagonal = Diagonal({"w": matrix.diagonal(dim1=1, dim2=2)}, {"w": number(0.5)}, torch.ones(1, dtype=DOUBLE))
    with pytest.raises(Indefinite, match="2 of its 3 eigenvalues are not positive"):
        diagonal.logdet()
    damped = Dense({"w": [3]}, matrix, {"w": number(3.5)}, torch.ones(1, dtype=DOUBLE))
    torch.testing.assert_close(damped.logdet(), -torch.tensor([0.5, 2.8, 7.5], dtype=DOUBLE).log().sum())


def test_a_flat_prior_on_a_singular_curvature_is_indefinite_too():
    a = torch.diag(torch.tensor([1.0, 0.0], dtype=DOUBLE))
    cov = Kronecker.of(
        "w", None, [2, 2], torch.eye(2, dtype=DOUBLE).unsqueeze(0), a, {"w": number(0.0)}, scale=torch.ones(1).double()
    )
    with pytest.raises(Indefinite, match="2 of its 4 eigenvalues"):
        cov.logdet()


def test_a_precision_of_each_weight_is_refused_by_kronecker_blocks():
    cov = case("kronecker").covariance
    for call in (lambda: cov.with_prior(EACH), lambda: cov.log_precision(EACH, TWO[:1]), lambda: case("kronecker", EACH)):
        with pytest.raises(ValueError, match="one prior precision for a layer's weight and one for its bias"):
            call()
    constant = {"w": torch.full((3, 2, 2), 0.7, dtype=DOUBLE), "b": torch.full((3,), 0.7, dtype=DOUBLE)}
    assert case("kronecker", constant).covariance.delta == 0.7


def test_corrected_eigenvalues_refuse_a_prior_that_would_turn_their_basis():
    same, apart = case("ekfac").covariance, case("ekfac", APART).covariance
    for call in (
        lambda: same.with_prior(APART),
        lambda: same.log_precision(APART, TWO[:1]),
        lambda: apart.with_prior(ONE),
        lambda: apart.log_precision(ONE, TWO[:1]),
    ):
        with pytest.raises(ValueError, match="keeps its eigenbasis.*w and b.*corrected=True"):
            call()


def test_structures_by_name():
    assert [STRUCTURES[n] for n in ("diagonal", "kronecker", "lowrank", "dense", "blocks")] == [
        Diagonal,
        Kronecker,
        LowRank,
        Dense,
        Blocks,
    ]
    cov = Diagonal.of({"w": torch.tensor([4.0, 1.0])})
    assert cov.logdet() == pytest.approx(torch.tensor(4.0).log().item())


@pytest.mark.parametrize("name", ["diagonal", "dense", "kronecker", "ekfac", "lowrank"])
def test_single_precision_is_kept(name):
    cov = case(name).covariance
    import dataclasses

    def cast(value):
        if isinstance(value, dict):
            return {n: cast(leaf) for n, leaf in value.items()}
        return value.float() if isinstance(value, Tensor) else value

    single = type(cov)(**{f.name: cast(getattr(cov, f.name)) for f in dataclasses.fields(cov)})
    assert all(leaf.dtype == torch.float32 for leaf in single.sample(2).values())
    assert all(leaf.dtype == torch.float32 for leaf in single.variance().values())
    assert single.logdet().dtype == DOUBLE
    torch.testing.assert_close(single.dense().double(), cov.dense(), rtol=1e-3, atol=1e-5)


def test_draws_are_multivariate_normal():
    """Beyond the moments: the log density of draws has the right mean and variance."""
    cov = case("kronecker", APART).covariance
    draws = rows_of(cov, cov.sample(20_000, torch.Generator().manual_seed(0)))
    scores = MultivariateNormal(torch.zeros(SIZE, dtype=DOUBLE), cov.dense()).log_prob(draws)
    expected = -0.5 * (SIZE * (1 + torch.log(torch.tensor(2 * torch.pi))) + cov.logdet())
    assert scores.mean().item() == pytest.approx(expected.item(), abs=0.1)
    assert scores.var().item() == pytest.approx(SIZE / 2, rel=0.05)
