"""Names of methods, measures and metrics, for the command line, the report and the contract tests.

A method enters here when its contract tests are green and a figure on real data is committed.
"""

from __future__ import annotations

from collections.abc import Callable

from dubito.inference.method import Method
from dubito.inference.methods import (
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
    ULA,
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

METHODS: dict[str, Callable[..., Method]] = {
    "map": MAP,
    "mc_dropout": MCDropout,
    "ensemble": Ensemble,
    "laplace": Laplace,
    "online_laplace": OnlineLaplace,
    "neural_linear": NeuralLinear,
    "swag": SWAG,
    "variational": Variational,
    "ivon": IVON,
    "pi_model": PiModel,
    "temporal_ensembling": TemporalEnsembling,
    "mean_teacher": MeanTeacher,
    "sgld": SGLD,
    "sghmc": SGHMC,
    "metropolis": Metropolis,
    "ula": ULA,
    "mala": MALA,
    "hmc": HMC,
    "nuts": NUTS,
    "mclmc": MCLMC,
    "mams": MAMS,
}
