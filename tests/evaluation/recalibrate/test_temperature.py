"""Temperature scaling: the optimum, that it is one, what it acts on, and what is said where there is none."""

import math

import pytest
import torch
from scipy.optimize import minimize_scalar

import dubito
from dubito import Bernoulli, Categorical, Gaussian
from dubito.metrics import accuracy, ece, nll
from dubito.posteriors.predictive import LatentMixture
from dubito.recalibrate import Temperature

DOUBLE = torch.float64


def drawn(n=400, classes=5, temperature=1.0, *, seed=0, labels=False, spread=3.0, draws=1):
    """A predictive, and classes drawn from it at that temperature."""
    source = torch.Generator().manual_seed(seed)
    f = spread * torch.randn(draws, n, classes, dtype=DOUBLE, generator=source)
    p = LatentMixture(Bernoulli() if labels else Categorical(), f)
    if labels:
        return p, torch.bernoulli(torch.sigmoid(torch.logit(p.mean) / temperature), generator=source).long()
    return p, torch.multinomial((p.mean.log() / temperature).softmax(-1), 1, generator=source).squeeze(-1)


def scores(p, y, temperatures):
    """The same by hand: the mean of the log probabilities of the truth, of averaged probabilities at a temperature."""
    logs = p.mean.log()
    return [float(-(logs / t).log_softmax(-1)[torch.arange(len(y)), y].mean()) for t in temperatures]


@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0])
def test_a_known_temperature_is_found(temperature):
    p, y = drawn(40_000, 4, temperature)
    assert Temperature().fit(p, y).temperature == pytest.approx(temperature, rel=0.03)
    p, y = drawn(20_000, 2, temperature, labels=True)
    assert Temperature().fit(p, y).temperature == pytest.approx(temperature, rel=0.03)


@pytest.mark.parametrize(
    ("seed", "temperature", "spread", "draws"), [(0, 2, 3, 1), (1, 0.5, 1, 7), (2, 8, 30, 3), (4, 1, 0.3, 1)]
)
def test_the_score_is_at_its_minimum(seed, temperature, spread, draws):
    p, y = drawn(300, 5, temperature, seed=seed, spread=spread, draws=draws)
    t = Temperature().fit(p, y).temperature
    here, *around = scores(p, y, [t, 1.0, 0.99 * t, 1.01 * t, t / 2, 2 * t])
    assert here <= min(around)
    at = torch.tensor(math.log(t), dtype=DOUBLE, requires_grad=True)
    score = -(p.mean.log() / at.exp()).log_softmax(-1)[torch.arange(len(y)), y].mean()
    assert abs(float(torch.autograd.grad(score, at)[0])) < 1e-9
    oracle = minimize_scalar(
        lambda log_t: scores(p, y, [math.exp(log_t)])[0], bracket=(math.log(t) - 1, math.log(t) + 1), tol=1e-9
    )
    assert t == pytest.approx(math.exp(oracle.x), rel=1e-4)


def test_far_from_one_newton_still_arrives():
    p, y = drawn(200, 3, 1.0, spread=2.0)
    for factor in (1e-6, 1e-3, 1e3, 1e6):
        scaled = LatentMixture(p.likelihood, factor * p.means)
        assert Temperature().fit(scaled, y).temperature == pytest.approx(factor * Temperature().fit(p, y).temperature, rel=1e-6)


def test_it_acts_on_the_average_and_keeps_the_order():
    p, y = drawn(300, 5, 2.0, draws=8)
    fix = Temperature().fit(p, y)
    q = fix(p)
    torch.testing.assert_close(q.mean, (p.mean.log() / fix.temperature).softmax(-1))
    torch.testing.assert_close(q.mean.sum(-1), torch.ones(300, dtype=DOUBLE))
    assert accuracy(q, y) == accuracy(p, y)
    assert nll(q, y) < nll(p, y)
    assert float(nll(q, y)) == pytest.approx(scores(p, y, [fix.temperature])[0])
    assert ece(q, y) < ece(p, y)
    torch.testing.assert_close(q.log_prob(y), q.mean.log()[torch.arange(300), y])


def test_uncertainty_is_split_in_the_shares_it_had():
    p, y = drawn(50, 3, 2.0, draws=8)
    q = Temperature().fit(p, y)(p)
    old, new = p.uncertainty, q.uncertainty
    torch.testing.assert_close(new.total, torch.special.entr(q.mean).sum(-1))
    torch.testing.assert_close(new.aleatoric + new.epistemic, new.total)
    torch.testing.assert_close(new.epistemic / new.total, old.epistemic / old.total)
    certain = LatentMixture(Categorical(), torch.tensor([[[0.0, -2000.0]]]))  # an entropy of 0 has no shares
    assert Temperature().fit(p, y)(certain).uncertainty.epistemic.item() == 0
    draws = q.sample(4000, torch.Generator().manual_seed(0))
    torch.testing.assert_close((draws == 1).double().mean(0), q.mean[:, 1], atol=0.04, rtol=0)
    torch.testing.assert_close(q.f_mean, p.f_mean)
    torch.testing.assert_close(q.f_var, p.f_var)
    with pytest.raises(ValueError, match="intervals and quantiles are for regression"):
        q.interval()


def test_batches_positions_and_what_is_ignored():
    p, y = drawn(300, 5, 2.0)
    whole = Temperature().fit(p, y).temperature
    parts = [(LatentMixture(p.likelihood, p.means[:, i : i + 77]), y[i : i + 77]) for i in range(0, 300, 77)]
    assert Temperature().fit(iter(parts)).temperature == pytest.approx(whole, rel=1e-12)
    dense = LatentMixture(Categorical(), p.means.reshape(1, 10, 5, 6, 5))  # [S, B, *D, C]
    assert Temperature().fit(dense, y.reshape(10, 5, 6)).temperature == pytest.approx(whole, rel=1e-12)
    padded = LatentMixture(Categorical(), torch.cat([p.means, 9 * torch.ones(1, 20, 5, dtype=DOUBLE)], 1))
    fix = Temperature().fit(padded, torch.cat([y, torch.full((20,), -100)]))
    assert (fix.temperature, fix.n) == (pytest.approx(whole, rel=1e-12), 300)
    assert fix(dense).log_prob(y.reshape(10, 5, 6)).shape == (10,)


def test_any_posterior_and_judge_and_the_global_generator():
    from torch.utils.data import DataLoader, TensorDataset

    from dubito.evaluation.judge import judge

    x = torch.randn(300, 2)
    y = torch.bernoulli(torch.sigmoid(3 * x[:, 0])).long()
    model = dubito.Model(torch.nn.Linear(2, 2), Categorical())
    posterior = dubito.fit(model, dubito.Ensemble(dubito.MAP(epochs=2), 3), (x, y), progress=False)
    before = torch.get_rng_state()
    fix = Temperature().fit(posterior.predict_batches(DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)))
    assert torch.equal(before, torch.get_rng_state())
    assert fix.temperature == pytest.approx(Temperature().fit(posterior.predict(x), y).temperature, rel=1e-5)
    found = judge(lambda x: fix(posterior.predict(x)), (x, y), progress=False)
    assert found["nll"] <= judge(posterior, (x, y), progress=False)["nll"]
    assert found["ece"] == pytest.approx(float(ece(fix(posterior.predict(x)), y)), abs=1e-6)


def test_what_has_no_temperature_is_said():
    p = LatentMixture(Categorical(), torch.tensor([[[4.0, 0.0], [0.0, 4.0]]]))
    with pytest.raises(ValueError, match="all 2 held-out answers are right, .* down to 0: fit it to more"):
        Temperature().fit(p, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="no more probable .* than by chance, .* up to infinity"):
        Temperature().fit(p, torch.tensor([1, 0]))
    with pytest.raises(ValueError, match="Temperature is for classes, and Gaussian predicts numbers: .* Variance, Quantiles"):
        Temperature().fit(LatentMixture(Gaussian(scale=1.0), torch.zeros(1, 2, 1)), torch.zeros(2))
    with pytest.raises(ValueError, match=r"fit\(predictive, y\)"):
        Temperature().fit(p)
    with pytest.raises(TypeError, match="pairs of them"):
        Temperature().fit(torch.zeros(2, 2), torch.zeros(2))
    with pytest.raises(TypeError, match="are pairs"):
        Temperature().fit([(torch.zeros(2, 2), torch.zeros(2))])
    with pytest.raises(ValueError, match="nothing to fit"):
        Temperature().fit([])
    with pytest.raises(ValueError, match="targets go from 0 to 2, but the network has 2 classes"):
        Temperature().fit(p, torch.tensor([0, 2]))


def test_improbable_classes_keep_their_order():
    p = LatentMixture(Categorical(), torch.tensor([[[0.0, -200.0, -300.0], [0.0, -200.0, -300.0]]]))  # 0 in float32
    fix = Temperature().fit(p, torch.tensor([0, 1]))
    assert float(fix(p).mean[0, 1]) > float(fix(p).mean[0, 2]) > 0
