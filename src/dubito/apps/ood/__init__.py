"""Detection of unfamiliar inputs: scores that are large where an input is unlike the training data, from any posterior.

No unfamiliar inputs are needed to fit a detector.

A detector is a frozen dataclass of settings; `fit(posterior, data)` gives a score, a function of inputs x -> [B], larger is less
familiar. `DETECTORS` has them by name, `detection` tells how well scores keep two sets of inputs apart.
"""

from collections.abc import Callable
from functools import partial

from dubito.apps.ood.detectors import ODIN as ODIN
from dubito.apps.ood.detectors import Detection as Detection
from dubito.apps.ood.detectors import Detector as Detector
from dubito.apps.ood.detectors import Energy as Energy
from dubito.apps.ood.detectors import Mahalanobis as Mahalanobis
from dubito.apps.ood.detectors import MaxLogit as MaxLogit
from dubito.apps.ood.detectors import Measured as Measured
from dubito.apps.ood.detectors import Neighbours as Neighbours
from dubito.apps.ood.detectors import detection as detection

DETECTORS: dict[str, Callable[..., Detector]] = {
    "msp": partial(Measured, "one_minus_max"),
    "max_logit": MaxLogit,
    "energy": Energy,
    "odin": ODIN,
    "mahalanobis": Mahalanobis,
    "relative_mahalanobis": partial(Mahalanobis, relative=True),
    "neighbours": Neighbours,
    "predictive_entropy": partial(Measured, "predictive_entropy"),
    "mutual_information": partial(Measured, "mutual_information"),
    "epistemic_variance": partial(Measured, "epistemic_variance"),
}
