"""Weights initialized again, by what the modules of other libraries bring along."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

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


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm"])
def test_a_parametrized_layer_starts_as_the_plain_one_does(kind):
    network = nn.Sequential(getattr(parametrizations, kind)(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 2))
    params = dict(network.named_parameters())
    first, second = (reinitialize(network, params, seed) for seed in (1, 2))
    assert all(leaf.isfinite().all() for leaf in first.values())
    assert not any(torch.equal(first[name], second[name]) for name in first)
    assert torch.func.functional_call(network, first, torch.eye(4)).isfinite().all()
    if kind == "weight_norm":
        plain = first["0.parametrizations.weight.original0"] * nn.functional.normalize(
            first["0.parametrizations.weight.original1"], dim=1
        )
        assert plain.abs().max() <= 0.5  # uniform on (-1 / sqrt(4), 1 / sqrt(4))


def test_a_start_in_the_buffers_is_refused():
    network = nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 8)), nn.Linear(8, 2))
    with pytest.raises(ValueError, match="all members would start alike"):
        reinitialize(network, dict(network.named_parameters()), 1)
