"""What a user gets who sets nothing: the training follows the data and arrives."""

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito.inference.descent import default_budget
from dubito.inference.method import with_budget
from dubito.model.priors import Normal

NOISE = 0.3


def line(rows: int = 80) -> tuple[Tensor, Tensor]:
    """A linear regression with five inputs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 5, generator=generator)
    weights = torch.randn(5, 1, generator=generator)
    return x, x @ weights + 0.5 + NOISE * torch.randn(rows, 1, generator=generator)


def exact(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of weights and bias under N(0, 1)."""
    inputs = torch.cat([x, torch.ones(len(x), 1)], 1)
    precision = inputs.T @ inputs / NOISE**2 + torch.eye(6)
    return torch.linalg.solve(precision, inputs.T @ y / NOISE**2).flatten(), torch.linalg.inv(precision).diagonal().sqrt()


METHODS = [dubito.MAP(), dubito.Variational(), dubito.IVON(), dubito.SWAG(), dubito.MCDropout(at="", rate=0.0)]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_defaults_arrive_on_eighty_rows(method):
    x, y = line()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = dubito.Model(nn.Linear(5, 1), dubito.Gaussian(scale=NOISE), Normal(1.0))
    found = dubito.fit(model, method, (x, y), progress=False).center[0]
    mean, scale = exact(x, y)
    assert ((torch.cat([found["weight"].flatten(), found["bias"]]) - mean).abs() < 0.3 * scale).all()


@pytest.mark.parametrize("method", [dubito.MAP(), dubito.OnlineLaplace()], ids=["MAP", "OnlineLaplace"])
def test_defaults_arrive_on_iris(method):
    data = pytest.importorskip("sklearn.datasets").load_iris()
    x, y = torch.tensor(data.data).float(), torch.tensor(data.target)
    x, order = (x - x.mean(0)) / x.std(0), torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[:100], order[100:]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = dubito.Model(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3)), dubito.Categorical())
    posterior = dubito.fit(model, method, (x[train], y[train]), progress=False)
    assert -posterior.predict(x[test]).log_prob(y[test]).mean() < 0.25


def test_the_budget_follows_the_data_and_never_a_user_who_gives_one():
    assert [default_budget(batches)[0] * batches for batches in (1, 7, 30, 5000)] == [3000, 3003, 3000, 500_000]
    assert default_budget(5000)[1] == 1e-3
    assert default_budget(1)[1] > 5e-3
    for kind in (dubito.MAP, dubito.Variational, dubito.MCDropout, dubito.SWAG, dubito.IVON):
        assert kind().steps(1) == kind().steps(30) == 3000
        assert with_budget(kind(epochs=7), 2) == kind(epochs=7)
        assert kind(epochs=7).steps(2) == 14
        assert with_budget(kind(), 2).steps(2) == kind().steps(2) == 3000
    assert dubito.MAP(epochs=7).peak_rate == 1e-3
    assert with_budget(dubito.MAP(learning_rate=0.5), 1) == dubito.MAP(epochs=3000, learning_rate=0.5)


def test_combinators_pass_the_budget_on():
    ensemble = with_budget(dubito.Ensemble(dubito.Laplace(), 2), 3)
    assert ensemble == dubito.Ensemble(dubito.Laplace(), 2, start=with_budget(dubito.MAP(), 3))
    assert ensemble.steps(3) == dubito.Ensemble(dubito.Laplace(), 2).steps(3) == 3003
    teacher = dubito.MeanTeacher(dubito.MAP(), unlabelled=torch.zeros(1000, 2), unlabelled_size=100)
    assert with_budget(teacher, 1).method == with_budget(dubito.MAP(), 10)
    assert with_budget(teacher, 1).steps(1) == teacher.steps(1) == 3000


def test_evidence_steps_are_as_many_for_few_rows_as_for_many():
    few, many = (with_budget(dubito.OnlineLaplace(), batches) for batches in (1, 1000))
    assert few.passes - few.epochs == many.passes - many.epochs == 19
    assert few.steps(1) == dubito.OnlineLaplace().steps(1)
