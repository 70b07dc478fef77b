"""Families of distributions q(theta) for variational inference, one a file."""

from dubito.families.binary import Binary as Binary
from dubito.families.cholesky import Full as Full
from dubito.families.cholesky import Layerwise as Layerwise
from dubito.families.factorised import Factorised as Factorised
from dubito.families.family import Family as Family
from dubito.families.flow import Flow as Flow
from dubito.families.grouped import Grouped as Grouped
from dubito.families.low_rank import LowRank as LowRank
from dubito.families.matrix_normal import MatrixNormal as MatrixNormal
from dubito.families.mean_field import MeanField as MeanField

FAMILIES: dict[str, type[Family]] = {
    "mean_field": MeanField,
    "factorised": Factorised,
    "low_rank": LowRank,
    "layerwise": Layerwise,
    "full": Full,
    "matrix_normal": MatrixNormal,
    "flow": Flow,
    "grouped": Grouped,
    "binary": Binary,
}
