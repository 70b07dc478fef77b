r"""Bandit problems: generated as published (Riquelme, Tucker & Snoek 2018), or made of labelled data. Nothing is downloaded."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable

import torch
from torch import Tensor

from dubito.apps.bandits.bandit import Bandit
from dubito.tensors.randomness import generator

SAFE, BAD, GOOD, REFUSE, HARM = 5.0, -35.0, 5.0, 0.0, 0.5  # rewards of eating and of not eating; how often poison harms
# values of the 22 attributes of the mushroom data: 117 columns, as published
ATTRIBUTES = (6, 4, 10, 2, 9, 2, 2, 2, 12, 2, 5, 4, 4, 9, 9, 1, 4, 3, 5, 9, 6, 7)
SPECIES = 23  # of which those data are samples


def wheel(rounds: int = 2000, *, delta: float = 0.95, seed: int = 0) -> Bandit:
    r"""The wheel: contexts uniform in the unit disc, five arms, and a reward that is large and rarely to be found.

    Arms 0 to 3 pay N(1, .05^2), arm 4 N(1.2, .05^2). Where :math:`\lVert x \rVert \ge \delta` one of the first four, chosen by the
    quadrant, pays N(50, .01^2): a share of :math:`1 - \delta^2` of all contexts.

    >>> wheel(100, seed=0).rewards.shape
    torch.Size([100, 5])
    """
    if not 0 <= delta < 1:
        raise ValueError(f"delta is a radius in [0, 1); got {delta}")
    source = generator("cpu", seed, "wheel")
    radius, angle = torch.rand((2, rounds), generator=source)
    radius, angle = radius.sqrt(), 2 * torch.pi * angle
    x = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    expected = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.2]).repeat(rounds, 1)
    scale = torch.full_like(expected, 0.05)
    quadrant = 2 * (x[:, 0] <= 0).long() + (x[:, 1] <= 0).long()
    far = (radius >= delta).nonzero().squeeze(1)
    expected[far, quadrant[far]], scale[far, quadrant[far]] = 50.0, 0.01
    noise = torch.randn(expected.shape, generator=source)
    return Bandit(x, expected + scale * noise, expected, f"wheel {delta:g}")


def linear(rounds: int = 2000, *, width: int = 10, arms: int = 8, nonzero: int | None = None, seed: int = 0) -> Bandit:
    """Arms that pay x . beta with x ~ N(0, 1), |beta| = 1 and noise of .01, .02, ...; with `nonzero` so many entries of beta are.

    >>> linear(100, arms=7, nonzero=3).contexts.shape
    torch.Size([100, 10])
    """
    source = generator("cpu", seed, "linear")
    beta = 2 * torch.rand((width, arms), generator=source) - 1
    if nonzero is not None:
        if not 1 <= nonzero <= width:
            raise ValueError(f"nonzero is between 1 and the width {width}; got {nonzero}")
        rank = torch.rand(beta.shape, generator=source).argsort(0).argsort(0)
        beta = beta * (rank < nonzero)
    beta = beta / beta.norm(dim=0)
    x = torch.randn((rounds, width), generator=source)
    noise = 0.01 * torch.arange(1, arms + 1) * torch.randn((rounds, arms), generator=source)
    return Bandit(x, x @ beta + noise, x @ beta, "linear" if nonzero is None else "sparse linear")


def eating(x: Tensor, poisonous: Tensor, rounds: int | None = None, *, seed: int = 0) -> Bandit:
    """The game of the mushrooms with any two classes: arm 0 leaves it, for 0; arm 1 eats, for 5 if it is safe, and else 5 or -35.

    Rounds are drawn from the rows with replacement, as published; None takes every row once, in random order. What is eaten is
    worth -15 on average if it is poisonous.

    >>> eating(torch.zeros(4, 2), torch.tensor([0, 1, 1, 0]), 10).rewards.shape
    torch.Size([10, 2])
    """
    if len(x) != len(poisonous) or set(poisonous.unique().tolist()) - {0, 1}:
        raise ValueError(f"poisonous is 0 or 1 for every row; got {len(poisonous)} values for {len(x)} rows")
    source, n = generator("cpu", seed, "eating"), len(x)
    rows = torch.randperm(n, generator=source) if rounds is None else torch.randint(n, (rounds,), generator=source)
    bad = poisonous[rows].bool()
    harmed = torch.rand(len(rows), generator=source) < HARM
    eaten = torch.where(bad & harmed, BAD, torch.where(bad, GOOD, SAFE))
    expected = torch.where(bad, HARM * BAD + (1 - HARM) * GOOD, SAFE)
    leave = torch.full_like(eaten, REFUSE)
    return Bandit(x[rows], torch.stack([leave, eaten], 1), torch.stack([leave, expected], 1), "eating")


def mushrooms(file: str | os.PathLike, rounds: int | None = 2000, *, seed: int = 0) -> Bandit:
    """The mushroom game as published, from a copy of UCI's `agaricus-lepiota.data`: a class, "e" or "p", and 22 letters a line."""
    with open(file, newline="") as lines:
        table = [row for row in csv.reader(lines) if row]
    if not table or any(row[0] not in ("e", "p") or len(row) != len(table[0]) for row in table):
        raise ValueError(f"{file}: every line of the mushroom data is a class, e or p, and 22 letters, separated by commas")
    columns = []
    for values in list(zip(*table, strict=True))[1:]:
        known = sorted(set(values))
        columns.append(torch.nn.functional.one_hot(torch.tensor([known.index(value) for value in values]), len(known)))
    poisonous = torch.tensor([row[0] == "p" for row in table]).long()
    found = eating(torch.cat(columns, 1).float(), poisonous, rounds, seed=seed)
    return Bandit(found.contexts, found.rewards, found.expected, "mushrooms")


def mushroom_like(rounds: int = 2000, *, concentration: float = 0.3, seed: int = 0) -> Bandit:
    """The mushroom game on generated mushrooms, for those without the file: 22 attributes of 117 values, 23 species.

    The published data are samples of 23 species, too. Here each species has its own frequencies of each attribute's values, drawn
    from a Dirichlet distribution, and every second one is poisonous.

    >>> mushroom_like(50).contexts.shape
    torch.Size([50, 117])
    """
    source = generator("cpu", seed, "mushroom")
    species = torch.randint(SPECIES, (rounds,), generator=source)
    columns = []
    for values in ATTRIBUTES:
        weights = torch._standard_gamma(torch.full((SPECIES, values), concentration), generator=source).clamp_min(1e-30)
        drawn = torch.multinomial(weights[species], 1, generator=source).squeeze(1)
        columns.append(torch.nn.functional.one_hot(drawn, values))
    poisonous = torch.randperm(SPECIES, generator=source)[species] % 2
    found = eating(torch.cat(columns, 1).float(), poisonous, None, seed=seed)
    return Bandit(found.contexts, found.rewards, found.expected, "mushroom-like")


def classification(x: Tensor, y: Tensor, rounds: int | None = None, *, seed: int = 0, name: str = "classification") -> Bandit:
    """Labelled data as a bandit: an arm for each class, which pays 1 where it is right and 0 where not.

    Classes are the values that occur in y, in rising order. Rows come in random order, at most `rounds` of them; contexts are
    standardised, as published.

    >>> classification(torch.randn(6, 2), torch.tensor([0, 1, 2, 0, 1, 2])).rewards.sum(1)
    tensor([1., 1., 1., 1., 1., 1.])
    """
    if len(x) != len(y) or y.ndim != 1:
        raise ValueError(f"a label is one number for every row; got {list(y.shape)} for {len(x)} rows")
    rows = torch.randperm(len(x), generator=generator("cpu", seed, "rows"))[: len(x) if rounds is None else rounds]
    x = x[rows].flatten(1).float()
    spread = x.std(0, correction=0)
    x = (x - x.mean(0)) / torch.where(spread > 0, spread, 1.0)
    right = y[rows].unsqueeze(1) == y.unique()  # labels need not begin at 0: those of shuttle are 1 to 7
    return Bandit(x, right.float(), name=name)


def _digits(rounds: int, seed: int) -> Bandit:
    from sklearn.datasets import load_digits

    x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    return classification(x, y, rounds, seed=seed, name="digits")


def _tumours(rounds: int, seed: int) -> Bandit:
    from sklearn.datasets import load_breast_cancer

    x, y = (torch.from_numpy(array) for array in load_breast_cancer(return_X_y=True))
    x = ((x - x.mean(0)) / x.std(0)).float()
    found = eating(x, 1 - y, rounds, seed=seed)  # there 1 is benign
    return Bandit(found.contexts, found.rewards, found.expected, "tumours")


def _mnist(rounds: int, seed: int) -> Bandit:
    from dubito.evaluation.data import mnist

    train = mnist("train")
    return classification(train.x, train.y, rounds, seed=seed, name="mnist")


# by name: (rounds, seed) -> Bandit. `tumours` is the mushroom game with real data of scikit-learn's; `mnist` needs DUBITO_DATA
PROBLEMS: dict[str, Callable[[int, int], Bandit]] = {
    "mushroom_like": lambda rounds, seed: mushroom_like(rounds, seed=seed),
    "wheel": lambda rounds, seed: wheel(rounds, seed=seed),
    "wheel_0.5": lambda rounds, seed: wheel(rounds, delta=0.5, seed=seed),
    "linear": lambda rounds, seed: linear(rounds, seed=seed),
    "sparse_linear": lambda rounds, seed: linear(rounds, arms=7, nonzero=3, seed=seed),
    "digits": _digits,
    "tumours": _tumours,
    "mnist": _mnist,
}
