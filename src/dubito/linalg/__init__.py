"""Covariance matrices over named weights, one structure a file, all with the same few methods."""

from dubito.linalg.blocks import Blocks as Blocks
from dubito.linalg.covariance import Covariance as Covariance
from dubito.linalg.covariance import Indefinite as Indefinite
from dubito.linalg.dense import Dense as Dense
from dubito.linalg.diagonal import Diagonal as Diagonal
from dubito.linalg.kronecker import Kronecker as Kronecker
from dubito.linalg.lowrank import LowRank as LowRank

STRUCTURES: dict[str, type[Covariance]] = {
    "diagonal": Diagonal,
    "kronecker": Kronecker,
    "lowrank": LowRank,
    "dense": Dense,
    "blocks": Blocks,
}
