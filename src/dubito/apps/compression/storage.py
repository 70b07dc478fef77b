"""A compressed network in a file, entropy-coded.

The file holds sizes and numbers: which units are left, and their weights. It holds no code and no names: `load` traces the network
that was compressed, cuts it in the same way, and fills in the weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dubito.apps.compression import coding
from dubito.apps.compression.cutting import Compressed, Plan, architecture, choices, follow, signature, write
from dubito.apps.compression.flows import Flows
from dubito.network.examples import pick_output
from dubito.tensors import store, tree
from dubito.tensors.checks import of_type
from dubito.tensors.randomness import fork_rng

MAGIC, FORMAT = b"dubito-cut", 2
HEAD = struct.Struct("<B8s8sIII")  # format, digests of the network and of what follows, lengths
SMALL = 256  # fewer numbers share the frequencies of others
LARGEST = 2**28  # numbers in the inputs of a file: they are few examples, and a damaged file could ask for any number
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool)
}


def save(module: Compressed, path: str | os.PathLike) -> int:
    """Write a compressed network to one file, whole or not at all; the result is how many bytes it has.

    Weights that were rounded are written as whole numbers, close to their entropy. What was changed since (trained further, for
    example) is written as it is.
    """
    of_type(Compressed, "what dubito.compress or compression.cut made", module=module)
    data = packed(module)
    with store.atomic_write(path) as scratch:
        scratch.write_bytes(data)
    return len(data)


def load(path: str | os.PathLike, network: nn.Module, *, output: Callable[[Any], Tensor] = pick_output) -> Compressed:
    """Read a compressed network. `network` is the one it was made of: the architecture only, its weights do not matter.

    >>> import tempfile
    >>> from dubito.apps import compression
    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> small = compression.cut(net, torch.zeros(1, 4), outputs={"0": torch.tensor([True, False, False])})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     size = compression.save(small, f"{folder}/small")
    ...     same = compression.load(f"{folder}/small", nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    >>> bool((same(torch.ones(1, 4)) == small(torch.ones(1, 4))).all())
    True
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    data = Path(path).read_bytes()
    if not data.startswith(MAGIC) or len(data) < len(MAGIC) + HEAD.size:
        raise store.FileError(f"{path}: not a network that dubito compressed")
    written, network_digest, digest, *lengths = HEAD.unpack_from(data, len(MAGIC))
    if written > FORMAT:
        raise store.FileError(f"{path}: written by a newer dubito (file format {written}); upgrade dubito to read it")
    body = data[len(MAGIC) + HEAD.size :]
    if _digest(written, network_digest, lengths, body) != digest or sum(lengths) > len(body):
        raise store.FileError(f"{path}: the contents do not match their checksum; the file was changed or damaged after writing")
    if architecture(network) != network_digest:
        raise store.FileError(f"{path}: made of another network, whose parameters or buffers have other names or shapes")
    parts = np.split(np.frombuffer(body, np.uint8), np.cumsum(lengths))
    about, masks, numbers, raw = (piece.tobytes() for piece in parts)
    return _unpacked(path, json.loads(zlib.decompress(about)), masks, numbers, raw, network, output)


def packed(module: Compressed) -> bytes:
    """The file's bytes."""
    planned, origin = module.plan, module.meta["origin"]
    state, steps = module.stored, []
    groups: dict[int, list[np.ndarray]] = {}
    raw = []
    for k, (name, leaf) in enumerate(state.items()):
        t, leaf = module.steps.get(name), leaf.detach().cpu()
        exact = t is not None and bool((coding.rounded(leaf, t) == leaf).all()) and int(coding.whole(leaf, t).abs().max()) < 2**31
        steps.append(t if exact else None)
        if exact:
            groups.setdefault(_context(k, leaf), []).append(coding.whole(leaf, t or 0).long().numpy().reshape(-1))
        else:
            raw.append(leaf.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    units, columns = origin
    chosen = np.concatenate(
        [planned.live[units], *(kept[there] for kept, there in zip(planned.columns, columns, strict=True)), planned.biases]
    )
    masks = coding.encode([chosen.astype(np.int64)])
    numbers = coding.encode([np.concatenate(groups[key]) for key in sorted(groups)])
    about: dict[str, Any] = {"steps": steps, "x": _shapes(planned.like), "masks": len(chosen), "trace": module.meta["trace"]}
    header = zlib.compress(json.dumps(about, separators=(",", ":")).encode(), 9)
    body = b"".join([header, masks, numbers, *raw])
    lengths = len(header), len(masks), len(numbers)
    digest = _digest(FORMAT, module.meta["architecture"], lengths, body)
    return MAGIC + HEAD.pack(FORMAT, module.meta["architecture"], digest, *lengths) + body


def _digest(written: int, network_digest: bytes, lengths: Sequence[int], body: bytes) -> bytes:
    """A digest of everything in the file; of the body alone in format 1."""
    head = HEAD.pack(written, network_digest, b"", *lengths) if written > 1 else b""
    return hashlib.blake2b(head + body, digest_size=8).digest()


def _context(k: int, leaf: Tensor) -> int:
    """Numbers that share frequencies: a large tensor its own, all small ones together."""
    return k if leaf.numel() >= SMALL else -1


def _shapes(like: Any) -> Any:
    if isinstance(like, Tensor):
        return [str(like.dtype).removeprefix("torch."), *like.shape]
    if isinstance(like, dict):
        return {key: _shapes(item) for key, item in like.items()}
    return {"": [_shapes(item) for item in like]}


def _like(shapes: Any) -> Any:
    if isinstance(shapes, dict):
        return tuple(map(_like, shapes[""])) if "" in shapes else {key: _like(item) for key, item in shapes.items()}
    return torch.empty(shapes[1:], dtype=DTYPES[shapes[0]], device="meta")


def _unpacked(
    path: str | os.PathLike,
    about: dict[str, Any],
    masks: bytes,
    numbers: bytes,
    raw: bytes,
    network: nn.Module,
    output: Callable[[Any], Tensor],
) -> Compressed:
    like = _like(about["x"])
    size = sum(leaf.numel() for leaf in tree.leaves(like))
    if size > LARGEST:
        raise store.FileError(f"{path}: damaged: it asks for inputs with {size} numbers")
    device = next(network.parameters()).device
    x = tree.apply_leaves(lambda leaf: torch.zeros(leaf.shape, dtype=leaf.dtype, device=device), like)
    weights = {name: leaf.detach() for name, leaf in [*network.named_parameters(), *network.named_buffers()]}
    with torch.no_grad(), fork_rng():
        flows = follow(network, weights, x, output)
        if signature(flows) != about["trace"]:
            why = "was made of a network that computes something else, or by another version of dubito or torch"
            raise store.FileError(f"{path} {why}: give that network, or use that version")
        units, columns = choices(flows, np.zeros(len(flows.units.parent), dtype=bool))
        if about["masks"] > len(units) + sum(map(len, columns)) + len(columns):
            raise store.FileError(f"{path}: damaged: it has {about['masks']} masks, more than the network has units and inputs")
        (kept,) = coding.decode(masks, [about["masks"]])
        module = write(network, flows, _plan(flows, kept > 0, like))
    state = module.stored
    _fill(list(state.values()), about["steps"], numbers, raw)
    module.meta["steps"] = {name: t for name, t in zip(state, about["steps"], strict=True) if t is not None}
    return module


def _plan(flows: Flows, kept: np.ndarray, like: Any) -> Plan:
    """The plan in a file: which units, columns and biases stay, in this order."""
    roots = flows.units.roots(np.arange(len(flows.units.parent)))
    units, _ = choices(flows, np.zeros(len(roots), dtype=bool))
    live = np.zeros(len(roots), dtype=bool)
    live[units] = kept[: len(units)]
    live, place, columns = live[roots], len(units), []
    for site in flows.sites:
        mask = live[site.cols]
        count = int(mask.sum())
        mask[mask] = kept[place : place + count]
        columns.append(mask)
        place += count
    return Plan(live, tuple(columns), tuple(kept[place:].tolist()), like)


def _fill(leaves: list[Tensor], steps: list[int | None], numbers: bytes, raw: bytes) -> None:
    """The weights, from whole numbers (those with a step) and from bytes (the others)."""
    groups: dict[int, list[int]] = {}
    for k, (leaf, t) in enumerate(zip(leaves, steps, strict=True)):
        if t is not None:
            groups.setdefault(_context(k, leaf), []).append(k)
    sizes = {key: [leaves[k].numel() for k in groups[key]] for key in sorted(groups)}
    decoded = coding.decode(numbers, [sum(size) for size in sizes.values()])
    for (key, size), array in zip(sizes.items(), decoded, strict=True):
        for k, piece in zip(groups[key], np.split(array, np.cumsum(size)[:-1]), strict=True):
            leaves[k].copy_((torch.from_numpy(piece).double() * 2.0 ** -(steps[k] or 0)).reshape(leaves[k].shape))
    place = 0
    for leaf in [leaf for leaf, t in zip(leaves, steps, strict=True) if t is None]:
        length = leaf.numel() * leaf.dtype.itemsize
        flat = np.frombuffer(raw, np.uint8, length, place).copy()
        leaf.copy_(torch.from_numpy(flat).view(leaf.dtype).reshape(leaf.shape))
        place += length
