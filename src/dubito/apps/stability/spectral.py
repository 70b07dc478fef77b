"""Networks whose layers are held to a norm while they are trained (Miyato et al. 2018), with convolutions taken for what they do."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import register_parametrization

from dubito.network.examples import Inputs
from dubito.network.weights import copy_network, in_mode
from dubito.tensors.checks import at_least, positive, require
from dubito.tensors.randomness import derive_seed, fork_rng

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
LAYERS = (nn.Linear, *CONVOLUTIONS)
FIRST = 30  # power iterations before training


def spectrally_normalized(
    network: nn.Module, x: Inputs, *, norm: float = 1.0, iterations: int = 1, at: str = "", seed: int = 0
) -> nn.Module:
    r"""A copy of a network whose linear and convolutional layers have the operator norm `norm`, whatever they are trained to.

    A layer's weight is divided by its largest singular value, which `iterations` of power iteration follow in every training step:
    of linear layers by torch's own `spectral_norm`, of convolutions on the convolution of images as they come there for inputs like x,
    not on the kernel as a matrix, whose norm is another number. With activations of slope 1 the Lipschitz constant of a chain of L
    layers is at most norm^L; `lipschitz_bound` tells what it is after training. BatchNorm is left as it is, and may undo this.
    Methods that draw other weights for every step (`Variational`, `IVON`) leave the iteration behind: norms are then above `norm`.

    `at` picks layers by `re.search` over their names; transposed convolutions are left as they are. The copy is an ordinary module:
    give it to a `dubito.Model`, and afterwards `torch.nn.utils.parametrize.remove_parametrizations` makes plain layers of it.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> held = spectrally_normalized(net, torch.zeros(1, 2))
    >>> round(float(torch.linalg.matrix_norm(held[0].weight.detach(), 2)), 3)
    1.0
    """
    positive(norm=norm)
    at_least(1, iterations=iterations)
    made = copy_network(network)
    layers = _layers(made, at)
    with fork_rng(derive_seed(seed, "spectral")):
        shapes = _shapes(made, layers, x)
        for name, layer in layers.items():
            if isinstance(layer, nn.Linear):
                spectral_norm(layer, n_power_iterations=iterations)
            else:
                require(name in shapes, f"the layer {name!r} is not called when the network runs on x: exclude it by `at`")
                register_parametrization(layer, "weight", ConvolutionNorm(layer, shapes[name], iterations))
            if norm != 1:
                register_parametrization(layer, "weight", Scaled(norm))
    return made


def _layers(network: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """The linear and convolutional layers whose names match, each with a weight of its own that is not zero."""
    layers = {name: layer for name, layer in network.named_modules() if isinstance(layer, LAYERS) and re.search(pattern, name)}
    layers = {name: layer for name, layer in layers.items() if layer.weight.ndim > 1}
    require(layers, f"the network has no linear or convolutional layer whose name matches at={pattern!r}")
    uses = Counter(id(p) for module in network.modules() for p in module._parameters.values() if p is not None)
    tied = [name for name, layer in layers.items() if uses[id(layer.weight)] > 1]
    require(
        not tied, f"the weights of {tied} are shared with other layers and would be scaled for one of them: exclude them by `at`"
    )
    zero = [name for name, layer in layers.items() if not bool(layer.weight.detach().any())]
    require(
        not zero,
        f"the weights of {zero} are all zero, and no factor gives them a norm: initialize them, or exclude them by `at`",
    )
    return dict(layers)


class ConvolutionNorm(nn.Module):
    """A kernel divided by the norm of its convolution, which the vectors of a power iteration follow."""

    input: Tensor

    def __init__(self, layer: nn.Module, shape: torch.Size, iterations: int):
        super().__init__()
        assert isinstance(layer, CONVOLUTIONS)
        self.iterations = iterations
        self.padding: tuple[int, ...] = tuple(layer._reversed_padding_repeated_twice)
        self.fill = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        self.stride, self.dilation, self.groups = layer.stride, layer.dilation, layer.groups
        start = F.normalize(torch.randn(1, *shape[1:]).flatten(), dim=0).view(1, *shape[1:])
        self.register_buffer("input", start.to(layer.weight))
        self._follow(layer.weight.detach(), FIRST)

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """The convolution of the layer with that kernel, without its bias."""
        run = (F.conv1d, F.conv2d, F.conv3d)[weight.ndim - 3]
        return run(F.pad(x, self.padding, mode=self.fill), weight, None, self.stride, 0, self.dilation, self.groups)

    @torch.no_grad()
    def _follow(self, weight: Tensor, iterations: int) -> None:
        for _ in range(iterations):
            with torch.enable_grad():
                x = self.input.detach().clone().requires_grad_()
                y = self.convolve(x, weight)
                (back,) = torch.autograd.grad(y, x, y.detach())
            self.input = back / back.norm().clamp_min(torch.finfo(back.dtype).tiny)

    def forward(self, weight: Tensor) -> Tensor:
        """W / (u^T W v), with the singular vectors u and v as far as they are known."""
        if self.training:
            self._follow(weight.detach(), self.iterations)
        v = self.input.detach().clone()
        with torch.no_grad():
            ahead = self.convolve(v, weight)
            u = ahead / ahead.norm().clamp_min(torch.finfo(ahead.dtype).tiny)
        return weight / (u * self.convolve(v, weight)).sum()


class Scaled(nn.Module):
    """A weight times a number."""

    def __init__(self, norm: float):
        super().__init__()
        self.norm = norm

    def forward(self, weight: Tensor) -> Tensor:
        """norm * W."""
        return self.norm * weight


def _shapes(network: nn.Module, layers: dict[str, nn.Module], x: Inputs) -> dict[str, torch.Size]:
    """The shape of what comes into each convolution."""
    shapes: dict[str, torch.Size] = {}

    def _note(name: str, _: nn.Module, args: tuple) -> None:
        shapes[name] = args[0].shape

    convolutions = {name: layer for name, layer in layers.items() if isinstance(layer, CONVOLUTIONS)}
    hooks = [layer.register_forward_pre_hook(partial(_note, name)) for name, layer in convolutions.items()]
    try:
        with torch.no_grad(), in_mode(network, False):
            args, kwargs = ((), x) if isinstance(x, dict) else (tuple(x) if isinstance(x, list | tuple) else (x,), {})
            network(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return shapes
