"""Priors p(theta), one a file. `Laplace` here is a prior; at the top level it is a method."""

from dubito.priors.multivariate_normal import MultivariateNormal as MultivariateNormal
from dubito.priors.normal import Normal as Normal
from dubito.priors.prior import Prior as Prior
