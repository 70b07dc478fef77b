r"""Convolutions of few channels as products of large matrices.

A GPU's matrix unit wants 64 columns and more; a convolution to 16 channels has 16, and libraries leave three quarters of the unit idle
and read every pixel nine times from far away. Here a row of the product is a group of G neighbouring pixels of a line, all their
channels its columns, computed from windows of neighbouring pixels in each of three lines, which lie in memory one after another:

.. math:: Y_{r, (g, o)} = \sum_d \sum_{(p, i)} X_{r, d, (p, i)} B_{d, (p, i), (g, o)}, \quad B_{d, (p, i), (g, o)} = w_{o, i, d, p - g},

B is the kernel, repeated along a diagonal, with zeros elsewhere: some more arithmetic for far fewer reads. The gradient of x is
such a product too, with the kernel turned around, and that of B is the product of the windows with the gradient of Y; it is
summed in float32 over all images, and the entries of B that are one weight are added up.
"""
# pyright: reportPossiblyUnboundVariable=false, reportIndexIssue=false

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    jit, FUSED = triton.jit, True
except ImportError:  # it comes with torch for GPUs only
    FUSED = False

    def jit(function):
        return function


How = Literal["plain", "kernel"]

COLUMNS = 64  # of a product that fills the matrix unit
CHANNELS = (3, 16, 32, 64)  # of the images and, but for 3, of the output
ROWS, AHEAD = 256, 3  # rows of the product that a program makes, and how many pieces of its windows it reads ahead
SUMMED, SUMMED_AHEAD = 64, 3  # the same for the gradient of the kernel, where the sum runs over rows
PARTS = 264  # programs that share that sum


def convolution(x: Tensor, weight: Tensor, *, stride: int = 1, how: How = "plain") -> Tensor:
    """x [B, I, H, W] convolved with weight [O, I, k, k], k = 1 or 3, to [B, O, H / stride, W / stride].

    The padding is "same": with stride 1 on all sides, with stride 2 below and to the right only, as in TensorFlow and JAX. What cannot
    be done as asked is done plainly. "kernel" is for GPUs and half precision, and has first derivatives only.

    >>> x = torch.arange(16.0).view(1, 1, 4, 4)
    >>> convolution(x, torch.ones(1, 1, 3, 3), stride=2)
    tensor([[[[45., 39.],
              [66., 50.]]]])
    """
    if how == "kernel" and x.is_cuda and torch.is_autocast_enabled("cuda"):
        x = x.to(torch.get_autocast_dtype("cuda"))
    if how == "kernel" and fits(x, weight, stride):
        return _convolution(x, weight, stride)
    if stride == 2 and weight.shape[-1] == 3:
        weight = F.pad(weight, (1, 0, 1, 0))  # a row and a column of zeros before the kernel, and no copy of the images
    if weight.shape[-1] == 1 and not x.is_cuda:
        # oneDNN 3.x, as it comes with torch 2.13, writes beyond its memory here: 1 x 1, stride 2, channels last, AVX2 without AVX-512
        x, stride = x[:, :, ::stride, ::stride], 1
    return F.conv2d(x, weight, stride=stride, padding=0 if weight.shape[-1] == 1 else 1)


def fits(x: Tensor, weight: Tensor, stride: int) -> bool:
    """Whether the kernels can do it."""
    (outputs, inputs, size, _), (height, width) = weight.shape, x.shape[2:]
    known = inputs in CHANNELS and outputs in CHANNELS[1:] and size in (1, 3) and stride in (1, 2)
    whole = height in (8, 16, 32, 64) and width in (8, 16, 32, 64)
    stem = inputs != 3 or (size == 3 and stride == 1 and not x.requires_grad)
    return FUSED and x.is_cuda and x.dtype.itemsize == 2 and known and whole and stem


@dataclass(frozen=True)
class Layout:
    """Rows of a product are (image, line y, place q). Row (y, q) reads `wide` pixels from (step y - up, step q - left) on, in each of
    `lines` lines; its columns are written `segment` at a time, in as many lines of the output."""

    height: int  # of the images read
    width: int
    channels: int
    down: int  # rows in an image: its lines and places
    across: int
    step: int  # lines from one y to the next
    side: int  # pixels from one q to the next
    up: int
    left: int
    lines: int
    wide: int
    columns: int
    segment: int

    @property
    def depth(self) -> int:
        return self.wide * self.channels

    @property
    def constants(self) -> dict[str, int]:
        return {
            "H": self.height, "W": self.width, "C": self.channels, "DOWN": self.down, "ACROSS": self.across, "STEP": self.step,
            "SIDE": self.side, "UP": self.up, "LEFT": self.left, "LINES": self.lines, "DEPTH": self.depth, "N": self.columns,
            "SEGMENT": self.segment,
        }  # fmt: skip


def layout(shape: tuple[int, ...], kernel: tuple[int, ...], stride: int, group: int) -> tuple[Layout, Tensor]:
    """Of a convolution of images [B, C, H, W] with a kernel [O, I, k, k], k = 1 or 3, in groups of pixels; and for every entry of B
    which one of the kernel it is, -1 for those that are zero.

    Padded so that H / stride lines come out, where stride 2 pads below and to the right only.
    """
    (_, channels, height, width), (outputs, inputs, size, _) = shape, kernel
    pad = 1 if size == 3 and stride == 1 else 0
    left = 2 if channels == 4 and pad else pad  # windows of images with 4 channels begin where memory can be read fast
    reach = (group - 1) * stride + size + left - pad
    wide = next(w for w in (1, 2, 3, 4, 6, 8, 16) if w >= reach and (w * channels) % 16 == 0 and (w != 3 or channels >= 64))
    form = Layout(
        height, width, channels, height // stride, width // stride // group, stride, stride * group, pad, left, size, wide,
        group * outputs, group * outputs,
    )  # fmt: skip
    d, p, i, g, o = torch.meshgrid(*(torch.arange(n) for n in (size, wide, channels, group, outputs)), indexing="ij")
    t = p - g * stride - (left - pad)
    index = ((o * inputs + i) * size + d) * size + t
    return form, torch.where((t >= 0) & (t < size) & (i < inputs), index, -1).reshape(size * form.depth, form.columns)


def backwards(shape: tuple[int, ...], kernel: tuple[int, ...], stride: int, group: int) -> tuple[Layout, Tensor]:
    """`layout` of the product that gives the gradient of the images from that of the output, [B, O, H / stride, W / stride]."""
    (_, _, height, width), (outputs, inputs, size, _) = shape, kernel
    if stride == 1:
        form, _ = layout((0, outputs, height, width), (inputs, outputs, size, size), 1, group)
        d, p, o, g, i = torch.meshgrid(*(torch.arange(n) for n in (size, form.wide, outputs, group, inputs)), indexing="ij")
        t = size - 1 - (p - g)
        index = ((o * inputs + i) * size + size - 1 - d) * size + t
        return form, torch.where((t >= 0) & (t < size), index, -1).reshape(size * form.depth, form.columns)
    # a row is a square of two by two pixels; tap d of line oy meets line 2 oy + d
    lines = 1 if size == 1 else 2
    form = Layout(
        height // 2,
        width // 2,
        outputs,
        height // 2,
        width // 2,
        1,
        1,
        lines - 1,
        lines - 1,
        lines,
        lines,
        4 * inputs,
        2 * inputs,
    )
    d, p, o, v, h, i = torch.meshgrid(*(torch.arange(n) for n in (lines, lines, outputs, 2, 2, inputs)), indexing="ij")
    t, s = v + 2 * (lines - 1 - d), h + 2 * (lines - 1 - p)
    index = ((o * inputs + i) * size + t) * size + s
    return form, torch.where((t < size) & (s < size), index, -1).reshape(lines * form.depth, form.columns)


@jit
def windows(
    x, row, images, line, k,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    STEP: tl.constexpr, SIDE: tl.constexpr, UP: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """Elements k of the windows of rows [R] in a line: [R, K], zero outside of the image."""
    image, across = row // (DOWN * ACROSS), row % ACROSS
    h = row // ACROSS % DOWN * STEP + line - UP
    w = across[:, None] * SIDE - LEFT + k[None, :] // C
    has = ((image < images) & (h >= 0) & (h < H))[:, None] & (w >= 0) & (w < W)
    start = image.to(tl.int64) * (H * W * C) + (h * W + across * SIDE - LEFT) * C
    return tl.load(x + start[:, None] + k[None, :], mask=has, other=0.0)


@jit
def multiply(
    x, b, y, images,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    STEP: tl.constexpr, SIDE: tl.constexpr, UP: tl.constexpr, LEFT: tl.constexpr,
    LINES: tl.constexpr, DEPTH: tl.constexpr, N: tl.constexpr, SEGMENT: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """R rows a program. AHEAD = 1 reads through the near cache, more copies so many pieces ahead past it."""
    TILES: tl.constexpr = DEPTH // K
    LINE: tl.constexpr = ACROSS * SEGMENT  # elements in a line of the output
    row = tl.program_id(0) * R + tl.arange(0, R)
    k = tl.arange(0, K)
    n = tl.arange(0, N)
    total = tl.zeros((R, N), tl.float32)
    if AHEAD > 1:
        for i in tl.range(0, LINES * TILES, num_stages=AHEAD):
            window = windows(x, row, images, i // TILES, i % TILES * K + k, H, W, C, DOWN, ACROSS, STEP, SIDE, UP, LEFT)
            part = tl.load(b + (i * K + k)[:, None] * N + n[None, :])
            total = tl.dot(window, part, total)
    else:
        for i in tl.static_range(LINES * TILES):
            window = windows(x, row, images, i // TILES, i % TILES * K + k, H, W, C, DOWN, ACROSS, STEP, SIDE, UP, LEFT)
            part = tl.load(b + (i * K + k)[:, None] * N + n[None, :])
            total = tl.dot(window, part, total)
    image = row // (DOWN * ACROSS)
    start = image.to(tl.int64) * (DOWN * ACROSS * N) + row // ACROSS % DOWN * (N // SEGMENT * LINE) + row % ACROSS * SEGMENT
    at = start[:, None] + (n // SEGMENT * LINE + n % SEGMENT)[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=(image < images)[:, None] & (n[None, :] < N))


@jit
def correlate(
    x, dy, sums, images,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    STEP: tl.constexpr, SIDE: tl.constexpr, UP: tl.constexpr, LEFT: tl.constexpr,
    LINES: tl.constexpr, DEPTH: tl.constexpr, N: tl.constexpr, SEGMENT: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr, NN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The gradient of B from that of the output, of every program's share of the rows: `sums` [program, LINES * DEPTH, N]."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    k = tl.program_id(1) * K + tl.arange(0, K)
    n = tl.program_id(2) * NN + tl.arange(0, NN)
    first = tl.zeros((K, NN), tl.float32)
    second = tl.zeros((K, NN), tl.float32)
    third = tl.zeros((K, NN), tl.float32)
    for i in tl.range(part, tl.cdiv(images * (DOWN * ACROSS), R), parts, num_stages=AHEAD):
        row = i * R + tl.arange(0, R)
        has = row // (DOWN * ACROSS) < images
        slope = tl.load(dy + row.to(tl.int64)[:, None] * N + n[None, :], mask=has[:, None] & (n[None, :] < N), other=0.0)
        window = windows(x, row, images, 0, k, H, W, C, DOWN, ACROSS, STEP, SIDE, UP, LEFT)
        first = tl.dot(tl.trans(window), slope, first)
        if LINES == 3:
            window = windows(x, row, images, 1, k, H, W, C, DOWN, ACROSS, STEP, SIDE, UP, LEFT)
            second = tl.dot(tl.trans(window), slope, second)
            window = windows(x, row, images, 2, k, H, W, C, DOWN, ACROSS, STEP, SIDE, UP, LEFT)
            third = tl.dot(tl.trans(window), slope, third)
    at = sums + (part * LINES * DEPTH + k[:, None]) * N + n[None, :]
    tl.store(at, first)
    if LINES == 3:
        tl.store(at + DEPTH * N, second)
        tl.store(at + 2 * DEPTH * N, third)


@jit
def spread(w, index, b, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """B from the kernel."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(index + i, mask=i < SIZE, other=-1)
    tl.store(b + i, tl.load(w + entry, mask=entry >= 0, other=0.0).to(b.dtype.element_ty), mask=i < SIZE)


@jit
def gather(
    sums,
    places,
    dw,
    parts,
    ENTRIES: tl.constexpr,
    SIZE: tl.constexpr,
    TIMES: tl.constexpr,
    BLOCK: tl.constexpr,
    MANY: tl.constexpr,
):
    """The kernel's gradient from all programs' sums: each of its entries is found at TIMES `places` of B."""
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((MANY, BLOCK), tl.float32)
    for t in tl.static_range(TIMES):
        place = tl.load(places + t * ENTRIES + j, mask=j < ENTRIES, other=0)
        for start in range(0, parts, MANY):
            part = start + tl.arange(0, MANY)
            has = (part[:, None] < parts) & (j[None, :] < ENTRIES)
            total += tl.load(sums + part.to(tl.int64)[:, None] * SIZE + place[None, :], mask=has, other=0.0)
    tl.store(dw + j, tl.sum(total, 0), mask=j < ENTRIES)


@lru_cache(maxsize=256)
def _plan(shape: tuple[int, ...], kernel: tuple[int, ...], stride: int, way: str, device: torch.device) -> tuple[Layout, Tensor]:
    """Layout and index of a product; for the gradient of the kernel, the places of each of its entries."""
    outputs, inputs = kernel[:2]
    width = shape[3] // stride
    if way == "backwards":
        group = max(1, min(width, COLUMNS // inputs)) if stride == 1 else 1
        form, index = backwards(shape, kernel, stride, group)
        return form, index.int().to(device)
    group = max(1, min(width, (COLUMNS if way == "forwards" else COLUMNS // 2) // outputs)) if stride == 1 else 1
    if way == "correlate" and stride == 1 and shape[1] * (group + 2) % 64:  # windows of a power of two
        group = max(1, min(width, COLUMNS // outputs))
    form, index = layout(shape, kernel, stride, group)
    if way == "forwards":
        return form, index.int().to(device)
    order = index.flatten().argsort(stable=True)[(index < 0).sum() :]
    return form, order.view(-1, group).T.contiguous().int().to(device)


def _spread(x: Tensor, w: Tensor, index: Tensor) -> Tensor:
    b = x.new_empty(index.shape)
    spread[(triton.cdiv(index.numel(), 1024),)](w.contiguous(), index, b, SIZE=index.numel(), BLOCK=1024)
    return b


def _tile(depth: int) -> int:
    """Elements of a window that are read at once."""
    return next(size for size in (64, 32, 16) if depth % size == 0)


def _multiply(x: Tensor, w: Tensor, shape: tuple[int, ...], stride: int, way: str, y: Tensor) -> Tensor:
    form, index = _plan(shape, tuple(w.shape), stride, way, x.device)
    rows = x.shape[0] * form.down * form.across
    block = ROWS if form.columns <= 64 else ROWS // 2
    multiply[(triton.cdiv(rows, block),)](
        x, _spread(x, w, index), y, x.shape[0], **form.constants, R=block, K=_tile(form.depth), AHEAD=AHEAD, num_warps=8,
    )  # fmt: skip
    return y


def _padded(x: Tensor) -> Tensor:
    """In channels-last memory, with a channel of zeros more where there are three."""
    if x.shape[1] == 3:
        return torch.cat([x, x.new_zeros(x.shape[0], 1, *x.shape[2:])], 1).contiguous(memory_format=torch.channels_last)
    return x.contiguous(memory_format=torch.channels_last)


@torch.library.custom_op("dubito::convolution", mutates_args=())
def _convolution(x: Tensor, w: Tensor, stride: int) -> Tensor:
    x = _padded(x)
    size = (x.shape[0], w.shape[0], x.shape[2] // stride, x.shape[3] // stride)
    y = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    return _multiply(x, w, (0, *x.shape[1:]), stride, "forwards", y)


@torch.library.custom_op("dubito::convolution_backward", mutates_args=())
def _convolution_backward(dy: Tensor, x: Tensor, w: Tensor, stride: int, images: bool) -> tuple[Tensor, Tensor]:
    """Gradients of the images, if they are wanted, and of the kernel, in float32."""
    x, dy = _padded(x), dy.contiguous(memory_format=torch.channels_last)
    shape = (0, *x.shape[1:])
    dx = _multiply(dy, w, shape, stride, "backwards", torch.empty_like(x)) if images else x.new_empty(0)
    form, places = _plan(shape, tuple(w.shape), stride, "correlate", x.device)
    tiles = [next(size for size in (128, 64, 32, 16) if form.depth % size == 0), min(64, form.columns)]
    parts = min(PARTS, triton.cdiv(x.shape[0] * form.down * form.across, SUMMED))
    sums = x.new_empty(parts, form.lines * form.depth * form.columns, dtype=torch.float32)
    correlate[(parts, form.depth // tiles[0], form.columns // tiles[1])](
        x, dy, sums, x.shape[0], **form.constants, R=SUMMED, K=tiles[0], NN=tiles[1], AHEAD=SUMMED_AHEAD,
        num_warps=8 if tiles[0] * tiles[1] > 4096 else 4,
    )  # fmt: skip
    dw = w.new_empty(w.shape, dtype=torch.float32)
    gather[(triton.cdiv(w.numel(), 64),)](
        sums, places, dw, parts, ENTRIES=w.numel(), SIZE=sums.shape[1], TIMES=places.shape[0], BLOCK=64, MANY=32
    )
    return dx, dw.to(w.dtype)


@_convolution.register_fake
def _(x, w, stride):
    size = (x.shape[0], w.shape[0], x.shape[2] // stride, x.shape[3] // stride)
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


@_convolution_backward.register_fake
def _(dy, x, w, stride, images):
    last = x.contiguous(memory_format=torch.channels_last)
    return torch.empty_like(last) if images else x.new_empty(0), torch.empty_like(w)


def _keep(ctx, inputs, output):
    x, w, ctx.stride = inputs
    ctx.save_for_backward(x, w)


def _differentiate(ctx, dy):
    x, w = ctx.saved_tensors
    images = ctx.needs_input_grad[0]
    dx, dw = _convolution_backward(dy, x, w, ctx.stride, images)
    return dx if images else None, dw, None


_convolution.register_autograd(_differentiate, setup_context=_keep)


@_convolution.register_vmap
def _(info, dims, x, w, stride):
    """One member after another: each has a kernel of its own, and fills the GPU."""
    pairs = [(_of(x, dims[0], i), _of(w, dims[1], i)) for i in range(info.batch_size)]
    return torch.stack([_convolution(*pair, stride) for pair in pairs]), 0


@_convolution_backward.register_vmap
def _(info, dims, dy, x, w, stride, images):
    each = [(_of(dy, dims[0], i), _of(x, dims[1], i), _of(w, dims[2], i)) for i in range(info.batch_size)]
    dx, dw = zip(*(_convolution_backward(*leaves, stride, images) for leaves in each), strict=True)
    return (torch.stack(dx), torch.stack(dw)), (0, 0)


def _of(leaf: Tensor, dim: int | None, member: int) -> Tensor:
    return leaf if dim is None else leaf.select(dim, member)
