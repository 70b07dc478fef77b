"""Inference methods, one a file."""

from dubito.methods.ensemble import Ensemble as Ensemble
from dubito.methods.map import MAP as MAP
from dubito.methods.mc_dropout import MCDropout as MCDropout
