"""dubito: neural networks that know when they don't know.

The rooms, from the lowest to the highest; each imports only from those before it:

tensors -> network -> model -> curvature -> posteriors -> inference -> evaluation -> apps -> report -> web -> cli -> testing

The names below are loaded when they are first used, so that `import dubito` costs little more than `import torch`.
"""

import importlib
import sys
from typing import TYPE_CHECKING

from dubito import _moved

__version__ = "0.2.0.dev0"

if TYPE_CHECKING:
    from dubito import posteriors as posteriors
    from dubito.apps.compression import compress as compress
    from dubito.apps.tables import TableModel as TableModel
    from dubito.apps.tables import fit_table as fit_table
    from dubito.cli import compare as compare
    from dubito.evaluation import data as data
    from dubito.evaluation import measures as measures
    from dubito.evaluation import metrics as metrics
    from dubito.evaluation import recalibrate as recalibrate
    from dubito.evaluation import shift as shift
    from dubito.evaluation.judge import judge as judge
    from dubito.inference import augment as augment
    from dubito.inference import methods as methods
    from dubito.inference.elbo import elbo as elbo
    from dubito.inference.fit import fit as fit
    from dubito.inference.methods import HMC as HMC
    from dubito.inference.methods import IVON as IVON
    from dubito.inference.methods import MALA as MALA
    from dubito.inference.methods import MAMS as MAMS
    from dubito.inference.methods import MAP as MAP
    from dubito.inference.methods import MCLMC as MCLMC
    from dubito.inference.methods import NUTS as NUTS
    from dubito.inference.methods import SGHMC as SGHMC
    from dubito.inference.methods import SGLD as SGLD
    from dubito.inference.methods import SWAG as SWAG
    from dubito.inference.methods import ULA as ULA
    from dubito.inference.methods import Ensemble as Ensemble
    from dubito.inference.methods import Laplace as Laplace
    from dubito.inference.methods import MCDropout as MCDropout
    from dubito.inference.methods import MeanTeacher as MeanTeacher
    from dubito.inference.methods import Metropolis as Metropolis
    from dubito.inference.methods import NeuralLinear as NeuralLinear
    from dubito.inference.methods import OnlineLaplace as OnlineLaplace
    from dubito.inference.methods import PiModel as PiModel
    from dubito.inference.methods import TemporalEnsembling as TemporalEnsembling
    from dubito.inference.methods import Variational as Variational
    from dubito.inference.plan import plan as plan
    from dubito.model import Model as Model
    from dubito.model import likelihoods as likelihoods
    from dubito.model import priors as priors
    from dubito.model.likelihoods import Bernoulli as Bernoulli
    from dubito.model.likelihoods import BetaNLL as BetaNLL
    from dubito.model.likelihoods import Categorical as Categorical
    from dubito.model.likelihoods import CensoredGaussian as CensoredGaussian
    from dubito.model.likelihoods import CensoredLogNormal as CensoredLogNormal
    from dubito.model.likelihoods import CensoredWeibull as CensoredWeibull
    from dubito.model.likelihoods import Gaussian as Gaussian
    from dubito.model.likelihoods import GaussianMixture as GaussianMixture
    from dubito.model.likelihoods import HeteroscedasticCategorical as HeteroscedasticCategorical
    from dubito.model.likelihoods import HeteroscedasticGaussian as HeteroscedasticGaussian
    from dubito.model.likelihoods import HeteroscedasticStudentT as HeteroscedasticStudentT
    from dubito.model.likelihoods import MultiTask as MultiTask
    from dubito.model.likelihoods import NaturalGaussian as NaturalGaussian
    from dubito.model.likelihoods import NegativeBinomial as NegativeBinomial
    from dubito.model.likelihoods import NextToken as NextToken
    from dubito.model.likelihoods import Ordinal as Ordinal
    from dubito.model.likelihoods import Poisson as Poisson
    from dubito.model.likelihoods import StudentT as StudentT
    from dubito.posteriors import diagnostics as diagnostics
    from dubito.posteriors import families as families
    from dubito.posteriors.export import as_module as as_module
    from dubito.posteriors.io import load as load
    from dubito.posteriors.io import save as save
    from dubito.posteriors.prior_predictive import prior_predictive as prior_predictive
    from dubito.web import labelling as labelling

_MODULES = ("posteriors", *_moved.SHORT)
_NAMES = {
    "compress": "apps.compression",
    "TableModel": "apps.tables",
    "fit_table": "apps.tables",
    "judge": "evaluation.judge",
    "elbo": "inference.elbo",
    "fit": "inference.fit",
    "plan": "inference.plan",
    "Model": "model",
    "as_module": "posteriors.export",
    "load": "posteriors.io",
    "save": "posteriors.io",
    "prior_predictive": "posteriors.prior_predictive",
    **dict.fromkeys(("HMC", "IVON", "MALA", "MAMS", "MAP", "MCLMC", "NUTS", "SGHMC", "SGLD", "SWAG", "ULA"), "inference.methods"),
    **dict.fromkeys(("Ensemble", "Laplace", "MCDropout", "MeanTeacher", "Metropolis", "NeuralLinear"), "inference.methods"),
    **dict.fromkeys(("OnlineLaplace", "PiModel", "TemporalEnsembling", "Variational"), "inference.methods"),
    **dict.fromkeys(("Bernoulli", "Categorical", "Gaussian", "MultiTask"), "model.likelihoods"),
    **dict.fromkeys(("HeteroscedasticCategorical", "HeteroscedasticGaussian", "HeteroscedasticStudentT"), "model.likelihoods"),
    **dict.fromkeys(("CensoredGaussian", "CensoredLogNormal", "CensoredWeibull", "GaussianMixture"), "model.likelihoods"),
    **dict.fromkeys(
        ("BetaNLL", "NaturalGaussian", "NegativeBinomial", "NextToken", "Ordinal", "Poisson", "StudentT"), "model.likelihoods"
    ),
}
__all__ = sorted((*_MODULES, *_NAMES))  # pyright: ignore[reportUnsupportedDunderAll]

_moved.install(sys.modules[__name__])


def __getattr__(name: str) -> object:
    if name in _NAMES:
        value = getattr(importlib.import_module(f"dubito.{_NAMES[name]}"), name)
    elif name in _MODULES or name in _moved.MOVED:
        value = importlib.import_module(f"dubito.{name}")
    else:
        raise AttributeError(f"module 'dubito' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
