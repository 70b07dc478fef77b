"""Bayesian optimisation with any posterior: expected improvement and Thompson sampling.

`Optimization` is the loop, with `ask` and `tell`; `expected_improvement` scores a predictive; `surrogate` is a posterior as a model
of BoTorch, an extra.
"""

from dubito.apps.optimize.improvement import expected_improvement as expected_improvement
from dubito.apps.optimize.improvement import greedy_improvement as greedy_improvement
from dubito.apps.optimize.optimization import Optimization as Optimization
from dubito.apps.optimize.surrogate import surrogate as surrogate
