"""Everything that the package defines has an oracle, and agrees with it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import pytest
import torch
from torch.distributions import Independent, Poisson

import dubito
from contract import oracles_evaluation, oracles_model, oracles_posteriors, oracles_rules
from contract.tables import TABLES
from dubito import Gaussian, measures, metrics, priors
from dubito.families import Family
from dubito.likelihoods import Likelihood
from dubito.model.priors.scales import Scale
from dubito.posteriors import Posterior
from dubito.posteriors.predict.streamlined.moments import RULES
from dubito.posteriors.predictive import LINKS
from dubito.priors import Prior
from dubito.tensors.covariances import Covariance
from dubito.testing import check_likelihood, check_prior


def concrete(base: type) -> set[str]:
    """The names of all classes of the package that derive from a base and can be made."""
    found, waiting = set(), [base]
    while waiting:
        kinds = waiting.pop().__subclasses__()
        waiting += kinds
        found |= {kind.__name__ for kind in kinds if kind.__module__.split(".")[0] == "dubito" and not inspect.isabstract(kind)}
    return {name for name in found if not name.startswith("_")}


def exported(module, *, but: set[str]) -> set[str]:
    """The public classes and functions of a module."""
    named = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return {name for name, value in named.items() if inspect.isclass(value) or inspect.isfunction(value)} - but


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, table in TABLES.items() for name in table])
def test_agrees_with_its_oracle(group, name):
    TABLES[group][name]()


def test_every_likelihood_has_an_oracle():
    assert concrete(Likelihood) == set(oracles_model.LIKELIHOODS)


def test_every_prior_has_an_oracle():
    assert concrete(Prior) == set(oracles_model.PRIORS)
    assert concrete(Scale) == set(oracles_model.SCALES)
    known = {*oracles_model.PRIORS, *oracles_model.SCALES, *oracles_model.FUNCTIONS}
    assert exported(priors, but={"Prior", "Groups", "concerned", "prior_params"}) <= known


def test_every_part_of_a_posterior_has_an_oracle():
    assert concrete(Covariance) == set(oracles_posteriors.COVARIANCES)
    assert concrete(Family) == set(oracles_posteriors.FAMILIES)
    assert concrete(Posterior) == set(oracles_posteriors.FORMS)
    assert set(LINKS) == set(oracles_posteriors.LINKS)


def test_every_one_pass_rule_has_an_oracle():
    ours = {name for name, rule in RULES.items() if rule.__module__.split(".")[0] == "dubito"}  # not those that a test adds
    assert ours == set(oracles_rules.ONE_PASS)


def test_every_measure_and_metric_has_an_oracle():
    assert set(measures.MEASURES) == set(oracles_evaluation.MEASURES)
    assert set(metrics.METRICS) == set(oracles_evaluation.METRICS)
    assert set(metrics.DECISIONS) == set(oracles_evaluation.DECISIONS)
    known = {*oracles_evaluation.METRICS, *oracles_evaluation.DECISIONS, *oracles_evaluation.FUNCTIONS}
    results = {"Decomposition", "Metric", "QuantileCalibration", "Reliability", "Threshold"}
    assert exported(metrics, but=results) <= {*known, "Callable", "Literal", "NamedTuple", "Tensor", "partial"}
    defined = {
        name for name, value in vars(measures).items() if inspect.isfunction(value) and value.__module__ == measures.__name__
    }
    assert {name for name in defined if not name.startswith("_")} == set(oracles_evaluation.MEASURES)


# ---- third parties, right and wrong


@dataclass(frozen=True)
class Counts(Likelihood):
    """y ~ Poisson(e^f), in six lines."""

    def __call__(self, f, params):
        return Independent(Poisson(f.exp(), validate_args=False), 1)


class WrongNormalizer(Gaussian):
    """A density that forgets the logarithm of its scale."""

    def log_prob(self, f, y, params):
        return super().log_prob(f, y, params) + self.noise(f, params).log().sum()


class WrongMean(Counts):
    def mean(self, f, params):
        return f.exp() + 0.05


def test_a_likelihood_of_a_third_party_is_held_to_the_same():
    check_likelihood(Counts())
    with pytest.raises(AssertionError, match="check the normalizer"):
        check_likelihood(WrongNormalizer(scale=0.3))
    with pytest.raises(AssertionError, match="mean differs by"):
        check_likelihood(WrongMean())


@dataclass(frozen=True)
class Logistic(Prior):
    """Every weight has a logistic density."""

    slope: float = 1.0
    constant: float = 0.0

    def log_prob(self, params):
        total = torch.zeros((), dtype=torch.float64)
        for leaf in params.values():
            total = total + (-leaf - 2 * torch.nn.functional.softplus(-leaf) + self.constant).sum()
        return total

    def sample(self, like, generator=None):
        return {name: torch.rand(leaf.shape, generator=generator, dtype=leaf.dtype).logit() for name, leaf in like.items()}

    def gradient(self, params):
        return {name: self.slope * (1 - 2 * leaf.sigmoid()) for name, leaf in params.items()}


def test_a_prior_of_a_third_party_is_held_to_the_same():
    check_prior(Logistic())
    with pytest.raises(AssertionError, match="the gradient of '0.weight' is .* but differences of log_prob give"):
        check_prior(Logistic(slope=1.1))
    with pytest.raises(AssertionError, match="check the normalizer"):
        check_prior(Logistic(constant=0.1))


def test_draws_that_are_not_of_the_density_are_noticed():
    class Shrunk(Logistic):
        def sample(self, like, generator=None):
            return {name: 0.8 * leaf for name, leaf in super().sample(like, generator).items()}

    with pytest.raises(AssertionError, match="draws of '0.weight' are not from the density"):
        check_prior(Shrunk())


def test_the_suite_needs_no_pytest():
    assert not any("pytest" in inspect.getsource(module) for module in (dubito.testing, dubito.testing.methods))
