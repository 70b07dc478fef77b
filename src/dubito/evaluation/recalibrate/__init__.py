r"""Make predictives keep what they promise, with the help of held-out data: maps of predictives, and conformal sets and intervals.

Each is a frozen dataclass of settings with `fit(predictive, y)`, which gives a map to call with other predictives:

    fix = Temperature().fit(posterior.predict(x_held), y_held)
    fix(posterior.predict(x)).mean

In the place of one predictive and its targets `fit` takes pairs of them, batch by batch: `fit(posterior.predict_batches(loader))`. A
recalibrated predictive is a `Predictive`, to be measured and judged as any other: `judge(lambda x: fix(posterior.predict(x)), data)`.
The held-out data is neither what the posterior was fitted to nor what the result is judged by.
"""

from dubito.evaluation.recalibrate.affine import Affine as Affine
from dubito.evaluation.recalibrate.affine import MatrixScaling as MatrixScaling
from dubito.evaluation.recalibrate.affine import VectorScaling as VectorScaling
from dubito.evaluation.recalibrate.classes import RecalibratedClasses as RecalibratedClasses
from dubito.evaluation.recalibrate.conformal_intervals import ConformalIntervals as ConformalIntervals
from dubito.evaluation.recalibrate.conformal_intervals import IntervalRule as IntervalRule
from dubito.evaluation.recalibrate.conformal_sets import ConformalSets as ConformalSets
from dubito.evaluation.recalibrate.conformal_sets import SetRule as SetRule
from dubito.evaluation.recalibrate.files import load as load
from dubito.evaluation.recalibrate.files import save as save
from dubito.evaluation.recalibrate.frequencies import Frequencies as Frequencies
from dubito.evaluation.recalibrate.frequencies import Histogram as Histogram
from dubito.evaluation.recalibrate.frequencies import Isotonic as Isotonic
from dubito.evaluation.recalibrate.numbers import RecalibratedNumbers as RecalibratedNumbers
from dubito.evaluation.recalibrate.quantiles import QuantileMap as QuantileMap
from dubito.evaluation.recalibrate.quantiles import Quantiles as Quantiles
from dubito.evaluation.recalibrate.temperature import Temperature as Temperature
from dubito.evaluation.recalibrate.temperature import Tempered as Tempered
from dubito.evaluation.recalibrate.variance import Stretched as Stretched
from dubito.evaluation.recalibrate.variance import Variance as Variance
