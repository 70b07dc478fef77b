"""Detectors of the unfamiliar: every score against its definition, for one network and for several."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dubito
from apps.networks import build
from dubito.apps import ood
from dubito.apps.network import networks, posterior_of, score_loader
from dubito.apps.ood import DETECTORS, ODIN, Energy, Mahalanobis, MaxLogit, Measured, Neighbours, detection
from dubito.apps.ood.detectors import kth_distance
from dubito.data import digits
from dubito.posteriors import Gaussian, Mixture, Point, Samples, Stochastic
from dubito.posteriors.predict.dropout import Dropout


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 4))


def forms() -> dict[str, dubito.posteriors.Posterior]:
    torch.manual_seed(0)
    model = dubito.Model(mlp(), dubito.Categorical())
    params, buffers = model.parameters(), model.buffers()
    stacked = {name: torch.stack([leaf, leaf + 0.3, -leaf]) for name, leaf in params.items()}
    small = {name: torch.full_like(leaf, 0.01) for name, leaf in params.items()}
    return {
        "point": Point(model, params, buffers),
        "gaussian": Gaussian.diagonal(model, params, small),
        "stochastic": Stochastic(model, params, buffers, Dropout(), draws=4),
        "samples": Samples(model, stacked, buffers),
        "mixture": Mixture.equal([Gaussian.diagonal(model, params, small), Gaussian.diagonal(model, params, small)]),
    }


def data(n: int = 80) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3), torch.arange(n) % 4


@pytest.mark.parametrize("form", list(forms()))
@pytest.mark.parametrize("name", list(DETECTORS))
def test_every_detector_of_every_posterior(name, form):
    posterior = forms()[form]
    before = copy.deepcopy(posterior.model.network.state_dict())
    settings = {"k": 5} if name == "neighbours" else {}
    score = DETECTORS[name](**settings).fit(posterior, data())
    x = torch.randn(7, 3)
    rng = torch.get_rng_state()
    found = score(x)
    assert found.shape == (7,)
    assert not found.requires_grad
    assert found.isfinite().all()
    torch.testing.assert_close(found, score(x))
    torch.testing.assert_close(score_loader(score, list(x.split(3))), found, rtol=1e-4, atol=1e-5)
    network = posterior.model.network
    assert torch.equal(rng, torch.get_rng_state())
    assert network.training
    assert all(torch.equal(leaf, before[key]) for key, leaf in network.state_dict().items())
    assert all(leaf.grad is None for leaf in network.parameters())
    assert not any(module._forward_pre_hooks for module in network.modules())


def test_scores_of_the_logits():
    posterior, x = forms()["samples"], torch.randn(9, 3)
    f = posterior.predict(x).means  # [3, 9, 4]
    torch.testing.assert_close(MaxLogit().fit(posterior)(x), -f.mean(0).amax(-1))
    energy = Energy(2.0).fit(posterior)(x)
    torch.testing.assert_close(energy, -2 * torch.logsumexp(f.mean(0) / 2, -1))
    assert (energy >= -(2 * torch.logsumexp(f / 2, -1)).mean(0)).all()  # draws that differ: less familiar
    torch.testing.assert_close(Measured("one_minus_max").fit(posterior)(x), 1 - f.softmax(-1).mean(0).amax(-1))
    with pytest.raises(ValueError, match="reads the logits of classes"):
        Energy().fit(dubito.Model(nn.Linear(1, 1), dubito.Gaussian(scale=1.0)))


# --- ODIN -------------------------------------------------------------------------------------------------------------


def test_odin_against_its_definition():
    posterior = forms()["samples"]
    x, std = torch.randn(9, 3), (0.5, 1.0, 2.0)
    leaf = x.clone().requires_grad_()
    nets = networks(posterior)

    def maximum(x: Tensor) -> Tensor:
        return torch.stack([(one(x).double() / 7).softmax(-1) for one in nets]).mean(0).amax(-1)

    maximum(leaf).log().sum().backward()
    moved = x + 0.05 * leaf.grad.sign() / torch.tensor(std)
    found = ODIN(7.0, 0.05, std=std).fit(posterior)(x)
    torch.testing.assert_close(found, -maximum(moved).log().detach(), rtol=1e-6, atol=0)
    assert (found < -maximum(x).log()).all()  # the step makes every input more certain


def test_odin_at_a_high_temperature_ranks_without_ties():
    """In float32 the softmax at T = 1000 would take a few values only."""
    network, x = nn.Linear(5, 10), 0.01 * torch.randn(2000, 5)
    found = ODIN(epsilon=0.0).fit(network)(x)
    assert len(found.unique()) == 2000
    # the order is that of max - mean of the logits, which is what ln S is to first order
    f = network(x).double().detach()
    expected = -(f.amax(-1) - f.mean(-1))
    same = torch.corrcoef(torch.stack([found, expected]))[0, 1]
    assert float(same) > 0.99999
    coarse = -(network(x) / 1000).softmax(-1).amax(-1).detach()
    assert len(coarse.unique()) < 500


def test_odin_chooses_one_step_by_familiar_inputs_alone():
    torch.manual_seed(1)
    network = mlp()
    x, y = data(60)
    score = ODIN(temperature=1.0, epsilons=(0.0, 0.1, 0.5, 30.0)).fit(network, (x, y))
    assert score.epsilon == max(score.criterion, key=score.criterion.get) > 0
    for epsilon, value in score.criterion.items():
        same = ODIN(temperature=1.0, epsilon=epsilon).fit(network)(x)
        assert float((-same).exp().mean()) == pytest.approx(value, rel=1e-6)
    assert x.requires_grad is False


def test_odin_needs_data_or_a_step_and_real_inputs():
    with pytest.raises(ValueError, match="or set epsilon"):
        ODIN().fit(nn.Linear(2, 2))
    words, ids = build("words")
    with pytest.raises(ValueError, match="one tensor of real numbers"):
        ODIN(epsilon=0.1).fit(words)(ids)
    with pytest.raises(ValueError, match="std has 2 channels"):
        ODIN(epsilon=0.1, std=(1.0, 1.0)).fit(nn.Linear(3, 2))(torch.zeros(1, 3))


# --- Mahalanobis ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("relative", [False, True])
def test_mahalanobis_against_its_definition(relative):
    network = nn.Sequential(nn.Linear(3, 6), nn.LeakyReLU(), nn.Linear(6, 4))
    x, y = torch.randn(300, 3) + 100, torch.arange(300) % 4  # far from the origin: nothing may be lost
    one, unseen = networks(posterior_of(network))[0], torch.randn(20, 3) + 100

    def features(x: Tensor) -> np.ndarray:
        return one.features(x, "2")[0].detach().double().numpy()

    phi, labels, at = features(x), y.numpy(), features(unseen)
    means = np.stack([phi[labels == c].mean(0) for c in range(4)])

    def shrunk(points: np.ndarray) -> np.ndarray:
        cov = points.T @ points / len(points)
        return 0.9 * cov + 0.1 * np.trace(cov) / len(cov) * np.eye(len(cov))

    def squared(around: np.ndarray, cov: np.ndarray) -> np.ndarray:
        diff = at[:, None] - around
        return np.einsum("bkd,de,bke->bk", diff, np.linalg.inv(cov), diff)

    expected = squared(means, shrunk(phi - means[labels])).min(1)
    if relative:
        expected = expected - squared(phi.mean(0)[None], shrunk(phi - phi.mean(0)))[:, 0]
    score = Mahalanobis(relative, 0.1).fit(network, [(x[:120], y[:120]), (x[120:], y[120:])])
    np.testing.assert_allclose(score(unseen), expected, rtol=1e-6, atol=1e-8)


def test_shrinkage_against_scikit_learn():
    from sklearn.covariance import oas

    from dubito.apps.ood.detectors import _whitening

    points = torch.randn(40, 12, dtype=torch.float64) @ torch.randn(12, 12, dtype=torch.float64)
    points -= points.mean(0)
    expected, shrinkage = oas(points.numpy(), assume_centered=True)
    assert 0 < shrinkage < 1
    root = _whitening(points.T @ points / 40, torch.tensor(40.0), None)
    np.testing.assert_allclose(torch.linalg.inv(root.T @ root), expected, rtol=1e-8)


def test_dead_units_and_missing_classes():
    """Features that never vary, and a class without an example, are no trouble."""
    network = nn.Linear(4, 5)
    x, y = torch.randn(50, 4), torch.tensor([0, 3]).repeat(25)
    x[:, 2] = 1.0
    score = Mahalanobis(shrinkage=0.0).fit(network, (x, y))
    assert len(score.distances[0].classes[1]) == 2
    assert score(x).isfinite().all()
    moved = x.clone()
    moved[:, 2] = 2.0  # never seen to vary: as far as can be
    assert float(score(moved).min()) > 1e6 * float(score(x).max())


def test_mahalanobis_of_a_regression_is_one_gaussian():
    model = dubito.Model(nn.Linear(3, 1), dubito.Gaussian(scale=1.0))
    x = torch.randn(500, 3)
    score = Mahalanobis().fit(model, (x, torch.zeros(500, 1)))
    assert float(score(x).mean()) == pytest.approx(3, rel=0.05)  # chi squared with 3 degrees of freedom
    with pytest.raises(ValueError, match="nothing to compare"):
        Mahalanobis(relative=True).fit(model, (x, torch.zeros(500, 1)))
    with pytest.raises(ValueError, match="learns from familiar inputs"):
        Mahalanobis().fit(model)


def test_networks_of_an_ensemble_have_clusters_of_their_own():
    posterior, (x, y) = forms()["samples"], data()
    score = Mahalanobis().fit(posterior, (x, y))
    members = [
        Mahalanobis().fit(Point(posterior.model, dubito.tensors.tree.select(posterior.params, i), posterior.buffers), (x, y))(x)
        for i in range(3)
    ]
    torch.testing.assert_close(score(x), torch.stack(members).mean(0))


# --- neighbours -------------------------------------------------------------------------------------------------------


def test_neighbours_against_all_distances(monkeypatch):
    monkeypatch.setattr(ood.detectors, "PAIRS", 500)  # several chunks
    points, bank = torch.randn(33, 5), torch.randn(90, 5)
    expected = torch.cdist(points.double(), bank.double()).sort(-1).values
    for k in (1, 7, 90):
        torch.testing.assert_close(kth_distance(points, bank, k).double(), expected[:, k - 1], rtol=1e-5, atol=1e-6)


def test_neighbours_close_by_are_told_apart():
    """Products of matrices cancel at such distances; what is reported does not."""
    bank = torch.tensor([[1.0, 0.0]])
    at = torch.tensor([[1.0, 1e-5], [1.0, 2e-5]])
    torch.testing.assert_close(kth_distance(at, bank, 1), torch.tensor([1e-5, 2e-5]))


def test_neighbours_of_normalised_features():
    network, (x, y) = nn.Linear(3, 4), data(60)
    at = torch.randn(11, 3)
    unit = torch.cdist(at / at.norm(dim=-1, keepdim=True), x / x.norm(dim=-1, keepdim=True)).sort(-1).values
    torch.testing.assert_close(Neighbours(k=4).fit(network, (x, y))(at), unit[:, 3], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        Neighbours(k=4, normalized=False).fit(network, x)(at), torch.cdist(at, x).sort(-1).values[:, 3], rtol=1e-4, atol=1e-5
    )
    assert len(Neighbours(k=4, most=10).fit(network, (x, y)).distances[0].features) == 10
    with pytest.raises(ValueError, match="have no 61-th nearest"):
        Neighbours(k=61).fit(network, (x, y))


# --- what it is worth -------------------------------------------------------------------------------------------------


def test_detection_against_scikit_learn():
    from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

    known, unknown = torch.randn(200), torch.randn(100) + 1
    found = detection(known, unknown)
    s, e = torch.cat([known, unknown]).numpy(), np.arange(300) >= 200
    fpr, tpr, _ = roc_curve(~e, -s, drop_intermediate=False)
    expected = roc_auc_score(e, s), average_precision_score(e, s), average_precision_score(~e, -s), fpr[np.argmax(tpr >= 0.95)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_digits_that_were_not_learned_are_unfamiliar():
    """A few classes of digits are learned; others come along."""
    split = digits(seed=0)
    torch.manual_seed(0)
    known = split.y_train < 6
    train = split.x_train[known], split.y_train[known]
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 6))
    model = dubito.Model(network, dubito.Categorical(), dubito.priors.Normal(scale=0.5))
    posterior = dubito.fit(model, dubito.MAP(epochs=15, learning_rate=0.01), train)
    familiar, others = split.x_test[split.y_test < 6], split.x_test[split.y_test >= 6]
    for name in ("msp", "max_logit", "energy", "odin", "mahalanobis", "neighbours"):
        score = DETECTORS[name](**({"k": 10} if name == "neighbours" else {})).fit(posterior, train)
        assert detection(score(familiar), score(others)).auroc > 0.85, name


def test_draws_without_weight_do_not_count():
    posterior, (x, y) = forms()["samples"], data()
    two = Samples(posterior.model, dubito.tensors.tree.select(posterior.params, slice(0, 2)), posterior.buffers)
    same = Samples(posterior.model, posterior.params, posterior.buffers, weights=torch.tensor([0.5, 0.5, 0.0]))
    for name in ("odin", "mahalanobis", "energy"):
        torch.testing.assert_close(DETECTORS[name]().fit(same, (x, y))(x), DETECTORS[name]().fit(two, (x, y))(x))


def test_nothing_to_learn_from():
    with pytest.raises(ValueError, match="no data to choose the step by"):
        ODIN().fit(nn.Linear(3, 4), [])
    x = torch.randn(60, 3)
    x[5] = torch.nan
    for detector in (Mahalanobis(), Neighbours(k=3)):
        with pytest.raises(ValueError, match="features are not finite"):
            detector.fit(nn.Linear(3, 4), (x, torch.arange(60) % 4))


def test_scores_of_different_types_keep_their_digits():
    assert detection(torch.tensor([0, 1]), torch.tensor([0.5, 1.5])).auroc == 0.75
    familiar, others = torch.tensor([1.0, 2.0]), torch.tensor([2.0 + 1e-12, 3.0], dtype=torch.float64)
    assert detection(familiar, others).auroc == 1


def test_neighbours_far_from_the_origin():
    bank, points = torch.randn(80, 4) + 3000, torch.randn(20, 4) + 3000
    expected = torch.cdist(points.double(), bank.double()).sort(-1).values[:, 2]
    torch.testing.assert_close(kth_distance(points, bank, 3).double(), expected, rtol=1e-3, atol=1e-3)


def test_what_is_advised_in_the_place_of_logits_works():
    model = dubito.Model(nn.Linear(3, 1), dubito.Gaussian(scale=1.0))
    with pytest.raises(ValueError, match="logits") as refused:
        Energy().fit(Point(model, model.parameters(), model.buffers()), torch.randn(5, 3))
    assert "entropy" not in str(refused.value)
