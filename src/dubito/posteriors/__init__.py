"""What is known after the data: forms of posteriors, their predictions, their files.

A method returns one of the forms, and what follows is written for the forms, never for the methods: `Point`, `Gaussian`, `Samples` (or
`Stored`, which stays on disk), `Stochastic`, `Drawn`, `Conjugate`, `Mixture`. Read `posterior` first, what every form can do; then
`predictive/`, what a prediction can be asked; `predict/`, the ways to predict; `functions`, a posterior as functions of x that can be
differentiated; `generate`, texts. Beside them are `families/` (q of variational inference), `diagnostics/` (whether draws can be
trusted), `prior_predictive`, `io` (save and load), `identity` (how a file knows its model) and `export` (`as_module`).

A form of your own derives from `Posterior` and has `sample` and `predict`; a name in `io.FORMS` makes it fit for files.
The room imports from curvature, model, network and tensors.
"""

from dubito.posteriors.conjugate import Conjugate as Conjugate
from dubito.posteriors.drawn import Drawn as Drawn
from dubito.posteriors.gaussian import Gaussian as Gaussian
from dubito.posteriors.mixture import Mixture as Mixture
from dubito.posteriors.posterior import Posterior as Posterior
from dubito.posteriors.samples import Point as Point
from dubito.posteriors.samples import Samples as Samples
from dubito.posteriors.stochastic import Stochastic as Stochastic
from dubito.posteriors.stored import Stored as Stored
