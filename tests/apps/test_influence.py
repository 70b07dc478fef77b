"""Influence functions: every product against explicit matrices, every prediction against retraining."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.func import grad as slope
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import dubito
from dubito.apps.influence import Influence, Influences, inspection
from dubito.data import digits
from dubito.posteriors import Gaussian, Point
from dubito.priors import Normal, StudentT
from dubito.report.images import influential, sheet
from dubito.tensors import tree


class Words(nn.Module):
    """An embedding that is averaged, a scale and a single number that no layer is known for, and a norm."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.factor, self.head = (
            nn.Embedding(7, 4),
            nn.LayerNorm(4),
            nn.Parameter(torch.ones(4)),
            nn.Linear(4, 3),
        )
        self.tone = nn.Parameter(torch.tensor(1.2))

    def forward(self, x: Tensor) -> Tensor:
        return self.tone * self.head(self.norm(self.table(x)).mean(1) * self.factor)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8, 3))


NETWORKS = {"mlp": mlp, "conv": conv, "words": Words}


def problem(name: str, n: int = 24) -> tuple[dubito.Model, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    network = NETWORKS[name]().double()
    shapes = {"mlp": (n + 5, 4), "conv": (n + 5, 1, 6, 6)}
    x = torch.randint(7, (n + 5, 6)) if name == "words" else torch.randn(shapes[name], dtype=torch.float64)
    y = torch.randint(3, (n + 5,))
    return dubito.Model(network, dubito.Categorical(), Normal(scale=0.7)), (x[:n], y[:n]), (x[n:], y[n:])


def matrix(model: dubito.Model, data: tuple[Tensor, Tensor]) -> Tensor:
    """The gradients of all losses, [N, P]."""
    params = model.parameters()

    def loss(params, x, y):
        return F.cross_entropy(functional_call(model.network, params, (x[None],)), y[None])

    return tree.flatten(vmap(slope(loss), (None, 0, 0))(params, *data), stacked=True)


def joint(model: dubito.Model, data: tuple[Tensor, Tensor], scale: float = 0.7) -> Tensor:
    """The Hessian of the negative log joint, [P, P]."""
    like = model.parameters()

    def energy(vector):
        params = tree.unflatten(vector, like)
        f = functional_call(model.network, params, (data[0],))
        return F.cross_entropy(f, data[1], reduction="sum") + 0.5 * (vector**2).sum() / scale**2

    return jacrev(slope(energy))(tree.flatten(like))


@pytest.mark.parametrize("name", list(NETWORKS))
@pytest.mark.parametrize("solver", ["ekfac", "kfac", "diagonal", "dense"])
def test_products_are_those_of_the_matrices(name, solver):
    model, train, test = problem(name)
    found = Influence(solver, 0.5).fit(model, train, batch_size=10)
    sigma = found.inverse.covariance.dense()
    places = tree.unflatten(torch.arange(len(sigma)), model.parameters())
    place = torch.cat([places[key].flatten() for key in found.inverse.covariance.shapes])
    g, g_test = matrix(model, train)[:, place], matrix(model, test)[:, place]
    torch.testing.assert_close(found.of(test), -g_test @ sigma @ g.mT)
    torch.testing.assert_close(found.removal(test), g_test @ sigma @ g.mT)
    torch.testing.assert_close(found.self_influence(), (g @ sigma * g).sum(1))
    few = Influence(solver, 0.5, memory=1e-7).fit(model, train)  # one test example at a time
    torch.testing.assert_close(few.of(test), found.of(test))


@pytest.mark.parametrize("name", list(NETWORKS))
def test_the_hessian_of_the_log_joint(name):
    model, train, test = problem(name)
    expected = -matrix(model, test) @ torch.linalg.solve(
        joint(model, train) + 20 * torch.eye(tree.size(model.parameters())).double(), matrix(model, train).mT
    )
    dense = Influence("dense", 20.0, "hessian").fit(model, train)
    torch.testing.assert_close(dense.of(test), expected)
    cg = Influence("cg", 20.0, "hessian", tolerance=1e-8).fit(model, train, batch_size=12)
    torch.testing.assert_close(cg.of((test[0][:2], test[1][:2])), expected[:2], rtol=1e-5, atol=1e-7)


def test_solvers_agree():
    model, train, test = problem("mlp", 8)
    test = (test[0][:1], test[1][:1])
    exact = Influence("dense", 2.0).fit(model, train)
    cg = Influence("cg", 2.0, tolerance=1e-8).fit(model, train)
    torch.testing.assert_close(cg.of(test), exact.of(test), rtol=1e-6, atol=1e-8)
    cg = Influence("cg", 2.0, tolerance=1e-4).fit(model, train)
    torch.testing.assert_close(cg.self_influence(), exact.self_influence(), rtol=1e-2, atol=1e-3)
    rng = torch.get_rng_state()
    lissa = Influence("lissa", 8.0, depth=90).fit(model, train)  # all data in a batch: the series itself
    expected = Influence("dense", 8.0).fit(model, train).of(test)
    torch.testing.assert_close(lissa.of(test), expected, rtol=1e-3, atol=1e-6)
    noisy = Influence("lissa", 8.0, depth=30, repeats=2, scale=3.0).fit(model, train, batch_size=4)
    found = noisy.of(test)
    assert correlation(found, expected) > 0.97
    assert torch.equal(found, noisy.of(test))  # the same seed, the same batches
    assert torch.equal(rng, torch.get_rng_state())


def test_a_series_that_is_too_short_is_told_of(recwarn):
    """Inputs of one direction are much larger than the others: the scale is theirs, and the rest takes longer."""
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([2.5, 1.0, 1.0])
    model = dubito.Model(nn.Linear(3, 1, bias=False), dubito.Gaussian(scale=1.0), Normal(scale=1.0))
    point = Point(model, {"weight": torch.zeros(1, 3)}, {})
    data, test = (x, x.sum(1, keepdim=True)), (x[:1], torch.ones(1, 1))
    exact = Influence("dense").fit(point, data).of(test)
    long = Influence("lissa", depth=100).fit(point, data).of(test)
    torch.testing.assert_close(long, exact, rtol=0.02, atol=0.02 * float(exact.abs().max()))
    assert not recwarn.list
    with pytest.warns(UserWarning, match="too short: 8 batches"):
        Influence("lissa", depth=8).fit(point, data).of(test)


def test_lissa_takes_the_smallest_power_of_ten_that_does_not_diverge():
    x = torch.full((4, 1), 9.0)  # the mean curvature is 81 + 1 / 4: 1 and 10 diverge
    model = dubito.Model(nn.Linear(1, 1, bias=False), dubito.Gaussian(scale=1.0), Normal(scale=1.0))
    found = Influence("lissa", depth=60).fit(model, (x, torch.zeros(4, 1)))
    inverse = found.inverse({"weight": torch.ones(1, 1, 1)})["weight"]
    assert found.inverse.scale == 100
    torch.testing.assert_close(inverse.squeeze(), torch.tensor(1 / 325.0))
    with pytest.raises(ValueError, match="diverges at scale=1:"):
        Influence("lissa", depth=60, scale=1.0).fit(model, (x, torch.zeros(4, 1))).of((x, torch.ones(4, 1)))


def test_conjugate_gradients_that_are_not_there_yet_say_so():
    model, train, test = problem("mlp")
    with pytest.warns(UserWarning, match="more `steps`"):
        Influence("cg", steps=1).fit(model, train).of(test)
    with pytest.raises(ValueError, match="add damping, or use the GGN"):
        Influence("cg", 0.0, "hessian").fit(dubito.Model(mlp().double(), dubito.Categorical(), Normal(scale=9.0)), train).of(test)


def test_any_prior_by_its_hessian():
    model, train, test = problem("mlp")
    heavy = dubito.Model(model.network, model.likelihood, StudentT(0.5, df=4.0))
    test = (test[0][:2], test[1][:2])
    found = Influence("cg", 30.0, "hessian", tolerance=1e-9).fit(heavy, train).of(test)
    flat = tree.flatten(model.parameters())
    extra = jacrev(slope(lambda v: -heavy.prior.log_prob(tree.unflatten(v, model.parameters()))))(flat)
    whole = joint(model, train, 1e6) + extra + 30 * torch.eye(len(flat)).double()
    torch.testing.assert_close(
        found, -matrix(model, test) @ torch.linalg.solve(whole, matrix(model, train).mT), rtol=1e-5, atol=1e-8
    )
    with pytest.raises(ValueError, match="use solver='cg' or 'lissa'"):
        Influence().fit(heavy, train)


def test_the_default_is_exact_where_that_is_free(monkeypatch):
    model, train, test = problem("mlp")
    for curvature in ("ggn", "hessian"):
        expected = Influence("dense", 20.0, curvature).fit(model, train).of(test)
        torch.testing.assert_close(Influence(None, 20.0, curvature).fit(model, train).of(test), expected)
    monkeypatch.setattr("dubito.apps.influence.influence.SMALL", 42)  # of 43 weights
    torch.testing.assert_close(Influence().fit(model, train).of(test), Influence("ekfac").fit(model, train).of(test))
    with pytest.raises(ValueError, match="no such structure as 'ekfac'"):
        Influence(curvature="hessian").fit(model, train)


# -- against retraining


def trained(x: Tensor, y: Tensor, start: Tensor | None = None) -> Point:
    """Logistic regression with a prior N(0, 1) at its exact optimum, by Newton's method in closed form."""
    model = dubito.Model(nn.Linear(x.shape[1], 2, bias=False).double(), dubito.Categorical(), Normal(scale=1.0))
    w = torch.zeros(2, x.shape[1], dtype=torch.float64) if start is None else start
    for _ in range(30):
        p = (x @ w.mT).softmax(-1)
        gradient = (p - F.one_hot(y, 2)).mT @ x + w
        fisher = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
        curvature = torch.einsum("ncd,ni,nj->cidj", fisher, x, x).reshape(w.numel(), -1) + torch.eye(w.numel()).double()
        step = torch.linalg.solve(curvature, gradient.flatten()).reshape(w.shape)
        w = w - step
        if float(step.norm()) < 1e-12:
            break
    return Point(model, {"weight": w}, {})


def losses(point: Point, data: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(data[0] @ point.params["weight"].mT, data[1], reduction="none")


@pytest.fixture(scope="module")
def logistic() -> tuple[Point, tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """A model, its training and test data, and the losses of these after leaving out each training example, [T, N]."""
    data = digits(seed=0)
    keep, kept = (data.y_train == 1) | (data.y_train == 7), (data.y_test == 1) | (data.y_test == 7)
    squeeze = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).double() / 8  # few features: leverages that matter
    x, y = data.x_train[keep].flatten(1).double()[:40] @ squeeze, (data.y_train[keep] == 7).long()[:40]
    x_test, y_test = data.x_test[kept].flatten(1).double()[:10] @ squeeze, (data.y_test[kept] == 7).long()[:10]
    y[3] = 1 - y[3]
    point = trained(x, y)
    start, rest = point.params["weight"], torch.arange(len(y))
    left = [trained(x[rest != n], y[rest != n], start) for n in rest]
    after = torch.stack([losses(one, (x_test, y_test)) for one in left], 1)
    return point, (x, y), (x_test, y_test), after


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


def test_leaving_one_out(logistic):
    point, train, test, after = logistic
    change = after - losses(point, test).unsqueeze(1)
    for solver in ("dense", "cg"):
        found = Influence(solver).fit(point, train)
        assert correlation(found.removal(test), change) > 0.99
    found = Influence("dense").fit(point, train)
    first, newton = found.removal(test), found.removal(test, leverage=True)
    assert correlation(newton, change) > 0.999
    assert (newton - change).abs().max() < 0.5 * (first - change).abs().max()
    assert int(found.self_influence().argmax()) == 3  # the label that was turned


def test_weights_without_some(logistic):
    point, train, _, _ = logistic
    found, which = Influence("dense").fit(point, train), [3, 11]
    rest = torch.tensor([n not in which for n in range(40)])
    truth = trained(train[0][rest], train[1][rest])
    moved = tree.flatten(found.shift(which))
    exact = tree.flatten(truth.params) - tree.flatten(point.params)
    assert float(torch.cosine_similarity(moved, exact, 0)) > 0.97
    together = tree.apply(torch.add, found.shift(3), found.shift(torch.tensor([11])))
    torch.testing.assert_close(moved, tree.flatten(together))
    torch.testing.assert_close(tree.flatten(found.without(which).params), tree.flatten(point.params) + moved)
    torch.testing.assert_close(tree.flatten(found.shift([11, 3, 11])), moved)  # nothing can be left out twice


def test_any_function_of_the_network(logistic):
    point, train, test, _ = logistic
    found = Influence("dense").fit(point, train)
    rows = torch.arange(len(test[1]))
    by_hand = found.of(lambda network: -network(test[0]).log_softmax(-1)[rows, test[1]])
    torch.testing.assert_close(by_hand, found.of(test))
    assert found.of(lambda network: network.params["weight"].sum()).shape == (1, 40)
    with pytest.raises(ValueError, match="a tensor \\[10, 2\\], with gradients"):
        found.of(lambda network: network(test[0]))
    with pytest.raises(ValueError, match="without gradients"):
        found.of(lambda network: network(test[0]).detach()[:, 0])


def test_through_inputs(logistic):
    """The gradient by a training input, beside models that are trained on a moved one."""
    point, (x, y), test, _ = logistic
    which, step = [5, 3], 1e-4
    found = Influence("dense").fit(point, (x, y)).on_inputs(test, which)
    assert found.shape == (2, 8)
    for row, n in enumerate(which):
        for k in (0, 4):
            ends = []
            for sign in (1, -1):
                moved = x.clone()
                moved[n, k] += sign * step
                ends.append(losses(trained(moved, y, point.params["weight"]), test).sum())
            torch.testing.assert_close(found[row, k], (ends[0] - ends[1]) / (2 * step), rtol=1e-4, atol=1e-7)


# -- what is given


def test_data_in_every_form_and_nothing_is_changed():
    model, train, test = problem("conv")
    network = model.network
    network[0].weight.grad = torch.ones_like(network[0].weight)
    before, rng = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    found = Influence().fit(model, train, batch_size=10)
    expected, inputs = found.of(test), found.on_inputs(test, [20, 1])
    forms = [
        TensorDataset(*train),
        DataLoader(TensorDataset(*train), batch_size=5),
        list(zip(train[0].split(9), train[1].split(9), strict=True)),
        (train[0].numpy(), train[1].numpy()),
    ]
    for data in forms:
        other = Influence().fit(model, data)
        torch.testing.assert_close(other.of(DataLoader(TensorDataset(*test), batch_size=2)), expected)
        torch.testing.assert_close(other.on_inputs(test, [20, 1]), inputs)
        torch.testing.assert_close(other.shift(13), found.shift(13))
    assert network.training
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(leaf, before[key]) for key, leaf in network.state_dict().items())
    assert torch.equal(network[0].weight.grad, torch.ones_like(network[0].weight))
    assert network[4].weight.grad is None


def test_posteriors():
    model, train, test = problem("mlp")
    point = Point(model, model.parameters(), model.buffers())
    laplace = dubito.fit(
        model, dubito.Laplace("dense", optimize_evidence=False, check=False), train, start=point, temperature=0.5
    )
    assert isinstance(laplace, Gaussian)
    expected = Influence("dense").fit(point, train).of(test)
    torch.testing.assert_close(Influence("posterior").fit(laplace, train).of(test), expected)  # whatever its temperature
    torch.testing.assert_close(Influence("dense").fit(laplace, train).of(test), expected)
    head = dubito.fit(model, dubito.Laplace(subset="last_layer", check=False), train, start=point)
    assert set(Influence("posterior").fit(head, train).shift(0)) == {"2.weight", "2.bias"}
    only = dubito.Model(model.network, model.likelihood, model.prior, "^2")
    assert set(Influence().fit(only, train).shift(0)) == {"2.weight", "2.bias"}
    assert isinstance(Influence().fit(mlp(), (train[0].float(), train[1])), Influences)


def test_a_learned_noise_stays():
    torch.manual_seed(0)
    x = torch.randn(30, 1)
    model = dubito.Model(nn.Linear(1, 1), dubito.Gaussian(), Normal(scale=3.0))
    point = dubito.fit(model, dubito.MAP(epochs=20, learning_rate=0.05), (x, 2 * x + 0.1 * torch.randn(30, 1)))
    found = Influence("ekfac").fit(point, (x, 2 * x))
    assert list(found.shift(0)) == ["weight", "bias"]
    torch.testing.assert_close(
        found.of((x[:3], x[:3])), Influence("cg").fit(point, (x, 2 * x)).of((x[:3], x[:3])), rtol=1e-3, atol=1e-4
    )
    with pytest.raises(ValueError, match="give a posterior"):
        Influence().fit(model, (x, x))


def test_refusals():
    model, train, _ = problem("mlp")
    with pytest.raises(ValueError, match="shuffle=False"):
        Influence().fit(model, DataLoader(TensorDataset(*train), shuffle=True))
    rows = TensorDataset(*train)
    mixed = BatchSampler(RandomSampler(rows), 4, drop_last=False)  # the loader's own `sampler` is then a sequential one
    with pytest.raises(ValueError, match="shuffle=False"):
        Influence().fit(model, DataLoader(rows, batch_sampler=mixed))
    stacked = {name: torch.stack([leaf, leaf]) for name, leaf in model.parameters().items()}
    with pytest.raises(ValueError, match="give it one of them"):
        Influence().fit(dubito.posteriors.Samples(model, stacked, {}), train)
    with pytest.raises(ValueError, match="has no covariance"):
        Influence("posterior").fit(model, train)
    with pytest.raises(ValueError, match="has no such structure"):
        Influence("ekfac", curvature="hessian")
    for wrong in (
        {"solver": "exact"},
        {"damping": -1.0},
        {"steps": 0},
        {"scale": 0.0, "solver": "lissa"},
        {"curvature": "fisher"},
    ):
        with pytest.raises(ValueError, match="must be|is"):
            Influence(**wrong)
    found = Influence("cg").fit(model, train)
    with pytest.raises(IndexError, match="24 training examples"):
        found.shift(24)
    with pytest.raises(ValueError, match="by their positions"):
        found.shift([])
    with pytest.raises(ValueError, match="solver='dense'"):
        found.removal(train, leverage=True)
    words, data, test = problem("words")
    found = Influence().fit(words, data)
    with pytest.raises(ValueError, match="one tensor of real numbers"):
        found.on_inputs(test, 0)


# -- wrong labels, and pictures


def test_inspection():
    wrong = torch.tensor([True, False, False, True, False])
    assert inspection(torch.arange(5.0), wrong, [0.4, 1.0]) == {0.4: 0.5, 1.0: 1.0}
    assert inspection(torch.zeros(5), wrong, [0.2, 0.6]) == {0.2: pytest.approx(0.2), 0.6: pytest.approx(0.6)}  # ties: at random
    with pytest.raises(ValueError, match="at least one label"):
        inspection(torch.zeros(5), torch.zeros(5, dtype=torch.bool))
    with pytest.raises(ValueError, match="bool"):
        inspection(torch.zeros(5), torch.zeros(5))


def test_wrong_labels_come_first_and_a_picture():
    data = digits(seed=0)
    x, y = data.x_train[:300], data.y_train[:300].clone()
    wrong = torch.zeros(300, dtype=torch.bool)
    wrong[::10] = True
    y[wrong] = (y[wrong] + 1 + torch.arange(30) % 9) % 10
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    model = dubito.Model(net, dubito.Categorical(), Normal(scale=0.3))
    point = dubito.fit(model, dubito.MAP(epochs=40, learning_rate=0.05), (x, y), batch_size=100)
    found = Influence().fit(point, (x, y))
    assert inspection(found.self_influence(), wrong, [0.2])[0.2] >= 0.9

    values = found.of((data.x_test[:1], data.y_test[:1]))[0]
    helpful, harmful = influential(values, 4)
    assert float(values[helpful].max()) < 0 < float(values[harmful].min())
    assert int(values.argmin()) == int(helpful[0])
    picture = sheet(data.x_test[0], str(int(data.y_test[0])), x, [str(int(one)) for one in y], values, count=4)
    assert picture.image.startswith("<svg")
    assert f"most helpful is example {int(helpful[0])}" in picture.alt
