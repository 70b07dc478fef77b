"""Active learning: scores against their definitions, BatchBALD and EPIG against brute force, and a loop that forgets nothing."""

from __future__ import annotations

import copy
import errno
import threading
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import dubito
from dubito.apps.active import (
    ACQUISITIONS,
    EPIG,
    SCORES,
    ActiveLearning,
    BatchBALD,
    Measured,
    Pool,
    Random,
    Randomized,
    View,
    acquisition,
    balanced,
    bald,
    batchbald,
    mean_std,
)
from dubito.apps.active import labels as files
from dubito.apps.active.acquisitions import systematic
from dubito.apps.active.pool import Functions, best
from dubito.data import digits
from dubito.posteriors import Gaussian, Mixture, Point, Samples, Stochastic
from dubito.posteriors.predict.dropout import Dropout
from dubito.posteriors.predictive import LatentMixture, StudentT
from dubito.tensors import store


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mlp(inputs: int = 3, outputs: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, outputs))


def forms(likelihood: dubito.likelihoods.Likelihood | None = None, outputs: int = 4) -> dict[str, dubito.posteriors.Posterior]:
    torch.manual_seed(0)
    model = dubito.Model(mlp(outputs=outputs), likelihood or dubito.Categorical())
    params, buffers = model.parameters(), model.buffers()
    stacked = {name: torch.stack([leaf, leaf + 0.3, -leaf]) for name, leaf in params.items()}
    small = {name: torch.full_like(leaf, 0.1) for name, leaf in params.items() if ":" not in name}
    centre = {name: leaf for name, leaf in params.items() if ":" not in name}
    dropping = Stochastic(model, params, buffers, Dropout(), draws=8, consistent=False)
    return {
        "gaussian": Gaussian.diagonal(model, centre, small),
        "stochastic": dropping,
        "samples": Samples(model, stacked, buffers),
        "mixture": Mixture.equal([dropping, dropping]),
    }


def view_of(posterior: dubito.posteriors.Posterior, x: Tensor, **settings) -> View:
    return View(posterior, Pool(x), torch.arange(len(x)), **settings)


def random_probs(draws: int, n: int, classes: int) -> Tensor:
    return torch.softmax(2 * torch.randn(draws, n, classes, dtype=torch.float64, generator=generator()), -1)


def information(probs: Tensor, batch: list[int], weights: Tensor | None = None) -> float:
    """I[y_1 ... y_k; theta] by going through all joint outcomes."""
    draws, _, classes = probs.shape
    weights = torch.full((draws,), 1 / draws, dtype=probs.dtype) if weights is None else weights
    if not batch:
        return 0.0
    joint = known = torch.zeros((), dtype=probs.dtype)
    for outcome in product(range(classes), repeat=len(batch)):
        each = torch.stack([probs[:, i, c] for i, c in zip(batch, outcome, strict=True)]).prod(0)  # [S]
        joint = joint + torch.special.entr(weights @ each)
        known = known + weights @ torch.special.entr(each)
    return float(joint - known)


# --- scores of single inputs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", list(forms()))
@pytest.mark.parametrize("name", [*ACQUISITIONS, "expected_entropy"])
def test_every_acquisition_of_every_posterior(name, form):
    """It chooses, the same again for the same generator, in a stream as at once, and nothing of the user's changes."""
    posterior, x = forms()[form], torch.randn(30, 3)
    before, rng = copy.deepcopy(posterior.model.network.state_dict()), torch.get_rng_state()
    chosen = [acquisition(name).choose(view_of(posterior, x, draws=8, size=size), 5, generator()) for size in (30, 30)]
    assert len(set(chosen[0].positions.tolist())) == 5
    assert torch.equal(chosen[0].positions, chosen[1].positions)
    assert chosen[0].scores.isfinite().all()
    network = posterior.model.network
    assert torch.equal(rng, torch.get_rng_state())
    assert network.training
    assert all(torch.equal(leaf, before[key]) for key, leaf in network.state_dict().items())
    if form in ("gaussian", "samples"):  # independent masks are others in other batches
        streamed = acquisition(name).choose(view_of(posterior, x, draws=8, size=7), 5, generator())
        assert torch.equal(chosen[0].positions, streamed.positions)


def test_scores_against_their_definitions():
    probs = random_probs(5, 7, 3)
    p = LatentMixture(dubito.Categorical(), probs.log())
    mean = probs.mean(0)
    entropy = -(mean * mean.log()).sum(-1)
    top = mean.sort(-1, descending=True).values
    votes = torch.nn.functional.one_hot(probs.argmax(-1), 3).double().mean(0)
    expected = {
        "entropy": entropy,
        "bald": entropy + (probs * probs.log()).sum(-1).mean(0),
        "variation_ratio": 1 - votes.amax(-1),
        "margin": 1 - (top[:, 0] - top[:, 1]),
        "least_confidence": 1 - top[:, 0],
        "mean_std": probs.std(0, correction=0).mean(-1),
        "variance": 1 - (mean**2).sum(-1),
    }
    for name, value in expected.items():
        torch.testing.assert_close(SCORES[name](p), value, msg=name)


def test_weighted_draws_count_by_their_weight():
    probs, weights = random_probs(3, 4, 3), torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    p = LatentMixture(dubito.Categorical(), probs.log(), weights=weights)
    repeated = LatentMixture(dubito.Categorical(), probs[[0, 0, 1, 2]].log())
    for name in ("bald", "mean_std", "variation_ratio"):
        torch.testing.assert_close(SCORES[name](p), SCORES[name](repeated))


def test_bald_of_numbers():
    """Half the log of the ratio of variances, whichever way a predictive comes to them; a noise of each draw's own on average."""
    means = torch.tensor([[[-3.0]], [[3.0]]])
    expected = 0.5 * torch.tensor([10.0]).log()
    torch.testing.assert_close(bald(LatentMixture(dubito.Gaussian(scale=1.0), means)), expected)
    torch.testing.assert_close(
        bald(LatentMixture(dubito.Gaussian(scale=2.0), torch.zeros(1, 1, 1), cov=torch.full((1, 1, 1), 36.0))), expected
    )
    ones = torch.ones(1, 1, 1)
    student = StudentT(
        dubito.Gaussian(), 0 * ones, 9 * ones, torch.tensor([0.5]), torch.tensor([1.0])
    )  # its variance is infinite
    torch.testing.assert_close(bald(student), expected)
    f = torch.tensor([[[0.0, 0.0]], [[0.0, 2.0]]])  # two draws that agree but for the noise, of variance 1 and e^2
    own = LatentMixture(dubito.HeteroscedasticGaussian(), f)
    torch.testing.assert_close(bald(own), 0.5 * (torch.tensor([(1 + np.e**2) / 2]).log() - 1))
    torch.testing.assert_close(mean_std(LatentMixture(dubito.Gaussian(scale=1.0), means)), torch.tensor([3.0]))


def test_bald_of_a_predicted_noise_that_is_uncertain():
    """Under a Gaussian posterior it is the mean of the log noise that counts, not the log of its mean: .538, where that gives .163."""
    p = LatentMixture(dubito.HeteroscedasticGaussian(), torch.tensor([[[0.0, -1.0]]]), cov=torch.tensor([[[0.3, 1.5]]]))
    torch.testing.assert_close(bald(p), torch.tensor([0.5 * (np.log(0.3 + np.exp(-1 + 1.5 / 2)) + 1)], dtype=torch.float32))
    unit = torch.randn(400_000, 1, 2, generator=generator())
    drawn = replace(p, means=p.means + unit * torch.tensor([0.3, 1.5]).sqrt(), cov=None)
    torch.testing.assert_close(bald(p), bald(drawn), atol=0.01, rtol=0)
    dense = replace(p, cov=torch.tensor([[[[0.3, 0.2], [0.2, 1.5]]]]))
    torch.testing.assert_close(bald(dense), bald(p))
    noises = {"likelihood:log_scale": torch.tensor([[-1.0], [1.0]])}  # an ensemble of Gaussians, each with a noise of its own
    several = LatentMixture(dubito.Gaussian(), torch.zeros(2, 1, 1), cov=torch.ones(2, 1, 1), params=noises)
    torch.testing.assert_close(bald(several), 0.5 * torch.tensor([1 + np.cosh(2)], dtype=torch.float32).log())


@pytest.mark.parametrize("certain", [True, False])
def test_bald_of_several_tasks_is_the_sum_over_them(certain):
    tasks = dubito.MultiTask({"a": (dubito.HeteroscedasticGaussian(), 2), "b": (dubito.Categorical(), 3)})
    f = torch.randn(6, 4, 5, generator=generator())
    p = LatentMixture(tasks, f, cov=None if certain else 0.5 * torch.ones(6, 4, 5))
    torch.testing.assert_close(bald(p), bald(p.task("a")) + bald(p.task("b")))


def test_ties_are_taken_at_random():
    """A point has no BALD at all: what it asks must not be the head of the pool."""
    chosen = torch.cat([best(torch.zeros(100), 3, generator(seed)).positions for seed in range(50)])
    assert chosen.double().mean() == pytest.approx(49.5, abs=10)
    with pytest.raises(ValueError, match="NaN"):
        best(torch.tensor([1.0, torch.nan]), 1, generator())


def test_dense_outputs_count_with_their_mean():
    model = dubito.Model(nn.Conv2d(1, 2, 1), dubito.Categorical(dim=1))
    posterior = Point(model, model.parameters(), model.buffers())
    x = torch.randn(6, 1, 3, 3)
    p = posterior.predict(x)
    found = Measured("entropy").scores(view_of(posterior, x, size=4), generator())
    torch.testing.assert_close(found, SCORES["entropy"](p).mean((1, 2)))
    with pytest.raises(ValueError, match="have positions"):
        EPIG(2).scores(view_of(posterior, x), generator())


def test_functions_of_ones_own_and_names_that_are_not():
    posterior, x = forms()["samples"], torch.randn(9, 3)
    own = acquisition(lambda p: p.mean[:, 0])
    assert int(own.choose(view_of(posterior, x), 1, generator()).positions) == int(posterior.predict(x).mean[:, 0].argmax())
    with pytest.raises(ValueError, match="there is no acquisition function 'bold'; there are entropy, bald"):
        acquisition("bold")
    with pytest.raises(TypeError, match=r"write BatchBALD\(\)"):
        acquisition(BatchBALD)
    with pytest.raises(ValueError, match=r"one number for each input, \["):
        acquisition(lambda p: p.mean.sum()).choose(view_of(posterior, x), 1, generator())
    with pytest.raises(ValueError, match="for classes"):
        acquisition("entropy").choose(view_of(forms(dubito.Gaussian(scale=1.0))["samples"], x), 1, generator())


# --- with noise -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "expected"), [("power", [1, 4, 16]), ("softmax", np.exp([2, 4, 8])), ("softrank", [1 / 9, 1 / 4, 1])]
)
def test_noise_draws_in_proportion(how, expected):
    scores = torch.tensor([1.0, 2.0, 4.0])
    noisy = Randomized(Random(), how, 2.0).perturbed(scores.repeat(20_000, 1), generator())
    shares = torch.bincount(noisy.argmax(-1), minlength=3) / 20_000
    np.testing.assert_allclose(shares, np.array(expected) / np.sum(expected), atol=0.012)


def test_coldness_goes_from_random_to_the_best():
    scores = torch.linspace(0, 1, 50)
    for how in ("power", "softmax", "softrank"):
        cold = Randomized(Random(), how, 1e6).perturbed(scores, generator())
        assert sorted(cold.topk(5).indices.tolist()) == [45, 46, 47, 48, 49]
        best_first = Randomized(Random(), how, float("inf")).perturbed(scores, generator())
        assert best_first.topk(5).indices.tolist() == [49, 48, 47, 46, 45]
        warm = Randomized(Random(), how, 0.0).perturbed(scores.repeat(2000, 1), generator())
        assert warm.argmax(-1).double().mean() == pytest.approx(24.5, abs=1.5)
    with pytest.raises(TypeError, match="single inputs"):
        Randomized(BatchBALD())


# --- BatchBALD --------------------------------------------------------------------------------------------------------


def test_batchbald_against_all_outcomes():
    """Gains are the differences of the joint information, and each pick is the best given those before."""
    probs = random_probs(6, 8, 3)
    weights = torch.tensor([3.0, 1, 1, 2, 1, 2], dtype=torch.float64) / 10
    found = batchbald(probs, 4, weights=weights, generator=generator())
    chosen: list[int] = []
    for pick, gain in zip(found.positions.tolist(), found.scores.tolist(), strict=True):
        before = information(probs, chosen, weights)
        gains = {i: information(probs, [*chosen, i], weights) - before for i in range(8) if i not in chosen}
        assert pick == max(gains, key=gains.__getitem__)
        assert gain == pytest.approx(gains[pick], abs=1e-6)
        chosen.append(pick)


def test_batchbald_begins_with_bald_and_shrinks():
    probs = random_probs(20, 40, 4)
    found = batchbald(probs, 6, generator=generator())
    single = bald(LatentMixture(dubito.Categorical(), probs.log()))
    assert int(found.positions[0]) == int(single.argmax())
    assert float(found.scores[0]) == pytest.approx(float(single.max()))
    gains = found.scores.tolist()
    assert gains == sorted(gains, reverse=True)  # submodular
    assert sum(gains) <= np.log(20) + 1e-9  # no more can be known of 20 functions than which it is


def test_sampled_configurations_come_close_to_all():
    probs = random_probs(12, 15, 4)
    exact = batchbald(probs, 5, configurations=4**5, generator=generator())
    rough = batchbald(probs, 5, configurations=100, generator=generator())
    assert exact.positions[:4].tolist() == rough.positions[:4].tolist()  # three labels of four classes, 64, are exact anyway
    torch.testing.assert_close(exact.scores[:4], rough.scores[:4])
    batch = rough.positions.tolist()
    assert float(rough.scores.sum()) == pytest.approx(information(probs, batch), abs=0.01)


def test_systematic_sampling_is_unbiased():
    chances = torch.tensor([0.55, 0.02, 0.0, 0.43], dtype=torch.float64)
    drawn = torch.stack([torch.bincount(systematic(chances, 10, generator(seed)), minlength=4) for seed in range(500)]).double()
    torch.testing.assert_close(drawn.mean(0) / 10, chances, atol=4e-3, rtol=0)
    assert (drawn - 10 * chances).abs().max() < 1


def test_copies_are_not_taken_twice():
    """BALD takes all copies of its favourite; to BatchBALD a copy of what is answered without noise tells nothing."""
    certain = torch.nn.functional.one_hot(torch.randint(3, (16, 4), generator=generator()), 3).double()  # [S, 4, C]
    probs = certain.repeat(1, 5, 1)  # five copies of four inputs
    batch = batchbald(probs, 4, generator=generator())
    assert sorted((batch.positions % 4).tolist()) == [0, 1, 2, 3]
    five = batchbald(probs, 5, generator=generator())
    assert float(five.scores[4]) == pytest.approx(0, abs=1e-9)


def test_batchbald_in_little_memory_and_given_what_is_pending():
    posterior, x = forms()["samples"], torch.randn(60, 3)
    whole = BatchBALD().choose(view_of(posterior, x), 3, generator())
    # room for 20 candidates: those with the largest BALD
    tight = BatchBALD(memory=20 * 2 * 3 * 4 * 4 / 2**30).choose(view_of(posterior, x, size=10), 3, generator())
    assert whole.positions.tolist() == tight.positions.tolist()
    first, *rest = whole.positions.tolist()
    left = torch.tensor([i for i in range(60) if i != first])
    after = View(posterior, Pool(x), left, pending=torch.tensor([first]))
    assert left[BatchBALD().choose(after, 2, generator()).positions].tolist() == rest
    point = Point(posterior.model, posterior.model.parameters(), posterior.model.buffers())
    with pytest.raises(ValueError, match="one function"):
        BatchBALD().choose(view_of(point, x), 2, generator())


@pytest.mark.parametrize("own_noise", [False, True])
def test_batchbald_of_numbers_is_a_determinant(own_noise):
    values, noise = torch.randn(30, 9, 2, dtype=torch.float64, generator=generator()), torch.rand(9, 2, dtype=torch.float64) + 0.1
    posterior, x = forms(dubito.Gaussian(scale=0.5), 2)["gaussian"], torch.randn(9, 3)
    view = view_of(posterior, x)
    weights = torch.full((30,), 1 / 30, dtype=torch.float64)
    log_noise = noise.log() - torch.rand(9, 2, dtype=torch.float64, generator=generator()) if own_noise else None
    view.functions = lambda indices=None, **_: iter([Functions(values, weights, noise, log_noise)])
    found = BatchBALD().choose(view, 4, generator())
    known = noise.log() if log_noise is None else log_noise

    def worth(batch: list[int]) -> float:
        deviations = (values - values.mean(0))[:, batch].flatten(1)
        cov = deviations.T @ deviations / 30
        return 0.5 * float(torch.linalg.slogdet(cov + noise[batch].flatten().diag())[1] - known[batch].sum())

    chosen: list[int] = []
    for pick, gain in zip(found.positions.tolist(), found.scores.tolist(), strict=True):
        gains = {i: worth([*chosen, i]) - worth(chosen) if chosen else worth([i]) for i in range(9) if i not in chosen}
        assert pick == max(gains, key=gains.__getitem__)
        assert gain == pytest.approx(gains[pick], rel=1e-5)
        chosen.append(pick)


@pytest.mark.parametrize("form", ["gaussian", "samples", "mixture"])
def test_batchbald_begins_with_bald_of_a_predicted_noise(form):
    posterior, x = forms(dubito.HeteroscedasticGaussian(), 2)[form], torch.randn(20, 3, generator=generator())
    view = view_of(posterior, x, draws=50)
    found = BatchBALD().choose(view, 1, generator())
    singles = bald(posterior.with_fixed_masks().predict(x, "sampled", draws=50, seed=view.seed))
    if form == "samples":  # the same draws, then
        assert found.scores[0].item() == pytest.approx(singles.max().item(), rel=1e-4)
    drawn = torch.cat([part.log_noise for part in view.functions()])
    assert torch.isfinite(drawn).all()


@pytest.mark.parametrize("form", ["gaussian", "samples", "mixture"])
def test_regression_has_acquisitions_too(form):
    posterior, x = forms(dubito.Gaussian(scale=0.3), 1)[form], torch.randn(20, 3)
    for name in ("bald", "variance", "mean_std", "epig", "batchbald", "power_bald", "random"):
        found = acquisition(name).choose(view_of(posterior, x), 3, generator())
        assert len(set(found.positions.tolist())) == 3


# --- EPIG -------------------------------------------------------------------------------------------------------------


def test_epig_against_its_definition(monkeypatch):
    monkeypatch.setattr(dubito.apps.active.acquisitions, "CHUNK", 100)  # several chunks
    posterior, x, goals = forms()["samples"], torch.randn(12, 3), torch.randn(5, 3)
    here, there = posterior.predict(x).probs.double(), posterior.predict(goals).probs.double()
    joint = torch.einsum("snc,std->ntcd", here, there) / 3
    apart = here.mean(0)[:, None, :, None] * there.mean(0)[None, :, None, :]
    expected = (joint * (joint / apart).log()).sum((2, 3)).mean(1)
    torch.testing.assert_close(
        EPIG(goals).scores(view_of(posterior, x, size=5), generator()).double(), expected, rtol=1e-3, atol=1e-5
    )


def test_epig_of_numbers_against_correlations():
    posterior, x, goals = forms(dubito.Gaussian(scale=0.3), 1)["samples"], torch.randn(12, 3), torch.randn(5, 3)
    here, there = posterior.predict(x).means[..., 0].double(), posterior.predict(goals).means[..., 0].double()
    here, there = here - here.mean(0), there - there.mean(0)
    cov = here.T @ there / 3
    square = cov**2 / ((here**2).mean(0)[:, None] + 0.09) / ((there**2).mean(0) + 0.09)
    expected = -0.5 * torch.log1p(-square).mean(1)
    torch.testing.assert_close(EPIG(goals).scores(view_of(posterior, x), generator()).double(), expected, rtol=1e-4, atol=1e-6)


def test_epig_leaves_alone_what_does_not_matter():
    """Two slopes are unknown. BALD wants the steeper one, EPIG the one that the targets depend on."""
    model = dubito.Model(nn.Linear(2, 1, bias=False), dubito.Gaussian(scale=1.0))
    one = {"weight": torch.ones(1, 2)}
    posterior = Gaussian.diagonal(model, {"weight": torch.zeros(1, 2)}, one)
    view = view_of(posterior, torch.tensor([[2.0, 0.0], [0.0, 9.0]]))
    assert int(Measured("bald").scores(view, generator()).argmax()) == 1
    assert int(EPIG(torch.tensor([[1.0, 0.0], [3.0, 0.0]])).scores(view, generator()).argmax()) == 0


# --- pools ------------------------------------------------------------------------------------------------------------


class Items(Dataset):
    def __init__(self, x: Tensor, labels: bool = True):
        self.x, self.labels = x, labels

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int):
        return (self.x[i], -1) if self.labels else self.x[i]


class Flow(IterableDataset):
    def __init__(self, x: Tensor):
        self.x = x

    def __iter__(self):
        return iter(self.x)


def test_all_kinds_of_pools_are_the_same():
    posterior, x = forms()["samples"], torch.randn(23, 3)
    model, candidates = posterior.model, torch.tensor([0, 3, 4, 5, 11, 22])
    kinds = {
        "tensor": x,
        "array": x.numpy(),
        "data set": Items(x),
        "inputs alone": Items(x, labels=False),
        "loader": DataLoader(Items(x), batch_size=4),
        "batches": [(part, None) for part in x.split(5)],
        "stream": DataLoader(Flow(x), batch_size=6),
    }
    rng = torch.get_rng_state()
    expected = Measured("entropy").scores(View(posterior, Pool(x), candidates), generator())
    for name, kind in kinds.items():
        pool = Pool(kind)
        assert len(pool) == 23, name
        found = Measured("entropy").scores(View(posterior, pool, candidates, size=4), generator())
        torch.testing.assert_close(found, expected, msg=name)
        assert torch.equal(pool.take(model, [7, 2, 7]), x[[7, 2, 7]]), name
        assert pool.fingerprint(model) == Pool(x).fingerprint(model), name
    assert torch.equal(rng, torch.get_rng_state())


def test_inputs_with_names():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(2, 3)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.head(a + b)

    model, pool = dubito.Model(Sum(), dubito.Categorical()), {"a": torch.randn(20, 2), "b": torch.randn(20, 2)}
    learning = ActiveLearning(model, dubito.MAP(epochs=1), pool, acquisition="margin")
    learning.tell([1, 2], [0, 2])
    learning.tell(learning.ask(2), [1, 1])
    assert len(learning.ask(3)) == 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((torch.zeros(3, 1), torch.zeros(3)), "inputs without labels"),
        (torch.zeros(0, 1), "empty"),
        (iter([torch.zeros(3, 1)]), "only once"),
        (DataLoader(Items(torch.zeros(9, 1)), shuffle=True), "shuffle=False"),
        ({"a": torch.zeros(3), "b": torch.zeros(4)}, r"same number of rows; got \[3, 4\]"),
        (7, "got a int"),
        ([[1.0, 2.0], [3.0, 4.0]], "must hold batches"),
        (["one line", "another"], "must hold batches"),
    ],
)
def test_pools_that_are_none(data, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Pool(data)


# --- the loop ---------------------------------------------------------------------------------------------------------

X = torch.randn(60, 3, generator=torch.Generator().manual_seed(5))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()


def session(cls=ActiveLearning, *first, **settings) -> ActiveLearning:
    torch.manual_seed(3)
    model = dubito.Model(mlp(outputs=3), dubito.Categorical())
    settings = {"acquisition": "bald", "held_out": (X, Y), **settings}
    make = ActiveLearning.load if cls == "load" else cls
    return make(*first, model, dubito.MCDropout(epochs=5, draws=6, learning_rate=0.05), X, **settings)


def test_ask_and_tell():
    learning = session()
    with pytest.raises(ValueError, match="before the first label"):
        _ = learning.posterior
    first = learning.ask(6)  # at random
    assert sorted(learning.pending.tolist()) == sorted(first.tolist())
    learning.tell(first[:4], Y[first[:4]])
    assert learning.pending.tolist() == first[4:].tolist()
    more = learning.ask(2)
    assert not set(more.tolist()) & set(first.tolist())
    learning.tell(int(more[0]), int(Y[more[0]]))
    learning.skip(more[1:])
    learning.tell([59 if 59 not in first.tolist() else 58], [0])  # nobody asked
    assert len(learning.labelled) == 6
    assert more[1] not in learning.candidates
    assert len(learning.candidates) == 60 - 6 - 2 - 1
    assert learning.predict([0, 1]).mean.shape == (2, 3)
    rounds = learning.history
    assert [one.labels for one in rounds] == [4, 6]
    assert rounds[0].asked == tuple(more.tolist())
    assert rounds[0].pool["total"] >= rounds[0].pool["epistemic"] > 0
    assert set(rounds[0].held_out) == {"accuracy", "nll", "total", "aleatoric", "epistemic"}
    assert learning.curve() == ([4, 6], [one.held_out["accuracy"] for one in rounds])


def test_labels_can_be_taken_back(tmp_path):
    learning = session(folder=tmp_path)
    learning.tell([1, 2, 3], Y[1:4])
    learning.skip(4)
    learning.forget([2, 4])
    assert learning.labelled.tolist() == [1, 3]
    assert learning.pending.tolist() == [2, 4]
    plain = session()
    plain.tell([1, 3], Y[[1, 3]])
    assert torch.equal(plain.posterior.predict(X).mean, learning.posterior.predict(X).mean)
    with pytest.raises(ValueError, match="cannot be forgotten"):
        learning.forget(7)
    learning.forget([1, 3])
    assert learning.targets is None
    assert session("load", tmp_path).pending.tolist() == [2, 4, 1, 3]
    assert len(learning.ask(2)) == 2


def test_labels_come_in_while_it_fits(tmp_path):
    """Told by another thread in the midst of a fit: none is lost, and the next fit knows them."""
    learning = session(folder=tmp_path)
    learning.tell([1, 2], Y[1:3])
    fit = dubito.MCDropout(epochs=2, draws=4)

    def method(n: int) -> dubito.MCDropout:
        thread = threading.Thread(target=lambda: learning.tell([10 + n], Y[[10 + n]]))
        thread.start()
        thread.join()
        return fit

    learning.method = method
    asked = learning.ask(2)
    assert learning.labelled.tolist() == [1, 2, 12]
    assert learning.history[0].labels == 2
    assert learning.history[0].asked == tuple(asked.tolist())
    learning.method = fit
    assert learning.refit().labels == 3
    assert session("load", tmp_path).labelled.tolist() == [1, 2, 12]


class Meeting(nn.Module):
    """A network in whose passes something happens: `during` is called with it."""

    during = staticmethod(lambda network: None)

    def __init__(self):
        super().__init__()
        self.body = mlp(outputs=3)

    def forward(self, x: Tensor) -> Tensor:
        Meeting.during(self)
        return self.body(x)


def test_a_label_that_is_told_during_a_fit_does_not_touch_it(monkeypatch):
    """Neither the network, which holds the fit's weights, nor the generators from which its dropout draws."""
    net = Meeting()
    learning = ActiveLearning(dubito.Model(net, dubito.Categorical()), dubito.MCDropout(epochs=2, draws=4), X)
    learning.tell([1, 2], Y[1:3])
    entered, drawn, met, fitting = threading.Event(), threading.Event(), [], threading.current_thread()

    def during(network: nn.Module) -> None:
        if threading.current_thread() is not fitting:
            met.append((network is net, network.training, net.training))
            entered.set()
            drawn.wait(10)
        elif network.training and not met:
            thread = threading.Thread(target=lambda: learning.tell([5], Y[[5]]))
            thread.start()
            entered.wait(10)
            torch.rand(1)  # as dropout does
            state = torch.get_rng_state()
            drawn.set()
            thread.join()
            assert torch.equal(torch.get_rng_state(), state)

    monkeypatch.setattr(Meeting, "during", staticmethod(during))
    before = torch.get_rng_state()
    learning.refit()
    assert met == [(False, False, True)]
    assert learning.labelled.tolist() == [1, 2, 5]
    assert torch.equal(torch.get_rng_state(), before)
    Meeting.during = staticmethod(lambda network: torch.rand(1))
    learning.tell([6], Y[[6]])  # nobody is at work: a network that draws leaves no trace
    assert torch.equal(torch.get_rng_state(), before)


def test_labels_are_checked_before_they_are_taken():
    learning = session()
    learning.tell([1, 2], [0, 1])
    wrong = [
        (([3], [3]), ValueError, "3 classes"),
        (([3, 4], [1]), ValueError, "got 1"),
        (([2], [0]), ValueError, "overwrite=True"),
        (([3, 3], [0, 0]), ValueError, "duplicate index"),
        (([60], [0]), IndexError, "from 0 to 59"),
        (([0.5], [0]), TypeError, "whole numbers"),
        (([3], [0.5]), ValueError, "integer indices"),
        (([3], [[0, 1]]), ValueError, "for each input"),
    ]
    for arguments, kind, message in wrong:
        with pytest.raises(kind, match=message):
            learning.tell(*arguments)
    assert learning.labelled.tolist() == [1, 2]
    learning.tell([2, 3], [2, 0], overwrite=True)
    assert learning.labelled.tolist() == [1, 2, 3]
    assert learning.targets.tolist() == [0, 2, 0]
    with pytest.raises(ValueError, match="from 1 to 57, since 57 of 60 inputs"):
        learning.ask(100)
    with pytest.raises(ValueError, match="they have labels"):
        learning.skip(3)
    with pytest.raises(ValueError, match="needs an oracle"):
        learning.step()


@pytest.mark.parametrize(("start", "name"), [("network", "batchbald"), ("anew", "power_bald"), ("last", "bald")])
def test_resumes_exactly(tmp_path, start, name):
    """Stopped anywhere, and gone on with by another process: the same labels are asked, and the history is the same."""
    settings = {"start": start, "acquisition": name, "oracle": lambda i: Y[i], "most": 40, "seed": 7}
    whole = session(**settings)
    whole.run(20, 4)

    learning = session(folder=tmp_path / "run", **settings)
    del settings["seed"]  # it is in the folder
    for _ in range(2):
        learning.step(4)
    asked = learning.ask(4)
    learning.tell(asked[:2], Y[asked[:2]])  # half a batch, and then the power fails
    learning = session("load", tmp_path / "run", **settings)
    assert learning.pending.tolist() == asked[2:].tolist()  # what is pending is there before anything is fitted
    learning.tell(asked[2:], Y[asked[2:]])
    learning.step(4)
    learning = session("load", tmp_path / "run", **settings)
    learning.posterior  # noqa: B018 (made again, from where it began)
    learning = session("load", tmp_path / "run", **settings)
    learning.run(20, 4)
    assert learning.labelled.tolist() == whole.labelled.tolist()
    assert [replace(one, seconds={}) for one in learning.history] == [replace(one, seconds={}) for one in whole.history]
    x = torch.randn(5, 3)
    assert torch.equal(learning.posterior.predict(x).mean, whole.posterior.predict(x).mean)


def test_going_on_begins_where_the_last_fit_ended():
    learning = session(start="last", held_out=None)
    learning.tell([1, 2, 3], Y[1:4])
    before = learning.posterior.params
    learning.tell([4], Y[4:5])
    learning.method = dubito.MCDropout(epochs=0)
    assert all(torch.equal(leaf, before[name]) for name, leaf in learning.posterior.params.items())
    with pytest.raises(ValueError, match="initializes its members anew"):
        ActiveLearning(learning.model, dubito.Ensemble(dubito.MAP(), 2), X, start="last")


def test_a_label_is_on_disk_or_not_taken(tmp_path, monkeypatch):
    learning = session(folder=tmp_path)
    learning.tell([1], [0])

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.store, "write", full)
        with pytest.raises(store.WriteError, match="repeat the call"):
            learning.tell([2], [1])
    assert learning.labelled.tolist() == [1]
    learning.tell([2], [1])
    assert session("load", tmp_path).labelled.tolist() == [1, 2]


def test_two_sessions_do_not_overwrite_each_other(tmp_path):
    one = session(folder=tmp_path)
    other = session("load", tmp_path)
    one.tell([1], [0])
    with pytest.raises(FileExistsError, match="another process has continued"):
        other.tell([2], [0])
    with pytest.raises(FileExistsError, match=r"ActiveLearning.load\(folder"):
        session(folder=tmp_path)
    with pytest.raises(ValueError, match="its pool was 60 inputs"):
        ActiveLearning.load(tmp_path, one.model, one.method, X + 1)
    with pytest.raises(FileNotFoundError, match="no session"):
        session("load", tmp_path / "elsewhere")
    fresh = session()
    with pytest.raises(FileExistsError):
        fresh.save(tmp_path)
    fresh.tell([1], [0])  # it does not believe that the folder were its own
    fresh.save(tmp_path / "own")
    fresh.tell([2], [0])
    assert session("load", tmp_path / "own").labelled.tolist() == [1, 2]


def test_nothing_of_the_users_changes(tmp_path):
    learning = session(folder=tmp_path, oracle=lambda i: Y[i])
    network = learning.model.network.train()
    before, rng = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    learning.run(6, 3)
    assert torch.equal(rng, torch.get_rng_state())
    assert network.training
    assert all(torch.equal(leaf, before[key]) for key, leaf in network.state_dict().items())
    assert all(p.grad is None for p in network.parameters())


def test_without_dropout_it_is_a_softmax():
    """The same weights, one network: no disagreement, and so BALD asks at random."""
    learning = session(bayesian=False, acquisition="entropy")
    learning.tell([1, 2, 3, 4], Y[1:5])
    asked = learning.ask(1)
    params, buffers = learning.posterior.params, learning.posterior.buffers
    probs = Point(learning.model, params, buffers).predict(X[5:]).mean
    free = [i for i in range(60) if i not in (1, 2, 3, 4)]
    entropy = torch.special.entr(Point(learning.model, params, buffers).predict(X[free]).mean).sum(-1)
    assert int(asked) == free[int(entropy.argmax())]
    assert learning.history[0].pool["epistemic"] == 0
    assert probs.shape == (55, 3)


def test_methods_in_a_chain_and_by_the_number_of_labels():
    seen = []

    def method(n: int):
        seen.append(n)
        return [dubito.MAP(epochs=20, learning_rate=0.05), dubito.Laplace(check=False)]

    torch.manual_seed(0)
    model = dubito.Model(nn.Linear(3, 1), dubito.Gaussian(scale=0.1))
    learning = ActiveLearning(model, method, X, acquisition="bald", held_out=(X, X[:, :1]), draws=None, start="anew")
    learning.tell([0, 1], X[:2, :1])
    learning.tell(learning.ask(2), torch.zeros(2, 1))
    assert isinstance(learning.posterior, Gaussian)
    assert set(learning.history[0].held_out) == {"rmse", "nll", "total", "aleatoric", "epistemic"}
    assert seen == [2, 4]
    with pytest.raises(ValueError, match="NaN"):
        learning.tell([50], [[torch.nan]])


def test_balanced_beginning():
    y = torch.randint(4, (200,))
    chosen = balanced(y, 20, seed=1)
    assert torch.bincount(y[chosen]).tolist() == [5, 5, 5, 5]
    assert not torch.equal(chosen, balanced(y, 20, seed=2))
    with pytest.raises(ValueError, match="multiple of 4"):
        balanced(y, 21)
    with pytest.raises(ValueError, match="fewer than"):
        balanced(y, 400)


def test_digits_are_learned_from_fewer_labels():
    """Margins of MC dropout against random labels on real digits, averaged over seeds."""
    data, accuracy = digits(seed=0), {}
    for name in ("margin", "random"):
        found = []
        for seed in range(2):
            torch.manual_seed(seed)
            net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10))
            model = dubito.Model(net, dubito.Categorical(), dubito.priors.Normal(scale=3.0))
            method = dubito.MCDropout(epochs=40, learning_rate=0.03, draws=10)
            learning = ActiveLearning(
                model, method, data.x_train, acquisition=name, oracle=lambda i: data.y_train[i],
                held_out=(data.x_test, data.y_test), seed=seed,
            )  # fmt: skip
            start = balanced(data.y_train, 20, seed=seed)
            learning.tell(start, data.y_train[start])
            found.append(learning.run(100, 20).history[-1].held_out["accuracy"])
        accuracy[name] = np.mean(found)
    assert accuracy["margin"] > accuracy["random"] + 0.01


def test_batchbald_and_epig_refuse_what_is_not_finite():
    values = torch.full((3, 5, 2), torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        batchbald(values, 2)
    some = torch.rand(3, 5, 2)
    some = some / some.sum(-1, keepdim=True)
    some[:, 1] = torch.nan  # one input is enough
    with pytest.raises(ValueError, match="not finite"):
        batchbald(some, 2)


def test_one_function_tells_nothing_by_epig():
    torch.manual_seed(0)
    model = dubito.Model(mlp(), dubito.Categorical())
    view = View(Point(model, model.parameters(), model.buffers()), Pool(torch.randn(40, 3)), torch.arange(40))
    assert torch.equal(EPIG().scores(view, generator()), torch.zeros(40))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_a_pool_of_numpy_numbers_has_the_dtype_of_the_network(kind):
    model = dubito.Model(mlp().to(kind), dubito.Categorical())
    x = np.random.default_rng(0).normal(size=(20, 3))
    for pool in (Pool(x), Pool([x[:12], x[12:]])):
        assert pool.take(model, [3, 1]).dtype == kind
        assert {part.dtype for part in pool.batches(model, torch.arange(20), 6)} == {kind}
    assert Pool({"x": x}).take(model, [0])["x"].dtype == kind
    learning = ActiveLearning(model, dubito.MCDropout(epochs=1), x, acquisition="bald")
    learning.tell([0, 1], [0, 1])
    assert len(learning.ask(2)) == 2


@pytest.mark.parametrize("name", ["epig", "batchbald"])
def test_yes_or_no_is_two_classes(name):
    """A network with one output and Bernoulli is the one with two outputs, 0 and f, and a softmax."""
    x = torch.randn(30, 2, generator=generator())
    one = dubito.Model(nn.Linear(2, 1), dubito.Bernoulli())
    draws = {"weight": torch.randn(12, 1, 2, generator=generator()), "bias": torch.randn(12, 1, generator=generator())}
    two = dubito.Model(nn.Linear(2, 2), dubito.Categorical())
    padded = {name: torch.cat([torch.zeros_like(leaf), leaf], 1) for name, leaf in draws.items()}
    found = [
        acquisition(name).choose(View(Samples(model, params, {}), Pool(x), torch.arange(30), torch.tensor([3])), 5, generator())
        for model, params in ((one, draws), (two, padded))
    ]
    assert found[0].positions.tolist() == found[1].positions.tolist()
    torch.testing.assert_close(found[0].scores, found[1].scores, rtol=1e-4, atol=1e-6)
    several = dubito.Model(nn.Linear(2, 2), dubito.Bernoulli())
    with pytest.raises(ValueError, match="each yes or no"):
        acquisition(name).choose(View(Samples(several, padded, {}), Pool(x), torch.arange(30)), 5, generator())


def test_ranks_do_not_hide_what_is_not_finite():
    model = dubito.Model(nn.Linear(2, 2), dubito.Categorical())
    posterior = Point(model, {name: torch.full_like(p, torch.nan) for name, p in model.parameters().items()}, {})
    with pytest.raises(ValueError, match="NaN"):
        acquisition("softrank_bald").choose(View(posterior, Pool(torch.zeros(4, 2)), torch.arange(4)), 2, generator())


def test_no_labels_are_no_error():
    learning = ActiveLearning(dubito.Model(nn.Linear(1, 3), dubito.Categorical()), dubito.MAP(), torch.zeros(4, 1))
    learning.tell([], [])  # a person who has not answered yet
    learning.skip([])
    assert len(learning.labelled) == len(learning.skipped) == 0
    with pytest.raises(ValueError, match="0 inputs need 0 labels; got 1"):
        learning.tell([], [2])


def test_a_label_that_says_nothing_is_none():
    pixels = dubito.Model(nn.Conv2d(1, 3, 1), dubito.Categorical(dim=1, ignore_index=9))
    learning = ActiveLearning(pixels, dubito.MAP(epochs=1), torch.randn(5, 1, 2, 2))
    some = torch.tensor([[[0, 9], [9, 9]], [[9, 9], [9, 9]]])
    with pytest.raises(ValueError, match=r"\[4\] are empty"):
        learning.tell([2, 4], some)
    learning.tell([2], some[:1])
    numbers = dubito.Model(nn.Conv2d(1, 2, 1), dubito.HeteroscedasticGaussian(dim=1, missing=True))
    learning = ActiveLearning(numbers, dubito.MAP(epochs=1), torch.randn(5, 1, 2, 2), acquisition="variance")
    with pytest.raises(ValueError, match="are empty"):
        learning.tell([1], torch.full((1, 2, 2), torch.nan))
    learning.tell([1], torch.tensor([[[0.5, torch.nan], [1.0, 2.0]]]))  # some pixels are known, and that is what `missing` is for
    assert len(learning.ask(2)) == 2
    with pytest.raises(ValueError, match="are empty"):
        ActiveLearning(dubito.Model(nn.Linear(1, 3), dubito.Categorical()), dubito.MAP(), torch.zeros(4, 1)).tell([0], [-100])
