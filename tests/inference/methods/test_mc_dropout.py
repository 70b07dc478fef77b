"""MC dropout beyond the contract: the model precision, and learned rates."""

from __future__ import annotations

import math

import pytest
import torch
from dubito.methods.mc_dropout import dropout_precision
from torch import nn

import dubito
from dubito import Ensemble, Gaussian, MCDropout, Model
from dubito.model import Target
from dubito.priors import Normal


def data(n: int = 50):
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
    return x, x[:, :1] * 2


def test_precision_follows_from_length_scale_keep_n_and_weight_decay():
    assert dropout_precision(length_scale=0.01, keep=0.95, n_data=400, weight_decay=1e-6) == pytest.approx(0.95e-4 / 8e-4)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
    method = MCDropout(epochs=2, length_scale=0.1, weight_decay=1e-4)
    posterior = dubito.fit(Model(net, Gaussian()), method, data())
    tau = 0.8 * 0.01 / (2 * 50 * 1e-4)
    assert posterior.params["likelihood:log_scale"].exp().item() == pytest.approx(tau**-0.5)
    p = posterior.predict(data()[0])
    assert torch.allclose(p.uncertainty.aleatoric, torch.tensor(1 / tau)), "tau is the noise of the predictive, once"


def test_its_objective_is_the_papers():
    """The gradient of N tau (1/(2N) sum (y - f)^2 + lambda ||M||^2), with lambda for weights and lambda / keep for biases."""
    keep, length, decay, n = 0.8, 0.1, 1e-3, 50
    net = nn.Linear(3, 1).double()
    x, y = (t.double() for t in data())
    model = Model(net, Gaussian())
    method = MCDropout(at="", rate=1 - keep, length_scale=length, weight_decay=decay)
    tau = dropout_precision(length_scale=length, keep=keep, n_data=n, weight_decay=decay)
    params = {**model.parameters(), "likelihood:log_scale": torch.tensor([-0.5 * math.log(tau)]).double()}
    from dataclasses import replace

    target = replace(method.prepare(Target(model, n)), around=None)  # without masks, which are random
    ours = target.gradient(params, [(x, y)], {}).gradient
    w, b = (p.detach().clone().requires_grad_() for p in (net.weight, net.bias))
    loss = (y - x @ w.mT - b).pow(2).sum() / (2 * n) + decay * (w.pow(2).sum() + b.pow(2).sum() / keep)
    grads = torch.autograd.grad(-n * tau * loss, [w, b])
    assert torch.allclose(ours["weight"], grads[0])
    assert torch.allclose(ours["bias"], grads[1])


def test_learned_rates_are_the_gradient_of_the_dropout_prior():
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    model = Model(net, Gaussian(scale=0.3), Normal(scale=0.7))
    method = MCDropout(at="", rate=0.2, learn_rates=True)
    params = {**model.parameters(), "dropout:0": torch.tensor([-1.0]).double(), "dropout:2": torch.tensor([0.3]).double()}
    target = Target(model, 50, 0.5)
    gradient = {name: torch.zeros_like(leaf) for name, leaf in params.items()}
    method.adjust(target, params, gradient)

    def extra(params):
        total = torch.zeros((), dtype=torch.float64)
        for site, inputs in (("0", 3), ("2", 8)):
            p = torch.sigmoid(params[f"dropout:{site}"]).squeeze()
            w2 = params[f"{site}.weight"].pow(2).sum()
            total = total - w2 / (2 * 0.49 * (1 - p)) + w2 / (2 * 0.49) - inputs * (p * p.log() + (1 - p) * (1 - p).log())
        return -total / 50  # the loss is the negative log joint (total / T) times T / N

    live = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    exact = torch.autograd.grad(extra(live), list(live.values()), allow_unused=True)
    for (name, slope), grad in zip(gradient.items(), exact, strict=True):
        assert torch.allclose(slope, torch.zeros_like(slope) if grad is None else grad), name


def test_learned_rates_fall_with_data():
    """With much data to explain, dropping units costs likelihood; with hardly any, the entropy of the masks holds the rates up."""
    rates = {}
    for n in (4, 3000):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 1))
        method = MCDropout(epochs=400 if n == 4 else 30, learning_rate=0.02, at="", rate=0.1, learn_rates=True)
        posterior = dubito.fit(Model(net, Gaussian(scale=0.1)), method, data(n))
        rates[n] = torch.sigmoid(torch.stack([v for k, v in posterior.params.items() if k.startswith("dropout:")])).mean().item()
    assert rates[3000] < 0.02
    assert rates[4] > 3 * rates[3000]


def test_learned_rates_in_an_ensemble_equal_one_after_another():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    model = Model(net, Gaussian(scale=0.3))
    method = MCDropout(at="", rate=0.2, learn_rates=True)
    from dataclasses import replace

    params = {**model.parameters(), "dropout:0": torch.tensor([-1.0]).double(), "dropout:2": torch.tensor([0.3]).double()}
    many = {name: torch.stack([leaf, leaf * 0.5]) for name, leaf in params.items()}
    stacked = method.adjust(replace(Target(model, 50), members=2), many, {k: torch.zeros_like(v) for k, v in many.items()})
    for i in range(2):
        one = {name: leaf[i] for name, leaf in many.items()}
        single = method.adjust(Target(model, 50), one, {k: torch.zeros_like(v) for k, v in one.items()})
        assert all(torch.allclose(stacked[name][i], single[name]) for name in single)
    posterior = dubito.fit(model, Ensemble(replace(method, epochs=2), 2, vectorize=True), tuple(t.double() for t in data()))
    assert posterior.members[0].params["dropout:0"].shape == (1,)


def test_bad_options_are_refused_in_words():
    for options, words in [
        ({"learn_rates": True}, "name the layers"),
        ({"length_scale": 1.0}, "both"),
        ({"recurrent": "step"}, "'sequence', 'batch'"),
        ({"draws": 0}, "draws must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=words):
            MCDropout(**options)
    net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1), nn.Dropout(0.3))
    with pytest.raises(ValueError, match="one dropout rate"):
        dubito.fit(Model(net, Gaussian()), MCDropout(length_scale=1.0, weight_decay=1e-3), data())
    with pytest.raises(ValueError, match=r"Gaussian\(\) without a scale"):
        dubito.fit(Model(net, Gaussian(scale=1.0)), MCDropout(at="", length_scale=1.0, weight_decay=1e-3), data())


def test_a_head_that_is_tied_to_an_embedding_is_no_place_of_its_own():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.middle, self.head = nn.Embedding(9, 5), nn.Linear(5, 5), nn.Linear(5, 9)
            self.head.weight = self.embed.weight

        def forward(self, words):
            return self.head(self.middle(self.embed(words)).tanh().mean(1))

    torch.manual_seed(0)
    model, data = Model(Reader(), dubito.Categorical()), (torch.randint(9, (40, 4)), torch.randint(9, (40,)))
    for options in ({}, {"learn_rates": True}):
        found, named = (dubito.fit(model, MCDropout(at=at, rate=0.2, epochs=2, **options), data) for at in ("", "^(?!(head)$)"))
        assert list(found.dropout.sites) == ["embed", "middle"]
        assert torch.equal(found.predict(data[0]).mean, named.predict(data[0]).mean)
    with pytest.raises(ValueError, match=r"inputs of \['head'\]: their weights are tied"):
        dubito.fit(model, MCDropout(at="head", rate=0.2, epochs=2), data)
