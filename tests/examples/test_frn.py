import os

import pytest
import torch
import torch.nn.functional as F
from kernels import frn as ours
from kernels.frn import filter_response_norm, fits
from torch import Tensor


def problem(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x, skip = (torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for _ in range(2))
    return x, skip, [torch.randn(shape[1], generator=generator).to(device).requires_grad_() for _ in range(4)]


def test_definition():
    x, skip, (bias, gamma, beta, tau) = problem(2, 3, 4, 5)
    found = filter_response_norm(x, gamma, beta, tau, bias=bias, skip=skip, swish=True)
    for n in range(2):
        for c in range(3):
            v = x[n, c] + bias[c]
            z = torch.maximum(gamma[c] * v / torch.sqrt(v.pow(2).mean() + 1e-6) + beta[c], tau[c])
            torch.testing.assert_close(found[n, c], F.silu(skip[n, c] + z))


def test_size_of_a_channel_does_not_matter():
    """Why the prior of a filter and its bias can be taken at any scale."""
    x, _, (bias, gamma, beta, tau) = problem(2, 3, 8, 8)
    one = filter_response_norm(x, gamma, beta, tau, bias=bias, swish=True)
    two = filter_response_norm(7 * x, gamma, beta, tau, bias=7 * bias, swish=True)
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(9, 16, 32, 32), (9, 32, 16, 16), (9, 64, 8, 8), (3, 5, 7, 9), (2, 200, 3, 3)])
@pytest.mark.parametrize("swish", [True, False])
@pytest.mark.parametrize("shortcut", [True, False])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_kernels(shape, swish, shortcut, dtype, error):
    x, skip, (bias, gamma, beta, tau) = problem(*shape, device="cuda", dtype=dtype)
    assert fits(x)
    wanted = (x, bias, gamma, beta, tau, *((skip,) if shortcut else ()))
    slope, found = torch.randn(shape, device="cuda").to(dtype), []
    for fused in (True, False):
        y = filter_response_norm(x, gamma, beta, tau, bias=bias, skip=skip if shortcut else None, swish=swish, fused=fused)
        found.append((y, *torch.autograd.grad(y, wanted, slope)))
    for one, two in zip(*found, strict=True):
        assert (one.float() - two.float()).norm() < error * two.float().norm()


@pytest.mark.skipif(not ours.FUSED or os.environ.get("TRITON_INTERPRET") != "1", reason="for Triton's interpreter")
@pytest.mark.parametrize("shape", [(3, 16, 8, 8), (2, 5, 3, 7)])
@pytest.mark.parametrize("swish", [True, False])
@pytest.mark.parametrize("shortcut", [True, False])
def test_interpreted(shape, swish, shortcut, monkeypatch):
    """The kernels in single precision, without a GPU: `pip install triton`, and TRITON_INTERPRET=1."""
    monkeypatch.setattr(ours, "fits", lambda x: True)
    x, skip, (bias, gamma, beta, tau) = problem(*shape)
    wanted = (x, bias, gamma, beta, tau, *((skip,) if shortcut else ()))
    slope, found = torch.randn(shape), []
    for fused in (True, False):
        y = filter_response_norm(x, gamma, beta, tau, bias=bias, skip=skip if shortcut else None, swish=swish, fused=fused)
        found.append((y, *torch.autograd.grad(y, wanted, slope)))
    for one, two in zip(*found, strict=True):
        assert (one - two).norm() < 1e-5 * two.norm()
