"""What is believed: a model is a network, a likelihood p(y | f) and a prior p(theta).

Read in this order:

- `model`: `Model`, the three parts together
- `target`: `Target`, the posterior that a model and its data define, up to a constant
- `inspect`: warnings before a fit
- `likelihoods`: p(y | f)
- `priors`: p(theta)

May import `network` and `tensors`.
"""

from dubito.model.model import Model as Model
from dubito.model.target import Evaluation as Evaluation
from dubito.model.target import Target as Target
