"""All oracles by group and name, and the checks of known methods beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from contract import oracles_evaluation, oracles_methods, oracles_model, oracles_posteriors, oracles_rules
from dubito.testing import KNOWN

TABLES: Mapping[str, Mapping[str, Callable[[], None]]] = {
    "likelihood": oracles_model.LIKELIHOODS,
    "definition": {**oracles_model.FURTHER, **oracles_methods.FURTHER},
    "prior": oracles_model.PRIORS,
    "scale": oracles_model.SCALES,
    "prior over functions": oracles_model.FUNCTIONS,
    "covariance": oracles_posteriors.COVARIANCES,
    "family": oracles_posteriors.FAMILIES,
    "form": oracles_posteriors.FORMS,
    "link": oracles_posteriors.LINKS,
    "rule": oracles_rules.ONE_PASS,
    "random weights": oracles_rules.FURTHER,
    "measure": oracles_evaluation.MEASURES,
    "metric": oracles_evaluation.METRICS,
    "decision": oracles_evaluation.DECISIONS,
    "function of metrics": oracles_evaluation.FUNCTIONS,
}


def run(key: str) -> None:
    """Run one check of the contract: "likelihood/Gaussian", or "method/mala/fixed step", at temperature 0.3."""
    group, name = key.split("/", 1)
    if group == "method":
        method, which = name.split("/")
        case = KNOWN[method][which]
        case.check(0.3 if 0.3 in case.temperatures else case.temperatures[0])
    else:
        TABLES[group][name]()
