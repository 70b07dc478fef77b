"""SWAG beyond the contract: its moments, the covariance of its draws, and BatchNorm statistics of each draw's own."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

import dubito
from dubito import Ensemble, Gaussian, Model, posteriors
from dubito.methods import SWAG
from dubito.posteriors import Mixture, Point, Samples
from dubito.priors import Normal
from dubito.tensors import tree
from dubito.testing import check_same, snapshot, tensors


def data(n: int = 48):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
    return x, x[:, :1] * 2 - x[:, 1:2] + 0.1 * torch.randn(n, 1, generator=torch.Generator().manual_seed(1))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def normed(momentum: float | None = 0.1) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=momentum), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 1))


def seeded(build, *args) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build(*args)


def recorded(model: Model, method: SWAG, source, *, epochs: int, **options):
    """A fit, and the weights at the end of every epoch of training, flat [epochs, P]."""
    found = []

    def keep(event):
        if event.step % event.state.period == 0 and event.step <= epochs * event.state.period:
            found.append(tree.flatten(event.state.params).clone())

    return dubito.fit(model, method, source, callbacks=[keep], **options), torch.stack(found)


def covariance(weights: torch.Tensor, rank: int) -> torch.Tensor:
    """The definition, on iterates [n, P]."""
    means = weights.cumsum(0) / torch.arange(1, len(weights) + 1, dtype=weights.dtype).unsqueeze(1)
    diagonal = (weights**2).mean(0) - weights.mean(0) ** 2
    if not rank:
        return diagonal.diag()
    d = (weights - means)[-rank:]
    return 0.5 * diagonal.diag() + d.mT @ d / (2 * (len(d) - 1))


@pytest.mark.parametrize("rank", [0, 4, 20])
def test_the_moments_are_those_of_the_weights_at_the_ends_of_epochs(rank):
    """More are collected than there are columns for, or fewer; covariances within and between the layers are those of the formula."""
    model, (x, y) = Model(seeded(plain).double(), Gaussian()), (t.double() for t in data())
    method = SWAG(epochs=21, collect_after=0.5, rank=rank, draws=7)
    posterior, weights = recorded(model, method, (x, y), epochs=21, batch_size=16)
    kept = weights[10:]
    assert len(kept) == 11
    assert isinstance(posterior, posteriors.Gaussian)
    assert torch.allclose(tree.flatten(posterior.params), kept.mean(0), atol=1e-12)
    exact = covariance(kept, rank)
    assert torch.allclose(posterior.covariance.dense(), exact, atol=1e-9 * exact.max(), rtol=1e-6)
    drawn = posterior.sample(100_000, torch.Generator().manual_seed(0))
    found = torch.cov(tree.flatten(drawn, stacked=True).mT)
    error = 5 * ((exact.diag().outer(exact.diag()) + exact**2) / 100_000).sqrt()
    assert ((found - exact).abs() < error).all()
    between = exact[: 3 * 4, -6:-1]  # of the first layer's weights and the last's
    if rank:
        assert (between.abs() > 20 / 5 * error[: 3 * 4, -6:-1]).any(), "one draw moves all layers together"
    assert posterior.predict(x).means.shape[0] == 7


def test_draws_for_batchnorm_have_the_same_covariance():
    method = SWAG(epochs=9, rank=4, draws=1000, collect_after=0.25)
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)).double()
    model, (x, y) = Model(seeded(lambda: net), Gaussian(scale=0.5)), (t.double() for t in data())
    posterior, weights = recorded(model, method, (x, y), epochs=8, batch_size=48)
    assert isinstance(posterior, Samples)
    assert len(posterior) == 1000
    exact, rows = covariance(weights[2:], 4), tree.flatten(posterior.params, stacked=True)
    spread = exact.diag().sqrt()
    assert ((rows.mean(0) - weights[2:].mean(0)).abs() < 5 * spread / 1000**0.5).all()
    error = 5 * ((exact.diag().outer(exact.diag()) + exact**2) / 1000).sqrt()
    assert ((torch.cov(rows.mT) - exact).abs() < error).all()
    assert (exact[:6, -3:].abs() > 2 * error[:6, -3:]).any()


def test_a_small_spread_around_a_large_mean_is_not_lost():
    """In single precision a difference of squares would be all rounding."""
    net = nn.Linear(3, 1, bias=False)
    nn.init.constant_(net.weight, 1000.0)
    x, _ = data()
    model = Model(net, Gaussian(scale=1.0), Normal(scale=1e4))
    y = 1000 * x.sum(1, keepdim=True) + torch.randn(48, 1, generator=torch.Generator().manual_seed(1))
    posterior, weights = recorded(model, SWAG(epochs=40, learning_rate=0.02), (x, y), epochs=40, batch_size=8)
    exact = covariance(weights[20:].double(), 20)
    assert exact.diag().max() < 0.01
    assert torch.allclose(posterior.covariance.dense().double(), exact, rtol=0.01, atol=1e-3 * float(exact.max()))


def test_on_a_quadratic_the_spread_is_that_of_sgd():
    r"""SGD on independent batches of B, with h and r the Hessian and the gradient at the mode of one example and H = E[h], has the
    stationary covariance S = S - \eta (H S + S H) + \eta^2 (E[h S h + r r^T] / B + (1 - 1/B) H S H). SWAG gives diag(S)/2 + S/2: its
    spread is that of a walk with this step, not the posterior's."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(60, 3, generator=g, dtype=torch.float64)
    x[:, 2] += x[:, 0]
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]).double() + 0.5 * torch.randn(60, 1, generator=g, dtype=torch.float64)
    rate, size = 0.1, 20
    h = x.unsqueeze(2) * x.unsqueeze(1) / 0.5**2 + torch.eye(3) / 60  # [N, 3, 3]
    c = x * y / 0.5**2  # [N, 3]
    mean = torch.linalg.solve(h.mean(0), c.mean(0))
    r, hessian = h @ mean - c, h.mean(0)
    s = torch.zeros(3, 3).double()
    for _ in range(2000):
        noise = (h @ s @ h + r.unsqueeze(2) * r.unsqueeze(1)).mean(0)
        s = s - rate * (hessian @ s + s @ hessian) + rate**2 * (noise / size + (1 - 1 / size) * hessian @ s @ hessian)

    class Independent:
        """Twenty batches a pass, drawn with replacement: an epoch is long enough to forget where the last one ended."""

        def __len__(self):
            return 20

        def __iter__(self):
            for rows in torch.randint(0, 60, (20, size)):
                yield x[rows], y[rows]

    model = Model(nn.Linear(3, 1, bias=False).double(), Gaussian(scale=0.5), Normal(scale=1.0))
    n, plain = 300, dict(learning_rate=rate, collecting_rate=rate, momentum=0.0, clip=None)
    method = SWAG(epochs=n + 10, collect_after=10 / (n + 10), rank=n, **plain)
    posterior = dubito.fit(model, method, Independent(), n_data=60)
    assert torch.allclose(posterior.params["weight"], mean, atol=5 * float((s.diag().max() / n).sqrt()))
    exact = 0.5 * s.diag().diag() + 0.5 * s
    assert torch.allclose(posterior.covariance.dense(), exact, atol=0.2 * float(exact.max()))


@pytest.mark.parametrize("momentum", [0.1, 0.5, None])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_batchnorm_statistics_are_each_draws_own(momentum, accumulate):
    """They are the plain average over the batches, whatever the layer's momentum, and with dropout off: what torch's own
    `update_bn` gives."""
    model = Model(seeded(normed, momentum), Gaussian(scale=0.3))
    x, y = data()
    batches = [(x[:10], y[:10]), (x[10:30], y[10:30]), (x[30:], y[30:])]
    before = snapshot(model)
    posterior = dubito.fit(model, SWAG(epochs=5, draws=3), batches, accumulate=accumulate)
    check_same(before, snapshot(model))
    assert isinstance(posterior, Samples)
    assert list(posterior.own_buffers) == ["1.running_mean", "1.running_var"]
    for i in range(3):
        net = copy.deepcopy(model.network)
        net[3].p = 0.0
        net.load_state_dict({**net.state_dict(), **tree.select(posterior.params, i)})
        update_bn([b for b, _ in batches], net)
        for name, found in posterior.own_buffers.items():
            assert torch.allclose(found[i], net.state_dict()[name], rtol=1e-5, atol=1e-6), name
        net.eval()
        assert torch.allclose(posterior.predict(x).means[i], net(x), atol=1e-5)
    assert not torch.allclose(posterior.own_buffers["1.running_var"][0], posterior.own_buffers["1.running_var"][1], rtol=1e-3)


def test_a_batchnorm_layer_that_is_used_twice_or_never():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.norm, self.idle = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(2)

        def forward(self, x):
            return self.norm(self.inner(self.norm(x)))[:, :1]

    model, (x, y) = Model(seeded(Twice), Gaussian(scale=0.3)), data()
    with torch.no_grad():
        model.network.idle.running_mean += 7
    posterior = dubito.fit(model, SWAG(epochs=5, draws=2), [(x, y)])
    net = copy.deepcopy(model.network)
    net.load_state_dict({**net.state_dict(), **tree.select(posterior.params, 0)})
    seen = []
    net.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].mean(0)))
    net.train()(x)
    exact = (0.9 * seen[0] + seen[1]) / 1.9  # the layer's own weighing of its two calls
    assert torch.allclose(posterior.own_buffers["norm.running_mean"][0], exact, atol=1e-6)
    assert torch.equal(posterior.own_buffers["idle.running_mean"], torch.full((2, 2), 7.0))


@pytest.mark.filterwarnings("ignore:The outputs of some examples depend on the others")  # batch statistics in eval mode
def test_networks_without_statistics_that_follow_the_data_give_a_gaussian():
    class Frozen(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)
            self[1].eval()
            return self

    still = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 1))
    for net in (Frozen(*normed()).train(), still):
        assert isinstance(dubito.fit(Model(net, Gaussian(scale=0.3)), SWAG(epochs=4), data()), posteriors.Gaussian)


@pytest.mark.parametrize("build", [plain, normed])
@pytest.mark.parametrize("at", [2, 6, 10, 13, 14, 15])
def test_stop_and_go_on_with_training_with_collecting_and_with_statistics(build, at, tmp_path):
    def run(seed=3, **options):
        model = Model(seeded(build), Gaussian())
        return dubito.fit(model, SWAG(epochs=5, rank=2, draws=3), data(), seed=seed, batch_size=16, **options)

    whole = run()
    unfinished = run(checkpoint=tmp_path, callbacks=[lambda event: event.step == at])
    assert isinstance(unfinished, Point) == (at < (15 if build is normed else 12))
    resumed = run(checkpoint=tmp_path, resume=True)

    def parts(posterior):
        return [*tensors(posterior), *posterior.sample(2, torch.Generator().manual_seed(0)).values()]

    assert all(torch.equal(p, q) for p, q in zip(parts(whole), parts(resumed), strict=True))
    assert any(not torch.equal(p, q) for p, q in zip(parts(whole), parts(run(seed=4)), strict=True))


@pytest.mark.parametrize("build", [plain, normed])
def test_an_ensemble_of_it_is_multi_swag(build):
    """In one batched pass, or one member after another, it finds the same Gaussians."""
    net = seeded(build)
    if build is normed:
        net[3].p = 0.0  # masks are drawn in another order
    model, (x, y), found = Model(net.double(), Gaussian()), (t.double() for t in data()), []
    for vectorize in (True, False):
        kinds = set()
        posterior = dubito.fit(
            model,
            Ensemble(SWAG(epochs=6, draws=100, rank=3), 2, vectorize=vectorize),
            (x, y),
            batch_size=24,
            callbacks=[lambda event, kinds=kinds: kinds.add(event.state.stages[0].stacked)],
        )
        assert kinds == {vectorize}
        assert isinstance(posterior, Mixture)
        assert posterior.predict(x).means.shape[0] == 200
        found.append(posterior.members)
    for a, b in zip(*found, strict=True):
        assert type(a) is type(b)
        if build is plain:
            assert torch.allclose(tree.flatten(a.params), tree.flatten(b.params), atol=1e-9)
            assert torch.allclose(a.covariance.dense(), b.covariance.dense(), atol=1e-9)
        else:
            spread = a.params["0.weight"].std(0)
            difference = a.params["0.weight"].mean(0) - b.params["0.weight"].mean(0)
            assert (difference.abs() < 6 * spread * (2 / 100) ** 0.5).all()
            assert torch.allclose(a.own_buffers["1.running_var"].mean(0), b.own_buffers["1.running_var"].mean(0), rtol=0.2)
    other = found[0][1].params["0.weight"] - found[0][0].params["0.weight"]
    assert other.abs().max() > 0.1, "members are not the same"


def test_validation_before_there_is_anything_to_draw_from():
    x, y = data()
    for build in (plain, normed):
        dubito.fit(Model(seeded(build), Gaussian()), SWAG(epochs=5, draws=3), (x, y), validation=(x, y), batch_size=16)


def test_the_learning_rate_falls_until_collecting_begins():
    method = SWAG(learning_rate=0.1, collecting_rate=0.03, collect_after=0.6, warmup=0.1)
    rates = [0.1 * method._share(step, 100) for step in range(100)]
    assert max(rates) == pytest.approx(0.1)
    assert rates[60:] == [pytest.approx(0.03)] * 40
    assert all(a >= b for a, b in pairwise(rates[6:]))
    assert min(rates) == pytest.approx(0.03)
    assert SWAG(learning_rate=0.1)._share(99, 100) == 0.5


def test_half_precision_weights_have_moments_in_single():
    model, (x, y) = Model(seeded(plain).bfloat16(), Gaussian(scale=0.5)), data()
    posterior = dubito.fit(model, SWAG(epochs=6), (x.bfloat16(), y.bfloat16()), batch_size=16)
    assert {leaf.dtype for leaf in posterior.params.values()} == {torch.bfloat16}
    assert {leaf.dtype for leaf in posterior.covariance.variance().values()} == {torch.float32}
    assert {leaf.dtype for leaf in posterior.sample(2).values()} == {torch.bfloat16}


@pytest.mark.parametrize("rank", [0, 3])
def test_a_saved_gaussian_predicts_the_same_bits(tmp_path, rank):
    model, (x, y) = Model(seeded(plain), Gaussian()), data()
    posterior = dubito.fit(model, SWAG(epochs=8, rank=rank, draws=4), (x, y), batch_size=16)
    dubito.save(posterior, tmp_path / "swag")
    same = dubito.load(tmp_path / "swag", model)
    assert isinstance(same, posteriors.Gaussian)
    assert torch.equal(posterior.predict(x).means, same.predict(x).means)
    assert same.predict(x).means.shape[0] == 4


def test_bad_options_are_refused_in_words():
    bad = [
        ({"rank": 1}, "at least 2 columns"),
        ({"rank": -1}, "at least 2 columns"),
        ({"draws": 0}, "draws must be at least 1"),
        ({"collect_after": 1.0}, "collect_after must be"),
        ({"collecting_rate": 0.0}, "collecting_rate must be positive"),
        ({"learning_rate": -1.0}, "learning_rate must be positive"),
    ]
    for options, words in bad:
        with pytest.raises(ValueError, match=words):
            SWAG(**options)
    for build, epochs in ((plain, 1), (normed, 2), (plain, 0)):
        with pytest.raises(ValueError, match="two epochs at least.*give more epochs"):
            dubito.fit(Model(build(), Gaussian(scale=0.3)), SWAG(epochs=epochs), data())
