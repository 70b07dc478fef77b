"""The contract of the library, for its own parts and for yours.

`check_method`, `check_likelihood` and `check_prior` hold a method, a likelihood or a prior to it and raise an `AssertionError` that
says what is wrong. Read `regression` first (the problem whose posterior is known), then `moments` (how draws are compared with it),
`known` (what every registered method must show), and `methods`, `likelihoods` and `priors`. This room may import every other.
"""

from dubito.testing.known import KNOWN as KNOWN
from dubito.testing.known import TEMPERATURES as TEMPERATURES
from dubito.testing.known import Case as Case
from dubito.testing.likelihoods import check_likelihood as check_likelihood
from dubito.testing.methods import check_counts as check_counts
from dubito.testing.methods import check_frozen as check_frozen
from dubito.testing.methods import check_method as check_method
from dubito.testing.methods import check_resume as check_resume
from dubito.testing.methods import check_samples as check_samples
from dubito.testing.methods import check_saved as check_saved
from dubito.testing.methods import check_seed as check_seed
from dubito.testing.methods import check_uncertainty as check_uncertainty
from dubito.testing.methods import check_untouched as check_untouched
from dubito.testing.methods import check_untouched_by_errors as check_untouched_by_errors
from dubito.testing.methods import small_data as small_data
from dubito.testing.methods import small_model as small_model
from dubito.testing.methods import small_network as small_network
from dubito.testing.moments import check_draws as check_draws
from dubito.testing.moments import check_functions as check_functions
from dubito.testing.moments import check_law as check_law
from dubito.testing.moments import require as require
from dubito.testing.priors import check_prior as check_prior
from dubito.testing.regression import Law as Law
from dubito.testing.regression import Regression as Regression
from dubito.testing.regression import langevin_law as langevin_law
from dubito.testing.snapshots import check_same as check_same
from dubito.testing.snapshots import same_bits as same_bits
from dubito.testing.snapshots import snapshot as snapshot
from dubito.testing.snapshots import tensors as tensors
