"""What is cut out changes nothing: the small network computes what the large one does with zeros in the places of what went."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from apps.networks import NETWORKS, Block, ResNet, build, lenet, sparse
from dubito.apps.compression import cut


def size(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


@torch.no_grad()
def assert_same(small: nn.Module, network: nn.Module, x) -> None:
    """For the inputs given, and for another number of them."""
    for some in (x, torch.cat([x, x[:2]])):
        expected = network.eval()(some)
        torch.testing.assert_close(small(some), expected, rtol=2e-5, atol=2e-5 * float(expected.abs().max().clamp_min(1e-3)))


@pytest.mark.parametrize("name", NETWORKS)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), rate=st.sampled_from([0.0, 0.2, 0.5, 0.9]))
def test_same_function(name, seed, rate):
    network, x = build(name, seed)
    sparse(network, rate, seed)
    small = cut(network, x)
    assert_same(small, network, x)
    assert size(small) <= size(network) + 10  # a bias may be new
    if rate == 0.9:
        assert size(small) < 0.6 * size(network)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(masks=st.lists(st.integers(0, 2**10 - 1), min_size=4, max_size=4))
def test_masks(masks):
    """Given as masks, by layer, the dropped units are as if their weights were zero."""
    network, x = build("mlp")
    bits = [torch.tensor([bool(mask >> i & 1) for i in range(n)]) for mask, n in zip(masks, (10, 8, 8, 7), strict=True)]
    small = cut(network, x, outputs={"0": bits[0], "3": bits[1]}, inputs={"5": bits[2], "7": bits[3]})
    full = copy.deepcopy(network)
    with torch.no_grad():
        for layer, mask in ((full[0], bits[0]), (full[3], bits[1])):
            layer.weight[mask], layer.bias[mask] = 0, 0
        full[5].weight[:, bits[2]], full[7].weight[:, bits[3]] = 0, 0
    assert_same(small, full, x)


def test_lenet():
    """The architecture of the paper on Bayesian compression: 20-50-800-500 becomes 8-13-88-13."""
    network, x = lenet().eval(), torch.randn(3, 1, 28, 28)
    filters = {"0": torch.arange(20) >= 8, "3": torch.arange(50) % 4 > 0}
    inputs = {"7": torch.arange(800) % 9 > 0, "9": torch.arange(500) >= 13}
    small = cut(network, x, outputs=filters, inputs=inputs)
    shapes = [tuple(p.shape) for p in small.parameters() if p.ndim > 1]
    positions = int(((torch.arange(800) % 9 == 0) & (torch.arange(800) // 16 % 4 == 0)).sum())
    assert shapes == [(8, 1, 5, 5), (13, 8, 5, 5), (13, positions), (10, 13)]
    with torch.no_grad():
        for name, mask in filters.items():
            network[int(name)].weight[mask], network[int(name)].bias[mask] = 0, 0
        for name, mask in inputs.items():
            network[int(name)].weight[:, mask] = 0
    assert_same(small, network, x)


def test_constants_go_into_the_bias():
    """A unit without weights is g(b), whatever the input."""
    network, x = build("mlp")
    with torch.no_grad():
        network[0].weight[:4], network[0].bias[:4] = 0, 3.0
        network[3].weight[2] = 0
    small = cut(network, x)
    assert small.get_parameter("0.weight").shape == (6, 6)
    assert small.get_parameter("3.weight").shape == (7, 6)
    assert small.get_parameter("5.bias").shape == (7,)  # there was none, and unit 2 of the layer before is sigmoid(b)
    assert_same(small, network, x)


@pytest.mark.parametrize(("padding", "bias", "left"), [(0, 1.0, 2), (1, 0.0, 2), (1, 1.0, 4), (1, -1.0, 2)])
def test_not_through_padding(padding, bias, left):
    """A constant beside zeros is none: its unit goes only if it is zero itself, as below a ReLU."""
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=padding))
    with torch.no_grad():
        network[0].weight[:2], network[0].bias[:2] = 0, bias
    x = torch.randn(2, 1, 8, 8)
    small = cut(network, x)
    assert small.get_parameter("0.weight").shape[0] == left
    assert_same(small, network, x)


def test_what_follows_the_number_of_examples_is_no_constant():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 1)

        def forward(self, x):
            return self.b(torch.sigmoid(self.a(x)) * x.shape[0])

    network = Net()
    small = cut(network, torch.zeros(2, 2), params={"a.weight": torch.tensor([[0.0, 0.0], [1.0, 1.0]])})
    with torch.no_grad():
        network.a.weight.copy_(torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    assert_same(small, network, torch.ones(3, 2))


def test_residual_channels_go_together():
    network, x = build("resnet")
    every = torch.arange(6) < 2
    one = cut(network, x, outputs={"blocks.0.second": every})
    assert one.get_parameter("stem.weight").shape[0] == 6  # its sum is not constant
    with torch.no_grad():
        for norm in (network.norm, network.blocks[0].norm2):
            norm.bias[:2] = 0
            norm.running_mean[:2] = 0
    both = cut(network, x, outputs={"blocks.0.second": every, "stem": every})
    assert both.get_parameter("stem.weight").shape[0] == both.get_parameter("blocks.0.second.weight").shape[0] == 4
    assert both.get_buffer("norm.running_mean").shape == (4,)
    assert both.get_parameter("blocks.1.first.weight").shape[1] == 4


def test_useless_circles():
    """Channels of a residual stream that only feed themselves go, though weights lead into and out of them."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block, self.out = nn.Conv2d(1, 6, 1), Block(6, 6, 1), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.block(self.first(x)).mean((2, 3)))

    network, x = Net().eval(), torch.randn(2, 1, 5, 5)
    with torch.no_grad():
        network.out.weight[:, 3:] = 0
        network.block.second.weight[:3, 3:], network.block.first.weight[:3, 3:] = 0, 0  # two blocks that do not talk
    small = cut(network, x)
    assert [tuple(p.shape)[:2] for p in small.parameters() if p.ndim == 4] == [(3, 1), (3, 3), (3, 3)]
    assert_same(small, network, x)


def test_depthwise_and_groups():
    network, x = build("groups")
    with torch.no_grad():
        network.point.weight[:3], network.norm.bias[:3], network.point.bias[:3], network.norm.running_mean[:3] = 0, 0, 0, 0
        network.depth.bias[:6] = 0
        network.mix.weight[2:4], network.mix.bias[2:4] = 0, 0  # the inputs of the second group
        network.grouped.weight[3:6], network.grouped.bias[3:6] = 0, 0
    small = cut(network, x)
    assert small.get_parameter("depth.weight").shape == (10, 1, 3, 3)
    assert small.get_parameter("grouped.weight").shape == (6, 2, 3, 3)
    assert_same(small, network, x)


def test_all_gone():
    """A layer of which nothing is left keeps a unit, so that there is a network."""
    network, x = build("mlp")
    small = cut(network, x, outputs={"0": torch.ones(10, dtype=torch.bool)})
    with torch.no_grad():
        network[0].weight.zero_()
        network[0].bias.zero_()
    assert_same(small, network, x)
    assert small(x).std(0).max() < 1e-6


def test_what_cannot_be_cut_through_is_told():
    network, x = build("opaque")
    assert cut(network, x).kept == {"layer_norm": "norm", "softmax": "Opaque", "getitem": "Opaque"}
    small = cut(network, x, outputs={"wide": torch.arange(12) < 5, "first": torch.arange(6) < 2})
    assert small.get_parameter("wide.weight").shape == (7, 6)
    assert small.get_parameter("first.weight").shape == (6, 5)


def test_nothing_of_the_users_changes():
    network, x = build("resnet")
    network.train()
    network(x).sum().backward()
    sparse(network, 0.5, 0)
    before, state = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    small = cut(network, x)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), network.state_dict().values(), strict=True))
    assert network.training
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is not None and p.requires_grad for p in network.parameters())
    with torch.no_grad():
        small.get_parameter("head.weight").zero_()
    assert torch.equal(before["head.weight"], network.head.weight)


def test_dropout_that_is_always_on():
    """It stays, and looking at the network draws nothing."""

    class Net(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            h = self[0](input)
            h += 3.0
            return self[1](F.dropout(F.relu(h), 0.5, True))

    network, x = Net(nn.Linear(3, 8), nn.Linear(8, 2)), torch.randn(4, 3)
    state = torch.get_rng_state()
    small = cut(network, x, inputs={"1": torch.arange(8) < 3})
    assert torch.equal(state, torch.get_rng_state())
    assert small.get_parameter("0.weight").shape == (5, 3)
    assert not torch.equal(small(x), small(x))


def test_weights_that_are_computed():
    """What is computed of weights alone, as by weight norm, is computed once."""
    network = nn.Sequential(weight_norm(nn.Linear(5, 8)), nn.ReLU(), nn.Linear(8, 2))
    x, gone = torch.randn(3, 5), torch.arange(8) < 3
    small = cut(network, x, inputs={"2": gone})
    with torch.no_grad():
        network[2].weight[:, gone] = 0
    assert_same(small, network, x)
    assert size(small) == 5 * 5 + 5 + 2 * 5 + 2


def test_weights_of_others():
    """`params` and `buffers` stand in the places of the network's own."""
    network, x = build("resnet")
    other, _ = build("resnet", seed=1)
    sparse(other, 0.3, 0)
    small = cut(network, x, params=dict(other.named_parameters()), buffers=dict(other.named_buffers()))
    assert_same(small, other, x)


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.out = nn.Linear(4, 8), nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        return {"logits": self.out(F.gelu(self.left(left) + self.right(right)))}


@pytest.mark.parametrize("named", [True, False])
def test_several_inputs(named):
    network, left, right = Several(), torch.randn(5, 4), torch.randn(5, 3)
    gone = torch.arange(8) < 3
    small = cut(network, {"right": right, "left": left} if named else (left, right), outputs={"left": gone, "right": gone})
    with torch.no_grad():
        for layer in (network.left, network.right):
            layer.weight[gone], layer.bias[gone] = 0, 0
        found = small(right=right, left=left) if named else small(left, right)
        torch.testing.assert_close(found, network(left, right)["logits"])
    assert small.get_parameter("out.weight").shape == (3, 5)


def test_a_module_like_any_other():
    """It trains, is copied, and is exported for any number of examples."""
    network, x = build("branches")
    sparse(network, 0.4, 3)
    small = cut(network, x)
    assert size(small) < size(network)
    assert_same(copy.deepcopy(small), network, x)
    assert copy.deepcopy(small).plan.columns[0].tolist() == small.plan.columns[0].tolist()
    small(x).sum().backward()
    assert all(p.grad is not None for p in small.parameters())
    program = torch.export.export(small, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert_same(program.module(), network, x)
    double = ResNet().double().eval()
    assert cut(double, torch.zeros(1, 3, 8, 8).double())(torch.zeros(2, 3, 8, 8).double()).dtype == torch.float64


def test_refused():
    network, x = build("mlp")
    with pytest.raises(ValueError, match="no layer .1. with a weight; the network has"):
        cut(network, x, outputs={"1": torch.ones(3, dtype=torch.bool)})
    with pytest.raises(ValueError, match=r"bool tensor of shape \[10\]"):
        cut(network, x, outputs={"0": torch.ones(3, dtype=torch.bool)})
    with pytest.raises(ValueError, match="the network has no parameter or buffer"):
        cut(network, x, params={"0.weight": torch.zeros(2, 2)})
    grouped, x = build("groups")
    with pytest.raises(ValueError, match="groups"):
        cut(grouped, x, inputs={"grouped": torch.ones(2, dtype=torch.bool)})

    class Fickle(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            out = super().forward(input)
            return out.relu() if len(input) > 2 else out

    with pytest.raises(ValueError, match="another number of examples"):
        cut(Fickle(3, 2), torch.zeros(4, 3))
