"""What `predict` makes of inputs as people hold them: the same prediction, or one sentence says what to do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dubito
from dubito import Categorical, Gaussian, Model, NeuralLinear
from dubito.posteriors import Gaussian as GaussianPosterior
from dubito.posteriors import Point, Samples
from dubito.tensors import tree

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Frame:
    """As much of a DataFrame or Series as is read."""

    def __init__(self, values: Tensor):
        self.values = values.double().numpy()

    def to_numpy(self) -> np.ndarray:
        return self.values


def posterior(form: str, network: nn.Module | None = None):
    torch.manual_seed(0)
    model = Model(network or nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), Categorical())
    params = model.parameters()
    if form == "point":
        return Point(model, params, model.buffers())
    if form == "samples":
        return Samples(model, tree.repeat(params, 3), model.buffers())
    return GaussianPosterior.diagonal(model, params, {name: torch.full_like(leaf, 0.1) for name, leaf in params.items()})


WAYS = [("point", None), ("samples", None), ("gaussian", "linearized"), ("gaussian", "sampled"), ("gaussian", "streamlined"),
        ("gaussian", "adjoint")]  # fmt: skip


@pytest.mark.parametrize(("form", "how"), WAYS)
def test_inputs_as_people_hold_them(form, how):
    p = posterior(form)
    wanted = p.predict(X, how).mean
    for x in (Frame(X), X.tolist(), X.double().numpy()):
        torch.testing.assert_close(p.predict(x, how).mean, wanted)


@pytest.mark.parametrize(("form", "how"), WAYS)
def test_loaders_are_sent_to_another_method(form, how):
    for x in (DataLoader(TensorDataset(X)), TensorDataset(X), iter([X])):
        with pytest.raises(TypeError, match="predict_loader"):
            posterior(form).predict(x, how)


@pytest.mark.parametrize(("form", "how"), WAYS)
def test_a_single_example_without_its_axis_is_told(form, how):
    with pytest.raises(ValueError, match=r"their first axis must be the examples. For a single example add that axis, x\[None\]"):
        posterior(form).predict(X[0], how)


@pytest.mark.parametrize(("form", "how"), WAYS)
def test_missing_values_are_told(form, how):
    x = X.clone()
    x[2, 1] = torch.nan
    with pytest.warns(UserWarning, match=r"predictions of 1 examples are NaN \(rows 2\)"):
        posterior(form).predict(x, how)


def test_a_network_that_takes_missing_values_is_left_alone():
    class Fills(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.nan_to_num(0.0))

    x = X.clone()
    x[2, 1] = torch.nan
    assert torch.isfinite(posterior("point", Fills(3, 2)).predict(x).mean).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize(("form", "how"), WAYS)
def test_inputs_of_another_precision_are_told(form, how, dtype):
    words = str(dtype).removeprefix("torch.")
    with pytest.raises(TypeError, match=rf"the inputs are {words} and the network's weights float32.*x.to\(torch.float32\)"):
        posterior(form).predict(X.to(dtype), how)


def test_a_fit_tells_of_precision_too():
    model = Model(nn.Linear(3, 2), Categorical())
    with pytest.raises(TypeError, match="the inputs are float64 and the network's weights float32"):
        dubito.fit(model, dubito.MAP(epochs=1), (X.double(), torch.tensor([0, 1, 0, 1])))


def test_a_conjugate_posterior_reads_the_same():
    model = Model(nn.Linear(3, 1), Gaussian())
    p = dubito.fit(model, NeuralLinear(), (X, X[:, :1]))
    torch.testing.assert_close(p.predict(Frame(X)).mean, p.predict(X).mean)
    x = X.clone()
    x[0, 0] = torch.nan
    with pytest.warns(UserWarning, match="are NaN"):
        p.predict(x)


def test_complex_parameters_are_told():
    network = nn.Linear(3, 2)
    network.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"the parameters \['phase'\] are complex"):
        Model(network, Categorical()).parameters()
    assert "phase" not in Model(network, Categorical(), only="weight|bias").parameters()


def test_sequences_with_time_first_are_no_single_example():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.GRU(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:  # [T, B, 3]
            return self.head(self.cell(x)[0][-1])

    assert posterior("point", Recurrent()).predict(torch.randn(7, 4, 3)).mean.shape == (4, 2)
