"""One training image, changed by hardly more than the eye can see, that turns a prediction: an attack by influence functions.

    DUBITO_DATA=folder python examples/poisoning.py
    DUBITO_DATA=folder python examples/poisoning.py --targets 10 --size 0.2

A network learns eight of the ten digits of MNIST. Its features are then frozen, and a logistic model on top of them learns to tell the
two others apart, 4 and 9, from a few hundred images. An attacker who may change a single one of these images, but not its label,
looks for the one whose change moves a test image most, and takes steps along the gradient of the test loss by its pixels; after every
step the logistic model is trained anew, to its exact optimum (Koh & Liang 2017, section 5.2). No pixel moves by more than `size`. For
comparison the same image gets random signs of that size.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import dubito
from dubito.apps.influence import Influence
from dubito.data import mnist
from dubito.posteriors import Point
from dubito.priors import Normal

PAIR = (4, 9)
FEATURES = 512  # more than there are training images: each can then pull at the decision in a direction of its own


class Network(nn.Module):
    """Convolutional features and a linear head."""

    def __init__(self, classes: int):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten(),
            nn.Linear(32 * 36, FEATURES), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(FEATURES, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@dataclass(frozen=True)
class Problem:
    """Images that the head is trained on, test images, and the model with frozen features."""

    model: dubito.Model
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    def trained(self, x: Tensor) -> Point:
        """The head at its optimum for these images, by Newton's method on the log joint."""
        model, prior = self.model, self.model.prior
        assert isinstance(prior, Normal)
        with torch.no_grad():
            phi = model.network.features(x)  # pyright: ignore[reportCallIssue]
            phi = torch.cat([phi, torch.ones_like(phi[:, :1])], 1).double()
            w, delta = torch.zeros(2, phi.shape[1], dtype=torch.float64), prior.scale_of("head") ** -2
            for _ in range(50):
                p = (phi @ w.mT).softmax(-1)
                slope = (p - nn.functional.one_hot(self.y, 2)).mT @ phi + delta * w
                # for two classes all curvature is in their difference
                half = (phi.mT * (2 * p[:, 0] * p[:, 1])) @ phi + delta * torch.eye(phi.shape[1]).double()
                step = torch.linalg.solve(half, slope.mT).mT
                w = w - step
                if float(step.abs().max()) < 1e-10:
                    break
        return Point(model, {"head.weight": w[:, :-1].float(), "head.bias": w[:, -1].float()}, model.buffers())


@dataclass
class Attack:
    """What became of one test image."""

    target: int  # test image
    poisoned: int  # training image
    before: float  # probability of the truth
    after: float
    random: float  # the same with random signs in the place of the attack
    steps: int
    image: Tensor = field(repr=False)


def problem(train: int, seed: int) -> Problem:
    data, test = mnist("train"), mnist("test")
    torch.manual_seed(seed)
    ours = torch.isin(data.y, torch.tensor(PAIR))
    others = ~ours
    labels = torch.tensor([0, 1, 2, 3, -1, 4, 5, 6, 7, -1])  # of the eight digits that the features are learned from
    network = Network(8)
    model = dubito.Model(network, dubito.Categorical())
    seen = (data.x[others][:8000], labels[data.y[others][:8000]])
    learned = dubito.fit(model, dubito.MAP(epochs=3, learning_rate=2e-3), seen, batch_size=64, seed=seed)
    network.load_state_dict(learned.params)
    network.requires_grad_(False)
    network.head = nn.Linear(FEATURES, 2)
    kept = torch.isin(test.y, torch.tensor(PAIR))
    model = dubito.Model(network, dubito.Categorical(), Normal(scale=1.0), only="^head")
    x, y = data.x[ours][:train], (data.y[ours][:train] == PAIR[1]).long()
    return Problem(model, x, y, test.x[kept], (test.y[kept] == PAIR[1]).long())


def attack(given: Problem, target: int, *, size: float, steps: int, seed: int = 0) -> Attack:
    """Look for one training image and a change of it that turns the prediction for a test image."""
    point = given.trained(given.x)
    test = given.x_test[target : target + 1], given.y_test[target : target + 1]

    def truth(point: Point) -> float:
        return float(point.predict(test[0]).mean[0, test[1][0]])

    before = after = truth(point)
    found = Influence("dense").fit(point, (given.x, given.y), batch_size=500)
    pulls = found.on_inputs(test, torch.arange(len(given.y)))
    which = int(
        pulls.abs().flatten(1).sum(1).argmax()
    )  # to first order a step of `size` in every pixel raises the loss by this much
    clean, x, taken = given.x[which], given.x.clone(), 0
    for i in range(steps):
        slope = pulls[which] if i == 0 else found.on_inputs(test, which)[0]
        moved = x[which] + size / 4 * slope.sign()
        x[which] = torch.minimum(torch.maximum(moved, clean - size), clean + size).clamp(0, 1)
        point, taken = given.trained(x), i + 1
        after = truth(point)
        if after < 0.5:
            break
        found = Influence("dense").fit(point, (x, given.y), batch_size=500)
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(seed)).sign()
    control = given.x.clone()
    control[which] = (clean + size * noise).clamp(0, 1)
    return Attack(target, which, before, after, truth(given.trained(control)), taken, x[which])


def main() -> list[Attack]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=int, default=200, help="images of the two digits to train on")
    parser.add_argument("--targets", type=int, default=5, help="test images to attack, one after the other")
    parser.add_argument("--size", type=float, default=0.2, help="of the change of a pixel, of 1")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    given = problem(options.train, options.seed)
    p = given.trained(given.x).predict(given.x_test).mean
    right = (p.argmax(-1) == given.y_test).nonzero().squeeze(1)
    print(f"{len(right) / len(p):.2%} of {len(p)} test images are right")
    done = []
    for target in right[: options.targets].tolist():
        one = attack(given, target, size=options.size, steps=options.steps, seed=options.seed)
        done.append(one)
        print(
            f"test image {target}: training image {one.poisoned} changed by {options.size:g}, p(truth) {one.before:.3f} -> "
            f"{one.after:.3f} in {one.steps} steps; by random signs {one.random:.3f}"
        )
    print(
        f"{sum(one.after < 0.5 for one in done)} of {len(done)} turned; by random signs {sum(one.random < 0.5 for one in done)}"
    )
    return done


if __name__ == "__main__":
    main()
