"""Models: batches of every kind, dense outputs, and which parameters are Bayesian."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import dubito
from dubito import (
    MAP,
    Bernoulli,
    Categorical,
    Ensemble,
    Gaussian,
    HeteroscedasticCategorical,
    HeteroscedasticGaussian,
    MCDropout,
    Model,
    priors,
)
from dubito.model import Target
from dubito.tensors import tree

METHODS = [
    MAP(epochs=1),
    MCDropout(epochs=1, at="", draws=3),
    Ensemble(MAP(epochs=1), 2),
    Ensemble(MAP(epochs=1), 2, vectorize=False),
]


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 3), nn.Linear(4, 3)

    def forward(self, left, right):
        return self.a(left) + self.b(right)


class Transformer(nn.Module):
    """In the manner of Hugging Face: keywords in, an object with logits out."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(11, 4), nn.Linear(4, 3)

    def forward(self, input_ids, attention_mask=None):
        h = self.table(input_ids) * attention_mask.unsqueeze(-1)
        return SimpleNamespace(logits=self.head(h.mean(1)), hidden=h)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_batches_of_every_kind(method):
    labels = torch.tensor([0, 1, 2, 1])
    left, right, ids = torch.randn(4, 2), torch.randn(4, 4), torch.randint(0, 11, (4, 5))
    mask = torch.ones(4, 5)
    several = Model(TwoInputs(), Categorical())
    for batch in ([left, right, labels], ((left, right), labels), {"left": left, "right": right, "label": labels}):
        posterior = dubito.fit(several, method, [batch])
        assert posterior.predict((left, right)).mean.shape == (4, 3)
        assert posterior.predict({"left": left, "right": right}).mean.shape == (4, 3)
    named = Model(Transformer(), Categorical())
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    posterior = dubito.fit(named, method, [batch])
    p, y = posterior.predict_loader([batch, batch])
    assert p.mean.shape == (8, 3)
    assert torch.equal(y, labels.repeat(2))
    rows = [{key: value[i] for key, value in batch.items()} for i in range(4)]
    assert dubito.fit(named, method, DataLoader(rows, batch_size=2)).predict(
        {"input_ids": ids, "attention_mask": mask}
    ).mean.shape == (4, 3)
    own = Model(nn.Linear(2, 3), Categorical(), split=lambda b: (b["x"]["deep"], b["z"]), output=lambda out: out * 2)
    assert dubito.fit(own, method, [{"x": {"deep": left}, "z": labels}]).predict(left).mean.shape == (4, 3)


def test_batches_nobody_can_read_are_refused_in_words():
    model = Model(nn.Linear(2, 1), Gaussian())
    for batch in ({"x": torch.zeros(2)}, [torch.zeros(2)], torch.zeros(2)):
        with pytest.raises(ValueError, match="split="):
            model.split(batch)
    with pytest.raises(ValueError, match="output="):
        Model(nn.Linear(2, 1), Gaussian()).output({"y": 1})
    with pytest.raises(ValueError, match="'0.weight'"):
        Model(nn.Sequential(nn.Linear(1, 1)), Gaussian(), only="head")
    with pytest.raises(TypeError, match="dubito.Categorical()"):
        Model(nn.Linear(1, 1), Categorical)
    with pytest.raises(TypeError, match="Module"):
        Model(lambda x: x, Gaussian())


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_dense_outputs(method):
    images = torch.randn(4, 2, 6, 5)
    labels = torch.randint(0, 3, (4, 6, 5))
    labels[:, 0] = 255
    conv = Model(nn.Conv2d(2, 3, 1), Categorical(dim=1, ignore_index=255))
    p = dubito.fit(conv, method, (images, labels)).predict(images)
    assert p.mean.shape == (4, 6, 5, 3)
    assert p.uncertainty.total.shape == (4, 6, 5)
    assert p.log_prob(labels).shape == (4,)
    depth = Model(nn.Conv2d(2, 1, 1), Gaussian(dim=1))
    p = dubito.fit(depth, method, (images, images[:, :1])).predict(images)
    assert p.mean.shape == (4, 6, 5, 1)
    assert p.log_prob(images[:, :1]).shape == (4,)
    low, high = p.interval(0.9)
    assert (low < high).all()
    sequence = Model(nn.Linear(2, 3), Categorical())
    x = torch.randn(4, 7, 2)
    p = dubito.fit(sequence, method, (x, torch.randint(0, 3, (4, 7)))).predict(x)
    assert p.uncertainty.epistemic.shape == (4, 7)
    tags = Model(nn.Linear(2, 5), Bernoulli())
    p = dubito.fit(tags, method, (x[:, 0], torch.randint(0, 2, (4, 5)))).predict(x[:, 0])
    assert p.uncertainty.total.shape == (4,)


def test_ignored_positions_carry_no_weight():
    images, labels = torch.randn(4, 2, 6, 5), torch.randint(0, 3, (4, 6, 5))
    model = Model(nn.Conv2d(2, 3, 1), Categorical(dim=1, ignore_index=255))
    some = labels.clone()
    some[:, 2:] = 255
    params, buffers = model.parameters(), model.buffers()
    a, _ = model.log_likelihood(params, (images, some), buffers)
    b, _ = model.log_likelihood(params, (images[:, :, :2], labels[:, :2]), buffers)
    assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("likelihood", [HeteroscedasticGaussian(), HeteroscedasticCategorical()])
@pytest.mark.parametrize("method", METHODS[1:3], ids=repr)
def test_heteroscedastic_likelihoods_train_and_predict(method, likelihood):
    x = torch.randn(16, 3)
    y = x[:, :2] if isinstance(likelihood, HeteroscedasticGaussian) else (x[:, 0] > 0).long()
    p = dubito.fit(Model(nn.Linear(3, 4), likelihood), method, (x, y)).predict(x)
    assert p.mean.shape == (16, 2)
    assert torch.isfinite(p.log_prob(y)).all()
    assert (p.uncertainty.epistemic >= 0).all()


def test_only_the_parameters_named_move():
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    x = torch.randn(32, 2)
    for method in METHODS:
        posterior = dubito.fit(Model(net, Gaussian(scale=0.1), only="^2"), method, (x, x[:, :1]))
        members = getattr(posterior, "members", [posterior])
        for member in members:
            assert {n for n in member.params if ":" not in n} == {"2.weight", "2.bias"}
            assert torch.equal(member.buffers["0.weight"], start["0.weight"])
        assert not torch.equal(members[0].params["2.weight"], start["2.weight"])


def test_a_posterior_keeps_its_own_copy_of_what_is_fixed():
    net = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
    x = torch.randn(8, 2)
    posterior = dubito.fit(Model(net, Gaussian(scale=0.1), only="^1"), MAP(epochs=1), (x, x[:, :1]))
    before = posterior.predict(x).mean
    with torch.no_grad():
        net[0].weight += 1
    assert torch.equal(posterior.predict(x).mean, before)


def test_tied_weights_are_one_parameter():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.relu(self.a(x)))

    model, x = Model(Tied(), Gaussian(scale=0.1)), torch.randn(20, 3)
    assert set(model.parameters()) == {"a.weight", "a.bias", "b.bias"}
    posterior = dubito.fit(model, Ensemble(MAP(epochs=2), 2), (x, x))
    w = posterior.params
    by_hand = torch.relu(x @ w["a.weight"][1].mT + w["a.bias"][1]) @ w["a.weight"][1].mT + w["b.bias"][1]
    assert torch.allclose(posterior.predict(x).means[1], by_hand, atol=1e-5)


def test_a_network_without_a_channel_axis():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 1)

        def forward(self, x):
            return self.linear(x).squeeze(-1)

    x = torch.randn(8, 2)
    p = dubito.fit(Model(Flat(), Gaussian()), MAP(epochs=1), (x, x[:, 0])).predict(x)
    assert p.mean.shape == (8, 1)
    assert p.log_prob(x[:, 0]).shape == (8,)


def test_stacked_targets_equal_single_ones():
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    model, x = Model(net, Gaussian()), torch.randn(10, 2).double()
    data = [(x, x[:, :1])]
    singles = [{n: p + 0.1 * i for n, p in model.parameters().items()} for i in range(3)]
    stacked = {n: torch.stack([s[n] for s in singles]) for n in singles[0]}
    whole = Target(model, 50, 0.5, members=3).gradient(stacked, data, {})
    value = Target(model, 50, 0.5, members=3).log_joint(stacked, data, {})
    for i, params in enumerate(singles):
        one = Target(model, 50, 0.5).gradient(params, data, {})
        assert all(torch.allclose(whole.gradient[n][i], one.gradient[n]) for n in params)
        assert torch.allclose(value[i], Target(model, 50, 0.5).log_joint(params, data, {}))


@pytest.mark.parametrize(
    "prior", [priors.ByName({"haed": priors.Laplace(0.5), "": priors.Normal()}), priors.Normal(scale={"haed": 0.5, "": 1.0})]
)
def test_a_pattern_of_the_prior_that_matches_nothing_is_refused(prior):
    with pytest.raises(ValueError, match="the prior's pattern 'haed' matches no parameter of the network; it has"):
        Model(nn.Linear(2, 2), Categorical(), prior)


def test_inputs_that_are_not_numbers_are_told_before_the_first_step():
    x, y = torch.tensor([[0.0], [float("nan")]]), torch.zeros(2, 1)
    with pytest.raises(ValueError, match="the inputs hold NaN or infinity"):
        dubito.fit(Model(nn.Linear(1, 1), Gaussian()), dubito.MAP(epochs=1), (x, y))

    class Fills(nn.Linear):
        def forward(self, x):
            return super().forward(x.nan_to_num(0.0))

    dubito.fit(Model(Fills(1, 1), Gaussian()), dubito.MAP(epochs=1), (x, y))  # a network that knows what to do with them


def test_a_pass_leaves_weights_of_recurrent_layers_where_they_are(monkeypatch):
    """On a GPU torch would lay weights that a layer has not seen before side by side for cuDNN, and move the tensors there."""
    torch.manual_seed(0)
    network = nn.LSTM(3, 4, batch_first=True)
    model, x = Model(network, Gaussian(scale=1.0), output=lambda out: out[0]), torch.randn(2, 5, 3)
    before, params = [*network._flat_weights], tree.apply(torch.zeros_like, model.parameters())
    calls = []
    monkeypatch.setattr(nn.LSTM, "flatten_parameters", lambda self: calls.append(self))
    f, _ = model.forward(params, x, {})
    assert not calls
    assert f.abs().max() == 0, "the weights given are those used"
    assert all(a is b for a, b in zip(before, network._flat_weights, strict=True))
    network(x)
    assert not calls, "the layer has its own weights again, and knows them"


# ---- networks that would go wrong in silence

X, Y = (
    torch.randn(40, 2, generator=torch.Generator().manual_seed(0)),
    torch.randn(40, 1, generator=torch.Generator().manual_seed(1)),
)


class Saves(nn.Module):
    """Computes a part again in the backward pass."""

    def __init__(self, *, reentrant: bool, always: bool):
        super().__init__()
        self.reentrant, self.always = reentrant, always
        self.a, self.b = nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return checkpoint(self.b, h, use_reentrant=self.reentrant) if self.always or self.training else self.b(h)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("reentrant", "always"), [(False, True), (False, False), (True, True)])
def test_checkpointing_is_refused(reentrant, always):
    model = Model(Saves(reentrant=reentrant, always=always), Gaussian(scale=0.1))
    with pytest.raises(ValueError, match="activation checkpointing"):
        dubito.fit(model, MAP(epochs=1), (X, Y))


class Elsewhere(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 4), nn.Linear(4, 1)
        self.weights = [self.a.weight, self.b.weight]

    def forward(self, x):
        x = x.to(self.weights[0].device)  # which is no use of it
        return F.linear(torch.tanh(F.linear(x, self.weights[0], self.a.bias)), self.b.weight, self.b.bias)


def test_weights_that_cannot_be_replaced_are_told():
    network = Elsewhere()
    with pytest.raises(ValueError, match=r"uses \['a.weight'\] by a reference of its own"):
        dubito.fit(Model(network, Gaussian(scale=0.1)), MAP(epochs=1), (X, Y))
    assert all(p.grad is None for p in network.parameters())


def test_lazy_networks_are_refused_before_they_have_shapes():
    network = nn.Sequential(nn.LazyLinear(1))
    with pytest.raises(ValueError, match=r"\['0.weight', '0.bias'\] have no shapes yet: call the network on a batch"):
        Model(network, Gaussian())
    network(torch.zeros(1, 4))
    assert Model(network, Gaussian()).prior.scale_of("0.weight") == 1.0  # 2 / sqrt(4)


def test_hooks_on_gradients_are_told():
    network = nn.Linear(2, 1)
    network.weight.register_hook(lambda slope: 0 * slope)
    with pytest.warns(UserWarning, match=r"hooks on the gradients of \['weight'\]"):
        dubito.fit(Model(network, Gaussian(scale=0.1)), MAP(epochs=1), (X, Y))


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.b(F.dropout(torch.tanh(self.a(x)), 0.5))


def test_networks_that_are_random_in_eval_mode_are_told():
    model = Model(Noisy(), Gaussian(scale=0.1))
    for method in (MAP(epochs=1), Ensemble(MAP(epochs=1), 2)):
        with pytest.warns(UserWarning, match="random in eval mode"):
            dubito.fit(model, method, (X, Y))
    for method in (MCDropout(epochs=1), Ensemble(MCDropout(epochs=1), 2)):  # for which it is what is wanted
        dubito.fit(model, method, (X, Y))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.outputs = nn.Linear(2, 8), nn.Linear(8, 1)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x):
        return self.outputs(self.layer(self.inputs(x).unsqueeze(1)).squeeze(1))


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)),
        nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1)),
        Attention(),
    ],
)
def test_the_network_runs_at_most_twice_before_the_first_step(network):
    calls, first = [], []
    network.register_forward_hook(lambda *_: calls.append(1))

    class Watched(MAP):
        def init(self, *args, **kwargs):
            first.append(len(calls))
            return super().init(*args, **kwargs)

    dubito.fit(Model(network, Gaussian(scale=0.1)), Watched(epochs=1), (X, Y))
    assert first == [2]


def test_rare_noise_in_eval_mode_is_noticed():
    class Rare(nn.Linear):
        def forward(self, x):
            return super().forward(x) + (torch.rand(len(x), 1) < 0.2)

    with pytest.warns(UserWarning, match="random in eval mode"):
        dubito.fit(Model(Rare(2, 1), Gaussian(scale=0.1)), MAP(epochs=1), (X, Y))


class Words(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.table, self.out = nn.Embedding(5, 3, **options), nn.Linear(3, 1)

    def forward(self, x):
        return self.out(self.table(x).sum(1))


def test_embeddings_whose_gradients_are_those_of_no_posterior():
    x = torch.arange(20).reshape(10, 2) % 5
    for options in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}):
        with pytest.raises(ValueError, match="'table' has max_norm or scale_grad_by_freq"):
            dubito.fit(Model(Words(**options), Gaussian(scale=0.1)), MAP(epochs=1), (x, Y[:10]))
    model = Model(Words(padding_idx=0), Gaussian(scale=0.1))
    dubito.fit(model, MAP(epochs=1), (x, Y[:10]))  # the row stays at zero
    for method in (dubito.IVON(epochs=1), Ensemble(dubito.Variational(epochs=1), 2)):
        with pytest.warns(UserWarning, match="padding row of table.weight"):
            dubito.fit(model, method, (x, Y[:10]))


class Squeezes(nn.Module):
    def __init__(self, outputs: int):
        super().__init__()
        self.layer = nn.Linear(2, outputs)

    def forward(self, x):
        return self.layer(x).squeeze()


@pytest.mark.parametrize(("outputs", "likelihood"), [(3, Categorical()), (1, Gaussian(scale=0.1))])
def test_an_example_whose_axis_is_squeezed_away_is_refused(outputs, likelihood):
    y = torch.arange(40) % 3 if outputs == 3 else Y
    posterior = dubito.fit(Model(Squeezes(outputs), likelihood), MAP(epochs=1), (X, y))
    assert posterior.predict(X[:2]).mean.shape == (2, outputs)
    with pytest.raises(ValueError, match=r"use squeeze\(-1\)"):
        posterior.predict(X[:1])


def test_what_hooks_make_of_weights_is_put_back():
    network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    prune.random_unstructured(network[0], "weight", 0.5)
    pruned = network[0].weight
    model = Model(network, Gaussian(scale=0.1))
    dubito.fit(model, MAP(epochs=2), (X, Y)).predict(X)
    dubito.fit(model, dubito.SGLD(draws=2, burn_in=2, chains=1), (X, Y)).predict(X)
    assert network[0].weight is pruned
    torch.testing.assert_close(pruned, network[0].weight_orig * network[0].weight_mask)
    with pytest.raises(ValueError, match="no reset_parameters"):
        dubito.fit(model, Ensemble(MAP(epochs=1), 2), (X, Y))


def test_a_network_is_for_one_thread_at_a_time():
    network = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 1))
    own, model = list(network.parameters()), Model(network, Gaussian(scale=0.1))
    posteriors = [dubito.fit(model, Ensemble(MAP(epochs=1), 2), (X, Y), seed=seed) for seed in range(2)]
    right, wrong = [p.predict(X).mean for p in posteriors], []

    def serve(which: int) -> None:
        for _ in range(200):
            wrong.append(not torch.allclose(posteriors[which].predict(X).mean, right[which], atol=1e-4))

    def train() -> None:
        dubito.fit(model, MAP(epochs=20), (X, Y), batch_size=8)

    threads = [threading.Thread(target=serve, args=(i % 2,)) for i in range(4)] + [threading.Thread(target=train)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 800
    assert not any(wrong)
    assert all(a is b for a, b in zip(own, network.parameters(), strict=True))
    assert network.training


def test_a_tied_weight_is_meant_by_any_of_its_names():
    network = nn.ModuleDict({"encoder": nn.Linear(2, 2, bias=False), "decoder": nn.Linear(2, 2)})
    network["decoder"].weight = network["encoder"].weight
    assert list(Model(network, Gaussian(), only="decoder").parameters()) == [
        "encoder.weight",
        "decoder.bias",
        "likelihood:log_scale",
    ]
    assert list(Model(network, Gaussian(), only="encoder").buffers()) == ["decoder.bias"]


class Graph(nn.Module):
    """Every node sees its neighbours."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x, adjacency):
        return adjacency @ self.layer(x)


def test_examples_along_a_second_axis_are_told():
    adjacency = (torch.rand(40, 40, generator=torch.Generator().manual_seed(0)) < 0.1).float()
    model = Model(Graph(), Gaussian(scale=0.1))
    with pytest.warns(UserWarning, match="coupled=True.*pass everything as one batch"):
        dubito.fit(model, MAP(epochs=1), ((X, adjacency), Y))
    dubito.fit(model, MAP(epochs=1), [((X, adjacency), Y)])


class Masked(Words):
    def forward(self, x):
        return self.out((self.table(x) * (x != 0).unsqueeze(-1)).sum(1))


def test_rows_of_padding_are_no_weights_of_a_gaussian():
    x, y = torch.arange(60).reshape(20, 3) % 5, Y[:20]
    found = []
    for network in (Words(padding_idx=0), Masked(padding_idx=0)):  # the same function
        torch.manual_seed(0)
        model = Model(network, Gaussian(scale=0.1), priors.Normal(scale=1.0))
        start = {name: torch.full_like(leaf, 0.1) for name, leaf in model.parameters().items()}
        start["table.weight"][0] = 0.0
        posterior = dubito.fit(model, dubito.Laplace("diagonal", optimize_evidence=False, check=False), (x, y), start=start)
        assert not posterior.sample(3)["table.weight"][:, 0].any()
        found.append(posterior.predict(x, how="sampled", draws=50, seed=1).f_var)
    torch.testing.assert_close(found[0], found[1])
    tied = nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Linear(3, 5))
    tied[1].weight = tied[0].weight
    assert not Model(tied, Categorical()).padding()  # the output layer learns that row


class Ghost(nn.Module):
    """Takes no two examples."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        return torch.cat([self.layer(part) for part in x.split(len(x) // (len(x) // 4))])


class Asks(nn.Module):
    """Reaches weights by another way, for their size and type, and one that is not inferred."""

    def __init__(self):
        super().__init__()
        self.fixed, self.layer = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1)
        self.kept = [self.fixed.weight, self.layer.weight]

    def forward(self, x):
        x = x.to(self.kept[1]) + torch.zeros_like(self.kept[1]).size(1) - x.size(1)
        return self.layer(F.linear(x, self.kept[0]))


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x, adjacency):
        return self.layer(adjacency @ x)


@pytest.mark.parametrize(
    ("network", "data"),
    [
        (Ghost(), (X, Y)),
        (Asks(), (X, Y)),
        (Sparse(), [((X, torch.eye(40).to_sparse()), Y)]),
        (
            nn.Sequential(nn.Embedding(5, 3, max_norm=1.0).requires_grad_(False), nn.Flatten(), nn.Linear(6, 1)),
            (torch.ones(40, 2).long(), Y),
        ),
    ],
    ids=["no two examples", "asks", "sparse", "frozen"],
)
def test_unusual_networks_that_are_right_are_taken(network, data):
    dubito.fit(Model(network, Gaussian(scale=0.1)), MAP(epochs=1), data)


def test_networks_that_give_nan_are_told_so():
    class Logs(nn.Linear):
        def forward(self, x):
            return torch.log(super().forward(x) - 1e3)

    with pytest.raises(FloatingPointError, match="not finite"):
        dubito.fit(Model(Logs(2, 1), Gaussian(scale=0.1)), MAP(epochs=1), (X, Y))


def test_what_a_hook_counts_stays():
    network = nn.Linear(2, 1)
    network.total = torch.zeros(())
    network.register_forward_pre_hook(lambda module, args: setattr(module, "total", module.total + len(args[0])))
    dubito.fit(Model(network, Gaussian(scale=0.1)), MAP(epochs=1), (X, Y))
    assert network.total > 40


class Counts(nn.Linear):
    seen = 0

    def extra_repr(self):
        return f"seen={self.seen}"

    def forward(self, x):
        self.seen += len(x)
        return super().forward(x)


def test_a_file_is_loaded_whatever_a_network_has_counted(tmp_path):
    posterior = dubito.fit(Model(Counts(2, 1), Gaussian(scale=0.1)), MAP(epochs=1), (X, Y))
    dubito.save(posterior, tmp_path / "file")
    loaded = dubito.load(tmp_path / "file", Model(Counts(2, 1), Gaussian(scale=0.1)))
    assert torch.equal(loaded.predict(X).mean, posterior.predict(X).mean)
