r"""Filter response normalisation with all that stands around it, in one pass over memory.

With :math:`\hat x = (x + b) / \sqrt{\nu^2 + \epsilon}`, where :math:`\nu^2` is the mean of :math:`(x + b)^2` over the positions of an
image's channel (Singh & Krishnan 2020),

.. math:: y = \phi(s + \max(\gamma \hat x + \beta, \tau)),

s a shortcut of the same shape or nothing, and :math:`\phi` the swish or the identity. Written with torch's own operations this is nine
passes over memory forward and more backward, and for a small convolutional network most of the time. The kernels here read x and s
once and write y; backward they read x, s and the gradient of y, and write those of x and s. Only x is kept in between.
"""
# pyright: reportPossiblyUnboundVariable=false, reportIndexIssue=false

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    jit, FUSED = triton.jit, True
except ImportError:  # it comes with torch for GPUs only; without it the plain operations are used
    FUSED = False

    def jit(function):
        return function


CHANNELS = 128  # at most so many channels a program
READ, BACK = 4096, 2048  # elements that a program works on at a time, forward and backward


def filter_response_norm(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    tau: Tensor,
    *,
    bias: Tensor | None = None,
    skip: Tensor | None = None,
    swish: bool = False,
    eps: float = 1e-6,
    fused: bool = True,
) -> Tensor:
    """y [B, C, H, W] of x [B, C, H, W], with parameters [C].

    On a GPU with Triton, `fused` kernels do it, of which the first derivatives are known; elsewhere, and for more derivatives, it is
    written in torch's operations.

    >>> x = torch.tensor([[[[3.0, -4.0]]]])  # one image, one channel
    >>> one, zero = torch.ones(1), torch.zeros(1)
    >>> filter_response_norm(x, one, zero, zero)  # 3 / sqrt(12.5), and what is below tau
    tensor([[[[0.8485, 0.0000]]]])
    """
    if fused and fits(x):
        none = gamma.new_zeros(gamma.shape) if bias is None else bias
        return _frn(x, skip, *(leaf.unsqueeze(0) for leaf in (none, gamma, beta, tau)), swish, eps)[0]
    dtype, x = x.dtype, x.float() if x.dtype.itemsize < 4 else x
    gamma, beta, tau = (leaf[:, None, None] for leaf in (gamma, beta, tau))
    x = x if bias is None else x + bias[:, None, None]
    z = torch.maximum(gamma * (x * torch.rsqrt(x.square().mean((2, 3), keepdim=True) + eps)) + beta, tau)
    z = z if skip is None else skip + z
    return (F.silu(z) if swish else z).to(dtype)


def fits(x: Tensor) -> bool:
    """Whether the kernels can take x."""
    return FUSED and x.is_cuda and x.ndim == 4


def _blocks(x: Tensor, elements: int) -> dict[str, int | bool]:
    """How a kernel cuts an image into pieces of so many elements."""
    channels, positions = x.shape[1], x.shape[2] * x.shape[3]
    block = min(CHANNELS, triton.next_power_of_2(channels))
    pieces = min(triton.next_power_of_2(positions), max(1, elements // block))
    # a thread with all of its eight neighbours in memory would keep the parameters of eight channels
    return {"C": channels, "CP": block, "P": pieces, "V": 4, "num_warps": max(1, min(8, block * pieces // 256)), "num_stages": 1}


@jit
def read(at, has, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(at).to(tl.float32)
    return tl.load(at, mask=has, other=0.0).to(tl.float32)


@jit
def sigmoid(z, FAST: tl.constexpr):
    """FAST is one instruction, within 3e-4, which half precision does not see."""
    if FAST:
        h = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=r,r", [0.5 * z], dtype=tl.float32, is_pure=True, pack=1)
        return 0.5 + 0.5 * h
    return 1.0 / (1.0 + tl.exp(-z))


@jit
def forward(
    x, skip, bias, gamma, beta, tau, y, root, images, eps, POSITIONS: tl.constexpr,
    C: tl.constexpr, P: tl.constexpr, CP: tl.constexpr, SKIP: tl.constexpr, SWISH: tl.constexpr, FAST: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """One program an image and CP of its C channels, P positions at a time; memory is [image, position, channel].

    It goes through the image twice; the second time it comes from the cache.
    """
    WHOLE: tl.constexpr = POSITIONS % P == 0 and C % CP == 0
    image = tl.program_id(0)
    start = image.to(tl.int64) * (POSITIONS * C)
    p = tl.arange(0, P)[:, None]
    c = tl.program_id(1) * CP + tl.arange(0, CP)
    within = tl.max_contiguous(p * C + c[None, :], (1, V))
    own = image // images * C + c
    b = read(bias + own, c < C, C % CP == 0)
    squares = tl.zeros((P, CP), tl.float32)
    whole = tl.zeros((P, CP), tl.float32)
    for q in range(0, POSITIONS, P):
        has = (p < POSITIONS - q) & (c[None, :] < C)
        v = read(x + (start + q * C) + within, has, WHOLE) + b[None, :]
        if not WHOLE:
            v = tl.where(has, v, 0.0)
        squares += v * v
        whole += v
    r = tl.rsqrt(tl.sum(squares, 0) / POSITIONS + eps)
    tl.store(root + image * 2 * C + c, r, mask=c < C)
    tl.store(root + (image * 2 + 1) * C + c, tl.sum(whole, 0), mask=c < C)
    steep = r * read(gamma + own, c < C, C % CP == 0)
    offset = read(beta + own, c < C, C % CP == 0) + steep * b
    least = read(tau + own, c < C, C % CP == 0)
    for q in range(0, POSITIONS, P):
        has = (p < POSITIONS - q) & (c[None, :] < C)
        at = start + q * C
        z = tl.maximum(read(x + at + within, has, WHOLE) * steep[None, :] + offset[None, :], least[None, :])
        if SKIP:
            z += read(skip + at + within, has, WHOLE)
        if SWISH:
            z = z * sigmoid(z, FAST)
        tl.store(y + at + within, z.to(y.dtype.element_ty), mask=has)


@jit
def pulled(
    x, skip, dy, at, within, has, steep, offset, least,
    WHOLE: tl.constexpr, SKIP: tl.constexpr, SWISH: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """x, the gradient g of what the activation is taken of, and the part of g that is above tau."""
    g = read(dy + at + within, has, WHOLE)
    v = read(x + at + within, has, WHOLE)
    u = v * steep[None, :] + offset[None, :]
    if SWISH:
        z = tl.maximum(u, least[None, :])
        if SKIP:
            z += read(skip + at + within, has, WHOLE)
        s = sigmoid(z, FAST)
        g = g * (s + z * (s - s * s))
    return v, g, tl.where(u > least[None, :], g, 0.0)


@jit
def backward(
    x, skip, bias, gamma, beta, tau, root, dy, dx, dskip, sums, images, POSITIONS: tl.constexpr,
    C: tl.constexpr, P: tl.constexpr, CP: tl.constexpr, SKIP: tl.constexpr, SWISH: tl.constexpr, FAST: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    r"""As `forward`; `sums` [image, 4, C] are what the image adds to the gradients of bias, gamma, beta and tau.

    With g the gradient at :math:`u = A x + B`, the argument of the maximum, where :math:`A = \gamma r`, that of x is
    :math:`A (g - \hat x \, \overline{g \hat x})`, which is linear in g and x.
    """
    WHOLE: tl.constexpr = POSITIONS % P == 0 and C % CP == 0
    image = tl.program_id(0)
    start = image.to(tl.int64) * (POSITIONS * C)
    p = tl.arange(0, P)[:, None]
    c = tl.program_id(1) * CP + tl.arange(0, CP)
    within = tl.max_contiguous(p * C + c[None, :], (1, V))
    own = image // images * C + c
    b = read(bias + own, c < C, C % CP == 0)
    r = read(root + image * 2 * C + c, c < C, C % CP == 0)
    steep = r * read(gamma + own, c < C, C % CP == 0)
    offset = read(beta + own, c < C, C % CP == 0) + steep * b
    least = read(tau + own, c < C, C % CP == 0)
    sum_below = tl.zeros((P, CP), tl.float32)
    sum_above = tl.zeros((P, CP), tl.float32)
    sum_along = tl.zeros((P, CP), tl.float32)
    for q in range(0, POSITIONS, P):
        has = (p < POSITIONS - q) & (c[None, :] < C)
        at = start + q * C
        v, g, above = pulled(x, skip, dy, at, within, has, steep, offset, least, WHOLE, SKIP, SWISH, FAST)
        if SKIP:
            tl.store(dskip + at + within, g.to(dskip.dtype.element_ty), mask=has)
        sum_below += g - above
        sum_above += above
        sum_along += above * v
    total = tl.sum(sum_above, 0)
    along = r * (tl.sum(sum_along, 0) + b * total)  # of g and the normalised x
    pull = steep * r * along / POSITIONS
    base = pull * b
    for q in range(0, POSITIONS, P):
        has = (p < POSITIONS - q) & (c[None, :] < C)
        at = start + q * C
        v, g, above = pulled(x, skip, dy, at, within, has, steep, offset, least, WHOLE, SKIP, SWISH, FAST)
        tl.store(dx + at + within, (steep[None, :] * above - pull[None, :] * v - base[None, :]).to(dx.dtype.element_ty), mask=has)
    row = sums + image * 4 * C + c
    tl.store(row, steep * total - pull * read(root + (image * 2 + 1) * C + c, c < C, C % CP == 0), mask=c < C)
    tl.store(row + C, along, mask=c < C)
    tl.store(row + 2 * C, total, mask=c < C)
    tl.store(row + 3 * C, tl.sum(sum_below, 0), mask=c < C)


@torch.library.custom_op("dubito::frn", mutates_args=())
def _frn(
    x: Tensor, skip: Tensor | None, bias: Tensor, gamma: Tensor, beta: Tensor, tau: Tensor, swish: bool, eps: float
) -> tuple[Tensor, Tensor]:
    """y, and of every image 1 / sqrt(nu^2 + eps) and the sum of x + b, [B, 2, C].

    Parameters are [G, C], one row for each of G equal parts of the batch.
    """
    x, skip = _last(x), None if skip is None else _last(skip)
    images, positions, blocks = x.shape[0], x.shape[2] * x.shape[3], _blocks(x, READ)
    y, root = torch.empty_like(x), x.new_empty(images, 2, x.shape[1], dtype=torch.float32)
    rows = [leaf.contiguous() for leaf in (bias, gamma, beta, tau)]
    forward[(images, triton.cdiv(x.shape[1], blocks["CP"]))](
        x, x if skip is None else skip, *rows, y, root, images // gamma.shape[0], eps, positions,
        SKIP=skip is not None, SWISH=swish, FAST=_fast(x), **blocks,
    )  # fmt: skip
    return y, root


@torch.library.custom_op("dubito::frn_backward", mutates_args=())
def _frn_backward(
    dy: Tensor,
    x: Tensor,
    skip: Tensor | None,
    bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    tau: Tensor,
    root: Tensor,
    swish: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of skip (empty without one) and of the four parameters, [4, G, C]."""
    dy, x, skip = _last(dy), _last(x), None if skip is None else _last(skip)
    images, channels, positions, blocks = x.shape[0], x.shape[1], x.shape[2] * x.shape[3], _blocks(x, BACK)
    groups = gamma.shape[0]
    dx, dskip = torch.empty_like(x), x.new_empty(0) if skip is None else torch.empty_like(skip)
    sums = x.new_empty(images, 4, channels, dtype=torch.float32)
    rows = [leaf.contiguous() for leaf in (bias, gamma, beta, tau)]
    backward[(images, triton.cdiv(channels, blocks["CP"]))](
        x, x if skip is None else skip, *rows, root, dy, dx, dskip, sums, images // groups, positions,
        SKIP=skip is not None, SWISH=swish, FAST=_fast(x), **blocks,
    )  # fmt: skip
    return dx, dskip, sums.view(groups, -1, 4, channels).sum(1).transpose(0, 1).contiguous()


def _fast(x: Tensor) -> bool:
    return x.dtype.itemsize < 4


def _last(x: Tensor) -> Tensor:
    """With the channels next to each other in memory."""
    return x.contiguous(memory_format=torch.channels_last)


@_frn.register_fake
def _(x, skip, bias, gamma, beta, tau, swish, eps):
    return torch.empty_like(_last(x)), x.new_empty(x.shape[0], 2, x.shape[1], dtype=torch.float32)


@_frn_backward.register_fake
def _(dy, x, skip, bias, gamma, beta, tau, root, swish):
    x = _last(x)
    return torch.empty_like(x), x.new_empty(0) if skip is None else torch.empty_like(x), gamma.new_empty(4, *gamma.shape)


def _keep(ctx, inputs, output):
    x, skip, bias, gamma, beta, tau, swish, _ = inputs
    ctx.save_for_backward(x, skip, bias, gamma, beta, tau, output[1])
    ctx.swish = swish


def _differentiate(ctx, dy, _):
    x, skip, *rest = ctx.saved_tensors
    dx, dskip, sums = _frn_backward(dy, x, skip, *rest, ctx.swish)
    return dx, None if skip is None else dskip, *sums.unbind(0), None, None


_frn.register_autograd(_differentiate, setup_context=_keep)


def _folded(size: int, leaf: Tensor | None, dim: int | None) -> Tensor | None:
    """A tensor of a batched call for one call with all: the images of all members one after another, and so the rows of parameters."""
    if leaf is None:
        return None
    return (leaf.expand(size, *leaf.shape) if dim is None else leaf.movedim(dim, 0)).flatten(0, 1)


@_frn.register_vmap
def _(info, dims, *inputs):
    leaves = [_folded(info.batch_size, leaf, dim) for leaf, dim in zip(inputs[:6], dims[:6], strict=True)]
    y, root = _frn(*leaves, *inputs[6:])
    return (y.unflatten(0, (info.batch_size, -1)), root.unflatten(0, (info.batch_size, -1))), (0, 0)


@_frn_backward.register_vmap
def _(info, dims, *inputs):
    leaves = [_folded(info.batch_size, leaf, dim) for leaf, dim in zip(inputs[:8], dims[:8], strict=True)]
    dx, dskip, sums = _frn_backward(*leaves, inputs[8])
    split = (info.batch_size, -1)
    dskip = dskip if inputs[2] is None else dskip.unflatten(0, split)
    return (dx.unflatten(0, split), dskip, sums.unflatten(1, split)), (0, None if inputs[2] is None else 0, 1)
