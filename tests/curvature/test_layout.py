"""Which layers a network has, and where their examples are; what is in doubt goes to the general way, which is always right."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dubito
from curvature.networks import (
    DOUBLE,
    NETWORKS,
    Net,
    build,
    ggn,
    jacobian,
    merged,
    numbers,
    positions,
    targets,
    time_major,
    tokens,
)
from dubito import Categorical, Gaussian, Laplace, Model, OnlineLaplace
from dubito.curvature import Spec, curvature
from dubito.curvature.layout import MERGED, Layout, layout

pytestmark = pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel lengths")  # torch, of its own accord


def found(net: nn.Module, x, likelihood=None, **options) -> Layout:
    model = Model(net, likelihood or Gaussian(scale=1.0), **options)
    params = model.parameters()
    return layout(model, params, x, model.buffers(), tuple(params))


KNOWN = ["perceptron", "in place", "in place, with positions", "residual", "conv1d", "conv1d, circular", "conv2d",
         "conv2d, same", "conv2d, reflect", "conv3d", "embedding", "embedding, time major", "layer norm",
         "layer norm, two axes", "rms norm", "group norm", "batch norm", "batch norm, flat", "instance norm", "attention",
         "attention, time major", "attention, as long as wide", "encoder", "encoder, norm first", "twice",
         "twice, of different lengths", "class token", "places", "places, added in place", "time major",
         "time major, as long as wide", "time major, one example", "rows of examples", "rows of times", "films",
         "sequences", "images", "two inputs", "named inputs"]  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_known_layers_are_recognised_whatever_their_layout(name):
    """The general way is right as well, but slow, so it must not be taken without need."""
    net, x = build(name)
    assert found(net, x).generic == ()


@pytest.mark.parametrize(
    ("name", "generic", "reason"),
    [
        ("conv2d, groups", {"0.weight", "0.bias"}, "otherwise"),
        ("bilinear", {"b.weight", "b.bias"}, "otherwise"),
        ("prelu", {"1.weight"}, "otherwise"),
        ("tied embedding", {"e.weight", "o.bias"}, "otherwise|different kinds"),
        ("used elsewhere", {"a.weight", "a.bias"}, "otherwise"),
        ("single numbers", {"t", "c"}, "otherwise"),
        ("two tables", {"t", "u"}, "otherwise|belong to which example"),
        ("positions", {"p.weight", "q.weight", "q.bias"}, "belong to which example"),
        ("as many positions as examples", {"p.weight", "q.weight", "q.bias"}, "belong to which example"),
        ("rows of times, all alike", {"i.weight", "i.bias", "n.weight", "n.bias"}, "belong to which example"),
        ("unused", {"nothing.weight", "nothing.bias", "alone"}, "does not use it"),
        ("lstm", {"r.weight_ih_l0", "r.weight_hh_l0", "r.bias_ih_l0", "r.bias_hh_l0"}, "otherwise"),
    ],
)
def test_what_is_not_known_or_in_doubt_goes_the_general_way(name, generic, reason):
    import re

    net, x = build(name)
    where = found(net, x)
    assert set(where.generic) == generic
    assert all(re.search(reason, where.reasons[n]) for n in generic if where.reasons[n])


def test_axes():
    axes = {(p.weight, p.axis) for p in found(time_major().double(), numbers(4, 4, 3)).parts}
    assert axes == {("i.weight", 1), ("o.weight", 0)}
    axes = {(p.weight, p.axis) for p in found(merged(False).double(), numbers(4, 4, 3)).parts}
    assert axes == {("i.weight", MERGED), ("n.weight", MERGED), ("o.weight", 0)}
    axes = {(p.weight, p.axis) for p in found(merged(True).double(), numbers(4, 4, 3)).parts}
    assert axes == {("i.weight", 0), ("n.weight", 0), ("o.weight", 0)}


def test_a_dummy_batch_before_the_real_one_does_no_harm():
    """Rows that are all alike do not tell how they are laid out, and what was found is remembered."""
    net = merged(False).double()
    model = Model(net, Categorical())
    params = model.parameters()
    dummy = torch.zeros(3, 4, 3, dtype=DOUBLE), torch.zeros(3).long()
    curvature(model, params, [dummy], model.buffers(), spec=Spec("dense"), prior=1.0)
    x = numbers(3, 4, 3)
    y = targets(model, params, x)
    matrix = curvature(model, params, [(x, y)], model.buffers(), spec=Spec("dense"), prior=1.0).dense()
    torch.testing.assert_close(torch.linalg.inv(matrix) - torch.eye(len(matrix)), ggn(model, params, x, y))


def test_a_batch_of_as_many_examples_as_positions_after_another():
    net = positions().double()
    model = Model(net, Categorical())
    params = model.parameters()
    for order in ((4, 3), (3, 4)):
        batches = [(x, targets(model, params, x)) for x in (tokens(n, 4) for n in order)]
        matrix = curvature(model, params, batches, {}, spec=Spec("dense"), prior=1.0).dense()
        exact = sum(ggn(model, params, x, y) for x, y in batches)
        torch.testing.assert_close(torch.linalg.inv(matrix) - torch.eye(len(matrix)), exact)
        net = positions().double()


def test_a_kronecker_layer_that_becomes_unclear_later_is_told_in_words():
    model = Model(merged(False).double(), Gaussian(scale=1.0))
    params = model.parameters()
    clear, unclear = numbers(3, 4, 3), torch.ones(3, 2, 3, dtype=DOUBLE)
    batches = [(x, torch.zeros(3, 2, dtype=DOUBLE)) for x in (clear, unclear)]
    with pytest.raises(ValueError, match="not clear which inputs of the layer with i.weight .* all alike"):
        curvature(model, params, batches, model.buffers(), spec=Spec("kronecker"), prior=1.0)
    back = curvature(model, params, batches[::-1], model.buffers(), spec=Spec("kronecker"), prior=1.0)
    assert torch.isfinite(back.logdet())


def test_what_is_known_belongs_to_the_output_that_is_looked_at():
    """One network, two outputs: a weight that is plain in one is used twice in the other."""

    def run(s, x):
        h = s.a(x)
        return h, h * s.a.weight.sum()

    net = Net(run, a=nn.Linear(3, 2)).double()
    x = numbers(4, 3)
    assert found(net, x).generic == ()
    assert set(found(net, x, output=lambda out: out[1]).generic) == {"a.weight", "a.bias"}
    for output in (None, lambda out: out[1]):
        model = Model(net, Categorical(), **({} if output is None else {"output": output}))
        params = model.parameters()
        y = targets(model, params, x)
        matrix = curvature(model, params, [(x, y)], {}, spec=Spec("dense"), prior=1.0).dense()
        torch.testing.assert_close(torch.linalg.inv(matrix) - torch.eye(8), ggn(model, params, x, y))


def branching(alone: bool = False) -> Net:
    """A matrix that inputs below zero meet once more, in a way that no rule knows; `flag` is for all inputs."""

    def run(s, x):
        h = s.a(x).tanh() if not alone else s.a(x)
        if s.flag or bool((x < 0).any()):
            h = h + (x if s.flag else x.clamp_max(0)) @ s.a.weight.mT.sin()
        return h if alone else s.o(h)

    net = Net(run, a=nn.Linear(3, 3), **({} if alone else {"o": nn.Linear(3, 2)})).double()
    net.flag = False
    return net


@pytest.mark.parametrize("structure", ["dense", "diagonal"])
@pytest.mark.parametrize("order", [1, -1])
def test_a_weight_that_a_later_batch_uses_once_more(structure, order):
    """Without it the curvature would depend on which batch comes first."""
    model = Model(branching(), Categorical())
    params, x = model.parameters(), numbers(8, 3)
    x[:4] = x[:4].abs()
    batches = [(part, targets(model, params, part)) for part in x.split(4)]
    matrix = torch.linalg.inv(curvature(model, params, batches[::order], {}, spec=Spec(structure), prior=1.0).dense())
    exact = sum(ggn(model, params, *batch) for batch in batches)
    exact = exact if structure == "dense" else torch.diag(exact.diagonal())
    torch.testing.assert_close(matrix - torch.eye(len(matrix)), exact)


@pytest.mark.parametrize(("structure", "alone"), [("kronecker", False), ("kronecker", True), ("dense", True)])
def test_sums_without_a_place_for_a_later_batch_are_refused(structure, alone):
    model, x, y = Model(branching(alone), Categorical()), numbers(4, 3).abs(), torch.zeros(4).long()
    with pytest.raises(ValueError, match="a.weight is used in another way than in the first batch"):
        curvature(model, model.parameters(), [(x, y), (-x, y)], {}, spec=Spec(structure), prior=1.0)
    back = curvature(model, model.parameters(), [(-x, y), (x, y)], {}, spec=Spec(structure), prior=1.0)
    assert torch.isfinite(back.logdet())


@pytest.mark.parametrize("structure", ["dense", "diagonal", "kronecker"])
@pytest.mark.parametrize("alone", [False, True])
def test_a_flag_that_changes_between_two_fits(structure, alone):
    x, y = numbers(6, 3).abs(), torch.zeros(6).long()

    def found(net):
        return curvature(Model(net, Categorical()), params, [(x, y)], {}, spec=Spec(structure), prior=1.0).dense()

    net, other = branching(alone), branching(alone)
    params = Model(net, Categorical()).parameters()
    before = found(net)
    net.flag = other.flag = True
    assert not torch.allclose(before, found(other))
    torch.testing.assert_close(found(net), found(other))


def test_an_output_layer_that_is_not_the_last_for_a_later_batch():
    net = Net(lambda s, x: s.a(x) if bool((x > 0).all()) else s.a(x).tanh(), a=nn.Linear(3, 2)).double()
    model, x = Model(net, Categorical()), numbers(4, 3).abs()
    params = model.parameters()
    batches = [(part, targets(model, params, part)) for part in (x, -x)]
    found = curvature(model, params, batches, {}, spec=Spec("diagonal"), prior=1.0).dense().diagonal()
    exact = sum(ggn(model, params, *batch) for batch in batches).diagonal()
    torch.testing.assert_close(1 / found - 1, exact)


@pytest.mark.parametrize("structure", ["dense", "diagonal", "kronecker", "lowrank"])
def test_predictions_where_a_weight_is_used_once_more(structure):
    model, x = Model(branching(), Gaussian(scale=0.5), dubito.priors.Normal(scale=1.0)), numbers(6, 3)
    laplace = dubito.Laplace(structure, optimize_evidence=False, check=False)
    posterior = dubito.fit(model, laplace, (x.abs(), numbers(6, 2)))
    sigma = posterior.covariance.dense()
    for inputs in (x.abs(), -x.abs(), x):  # what the first of them tell is remembered
        rows = jacobian(model, posterior.params, inputs)
        torch.testing.assert_close(posterior.predict(inputs).cov[0], rows @ sigma @ rows.mT)


def test_a_network_that_never_does_the_same_is_told_so():
    calls = []

    def run(s, x):
        calls.append(1)
        return s.a(x) if len(calls) % 3 else x @ s.a.weight.mT

    model, x = Model(Net(run, a=nn.Linear(3, 2)).double(), Categorical()), numbers(4, 3)
    with pytest.raises(ValueError, match="a.bias is used in one way in one pass and in another in the next"):
        curvature(model, model.parameters(), [(x, torch.zeros(4).long())] * 3, {}, spec=Spec("dense"))


@pytest.mark.parametrize("error", [RuntimeError, ValueError, AssertionError, KeyError])
def test_a_network_that_insists_on_its_batch_size_goes_the_general_way(error):
    def run(s, x):
        if len(x) not in (1, 4):  # one example at a time is how the general way goes
            raise error("four, please")
        return s.o(s.a(x).tanh())

    net = Net(run, a=nn.Linear(3, 3), o=nn.Linear(3, 2)).double()
    model, x = Model(net, Categorical()), numbers(4, 3)
    params = model.parameters()
    y = targets(model, params, x)
    matrix = curvature(model, params, [(x, y)], {}, spec=Spec("dense"), prior=1.0).dense()
    torch.testing.assert_close(torch.linalg.inv(matrix) - torch.eye(len(matrix)), ggn(model, params, x, y))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_layout_survives_a_checkpoint(name):
    net, x = build(name)
    where = found(net, x)
    again = Layout.unpacked(where.packed())
    assert again.parts == where.parts
    assert again.generic == where.generic
    shapes = {n: p.shape for n, p in net.named_parameters()}
    assert {n for p in where.parts for n in p.names} | set(where.generic) == set(shapes), "every weight is somewhere"


def centered(s, x):
    h = s.i(x)
    return s.o(torch.tanh(h - h.mean(0)))


def attending(s, x):
    h = s.i(x)
    return s.o(torch.tanh(h + (h @ h.mT).softmax(-1) @ h))


def among_neighbours(s, x):
    near = torch.cdist(x, x).topk(3, largest=False).indices
    return s.o(torch.tanh(s.i(x)[near].mean(1)))


@pytest.mark.parametrize("run", [centered, attending, among_neighbours])
def test_examples_that_depend_on_each_other_are_refused(run):
    """Curvature was wrong by up to 3.8 times, without a word."""
    x = numbers(40, 3)
    model = Model(Net(run, i=nn.Linear(3, 5), o=nn.Linear(5, 2)).double(), Categorical())
    y = torch.arange(40) % 2
    for method in (Laplace("diagonal", check=False), OnlineLaplace(epochs=20)):
        with pytest.raises(ValueError, match="depend on the others in the batch.*coupled=True"):
            dubito.fit(model, method, [(x, y)])
    params = model.parameters()
    by_hand = dubito.posteriors.Gaussian.diagonal(model, params, {n: torch.ones_like(leaf) for n, leaf in params.items()})
    with pytest.raises(ValueError, match="depend on the others in the batch"):
        by_hand.predict(x)
    by_hand.predict(x, draws=2)  # draws of f and its slope for all inputs together are right
    with pytest.warns(UserWarning, match="The outputs of some examples depend on the others in their batch"):
        dubito.fit(model, dubito.MAP(epochs=1), (x, y))
    dubito.fit(model, dubito.MAP(epochs=1), [(x, y)])


def test_random_networks_and_equal_rows_are_not_taken_for_mixing():
    net = Net(lambda s, x: s.i(x) + 0.1 * torch.randn(len(x), 2, dtype=x.dtype), i=nn.Linear(3, 2)).double()
    assert found(net, numbers(8, 3)).generic == ()
    norm = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    assert found(norm, numbers(8, 3)).generic == ()
