"""Priors p(theta). `Laplace` here is a prior; at the top level it is a method.

Read `prior`, the interface, and `normal`. `factorized` are independent weights that are all alike, `correlated` are Gaussians,
`hierarchical` infer the scales of groups (by the densities in `scales`), `composed` are made of other priors. `gaussian_process` and
`matching` are about functions.
"""

from dubito._moved import renamed as _renamed
from dubito.model.priors.composed import ByName as ByName
from dubito.model.priors.composed import Centered as Centered
from dubito.model.priors.correlated import ConvCorrelated as ConvCorrelated
from dubito.model.priors.correlated import MatrixNormal as MatrixNormal
from dubito.model.priors.correlated import MultivariateNormal as MultivariateNormal
from dubito.model.priors.factorized import Bernoulli as Bernoulli
from dubito.model.priors.factorized import Laplace as Laplace
from dubito.model.priors.factorized import LogUniform as LogUniform
from dubito.model.priors.factorized import ScaleMixture as ScaleMixture
from dubito.model.priors.factorized import StudentT as StudentT
from dubito.model.priors.gaussian_process import NNGP as NNGP
from dubito.model.priors.gaussian_process import RBF as RBF
from dubito.model.priors.gaussian_process import GaussianProcess as GaussianProcess
from dubito.model.priors.hierarchical import ARD as ARD
from dubito.model.priors.hierarchical import Groups as Groups
from dubito.model.priors.hierarchical import Hierarchical as Hierarchical
from dubito.model.priors.hierarchical import Horseshoe as Horseshoe
from dubito.model.priors.hierarchical import Jeffreys as Jeffreys
from dubito.model.priors.matching import matching as matching
from dubito.model.priors.normal import Normal as Normal
from dubito.model.priors.prior import Prior as Prior
from dubito.model.priors.prior import prior_params as prior_params
from dubito.model.priors.scales import Gamma as Gamma
from dubito.model.priors.scales import HalfCauchy as HalfCauchy
from dubito.model.priors.scales import InverseGamma as InverseGamma
from dubito.model.priors.spike_and_slab import SpikeAndSlab as SpikeAndSlab

__getattr__ = _renamed(__name__, {"Centred": "Centered", "concerned": "prior_params"})
