"""When a model will fail: scores that rank its errors first, a head that learns to, and answers only where it is safe.

`scores` reads scores off a predictive, `ConfidNet` learns one, `Selective` decides by one, and `failures` tells how good they are.
"""

from dubito.apps.failure.confidnet import Confidence as Confidence
from dubito.apps.failure.confidnet import ConfidNet as ConfidNet
from dubito.apps.failure.scores import SCORES as SCORES
from dubito.apps.failure.scores import Answer as Answer
from dubito.apps.failure.scores import Failure as Failure
from dubito.apps.failure.scores import Selective as Selective
from dubito.apps.failure.scores import Selector as Selector
from dubito.apps.failure.scores import errors as errors
from dubito.apps.failure.scores import failure as failure
from dubito.apps.failure.scores import failures as failures
from dubito.apps.failure.scores import one_minus_true as one_minus_true
from dubito.apps.failure.scores import scores as scores
