"""Is the best posterior also the most robust one? HMC beside an ensemble under the 15 common corruptions, severity by severity.

    DUBITO_DATA=folder python examples/posteriors/shift.py            # MNIST; some minutes

MNIST, since its images have a size for which the corruptions are meant, and a dark border about which the training images say nothing:
draws of the posterior keep the prior's spread there (see `corruption.py`), and corruptions that bring light into the dark find it.
"""

from __future__ import annotations

import torch
from problem import Problem, report, setting
from torch import Tensor, nn

import dubito
from dubito.data import mnist
from dubito.shift import Sweep, sweep

TEST = 1000  # images


def flat(x: Tensor) -> Tensor:
    return x.flatten(1)


s = setting()
train, test = mnist("train"), mnist("test")
images, labels = test.x[:TEST].to(s.device), test.y[:TEST].to(s.device)
problem = Problem(s, flat(train.x[: s.train]).to(s.device), train.y[: s.train].to(s.device), flat(images), labels)
torch.manual_seed(s.seed)
network = nn.Sequential(nn.Linear(784, s.hidden), nn.ReLU(), nn.Linear(s.hidden, 10)).to(s.device)
model = dubito.Model(network, dubito.Categorical(), dubito.priors.Normal(s.scale))
hmc = problem.hmc(model)
posteriors = {"HMC": hmc, "ensemble of 10": problem.trained(model, 10), "one network (MAP)": problem.trained(model)}
sweeps: dict[str, Sweep] = {label: sweep(one, images, labels, transform=flat, seed=s.seed) for label, one in posteriors.items()}
rows = {
    label: {
        f"{metric} {level:g}": found.mean(metric, level)
        for metric in ("accuracy", "nll", "ece", "epistemic")
        for level in (0, 3, 5)
    }
    for label, found in sweeps.items()
}
rows["HMC"] |= problem.trust(hmc)
for label, found in sweeps.items():
    print(
        label,
        *(f"{kind} {found.scores[kind, 5]['accuracy']:.3f} {found.scores[kind, 5]['nll']:.2f}" for kind in found.kinds),
        sep=", ",
    )
report("shift", s, rows, sweeps={label: found.rows for label, found in sweeps.items()})
