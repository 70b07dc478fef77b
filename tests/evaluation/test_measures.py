"""Measures of uncertainty: the lecture's worked cases, brute force, and what must hold for every predictive."""

import inspect
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import dubito
from dubito import Bernoulli, Categorical, Gaussian, HeteroscedasticCategorical, HeteroscedasticGaussian, MultiTask
from dubito import measures as measures_module
from dubito.measures import MEASURES
from dubito.posteriors.predictive import LatentMixture, Predictive

LN2 = math.log(2)
ENTROPIES = [name for name in MEASURES if not name.endswith("_variance")]
VARIANCES = [name for name in MEASURES if name.endswith("_variance")]

# all draws (1, 0); all (.5, .5); half (1, 0) and half (0, 1)
WORKED = {
    "predictive_entropy": (0.0, LN2, LN2),
    "expected_entropy": (0.0, LN2, 0.0),
    "mutual_information": (0.0, 0.0, LN2),
    "variation_ratio": (0.0, 0.5, 0.5),
    "one_minus_max": (0.0, 0.5, 0.5),
    "margin": (0.0, 1.0, 1.0),
    "total_variance": (0.0, 0.5, 0.5),
    "aleatoric_variance": (0.0, 0.5, 0.0),
    "epistemic_variance": (0.0, 0.0, 0.5),
}


def classes(probs, weights=None, likelihood=None) -> LatentMixture:
    """A predictive whose draws have these class probabilities, [S, B, *D, C]."""
    return LatentMixture(likelihood or Categorical(), torch.as_tensor(probs).log(), weights=weights)


@pytest.mark.parametrize("draws", [2, 10, 14])  # 10 draws in float32: their weights do not add up to 1
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MEASURES)
def test_worked_cases(name, dtype, draws):
    one, other, half = [1.0, 0.0], [0.0, 1.0], [0.5, 0.5]
    probs = torch.tensor([[one, half, one if s % 2 else other] for s in range(draws)], dtype=dtype)
    values = MEASURES[name](classes(probs))
    expected = torch.tensor(WORKED[name], dtype=dtype)
    torch.testing.assert_close(values, expected, rtol=4 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)
    assert (values >= 0).all()
    if draws == 2:  # weights of 1/2 do not round
        assert values[0] == 0


def test_every_measure_is_listed():
    public = {
        name
        for name, value in vars(measures_module).items()
        if inspect.isfunction(value) and value.__module__ == measures_module.__name__ and not name.startswith("_")
    }
    assert {name: f.__name__ for name, f in MEASURES.items()} == {name: name for name in public}


def test_variation_ratio_weighs_votes_and_splits_ties():
    probs = [[[0.5, 0.5, 0.0]], [[0.2, 0.2, 0.6]], [[0.4, 0.3, 0.3]]]
    p = classes(probs, torch.tensor([0.5, 0.3, 0.2]))
    # votes: 0.25 + 0.2, 0.25, 0.3
    assert MEASURES["variation_ratio"](p).item() == pytest.approx(1 - 0.45)


@pytest.mark.parametrize("name", MEASURES)
def test_against_formulas_with_weights(name):
    torch.manual_seed(0)
    q = torch.rand(5, 7, 4, dtype=torch.float64).softmax(-1)
    w = torch.rand(5, dtype=torch.float64)
    w = w / w.sum()
    m = (w[:, None, None] * q).sum(0)
    top = m.sort(-1, descending=True).values
    votes = torch.zeros(7, 4, dtype=torch.float64)
    for s in range(5):
        for b in range(7):
            votes[b, q[s, b].argmax()] += w[s]
    entropy, inner = -(m * m.log()).sum(-1), -(w[:, None] * (q * q.log()).sum(-1)).sum(0)
    noise = (w[:, None] * (1 - (q**2).sum(-1))).sum(0)
    expected = {
        "predictive_entropy": entropy,
        "expected_entropy": inner,
        "mutual_information": entropy - inner,
        "variation_ratio": 1 - votes.amax(-1),
        "one_minus_max": 1 - top[:, 0],
        "margin": 1 - (top[:, 0] - top[:, 1]),
        "total_variance": 1 - (m**2).sum(-1),
        "aleatoric_variance": noise,
        "epistemic_variance": 1 - (m**2).sum(-1) - noise,
    }
    torch.testing.assert_close(MEASURES[name](classes(q, w)), expected[name])


shapes = st.tuples(st.integers(1, 5), st.integers(1, 3), st.lists(st.integers(1, 3), max_size=2), st.integers(1, 4))
likelihoods = st.sampled_from(
    [Categorical(), Bernoulli(), HeteroscedasticCategorical(samples=8), Gaussian(scale=0.3), HeteroscedasticGaussian()]
)


@given(
    shapes,
    st.sampled_from([torch.float32, torch.float64]),
    likelihoods,
    st.sampled_from(["none", "diagonal", "dense"]),
    st.sampled_from([0.1, 3.0, 100.0]),
    st.integers(0, 1000),
)
@example((3, 2, [3], 2), torch.float64, Bernoulli(), "diagonal", 100.0, 66)  # whose mean rounded to more than 1
@settings(max_examples=80, deadline=None)
def test_every_predictive(shape, dtype, likelihood, covariance, scale, seed):
    s, b, d, c = shape
    heteroscedastic = isinstance(likelihood, HeteroscedasticCategorical | HeteroscedasticGaussian)
    outputs = 2 * c if heteroscedastic else c
    generator = torch.Generator().manual_seed(seed)
    f = scale * torch.randn(s, b, *d, outputs, dtype=dtype, generator=generator)
    if heteroscedastic:
        f[..., c:].clamp_(-10, 10)
    cov = None
    if covariance == "diagonal":
        cov = torch.rand(f.shape, dtype=dtype, generator=generator)
    elif covariance == "dense":
        root = torch.randn(*f.shape, outputs, dtype=dtype, generator=generator)
        cov = root @ root.mT
    p = LatentMixture(likelihood, f, cov, quadrature=16)
    values = {name: MEASURES[name](p) for name in (MEASURES if likelihood.discrete else VARIANCES)}
    for name, value in values.items():
        assert value.shape == (b, *d), name
        assert value.dtype == dtype, name
        assert torch.isfinite(value).all(), name
        assert (value >= 0).all(), name
    close = dict(rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(values["total_variance"], values["aleatoric_variance"] + values["epistemic_variance"], **close)
    if not likelihood.discrete:
        return
    torch.testing.assert_close(values["predictive_entropy"], values["expected_entropy"] + values["mutual_information"], **close)
    choices, k = (c, 2) if isinstance(likelihood, Bernoulli) else (1, c)
    ceiling = {"predictive_entropy": math.log(k), "one_minus_max": 1 - 1 / k, "variation_ratio": 1 - 1 / k, "margin": 1}
    for name, top in ceiling.items():
        assert (values[name] <= choices * top + 1e-5).all(), name


@pytest.mark.parametrize("name", MEASURES)
def test_labels_are_choices_of_their_own(name):
    torch.manual_seed(0)
    f = torch.randn(6, 5, 3, dtype=torch.float64)
    f[:2, :, 0] = 0.0  # ties
    labels = MEASURES[name](LatentMixture(Bernoulli(), f))
    pairs = [MEASURES[name](LatentMixture(Categorical(), torch.stack([0 * f[..., c], f[..., c]], -1))) for c in range(3)]
    # the variance is that of the label, and a one-hot pair has it twice
    torch.testing.assert_close(labels, sum(pairs) / (2 if name in VARIANCES else 1))


def test_confident_inputs_are_still_ranked():
    logits = torch.tensor([[[20.0, 0.0], [30.0, 0.0], [40.0, 0.0]]])
    for name in ("one_minus_max", "margin", "predictive_entropy"):
        values = MEASURES[name](LatentMixture(Categorical(), logits))
        assert (values.diff() < 0).all(), name


@pytest.mark.parametrize("likelihood", [Gaussian(scale=(0.5, 2.0)), HeteroscedasticGaussian()])
def test_regression_variances(likelihood):
    torch.manual_seed(0)
    f = torch.randn(4, 3, 2 if isinstance(likelihood, Gaussian) else 4)
    p = LatentMixture(likelihood, f)
    y = p.sample(200_000, torch.Generator().manual_seed(0))  # [n, B, 2]
    torch.testing.assert_close(MEASURES["total_variance"](p), y.var(0).sum(-1), rtol=0.03, atol=0)
    epistemic = f[..., :2].var(0, correction=0).sum(-1)
    torch.testing.assert_close(MEASURES["epistemic_variance"](p), epistemic)
    aleatoric = 4.25 if isinstance(likelihood, Gaussian) else f[..., 2:].exp().mean(0).sum(-1)
    torch.testing.assert_close(MEASURES["aleatoric_variance"](p), torch.zeros(3) + aleatoric)


@pytest.mark.parametrize("name", MEASURES)
def test_what_does_not_fit_is_refused_in_words(name):
    if name in ENTROPIES:
        with pytest.raises(ValueError, match=f"{name} is for classes, and Gaussian .* total_variance"):
            MEASURES[name](LatentMixture(Gaussian(scale=1.0), torch.zeros(1, 2, 1)))
    tasks = MultiTask({"depth": (Gaussian(scale=1.0), 1), "label": (Categorical(), 3)})
    p = LatentMixture(tasks, torch.zeros(2, 5, 4))
    with pytest.raises(ValueError, match=r"one task at a time: use p\.task\(name\), one of \['depth', 'label'\]"):
        MEASURES[name](p)
    assert MEASURES[name](p.task("label")).shape == (5,)


class Moments(Predictive):
    """A predictive that has no draws."""

    mean = uncertainty = f_mean = f_var = log_prob = sample = interval = to = None

    def __init__(self, likelihood, mean):
        self.likelihood, self.mean = likelihood, mean


def test_predictives_without_draws():
    p = Moments(Categorical(), torch.tensor([[0.7, 0.2, 0.1]]))
    assert MEASURES["one_minus_max"](p).item() == pytest.approx(0.3)
    assert MEASURES["margin"](p).item() == pytest.approx(0.5)
    for name in ("variation_ratio", *VARIANCES):
        with pytest.raises(ValueError, match=f"{name} needs draws .* Moments"):
            MEASURES[name](p)


def test_labels_that_are_nearly_sure_are_ranked_like_two_classes():
    f = torch.cat([torch.linspace(17, 25, 50), -torch.linspace(17, 25, 50)]).view(1, -1, 1)
    labels, classes = LatentMixture(Bernoulli(), f), LatentMixture(Categorical(), torch.cat([torch.zeros_like(f), f], -1))
    for name in ("one_minus_max", "margin", "predictive_entropy", "expected_entropy"):
        torch.testing.assert_close(MEASURES[name](labels), MEASURES[name](classes), rtol=1e-4, atol=0.0)
    y = (f[0] > 0).long()
    found = [
        dubito.judge(lambda _, p=p: p, [(f[0], t)], metrics=["aurc"]).values["aurc"] for p, t in ((labels, y), (classes, y[:, 0]))
    ]
    assert found[0] == found[1]
    assert float((labels.complement + labels.mean - 1).abs().max()) < 1e-6
