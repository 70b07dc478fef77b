"""Conformal sets and intervals: the promise by simulation against its exact law, the sets by brute force."""

import math
import warnings

import pytest
import torch
from dubito.recalibrate.conformal import conformal_quantile
from scipy import stats

from dubito import Bernoulli, Categorical, Gaussian
from dubito.posteriors.predictive import LatentMixture
from dubito.recalibrate import ConformalIntervals, ConformalSets, Quantiles, Temperature, Variance

DOUBLE = torch.float64
SETS = [
    ConformalSets("lac"),
    ConformalSets("aps"),
    ConformalSets("raps", penalty=0.1, free=1),
    ConformalSets("aps", by_class=True),
    ConformalSets("lac", by_class=True),
]


def source(seed=0):
    return torch.Generator().manual_seed(seed)


def drawn(n, generator, *, classes=4):
    """Classes, and a predictive that knows something of them but is far too sure."""
    y = torch.randint(classes, (n,), generator=generator)
    f = 3 * torch.randn(1, n, classes, dtype=DOUBLE, generator=generator)
    return f.scatter_add(-1, y.reshape(1, n, 1), torch.full((1, n, 1), 4.0, dtype=DOUBLE)), y


def law(n, level, m):
    """How many of m new examples are covered, after n held-out ones."""
    rank = math.ceil((n + 1) * level - 1e-9)
    return stats.betabinom(m, rank, n + 1 - rank)


def holds(counts, n, level, m):
    """Counts over independent repetitions follow the law: their mean, and their spread, within four standard errors."""
    exact, repeats = law(n, level, m), len(counts)
    assert abs(sum(counts) / repeats - exact.mean()) < 4 * exact.std() / math.sqrt(repeats)
    found = torch.tensor(counts, dtype=DOUBLE).std()
    assert float(found) == pytest.approx(exact.std(), rel=4 / math.sqrt(2 * repeats))


@pytest.mark.parametrize("settings", SETS[:3], ids=lambda s: s.score)
def test_sets_keep_their_promise(settings):
    generator, n, m, level, counts = source(), 49, 40, 0.8, []
    for _ in range(150):
        f, y = drawn(n + m, generator)
        rule = settings.fit(LatentMixture(Categorical(), f[:, :n]), y[:n], level=level, generator=generator)
        sets = rule(LatentMixture(Categorical(), f[:, n:]), generator=generator)
        counts.append(int(sets.gather(-1, y[n:].unsqueeze(-1)).sum()))
    holds(counts, n, level, m)


@pytest.mark.parametrize("settings", SETS[3:], ids=lambda s: s.score)
def test_every_class_keeps_its_promise(settings):
    generator, n, m, level, counts = source(), 19, 20, 0.8, {0: [], 1: []}
    for _ in range(120):
        y = torch.arange(2).repeat(n + m)  # n and m examples of each class
        f = torch.randn(1, len(y), 2, dtype=DOUBLE, generator=generator) + torch.tensor([1.5, 0.0], dtype=DOUBLE)  # biased
        rule = settings.fit(LatentMixture(Categorical(), f[:, : 2 * n]), y[: 2 * n], level=level, generator=generator)
        inside = rule(LatentMixture(Categorical(), f[:, 2 * n :]), generator=generator).gather(-1, y[2 * n :].unsqueeze(-1))
        for c, found in counts.items():
            found.append(int(inside[y[2 * n :] == c].sum()))
    for found in counts.values():
        holds(found, n, level, m)
    plain = ConformalSets(settings.score).fit(LatentMixture(Categorical(), f), y, level=level, generator=generator)
    by_class = plain.judge(LatentMixture(Categorical(), f), y, generator=generator).by_class
    assert by_class[0] > 0.9  # at the expense of the other
    assert by_class[1] < 0.75


@pytest.mark.parametrize("settings", [ConformalIntervals(s) for s in ("absolute", "scaled", "quantile")], ids=lambda s: s.score)
def test_intervals_keep_their_promise(settings):
    generator, n, m, level, counts = source(), 39, 40, 0.9, []
    for _ in range(100):
        f = torch.randn(1, n + m, 1, dtype=DOUBLE, generator=generator)
        spread = f.abs() + 0.1
        y = (f + spread * torch.randn(f.shape, dtype=DOUBLE, generator=generator) ** 3)[0]  # nothing like what is predicted
        known, new = (LatentMixture(Gaussian(scale=0.1), f[:, part], cov=spread[:, part]) for part in (slice(n), slice(n, None)))
        lower, upper = settings.fit(known, y[:n], level=level)(new)
        counts.append(int(((lower <= y[n:]) & (y[n:] <= upper)).sum()))
    holds(counts, n, level, m)


def test_sets_by_brute_force():
    f, y = drawn(60, source(1), classes=5)
    p = LatentMixture(Categorical(), f)
    probs = p.mean
    for settings in (ConformalSets("aps"), ConformalSets("raps", penalty=0.03, free=2), ConformalSets("aps", randomized=False)):
        rule = settings.fit(p, y, level=0.85, generator=source(7))
        scores = torch.zeros(60, 5, dtype=DOUBLE)
        u = torch.rand(60, 1, 1, dtype=DOUBLE, generator=source(7)).flatten() if settings.randomized else torch.ones(60)
        for i in range(60):
            for c in range(5):
                above = [d for d in range(5) if probs[i, d] > probs[i, c]]
                scores[i, c] = sum(probs[i, d] for d in above) + u[i] * probs[i, c]
                if settings.score == "raps":
                    scores[i, c] += 0.03 * max(0, len(above) + 1 - 2)
        own = sorted(scores[torch.arange(60), y].tolist())
        threshold = own[math.ceil(61 * 0.85) - 1]
        assert float(rule.threshold) == pytest.approx(threshold, abs=1e-12)
        assert torch.equal(rule(p, generator=source(7)), scores <= float(rule.threshold))


def test_level_and_size_and_empty_sets():
    f, y = drawn(2000, source())
    p = LatentMixture(Categorical(), f)
    rule = ConformalSets("lac").fit(p, y, level=0.7)
    found = rule.judge(p, y)
    assert found.coverage == pytest.approx(math.ceil(2001 * 0.7) / 2000)  # of the data it was fitted to, exactly
    assert found.n == 2000
    sizes = rule(p).sum(-1)
    assert found.size == pytest.approx(float(sizes.double().mean()))
    full = ConformalSets("lac", nonempty=True).fit(p, y, level=0.7)
    assert bool((sizes == 0).any())
    assert int(full(p).sum(-1).min()) == 1
    top = p.mean.argmax(-1, keepdim=True)
    assert bool(full(p).gather(-1, top).all())
    sizes = [ConformalSets("lac").fit(p, y, level=level).judge(p, y).size for level in (0.5, 0.8, 0.95)]
    assert sizes == sorted(sizes)
    parts = [(LatentMixture(p.likelihood, f[:, i : i + 700]), y[i : i + 700]) for i in range(0, 2000, 700)]
    assert torch.equal(ConformalSets("lac").fit(parts, level=0.7).threshold, rule.threshold)
    assert rule.judge(parts).coverage == pytest.approx(found.coverage)


def test_sets_after_recalibration_and_of_pixels():
    f, y = drawn(600, source())
    p = LatentMixture(Categorical(), f)
    fix = Temperature().fit(p, y)
    rule = ConformalSets("aps").fit(fix(p), y, generator=source())
    assert rule.judge(fix(p), y, generator=source(1)).coverage == pytest.approx(0.9, abs=0.04)
    dense, labels = LatentMixture(Categorical(), f.reshape(1, 6, 10, 10, 4)), y.reshape(6, 10, 10).clone()
    labels[0] = -100
    found = ConformalSets("lac").fit(dense, labels)
    assert found.n == 500
    assert found(dense).shape == (6, 10, 10, 4)
    assert found.judge(dense, labels).n == 500


def test_labels_have_sets_of_zero_and_one():
    f = 2 * torch.randn(1, 4000, 2, dtype=DOUBLE, generator=source())
    y = torch.bernoulli(torch.sigmoid(f[0] * torch.tensor([1.0, 0.2])), generator=source(1)).long()
    p = LatentMixture(Bernoulli(), f)
    rule = ConformalSets("lac").fit(p, y, level=0.9)
    sets = rule(p)
    assert sets.shape == (4000, 2, 2)
    assert rule.threshold.shape == (2, 1)
    covered = sets.gather(-1, y.unsqueeze(-1)).squeeze(-1).double().mean(0)
    torch.testing.assert_close(covered, torch.full((2,), 0.9, dtype=DOUBLE), atol=2e-3, rtol=0)
    assert sets[:, 1].sum() > sets[:, 0].sum()  # the label that is predicted worse
    each = ConformalSets("lac", by_class=True).fit(p, y, level=0.9)
    torch.testing.assert_close(each.judge(p, y).by_class, torch.full((2,), 0.9, dtype=DOUBLE), atol=5e-3, rtol=0)


def test_intervals_by_hand_and_jointly():
    f = torch.zeros(1, 19, 2, dtype=DOUBLE)
    y = torch.stack([torch.arange(1.0, 20.0), torch.arange(19.0, 0.0, -1)], -1).double()
    p = LatentMixture(Gaussian(scale=(1.0, 2.0)), f)
    rule = ConformalIntervals("absolute").fit(p, y, level=0.9)
    assert rule.threshold.tolist() == [18.0, 18.0]
    rule = ConformalIntervals("scaled").fit(p, y, level=0.9)
    assert rule.threshold.tolist() == [18.0, 9.0]
    assert rule(p)[1][0].tolist() == pytest.approx([18.0, 18.0], rel=1e-14)
    joint = ConformalIntervals("absolute", joint=True).fit(p, y, level=0.9)
    assert joint.threshold.tolist() == [19.0, 19.0]  # the 18th of max(k, 20 - k)
    assert joint.judge(p, y).coverage == 1
    lower, upper = p.interval(0.9)
    rule = ConformalIntervals("quantile").fit(p, y, level=0.9)
    torch.testing.assert_close(rule(p)[1], upper + (18 - upper[0]))
    narrow = ConformalIntervals("quantile").fit(p, 0.01 * torch.randn(19, 2, dtype=DOUBLE, generator=source()), level=0.9)
    low, high = narrow(p)
    assert bool((narrow.threshold < 0).all())  # the model was too careful
    assert bool((low >= lower).all() & (high <= upper).all() & (low <= high).all())
    found = narrow.judge(p, torch.zeros(19, 2))
    assert found.by_output.tolist() == [1.0, 1.0]
    assert found.width == pytest.approx(float((high - low).mean()))
    stretched = Variance().fit(p, y)(p)
    assert ConformalIntervals().fit(stretched, y).judge(stretched, y).coverage == pytest.approx(18 / 19)


def test_too_few_examples_are_told_of():
    f, y = drawn(9, source(), classes=2)
    p = LatentMixture(Categorical(), f)
    with pytest.warns(UserWarning, match=r"too few held-out examples: 9. A level of 0.95 needs at least 19; .* all classes"):
        rule = ConformalSets("lac").fit(p, y, level=0.95)
    assert bool(rule(p).all())
    with pytest.warns(UserWarning, match="class 1 \\(1\\)"):
        ConformalSets("lac", by_class=True).fit(p, torch.tensor([0] * 8 + [1]), level=0.8)
    numbers = LatentMixture(Gaussian(scale=1.0), torch.zeros(1, 9, 1))
    with pytest.warns(UserWarning, match="the whole line"):
        rule = ConformalIntervals("absolute").fit(numbers, torch.zeros(9), level=0.95)
    assert rule(numbers)[0].eq(-torch.inf).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ConformalSets("lac").fit(p, y, level=0.9).threshold.isfinite()  # 9 of 9: just enough


def test_errors_in_words():
    p, numbers = LatentMixture(Categorical(), torch.zeros(1, 2, 2)), LatentMixture(Gaussian(scale=1.0), torch.zeros(1, 2, 1))
    with pytest.raises(ValueError, match="ConformalSets is for classes, and Gaussian predicts numbers: .* ConformalIntervals"):
        ConformalSets().fit(numbers, torch.zeros(2))
    with pytest.raises(
        ValueError, match="ConformalIntervals is for regression, and Categorical predicts classes: .* ConformalSets"
    ):
        ConformalIntervals().fit(p, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="level must be above 0 and below 1; got 90"):
        ConformalSets().fit(p, torch.tensor([0, 1]), level=90)
    with pytest.raises(ValueError, match="score must be one of 'lac', 'aps', 'raps'; got 'naps'"):
        ConformalSets("naps")
    with pytest.raises(ValueError, match="score must be one of 'absolute', 'scaled', 'quantile'; got 'cqr'"):
        ConformalIntervals("cqr")
    rule = ConformalSets("lac", by_class=True).fit(p, torch.tensor([0, 1]), level=0.5)
    with pytest.raises(ValueError, match="fitted to 2 outputs; this predictive has 3"):
        rule(LatentMixture(Categorical(), torch.zeros(1, 2, 3)))
    with pytest.raises(ValueError, match="zero or infinite has no scale"):
        ConformalIntervals().fit(LatentMixture(Gaussian(scale=1e-30), torch.zeros(1, 2, 1)), torch.zeros(2))


def test_no_quantile_of_nan():
    for level in (0.5, 0.99):
        with pytest.raises(ValueError, match="2 of 5 held-out predictions are NaN"):
            conformal_quantile(torch.tensor([[0.0, 1.0], [math.nan, math.nan], [1.0, 0.0], [2.0, math.nan], [1.0, 1.0]]), level)


@pytest.mark.parametrize("settings", [*SETS, ConformalSets("lac", nonempty=True)])
def test_the_set_of_a_prediction_that_is_nan_holds_all(settings):
    f, y = drawn(200, source())
    rule = settings.fit(LatentMixture(Categorical(), f), y, level=0.5, generator=source())
    broken = f.clone()
    broken[:, :3, 1] = math.nan
    sets = rule(LatentMixture(Categorical(), broken), generator=source())
    assert bool(sets[:3].all())
    assert torch.equal(sets[3:], rule(LatentMixture(Categorical(), f), generator=source())[3:])
    assert rule.judge(LatentMixture(Categorical(), broken[:, :3]), y[:3]).coverage == 1
    labels = ConformalSets("lac").fit(LatentMixture(Bernoulli(), f), (f[0] > 1).long(), level=0.5)
    assert bool(labels(LatentMixture(Bernoulli(), broken))[:3].all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("score", ["absolute", "scaled", "quantile"])
def test_the_interval_of_a_prediction_that_is_nan_is_the_whole_line(score, bad):
    f = torch.randn(1, 50, 2, generator=source())
    p, y = LatentMixture(Gaussian(scale=1.0), f), torch.randn(50, 2, generator=source(1))
    rule = ConformalIntervals(score).fit(p, y)
    broken = f.clone()
    broken[:, 4, 1] = bad
    lower, upper = rule(LatentMixture(Gaussian(scale=1.0), broken))
    assert (
        lower[4].tolist() == [-math.inf] * 2
    )  # of all outputs: what was promised was promised for examples like the held-out ones
    assert upper[4].tolist() == [math.inf] * 2
    assert torch.equal(lower[:4], rule(p)[0][:4])
    found = rule.judge(LatentMixture(Gaussian(scale=1.0), broken[:, 4:5]), y[4:5])
    assert (found.coverage, found.width) == (1, math.inf)


def test_intervals_of_what_was_recalibrated():
    f, y = torch.randn(1, 80, 1, generator=source()), torch.randn(80, 1, generator=source(1))
    p = LatentMixture(Gaussian(scale=1.0), f)
    fix = Quantiles().fit(p, y)
    f[:, 3] = math.nan
    with pytest.raises(ValueError, match="1 of 80 held-out predictions are NaN"):
        ConformalIntervals("quantile").fit(fix(LatentMixture(Gaussian(scale=1.0), f)), y)


@pytest.mark.parametrize("logit", [2.0, 0.3, -1.1])
@pytest.mark.parametrize("score", ["lac", "aps"])
def test_sets_of_labels_hold_their_promise_where_all_scores_are_tied(logit, score):
    y, p = torch.arange(200).view(-1, 1) % 2, LatentMixture(Bernoulli(), torch.full((1, 200, 1), logit))
    assert ConformalSets(score, randomized=False).fit(p, y, level=0.9).judge(p, y).coverage == 1


@pytest.mark.parametrize("score", ["absolute", "scaled", "quantile"])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_a_target_on_the_threshold_is_inside(score, dtype):
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        y = (torch.randint(3, (60,), generator=generator) * torch.rand((), generator=generator)).to(dtype)
        mean = torch.randn((), generator=generator).to(dtype).expand(1, 60, 1)
        p = LatentMixture(Gaussian(scale=0.1 + float(torch.rand((), generator=generator))), mean)
        assert ConformalIntervals(score).fit(p, y, level=0.9).judge(p, y).coverage >= 0.9


def test_a_class_without_examples_is_in_every_set():
    p = LatentMixture(Categorical(), torch.randn(1, 50, 3, generator=torch.Generator().manual_seed(0)))
    with pytest.warns(UserWarning, match=r"class 2 \(0\)"):
        rule = ConformalSets(by_class=True).fit(p, torch.arange(50) % 2)
    assert bool(rule(p)[:, 2].all())


def test_coverage_has_its_standard_error():
    g = torch.Generator().manual_seed(0)
    p = LatentMixture(Gaussian(scale=1.0), torch.zeros(1, 400, 1))
    y = torch.randn(400, generator=g)
    found = ConformalIntervals("absolute").fit(p, torch.randn(400, generator=g)).judge(p, y)
    assert found.standard_error == pytest.approx((found.coverage * (1 - found.coverage) / 399) ** 0.5)
    probs = LatentMixture(Categorical(), torch.randn(1, 300, 4, generator=g))
    truth = torch.randint(4, (300,), generator=g)
    sets = ConformalSets("lac").fit(probs, truth).judge(probs, truth)
    assert sets.standard_error == pytest.approx((sets.coverage * (1 - sets.coverage) / 299) ** 0.5)


def test_the_old_spelling_still_works():
    with pytest.warns(DeprecationWarning, match=r"ConformalSets\(randomised=...\).*use ConformalSets\(randomized=...\)"):
        settings = ConformalSets("aps", randomised=False)
    assert settings == ConformalSets("aps", randomized=False)
    with pytest.warns(DeprecationWarning, match="randomized"):
        assert settings.randomised is False
