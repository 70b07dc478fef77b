"""Tensors on disk in one namespace: safe files, packed states, draws, and folders that one run holds at a time."""

from dubito._moved import renamed
from dubito.tensors.archive import SHARDS as SHARDS
from dubito.tensors.archive import Archive as Archive
from dubito.tensors.archive import Leaf as Leaf
from dubito.tensors.archive import Shard as Shard
from dubito.tensors.archive import write_shared as write_shared
from dubito.tensors.draws import GIGABYTE as GIGABYTE
from dubito.tensors.draws import Draws as Draws
from dubito.tensors.draws import Followed as Followed
from dubito.tensors.draws import TooLarge as TooLarge
from dubito.tensors.files import FORMAT as FORMAT
from dubito.tensors.files import FileError as FileError
from dubito.tensors.files import WriteError as WriteError
from dubito.tensors.files import atomic_write as atomic_write
from dubito.tensors.files import checksum as checksum
from dubito.tensors.files import describing_write_errors as describing_write_errors
from dubito.tensors.files import lock_folder as lock_folder
from dubito.tensors.files import read as read
from dubito.tensors.files import write as write
from dubito.tensors.packing import describe as describe
from dubito.tensors.packing import pack as pack
from dubito.tensors.packing import unpack as unpack
from dubito.tensors.packing import without_addresses as without_addresses

__getattr__ = renamed(
    __name__,
    {
        "described": "describe", "locked": "lock_folder", "replacing": "atomic_write", "telling": "describing_write_errors",
        "unplaced": "without_addresses",
    },
)  # fmt: skip
