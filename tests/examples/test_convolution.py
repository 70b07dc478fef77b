import os

import pytest
import torch
import torch.nn.functional as F
from kernels import convolution as ours
from kernels.convolution import Layout, convolution
from torch import Tensor

# channels, outputs, height and width, taps, stride: those of ResNet-20
SHAPES = [
    (3, 16, 32, 3, 1),
    (16, 16, 32, 3, 1),
    (32, 32, 16, 3, 1),
    (64, 64, 8, 3, 1),
    (16, 32, 32, 3, 2),
    (16, 32, 32, 1, 2),
    (32, 64, 16, 3, 2),
    (32, 64, 16, 1, 2),
]


def same(x: Tensor, w: Tensor, stride: int) -> Tensor:
    """By the definition of the padding: what stands over at the end is padded first."""
    total = max(0, w.shape[-1] - stride)
    before, after = total // 2, total - total // 2
    return F.conv2d(F.pad(x, (before, after, before, after)), w, stride=stride)


def problem(shape, *, dtype=torch.float64, device="cpu", images=2) -> tuple[Tensor, Tensor]:
    channels, outputs, side, taps, _ = shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(images, channels, side, side, generator=generator, dtype=torch.float64)
    w = torch.randn(outputs, channels, taps, taps, generator=generator, dtype=torch.float64)
    return x.to(device, dtype).contiguous(memory_format=torch.channels_last), w.to(
        device, torch.float32 if dtype != w.dtype else dtype
    )


@pytest.mark.parametrize("how", ["plain", "kernel"])  # on a CPU, the last is done as the first
@pytest.mark.parametrize("shape", SHAPES)
def test_same_padding(shape, how):
    x, w = (leaf.requires_grad_() for leaf in problem(shape))
    found, expected = convolution(x, w, stride=shape[-1], how=how), same(x, w, shape[-1])
    torch.testing.assert_close(found, expected)
    slope = torch.randn_like(expected)
    torch.testing.assert_close(torch.autograd.grad(found, (x, w), slope), torch.autograd.grad(expected, (x, w), slope))


def windows(x: Tensor, form: Layout) -> Tensor:
    """What a row of the product reads, [rows, lines, wide * channels], by its definition."""
    y, q = torch.meshgrid(torch.arange(form.down), torch.arange(form.across), indexing="ij")
    h = y.flatten()[:, None, None] * form.step - form.up + torch.arange(form.lines)[None, :, None]
    w = q.flatten()[:, None, None] * form.side - form.left + torch.arange(form.wide)[None, None, :]
    inside = (h >= 0) & (h < form.height) & (w >= 0) & (w < form.width)
    pixels = x.permute(0, 2, 3, 1)[:, h.clamp(0, form.height - 1), w.clamp(0, form.width - 1)] * inside[..., None]
    return pixels.reshape(-1, form.lines * form.depth)


def spread(w: Tensor, index: Tensor) -> Tensor:
    return torch.where(index >= 0, w.flatten()[index.clamp_min(0)], 0.0)


@pytest.mark.parametrize("shape", SHAPES)
def test_layouts(shape):
    """Forwards, backwards and for the kernel's gradient, the products are the convolution and its derivatives."""
    stride, device = shape[-1], torch.device("cpu")
    x, w = problem(shape)
    expected = same(x.requires_grad_(), w.requires_grad_(), stride)
    slope = torch.randn_like(expected).contiguous(memory_format=torch.channels_last)
    dx, dw = torch.autograd.grad(expected, (x, w), slope)
    x, w = ours._padded(x.detach()), w.detach()
    size = (0, *x.shape[1:])

    form, index = ours._plan(size, tuple(w.shape), stride, "forwards", device)
    found = windows(x, form) @ spread(w, index)
    torch.testing.assert_close(found.view(2, *expected.shape[2:], -1).permute(0, 3, 1, 2), expected.detach())

    form, places = ours._plan(size, tuple(w.shape), stride, "correlate", device)
    of_b = windows(x, form).T @ slope.permute(0, 2, 3, 1).reshape(-1, form.columns)
    torch.testing.assert_close(of_b.flatten()[places.long()].sum(0).view_as(w), dw)

    if shape[0] != 3:
        form, index = ours._plan(size, tuple(w.shape), stride, "backwards", device)
        found = (windows(slope, form) @ spread(w, index)).view(2, form.down, form.across, -1, form.segment)
        torch.testing.assert_close(found.transpose(2, 3).reshape(2, *x.shape[2:], -1).permute(0, 3, 1, 2), dx)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels(shape):
    x, w = problem(shape, dtype=torch.bfloat16, device="cuda", images=37)
    x, w = x.requires_grad_(shape[0] != 3), w.bfloat16().float().requires_grad_()
    wanted = (w, x) if shape[0] != 3 else (w,)
    assert ours.fits(x, w, shape[-1])
    found = convolution(x, w, stride=shape[-1], how="kernel")
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        expected = same(x.float(), w, shape[-1])
        slope = torch.randn_like(expected).bfloat16()
        slopes = torch.autograd.grad(expected, wanted, slope.float())
    for one, two in zip((found, *torch.autograd.grad(found, wanted, slope)), (expected, *slopes), strict=True):
        assert (one.float() - two).norm() < 5e-3 * two.norm()


@pytest.mark.skipif(not ours.FUSED or os.environ.get("TRITON_INTERPRET") != "1", reason="for Triton's interpreter")
@pytest.mark.parametrize("shape", SHAPES)
def test_interpreted(shape):
    """The kernels in single precision, without a GPU: `pip install triton`, and TRITON_INTERPRET=1."""
    x, w = problem(shape, dtype=torch.float32)
    x, w = x.requires_grad_(shape[0] != 3), w.requires_grad_()
    wanted = (w, x) if shape[0] != 3 else (w,)
    found, expected = ours._convolution(x, w, shape[-1]), same(x, w, shape[-1])
    slope = torch.randn_like(expected)
    pairs = zip(torch.autograd.grad(found, wanted, slope), torch.autograd.grad(expected, wanted, slope), strict=True)
    for one, two in ((found, expected), *pairs):
        assert (one - two).norm() < 1e-5 * two.norm()
