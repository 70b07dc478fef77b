"""The mean teacher against its recursion, and where its optimum is known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dubito
from dubito import MAP, Categorical, Gaussian, MeanTeacher, Model
from dubito.augment import Noise
from dubito.priors import Normal
from dubito.tensors import tree


def data(n: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 2, generator=torch.Generator().manual_seed(0)), torch.arange(n) % 3


def test_the_teacher_is_the_average_of_the_students():
    students, teachers = [], []

    def keep(event):
        students.append(tree.clone(event.state.student.params))
        teachers.append(tree.clone(event.state.teacher))

    model = Model(nn.Linear(2, 3), Categorical())
    method = MeanTeacher(MAP(epochs=5, learning_rate=0.1), decay=0.7, augment=Noise(0.1))
    found = dubito.fit(model, method, data(), batch_size=8, callbacks=[keep])
    average = {name: leaf.detach().clone() for name, leaf in model.network.named_parameters()}
    for s, (student, teacher) in enumerate(zip(students, teachers, strict=True), start=1):
        a = min(0.7, 1 - 1 / (s + 1))
        average = {name: a * leaf + (1 - a) * student[name] for name, leaf in average.items()}
        assert all(torch.allclose(teacher[name], leaf, atol=1e-6) for name, leaf in average.items())
    # 1/2, 2/3, then the decay: up to there it is the plain mean of the start and all students
    mean = torch.stack([model.network.weight.detach(), *(s["weight"] for s in students[:2])]).mean(0)
    assert torch.allclose(teachers[1]["weight"], mean, atol=1e-6)
    assert all(torch.equal(found.params[name], leaf) for name, leaf in teachers[-1].items())


def test_on_linear_regression_it_is_the_ridge_solution():
    """Where the student stands still the teacher catches up, and agreement costs nothing."""
    source = torch.Generator().manual_seed(1)
    x = torch.randn(60, 3, generator=source, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64) + 0.5 * torch.randn(60, 1, generator=source).double()
    model = Model(nn.Linear(3, 1, bias=False).double(), Gaussian(scale=0.5), Normal(scale=0.8))
    exact = torch.linalg.solve(x.mT @ x / 0.25 + torch.eye(3) / 0.64, x.mT @ y / 0.25)
    method = MeanTeacher(MAP(epochs=200, learning_rate=0.2), weight=3.0, decay=0.5)
    found = dubito.fit(model, method, (x, y), batch_size=60)
    assert torch.allclose(found.params["weight"].mT, exact, atol=1e-4)


def test_the_teacher_has_running_statistics_of_its_own():
    """Its passes are others than the student's, and the posterior is the teacher with what belongs to it."""
    network = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    states = []
    method = MeanTeacher(MAP(epochs=4, learning_rate=0.1), decay=0.9, augment=Noise(0.1))
    found = dubito.fit(
        Model(network, Categorical()), method, data(), batch_size=8, callbacks=[lambda event: states.append(event.state)]
    )
    last = states[-1]
    assert int(last.buffers["1.num_batches_tracked"]) == 12
    assert not torch.allclose(last.buffers["1.running_mean"], last.student.buffers["1.running_mean"])
    assert torch.equal(found.buffers["1.running_mean"], last.buffers["1.running_mean"])


def test_refusals():
    with pytest.raises(ValueError, match="decay must be"):
        MeanTeacher(MAP(), decay=1.0)
