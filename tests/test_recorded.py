import pytest
import torch
from torch import nn

from dubito import Categorical, Model
from dubito.model import Target
from dubito.recorded import Recorded


def problem(device: str):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    batches = [(torch.randn(16, 4, device=device), torch.randint(3, (16,), device=device)) for _ in range(3)]
    return Model(network, Categorical()), batches


def same(model, batches):
    """Gradients as the weights move in place, and over batches of another size."""
    plain, recorded = Target(model, 100), Recorded(model, 100)
    params = model.parameters()
    for x, y in [*batches, (batches[0][0][:7], batches[0][1][:7])]:
        expected = plain.gradient(params, [(x, y)], {}, factor=0.3)
        found = recorded.gradient(params, [(x, y)], {}, factor=0.3)
        torch.testing.assert_close(found.gradient, expected.gradient)
        torch.testing.assert_close(found.log_likelihood, expected.log_likelihood)
        torch._foreach_add_(list(params.values()), list(found.gradient.values()), alpha=0.01)
    return recorded


def test_ordinary_way_on_a_cpu():
    assert not same(*problem("cpu")).recordings


@pytest.mark.gpu
def test_played_back():
    recorded = same(*problem("cuda"))
    assert len(recorded.recordings) == 2
    assert all(recording is not None for recording in recorded.recordings.values())


@pytest.mark.gpu
def test_a_network_that_looks_at_values_goes_the_ordinary_way():
    class Looks(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2.0 if x.sum().item() > 0 else 1.0)

    _, batches = problem("cuda")
    same(Model(Looks(4, 3).cuda(), Categorical()), batches)
