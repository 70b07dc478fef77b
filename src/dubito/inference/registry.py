"""Names of methods, measures and metrics, for the command line, the report and the contract tests.

A method enters here when its contract tests are green and a figure on real data is committed.
"""

from __future__ import annotations

from collections.abc import Callable

from dubito.inference import methods
from dubito.inference.method import Method

METHODS: dict[str, Callable[..., Method]] = {
    "map": methods.MAP,
    "mc_dropout": methods.MCDropout,
    "ensemble": methods.Ensemble,
    "laplace": methods.Laplace,
    "online_laplace": methods.OnlineLaplace,
    "neural_linear": methods.NeuralLinear,
    "swag": methods.SWAG,
    "variational": methods.Variational,
    "ivon": methods.IVON,
    "pi_model": methods.PiModel,
    "temporal_ensembling": methods.TemporalEnsembling,
    "mean_teacher": methods.MeanTeacher,
    "sgld": methods.SGLD,
    "sghmc": methods.SGHMC,
    "metropolis": methods.Metropolis,
    "ula": methods.ULA,
    "mala": methods.MALA,
    "hmc": methods.HMC,
    "nuts": methods.NUTS,
    "mclmc": methods.MCLMC,
    "mams": methods.MAMS,
}
