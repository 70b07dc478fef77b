"""Covariance matrices over named weights, all with the same few methods."""

from dubito.tensors.covariances.covariance import Blocks as Blocks
from dubito.tensors.covariances.covariance import Covariance as Covariance
from dubito.tensors.covariances.covariance import Indefinite as Indefinite
from dubito.tensors.covariances.dense import Dense as Dense
from dubito.tensors.covariances.diagonal import Diagonal as Diagonal
from dubito.tensors.covariances.kronecker import Kronecker as Kronecker
from dubito.tensors.covariances.lowrank import LowRank as LowRank

STRUCTURES: dict[str, type[Covariance]] = {
    "diagonal": Diagonal,
    "kronecker": Kronecker,
    "lowrank": LowRank,
    "dense": Dense,
    "blocks": Blocks,
}
