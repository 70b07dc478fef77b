"""Bayesian optimization with any posterior: expected improvement and Thompson sampling.

`Optimization` is the loop, with `ask` and `tell`; `expected_improvement` scores a predictive; `surrogate` wraps a posterior as a model
of BoTorch, an optional dependency. A part of the room `apps`: it imports from `apps.network` and from the rooms below.
"""

from dubito.apps.optimize.optimization import Optimization as Optimization
from dubito.apps.optimize.optimization import expected_improvement as expected_improvement
from dubito.apps.optimize.optimization import greedy_improvement as greedy_improvement
from dubito.apps.optimize.optimization import surrogate as surrogate
