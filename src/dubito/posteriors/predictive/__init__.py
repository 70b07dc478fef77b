"""What a model predicts: one object for every way to get there.

Inside, the network's output f is [S, B, *D, C]: S draws or mixture components, B inputs, *D positions (pixels, time), C last.
A predictive answers in terms of the target y, with the observation noise always included. Read `predictive` for the definitions (mean,
log score, total = aleatoric + epistemic), then `latent_mixture`, the general kind, `student_t`, that of conjugate regression, and
`combine`.
"""

from dubito.posteriors.predictive.combine import concatenate as concatenate
from dubito.posteriors.predictive.combine import mix as mix
from dubito.posteriors.predictive.latent_mixture import LINKS as LINKS
from dubito.posteriors.predictive.latent_mixture import LatentMixture as LatentMixture
from dubito.posteriors.predictive.predictive import Predictive as Predictive
from dubito.posteriors.predictive.predictive import Units as Units
from dubito.posteriors.predictive.student_t import StudentT as StudentT
