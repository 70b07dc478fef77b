"""Norms against matrices, slopes against Jacobians, bounds above both, and attacks that certificates withstand."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import jacrev, vmap
from torch.nn.utils.parametrize import remove_parametrizations

import dubito
from dubito import MAP, Bernoulli, Categorical, Ensemble, Gaussian, MCDropout, Model
from dubito.apps.stability import lipschitz_bound, local_slopes, operator_norm, spectrally_normalized, stability
from dubito.apps.stability.bound import SLOPES
from dubito.posteriors import Point
from dubito.report import stability as drawing
from dubito.report.report import Report
from dubito.shift import pgd
from dubito.testing import check_same, snapshot


def seeded(build, seed: int = 0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()


def dense(apply, shape) -> torch.Tensor:
    """The matrix of a linear function, from its values at unit vectors."""
    n = math.prod(shape)
    eye = torch.eye(n, dtype=torch.float64).view(n, *shape)
    zero = apply(torch.zeros(1, *shape, dtype=torch.float64))
    return torch.cat([(apply(row.unsqueeze(0)) - zero).reshape(1, -1) for row in eye])


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1, stride=2), nn.LeakyReLU(1.5), nn.Conv2d(3, 4, 3, groups=1), nn.Tanh(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.Conv2d(2, 3, 3, padding=1),
        lambda: nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2),
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
        lambda: nn.Conv2d(2, 3, 2, padding="same", dilation=2),
        lambda: nn.ConvTranspose2d(2, 3, 3, stride=2),
        lambda: nn.AvgPool2d(2, stride=1),
        lambda: nn.AdaptiveAvgPool2d(2),
    ],
)
def test_norms_of_operations_are_those_of_their_matrices(layer):
    layer = seeded(layer).double()
    exact = float(torch.linalg.matrix_norm(dense(layer, (2, 6, 6)), 2).detach())
    assert operator_norm(layer, torch.zeros(1, 2, 6, 6, dtype=torch.float64)) == pytest.approx(exact, rel=1e-5)
    assert lipschitz_bound(_holding(layer), torch.zeros(1, 2, 6, 6).double()).value == pytest.approx(exact, rel=1e-5)


def _holding(layer: nn.Module) -> nn.Module:
    """A network needs parameters to be a model: one that does nothing."""

    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale = layer, nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, x):
            return (self.layer(x) * self.scale).flatten(1)

    return Held()


def test_the_norm_of_a_convolution_is_not_that_of_its_kernel():
    layer = seeded(lambda: nn.Conv2d(3, 8, 3, padding=1)).double()
    kernel = float(torch.linalg.matrix_norm(layer.weight.detach().flatten(1), 2))
    exact = float(torch.linalg.matrix_norm(dense(layer, (3, 8, 8)), 2).detach())
    assert operator_norm(layer, torch.zeros(1, 3, 8, 8, dtype=torch.float64)) == pytest.approx(exact, rel=1e-4)
    assert exact > 1.2 * kernel


def test_norms_of_which_many_are_nearly_alike():
    """More directions than are kept at a time: it begins anew from the best."""
    sizes = torch.linspace(1.0, 0.5, 1000, dtype=torch.float64)
    assert operator_norm(lambda x: sizes * x, torch.zeros(1, 1000, dtype=torch.float64)) == pytest.approx(1.0, rel=1e-8)


@pytest.mark.parametrize("name", SLOPES)
def test_slopes_of_activations_are_the_steepest(name):
    function = getattr(F, name) if hasattr(F, name) else getattr(torch, name)
    kwargs = (
        [{"approximate": how} for how in ("none", "tanh")] if name == "gelu" else [{"min": -1.0}] if name == "clamp" else [{}]
    )
    for options in kwargs:
        x = torch.linspace(-8, 8, 40_001, dtype=torch.float64).requires_grad_()
        (slope,) = torch.autograd.grad(function(x, **options).sum(), x)
        assert 0.999 * SLOPES[name] < float(slope.abs().max()) <= SLOPES[name] * (1 + 1e-6)  # torch rounds some of their settings


@pytest.mark.parametrize(
    ("layer", "exact"),
    [
        (lambda: nn.MaxPool2d(3, stride=2), 2.0),  # a number is in four windows at most
        (lambda: nn.MaxPool2d(3, stride=1, padding=1), 3.0),
        (lambda: nn.MaxPool2d((2, 1)), 1.0),
        (lambda: nn.LeakyReLU(-2.0), 2.0),
        (lambda: nn.LogSigmoid(), 1.0),
        (lambda: nn.ELU(3.0), 3.0),
        (lambda: nn.CELU(3.0), 1.0),
        (lambda: nn.Softmax(-1), 0.5),
    ],
)
def test_bounds_of_pooling_and_of_activations_with_settings(layer, exact):
    assert lipschitz_bound(_holding(layer()), torch.zeros(1, 1, 7, 7).double()).value == pytest.approx(exact, rel=1e-6)
    x = torch.zeros(1, 1, 7, 7)
    peak = x.clone()
    peak[0, 0, 2, 2] = 1.0  # where windows overlap
    assert float((layer()(peak) - layer()(x)).norm()) <= exact + 1e-6


def test_the_bound_of_a_chain_is_the_product_and_above_every_slope():
    net = seeded(conv).double()
    x = torch.randn(16, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    first = torch.linalg.matrix_norm(dense(net[0], (1, 8, 8)), 2)
    second = torch.linalg.matrix_norm(dense(net[2], (3, 4, 4)), 2)
    exact = float((first * 1.5 * second * torch.linalg.matrix_norm(net[6].weight, 2)).detach())
    found = lipschitz_bound(net, x)
    assert found.value == pytest.approx(exact, rel=1e-5)
    assert math.prod(found.factors.values()) == pytest.approx(found.value)
    point = Point(Model(net, Categorical()), dict(net.named_parameters()), {})
    assert (local_slopes(point, x, of="outputs") <= found.value).all()


def test_bounds_of_sums_pieces_and_normalised_layers():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(8, 2)

        def forward(self, x):
            x = x + F.relu(self.norm(self.a(x)))
            return self.head(torch.cat([x, 2 * x], -1))

    net = seeded(Residual).double()
    net.norm.running_var.copy_(torch.tensor([0.25, 1.0, 4.0, 1.0]))
    net.norm.weight.data.copy_(torch.tensor([1.0, -3.0, 1.0, 1.0]))
    slopes = net.norm.weight / (net.norm.running_var + 1e-5).sqrt()
    # a linear layer and the BatchNorm behind it are one matrix, and so are the copies side by side and the head
    inner = 1 + torch.linalg.matrix_norm(slopes.unsqueeze(1) * net.a.weight, 2)
    exact = float((inner * math.sqrt(1 + 4) * torch.linalg.matrix_norm(net.head.weight, 2)).detach())
    assert lipschitz_bound(net, torch.zeros(2, 4).double()).value == pytest.approx(exact, rel=1e-6)


def test_an_ensemble_is_bounded_by_the_mean():
    nets = [seeded(lambda: nn.Linear(3, 2), seed) for seed in (0, 1)]
    model = Model(nets[0], Categorical())
    both = {name: torch.stack([dict(net.named_parameters())[name].detach() for net in nets]) for name in ("weight", "bias")}
    found = lipschitz_bound(dubito.posteriors.Samples(model, both, {}), torch.zeros(1, 3)).value
    assert found == pytest.approx(sum(float(torch.linalg.matrix_norm(n.weight.detach(), 2)) for n in nets) / 2, rel=1e-6)


class Calls(nn.Module):
    """A function of a linear layer's output h and of the input."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = seeded(lambda: nn.Linear(3, 3)), function

    def forward(self, x):
        return self.function(self.linear(x), x)


@pytest.mark.parametrize(
    ("function", "least"),  # and the bound, in terms of the norm of the linear layer
    [
        (lambda h, x: torch.cat([h.relu()] * 2, -1), lambda a: math.sqrt(2) * a),
        (lambda h, x: (lambda r: torch.stack([r, x, r], 1).flatten(1))(h.relu()), lambda a: math.sqrt(2 * a**2 + 1)),
        (lambda h, x: torch.add(x, h.relu(), alpha=-5), lambda a: 1 + 5 * a),
        (lambda h, x: torch.sub(x, other=h.relu()), lambda a: 1 + a),
        (lambda h, x: 2 * h.detach(), lambda a: 2 * a),
        (lambda h, x: torch.rsub(x, h.relu(), alpha=5), lambda a: 5 + a),
        (lambda h, x: (h.relu().unsqueeze(1) + x.tanh().unsqueeze(2)).flatten(1), lambda a: math.sqrt(3) * (a + 1)),
        (lambda h, x: h.relu()[:, [0, 0, 0, 0]], lambda a: 2 * a),
        (lambda h, x: h.relu()[:, 1:, None].flatten(1), lambda a: a),
        (lambda h, x: h.relu().mul_(3.0), lambda a: 3 * a),
        (lambda h, x: h.log_softmax(-1), lambda a: math.sqrt(3) * a),
        (lambda h, x: F.dropout(h.relu(), 0.5, training=False), lambda a: a),
        (lambda h, x: h.double().relu() @ torch.eye(3).double(), lambda a: a),
    ],
)
def test_bounds_count_what_comes_in_more_than_once(function, least):
    net = Calls(function)
    found = lipschitz_bound(net, torch.zeros(1, 3))
    a = float(torch.linalg.matrix_norm(net.linear.weight.detach(), 2))
    assert found.value == pytest.approx(least(a), rel=1e-5)
    x = 3 * torch.randn(2, 200, 3, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert ((net(x[0]) - net(x[1])).norm(dim=1) <= found.value * (x[0] - x[1]).norm(dim=1) + 1e-5).all()


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda h, x: h * x, "mul"),
        (lambda h, x: h * h, "mul"),
        (lambda h, x: h / h, "div"),
        (lambda h, x: 1 / h, "rdiv"),
        (lambda h, x: torch.einsum("bi,bj->bij", h, h).flatten(1), "einsum"),
        (lambda h, x: F.dropout(h, 0.5, training=True), "dropout"),
        (lambda h, x: F.batch_norm(h, None, None, training=True), "batch_norm"),
    ],
)
def test_what_has_no_bound_is_refused(function, name):
    with pytest.raises(ValueError, match=f"calls {name}, for which there is no bound"):
        lipschitz_bound(Calls(function), torch.zeros(3, 3))


def test_bounds_are_of_real_numbers_in_whatever_mode():
    with pytest.raises(ValueError, match="embed words"):
        lipschitz_bound(nn.Linear(2, 2), torch.zeros(1, 2).long())
    net = seeded(lambda: nn.Linear(2, 2))
    exact = float(torch.linalg.matrix_norm(net.weight.detach(), 2))
    with torch.inference_mode():
        assert lipschitz_bound(net, torch.zeros(1, 2).double()).value == pytest.approx(exact, rel=1e-6)


def test_slopes_of_attention():
    """Its fastest kernels cannot be differentiated twice."""
    net = seeded(
        lambda: nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Flatten(), nn.Linear(12, 2))
    ).eval()
    x = torch.randn(3, 3, 4, generator=torch.Generator().manual_seed(0))
    point = Point(Model(net, Categorical()), {name: p.detach() for name, p in net.named_parameters()}, {})
    exact = [torch.autograd.functional.jacobian(lambda one: net(one.unsqueeze(0)).squeeze(0), one).flatten(1) for one in x]
    found = local_slopes(point, x, of="outputs", tolerance=1e-8, steps=500)
    assert torch.allclose(found, torch.linalg.matrix_norm(torch.stack(exact), 2), rtol=1e-3)


def test_slopes_are_norms_of_jacobians():
    net = seeded(conv).double()
    x = torch.randn(12, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = Model(net, Categorical())
    point = Point(model, {name: p.detach() for name, p in net.named_parameters()}, {})
    for of, g in (("outputs", net), ("predictions", lambda x: net(x).softmax(-1))):
        exact = vmap(jacrev(lambda one, g=g: g(one.unsqueeze(0)).squeeze(0)))(x).flatten(2)
        exact = torch.linalg.matrix_norm(exact, 2).detach()
        found = local_slopes(point, x, of=of, tolerance=1e-8, steps=500, batch_size=5)
        assert torch.allclose(found, exact, rtol=1e-4)


def test_slopes_of_a_posterior_are_those_of_its_mean_prediction():
    x = torch.randn(10, 3, generator=torch.Generator().manual_seed(1))
    y = (x[:, 0] > 0).long()
    net = seeded(lambda: nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2)))
    model = Model(net, Categorical())
    before = snapshot(model)
    p = dubito.fit(model, MCDropout(epochs=5, draws=12), (x, y))
    found = local_slopes(p, x, tolerance=1e-7, steps=200)
    step = 1e-3 * F.normalize(torch.randn(200, 3, generator=torch.Generator().manual_seed(2)), dim=1)
    ahead, behind = (p.predict((x + sign * step.unsqueeze(1)).flatten(0, 1)).mean.view(200, 10, 2) for sign in (1, -1))
    seen = ((ahead - behind).norm(dim=2) / 2e-3).amax(0)
    assert (seen <= found * 1.02 + 1e-3).all()
    assert (seen >= 0.9 * found - 1e-3).double().mean() > 0.7
    check_same(before, snapshot(model))


def test_layers_are_held_to_a_norm_and_the_users_network_is_not_touched():
    net = seeded(conv)
    model = Model(net, Categorical())
    before = snapshot(model)
    x = torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    y = torch.arange(32) % 3
    held = spectrally_normalized(net, x[:2], norm=0.8, iterations=2)
    check_same(before, snapshot(model))
    kept = copy.deepcopy(held.state_dict())
    p = dubito.fit(Model(held, Categorical()), MAP(epochs=100, learning_rate=0.02), (x, y))
    assert all(torch.equal(a, b) for a, b in zip(kept.values(), held.state_dict().values(), strict=True))
    assert lipschitz_bound(p, x).value == pytest.approx(1.5 * 0.8**3, rel=0.03)
    assert float((p.predict(x).mean.argmax(-1) == y).double().mean()) > 0.4  # it still learns
    with torch.no_grad():
        for name, leaf in {**p.params, **p.buffers}.items():
            held.get_parameter(name).copy_(leaf) if name in p.params else held.get_buffer(name).copy_(leaf)
    held.eval()
    for layer, shape in ((held[0], (1, 8, 8)), (held[2], (3, 4, 4))):
        remove_parametrizations(layer, "weight")
        assert float(torch.linalg.matrix_norm(dense(layer.double(), shape), 2).detach()) == pytest.approx(0.8, rel=0.02)
    assert float(torch.linalg.matrix_norm(held[6].weight.detach(), 2)) == pytest.approx(0.8, rel=0.02)


def test_only_the_layers_that_are_named():
    net = seeded(conv)
    held = spectrally_normalized(net, torch.zeros(1, 1, 8, 8), at="^6$")
    assert [name for name, _ in held.named_parameters() if "parametrizations" in name] == ["6.parametrizations.weight.original"]
    with pytest.raises(ValueError, match="no linear or convolutional layer"):
        spectrally_normalized(net, torch.zeros(1, 1, 8, 8), at="nowhere")
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match="shared with other layers"):
        spectrally_normalized(tied, torch.zeros(1, 3))
    zero = nn.Sequential(nn.Linear(3, 3))
    nn.init.zeros_(zero[0].weight)
    with pytest.raises(ValueError, match="all zero"):
        spectrally_normalized(zero, torch.zeros(1, 3))
    with pytest.raises(ValueError, match="norm must be positive"):
        spectrally_normalized(net, torch.zeros(1, 1, 8, 8), norm=0.0)


@pytest.fixture(scope="module")
def reports():
    source = torch.Generator().manual_seed(0)
    x = torch.rand(80, 4, generator=source)
    y = ((x[:, 0] + x[:, 1]) > 1).long()
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)))
    fits = {
        "plain": dubito.fit(Model(net, Categorical()), MAP(epochs=60, learning_rate=0.02), (x, y)),
        "held": dubito.fit(Model(spectrally_normalized(net, x[:1]), Categorical()), MAP(epochs=60, learning_rate=0.02), (x, y)),
        "ensemble": dubito.fit(Model(net, Categorical()), Ensemble(MAP(epochs=60, learning_rate=0.02), 3), (x, y)),
    }
    return fits, x, y, {name: stability(p, x, y, sizes=[0.05, 0.2], bounds=(0, 1)) for name, p in fits.items()}


def test_what_is_certified_withstands_and_slopes_are_bounded(reports):
    fits, x, y, found = reports
    for name, one in found.items():
        clean = one.level(0.0)
        assert clean.accuracy == pytest.approx(float((fits[name].predict(x).mean.argmax(-1) == y).double().mean()))
        assert [level.accuracy for level in one.levels] == sorted((level.accuracy for level in one.levels), reverse=True)
        assert [level.nll for level in one.levels] == sorted(level.nll for level in one.levels)
        assert clean.noticed == 0.5
        assert one.bound is not None
        assert (one.slopes <= one.bound.value / 2 + 1e-6).all()  # a softmax halves
        for level in one.levels:
            assert level.total == pytest.approx(level.aleatoric + level.epistemic, rel=1e-4)
            if level.certified is not None:
                assert level.certified <= level.accuracy + 1e-6
    assert found["held"].bound.value == pytest.approx(1.0, rel=0.05)
    assert found["held"].bound.value < 0.2 * found["plain"].bound.value
    assert found["held"].level(0.05).certified > 0.95 * found["held"].level(0.05).accuracy  # so tight is the bound then
    assert found["ensemble"].level(0.05).certified is None
    assert found["ensemble"].level(0.0).epistemic > 0


def test_whether_doubt_tells_wrong_and_attacked_inputs(reports):
    """AUROCs as what they mean: how often one of these is more doubtful than one of those."""
    fits, x, y, found = reports

    def ahead(these, those):
        apart = these.unsqueeze(1) - those
        return float(((apart > 0).double() + 0.5 * (apart == 0).double()).mean())

    moved = pgd(fits["plain"], x, y, size=0.2, bounds=(0, 1), norm="l2")
    p, clean = fits["plain"].predict(moved), fits["plain"].predict(x)
    total, wrong = p.uncertainty.total, p.mean.argmax(-1) != y
    level = found["plain"].level(0.2)
    assert level.noticed == pytest.approx(ahead(total, clean.uncertainty.total), abs=1e-5)
    assert level.errors == pytest.approx(ahead(total[wrong], total[~wrong]), abs=1e-5)
    assert level.confidence == pytest.approx(float(p.mean.amax(-1).mean()), abs=1e-5)
    assert abs(level.noticed - 0.5) > 0.1
    assert abs(level.errors - 0.5) > 0.1


def test_pixels_without_a_class_do_not_count():
    x, y = torch.rand(5, 1, 6, 6, generator=torch.Generator().manual_seed(0)), torch.zeros(5, 6, 6).long()
    layer = seeded(lambda: nn.Conv2d(1, 2, 3, padding=1))
    point = Point(Model(layer, Categorical(dim=1)), {name: p.detach() for name, p in layer.named_parameters()}, {})
    y[:, :, 2:] = layer(x)[:, :, :, 2:].argmax(1)  # right, and in the first two columns by chance
    y[:, :3, :2] = -100
    found = stability(point, x, y, sizes=[1e-6], bounds=None).level(0.0)
    p = point.predict(x)
    counts = y >= 0
    right, total = (p.mean.argmax(-1) == y)[counts], p.uncertainty.total[counts]
    assert found.certified == pytest.approx(found.accuracy)
    assert found.accuracy == pytest.approx(float(right.double().mean()))
    ahead = (total[~right].unsqueeze(1) > total[right]).double().mean()
    assert found.errors == pytest.approx(float(ahead), abs=1e-5)


def test_inputs_of_another_precision(reports):
    fits, x, y, found = reports
    level = stability(fits["plain"], x.double(), y, sizes=[0.2], bounds=(0, 1)).level(0.2)
    assert level.accuracy == pytest.approx(found["plain"].level(0.2).accuracy, abs=0.03)
    assert level.certified == pytest.approx(found["plain"].level(0.2).certified)


def test_pictures(reports, tmp_path):
    found = reports[3]
    made = drawing.section(found)
    assert [row[0] for row in made.tables[0].rows] == ["plain", "held", "ensemble"]
    assert made.tables[0].rows[0][2] == found["plain"].level(0.2).accuracy
    assert all(p.image.startswith("<svg") and "plain" in p.alt for figure in made.figures for p in figure.pictures)
    Report("Stability", sections=(made,)).write(tmp_path / "report.html")
    with pytest.raises(ValueError, match="what must be one of"):
        drawing.lines(found, "speed")
    with pytest.raises(ValueError, match="at least one"):
        drawing.table({})


def test_refusals(reports):
    fits, x, y, found = reports
    with pytest.raises(ValueError, match="no level of size 0.1"):
        found["plain"].level(0.1)
    with pytest.raises(ValueError, match="at least one"):
        stability(fits["plain"], x, y, sizes=[], bounds=None)
    with pytest.raises(ValueError, match="outside `bounds`"):
        stability(fits["plain"], x + 1, y, sizes=[0.1], bounds=(0, 1))
    several = Point(Model(nn.Linear(4, 3), Bernoulli()), {}, {})
    with pytest.raises(ValueError, match=r"one label for each input; got targets \[80, 3\]"):
        stability(several, x, torch.zeros(80, 3), sizes=[0.1], bounds=None)
    point = Point(Model(nn.Linear(2, 1), Gaussian(scale=1.0)), {}, {})
    with pytest.raises(ValueError, match="of classifiers"):
        stability(point, x, y, sizes=[0.1], bounds=None)
    with pytest.raises(ValueError, match="embed words"):
        local_slopes(fits["plain"], y)


def test_the_bound_of_a_slope_that_is_learned():
    net = nn.Sequential(nn.Linear(2, 2), nn.PReLU(2))
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(2))
        net[1].weight.copy_(torch.tensor([0.5, -3.0]))
    assert lipschitz_bound(net, torch.zeros(1, 2)).value == pytest.approx(3.0)


def test_no_certificate_where_the_class_is_not_the_largest_logit():
    """The largest logit is that of class 0, but class 1, whose logit is all noise, has the most probability."""
    model = Model(nn.Linear(3, 6), dubito.HeteroscedasticCategorical())
    point = Point(model, {"weight": torch.zeros(6, 3), "bias": torch.tensor([1.0, 0.5, 0.0, -9.0, 9.0, -9.0])}, {})
    x = torch.randn(5, 3)
    assert point.predict(x).mean.argmax(-1).tolist() == [1] * 5
    found = stability(point, x, torch.zeros(5, dtype=torch.long), sizes=[0.1], bounds=None, steps=1)
    assert [level.accuracy for level in found.levels] == [0.0, 0.0]
    assert [level.certified for level in found.levels] == [None, None]


def test_targets_in_a_column_are_those_in_a_row():
    model = Model(nn.Linear(3, 3), Categorical())
    point, x, y = Point(model, model.parameters(), {}), torch.randn(12, 3), torch.arange(12) % 3
    rows = stability(point, x, y, sizes=[0.1], bounds=None, steps=1)
    assert stability(point, x, y.unsqueeze(1), sizes=[0.1], bounds=None, steps=1).levels == rows.levels
