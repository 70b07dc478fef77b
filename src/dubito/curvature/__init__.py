"""Curvature of the log likelihood over a network's weights: data to GGN, Fisher or Hessian in a structure.

Read `statistics` first: what happens to a batch, from the forward pass to sums over examples (`products`: products with
vectors). Then, upwards: `passes` makes a covariance of the sums in one pass or two, `accumulate` is the state of a method that does
so, `evidence` what follows for ln p(D) and under other priors. Downwards: `setup` says which curvature of
what, `layout` finds the layers that hold the weights, `capture` records them in a forward pass, `rows` reads them as matrices
(`output_rows`: an output layer alone),
`cotangents` are what is propagated back, `generic` differentiates what is no known layer, `products` multiplies the curvature with
vectors, `memory` tells what fits. The room imports from model, network and tensors.
"""

from dubito._moved import renamed
from dubito.curvature.passes import curvature as curvature
from dubito.curvature.setup import Setup as Setup
from dubito.curvature.setup import Spec as Spec

__getattr__ = renamed(__name__, {"Collector": "Setup"})
