"""What SGLD and SGHMC share: schedules, draws, chains, buffers and what is noted."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from dubito.methods.sghmc import SGHMC
from dubito.methods.sgld import SGLD
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dubito
from dubito import Categorical, Ensemble, Gaussian, Model
from dubito.data import digits
from dubito.inference.method import Event
from dubito.inference.sgmcmc import Move
from dubito.model import Target
from dubito.posteriors import Samples
from dubito.priors import LogUniform, Normal
from inference.methods.gaussians import Levels


def network(*, norm: bool = False) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Linear(8, 1))


def data(n: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator)
    return x, x[:, :1] - 0.5 * x[:, 1:2] + 0.1 * torch.randn(n, 1, generator=generator)


@pytest.mark.parametrize("kind", [SGLD, SGHMC])
def test_cycles_are_those_of_the_paper(kind):
    """Zhang et al. (2020), eq. 1: alpha_k = alpha_0 / 2 (cos(pi mod(k - 1, ceil(K / M)) / ceil(K / M)) + 1) for k = 1 ... K; there is
    no noise where mod(k - 1, ceil(K / M)) / ceil(K / M) < beta."""
    method, batches = kind(cycles=3, draws=6, burn_in=8, thin=1, exploration=0.6, learning_rate=0.4), 5
    total, cycles = method.steps(batches), 3
    assert total == 3 * (8 + 2) * 5
    length = math.ceil(total / cycles)
    for k in range(1, total + 1):
        share = (k - 1) % length / length
        assert method.learning_rate_at(k - 1, batches) == pytest.approx(0.4 / 2 * (math.cos(math.pi * share) + 1))
        assert method.explores(k - 1, batches) == (share < 0.6)


@pytest.mark.parametrize("kind", [SGLD, SGHMC])
def test_cycles_end_in_draws_and_explore_without_noise(kind):
    (x, y), weights, draws = data(), [], []
    method = kind(cycles=2, draws=4, burn_in=6, thin=2, exploration=0.5, learning_rate=0.01)

    def watch(event: Event) -> None:
        weights[-1].append(event.state.params["0.weight"].clone())
        if method.draw(event.state) is not None:
            draws[-1].append(event.step)

    for seed in (1, 2):
        weights.append([])
        draws.append([])
        model = Model(network(), Gaussian(scale=1.0))
        found = dubito.fit(model, method, (x, y), batch_size=40, seed=seed, callbacks=[watch])
        assert draws[-1] == [8, 10, 18, 20], "the last of every cycle is its end"
        assert len(found) == 4
        for i, step in enumerate(draws[-1]):
            assert torch.equal(found.params["0.weight"][i], weights[-1][step - 1][0])
        assert found.trace["step_size"].tolist() == pytest.approx(
            [method.learning_rate_at(step - 1, 1) / 40 for step in draws[-1]]
        )
    same = [torch.allclose(a, b, atol=1e-6) for a, b in zip(*weights, strict=True)]  # the order of the data differs
    assert same[:5] == [True] * 5, "the first half of a cycle of ten has no noise"
    assert not any(same[5:])


def test_draws_are_counted_in_epochs():
    method, (x, y), seen = SGLD(burn_in=2, draws=3, thin=2, chains=2), data(), []
    found = dubito.fit(
        Model(network(), Gaussian(scale=0.3)), method, (x, y), batch_size=10, callbacks=[lambda e: seen.append(e.epoch)]
    )
    assert len(seen) == (2 + 3 * 2) * 4
    assert (len(found), found.chains) == (6, 2)


def test_a_step_that_decays():
    method = SGLD(decay=1 / 3, burn_in=2, draws=30, learning_rate=0.1)
    rates = [method.learning_rate_at(step, 5) for step in range(method.steps(5))]
    assert rates[:10] == [0.1] * 10
    assert rates[79] == pytest.approx(0.1 / 2), "8 times the burn-in"
    assert rates == sorted(rates, reverse=True)


def test_with_a_decaying_step_the_variance_follows_its_recursion():
    r"""v_{t+1} = (1 - h_t lambda)^2 v_t + 2 h_t, averaged over the draws: nearer to 1 / lambda than at the first step."""
    levels = Levels(24)
    method = SGLD(learning_rate=0.3, decay=0.5, burn_in=10, draws=200, thin=2)
    found = dubito.fit(levels.model, method, levels.data, batch_size=24, start=levels.start())
    v, kept = 0.0, []
    for step in range(method.steps(1)):
        h = method.learning_rate_at(step, 1) / 24
        v = (1 - h * levels.precision) ** 2 * v + 2 * h
        if step + 1 > 10 and (step + 1 - 10) % 2 == 0:
            kept.append(v)
    measured = (found.params["level"] - levels.mean).square().mean()
    assert float(measured) == pytest.approx(sum(kept) / len(kept), rel=0.04)
    constant = 1 / (levels.precision * (1 - method.rate * levels.precision / 48))
    assert constant * levels.precision > 2 > 1.3 > float(measured) * levels.precision


@pytest.mark.parametrize("kind", [SGLD, SGHMC])
@pytest.mark.parametrize("norm", [False, True])
def test_chains_in_one_pass_go_where_chains_in_turn_go(kind, norm, monkeypatch):
    """Without noise, to rounding; chains start apart, and each has statistics of its own."""
    monkeypatch.setattr(kind, "explores", lambda *_: True)
    found = []
    for vectorize in (True, False):
        method = kind(chains=3, draws=4, burn_in=1, learning_rate=0.02, vectorize=vectorize, preconditioner="none")
        found.append(dubito.fit(Model(network(norm=norm), Gaussian(scale=0.5)), method, data(), batch_size=10))
    a, b = found
    assert a.params["0.weight"].shape == (12, 8, 3)
    for name, leaf in {**a.params, **a.own_buffers, **a.trace}.items():
        other = {**b.params, **b.own_buffers, **b.trace}[name]
        assert torch.allclose(leaf.double(), other.double(), rtol=1e-3, atol=1e-4), name
    assert set(a.own_buffers) == ({"1.running_mean", "1.running_var", "1.num_batches_tracked"} if norm else set())
    first, second = a.params["0.weight"][:4], a.params["0.weight"][4:8]
    assert (first - second).abs().max() > 0.1


def test_draws_keep_the_statistics_they_were_made_with():
    x, y = data()
    model = Model(network(norm=True), Gaussian(scale=0.5))
    found = dubito.fit(model, SGHMC(draws=3, burn_in=2, learning_rate=0.05), (x, y), batch_size=10)
    assert found.own_buffers["1.num_batches_tracked"].tolist() == [12, 16, 20]
    assert found.own_buffers["1.running_mean"].shape == (3, 8)
    p = found.predict(x)
    for i in range(3):
        own = {**{n: v[i] for n, v in found.own_buffers.items()}, **found.buffers}
        f, _ = model.forward({n: v[i] for n, v in found.params.items()}, x, own)
        assert torch.allclose(p.means[i], f, atol=1e-5)


def test_buffers_that_stand_still_are_kept_once():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()
            self.register_buffer("mask", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x * self.mask)

    found = dubito.fit(Model(Masked(), Gaussian(scale=0.5)), SGLD(draws=3, burn_in=1, chains=2), data())
    assert not found.own_buffers
    assert found.buffers["mask"].shape == (3,)


@pytest.mark.parametrize("vectorize", [True, False])
def test_buffers_that_a_network_puts_others_in_the_place_of_are_followed(vectorize):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.seen = self.seen + 1.0
            return self.inner(x)

    model = Model(Counting(), Gaussian(scale=0.5))
    found = dubito.fit(model, SGLD(draws=3, burn_in=1, chains=2, vectorize=vectorize), data(), batch_size=10)
    assert found.own_buffers["seen"].tolist() == [8, 12, 16] * 2


def test_frozen_parameters_are_shared_by_all_chains():
    for vectorize in (True, False):
        model = Model(network(norm=True), Gaussian(scale=0.5), only="2")
        found = dubito.fit(model, SGHMC(draws=2, burn_in=1, chains=2, vectorize=vectorize), data())
        assert set(found.params) == {"2.weight", "2.bias"}
        assert torch.equal(found.buffers["0.weight"], model.network[0].weight)
        assert found.predict(data()[0]).mean.shape == (40, 1)


def test_what_is_noted(monkeypatch):
    monkeypatch.setattr(SGLD, "explores", lambda *_: True)
    x, y = data()
    model = Model(network().double(), Gaussian(scale=0.5))
    method = SGLD(draws=3, burn_in=2, chains=2, learning_rate=1e-12)  # they stand still
    found = dubito.fit(model, method, (x.double(), y.double()), batch_size=10, temperature=0.5)
    target = Target(model, 40)
    assert set(found.trace) == {"log_likelihood", "log_prior", "step_size"}
    for i in (0, 5):
        params = {name: leaf[i] for name, leaf in found.params.items()}
        log_joint = target.log_joint(params, [(x.double(), y.double())])
        noted = {name: float(values[i]) for name, values in found.trace.items()}
        assert noted["log_prior"] == pytest.approx(float(target.log_prior(params)))
        assert noted["log_likelihood"] + noted["log_prior"] == pytest.approx(float(log_joint), rel=1e-5)
    assert found.trace["step_size"].tolist() == pytest.approx([1e-12 * 0.5 / 40] * 6)
    assert found.sampler["method"] == "SGLD"
    assert found.sampler["adjusted"] is False


def test_a_run_that_is_stopped_before_its_first_draw_says_so():
    model = Model(network(norm=True), Gaussian(scale=0.5))
    found = dubito.fit(model, SGLD(draws=3, burn_in=2, chains=2), data(), callbacks=[lambda e: e.step == 1])
    assert isinstance(found, Samples)
    assert found.sampler["burnt_in"] is False
    assert (len(found), found.chains) == (2, 2)
    assert found.predict(data()[0]).mean.shape == (40, 1)
    assert dubito.fit(model, SGLD(draws=3, burn_in=2), data()).sampler["burnt_in"] is True


@pytest.mark.parametrize("kind", [SGLD, SGHMC])
def test_large_networks_resume_bit_for_bit(kind, tmp_path):
    """Their noise comes from another generator, which the method's own seeds."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 30, generator=generator), torch.randn(40, 1, generator=generator)
    net = nn.Sequential(nn.Linear(30, 800), nn.Tanh(), nn.Linear(800, 1))
    method = kind(draws=3, burn_in=1, chains=2, learning_rate=1e-3, preconditioner="rmsprop")

    def run(**options) -> Samples:
        return dubito.fit(Model(net, Gaussian(scale=0.5)), method, (x, y), batch_size=20, seed=3, **options)

    whole = run()
    run(checkpoint=tmp_path, callbacks=[lambda event: event.step == 5])
    torch.manual_seed(99)
    resumed = run(checkpoint=tmp_path, resume=True)
    for name, leaf in {**whole.params, **whole.trace}.items():
        assert torch.equal(leaf, {**resumed.params, **resumed.trace}[name]), name


def test_chains_start_where_they_are_told_to():
    model = Model(network(), Gaussian(scale=0.5))
    ensemble = dubito.fit(model, Ensemble(dubito.MAP(epochs=2), 3), data())
    found = dubito.fit(model, SGHMC(draws=1, burn_in=0, chains=3, learning_rate=1e-12), data(), start=ensemble)
    assert torch.allclose(found.params["0.weight"], ensemble.params["0.weight"], atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"preconditioner": "rmsprop"}, {"decay": 0.3}], ids=str)
@pytest.mark.parametrize("kind", [SGLD, SGHMC])
def test_a_run_can_grow_to_what_a_longer_one_would_have_been(kind, options, tmp_path):
    model, method = Model(network(norm=True), Gaussian()), kind(burn_in=2, draws=4, thin=2, chains=2, **options)
    whole = dubito.fit(model, method, data(), batch_size=16, checkpoint=tmp_path / "whole")
    for draws in (1, 4):
        grown = dubito.fit(model, replace(method, draws=draws), data(), batch_size=16, checkpoint=tmp_path / "grown", resume=True)
    for name, leaf in {**whole.params, **whole.own_buffers, **whole.trace}.items():
        assert torch.equal(leaf, {**grown.params, **grown.own_buffers, **grown.trace}[name]), name
    cyclical = kind(burn_in=2, draws=2, cycles=2)
    dubito.fit(model, cyclical, data(), checkpoint=tmp_path / "cycles")
    with pytest.raises(ValueError, match="belongs to another run; different: method"):
        dubito.fit(model, replace(cyclical, draws=4), data(), checkpoint=tmp_path / "cycles", resume=True)


@pytest.mark.parametrize(("kind", "rate"), [(SGLD, 0.02), (SGHMC, 0.002)])
def test_what_is_left_over_at_the_end_of_a_pass_counts_for_what_it_is(kind, rate):
    """Of 65 examples in batches of 64, the last one alone must not stand for all: their variance would be more than twice too large."""
    levels, method = Levels(65), kind(learning_rate=rate, burn_in=150, draws=300)
    loader = DataLoader(TensorDataset(*levels.data), batch_size=64, shuffle=True)
    found = dubito.fit(levels.model, method, loader, start=levels.start())
    ratio = (found.params["level"] - levels.mean).square().mean() * levels.precision
    assert float(ratio) == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("kind", [SGLD, SGHMC])
def test_chains_start_where_the_prior_has_a_density(kind):
    model = Model(network(), Gaussian(scale=0.5), LogUniform(bounds=(1e-3, 3.0)))
    with torch.no_grad():
        model.network[0].weight[0, 0] = 5.0
    found = dubito.fit(model, kind(learning_rate=1e-9, burn_in=0, draws=1, chains=2), data())
    assert found.trace["log_prior"].isfinite().all()
    assert torch.allclose(found.params["2.weight"][0], model.network[2].weight, atol=1e-4), "the others stay"


@pytest.mark.parametrize("vectorize", [True, False])
def test_chains_start_with_the_statistics_of_the_members_they_start_at(vectorize):
    model, mean = Model(network(norm=True), Gaussian(scale=0.5)), "1.running_mean"
    ensemble = dubito.fit(model, Ensemble(dubito.MAP(epochs=2), 3), data())
    still = SGHMC(draws=1, burn_in=0, chains=3, learning_rate=1e-12, vectorize=vectorize)
    found = dubito.fit(model, still, data(), start=ensemble, batch_size=40)
    expected, x = [], data()[0]
    for i, before in enumerate(ensemble.own_buffers[mean]):
        after = x @ ensemble.params["0.weight"][i].mT + ensemble.params["0.bias"][i]
        expected.append(0.9 * before + 0.1 * after.mean(0))  # one step follows
    assert torch.allclose(found.own_buffers[mean], torch.stack(expected), atol=1e-5)


def test_an_ensemble_of_samplers():
    found = dubito.fit(Model(network(), Gaussian(scale=0.5)), Ensemble(SGHMC(draws=2, burn_in=1, chains=2), 2), data())
    assert [len(member) for member in found.members] == [4, 4]


def test_networks_that_cannot_run_in_one_pass_run_in_turn():
    class Asking(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, x: Tensor) -> Tensor:
            f = self.inner(x)
            return f if float(f.detach().sum()) > 0 else f + 0

    model = Model(Asking(), Gaussian(scale=0.5))
    assert len(dubito.fit(model, SGLD(draws=2, burn_in=1, chains=2), data())) == 4
    with pytest.raises(RuntimeError, match="use vectorize=False"):
        dubito.fit(model, SGLD(draws=2, burn_in=1, chains=2, vectorize=True), data())


def test_a_step_that_is_too_large_is_an_error_in_words():
    with pytest.raises(FloatingPointError, match="lower learning_rate"):
        dubito.fit(Model(network(), Gaussian(scale=0.01)), SGLD(learning_rate=10.0), data())


def test_weights_in_half_precision_are_refused():
    x, y = data()
    with pytest.raises(ValueError, match="keep the network in float32"):
        dubito.fit(Model(network().bfloat16(), Gaussian(scale=0.5)), SGLD(), (x.bfloat16(), y.bfloat16()))
    dubito.fit(Model(network(), Gaussian(scale=0.5)), SGLD(draws=1, burn_in=1), (x, y), precision="bfloat16")


@pytest.mark.parametrize("keep", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("metric", [False, True])
@pytest.mark.parametrize("sizes", [(3, 4), (100_000, 7)])
def test_moves_are_what_they_say(keep, metric, sizes):
    """Whichever way they are computed: v <- keep v + by, w <- w + drift root v, and noise in the place of `by`."""
    shapes = [sizes, (5,)]

    def fresh() -> Move:
        generator = torch.Generator().manual_seed(0)
        weights, slopes, velocity, root = ([torch.randn(shape, generator=generator) for shape in shapes] for _ in range(4))
        return Move(weights, slopes, velocity, root if metric else [], torch.Generator().manual_seed(1))

    def moved(before: Move, velocity: list[Tensor]) -> list[Tensor]:
        roots = before.root or [torch.ones(shape) for shape in shapes]
        return [w + 0.3 * r * v for w, r, v in zip(before.weights, roots, velocity, strict=True)]

    before, pushed, shaken, still = fresh(), fresh(), fresh(), fresh()._replace(generator=None)
    pushed.push(pushed.velocity, pushed.slopes, keep=keep, drift=0.3)
    expected = [keep * v + s for v, s in zip(before.velocity, before.slopes, strict=True)]
    still.shake(still.velocity, 2.0, keep=keep, drift=0.3)
    shaken.shake(shaken.velocity, 2.0, keep=keep, drift=0.3)
    noise = [(v - keep * u) / 2 for v, u in zip(shaken.velocity, before.velocity, strict=True)]
    for move, velocity in (
        (pushed, expected),
        (still, [keep * v for v in before.velocity]),
        (shaken, shaken.velocity),
    ):
        for found, exact in zip([*move.velocity, *move.weights], [*velocity, *moved(before, velocity)], strict=True):
            assert torch.allclose(found, exact, atol=1e-5)
    if sizes[0] > 3:
        assert float(noise[0].std()) == pytest.approx(1.0, abs=0.01)
        assert abs(float((noise[0] * before.velocity[0]).mean())) < 0.01
    assert all((n != 0).all() for n in noise)


BAD = [
    ({"draws": 0}, "at least 1"),
    ({"chains": 0}, "at least 1"),
    ({"burn_in": -1}, "at least 0"),
    ({"learning_rate": 0.0}, "learning_rate must be positive"),
    ({"exploration": 1.0}, "exploration must be at least 0 and below 1"),
    ({"preconditioner": "adam"}, "'none', 'rmsprop'"),
    ({"cycles": 4, "draws": 30}, "multiple of cycles"),
    ({"cycles": 3, "burn_in": 5}, "longer burn_in"),
    ({"decay": 0.3, "cycles": 3}, "not in cycles"),
    ({"decay": 0.3, "burn_in": 0}, "burn_in > 0"),
    ({"preconditioner": "rmsprop", "burn_in": 0}, "learned during the burn-in"),
]


@pytest.mark.parametrize(("options", "words"), BAD)
def test_bad_options_are_refused_in_words(options, words):
    for kind in (SGLD, SGHMC):
        with pytest.raises(ValueError, match=words):
            kind(**options)


@pytest.mark.slow
def test_on_digits_draws_are_better_than_the_mode():
    split = digits()
    found = {}
    methods = {
        "map": dubito.MAP(epochs=60, learning_rate=3e-3),
        "sghmc": SGHMC(),
        "cyclical sghmc": SGHMC(cycles=5, learning_rate=0.1),
        "preconditioned sghmc": SGHMC(preconditioner="rmsprop"),
        "preconditioned sgld": SGLD(preconditioner="rmsprop"),
    }
    for name, method in methods.items():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
        posterior = dubito.fit(
            Model(net, Categorical(), Normal(scale=1.0)), method, (split.x_train, split.y_train), batch_size=64
        )
        p = posterior.predict(split.x_test)
        found[name] = float(dubito.metrics.nll(p, split.y_test))
        assert float((p.mean.argmax(-1) == split.y_test).float().mean()) > 0.95, name
    assert all(nll < found["map"] + 0.005 for nll in found.values()), found
    assert sum(nll < found["map"] for nll in found.values()) >= 3, found


@pytest.mark.parametrize("scale", [None, 0.1])
@pytest.mark.parametrize("kind", [SGLD, SGHMC])
def test_the_default_rate_does_not_run_away_where_the_noise_is_small(kind, scale):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(60, 1, generator=generator) * 4 - 2
    y = torch.sin(2 * x) + 0.1 * torch.randn(60, 1, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(1, 50), nn.ReLU(), nn.Linear(50, 1))
    p = dubito.fit(Model(net, Gaussian(scale=scale), Normal()), kind(), (x, y), batch_size=32).predict(x)
    assert (p.mean - y).square().mean().sqrt() < 0.3, "the noise is 0.1; it was 60, or the walk left the numbers"


@pytest.mark.parametrize("kind", [SGLD, SGHMC])
def test_a_metric_that_follows_a_learned_noise_leaves_the_law_as_it_is(kind, monkeypatch):
    """Few data, so that the noise, and the steps with it, vary by a factor of four."""
    monkeypatch.setitem(kind.rates, "none", 0.03)
    y = torch.tensor([0.4, 0.55, 0.45, 0.6, 0.3], dtype=torch.float64).unsqueeze(1)
    model = Model(nn.Linear(1, 1, bias=False).double(), Gaussian(prior=torch.distributions.Gamma(1.0, 0.01)))
    method = kind(chains=2000, burn_in=250, draws=1)
    found = dubito.fit(model, method, (torch.ones_like(y), y), start={"weight": y.mean().reshape(1, 1)})
    level = torch.linspace(-2, 3, 1001, dtype=torch.float64).unsqueeze(1)
    log_noise = torch.linspace(-5, 3, 1001, dtype=torch.float64)
    squares = (y.squeeze(1).view(-1, 1, 1) - level).square().sum(0)
    density = -(5 + 2) * log_noise - (0.5 * squares + 0.01) * (-2 * log_noise).exp() - 0.5 * level.square()
    density = density.flatten().softmax(0).view_as(density)

    def moments(value: Tensor) -> tuple[Tensor, Tensor]:
        mean = (density * value).sum()
        return mean, (density * (value - mean).square()).sum().sqrt()

    for draws, value in ((found.params["weight"], level), (found.params["likelihood:log_scale"], log_noise)):
        mean, spread = moments(value)
        assert float((draws.mean() - mean) / spread) == pytest.approx(0.0, abs=0.08)
        assert float(draws.std() / spread) == pytest.approx(1.0, abs=0.08)


def test_a_rate_that_is_given_is_the_rate():
    levels, seen = Levels(24), []
    for method in (SGLD(learning_rate=0.1), SGLD()):
        found = dubito.fit(levels.model, replace(method, burn_in=1, draws=1), levels.data, batch_size=24)
        seen.append(float(found.trace["step_size"]) * 24)
    assert seen == pytest.approx([0.1, 0.1 * 0.5**2]), "the default is measured by the noise, 0.5"
