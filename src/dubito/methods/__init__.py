"""Inference methods, one a file."""

from dubito.methods.ensemble import Ensemble as Ensemble
from dubito.methods.laplace import Laplace as Laplace
from dubito.methods.map import MAP as MAP
from dubito.methods.mc_dropout import MCDropout as MCDropout
from dubito.methods.neural_linear import NeuralLinear as NeuralLinear
from dubito.methods.online_laplace import OnlineLaplace as OnlineLaplace
from dubito.methods.swag import SWAG as SWAG
