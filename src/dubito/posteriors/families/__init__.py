"""Families of distributions q(theta) for variational inference.

`Family` is the interface, `FAMILIES` the table by name. Read `family`; `gaussian`, with matrix-variate Gaussians; the others,
`factorized` and `grouped`; and `reparametrized`, for drawing the outputs of layers instead of weights.
The package imports from the rooms `tensors`, `network` and `model`.
"""

from dubito._moved import renamed
from dubito.posteriors.families.factorized import Binary as Binary
from dubito.posteriors.families.factorized import Factorized as Factorized
from dubito.posteriors.families.family import Family as Family
from dubito.posteriors.families.gaussian import Full as Full
from dubito.posteriors.families.gaussian import Layerwise as Layerwise
from dubito.posteriors.families.gaussian import LowRank as LowRank
from dubito.posteriors.families.gaussian import MatrixNormal as MatrixNormal
from dubito.posteriors.families.gaussian import MeanField as MeanField
from dubito.posteriors.families.grouped import Flow as Flow
from dubito.posteriors.families.grouped import Grouped as Grouped

FAMILIES: dict[str, type[Family]] = {
    "mean_field": MeanField,
    "factorized": Factorized,
    "low_rank": LowRank,
    "layerwise": Layerwise,
    "full": Full,
    "matrix_normal": MatrixNormal,
    "flow": Flow,
    "grouped": Grouped,
    "binary": Binary,
    "factorised": Factorized,  # as version 0.1 wrote it, also into files
}

__getattr__ = renamed(__name__, {"Factorised": "Factorized"})
