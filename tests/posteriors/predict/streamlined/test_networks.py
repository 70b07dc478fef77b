"""The networks of the trade, whole, with all their weights random."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FRN(nn.Module):
    """Filter response normalisation with its thresholded activation, which does without the batch."""

    def __init__(self, channels: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(1, channels, 1, 1)), nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean((2, 3), keepdim=True) + 1e-3) + self.bias


class Block(nn.Module):
    """Two convolutions and a way around; `before`: norms and functions come before the convolutions, as in a wide ResNet."""

    def __init__(self, fan_in: int, fan_out: int, stride: int, norm, before: bool):
        super().__init__()
        self.before = before
        self.norm1, self.norm2 = norm(fan_in if before else fan_out), norm(fan_out)
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, 1, 1, bias=False)
        same = stride == 1 and fan_in == fan_out
        self.around = nn.Identity() if same else nn.Conv2d(fan_in, fan_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            h = self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))
            return h + self.around(x)
        h = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(h + self.around(x))


class ResNet(nn.Module):
    def __init__(self, blocks: int, width: int, norm, before: bool = False):
        super().__init__()
        self.first, widths = nn.Conv2d(1, width, 3, padding=1, bias=False), (width, 2 * width, 4 * width)
        layers, fan_in = [], width
        for stage, fan_out in enumerate(widths):
            for i in range(blocks):
                layers.append(Block(fan_in, fan_out, 2 if stage and not i else 1, norm, before))
                fan_in = fan_out
        self.body, self.last = nn.Sequential(*layers), nn.Linear(fan_in, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.adaptive_avg_pool2d(self.body(self.first(x)), 1).flatten(1))


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 20), nn.ReLU(), nn.Linear(20, 3),
    )  # fmt: skip


NETWORKS = {
    "LeNet": lenet,
    "ResNet-20": lambda: ResNet(3, 8, nn.BatchNorm2d),
    "ResNet-20 with FRN": lambda: ResNet(3, 8, FRN),
    "wide ResNet": lambda: ResNet(1, 16, nn.BatchNorm2d, before=True),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_against_draws(name, around):
    network = NETWORKS[name]()
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):  # as after training
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
    posterior, x = around(network.eval(), variance=2e-5), torch.randn(2, 1, 8, 8)
    truth = posterior.predict(x, "sampled", draws=3000)
    adjoint = posterior.predict(x, "adjoint")
    # of x times its own norm's inverse the two are taken to be independent, in twenty layers one after another
    within = 0.2 if "FRN" in name else 0.06
    assert float(((adjoint.f_var / truth.f_var).sqrt() - 1).abs().mean()) < within
    shift = (1.0 if "FRN" in name else 0.2) * float(truth.f_var.sqrt().max())
    torch.testing.assert_close(adjoint.f_mean, truth.f_mean, rtol=0, atol=shift)
    forward = posterior.predict(x, "streamlined", rank=0)  # drops what positions share
    assert 0.3 < float((forward.f_var / truth.f_var).sqrt().mean()) < (3 if "FRN" in name else 1.7)
