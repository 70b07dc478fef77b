"""Whether draws can be trusted: R-hat, effective sample sizes, energies, and predictives compared with each other.

Draws are [chains, n, ...]: every quantity on the trailing axes is judged on its own, all of them at once.
"""

from dubito.diagnostics.arviz import to_arviz as to_arviz
from dubito.diagnostics.energy import bfmi as bfmi
from dubito.diagnostics.energy import energy_error_per_dimension as energy_error_per_dimension
from dubito.diagnostics.ess import ess_bulk as ess_bulk
from dubito.diagnostics.ess import ess_mean as ess_mean
from dubito.diagnostics.ess import ess_tail as ess_tail
from dubito.diagnostics.ess import mcse_mean as mcse_mean
from dubito.diagnostics.predictions import agreement as agreement
from dubito.diagnostics.predictions import log_scores as log_scores
from dubito.diagnostics.predictions import running_log_score as running_log_score
from dubito.diagnostics.predictions import total_variation as total_variation
from dubito.diagnostics.rhat import nested_rhat as nested_rhat
from dubito.diagnostics.rhat import rhat as rhat
from dubito.diagnostics.rhat import rhat_classic as rhat_classic
from dubito.diagnostics.summary import Spread as Spread
from dubito.diagnostics.summary import Summary as Summary
from dubito.diagnostics.summary import convergence as convergence
from dubito.diagnostics.summary import summarize as summarize
