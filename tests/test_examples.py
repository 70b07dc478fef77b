"""The networks in examples/ are what they say, and run in dubito."""

import importlib.util
import runpy
from pathlib import Path

import pytest
import torch

import dubito
from dubito.inference.log_density import Density
from dubito.inference.registry import METHODS
from dubito.model import Target
from dubito.priors import Normal

PATH = Path(__file__).parents[1] / "examples" / "resnet20_frn.py"


@pytest.fixture(scope="module")
def resnet20_frn():
    spec = importlib.util.spec_from_file_location("resnet20_frn", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_parameters(resnet20_frn):
    """As many as the network has that HMC was run on, with a last layer of 64 inputs."""
    network = resnet20_frn.ResNet20FRN()
    assert sum(p.numel() for p in network.parameters()) == 274_042
    assert network.head.weight.shape == (10, 64)
    assert network(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def test_normalised(resnet20_frn):
    x = torch.tensor([0.49, 0.48, 0.64]).view(1, 3, 1, 1)
    torch.testing.assert_close(resnet20_frn.normalised(x).flatten(), torch.tensor([0.0, 0.0, 1.0]), atol=1e-6, rtol=0)


def test_runs(resnet20_frn):
    """Sampled with mini-batches, and as a density with all data."""
    torch.manual_seed(0)
    x, y = torch.randn(12, 3, 16, 16), torch.randint(10, (12,))
    model = dubito.Model(resnet20_frn.ResNet20FRN(width=4), dubito.Categorical(), Normal(scale=0.2**0.5))
    posterior = dubito.fit(model, dubito.SGHMC(burn_in=1, draws=2), (x, y), batch_size=6)
    assert posterior.predict(x).mean.shape == (12, 10)

    params, target = model.parameters(), Target(model, 12)
    density = Density(target, [(x[:6], y[:6]), (x[6:], y[6:])], params, {})
    value = density(dubito.tensors.tree.flatten(params).unsqueeze(0))
    expected = target.gradient(params, [(x, y)], {})
    torch.testing.assert_close(value.gradient[0], dubito.tensors.tree.flatten(expected.gradient), rtol=1e-3, atol=1e-3)


def test_closeness_has_a_setting_for_every_method(monkeypatch):
    """One that joins the registry and cannot be made without arguments needs a line there, or the example does not run."""
    folder = PATH.parent / "posteriors"
    monkeypatch.syspath_prepend(str(folder))
    closeness = runpy.run_path(str(folder / "closeness.py"))
    rows, refused = closeness["compared"](closeness["Setting"](), None)
    known = closeness["named"](closeness["Setting"](), None)
    assert set(known) <= set(METHODS)
    assert set(refused) == {"pi_model", "temporal_ensembling", "mean_teacher"}
    assert len(rows) == sum(len(known.get(name, [name])) for name in METHODS if name not in refused)
    assert all(method.data in ("batches", "full") for _, method, _ in rows)
