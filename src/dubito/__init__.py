"""dubito: neural networks that know when they don't know."""

from dubito import augment as augment
from dubito import diagnostics as diagnostics
from dubito import families as families
from dubito import measures as measures
from dubito import metrics as metrics
from dubito import posteriors as posteriors
from dubito import priors as priors
from dubito.apps.compression import compress as compress
from dubito.elbo import elbo as elbo
from dubito.export import as_module as as_module
from dubito.fit import fit as fit
from dubito.io import load as load
from dubito.io import save as save
from dubito.judge import judge as judge
from dubito.likelihoods import Bernoulli as Bernoulli
from dubito.likelihoods import Categorical as Categorical
from dubito.likelihoods import Gaussian as Gaussian
from dubito.likelihoods import HeteroscedasticCategorical as HeteroscedasticCategorical
from dubito.likelihoods import HeteroscedasticGaussian as HeteroscedasticGaussian
from dubito.likelihoods import MultiTask as MultiTask
from dubito.methods import HMC as HMC
from dubito.methods import IVON as IVON
from dubito.methods import MALA as MALA
from dubito.methods import MAMS as MAMS
from dubito.methods import MAP as MAP
from dubito.methods import MCLMC as MCLMC
from dubito.methods import NUTS as NUTS
from dubito.methods import SGHMC as SGHMC
from dubito.methods import SGLD as SGLD
from dubito.methods import SWAG as SWAG
from dubito.methods import ULA as ULA
from dubito.methods import Ensemble as Ensemble
from dubito.methods import Laplace as Laplace
from dubito.methods import MCDropout as MCDropout
from dubito.methods import MeanTeacher as MeanTeacher
from dubito.methods import Metropolis as Metropolis
from dubito.methods import NeuralLinear as NeuralLinear
from dubito.methods import OnlineLaplace as OnlineLaplace
from dubito.methods import PiModel as PiModel
from dubito.methods import TemporalEnsembling as TemporalEnsembling
from dubito.methods import Variational as Variational
from dubito.model import Model as Model
from dubito.plan import plan as plan
from dubito.prior_predictive import prior_predictive as prior_predictive

__version__ = "0.2.0.dev0"
