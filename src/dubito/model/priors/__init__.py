"""Priors p(theta), one a file. `Laplace` here is a prior; at the top level it is a method."""

from dubito._moved import renamed as _renamed
from dubito.model.priors.ard import ARD as ARD
from dubito.model.priors.bernoulli import Bernoulli as Bernoulli
from dubito.model.priors.by_name import ByName as ByName
from dubito.model.priors.centered import Centered as Centered
from dubito.model.priors.conv_correlated import ConvCorrelated as ConvCorrelated
from dubito.model.priors.gaussian_process import RBF as RBF
from dubito.model.priors.gaussian_process import GaussianProcess as GaussianProcess
from dubito.model.priors.groups import Groups as Groups
from dubito.model.priors.hierarchical import Hierarchical as Hierarchical
from dubito.model.priors.horseshoe import Horseshoe as Horseshoe
from dubito.model.priors.jeffreys import Jeffreys as Jeffreys
from dubito.model.priors.laplace import Laplace as Laplace
from dubito.model.priors.log_uniform import LogUniform as LogUniform
from dubito.model.priors.matching import matching as matching
from dubito.model.priors.matrix_normal import MatrixNormal as MatrixNormal
from dubito.model.priors.multivariate_normal import MultivariateNormal as MultivariateNormal
from dubito.model.priors.nngp import NNGP as NNGP
from dubito.model.priors.normal import Normal as Normal
from dubito.model.priors.prior import Prior as Prior
from dubito.model.priors.prior import prior_params as prior_params
from dubito.model.priors.scale_mixture import ScaleMixture as ScaleMixture
from dubito.model.priors.scales import Gamma as Gamma
from dubito.model.priors.scales import HalfCauchy as HalfCauchy
from dubito.model.priors.scales import InverseGamma as InverseGamma
from dubito.model.priors.spike_and_slab import SpikeAndSlab as SpikeAndSlab
from dubito.model.priors.student_t import StudentT as StudentT

concerned = prior_params

__getattr__ = _renamed(__name__, {"Centred": "Centered"})
