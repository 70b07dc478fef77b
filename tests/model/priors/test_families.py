"""Every family of priors: its density, slope, draws and expectation, against what is known or against Monte Carlo."""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import nn
from torch.func import vmap

import dubito
from dubito import HMC, MAP, Categorical, Gaussian, Model
from dubito.inference.log_density import Density
from dubito.model import Target
from dubito.priors import (
    NNGP,
    RBF,
    Bernoulli,
    ByName,
    Centered,
    ConvCorrelated,
    Gamma,
    HalfCauchy,
    Horseshoe,
    InverseGamma,
    Laplace,
    LogUniform,
    MatrixNormal,
    MultivariateNormal,
    Normal,
    Prior,
    ScaleMixture,
    SpikeAndSlab,
    StudentT,
)
from dubito.tensors import tree
from dubito.tensors.covariances import Diagonal

DOUBLE, SOURCE = torch.float64, torch.Generator().manual_seed(0)
WEIGHTS = {
    "0.weight": torch.randn(4, 3, dtype=DOUBLE, generator=SOURCE),
    "0.bias": torch.randn(4, dtype=DOUBLE, generator=SOURCE),
    "conv": torch.randn(2, 3, 2, 2, dtype=DOUBLE, generator=SOURCE),
}


def mixture(w):
    return 0.25 * stats.norm.pdf(w) + 0.75 * stats.norm.pdf(w, scale=0.2)


SINGLE = {  # the density of one weight
    "normal": (Normal(scale=0.7), stats.norm(scale=0.7).pdf),
    "laplace": (Laplace(0.7), stats.laplace(scale=0.7 / math.sqrt(2)).pdf),
    "student": (StudentT(0.7, df=3.0), stats.t(3.0, scale=0.7).pdf),
    "cauchy": (StudentT(0.7, df=1.0), stats.cauchy(scale=0.7).pdf),
    "scale mixture": (ScaleMixture(0.25, scales=(1.0, 0.2)), mixture),
    "spike and slab": (SpikeAndSlab(0.25, scale=1.0, spike=0.2), mixture),
    "log-uniform": (LogUniform(bounds=(0.1, 10.0)), lambda w: stats.loguniform(0.1, 10.0).pdf(abs(w)) / 2),
    "centred": (Centered({"w": torch.tensor(0.4)}, Laplace(0.7)), stats.laplace(0.4, 0.7 / math.sqrt(2)).pdf),
    "relaxed": (Bernoulli(0.3, values=(-1.0, 1.0), temperature=0.7), None),
}
GENERAL = {
    **{name: prior for name, (prior, _) in SINGLE.items() if name not in ("log-uniform", "relaxed")},
    "centred": Centered({"0.weight": WEIGHTS["0.weight"]}, Laplace(0.7)),
    "share": SpikeAndSlab((2.0, 5.0), spike=0.2),
    "matrix": ByName({"0.weight": MatrixNormal(torch.eye(4) + 0.5, columns=torch.eye(3) + 1.0), "": Normal()}),
    "convolution": ConvCorrelated(0.7, length=1.5),
    "by name": ByName({"bias": StudentT(0.3), "conv": ScaleMixture(), "": Laplace(0.1)}),
}


@pytest.mark.parametrize(("prior", "pdf"), SINGLE.values(), ids=SINGLE)
def test_the_density_of_one_weight(prior, pdf):
    values = np.array([-3.1, -0.6, 0.25, 0.9, 4.0])
    found = [float(prior.log_prob({"w": torch.tensor(value, dtype=DOUBLE)})) for value in values]
    if pdf is None:  # between -1 and 1 only, where it must be a density, and what the draws have
        pdf = lambda w: math.exp(prior.log_prob({"w": torch.tensor(w, dtype=DOUBLE)}))  # noqa: E731
        assert integrate.quad(pdf, -1, 1, points=[-0.99, 0.99])[0] == pytest.approx(1, rel=1e-3)
        assert found[0] == found[-1] == -math.inf
    else:
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(found, np.log(pdf(values)), rtol=1e-6)
    drawn = prior.sample({"w": torch.zeros((), dtype=DOUBLE).expand(10_000).clone()}, torch.Generator().manual_seed(0))["w"]
    if not isinstance(prior, Centered):
        assert drawn.dtype == DOUBLE
    edges = np.quantile(drawn.numpy(), [0.1, 0.5, 0.8])
    for low, high, share in ((edges[0], edges[1], 0.4), (edges[1], edges[2], 0.3)):
        points = [p for p in (0.0, -0.1, 0.1, 0.4) if low < p < high]
        assert integrate.quad(pdf, low, high, points=points or None)[0] == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("prior", GENERAL.values(), ids=GENERAL)
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_slopes(prior, dtype):
    like = {name: leaf.to(dtype) for name, leaf in {**WEIGHTS, **prior.parameters(WEIGHTS)}.items()}
    drawn = prior.sample(like, torch.Generator().manual_seed(0))
    params = {name: leaf.requires_grad_() for name, leaf in drawn.items()}
    assert {name: leaf.shape for name, leaf in params.items()} == {name: leaf.shape for name, leaf in like.items()}
    value = prior.log_prob(params)
    assert value.dtype == dtype
    expected = dict(zip(params, torch.autograd.grad(value, list(params.values())), strict=True))
    slopes, stacked = prior.gradient(params), {name: torch.stack([leaf, leaf]) for name, leaf in params.items()}
    several = prior.gradient(stacked) if prior.stacks else vmap(prior.gradient)(tree.clone(stacked))
    for name, slope in expected.items():
        assert not slopes[name].requires_grad
        assert slopes[name].dtype == dtype
        torch.testing.assert_close(slopes[name], slope, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(several[name], torch.stack([slope, slope]), rtol=1e-4, atol=1e-5)
    vmap(prior.log_prob)(tree.clone(stacked))
    units = prior.units(params)
    assert all((units[name] > 0).all() and units[name].shape == leaf.shape for name, leaf in params.items())


@pytest.mark.parametrize(
    "prior",
    [
        Normal(scale=0.7),
        Laplace(0.7),
        Centered(WEIGHTS, Laplace(0.3)),
        GENERAL["matrix"],
        GENERAL["convolution"],
        MultivariateNormal(WEIGHTS, Diagonal.of({name: leaf.square() + 0.1 for name, leaf in WEIGHTS.items()})),
    ],
    ids=["normal", "laplace", "centred", "matrix", "convolution", "diagonal"],
)
def test_expectations_under_a_gaussian(prior):
    mean = {name: (0.5 * leaf).requires_grad_() for name, leaf in WEIGHTS.items()}
    variance = {name: (0.05 + 0.2 * torch.rand_like(leaf)).requires_grad_() for name, leaf in mean.items()}
    exact = prior.expected_log_prob(mean, variance, independent=True)
    draws = {name: leaf + variance[name].sqrt() * torch.randn(4000, *leaf.shape, dtype=DOUBLE) for name, leaf in mean.items()}
    values = vmap(prior.log_prob)(draws)
    assert float(exact.detach()) == pytest.approx(
        float(values.detach().mean()), abs=5 * float(values.detach().std()) / math.sqrt(4000)
    )
    leaves = [*mean.values(), *variance.values()]
    assert all(slope.isfinite().all() for slope in torch.autograd.grad(exact, leaves))
    ties = isinstance(prior, ByName | ConvCorrelated)
    assert (prior.expected_log_prob(mean, variance) is None) == ties


def test_mixtures_have_no_closed_expectation():
    assert ScaleMixture().expected_log_prob(WEIGHTS, WEIGHTS) is None
    assert StudentT().expected_log_prob(WEIGHTS, WEIGHTS) is None


def test_the_expectation_of_the_log_uniform_is_close_everywhere():
    worst, a = 0.0, torch.linspace(-40, 40, 400_001, dtype=DOUBLE)  # E ln |e + r| of e ~ N(0, 1), with r = mean / scale
    for log_alpha in torch.linspace(-6, 8, 15, dtype=DOUBLE):
        mean, scale = torch.tensor(1.3, dtype=DOUBLE), 1.3 * (log_alpha / 2).exp()
        # by parts against the integral of ln, which is not infinite anywhere
        x = a + mean / scale
        exact = -(
            scale.log() + torch.trapezoid((-0.5 * a**2).exp() * a / math.sqrt(2 * math.pi) * (torch.xlogy(x, x.abs()) - x), a)
        )
        found = LogUniform().expected_log_prob({"w": mean}, {"w": scale**2})
        worst = max(worst, abs(float(found - exact)))
    assert worst < 0.01
    at_zero = LogUniform().expected_log_prob({"w": torch.zeros(3)}, {"w": torch.zeros(3)})
    assert at_zero.isfinite()


def test_a_narrow_spike_does_not_underflow():
    prior = ScaleMixture(0.5, scales=(1.0, math.exp(-8)))
    params = {"w": torch.tensor([0.0, 1e-4, 0.5, 3.0])}
    assert prior.log_prob(params).isfinite()
    assert torch.equal(prior.gradient(params)["w"][2:], -params["w"][2:])
    expected = sum(math.log(0.5 * stats.norm.pdf(w) + 0.5 * stats.norm.pdf(w, scale=math.exp(-8))) for w in params["w"].tolist())
    assert float(prior.log_prob(params)) == pytest.approx(expected, rel=1e-5)


def test_a_spike_of_no_width_can_be_drawn_but_not_scored():
    prior = SpikeAndSlab(0.3, spike=0.0)
    drawn = prior.sample({"w": torch.zeros(5000)}, torch.Generator().manual_seed(0))
    assert float((drawn["w"] != 0).float().mean()) == pytest.approx(0.3, abs=0.03)
    assert torch.equal(prior.inclusion(drawn)["w"], (drawn["w"] != 0).float())
    with pytest.raises(ValueError, match="exactly 0 has no density"):
        prior.log_prob(drawn)


def test_the_share_of_a_slab_has_a_beta_prior():
    prior, free = SpikeAndSlab((2.0, 5.0)), torch.linspace(-15, 15, 4001, dtype=DOUBLE)
    density = torch.stack([prior.log_prob({"prior:logit_share": s.reshape(1)}) for s in free]).exp()
    assert torch.trapezoid(density, free).item() == pytest.approx(1, abs=1e-4)
    like = {"w": torch.zeros(1), "prior:logit_share": torch.zeros(1)}
    drawn = torch.stack(
        [prior.sample(like, g)["prior:logit_share"] for g in [torch.Generator().manual_seed(0)] for _ in range(2000)]
    )
    assert stats.kstest(drawn.sigmoid().flatten().numpy(), stats.beta(2.0, 5.0).cdf).pvalue > 1e-3


def test_matrix_normals():
    rows, columns = torch.eye(3, dtype=DOUBLE) + 0.5, torch.tensor([[2.0, 0.6], [0.6, 1.0]], dtype=DOUBLE)
    prior, w = MatrixNormal(rows, columns=columns), torch.randn(3, 2, dtype=DOUBLE)
    law = torch.distributions.MultivariateNormal(torch.zeros(6, dtype=DOUBLE), torch.kron(rows, columns))
    torch.testing.assert_close(prior.log_prob({"w": w}), law.log_prob(w.reshape(-1)))
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([prior.sample({"w": w}, generator)["w"].reshape(-1) for _ in range(4000)])
    torch.testing.assert_close(torch.cov(drawn.mT), law.covariance_matrix, rtol=0, atol=0.25)
    torch.testing.assert_close(prior.units({"w": w})["w"], law.stddev.reshape(3, 2))
    with pytest.raises(ValueError, match=r"is \[4, 2\] as a matrix, but the prior's rows are \[3, 3\]"):
        prior.log_prob({"w": torch.zeros(4, 2)})
    with pytest.raises(ValueError, match="`columns` is a covariance"):
        MatrixNormal(columns=-torch.eye(2))


def test_correlated_kernels():
    prior, w = ConvCorrelated(0.7, length=2.0), torch.randn(2, 3, 2, 3, dtype=DOUBLE)
    law = torch.distributions.MultivariateNormal(torch.zeros(6, dtype=DOUBLE), prior.covariance((2, 3)))
    assert float(law.covariance_matrix[0, 4]) == pytest.approx(0.49 * math.exp(-math.sqrt(2) / 2))
    torch.testing.assert_close(prior.log_prob({"w": w}), law.log_prob(w.reshape(6, 6)).sum())
    torch.testing.assert_close(prior.log_prob({"b": w[0, 0]}), Normal(scale=0.7).log_prob({"b": w[0, 0]}))
    drawn = prior.sample({"w": torch.zeros(60, 60, 2, 3, dtype=DOUBLE)}, torch.Generator().manual_seed(0))["w"].reshape(-1, 6)
    torch.testing.assert_close(torch.cov(drawn.mT), law.covariance_matrix, rtol=0, atol=0.06)


def test_binary_weights():
    prior = Bernoulli(0.3, values=(-1.0, 1.0))
    drawn = prior.sample({"w": torch.zeros(5000)}, torch.Generator().manual_seed(0))
    assert set(drawn["w"].tolist()) == {-1.0, 1.0}
    assert float((drawn["w"] == 1).float().mean()) == pytest.approx(0.3, abs=0.03)
    assert float(prior.log_mass({"w": torch.tensor([1.0, -1.0, -1.0])})) == pytest.approx(math.log(0.3 * 0.7 * 0.7))
    assert prior.log_mass({"w": torch.tensor([0.5])}) == -math.inf
    logits = {"w": torch.tensor([-0.4, 2.0])}
    q, p = torch.distributions.Bernoulli(logits=logits["w"]), torch.distributions.Bernoulli(torch.full((2,), 0.3))
    torch.testing.assert_close(prior.divergence(logits), torch.distributions.kl_divergence(q, p).sum())
    relaxed = Bernoulli(0.3, temperature=0.6)
    law = torch.distributions.RelaxedBernoulli(torch.tensor(0.6), probs=torch.tensor(0.3))
    x = torch.tensor([0.1, 0.5, 0.97])
    torch.testing.assert_close(relaxed.log_prob({"w": x}), law.log_prob(x).sum())


@pytest.mark.parametrize(
    ("prior", "said"),
    [
        (Bernoulli(), "have no density"),
        (LogUniform(), "the log-uniform prior is improper"),
        (SpikeAndSlab(spike=0.0), "no density"),
    ],
)
def test_methods_refuse_what_has_no_density_in_words(prior, said):
    model, data = Model(nn.Linear(1, 1), Gaussian(scale=1.0), prior), (torch.ones(4, 1), torch.ones(4, 1))
    for method in (HMC(draws=10, burn_in=10, chains=2), MAP(epochs=1)):
        with pytest.raises(ValueError, match=said):
            dubito.fit(model, method, data)


def test_a_prior_around_a_pretrained_network():
    net = nn.Linear(2, 1)
    prior = Centered(net, Normal(scale=0.1))
    with torch.no_grad():
        net.weight.add_(1.0)  # what it was centred on stays
    assert float(prior.gradient({"weight": net.weight})["weight"][0, 0]) == pytest.approx(-100, rel=1e-4)
    with pytest.raises(ValueError, match=r"centered on a weight of \[1, 2\], but the network's is \[1, 3\]"):
        prior.log_prob({"weight": torch.zeros(1, 3)})
    with pytest.raises(ValueError, match="of which the network has none"):
        Model(nn.Sequential(net), Gaussian(scale=0.3), prior).parameters()  # "0.weight"
    headed = Model(nn.Sequential(net, nn.Linear(1, 1)), Gaussian(scale=0.3), Centered(nn.Sequential(net)))
    assert len(headed.parameters()) == 4, "a new head needs no centre"


def test_scales_by_fan_in():
    net = nn.Sequential(nn.Conv2d(3, 4, 2), nn.ConvTranspose2d(4, 5, 3), nn.Embedding(7, 6), nn.LSTM(6, 2))
    prior = Normal.fan_in(net, 2.0, bias=0.3)
    for name, fan in {"0.weight": 12, "1.weight": 36, "3.weight_ih_l0": 6}.items():
        assert prior.scale_of(name) == pytest.approx(2 / math.sqrt(fan)), name
    assert prior.scale_of("0.bias") == prior.scale_of("2.weight") == 0.3
    assert Normal.fan_in(nn.LayerNorm([2, 3]), 2.0, bias=0.3).scale_of("weight") == 0.3
    x = torch.linspace(-1, 1, 40).unsqueeze(1)
    model = Model(net := nn.Linear(1, 1), Gaussian(scale=0.3), Normal.fan_in(net, 0.5))
    trained = dubito.fit(model, MAP(epochs=200, learning_rate=0.05), (x, x))
    posterior = dubito.fit(model, dubito.Laplace("dense"), (x, x), start=trained)
    assert float(posterior.prior_precision["weight"]) == pytest.approx(4.0)


def test_the_default_prior_follows_the_fan_in_and_the_likelihood():
    net = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3))
    for likelihood, scale in ((Gaussian(outputs=3), 2.0), (Categorical(), 3.0)):
        prior = Model(net, likelihood).prior
        found = [prior.scale_of(name) for name, _ in net.named_parameters()]
        assert found == pytest.approx([scale / 2, 1.0, scale / 3, 1.0])
        assert prior == Normal.fan_in(net, scale, bias=1.0, learned=True)
        assert repr(prior) == f"Normal.fan_in(scale={scale:g}, bias=1, learned=True)"


def test_the_default_prior_is_where_the_evidence_begins():
    x = torch.linspace(-1, 1, 40).unsqueeze(1)
    found = []
    for prior in (None, Normal()):
        torch.manual_seed(0)
        model = Model(nn.Linear(1, 1), Gaussian(scale=0.3), prior)
        posterior = dubito.fit(model, dubito.Laplace("dense", check=False), (x, x))
        found.append(float(posterior.prior_precision["weight"]))
    assert found[0] == pytest.approx(found[1], rel=1e-3), "the evidence has one maximum"
    kept = Model(nn.Linear(1, 1), Gaussian(scale=0.3), Normal(scale=2.0))
    assert float(dubito.fit(kept, dubito.Laplace(check=False), (x, x)).prior_precision["weight"]) == pytest.approx(0.25)


def test_a_tied_weight_has_the_scale_of_its_largest_sum():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.out = nn.Embedding(7, 16), nn.Linear(16, 7, bias=False)
            self.out.weight = self.embedding.weight

        def forward(self, x):
            return self.out(self.embedding(x))

    prior = Model(Tied(), Categorical()).prior
    assert prior.scale_of("embedding.weight") == pytest.approx(3 / 4)


def test_patterns():
    prior = ByName({"bias": Normal(scale=0.5), "weight": Laplace(2.0)})
    assert prior.stacks
    bias, weight = {"0.bias": WEIGHTS["0.bias"]}, {"0.weight": WEIGHTS["0.weight"]}
    torch.testing.assert_close(
        prior.log_prob({**weight, **bias}), Normal(scale=0.5).log_prob(bias) + Laplace(2.0).log_prob(weight)
    )
    with pytest.raises(ValueError, match=r"no pattern of the prior, \['bias', 'weight'\], matches the parameter 'conv'"):
        prior.log_prob(WEIGHTS)
    with pytest.raises(TypeError, match="maps patterns to priors"):
        ByName({"": 1.0})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Laplace(0.0),
        lambda: StudentT(df=-1.0),
        lambda: ScaleMixture(1.0),
        lambda: SpikeAndSlab(0.5, scale=0.1, spike=0.2),
        lambda: LogUniform((1.0, 0.5)),
        lambda: Bernoulli(1.0),
        lambda: ConvCorrelated(length=0.0),
    ],
)
def test_settings_that_make_no_sense(make):
    with pytest.raises(ValueError, match="got|matrix"):
        make()


@pytest.mark.parametrize("half", [np.float32(0.5), torch.tensor(0.5)])
def test_settings_may_be_numbers_of_numpy_or_torch(half):
    for kind, names in {
        Laplace: ["scale"],
        StudentT: ["width", "df"],
        ConvCorrelated: ["scale", "length"],
        Bernoulli: ["temperature"],
        Horseshoe: ["width"],
        HalfCauchy: ["width"],
        Gamma: ["shape", "rate"],
        InverseGamma: ["shape", "rate"],
        NNGP: ["scale"],
        RBF: ["scale", "length"],
    }.items():
        made, plain = kind(**dict.fromkeys(names, half)), kind(**dict.fromkeys(names, 0.5))
        assert made == plain, kind
        assert all(type(getattr(made, name)) is float for name in names), kind
    assert ScaleMixture(scales=(half, half)) == ScaleMixture(scales=(0.5, 0.5))
    assert SpikeAndSlab((half, half), scale=half) == SpikeAndSlab((0.5, 0.5), scale=0.5)


def test_draws_of_relaxed_binary_weights_have_a_density():
    """In float32 one in four thousand would be rounded to a value, where there is none."""
    for values in [(0.0, 1.0), (-1.0, 1.0), (100.0, 101.0)]:
        prior = Bernoulli(values=values, temperature=0.3)
        drawn = prior.sample({"w": torch.zeros(100_000)}, torch.Generator().manual_seed(0))
        assert prior.log_prob(drawn).isfinite(), values


def test_stacked_members_under_a_prior_that_does_not_stack():
    class Tied(Prior):
        """The sum of all weights is standard normal: each draw on its own."""

        def log_prob(self, params):
            return -0.5 * torch.stack([leaf.sum() for leaf in params.values()]).sum() ** 2

        def sample(self, like, generator=None):
            return like

    model, data = Model(nn.Linear(1, 1), Gaussian(scale=1.0), Tied()), (torch.ones(4, 1), torch.ones(4, 1))
    params = [{"weight": torch.tensor([[v]]), "bias": torch.tensor([v])} for v in (0.5, 2.0)]
    together = Target(model, 4, members=2).gradient(tree.stack(params), [data], {}).gradient
    for i, one in enumerate(params):
        torch.testing.assert_close(together["bias"][i], Target(model, 4).gradient(one, [data], {}).gradient["bias"])


@pytest.mark.parametrize("name", ["laplace", "student", "scale mixture", "convolution", "share", "by name"])
def test_full_batch_samplers_see_the_same_density(name):
    prior = GENERAL[name]
    net = nn.Sequential(OrderedDict(conv=nn.Conv1d(1, 2, 2), flat=nn.Flatten(), head=nn.Linear(6, 1))).double()
    model, data = Model(net, Gaussian(scale=1.0), prior), (torch.randn(5, 1, 4).double(), torch.randn(5, 1).double())
    params = [prior.sample(model.parameters(), torch.Generator().manual_seed(i)) for i in range(2)]
    target = Target(model, 5)
    found = Density(target, [data], model.parameters(), {})(tree.flatten(tree.stack(params), stacked=True))
    for i, one in enumerate(params):
        assert float(found.log_prior[i]) == pytest.approx(float(target.log_prior(one)))
        torch.testing.assert_close(found.gradient[i], tree.flatten(target.gradient(one, [data], {}).gradient))


def test_a_sampler_asks_an_earlier_posterior_in_double_precision():
    """Of a Kronecker covariance in float32."""
    torch.manual_seed(0)
    model = dubito.Model(nn.Linear(2, 1), dubito.Gaussian(scale=0.5), dubito.priors.Normal(scale=1.0))
    data = torch.randn(20, 2), torch.randn(20, 1)
    earlier = dubito.fit(model, dubito.Laplace(check=False), data).as_prior()
    later = dubito.Model(model.network, model.likelihood, earlier)
    assert len(dubito.fit(later, dubito.HMC(0.01, chains=1, draws=2, burn_in=0, path_length=0.05), data)) == 2
