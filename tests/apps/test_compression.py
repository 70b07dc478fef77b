"""From a posterior to a small network: what is pruned, how many bits are left, what a file holds, and what is reported."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import dubito
from apps.networks import NETWORKS, build, sparse
from dubito.apps import compression
from dubito.apps.compression import coding as bits
from dubito.apps.compression import cut, load, prune, save, thresholds
from dubito.data import digits
from dubito.likelihoods import Bernoulli, Categorical, Gaussian
from dubito.posteriors import Gaussian as Posterior
from dubito.posteriors import Point, Samples
from dubito.tensors.store import FileError
from dubito.tensors.tree import Params


def posterior_of(network: nn.Module, scale: float = 0.05, likelihood=None) -> Posterior:
    model = dubito.Model(network, likelihood or Categorical())
    mean = model.parameters()
    return Posterior.diagonal(model, mean, {n: torch.full_like(leaf, scale**2) for n, leaf in mean.items() if ":" not in n})


# --- pruning ----------------------------------------------------------------------------------------------------------


def test_by_threshold():
    posterior = posterior_of(build("mlp")[0], scale=0.1)
    pruned = prune(posterior, threshold=2.0)
    for name, variance in pruned.covariance.variance().items():
        low = posterior.params[name].abs() < 0.2
        assert torch.equal(pruned.params[name] == 0, low)
        assert torch.equal(variance == 0, low)  # mean and standard deviation
        assert torch.equal(pruned.params[name][~low], posterior.params[name][~low])


def test_by_share():
    posterior = posterior_of(build("mlp")[0])
    pruned = prune(posterior, share=0.75)
    flat = torch.cat([leaf.flatten() for leaf in pruned.params.values()])
    assert int((flat == 0).sum()) == round(0.75 * len(flat))
    kept = min(float(leaf[leaf != 0].abs().min()) for leaf in pruned.params.values())
    gone = max(
        float(leaf[pruned.params[name] == 0].abs().max())
        for name, leaf in posterior.params.items()
        if (pruned.params[name] == 0).any()
    )
    assert gone <= kept


def test_by_name():
    posterior = posterior_of(build("mlp")[0], scale=0.1)
    pruned = prune(posterior, threshold={"weight": 2.0})
    assert all((pruned.params[name] == 0).any() == ("weight" in name) for name in pruned.params if name != "7.bias")


@pytest.mark.parametrize("how", ["linearized", "sampled", "streamlined", "adjoint"])
def test_pruned_posterior_predicts(how):
    """A weight that is zero for certain adds nothing to any variance."""
    network = nn.Linear(3, 1)
    posterior = posterior_of(network, likelihood=Gaussian(scale=0.1))
    posterior.params["weight"].copy_(torch.tensor([[2.0, 1e-4, -1.0]]))
    x = torch.tensor([[1.0, 100.0, 1.0]])
    p = prune(posterior).predict(x, how, draws=4000 if how == "sampled" else None)
    torch.testing.assert_close(p.f_mean, 1.0 + posterior.params["bias"].expand(1, 1), atol=0.01, rtol=0)
    torch.testing.assert_close(p.f_var, torch.full((1, 1), 3 * 0.05**2), rtol=0.1, atol=0)


def test_other_covariances():
    """Correlations are left out: what counts is the variance of each weight."""
    x, y = torch.randn(40, 6), torch.randint(3, (40,))
    model = dubito.Model(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), Categorical())
    posterior = dubito.fit(model, dubito.Laplace("kronecker", check=False), (x, y))
    pruned = prune(posterior, share=0.5)
    variance = posterior.covariance.variance()
    for name, leaf in pruned.covariance.variance().items():
        torch.testing.assert_close(leaf, variance[name] * (pruned.params[name] != 0))
    small = dubito.compress(posterior, x, share=0.5, step=None, repeats=1)
    torch.testing.assert_close(small(x), pruned.predict(x, "linearized").f_mean, rtol=1e-4, atol=1e-5)


def test_refused():
    posterior = posterior_of(build("mlp")[0])
    with pytest.raises(ValueError, match="one of the two"):
        prune(posterior, threshold=1.0, share=0.5)
    with pytest.raises(ValueError, match="at least 0 and below 1"):
        prune(posterior, share=1.0)
    with pytest.raises(ValueError, match="match none of"):
        prune(posterior, threshold={"conv": 1.0})
    with pytest.raises(ValueError, match="positive number of posterior standard deviations"):
        dubito.compress(posterior, torch.zeros(1, 6), step=0.0)
    point = Point(posterior.model, posterior.params, posterior.buffers)
    with pytest.raises(TypeError, match="no mean and variance of each weight"):
        dubito.compress(point, torch.zeros(1, 6))
    assert Samples  # a set of draws is refused alike


# --- units ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Factors(Point):
    """A posterior with a score for every unit, as families with a factor for each have: inputs of matrices, filters of convolutions."""

    def units(self) -> Params:
        weights = {name: leaf for name, leaf in self.params.items() if leaf.ndim > 1}
        return {name: torch.arange(float(w.shape[1 if w.ndim == 2 else 0])) for name, w in weights.items()}

    def moments(self) -> tuple[Params, Params]:
        return dict(self.params), {name: torch.full_like(leaf, 1e-6) for name, leaf in self.params.items()}


def convolutional(padding: int = 0) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    width = (4 + padding) * (4 + padding)
    network = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 5, 3, padding=padding // 2), nn.ReLU(), nn.Flatten(), nn.Linear(5 * width, 3)
    )  # fmt: skip
    return network, torch.randn(4, 1, 8, 8)


@pytest.mark.parametrize("padding", [0, 2])
def test_units(padding):
    """Filters above the threshold go, with their biases where these would stand in the way, and inputs of matrices."""
    network, x = convolutional(padding)
    model = dubito.Model(network, Categorical())
    posterior = Factors(model, model.parameters(), model.buffers())
    small = dubito.compress(posterior, x, threshold={"0": 3.5, "2": 2.5, "5": 30.5}, step=None, repeats=1)
    full = {name: leaf.clone() for name, leaf in posterior.params.items()}
    full["0.weight"][4:], full["2.weight"][3:], full["5.weight"][:, 31:] = 0, 0, 0
    if padding:
        full["0.bias"][4:] = 0
    width = (4 + padding) ** 2
    assert [tuple(p.shape) for n, p in small.named_parameters() if "weight" in n] == [
        (4, 1, 3, 3),
        (1 if width > 30 else 2, 4, 3, 3),
        (3, 31),
    ]
    with torch.no_grad():
        torch.testing.assert_close(small(x), torch.func.functional_call(network, full, (x,)), rtol=1e-4, atol=1e-5)
    pruned = prune(posterior, threshold={"0": 3.5, "2": 2.5, "5": 30.5})
    assert bool((pruned.params["0.weight"][4:] == 0).all())
    assert pruned.how == "sampled"


def test_units_want_a_threshold():
    model = dubito.Model(convolutional()[0], Categorical())
    with pytest.raises(ValueError, match=r"quartiles .* 0.weight 0 1.25 2.5 3.75 5"):
        dubito.compress(Factors(model, model.parameters(), model.buffers()), torch.zeros(1, 1, 8, 8))


def test_thresholds_prune_what_held_out_data_do_not_miss():
    """Inputs and hidden units that the targets do not depend on go, the others stay; the allowance is kept."""
    generator = torch.Generator().manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(300, 6, generator=generator)
    with torch.no_grad():
        network[0].weight[:, 4:] = 1e-3 * torch.randn(8, 2, generator=generator)
        network[2].weight[:, 5:] = 1e-3 * torch.randn(3, 3, generator=generator)
        y = network(x).argmax(-1)
    model = dubito.Model(network, Categorical())
    mean = model.parameters()
    posterior = Posterior.diagonal(model, mean, {name: torch.full_like(leaf, 0.01) for name, leaf in mean.items()})
    pruned = {}
    for allow in (0.0, 0.3):
        pruned[allow] = prune(posterior, threshold=thresholds(posterior, (x, y), allow=allow, size=77))
        assert float((pruned[allow].params["2.weight"] == 0).sum()) >= 9
        wrong = float((torch.func.functional_call(network, pruned[allow].params, (x,)).argmax(-1) != y).double().mean())
        assert wrong <= allow
    fewer = [sum(int((leaf != 0).sum()) for leaf in p.params.values()) for p in pruned.values()]
    assert fewer[1] < fewer[0] < 83 - 20


def test_thresholds_of_units():
    network, x = convolutional()
    model = dubito.Model(network, Categorical())
    posterior = Factors(model, model.parameters(), model.buffers())
    y = network(x).argmax(-1)
    found = thresholds(posterior, (x, y), allow=0.0)
    assert set(found) == {r"^0\.weight$", r"^2\.weight$", r"^5\.weight$"}
    small = dubito.compress(posterior, x, threshold=found, step=None, repeats=1)
    with torch.no_grad():
        assert torch.equal(small(x).argmax(-1), y)
    assert small.report.parameters[1] < small.report.parameters[0]
    most = thresholds(posterior, (x, y), allow=1.0)  # whatever it costs, something stays
    assert {
        name: int(prune(posterior, threshold=most).params[name].flatten(1).any(1).sum()) for name in ("0.weight", "2.weight")
    } == {
        "0.weight": 1,
        "2.weight": 1,
    }


def test_thresholds_of_weights_that_are_certain():
    """A variance of 0 makes a ratio without end; also then something stays, and the score is worth what was allowed."""
    model = dubito.Model(nn.Linear(4, 1, bias=False), Gaussian(scale=1.0))
    mean = {"weight": torch.tensor([[0.0, 1.0, 2.0, 3.0]])}
    posterior = Posterior.diagonal(model, mean, {"weight": torch.zeros(1, 4)})
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    found = thresholds(posterior, (x, x @ mean["weight"].T + 0.1), allow=100.0)
    assert all(math.isfinite(limit) for limit in found.values())
    assert prune(posterior, threshold=found).params["weight"].any()


def test_thresholds_of_regression():
    model = dubito.Model(nn.Linear(5, 1, bias=False), dubito.Gaussian(scale=0.1))
    mean = torch.tensor([[3.0, 2.0, 1.0, 0.1, 0.01]])
    posterior = Posterior.diagonal(model, {"weight": mean}, {"weight": torch.ones(1, 5)})
    x = torch.randn(4000, 5, generator=torch.Generator().manual_seed(0))
    y = x @ mean.T + torch.randn(4000, 1, generator=torch.Generator().manual_seed(1))
    for allow, left in ((0.0, 5), (0.002, 4), (0.02, 3), (0.6, 2)):  # RMSE grows by 5e-5, .005, .42
        kept = prune(posterior, threshold=thresholds(posterior, (x, y), allow=allow)).params["weight"]
        assert int((kept != 0).sum()) in ((left, left - 1) if allow == 0 else (left,))
    with pytest.raises(ValueError, match="allow must be at least 0"):
        thresholds(posterior, (x, y), allow=-1.0)


# --- bits -------------------------------------------------------------------------------------------------------------


def test_steps():
    """The largest power of two that is at most so many standard deviations: in the mean over precisions."""
    mean = {"a": torch.tensor([1.0, -3.0, 0.0]), "b": torch.zeros(2)}
    variance = {"a": torch.tensor([0.01, 0.04, 1e-9]), "b": torch.ones(2)}
    width = (0.5 * (1 / 0.01 + 1 / 0.04)) ** -0.5
    assert bits.exponents(mean, variance) == {"a": math.ceil(-math.log2(width)), "b": 0}
    assert bits.exponents(mean, variance, step=0.25)["a"] == math.ceil(-math.log2(width / 4))
    third = {"a": torch.tensor([1.0, 0.7]) / 3}
    fine = bits.exponents(third, {"a": torch.full((2,), 1e-30)})["a"]  # no finer than float32 is
    assert torch.equal(bits.rounded(third["a"], fine)[:1], third["a"][:1])
    assert fine == 25


def test_constants_that_go_into_biases_keep_their_digits():
    """Also where all of the layer's own biases were pruned."""
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    model = dubito.Model(net, dubito.Gaussian(scale=0.1))
    mean = {name: torch.ones_like(leaf) for name, leaf in model.parameters().items()}
    mean["0.weight"][0], mean["0.bias"][0], mean["2.bias"][:] = 0.0, 0.3, 1e-4
    posterior = Posterior.diagonal(model, mean, {name: torch.full_like(leaf, 1e-4) for name, leaf in mean.items()})
    small, x = dubito.compress(posterior, torch.zeros(1, 2)), torch.ones(1, 2)
    torch.testing.assert_close(small(x), model.forward(prune(posterior).params, x, {})[0], rtol=0, atol=0.005)


def test_weights_without_variance_are_not_rounded():
    model = dubito.Model(nn.Linear(2, 1), dubito.Gaussian(scale=0.1))
    mean = {"weight": torch.tensor([[0.3, -0.2]]), "bias": torch.tensor([0.1])}
    posterior = Posterior.diagonal(model, mean, {name: torch.zeros_like(leaf) for name, leaf in mean.items()})
    small = dubito.compress(posterior, torch.zeros(1, 2))
    assert torch.equal(small(torch.eye(2)), torch.tensor([[0.4], [-0.1]]))
    assert small.steps == {}


def test_what_rounding_costs():
    """At most n s^2 / 24 nats of log density of n weights, in expectation."""
    g = torch.Generator().manual_seed(0)
    mean, sd = torch.randn(20_000, generator=g), 0.02 + 0.2 * torch.rand(20_000, generator=g)
    for step in (0.5, 2.0):
        t = bits.exponents({"w": mean}, {"w": sd.square()}, step=step)["w"]
        lost = 0.5 * ((bits.rounded(mean, t) - mean) / sd).square().mean()
        assert 0.25 * 0.95 * step**2 / 24 < lost < 1.05 * step**2 / 24


def test_width():
    assert [bits.width(torch.tensor([0.5, -2.0]), 1), bits.width(torch.zeros(3), 1), bits.width(torch.zeros(3), None)] == [
        4,
        0,
        32,
    ]


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_saved(name, tmp_path):
    """Another network of the same kind, and the file, give the same function to the last bit; rounded or not."""
    network, x = build(name)
    sparse(network, 0.5, 1)
    other, _ = build(name, seed=5)
    small = cut(network, x)
    save(small, tmp_path / "cut")
    posterior = posterior_of(network, likelihood=Bernoulli() if name == "opaque" else None)
    rounded = dubito.compress(posterior, x, threshold=0.0, repeats=1)
    assert 8 * save(rounded, tmp_path / "rounded") == rounded.report.coded
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "cut", other)(x), small(x))
        again = load(tmp_path / "rounded", other)
        assert torch.equal(again(x), rounded(x))
    assert again.steps == rounded.steps
    assert save(again, tmp_path / "again") == (tmp_path / "rounded").stat().st_size
    assert (tmp_path / "rounded").stat().st_size < (tmp_path / "cut").stat().st_size
    assert b"weight" not in (tmp_path / "cut").read_bytes()


def test_trained_further(tmp_path):
    """Weights that are on no grid any more are written as they are."""
    network, x = build("mlp")
    small = dubito.compress(posterior_of(network), x, repeats=1)
    with torch.no_grad():
        small.get_parameter("0.weight").add_(0.001 * torch.randn(small.get_parameter("0.weight").shape))
    save(copy.deepcopy(small), tmp_path / "small")
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "small", network)(x), small(x))


def flipped(data: bytes, bit: int) -> bytes:
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


@pytest.mark.parametrize(
    ("name", "value", "words"), [("x", ["float32", 2, 10**10], "asks for inputs"), ("masks", 10**10, "10000000000 masks")]
)
def test_a_file_cannot_ask_for_any_amount_of_memory(name, value, words, tmp_path, monkeypatch):
    """Also where its digest fits, as in a file that was made to do harm."""
    network, x = build("mlp")
    dumps = json.dumps
    monkeypatch.setattr(
        json, "dumps", lambda about, **options: dumps({**about, name: value} if "masks" in about else about, **options)
    )
    small = cut(network, x)
    save(small, tmp_path / "small")
    monkeypatch.undo()
    with pytest.raises(FileError, match=words):
        load(tmp_path / "small", network)


def test_files_that_cannot_be_read(tmp_path):
    network, x = build("mlp")
    path = tmp_path / "small"
    save(dubito.compress(posterior_of(network), x, repeats=1), path)
    data = path.read_bytes()
    with pytest.raises(FileError, match="made of another network"):
        load(path, nn.Linear(6, 3))
    network[1] = nn.Identity()
    with pytest.raises(FileError, match="computes something else"):
        load(path, network)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none", network)
    for broken, words in (
        (data[:-3], "checksum"),
        (data[:60] + bytes([data[60] ^ 1]) + data[61:], "checksum"),
        (b"PK\x03", "not a network"),
    ):
        path.write_bytes(broken)
        with pytest.raises(FileError, match=words):
            load(path, network)
    for bit in range(8 * 27, 8 * 39):  # the lengths in the header
        path.write_bytes(flipped(data, bit))
        with pytest.raises(FileError, match="checksum"):
            load(path, network)
    path.write_bytes(data[:10] + bytes([9]) + data[11:])
    with pytest.raises(FileError, match="upgrade"):
        load(path, network)
    with pytest.raises(TypeError, match="compress or compression.cut"):
        save(network, path)  # pyright: ignore
    assert [file.name for file in tmp_path.iterdir()] == ["small"]


# --- the whole way, on real data --------------------------------------------------------------------------------------


def test_digits(tmp_path):
    """A trained network gives up most of its bits and little of its accuracy."""
    data = digits(seed=0)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10))
    model = dubito.Model(network, Categorical(), dubito.priors.Normal(scale=0.3))
    train, test = (data.x_train, data.y_train), (data.x_test, data.y_test)
    trained = dubito.fit(model, dubito.MAP(epochs=15, learning_rate=0.01), train, batch_size=128)
    posterior = dubito.fit(model, dubito.Laplace("diagonal", check=False), train, start=trained)
    before = {name: leaf.clone() for name, leaf in network.state_dict().items()}
    small = dubito.compress(posterior, data.x_test, share=0.5, step=0.25, data=test, repeats=3)
    report = small.report
    assert all(torch.equal(leaf, before[name]) for name, leaf in network.state_dict().items())
    assert report.parameters[0] == 64 * 40 + 40 + 400 + 10 == report.numbers[0]
    assert report.parameters[1] == sum(p.numel() for p in small.parameters()) < report.parameters[0]
    assert report.nonzero[1] == sum(int((p != 0).sum()) for p in small.parameters()) <= 0.5 * report.parameters[0]
    assert report.operations[0] == 64 * 40 + 400 > report.operations[1]
    assert report.measure == "accuracy"
    assert report.score is not None
    assert report.score[0] > 0.95
    assert report.score[1] > report.score[0] - 0.015
    accuracy = float((small(data.x_test).argmax(1) == data.y_test).float().mean())
    assert report.score[1] == pytest.approx(accuracy)
    assert report.rate_coded > 1.1 * report.rate_bits > report.rate_cut > 1
    assert save(small, tmp_path / "digits") * 8 == report.coded
    shown = str(report)
    for words in ("parameters", "not zero", "coded in a file", "multiply-adds", "accuracy", "before", "after"):
        assert words in shown
    fine = dubito.compress(posterior, data.x_test, threshold=0.0, step=0.01, repeats=1)
    torch.testing.assert_close(fine(data.x_test), posterior.predict(data.x_test).f_mean, rtol=0, atol=0.02)


def test_regression():
    """With a learned noise, statistics of a batch norm, and a part of the network that is not Bayesian."""
    torch.manual_seed(0)
    x = torch.randn(100, 3)
    network = nn.Sequential(nn.Linear(3, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 1))
    model = dubito.Model(network, Gaussian(), only="3|0.weight")
    data = (x, x[:, :1] + 0.1 * torch.randn(100, 1))
    trained = dubito.fit(model, dubito.MAP(epochs=100, learning_rate=0.03), data)
    mean = {name: leaf for name, leaf in trained.params.items() if ":" not in name}
    variance = {name: torch.full_like(leaf, 0.01**2) for name, leaf in mean.items()}
    posterior = Posterior.diagonal(model, trained.params, variance, trained.buffers)
    small = dubito.compress(posterior, x, threshold=1.0, data=data, repeats=1)
    assert small.report.measure == "RMSE"
    assert small.report.score[1] < 1.2 * small.report.score[0] < 0.3
    assert small.report.numbers[0] == small.report.parameters[0] + 40
    assert set(small.steps) == {"0.weight", "3.weight", "3.bias"} | ({"0.bias"} & set(small.steps))
    assert compression.cut(network, x).report is None


@pytest.mark.parametrize("name", list(NETWORKS))
def test_small_is_the_pruned_network(name):
    """Also where all weights of an output are gone: its bias is not, and is the answer."""
    network, x = build(name)[:2]
    posterior = posterior_of(network)
    pruned = prune(posterior, share=0.9)
    small = dubito.compress(posterior, x, share=0.9, step=None, repeats=1)
    with torch.no_grad():
        f = torch.func.functional_call(network, pruned.params, (x,))
        torch.testing.assert_close(small(x), f, rtol=1e-4, atol=1e-5)


def test_an_intercept_stays():
    model = dubito.Model(nn.Linear(2, 1), Gaussian(scale=0.1))
    mean, variance = {"weight": torch.full((1, 2), 0.01), "bias": torch.tensor([5.0])}, {"weight": torch.ones(1, 2)}
    posterior = Posterior.diagonal(model, mean, variance | {"bias": torch.full((1,), 1e-4)})
    assert dubito.compress(posterior, torch.zeros(1, 2))(torch.zeros(1, 2)).item() == pytest.approx(5.0, abs=0.01)


@pytest.mark.parametrize("shape", ["laplace", "logistic", "uniform"])
def test_other_shapes_have_moments_to_decide_by(shape):
    model = dubito.Model(nn.Linear(3, 2), Categorical())
    x, y = torch.randn(30, 3), torch.randint(2, (30,))
    posterior = dubito.fit(model, dubito.Variational(dubito.families.Factorized(shape), epochs=1, init_scale=0.3), (x, y))
    mean, variance = posterior.family.weight_moments(posterior.leaves)
    drawn = posterior.sample(3000, torch.Generator().manual_seed(0))
    for leaf in mean:
        torch.testing.assert_close(drawn[leaf].mean(0), mean[leaf], atol=0.05, rtol=0)
        torch.testing.assert_close(drawn[leaf].var(0), variance[leaf], rtol=0.2, atol=0)
    assert dubito.compress(posterior, x).report.parameters[0] == 8


def test_what_has_no_moments_is_refused_with_advice():
    model = dubito.Model(nn.Linear(3, 2), Categorical())
    data = torch.randn(30, 3), torch.randint(2, (30,))
    posterior = dubito.fit(model, dubito.Variational(dubito.families.Factorized("cauchy"), epochs=1), data)
    with pytest.raises(TypeError, match="use a Gaussian one"):
        dubito.compress(posterior, data[0])


def test_binary_weights_are_compressed():
    model = dubito.Model(nn.Linear(3, 2, bias=False), Categorical(), dubito.priors.Bernoulli(values=(-1.0, 1.0)))
    data = torch.randn(30, 3), torch.randint(2, (30,))
    posterior = dubito.fit(model, dubito.Variational(dubito.families.Binary((-1.0, 1.0)), epochs=1), data)
    assert dubito.compress(posterior, data[0], threshold=0.0).report.parameters == (6, 6)


def test_held_out_data_may_be_a_loader():
    x, y = torch.randn(40, 3), torch.randint(2, (40,))
    posterior = posterior_of(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    assert thresholds(posterior, loader, allow=0.1) == thresholds(posterior, (x, y), allow=0.1)
    reports = [dubito.compress(posterior, x, data=data, repeats=1).report for data in (loader, (x, y), (x.numpy(), y.numpy()))]
    assert len({report.score for report in reports}) == 1
