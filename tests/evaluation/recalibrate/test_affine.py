"""Vector and matrix scaling: known maps are found, minima are minima, and penalties do what they say."""

import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression

from dubito import Bernoulli, Categorical
from dubito.metrics import nll
from dubito.posteriors.predictive import LatentMixture
from dubito.recalibrate import MatrixScaling, Temperature, VectorScaling, convex

DOUBLE = torch.float64


def drawn(n, weight, bias, *, seed=0, spread=2.0):
    """A predictive, and classes drawn from softmax(W ln p + b)."""
    source = torch.Generator().manual_seed(seed)
    p = LatentMixture(Categorical(), spread * torch.randn(1, n, len(bias), dtype=DOUBLE, generator=source))
    z = p.mean.log() * weight if weight.ndim == 1 else p.mean.log() @ weight.mT
    return p, torch.multinomial((z + bias).softmax(-1), 1, generator=source).squeeze(-1)


WEIGHT, BIAS = torch.tensor([0.5, 1.0, 1.5], dtype=DOUBLE), torch.tensor([1.0, 0.0, -1.0], dtype=DOUBLE)


def test_a_known_vector_is_found():
    p, y = drawn(20_000, WEIGHT, BIAS)
    fix = VectorScaling(penalty=0.0).fit(p, y)
    torch.testing.assert_close(fix.weight, WEIGHT, atol=0.1, rtol=0)
    torch.testing.assert_close(fix.bias - fix.bias.mean(), BIAS, atol=0.15, rtol=0)
    torch.testing.assert_close(fix(p).mean, (fix.weight * p.mean.log() + fix.bias).softmax(-1))


def test_a_known_matrix_is_found():
    weight = torch.tensor([[1.0, 0.3, 0.0], [0.0, 0.7, -0.3], [0.2, 0.0, 1.2]], dtype=DOUBLE)
    p, y = drawn(40_000, weight, BIAS)
    fix = MatrixScaling(penalty=1e-6).fit(p, y)
    true = (p.mean.log() @ weight.mT + BIAS).softmax(-1)
    assert float((fix(p).mean - true).abs().mean()) < 0.006
    assert nll(fix(p), y) < nll(VectorScaling(penalty=1e-6).fit(p, y)(p), y) < nll(Temperature().fit(p, y)(p), y)


@pytest.mark.parametrize("method", [VectorScaling, MatrixScaling])
def test_the_gradient_is_gone(method):
    p, y = drawn(300, WEIGHT, BIAS)
    fix = method(penalty=1e-2).fit(p, y)
    weight, bias = fix.weight.clone().requires_grad_(), fix.bias.clone().requires_grad_()
    z = p.mean.log()
    score = F.cross_entropy((z * weight if weight.ndim == 1 else z @ weight.mT) + bias, y)
    if method is VectorScaling:
        fine = ((weight - 1) ** 2 + bias**2).sum() / 3
    else:
        fine = (weight - torch.diag(weight.diag())).square().sum() / 6 + bias.square().sum() / 3
    for gradient in torch.autograd.grad(score + 1e-2 * fine, [weight, bias]):
        assert float(gradient.abs().max()) < 2e-5


@pytest.mark.parametrize("method", [VectorScaling, MatrixScaling])
def test_many_classes_take_another_way_to_the_same_place(method, monkeypatch):
    p, y = drawn(300, WEIGHT, BIAS)
    direct = method(penalty=1e-3).fit(p, y)
    monkeypatch.setattr(convex, "DENSE", 0)
    found = method(penalty=1e-3).fit(p, y)
    torch.testing.assert_close(found(p).mean, direct(p).mean, atol=1e-6, rtol=0)


def test_labels_against_logistic_regression():
    source = torch.Generator().manual_seed(0)
    f = 2 * torch.randn(1, 500, 2, dtype=DOUBLE, generator=source)
    y = torch.bernoulli(torch.sigmoid(0.5 * f[0] + 1), generator=source).long()
    p = LatentMixture(Bernoulli(), f)
    fix = VectorScaling(penalty=0.0).fit(p, y)  # Platt scaling, label by label
    for c in range(2):
        oracle = LogisticRegression(C=1e9, tol=1e-10, max_iter=1000).fit(f[0, :, c : c + 1].numpy(), y[:, c].numpy())
        assert float(fix.weight[c]) == pytest.approx(oracle.coef_[0, 0], rel=1e-4)
        assert float(fix.bias[c]) == pytest.approx(oracle.intercept_[0], rel=1e-4)
    assert nll(fix(p), y) < nll(p, y)


def test_a_penalty_is_chosen_on_held_out_data():
    p, y = drawn(150, torch.ones(8, dtype=DOUBLE), torch.zeros(8, dtype=DOUBLE))  # nothing to be mended
    other, answers = drawn(4000, torch.ones(8, dtype=DOUBLE), torch.zeros(8, dtype=DOUBLE), seed=1)
    free, chosen = MatrixScaling(penalty=1e-5).fit(p, y), MatrixScaling(penalty=(1e-5, 1e-1, 10.0)).fit(p, y)
    assert chosen.penalty > 1e-5
    assert nll(chosen(other), answers) < nll(free(other), answers)
    tight = MatrixScaling(penalty=1e3, regularizer="l2").fit(p, y)
    torch.testing.assert_close(tight.weight, torch.eye(8, dtype=DOUBLE), atol=1e-2, rtol=0)
    again = MatrixScaling(penalty=(1e-5, 1e-1, 10.0)).fit(p, y)
    assert torch.equal(again.weight, chosen.weight)


def test_what_cannot_be_done_is_said():
    p = LatentMixture(Categorical(), torch.tensor([[[4.0, 0.0], [0.0, 4.0]] * 10]))
    y = torch.tensor([0, 1] * 10)
    with pytest.raises(ValueError, match="give a larger penalty"):
        VectorScaling(penalty=0.0).fit(LatentMixture(Categorical(), torch.randn(1, 20, 3)), torch.zeros(20).long())
    assert VectorScaling(penalty=0.1).fit(p, y).weight.isfinite().all()  # told apart, and yet finite
    with pytest.raises(ValueError, match="4 held-out examples are too few to choose a penalty"):
        VectorScaling().fit(LatentMixture(Categorical(), p.means[:, :4]), y[:4])
    with pytest.raises(ValueError, match="was fitted to 2 outputs; this predictive has 3"):
        VectorScaling(penalty=0.1).fit(p, y)(LatentMixture(Categorical(), torch.zeros(1, 1, 3)))
    with pytest.raises(ValueError, match="penalty must be at least 0"):
        VectorScaling(penalty=-1.0)
    with pytest.raises(ValueError, match="regularizer must be one of 'odir', 'l2'"):
        MatrixScaling(regularizer="l1")


def test_a_class_that_is_never_seen():
    """ODIR leaves the diagonal free, and that of such a class would go to infinity, whatever the penalty."""
    p, y = drawn(400, WEIGHT, torch.tensor([1.0, 0.0, -1e9], dtype=DOUBLE))
    assert not bool((y == 2).any())
    for method in (MatrixScaling(), MatrixScaling(penalty=1e-4), MatrixScaling(penalty=100.0), VectorScaling()):
        fix = method.fit(p, y)
        assert fix.weight.isfinite().all()
        assert nll(fix(p), y) < nll(p, y)
        assert float(fix(p).mean[:, 2].mean()) < float(p.mean[:, 2].mean())
    assert MatrixScaling(penalty=0.1).fit(p, torch.zeros_like(y)).weight.isfinite().all()  # one class, and no other
    for method in (MatrixScaling(penalty=0.0), VectorScaling(penalty=0.0)):
        with pytest.raises(ValueError, match="has no minimum: class 2 is never seen in the held-out data; give a larger penalty"):
            method.fit(p, y)
    labels = LatentMixture(Bernoulli(), p.means)
    with pytest.raises(ValueError, match="of label 1 the held-out data are all the same"):
        VectorScaling(penalty=0.0).fit(labels, torch.stack([y, torch.ones_like(y), 1 - y], -1))


def test_a_class_that_is_seen_once_does_not_decide_the_penalty():
    """It is missing from one part of the cross-validation: that is no reason for the largest penalty."""
    p, y = drawn(2000, WEIGHT, torch.tensor([1.0, 0.0, -1e9], dtype=DOUBLE))
    y[0] = 2
    assert MatrixScaling().fit(p, y).penalty < 100
