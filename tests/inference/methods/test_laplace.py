"""The Laplace method: what it collects, what it warns of and refuses, and what it leaves alone."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import dubito
from curvature.networks import DOUBLE, Net, build, ggn, gradients, hessian, numbers, targets
from curvature.test_evidence import STRUCTURES, Linear, every, fitted, problem
from dubito import Categorical, Gaussian, HeteroscedasticGaussian, Laplace, Model
from dubito.data import digits
from dubito.inference.plan import _Tracked
from dubito.priors import Normal, Prior
from dubito.tensors import tree
from dubito.tensors.covariances import Kronecker
from dubito.testing import check_same, snapshot


def perceptron(outputs: int = 3, prior=None, n: int = 12) -> tuple[Model, tuple[torch.Tensor, torch.Tensor]]:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    model, x = Model(net, Categorical(), prior or Normal(scale=1.0)), numbers(n, 3)
    return model, (x, targets(model, model.parameters(), x))


def precision(posterior) -> torch.Tensor:
    """The curvature again, from a posterior with prior precision 1."""
    return torch.linalg.inv(posterior.covariance.dense()) - torch.eye(posterior.covariance.size, dtype=DOUBLE)


# --- what it collects ------------------------------------------------------------------------------------------------


@every
def test_batches_of_any_size_and_order_give_the_same(name):
    model, data = problem(Gaussian())
    start = {**model.parameters(), "likelihood:log_scale": torch.tensor([-0.4], dtype=DOUBLE)}
    whole = fitted(model, STRUCTURES[name], data, batch_size=10, start=start)
    for size, seed in ((1, 0), (3, 1), (7, 2)):
        parts = fitted(model, STRUCTURES[name], data, batch_size=size, seed=0 if name == "lowrank" else seed, start=start)
        torch.testing.assert_close(parts.covariance.dense(), whole.covariance.dense(), rtol=1e-7, atol=1e-10)
        torch.testing.assert_close(parts.log_evidence(), whole.log_evidence())
    several = fitted(model, STRUCTURES[name], data, batch_size=3, accumulate=2, start=start)
    torch.testing.assert_close(several.covariance.dense(), whole.covariance.dense(), rtol=1e-7, atol=1e-10)


class Stream(IterableDataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __iter__(self):
        yield from zip(self.x, self.y, strict=True)


@every
def test_data_are_counted(name):
    """A loader that drops its last batch has so many data; a stream stands for as many as it is said to."""
    model, (x, y) = problem(Gaussian())
    start = {**model.parameters(), "likelihood:log_scale": torch.tensor([-0.4], dtype=DOUBLE)}
    dropped = fitted(model, STRUCTURES[name], DataLoader(TensorDataset(x, y), batch_size=4, drop_last=True), start=start)
    exact = fitted(model, STRUCTURES[name], (x[:8], y[:8]), start=start)
    torch.testing.assert_close(dropped.covariance.dense(), exact.covariance.dense(), rtol=1e-7, atol=1e-10)
    twice = fitted(model, STRUCTURES[name], (torch.cat([x, x]), torch.cat([y, y])), start=start)
    stream = fitted(model, STRUCTURES[name], DataLoader(Stream(x, y), batch_size=5), n_data=20, start=start)
    torch.testing.assert_close(stream.covariance.dense(), twice.covariance.dense(), rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(stream.log_evidence(), twice.log_evidence())


@every
def test_a_temperature_scales_the_covariance(name):
    model, data = problem(Gaussian())
    warm, cold = (fitted(model, STRUCTURES[name], data, temperature=t) for t in (1.0, 0.25))
    torch.testing.assert_close(cold.covariance.dense(), 0.25 * warm.covariance.dense())
    torch.testing.assert_close(cold.predict(data[0]).f_var, 0.25 * warm.predict(data[0]).f_var)


@pytest.mark.parametrize("structure", ["dense", "diagonal"])
@pytest.mark.parametrize("kind", ["ggn", "empirical", "hessian"])
def test_kinds_of_curvature(kind, structure):
    model, (x, y) = perceptron()
    params = model.parameters()
    slopes = gradients(model, params, x, y)
    exact = {"ggn": ggn(model, params, x, y), "empirical": slopes.mT @ slopes, "hessian": hessian(model, params, x, y)}[kind]
    method = Laplace(structure, kind, damping=20.0, check=False, optimize_evidence=False)
    found = torch.linalg.inv(dubito.fit(model, method, (x, y), batch_size=5).covariance.dense())
    exact = exact + 21 * torch.eye(len(exact))
    torch.testing.assert_close(found, exact if structure == "dense" else torch.diag(exact.diag()))


def test_the_fisher_of_drawn_labels_tends_to_the_ggn():
    model, (x, y) = perceptron()
    exact = ggn(model, model.parameters(), x, y)
    many = x.repeat(300, 1), y.repeat(300)
    a, b, c = (fitted(model, Laplace("dense", "fisher"), many, n_data=12, seed=s) for s in (0, 0, 1))
    assert torch.equal(a.covariance.dense(), b.covariance.dense())
    assert not torch.equal(a.covariance.dense(), c.covariance.dense())
    assert (precision(a) - exact).norm() < 0.1 * exact.norm()


def test_the_hessian_of_more_weights_than_fit_at_a_time():
    net = nn.Sequential(nn.Linear(9, 20), nn.Tanh(), nn.Linear(20, 4)).double()
    model, x = Model(net, Categorical(), Normal()), numbers(4, 9)
    y = targets(model, model.parameters(), x)
    assert tree.size(model.parameters()) > 256
    method = Laplace("dense", "hessian", damping=50.0, check=False, optimize_evidence=False)
    found = torch.linalg.inv(dubito.fit(model, method, (x, y)).covariance.dense())
    torch.testing.assert_close(found, hessian(model, model.parameters(), x, y) + 51 * torch.eye(len(found)))


def test_low_rank_finds_the_main_directions():
    net, x = build("perceptron")
    model, x = Model(net, Categorical(), Normal(scale=1.0)), numbers(40, 3)
    y = targets(model, model.parameters(), x)
    values, vectors = torch.linalg.eigh(ggn(model, model.parameters(), x, y))
    posterior = fitted(model, Laplace("lowrank", rank=5), (x, y), batch_size=9)
    top = (vectors[:, -5:] * values[-5:]) @ vectors[:, -5:].mT
    found, exact = precision(posterior), ggn(model, model.parameters(), x, y)
    apart = ~torch.eye(len(found), dtype=torch.bool)
    assert (found - top)[apart].norm() < 1e-2 * top.norm()
    torch.testing.assert_close(found.diagonal(), exact.diagonal())  # outside the directions, weight by weight
    smaller = Laplace("lowrank", rank=5, optimize_evidence=False)
    assert float(fitted(model, smaller, (x, y)).log_evidence()) < float(fitted(model, Laplace("dense"), (x, y)).log_evidence())
    whole = fitted(model, Laplace("lowrank", rank=100), (x, y), batch_size=9)
    torch.testing.assert_close(precision(whole), ggn(model, model.parameters(), x, y), rtol=1e-6, atol=1e-8)
    hess = fitted(model, Laplace("lowrank", "hessian", rank=100, clip=True), (x, y), batch_size=9)
    values, vectors = torch.linalg.eigh(hessian(model, model.parameters(), x, y))
    torch.testing.assert_close(precision(hess), (vectors * values.clamp_min(0)) @ vectors.mT, rtol=1e-6, atol=1e-7)


def test_low_rank_is_no_worse_than_diagonal():
    """Without the curvature outside its directions it made 38 to 47 % of 96 % right, and its evidence was above all others."""
    split = digits()
    train, held = (split.x_train[:600], split.y_train[:600]), (split.x_test, split.y_test)
    torch.manual_seed(0)
    model = Model(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)), Categorical())
    trained = dubito.fit(model, dubito.MAP(epochs=100, learning_rate=0.01), train)
    fits = {s: dubito.fit(model, Laplace(s, check=False), train, start=trained) for s in ("diagonal", "lowrank", "dense")}
    scores = {s: float(-p.predict(held[0]).log_prob(held[1]).mean()) for s, p in fits.items()}
    assert scores["lowrank"] < scores["diagonal"]
    accuracy = {s: float((p.predict(held[0]).mean.argmax(1) == held[1]).float().mean()) for s, p in fits.items()}
    assert accuracy["lowrank"] > accuracy["dense"] - 0.01
    evidence = {s: float(p.log_evidence()) for s, p in fits.items()}
    assert evidence["diagonal"] < evidence["lowrank"] < evidence["dense"]


@pytest.mark.parametrize("rank", [1, 3, 8, 20])
def test_the_evidence_of_a_low_rank_is_never_above_the_whole(rank):
    net, x = build("perceptron")
    for _ in range(5):
        model, x = Model(net, Categorical(), Normal(scale=1.0)), 2 * numbers(30, 3)
        y = targets(model, model.parameters(), x)
        low, dense = (fitted(model, Laplace(s, rank=rank, check=False), (x, y)) for s in ("lowrank", "dense"))
        for precision in (1e-3, 1.0, 30.0):
            assert float(low.log_evidence(precision)) <= float(dense.log_evidence(precision)) + 1e-6


def test_low_rank_with_fewer_data_than_directions():
    """Then some directions have no curvature at all, and the evidence has slopes all the same."""
    net = nn.Linear(12, 1).double()
    x, y = numbers(3, 12), numbers(3, 1)
    posterior = dubito.fit(Model(net, Gaussian()), Laplace("lowrank", rank=10, check=False, optimize_noise=True), (x, y))
    assert torch.isfinite(posterior.log_evidence())
    assert torch.isfinite(posterior.params["likelihood:log_scale"]).all()


def test_corrected_eigenvalues_by_their_definition():
    """The mean square, along the eigenvectors of the Kronecker factors, of the gradients of every example and cotangent."""
    model, (x, y) = perceptron(n=20)
    params = model.parameters()
    plain, corrected = (fitted(model, Laplace(corrected=c), (x, y), batch_size=6) for c in (False, True))
    exact = ggn(model, params, x, y)
    errors = []
    start = 0
    for before, block in zip(plain.covariance.blocks, corrected.covariance.blocks, strict=True):
        assert isinstance(block, Kronecker)
        size = block.size
        inner, (outputs, inputs) = exact[start : start + size, start : start + size], block.values.shape
        order = torch.arange(size).reshape(outputs, inputs)
        order = torch.cat([order[:, :-1].flatten(), order[:, -1]])
        rotation = torch.kron(block.left, block.right)[order]
        torch.testing.assert_close(block.values.flatten(), (rotation.mT @ inner @ rotation).diag())
        assert torch.equal(block.left, before.left)
        curvatures = [torch.linalg.inv(b.dense()) - torch.eye(size, dtype=DOUBLE) for b in (before, block)]
        errors.append([(c - inner).norm().item() for c in curvatures])
        assert abs((curvatures[1] - inner).trace()) < 1e-8 * inner.trace(), "the trace is that of the GGN"
        start += size
    assert all(after <= before for before, after in errors)
    assert any(after < 0.99 * before for before, after in errors)


def test_corrected_eigenvalues_with_a_bias_of_its_own_precision():
    model, (x, y) = perceptron(prior=Normal(scale={"weight": 0.5, "bias": 3.0}))
    posterior = fitted(model, Laplace(corrected=True), (x, y), batch_size=6)
    exact = ggn(model, model.parameters(), x, y)
    block = posterior.covariance.blocks[0]
    matrix = torch.linalg.inv(block.dense()) - torch.diag(torch.tensor([4.0] * 12 + [1 / 9] * 4, dtype=DOUBLE))
    assert (matrix - exact[:16, :16]).norm() < exact[:16, :16].norm()
    torch.testing.assert_close((matrix * block.dense()).sum().item(), (exact[:16, :16] * block.dense()).sum().item())
    assert torch.isfinite(posterior.log_evidence())


@pytest.mark.parametrize("by", ["variance", "magnitude"])
def test_a_subnetwork(by):
    model, (x, y) = perceptron(n=30)
    params = model.parameters()
    posterior = fitted(model, Laplace("dense", subnetwork=6, subnetwork_by=by), (x, y), batch_size=7)
    exact = ggn(model, params, x, y)
    score = 1 / (exact.diag() + 1) if by == "variance" else tree.flatten(params).abs()
    index = score.topk(6).indices.sort().values
    found = posterior.covariance.dense()
    whole = torch.zeros_like(exact)
    whole[index.unsqueeze(1), index] = torch.linalg.inv(exact[index][:, index] + torch.eye(6))
    torch.testing.assert_close(found, whole)
    drawn = tree.flatten(posterior.sample(5), stacked=True) != tree.flatten(params)
    assert torch.equal(drawn.all(0).nonzero().flatten(), index)
    everything = fitted(model, Laplace("dense", subnetwork=tree.size(params), subnetwork_by=by), (x, y))
    torch.testing.assert_close(precision(everything), exact)


@pytest.mark.parametrize(("subset", "names"), [("dec", ["enc.weight", "dec.bias"]), ("enc", ["enc.weight", "enc.bias"])])
def test_a_subset_has_weights_by_any_of_their_names(subset, names):
    """A decoder's matrix that is the encoder's is called after the encoder."""
    net = Net(lambda s, x: s.dec(s.enc(x).tanh()), enc=nn.Linear(3, 3), dec=nn.Linear(3, 3)).double()
    net.dec.weight = net.enc.weight
    model, x = Model(net, Categorical(), Normal(scale=1.0)), numbers(12, 3)
    y = targets(model, model.parameters(), x)
    posterior = fitted(model, Laplace("dense", subset=subset), (x, y))
    assert sorted(posterior.covariance.shapes) == sorted(names)
    torch.testing.assert_close(precision(posterior), ggn(model, model.parameters(), x, y, posterior.covariance.shapes))


def test_subsets():
    model, (x, y) = perceptron()
    assert list(fitted(model, Laplace(subset="last_layer"), (x, y)).covariance.shapes) == ["2.weight", "2.bias"]
    assert list(fitted(model, Laplace("dense", subset="bias"), (x, y)).covariance.shapes) == ["0.bias", "2.bias"]
    head = fitted(model, Laplace("dense", subset="last_layer"), (x, y))
    assert list(head.params) == list(model.parameters()), "what is left out stays a point"
    exact = ggn(model, model.parameters(), x, y, ["2.weight", "2.bias"])
    torch.testing.assert_close(precision(head), exact)
    only = fitted(Model(model.network, Categorical(), Normal(scale=1.0), only="^2"), Laplace("dense"), (x, y))
    torch.testing.assert_close(only.covariance.dense(), head.covariance.dense())


# --- the prior and the noise -----------------------------------------------------------------------------------------


def test_a_prior_that_is_given_is_kept_and_one_that_is_not_is_learned():
    model, data = perceptron(prior=Normal(scale=0.5))
    assert {float(p) for p in dubito.fit(model, Laplace(check=False), data).prior_precision.values()} == {4.0}
    free = Model(model.network, Categorical())
    learned = dubito.fit(free, Laplace(check=False), data)
    layers = {n: float(p) for n, p in learned.prior_precision.items()}
    assert layers["0.weight"] == layers["0.bias"] != layers["2.weight"] == layers["2.bias"]
    for groups, count in (("one", 1), ("layer", 2), ("parameter", 4)):
        found = dubito.fit(free, Laplace(check=False, prior_groups=groups), data)
        assert len({float(p) for p in found.prior_precision.values()}) == count
    fixed = dubito.fit(free, Laplace(check=False, optimize_evidence=False), data)
    assert {n: float(p) for n, p in fixed.prior_precision.items()} == pytest.approx(
        {n: free.prior.scale_of(n) ** -2 for n in learned.prior_precision}  # pyright: ignore[reportAttributeAccessIssue]
    )
    assert fixed.log_evidence() < learned.log_evidence()
    damped = dubito.fit(model, Laplace("dense", damping=2.0, check=False), data)
    assert {float(p) for p in damped.prior_precision.values()} == {6.0}


def test_a_prior_centered_on_known_weights():
    """Exact for a linear model: the mean, the covariance and the evidence are those of ridge regression on y less the known map."""
    torch.manual_seed(0)
    network = nn.Linear(2, 1, bias=False).double()
    known = {"weight": torch.tensor([[1.0, -2.0]], dtype=torch.float64)}
    x = torch.randn(20, 2, dtype=torch.float64)
    y = x @ torch.tensor([[1.5], [-2.5]], dtype=torch.float64) + 0.1 * torch.randn(20, 1, dtype=torch.float64)
    model = Model(network, Gaussian(scale=0.1), dubito.priors.Centered(known, Normal(scale=0.3)))
    precision = x.T @ x / 0.01 + torch.eye(2, dtype=torch.float64) / 0.09
    mean = known["weight"] + torch.linalg.solve(precision, x.T @ (y - x @ known["weight"].T) / 0.01).T
    posterior = dubito.fit(model, Laplace("dense"), (x, y), start={"weight": mean})
    torch.testing.assert_close(posterior.covariance.dense(), precision.inverse())
    marginal = torch.distributions.MultivariateNormal(
        (x @ known["weight"].T).flatten(), 0.09 * x @ x.T + 0.01 * torch.eye(20, dtype=torch.float64)
    )
    torch.testing.assert_close(posterior.log_evidence(), marginal.log_prob(y.flatten()))
    learned = Model(network, Gaussian(scale=0.1), dubito.priors.Centered(known))
    found = dubito.fit(learned, Laplace("dense", check=False), (x, y), start={"weight": mean}).prior_precision
    assert float(next(iter(found.values()))) ** -0.5 == pytest.approx(0.5, abs=0.02)  # how far the weights are from what is known


def test_the_noise_is_learned_on_demand():
    line = Linear(n=40)
    start = {
        **line.start(torch.ones(2, 4, dtype=DOUBLE), torch.ones(2, dtype=DOUBLE)),
        "likelihood:log_scale": torch.tensor([1.5]).double(),
    }
    model = Model(line.net(), Gaussian(), Normal(scale=1.0))
    kept = dubito.fit(model, Laplace(check=False), (line.x, line.y), start=start)
    learned = dubito.fit(model, Laplace(check=False, optimize_noise=True), (line.x, line.y), start=start)
    assert kept.params["likelihood:log_scale"] == 1.5
    residual = (line.y - kept.predict(line.x).mean).pow(2).mean().sqrt()
    assert learned.params["likelihood:log_scale"].exp().item() == pytest.approx(residual.item(), rel=0.1)
    assert {float(p) for p in learned.prior_precision.values()} == {1.0}


# --- warnings --------------------------------------------------------------------------------------------------------


def test_a_network_that_is_not_trained_is_told_of_with_the_number():
    torch.manual_seed(0)
    x = numbers(200, 3)
    model = Model(nn.Linear(3, 1).double(), Gaussian(scale=0.1), Normal(scale=1.0))
    y = 3 * x[:, :1] + 0.1 * numbers(200, 1)
    with pytest.warns(UserWarning, match="not at an optimum") as caught:
        dubito.fit(model, Laplace("dense"), (x, y))
    import re

    design = torch.cat([x, torch.ones(200, 1)], 1)
    matrix = design.mT @ design / 0.01 + torch.eye(4)
    params = model.parameters()
    away = torch.linalg.solve(matrix, design.mT @ y / 0.01).flatten() - torch.cat([params["weight"].flatten(), params["bias"]])
    rise = 0.5 * away @ matrix @ away  # a quadratic function: exactly what the log joint can rise by
    number = float(re.search(r"rise by about ([\d.e+]+)", str(caught[0].message))[1])
    assert number == pytest.approx(rise.item(), rel=0.01)
    assert "Laplace(check=False)" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dubito.fit(model, Laplace("dense", check=False), (x, y))


@pytest.mark.parametrize("structure", ["dense", "kronecker", "diagonal", "lowrank"])
def test_a_trained_model_is_not_warned_of(structure):
    line = Linear(n=60)
    start = line.start(torch.ones(2, 4, dtype=DOUBLE), torch.full((2,), 0.4, dtype=DOUBLE))
    for prior in (Normal(scale=1.0), Normal()):
        dubito.fit(Model(line.net(), Gaussian(scale=0.4), prior), Laplace(structure), (line.x, line.y), start=start, batch_size=7)


def test_a_trained_network_with_padding_is_not_warned_of():
    """The row of the padding is never trained, and so never at an optimum."""
    torch.manual_seed(0)
    net = Net(lambda s, x: s.o(s.e(x).mean(1)), e=nn.Embedding(7, 3, padding_idx=0), o=nn.Linear(3, 2)).double()
    with torch.no_grad():
        net.e.weight[0] = 2.0
    x = torch.randint(7, (200, 5)) * (torch.arange(5) < 3)
    model = Model(net, Categorical(), Normal(scale=1.0))
    trained = dubito.fit(model, dubito.MAP(epochs=300, learning_rate=0.02), (x, (x[:, 0] > 3).long()), batch_size=200)
    dubito.fit(model, Laplace("dense"), (x, (x[:, 0] > 3).long()), start=trained)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(structure="full"), "structure must be one of 'kronecker', 'diagonal', 'lowrank', 'dense'; got 'full'"),
        (dict(curvature="kfac"), "curvature must be one of 'ggn', 'fisher', 'empirical', 'hessian'; got 'kfac'"),
        (dict(prior_groups="weight"), "prior_groups must be one of 'layer', 'one', 'parameter'"),
        (dict(shared="sum"), "shared must be one of 'expand', 'reduce'"),
        (dict(subnetwork_by="size"), "subnetwork_by must be one of 'variance', 'magnitude'"),
        (dict(curvature="hessian"), "a Hessian has no Kronecker form"),
        (dict(structure="lowrank", curvature="fisher"), "low-rank structure is of the exact curvature"),
        (dict(structure="dense", corrected=True), "corrected=True corrects the eigenvalues of structure='kronecker'"),
        (dict(shared="reduce", corrected=True), "in its expand form"),
        (dict(corrected=True, prior_groups="parameter"), "one precision for a layer's weight and bias"),
        (dict(subnetwork=3), "structure='dense'"),
        (dict(structure="dense", subnetwork=0), "k >= 1"),
        (dict(structure="dense", subnetwork=3, curvature="hessian"), "not for curvature='hessian'"),
        (dict(damping=-1.0), "damping must be at least 0"),
        (dict(draws=-1), "draws must be at least 0"),
        (dict(rank=0), "rank must be at least 1"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        Laplace(**options)


class Sparse(Prior):
    def log_prob(self, params):
        return -sum(leaf.abs().sum() for leaf in params.values())

    def sample(self, like, generator=None):
        return like


def test_what_cannot_be_fitted_is_told_before_any_data_are_seen():
    model, data = perceptron()
    seen = []

    class Counting(list):
        def __iter__(self):
            seen.append(1)
            return super().__iter__()

    batches = Counting([data])
    cases = [
        (replace(model, prior=Sparse()), Laplace(), "or an earlier posterior; got a Sparse"),
        (model, Laplace(subset="decoder"), r"subset='decoder' matches no Bayesian parameter; there are \['0.weight'"),
        (model, Laplace("dense", subnetwork=1000), "a subnetwork of 1000 weights is more than the 31 there are"),
        (
            Model(nn.Bilinear(3, 3, 3).double(), Categorical(), Normal(scale=1.0), split=lambda b: ((b[0], b[0]), b[1])),
            Laplace(subset="last_layer"),
            "last layer is not a linear or convolutional one: name its weights with subset=",
        ),
    ]
    for wrong, method, message in cases:
        seen.clear()
        with pytest.raises(ValueError, match=message):
            dubito.fit(wrong, method, batches, n_data=12)
        assert len(seen) <= 1, "only the first batch"


@pytest.mark.filterwarnings("ignore:The outputs of some examples depend on the others in their batch")  # which is so
def test_batch_statistics_are_refused():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3)).double()
    for method in STRUCTURES.values():
        with pytest.raises(ValueError, match="BatchNorm layer uses the statistics of the batch"):
            fitted(Model(net, Categorical()), method, perceptron()[1])


def test_an_indefinite_hessian_is_told_with_its_spectrum():
    model, (x, y) = perceptron(outputs=2)
    model = Model(model.network, HeteroscedasticGaussian(), Normal(scale=10.0))
    y = numbers(12, 1) + 5
    values = torch.linalg.eigvalsh(hessian(model, model.parameters(), x, y)) + 0.01
    assert values[0] < 0
    for structure in ("dense", "diagonal"):
        with pytest.raises(ValueError, match="not positive definite") as caught:
            fitted(model, Laplace(structure, "hessian"), (x, y))
        if structure == "dense":
            assert f"{int((values <= 0).sum())} of its {len(values)} eigenvalues" in str(caught.value)
            assert f"smallest is {values[0]:.3g} and the largest {values[-1]:.3g}" in str(caught.value)
        assert "curvature='ggn'" in str(caught.value)
    with pytest.raises(ValueError, match="negative curvature in its main directions, down to -"):
        fitted(model, Laplace("lowrank", "hessian"), (x, y))
    for method in (Laplace("dense", "hessian", clip=True), Laplace("dense", "hessian", damping=float(-2 * values[0]))):
        assert torch.isfinite(fitted(model, method, (x, y)).logdet())
    clipped = fitted(model, Laplace("dense", "hessian", clip=True), (x, y))
    smallest = torch.linalg.eigvalsh(torch.linalg.inv(clipped.covariance.dense()))[0]
    assert smallest.item() == pytest.approx(0.01, rel=1e-6)


def test_a_precision_for_each_weight_is_for_diagonal_and_dense_structures():
    model, data = perceptron()
    each = {"0.weight": torch.rand(4, 3, dtype=DOUBLE) + 0.5}
    kronecker = fitted(model, Laplace(), data)
    for call in (kronecker.with_prior, kronecker.log_evidence):
        with pytest.raises(ValueError, match="one prior precision for a layer's weight.*structure='diagonal' or 'dense'"):
            call(each)
    for structure in ("diagonal", "dense", "lowrank"):
        assert torch.isfinite(fitted(model, Laplace(structure), data).with_prior(each).log_evidence())


# --- what is left alone ----------------------------------------------------------------------------------------------


class Fragile(nn.Module):
    """With statistics, a mode and a way to fail."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)).double()
        self.left = 10**9

    def forward(self, x):
        self.left -= 1
        if self.left < 0:
            raise ArithmeticError("enough")
        return self.inner(x)


@every
def test_nothing_of_the_users_changes_also_when_the_network_raises(name):
    model = Model(Fragile(), Categorical(), Normal(scale=1.0))
    data = perceptron()[1]
    model.network.train()
    model.network.inner[1].eval()
    model.network(data[0]).sum().backward()
    others = [numbers(3 + calls, 3) for calls in range(8)]
    before = snapshot(model)
    posterior = fitted(model, STRUCTURES[name], data, batch_size=5)
    posterior.predict(data[0])
    posterior.joint(data[0])
    posterior.sample_functions(data[0], 2)
    check_same(before, snapshot(model))
    for calls in (0, 1, 2, 4, 6):
        model.network.left = calls
        with pytest.raises(ArithmeticError, match="enough"):
            fitted(model, STRUCTURES[name], data, batch_size=2)
        for call in (posterior.predict, posterior.joint, lambda x: posterior.sample_functions(x, 3)):
            model.network.left = 0
            with pytest.raises(ArithmeticError, match="enough"):
                call(others[calls])
        check_same(before, snapshot(model))


@every
def test_the_same_seed_gives_the_same_bits(name):
    model, data = problem(Categorical())
    a, b = (fitted(model, STRUCTURES[name], data, batch_size=4, seed=3) for _ in range(2))
    assert torch.equal(a.covariance.dense(), b.covariance.dense())
    assert torch.equal(a.predict(data[0]).mean, b.predict(data[0]).mean)


@every
def test_a_run_that_was_stopped_goes_on(name, tmp_path):
    model, data = problem(Gaussian())
    whole = fitted(model, STRUCTURES[name], data, batch_size=3)
    fitted(model, STRUCTURES[name], data, batch_size=3, checkpoint=tmp_path, callbacks=[lambda event: event.step == 3])
    again = fitted(model, STRUCTURES[name], data, batch_size=3, checkpoint=tmp_path, resume=True)
    assert torch.equal(again.covariance.dense(), whole.covariance.dense())
    assert torch.equal(again.log_evidence(), whole.log_evidence())


def test_a_stochastic_network_is_taken_in_eval_mode():
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 3)).double().train()
    model, data = Model(net, Categorical(), Normal(scale=1.0)), perceptron()[1]
    posterior = fitted(model, Laplace("dense"), data)
    torch.testing.assert_close(precision(posterior), ggn(model, model.parameters(), *data))


# --- a network that was trained elsewhere ----------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["kronecker", "diagonal", "dense", "lowrank"])
def test_a_noise_that_nobody_has_given_is_that_of_the_residuals(structure):
    """A trained network alone does not say what its noise is, and the spread of the targets would be far too much."""
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(), numbers(30, 3)
    y = net(x).detach() + 0.1 * numbers(30, 1)
    model, method = Model(net, Gaussian(), Normal(scale=1.0)), Laplace(structure, check=False)
    noise = (net(x) - y).pow(2).mean().sqrt().detach()
    for size in (4, 30):
        found = dubito.fit(model, method, (x, y), batch_size=size)
        torch.testing.assert_close(found.params["likelihood:log_scale"].exp().squeeze(), noise)
    given = dubito.fit(model, method, (x, y), start={**model.parameters(), "likelihood:log_scale": noise.log().reshape(1)})
    torch.testing.assert_close(found.covariance.dense(), given.covariance.dense(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found.log_evidence(), given.log_evidence())


def test_several_noises_that_nobody_has_given():
    net, x = nn.Linear(3, 2).double(), numbers(30, 3)
    y = net(x).detach() + numbers(30, 2) * torch.tensor([0.1, 0.5], dtype=DOUBLE)
    found = dubito.fit(Model(net, Gaussian(outputs=2)), Laplace(check=False), (x, y))
    torch.testing.assert_close(found.params["likelihood:log_scale"].exp(), (net(x) - y).pow(2).mean(0).sqrt().detach())


@pytest.mark.parametrize("method", [Laplace("dense", "hessian"), Laplace("dense", "empirical")])
def test_where_the_residuals_cannot_tell_the_noise_it_has_to_be_given(method):
    model = Model(nn.Linear(3, 1).double(), Gaussian())
    with pytest.raises(ValueError, match="the noise is learned, and here it cannot be taken from the residuals: give start="):
        dubito.fit(model, method, (numbers(9, 3), numbers(9, 1)))


def test_examples_cannot_be_weighed_by_an_ensemble_of_them():
    with pytest.raises(ValueError, match="Laplace takes all examples as they are: leave out bagging"):
        dubito.Ensemble(Laplace(), 2, bagging=True)


def test_damping_stays_where_the_evidence_sets_the_prior():
    model, data = perceptron(prior=Normal())
    free, damped = (dubito.fit(model, Laplace("dense", damping=d, check=False), data) for d in (0.0, 50.0))
    assert {float(p) for p in damped.prior_precision.values()} == {51.0}
    assert (damped.predict(data[0]).f_var < free.predict(data[0]).f_var).all()
    hessian = dubito.fit(model, Laplace("dense", "hessian", damping=200.0, check=False), data)  # a way out of an indefinite one
    assert torch.isfinite(hessian.log_evidence())


def test_low_rank_in_single_precision_keeps_directions_of_small_curvature():
    x = numbers(500, 3).float() * torch.tensor([30.0, 1.0, 0.1])
    net = nn.Linear(3, 1, bias=False)
    model, data = Model(net, Gaussian(scale=0.1), Normal(scale=1.0)), (x, net(x).detach())
    low, dense = (dubito.fit(model, Laplace(s, check=False), data).predict(torch.eye(3)).f_var for s in ("lowrank", "dense"))
    torch.testing.assert_close(low, dense, rtol=0.05, atol=0.0)


def test_inputs_that_are_all_alike_do_not_spoil_the_layout_for_others():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.outer(self.inner(x.reshape(-1, 3)).tanh().reshape(len(x), -1, 4).mean(1))

    model, x = Model(Flat().double(), Categorical(), Normal(scale=1.0)), numbers(8, 5, 3)
    y = torch.arange(8) % 2
    dubito.plan(model, Laplace(), (torch.zeros_like(x), y))
    found = dubito.fit(model, Laplace(check=False), (x, y))
    assert [type(block) for block in found.covariance.blocks] == [Kronecker, Kronecker]


def test_the_last_layer_must_be_bayesian_and_residuals_must_be_there():
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(), numbers(9, 3)
    with pytest.raises(ValueError, match="the last layer, with 2.weight, is not among the Bayesian weights"):
        dubito.fit(Model(net, Gaussian(scale=1.0), only="^0"), Laplace(subset="last_layer"), (x, numbers(9, 1)))
    with pytest.raises(ValueError, match="without any residual"):
        dubito.fit(Model(net, Gaussian()), Laplace(check=False), (x, net(x).detach()), batch_size=9)
    with pytest.raises(ValueError, match="mixed precision"):
        dubito.fit(Model(net, Gaussian(scale=1.0)), Laplace(), (x, numbers(9, 1)), precision="bfloat16")


def test_a_thousand_classes_take_no_matrix_for_each_input_where_none_is_needed():
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1000))
    model, x, y = Model(net, Categorical()), torch.randn(8, 4), torch.randint(1000, (8,))
    wide = dubito.fit(model, Laplace("diagonal", subset="last_layer", check=False), (x, y)).predict(x)
    assert wide.cov.shape == (1, 8, 1000)
    kronecker = dubito.fit(model, Laplace(subset="last_layer", check=False), (x, y))
    assert kronecker.predict(x).root.shape == (1, 8, 1000, 1000)
    mixed = dubito.posteriors.Mixture.equal([kronecker, kronecker]).predict(x)
    assert mixed.root.shape == (2, 8, 1000, 1000)
    torch.testing.assert_close(mixed.mean, kronecker.predict(x).mean)


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter beside it (LoRA)."""

    def __init__(self, fan_in: int, fan_out: int, rank: int = 2):
        super().__init__()
        self.base = nn.Linear(fan_in, fan_out).requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(fan_in, rank, bias=False), nn.Linear(rank, fan_out, bias=False)

    def forward(self, x):
        return self.base(x) + self.lora_b(self.lora_a(x))


@pytest.mark.parametrize("structure", ["dense", "kronecker", "diagonal", "lowrank"])
def test_adapters_of_a_frozen_network(structure):
    """`only=` picks the adapters; the dense posterior is that of their Jacobian, and the rest of the network never moves."""
    network = nn.Sequential(Adapted(3, 5), nn.Tanh(), Adapted(5, 2)).double()
    model = Model(network, Gaussian(scale=0.5), Normal(scale=1.0), only="lora")
    x, y = torch.randn(12, 3).double(), torch.randn(12, 2).double()
    posterior = dubito.fit(model, Laplace(structure, optimize_evidence=False, check=False), (x, y), progress=False)
    names = list(posterior.covariance.shapes)
    assert sorted(names) == sorted(name for name, _ in network.named_parameters() if "lora" in name)
    assert set(posterior.sample(3)) == set(names)
    p = posterior.predict(x)
    assert (p.f_var > 0).all()
    if structure == "dense":
        params = {name: dict(network.named_parameters())[name].detach() for name in names}
        slopes = torch.func.jacrev(lambda w: torch.func.functional_call(network, w, (x,)))(params)
        rows = torch.cat([slopes[name].reshape(24, -1) for name in names], 1)
        exact = torch.linalg.inv(rows.mT @ rows / 0.25 + torch.eye(rows.shape[1]).double())
        torch.testing.assert_close(posterior.covariance.dense(), exact)
        torch.testing.assert_close(p.f_var.flatten(), (rows @ exact @ rows.mT).diagonal())
    assert (posterior.predict(x, "adjoint").f_var > 0).all()


def test_labels_are_drawn_where_outputs_are_many_and_only_there(monkeypatch):
    model, data = perceptron()
    plain, none, once = Laplace(check=False), Laplace(check=False, draws=0), Laplace(check=False, draws=1)
    exact = fitted(model, plain, data).covariance.dense()
    assert torch.equal(exact, fitted(model, none, data).covariance.dense())
    assert not torch.equal(exact, fitted(model, once, data).covariance.dense())
    assert dubito.plan(model, plain, data).curvature == "exact GGN"
    monkeypatch.setattr("dubito.curvature.cotangents.MANY", 1)
    drawn = fitted(model, plain, data).covariance.dense()
    assert torch.equal(drawn, fitted(model, once, data).covariance.dense())
    assert torch.equal(exact, fitted(model, none, data).covariance.dense())
    last = replace(plain, subset="last_layer")
    assert torch.equal(
        fitted(model, last, data).covariance.dense(), fitted(model, replace(last, draws=0), data).covariance.dense()
    )
    outputs = model.network(data[0]).shape[-1]
    words = f"GGN of labels drawn once for each example of {outputs} outputs"
    assert dubito.plan(model, plain, data).curvature == words
    assert words in str(dubito.plan(model, dubito.Ensemble(plain, 2), data))
    assert dubito.plan(model, replace(plain, draws=3), data).curvature == words.replace("once", "3 times")
    for exactly in (none, last, Laplace("lowrank", check=False)):
        assert dubito.plan(model, exactly, data).curvature == "exact GGN"
    online, free = dubito.OnlineLaplace(epochs=2, every=1, burn_in=0.0), Model(model.network, Categorical(), Normal())
    assert dubito.plan(free, online, data).curvature == words
    assert dubito.plan(free, replace(online, draws=0), data).curvature == "exact GGN"
    assert dubito.plan(model, Laplace("diagonal", "empirical"), data).curvature == "empirical Fisher"
    assert dubito.plan(model, dubito.MAP(epochs=1), data).curvature == ""
    for method in (Laplace, dubito.OnlineLaplace):
        with pytest.raises(ValueError, match="with draws=0 use curvature='ggn'"):
            method(curvature="fisher", draws=0)


def test_low_rank_of_a_text_takes_no_matrix_for_each_token():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(300, 2), nn.Tanh(), nn.Linear(2, 300))
    model, x = Model(net, dubito.NextToken()), torch.randint(300, (4, 20))
    tracked = _Tracked()
    with tracked:
        fitted(model, Laplace("lowrank", rank=2, check=False), (x, x))
    assert tracked.peak < 4 * x.numel() * 300 * 300  # it was more than the matrices of all tokens
