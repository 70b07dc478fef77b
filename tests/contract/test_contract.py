"""What every method promises, whoever wrote it. The numbers are those of the design's contract."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import dubito
from contract.methods import DETERMINISTIC, QUICK, REGRESSION_ONLY, data, network
from dubito import Categorical, Gaussian, Model
from dubito.inference.fit import Event
from dubito.model import Target
from dubito.posteriors import Mixture, Samples, Stochastic


def build(outputs: int = 1, dtype: torch.dtype = torch.float32) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = network(outputs).to(dtype)
    return Model(net, Gaussian(scale=0.3) if outputs == 1 else Categorical())


def tensors(held: Any) -> list[torch.Tensor]:
    """Every tensor a posterior holds: its weights, and whatever is in its covariance, its evidence and its members."""
    if isinstance(held, torch.Tensor):
        return [held]
    if isinstance(held, Mapping):
        held = list(held.values())
    elif is_dataclass(held):
        held = [getattr(held, field.name) for field in fields(held) if field.name != "model"]
    return [leaf for item in held for leaf in tensors(item)] if isinstance(held, list | tuple) else []


def snapshot(model: Model) -> dict:
    """All that is the user's: weights, buffers, gradients, modes, flags, hooks and the global generators."""
    net = model.network
    return {
        "state": copy.deepcopy(net.state_dict()),
        "identity": [id(p) for p in net.parameters()] + [id(b) for b in net.buffers()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in net.parameters()],
        "flags": [p.requires_grad for p in net.parameters()],
        "modes": [m.training for m in net.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()],
        "attributes": [sorted(m.__dict__) for m in net.modules()],
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].copy(),  # noqa: NPY002
        "python": random.getstate(),
    }


def assert_same(before: dict, after: dict) -> None:
    assert before.keys() == after.keys()
    for key, value in before.items():
        flat_a = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
        other = after[key]
        flat_b = list(other.values()) if isinstance(other, dict) else other if isinstance(other, list) else [other]
        for a, b in zip(flat_a, flat_b, strict=True):
            same = torch.equal(a, b) if isinstance(a, torch.Tensor) else np.array_equal(a, b) if key == "numpy" else a == b
            assert same, f"{key} changed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_1_samples_have_the_shape_dtype_and_device_of_the_weights(method, dtype):
    model, (x, y) = build(dtype=dtype), data()
    posterior = dubito.fit(model, method, (x.to(dtype), y.to(dtype)))
    drawn = posterior.sample(5, torch.Generator().manual_seed(1))
    stochastic = isinstance(posterior, Stochastic) or (
        isinstance(posterior, Mixture) and isinstance(posterior.members[0], Stochastic)
    )
    if stochastic:  # draws functions instead, and says so
        assert drawn["dropout:seed"].shape == (5,)
        return
    for name, parameter in model.network.named_parameters():
        assert drawn[name].shape == (5, *parameter.shape)
        assert drawn[name].dtype == dtype
        assert drawn[name].device == parameter.device
    again = posterior.sample(5, torch.Generator().manual_seed(1))
    assert all(torch.equal(drawn[name], again[name]) for name in drawn)


@pytest.mark.parametrize("outputs", [1, 3], ids=["regression", "classes"])
def test_4_total_is_aleatoric_plus_epistemic_with_noise_inside(method, outputs):
    x, y = data()
    y = y if outputs == 1 else (y.squeeze(1) > 0).long()
    if outputs > 1 and any(method is QUICK[name] for name in REGRESSION_ONLY):
        with pytest.raises(ValueError, match="for Categorical use"):
            dubito.fit(build(outputs), method, (x, y))
        return
    p = dubito.fit(build(outputs), method, (x, y)).predict(x)
    u = p.uncertainty
    assert torch.allclose(u.total, u.aleatoric + u.epistemic, rtol=1e-5, atol=1e-7)
    assert (u.epistemic >= 0).all()
    assert (u.aleatoric >= 0).all()
    if outputs == 1:
        assert torch.allclose(u.aleatoric, torch.tensor(0.09), rtol=1e-4), "the noise is inside the predictive"
        assert torch.allclose(p.mean, p.f_mean, atol=1e-5)
        assert (p.log_prob(y) <= torch.distributions.Normal(0, 0.3).log_prob(torch.tensor(0.0)) + 1e-5).all()
    else:
        assert torch.allclose(p.mean.sum(-1), torch.ones(len(x)), atol=1e-5)
        assert (u.total <= np.log(3) + 1e-5).all()


def test_5_the_same_seed_gives_the_same_bits_and_another_seed_others(method):
    (x, y), loader = data(48), DataLoader(TensorDataset(*data(48)), batch_size=16, shuffle=True)
    for source in ((x, y), loader):
        a, b, other = (dubito.fit(build(), method, source, seed=seed, batch_size=16) for seed in (3, 3, 4))
        assert all(torch.equal(p, q) for p, q in zip(tensors(a), tensors(b), strict=True))
        if any(method is QUICK[name] for name in DETERMINISTIC):
            assert torch.allclose(a.predict(x).f_var, other.predict(x).f_var, rtol=1e-4)
        else:
            assert any(not torch.equal(p, q) for p, q in zip(tensors(a), tensors(other), strict=True))


@pytest.mark.parametrize("at", [1, 3, 5])
def test_5_stop_save_load_and_go_on_equals_one_run(method, at, tmp_path):
    whole = dubito.fit(build(), method, data(48), seed=3, batch_size=16)

    def stop(event: Event) -> bool:
        return event.step == at  # in the middle of an epoch, too

    folder = tmp_path / "run"
    dubito.fit(build(), method, data(48), seed=3, batch_size=16, checkpoint=folder, callbacks=[stop])
    torch.manual_seed(99)  # nothing may depend on the state of the world at resumption
    resumed = dubito.fit(build(), method, data(48), seed=3, batch_size=16, checkpoint=folder, resume=True)
    assert all(torch.equal(p, q) for p, q in zip(tensors(whole), tensors(resumed), strict=True))


def test_5_a_saved_posterior_predicts_the_same_bits(method, tmp_path):
    model, (x, y) = build(), data()
    posterior = dubito.fit(model, method, (x, y))
    dubito.save(posterior, tmp_path / "posterior.safetensors")
    same = dubito.load(tmp_path / "posterior.safetensors", build())
    assert type(same) is type(posterior)
    for part in ("means", "f_var", "mean"):
        assert torch.equal(getattr(posterior.predict(x), part), getattr(same.predict(x), part))


def test_6_nor_the_weights_that_a_recurrent_layer_lists():
    """nn.LSTM keeps a list of its own weights, which is brought up to date by every pass."""
    net = nn.LSTM(3, 2, batch_first=True)
    listed = [id(w) for w in net._flat_weights]
    x = torch.randn(8, 5, 3)
    posterior = dubito.fit(Model(net, Gaussian(scale=0.1)), dubito.MAP(epochs=1), (x, torch.randn(8, 5, 2)))
    posterior.predict(x)
    assert [id(w) for w in net._flat_weights] == listed == [id(p) for p in net.parameters()]


@pytest.mark.parametrize("training", [True, False])
def test_6_nothing_of_the_users_changes(method, training):
    model, (x, y) = build(), data()
    model.network.train(training)
    model.network[1].train(not training)  # a mixed state is kept as well
    model.network(x).sum().backward()
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(7))
    state = loader.generator.get_state()
    before = snapshot(model)
    posterior = dubito.fit(model, method, loader, validation=None)
    posterior.predict(x)
    posterior.sample(3)
    posterior.predict_loader(DataLoader(TensorDataset(x, y), batch_size=16))
    assert_same(before, snapshot(model))
    assert torch.equal(state, loader.generator.get_state())
    assert not any(leaf.requires_grad for leaf in tensors(posterior))


def test_6_nor_when_something_raises(method):
    class Fragile(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.calls = network(), 0

        def forward(self, x):
            calls.append(1)
            if len(calls) >= limit:  # and ever after: a method may try things out, and take a refusal for an answer
                raise OSError("the disk is full")
            return self.inner(x)

    calls, limit = [], 4
    model, (x, y) = Model(Fragile(), Gaussian(scale=0.3)), data()
    before = snapshot(model)
    with pytest.raises(OSError, match="disk is full"):
        dubito.fit(model, method, (x, y), batch_size=16)
    assert_same(before, snapshot(model))
    calls, limit = [], 10**9
    posterior = dubito.fit(model, method, (x, y), batch_size=16)
    calls, limit = [], 1
    with pytest.raises(OSError, match="disk is full"):
        posterior.predict(x)
    assert_same(before, snapshot(model))


def test_7_the_target_does_not_depend_on_the_batch_size():
    model, (x, y) = build(), data()
    params, buffers = model.parameters(), model.buffers()
    values, gradients = [], []
    for size in (1, 7, 40):
        chunks = [(x[i : i + size], y[i : i + size]) for i in range(0, 40, size)]
        target = Target(model, 40)
        values.append(target.log_joint(params, chunks))
        gradients.append(target.gradient(params, chunks, buffers).gradient)
    exact = model.log_likelihood(params, (x, y), buffers)[0].sum() + model.prior.log_prob(params)
    assert torch.allclose(torch.stack(values), exact.double(), rtol=1e-6)
    for gradient in gradients[:2]:
        assert all(torch.allclose(gradient[n], gradients[2][n], rtol=1e-4, atol=1e-4) for n in gradient)
    # a mini-batch is an unbiased estimate: the mean over equal batches is the whole
    parts = [Target(model, 40).gradient(params, [(x[i : i + 8], y[i : i + 8])], buffers).gradient for i in range(0, 40, 8)]
    for name in params:
        assert torch.allclose(torch.stack([g[name] for g in parts]).mean(0), gradients[2][name], rtol=1e-4, atol=1e-3)


def test_7_temperature_and_the_gradient_of_the_log_joint():
    model, (x, y) = build(dtype=torch.float64), data()
    model = Model(model.network, Gaussian(prior=torch.distributions.Gamma(*torch.tensor([0.5, 1.0]).double())))
    x, y = x.double(), y.double()
    params = model.parameters(y)
    for temperature in (1.0, 0.25):
        target = Target(model, 100, temperature)
        gradient = target.gradient(params, [(x, y)], model.buffers()).gradient
        for name, leaf in params.items():
            index = (0,) * leaf.ndim
            shifted = []
            for sign in (1, -1):
                moved = {**params, name: leaf.clone()}
                moved[name][index] += sign * 1e-5
                shifted.append(target.log_joint(moved, [(x, y)]))
            assert torch.allclose(gradient[name][index].double(), (shifted[0] - shifted[1]) / 2e-5, rtol=1e-4, atol=1e-4), name
    assert torch.allclose(
        Target(model, 100, 0.25).log_joint(params, [(x, y)]), 4 * Target(model, 100).log_joint(params, [(x, y)])
    )


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(*data(), strict=True)


def test_7_loaders_are_counted_right_or_refused(method):
    class Counted(Exception):
        pass

    class Spy:
        def __getattr__(self, name):
            return getattr(method, name)

        def init(self, target, *args, **kwargs):
            method.init(target, *args, **kwargs)
            raise Counted(target.n_data)  # that is all there is to know

    dataset = TensorDataset(*data())
    loaders = [
        (DataLoader(dataset, batch_size=16, drop_last=True), 32),
        (DataLoader(dataset, batch_size=16), 40),
        (DataLoader(dataset, batch_sampler=[[0, 1, 2], [3, 4]]), 5),
        ([data(16), data(24)], 40),
    ]
    for loader, n in loaders:
        with pytest.raises(Counted, match=f"^{n}$"):
            dubito.fit(build(), Spy(), loader)
    with pytest.raises(ValueError, match="give n_data="):
        dubito.fit(build(), Spy(), DataLoader(Stream(), batch_size=16))
    with pytest.raises(Counted, match="^40$"):
        dubito.fit(build(), Spy(), DataLoader(Stream(), batch_size=16), n_data=40)
    with pytest.raises(TypeError, match="only once"):
        dubito.fit(build(), Spy(), iter([data()]))


def test_a_method_is_a_frozen_dataclass(method):
    hash(method)
    with pytest.raises(AttributeError):
        method.steps = None
    assert isinstance(repr(method), str)


def test_an_ensemble_of_points_is_a_set_of_samples():
    assert isinstance(dubito.fit(build(), QUICK["ensemble"], data()), Samples)
    assert isinstance(dubito.fit(build(), QUICK["ensemble/of dropout"], data()), Mixture)
