from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import dubito
from dubito import Variational
from dubito.families import Binary, Factorized, Grouped, LowRank, MeanField
from dubito.inference.method import Start
from dubito.model import Target
from dubito.posteriors import Drawn, Gaussian
from dubito.posteriors.families.reparametrized import drawable_layers
from dubito.priors import Bernoulli, ByName, Hierarchical, InverseGamma, Laplace, LogUniform, Normal
from dubito.tensors import tree


def regression(n=60, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    mix = torch.tensor([[1.0, 0.6], [0.0, 1.0]], dtype=dtype)
    x = torch.randn(n, 2, generator=generator, dtype=dtype) @ mix
    y = x @ torch.tensor([[1.0], [-2.0]], dtype=dtype) + 0.5 * torch.randn(n, 1, generator=generator, dtype=dtype)
    return x, y


def linear(prior=None):
    torch.manual_seed(0)
    return dubito.Model(nn.Linear(2, 1).double(), dubito.Gaussian(scale=0.5), prior or Normal(scale=0.8))


def exact(x, y, temperature=1.0):
    """Mean, precision and log evidence of the posterior of (weights, bias)."""
    a = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    precision = (a.T @ a / 0.25 + torch.eye(3, dtype=x.dtype) / 0.64) / temperature
    mean = torch.linalg.solve(precision * temperature, a.T @ y / 0.25).flatten()
    gram = a @ a.T * 0.64 + 0.25 * torch.eye(len(x), dtype=x.dtype)
    evidence = torch.distributions.MultivariateNormal(torch.zeros(len(x), dtype=x.dtype), gram).log_prob(y.flatten())
    return mean, precision, float(evidence)


def flat(params):
    return torch.cat([params["weight"].flatten(), params["bias"].flatten()])


FITTED = {"epochs": 400, "learning_rate": 0.03, "init_scale": 0.05, "samples": 2}


@pytest.mark.parametrize(("estimator", "temperature", "batch"), [("weights", 1.0, 60), ("auto", 0.25, 20), ("flipout", 2.0, 30)])
def test_the_known_optimum_of_mean_field_is_where_its_gradient_is_zero(estimator, temperature, batch):
    """The mean of the posterior, and variances 1 / diag of its precision: whatever the batch, the temperature and the estimator."""
    x, y = regression()
    mean, precision, _ = exact(x, y, temperature)
    scale = precision.diagonal().rsqrt()
    method = Variational(estimator=estimator, optimizer="sgd", momentum=0.0, schedule="constant", learning_rate=1.0)
    target, generator = Target(linear(), 60, temperature), torch.Generator().manual_seed(0)
    start = {"weight": mean[None, :2], "bias": mean[2:]}

    def slopes(scale):
        state = method.init(target, Start(start, {}), (x, y), generator, steps=1)
        leaves = method.q.leaves(start, {"weight": scale[None, :2], "bias": scale[2:]})
        rows = []
        for _ in range(150):
            for part in zip(x.split(batch), y.split(batch), strict=True):
                for name, leaf in leaves.items():
                    state.params[name].copy_(leaf)
                method.step(target, state, [part], generator)
                rows.append(tree.flatten(leaves) - tree.flatten(state.params))
        passes = torch.stack(rows).view(150, -1, 6).mean(1)  # the batches of a pass over the data
        return passes.mean(0), passes.std(0) / math.sqrt(150)

    found, error = slopes(scale)
    assert (found.abs() < 4.5 * error + 1e-9).all()
    found, error = slopes(2 * scale)
    assert (found[3:] > 3 * error[3:]).all(), "and not where the scales are too large"


def test_mean_field_arrives_there():
    x, y = regression()
    mean, precision, _ = exact(x, y)
    posterior = dubito.fit(linear(), Variational(**FITTED), (x, y), batch_size=60)
    assert isinstance(posterior, Gaussian)
    variance = flat(posterior.covariance.variance())
    assert ((flat(posterior.params) - mean).abs() < 0.4 * variance.sqrt()).all()
    torch.testing.assert_close(variance, 1 / precision.diagonal(), rtol=0.3, atol=0)


def test_the_full_family_is_exact_and_its_bound_the_evidence():
    x, y = regression()
    mean, precision, evidence = exact(x, y)
    posterior = dubito.fit(
        linear(), Variational("full", **{**FITTED, "epochs": 500, "learning_rate": 0.05}), (x, y), batch_size=60
    )
    torch.testing.assert_close(posterior.covariance.dense(), torch.linalg.inv(precision), rtol=0.2, atol=3e-4)
    bound = dubito.elbo(posterior, (x, y), draws=400)
    assert abs(bound.nats - evidence) < 0.15
    # and at the posterior itself, exactly
    shapes = {"weight": [1, 2], "bias": [1]}
    dense = dubito.tensors.covariances.Dense(
        shapes, precision[None], {n: torch.zeros(()).double() for n in shapes}, torch.ones(1).double()
    )
    model = linear()
    best = Gaussian(model, {"weight": mean[None, :2], "bias": mean[2:]}, {}, dense)
    known = dubito.elbo(best, (x, y), draws=2000)
    assert abs(known.nats - evidence) < 4 * known.error_of * math.log(2)
    assert bound.nats < evidence + 0.1
    assert "bits" in str(known)


@pytest.mark.parametrize("family", [LowRank(rank=2), "matrix_normal", "flow", Factorized("normal")], ids=str)
def test_other_families_find_the_mean(family):
    x, y = regression()
    mean, precision, _ = exact(x, y)
    posterior = dubito.fit(linear(), Variational(family, **FITTED), (x, y), batch_size=60)
    rows = posterior.sample(400, torch.Generator().manual_seed(0))
    rows = torch.cat([rows["weight"].flatten(1), rows["bias"]], 1)
    scale = torch.linalg.inv(precision).diagonal().sqrt()
    assert ((rows.mean(0) - mean).abs() < 0.4 * scale).all()
    assert (rows.std(0) < 1.6 * scale).all()
    assert (rows.std(0) > 0.6 * (1 / precision.diagonal()).sqrt()).all()


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Tanh(), nn.Linear(6, 2))


def gradients(estimator, n, *, prior=None, path_only=False):
    """Gradients of the loss by many steps from the same place, [n, leaves]."""
    model = dubito.Model(network().double(), dubito.Gaussian(scale=1.0), prior or Normal(scale=1.0))
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 2, 3, generator=generator).double(), torch.randn(8, 2, generator=generator).double()
    method = Variational(
        estimator=estimator, init_scale=0.3, path_only=path_only, optimizer="sgd", momentum=0.0, schedule="constant"
    )
    method = replace(method, learning_rate=1.0)
    target = Target(model, 8)
    rows = []
    for _ in range(n):
        state = method.init(target, Start(model.parameters(), {}), (x, y), generator, steps=1)
        before = tree.flatten(state.params)
        state, _ = method.step(target, state, [(x, y)], generator)
        rows.append(before - tree.flatten(state.params))
    return torch.stack(rows)


def test_estimators_agree_and_their_variances_are_ordered():
    """Flipout has the same expectation as drawing weights; the local one too where a weight is used once an example; variances fall."""
    found = {name: gradients(name, 250) for name in ("weights", "flipout", "local", "auto")}
    reference = found["weights"]
    # leaves in order: means of the convolution (12 + 3), of the linear layer (12 + 2), then the same of rho
    last = torch.cat([torch.arange(15, 29), torch.arange(44, 58)])
    for name in ("flipout", "auto"):
        error = (reference.var(0) / 250 + found[name].var(0) / 250).sqrt()
        assert ((found[name].mean(0) - reference.mean(0)).abs() < 5 * error).all(), name
    totals = {name: float(rows[:, last].var(0).sum()) for name, rows in found.items()}
    assert totals["auto"] < totals["flipout"] < totals["weights"]


def test_without_the_score_of_q_the_gradient_has_the_same_mean():
    found = [gradients("weights", 200, path_only=path_only) for path_only in (False, True)]
    error = (found[0].var(0) / 200 + found[1].var(0) / 200).sqrt()
    assert ((found[0].mean(0) - found[1].mean(0)).abs() < 5 * error).all()


@pytest.mark.parametrize("family", ["mean_field", "full", "low_rank"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_at_the_posterior_it_is_zero_for_every_draw(family, temperature):
    """Sticking the landing: likelihood, prior and q are scored at the same weights, where they cancel."""
    model = dubito.Model(nn.Linear(1, 1, bias=False).double(), dubito.Gaussian(scale=1.0), Normal(scale=1.0))
    x, y = torch.ones(3, 1).double(), torch.ones(3, 1).double()
    target, generator = Target(model, 3, temperature), torch.Generator().manual_seed(0)
    start = Start({"weight": torch.full((1, 1), 0.75).double()}, {})  # the precision is 4 / T, the mean 3 / 4
    scale, sizes = math.sqrt(temperature / 4), []
    for path_only in (True, False):
        method = Variational(
            family, path_only=path_only, estimator="weights", optimizer="sgd", momentum=0.0, learning_rate=1.0, init_scale=scale
        )
        state = method.init(target, start, (x, y), generator, steps=9)
        if family == "low_rank":
            state.params["columns/weight"].zero_()
        before = tree.flatten(state.params).clone()
        method.step(target, state, [(x, y)], generator)
        sizes.append(float((tree.flatten(state.params) - before).abs().max()))
    assert sizes[0] < 1e-12 < 1e-3 < sizes[1]


def test_a_closed_form_is_the_mean_of_draws():
    class Hidden(Laplace):
        def expected_log_prob(self, mean, variance, *, independent=False):
            return None

    found = [gradients("weights", 200, prior=kind(0.5)) for kind in (Laplace, Hidden)]
    error = (found[0].var(0) / 200 + found[1].var(0) / 200).sqrt()
    assert ((found[0].mean(0) - found[1].mean(0)).abs() < 5 * error).all()


def test_the_divergence_does_not_depend_on_how_weights_are_cut():
    """Blundell's weights of the batches of an epoch add up to one, and the closed form is that of the general way."""
    method = Variational(kl_batches="blundell")
    model = linear()
    state = method.init(Target(model, 60), Start(model.parameters(), {}), regression(), torch.Generator(), steps=500)
    state.period = 5
    weights = []
    for state.step in range(5):
        weights.append(method._weight(state))
    assert math.isclose(sum(weights), 5)
    assert weights[0] == 2 * weights[1]
    generator, plain = torch.Generator().manual_seed(0), Variational()
    for temperature in (1.0, 0.5):
        target = Target(model, 60, temperature)
        live = {n: leaf.detach().requires_grad_() for n, leaf in plain.q.constrain(state.params).items()}
        value = plain._closed(target, live, 1.0, report=True)
        slopes = [leaf.grad for leaf in live.values()]
        general = plain._divergence(target, live, generator)
        torch.testing.assert_close(value, general.detach())
        for a, b in zip(slopes, torch.autograd.grad(general, list(live.values())), strict=True):
            torch.testing.assert_close(a, b)


def test_layers_that_can_be_drawn_by_their_outputs():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.tied, self.scaled = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
            self.norm, self.free = nn.LayerNorm(2), nn.Parameter(torch.ones(2, 2))

        def forward(self, x):
            x = self.tied(self.tied(self.a(x)))
            return nn.functional.linear(self.norm(x) @ self.free, 2 * self.scaled.weight, self.scaled.bias)

    model = dubito.Model(Net(), dubito.Gaussian(scale=1.0))
    found = drawable_layers(model, model.parameters(), torch.zeros(3, 2), {})
    assert found == {"a.weight": "a.bias"}, (
        "tied weights, weights that are changed first, and other parameters are drawn themselves"
    )
    data = torch.randn(16, 2), torch.randn(16, 2)
    posterior = dubito.fit(model, Variational(epochs=2), data)
    assert all((leaf > 0).all() for leaf in posterior.covariance.variance().values())


class Positions(nn.Module):
    """The mean over positions of a linear layer that sees them in a layout of its own."""

    def __init__(self, layout):
        super().__init__()
        self.layer, self.layout = nn.Linear(3, 1), layout

    def forward(self, x):  # [B, T, 3]
        if self.layout == "first":
            return self.layer(x.transpose(0, 1)).mean(0)
        if self.layout == "folded":
            return self.layer(x.flatten(0, 1)).view(*x.shape[:2], 1).mean(1)
        return self.layer(x).mean(1)


@pytest.mark.parametrize(("layout", "drawn"), [("first", False), ("folded", False), ("second", True)])
def test_all_positions_of_an_example_see_the_same_weights(layout, drawn):
    model = dubito.Model(Positions(layout), dubito.Gaussian(scale=1.0))
    x, q, generator = torch.ones(8, 8, 3), MeanField(), torch.Generator().manual_seed(0)
    found = drawable_layers(model, model.parameters(), x, {})
    assert found == ({"layer.weight": "layer.bias"} if drawn else {})
    if drawn:
        leaves = q.constrain(
            q.leaves(model.parameters(), tree.apply(lambda leaf: torch.full_like(leaf, 0.5), model.parameters()))
        )
        rows = []
        for _ in range(100):
            means, drawing = q.outputs(leaves, found, "auto", generator)
            with drawing:
                rows.append(model.call(means, x, {})[0])
        assert abs(float(torch.stack(rows).std()) - 1) < 0.15, "four weights that each add 1/4 of a variance"


@pytest.mark.parametrize("family", ["full", Factorized("normal")])
def test_scales_that_are_points_are_taken_as_given(family):
    """The bound is that of the same Gaussian prior, in which nothing was learned; that of log p(D, scale) would be none of log p(D)."""
    scale = {"prior:log_scale": torch.full((1,), math.log(0.8)).double()}
    learned, given = Hierarchical(InverseGamma(50.0, 32.0), groups="all"), Normal(scale=0.8)
    found = []
    for prior in (learned, given):
        model = linear(prior)
        start = {**model.parameters(), **(scale if prior is learned else {})}
        posterior = dubito.fit(model, Variational(family, epochs=0), regression(), start=start)
        found.append(dubito.elbo(posterior, regression(), draws=3).nats)
    assert math.isclose(*found, rel_tol=1e-6)


@pytest.mark.parametrize("likelihood", [dubito.Gaussian(scale=0.5), dubito.Gaussian()])
def test_the_bound_of_laplace_is_its_evidence(likelihood):
    """On a linear model, at the prior and the noise that the evidence has set."""
    x, y = regression()
    model = dubito.Model(nn.Linear(2, 1).double(), likelihood, Normal())
    trained = dubito.fit(model, dubito.MAP(epochs=300, learning_rate=0.05), (x, y), batch_size=60)
    posterior = dubito.fit(model, dubito.Laplace("dense"), (x, y), start=trained)
    assert abs(float(posterior.prior_precision["weight"]) - 1) > 0.2
    own = posterior.with_prior({"weight": torch.tensor([[0.3, 2.0]]).double(), "bias": 1.0})
    for one in (posterior, own):
        found = dubito.elbo(one, (x, y), draws=300)
        assert abs(found.nats - float(one.log_evidence())) < 4 * found.error_of * math.log(2)


def test_an_improper_prior_gives_no_bound():
    for prior, family in ((LogUniform(), "mean_field"), (Normal(scale=1.0), Grouped())):
        posterior = dubito.fit(linear(prior), Variational(family, epochs=1), regression())
        found = dubito.elbo(posterior, regression(), draws=2)
        assert not found.bounds
        assert "no bound" in str(found)
    assert "log p(D) >=" in str(dubito.elbo(dubito.fit(linear(), Variational(epochs=1), regression()), regression(), draws=2))


def test_the_prior_is_learned():
    x, y = regression()
    posterior = dubito.fit(linear(Normal()), Variational(learn_prior=True, **FITTED), (x, y), batch_size=60)
    mean, variance = posterior.params["weight"], posterior.covariance.variance()["weight"]
    expected = float((mean.square() + variance).mean().sqrt())
    assert math.isclose(posterior.model.prior.scale_of("weight"), expected, rel_tol=1e-9)
    assert 1.0 < expected < 2.2
    with pytest.raises(ValueError, match="Normal()"):
        dubito.fit(linear(), Variational(learn_prior=True, epochs=1), (x, y))


def test_a_noise_is_learned_as_a_point():
    x, y = regression(400)
    model = dubito.Model(nn.Linear(2, 1).double(), dubito.Gaussian(), Normal(scale=1.0))
    posterior = dubito.fit(model, Variational(**{**FITTED, "epochs": 150}), (x, y), batch_size=100)
    assert abs(float(posterior.params["likelihood:log_scale"].exp()) - 0.5) < 0.06


def test_a_collapse_is_told_in_words():
    model = linear()
    params = {"weight": torch.ones(1, 2).double(), "bias": torch.zeros(1).double()}
    scale = {"weight": torch.full((1, 2), 1e-10).double(), "bias": torch.full((1,), 0.64).double()}
    q = Gaussian.diagonal(model, params, scale)
    notes = dubito.elbo(q, regression(), draws=2).notes
    assert len(notes) == 2
    assert "bias has stayed at the prior" in notes[0]
    assert "weight is nearly a point" in notes[1]


def test_sparse_factors_switch_off_inputs_that_say_nothing():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 6, generator=generator)
    y = x[:, :2].sum(1, keepdim=True) + 0.1 * torch.randn(300, 1, generator=generator)
    for prior in ("normal_jeffreys", "horseshoe"):
        torch.manual_seed(0)
        model = dubito.Model(nn.Linear(6, 1), dubito.Gaussian(scale=0.1))
        method = Variational(Grouped(prior), epochs=150, learning_rate=0.02 if prior == "normal_jeffreys" else 0.1)
        posterior = dubito.fit(model, method, (x, y), batch_size=100)
        assert isinstance(posterior, Drawn)
        scores = posterior.units()["weight"]
        assert scores[:2].max() < scores[2:].min() - 1
        mean, variance = posterior.moments()
        assert (mean["weight"][0, :2] - 1).abs().max() < 0.1
        assert variance["weight"].shape == (1, 6)


def test_a_limit_of_scales_can_be_left_again():
    """Data that say nothing of a weight leave its scale there, those that say much take it back."""
    model = dubito.Model(nn.Linear(1, 1), dubito.Gaussian(scale=0.05))
    method = Variational(Grouped(limit=0.2), epochs=60, learning_rate=0.05, init_scale=0.3, schedule="constant")
    x = torch.linspace(-1, 1, 200).unsqueeze(1)
    scales = []
    for data in ((torch.zeros(1, 1), torch.zeros(1, 1)), (x, x)):
        target, generator = Target(model, len(data[0])), torch.Generator().manual_seed(0)
        state = method.init(target, Start(model.parameters(), {}), data, generator, steps=60)
        for _ in range(60):
            method.step(target, state, [data], generator)
        scales.append(float(method.q.scales(state.params)["weight"]))
    assert math.isclose(scales[0], 0.2, rel_tol=1e-5)
    assert scales[1] < 0.1


def test_limits_of_scales_by_name():
    start = dict(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).named_parameters())
    start = {name: leaf.detach() for name, leaf in start.items()}
    wide = {name: torch.full_like(leaf, 0.5) for name, leaf in start.items()}
    q = Grouped(limit={r"^0\.weight$": 0.2})
    scales = q.scales(q.leaves(start, wide))
    assert torch.allclose(scales["0.weight"], torch.tensor(0.2))
    assert all(torch.allclose(scales[name], torch.tensor(0.5)) for name in ("0.bias", "1.weight", "1.bias"))
    with pytest.raises(ValueError, match="matches no weight"):
        Grouped(limit={"conv": 0.2}).leaves(start, wide)
    with pytest.raises(ValueError, match="positive"):
        Grouped(limit={"": 0.0})


def test_mean_field_is_too_certain_between_clusters():
    """Its standard deviation in the gap, relative to that at the data, is smaller than that of HMC (Foong et al. 2020)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.linspace(-1.2, -0.7, 20), torch.linspace(0.7, 1.2, 20)])[:, None]
    y = torch.cat([torch.full((20, 1), -0.5), torch.full((20, 1), 0.5)]) + 0.05 * torch.randn(40, 1, generator=generator)
    torch.manual_seed(0)
    model = dubito.Model(
        nn.Sequential(nn.Linear(1, 20), nn.ReLU(), nn.Linear(20, 1)), dubito.Gaussian(scale=0.1), Normal(scale=1.0)
    )
    at = torch.tensor([[0.0], [0.95]])
    ratios = {}
    for name, method in {
        "vi": Variational(epochs=800, learning_rate=0.02),
        "hmc": dubito.HMC(chains=4, draws=40, burn_in=40, path_length=1.0),
    }.items():
        spread = dubito.fit(model, method, (x, y)).predict(at).f_var.sqrt().flatten()
        ratios[name] = float(spread[0] / spread[1])
    assert ratios["vi"] < 0.75 * ratios["hmc"], ratios


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"family": "round"}, "family must be one of"),
        ({"estimator": "best"}, "estimator must be"),
        ({"family": "full", "estimator": "local"}, "independent"),
        ({"samples": 0}, "at least 1"),
        ({"kl_warmup": 1.0}, "kl_warmup must be"),
        ({"family": "flow", "path_only": True}, "density of q"),
        ({"estimator": "local", "path_only": True}, "draws of the weights"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Variational(**options)


def test_half_precision_is_refused():
    model = dubito.Model(nn.Linear(2, 1).bfloat16(), dubito.Gaussian(scale=0.5))
    with pytest.raises(ValueError, match="float32"):
        dubito.fit(model, Variational(epochs=1), (torch.randn(8, 2).bfloat16(), torch.randn(8, 1).bfloat16()))


def test_dropout_does_not_concentrate_and_the_others_do():
    """With sixteen times the data the variance of the function falls to a sixteenth, but under MC dropout it stays."""
    found = {}
    for n in (40, 640):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(n, 2, generator=generator)
        y = x @ torch.tensor([[1.0], [-1.0]]) + 0.3 * torch.randn(n, 1, generator=generator)
        at = torch.ones(1, 2)
        torch.manual_seed(0)
        model = dubito.Model(nn.Linear(2, 1), dubito.Gaussian(scale=0.3), Normal(scale=1.0))
        options = {"epochs": 24_000 // n, "learning_rate": 0.03}
        for name, method in {
            "vi": Variational(**options),
            "dropout": dubito.MCDropout(at="", rate=0.1, draws=200, **options),
        }.items():
            found[name, n] = float(dubito.fit(model, method, (x, y), batch_size=80).predict(at).f_var)
    assert 10 < found["vi", 40] / found["vi", 640] < 26
    assert 0.6 < found["dropout", 40] / found["dropout", 640] < 1.7


def test_binary_weights_are_learned():
    """Signs of a linear map, beside a bias that is not binary."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.tensor([[1.0, -1.0, -1.0, 1.0, 1.0]])
    x = torch.randn(200, 5, generator=generator)
    y = x @ signs.T + 0.5 + 0.3 * torch.randn(200, 1, generator=generator)
    torch.manual_seed(0)
    prior = ByName({"weight": Bernoulli(0.5, values=(-1.0, 1.0)), "": Normal(scale=1.0)})
    model = dubito.Model(nn.Linear(5, 1), dubito.Gaussian(scale=0.3), prior)
    posterior = dubito.fit(
        model, Variational(Binary((-1.0, 1.0), at="weight"), epochs=150, learning_rate=0.1), (x, y), batch_size=100
    )
    drawn = posterior.sample(20)
    assert (drawn["weight"].sign() == signs).double().mean() > 0.95
    assert drawn["weight"].abs().mean().item() == pytest.approx(1.0, abs=0.1)  # the scale is learned
    assert abs(float(drawn["bias"].mean()) - 0.5) < 0.1
    with pytest.raises(ValueError, match="no density"):
        dubito.fit(model, dubito.MAP(epochs=1), (x, y))


def test_binary_weights_of_a_perceptron_leave_chance():
    """Sums over 64 inputs of size one were too large for the next layer; with a scale for each tensor it trains."""
    x, y = dubito.data.digits()[:2]
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = dubito.Model(network, dubito.Categorical(), Bernoulli(0.5, values=(-1.0, 1.0)))
    method = Variational(Binary((-1.0, 1.0)), epochs=40, learning_rate=0.02, kl_warmup=0.9)
    posterior = dubito.fit(model, method, (2 * x[:1000] - 1, y[:1000]), progress=False)
    assert (posterior.predict(2 * x[:1000] - 1).mean.argmax(1) == y[:1000]).double().mean() > 0.3


def test_the_prior_of_the_noise_counts_once():
    """Beside the mean log likelihood of n examples it has the weight 1 / n: seen in one step down the gradient, with it and without."""
    prior, name, scales = torch.distributions.LogNormal(torch.tensor([-3.0]), torch.tensor([0.5])), "likelihood:log_scale", []
    x, y = torch.ones(5, 1).double(), torch.ones(5, 1).double()
    for noise in (dubito.Gaussian(), dubito.Gaussian(prior=prior)):
        model = dubito.Model(nn.Linear(1, 1, bias=False).double(), noise, Normal(scale=1.0))
        target, generator = Target(model, 5), torch.Generator().manual_seed(0)
        start = Start({"weight": torch.full((1, 1), 0.75).double(), name: torch.zeros(1).double()}, {})
        method = Variational(optimizer="sgd", momentum=0.0, learning_rate=1.0, clip=None)
        state = method.init(target, start, (x, y), generator, steps=9)
        method.step(target, state, [(x, y)], generator)
        scales.append(state.params[name].clone())
    at = torch.zeros(1).double().requires_grad_()
    (slope,) = torch.autograd.grad(dubito.Gaussian(prior=prior).log_prior({name: at}).sum(), at)
    torch.testing.assert_close(scales[1] - scales[0], slope / 5)


def test_a_strong_prior_decides_on_the_noise():
    torch.manual_seed(0)
    x = torch.randn(40, 2)
    data = (x, x.sum(1, keepdim=True) + torch.randn(40, 1))
    prior = torch.distributions.LogNormal(torch.tensor([-3.0]), torch.tensor([0.01]))  # of the precision
    model = dubito.Model(nn.Linear(2, 1), dubito.Gaussian(prior=prior))
    posterior = dubito.fit(model, Variational(epochs=100, learning_rate=0.05), data, progress=False)
    assert posterior.params["likelihood:log_scale"].item() == pytest.approx(1.5, abs=0.02)
