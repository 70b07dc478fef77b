"""The methods under contract, each with what is known of it in closed form."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import dubito
from dubito import (
    HMC,
    IVON,
    MALA,
    MAMS,
    MAP,
    MCLMC,
    NUTS,
    SGHMC,
    SGLD,
    SWAG,
    Ensemble,
    Laplace,
    MCDropout,
    MeanTeacher,
    Metropolis,
    NeuralLinear,
    OnlineLaplace,
    PiModel,
    TemporalEnsembling,
    Variational,
)
from dubito.augment import Noise
from dubito.families import Flow
from dubito.inference.registry import METHODS

DOCS = Path(__file__).parents[2] / "docs"


def documented_sampler() -> Any:
    """The sampler of docs/writing-a-method.md, as a third party would write one."""
    code = re.findall(r"```python\n(.*?)```", (DOCS / "writing-a-method.md").read_text(), re.DOTALL)[0]
    namespace: dict[str, Any] = {"__name__": "documented"}
    exec(compile(code, "writing-a-method.md", "exec", dont_inherit=True), namespace)
    return namespace["ULA"]


ULA = documented_sampler()

UNLABELLED = torch.randn(100, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))  # inputs without targets

# Short fits for tests of form, not of quality.
QUICK: dict[str, Any] = {
    "map": MAP(epochs=3),
    "mc_dropout": MCDropout(epochs=3, at="", rate=0.2, draws=8),
    "mc_dropout/learned rates": MCDropout(epochs=3, at="", rate=0.2, draws=8, learn_rates=True),
    "ensemble": Ensemble(MAP(epochs=3), 3),
    "ensemble/one after another": Ensemble(MAP(epochs=3), 3, vectorize=False, bagging=True, adversarial=0.01),
    "ensemble/of dropout": Ensemble(MCDropout(epochs=3, at="", rate=0.2, draws=4), 2),
    "ensemble/of a sampler": Ensemble(ULA(n_draws=8, burn_in=0), 2),
    "ensemble/of swag": Ensemble(SWAG(epochs=4, draws=3), 2),
    "ensemble/of ivon": Ensemble(IVON(epochs=3), 2),
    "ensemble/of laplace": Ensemble(Laplace(check=False), 2, start=MAP(epochs=2)),
    "ensemble/early stopping": Ensemble(MAP(epochs=3), 2, hold_out=0.3),
    "ensemble/two stages": Ensemble(MAP(epochs=2), 2, start=MAP(epochs=1)),
    "laplace": Laplace(check=False),
    "laplace/diagonal": Laplace("diagonal", check=False),
    "laplace/dense": Laplace("dense", check=False),
    "laplace/lowrank": Laplace("lowrank", rank=5, check=False),
    "laplace/corrected": Laplace(corrected=True, check=False),
    "laplace/last layer": Laplace(subset="last_layer", check=False),
    "laplace/sampled labels": Laplace(curvature="fisher", check=False),
    "online_laplace": OnlineLaplace(epochs=3, every=1),
    "online_laplace/diagonal": OnlineLaplace("diagonal", "fisher", epochs=3, every=1),
    "neural_linear": NeuralLinear(),
    "swag": SWAG(epochs=4, draws=5, rank=3),
    "variational": Variational(epochs=3),
    "variational/layerwise": Variational("layerwise", epochs=3),
    "variational/flow": Variational(Flow(hidden=3), epochs=3),
    "variational/grouped": Variational("grouped", epochs=3),
    "ivon": IVON(epochs=3),
    "pi_model": PiModel(MAP(epochs=1), augment=Noise(0.1), unlabelled=UNLABELLED, unlabelled_size=20),
    "temporal_ensembling": TemporalEnsembling(
        MCDropout(epochs=1, at="", rate=0.2, draws=4), unlabelled=UNLABELLED, unlabelled_size=20
    ),
    "mean_teacher": MeanTeacher(MAP(epochs=1), augment=Noise(0.1), unlabelled=UNLABELLED, unlabelled_size=20),
    "mean_teacher/labelled only": MeanTeacher(MAP(epochs=3)),
    "ensemble/of mean teachers": Ensemble(MeanTeacher(MAP(epochs=1), unlabelled=UNLABELLED, unlabelled_size=20), 2),
    "sgld": SGLD(burn_in=1, draws=3, chains=2),
    "sgld/preconditioned": SGLD(burn_in=1, draws=3, preconditioner="rmsprop"),
    "sghmc": SGHMC(burn_in=1, draws=3),
    "sghmc/cyclical": SGHMC(burn_in=2, draws=2, cycles=2, chains=2),
    "metropolis": Metropolis(chains=2, draws=4, burn_in=2, thin=2),
    "ula": dubito.ULA(0.01, chains=2, draws=4, burn_in=2, thin=2),
    "mala": MALA(chains=2, draws=4, burn_in=2, thin=2),
    "hmc": HMC(0.01, chains=2, draws=4, burn_in=2, path_length=0.05),
    "nuts": NUTS(0.01, chains=2, draws=4, burn_in=2, max_depth=3),
    "mclmc": MCLMC(chains=2, draws=4, burn_in=2, thin=2),
    "mams": MAMS(0.01, chains=2, draws=4, burn_in=2, path_length=0.05),
    "third party": ULA(n_draws=8, burn_in=0),
}
# They sum over all data at the weights they are given and draw nothing, so another seed gives the same but for the order of the sums.
DETERMINISTIC = {"laplace", "laplace/diagonal", "laplace/dense", "laplace/corrected", "laplace/last layer", "neural_linear"}
REGRESSION_ONLY = {"neural_linear"}  # exact for Gaussian noise; classes are refused
assert {name.split("/")[0] for name in QUICK} == {*METHODS, "third party"}, "every registered method is under contract"
