"""Dropout that stays on, as noise."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dubito import Categorical, Gaussian, Model
from dubito.posteriors import Stochastic
from dubito.posteriors.predict.dropout import Dropout
from dubito.posteriors.predict.streamlined import Moments
from dubito.posteriors.predict.streamlined.moments import RULES
from dubito.posteriors.predict.streamlined.program import lower
from dubito.posteriors.predict.streamlined.trace import trace


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_moments(p, noisy):
    x = noisy(4, 5, sd=0.5)
    found = RULES["dropout"](x, p)
    truth = F.dropout(x.mean + x.var.sqrt() * torch.randn(200_000, 4, 5), p)
    torch.testing.assert_close(found.mean, x.mean)
    torch.testing.assert_close(found.var.sqrt(), truth.std(0), rtol=0.02, atol=0.002)


def test_of_what_is_certain_and_at_the_ends():
    x = torch.randn(3, 4)
    torch.testing.assert_close(RULES["dropout"](x, 0.5).var, x * x)
    assert RULES["dropout"](x, 1.0).mean.abs().max() == 0
    assert RULES["dropout"](x, 0.0).var.max() == 0
    assert RULES["dropout"](x, 0.5, training=False) is x
    assert isinstance(RULES["dropout2d"](torch.randn(2, 3, 4, 4), 0.2), Moments)


def test_a_trace_has_dropout_only_when_asked():
    network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))
    model = Model(network, Gaussian())
    args = model, model.parameters(), torch.randn(5, 4), model.buffers()
    assert [step.name for step in trace(*args).steps] == ["linear", "linear"]
    assert [step.name for step in trace(*args, Dropout()).steps] == ["linear", "dropout", "linear"]
    placed = trace(*args, Dropout.find(network, "^0$", 0.3))
    assert [step.name for step in placed.steps] == ["dropout", "linear", "dropout", "linear"]
    assert placed.steps[0].args[1] == 0.3
    assert [step.name for step in trace(*args).steps] == ["linear", "linear"]


def test_what_has_no_rule_says_so():
    for network, at in ((nn.Sequential(nn.Linear(4, 3), nn.AlphaDropout(0.1)), None), (nn.GRU(4, 3, batch_first=True), "^$")):
        model = Model(network, Gaussian(), output=lambda out: out[0] if isinstance(out, tuple) else out)
        with pytest.raises(ValueError, match="how='sampled'"):
            trace(model, model.parameters(), torch.randn(5, 2, 4), {}, Dropout.find(network, at, 0.1))


NETWORKS = {
    "units": (lambda: nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3)), (4, 4), None),
    "input": (lambda: nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3)), (4, 4), ""),
    "channels": (
        lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Dropout2d(0.2), nn.AvgPool2d(6), nn.Flatten(), nn.Linear(8, 3)),
        (4, 1, 8, 8),
        None,
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_programs_with_dropout(name):
    """The traced network with dropout as noise, run forwards, against draws of masks."""
    make, shape, at = NETWORKS[name]
    network = make()
    model = Model(network, Gaussian(scale=0.1))
    dropout = Dropout.find(network, at, 0.1)
    x, params, buffers = torch.randn(shape), model.parameters(), model.buffers()
    truth = Stochastic(model, params, buffers, dropout).predict(x, draws=20_000)
    weights = {name: leaf for name, leaf in params.items() if ":" not in name}
    found = trace(model, weights, x, buffers, dropout)
    f = lower(found, ())(x, *({**buffers, **weights}[n] for n in found.weights.values()))
    var = f.var if isinstance(f, Moments) else f.cov.diagonal(dim1=-2, dim2=-1)
    ratio = float((var / truth.f_var).sqrt().mean())
    # units that share a dropped input move together, and pixels a dropped channel: not kept by the forward pass
    assert (ratio == pytest.approx(1, abs=0.1)) or (name == "channels" and 0.2 < ratio < 1)
    assert float(((f.mean - truth.f_mean).abs() / truth.f_var.sqrt()).max()) < 0.15


@pytest.mark.parametrize("how", ["streamlined", "adjoint"])
@pytest.mark.parametrize("at", [None, "^3$", ""])
def test_dropout_in_one_pass(how, at):
    """What MC dropout predicts, by the first two moments of its masks."""
    network = nn.Sequential(
        nn.Linear(4, 40), nn.ReLU(), nn.Dropout(0.2), nn.Linear(40, 40), nn.Tanh(), nn.Dropout(0.1), nn.Linear(40, 2)
    )
    model, x = Model(network, Gaussian(scale=0.1)), torch.randn(5, 4)
    posterior = Stochastic(model, model.parameters(), model.buffers(), Dropout.find(network, at, 0.1))
    truth, found = posterior.predict(x, draws=20_000), posterior.predict(x, how)
    torch.testing.assert_close(found.f_mean, truth.f_mean, rtol=0, atol=0.02)
    # without covariances units that share what was dropped before them count as independent
    within = 0.03 if how == "adjoint" else 0.25
    assert float(((found.f_var / truth.f_var).sqrt() - 1).abs().mean()) < within


def test_learned_rates_are_used_in_one_pass():
    network = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 2))
    model, x = Model(network, Gaussian(scale=0.1)), torch.randn(5, 4)
    params = {**model.parameters(), "dropout:2": torch.tensor([-2.0])}
    posterior = Stochastic(model, params, model.buffers(), Dropout.find(network, "^2$", 0.5))
    hidden, rate = torch.relu(network[0](x)), torch.sigmoid(torch.tensor(-2.0))
    exact = (rate / (1 - rate)) * hidden**2 @ network[2].weight.T ** 2
    for how in ("streamlined", "adjoint"):
        torch.testing.assert_close(posterior.predict(x, how).f_var, exact.detach())


def test_options_are_those_of_a_gaussian():
    """Directions, uncertain inputs and links, as `Gaussian.predict` has them."""
    network = nn.Sequential(nn.Linear(4, 30), nn.ReLU(), nn.Dropout(0.2), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 3))
    model, x = Model(network, Categorical()), torch.randn(5, 4)
    posterior = Stochastic(model, model.parameters(), model.buffers(), Dropout.find(network, None, 0.2))
    truth = posterior.predict(x, draws=5_000)
    error = {r: float(((posterior.predict(x, "streamlined", rank=r).f_var / truth.f_var).log()).abs().mean()) for r in (0, -1)}
    assert error[-1] < 0.1 < error[0]
    x_var = torch.full_like(x, 0.01)
    noisy = x + 0.1 * torch.randn(400, *x.shape)
    drawn = posterior.predict(noisy.flatten(0, 1), draws=20, consistent=False).means.unflatten(1, (400, 5)).flatten(0, 1)
    for how, options in (("adjoint", {}), ("streamlined", {"rank": -1})):
        found = posterior.predict(x, how, x_var=x_var, **options)
        torch.testing.assert_close(found.f_var.sqrt(), drawn.std(0), rtol=0.1, atol=0)
        assert not torch.equal(posterior.predict(x, how, link="probit").mean, posterior.predict(x, how).mean)
    assert posterior.predict(x, "adjoint", top=2).how == "adjoint, 2 largest outputs"
    with pytest.raises(ValueError, match="in one pass"):
        posterior.predict(x, rank=3)
    with pytest.raises(ValueError, match="link must be one of"):
        posterior.predict(x, "adjoint", link="logit")


@pytest.mark.parametrize("how", ["streamlined", "adjoint"])
def test_dropout_after_a_convolution(how):
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dropout(0.3), nn.Flatten(), nn.Linear(64, 2))
    model, x = Model(network, Gaussian(scale=0.1)), torch.randn(3, 1, 6, 6)
    random = Stochastic(model, {name: leaf.detach() for name, leaf in model.parameters().items()}, {}, Dropout())
    f_var = random.predict(x, "sampled", draws=4000).f_var
    torch.testing.assert_close(random.predict(x, how).f_var, f_var, rtol=0.1, atol=0)
