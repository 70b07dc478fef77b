"""The neural linear model: all of it has closed forms, and all are tested against brute force."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dubito
from dubito import Categorical, Ensemble, Gaussian, HeteroscedasticGaussian, Model
from dubito.inference.method import Event
from dubito.methods import NeuralLinear
from dubito.posteriors import Conjugate
from dubito.posteriors.predict.sampled import sampled
from dubito.posteriors.predictive import LatentMixture, StudentT
from dubito.priors import Normal

N, WIDTH = 30, 4
NIG = NeuralLinear(prior_precision=0.7, a0=1.5, b0=0.4)


def network(outputs: int = 1, *, bias: bool = True, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh(), nn.Linear(WIDTH, outputs, bias=bias)).to(dtype)


def data(outputs: int = 1, n: int = N, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    y = x[:, :1] * torch.arange(1.0, outputs + 1) + 0.3 * torch.randn(n, outputs, generator=generator, dtype=torch.float64) + 0.5
    return x.to(dtype), y.to(dtype)


def phi(net: nn.Sequential, x: Tensor) -> Tensor:
    h = net[:-1](x).detach()
    return torch.cat([h, torch.ones_like(h[:, :1])], 1) if net[-1].bias is not None else h


def fit(model: Model, method: NeuralLinear, *args, **kwargs) -> Conjugate:
    found = dubito.fit(model, method, *args, **kwargs)
    assert isinstance(found, Conjugate)
    return found


def head(net: nn.Sequential) -> list[str]:
    return ["2.weight"] if net[-1].bias is None else ["2.weight", "2.bias"]


def marginal_t(y: Tensor, features: Tensor, precision: float | Tensor, a0: float, b0: float) -> Tensor:
    """log p(D) of the Normal-inverse-gamma model: y is a multivariate Student-t, y ~ t_{2 a0}(0, b0/a0 (I + Phi Phi^T / lambda))."""
    n, dof = len(y), 2 * a0
    scale = b0 / a0 * (torch.eye(n, dtype=y.dtype) + features @ features.mT / precision)
    quadratic = y @ torch.linalg.solve(scale, y)
    constant = math.lgamma((dof + n) / 2) - math.lgamma(dof / 2) - n / 2 * math.log(dof * math.pi)
    return constant - 0.5 * torch.logdet(scale) - (dof + n) / 2 * torch.log1p(quadratic / dof)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("outputs", [1, 3])
def test_posterior_and_evidence_are_the_closed_form(outputs, bias):
    net, (x, y) = network(outputs, bias=bias), data(outputs)
    found = fit(Model(net, Gaussian(outputs=outputs)), NIG, (x, y), batch_size=7)
    f = phi(net, x)
    precision = f.mT @ f + 0.7 * torch.eye(f.shape[1], dtype=f.dtype)
    mean = torch.linalg.solve(precision, f.mT @ y)  # [d, C]
    assert torch.allclose(found.mean, mean.mT, rtol=1e-10, atol=1e-12)
    assert torch.allclose(found.root[0] @ found.root[0].mT, torch.linalg.inv(precision), rtol=1e-9, atol=1e-12)
    assert found.root.shape == (1, f.shape[1], f.shape[1])
    assert found.shape.tolist() == [1.5 + N / 2] * outputs
    assert torch.allclose(found.rate, 0.4 + 0.5 * (y.square().sum(0) - (mean * (precision @ mean)).sum(0)), rtol=1e-10)
    assert found.evidence == pytest.approx(sum(float(marginal_t(column, f, 0.7, 1.5, 0.4)) for column in y.mT), rel=1e-10)
    assert torch.allclose(found.params["2.weight"], mean.mT[:, :WIDTH])
    assert torch.equal(found.params["0.weight"], net[0].weight)


def test_outputs_that_share_a_noise_are_one_regression_of_all():
    """Gaussian() has one noise, so y of all outputs, one after another, is one multivariate Student-t."""
    net, (x, y) = network(3), data(3)
    found = fit(Model(net, Gaussian()), NIG, (x, y))
    f = phi(net, x)
    stacked = torch.block_diag(f, f, f)
    assert found.evidence == pytest.approx(float(marginal_t(y.mT.reshape(-1), stacked, 0.7, 1.5, 0.4)), rel=1e-10)
    assert found.shape.tolist() == [1.5 + 3 * N / 2]
    # p(y* | D) = p(D, y*) / p(D), jointly over the outputs
    new = torch.randn(1, 3, dtype=torch.float64)
    more = fit(Model(net, Gaussian()), NIG, (torch.cat([x, new]), torch.cat([y, new])))
    score = found.predict(new).log_prob(new)
    assert float(score) == pytest.approx(more.evidence - found.evidence, rel=1e-9)
    again = found.update(new, new)
    assert torch.allclose(again.rate, more.rate)
    assert again.evidence == pytest.approx(more.evidence, rel=1e-10)


@pytest.mark.parametrize("noise", [0.5, (0.5, 0.2, 1.0)])
def test_known_noise_is_gaussian_and_exact(noise):
    net, (x, y) = network(3), data(3)
    found = fit(Model(net, Gaussian(scale=noise), Normal(scale={"bias": 2.0, "": 0.8})), NeuralLinear(), (x, y), batch_size=11)
    f = phi(net, x)
    prior = torch.tensor([0.8] * WIDTH + [2.0], dtype=torch.float64) ** -2
    p, evidence = found.predict(x), 0.0
    assert isinstance(p, LatentMixture)
    for c, s in enumerate((noise,) * 3 if isinstance(noise, float) else noise):
        precision = f.mT @ f / s**2 + torch.diag(prior)
        mean = torch.linalg.solve(precision, f.mT @ y[:, c] / s**2)
        assert torch.allclose(found.mean[c], mean, rtol=1e-9, atol=1e-12)
        root = found.root[min(c, len(found.root) - 1)]
        assert torch.allclose(s**2 * root @ root.mT, torch.linalg.inv(precision), rtol=1e-9, atol=1e-12)
        assert torch.allclose(p.mean[:, c], f @ mean)
        spread = (f @ torch.linalg.inv(precision) * f).sum(1)
        assert torch.allclose(p.uncertainty.epistemic[:, c], spread)
        assert torch.allclose(p.uncertainty.aleatoric[:, c], torch.tensor(s**2).double())
        full = s**2 * torch.eye(N, dtype=f.dtype) + f / prior @ f.mT
        evidence += float(torch.distributions.MultivariateNormal(torch.zeros(N).double(), full).log_prob(y[:, c]))
    assert found.evidence == pytest.approx(evidence, rel=1e-10)
    assert len(found.root) == (1 if isinstance(noise, float) else 3)


@pytest.mark.parametrize("likelihood", [Gaussian(), Gaussian(outputs=2), Gaussian(scale=0.3), Gaussian(scale=(0.3, 0.6))])
def test_evidence_is_at_its_maximum(likelihood):
    net, (x, y) = network(2), data(2)
    found = fit(Model(net, likelihood), NeuralLinear(a0=1.5, b0=0.4), (x, y))
    best = found.prior_precision
    for factor in (0.99, 1.01):
        if likelihood.scale is None:
            near = fit(Model(net, likelihood), NeuralLinear(prior_precision=float(best * factor), a0=1.5, b0=0.4), (x, y))
        else:
            scale = float((factor * best / torch.tensor(likelihood.scale).double() ** 2).reshape(-1)[0]) ** -0.5
            near = fit(Model(net, likelihood, Normal(scale=scale)), NeuralLinear(), (x, y))
        assert near.evidence < found.evidence
        assert near.evidence == pytest.approx(found.evidence, abs=1e-3)
    left = fit(Model(net, likelihood), NeuralLinear(optimize_evidence=False, a0=1.5, b0=0.4), (x, y))
    fixed = fit(Model(net, likelihood, Normal(scale=1.0)), NeuralLinear(a0=1.5, b0=0.4), (x, y))
    assert torch.equal(left.mean, fixed.mean)
    assert left.evidence < found.evidence


def test_a_prior_scale_is_meant_at_the_noise_that_the_data_show():
    net, (x, y) = network(1), data(1)
    found = fit(Model(net, Gaussian(), Normal(scale=0.6)), NeuralLinear(), (x, y))
    noise = found.rate / found.shape
    assert torch.allclose(found.prior_precision, noise / 0.6**2, rtol=1e-9)
    known = fit(Model(net, Gaussian(scale=float(noise) ** 0.5), Normal(scale=0.6)), NeuralLinear(), (x, y))
    assert torch.allclose(found.mean, known.mean, rtol=1e-7)


def test_a_gamma_prior_of_the_likelihood_is_the_noises():
    net, (x, y) = network(1), data(1)
    given = fit(Model(net, Gaussian(prior=torch.distributions.Gamma(1.5, 0.4))), NeuralLinear(prior_precision=0.7), (x, y))
    own = fit(Model(net, Gaussian()), NIG, (x, y))
    assert torch.allclose(given.rate, own.rate, rtol=1e-6)  # torch's Gamma holds float32
    assert given.evidence == pytest.approx(own.evidence, rel=1e-5)


def test_predictive_is_what_draws_of_weights_and_noise_give():
    net, (x, y) = network(2), data(2)
    found = fit(Model(net, Gaussian(outputs=2)), NIG, (x, y))
    p, n = found.predict(x[:5] * 2), 100_000
    drawn = found.sample(n, torch.Generator().manual_seed(1))
    assert drawn["2.weight"].shape == (n, 2, WIDTH)
    assert drawn["likelihood:log_scale"].shape == (n, 2)
    assert (drawn["0.weight"] == net[0].weight).all()
    weights = torch.cat([drawn["2.weight"], drawn["2.bias"].unsqueeze(-1)], -1)
    f = torch.einsum("ncd,bd->nbc", weights, phi(net, x[:5] * 2))
    noise = drawn["likelihood:log_scale"].exp().square()
    assert torch.allclose(f.mean(0), p.mean, atol=0.01)
    assert torch.allclose(f.var(0), p.uncertainty.epistemic, rtol=0.03)
    assert torch.allclose(f.var(0), p.f_var, rtol=0.03)
    assert torch.allclose(noise.mean(0).expand_as(p.mean), p.uncertainty.aleatoric, rtol=0.02)
    seen = f + noise.sqrt().unsqueeze(1) * torch.randn_like(f)
    for level in (0.05, 0.3, 0.99):
        assert torch.allclose(torch.quantile(seen[:, :, 0], level, dim=0), p.quantile(level)[:, 0], atol=0.03)
    # the density, as a mixture over draws
    score = torch.distributions.Normal(f, noise.sqrt().unsqueeze(1)).log_prob(y[:5]).sum(-1)
    assert torch.allclose(score.logsumexp(0) - math.log(n), p.log_prob(y[:5]), atol=0.02)
    # weights and noise are drawn jointly: standardised by their own noise they are normal
    unit = (weights - found.mean)[:, 0] / noise[:, :1].sqrt()
    assert torch.allclose(torch.cov(unit.mT), found.root[0] @ found.root[0].mT, atol=0.02)


@pytest.mark.parametrize("likelihood", [Gaussian(outputs=2), Gaussian(scale=0.3), Gaussian(scale=(0.3, 0.6))])
def test_predicting_by_sampling_agrees(likelihood):
    net, (x, y) = network(2), data(2)
    found = fit(Model(net, likelihood), NeuralLinear(a0=1.5, b0=0.4), (x, y))
    exact, p = found.predict(x), found.predict(x, how="sampled", draws=20_000)
    assert isinstance(p, LatentMixture)
    assert p.means.shape == (20_000, N, 2)
    assert torch.allclose(p.mean, exact.mean, atol=0.01)
    assert torch.allclose(p.uncertainty.total, exact.uncertainty.total, rtol=0.05)
    assert torch.allclose(p.log_prob(y), exact.log_prob(y), atol=0.05)
    assert torch.equal(found.predict(x, how="sampled", seed=1).means, found.predict(x, how="sampled", seed=1).means)
    same = sampled(found.model, x, shared=found.buffers, stacked=found.sample(3, torch.Generator().manual_seed(0)))
    assert same.means.shape == (3, N, 2)


@pytest.mark.parametrize(
    "likelihood", [Gaussian(outputs=2), Gaussian(), Gaussian(scale=0.3), Gaussian(scale=(0.3, 0.6))], ids=repr
)
def test_observations_one_by_one_equal_all_at_once(likelihood):
    net, (x, y) = network(2), data(2, n=430)
    model, part = Model(net, likelihood, Normal(scale=1.0)), slice(0, 30)
    method = NIG if likelihood.scale is None else NeuralLinear()
    whole, online = fit(model, method, (x, y)), fit(model, method, (x[part], y[part]))
    before = online.mean.clone()
    grown = online
    for i in range(30, 130):
        grown = grown.update(x[i : i + 1], y[i : i + 1])
    grown = grown.update(x[130:], y[130:])
    assert torch.equal(online.mean, before)
    assert torch.allclose(grown.mean, whole.mean, rtol=1e-8, atol=1e-10)
    assert torch.allclose(grown.root @ grown.root.mT, whole.root @ whole.root.mT, rtol=1e-8, atol=1e-12)
    assert grown.evidence == pytest.approx(whole.evidence, rel=1e-8)
    if likelihood.scale is None:
        assert torch.allclose(grown.shape, whole.shape, rtol=1e-12)
        assert torch.allclose(grown.rate, whole.rate, rtol=1e-8)
    for name, leaf in whole.params.items():
        assert torch.allclose(grown.params[name], leaf, rtol=1e-8, atol=1e-10)


def test_online_updates_stay_sound_for_features_that_are_nearly_the_same():
    """A root of the covariance cannot lose its sign, whatever is subtracted."""
    x = torch.randn(500, 1, dtype=torch.float64)
    x = torch.cat([x, x + 1e-7 * torch.randn_like(x)], 1)
    model = Model(nn.Linear(2, 1).double(), Gaussian())
    found = fit(model, NeuralLinear(prior_precision=1e-6), (x[:2], x[:2, :1])).update(x[2:], x[2:, :1])
    whole = fit(model, NeuralLinear(prior_precision=1e-6), (x, x[:, :1]))
    p, q = found.predict(x), whole.predict(x)
    assert (p.spread > 0).all()
    assert torch.allclose(p.spread, q.spread, rtol=1e-4)
    with pytest.raises(ValueError, match="NaN or infinite"):
        found.update(x[:1] * torch.nan, x[:1, :1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_network_of_lower_precision(dtype):
    net, (x, y) = network(1, dtype=dtype), data(1, dtype=dtype)
    found = fit(Model(net, Gaussian()), NIG, (x, y))
    assert found.mean.dtype == torch.float64
    assert found.params["2.weight"].dtype == found.sample(2)["2.weight"].dtype == dtype
    p = found.predict(x)
    assert p.mean.dtype == p.log_prob(y).dtype == p.uncertainty.total.dtype == p.interval()[0].dtype == torch.float32
    if dtype == torch.float32:
        exact = fit(Model(copy.deepcopy(net).double(), Gaussian()), NIG, (x.double(), y.double()))
        assert torch.allclose(p.log_prob(y).double(), exact.predict(x.double()).log_prob(y.double()), rtol=1e-4, atol=1e-5)


def test_only_part_of_the_last_layer():
    """A bias outside `only` is an offset; other parameters stay where they are."""
    net, (x, y) = network(1), data(1)
    found = fit(Model(net, Gaussian(), only="2.weight"), NIG, (x, y))
    f = net[:-1](x).detach()
    bare = nn.Sequential(*net[:-1], nn.Linear(WIDTH, 1, bias=False).double())
    exact = fit(Model(bare, Gaussian()), NIG, (x, y - net[2].bias.detach()))
    assert torch.allclose(found.mean, exact.mean)
    assert found.mean.shape == (1, WIDTH)
    assert torch.allclose(found.predict(x).mean, f @ found.mean.mT + net[2].bias)
    assert found.evidence == pytest.approx(exact.evidence)
    assert torch.allclose(found.update(x[:3], y[:3]).mean, exact.update(x[:3], y[:3] - net[2].bias.detach()).mean)
    assert list(found.sample(2)) == ["2.weight", "likelihood:log_scale"]
    assert torch.allclose(found.predict(x, how="sampled", draws=20_000).mean, found.predict(x).mean, atol=0.01)
    with pytest.raises(ValueError, match="'2.weight' is not Bayesian: let Model"):
        fit(Model(net, Gaussian(), only="0|bias"), NIG, (x, y))
    net[2].requires_grad_(False)
    with pytest.raises(ValueError, match="do not freeze"):
        fit(Model(net, Gaussian()), NIG, (x, y))


def test_batches_loaders_and_n_data_give_the_same_posterior():
    net, (x, y) = network(1), data(1)
    whole = fit(Model(net, Gaussian()), NIG, (x, y))
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
    for found in (fit(Model(net, Gaussian()), NIG, loader), fit(Model(net, Gaussian()), NIG, loader, accumulate=3)):
        assert torch.allclose(found.mean, whole.mean)
        assert found.evidence == pytest.approx(whole.evidence)
    # data that stand for three times as many
    thrice = fit(Model(net, Gaussian()), NIG, (x, y), n_data=3 * N)
    repeated = fit(Model(net, Gaussian()), NIG, (x.repeat(3, 1), y.repeat(3, 1)))
    assert torch.allclose(thrice.mean, repeated.mean)
    assert torch.allclose(thrice.rate, repeated.rate)
    assert thrice.evidence == pytest.approx(repeated.evidence)


def test_chained_to_a_trained_network_it_uses_those_weights():
    net, (x, y) = network(1), data(1)
    model = Model(net, Gaussian())
    trained = dubito.fit(model, dubito.MAP(epochs=20), (x, y))
    found = fit(model, NIG, (x, y), start=trained)
    assert torch.equal(found.params["0.weight"], trained.params["0.weight"])
    assert not torch.equal(found.params["0.weight"], net[0].weight)
    again = fit(model, NIG, (x, y), start=found)
    assert torch.equal(again.mean, found.mean)


@pytest.mark.parametrize("at", [1, 3])
def test_stopped_and_resumed_it_is_the_same(at, tmp_path):
    x, y = data(1)
    model = Model(network(1), Gaussian())
    whole = fit(model, NIG, (x, y), batch_size=8, seed=3)

    def stop(event: Event) -> bool:
        return event.step == at

    dubito.fit(model, NIG, (x, y), batch_size=8, seed=3, checkpoint=tmp_path / "run", callbacks=[stop])
    found = fit(model, NIG, (x, y), batch_size=8, seed=3, checkpoint=tmp_path / "run", resume=True)
    assert torch.equal(found.mean, whole.mean)
    assert torch.equal(found.root, whole.root)
    assert found.evidence == whole.evidence


@pytest.mark.parametrize("likelihood", [Gaussian(), Gaussian(scale=0.3)])
def test_saved_and_loaded_it_predicts_and_goes_on_the_same(likelihood, tmp_path):
    net, (x, y) = network(1), data(1)
    found = fit(Model(net, likelihood), NIG, (x, y))
    dubito.save(found, tmp_path / "posterior.safetensors")
    same = dubito.load(tmp_path / "posterior.safetensors", Model(copy.deepcopy(net), likelihood))
    assert isinstance(same, Conjugate)
    assert torch.equal(same.predict(x).means, found.predict(x).means)
    assert torch.equal(same.predict(x).log_prob(y), found.predict(x).log_prob(y))
    assert same.evidence == found.evidence
    assert torch.equal(same.update(x, y).mean, found.update(x, y).mean)


def test_a_loader_gives_one_predictive_of_the_same_kind():
    net, (x, y) = network(1), data(1)
    found = fit(Model(net, Gaussian()), NIG, (x, y))
    p, targets = found.predict_loader(DataLoader(TensorDataset(x, y), batch_size=7))
    assert isinstance(p, StudentT)
    assert torch.allclose(p.log_prob(targets), found.predict(x).log_prob(y))
    assert found.predict_loader([(x, y)], "sampled", draws=3)[0].means.shape == (3, N, 1)
    for name, metric in dubito.metrics.METRICS.items():
        if metric.regression:
            assert torch.isfinite(metric.function(p, targets)), name
    for measure in (dubito.measures.total_variance, dubito.measures.epistemic_variance):
        assert measure(p).shape == (N,)


def test_ensembles_of_it_are_mixtures():
    x, y = data(1)
    found = dubito.fit(Model(network(1), Gaussian()), Ensemble(NIG, 2, bagging=True), (x, y))
    p = found.predict(x, draws=20)
    assert p.means.shape == (20, N, 1)
    assert found.sample(5)["2.weight"].shape == (5, 1, WIDTH)
    with pytest.raises(ValueError, match="how='sampled'"):
        found.predict(x, "conjugate")
    with pytest.raises(ValueError, match="adversarial"):
        dubito.fit(Model(network(1), Gaussian()), Ensemble(NIG, 2, adversarial=0.1), (x, y))


class Sequence(nn.Module):
    """Two inputs, a head in an inner module, a result with the channels in front of time, and more than one output."""

    def __init__(self):
        super().__init__()
        self.rnn, self.heads = (
            nn.GRU(3, WIDTH, batch_first=True),
            nn.ModuleDict({"y": nn.Linear(WIDTH, 2), "z": nn.Linear(WIDTH, 2)}),
        )

    def forward(self, x, scale):
        h = self.rnn(x)[0] * scale[:, None, None]
        other = self.heads["z"](h.mean(1))
        return self.heads["y"](h).transpose(1, 2), other


def test_dense_outputs_dicts_and_several_heads():
    net = Sequence().double()
    x, scale = torch.randn(12, 5, 3, dtype=torch.float64), torch.rand(12, dtype=torch.float64) + 0.5
    y = torch.randn(12, 2, 5, dtype=torch.float64)  # channels in front
    batches = [{"x": x[i : i + 4], "scale": scale[i : i + 4], "y": y[i : i + 4]} for i in (0, 4, 8)]
    found = fit(Model(net, Gaussian(dim=1, outputs=2)), NIG, batches)
    assert (found.weight, found.bias) == ("heads.y.weight", "heads.y.bias")
    h = (net.rnn(x)[0] * scale[:, None, None]).detach()
    f = torch.cat([h, torch.ones_like(h[..., :1])], -1).reshape(60, -1)
    rows = y.transpose(1, 2).reshape(60, 2)
    mean = torch.linalg.solve(f.mT @ f + 0.7 * torch.eye(WIDTH + 1).double(), f.mT @ rows)
    assert torch.allclose(found.mean, mean.mT)
    p = found.predict({"x": x, "scale": scale})
    assert torch.allclose(p.mean, (f @ mean).reshape(12, 5, 2))
    assert p.log_prob(y).shape == (12,)
    assert torch.allclose(found.predict((x, scale)).mean, p.mean)
    assert torch.allclose(found.predict((x, scale), memory=1e-7).f_var, p.f_var), "in small pieces it is the same"
    grown = found.update((x, scale), y)
    assert grown.evidence - found.evidence == pytest.approx(
        fit(Model(net, Gaussian(dim=1, outputs=2)), NIG, batches * 2).evidence - found.evidence
    )


class Last(nn.Module):
    def __init__(self, then, outputs: int = 1):
        super().__init__()
        self.body, self.head, self.then = nn.Linear(3, WIDTH), nn.Linear(WIDTH, outputs), then

    def forward(self, x):
        return self.then(self.head(torch.tanh(self.body(x))), self, x)


VIEWS = {
    "squeezed": (lambda h, net, x: h.squeeze(-1), 1),
    "reshaped": (lambda h, net, x: h.view(-1, 1, 2).flatten(1), 2),
    "in a dict": (lambda h, net, x: {"logits": h}, 2),
}


@pytest.mark.parametrize("name", VIEWS)
def test_what_is_only_reshaped_is_found(name):
    then, outputs = VIEWS[name]
    net, (x, y) = Last(then, outputs).double(), data(outputs)
    found = fit(Model(net, Gaussian()), NIG, (x, y if outputs > 1 else y.squeeze(1)))
    plain = nn.Sequential(net.body, nn.Tanh(), net.head)
    assert torch.allclose(found.mean, fit(Model(plain, Gaussian()), NIG, (x, y)).mean)


def test_a_step_of_a_sequence_can_be_picked_after_the_layer():
    net = Last(lambda h, net, x: h[:, -1], 2).double()
    x, y = torch.randn(9, 5, 3, dtype=torch.float64), torch.randn(9, 2, dtype=torch.float64)
    found = fit(Model(net, Gaussian()), NIG, (x, y))
    plain = nn.Sequential(net.body, nn.Tanh(), net.head)
    assert torch.allclose(found.mean, fit(Model(plain, Gaussian()), NIG, (x[:, -1], y)).mean)


NOT_LAST = {
    "scaled": lambda h, net, x: 2 * h,
    "scaled in place": lambda h, net, x: h.mul_(2),
    "an activation in place": lambda h, net, x: torch.relu_(h),
    "skipped": lambda h, net, x: h + x[:, :2],
    "some of its outputs": lambda h, net, x: torch.cat([h, h], 1)[:, :2],
    "mixed up": lambda h, net, x: h.flip(-1),
}


@pytest.mark.parametrize("name", NOT_LAST)
def test_anything_else_after_the_layer_is_refused_with_advice(name):
    net, (x, y) = Last(NOT_LAST[name], 2).double(), data(2)
    before = {key: leaf.clone() for key, leaf in net.state_dict().items()}
    with pytest.raises(ValueError, match="end it with nn.Linear"):
        fit(Model(net, Gaussian()), NIG, (x, y))
    assert all(torch.equal(before[key], leaf) for key, leaf in net.state_dict().items())


def test_tied_and_parametrized_layers_are_refused():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(torch.tanh(self.layer(x)))

    x, y = data(3)
    with pytest.raises(ValueError, match="used elsewhere"):
        fit(Model(Tied().double(), Gaussian()), NIG, (x, y))
    net = network(3)
    nn.utils.parametrizations.weight_norm(net[2])
    with pytest.raises(ValueError, match="computed from others"):
        fit(Model(net, Gaussian()), NIG, (x, y))


def test_another_way_through_the_network_is_noticed():
    net = Last(lambda h, net, x: h if len(x) > 5 else 2 * h).double()
    x, y = data(1)
    found = fit(Model(net, Gaussian()), NIG, (x, y))
    with pytest.raises(ValueError, match="is not the last layer of the network, as it was in the fit"):
        found.predict(x[:3])


def test_what_is_not_exact_is_refused():
    x, y = data(1)
    for likelihood in (Categorical(), HeteroscedasticGaussian()):
        labels = torch.zeros(N, dtype=torch.long) if likelihood.discrete else y
        with pytest.raises(ValueError, match=r"use Laplace\(subset='last_layer', structure='dense'\)"):
            fit(Model(network(2), likelihood), NIG, (x, labels))
    with pytest.raises(ValueError, match="leave out temperature"):
        fit(Model(network(1), Gaussian()), NIG, (x, y), temperature=0.5)
    with pytest.raises(ValueError, match="leave out precision"):
        fit(Model(network(1), Gaussian()), NIG, (x, y), precision="bfloat16")
    with pytest.raises(ValueError, match="Gamma of its precision"):
        fit(Model(network(1), Gaussian(prior=torch.distributions.LogNormal(0.0, 1.0))), NIG, (x, y))
    for wrong in ({"prior_precision": 0.0}, {"a0": -1.0}, {"b0": math.inf}):
        with pytest.raises(ValueError, match="must be above 0"):
            NeuralLinear(**wrong)
    found = fit(Model(network(1), Gaussian()), NIG, (x, y))
    with pytest.raises(ValueError, match="'conjugate' or 'sampled'"):
        found.predict(x, how="streamlined")
    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        fit(Model(network(1), Gaussian()), NIG, [(x, y), (x * torch.nan, y)])


def test_the_module_is_unchanged_after_an_exception():
    calls: list[int] = []

    class Fragile(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.limit = network(1), 0

        def forward(self, x):
            calls.append(1)
            if len(calls) == self.limit:
                raise OSError("the disk is full")
            return self.inner(x)

    net, (x, y) = Fragile(), data(1)
    net.train()
    state, identity = copy.deepcopy(net.state_dict()), [id(p) for p in net.parameters()]
    fit(Model(net, Gaussian()), NIG, (x, y), batch_size=8)
    # In the inspection, in the search for the last layer, and in the pass over the data. The second call is a probe, which may fail.
    for net.limit in (1, 3, len(calls)):
        calls.clear()
        with pytest.raises(OSError, match="disk is full"):
            fit(Model(net, Gaussian()), NIG, (x, y), batch_size=8)
        assert [id(p) for p in net.parameters()] == identity
        assert all(torch.equal(state[name], leaf) for name, leaf in net.state_dict().items())
        assert all(module.training for module in net.modules())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
