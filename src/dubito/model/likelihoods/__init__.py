r"""Likelihoods p(y | f): what the network's output f means, and how its uncertainty splits.

A likelihood must give one thing, the distribution of y for given f. Everything else has a default by Monte Carlo or from the
distribution's moments, which closed forms override; tests hold every closed form against the default.

Axes: f is `[..., C]` with C last. `dim` says where C stands in what the network returns (`dim=1` for NCHW). Learned quantities
live in `params` under names that start with `likelihood:`; their leaves broadcast against f.
"""

from dubito._moved import renamed as _renamed
from dubito.model.likelihoods.categorical import Bernoulli as Bernoulli
from dubito.model.likelihoods.categorical import Categorical as Categorical
from dubito.model.likelihoods.categorical import Classes as Classes
from dubito.model.likelihoods.categorical import HeteroscedasticCategorical as HeteroscedasticCategorical
from dubito.model.likelihoods.censored import CensoredGaussian as CensoredGaussian
from dubito.model.likelihoods.censored import CensoredLogNormal as CensoredLogNormal
from dubito.model.likelihoods.censored import CensoredWeibull as CensoredWeibull
from dubito.model.likelihoods.counts import NegativeBinomial as NegativeBinomial
from dubito.model.likelihoods.counts import Poisson as Poisson
from dubito.model.likelihoods.gaussian import BetaNLL as BetaNLL
from dubito.model.likelihoods.gaussian import Gaussian as Gaussian
from dubito.model.likelihoods.gaussian import HeteroscedasticGaussian as HeteroscedasticGaussian
from dubito.model.likelihoods.gaussian import NaturalGaussian as NaturalGaussian
from dubito.model.likelihoods.likelihood import NOISE as NOISE
from dubito.model.likelihoods.likelihood import PREFIX as PREFIX
from dubito.model.likelihoods.likelihood import Likelihood as Likelihood
from dubito.model.likelihoods.likelihood import Uncertainty as Uncertainty
from dubito.model.likelihoods.likelihood import align as align
from dubito.model.likelihoods.likelihood import average as average
from dubito.model.likelihoods.likelihood import entropy as entropy
from dubito.model.likelihoods.likelihood import likelihood_params as likelihood_params
from dubito.model.likelihoods.likelihood import nodes as nodes
from dubito.model.likelihoods.likelihood import quadrature as quadrature
from dubito.model.likelihoods.mixture import GaussianMixture as GaussianMixture
from dubito.model.likelihoods.multi_task import MultiTask as MultiTask
from dubito.model.likelihoods.next_token import NextToken as NextToken
from dubito.model.likelihoods.ordinal import Ordinal as Ordinal
from dubito.model.likelihoods.student_t import HeteroscedasticStudentT as HeteroscedasticStudentT
from dubito.model.likelihoods.student_t import StudentT as StudentT

__getattr__ = _renamed(__name__, {"own": "likelihood_params"})
