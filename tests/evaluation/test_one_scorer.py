"""All callers of the scorer give the numbers that version 0.1 gave, when each of them scored on its own.

`python tests/evaluation/test_one_scorer.py` writes the numbers of today's code; only do that if they are meant to change.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import dubito
from dubito import Bernoulli, Categorical, Gaussian, HeteroscedasticCategorical
from dubito.apps import dense
from dubito.cli.compare.scoring import evaluate
from dubito.cli.compare.summary import describe
from dubito.evaluation.judge import Judge, judge, score
from dubito.evaluation.problems import DIGITS, Problem, Split, perceptron
from dubito.evaluation.shift import sweep
from dubito.posteriors import Samples
from dubito.posteriors.predictive import LatentMixture, StudentT

FILE = Path(__file__).parent / "pinned" / "scores.json"
N, S = 120, 3


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(1))


def samples(network, likelihood):
    model = dubito.Model(network, likelihood)
    shapes = {name: leaf.shape for name, leaf in network.named_parameters()}
    params = {name: noise(S, *shape, seed=3 + i) for i, (name, shape) in enumerate(sorted(shapes.items()))}
    return Samples(model, params, {})


def images():
    x = torch.rand(N, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    return samples(nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), Categorical()), x, labels(4, N)


def numbers():
    return samples(nn.Linear(3, 2), Gaussian(scale=0.8)), noise(N, 3), 2 * noise(N, 2, seed=1)


def predictives():
    gapped = labels(3, 12, 5, 2)
    gapped[::3, 1] = -100
    spread = noise(1, N, 2, seed=2).square()
    return {
        "classes": (LatentMixture(Categorical(), 2 * noise(S, N, 5)), labels(5, N)),
        "probit": (LatentMixture(Categorical(), noise(1, N, 2), spread, quadrature=8, link="probit"), labels(2, N)),
        "noisy classes": (LatentMixture(HeteroscedasticCategorical(samples=8), noise(S, N, 6)), labels(3, N)),
        "maps": (LatentMixture(Categorical(dim=1), 2 * noise(S, 12, 5, 2, 3)), gapped),
        "labels": (LatentMixture(Bernoulli(), noise(S, N, 3)), labels(2, N, 3)),
        "numbers": (LatentMixture(Gaussian(scale=(0.3, 0.7)), noise(S, N, 2)), noise(N, 2, seed=3)),
        "maps of numbers": (LatentMixture(Gaussian(scale=0.5, dim=1), noise(S, 12, 5, 2, 1)), noise(12, 1, 5, 2, seed=3)),
        "Student-t": (
            StudentT(Gaussian(outputs=2), noise(1, N, 2), spread, torch.ones(2) * 2, torch.ones(2)),
            noise(N, 2, seed=3),
        ),
    }


def of_judge():
    found = {}
    for name, (p, y) in predictives().items():
        one = Judge()
        one.update(p, y)
        found[name] = one.compute().data
    for name, make in (("images", images), ("table", numbers)):
        posterior, x, y = make()
        scores = ["total_variance", "epistemic_variance"]
        found[name] = judge(posterior, (x, y), size=50, scores=scores, progress=False).data
    return found


def of_evaluate():
    return {name: score(p, y) for name, (p, y) in predictives().items()}


def of_compare():
    found = {}
    posterior, x, y = images()
    split = Split(x[:40], y[:40], x, y, None, None, {"dark": 0.1 * x[:30]})
    given = Problem("images", "classification", lambda seed: split, DIGITS, perceptron((4,)), tuple("abcd"))
    asked = {"corruptions": ("contrast", "fog"), "severities": (1, 3), "detectors": ("msp", "energy"), "confidence": ("entropy",)}
    one = evaluate(posterior, given, split, seed=0, **asked)
    found["images"] = {"scores": dict(one.scores), "shift": dict(one.shift)}
    posterior, x, y = numbers()
    shift, scale = torch.tensor([1.0, -1.0]), torch.tensor([2.0, 3.0])
    split = Split(x[:40], y[:40], x, shift + scale * y, shift, scale, {"far": 5 * x[:30]})
    given = Problem("table", "regression", lambda seed: split, DIGITS, perceptron((4,)), ("a", "b"))
    found["table"] = {"scores": dict(evaluate(posterior, given, split, seed=0).scores)}
    return found


def of_demo():
    posterior, x, y = images()
    split = Split(x[:40], y[:40], x, y, None, None, {"unfamiliar": 0.1 * x[:30]})
    given = Problem("images", "classification", lambda seed: split, DIGITS, perceptron((4,)), tuple("abcd"))
    keys = ("accuracy", "nll", "ece", "errors auroc", "unfamiliar auroc total")
    scores = evaluate(posterior, given, split, seed=0).scores
    return {describe(key).name: scores[key] for key in keys} | {"seconds": 1.5}


def of_sweep():
    posterior, x, y = images()
    found = {"images": sweep(posterior, x, y, shift=["contrast", "fog"], batch_size=50).rows}
    found["rotations"] = sweep(posterior, x, y, shift="rotations", metrics=["brier", "mce"]).rows[:3]
    return found


def of_dense():
    found = {name: dense.Tally() for name in ("maps", "maps of numbers")}
    for name, tally in found.items():
        tally.update(*predictives()[name])
    posterior = samples(nn.Conv2d(1, 3, 1), Categorical(dim=1))
    x = torch.rand(6, 1, 5, 7, generator=torch.Generator().manual_seed(2))
    scores = ("total", "one_minus_max", "spread")
    assessed = dense.assess(posterior, (x, labels(3, 6, 5, 7)), scores=scores, progress=False)
    return {name: tally.compute().data for name, tally in found.items()} | {"assess": assessed.data}


CALLERS = {
    "judge": of_judge,
    "evaluate": of_evaluate,
    "compare": of_compare,
    "demo": of_demo,
    "sweep": of_sweep,
    "dense": of_dense,
}


def flat(value, path=""):
    """Every number of nested mappings and lists by its path."""
    if isinstance(value, dict):
        return {key: leaf for name, inner in value.items() for key, leaf in flat(inner, f"{path}/{name}").items()}
    if isinstance(value, list):
        return {key: leaf for i, inner in enumerate(value) for key, leaf in flat(inner, f"{path}/{i}").items()}
    return {path: None if isinstance(value, float) and not math.isfinite(value) else value}


@pytest.mark.parametrize("caller", CALLERS)
def test_the_numbers_of_every_caller_stay(caller):
    found, expected = flat(CALLERS[caller]()), json.loads(FILE.read_text())[caller]
    found = {path: value for path, value in found.items() if "/standard_errors/" not in path}  # new since then
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        assert found[path] == (pytest.approx(value, rel=1e-6, abs=1e-9) if isinstance(value, float) else value), path


if __name__ == "__main__":
    written = {name: flat(caller()) for name, caller in CALLERS.items()}
    FILE.write_text(json.dumps(written, indent=0) + "\n")
