"""Dense prediction: maps, streaming figures against those on everything at once, edges, and missing numbers."""

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sklearn.metrics import average_precision_score, jaccard_score, precision_recall_curve, roc_auc_score
from torch import nn

import dubito
from dubito import metrics
from dubito.apps.dense import Confusion, Detector, Tally, assess, edge_distance, edges, maps, maps_of
from dubito.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticCategorical,
    HeteroscedasticGaussian,
    MultiTask,
)
from dubito.posteriors import Point
from dubito.posteriors.predictive import LatentMixture
from dubito.recalibrate import Temperature

VOID = 9


def labels(*shape, classes=3, void=True, seed=0):
    source = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, shape, generator=source)
    return torch.where(torch.rand(shape, generator=source) < 0.2, VOID, y) if void else y


def dense(likelihood, channels, *, draws=4, seed=0, cov=False):
    """A predictive of two maps of 5 x 6 pixels."""
    source = torch.Generator().manual_seed(seed)
    means = torch.randn(draws, 2, 5, 6, channels, generator=source)
    return LatentMixture(likelihood, means, torch.rand(means.shape, generator=source) if cov else None)


CASES = {
    "draws": lambda: dense(Categorical(dim=1, ignore_index=VOID), 3),
    "gaussians": lambda: dense(Categorical(dim=1, ignore_index=VOID), 3, draws=1, cov=True),
    "probit": lambda: replace(dense(Categorical(dim=1, ignore_index=VOID), 3, draws=1, cov=True), link="probit"),
    "noisy logits": lambda: dense(HeteroscedasticCategorical(dim=1, ignore_index=VOID, samples=16), 6),
}


@pytest.mark.parametrize("case", CASES)
def test_maps_are_those_of_the_predictive(case, monkeypatch):
    """Piece by piece as at once."""
    monkeypatch.setattr(sys.modules[maps.__module__], "PIECE", 1000)
    p = CASES[case]()
    found, split = maps_of(p), p.uncertainty
    torch.testing.assert_close(found.mean, p.mean)
    assert torch.equal(found.prediction, p.mean.argmax(-1))
    torch.testing.assert_close(found.confidence, p.mean.amax(-1))
    for name in ("total", "aleatoric", "epistemic"):
        torch.testing.assert_close(getattr(found, name), getattr(split, name), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(found.spread, p.f_var[..., :3].mean(-1))
    noisy = isinstance(p.likelihood, HeteroscedasticCategorical)
    assert (found.noise is not None) == noisy
    if noisy:
        torch.testing.assert_close(found.noise, p.means[..., 3:].exp().mean((0, -1)))


def test_maps_of_numbers():
    p = dense(HeteroscedasticGaussian(dim=1), 4, cov=True)
    found, split = maps_of(p), p.uncertainty
    torch.testing.assert_close(found.prediction, p.mean)
    torch.testing.assert_close(found.epistemic, split.epistemic.sum(-1), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.total, (split.aleatoric + split.epistemic).sum(-1), atol=1e-5, rtol=1e-4)
    assert found.noise.shape == (2, 5, 6)
    with pytest.raises(ValueError, match="no confidence"):
        found.confidence  # noqa: B018


def network(outputs, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Dropout2d(0.4), nn.Conv2d(6, outputs, 1))


def posterior(likelihood, outputs):
    model = dubito.Model(network(outputs), likelihood)
    x = torch.rand(3, 2, 5, 6)
    y = labels(3, 5, 6, void=False) if likelihood.discrete else torch.zeros(3, 5, 6)
    return dubito.fit(model, dubito.MCDropout(epochs=0, draws=5), (x, y))


def test_maps_do_not_depend_on_the_memory():
    """All images are seen by the same functions, however few at a time; module, mode and generators are as before."""
    found = posterior(Categorical(dim=1), 3)
    x, state = torch.rand(7, 2, 5, 6), torch.get_rng_state()
    all_at_once, one_by_one = maps(found, x), maps(found, x, memory=1e-6)
    assert torch.equal(state, torch.get_rng_state())
    assert found.model.network.training
    torch.testing.assert_close(all_at_once.epistemic, one_by_one.epistemic)
    torch.testing.assert_close(all_at_once.mean, found.predict(x).mean)
    torch.testing.assert_close(maps(found.predict, x).mean, all_at_once.mean)


def test_tasks():
    tasks = MultiTask(
        {
            "classes": (HeteroscedasticCategorical(samples=8, ignore_index=VOID), 6),
            "edges": (Categorical(scale=None, ignore_index=VOID), 2),
        },
        dim=1,
    )
    x, y = torch.rand(4, 2, 5, 6), labels(4, 5, 6)
    targets = {"classes": y, "edges": edges(y, ignore_index=VOID)}
    found = dubito.fit(dubito.Model(network(8), tasks), dubito.MCDropout(epochs=1, draws=3), (x, targets))
    assert maps(found, x, task="classes").mean.shape == (4, 5, 6, 3)
    result = assess(found, (x, targets), task="edges")
    assert result.n == int((y != VOID).sum())
    assert result["nll"] == pytest.approx(float(metrics.nll(found.predict(x).task("edges"), targets["edges"])), rel=1e-4)
    with pytest.raises(ValueError, match="name one"):
        maps(found, x)
    with pytest.raises(ValueError, match="of one task"):
        Tally().update(found.predict(x), y)
    with pytest.raises(ValueError, match="no tasks"):
        maps(posterior(Categorical(dim=1), 3), x, task="classes")


@pytest.mark.parametrize("case", CASES)
def test_a_tally_of_batches_is_that_of_the_metrics(case, monkeypatch):
    monkeypatch.setattr(sys.modules[maps.__module__], "PIECE", 1000)
    p, tally, y = CASES[case](), Tally(scores=("total", "aleatoric", "epistemic", "one_minus_max")), labels(2, 5, 6)
    for i in range(2):
        cov = None if p.cov is None else p.cov[:, i : i + 1]
        tally.update(replace(p, means=p.means[:, i : i + 1], cov=cov), y[i : i + 1])
    found, keep, wrong = tally.compute(), y != VOID, p.mean.argmax(-1) != y
    assert found.n == int(keep.sum()) < 60
    for name in ("accuracy", "nll", "ece"):
        assert found[name] == pytest.approx(float(getattr(metrics, name)(p, y)), rel=1e-4), name
    assert found["miou"] == pytest.approx(jaccard_score(y[keep], p.mean.argmax(-1)[keep], average="macro"))
    assert found["aleatoric"] == pytest.approx(float(p.uncertainty.aleatoric[keep].mean()), rel=1e-4)
    whole = metrics.reliability(p, y)
    torch.testing.assert_close(found.reliability.count, whole.count)
    torch.testing.assert_close(found.reliability.lower, whole.lower, equal_nan=True)
    score = p.uncertainty.total[keep]
    detector = found.detectors["total"]
    assert detector.average_precision == pytest.approx(average_precision_score(wrong[keep], score), abs=0.02)
    assert found.data["n"] == found.n
    assert "IoU of b" in found.table(["a", "b", "c"])


def test_recalibrated_predictives_are_tallied_as_well():
    """These have no draws to cut into pieces."""
    p, y = CASES["draws"](), labels(2, 5, 6)
    y = torch.where((torch.rand(y.shape) < 0.6) & (y != VOID), p.mean.argmax(-1), y)
    fix = Temperature().fit(p, y)
    tally = Tally()
    tally.update(fix(p), y)
    found = tally.compute()
    for name in ("accuracy", "nll", "ece"):
        assert found[name] == pytest.approx(float(getattr(metrics, name)(fix(p), y)), rel=1e-4), name
    assert found["nll"] < float(metrics.nll(p, y))


def test_unlikely_truths_are_scored_in_logs():
    """A probability that is 0 in float32 has a log all the same."""
    f = torch.tensor([[0.0, 300.0], [0.0, 290.0]]).reshape(2, 1, 1, 1, 2)
    p, tally = LatentMixture(Categorical(dim=1), f), Tally()
    tally.update(p, torch.zeros(1, 1, 1, dtype=torch.long))
    assert tally.compute()["nll"] == pytest.approx(290 + math.log(2), rel=1e-5)


def test_one_label_is_two_classes():
    p, y = dense(Bernoulli(dim=1), 1), labels(2, 5, 6, classes=2, void=False)
    tally = Tally()
    tally.update(p, y)
    found = tally.compute()
    assert found["accuracy"] == pytest.approx(float(metrics.accuracy(p, y)))
    assert found["nll"] == pytest.approx(float(metrics.nll(p, y)), rel=1e-5)
    assert torch.equal(maps_of(p).prediction, (p.mean.squeeze(-1) > 0.5).long())
    with pytest.raises(ValueError, match="one by one"):
        maps_of(dense(Bernoulli(dim=1), 2))


@pytest.mark.parametrize("likelihood", [Gaussian(scale=0.5, dim=1), HeteroscedasticGaussian(dim=1)])
@pytest.mark.parametrize("cov", [False, True])
def test_numbers_are_those_of_the_metrics(likelihood, cov):
    channels = 2 if isinstance(likelihood, Gaussian) else 4
    p, y = dense(likelihood, channels, cov=cov), torch.randn(2, 2, 5, 6)
    tally = Tally()
    tally.update(p, y)
    found = tally.compute()
    for name in ("rmse", "nll", "quantile_error"):
        assert found[name] == pytest.approx(float(getattr(metrics, name)(p, y)), rel=1e-4), name
    loss = (p.mean - y.movedim(1, -1)).square().sum(-1)
    risk = float(metrics.aurc(p.uncertainty.total.sum(-1).flatten(), loss.flatten()))
    assert found.detectors["total"].aurc == pytest.approx(risk, rel=0.02)
    with pytest.raises(ValueError, match="0 or 1"):
        found.detectors["total"].precision_recall()


def test_missing_numbers_count_for_nothing():
    """Scores, gradients and figures are those without the missing pixels."""
    likelihood, y = HeteroscedasticGaussian(dim=1, missing=True), torch.randn(2, 5, 6)
    y[torch.rand(y.shape) < 0.3] = torch.nan
    keep = ~y.isnan()
    for cov in (False, True):
        p, tally = dense(likelihood, 2, cov=cov), Tally()
        alone = replace(p, means=p.means[:, keep], cov=None if p.cov is None else p.cov[:, keep])
        score = alone.log_prob(y[keep].unsqueeze(-1))
        torch.testing.assert_close(p.log_prob(y).sum(), score.sum())
        tally.update(p, y)
        found = tally.compute()
        assert found.n == int(keep.sum())
        assert found["nll"] == pytest.approx(-float(score.mean()), rel=1e-4)
        assert float(metrics.nll(p, y)) == pytest.approx(found["nll"], rel=1e-4)
        for name in ("rmse", "crps", "quantile_error"):
            with pytest.raises(ValueError, match=rf"{name} needs all targets.*assess"):
                getattr(metrics, name)(p, y)
        assert found["rmse"] == pytest.approx(float((p.mean.squeeze(-1) - y)[keep].square().mean().sqrt()), rel=1e-5)
    model, x = dubito.Model(network(2), likelihood), torch.rand(2, 2, 5, 6)
    fitted = dubito.fit(model, dubito.MAP(epochs=2), (x, y))
    assert all(bool(leaf.isfinite().all()) for leaf in fitted.params.values())
    assert bool(dubito.fit(model, dubito.Laplace("diagonal"), (x, y), start=fitted).sample(1)["0.weight"].isfinite().all())
    with pytest.raises(ValueError, match="missing=True"):
        dubito.fit(dubito.Model(network(2), HeteroscedasticGaussian(dim=1)), dubito.MAP(epochs=1), (x, y))
    with pytest.raises(ValueError, match="infinite"):
        dubito.fit(model, dubito.MAP(epochs=1), (x, torch.full_like(y, torch.inf)))


def test_missing_targets_of_one_task_of_several():
    """With draws they are left out; tasks that a Gaussian holds together are asked one by one."""
    tasks = MultiTask(
        {"classes": (Categorical(ignore_index=VOID), 3), "numbers": (HeteroscedasticGaussian(missing=True), 2)}, dim=1
    )
    y = {"classes": labels(2, 5, 6), "numbers": torch.randn(2, 5, 6)}
    y["numbers"][0] = torch.nan
    p = dense(tasks, 5, draws=1)
    apart = sum(p.task(name).log_prob(part) for name, part in y.items())
    torch.testing.assert_close(p.log_prob(y), apart)
    p = dense(tasks, 5, draws=1, cov=True)
    with pytest.raises(ValueError, match="each task alone"):
        p.log_prob(y)
    for name, part in y.items():
        assert bool(p.task(name).log_prob(part).isfinite().all())


def test_confusion():
    y, said = labels(4, 7, 8), labels(4, 7, 8, void=False, seed=1)
    found = Confusion.of(said[:2], y[:2], classes=4, ignore_index=VOID) + Confusion.of(
        said[2:], y[2:], classes=4, ignore_index=VOID
    )
    keep = y != VOID
    expected = jaccard_score(y[keep], said[keep], average=None, labels=[0, 1, 2])
    torch.testing.assert_close(found.iou[:3], torch.tensor(expected))
    assert found.iou[3].isnan()
    assert found.miou == pytest.approx(expected.mean())
    assert found.accuracy == pytest.approx(float((said == y)[keep].double().mean()))
    each = [float((said == c)[y == c].double().mean()) for c in range(3)]
    assert found.class_accuracy == pytest.approx(sum(each) / 3)
    with pytest.raises(ValueError, match="ignore_index"):
        Confusion.of(said, y, classes=3)
    with pytest.raises(ValueError, match="same shape"):
        Confusion.of(said[:2], y, classes=3)


def test_detector_is_exact_for_scores_of_few_digits():
    """Any batches, any sizes of scores from 0 to huge; ties stay together."""
    scores = torch.randint(0, 2000, (600,)) * 2.0 ** torch.randint(-40, 40, (600,))
    wrong = torch.rand(600) < 0.2 + 0.5 * (scores > scores.median())
    found = Detector()
    for part in range(3):
        found.add(scores[part::3], wrong[part::3])
    assert found.n == 600
    assert found.average_precision == pytest.approx(average_precision_score(wrong, scores))
    assert found.auroc == pytest.approx(roc_auc_score(wrong, scores))
    assert found.aurc == pytest.approx(float(metrics.aurc(scores.double(), wrong)))
    precision, recall = found.precision_recall()
    p, r, _ = precision_recall_curve(wrong, scores)
    torch.testing.assert_close(precision, torch.from_numpy(p[:-1].copy()).flip(0))
    torch.testing.assert_close(recall, torch.from_numpy(r[:-1].copy()).flip(0))
    coverage, risk = found.kept()
    assert coverage[-1] == 1
    assert float(risk[-1]) == pytest.approx(float(wrong.double().mean()))


def test_detector_rounds_by_less_than_a_thousandth():
    found, score = Detector(), torch.rand(5000) * 10.0 ** torch.randint(-9, 3, (5000,))
    found.add(score, torch.zeros(5000))
    assert len(found.ranking.values) > 4000
    exact = score.sort().values
    shown = found.ranking.values.repeat_interleave(found.ranking.size)
    assert float(((exact - shown) / exact).abs().max()) < 5e-4


def test_detector_refuses():
    perfect = Detector()
    perfect.add(torch.rand(2), torch.tensor([False, False]))
    with pytest.raises(ValueError, match="no pixel is wrong"):
        perfect.precision_recall()
    assert perfect.aurc == 0
    with pytest.raises(ValueError, match="add scores first"):
        Detector().ranking  # noqa: B018
    with pytest.raises(ValueError, match="NaN or negative"):
        Detector().add(torch.tensor([-1.0]), torch.tensor([True]))
    with pytest.raises(ValueError, match="one for each"):
        Detector().add(torch.rand(2), torch.tensor([True]))


def test_edges():
    y = torch.zeros(1, 6, 8, dtype=torch.long)
    y[:, :, 4:] = 2
    y[:, 0] = VOID
    found = edges(y, ignore_index=VOID)
    expected = torch.zeros_like(y)
    expected[:, :, 3:5] = 1
    expected[:, 0] = VOID
    assert torch.equal(found, expected), "void is no other label"
    distance = edge_distance(y, cap=3, ignore_index=VOID)
    assert distance[0, 0].isnan().all()
    assert distance[0, 3].tolist() == [3, 2, 1, 0, 0, 1, 2, 3]
    assert torch.equal(edges(y, width=3, ignore_index=VOID)[0, 1:, 1:7], torch.ones(5, 6, dtype=torch.long))
    # by hand, on random labels
    y = labels(1, 5, 5)
    for i in range(5):
        for j in range(5):
            near = y[0, max(0, i - 1) : i + 2, max(0, j - 1) : j + 2]
            other = bool(((near != y[0, i, j]) & (near != VOID)).any())
            assert int(edges(y, ignore_index=VOID)[0, i, j]) == (VOID if y[0, i, j] == VOID else int(other))
    for kind in (torch.uint8, torch.int8, torch.int32):
        found = edges(y.to(kind), ignore_index=VOID)
        assert found.dtype == kind
        assert torch.equal(found.long(), edges(y, ignore_index=VOID))
        torch.testing.assert_close(
            edge_distance(y.to(kind), ignore_index=VOID), edge_distance(y, ignore_index=VOID), equal_nan=True
        )
    with pytest.raises(ValueError, match="whole numbers"):
        edges(torch.zeros(1, 2, 2))
    with pytest.raises(ValueError, match="cap must be at least 1; got 0"):
        edge_distance(y, cap=0)
    with pytest.raises(ValueError, match="width must be at least 1; got 0"):
        edges(y, width=0)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="scores must be a list of names"):
        Tally(scores=("entropy",))
    with pytest.raises(ValueError, match="nothing to judge"):
        Tally().compute()
    with pytest.raises(TypeError, match="expected a posterior, or a function"):
        maps(3, torch.zeros(1, 2, 5, 6))
    with pytest.raises(TypeError, match="returns a Tensor"):
        maps(network(3), torch.zeros(1, 2, 5, 6))
    with pytest.raises(ValueError, match="predicts no noise"):
        Tally(scores=("noise",)).update(CASES["draws"](), labels(2, 5, 6))
    tally = Tally()
    tally.update(CASES["draws"](), labels(2, 5, 6))
    with pytest.raises(ValueError, match="different tasks"):
        tally.update(dense(Gaussian(scale=1.0, dim=1), 1), torch.zeros(2, 5, 6))
    with pytest.raises(ValueError, match="inputs only"):
        assess(posterior(Categorical(dim=1), 3), [torch.zeros(1, 2, 5, 6)])


@pytest.fixture(scope="module")
def fully_convolutional():
    path = Path(__file__).parents[2] / "examples" / "fully_convolutional.py"
    spec = importlib.util.spec_from_file_location("fully_convolutional", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FullyConvolutional


def test_the_network_of_the_examples(fully_convolutional):
    """Any size of image, dropout in the middle only, and as many weights as it says."""
    assert sum(p.numel() for p in fully_convolutional(22).parameters()) == 1_211_190
    for depth in (0, 1, 3):
        net = fully_convolutional(4, width=4, depth=depth)
        assert net(torch.rand(2, 3, 11, 17)).shape == (2, 4, 11, 17)
    assert sum(isinstance(module, nn.Dropout2d) for module in net.modules()) == 5
    assert not any(isinstance(module, nn.Dropout2d) for module in fully_convolutional(4, dropout=0.0).modules())


def test_stripes_are_learned_and_where_they_blur_is_uncertain(fully_convolutional):
    """Two classes by colour; a column in which labels are tossed has aleatoric uncertainty, in every draw alike."""
    source = torch.Generator().manual_seed(0)
    y = torch.randint(2, (24, 1, 8), generator=source).expand(-1, 8, -1).clone()
    x = torch.stack([y.float(), 1.0 - y, torch.zeros(y.shape)], 1)
    x[:, 2, :, 5] = 1.0
    y[:, :, 5] = torch.randint(2, (24, 8), generator=source)
    y[:, 0] = VOID
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = fully_convolutional(4, width=4, depth=1, dropout=0.1)
    model = dubito.Model(net, HeteroscedasticCategorical(dim=1, ignore_index=VOID, samples=8))
    fitted = dubito.fit(model, dubito.MCDropout(epochs=30, learning_rate=0.02, draws=10), (x, y), batch_size=8)
    found, result = maps(fitted, x), assess(fitted, (x, y))
    others = [i for i in range(8) if i != 5]
    assert float((found.prediction == y)[:, 1:, others].float().mean()) > 0.95
    assert float(found.aleatoric[:, 1:, 5].mean()) > 3 * float(found.aleatoric[:, 1:, others].mean())
    assert result.detectors["aleatoric"].auroc > 0.8
    assert result["total"] == pytest.approx(result["aleatoric"] + result["epistemic"])
    assert float(maps(Point(model, fitted.params, fitted.buffers), x).epistemic.abs().max()) < 1e-6


def test_numpy_numbers_have_the_dtype_of_the_network():
    model = dubito.Model(nn.Conv2d(3, 4, 1), Categorical(dim=1))
    posterior = Point(model, model.parameters(), model.buffers())
    x, y = torch.rand(3, 3, 5, 6, dtype=torch.float64).numpy(), torch.randint(4, (3, 5, 6))
    assert torch.equal(maps(posterior, x).prediction, maps(posterior, torch.from_numpy(x).float()).prediction)
    assert assess(posterior, (x, y.numpy())).n == 90


def test_predictions_that_are_nan_are_not_counted_as_right():
    tally = Tally(scores=())
    tally.update(LatentMixture(Categorical(dim=1), torch.full((1, 1, 2, 2, 3), math.nan)), torch.zeros(1, 2, 2, dtype=torch.long))
    assert all(math.isnan(tally.compute().values[name]) for name in ("miou", "accuracy", "class_accuracy", "ece"))
