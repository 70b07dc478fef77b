"""What `fit` makes of data, starts and settings as people give them: it works, or one sentence says what to do."""

from __future__ import annotations

from collections import UserDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dubito
from dubito.network.examples import as_arrays

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3


def model(**options) -> dubito.Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return dubito.Model(nn.Linear(3, 3), dubito.Categorical(), **options)


def fit(data, network: dubito.Model | None = None, **options):
    return dubito.fit(network or model(), dubito.MAP(epochs=3), data, progress=False, **options)


class Frame:
    """As much of a DataFrame or Series as is read."""

    def __init__(self, values):
        self.values = np.asarray(values)
        self.values.flags.writeable = False

    def to_numpy(self):
        return self.values


class HuggingFace:
    """As much of a `datasets.Dataset` as is read."""

    column_names = ("input", "label")

    def __init__(self, kind: str = "python"):
        self.kind = kind

    def with_format(self, kind: str) -> HuggingFace:
        return HuggingFace(kind)

    def __len__(self) -> int:
        return len(Y)

    def __getitem__(self, i: int) -> dict:
        row = {"input": X[i], "label": Y[i]}
        return row if self.kind == "torch" else {key: value.tolist() for key, value in row.items()}


@pytest.mark.parametrize(
    "data",
    [
        (Frame(X.double()), Frame(Y)),
        (X.tolist(), Y.tolist()),
        (X, Y.tolist()),
        {"input": X, "labels": Y},
        UserDict({"input": X.tolist(), "labels": Y.tolist()}),
        HuggingFace(),
    ],
    ids=["frames", "lists", "tensor and list", "dict", "BatchEncoding", "datasets.Dataset"],
)
def test_data_as_people_hold_them_give_the_same_fit(data):
    wanted = fit((X, Y)).params
    for name, leaf in fit(data).params.items():
        assert torch.allclose(leaf, wanted[name], atol=1e-6)


class NAType:
    """As much of pandas.NA as is read."""


@pytest.mark.parametrize(
    "x",
    [
        X.numpy().astype(object),
        X.numpy().astype(">f8"),
        X.numpy()[::-1, ::-1][::-1, ::-1],
        X.numpy().astype(np.longdouble),
        np.ma.masked_array(X.numpy(), np.zeros(X.shape, bool)),
    ],
    ids=["objects", "other byte order", "negative strides", "long double", "nothing masked"],
)
def test_arrays_of_every_kind_give_the_same_fit(x):
    wanted = fit((X, Y)).params
    for name, leaf in fit((x, Y)).params.items():
        assert torch.allclose(leaf, wanted[name], atol=1e-6)


def test_frames_of_several_types_are_numbers_and_what_is_missing_is_nan():
    x = np.array([[1.5, True, 2], [None, False, NAType()]], dtype=object)
    assert np.array_equal(as_arrays(Frame(x)), [[1.5, 1.0, 2.0], [np.nan, 0.0, np.nan]], equal_nan=True)
    assert as_arrays(Frame(np.array([1, np.int64(2)], dtype=object))).dtype == np.int64


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Frame(X), "give a tuple, such as"),
        ((Frame(np.array([["a"], ["b"]])), Frame([0, 1])), "holds text, dates or objects"),
        (([["a", "b"], ["c", "d"]], [0, 1]), "holds text, dates or objects"),
        ((list(X.numpy()), Y), r"read as several inputs, and np.stack\(x\)"),
        ((list(X), list(Y)), r"read as several inputs, and np.stack\(x\)"),
        ((X.to_sparse(), Y), "to_dense"),
        ((X[:, 0], Y), r"does not take inputs of shape \[12\] .* x\[:, None\]"),
        (X, r"Data are a tuple \(x, y\)"),
        ("table.csv", "dubito.fit_table reads a file"),
        ((X, [1.0, np.nan, *Y[2:].tolist()]), "1 class targets are missing"),
        ((X, np.ma.masked_array(Y.numpy(), Y.numpy() == 2)), "4 class targets are missing"),
        ((np.ma.masked_array(X.numpy(), X.numpy() > 1), Y), "the inputs hold NaN"),
        (([[1.0, 2.0], [3.0]], [0, 1]), "different lengths"),
    ],
)
def test_data_that_cannot_be_read_are_told(data, words):
    with pytest.raises((TypeError, ValueError), match=words):
        fit(data)


def test_a_dict_needs_the_default_split():
    with pytest.raises(TypeError, match="default split"):
        fit({"a": X, "b": Y}, model(split=lambda batch: (batch["a"], batch["b"])))


@pytest.mark.parametrize("size", [0, 2.5])
def test_a_batch_has_a_whole_number_of_examples(size):
    with pytest.raises(ValueError, match=f"batch_size must be .*; got {size}"):
        fit((X, Y), batch_size=size)


@pytest.mark.parametrize("form", ["arrays", "loader"])
def test_labels_out_of_range_in_a_later_batch_are_told(form):
    y = torch.cat([Y[:-1], torch.tensor([7])])
    data = (X, y) if form == "arrays" else DataLoader(TensorDataset(X, y), batch_size=4)
    with pytest.raises(ValueError, match="from . to 7, but the network has 3 classes"):
        fit(data, batch_size=4)


def test_held_out_labels_out_of_range_and_complex_targets_are_told():
    with pytest.raises(ValueError, match="from 3 to 5, but the network has 3 classes"):
        fit((X, Y), validation=(X, Y + 3))
    with pytest.raises(ValueError, match="the targets are complex"):
        fit((X, X + 1j), dubito.Model(nn.Linear(3, 3), dubito.Gaussian()))
    with pytest.raises(ValueError, match="n_data must be at least 1; got 0"):
        fit((X, Y), n_data=0)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (None, "predict takes the inputs of some examples, .*; got None"),
        ("x.csv", "predict takes the inputs of some examples"),
        ((X, Y), "leave the targets out"),
        ({"q": X}, "a dict has them by name"),
        (X.long(), "the inputs are int64, which the network does not take"),
        (X[:, :2], r"does not take inputs of shape \[12, 2\]"),
    ],
    ids=["none", "text", "pair", "dict", "integers", "width"],
)
def test_inputs_that_a_network_does_not_take_are_told_at_prediction(x, words):
    with pytest.raises((TypeError, ValueError), match=words):
        fit((X, Y)).predict(x)


@pytest.mark.parametrize("method", [dubito.MAP(epochs=1), dubito.Ensemble(dubito.MAP(epochs=1), 2), dubito.Laplace(check=False)])
def test_one_example_with_as_many_numbers_as_outputs_is_told(method):
    posterior = dubito.fit(dubito.Model(nn.Linear(3, 3), dubito.Gaussian()), method, (X, X), progress=False)
    with pytest.raises(ValueError, match="one example without its batch axis, 3 numbers"):
        posterior.predict(X[0])


def test_a_network_of_numbers_takes_a_vector():
    class Line(nn.Module):
        def __init__(self):
            super().__init__()
            self.slope = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.slope * x

    posterior = fit((X[:, 0], X[:, 1]), dubito.Model(Line(), dubito.Gaussian()))
    assert posterior.predict(X[:5, 0]).mean.shape == (5, 1)


@pytest.mark.parametrize("draws", [0, -1, 2.5])
@pytest.mark.parametrize("method", [dubito.Ensemble(dubito.MAP(epochs=1), 2), dubito.Laplace(check=False)])
def test_a_number_of_draws_is_whole_and_positive(method, draws):
    posterior = dubito.fit(model(), method, (X, Y), progress=False)
    with pytest.raises(ValueError, match=f"draws must be .*; got {draws}"):
        posterior.predict(X, "sampled", draws=draws)


def test_targets_of_a_prediction_as_people_hold_them():
    posterior = fit((X, Y))
    p = posterior.predict(X)
    for y in (Y.tolist(), Frame(Y), Y.numpy()):
        assert torch.equal(p.log_prob(y), p.log_prob(Y))
    with pytest.raises(ValueError, match="from 3 to 5, but the network has 3 classes"):
        p.log_prob(Y + 3)
    scores = dubito.judge(posterior, (X, Y), metrics=["nll"])["nll"]
    for data in ((Frame(X), Frame(Y)), (X.tolist(), Y.tolist()), {"input": X, "labels": Y}, HuggingFace()):
        assert dubito.judge(posterior, data, metrics=["nll"])["nll"] == pytest.approx(scores, rel=1e-5)


def test_a_network_is_a_start():
    other = nn.Linear(3, 3)
    found = dubito.fit(model(), dubito.MAP(epochs=0), (X, Y), start=other, progress=False)
    assert torch.equal(found.params["weight"], other.weight)
    with pytest.raises(ValueError, match="other shapes"):
        dubito.fit(model(), dubito.MAP(epochs=0), (X, Y), start=nn.Linear(3, 4), progress=False)


def test_what_is_no_start_and_no_ensemble_is_told():
    with pytest.raises(TypeError, match="start must be a network, weights by their names, .* got the class Linear"):
        fit((X, Y), start=nn.Linear)
    with pytest.raises(TypeError, match=r"such as Ensemble\(5\) or Ensemble\(MAP\(\), 5\); got 2.5"):
        dubito.Ensemble(2.5)


def test_a_list_of_starts_is_for_methods_with_several():
    with pytest.raises(ValueError, match="a list of 2 settings; this method begins at one"):
        fit((X, Y), start=[nn.Linear(3, 3), nn.Linear(3, 3)])


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10)

    def forward(self, input_ids):
        return self.head(self.embed(input_ids))


def test_labels_that_are_the_inputs_are_refused():
    ids = torch.randint(10, (6, 5), generator=torch.Generator().manual_seed(0))
    padded = ids.clone()
    padded[:, -1] = -100
    for labels in (ids, padded):
        with pytest.raises(ValueError, match="use the likelihood dubito.NextToken"):
            fit([{"input_ids": ids, "labels": labels}], dubito.Model(Language(), dubito.Categorical()))
    shifted = torch.cat([ids[:, 1:], torch.full((6, 1), -100)], 1)
    fit([{"input_ids": ids, "labels": shifted}], dubito.Model(Language(), dubito.Categorical()))


def test_a_network_is_taken_out_of_distributed_data_parallel_aloud(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        network = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
        with pytest.warns(UserWarning, match="taken out of DistributedDataParallel"):
            model = dubito.Model(network, dubito.Categorical())
        assert model.network is network.module
        assert list(fit((X, Y), model).params) == ["weight", "bias"]
        with pytest.raises(ValueError, match="the network holds a DistributedDataParallel"):
            fit((X, Y), dubito.Model(nn.Sequential(network), dubito.Categorical()))
    finally:
        torch.distributed.destroy_process_group()


class Cut(nn.Module):
    """A network of two layers, of which one has no gradient."""

    def __init__(self):
        super().__init__()
        self.cut, self.free, self.unused = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.cut(x).detach() + self.free(x)


def test_weights_without_a_gradient_are_told():
    with pytest.warns(UserWarning, match=r"depend on \['cut.weight', 'cut.bias'.*no gradient there") as caught:
        fit((X, Y), dubito.Model(Cut(), dubito.Categorical()))
    assert caught[0].filename == __file__
    fit((X, Y), dubito.Model(Cut(), dubito.Categorical(), only="free|unused"))  # nothing is said of weights that are not used


def test_a_network_without_values_and_one_without_classes_are_told():
    with torch.device("meta"):
        network = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="meta device"):
        fit((X, Y), dubito.Model(network, dubito.Categorical()))
    with pytest.raises(ValueError, match=r"one output for yes or no goes with Bernoulli\(\)"):
        fit((X, Y), dubito.Model(nn.Linear(3, 1), dubito.Categorical()))
