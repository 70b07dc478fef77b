"""Priors p(theta), one a file. `Laplace` here is a prior; at the top level it is a method."""

from dubito.priors.ard import ARD as ARD
from dubito.priors.bernoulli import Bernoulli as Bernoulli
from dubito.priors.by_name import ByName as ByName
from dubito.priors.centred import Centred as Centred
from dubito.priors.conv_correlated import ConvCorrelated as ConvCorrelated
from dubito.priors.gaussian_process import RBF as RBF
from dubito.priors.gaussian_process import GaussianProcess as GaussianProcess
from dubito.priors.groups import Groups as Groups
from dubito.priors.hierarchical import Hierarchical as Hierarchical
from dubito.priors.horseshoe import Horseshoe as Horseshoe
from dubito.priors.jeffreys import Jeffreys as Jeffreys
from dubito.priors.laplace import Laplace as Laplace
from dubito.priors.log_uniform import LogUniform as LogUniform
from dubito.priors.matching import matching as matching
from dubito.priors.matrix_normal import MatrixNormal as MatrixNormal
from dubito.priors.multivariate_normal import MultivariateNormal as MultivariateNormal
from dubito.priors.nngp import NNGP as NNGP
from dubito.priors.normal import Normal as Normal
from dubito.priors.prior import Prior as Prior
from dubito.priors.prior import concerned as concerned
from dubito.priors.scale_mixture import ScaleMixture as ScaleMixture
from dubito.priors.scales import Gamma as Gamma
from dubito.priors.scales import HalfCauchy as HalfCauchy
from dubito.priors.scales import InverseGamma as InverseGamma
from dubito.priors.spike_and_slab import SpikeAndSlab as SpikeAndSlab
from dubito.priors.student_t import StudentT as StudentT
