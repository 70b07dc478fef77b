"""The mixture predictive against Monte Carlo over f, against scipy, and as a proper density."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import NormalDist

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import kstest, norm, t
from torch import Tensor
from torch.distributions import Independent

from dubito import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticCategorical,
    HeteroscedasticGaussian,
    HeteroscedasticStudentT,
    MultiTask,
    NegativeBinomial,
    NextToken,
    Poisson,
    StudentT,
)
from dubito.likelihoods import Likelihood, align, average, entropy, nodes
from dubito.posteriors.predictive import LatentMixture, concatenate, mix

DOUBLE = torch.float64
COVARIANCES = ["none", "diagonal", "dense"]
LEARNED = {"likelihood:log_scale": torch.tensor([[-0.7], [0.0], [0.3]], dtype=DOUBLE)}  # one for each of three draws
REGRESSIONS = {
    "fixed": (Gaussian(scale=(0.4, 0.8)), None),
    "learned": (Gaussian(), LEARNED),
    "heteroscedastic": (HeteroscedasticGaussian(), None),
}
CLASSES = {
    "categorical": (Categorical(), None),
    "learned": (Categorical(scale=None), LEARNED),
    "heteroscedastic": (HeteroscedasticCategorical(samples=32), None),
    "bernoulli": (Bernoulli(), None),
}


def predictive(likelihood, params=None, covariance="none", *, inputs=3, width=2, spread=0.6, dtype=DOUBLE, dense=()):
    """Three components with weights of their own, for targets (or classes) of this width."""
    generator = torch.Generator().manual_seed(0)
    heteroscedastic = isinstance(likelihood, HeteroscedasticGaussian | HeteroscedasticCategorical)
    shape = (3, inputs, *dense, 2 * width if heteroscedastic else width)
    means = torch.randn(shape, dtype=dtype, generator=generator)
    root = spread * torch.randn(*shape, shape[-1], dtype=dtype, generator=generator)
    cov = {"none": None, "diagonal": root[..., 0] ** 2, "dense": root @ root.mT}[covariance]
    weights = torch.tensor([0.5, 0.2, 0.3], dtype=dtype)
    params = {name: leaf.to(dtype) for name, leaf in (params or {}).items()}
    return LatentMixture(likelihood, means, cov, weights, params, quadrature=512)


def draws_of_f(p: LatentMixture, n: int):
    """n draws of f, [n, B, C], from the definition of the mixture, and the likelihood's parameters that go with them."""
    generator = torch.Generator().manual_seed(1)
    which = torch.multinomial(p.weights, n, replacement=True, generator=generator)
    f = p.means[which]
    if p.cov is not None:
        cov = p.cov if p.cov.ndim > p.means.ndim else torch.diag_embed(p.cov)
        factor = torch.linalg.cholesky(cov + 1e-12 * torch.eye(cov.shape[-1]))
        unit = torch.randn(f.shape, dtype=f.dtype, generator=generator)
        f = f + torch.einsum("nbcd,nbd->nbc", factor[which], unit)
    params = {name: leaf[which] for name, leaf in p.params.items()}
    return f, align(params, f)


@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize(("likelihood", "params"), [*REGRESSIONS.values(), *CLASSES.values()])
def test_against_monte_carlo(likelihood, params, covariance):
    p = predictive(likelihood, params, covariance)
    n = 10_000 if isinstance(likelihood, HeteroscedasticCategorical) else 50_000
    f, inner = draws_of_f(p, n)
    close = dict(rtol=0.03, atol=0.02)
    torch.testing.assert_close(p.f_mean, f.mean(0), **close)
    torch.testing.assert_close(p.f_var, f.var(0), **close)
    torch.testing.assert_close(p.mean, likelihood.mean(f, inner).mean(0), **close)
    split = likelihood.uncertainty(f, torch.full((len(f),), 1 / len(f), dtype=DOUBLE), inner)
    torch.testing.assert_close(p.uncertainty.total, split.total, **close)
    torch.testing.assert_close(p.uncertainty.aleatoric, split.aleatoric, **close)
    torch.testing.assert_close(p.uncertainty.epistemic, split.epistemic, **close)
    y = torch.tensor([0, 1, 1]) if likelihood.discrete else torch.tensor([[0.3, -0.5], [1.0, 0.2], [-0.7, 0.0]])
    y = torch.nn.functional.one_hot(y) if isinstance(likelihood, Bernoulli) else y
    scores = likelihood.log_prob(f, likelihood.target(y, p.means[0]), inner)
    torch.testing.assert_close(p.log_prob(y).exp(), scores.exp().mean(0), **close)
    sample = p.sample(n, torch.Generator().manual_seed(2))
    if isinstance(likelihood, Categorical | HeteroscedasticCategorical):
        sample = torch.nn.functional.one_hot(sample, 2).double()
    torch.testing.assert_close(sample.mean(0), p.mean, **close)
    if not likelihood.discrete:
        torch.testing.assert_close(sample.var(0), p.uncertainty.total, rtol=0.05, atol=0.02)  # of what may have heavy tails


@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("name", REGRESSIONS)
def test_the_density_integrates_to_one(name, covariance):
    likelihood, params = REGRESSIONS[name]
    p = predictive(likelihood, params, covariance, inputs=1)
    line = torch.linspace(-12, 12, 97, dtype=DOUBLE)
    y = torch.cartesian_prod(line, line)  # [n, 2]: the one input, asked about n targets
    cov = None if p.cov is None else p.cov.expand(3, len(y), *p.cov.shape[2:])
    same = replace(p, means=p.means.expand(3, len(y), -1), cov=cov, quadrature=16)
    density = same.log_prob(y).exp().reshape(97, 97)
    mass = torch.trapezoid(torch.trapezoid(density, line), line)
    assert mass.item() == pytest.approx(1, abs=2e-3)


@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("name", REGRESSIONS)
def test_quantiles_against_sampling(name, covariance):
    likelihood, params = REGRESSIONS[name]
    p = predictive(likelihood, params, covariance)
    y = p.sample(50_000, torch.Generator().manual_seed(0))
    for level in (0.05, 0.5, 0.9):
        q = p.quantile(level)
        torch.testing.assert_close((y <= q).double().mean(0), torch.full((3, 2), level, dtype=DOUBLE), rtol=0, atol=0.01)
        torch.testing.assert_close(p.cdf(q), torch.full((3, 2), level, dtype=DOUBLE), rtol=0, atol=1e-9)
    lower, upper = p.interval(0.8)
    assert ((lower <= y) & (y <= upper)).double().mean().item() == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_one_gaussian_against_scipy(dtype, covariance):
    p = predictive(Gaussian(scale=0.4), covariance=covariance, dtype=dtype)
    p = replace(p, means=p.means[:1], cov=None if p.cov is None else p.cov[:1], weights=None)
    variance = torch.zeros(3, 2) if p.cov is None else p.cov[0] if p.cov.ndim == 3 else p.cov[0].diagonal(dim1=1, dim2=2)
    law = norm(p.means[0].numpy(), (variance + 0.4**2).sqrt().numpy())
    close = dict(rtol=1e-5, atol=1e-5)
    for level in (0.001, 0.3, 0.99):
        torch.testing.assert_close(p.quantile(level), torch.tensor(law.ppf(level), dtype=dtype), **close)
    y = torch.randn(3, 2, dtype=dtype)
    torch.testing.assert_close(p.cdf(y), torch.tensor(law.cdf(y.numpy()), dtype=dtype), **close)
    torch.testing.assert_close(p.uncertainty.total, torch.tensor(law.var(), dtype=dtype), **close)
    torch.testing.assert_close(p.uncertainty.epistemic, variance.to(dtype), **close)
    if covariance != "dense":
        torch.testing.assert_close(p.log_prob(y), torch.tensor(law.logpdf(y.numpy()).sum(-1), dtype=dtype), **close)


def test_draws_have_no_gaps_where_the_noise_is_small():
    p = LatentMixture(Gaussian(scale=1e-3), torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    y = p.sample(20_000, torch.Generator().manual_seed(0)).flatten()
    assert kstest(y.numpy(), norm(0, 1).cdf).pvalue > 0.01


@pytest.mark.parametrize("given_generator", [False, True])
@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("likelihood", [Gaussian(scale=0.4), Categorical(), Bernoulli()])
def test_sampling_and_its_generator(likelihood, covariance, given_generator):
    p = predictive(likelihood, covariance=covariance, width=4)
    before = torch.get_rng_state()
    first, again, other = (p.sample(50, torch.Generator().manual_seed(s) if given_generator else None) for s in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert first.shape == ((50, 3) if isinstance(likelihood, Categorical) else (50, 3, 4))
    assert torch.equal(first, again) == given_generator
    assert not torch.equal(first, other)
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(p.sample(50, generator), first) == given_generator
    assert not torch.equal(p.sample(50, generator), first)  # the generator has moved on


@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("name", CLASSES)
def test_dense_outputs_are_positions_on_their_own(name, covariance):
    likelihood, params = CLASSES[name]
    image = predictive(likelihood, params, covariance, inputs=2, dense=(4, 5), width=3)
    image = replace(image, quadrature=16)
    cov = None if image.cov is None else image.cov.flatten(1, 3)
    flat = replace(image, means=image.means.flatten(1, 3), cov=cov)
    y = torch.randint(2, (2, 4, 5, 3) if name == "bernoulli" else (2, 4, 5))
    score = flat.log_prob(y.flatten(0, 2)).reshape(2, 20).sum(1)
    torch.testing.assert_close(image.log_prob(y), score)
    torch.testing.assert_close(image.mean.flatten(0, 2), flat.mean)
    torch.testing.assert_close(image.uncertainty.epistemic.flatten(), flat.uncertainty.epistemic)
    assert image.sample(6).shape == (6, *y.shape)


@given(
    st.sampled_from([*REGRESSIONS.values(), *CLASSES.values()]),
    st.sampled_from(COVARIANCES),
    st.sampled_from([torch.float32, DOUBLE]),
    st.lists(st.integers(1, 3), max_size=2),
    st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_shapes_and_dtypes(case, covariance, dtype, dense, inputs):
    likelihood, params = case
    p = predictive(likelihood, params, covariance, dtype=dtype, dense=tuple(dense), inputs=inputs)
    p = replace(p, quadrature=8)
    shape = (inputs, *dense)
    uncertain = shape if likelihood.discrete else (*shape, 2)
    for value, expected in (
        (p.mean, (*shape, 2)),
        (p.f_mean, p.means.shape[1:]),
        (p.f_var, p.means.shape[1:]),
        (p.uncertainty.total, uncertain),
        (p.uncertainty.aleatoric, uncertain),
        (p.uncertainty.epistemic, uncertain),
    ):
        assert value.shape == expected
        assert value.dtype == dtype
        assert torch.isfinite(value).all()
    split = p.uncertainty
    torch.testing.assert_close(split.total, split.aleatoric + split.epistemic)
    assert (split.aleatoric >= 0).all()
    assert (split.epistemic >= 0).all()
    y = p.sample(1)[0]
    score = p.log_prob(y)
    assert score.shape == (inputs,)
    assert score.dtype == dtype
    assert torch.isfinite(score).all()


# --- putting predictives together ------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", COVARIANCES)
@pytest.mark.parametrize("second", COVARIANCES)
def test_mixing(first, second):
    a = predictive(Gaussian(), LEARNED, first)
    b = predictive(Gaussian(), {"likelihood:log_scale": torch.tensor([0.2], dtype=DOUBLE)}, second)
    b = replace(b, means=b.means + 1)
    p, y = mix([a, b], [0.25, 0.75]), torch.randn(3, 2, dtype=DOUBLE)
    torch.testing.assert_close(p.mean, 0.25 * a.mean + 0.75 * b.mean)
    torch.testing.assert_close(p.cdf(y), 0.25 * a.cdf(y) + 0.75 * b.cdf(y))
    expected = torch.log(0.25 * a.log_prob(y).exp() + 0.75 * b.log_prob(y).exp())
    torch.testing.assert_close(p.log_prob(y), expected)
    noise = 0.25 * a.uncertainty.aleatoric + 0.75 * b.uncertainty.aleatoric
    torch.testing.assert_close(p.uncertainty.aleatoric, noise)
    between = 0.25 * 0.75 * (a.mean - b.mean) ** 2
    torch.testing.assert_close(p.uncertainty.total, 0.25 * a.uncertainty.total + 0.75 * b.uncertainty.total + between)
    assert p.quadrature == 512


def test_mixing_classes():
    a, b = predictive(Categorical(), covariance="dense", width=3), predictive(Categorical(), width=3)
    p = mix([a, replace(b, means=-b.means)], [0.5, 0.5])
    torch.testing.assert_close(p.mean, 0.5 * a.mean + 0.5 * replace(b, means=-b.means).mean)
    assert p.weights.sum().item() == pytest.approx(1)


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_concatenating_batches(covariance):
    whole = predictive(Gaussian(), LEARNED, covariance, inputs=5)
    parts = [
        replace(whole, means=whole.means[:, at], cov=None if whole.cov is None else whole.cov[:, at])
        for at in (slice(0, 2), slice(2, 3), slice(3, 5))
    ]
    p, y = concatenate(parts), torch.randn(5, 2, dtype=DOUBLE)
    assert torch.equal(p.log_prob(y), whole.log_prob(y))
    assert torch.equal(p.uncertainty.total, whole.uncertainty.total)
    assert concatenate(parts[:1]) is parts[0]


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_one_of_several_tasks(covariance):
    tasks = MultiTask({"depth": (Gaussian(), 1), "label": (Categorical(), 3)})
    params = {"likelihood:depth.log_scale": LEARNED["likelihood:log_scale"]}
    p = replace(predictive(tasks, params, covariance, width=4), quadrature=4096)
    depth, label = torch.randn(3, 1, dtype=DOUBLE), torch.tensor([0, 2, 1])
    f, inner = draws_of_f(p, 100_000)
    both = tasks.log_prob(f, tasks.target({"depth": depth, "label": label}, p.means[0]), inner).exp().mean(0)
    torch.testing.assert_close(p.log_prob({"depth": depth, "label": label}).exp(), both, rtol=0.05, atol=0.01)
    alone, cov = p.task("depth"), p.cov
    if cov is not None:  # exact, not by nodes
        cov = cov[..., :1] if covariance == "diagonal" else cov[..., :1, :1]
    exact = LatentMixture(Gaussian(), p.means[..., :1], cov, p.weights, LEARNED)
    assert torch.equal(alone.log_prob(depth), exact.log_prob(depth))
    probs = f[..., 1:].softmax(-1).mean(0)
    torch.testing.assert_close(p.task("label").mean, probs, rtol=0, atol=0.01)
    torch.testing.assert_close(p.mean[:, 1:], probs, rtol=0, atol=0.01)
    assert p.sample(5).shape == (5, 3, 2)


def test_narrow_noise_of_one_of_several_tasks():
    """Where the noise is a hundredth of the spread, nodes over the numbers would be a comb: only what is not a number is on nodes."""
    tasks = MultiTask({"a": (Gaussian(scale=0.01), 1), "b": (HeteroscedasticGaussian(), 2), "label": (Categorical(), 3)})
    means, root = torch.randn(1, 4, 6, dtype=DOUBLE), torch.randn(1, 4, 6, 6, dtype=DOUBLE)
    y = {"a": means[0, :, :1] + 0.5, "b": means[0, :, 1:2] - 0.3, "label": torch.tensor([0, 2, 1, 1])}
    independent = LatentMixture(tasks, means, root[..., 0] ** 2, quadrature=1024)
    apart = sum(independent.task(name).log_prob(y[name]) for name in tasks.tasks)
    torch.testing.assert_close(independent.log_prob(y), apart, rtol=0, atol=0.02)
    together = LatentMixture(tasks, means, root @ root.mT, quadrature=4096)
    # by Monte Carlo over the outputs but the first, given which the first is Gaussian
    cov = (root @ root.mT)[0]
    draws = means[0, :, 1:] + (torch.linalg.cholesky(cov[:, 1:, 1:]) @ torch.randn(200_000, 4, 5, 1, dtype=DOUBLE)).squeeze(-1)
    gain = torch.linalg.solve(cov[:, 1:, 1:], cov[:, 1:, :1])
    inner = means[0, :, 0] + ((draws - means[0, :, 1:]).unsqueeze(-2) @ gain).squeeze((-1, -2))
    spread = (cov[:, 0, 0] - (cov[:, :1, 1:] @ gain).squeeze((-1, -2)) + 0.01**2).sqrt()
    score = torch.distributions.Normal(inner, spread).log_prob(y["a"].squeeze(-1))
    score = (
        score
        + HeteroscedasticGaussian().log_prob(draws[..., :2], y["b"], {})
        + Categorical().log_prob(draws[..., 2:], y["label"], {})
    )
    torch.testing.assert_close(together.log_prob(y), score.logsumexp(0) - math.log(200_000), rtol=0, atol=0.1)
    numbers = MultiTask({"a": (Gaussian(scale=0.01), 2), "b": (Gaussian(scale=0.1), 1)})
    exact = LatentMixture(Gaussian(scale=(0.01, 0.01, 0.1)), means[..., :3], together.covariances[..., :3, :3])
    same = LatentMixture(numbers, means[..., :3], together.covariances[..., :3, :3])
    torch.testing.assert_close(same.log_prob(means[0, :, :3] + 0.1), exact.log_prob(means[0, :, :3] + 0.1))


# --- small print -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", "diagonal", "dense", "root"])
@pytest.mark.parametrize("name", ["known noise", "one learned noise", "a noise for each", "heteroscedastic"])
def test_other_units(name, kind):
    """Of shift + scale * y: densities, quantiles and variances follow exactly."""
    shift, scale = torch.tensor([1.0, -2.0]).double(), torch.tensor([10.0, 0.1]).double()
    log_scale = torch.tensor([[0.3], [-0.2], [0.1]]).double()
    likelihood, params = {
        "known noise": (Gaussian(scale=0.4), {}),
        "one learned noise": (Gaussian(), {"likelihood:log_scale": log_scale}),
        "a noise for each": (Gaussian(outputs=2), {"likelihood:log_scale": log_scale + torch.tensor([0.0, 0.5])}),
        "heteroscedastic": (HeteroscedasticGaussian(), {}),
    }[name]
    width = 4 if name == "heteroscedastic" else 2
    means, root = 0.5 * torch.randn(3, 6, width).double(), 0.3 * torch.randn(3, 6, width, 3).double()
    spread = {"diagonal": {"cov": root[..., 0] ** 2}, "dense": {"cov": root @ root.mT}, "root": {"root": root}}.get(kind, {})
    p = LatentMixture(likelihood, means, params=params, **spread)
    q, y = p.rescaled(shift, scale), torch.randn(6, 2).double()
    assert torch.allclose(q.log_prob(shift + scale * y), p.log_prob(y) - scale.log().sum())
    assert torch.allclose(q.quantile(0.3), shift + scale * p.quantile(0.3))
    assert torch.allclose(q.mean, shift + scale * p.mean)
    # a learned variance is averaged over nodes, and where these lie in the space of f depends on the units
    close = {"rtol": 0.05} if name == "heteroscedastic" and kind != "none" else {"atol": 1e-12}
    for part in ("total", "aleatoric", "epistemic"):
        assert torch.allclose(getattr(q.uncertainty, part), scale**2 * getattr(p.uncertainty, part), **close)


@pytest.mark.parametrize("likelihood", [Gaussian(), Gaussian(scale=0.4), HeteroscedasticGaussian()])
def test_units_as_numbers_and_arrays(likelihood):
    y = torch.tensor([[3e5], [1e5], [2e5]])
    width = 2 if isinstance(likelihood, HeteroscedasticGaussian) else 1
    p = LatentMixture(likelihood, torch.randn(2, 3, width), params=likelihood.parameters())
    expected = p.rescaled(torch.tensor([2e5]), torch.tensor([1e5])).log_prob(y)
    for shift, scale in ((y.mean(), y.std()), (2e5, 1e5), ([2e5], [1e5]), (y.numpy().mean(), y.numpy().std(0, ddof=1))):
        assert torch.allclose(p.rescaled(shift, scale).log_prob(y), expected)
    with pytest.raises(ValueError, match="scale must be positive"):
        p.rescaled(0.0, 0.0)
    with pytest.raises(ValueError, match="there are 1 targets"):
        p.rescaled([0.0, 1.0], 1.0)


def test_classes_have_no_units():
    with pytest.raises(ValueError, match="no units"):
        LatentMixture(Categorical(), torch.zeros(1, 2, 3)).rescaled(torch.zeros(3), torch.ones(3))


def test_equal_weights_add_up_in_double_precision():
    f = torch.randn(3, 4, 2, dtype=DOUBLE)
    torch.testing.assert_close(LatentMixture(Gaussian(scale=1.0), f).mean, f.mean(0), rtol=0, atol=1e-15)
    assert LatentMixture(Gaussian(scale=1.0), f).draw_weights.dtype == DOUBLE


def test_a_singular_covariance_is_no_error():
    root = torch.randn(2, 3, 4, 1, dtype=DOUBLE)
    p = LatentMixture(Categorical(), torch.zeros(2, 3, 4, dtype=DOUBLE), root @ root.mT)
    assert torch.isfinite(p.mean).all()
    assert torch.isfinite(p.log_prob(torch.tensor([0, 1, 3]))).all()


def test_ignored_targets_score_zero():
    p = predictive(Categorical(), width=3)
    assert p.log_prob(torch.tensor([-100, 0, 1]))[0].item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: predictive(Categorical()).interval(0.9), "for regression; Categorical has classes"),
        (lambda: predictive(Bernoulli()).quantile(0.5), "for regression; Bernoulli"),
        (lambda: predictive(Gaussian(scale=1.0)).quantile(0.0), "level must be above 0 and below 1; got 0.0"),
        (lambda: predictive(Gaussian(scale=1.0)).interval(1.0), "above 0 and below 1"),
        (lambda: predictive(Gaussian(scale=1.0)).task("a"), "only a MultiTask predictive has tasks"),
        (
            lambda: predictive(MultiTask({"a": (Gaussian(scale=1.0), 2)})).task("b"),
            r"no task 'b'; the tasks are \['a'\]",
        ),
        (lambda: predictive(Gaussian(scale=1.0)).log_prob(torch.zeros(3)), r"expects \[3, 2\]"),
    ],
)
def test_errors_in_words(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("width", [1, 2])
def test_heteroscedastic_density_is_smooth_where_the_noise_is_small(width, dense):
    """The noise is a twentieth of the spread of the mean: nodes over the mean would give a comb, not a density."""
    g = torch.Generator().manual_seed(0)
    root = torch.randn(2 * width, 2 * width, generator=g, dtype=torch.float64) * 0.5
    cov = root @ root.mT + 0.2 * torch.eye(2 * width, dtype=torch.float64)
    cov = cov if dense else cov.diagonal()
    mean = torch.cat([torch.randn(width, generator=g), torch.full((width,), -6.0)]).double()
    p = LatentMixture(HeteroscedasticGaussian(), mean.reshape(1, 1, -1), cov.reshape(1, 1, *cov.shape))
    full = cov if dense else torch.diag(cov)
    f = torch.distributions.MultivariateNormal(mean, full).sample((400_000,))
    y = torch.randn(5, width, generator=g, dtype=torch.float64) * 0.7 + mean[:width]
    # exact in the mean given the log variance, Monte Carlo over the log variance
    m, s = f[:, :width], f[:, width:]
    slope = torch.linalg.solve(full[width:, width:], full[width:, :width])
    centre = mean[:width] + (s - mean[width:]) @ slope
    left = full[:width, :width] - full[:width, width:] @ slope
    given = torch.distributions.MultivariateNormal(centre[:20_000], left + torch.diag_embed(s[:20_000].exp()))
    for one in y:
        exact = given.log_prob(one).logsumexp(0) - math.log(20_000)
        assert p.log_prob(one.reshape(1, -1)).item() == pytest.approx(exact.item(), abs=0.05)
    draws = (m + (0.5 * s).exp() * torch.randn(m.shape, generator=g, dtype=torch.float64)).sort(0).values
    low, high = p.interval(0.8)
    assert torch.allclose(low[0], draws[40_000], atol=0.02)
    assert torch.allclose(high[0], draws[-40_000], atol=0.02)


# --- roots of covariances, and links ---------------------------------------------------------------------------------


def rooted(likelihood, width=4, rank=2, params=None):
    """The same predictive given by a root of its covariance and by the covariance."""
    p = predictive(likelihood, params, width=width)
    root = 0.7 * torch.randn(*p.means.shape, rank, dtype=DOUBLE, generator=torch.Generator().manual_seed(3))
    return replace(p, root=root), replace(p, cov=root @ root.mT)


@pytest.mark.parametrize("rank", [2, 4, 9])
@pytest.mark.parametrize("name", ["fixed", "learned", "heteroscedastic"])
def test_a_root_is_as_good_as_a_covariance_for_numbers(name, rank):
    likelihood, params = REGRESSIONS[name]
    a, b = rooted(likelihood, width=2, rank=rank, params=params)
    y = torch.randn(3, 2, dtype=DOUBLE)
    torch.testing.assert_close(a.covariances, b.cov)
    torch.testing.assert_close(a.f_var, b.f_var)
    close = dict(rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(a.log_prob(y), b.log_prob(y), **close)
    torch.testing.assert_close(a.mean, b.mean, **close)
    if name != "heteroscedastic":  # whose noise is a mean over nodes, which differ
        torch.testing.assert_close(a.uncertainty.total, b.uncertainty.total, **close)
        torch.testing.assert_close(a.quantile(0.3), b.quantile(0.3), **close)
        draws = a.sample(40_000, torch.Generator().manual_seed(0))
        torch.testing.assert_close(draws.var(0), a.uncertainty.total, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("name", CLASSES)
def test_a_root_is_as_good_as_a_covariance_for_classes(name):
    likelihood, params = CLASSES[name]
    a, b = rooted(likelihood, params=params)
    for p in (a, b):
        assert not p.certain
    torch.testing.assert_close(a.mean, b.mean, rtol=0, atol=0.02)
    torch.testing.assert_close(a.uncertainty.epistemic, b.uncertainty.epistemic, rtol=0, atol=0.05)
    draws = a.sample(30_000, torch.Generator().manual_seed(0))
    share = draws.double() if isinstance(likelihood, Bernoulli) else torch.nn.functional.one_hot(draws, 4).double()
    torch.testing.assert_close(share.mean(0), a.mean, rtol=0, atol=0.02)


def test_roots_are_concatenated_mixed_and_moved():
    a, b = rooted(Categorical())
    torch.testing.assert_close(concatenate([a, a]).root, torch.cat([a.root, a.root], 1))
    torch.testing.assert_close(mix([a, b], [0.5, 0.5]).f_var, b.f_var)
    assert torch.equal(a.to("cpu").root, a.root)
    tasks = MultiTask({"depth": (Gaussian(scale=1.0), 1), "label": (Categorical(), 3)})
    a, b = rooted(tasks)
    torch.testing.assert_close(a.task("label").mean, b.task("label").mean)
    torch.testing.assert_close(a.task("depth").f_var, b.task("depth").f_var)


@pytest.mark.parametrize("covariance", ["diagonal", "dense"])
@pytest.mark.parametrize("link", ["nodes", "mc", "probit", "bridge"])
@pytest.mark.parametrize("name", ["categorical", "learned", "bernoulli"])
def test_links_against_monte_carlo(name, link, covariance):
    """Nodes and draws tend to the truth; the closed approximations are off by what they are known to be off by."""
    if name == "bernoulli" and link == "bridge":
        return
    likelihood, params = CLASSES[name]
    p = replace(predictive(likelihood, params, covariance, width=3, spread=0.5), link=link, quadrature=2048)
    f, inner = draws_of_f(replace(p, link="nodes"), 100_000)
    exact = likelihood.mean(f, inner).mean(0)
    tolerance = {"nodes": 0.01, "mc": 0.04, "probit": 0.12, "bridge": 0.4}[link]
    torch.testing.assert_close(p.mean, exact, rtol=0, atol=tolerance)
    if link != "nodes":
        assert not torch.allclose(p.mean, replace(p, link="nodes").mean, atol=1e-6)
    total = torch.ones(3, dtype=DOUBLE) if name != "bernoulli" else None
    if total is not None:
        torch.testing.assert_close(p.mean.sum(-1), total)
    y = torch.tensor([0, 1, 2]) if name != "bernoulli" else torch.tensor([[0, 1, 1], [1, 1, 0], [0, 0, 0]])
    if link in ("probit", "bridge"):
        each = [replace(p, means=p.means[i : i + 1], cov=p.cov[i : i + 1], weights=None).mean for i in range(len(p.means))]
        score = (
            p.mean.gather(1, y[:, None]).log()[:, 0]
            if name != "bernoulli"  # whose labels hang together: each component has its own
            else sum(w * torch.where(y == 1, q, 1 - q).prod(1) for w, q in zip(p.component_weights, each, strict=True)).log()
        )
        torch.testing.assert_close(p.log_prob(y), score, rtol=1e-5, atol=1e-5)
    split = p.uncertainty
    torch.testing.assert_close(split.total, split.aleatoric + split.epistemic)
    assert (split.epistemic >= 0).all()


def test_the_probit_approximation_is_good_for_two_classes_and_known_in_closed_form():
    mean, variance = torch.tensor([[[0.8]]], dtype=DOUBLE), torch.tensor([[[1.7]]], dtype=DOUBLE)
    p = LatentMixture(Bernoulli(), mean, variance, link="probit")
    assert p.mean.item() == pytest.approx(1 / (1 + math.exp(-0.8 / math.sqrt(1 + math.pi / 8 * 1.7))))
    nodes = LatentMixture(Bernoulli(), mean, variance, quadrature=4096)
    assert p.mean.item() == pytest.approx(nodes.mean.item(), abs=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("shift", [0.0, 2.0])
def test_the_bridge_is_exact_for_the_logits_of_a_dirichlet(shift, dtype):
    """The Laplace bridge of a Dirichlet, there and back; such logits sum to zero, also in their covariance."""
    alpha = torch.tensor([[0.7, 2.0, 5.0, 1.1], [30.0, 1.0, 1.0, 2.0]], dtype=DOUBLE)
    mean = alpha.log() - alpha.log().mean(-1, keepdim=True)
    inverse = 1 / alpha
    cov = torch.diag_embed(inverse) - (inverse[:, :, None] + inverse[:, None] - inverse.mean(-1)[:, None, None]) / 4
    p = LatentMixture(Categorical(), (mean + shift)[None].to(dtype), cov[None].to(dtype), link="bridge")
    torch.testing.assert_close(p.mean, (alpha / alpha.sum(-1, keepdim=True)).to(dtype), rtol=1e-4, atol=1e-5)
    free = replace(p, cov=p.cov + 0.3)  # a common shift of all logits, of which softmax knows nothing
    torch.testing.assert_close(free.mean, p.mean, rtol=1e-3, atol=1e-4)


def test_the_bridge_is_the_mean_of_its_dirichlet():
    """With equal variances v and logits m that sum to zero: alpha_c = (1 - 2/C + e^{m_c} sum_d e^{-m_d} / C^2) / v'."""
    mean, v = torch.tensor([0.5, -0.2, -0.3], dtype=DOUBLE), 0.4
    p = LatentMixture(Categorical(), mean.reshape(1, 1, 3), torch.full((1, 1, 3), v, dtype=DOUBLE), link="bridge")
    alpha = 1 - 2 / 3 + mean.exp() * (-mean).exp().sum() / 9
    torch.testing.assert_close(p.mean[0], alpha / alpha.sum())


@pytest.mark.parametrize("link", ["nodes", "mc", "probit", "bridge"])
def test_links_are_certain_where_f_is_certain(link):
    sharp = torch.full((1, 2, 3), 1e-9, dtype=DOUBLE)
    mean = torch.tensor([[[2.0, 0.0, -1.0], [30.0, 0.0, -40.0]]], dtype=DOUBLE)
    p = LatentMixture(Categorical(), mean, sharp, link=link)
    assert torch.isfinite(p.mean).all()
    assert torch.isfinite(p.log_prob(torch.tensor([0, 0]))).all()
    if link != "bridge":  # of which this is not a limit
        torch.testing.assert_close(p.mean, mean[0].softmax(-1), rtol=0, atol=1e-3)


def test_links_that_do_not_exist_are_named():
    p = predictive(Bernoulli(), covariance="diagonal")
    with pytest.raises(ValueError, match="link must be one of 'nodes', 'mc', 'pairwise', 'probit', 'bridge'; got 'logit'"):
        replace(p, link="logit")
    with pytest.raises(ValueError, match="Bernoulli has no 'bridge' approximation: use link='nodes'"):
        replace(p, link="bridge").mean  # noqa: B018
    with pytest.raises(ValueError, match="HeteroscedasticCategorical has no 'probit'"):
        replace(predictive(HeteroscedasticCategorical(), covariance="diagonal"), link="probit").mean  # noqa: B018


def test_random_nodes_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    p = replace(predictive(Categorical(), covariance="dense"), link="mc")
    first = p.mean
    assert torch.equal(first, replace(p).mean)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("level", [1e-6, 0.05, 0.5, 0.9, 0.999])
def test_quantiles_of_rugged_mixtures(dtype, level, monkeypatch):
    """Components far apart and of very different widths: the cdf is steep here and flat there. Bisection in float64 is the judge."""
    monkeypatch.setattr("dubito.posteriors.predictive.predictive.CACHE", 700)  # several blocks
    g = torch.Generator().manual_seed(0)
    apart = torch.tensor([0.0, 0.1, 1.0, 10.0, 300.0], dtype=DOUBLE).repeat_interleave(40)
    means = (apart * torch.randn(7, 200, generator=g, dtype=DOUBLE)).to(dtype)
    scales = (2 * torch.randn(7, 200, generator=g, dtype=DOUBLE)).exp().to(dtype)
    weights = torch.tensor([0.0, 0.07, 0.11, 0.29, 0.24, 0.16, 0.13], dtype=dtype)
    f = torch.stack([means, 2 * scales.log()], -1)
    p = LatentMixture(HeteroscedasticGaussian(), f, weights=weights)
    q = p.quantile(level).squeeze(-1)
    assert q.dtype == dtype
    m, s = (t.squeeze(-1).double() for t in (p.marginals[0].mean, p.marginals[0].stddev))
    w, upper = weights.double(), level > 0.5
    low, high = (m - 20 * s).amin(0), (m + 20 * s).amax(0)
    for _ in range(100):
        middle = (low + high) / 2
        tail = 0.5 * w @ torch.erfc(((middle - m) if upper else (m - middle)) / s * math.sqrt(0.5))
        left = tail > 1 - level if upper else tail < level
        low, high = torch.where(left, middle, low), torch.where(left, high, middle)
    # as near as the number itself or the cdf, whichever is the coarser, can be told
    eps = torch.finfo(dtype).eps
    density = w @ (torch.exp(-(((low - m) / s) ** 2) / 2) / s) / math.sqrt(2 * math.pi)
    assert ((q.double() - low).abs() <= 8 * eps * (low.abs() + s.amin(0) + min(level, 1 - level) / density)).all()


def test_quantiles_of_equal_components_of_nothing_and_of_nan():
    p = LatentMixture(Gaussian(scale=2.0), torch.full((4, 3, 1), 5.0))
    torch.testing.assert_close(p.quantile(0.8), torch.full((3, 1), float(norm.ppf(0.8, 5, 2))))
    assert LatentMixture(Gaussian(scale=2.0), torch.zeros(4, 0, 1)).quantile(0.3).shape == (0, 1)
    q = LatentMixture(Gaussian(scale=2.0), torch.tensor([[[0.0], [math.nan]], [[0.0], [1.0]]])).quantile(0.5)
    assert q.isnan().flatten().tolist() == [False, True]


@dataclass(frozen=True)
class Skewed(Likelihood):
    def __call__(self, f, params):
        return Independent(torch.distributions.LogNormal(f, 2.5), 1)


@pytest.mark.parametrize("level", [0.001, 0.05, 0.5, 0.95, 0.999])
def test_quantiles_of_a_skewed_likelihood(level):
    """Which lie far from the mean, in deviations or not at all."""
    p = LatentMixture(Skewed(), torch.zeros(1, 1, 1).double())
    exact = math.exp(2.5 * NormalDist().inv_cdf(level))
    assert float(p.quantile(level)) == pytest.approx(exact, rel=1e-6)


# ---- what has a closed form, and numbers that floats hardly hold


@pytest.mark.parametrize("form", ["diagonal", "dense", "root"])
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_noise_that_is_predicted_is_split_exactly(form, spread):
    """e^s is log-normal where s is Gaussian; and the spread of s is none of the mean."""
    means = torch.tensor([[[0.2, -1.0, 0.5, 0.1]]], dtype=DOUBLE)
    variance = torch.tensor([0.4, 0.1, spread, 2 * spread], dtype=DOUBLE)
    root = torch.diag(variance.sqrt())[None, None]
    cov = {"diagonal": variance[None, None], "dense": root @ root, "root": None}[form]
    p = LatentMixture(HeteroscedasticGaussian(), means, cov, root=root if form == "root" else None)
    aleatoric = torch.exp(means[0, :, 2:] + variance[2:] / 2)
    torch.testing.assert_close(p.uncertainty.aleatoric, aleatoric)
    torch.testing.assert_close(p.uncertainty.epistemic, variance[None, :2])
    torch.testing.assert_close(p.uncertainty.total, aleatoric + variance[:2])
    tasks = MultiTask({"a": (HeteroscedasticGaussian(), 4), "b": (Gaussian(scale=0.5), 1)})
    wide = torch.nn.functional.pad(root, (0, 1, 0, 1))
    joint = LatentMixture(tasks, torch.nn.functional.pad(means, (0, 1)), wide @ wide.mT)
    torch.testing.assert_close(joint.uncertainty.aleatoric[:, :2], aleatoric)


def test_nodes_do_not_depend_on_how_eigenvectors_turn():
    noise = torch.randn(5, 5, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    means, cov = torch.linspace(-2, 2, 5, dtype=DOUBLE)[None, None], 9 * torch.eye(5, dtype=DOUBLE)[None, None]
    near = cov + 1e-9 * (noise + noise.mT)
    for likelihood in (Categorical(), MultiTask({"a": (Categorical(), 3), "b": (Gaussian(scale=1.0), 2)})):
        a, b = (LatentMixture(likelihood, means, one) for one in (cov, near))
        torch.testing.assert_close(a.mean, b.mean, atol=1e-8, rtol=0)
        y = torch.tensor([1]) if isinstance(likelihood, Categorical) else {"a": torch.tensor([1]), "b": torch.zeros(1, 2)}
        if isinstance(y, Tensor):
            torch.testing.assert_close(a.log_prob(y), b.log_prob(y), atol=1e-7, rtol=0)


@pytest.mark.parametrize(("mean", "scale"), [(0.5, 1.0), (10.0, 3.0), (20.0, 6.0), (30.0, 6.0), (-3.0, 0.1), (40.0, 100.0)])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_one_logit_against_quadrature(mean, scale, dtype):
    """What is improbable is so by the tail of the Gaussian, which nodes of equal weight do not reach."""

    def integrand(z, sign):
        return norm.pdf(z) / (1 + math.exp(min(700.0, sign * (mean + scale * z))))

    breaks = [-mean / scale] if abs(mean / scale) < 12 else None
    off, on = (quad(integrand, -12, 12, args=(sign,), points=breaks, limit=400, epsabs=1e-14)[0] for sign in (1, -1))
    p = LatentMixture(Bernoulli(), torch.full((1, 1, 1), mean, dtype=dtype), torch.full((1, 1, 1), scale**2, dtype=dtype))
    close = dict(rtol=1e-3 if scale > 50 else 1e-4, atol=0.0)
    torch.testing.assert_close(float(p.complement), off, **close)
    torch.testing.assert_close(float(p.mean), on, **close)
    torch.testing.assert_close(float(p.log_prob(torch.zeros(1, 1)).exp()), off, **close)


def test_links_keep_what_is_improbable():
    p = LatentMixture(Bernoulli(), torch.tensor([[[-30.0]]]), torch.full((1, 1, 1), 0.01), link="probit")
    logit = -30 / math.sqrt(1 + 0.01 * math.pi / 8)
    assert float(p.log_prob(torch.ones(1, 1))) == pytest.approx(logit, rel=1e-5)
    assert float(p.mean) == pytest.approx(math.exp(logit), rel=1e-4)
    for link, expected in (
        ("probit", -200 / math.sqrt(1 + 0.01 * math.pi / 8)),
        ("pairwise", -200 / math.sqrt(1 + 0.02 * math.pi / 8)),
    ):
        p = LatentMixture(Categorical(), torch.tensor([[[200.0, 0.0, 0.0]]]), torch.full((1, 1, 3), 0.01), link=link)
        assert float(p.log_prob(torch.tensor([1]))) == pytest.approx(expected, rel=1e-4)
    bridge = LatentMixture(Categorical(), torch.tensor([[[90.0, 0.0, 0.0]]]), torch.ones(1, 1, 3), link="bridge")
    torch.testing.assert_close(bridge.mean, torch.tensor([[1.0, 0.0, 0.0]]))


def test_any_number_of_random_nodes_and_noise_beyond_floats():
    p = LatentMixture(Categorical(), torch.zeros(1, 2, 3), torch.ones(1, 2, 3), link="mc", quadrature=129)
    torch.testing.assert_close(p.mean.sum(-1), torch.ones(2))
    far = LatentMixture(HeteroscedasticGaussian(), torch.zeros(1, 1, 2), torch.tensor([[[1.0, 200.0]]]))
    assert bool(far.uncertainty.total.isfinite().all())


def gaussian_logits(classes: int, spread: float, inputs: int = 30) -> tuple[Tensor, Tensor]:
    torch.manual_seed(classes)
    root = torch.randn(inputs, classes, classes, dtype=DOUBLE) * spread / classes**0.5
    return 1.5 * torch.randn(inputs, classes, dtype=DOUBLE), root


@pytest.mark.parametrize("spread", [0.5, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("classes", [2, 3, 5, 10])
def test_class_probabilities_of_gaussian_logits(classes, spread):
    """With 128 nodes whatever the spread, five classes were off by .024 at a spread of 2, and ten by .038 at 3."""
    mean, root = gaussian_logits(classes, spread)
    p = LatentMixture(Categorical(), mean[None], (root @ root.mT)[None])
    unit = nodes(2**14, root)
    probs = (mean + torch.einsum("bcr,nr->nbc", root, unit)).softmax(-1)
    exact, noise = probs.mean(0), entropy(probs).mean(0)
    torch.testing.assert_close(p.mean, exact, rtol=0, atol=0.003)
    torch.testing.assert_close(p.uncertainty.aleatoric, noise, rtol=0, atol=0.01)
    torch.testing.assert_close(p.log_forecasts.exp(), p.mean)
    for rare in (exact.argmin(-1), exact.argmax(-1)):
        torch.testing.assert_close(p.log_prob(rare).exp(), p.mean.gather(1, rare[:, None])[:, 0])
    alone = replace(p, means=p.means[:, 7:8], cov=p.cov[:, 7:8])  # an input's nodes do not depend on the others
    torch.testing.assert_close(alone.mean, p.mean[7:8])
    shifted = replace(p, means=p.means + 5, cov=p.cov + 3)  # of which softmax knows nothing
    torch.testing.assert_close(shifted.mean, p.mean, rtol=0, atol=1e-6)


def test_nodes_follow_the_spread_at_every_pixel_and_over_components():
    mean, root = gaussian_logits(4, 2.0, inputs=24)
    params = {"likelihood:log_scale": torch.tensor([[0.2], [-0.1]], dtype=DOUBLE)}
    both = torch.stack([mean, mean.flip(0)]), torch.stack([root @ root.mT, 0.01 * root @ root.mT])
    flat = LatentMixture(Categorical(scale=None), *both, weights=torch.tensor([0.3, 0.7], dtype=DOUBLE), params=params)
    means, cov = flat.means.reshape(2, 2, 3, 4, 4), flat.cov.reshape(2, 2, 3, 4, 4, 4)
    image = replace(flat, likelihood=Categorical(scale=None, dim=1), means=means, cov=cov)
    torch.testing.assert_close(image.mean, flat.mean.reshape(2, 3, 4, 4))
    torch.testing.assert_close(image.uncertainty.total, flat.uncertainty.total.reshape(2, 3, 4))
    y = torch.arange(24) % 4
    y[5] = -100
    torch.testing.assert_close(image.log_prob(y.reshape(2, 3, 4)), flat.log_prob(y).reshape(2, 12).sum(1))
    fixed = replace(flat, quadrature=2**14)
    torch.testing.assert_close(flat.mean, fixed.mean, rtol=0, atol=0.003)
    diagonal = replace(flat, cov=flat.cov.diagonal(dim1=-2, dim2=-1))
    torch.testing.assert_close(diagonal.mean, replace(diagonal, quadrature=2**14).mean, rtol=0, atol=0.003)


@pytest.mark.parametrize("covariance", ["diagonal", "dense"])
def test_labels_are_integrals_of_one_dimension(covariance):
    """Nodes in all dimensions at once were off by up to .03."""
    torch.manual_seed(0)
    mean, root = 2 * torch.randn(20, 6, dtype=DOUBLE), 1.5 * torch.randn(20, 6, 6, dtype=DOUBLE)
    cov = root @ root.mT
    variance = cov.diagonal(dim1=1, dim2=2)
    p = LatentMixture(Bernoulli(), mean[None], (cov if covariance == "dense" else variance)[None])
    t = torch.linspace(-9, 9, 4001, dtype=DOUBLE)
    density = torch.exp(-0.5 * t * t) / torch.exp(-0.5 * t * t).sum()
    on = torch.sigmoid(mean[..., None] + variance.sqrt()[..., None] * t)  # [20, 6, n]
    noise = entropy(torch.stack([on, 1 - on], -1)) @ density
    exact = on @ density
    torch.testing.assert_close(p.mean, exact, rtol=0, atol=1e-4)
    torch.testing.assert_close(p.complement, 1 - exact, rtol=0, atol=1e-4)
    torch.testing.assert_close(p.log_forecasts, exact.logit(), rtol=0, atol=2e-3)
    torch.testing.assert_close(p.uncertainty.aleatoric, noise.sum(-1), rtol=0, atol=1e-3)
    if covariance == "diagonal":
        y = (torch.rand(20, 6) < 0.5).to(DOUBLE)
        score = torch.where(y == 1, exact, 1 - exact).log().sum(-1)
        torch.testing.assert_close(p.log_prob(y), score, rtol=1e-3, atol=1e-3)
        two = replace(p, means=p.means.expand(2, -1, -1), cov=p.cov.expand(2, -1, -1), quadrature=64)
        torch.testing.assert_close(two.log_prob(y), score, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("likelihood", [Categorical(), HeteroscedasticCategorical(), Bernoulli()])
def test_an_input_that_is_nan_spoils_no_other(likelihood):
    """The eigenvalues of a matrix of NaN are an error of the linear algebra library, which took the whole batch with it."""
    p = predictive(likelihood, covariance="dense", width=4)
    means, cov = p.means.clone(), p.cov.clone()
    means[:, 1], cov[:, 1] = torch.nan, torch.nan
    mean = replace(p, means=means, cov=cov).mean
    assert mean[1].isnan().all()
    torch.testing.assert_close(mean[[0, 2]], p.mean[[0, 2]])


@pytest.mark.parametrize("deviation", [1.0, 3.0])
def test_labels_and_tasks_that_go_together_against_draws(deviation):
    """With 128 nodes whatever the spread, probabilities of a task were off by .03 and those of two labels together by .01."""
    torch.manual_seed(4)
    tasks = MultiTask({"number": (Gaussian(0.5), 1), "class": (Categorical(), 3), "labels": (Bernoulli(), 2)})
    root = torch.randn(8, 6, 6)
    root = deviation * root / root.norm(dim=-1, keepdim=True)
    p = LatentMixture(tasks, deviation * torch.randn(1, 8, 6), (root @ root.mT).unsqueeze(0))
    f = p.means + (root @ torch.randn(200_000, 8, 6, 1)).squeeze(-1)  # [S, B, C]
    torch.testing.assert_close(p.mean[:, 1:4], f[..., 1:4].softmax(-1).mean(0), rtol=0, atol=0.004)
    torch.testing.assert_close(p.mean[:, 4:], f[..., 4:].sigmoid().mean(0), rtol=0, atol=0.004)
    labels, y = p.task("labels"), torch.tensor([1.0, 0.0]).expand(8, 2)
    together = (f[..., 4].sigmoid() * (-f[..., 5]).sigmoid()).mean(0)
    torch.testing.assert_close(labels.log_prob(y).exp(), together, rtol=0, atol=0.004)
    few = replace(labels, means=labels.means[:, 3:4], cov=labels.cov[:, 3:4])  # an input's nodes do not depend on the others
    torch.testing.assert_close(few.log_prob(y[:1]), labels.log_prob(y)[3:4])


@pytest.mark.parametrize("scale", [0.001, 0.05, 1.0, 5.0])
@pytest.mark.parametrize("dof", [2.2, 4.0, 60.0])
def test_student_noise_that_is_small_beside_the_spread_of_the_outputs(scale, dof):
    y = torch.tensor([[0.0], [0.013], [1.0], [4.0]], dtype=DOUBLE)
    p = LatentMixture(StudentT(scale, dof=dof), torch.zeros(1, 4, 1, dtype=DOUBLE), cov=torch.ones(1, 4, 1, dtype=DOUBLE))

    def density(at: float) -> float:
        near = [at + sign * scale * 10**k for sign in (-1, 1) for k in range(5)]
        parts = pairwise(sorted({max(-9.0, min(9.0, mark)) for mark in (-9.0, at, 9.0, *near)}))
        return sum(quad(lambda f: norm.pdf(f) * t.pdf((at - f) / scale, dof) / scale, *ends, limit=500)[0] for ends in parts)

    exact = torch.tensor([density(float(at)) for at in y]).log()
    torch.testing.assert_close(p.log_prob(y), exact.double(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("scale", [0.01, 0.3, 2.0])
@pytest.mark.parametrize("dof", [2.5, 4.0, 30.0])
def test_the_joint_score_of_two_correlated_outputs_with_student_noise(scale, dof):
    """Against an integral over the noise itself, at points e = scale sinh(z)."""
    cov = torch.tensor([[1.0, 0.9], [0.9, 1.5]], dtype=DOUBLE)
    y = torch.tensor([[0.3, 0.2], [-0.5, 1.0], [2.0, -1.0]], dtype=DOUBLE)
    p = LatentMixture(StudentT((scale, 2 * scale), dof=dof), torch.zeros(1, 3, 2, dtype=DOUBLE), cov=cov.expand(1, 3, 2, 2))
    z = torch.linspace(-14, 14, 2001, dtype=DOUBLE)
    parts = torch.from_numpy(t.logpdf(z.sinh().numpy(), dof)) + z.cosh().log() + math.log(28 / 2000)
    noise = scale * torch.stack(torch.meshgrid(z.sinh(), 2 * z.sinh(), indexing="ij"), -1)
    gaussian = torch.distributions.MultivariateNormal(torch.zeros(2, dtype=DOUBLE), cov, validate_args=False)
    exact = torch.stack([(gaussian.log_prob(at - noise) + parts[:, None] + parts).flatten().logsumexp(0) for at in y])
    torch.testing.assert_close(p.log_prob(y), exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("likelihood", [StudentT(0.05), HeteroscedasticStudentT()], ids=["known", "predicted"])
def test_the_joint_score_of_three_correlated_outputs_with_student_noise(likelihood, monkeypatch):
    """Against draws of the noise, for two draws of the degrees of freedom; rows are looked at in pieces."""
    monkeypatch.setattr("dubito.model.likelihoods.student_t.MANY", 2 * 32**3)
    source = torch.Generator().manual_seed(0)
    root = torch.randn(3, 3, dtype=DOUBLE, generator=source)
    means, dofs = torch.randn(2, 3, 3, dtype=DOUBLE, generator=source), torch.tensor([2.5, 7.0], dtype=DOUBLE)
    cov, y = root @ root.mT, torch.randn(3, 3, dtype=DOUBLE, generator=source)
    f, spread = means, cov
    if isinstance(likelihood, HeteroscedasticStudentT):
        f = torch.cat([means, torch.full_like(means, 2 * math.log(0.05))], -1)
        spread = torch.block_diag(cov, torch.zeros(3, 3, dtype=DOUBLE))
    p = LatentMixture(
        likelihood, f, cov=spread.expand(2, 3, *spread.shape), params={"likelihood:log_dof": (dofs - 2).log().unsqueeze(1)}
    )
    exact = []
    for mean, dof in zip(means, dofs, strict=True):
        noise = 0.05 * torch.from_numpy(t.rvs(float(dof), size=(200_000, 3), random_state=0))
        gaussian = torch.distributions.MultivariateNormal(torch.zeros(3, dtype=DOUBLE), cov, validate_args=False)
        exact.append((gaussian.log_prob((y - mean).unsqueeze(1) - noise)).logsumexp(1) - math.log(200_000))
    torch.testing.assert_close(p.log_prob(y), torch.stack(exact).logsumexp(0) - math.log(2), rtol=0, atol=0.01)
    torch.testing.assert_close(p.quantile(0.9), replace(p, cov=p.variances).quantile(0.9))


def test_student_outputs_that_hang_together_have_exact_quantiles_one_by_one():
    cov = torch.tensor([[1.0, 0.9], [0.9, 1.0]], dtype=DOUBLE)
    p = LatentMixture(StudentT(0.01, dof=4.0), torch.zeros(1, 1, 2, dtype=DOUBLE), cov=cov.expand(1, 1, 2, 2))
    alone = replace(p, cov=torch.ones(1, 1, 2, dtype=DOUBLE))
    for level in (0.3, 0.95):
        torch.testing.assert_close(p.quantile(level), alone.quantile(level))
    torch.testing.assert_close(p.quantile(0.95), torch.full((1, 2), 1.645, dtype=DOUBLE), atol=2e-3, rtol=0)


def test_a_predicted_student_scale_under_a_gaussian_against_draws():
    f, spread = torch.tensor([[[0.0, -6.0]]], dtype=DOUBLE), torch.tensor([[[1.0, 0.5]]], dtype=DOUBLE)
    y = torch.tensor([[0.1], [2.5]], dtype=DOUBLE)
    p = LatentMixture(HeteroscedasticStudentT(dof=4.0), f.expand(1, 2, 2), cov=spread.expand(1, 2, 2))
    unit = torch.randn(400_000, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    scale = (-3.0 + 0.5 * math.sqrt(0.5) * unit[:, 1]).exp()
    exact = torch.stack([torch.distributions.StudentT(4.0, unit[:, 0], scale).log_prob(at).exp().mean().log() for at in y])
    torch.testing.assert_close(p.log_prob(y), exact, rtol=0, atol=0.03)


def test_a_joint_score_reads_targets_as_other_scores_do():
    p = LatentMixture(NextToken(), torch.randn(3, 2, 4, 5, generator=torch.Generator().manual_seed(0)))
    tokens = [[0, 1, 2, 3], [4, 3, 2, 1]]
    torch.testing.assert_close(p.joint_log_prob(tokens), p.joint_log_prob(torch.tensor(tokens)))
    with pytest.raises(ValueError, match="the targets go from 0 to 5, but the network has 5 classes"):
        p.joint_log_prob(torch.tensor([[0, 5, 1, 1], [0, 0, 0, 0]]))


@pytest.mark.parametrize("likelihood", [HeteroscedasticGaussian(), StudentT(0.3, dof=4.0), Gaussian(scale=0.4)])
def test_a_mean_that_is_linear_in_the_outputs_needs_no_nodes(likelihood):
    p = predictive(likelihood, covariance="diagonal")
    assert torch.allclose(p.mean, average(p.probs, p.draw_weights))
    plain = predictive(likelihood, covariance="diagonal")
    assert torch.equal(plain.mean, p.mean)
    assert not {"probs", "_nodes", "_line_nodes"} & vars(plain).keys()


@pytest.mark.parametrize("spread", [0.5, 2.0])
def test_several_counts_are_as_exact_as_one(spread):
    """With 128 nodes for all outputs, the means of three counts were off by an eighth at a spread of 2, and their variances by most."""
    source = torch.Generator().manual_seed(0)
    means, variance = torch.randn(1, 2, 3, dtype=DOUBLE, generator=source), torch.tensor(spread**2, dtype=DOUBLE)
    p = LatentMixture(Poisson(), means, cov=variance.expand_as(means))
    rate = (means[0] + variance / 2).exp()
    torch.testing.assert_close(p.mean, rate)
    torch.testing.assert_close(p.uncertainty.epistemic, rate**2 * variance.expm1(), rtol=1e-5, atol=0)
    y = torch.tensor([[0.0, 3.0, 9.0], [1.0, 2.0, 0.0]], dtype=DOUBLE)
    alone = [replace(p, means=means[..., i : i + 1], cov=p.cov[..., i : i + 1]) for i in range(3)]
    torch.testing.assert_close(p.log_prob(y), sum(one.log_prob(y[:, i : i + 1]) for i, one in enumerate(alone)))
    torch.testing.assert_close(p.quantile(0.9), torch.cat([one.quantile(0.9) for one in alone], -1))


@pytest.mark.parametrize("likelihood", [Poisson(), NegativeBinomial(0.4)])
def test_correlated_counts_against_draws(likelihood):
    cov = torch.tensor([[1.0, 0.8], [0.8, 1.0]], dtype=DOUBLE)
    p = LatentMixture(likelihood, torch.ones(1, 1, 2, dtype=DOUBLE), cov=cov.expand(1, 1, 2, 2))
    source = torch.Generator().manual_seed(0)
    f = 1 + torch.randn(400_000, 2, dtype=DOUBLE, generator=source) @ torch.linalg.cholesky(cov).mT
    y = torch.tensor([[4.0, 1.0]], dtype=DOUBLE)
    exact = likelihood.log_prob(f, y, {}).logsumexp(0) - math.log(len(f))
    torch.testing.assert_close(p.log_prob(y)[0], exact, rtol=0, atol=0.01)
    torch.testing.assert_close(p.mean, (torch.ones(1, 2, dtype=DOUBLE) * 1.5).exp())
