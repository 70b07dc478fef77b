"""Active learning: which inputs are worth a label, from any posterior.

`ActiveLearning` is the loop, with `ask` and `tell`. `ACQUISITIONS` has what it may ask by, by name: scores of single inputs
(`Measured`, `EPIG`, with noise `Randomized`), and `BatchBALD`, which looks at a batch as a whole. Read `learning` first (`labels` is
its state, `record` its files, `pool` the inputs), then `view`, a posterior's predictions on the pool, `acquisition`, and one
acquisition a file.
"""

from dubito._moved import renamed
from dubito.apps.active.acquisition import Acquisition as Acquisition
from dubito.apps.active.acquisition import Choice as Choice
from dubito.apps.active.batchbald import BatchBALD as BatchBALD
from dubito.apps.active.batchbald import batchbald as batchbald
from dubito.apps.active.epig import EPIG as EPIG
from dubito.apps.active.initial import balanced as balanced
from dubito.apps.active.labels import Round as Round
from dubito.apps.active.learning import ActiveLearning as ActiveLearning
from dubito.apps.active.measured import SCORES as SCORES
from dubito.apps.active.measured import Measured as Measured
from dubito.apps.active.measured import Random as Random
from dubito.apps.active.measured import bald as bald
from dubito.apps.active.measured import mean_std as mean_std
from dubito.apps.active.pool import Pool as Pool
from dubito.apps.active.randomized import Randomized as Randomized
from dubito.apps.active.registry import ACQUISITIONS as ACQUISITIONS
from dubito.apps.active.registry import acquisition as acquisition
from dubito.apps.active.view import View as View

__getattr__ = renamed(__name__, {"Randomised": "Randomized"})
