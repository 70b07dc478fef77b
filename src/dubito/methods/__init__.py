"""Inference methods, one a file."""

from dubito.methods.ensemble import Ensemble as Ensemble
from dubito.methods.hmc import HMC as HMC
from dubito.methods.ivon import IVON as IVON
from dubito.methods.laplace import Laplace as Laplace
from dubito.methods.mala import MALA as MALA
from dubito.methods.mams import MAMS as MAMS
from dubito.methods.map import MAP as MAP
from dubito.methods.mc_dropout import MCDropout as MCDropout
from dubito.methods.mclmc import MCLMC as MCLMC
from dubito.methods.mean_teacher import MeanTeacher as MeanTeacher
from dubito.methods.metropolis import Metropolis as Metropolis
from dubito.methods.neural_linear import NeuralLinear as NeuralLinear
from dubito.methods.nuts import NUTS as NUTS
from dubito.methods.online_laplace import OnlineLaplace as OnlineLaplace
from dubito.methods.pi_model import PiModel as PiModel
from dubito.methods.sghmc import SGHMC as SGHMC
from dubito.methods.sgld import SGLD as SGLD
from dubito.methods.swag import SWAG as SWAG
from dubito.methods.temporal_ensembling import TemporalEnsembling as TemporalEnsembling
from dubito.methods.ula import ULA as ULA
from dubito.methods.variational import Variational as Variational
