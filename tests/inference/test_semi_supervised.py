"""What stability training shares: the scaling of its term, unlabelled examples, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dubito
from dubito import MAP, Categorical, Ensemble, Laplace, MCDropout, MeanTeacher, Model, OnlineLaplace, PiModel
from dubito import TemporalEnsembling as Temporal
from dubito.augment import Noise
from dubito.inference.semi_supervised import Consistent, Stream, ramp, squared
from dubito.priors import Normal
from dubito.tensors.shares import Share
from dubito.testing import tensors

METHODS = (PiModel, Temporal, MeanTeacher)


def net(outputs: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, outputs))


def moons(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two half circles."""
    source = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 2
    angle = math.pi * torch.rand(n, generator=source)
    x = torch.stack([angle.cos() + y - 0.5, (1 - 2 * y) * angle.sin() + 0.5 * y - 0.25], 1)
    return x + 0.08 * torch.randn(n, 2, generator=source), y


def test_the_ramp():
    assert ramp(0, 100, 0.8) == pytest.approx(math.exp(-5))
    assert ramp(40, 100, 0.8) == pytest.approx(math.exp(-1.25))
    assert ramp(80, 100, 0.8) == ramp(99, 100, 0.8) == ramp(0, 100, 0.0) == 1.0


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_the_term_is_scaled_as_the_log_joint_is(temperature):
    """(log p(D, theta) - N w J) / T, whatever the batches; against autograd of that very formula."""
    model = Model(net().double(), Categorical(), Normal(scale=0.7))
    x, y = torch.randn(12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 3
    more = torch.randn(20, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    fixed = torch.full((32, 3), 1 / 3, dtype=torch.float64)
    target = Consistent(
        model,
        40,
        temperature,
        teach=lambda view: squared(view.z, fixed),
        batch=lambda index: (more, torch.arange(20), Share.of(20, 0, 1)),
        augment=None,
        generator=torch.Generator(),
        weight=7.0,
    )
    params = model.parameters()
    live = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    f = torch.func.functional_call(model.network, live, (torch.cat([x, more]),))
    ll = -nn.functional.cross_entropy(f[:12], y)
    apart = (f.softmax(-1) - fixed).pow(2).mean()
    exact = (40 * ll + model.prior.log_prob(live) - 40 * 7.0 * apart) / temperature
    slopes = torch.autograd.grad(exact, list(live.values()))
    found = target.gradient(params, [(x, y)], {}, train=True).gradient
    for name, slope in zip(live, slopes, strict=True):
        assert torch.allclose(found[name], slope, rtol=1e-9, atol=1e-12)
    assert torch.allclose(target.log_joint(params, [(x, y)], {}), exact.detach(), rtol=1e-9)
    assert all(float(noted) == pytest.approx(float(apart.detach())) for _, noted in target.noted)


@pytest.mark.parametrize("kind", METHODS)
def test_without_weight_it_is_the_method_inside(kind):
    """And an epoch of labelled examples is an epoch, where there are no others."""
    x, y = moons(30, 0)
    plain = dubito.fit(Model(net(), Categorical()), MAP(epochs=4), (x, y), batch_size=10)
    method = kind(MAP(epochs=4), weight=0.0, augment=lambda x, _: x)
    if kind is MeanTeacher:
        method = MeanTeacher(MAP(epochs=4), weight=0.0, decay=0.0)  # a teacher without memory is the student
    found = dubito.fit(Model(net(), Categorical()), method, (x, y), batch_size=10)
    assert all(torch.allclose(found.params[name], leaf, atol=1e-6) for name, leaf in plain.params.items())


@pytest.mark.parametrize("kind", METHODS)
def test_what_is_told_of_a_step(kind):
    """The log likelihood of the student's view, and how far its predictions are from those of another; every second view is moved."""
    views, told = [0], []

    def augment(x, _):
        views[0] += 1
        return x + (views[0] - 1) % 2

    x, y = moons(16, 0)
    more = moons(40, 1)[0]
    model = Model(net(), Categorical())
    method = kind(MAP(epochs=2, learning_rate=1e-12), weight=9.0, ramp_up=0.0, augment=augment, unlabelled=more)
    dubito.fit(model, method, (x, y), callbacks=[lambda event: told.append(event.info)])
    moved = int(kind is Temporal)  # it has one view a step, and remembers that of the step before
    params = model.parameters()
    ll = model.log_likelihood(params, (x + moved, y), {})[0].mean()
    z, other = (model.forward(params, torch.cat([x, more]) + by, {})[0].softmax(-1) for by in (moved, 1 - moved))
    assert float(told[-1]["consistency"]) == pytest.approx(float((z - other).pow(2).mean()), rel=1e-4)
    assert float(told[-1]["consistency"]) > 1e-3
    assert float(told[-1]["log_likelihood"]) == pytest.approx(float(ll), rel=1e-4)


def wrong(method) -> float:
    """The share of errors, of two half circles with three labels each."""
    x, y = moons(6, 1)
    x_test, y_test = moons(500, 2)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        wide = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    p = dubito.fit(Model(wide, Categorical(), Normal(scale=10.0)), method, (x, y), seed=1)
    return float((p.predict(x_test).mean.argmax(-1) != y_test).double().mean())


@pytest.fixture(scope="module")
def supervised() -> float:
    return wrong(MAP(epochs=150, learning_rate=3e-3))


@pytest.mark.parametrize("kind", METHODS)
def test_unlabelled_examples_help(kind, supervised):
    """What lies between the labels is learned from the shape of the rest."""
    inner = MAP(epochs=40, learning_rate=5e-3)
    stable = wrong(kind(inner, unlabelled=moons(400, 3)[0], augment=Noise(0.15), weight=30.0, ramp_up=0.5))
    assert stable < 0.75 * supervised, (stable, supervised)


def test_a_data_set_is_as_good_as_a_tensor():
    class Inputs(Dataset):
        def __init__(self, x):
            self.x = x

        def __len__(self):
            return len(self.x)

        def __getitem__(self, i):
            return self.x[i]

    class Without(Inputs):  # targets are not looked at, so there need be none
        def __getitem__(self, i):
            return self.x[i], None

    x, y = moons(20, 0)
    more = moons(50, 1)
    sources = [more[0], more[0].numpy(), Inputs(more[0]), TensorDataset(*more), TensorDataset(more[0]), Without(more[0])]
    fits = [
        dubito.fit(Model(net(), Categorical()), MeanTeacher(MAP(epochs=2), unlabelled=s, unlabelled_size=25), (x, y))
        for s in sources
    ]
    for other in fits[1:]:
        assert all(torch.equal(a, b) for a, b in zip(tensors(fits[0]), tensors(other), strict=True))


def test_every_pass_meets_every_example_once_in_another_order():
    model = Model(net(), Categorical())
    x = torch.arange(46.0).view(23, 2)
    stream = Stream(model, x, 5)
    passes = [torch.cat([stream(5 * turn + i, 9)[1] for i in range(5)]) for turn in range(2)]
    assert all(torch.equal(rows.sort().values, torch.arange(23)) for rows in passes)
    assert not torch.equal(*passes)
    batch, rows, _ = stream(3, 9)
    assert torch.equal(batch, x[rows])
    assert not torch.equal(stream(3, 8)[1], rows)


def test_an_epoch_is_a_pass_over_the_longer():
    method = PiModel(MAP(epochs=3), unlabelled=torch.zeros(1000, 2), unlabelled_size=100)
    assert method.steps(4) == 30
    assert method.steps(25) == 75
    assert PiModel(MAP(epochs=3)).steps(4) == 12


def test_accumulated_batches_have_unlabelled_ones_each():
    drawn = []
    x, y = moons(24, 0)
    dubito.fit(
        Model(net(), Categorical()),
        MeanTeacher(MAP(epochs=2), unlabelled=moons(60, 1)[0], unlabelled_size=20),
        (x, y),
        batch_size=6,
        accumulate=2,
        callbacks=[lambda event: drawn.append(event.state.drawn)],
    )
    assert drawn == [2, 4, 6, 8, 10, 12]


def test_networks_of_several_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 3), nn.Linear(1, 3)

        def forward(self, left, right):
            return self.a(left) + self.b(right)

    labelled = [{"left": torch.randn(8, 2), "right": torch.randn(8, 1), "y": torch.arange(8) % 3}] * 2
    more = {"left": torch.randn(30, 2), "right": torch.randn(30, 1)}
    p = dubito.fit(Model(Two(), Categorical()), Temporal(MAP(epochs=2), unlabelled=more, unlabelled_size=10), labelled, n_data=16)
    assert p.params["a.weight"].shape == (3, 2)


def test_a_data_set_of_dicts_may_have_labels_which_are_not_looked_at():
    class Named(Dataset):
        def __init__(self, labels: bool):
            self.x, self.labels = moons(30, 1)[0], labels

        def __len__(self):
            return len(self.x)

        def __getitem__(self, i):
            return {"input": self.x[i], **({"labels": -1} if self.labels else {})}

    x, y = moons(8, 0)
    labelled = [{"input": x, "labels": y}]
    fits = [
        dubito.fit(Model(net(), Categorical()), MeanTeacher(MAP(epochs=2), unlabelled=Named(labels)), labelled, n_data=8)
        for labels in (True, False)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*map(tensors, fits), strict=True))


def test_resuming_with_other_unlabelled_examples_is_refused(tmp_path):
    x, y = moons(20, 0)
    stop = [lambda event: event.step == 2]
    more = moons(50, 1)[0]
    dubito.fit(
        Model(net(), Categorical()), MeanTeacher(MAP(epochs=3), unlabelled=more), (x, y), checkpoint=tmp_path, callbacks=stop
    )
    other = MeanTeacher(MAP(epochs=3), unlabelled=more + 1)
    with pytest.raises(ValueError, match="others than those this run began with"):
        dubito.fit(Model(net(), Categorical()), other, (x, y), checkpoint=tmp_path, resume=True)


def test_dropout_stays_in_the_posterior():
    network = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2))
    p = dubito.fit(Model(network, Categorical()), PiModel(MCDropout(epochs=2, draws=8)), moons(20, 0))
    assert (p.predict(moons(5, 1)[0]).uncertainty.epistemic > 0).any()


def test_validation_picks_the_best_teacher():
    x, y = moons(40, 0)
    p = dubito.fit(
        Model(net(), Categorical()), MeanTeacher(MAP(epochs=5)), (x, y), validation=moons(40, 3), patience=2, batch_size=20
    )
    assert p.predict(x).mean.shape == (40, 3)


@pytest.mark.parametrize("kind", METHODS)
def test_what_cannot_be_wrapped_is_refused(kind):
    with pytest.raises(ValueError, match=f"write Ensemble\\({kind.__name__}"):
        kind(Ensemble(MAP(), 2))
    for method in (Laplace(), dubito.Variational(), dubito.SGLD()):
        with pytest.raises(ValueError, match="trains one setting of the weights"):
            kind(method)
    with pytest.raises(ValueError, match="keeps more than one setting"):
        dubito.fit(Model(net(), Categorical()), kind(OnlineLaplace(epochs=3, every=1)), moons(20, 0))
    with pytest.raises(ValueError, match="takes all examples as they are"):
        Ensemble(kind(MAP()), 2, bagging=True)


@pytest.mark.parametrize("kind", METHODS)
def test_refusals(kind):
    x, y = moons(20, 0)
    with pytest.raises(TypeError, match="give its .dataset"):
        kind(MAP(), unlabelled=DataLoader(TensorDataset(x)))
    with pytest.raises(TypeError, match="unlabelled is a tensor"):
        kind(MAP(), unlabelled=[x])
    with pytest.raises(TypeError, match="give it a __len__"):
        kind(MAP(), unlabelled=Dataset())
    with pytest.raises(ValueError, match="no unlabelled examples"):
        kind(MAP(), unlabelled=x[:0])
    with pytest.raises(ValueError, match="weight must be at least 0"):
        kind(MAP(), weight=-1.0)
    with pytest.raises(TypeError, match="augment is a function"):
        kind(MAP(), augment=0.1)
    with pytest.raises(ValueError, match=r"alike but for their number; got \[20, 2\] and \[20, 1\]"):
        dubito.fit(Model(net(), Categorical()), kind(MAP(), unlabelled=x[:, :1], augment=Noise(0.1)), (x, y))
    method = kind(MAP(), unlabelled={"inputs": x}, augment=lambda x, _: x)
    with pytest.raises(ValueError, match=r"\['input'\] and \['inputs'\]"):
        dubito.fit(Model(net(), Categorical()), method, [{"input": x, "labels": y}], n_data=20)
    with pytest.raises(ValueError, match="it received 20 and returned 5"):
        dubito.fit(Model(net(), Categorical()), kind(MAP(), augment=lambda x, _: x[:5]), (x, y))


def test_regression_agrees_in_its_mean():
    x = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))
    p = dubito.fit(Model(net(2), dubito.HeteroscedasticGaussian()), MeanTeacher(MAP(epochs=2)), (x, x[:, :1]))
    assert p.predict(x).mean.shape == (30, 1)
