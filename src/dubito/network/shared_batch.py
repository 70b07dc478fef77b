"""A forward pass in train mode on a process's share of a batch, with what depends on the whole batch as if all of it were there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.overrides import TorchFunctionMode

from dubito.network.recurrent import RECURRENT
from dubito.tensors.processes import Processes
from dubito.tensors.randomness import derive_seed, fork_rng
from dubito.tensors.shares import Share, sharing

FACTORS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d}  # which multiply by random numbers
RANDOM = {F.alpha_dropout, F.feature_alpha_dropout, torch.bernoulli, torch.rand_like, torch.randn_like}
INSIDE = {F.multi_head_attention_forward, F.scaled_dot_product_attention, *RECURRENT}  # which may drop within one call


class SharedBatch(TorchFunctionMode):
    """Dropout masks are this process's rows of the masks of the whole batch, and BatchNorm has the statistics of all of it.

    Attention and recurrent layers draw masks inside of one call, where nobody can enter: each process has random numbers of its own
    for these. The global generator is in the same state on all processes afterwards.
    """

    def __init__(self, share: Share, processes: Processes):
        super().__init__()
        self.share, self.processes, self.stack = share, processes, ExitStack()

    def __enter__(self) -> SharedBatch:
        self.stack.enter_context(sharing(self.share))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.stack.close()

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in FACTORS:
            return self._factors(func, *args, **kwargs)
        if func in RANDOM:
            return self._whole(func, args, kwargs)
        if func in INSIDE and _drops(func, args, kwargs):
            with fork_rng(self._own_seed()):
                return func(*args, **kwargs)
        if func is F.batch_norm:
            return self._batch_norm(*args, **kwargs)
        return func(*args, **kwargs)

    def _factors(self, func: Callable, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Dropout, by the mask of the whole batch."""
        axis = self.share.axis(input.shape)
        if not training or p == 0 or axis is None:
            return func(input, p, training, inplace)
        return input * self.share.draw(lambda shape: func(_ones(input, shape), p, True), input.shape, axis)

    def _whole(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """A random function of a tensor, called on a whole batch of which this process's rows are taken."""
        if not args or self.share.axis(args[0].shape) != 0:
            return func(*args, **kwargs)
        each = len(args[0]) // self.share.count
        grouped = args[0].reshape(self.share.count, each, *args[0].shape[1:])
        return self.share.take(func(self.share.pad(grouped).flatten(0, 1), *args[1:], **kwargs))

    def _own_seed(self) -> int:
        """A seed that follows the global generator, and differs from process to process."""
        return derive_seed(int(torch.randint(2**62, ())), "process", self.processes.rank)

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """BatchNorm with the mean and variance of the whole batch: four sums over processes, two of them backwards."""
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        if maybe_current_level() is not None:
            raise ValueError(
                "BatchNorm on several processes needs one setting of the weights at a time: give vectorize=False, or distributed=False"
            )
        axes, shape = [0, *range(2, input.ndim)], [1, -1, *[1] * (input.ndim - 2)]
        idle = self.share.idle * (len(input) // self.share.count)

        def total(*sums: Tensor) -> Tensor:
            """Sums over the examples that count, of all processes, in one vector."""
            return _Sum.apply(torch.cat(sums), self.processes)

        x = input.float() if input.dtype.itemsize < 4 else input
        rows = x[idle:]
        mean, n = total(rows.sum(axes), x.new_tensor([rows[:, 0].numel()])).split([x.shape[1], 1])
        mean = mean / n
        deviation = x - mean.view(shape)
        variance = total(deviation[idle:].square().sum(axes)) / n
        with torch.no_grad():
            if running_mean is not None:
                running_mean.lerp_(mean.to(running_mean), momentum)
            if running_var is not None:
                running_var.lerp_((variance * n / (n - 1)).to(running_var), momentum)
        out = deviation * (variance + eps).rsqrt().view(shape)
        out = out if weight is None else out * weight.view(shape)
        return (out if bias is None else out + bias.view(shape)).to(input.dtype)


def _ones(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Ones in the memory layout of a tensor, in whose order torch draws."""
    axes = sorted(range(like.ndim), key=like.stride, reverse=True)
    return like.new_ones([shape[axis] for axis in axes]).permute([axes.index(axis) for axis in range(like.ndim)])


def _drops(func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether attention or a recurrent layer is called with dropout."""
    if func is F.scaled_dot_product_attention:
        return kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0) > 0
    if func is F.multi_head_attention_forward:
        return args[10] > 0 and kwargs.get("training", True)
    where = 2 if isinstance(args[2], list) else 3  # packed sequences have one more argument before the weights
    return args[where + 3] > 0 and args[where + 4]


class _Sum(torch.autograd.Function):
    """The sum of a tensor over processes, whose gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, processes: Processes) -> Tensor:
        ctx.processes = processes
        total = x.detach().clone()
        processes.sum_([total])
        return total

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        total = slopes[0].clone()
        ctx.processes.sum_([total])
        return total, None
