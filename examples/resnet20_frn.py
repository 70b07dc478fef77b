r"""ResNet-20 with filter response normalisation and swish, of which Izmailov et al. (2021), "What are Bayesian neural network
posteriors really like?", drew 720 samples by HMC on CIFAR-10.

It has no batch normalisation, so one image's output does not depend on the others and the likelihood is a product over images. Every
one of its 274,042 parameters has the prior N(0, 1/5). After each of the 21 convolutions with bias, a channel is divided by its root
mean square over the image's positions, scaled, shifted and cut off from below (Singh & Krishnan 2020):

.. math:: z = \max(\gamma x / \sqrt{\overline{x^2} + 10^{-6}} + \beta, \tau).

A block is swish(s + z_2(swish(z_1(x)))); where it halves the image, s is a convolution with a 1 x 1 kernel and its own normalisation.

    import dubito
    from resnet20_frn import ResNet20FRN, normalised

    x, y = dubito.data.cifar10("train")
    model = dubito.Model(ResNet20FRN(), dubito.Categorical(), dubito.priors.Normal(scale=0.2**0.5))
    posterior = dubito.fit(model, dubito.SGHMC(cycles=3), (normalised(x), y), device="cuda", precision="bfloat16")
"""

from __future__ import annotations

from itertools import pairwise

import torch
from kernels.convolution import How, convolution
from kernels.frn import filter_response_norm
from torch import Tensor, nn


def normalised(images: Tensor) -> Tensor:
    """Images [B, 3, H, W] in [0, 1] as the network expects them."""
    mean = torch.tensor([0.49, 0.48, 0.44], device=images.device).view(3, 1, 1)
    return (images - mean) / 0.2


class Layer(nn.Module):
    """A convolution and its filter response normalisation, and perhaps a shortcut that is added and the swish.

    `fused` normalises with our own kernel on a GPU, several times faster, but with first derivatives only; `convolutions` says how
    these are done: see `kernels`, beside this file.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        kernel: int = 3,
        stride: int = 1,
        swish: bool = True,
        fused: bool = False,
        convolutions: How = "plain",
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, kernel, kernel))
        self.bias, self.gamma, self.beta, self.tau = (nn.Parameter(torch.empty(outputs)) for _ in range(4))
        self.stride, self.swish, self.fused, self.convolutions = stride, swish, fused, convolutions
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, nonlinearity="relu")
        nn.init.ones_(self.gamma)
        for leaf in (self.bias, self.beta, self.tau):
            nn.init.zeros_(leaf)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        x = convolution(x, self.weight, stride=self.stride, how=self.convolutions)  # the bias is added with the normalisation
        return filter_response_norm(
            x, self.gamma, self.beta, self.tau, bias=self.bias, skip=skip, swish=self.swish, fused=self.fused
        )


class Block(nn.Module):
    """Two layers and a way around them."""

    def __init__(self, inputs: int, outputs: int, *, fused: bool = False, convolutions: How = "plain"):
        super().__init__()
        how = {"fused": fused, "convolutions": convolutions}
        self.first = Layer(inputs, outputs, stride=1 if inputs == outputs else 2, **how)
        self.second = Layer(outputs, outputs, **how)
        self.shortcut = nn.Identity() if inputs == outputs else Layer(inputs, outputs, kernel=1, stride=2, swish=False, **how)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x), self.shortcut(x))


class ResNet20FRN(nn.Module):
    """Logits [B, classes] of images [B, 3, 32, 32].

    >>> sum(p.numel() for p in ResNet20FRN().parameters())
    274042
    """

    def __init__(self, classes: int = 10, *, width: int = 16, fused: bool = False, convolutions: How = "plain"):
        super().__init__()
        widths = [width, width, width, width, 2 * width, 2 * width, 2 * width, 4 * width, 4 * width, 4 * width]
        how = {"fused": fused, "convolutions": convolutions}
        self.stem = Layer(3, width, **how)
        self.blocks = nn.Sequential(*(Block(a, b, **how) for a, b in pairwise(widths)))
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x.contiguous(memory_format=torch.channels_last)))
        return self.head(x.mean((2, 3)))
