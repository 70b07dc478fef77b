"""Curvature against its definition, written out with Jacobians: every layer type, structure, kind and likelihood."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import unfold

import dubito
from curvature.networks import (
    DOUBLE,
    NETWORKS,
    Net,
    build,
    ggn,
    gradients,
    moved,
    numbers,
    output,
    part,
    size,
    targets,
    tokens,
)
from dubito import Bernoulli, Categorical, Gaussian, HeteroscedasticCategorical, HeteroscedasticGaussian, Model, MultiTask
from dubito.curvature import Setup, Spec, curvature
from dubito.curvature.statistics import STATISTICS
from dubito.tensors.covariances import Blocks, Dense, Diagonal, Kronecker

pytestmark = pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel lengths")  # torch, of its own accord

LEARNED = {"likelihood:log_scale": torch.tensor([-0.4], dtype=DOUBLE)}
LIKELIHOODS = {
    "gaussian": (Gaussian(scale=0.7), {}),
    "gaussian, a scale each": (Gaussian(scale=(0.5, 1.0, 2.0, 0.7)), {}),
    "gaussian, learned": (Gaussian(), LEARNED),
    "gaussian, learned each": (
        Gaussian(outputs=4),
        {"likelihood:log_scale": torch.tensor([-0.4, 0.3, 0.1, -0.2], dtype=DOUBLE)},
    ),
    "heteroscedastic gaussian": (HeteroscedasticGaussian(), {}),
    "categorical": (Categorical(), {}),
    "categorical, scaled": (Categorical(scale=1.5), {}),
    "categorical, learned": (Categorical(scale=None), LEARNED),
    "heteroscedastic categorical": (HeteroscedasticCategorical(), {}),
    "bernoulli": (Bernoulli(), {}),
    "bernoulli, learned": (Bernoulli(scale=None), LEARNED),
    "tasks": (
        MultiTask({"depth": (Gaussian(), 1), "label": (Categorical(scale=None), 2), "tags": (Bernoulli(), 1)}),
        {"likelihood:depth.log_scale": LEARNED["likelihood:log_scale"], "likelihood:label.log_scale": torch.tensor([0.2])},
    ),
}


def precision(found: Blocks, names: list[str]) -> torch.Tensor:
    """The curvature again [P, P], weights in the order of `names`; it was asked for with a prior precision of 1."""
    matrix = torch.linalg.inv(found.dense()) - torch.eye(found.size, dtype=DOUBLE)
    starts, order = {}, list(found.shapes)
    for name in order:
        starts[name] = sum(torch.Size(found.shapes[n]).numel() for n in order[: order.index(name)])
    index = torch.cat([starts[n] + torch.arange(torch.Size(found.shapes[n]).numel()) for n in names])
    return matrix[index][:, index]


def collected(model: Model, params, batches, structure: str, **options) -> torch.Tensor:
    names = [name for name in params if ":" not in name]
    generator = options.pop("generator", None)
    found = curvature(model, params, batches, model.buffers(), spec=Spec(structure, **options), prior=1.0, generator=generator)
    return precision(found, names)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-8) -> None:
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * (1 + expected.abs().max().item()))


def halves(x, y) -> list:
    n = size(x)
    return [(part(x, slice(0, n // 2)), y[: n // 2]), (part(x, slice(n // 2, n)), y[n // 2 :])] if n > 1 else [(x, y)]


# --- every layer type ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_dense_and_diagonal_curvature_of_every_layer_type(name):
    net, x = build(name)
    for likelihood in (Categorical(), Gaussian()):
        model = Model(net, likelihood)
        params = model.parameters()
        if not likelihood.discrete:
            params |= LEARNED
        elif output(model, params, x).shape[-1] == 1:
            continue
        y = targets(model, params, x)
        exact = ggn(model, params, x, y)
        assert exact.abs().max() > 1e-6
        close(collected(model, params, [(x, y)], "dense"), exact)
        close(collected(model, params, [(x, y)], "diagonal"), torch.diag(exact.diag()))


@pytest.mark.parametrize("name", [n for n, (_, x) in NETWORKS.items() if size(x()) > 1])
def test_any_split_of_the_data_gives_the_same_curvature(name):
    """Also one that changes what the shapes look like, such as to batches of as many examples as positions."""
    net, x = build(name)
    model = Model(net, Gaussian(scale=0.5))
    params = model.parameters()
    y = targets(model, params, x)
    n = size(x)
    single = [(part(x, slice(i, i + 1)), y[i : i + 1]) for i in range(n)]
    # where it is unclear what belongs to whom, a layer gets a diagonal, and of one example it is always clear
    for structure in ("dense", *(["kronecker"] if "alike" not in name else [])):
        whole = collected(model, params, [(x, y)], structure)
        close(collected(model, params, halves(x, y), structure), whole)
        close(collected(model, params, single, structure), whole)


@pytest.mark.parametrize("only", ["bias", "weight$", "^0", "^2", "^0.bias", "^1.weight", "^1"])
@pytest.mark.parametrize("structure", ["dense", "diagonal"])
def test_some_of_the_weights(only, structure):
    net = nn.Sequential(nn.Conv1d(2, 3, 2, padding=1), moved(nn.GroupNorm(1, 3)), nn.Conv1d(3, 2, 2), nn.Tanh(), nn.Flatten())
    net = nn.Sequential(*net, nn.Linear(6, 3)).double()
    model, x = Model(net, Categorical(), only=only), numbers(4, 2, 3)
    params = model.parameters()
    y = targets(model, params, x)
    exact = ggn(model, params, x, y)
    close(collected(model, params, halves(x, y), structure), exact if structure == "dense" else torch.diag(exact.diag()))


@pytest.mark.parametrize("name", ["conv of one pixel", "embedding", "layer norm", "attention", "lstm"])
def test_biases_alone(name):
    net, x = build(name)
    model = Model(net, Categorical(), only="bias")
    params = model.parameters()
    y = targets(model, params, x)
    exact = ggn(model, params, x, y)
    close(collected(model, params, [(x, y)], "dense"), exact)
    close(collected(model, params, [(x, y)], "diagonal"), torch.diag(exact.diag()))
    collected(model, params, [(x, y)], "kronecker")


def test_frozen_layers_are_left_out():
    net, x = build("perceptron")
    net[0].requires_grad_(False)
    model = Model(net, Categorical())
    params = model.parameters()
    assert list(params) == ["2.weight", "2.bias"]
    y = targets(model, params, x)
    close(collected(model, params, [(x, y)], "dense"), ggn(model, params, x, y))


def test_images_with_pixels_that_are_not_labelled():
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Conv2d(2, 3, 2, padding=1)).double()
    model, x = Model(net, Categorical(dim=1, ignore_index=255)), numbers(4, 1, 3, 2)
    params = model.parameters()
    y = targets(model, params, x)
    y[0, 0, 1] = y[2] = 255
    exact = ggn(model, params, x, y)
    assert not torch.allclose(exact, ggn(model, params, x, torch.zeros_like(y)))
    close(collected(model, params, halves(x, y), "dense"), exact)
    close(collected(model, params, halves(x, y), "diagonal"), torch.diag(exact.diag()))
    many = [(x.repeat(500, 1, 1, 1), y.repeat(500, 1, 1))]
    draws = collected(model, params, many, "dense", kind="fisher", generator=torch.Generator().manual_seed(0)) / 500
    assert (draws - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("only", ["", "^2"])
def test_examples_without_a_label(only):
    net, x = build("perceptron")
    model, y = Model(net, Categorical(), only=only), torch.tensor([0, -100, 2, -100, 1])
    params = model.parameters()
    kept = [0, 2, 4]
    for structure in ("dense", "diagonal"):
        expected = collected(model, params, [(x[kept], y[kept])], structure)
        close(collected(model, params, [(x, y)], structure), expected)


@pytest.mark.parametrize("only", ["", "^2"])
def test_tasks_of_which_some_have_no_label(only):
    tasks = MultiTask({"depth": (Gaussian(scale=0.5), 1), "label": (Categorical(), 3)})
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    model, x = Model(net, tasks, only=only), numbers(4, 3)
    y = torch.tensor([[0.1, 0], [0.2, -100], [0.3, 2], [0.4, -100]], dtype=DOUBLE)
    params = model.parameters()
    depth, label = (Model(Net(lambda s, x, p=p: s.net(x)[:, p], net=net), part, only=only and "^net.2") for p, part in (
        (slice(0, 1), Gaussian(scale=0.5)), (slice(1, 4), Categorical())))  # fmt: skip
    inner = {f"net.{name}": leaf for name, leaf in params.items()}
    exact = ggn(depth, inner, x, y[:, :1]) + ggn(label, inner, x[[0, 2]], y[[0, 2], 1].long())
    close(collected(model, params, [(x, y)], "dense"), exact)
    close(collected(model, params, [(x, y)], "diagonal"), torch.diag(exact.diag()))


# --- every likelihood and kind ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("only", ["", "^2"], ids=["all", "last layer"])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_every_likelihood(name, only):
    likelihood, learned = LIKELIHOODS[name]
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 4)).double()
    model, x = Model(net, likelihood, only=only), numbers(6, 3)
    params = {**model.parameters(), **learned}
    y = targets(model, params, x)
    exact = ggn(model, params, x, y)
    close(collected(model, params, halves(x, y), "dense"), exact)
    close(collected(model, params, halves(x, y), "diagonal"), torch.diag(exact.diag()))
    slopes = gradients(model, params, x, y)
    close(collected(model, params, halves(x, y), "dense", kind="empirical"), slopes.mT @ slopes)
    close(collected(model, params, halves(x, y), "diagonal", kind="empirical"), torch.diag(slopes.square().sum(0)))


@pytest.mark.parametrize("kind", ["ggn", "fisher"])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_draws_of_cotangents_average_to_the_exact_curvature(name, kind):
    likelihood, learned = LIKELIHOODS[name]
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 4)).double()
    model, x = Model(net, likelihood), numbers(8, 2)
    params = {**model.parameters(), **learned}
    exact = ggn(model, params, x, targets(model, params, x))
    errors = []
    for copies, draws in ((10, 2), (640, 2), (320, 4)):  # many copies of the data are many draws
        many = x.repeat(copies, 1)
        data = [(many, targets(model, params, many))]
        found = (
            collected(model, params, data, "dense", kind=kind, draws=draws, generator=torch.Generator().manual_seed(1)) / copies
        )
        errors.append(((found - exact).norm() / exact.norm()).item())
    assert max(errors[1:]) < 0.06
    assert max(errors[1:]) < 0.5 * errors[0], "an error that does not shrink is a bias"


def test_draws_follow_the_generator():
    net, x = build("perceptron")
    model = Model(net, Categorical())
    params = model.parameters()
    y = targets(model, params, x)
    state = torch.get_rng_state()
    first, again, other = (
        collected(model, params, [(x, y)], "dense", kind="fisher", generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1)
    )
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_one_draw_of_the_labels_is_the_empirical_fisher_of_these_labels():
    """Which is what tells it from a Fisher with the signs or the squares wrong."""
    net, x = build("sequences")
    model = Model(net, Bernoulli())
    params = model.parameters()
    y = targets(model, params, x)
    slopes = gradients(model, params, x, y)
    close(collected(model, params, halves(x, y), "dense", kind="empirical"), slopes.mT @ slopes)


def test_many_classes_take_a_draw_unless_the_output_layer_is_asked_alone():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 300, bias=False)).double()
    x = numbers(3, 2)
    y = torch.randint(300, (3,))
    head, whole = Model(net, Categorical(), only="^1"), Model(net, Categorical(), only="^0")
    exact = ggn(head, head.parameters(), x, y)
    close(collected(head, head.parameters(), [(x, y)], "diagonal"), torch.diag(exact.diag()))
    exact = ggn(whole, whole.parameters(), x, y)
    many = [(x.repeat(1000, 1), y.repeat(1000))]
    drawn = collected(whole, whole.parameters(), many, "dense", generator=torch.Generator().manual_seed(0)) / 1000
    assert not torch.allclose(drawn, exact, rtol=1e-6)
    assert (drawn - exact).norm() < 0.1 * exact.norm()


# --- Kronecker -------------------------------------------------------------------------------------------------------


def factors(block: Kronecker) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B from their eigenvalues and eigenvectors."""
    return (block.right * block.right_values) @ block.right.mT, (block.left * block.left_values) @ block.left.mT


def cotangents_of(likelihood: Categorical, f: torch.Tensor) -> torch.Tensor:
    """Roots of the Fisher by Cholesky-free means, [C, B, C]."""
    values, vectors = torch.linalg.eigh(likelihood.fisher(f, {}))
    return (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)).movedim(-1, 0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("likelihood", [Gaussian(scale=0.3), Gaussian(), Gaussian(outputs=2)])
def test_kronecker_is_exact_for_linear_regression(likelihood, bias):
    model, x = Model(nn.Linear(3, 2, bias=bias).double(), likelihood), numbers(6, 3)
    params = model.parameters()
    if likelihood.scale is None:
        params["likelihood:log_scale"] = torch.tensor([-0.4, 0.6], dtype=DOUBLE)[: likelihood.outputs]
    y = targets(model, params, x)
    close(collected(model, params, halves(x, y), "kronecker"), ggn(model, params, x, y))


def test_kronecker_is_exact_block_by_block_for_deep_linear_networks():
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3, bias=False), nn.Linear(3, 2)).double()
    model, x = Model(net, Gaussian(scale=0.3)), numbers(6, 3)
    params = model.parameters()
    y = targets(model, params, x)
    exact = ggn(model, params, x, y)
    blocks = torch.block_diag(torch.ones(16, 16), torch.ones(12, 12), torch.ones(8, 8)).double()
    close(collected(model, params, halves(x, y), "kronecker"), exact * blocks)


def test_kronecker_factors_by_hand():
    net, x = build("perceptron")
    model = Model(net, Categorical())
    params = model.parameters()
    y = targets(model, params, x)
    blocks = curvature(model, params, halves(x, y), {}, spec=Spec("kronecker"), prior=1.0).blocks
    a0 = torch.cat([x, torch.ones(5, 1)], 1)
    hidden = net[0](x).detach().requires_grad_()
    f = net[2](hidden.tanh())
    a1 = torch.cat([hidden.detach().tanh(), torch.ones(5, 1)], 1)
    slopes = cotangents_of(Categorical(), f.detach())
    inner = torch.stack([torch.autograd.grad(f, hidden, s, retain_graph=True)[0] for s in slopes])
    for block, a, g in zip(blocks, (a0, a1), (inner, slopes), strict=True):
        found_a, found_b = factors(block)
        close(found_a, a.mT @ a / 5)
        close(found_b, torch.einsum("knc,knd->cd", g, g))


@pytest.mark.parametrize("shared", ["expand", "reduce"])
@pytest.mark.parametrize("layer", ["linear", "convolution", "twice"])
def test_kronecker_factors_of_shared_weights_by_hand(layer, shared):
    """KFAC-expand takes positions for examples; KFAC-reduce averages inputs and adds gradients over positions first."""
    recorded: list = []

    def run(s, x):
        if layer == "twice":
            first = s.a(x)
            second = s.a(first.tanh())
            recorded[:] = [torch.stack([x, first.tanh()], 1).detach(), [first, second]]
            return s.o(second.tanh())
        h = s.a(x)
        rows = x if layer == "linear" else unfold(x.unsqueeze(2), (1, 2)).mT
        recorded[:] = [rows.detach(), [h]]
        return s.o(h.tanh().flatten(1))

    inner, width = {"linear": (nn.Linear(2, 2), 8), "convolution": (nn.Conv1d(2, 2, 2), 6), "twice": (nn.Linear(2, 2), 2)}[layer]
    net = Net(run, a=inner, o=nn.Linear(width, 3)).double()
    x = {"linear": numbers(5, 4, 2), "convolution": numbers(5, 2, 4), "twice": numbers(5, 2)}[layer]
    model = Model(net, Categorical())
    params = model.parameters()
    y = targets(model, params, x)
    spec = Spec("kronecker", shared=shared)
    block = next(b for b in curvature(model, params, halves(x, y), {}, spec=spec, prior=1.0).blocks if b.weight == "a.weight")
    f = net(x)
    rows, taps = recorded
    rows = torch.cat([rows, torch.ones(*rows.shape[:2], 1)], -1)
    slopes = []
    for s in cotangents_of(Categorical(), f.detach()):
        found = torch.autograd.grad(f, taps, s, retain_graph=True)
        slopes.append(torch.stack(found, 1) if layer == "twice" else found[0].mT if layer == "convolution" else found[0])
    slopes = torch.stack(slopes)  # [K, B, T, O]
    positions = rows.shape[1]
    assert positions > 1
    if shared == "reduce":
        a, b = (
            torch.einsum("ni,nj->ij", rows.mean(1), rows.mean(1)) / 5,
            torch.einsum("kno,knp->op", slopes.sum(2), slopes.sum(2)),
        )
    else:
        a, b = torch.einsum("nti,ntj->ij", rows, rows) / (5 * positions), torch.einsum("knto,kntp->op", slopes, slopes)
    found_a, found_b = factors(block)
    close(found_a, a)
    close(found_b, b)


def test_what_has_no_matrix_gets_a_block_of_its_own_beside_kronecker_ones():
    net = nn.Sequential(nn.Linear(3, 4), moved(nn.LayerNorm(4)), nn.PReLU(4), nn.Linear(4, 2)).double()
    model, x = Model(net, Categorical()), numbers(5, 3)
    params = model.parameters()
    y = targets(model, params, x)
    found = curvature(model, params, [(x, y)], {}, spec=Spec("kronecker"), prior=1.0)
    assert [type(block) for block in found.blocks] == [Kronecker, Dense, Diagonal, Kronecker]
    exact = ggn(model, params, x, y)
    norm, rest = slice(16, 24), slice(24, 28)  # 12 + 4 before
    close(torch.linalg.inv(found.blocks[1].dense()) - torch.eye(8, dtype=DOUBLE), exact[norm, norm])
    close(torch.linalg.inv(found.blocks[2].dense()) - torch.eye(4, dtype=DOUBLE), torch.diag(exact[rest, rest].diag()))


def test_embeddings_beside_kronecker_blocks_are_diagonal():
    net, x = build("embedding, padding")
    model = Model(net, Categorical())
    params = model.parameters()
    y = targets(model, params, x)
    found = curvature(model, params, halves(x, y), {}, spec=Spec("kronecker"), prior=1.0)
    assert [type(block) for block in found.blocks] == [Diagonal, Kronecker]
    exact = ggn(model, params, x, y)
    assert (exact[:3, :3] == 0).all(), "the padding is a constant"
    close(1 / found.blocks[0].variance()["e.weight"].flatten() - 1, exact.diag()[:21])


@pytest.mark.parametrize("name", NETWORKS)
def test_kronecker_blocks_of_every_network_are_over_all_weights_and_no_worse_than_nothing(name):
    net, x = build(name)
    model = Model(net, Gaussian(scale=0.5))
    params = model.parameters()
    y = targets(model, params, x)
    exact = ggn(model, params, x, y)
    found = collected(model, params, [(x, y)], "kronecker")
    assert (found - exact).norm() < 1.5 * exact.norm()
    assert torch.linalg.eigvalsh(found)[0] > -1e-8 * exact.abs().max()


# --- other number formats --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["perceptron", "conv2d", "embedding", "layer norm", "attention", "lstm", "rows of times"])
@pytest.mark.parametrize("structure", ["dense", "diagonal", "kronecker"])
def test_single_precision(name, structure):
    net, x = build(name)
    y = targets(Model(net, Categorical()), Model(net, Categorical()).parameters(), x)
    exact = collected(Model(net, Categorical()), Model(net, Categorical()).parameters(), [(x, y)], structure)
    net = net.float()
    model, x = Model(net, Categorical()), x.float() if x.is_floating_point() else x
    params = model.parameters()
    found = curvature(model, params, halves(x, y), model.buffers(), spec=Spec(structure), prior=1.0)
    assert all(leaf.dtype == torch.float32 for leaf in found.variance().values())
    matrix = torch.linalg.inv(found.dense().double()) - torch.eye(found.size)
    order = precision(Blocks(found.blocks), [n for n in params]) if list(found.shapes) != list(params) else matrix  # noqa: C416
    close(order, exact, 1e-3)


@pytest.mark.parametrize("name", ["perceptron", "conv2d", "embedding", "layer norm"])
def test_half_precision_networks_are_summed_in_single(name):
    net, x = build(name)
    y = targets(Model(net, Categorical()), Model(net, Categorical()).parameters(), x)
    net = net.bfloat16()
    x = x.bfloat16() if x.is_floating_point() else x
    rounded = Model(net, Categorical())
    try:
        net(x)
    except RuntimeError as error:
        pytest.skip(f"this processor cannot run it in bfloat16: {error}")
    params = rounded.parameters()
    found = curvature(rounded, params, halves(x, y), rounded.buffers(), spec=Spec("dense"), prior=1.0)
    assert found.blocks[0].curvature.dtype == torch.float32
    exact = Model(net.double(), Categorical())
    matrix = torch.linalg.inv(found.dense().double()) - torch.eye(found.size)
    close(matrix, ggn(exact, exact.parameters(), x.double() if x.is_floating_point() else x, y), 0.05)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_no_data():
    net, _ = build("perceptron")
    model = Model(net, Categorical())
    with pytest.raises(ValueError, match="there is no data"):
        curvature(model, model.parameters(), [], {})


def test_statistics_of_the_batch_are_refused_with_advice():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2)).double()
    model = Model(net, Categorical(), only="^2")
    with pytest.raises(ValueError, match="statistics of the batch.*track_running_stats=True"):
        curvature(model, model.parameters(), [(numbers(4, 3), torch.zeros(4).long())], model.buffers())


def test_an_input_that_is_changed_in_place_after_use_is_refused():
    def run(s, x):
        h = s.a(x).tanh()
        g = s.b(h)
        h += 1
        return g + h

    model = Model(Net(run, a=nn.Linear(3, 2), b=nn.Linear(2, 2)).double(), Categorical())
    with pytest.raises(ValueError, match=r"layer with b.weight is changed in place.*x = x \+ y"):
        curvature(model, model.parameters(), [(numbers(4, 3), torch.zeros(4).long())], {})


def test_embeddings_that_are_renormalised_in_use_are_refused():
    model = Model(nn.Sequential(nn.Embedding(7, 2, max_norm=1.0), nn.Linear(2, 2)).double(), Categorical())
    with pytest.raises(ValueError, match="0.weight is renormalized while it is used"):
        curvature(model, model.parameters(), [(tokens(4), torch.zeros(4).long())], {})


def test_a_network_that_takes_another_way_is_noticed():
    net = Net(lambda s, x: s.a(x) if x[0, 0] > 0 else s.a(x, True), a=nn.Linear(3, 2)).double()
    net.run = lambda s, x: torch.nn.functional.linear(x, s.a.weight, s.a.bias if x[0, 0] > 0 else None)
    model = Model(net, Categorical())
    x, y = torch.ones(4, 3, dtype=DOUBLE), torch.zeros(4).long()
    with pytest.raises(ValueError, match="used in another way than in the first batch"):
        curvature(model, model.parameters(), [(x, y), (-x, y)], {})


def test_the_module_is_as_it_was_also_when_it_raises():
    net, x = build("batch norm")
    net.train()
    net(x).sum().backward()
    model = Model(net, Categorical())
    before = [p.grad.clone() for p in net.parameters()], [id(p) for p in net.parameters()], model.buffers()
    y = targets(model, model.parameters(), x)
    for batch in ((x, y), (x[:, :, :2], y)):
        try:
            curvature(model, model.parameters(), [batch], model.buffers())
        except ValueError as error:
            assert "shape" in str(error)  # noqa: PT017
        assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), before[0], strict=True))
        assert [id(p) for p in net.parameters()] == before[1]
        assert all(m.training for m in net.modules())
        assert all(torch.equal(a, b) for a, b in zip(model.buffers().values(), before[2].values(), strict=True))


# --- many outputs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["dense", "diagonal", "kronecker"])
def test_labels_drawn_for_many_outputs_give_the_exact_curvature_on_average(structure, monkeypatch):
    """A text of 5 x 7 outputs, with tokens that nobody asks for: means over seeds within their standard errors."""
    torch.manual_seed(0)
    layers = nn.Embedding(7, 3), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 7)
    model, x = Model(nn.Sequential(*layers).double(), dubito.NextToken()), torch.randint(7, (4, 5))
    y = x.clone()
    y[1, 3:] = -100
    params = model.parameters()

    def sums(seed: int, draws: int | None) -> torch.Tensor:
        made = Setup(model, params, {}, tuple(params), Spec(structure, draws=draws))
        statistic = STATISTICS[structure](made)
        total = statistic.zeros(made.layout(x))
        statistic.add(total, (x, y), generator=torch.Generator().manual_seed(seed))
        return torch.cat([leaf.flatten() for leaf in total.values()])

    exact = sums(0, 0)
    assert torch.equal(sums(0, None), exact)  # 35 outputs are few
    monkeypatch.setattr("dubito.curvature.cotangents.MANY", 30)
    assert torch.equal(sums(0, 0), exact)
    assert torch.equal(sums(3, None), sums(3, 1))
    found = torch.stack([sums(seed, None) for seed in range(400)])
    error = (found.mean(0) - exact).abs()
    allowed = 5 * found.std(0) / 400**0.5
    assert bool((error <= allowed + 1e-9).all())
    assert float(error.norm() / exact.norm()) < 0.1
    twice = torch.stack([sums(seed, 2) for seed in range(400)])
    assert float(twice.var(0).sum() / found.var(0).sum()) == pytest.approx(0.5, abs=0.1)
