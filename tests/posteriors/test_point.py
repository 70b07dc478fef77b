"""The network at the centre of a posterior, as it is used without Bayes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dubito
from dubito.posteriors import Gaussian, Mixture, Point, Stochastic
from dubito.posteriors.predict.dropout import Dropout
from dubito.shift import Attacks, sweep


def forms() -> dict[str, dubito.posteriors.Posterior]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 4))
    model = dubito.Model(net, dubito.Categorical())
    params, buffers = model.parameters(), model.buffers()
    wide = Gaussian.diagonal(model, params, {name: torch.ones_like(leaf) for name, leaf in params.items()})
    return {
        "point": Point(model, params, buffers),
        "gaussian": wide,
        "stochastic": Stochastic(model, params, buffers, Dropout()),
        "mixture": Mixture.equal([wide, wide]),
    }


@pytest.mark.parametrize("name", list(forms()))
def test_it_is_the_plain_network(name):
    posterior, x = forms()[name], torch.randn(7, 3)
    network = posterior.model.network.eval()
    with torch.no_grad():
        expected = network(x).softmax(-1)
    p = posterior.predict(x, "point")
    torch.testing.assert_close(p.mean, expected)
    assert p.uncertainty.epistemic.abs().max() < 1e-6
    assert name == "point" or (posterior.predict(x).mean - expected).abs().max() > 1e-3


def test_of_an_exact_last_layer_it_is_the_mean():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))
    x = torch.randn(30, 2)
    posterior = dubito.fit(dubito.Model(net, dubito.Gaussian()), dubito.NeuralLinear(), (x, x[:, :1]))
    p = posterior.predict(x, "point")
    torch.testing.assert_close(p.f_mean, posterior.predict(x).f_mean)
    assert p.uncertainty.epistemic.abs().max() < 1e-9


def test_an_attacker_who_knows_the_network_alone():
    posterior, x, y = forms()["stochastic"], torch.rand(12, 3), torch.randint(4, (12,))
    known = sweep(posterior, x, y, shift=Attacks((0.3,), (0, 1), how="point"))
    alone = sweep(posterior, x, y, shift=Attacks((0.3,), (0, 1), how="point"), how="point")
    assert known.mean("epistemic") > 1e-3
    assert abs(alone.mean("epistemic")) < 1e-6


def test_members_are_given_what_they_take():
    mixture = forms()["mixture"]
    x = torch.randn(7, 3)
    p = mixture.predict(x, "linearized", link="probit")
    torch.testing.assert_close(p.mean, mixture.predict(x, "linearized").linked("probit").mean)
    with pytest.raises(TypeError, match="Stochastic posterior predicts without colour"):
        Mixture.equal([forms()["stochastic"]]).predict(x, colour="red")


def test_posteriors_are_shown_in_a_line():
    model = dubito.Model(torch.nn.Linear(3, 2), dubito.Categorical())
    point = Point(model, model.parameters(), model.buffers())
    assert repr(point) == "Point(8 weights of Linear, Categorical(dim=-1, ignore_index=-100, scale=1.0))"
    draws = dubito.posteriors.Samples(model, point.sample(5), {})
    assert repr(draws).startswith("Samples(5 draws, 8 weights of Linear, ")
    assert repr(Mixture(model, (point, point), torch.full((2,), 0.5))).startswith("Mixture(2 members, 8 weights of Linear, ")
