"""The forms a posterior can take, one a file. Methods return one of these; what follows is written for the forms."""

from dubito.posteriors.conjugate import Conjugate as Conjugate
from dubito.posteriors.drawn import Drawn as Drawn
from dubito.posteriors.gaussian import Gaussian as Gaussian
from dubito.posteriors.mixture import Mixture as Mixture
from dubito.posteriors.point import Point as Point
from dubito.posteriors.posterior import Posterior as Posterior
from dubito.posteriors.samples import Samples as Samples
from dubito.posteriors.stochastic import Stochastic as Stochastic
from dubito.posteriors.stored import Stored as Stored
