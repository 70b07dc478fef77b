"""Active learning: which inputs are worth a label, from any posterior.

`ActiveLearning` is the loop, with `ask` and `tell`. `ACQUISITIONS` has what it may ask by, by name: scores of single inputs
(`Measured`, `EPIG`, with noise `Randomized`), and `BatchBALD`, which looks at a batch as a whole. Read `learning` first (`labels` has
its state and its files), then `pool`, the inputs and a posterior's predictions for them, and `acquisitions`.
"""

from dubito._moved import renamed
from dubito.apps.active.acquisitions import ACQUISITIONS as ACQUISITIONS
from dubito.apps.active.acquisitions import EPIG as EPIG
from dubito.apps.active.acquisitions import SCORES as SCORES
from dubito.apps.active.acquisitions import BatchBALD as BatchBALD
from dubito.apps.active.acquisitions import Measured as Measured
from dubito.apps.active.acquisitions import Random as Random
from dubito.apps.active.acquisitions import Randomized as Randomized
from dubito.apps.active.acquisitions import acquisition as acquisition
from dubito.apps.active.acquisitions import bald as bald
from dubito.apps.active.acquisitions import batchbald as batchbald
from dubito.apps.active.acquisitions import mean_std as mean_std
from dubito.apps.active.labels import Round as Round
from dubito.apps.active.learning import ActiveLearning as ActiveLearning
from dubito.apps.active.pool import Acquisition as Acquisition
from dubito.apps.active.pool import Choice as Choice
from dubito.apps.active.pool import Pool as Pool
from dubito.apps.active.pool import View as View
from dubito.apps.active.pool import balanced as balanced

__getattr__ = renamed(__name__, {"Randomised": "Randomized"})
