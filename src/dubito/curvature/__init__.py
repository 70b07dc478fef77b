"""Curvature of the log likelihood over a network's weights: data to GGN, Fisher or Hessian in a structure."""

from dubito.curvature.collect import Collector as Collector
from dubito.curvature.collect import Spec as Spec
from dubito.curvature.collect import curvature as curvature
