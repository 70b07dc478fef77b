"""Inference methods, one a file."""

from dubito.inference.methods.ensemble import Ensemble as Ensemble
from dubito.inference.methods.hmc import HMC as HMC
from dubito.inference.methods.ivon import IVON as IVON
from dubito.inference.methods.laplace import Laplace as Laplace
from dubito.inference.methods.mala import MALA as MALA
from dubito.inference.methods.mams import MAMS as MAMS
from dubito.inference.methods.map import MAP as MAP
from dubito.inference.methods.mc_dropout import MCDropout as MCDropout
from dubito.inference.methods.mclmc import MCLMC as MCLMC
from dubito.inference.methods.mean_teacher import MeanTeacher as MeanTeacher
from dubito.inference.methods.metropolis import Metropolis as Metropolis
from dubito.inference.methods.neural_linear import NeuralLinear as NeuralLinear
from dubito.inference.methods.nuts import NUTS as NUTS
from dubito.inference.methods.online_laplace import OnlineLaplace as OnlineLaplace
from dubito.inference.methods.pi_model import PiModel as PiModel
from dubito.inference.methods.sghmc import SGHMC as SGHMC
from dubito.inference.methods.sgld import SGLD as SGLD
from dubito.inference.methods.swag import SWAG as SWAG
from dubito.inference.methods.temporal_ensembling import TemporalEnsembling as TemporalEnsembling
from dubito.inference.methods.ula import ULA as ULA
from dubito.inference.methods.variational import Variational as Variational
