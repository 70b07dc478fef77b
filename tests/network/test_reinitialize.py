"""Weights initialized again, by what the modules of other libraries bring along."""

from __future__ import annotations

import torch
from torch import nn

from dubito.network.reinitialize import reinitialize


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x):
        return self.weight * x / x.square().mean(-1, keepdim=True).sqrt()


class Mix(nn.Module):
    """A layer without `reset_parameters`."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.full((4, 4), 3.0))
        self.norm = RMSNorm()

    def forward(self, x):
        return self.norm(x @ self.table)


class Pretrained(nn.Module):
    """As transformers has it: the whole initializes each of its parts."""

    def __init__(self):
        super().__init__()
        self.mix, self.head = Mix(), nn.Linear(4, 2)

    def _init_weights(self, module):
        if isinstance(module, Mix):
            nn.init.normal_(module.table, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)


def test_a_network_that_initializes_its_parts_is_asked():
    network = Pretrained()
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    first, second = (reinitialize(network, dict(network.named_parameters()), seed) for seed in (1, 2))
    assert 0.005 < first["mix.table"].std() < 0.05
    assert first["head.weight"].abs().max() < 0.1  # its own way, not that of nn.Linear
    assert not torch.equal(first["mix.table"], second["mix.table"])
    assert torch.equal(first["mix.norm.weight"], torch.ones(4))
    assert all(torch.equal(before[name], p) for name, p in network.named_parameters())
