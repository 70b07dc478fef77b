"""Attacks against closed forms where the score is monotone in a linear function, and what they must leave alone."""

import pytest
import torch
from torch import nn

import dubito
from dubito.posteriors import Conjugate, Gaussian, Mixture, Point, Samples, Stochastic
from dubito.shift import fgsm, functions, pgd
from dubito.tensors.store import Draws

ATTACKS = {"fgsm": fgsm, "pgd": pgd}


def logistic(dtype=torch.float64):
    """A linear-logistic point posterior, inputs in [0, 1] and labels."""
    torch.manual_seed(0)
    model = dubito.Model(nn.Linear(6, 1).to(dtype), dubito.Bernoulli())
    x = 0.2 + 0.6 * torch.rand(20, 6, dtype=dtype)
    return Point(model, model.parameters(), model.buffers()), x, (torch.arange(20) % 2).to(dtype)


def network(*more):
    torch.manual_seed(0)
    return dubito.Model(nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), *more, nn.Linear(8, 3)), dubito.Categorical())


def gaussian(model, scale=0.3):
    mean = model.parameters()
    return Gaussian.diagonal(model, mean, {name: torch.full_like(leaf, scale**2) for name, leaf in mean.items()})


def samples(model, n=4, **more):
    return Samples(model, gaussian(model).sample(n, torch.Generator().manual_seed(0)), model.buffers(), **more)


def stored(model, folder):
    draws = samples(model, 5)
    with Draws(folder) as kept:
        for i in range(5):
            kept.append({name: leaf[i] for name, leaf in draws.params.items()})
        kept.flush()
    from dubito.posteriors import Stored

    return Stored.open(folder, model)


def forms(folder):
    """One posterior of every form, and the ways whose draws `predict` would take as well."""
    model, dropped = network(), network(nn.Dropout(0.4))
    fitted = dubito.fit(
        dropped, dubito.MCDropout(epochs=1, draws=6), (torch.rand(6, 1, 4, 4), torch.tensor([0, 1, 2] * 2)), progress=False
    )
    independent = Stochastic(fitted.model, fitted.params, fitted.buffers, fitted.dropout, draws=3, consistent=False)
    drawn = dubito.fit(
        model,
        dubito.Variational(family="grouped", epochs=1),
        (torch.rand(6, 1, 4, 4), torch.tensor([0, 1, 2] * 2)),
        progress=False,
    )
    return {
        "point": (Point(model, model.parameters(), model.buffers()), None),
        "gaussian sampled": (gaussian(model), "sampled"),
        "gaussian linearised": (gaussian(model), "linearized"),
        "samples": (samples(model), None),
        "weighted": (samples(model, weights=torch.tensor([0.1, 0.2, 0.3, 0.4])), None),
        "stored": (stored(model, folder), None),
        "dropout": (fitted, None),
        "independent": (independent, None),
        "drawn": (drawn, None),
        "mixture": (Mixture.equal([gaussian(model), gaussian(model, 0.1)]), "sampled"),
    }


def test_functions_are_those_of_predict(tmp_path):
    x = torch.rand(5, 1, 4, 4)
    for name, (posterior, how) in forms(tmp_path).items():
        draws = None if name in ("point", "weighted", "independent") else 3
        p = functions(posterior, how=how, draws=draws, seed=7)(x)
        if name != "independent":  # these masks are drawn for every call
            expected = posterior.predict(x, how, draws=draws, seed=7)
            torch.testing.assert_close(p.means, expected.means, atol=1e-5, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
            torch.testing.assert_close(p.mean, expected.mean, atol=1e-5, rtol=1e-4)
        for attack in ATTACKS.values():
            moved = attack(posterior, x, torch.tensor([0, 1, 2, 0, 1]), size=0.05, bounds=(0, 1), how=how, draws=draws)
            assert (moved - x).abs().max() <= 0.05 + 1e-6, name
            assert not torch.equal(moved, x), name


def test_conjugate():
    torch.manual_seed(0)
    x, y = torch.randn(30, 2), torch.randn(30, 1)
    model = dubito.Model(nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)), dubito.Gaussian())
    posterior = dubito.fit(model, dubito.NeuralLinear(), (x, y), progress=False)
    assert isinstance(posterior, Conjugate)
    found, expected = functions(posterior, draws=4, seed=2)(x), posterior.predict(x, "sampled", draws=4, seed=2)
    torch.testing.assert_close(found.means, expected.means)
    moved = pgd(posterior, x, y, size=0.1, bounds=None)
    assert dubito.metrics.nll(posterior.predict(moved), y) > dubito.metrics.nll(posterior.predict(x), y)


@pytest.mark.parametrize("attack", ATTACKS)
def test_worst_case_of_a_linear_model(attack):
    """y f falls by size |w|_1, no more and no less: the closed-form worst case in the box, away from the bounds."""
    posterior, x, y = logistic()
    w, b = posterior.params["weight"], posterior.params["bias"]
    sign = 2 * y - 1
    moved = ATTACKS[attack](posterior, x, y, size=0.1, bounds=(0, 1))
    torch.testing.assert_close(moved, x - 0.1 * sign[:, None] * w.sign())
    margin = sign * (x @ w.mT + b).squeeze(1) - 0.1 * w.abs().sum()
    torch.testing.assert_close(posterior.predict(moved).log_prob(y), -torch.log1p(torch.exp(-margin)))


@pytest.mark.parametrize("attack", ATTACKS)
def test_worst_case_in_the_ball(attack):
    posterior, x, y = logistic()
    w = posterior.params["weight"]
    more = {"random_start": False} if attack == "pgd" else {}
    moved = ATTACKS[attack](posterior, x, y, size=0.1, bounds=(0, 1), norm="l2", **more)
    torch.testing.assert_close(moved, x - 0.1 * (2 * y - 1)[:, None] * w / w.norm())


def test_worst_case_at_the_bounds():
    """Every number is as far as it may go."""
    posterior, x, y = logistic()
    moved = fgsm(posterior, x, y, size=0.5, bounds=(0.1, torch.full((6,), 0.9)))
    expected = torch.where(
        (2 * y - 1)[:, None] * posterior.params["weight"] > 0, (x - 0.5).clamp_min(0.1), (x + 0.5).clamp_max(0.9)
    )
    torch.testing.assert_close(moved, expected)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_pgd_stays_in_the_ball_and_gets_worse(norm):
    model = network()
    posterior, x, y = samples(model), torch.rand(40, 1, 4, 4), torch.arange(40) % 3
    size = 0.1 if norm == "linf" else 0.5

    def score(x):
        return -posterior.predict(x).log_prob(y)

    once = fgsm(posterior, x, y, size=size, bounds=(0, 1), norm=norm)
    many = pgd(posterior, x, y, size=size, bounds=(0, 1), norm=norm, steps=20, restarts=2)
    away = (many - x).flatten(1)
    assert (away.abs().amax(1) if norm == "linf" else away.norm(dim=1)).max() <= size + 1e-6
    assert many.min() >= 0
    assert many.max() <= 1
    assert (score(many) >= score(x) - 1e-6).all()
    assert score(many).mean() >= score(once).mean() - 1e-4
    assert score(once).mean() > score(x).mean()


def test_the_average_is_attacked():
    """Two functions with opposite slopes in x2: what fools one saves the other, and the average is moved along x1 alone."""
    model = dubito.Model(nn.Linear(2, 1, bias=False), dubito.Bernoulli())
    posterior = Samples(model, {"weight": torch.tensor([[[1.0, 1.0]], [[1.0, -1.0]]])}, {})
    moved = pgd(posterior, torch.zeros(1, 2), torch.ones(1), size=0.5, norm="l2", bounds=None, random_start=False)
    torch.testing.assert_close(moved, torch.tensor([[-0.5, 0.0]]), atol=1e-5, rtol=0)


def test_transform_and_point():
    """Against normalised, flattened inputs; bounds and sizes are those of the images."""
    torch.manual_seed(0)
    model = dubito.Model(nn.Linear(16, 3), dubito.Categorical())
    posterior, x, y = gaussian(model, 0.05), torch.rand(4, 1, 4, 4), torch.tensor([0, 1, 2, 0])
    moved = fgsm(posterior, x, y, size=0.02, bounds=(0, 1), how="point", transform=lambda x: (x.flatten(1) - 0.5) / 0.25)
    f = model.network((x.flatten(1) - 0.5) / 0.25).detach()
    residual = f.softmax(-1) - nn.functional.one_hot(y, 3)
    expected = (x + 0.02 * (residual @ model.network.weight.detach()).sign().view_as(x)).clamp(0, 1)
    torch.testing.assert_close(moved, expected)


def test_nothing_of_the_users_changes():
    model = network(nn.BatchNorm1d(8), nn.Dropout(0.5))
    net = model.network.train()
    net(torch.rand(8, 1, 4, 4)).sum().backward()
    grads = {name: p.grad.clone() for name, p in net.named_parameters()}
    x = torch.rand(6, 1, 4, 4, requires_grad=True)
    state, random = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    one = pgd(samples(model), x, torch.arange(6) % 3, size=0.1, bounds=(0, 1), seed=3)
    two = pgd(samples(model), x, torch.arange(6) % 3, size=0.1, bounds=(0, 1), seed=3)
    assert torch.equal(one, two)
    assert not one.requires_grad
    assert x.grad is None
    assert net.training
    assert all(torch.equal(grads[name], p.grad) for name, p in net.named_parameters())
    assert all(torch.equal(state[k], v) for k, v in net.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    with torch.inference_mode():
        assert torch.equal(pgd(samples(model), x, torch.arange(6) % 3, size=0.1, bounds=(0, 1), seed=3), one)


def test_batches():
    posterior, x, y = logistic()
    one, two = (fgsm(posterior, x, y, size=0.1, bounds=(0, 1), batch_size=size) for size in (3, 100))
    torch.testing.assert_close(one, two)
    assert fgsm(posterior, x[:0], y[:0], size=0.1, bounds=(0, 1)).shape == (0, 6)


def test_no_size_no_change():
    posterior, x, y = logistic()
    for norm in ("linf", "l2"):
        assert torch.equal(pgd(posterior, x, y, size=0.0, bounds=(0, 1), norm=norm), x)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"size": -1.0}, "at least 0; got -1"),
        ({"bounds": (0.3, 0.7)}, "lie outside `bounds`"),
        ({"norm": "l1"}, "'linf'.*'l2'"),
        ({"how": "streamlined"}, "how must be one of 'sampled', 'linearized', 'point'"),
        ({"how": "linearized"}, "a Point posterior predicts"),
        ({"draws": 0}, "draws must be at least 1"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1; got 0"),
        ({"transform": lambda x: x.detach()}, "cannot|has no gradient"),
    ],
)
def test_errors(more, message):
    posterior, x, y = logistic()
    with pytest.raises(ValueError, match=message):
        pgd(posterior, x, y, **{"size": 0.1, "bounds": (0, 1), **more})


def test_wrong_inputs():
    posterior, x, y = logistic()
    with pytest.raises(ValueError, match="divide bytes by 255"):
        fgsm(posterior, (255 * x).to(torch.uint8), y, size=0.1, bounds=(0, 1))
    with pytest.raises(ValueError, match="20 inputs for 19 targets"):
        fgsm(posterior, x, y[1:], size=0.1, bounds=(0, 1))
