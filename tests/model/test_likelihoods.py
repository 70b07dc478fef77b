"""Every closed form against the base class's Monte Carlo default, torch.distributions or brute force."""

import math

import pytest
import torch
from dubito.likelihoods.likelihood import _unit_nodes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Bernoulli as TorchBernoulli
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Gamma, MultivariateNormal, Normal

from dubito import Bernoulli, Categorical, Gaussian, HeteroscedasticCategorical, HeteroscedasticGaussian, MultiTask
from dubito.likelihoods import Likelihood, Uncertainty, align, entropy, nodes

DOUBLE = torch.float64
LOG_SCALE = {"likelihood:log_scale": torch.tensor([-0.4], dtype=DOUBLE)}
LOG_SCALES = {"likelihood:log_scale": torch.tensor([-0.4, 0.3, 0.1, -0.2], dtype=DOUBLE)}
TASKS = MultiTask(
    {"depth": (Gaussian(), 1), "label": (Categorical(scale=None), 2), "tags": (Bernoulli(), 1)}
)  # 4 outputs, 3 targets
TASK_SCALES = {
    "likelihood:depth.log_scale": torch.tensor([-0.4], dtype=DOUBLE),
    "likelihood:label.log_scale": torch.tensor([0.2], dtype=DOUBLE),
}

CASES = {
    "gaussian": (Gaussian(scale=0.7), {}),
    "gaussian, a scale each": (Gaussian(scale=(0.5, 1.0, 2.0, 0.7)), {}),
    "gaussian, learned": (Gaussian(), LOG_SCALE),
    "gaussian, learned each": (Gaussian(outputs=4), LOG_SCALES),
    "heteroscedastic gaussian": (HeteroscedasticGaussian(), {}),
    "categorical": (Categorical(), {}),
    "categorical, scaled": (Categorical(scale=1.5), {}),
    "categorical, learned": (Categorical(scale=None), LOG_SCALE),
    "heteroscedastic categorical": (HeteroscedasticCategorical(), {}),
    "bernoulli": (Bernoulli(), {}),
    "bernoulli, scaled": (Bernoulli(scale=1.5), {}),
    "bernoulli, learned": (Bernoulli(scale=None), LOG_SCALE),
    "tasks": (TASKS, TASK_SCALES),
}
every = pytest.mark.parametrize(("likelihood", "params"), CASES.values(), ids=CASES)


def outputs(*shape: int, seed: int = 0, dtype=DOUBLE) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def sampled(likelihood: Likelihood, f: torch.Tensor, params, n: int) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return likelihood(f, params).sample((n,))


# --- closed forms against the defaults -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in CASES if name != "heteroscedastic categorical"])
def test_fisher_against_monte_carlo(name):
    likelihood, params = CASES[name]
    f = outputs(3, 4)
    closed = likelihood.fisher(f, params)
    default = Likelihood.fisher(likelihood, f, params, draws=60_000)
    assert closed.shape == (3, 4, 4)
    assert closed.dtype == DOUBLE
    torch.testing.assert_close(closed, default, rtol=0.03, atol=0.015 * closed.abs().max().item())
    assert (torch.linalg.eigvalsh(closed) > -1e-9).all()


@pytest.mark.parametrize("name", ["categorical", "categorical, scaled", "categorical, learned", "bernoulli, learned"])
def test_fisher_is_the_hessian_where_that_does_not_depend_on_y(name):
    likelihood, params = CASES[name]
    f = outputs(4)
    y = torch.tensor(1) if isinstance(likelihood, Categorical) else torch.tensor([0.0, 1, 1, 0], dtype=DOUBLE)
    hessian = torch.autograd.functional.hessian(lambda f: -likelihood.log_prob(f, y, params), f)
    torch.testing.assert_close(likelihood.fisher(f, params), hessian)


@every
@pytest.mark.parametrize("positions", [(3,), (2, 3)])
def test_roots_of_the_fisher_information(likelihood, params, positions):
    f = outputs(*positions, 4)
    root = likelihood.fisher_root(f, params)  # [K, ..., C]
    assert root.shape[1:] == f.shape
    together = torch.einsum("k...c,k...d->...cd", root, root)
    torch.testing.assert_close(together, likelihood.fisher(f, params), rtol=1e-9, atol=1e-10)
    default = Likelihood.fisher_root(likelihood, f, params)
    torch.testing.assert_close(torch.einsum("k...c,k...d->...cd", default, default), together, rtol=1e-7, atol=1e-9)
    assert len(root) <= 4


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_roots_of_confident_classes(dtype):
    """Probabilities that round to 0 and 1, in any order of the classes."""
    f = torch.tensor([[200.0, 0, -200], [-200, 0, 200], [0, 200, -200], [0, 0, 0], [90, 90, -90]], dtype=dtype)
    root = Categorical().fisher_root(f, {})
    assert torch.isfinite(root).all()
    torch.testing.assert_close(torch.einsum("knc,knd->ncd", root, root), Categorical().fisher(f, {}), rtol=1e-5, atol=1e-6)


def test_the_fisher_of_noisy_logits_does_not_depend_on_the_company():
    f = outputs(5, 6)
    likelihood = HeteroscedasticCategorical()
    alone = torch.cat([likelihood.fisher(f[i : i + 1], {}) for i in range(5)])
    torch.testing.assert_close(likelihood.fisher(f, {}), alone, rtol=1e-12, atol=1e-14)


def test_noise_that_is_learned_is_grouped_by_output():
    assert Gaussian().noise_groups(3).tolist() == [0, 0, 0]
    assert Gaussian(outputs=3).noise_groups(3).tolist() == [0, 1, 2]
    for name, (likelihood, params) in CASES.items():
        groups = likelihood.noise_groups(4)
        assert (groups is not None) == (name in ("gaussian, learned", "gaussian, learned each"))
        if groups is not None:
            fisher = likelihood.fisher(outputs(1, 4), params)[0]
            torch.testing.assert_close(fisher, torch.diag((-2 * params["likelihood:log_scale"]).exp()[groups]))


def test_what_is_there_at_all():
    assert Gaussian(scale=1.0).observed(outputs(3, 2)) is None
    assert Categorical().observed(torch.tensor([0, 1])) is None
    assert Categorical(ignore_index=9).observed(torch.tensor([[0, 9], [9, 1]])).tolist() == [[True, False], [False, True]]
    tasks = MultiTask({"depth": (HeteroscedasticGaussian(), 2), "label": (Categorical(), 3)})
    y = tasks.target({"depth": outputs(3, 1), "label": torch.tensor([1, -100, 2])}, outputs(3, 5))
    assert tasks.observed(y).tolist() == [[True] * 5, [True, True, False, False, False], [True] * 5]
    assert tasks.observed(y[[0, 2]]) is None


def test_fisher_of_noisy_logits_against_all_classes():
    likelihood, f = HeteroscedasticCategorical(), outputs(6)
    slopes = torch.func.jacrev(lambda f: likelihood.log_probs(f, {}))(f)  # [classes, 6]
    exact = torch.einsum("k,kc,kd->cd", likelihood.mean(f, {}), slopes, slopes)
    torch.testing.assert_close(likelihood.fisher(f, {}, draws=20_000), exact, rtol=0.03, atol=0.005)


def test_the_default_fisher_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    first = Likelihood.fisher(Gaussian(scale=1.0), outputs(2, 1), {})
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first, Likelihood.fisher(Gaussian(scale=1.0), outputs(2, 1), {}))


@every
def test_log_prob_and_mean_are_those_of_the_distribution(likelihood, params):
    f = outputs(3, 2, 4)
    y = sampled(likelihood, f, params, 5)  # [5, 3, 2, *event]
    closed = likelihood.log_prob(f.expand(5, *f.shape), y, params)
    torch.testing.assert_close(closed, likelihood(f, params).log_prob(y))
    distribution = likelihood(f, params)
    mean = distribution.probs if isinstance(distribution, TorchCategorical) else distribution.mean
    torch.testing.assert_close(likelihood.mean(f, params), mean)


def test_log_prob_against_torch():
    f, y, k = outputs(5, 4), outputs(5, 4, seed=1), torch.tensor([0, 3, 1, 2, 0])
    labels = (y > 0).double()
    each = torch.tensor([0.5, 1.0, 2.0, 0.7], dtype=DOUBLE)
    close = torch.testing.assert_close
    close(Gaussian(scale=tuple(each.tolist())).log_prob(f, y, {}), Normal(f, each).log_prob(y).sum(-1))
    close(Gaussian(outputs=4).log_prob(f, y, LOG_SCALES), Normal(f, LOG_SCALES["likelihood:log_scale"].exp()).log_prob(y).sum(-1))
    two = y[:, :2]
    close(HeteroscedasticGaussian().log_prob(f, two, {}), Normal(f[:, :2], f[:, 2:].exp().sqrt()).log_prob(two).sum(-1))
    close(Categorical().log_prob(f, k, {}), TorchCategorical(logits=f).log_prob(k))
    close(Categorical(scale=2.0).log_prob(f, k, {}), TorchCategorical(logits=f / 4).log_prob(k))
    close(Categorical(scale=None).log_prob(f, k, LOG_SCALE), TorchCategorical(logits=f * math.exp(0.8)).log_prob(k))
    close(Bernoulli().log_prob(f, labels, {}), TorchBernoulli(logits=f).log_prob(labels).sum(-1))
    close(Bernoulli(scale=2.0).log_prob(f, labels, {}), TorchBernoulli(logits=f / 4).log_prob(labels).sum(-1))


@every
def test_gradients(likelihood, params):
    f = outputs(2, 4).requires_grad_()
    y = sampled(likelihood, f.detach(), params, 1)[0]
    names, leaves = list(params), [leaf.clone().requires_grad_() for leaf in params.values()]
    assert torch.autograd.gradcheck(
        lambda f, *leaves: likelihood.log_prob(f, y, dict(zip(names, leaves, strict=True))), (f, *leaves)
    )


@every
def test_uncertainty_against_brute_force(likelihood, params):
    f, weights = outputs(3, 2, 4), torch.tensor([0.2, 0.3, 0.5], dtype=DOUBLE)
    split = likelihood.uncertainty(f, weights, params)
    torch.testing.assert_close(split.total, split.aleatoric + split.epistemic)
    if isinstance(likelihood, MultiTask):
        parts = likelihood.split(f)
        alone = [likelihood.tasks[n][0].uncertainty(parts[n], weights, likelihood.of(n, params)) for n in parts]
        columns = [u.total if u.total.ndim == 2 else u.total[:, None] for u in alone]
        torch.testing.assert_close(split.total, torch.cat(columns, -1))
        return
    if not likelihood.discrete:
        y = sampled(likelihood, f, params, 200_000)  # [n, S, B, T]
        w = weights[:, None, None]
        mean, inner = (w * y.mean(0)).sum(0), (w * y.var(0)).sum(0)
        torch.testing.assert_close(split.aleatoric, inner, rtol=0.02, atol=0)
        torch.testing.assert_close(split.total, (w * (y - mean).square().mean(0)).sum(0), rtol=0.02, atol=0)
        return

    def mean_entropy(probs):  # [..., C] by a plain loop over the choices
        choices = [probs] if not isinstance(likelihood, Bernoulli) else [torch.stack([p, 1 - p], -1) for p in probs.unbind(-1)]
        return sum(-(q * q.log()).sum(-1) for q in choices)

    probs = likelihood.mean(f, params)
    torch.testing.assert_close(split.total, mean_entropy(sum(w * p for w, p in zip(weights, probs, strict=True))))
    torch.testing.assert_close(split.aleatoric, sum(w * mean_entropy(p) for w, p in zip(weights, probs, strict=True)))


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("dense", [False, True])
def test_convolution_against_monte_carlo(dense, learned):
    likelihood, params = CASES["gaussian, learned each" if learned else "gaussian, a scale each"]
    m, y, root = outputs(2, 4), outputs(2, 4, seed=1), 0.5 * outputs(2, 4, 4, seed=2)
    cov = root @ root.mT if dense else root[..., 0] ** 2
    f = MultivariateNormal(m, cov + 1e-9 * torch.eye(4)) if dense else Normal(m, cov.sqrt())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        scores = likelihood.log_prob(f.sample((300_000,)), y, params)
    exact = likelihood.convolve(m, cov, params)
    assert exact is not None
    torch.testing.assert_close(exact.log_prob(y).exp(), scores.exp().mean(0), rtol=0.03, atol=0)
    assert Categorical().convolve(m, cov, {}) is None


# --- learned noise ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", [Gamma(0.5, 1.0), Gamma(2.0, 3.0)])
def test_the_noise_prior_is_a_density_in_log_scale(prior):
    grid = torch.linspace(-12, 40, 20_001, dtype=DOUBLE)  # Gamma(1/2, 1) has a long tail of small precisions
    likelihood = Gaussian(prior=prior)
    density = torch.func.vmap(lambda s: likelihood.log_prior({"likelihood:log_scale": s[None]}))(grid).exp()
    assert torch.trapezoid(density, grid).item() == pytest.approx(1, abs=1e-4)
    # the same belief as that about the precision: P(precision < 1) = P(log scale > 0)
    expected = prior.cdf(torch.tensor(1.0)).item()
    assert torch.trapezoid(density[grid > 0], grid[grid > 0]).item() == pytest.approx(expected, abs=2e-3)


def test_the_noise_prior_adds_up_over_outputs_and_is_optional():
    prior = Gamma(0.5, 1.0)
    both = {"likelihood:log_scale": torch.tensor([0.3, -1.0])}
    one = [Gaussian(prior=prior).log_prior({"likelihood:log_scale": s[None]}) for s in both["likelihood:log_scale"]]
    torch.testing.assert_close(Gaussian(outputs=2, prior=prior).log_prior(both), one[0] + one[1])
    assert Gaussian(outputs=2).log_prior(both) == 0
    assert Gaussian(scale=1.0).log_prior({}) == 0
    tasks = MultiTask({"a": (Gaussian(prior=prior), 1), "b": (Categorical(), 2)})
    assert tasks.log_prior({"likelihood:a.log_scale": torch.tensor([0.3])}) == one[0]


def test_learned_noise_starts_at_the_spread_of_the_targets():
    torch.manual_seed(0)
    y = torch.randn(5000, 2) * torch.tensor([0.1, 10.0])
    start = Gaussian(outputs=2).parameters(y)["likelihood:log_scale"].exp()
    torch.testing.assert_close(start, torch.tensor([0.1, 10.0]), rtol=0.05, atol=0)
    images = y.reshape(50, 10, 10, 2).movedim(-1, 1)  # NCHW
    torch.testing.assert_close(Gaussian(outputs=2, dim=1).parameters(images)["likelihood:log_scale"].exp(), start)
    assert Gaussian().parameters(y[:, 0])["likelihood:log_scale"].exp().item() == pytest.approx(0.1, rel=0.05)
    assert Gaussian(outputs=2).parameters()["likelihood:log_scale"].tolist() == [0, 0]
    assert torch.isfinite(Gaussian().parameters(torch.ones(4))["likelihood:log_scale"]).all()
    assert Gaussian(scale=1.0).parameters(y) == Categorical().parameters() == Bernoulli().parameters() == {}
    assert list(Categorical(scale=None).parameters()) == list(Bernoulli(scale=None).parameters()) == list(LOG_SCALE)


def test_stacked_noise_belongs_to_its_draw():
    f, y = outputs(3, 5, 2), outputs(5, 2, seed=1)
    stacked = {"likelihood:log_scale": torch.tensor([[0.0], [1.0], [2.0]], dtype=DOUBLE)}
    together = Gaussian().log_prob(f, y, align(stacked, f))
    alone = [Gaussian().log_prob(f[s], y, {"likelihood:log_scale": stacked["likelihood:log_scale"][s]}) for s in range(3)]
    torch.testing.assert_close(together, torch.stack(alone))


# --- noise on the logits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0])
def test_noisy_logits_against_monte_carlo(spread):
    f = torch.cat([outputs(5, 4), torch.full((5, 4), 2 * math.log(spread), dtype=DOUBLE)], -1)
    noise = outputs(100_000, 5, 4, seed=1)
    expected = (f[:, :4] + spread * noise).softmax(-1).mean(0)
    probs = HeteroscedasticCategorical().mean(f, {})
    torch.testing.assert_close(probs.sum(-1), torch.ones(5, dtype=DOUBLE))
    torch.testing.assert_close(probs, expected, rtol=0, atol=0.01 if spread <= 1 else 0.03)
    many = HeteroscedasticCategorical(samples=4096).mean(f, {})
    torch.testing.assert_close(many, expected, rtol=0, atol=0.004)


@given(st.integers(1, 64), st.integers(1, 12))
@settings(max_examples=20, deadline=None)
def test_nodes_have_the_moments_of_a_standard_normal(half, width):
    points = nodes(2 * half, torch.zeros(1, width, dtype=DOUBLE))
    assert points.shape == (2 * half, width)
    torch.testing.assert_close(points.mean(0), torch.zeros(width, dtype=DOUBLE), rtol=0, atol=1e-12)
    if half > width:
        torch.testing.assert_close(points.mT @ points / (2 * half), torch.eye(width, dtype=DOUBLE), rtol=0, atol=1e-9)


def test_nodes_are_the_same_every_time():
    _unit_nodes.cache_clear()
    before = torch.get_rng_state()
    with torch.inference_mode():  # what is cached here must serve training later
        first = nodes(8, torch.zeros(3, dtype=DOUBLE)).clone()
    assert torch.equal(before, torch.get_rng_state())
    f = torch.zeros(1, 6, dtype=DOUBLE, requires_grad=True)
    HeteroscedasticCategorical(samples=8).log_probs(f, {}).sum().backward()
    _unit_nodes.cache_clear()
    batched = torch.func.vmap(HeteroscedasticCategorical(samples=8).log_probs, (0, None))(f[None].detach(), {})
    assert torch.equal(batched[0], HeteroscedasticCategorical(samples=8).log_probs(f, {}))
    assert torch.equal(first, nodes(8, torch.zeros(3, dtype=DOUBLE)))
    for wrong in (0, 7):
        with pytest.raises(ValueError, match="even"):
            nodes(wrong, torch.zeros(3))


# --- several tasks ---------------------------------------------------------------------------------------------------


def test_tasks_add_up():
    f = outputs(6, 4)
    y = {"depth": outputs(6, 1, seed=1), "label": torch.tensor([0, 1, 1, 0, 1, 0]), "tags": torch.ones(6)}
    parts = TASKS.split(f)
    alone = sum(
        part.log_prob(parts[n], part.target(y[n], parts[n]), TASKS.of(n, TASK_SCALES)) for n, (part, _) in TASKS.tasks.items()
    )
    side_by_side = torch.cat([y["depth"], y["label"][:, None].double(), y["tags"][:, None]], -1)
    for targets in (y, side_by_side):
        TASKS.check(f, targets)
        torch.testing.assert_close(TASKS.log_prob(f, TASKS.target(targets, f), TASK_SCALES), alone)
    assert sampled(TASKS, f, TASK_SCALES, 2).dtype == DOUBLE
    learned = TASKS.parameters({"depth": 3 * outputs(500, 1)})
    assert list(learned) == list(TASK_SCALES)
    assert learned["likelihood:depth.log_scale"].exp().item() == pytest.approx(3, rel=0.1)


def test_the_loss_of_tasks_is_that_of_the_paper():
    # Kendall, Gal & Cipolla (2018): |y - f|^2 / (2 sigma^2) + log sigma, and softmax(f / sigma^2)
    f, y = outputs(1, 4), {"depth": torch.tensor([0.3]), "label": torch.tensor([1]), "tags": torch.tensor([0.0])}
    loss = -TASKS.log_prob(f, TASKS.target(y, f), TASK_SCALES)
    sigma1, sigma2 = math.exp(-0.4), math.exp(0.2)
    depth = (0.3 - f[0, 0]) ** 2 / (2 * sigma1**2) + math.log(sigma1) + 0.5 * math.log(2 * math.pi)
    label = torch.nn.functional.cross_entropy(f[:, 1:3] / sigma2**2, y["label"])
    torch.testing.assert_close(loss[0], depth + label + torch.nn.functional.softplus(f[0, 3]))


@pytest.mark.parametrize("as_dict", [False, True])
def test_tasks_of_images(as_dict):
    tasks = MultiTask({"depth": (Gaussian(scale=1.0), 2), "label": (Categorical(), 3)}, dim=1)
    depth, label = outputs(2, 2, 4, 5), torch.randint(3, (2, 4, 5))
    y = {"depth": depth, "label": label} if as_dict else torch.cat([depth, label[:, None].double()], 1)  # NCHW
    expected = torch.cat([depth, label[:, None].double()], 1).movedim(1, -1)
    assert torch.equal(tasks.target(y, outputs(2, 4, 5, 5)), expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MultiTask({}), "needs tasks"),
        (lambda: TASKS.split(outputs(2, 5)), r"\[1, 2, 1\] outputs, 4 in all, but the network gives 5"),
        (lambda: TASKS.target({"depth": outputs(2, 1)}, outputs(2, 4)), r"lack the tasks \['label', 'tags'\]"),
        (lambda: TASKS.target(outputs(2, 4), outputs(2, 4)), r"is \[..., 3\]; got \[2, 4\]"),
        (lambda: TASKS.check(outputs(2, 4), torch.full((2, 3), 5.0)), "the network has 2 classes"),
    ],
)
def test_tasks_that_do_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- targets ---------------------------------------------------------------------------------------------------------

numbers, indices = torch.zeros, lambda *shape: torch.zeros(*shape, dtype=torch.long)


@pytest.mark.parametrize(
    ("likelihood", "f", "y", "shape"),
    [
        (Gaussian(scale=1.0), (4, 1), numbers(4), (4, 1)),
        (Gaussian(scale=1.0), (4, 1), numbers(4, 1), (4, 1)),
        (Gaussian(scale=1.0), (4, 3), numbers(4, 3), (4, 3)),
        (Gaussian(scale=1.0), (4, 5, 1), numbers(4, 5), (4, 5, 1)),
        (Gaussian(scale=1.0, dim=1), (4, 5, 6, 2), numbers(4, 2, 5, 6), (4, 5, 6, 2)),
        (Gaussian(scale=1.0, dim=1), (4, 5, 6, 1), numbers(4, 5, 6), (4, 5, 6, 1)),
        (Gaussian(scale=1.0), (4, 1), indices(4), (4, 1)),
        (HeteroscedasticGaussian(), (4, 2), numbers(4), (4, 1)),
        (HeteroscedasticGaussian(), (4, 6), numbers(4, 3), (4, 3)),
        (Categorical(), (4, 3), indices(4), (4,)),
        (Categorical(), (4, 3), indices(4, 1), (4,)),
        (Categorical(), (4, 5, 3), indices(4, 5), (4, 5)),
        (Categorical(dim=1), (4, 5, 6, 3), indices(4, 5, 6).to(torch.uint8), (4, 5, 6)),
        (HeteroscedasticCategorical(), (4, 6), indices(4), (4,)),
        (Bernoulli(), (4, 1), indices(4), (4, 1)),
        (Bernoulli(), (4, 3), numbers(4, 3).bool(), (4, 3)),
    ],
)
def test_targets_that_fit(likelihood, f, y, shape):
    target = likelihood.target(y, torch.zeros(f, dtype=DOUBLE))
    assert target.shape == shape
    assert target.dtype == (torch.long if isinstance(likelihood, Categorical | HeteroscedasticCategorical) else DOUBLE)
    likelihood.check(torch.zeros(f), y)
    assert likelihood.log_prob(torch.zeros(f), target, {}).shape == f[:-1]


@pytest.mark.parametrize(
    ("likelihood", "f", "y", "message"),
    [
        (Gaussian(scale=1.0), (4, 3), numbers(4), r"shape \[4\] do not fit Gaussian, which expects \[4, 3\]"),
        (Gaussian(scale=1.0), (4, 3), numbers(4, 1), r"\[4, 1\] do not fit"),
        (Gaussian(scale=1.0), (4, 1), numbers(4, 3), r"\[4, 3\] do not fit"),
        (Gaussian(scale=1.0), (4, 1), numbers(1), r"\[1\] do not fit|\[1, 1\] do not fit"),
        (Gaussian(scale=1.0, dim=1), (4, 5, 6, 2), numbers(4, 5, 6, 2), "do not fit"),
        (Gaussian(scale=1.0), (4, 1), torch.tensor([0, 1, math.nan, 2]), "NaN or infinite"),
        (Gaussian(scale=(1.0, 2.0)), (4, 3), numbers(4, 3), "2 noise scales, but the network has 3 outputs"),
        (Gaussian(outputs=2), (4, 3), numbers(4, 3), "2 noise scales, but the network has 3 outputs"),
        (HeteroscedasticGaussian(), (4, 3), numbers(4), "even number of outputs; the network gives 3"),
        (HeteroscedasticGaussian(), (4, 2), numbers(4, 2), "do not fit"),
        (Categorical(), (4, 3), numbers(4), "integer indices; got floating point"),
        (Categorical(), (4, 3), indices(4, 3), r"\[4, 3\] do not fit .* expected \[4\]"),
        (Categorical(), (4, 3), indices(5), r"\[5\] do not fit"),
        (Categorical(), (4, 3, 5, 6), indices(4, 5, 6), "if the classes stand on another axis, set `dim`"),
        (Categorical(), (2, 3), torch.tensor([0, 3]), "from 0 to 3, but the network has 3 classes"),
        (Categorical(), (2, 3), torch.tensor([-1, 2]), "from -1 to 2, .* ignore_index"),
        (HeteroscedasticCategorical(), (2, 6), torch.tensor([0, 3]), "the network has 3 classes"),
        (Bernoulli(), (3, 1), torch.tensor([0, 1, 2]), "0 or 1; .* use Categorical"),
        (Bernoulli(), (4, 3), numbers(4), "do not fit Bernoulli"),
    ],
)
def test_targets_that_do_not_fit(likelihood, f, y, message):
    with pytest.raises(ValueError, match=message):
        likelihood.check(torch.zeros(f), y)


@pytest.mark.parametrize(
    "call",
    [
        lambda: Gaussian(scale=0.0),
        lambda: Gaussian(scale=-1.0),
        lambda: Gaussian(scale=(1.0, math.nan)),
        lambda: Gaussian(scale=1.0, prior=Gamma(0.5, 1.0)),
        lambda: HeteroscedasticCategorical().log_probs(torch.zeros(2, 3), {}),
    ],
)
def test_settings_that_make_no_sense(call):
    with pytest.raises(ValueError, match="positive standard deviation|leave out `scale`|even number of outputs"):
        call()


@pytest.mark.parametrize("likelihood", [Categorical(ignore_index=255), HeteroscedasticCategorical(ignore_index=255)])
def test_ignored_targets_count_for_nothing(likelihood):
    f, y = outputs(3, 4).requires_grad_(), torch.tensor([1, 255, 0])
    likelihood.check(f, y)
    score = likelihood.log_prob(f, y, {})
    assert score[1] == 0
    (slope,) = torch.autograd.grad(score.sum(), f)
    assert (slope[1] == 0).all()
    assert (slope[[0, 2]] != 0).any()


# --- entropy and the split -------------------------------------------------------------------------------------------


def test_entropy_at_the_edges():
    assert entropy(torch.tensor([1.0, 0.0])) == 0
    assert entropy(torch.tensor([1.0000001, 0.0])) == 0
    assert entropy(torch.full((8,), 0.125)).item() == pytest.approx(math.log(8))


@given(st.floats(0, 10), st.floats(0, 10))
def test_the_parts_add_up_and_none_is_negative(total, aleatoric):
    split = Uncertainty.of(torch.tensor(total), torch.tensor(aleatoric))
    assert split.epistemic >= 0
    torch.testing.assert_close(split.aleatoric + split.epistemic, split.total)


@pytest.mark.parametrize("likelihood", [Categorical(), Categorical(scale=0.7), Bernoulli(), HeteroscedasticGaussian()], ids=repr)
def test_parts_of_the_fisher_information_without_all_of_it(likelihood):
    f = torch.randn(5, 7, 4, dtype=torch.float64)
    whole = likelihood.fisher(f, {})
    torch.testing.assert_close(likelihood.fisher_diagonal(f, {}), whole.diagonal(dim1=-2, dim2=-1))
    torch.testing.assert_close(likelihood.fisher_sum(f, {}), whole.sum((0, 1)))
    v = torch.randn_like(f)
    torch.testing.assert_close(likelihood.fisher_product(f, v, {}), (whole @ v.unsqueeze(-1)).squeeze(-1))


def test_a_sum_over_many_pixels_is_made_in_pieces(monkeypatch):
    f = torch.randn(6, 5, 4, dtype=torch.float64)
    likelihood, seen = HeteroscedasticGaussian(), []
    whole = likelihood.fisher(f, {}).sum((0, 1))
    monkeypatch.setattr("dubito.model.likelihoods.likelihood.PIECE", 7 * 16)
    fisher = HeteroscedasticGaussian.fisher
    monkeypatch.setattr(HeteroscedasticGaussian, "fisher", lambda self, f, params: seen.append(len(f)) or fisher(self, f, params))
    torch.testing.assert_close(likelihood.fisher_sum(f, {}), whole)
    assert seen == [7, 7, 7, 7, 2]


def test_the_least_noise_of_all_outputs():
    learned = torch.tensor([[0.5, 0.2], [0.3, 0.4]]).log()
    assert Gaussian(scale=(0.2, 0.5)).least_noise({}) == 0.2
    assert torch.allclose(Gaussian(outputs=2).least_noise({"likelihood:log_scale": learned}), torch.tensor([0.2, 0.3]))
    assert Categorical().least_noise({}) == 1.0
    tasks = MultiTask({"a": (Gaussian(), 1), "b": (Categorical(), 3), "c": (Gaussian(scale=0.25), 1)})
    assert torch.allclose(tasks.least_noise({"likelihood:a.log_scale": learned[:, :1]}), torch.tensor([0.25, 0.25]))
    assert torch.allclose(tasks.least_noise({"likelihood:a.log_scale": learned[:, 1:]}), torch.tensor([0.2, 0.25]))
    assert MultiTask({"b": (Categorical(), 3), "c": (Gaussian(scale=0.25), 1)}).least_noise({}) == 0.25
