"""Diagnostics of draws: R-hat, effective sample sizes, energies, and comparisons of predictives.

Draws are [chains, n, ...]; every quantity on the trailing axes is judged separately, all of them at once. Read `chains`, then
`summary`; `predictions` stands apart. Only `posteriors.predictive` and the rooms below are imported.
"""

from dubito.posteriors.diagnostics.chains import Spread as Spread
from dubito.posteriors.diagnostics.chains import bfmi as bfmi
from dubito.posteriors.diagnostics.chains import convergence as convergence
from dubito.posteriors.diagnostics.chains import energy_error_per_dimension as energy_error_per_dimension
from dubito.posteriors.diagnostics.chains import ess_bulk as ess_bulk
from dubito.posteriors.diagnostics.chains import ess_mean as ess_mean
from dubito.posteriors.diagnostics.chains import ess_tail as ess_tail
from dubito.posteriors.diagnostics.chains import mcse_mean as mcse_mean
from dubito.posteriors.diagnostics.chains import nested_rhat as nested_rhat
from dubito.posteriors.diagnostics.chains import rhat as rhat
from dubito.posteriors.diagnostics.chains import rhat_classic as rhat_classic
from dubito.posteriors.diagnostics.predictions import agreement as agreement
from dubito.posteriors.diagnostics.predictions import log_scores as log_scores
from dubito.posteriors.diagnostics.predictions import running_log_score as running_log_score
from dubito.posteriors.diagnostics.predictions import total_variation as total_variation
from dubito.posteriors.diagnostics.summary import Summary as Summary
from dubito.posteriors.diagnostics.summary import summarize as summarize
from dubito.posteriors.diagnostics.summary import to_arviz as to_arviz
