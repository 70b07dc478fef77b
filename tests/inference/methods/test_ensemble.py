"""Ensembles beyond the contract: their starts, one batched pass against one member after another, bagging, adversaries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from torch import nn

import dubito
from contract.methods import ULA
from dubito import MAP, Categorical, Ensemble, Gaussian, MCDropout, Model
from dubito.inference.members import bag
from dubito.inference.method import Traits
from dubito.model import Target
from dubito.posteriors import Mixture, Samples
from dubito.tensors import tree
from dubito.tensors.randomness import hash_rows
from dubito.testing import tensors


def net(outputs: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, outputs))


def data(n: int = 60):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
    return x, x[:, :1] * 2 - x[:, 1:2]


@pytest.mark.parametrize("options", [{}, {"clip": 0.5}, {"optimizer": "sgd", "learning_rate": 0.01}], ids=str)
@pytest.mark.parametrize("bagging", [False, True])
def test_one_batched_pass_equals_one_member_after_another(options, bagging):
    model, (x, y) = Model(net().double(), Gaussian()), (t.double() for t in data())
    a, b = (
        dubito.fit(model, Ensemble(MAP(epochs=4, **options), 3, vectorize=v, bagging=bagging), (x, y), batch_size=16)
        for v in (True, False)
    )
    assert all(torch.allclose(a.params[n], b.params[n], atol=1e-9) for n in a.params)
    assert all(torch.allclose(a.own_buffers[n], b.own_buffers[n], atol=1e-9) for n in a.own_buffers)
    assert a.own_buffers["1.running_mean"].shape == (3, 16)
    assert not torch.allclose(a.params["0.weight"][0], a.params["0.weight"][1])
    assert torch.allclose(a.predict(x).means, b.predict(x).means, atol=1e-8)


def test_only_some_parameters_are_stacked():
    model = Model(net(), Gaussian(scale=0.1), only="^3")
    for vectorize in (True, False):
        posterior = dubito.fit(model, Ensemble(MAP(epochs=1), 3, vectorize=vectorize), data())
        assert posterior.buffers["0.weight"].shape == (16, 3), "what is fixed is held once"
        assert posterior.params["3.weight"].shape == (3, 1, 16)
        assert posterior.own_buffers["1.running_var"].shape == (3, 16)


def test_members_start_apart_and_the_network_is_only_the_pattern():
    model = Model(net(), Gaussian(scale=0.1))
    posterior = dubito.fit(model, Ensemble(MAP(epochs=0), 3), data())
    w = posterior.params["0.weight"]
    assert len({tuple(m.flatten().tolist()) for m in [*w, model.network[0].weight.detach()]}) == 4
    assert torch.equal(posterior.params["1.weight"], torch.ones(3, 16)), "as BatchNorm itself starts"
    assert w.std().item() == pytest.approx(3**-0.5 / 3**0.5, rel=0.15), "as nn.Linear itself starts"


def test_a_parameter_that_nothing_initialises_is_an_error_with_advice():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.inner = nn.Parameter(torch.ones(1)), nn.Linear(3, 1)

        def forward(self, x):
            return self.scale * self.inner(x)

    with pytest.raises(ValueError, match=r"\['scale'\].*initialize="):
        dubito.fit(Model(Bare(), Gaussian(scale=0.1)), Ensemble(MAP(epochs=1), 2), data())
    dubito.fit(Model(Bare(), Gaussian(scale=0.1), only="inner"), Ensemble(MAP(epochs=1), 2), data())

    def start(network):
        nn.init.normal_(network.scale)
        network.inner.reset_parameters()

    posterior = dubito.fit(Model(Bare(), Gaussian(scale=0.1)), Ensemble(MAP(epochs=0), 4, initialize=start), data())
    assert len(posterior.params["scale"].unique()) == 4
    transformer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    dubito.fit(Model(transformer, Gaussian(scale=0.1)), Ensemble(MAP(epochs=1), 2), (torch.randn(4, 3, 4), torch.randn(4, 3, 4)))


def test_bags_are_poisson_belong_to_the_example_and_differ_between_members():
    x, y = torch.randn(5000, 3), torch.randint(0, 2, (5000,))
    target = Target(Model(net(2), Categorical()), 5000)
    bags = bag(target, (x, y), range(4))
    assert bags.shape == (4, 5000)
    assert torch.allclose(bags.mean(1), torch.ones(4), atol=0.06)
    assert torch.allclose(bags.var(1), torch.ones(4), atol=0.12)
    assert torch.allclose((bags == 0).float().mean(1), torch.tensor(0.3679).expand(4), atol=0.03)
    order = torch.randperm(5000)
    assert torch.equal(bag(target, (x[order], y[order]), range(4)), bags[:, order]), "whatever the order and the batch"
    assert (torch.corrcoef(bags) - torch.eye(4)).abs().max() < 0.06
    assert len(hash_rows([x, y]).unique()) == 5000
    digits = torch.zeros(100, 64)
    digits[torch.arange(100), torch.arange(100) % 64] = torch.arange(100) // 64 + 1.0
    assert len(hash_rows([digits]).unique()) == 100, "sparse rows are told apart"


def test_a_bag_weighs_the_likelihood_as_repeated_data_would():
    model, (x, y) = Model(nn.Linear(3, 1).double(), Gaussian(scale=0.1)), (t.double() for t in data(6))
    counts = torch.tensor([2.0, 0.0, 1.0, 1.0, 0.0, 2.0]).double()
    weighed = Target(model, 6, weights=(counts,)).gradient(model.parameters(), [(x, y)], {})
    rows = torch.repeat_interleave(torch.arange(6), counts.long())
    repeated = Target(model, 6).gradient(model.parameters(), [(x[rows], y[rows])], {})
    assert all(torch.allclose(weighed.gradient[n], repeated.gradient[n]) for n in weighed.gradient)


def test_the_adversary_is_the_fast_gradient_sign():
    model, (x, y) = (
        Model(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double(), Gaussian(scale=0.5)),
        (t.double() for t in data(6)),
    )
    step = torch.tensor([0.1, 0.2, 0.3]).double()
    params = model.parameters()
    live = x.clone().requires_grad_()
    loss = -model.log_likelihood(params, (live, y), {})[0].sum()
    near = x + step * torch.autograd.grad(loss, live)[0].sign()
    value = Target(model, 6, adversary=step).gradient(params, [(x, y)], {})
    plain = [Target(model, 6).gradient(params, [(inputs, y)], {}) for inputs in (x, near)]
    assert torch.allclose(value.log_likelihood, (plain[0].log_likelihood + plain[1].log_likelihood) / 2)
    prior = model.prior.gradient(params)
    for name in params:
        both = (plain[0].gradient[name] + plain[1].gradient[name]) / 2
        assert torch.allclose(value.gradient[name], both), name
        assert prior[name].shape == both.shape
    assert plain[1].log_likelihood < plain[0].log_likelihood


def test_adversarial_training_withstands_the_attack_better():
    """At the step it was trained for, on the same attack."""
    g = torch.Generator().manual_seed(1)
    x = torch.rand(200, 20, generator=g)
    y = (x[:, 0] + 0.3 * x[:, 1:].mean(1) > 0.65).long()
    model = Model(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2)), Categorical(), dubito.priors.Normal(scale=3.0))
    scores = []
    for adversarial in (None, 0.1):
        posterior = dubito.fit(model, Ensemble(MAP(epochs=60, learning_rate=0.01), 2, adversarial=adversarial), (x, y))
        live = x.clone().requires_grad_()
        w = {n: p[0] for n, p in posterior.params.items()}
        slope = torch.autograd.grad(model.log_likelihood(w, (live, y), {})[0].sum(), live)[0]
        attacked = x - 0.1 * slope.sign()
        scores.append(model.log_likelihood(w, (attacked, y), {})[0].mean())
    assert scores[1] > scores[0] + 0.05


def test_bad_options_are_refused_in_words():
    for options, words in [({"size": 0}, "size must be at least 1"), ({"adversarial": -1.0}, "adversarial must be positive")]:
        with pytest.raises(ValueError, match=words):
            Ensemble(MAP(), **options)
    ids = torch.randint(0, 5, (8, 3))
    words = Model(nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 2)), Categorical())
    with pytest.raises(ValueError, match="real numbers"):
        dubito.fit(words, Ensemble(MAP(epochs=1), 2, adversarial=0.1), (ids, torch.zeros(8).long()))


@dataclass
class CloudState:
    params: dict
    buffers: dict
    spread: dict
    optimizer: torch.optim.Optimizer
    rest: int


@dataclass(frozen=True)
class Cloud:
    """A method for trained networks, such as Laplace: one pass for a spread around the weights it starts from, then two draws."""

    traits: ClassVar[Traits] = Traits(post_hoc=True)
    seen: list = field(default_factory=list, compare=False, repr=False)

    @property
    def data(self):
        return "batches"

    def steps(self, n_batches):
        return n_batches

    def init(self, target, start, batch, generator, *, steps):
        self.seen.append((start, steps))
        spread = {n: torch.rand(p.shape, generator=generator, dtype=p.dtype) for n, p in start.params.items()}
        return CloudState(start.params, start.buffers, spread, torch.optim.Adam(list(spread.values()), lr=0.1), steps)

    def step(self, target, state, data, generator):
        slopes = target.gradient(state.params, data, state.buffers).gradient
        for name, leaf in state.spread.items():
            leaf.grad = slopes[name] + torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)
        state.optimizer.step()
        state.rest -= 1
        return state, {}

    def draw(self, state):
        return None

    def posterior(self, target, state, draws):
        around = [tree.apply(op, state.params, state.spread) for op in (torch.add, torch.sub)]
        return Samples(target.model, tree.stack(around), state.buffers)


@pytest.mark.parametrize("vectorize", [None, False])
def test_a_start_trains_the_members_and_the_method_goes_on_from_there(vectorize):
    """With all that was learned, the noise and the statistics of BatchNorm too; the training is batched where it can be."""
    model, cloud, kinds = Model(net(), Gaussian()), Cloud(), []

    def look(event):
        kinds.append([stage.stacked for stage in event.state.stages])

    method = Ensemble(cloud, 3, start=MAP(epochs=4), vectorize=vectorize)
    posterior = dubito.fit(model, method, data(), batch_size=16, callbacks=[look])
    trained = dubito.fit(model, Ensemble(MAP(epochs=4), 3, vectorize=vectorize), data(), batch_size=16)
    assert isinstance(posterior, Mixture)
    assert len(cloud.seen) == 6, "once to find out early what cannot work"
    for i, ((start, steps), member) in enumerate(zip(cloud.seen[3:], posterior.members, strict=True)):
        assert steps == 4
        assert all(torch.equal(leaf, trained.params[name][i]) for name, leaf in start.params.items())
        assert all(torch.equal(start.buffers[name][None], leaf[i][None]) for name, leaf in trained.own_buffers.items())
        assert "likelihood:log_scale" in start.params
        assert torch.allclose(member.params["0.weight"].mean(0), trained.params["0.weight"][i], atol=1e-6)
    assert len(kinds) == 20
    assert all(kind == [vectorize is None, False] for kind in kinds)


@pytest.mark.parametrize("at", [1, 4, 7, 8, 9, 11, 12])
def test_a_run_of_two_stages_goes_on_after_a_stop_in_either(at, tmp_path):
    def run(**options):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = Model(net(), Gaussian())
        method = Ensemble(Cloud(), 2, start=MAP(epochs=2))
        return dubito.fit(model, method, data(), seed=3, batch_size=16, **options)

    run(checkpoint=tmp_path, callbacks=[lambda event: event.step == at])
    resumed = run(checkpoint=tmp_path, resume=True)
    assert all(torch.equal(p, q) for p, q in zip(tensors(run()), tensors(resumed), strict=True))


def test_validation_looks_at_both_stages_and_keeps_the_best_state():
    """The spread of this method is nonsense, so the trained members are best; the state of another stage is brought back."""
    model, (x, y) = Model(net(), Gaussian(scale=0.3)), data()
    options = dict(batch_size=16, validation=(x, y), seed=1)
    best = dubito.fit(model, Ensemble(Cloud(), 2, start=MAP(epochs=5, learning_rate=0.01)), (x, y), **options)
    trained = dubito.fit(model, Ensemble(MAP(epochs=5, learning_rate=0.01), 2), (x, y), **options)
    assert isinstance(best, Samples)
    assert all(torch.equal(best.params[name], trained.params[name]) for name in best.params)
    patient = dubito.fit(model, Ensemble(Cloud(), 2, start=MAP(epochs=50, learning_rate=10.0)), (x, y), patience=1, **options)
    assert isinstance(patient, Samples)


def test_methods_for_trained_networks_have_map_as_their_start_and_others_none():
    assert Ensemble(Cloud(), 2).methods == (MAP(), Cloud())
    assert Ensemble(Cloud(), 2, start=MAP(epochs=7)).methods == (MAP(epochs=7), Cloud())
    assert Ensemble(MAP(), 2).methods == (MAP(),)
    assert Ensemble(Cloud(), 2).steps(60) == 6060
    model = Model(nn.Linear(3, 1), Gaussian(scale=0.1))
    assert isinstance(dubito.fit(model, Ensemble(Cloud(), 2), data()), Mixture)


def test_a_method_of_no_steps_still_has_the_last_word():
    model = Model(net(), Gaussian())
    method = Ensemble(MCDropout(epochs=0, at="3", draws=4), 2, start=MAP(epochs=2))
    posterior = dubito.fit(model, method, data(), batch_size=16)
    trained = dubito.fit(model, Ensemble(MAP(epochs=2), 2), data(), batch_size=16)
    assert isinstance(posterior, Mixture)
    assert torch.equal(posterior.members[1].params["0.weight"], trained.params["0.weight"][1])
    nothing = dubito.fit(model, Ensemble(MCDropout(epochs=0, at="3"), 2, start=MAP(epochs=0)), data())
    assert isinstance(nothing, Mixture)


def test_draws_are_those_of_the_method_not_of_its_start():
    @dataclass(frozen=True)
    class Slow(MAP):
        @property
        def data(self):
            return "full"

        def draw(self, state):
            return state.params

    model = Model(nn.Linear(3, 1).double(), Gaussian(scale=0.5))
    x, y = (t.double() for t in data())
    posterior = dubito.fit(model, Ensemble(ULA(n_draws=8, burn_in=0), 2, start=Slow(epochs=300, learning_rate=0.05)), (x, y))
    for member in posterior.members:
        assert len(member) == 8
        assert (member.params["weight"] - torch.tensor([2.0, -1.0, 0.0]).double()).abs().max() < 0.5, "no need to burn in"


def test_starts_that_cannot_work_are_refused_before_anything_runs():
    with pytest.raises(ValueError, match="MAP takes its data as 'batches' and ULA as 'full'"):
        Ensemble(ULA(), 2, start=MAP())
    with pytest.raises(ValueError, match="ULA cannot be a start.*single setting"):
        dubito.fit(Model(nn.Linear(3, 1), Gaussian(scale=0.1)), Ensemble(ULA(), 2, start=ULA()), data())
    with pytest.raises(ValueError, match="ULA cannot run members in one pass"):
        Ensemble(ULA(), 2, vectorize=True)
