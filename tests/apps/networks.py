"""Networks to cut, with what stands in the way: residual sums, batch norm, concatenation, groups, padding, shared weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp() -> nn.Module:
    first = nn.Linear(6, 10), nn.Tanh(), nn.Dropout(), nn.Linear(10, 8), nn.Sigmoid()
    return nn.Sequential(*first, nn.Linear(8, 7, bias=False), nn.ReLU(), nn.Linear(7, 3))


def lenet() -> nn.Module:
    """LeNet-5-Caffe, 20-50-800-500."""
    convolutions = nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10))


class Block(nn.Module):
    def __init__(self, width: int, out: int, stride: int):
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.second, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        down = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.shortcut = down if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.first(x)), inplace=True)
        h = self.norm2(self.second(h))
        h += self.shortcut(x)
        return F.relu(h)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.blocks = nn.Sequential(Block(6, 6, 1), Block(6, 10, 2), Block(10, 10, 1))
        self.head = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(h, 1), 1))


class Branches(nn.Module):
    """Concatenation, and a flattening by hand."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Conv2d(2, 5, 3, padding=1), nn.Conv2d(2, 4, 1)
        self.joint, self.hidden, self.out = nn.Conv2d(9, 6, 3), nn.Linear(6 * 16, 7), nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([F.elu(self.left(x)), torch.sigmoid(self.right(x))], 1)
        h = F.gelu(self.joint(h)).view(x.size(0), -1)
        return self.out(torch.tanh(self.hidden(h)))


class Groups(nn.Module):
    """A depthwise convolution, and one in groups."""

    def __init__(self):
        super().__init__()
        self.point, self.norm = nn.Conv2d(2, 8, 1), nn.BatchNorm2d(8)
        self.depth, self.mix = nn.Conv2d(8, 16, 3, padding=1, groups=8), nn.Conv2d(16, 6, 1)
        self.grouped, self.out = nn.Conv2d(6, 9, 3, groups=3), nn.Conv2d(9, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu6(self.norm(self.point(x)))
        h = F.silu(self.mix(F.hardswish(self.depth(h))))
        return self.out(F.relu(self.grouped(h))).mean((2, 3))


class Padded(nn.Module):
    """A shortcut without weights, whose missing channels are zeros, and channels in another order."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 8, 3, 2, 1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x))
        h = F.relu(self.second(h) + F.pad(h[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2)))
        a, b = h.chunk(2, 1)
        return self.out(torch.cat([b, a], 1).mean(dim=[2, 3]))


class Gates(nn.Module):
    """Squeeze and excite, a scale of its own, PReLU, a transposed convolution, zeros that are averaged in."""

    def __init__(self):
        super().__init__()
        self.first, self.squeeze, self.excite = nn.Conv2d(2, 6, 3), nn.Linear(6, 3), nn.Linear(3, 6)
        self.scale, self.bend = nn.Parameter(torch.randn(6, 1, 1)), nn.PReLU(6)
        self.up, self.out = nn.ConvTranspose2d(6, 4, 3, 2, 1), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.bend(self.first(x) * self.scale)
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(h.mean((-1, -2))))))
        h = F.avg_pool2d(F.relu(self.up(h * gate[:, :, None, None])), 3, padding=1)
        return self.out(h).amax((2, 3))


class Opaque(nn.Module):
    """Layer norm and softmax, which mix units as they are; one output as a vector."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(5, 6), nn.LayerNorm(6)
        self.wide, self.narrow, self.out = nn.Linear(6, 12), nn.Linear(12, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h + self.narrow(F.gelu(self.wide(self.norm(h))))
        return self.out(F.softmax(h, -1))[:, 0]


class Shared(nn.Module):
    """One layer twice, and a weight that is used as a matrix."""

    def __init__(self):
        super().__init__()
        self.first, self.again, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Parameter(torch.randn(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return torch.tanh(self.again(torch.tanh(self.again(h)))) @ self.last


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(11, 6), nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(self.embed(x))[0][:, -1])


NETWORKS = {
    "mlp": (mlp, (6,)),
    "resnet": (ResNet, (3, 8, 8)),
    "branches": (Branches, (2, 6, 6)),
    "groups": (Groups, (2, 6, 6)),
    "padded": (Padded, (2, 6, 6)),
    "gates": (Gates, (2, 8, 8)),
    "opaque": (Opaque, (5,)),
    "shared": (Shared, (5,)),
    "words": (Words, ()),
}


def build(name: str, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """The network, with statistics of its own, and inputs."""
    torch.manual_seed(seed)
    make, shape = NETWORKS[name]
    network = make().eval()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for leaf, low in (
                (module.running_mean, -1),
                (module.running_var, 0.5),
                (module.weight.data, -1),
                (module.bias.data, -1),
            ):
                leaf.uniform_(low, 2)
    return network, torch.randn(5, *shape) if shape else torch.randint(11, (5, 4))


@torch.no_grad()
def sparse(network: nn.Module, rate: float, seed: int) -> nn.Module:
    """Zero outputs, inputs, single weights and biases, at random."""
    g = torch.Generator().manual_seed(seed)

    def chance(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=g)

    for leaf in network.parameters():
        if leaf.ndim < 2:
            leaf *= chance(*leaf.shape) > rate / 2
            continue
        leaf[chance(leaf.shape[0]) < rate] = 0
        leaf[:, chance(leaf.shape[1]) < rate / 2] = 0
        leaf *= chance(*leaf.shape) > rate / 2
    return network
