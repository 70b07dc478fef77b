"""Scores of failure, what they are worth, a confidence that is learned, and answers that are held back."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dubito
from apps.networks import build
from dubito.apps import failure
from dubito.apps.failure import Confidence, ConfidNet, Selective
from dubito.apps.network import networks, posterior_of
from dubito.data import digits
from dubito.posteriors import Point
from dubito.posteriors.predictive import LatentMixture
from dubito.tensors.store import FileError


def predictive(n: int = 400, draws: int = 5, classes: int = 4) -> tuple[LatentMixture, Tensor]:
    p = LatentMixture(dubito.Categorical(), 2 * torch.randn(draws, n, classes))
    return p, torch.multinomial(p.mean, 1).squeeze(1)


# --- scores -----------------------------------------------------------------------------------------------------------


def test_scores_by_name():
    p, _ = predictive()
    found = failure.scores(p)
    torch.testing.assert_close(found["mcp"], 1 - p.mean.amax(-1))
    torch.testing.assert_close(found["entropy"], -(p.mean * p.mean.log()).sum(-1))
    assert set(found) == {"mcp", "entropy", "mutual_information", "variation_ratio"}
    with pytest.raises(ValueError, match="score must be one of .* got 'trust'"):
        failure.scores(p, ["trust"])


def test_the_oracle():
    p, y = predictive()
    tcp, wrong = failure.one_minus_true(p, y), failure.errors(p, y)
    torch.testing.assert_close(tcp, 1 - p.mean[torch.arange(len(y)), y])
    assert not wrong[tcp < 0.5].any()
    assert wrong[tcp > 1 - 1 / 4].all()


def test_positions_without_a_label_do_not_count():
    likelihood = dubito.Categorical(dim=1, ignore_index=9)
    p = LatentMixture(likelihood, torch.randn(1, 3, 4, 5, 2))
    y = torch.randint(2, (3, 4, 5))
    y[0] = 9
    assert not failure.errors(p, y)[0].any()
    assert failure.one_minus_true(p, y)[0].isnan().all()
    part = LatentMixture(likelihood, p.means[:, 1:])
    assert failure.failures(p, y, oracle=True) == failure.failures(part, y[1:], oracle=True)


def test_figures_against_scikit_learn():
    from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

    p, y = predictive()
    score, wrong = failure.scores(p, ["mcp"])["mcp"], failure.errors(p, y)
    found = failure.failures(p, y, names=["mcp"], oracle=True)
    s, e = score.numpy(), wrong.numpy()
    fpr, tpr, _ = roc_curve(~e, -s, drop_intermediate=False)
    expected = [fpr[np.argmax(tpr >= 0.95)], average_precision_score(e, s), average_precision_score(~e, -s), roc_auc_score(e, s)]
    np.testing.assert_allclose(found["mcp"][:4], expected, rtol=1e-6)
    assert found["tcp"].auroc > found["mcp"].auroc
    assert found["tcp"].excess_aurc < found["mcp"].excess_aurc


def test_others_must_fit():
    p, y = predictive()
    with pytest.raises(ValueError, match="the score 'mine' is"):
        failure.failures(p, y, others={"mine": torch.zeros(3)})
    mine = torch.rand(len(y))
    expected = failure.failures(p, y, names=["mcp"], others={"mine": mine}, oracle=True)
    assert failure.failures(p, y.numpy(), names=["mcp"], others={"mine": mine.numpy()}, oracle=True) == expected
    assert failure.failures(p, y.tolist(), names=["mcp"], others={"mine": mine.tolist()}, oracle=True)["mcp"] == expected["mcp"]


def test_one_label_is_two_classes():
    f = 2 * torch.randn(3, 300, 1)
    p, two = LatentMixture(dubito.Bernoulli(), f), LatentMixture(dubito.Categorical(), torch.cat([torch.zeros_like(f), f], -1))
    y = torch.bernoulli(p.mean[:, 0]).long()
    for given in (y, y.unsqueeze(-1), y.bool(), y.float(), y.tolist()):
        assert torch.equal(failure.errors(p, given), failure.errors(two, y))
        torch.testing.assert_close(failure.one_minus_true(p, given), failure.one_minus_true(two, y))
    for name, score in failure.scores(two).items():
        torch.testing.assert_close(failure.scores(p)[name], score)
    found, expected = (failure.failures(one, y, oracle=True) for one in (p, two))
    for name, figures in expected.items():
        assert found[name] == pytest.approx(figures, abs=1e-3)  # but for ties


def test_failures_of_other_than_classes_are_told_of():
    numbers, y = LatentMixture(dubito.Gaussian(scale=1.0), torch.zeros(1, 3, 1)), torch.zeros(3)
    for name in ("failures", "errors", "one_minus_true"):
        with pytest.raises(
            ValueError, match=rf"{name} is for classes, and Gaussian predicts numbers: .*judge .*metrics.threshold"
        ):
            getattr(failure, name)(numbers, y)
    labels = LatentMixture(dubito.Bernoulli(), torch.zeros(1, 3, 2))
    with pytest.raises(ValueError, match="failures is for one class an input, and here are 2 labels .* one wrong label"):
        failure.failures(labels, torch.zeros(3, 2))
    tasks = dubito.MultiTask({"depth": (dubito.Gaussian(scale=1.0), 1), "label": (dubito.Categorical(), 2)})
    with pytest.raises(ValueError, match=r"failures is for one task at a time: use p.task\(name\), one of \['depth', 'label'\]"):
        failure.failures(LatentMixture(tasks, torch.zeros(1, 3, 3)), {"depth": torch.zeros(3), "label": torch.zeros(3)})


def test_a_prediction_that_is_nan_is_an_error():
    f = torch.zeros(1, 4, 3)
    f[:, 1] = math.nan
    p = LatentMixture(dubito.Categorical(), f)
    assert failure.errors(p, torch.zeros(4).long()).tolist() == [False, True, False, False]
    label = LatentMixture(dubito.Bernoulli(), f[..., :1])
    assert failure.errors(label, torch.zeros(4)).tolist() == [False, True, False, False]
    found = failure.failures(p, torch.zeros(4).long(), names=[], others={"mine": [0.1, 0.9, 0.2, 0.3]})
    assert found["mine"].auroc == 1


# --- selective prediction ---------------------------------------------------------------------------------------------


def logistic(n: int) -> tuple[Tensor, Tensor]:
    x = 6 * torch.rand(n, 1) - 3
    return x, torch.bernoulli(torch.sigmoid(2 * x[:, 0])).long()


def logistic_network() -> nn.Module:
    network = nn.Linear(1, 2)
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[-1.0], [1.0]]))
        network.bias.zero_()
    return network


@pytest.mark.parametrize("score", ["mcp", lambda x: -x[:, 0].abs()])
def test_the_wanted_risk_is_kept_on_new_data(score):
    network = logistic_network()
    selector = Selective(0.05, score, confidence=0.95).fit(network, logistic(4000))
    x, y = logistic(20000)
    answer = selector(x)
    risk = float((answer.prediction != y)[answer.accepted].double().mean())
    assert risk <= 0.05
    assert selector.bound <= 0.05
    assert 0.4 < float(answer.accepted.double().mean()) < 0.9
    torch.testing.assert_close(answer.accepted, selector.accept(answer.score))
    plain = Selective(0.05, score).fit(network, logistic(4000))
    assert plain.threshold > selector.threshold
    assert plain.risk <= 0.05


def test_a_risk_that_cannot_be_had():
    selector = Selective(0.0, confidence=0.99).fit(logistic_network(), logistic(200))
    assert not selector(logistic(50)[0]).accepted.any()


def test_selection_with_one_label_is_that_with_two_classes():
    data, new = logistic(2000), logistic(50)[0]
    network = nn.Linear(1, 1)
    network.load_state_dict({"weight": torch.tensor([[2.0]]), "bias": torch.zeros(1)})
    expected = Selective(0.05).fit(logistic_network(), data)
    for y in (data[1], data[1].float().unsqueeze(-1)):
        selector = Selective(0.05).fit(dubito.Model(network, dubito.Bernoulli()), (data[0], y))
        assert selector.coverage == pytest.approx(expected.coverage, abs=2e-3)
        answer = selector(new)
        assert answer.prediction.tolist() == (new[:, 0] > 0).long().tolist()
        assert answer.accepted.shape == (50,)


def test_what_selection_cannot_answer():
    model = dubito.Model(nn.Linear(1, 1), dubito.Gaussian(scale=1.0))
    with pytest.raises(ValueError, match=r"Selective is for classes, and Gaussian predicts numbers: .*metrics.threshold"):
        Selective(0.1).fit(model, (torch.zeros(9, 1), torch.zeros(9, 1)))
    selector = Selective(0.5, lambda x: x[:, 0].abs().nan_to_num().numpy()).fit(logistic_network(), logistic(400))
    with pytest.warns(UserWarning, match="The inputs hold NaN"):
        answer = selector(torch.tensor([[0.1], [math.nan]]))
    assert answer.accepted.tolist() == [True, False]  # what is NaN is no answer
    assert selector.accept([0.0, 1e9]).tolist() == [True, False]


def test_bad_settings_of_selection():
    with pytest.raises(ValueError, match="held-out batches"):
        Selective(0.1).fit(logistic_network(), logistic(9)[0])
    with pytest.raises(ValueError, match="risk must be at least 0 and below 1"):
        Selective(1.5)
    with pytest.raises(ValueError, match="score must be one of"):
        Selective(0.1, "trust")


# --- ConfidNet --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    """A small network that drops and normalises, on digits."""
    data = digits(seed=0)
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10)
    )  # fmt: skip
    model = dubito.Model(network, dubito.Categorical(), dubito.priors.Normal(scale=0.5))
    posterior = dubito.fit(model, dubito.MAP(epochs=12, learning_rate=0.01), (data.x_train[:600], data.y_train[:600]))
    return posterior, data


def state(network: nn.Module) -> dict:
    return copy.deepcopy(network.state_dict())


def test_confidnet_learns_where_the_network_errs():
    """Labels that are wrong for one half of the inputs: the network says the same of both, its features tell which they are."""
    g = torch.Generator().manual_seed(0)

    def draw(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(n, 4, generator=g)
        clean = (x[:, 0] > 0).long()
        flip = (torch.rand(n, generator=g) < 0.45) & (x[:, 1] > 0)
        return x, torch.where(flip, 1 - clean, clean)

    network = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        network[0].weight.copy_(torch.eye(4))
        network[0].bias.zero_()
        network[2].weight.copy_(torch.tensor([[-3.0, 0, 0, 0], [3.0, 0, 0, 0]]))
        network[2].bias.zero_()
    before, rng = state(network), torch.get_rng_state()
    fitted = ConfidNet((32, 32), epochs=12, learning_rate=3e-3, tune_epochs=1, tune_rate=1e-4).fit(
        network, draw(3000), validation=draw(1000), progress=False
    )
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(leaf, before[name]) for name, leaf in network.state_dict().items())
    assert all(leaf.grad is None and leaf.requires_grad for leaf in network.parameters())
    assert not any(m._forward_pre_hooks for m in network.modules())
    x, y = draw(2000)
    p = fitted.predict(x)
    torch.testing.assert_close(p.f_mean, network(x).detach())
    found = failure.failures(p, y, names=["mcp"], others={"confidnet": fitted(x)})
    assert found["mcp"].auroc < 0.65
    assert found["confidnet"].auroc > 0.75
    assert found["confidnet"].aupr_error > found["mcp"].aupr_error + 0.05
    # what it learned is the probability of the true class: E[TCP | x1 > 0] = .45 (1 - p) + .55 p
    certain, confidence = p.mean.amax(-1), 1 - fitted(x)
    for there, expected in ((x[:, 1] > 0.5, 0.45 + 0.1 * certain), (x[:, 1] < -0.5, certain)):
        assert abs(float((confidence - expected)[there].mean())) < 0.06


def test_the_best_epoch_is_kept(trained):
    posterior, data = trained
    settings = ConfidNet((16,), epochs=6, learning_rate=0.02, tune_epochs=2, tune_rate=0.01)
    fitted = settings.fit(posterior, (data.x_train[:600], data.y_train[:600]), validation=(data.x_test, data.y_test))
    found = failure.failures(fitted.predict(data.x_test), data.y_test, names=[], others={"c": fitted(data.x_test)})["c"]
    assert len(fitted.history) == 8
    assert found.aupr_error == pytest.approx(max(row["aupr_error"] for row in fitted.history), abs=1e-6)


def test_the_same_seed_gives_the_same_bits_and_a_file(trained, tmp_path):
    posterior, data = trained
    x, y = data.x_train[:600], data.y_train[:600]
    settings, held = ConfidNet((16,), epochs=2, tune_epochs=1), (data.x_test, data.y_test)
    module = posterior.model.network.train()
    one = settings.fit(posterior, (x, y), validation=held, seed=3)
    assert all(m.training for m in module.modules())
    torch.rand(1)
    two = settings.fit(posterior, (x, y), validation=held, seed=3)
    assert torch.equal(one(data.x_test), two(data.x_test))
    assert not torch.equal(one(data.x_test), settings.fit(posterior, (x, y), validation=held, seed=4)(data.x_test))
    one.save(tmp_path / "confidence.safetensors")
    same = Confidence.load(tmp_path / "confidence.safetensors", posterior.model)
    assert torch.equal(same(data.x_test), one(data.x_test))
    assert torch.equal(same.predict(data.x_test).mean, one.predict(data.x_test).mean)
    assert same.history == one.history
    with pytest.raises(FileError, match="made for another network"):
        Confidence.load(tmp_path / "confidence.safetensors", nn.Linear(3, 2))


def test_dropout_is_on_for_the_head_and_off_for_the_score(trained):
    posterior, data = trained
    x, y = data.x_train[:200], data.y_train[:200]
    one = networks(posterior)[0]
    phi, target, random = ConfidNet().training_features(one, "5", (x, y), seed=0)
    still, sure, fixed = ConfidNet(dropout=False).training_features(one, "5", (x, y), seed=0)
    assert random
    assert not fixed
    dropped = (phi == 0) & (still != 0)
    assert 0.1 < float(dropped.double().sum() / (still != 0).double().sum()) < 0.3
    assert float(target.mean()) < float(sure.mean())
    fitted = ConfidNet((8,), epochs=1, tune_epochs=0).fit(posterior, (x, y))
    assert torch.equal(fitted(x), fitted(x))


def test_the_ratio_target():
    network = nn.Linear(2, 3)
    x, y = torch.randn(20, 2), torch.randint(3, (20,))
    from dubito.apps.failure.confidnet import _truth

    one = networks(posterior_of(network))[0]
    probs = network(x).softmax(-1).detach()
    ratio, wrong, _ = _truth(one, one(x), y, "ratio")
    torch.testing.assert_close(ratio, probs.gather(1, y[:, None])[:, 0] / probs.amax(-1))
    assert torch.equal(wrong, ratio < 1)


def test_confidnet_on_dense_outputs():
    network = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))
    model = dubito.Model(network, dubito.Categorical(dim=1))
    x, y = torch.randn(6, 2, 5, 7), torch.randint(3, (6, 5, 7))
    y[:, 0] = -100
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=2, shuffle=True)
    rng = torch.get_rng_state()
    fitted = ConfidNet((8,), epochs=2, tune_epochs=1, layer="2").fit(model, loader, validation=(x, y))
    assert torch.equal(rng, torch.get_rng_state())
    assert fitted(x).shape == (6, 5, 7)


def test_a_network_without_errors_is_judged_by_the_loss():
    network = logistic_network()
    x = torch.tensor([[-3.0], [3.0]] * 20)
    fitted = ConfidNet((4,), epochs=2, tune_epochs=0).fit(network, (x, (x[:, 0] > 0).long()))
    assert all(math.isnan(row["aupr_error"]) for row in fitted.history)
    assert ((fitted(x) > 0) & (fitted(x) < 1)).all()


def test_what_confidnet_cannot_do(trained):
    posterior, data = trained
    loader = [(data.x_train[:10], data.y_train[:10])]
    with pytest.raises(ValueError, match="give validation=..."):
        ConfidNet().fit(posterior, loader)
    with pytest.raises(ValueError, match="has no layer 'head'"):
        ConfidNet(layer="head").fit(posterior, loader, validation=loader)
    with pytest.raises(ValueError, match="learns from labelled data"):
        ConfidNet().fit(posterior, loader, validation=[data.x_train[:10]])
    model = dubito.Model(nn.Linear(1, 1), dubito.Gaussian(scale=1.0))
    with pytest.raises(ValueError, match="ConfidNet is for classifiers"):
        ConfidNet().fit(Point(model, model.parameters(), {}), (torch.zeros(3, 1), torch.zeros(3, 1)))
    with pytest.raises(ValueError, match="epochs must be at least 1; got 0"):
        ConfidNet(epochs=0)


def test_any_network():
    network, x = build("resnet")
    fitted = ConfidNet((8,), epochs=1, tune_epochs=1).fit(network, (x, torch.arange(5) % 4), validation=(x, torch.arange(5) % 4))
    assert fitted.layer == "head"
    assert fitted(x).shape == (5,)


class Restless:
    """Batches in another order every time, by a generator that nobody else knows of."""

    def __init__(self, x: Tensor, y: Tensor):
        self.x, self.y, self.source = x, y, torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return 1

    def __iter__(self):
        order = torch.randperm(len(self.y), generator=self.source)
        yield self.x[order], self.y[order]


def test_held_out_data_may_come_in_any_order(trained):
    """Features of the tuned encoder and errors of the network belong to the same inputs."""
    posterior, data = trained
    settings = ConfidNet((16,), epochs=2, learning_rate=0.02, tune_epochs=1, tune_rate=1e-6)
    train = data.x_train[:300], data.y_train[:300]
    still = settings.fit(posterior, train, validation=(data.x_test, data.y_test))
    restless = settings.fit(posterior, train, validation=Restless(data.x_test, data.y_test))
    for one, two in zip(still.history, restless.history, strict=True):
        assert one == pytest.approx(two, rel=1e-4)


def test_dense_features_are_a_random_part(monkeypatch):
    monkeypatch.setattr("dubito.apps.failure.confidnet.POSITIONS", 40)
    network = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))
    model = dubito.Model(network, dubito.Categorical(dim=1))
    x, y = torch.randn(6, 2, 5, 7), torch.randint(3, (6, 5, 7))
    one = networks(posterior_of(model))[0]
    phi, target, _ = ConfidNet().training_features(one, "2", [(x[:3], y[:3]), (x[3:], y[3:])], seed=0)
    assert phi.shape == (40, 4)
    assert target.shape == (40,)
    fitted = ConfidNet((8,), epochs=1, tune_epochs=1, layer="2").fit(model, (x, y), validation=(x, y))
    assert len(fitted.history) == 2


def test_a_data_set_is_shuffled_for_the_encoder():
    from dubito.apps.failure.confidnet import _shuffled

    model = dubito.Model(nn.Linear(1, 2), dubito.Categorical())
    x, y = torch.arange(50.0).unsqueeze(-1), torch.arange(50) % 2
    data = torch.utils.data.TensorDataset(x, y)
    for given in (data, (x, y)):
        one, two, same = (torch.cat([x for x, _ in _shuffled(model, given, 8, seed)]).squeeze() for seed in (0, 1, 0))
        assert torch.equal(one, same)
        assert not torch.equal(one, two)
        assert torch.equal(one.sort().values, x.squeeze())


def test_labels_that_are_all_missing_and_rates_that_are_too_large(trained):
    posterior, data = trained
    x, y = data.x_train[:50], data.y_train[:50]
    none = torch.full_like(y, -100)
    with pytest.raises(ValueError, match="no target of the validation data is a label"):
        ConfidNet().fit(posterior, (x, y), validation=(x, none))
    with pytest.raises(ValueError, match="nothing to learn from"):
        ConfidNet().fit(posterior, (x, none), validation=(x, y))
    with pytest.raises(ValueError, match="lower learning_rate"):
        ConfidNet((4,), epochs=1, learning_rate=math.inf).fit(posterior, (x, y), validation=(x, y))


def test_selection_refuses_nonsense_before_it_reads_data():
    with pytest.raises(ValueError, match="confidence must be above 0 and below 1; got 95"):
        Selective(0.1, confidence=95)
    with pytest.raises(ValueError, match=r"the score is \[9, 1\] for predictions \[9\]"):
        Selective(0.1, lambda x: x).fit(logistic_network(), logistic(9))


@pytest.mark.parametrize(("figures", "chosen"), [((0.1, 0.9, 0.3, 0.9, 0.5, 0.2), 1), ((0.1, 0.4, 0.3, 0.4, 0.8, 0.2), 4)])
def test_head_and_encoder_are_those_of_the_best_epoch(figures, chosen, monkeypatch, tmp_path):
    """Three epochs of the head, a look at the best of them, and two epochs with the encoder, of which the figures are made up."""
    from dubito.apps.failure import confidnet

    heads, features, coming = [], [], iter(figures)

    def judge(self, head):
        heads.append(copy.deepcopy(head.state_dict()))
        features.append(self.phi)
        return {"aupr_error": next(coming), "held_out_loss": 0.0}

    monkeypatch.setattr(confidnet._Held, "judge", judge)
    network = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
    x, y = torch.randn(40, 3), torch.arange(40) % 4
    settings = ConfidNet((6,), epochs=3, learning_rate=0.1, tune_epochs=2, tune_rate=0.05)
    fitted = settings.fit(network, (x, y), validation=(x, y))
    assert all(torch.equal(leaf, heads[chosen][name]) for name, leaf in fitted.head.state_dict().items())
    assert all(torch.equal(leaf, heads[3][name]) for name, leaf in heads[1].items())  # tuning starts at the best head
    phi = torch.tanh(x @ fitted.encoder["0.weight"].T + fitted.encoder["0.bias"])
    torch.testing.assert_close(phi, features[chosen])
    assert torch.equal(fitted.encoder["0.weight"], network[0].weight) == (chosen == 1)
    fitted.save(tmp_path / "confidence.safetensors")
    same = Confidence.load(tmp_path / "confidence.safetensors", network)
    torch.testing.assert_close(same.predict(x).f_mean, network(x).detach())
    assert torch.equal(same(x), fitted(x))


def test_what_is_learned_is_always_the_probability_of_the_network_as_it_was(monkeypatch):
    from dubito.apps.failure import confidnet

    seen, truth = [], confidnet._truth
    monkeypatch.setattr(confidnet, "_truth", lambda network, f, *rest: seen.append(f) or truth(network, f, *rest))
    network = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
    x, y = torch.randn(20, 3), torch.arange(20) % 4
    ConfidNet((6,), epochs=1, tune_epochs=3, tune_rate=0.3).fit(network, (x, y), validation=(x, y))
    assert len(seen) == 1 + 1 + 3 + 3  # held out, the head, and every epoch of tuning with a look at what is held out
    expected = network(x).detach()
    for f in seen:
        torch.testing.assert_close(f[f[:, 0].argsort()], expected[expected[:, 0].argsort()])


def test_nothing_is_learned_from_what_is_held_out():
    model, x = dubito.Model(nn.Linear(1, 2), dubito.Categorical()), torch.arange(50.0).unsqueeze(-1)
    (x_train, y_train), (x_held, y_held) = ConfidNet(held_out=0.2)._split(model, (x, torch.arange(50)), seed=0)
    assert len(x_held) == 10
    assert torch.equal(torch.cat([y_train, y_held]).sort().values, torch.arange(50))
    assert torch.equal(x_train.squeeze().long(), y_train)
    assert torch.equal(x_held.squeeze().long(), y_held)


def test_confidnet_takes_numpy_numbers():
    model = dubito.Model(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)), dubito.Categorical())
    x, y = torch.randn(60, 2, dtype=torch.float64).numpy(), torch.randint(3, (60,)).numpy()
    posterior = dubito.fit(model, dubito.MAP(epochs=1), (x, y))
    for given in ({}, {"validation": (x[:20], y[:20])}):
        found = ConfidNet((8,), epochs=1, tune_epochs=1).fit(posterior, (x, y), progress=False, **given)
        assert found(x).shape == (60,)
