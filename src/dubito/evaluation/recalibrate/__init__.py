r"""Make predictives keep what they promise, with the help of held-out data: maps of predictives, and conformal sets and intervals.

Each is a frozen dataclass of settings with `fit(predictive, y)`, which gives a map to call with other predictives:

    fix = Temperature().fit(posterior.predict(x_held), y_held)
    fix(posterior.predict(x)).mean

In the place of one predictive and its targets `fit` takes pairs of them, batch by batch: `fit(posterior.predict_batches(loader))`. A
recalibrated predictive is a `Predictive`, to be measured and judged as any other: `judge(lambda x: fix(posterior.predict(x)), data)`.
The held-out data is neither what the posterior was fitted to nor what the result is judged by.
"""

from dubito.evaluation.recalibrate.conformal import ConformalIntervals as ConformalIntervals
from dubito.evaluation.recalibrate.conformal import ConformalSets as ConformalSets
from dubito.evaluation.recalibrate.conformal import IntervalRule as IntervalRule
from dubito.evaluation.recalibrate.conformal import SetRule as SetRule
from dubito.evaluation.recalibrate.files import load as load
from dubito.evaluation.recalibrate.files import save as save
from dubito.evaluation.recalibrate.frequencies import Frequencies as Frequencies
from dubito.evaluation.recalibrate.frequencies import Histogram as Histogram
from dubito.evaluation.recalibrate.frequencies import Isotonic as Isotonic
from dubito.evaluation.recalibrate.predictives import RecalibratedClasses as RecalibratedClasses
from dubito.evaluation.recalibrate.predictives import RecalibratedNumbers as RecalibratedNumbers
from dubito.evaluation.recalibrate.regression import QuantileMap as QuantileMap
from dubito.evaluation.recalibrate.regression import Quantiles as Quantiles
from dubito.evaluation.recalibrate.regression import Stretched as Stretched
from dubito.evaluation.recalibrate.regression import Variance as Variance
from dubito.evaluation.recalibrate.scaling import Affine as Affine
from dubito.evaluation.recalibrate.scaling import MatrixScaling as MatrixScaling
from dubito.evaluation.recalibrate.scaling import Temperature as Temperature
from dubito.evaluation.recalibrate.scaling import Tempered as Tempered
from dubito.evaluation.recalibrate.scaling import VectorScaling as VectorScaling
