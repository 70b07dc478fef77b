"""Families of distributions q(theta) for variational inference, one a file."""

from dubito.posteriors.families.binary import Binary as Binary
from dubito.posteriors.families.cholesky import Full as Full
from dubito.posteriors.families.cholesky import Layerwise as Layerwise
from dubito.posteriors.families.factorized import Factorised as Factorised
from dubito.posteriors.families.family import Family as Family
from dubito.posteriors.families.flow import Flow as Flow
from dubito.posteriors.families.grouped import Grouped as Grouped
from dubito.posteriors.families.low_rank import LowRank as LowRank
from dubito.posteriors.families.matrix_normal import MatrixNormal as MatrixNormal
from dubito.posteriors.families.mean_field import MeanField as MeanField

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
