"""What every method promises, whoever wrote it: the checks of `dubito.testing`, run over all registered methods."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dubito
from contract.methods import DETERMINISTIC, QUICK, REGRESSION_ONLY
from dubito import Gaussian, Model
from dubito.model import Target
from dubito.posteriors import Mixture, Samples
from dubito.testing import (
    check_counts,
    check_frozen,
    check_resume,
    check_samples,
    check_saved,
    check_seed,
    check_uncertainty,
    check_untouched,
    check_untouched_by_errors,
    small_data,
    small_model,
)


def among(method, names: set[str]) -> bool:
    return any(method is QUICK[name] for name in names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_1_samples_have_the_shape_dtype_and_device_of_the_weights(method, dtype):
    check_samples(method, dtype)


@pytest.mark.parametrize("outputs", [1, 3], ids=["regression", "classes"])
def test_4_total_is_aleatoric_plus_epistemic_with_noise_inside(method, outputs):
    if outputs > 1 and among(method, REGRESSION_ONLY):
        with pytest.raises(ValueError, match="for Categorical use"):
            check_uncertainty(method, outputs)
    else:
        check_uncertainty(method, outputs)


def test_5_the_same_seed_gives_the_same_bits_and_another_seed_others(method):
    check_seed(method, deterministic=among(method, DETERMINISTIC))


@pytest.mark.parametrize("at", [1, 3, 5])
def test_5_stop_save_load_and_go_on_equals_one_run(method, at):
    check_resume(method, at)  # in the middle of an epoch, too


def test_5_a_saved_posterior_predicts_the_same_bits(method):
    check_saved(method)


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
    check_untouched(method, training=training)


def test_6_nor_when_something_raises(method):
    check_untouched_by_errors(method)


def test_7_the_target_does_not_depend_on_the_batch_size():
    model, (x, y) = small_model(), small_data()
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
    model, (x, y) = small_model(dtype=torch.float64), small_data()
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


def test_7_loaders_are_counted_right_or_refused(method):
    check_counts(method)


def test_a_method_is_a_frozen_dataclass(method):
    check_frozen(method)


def test_an_ensemble_of_points_is_a_set_of_samples():
    assert isinstance(dubito.fit(small_model(), QUICK["ensemble"], small_data()), Samples)
    assert isinstance(dubito.fit(small_model(), QUICK["ensemble/of dropout"], small_data()), Mixture)
