"""Online Laplace beyond the contract: the exact maximum of the evidence, what trains when, and what the prior does meanwhile."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from dubito.methods.online_laplace import OnlineLaplace, Precisions
from torch import nn

import dubito
from dubito import Categorical, Ensemble, Gaussian, Model, posteriors
from dubito.inference.method import traits_of
from dubito.methods import MAP, MCDropout
from dubito.posteriors import Mixture, Point
from dubito.priors import Normal
from dubito.testing import check_same, snapshot, tensors

NOISE = "likelihood:log_scale"


class Additive(nn.Module):
    """A linear layer for each block of features; f is their sum."""

    def __init__(self, *widths: int, outputs: int = 1):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(width, outputs, bias=False) for width in widths)

    def forward(self, x):
        pieces = x.split([part.in_features for part in self.parts], -1)
        return torch.stack([part(piece) for part, piece in zip(self.parts, pieces, strict=True)]).sum(0)


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def problem(outputs: int = 1, n: int = 60, *, second: float = 0.0):
    """Three features that matter, and three that matter as much as `second` says."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, 6, generator=g, dtype=torch.float64)
    x[:, 2] += 0.5 * x[:, 0]
    w = torch.randn(6, outputs, generator=g, dtype=torch.float64) * torch.tensor([2.0] * 3 + [second] * 3).unsqueeze(1)
    return x, x @ w + 0.4 * torch.randn(n, outputs, generator=g, dtype=torch.float64)


def exact(x, y, groups, noise: float | None):
    """Type-II maximum likelihood: prior precisions of groups of features [G] and the noise, by the marginal density of y."""
    free = torch.zeros(int(groups.max()) + 2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([free], max_iter=500, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe")

    def parts():
        sigma = free[-1].exp() if noise is None else torch.tensor(noise, dtype=torch.float64)
        return free[:-1].exp(), sigma

    def loss():
        optimizer.zero_grad()
        precision, sigma = parts()
        covariance = x / precision[groups] @ x.mT + sigma**2 * torch.eye(len(x), dtype=torch.float64)
        density = torch.distributions.MultivariateNormal(torch.zeros(len(x), dtype=torch.float64), covariance)
        value = -density.log_prob(y.mT).sum()
        value.backward()
        return value

    optimizer.step(loss)
    precision, sigma = (leaf.detach() for leaf in parts())
    a = x.mT @ x / sigma**2 + torch.diag(precision[groups])
    return precision, sigma, torch.linalg.solve(a, x.mT @ y / sigma**2), torch.linalg.inv(a), -float(loss().detach())


LONG = dict(epochs=600, learning_rate=0.1, every=10, burn_in=0.05)


@pytest.mark.parametrize("structure", ["kronecker", "dense"])
@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_on_linear_regression_precision_and_noise_maximise_the_exact_evidence(structure, rate):
    x, y = problem()
    precision, sigma, mean, covariance, evidence = exact(x, y, torch.zeros(6, dtype=torch.long), None)
    model = Model(nn.Linear(6, 1, bias=False).double(), Gaussian())
    found = dubito.fit(model, OnlineLaplace(structure, evidence_rate=rate, **LONG), (x, y), batch_size=60)
    assert isinstance(found, posteriors.Gaussian)
    assert torch.allclose(found.prior_precision["weight"], precision, rtol=1e-4)
    assert torch.allclose(found.params[NOISE].exp(), sigma, rtol=1e-4)
    assert torch.allclose(found.params["weight"].mT, mean, atol=1e-5)
    assert torch.allclose(found.covariance.dense(), covariance, rtol=1e-3, atol=1e-8)
    assert float(found.log_evidence()) == pytest.approx(evidence, abs=1e-4)


@pytest.mark.parametrize("outputs", [1, 3])
def test_every_layer_has_its_own_exact_precision(outputs):
    """With several outputs, too, the prior counts once, not once for each output."""
    x, y = problem(outputs, second=0.2)
    precision, _, mean, covariance, evidence = exact(x, y, torch.arange(6) // 3, 0.4)
    model = Model(Additive(3, 3, outputs=outputs).double(), Gaussian(scale=0.4))
    found = dubito.fit(model, OnlineLaplace("dense", **LONG), (x, y), batch_size=60)
    assert isinstance(found, posteriors.Gaussian)
    learned = found.prior_precision
    assert torch.allclose(torch.stack([learned["parts.0.weight"], learned["parts.1.weight"]]), precision, rtol=1e-3)
    assert learned["parts.1.weight"] > 10 * learned["parts.0.weight"]
    w = torch.cat([found.params["parts.0.weight"], found.params["parts.1.weight"]], 1)
    assert torch.allclose(w.mT, mean, atol=1e-4)
    assert float(found.log_evidence()) == pytest.approx(evidence, abs=1e-3)
    if outputs == 1:
        assert torch.allclose(found.covariance.dense(), covariance, rtol=1e-3, atol=1e-7)


def test_the_precision_of_useless_features_is_large():
    """The evidence is at its highest without them."""
    x, y = problem()
    found = dubito.fit(Model(Additive(3, 3).double(), Gaussian()), OnlineLaplace(**LONG), (x, y), batch_size=60)
    assert isinstance(found, posteriors.Gaussian)
    assert found.prior_precision["parts.0.weight"] < 1
    assert found.prior_precision["parts.1.weight"] > 1e4
    assert found.params["parts.1.weight"].abs().max() < 1e-3


def test_with_mini_batches_it_finds_the_same():
    x, y = problem()
    precision, sigma, _, _, _ = exact(x, y, torch.zeros(6, dtype=torch.long), None)
    model = Model(nn.Linear(6, 1, bias=False).double(), Gaussian())
    found = dubito.fit(model, OnlineLaplace(**LONG), (x, y), batch_size=16)
    assert isinstance(found, posteriors.Gaussian)
    assert torch.allclose(found.prior_precision["weight"], precision, rtol=0.01)
    assert torch.allclose(found.params[NOISE].exp(), sigma, rtol=0.01)


def test_one_precision_for_all_and_one_for_each_leaf():
    x, y = problem()
    model = Model(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)).double(), Gaussian())
    for by, n in (("one", 1), ("layer", 2), ("parameter", 4)):
        method = OnlineLaplace(epochs=20, learning_rate=0.05, every=4, prior_groups=by)  # pyright: ignore[reportArgumentType]
        found = dubito.fit(model, method, (x, y))
        assert isinstance(found, posteriors.Gaussian)
        assert len({float(leaf) for leaf in found.prior_precision.values()}) == n


def test_an_evidence_step_goes_a_share_of_the_way_and_ten_times_at_most():
    method = OnlineLaplace(evidence_rate=0.5)
    factors = method._towards(torch.ones(3), torch.tensor([1.0, 4.0, 1e12]))
    assert torch.allclose(factors, torch.tensor([1.0, 2.0, 10.0]))


def test_a_given_prior_stays_and_only_the_noise_is_learned():
    x, y = problem()
    model = Model(nn.Linear(6, 1, bias=False).double(), Gaussian(), Normal(scale=0.8))
    found = dubito.fit(model, OnlineLaplace(**LONG), (x, y), batch_size=60)
    assert isinstance(found, posteriors.Gaussian)
    assert torch.allclose(found.prior_precision["weight"], torch.tensor(0.8**-2).double())
    best = found.optimized(prior=False)
    assert torch.allclose(best.params[NOISE], found.params[NOISE], atol=1e-4)


def test_a_diagonal_leaves_the_noise_to_descent():
    x, y = problem()
    for given, expected in ((None, False), (True, True)):
        states = []
        method = OnlineLaplace("diagonal", epochs=4, every=1, optimize_noise=given)
        model = Model(nn.Linear(6, 1).double(), Gaussian())
        dubito.fit(model, method, (x, y), callbacks=[lambda e, s=states: s.append(e.state.noise_set)])
        assert any(states) == expected


class Watched(nn.Module):
    """BatchNorm and dropout, and a note of the mode of every pass."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop, self.last = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 1)
        self.seen: list[bool] = []

    def forward(self, x):
        self.seen.append(self.training)
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


def test_train_mode_in_training_eval_mode_for_curvature_and_the_schedule_sees_training_only():
    x, y = (leaf.float() for leaf in problem())
    net, method = Watched(), OnlineLaplace(epochs=5, every=2, burn_in=0.2)
    rows: list[dict[str, Any]] = []

    def note(event):
        rates = event.state.optimizer.param_groups[0]["lr"]
        mean, weights = event.state.buffers["norm.running_mean"].clone(), event.state.params["first.weight"].clone()
        modes = list(net.seen)
        net.seen.clear()
        rows.append(dict(mean=mean, weights=weights, modes=modes, rate=rates, info=event.info, step=event.state.step))

    dubito.fit(Model(net, Gaussian()), method, (x, y), batch_size=20, callbacks=[note])
    kinds = "TCTTCTTC"
    assert len(rows) == 3 * len(kinds) == method.steps(3)
    rates = []
    for before, row, kind in zip(rows, rows[1:], "".join(k * 3 for k in kinds)[1:], strict=False):
        moved = not torch.equal(before["mean"], row["mean"]), not torch.equal(before["weights"], row["weights"])
        if kind == "T":
            assert moved == (True, True)
            assert all(row["modes"])
            rates.append(row["rate"])
        else:
            assert moved == (False, False)
            assert not any(row["modes"])
    assert [row["step"] for row in rows][-1] == 15
    assert rates == pytest.approx([0.5e-3 * (1 + math.cos(math.pi * i / 15)) for i in range(1, 15)])
    assert [i for i, row in enumerate(rows) if "log_evidence" in row["info"]] == [5, 14, 23]


def test_with_precisions_at_one_training_is_that_of_map():
    """Up to the first evidence step, bit for bit: the prior's gradient is the same."""
    x, y = (leaf.float() for leaf in problem())
    model = Model(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)), Gaussian(), Normal())
    a, b = [], []
    for kept, method in ((a, MAP(epochs=4)), (b, OnlineLaplace(epochs=4, burn_in=0.5))):
        dubito.fit(
            model, method, (x, y), batch_size=20, callbacks=[lambda e, k=kept: k.append(e.state.params["0.weight"].clone())]
        )
    assert all(torch.equal(p, q) for p, q in zip(a[:6], b[:6], strict=True))
    assert not torch.equal(a[-1], b[-1])


def test_precisions_are_a_normal_prior():
    params = {"a.weight": torch.randn(3, 2), "b": torch.randn(4)}
    mine, other = Precisions({"a.weight": 4.0, "b": 0.25}), Normal(scale={"weight": 0.5, "": 2.0})
    assert torch.allclose(mine.log_prob(params), other.log_prob(params))
    for a, b in zip(mine.gradient(params).values(), other.gradient(params).values(), strict=True):
        assert torch.allclose(a, b)
    sums = [{name: torch.ones_like(leaf) for name, leaf in params.items()} for _ in range(2)]
    mine.add_gradient(sums[0], params, 0.3)
    other.add_gradient(sums[1], params, 0.3)
    assert all(torch.allclose(sums[0][name], sums[1][name]) for name in params)
    drawn = mine.sample({"a.weight": torch.empty(10_000)}, torch.Generator().manual_seed(0))
    assert drawn["a.weight"].std() == pytest.approx(0.5, rel=0.05)


SHORT = OnlineLaplace(epochs=3, every=1)  # of three batches each: train, curvature, train, curvature, train, curvature


def normed() -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 1)), Gaussian())


def everything(posterior) -> list[torch.Tensor]:
    assert isinstance(posterior, posteriors.Gaussian)
    return [*tensors(posterior), posterior.covariance.dense(), *posterior.prior_precision.values(), posterior.log_evidence()]


@pytest.mark.parametrize("method", [SHORT, OnlineLaplace("diagonal", "fisher", epochs=3, every=1)], ids=["exact", "Monte Carlo"])
@pytest.mark.parametrize("at", [1, 3, 5, 6, 8, 10, 17])
def test_stopping_and_going_on_equals_one_run(method, at, tmp_path):
    x, y = (leaf.float() for leaf in problem())
    whole = everything(dubito.fit(normed(), method, (x, y), seed=3, batch_size=20))
    folder = tmp_path / "run"
    dubito.fit(normed(), method, (x, y), seed=3, batch_size=20, checkpoint=folder, callbacks=[lambda e: e.step == at])
    torch.manual_seed(99)
    resumed = everything(dubito.fit(normed(), method, (x, y), seed=3, batch_size=20, checkpoint=folder, resume=True))
    assert all(torch.equal(p, q) for p, q in zip(whole, resumed, strict=True))


def test_the_same_seed_gives_the_same_bits_and_nothing_of_the_users_changes():
    x, y = (leaf.float() for leaf in problem())
    model = normed()
    before = snapshot(model)
    a, b = (everything(dubito.fit(model, SHORT, (x, y), seed=3, batch_size=20)) for _ in range(2))
    check_same(before, snapshot(model))
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
    with pytest.raises(RuntimeError, match="stop here"):
        dubito.fit(model, SHORT, (x, y), batch_size=20, callbacks=[_fail])
    check_same(before, snapshot(model))


def _fail(event):
    if event.step == 4:  # in a pass for curvature
        raise RuntimeError("stop here")


def test_classes_gradients_accumulated_and_a_file(tmp_path):
    x, y = (leaf.float() for leaf in problem(3))
    model = Model(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), Categorical())
    found = dubito.fit(model, OnlineLaplace(epochs=10, every=3), (x, y.argmax(1)), batch_size=20, accumulate=2, temperature=0.5)
    p = found.predict(x)
    assert (p.uncertainty.epistemic > 0).all()
    dubito.save(found, tmp_path / "posterior.safetensors")
    same = dubito.load(tmp_path / "posterior.safetensors", model)
    assert isinstance(same, posteriors.Gaussian)
    assert torch.equal(same.predict(x).mean, p.mean)
    assert same.prior_precision.keys() == found.prior_precision.keys()


def test_where_there_is_no_curvature_of_the_weights_validation_scores_a_point():
    x, y = (leaf.float() for leaf in problem())
    kinds = []

    class Noted(OnlineLaplace):
        def posterior(self, target, state, draws):
            found = super().posterior(target, state, draws)
            kinds.append(type(found))
            return found

    dubito.fit(normed(), Noted(epochs=3, every=1), (x, y), batch_size=20, validation=(x, y))
    assert kinds[:6] == [Point, posteriors.Gaussian] * 3


def test_members_of_an_ensemble_learn_priors_of_their_own():
    x, y = (leaf.float() for leaf in problem())
    found = dubito.fit(Model(nn.Linear(6, 1), Gaussian()), Ensemble(SHORT, 2), (x, y), batch_size=20)
    assert isinstance(found, Mixture)
    first, second = found.members
    assert isinstance(first, posteriors.Gaussian)
    assert isinstance(second, posteriors.Gaussian)
    assert first.prior_precision["weight"] != second.prior_precision["weight"]


def test_what_cannot_be_learned_is_refused():
    x, y = (leaf.float() for leaf in problem())
    with pytest.raises(ValueError, match="nothing to learn from the evidence"):
        dubito.fit(Model(nn.Linear(6, 1), Gaussian(scale=0.4), Normal(scale=1.0)), SHORT, (x, y))
    with pytest.raises(ValueError, match="nothing to learn from the evidence"):
        dubito.fit(Model(nn.Linear(6, 1), Gaussian(), Normal(scale=1.0)), OnlineLaplace("diagonal"), (x, y))
    with pytest.raises(ValueError, match="leave no training after an evidence step"):
        OnlineLaplace(epochs=1)
    for wrong in (dict(every=0), dict(burn_in=1.0), dict(evidence_rate=0.0), dict(draws=-1), dict(structure="lowrank")):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            OnlineLaplace(**wrong)
    assert traits_of(MCDropout()).stacks
    assert not traits_of(SHORT).stacks
