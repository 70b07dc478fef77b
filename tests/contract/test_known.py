"""Every registered method is exact on Bayesian linear regression or has its known bias, and a method that is wrong is noticed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import dubito
from dubito import HMC, MALA, MAP, NeuralLinear
from dubito.inference.registry import METHODS
from dubito.inference.tuning import ChainState
from dubito.testing import KNOWN, TEMPERATURES, Regression, check_method

CASES = [
    pytest.param(case, temperature, id=f"{name}-{which}-{temperature}")
    for name, cases in KNOWN.items()
    for which, case in cases.items()
    for temperature in case.temperatures
]


def test_every_registered_method_is_known():
    assert KNOWN.keys() == METHODS.keys(), "add what a method must show to dubito.testing.known.KNOWN"
    for name, cases in KNOWN.items():
        made = METHODS[name]
        assert all(isinstance(case.method, made) for case in cases.values()), name  # pyright: ignore[reportArgumentType]
        tempered = set().union(*(case.temperatures for case in cases.values()))
        assert tempered == (set(TEMPERATURES) if name != "neural_linear" else {1.0}), name


def test_neural_linear_refuses_a_temperature():
    problem = Regression()
    with pytest.raises(ValueError, match="temperature"):
        dubito.fit(problem.model, NeuralLinear(), problem.data, temperature=0.3)


@pytest.mark.parametrize(("case", "temperature"), CASES)
def test_the_posterior_is_the_known_one(case, temperature):
    case.check(temperature)


# ---- methods that are wrong on purpose

SHORT: dict[str, Any] = {"chains": 2, "draws": 4, "burn_in": 2}


def deciding(answer):
    """Whatever the accept step of a sampler decides, the answer for all chains is this one."""
    accept = ChainState.accept
    return patch.object(
        ChainState, "accept", lambda state, point, accepted: accept(state, point, torch.full_like(accepted, answer))
    )


@dataclass(frozen=True)
class AcceptEverything(MALA):
    """Moves of three times the length, none of which is rejected."""

    def move(self, density, state, generator):
        state.tuning["log_step"] = torch.full_like(state.tuning["log_step"], 3 * self.step_size).log()
        with deciding(True):
            return super().move(density, state, generator)


@dataclass(frozen=True)
class RejectEverything(HMC):
    """Chains that never move."""

    def move(self, density, state, generator):
        with deciding(False):
            return super().move(density, state, generator)


def sampler(kind, **options):
    return kind(0.1, tune=False, chains=512, burn_in=15, draws=8, **options)


def test_a_sampler_that_is_right_passes():
    right = sampler(MALA, thin=15)
    check_method(right, short=replace(right, thin=1, **SHORT), temperatures=(0.3,))


def test_a_sampler_that_accepts_everything_is_noticed():
    wrong = sampler(AcceptEverything, thin=10)
    with pytest.raises(AssertionError, match="AcceptEverything on linear regression at temperature 0.3: the draws are not"):
        check_method(wrong, short=replace(wrong, thin=1, **SHORT))


def test_a_sampler_that_never_moves_is_noticed():
    with pytest.raises(AssertionError, match="effective draws|not those of the known law"):
        check_method(sampler(RejectEverything, path_length=1.0))


@dataclass(frozen=True)
class Untempered(MAP):
    """A point of the wrong model: weights are halved at the end."""

    def posterior(self, target, state, draws):
        state.params = {name: 0.5 * leaf for name, leaf in state.params.items()}
        return super().posterior(target, state, draws)


def test_a_wrong_mode_is_noticed():
    with pytest.raises(AssertionError, match="the mean is off by"):
        check_method(Untempered(epochs=300, learning_rate=0.05), "mode", batch_size=29)
