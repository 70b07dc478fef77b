r"""Networks with one hidden layer or two, Gaussian noise and Gaussian weights: whole trajectories in one launch.

`recognize` says whether a posterior is one of these, by its structure alone; the kernel itself is in `mlp_triton`, which is
imported on first use.
"""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dubito.inference.kernels.kernel import Kernel, Moved, all_bayesian, gamma, is_hooked, is_plain, offsets
from dubito.model import Target
from dubito.model.likelihoods import NOISE, Gaussian
from dubito.model.priors import Normal
from dubito.network.examples import Batch, Inputs, Targets
from dubito.tensors.shares import draw_rows
from dubito.tensors.tree import Params

WIDEST_INPUT, WIDEST_LAYER, WIDEST_OF_TWO = 64, 128, 64  # what one thread block can keep
PLACES = ("W_AT", "B_AT", "V_AT", "A_AT", "U_AT", "C_AT", "S_AT")
ACTIVATIONS = {nn.ReLU: "relu", nn.Tanh: "tanh", nn.SiLU: "silu", nn.GELU: "gelu"}


def available(device: torch.device) -> bool:
    """Whether the kernels can run on a device: Triton is there, and a GPU (or Triton's interpreter, `TRITON_INTERPRET=1`)."""
    if importlib.util.find_spec("triton") is None:
        return False
    interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"
    return interpreted or (
        device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def recognize(target: Target, batch: Batch, like: Params) -> Plan | None:
    """The plan for a posterior over all the data of `batch`, or None where it is not exactly of the kind the kernels know.

    An `nn.Sequential` of Linear, activation, Linear with one output, or of Linear, activation, Linear, activation, Linear; all
    parameters Bayesian and float32 under a `Normal` prior; Gaussian noise of one scale, known or learned; any temperature.
    `like` is one chain's tree, unstacked.
    """
    model, device = target.model, next(iter(like.values())).device
    layers, activation = _layers(model.network)
    if activation is None or not is_plain(target) or not available(device):
        return None
    widths = tuple(layer.in_features for layer in layers.values())
    places, constants = _places(like, layers, device), _constants(target, like)
    prior = model.prior.normal
    if places is None or constants is None or prior is None or not _fits(*model.split(batch), target.n_data, widths[0], device):
        return None
    precision = [torch.full((p.numel(),), 0.0 if name == NOISE else prior.scale_of(name) ** -2) for name, p in like.items()]
    return Plan(
        widths=widths,
        activation=activation,
        places=places,
        constants=torch.tensor(constants, dtype=torch.float64, device=device),
        precision=torch.cat(precision).to(device, torch.float32),
    )


def _layers(network: nn.Module) -> tuple[dict[str, nn.Linear], str | None]:
    """The linear layers by name, and the activation between them; None for an activation of another network."""
    if type(network) is not nn.Sequential or len(network) not in (3, 5) or any(map(is_hooked, network.modules())):
        return {}, None
    layers = {name: layer for name, layer in list(network.named_children())[::2] if type(layer) is nn.Linear}
    between = list(network)[1::2]
    alike = all(type(layer) is type(between[0]) and getattr(layer, "approximate", "none") == "none" for layer in between)
    if len(layers) <= len(between) or not alike or not _narrow(*layers.values()):
        return {}, None
    return layers, ACTIVATIONS.get(type(between[0]))


def _narrow(first: nn.Linear, *later: nn.Linear) -> bool:
    """Whether one thread block can keep all layers, the last of which has one output."""
    widest = WIDEST_LAYER if len(later) == 1 else WIDEST_OF_TWO
    inputs = first.in_features + (first.bias is not None)
    return later[-1].out_features == 1 and inputs <= WIDEST_INPUT and all(layer.in_features <= widest for layer in later)


def _fits(x: Inputs, y: Targets, n: int, width: int, device: torch.device) -> bool:
    """Whether the data are plain tensors on the device, of a regression with one output."""
    tensors = all(isinstance(leaf, Tensor) and leaf.dtype == torch.float32 and leaf.device == device for leaf in (x, y))
    return tensors and x.shape == (n, width) and y.shape in ((n,), (n, 1))


def _places(like: Params, layers: dict[str, nn.Linear], device: torch.device) -> tuple[int, ...] | None:
    """Where weight and bias of the first, middle and last layer and the log noise start in a chain's vector; -1: there is none."""
    if not all_bayesian(like, layers) or any(leaf.dtype != torch.float32 or leaf.device != device for leaf in like.values()):
        return None
    starts, (first, *middle, last) = offsets(like), layers
    names = [f"{key}.{name}" for key in (first, *(middle or [""]), last) for name in ("weight", "bias")]
    return tuple(starts.get(name, -1) for name in (*names, NOISE))


def _constants(target: Target, like: Params) -> list[float] | None:
    """1 / T; 1 / sigma^2 of a known noise; shape and rate of a learned one's prior; what the log prior and the log likelihood of one
    datum are at 0."""
    likelihood, prior = target.model.likelihood, target.model.prior
    if type(likelihood) is not Gaussian or likelihood.dim != -1 or type(prior) is not Normal:
        return None
    weights = {name: leaf.numel() for name, leaf in like.items() if name != NOISE}
    log_prior = -sum(n * (math.log(prior.scale_of(name)) + 0.5 * math.log(2 * math.pi)) for name, n in weights.items())
    cold, one = 1 / target.temperature, -0.5 * math.log(2 * math.pi)
    scale = likelihood.scale
    if isinstance(scale, float):
        return None if NOISE in like else [cold, scale**-2, 0.0, 0.0, log_prior, one - math.log(scale)]
    shape_and_rate = gamma(likelihood.prior)
    if scale is not None or likelihood.outputs != 1 or NOISE not in like or shape_and_rate is None:
        return None
    shape, rate = shape_and_rate
    if likelihood.prior is not None:
        log_prior += shape * math.log(rate) - math.lgamma(shape) + math.log(2)
    return [cold, 1.0, shape, rate, log_prior, one]


@dataclass(eq=False)
class Plan:
    """How the kernels run one posterior. Chains are the rows of [C, P] matrices in the order of `tree.flatten`."""

    widths: tuple[int, ...]  # inputs, units of the hidden layer or layers
    activation: str
    places: tuple[int, ...]
    constants: Tensor  # [6], see `_constants`
    precision: Tensor  # [P]: 1 / scale^2 of every weight's prior, 0 for the noise
    options: dict[str, Any] = field(default_factory=dict)  # what to try instead of the defaults, for measurements
    _read: tuple[Any, ...] = field(default=(), repr=False)

    def leapfrog(
        self, x: Tensor, y: Tensor, q: Tensor, v: Tensor, g: Tensor, log_likelihood: Tensor, log_prior: Tensor,
        *, step: Tensor, left: Tensor, scale: Tensor, steps: int,
    ) -> None:  # fmt: skip
        """`min(left, steps)` leapfrog steps of every chain, in place.

        .. math:: v \\mathrel{+}= \\tfrac{h}{2} s g, \\quad q \\mathrel{+}= h s v, \\quad g = \\nabla \\log p(q) / T, \\quad v
           \\mathrel{+}= \\tfrac{h}{2} s g

        `q`, `v`, `g` [C, P]: g is the gradient at q, before and after. `log_likelihood`, `log_prior` [C], float64: the sums over the
        data and over the weights at the last q, not tempered. `step` [C] is h, `left` [C] int32, `scale` [P] or [C, P] is s.
        """
        _check(q, v, g, step, scale, log_likelihood, log_prior, left)
        self._run(x, y, "trajectory", (q, v, g, log_likelihood, log_prior, step, left, scale), (steps, _stride(scale)), MOVE=True)

    def microcanonical(
        self, x: Tensor, y: Tensor, q: Tensor, v: Tensor, g: Tensor, log_likelihood: Tensor, log_prior: Tensor,
        *, step: Tensor, left: Tensor, scale: Tensor, steps: int, share: float,
        kicks: Tensor | None = None, fresh: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`min(left, steps)` microcanonical steps of every chain, as `integrators.minimal_norm` makes them, in place.

        As `leapfrog`, with directions v of length sqrt(P). `share` is that of the outer turns. After each step its row of `kicks`
        [steps, C, P], times `fresh` [C], is added to the direction. Returns the rise of the kinetic energy in all steps, [C].
        """
        _check(q, v, g, step, scale, log_likelihood, log_prior, left)
        (chains, size), gain = q.shape, torch.empty_like(log_prior)
        if (kicks is None) != (fresh is None) or (kicks is not None and kicks.shape != (steps, chains, size)):
            raise ValueError(f"kicks are [{steps}, {chains}, {size}] here, and go with `fresh` [{chains}]")
        tensors = (q, v, g, log_likelihood, log_prior, gain, step, left, scale)
        tensors += (q, step) if kicks is None or fresh is None else (kicks.contiguous(), fresh.contiguous())
        self._run(x, y, "microcanonical", tensors, (steps, _stride(scale), chains, share), KICK=kicks is not None)
        return gain

    def gradient(self, x: Tensor, y: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of the log joint over T at q [C, P], the log likelihood and the log prior [C], as `leapfrog` leaves them."""
        q = q.contiguous()
        g, (log_likelihood, log_prior) = torch.empty_like(q), q.new_empty(2, len(q), dtype=torch.float64)
        self._run(x, y, "trajectory", (q, q, g, log_likelihood, log_prior, q, q, q), (0, 0), MOVE=False)
        return g, log_likelihood, log_prior

    def _run(self, x: Tensor, y: Tensor, name: str, tensors: tuple[Tensor, ...], numbers: tuple[float, ...], **how: bool) -> None:
        from dubito.inference.kernels import mlp_triton

        chains, size = tensors[0].shape
        if size != len(self.precision):
            raise ValueError(f"the chains have {size} weights, and the plan is for {len(self.precision)}")
        settings = self.settings()
        inputs, targets = self._padded(x, y, settings)
        launch = {name: settings.pop(name) for name in ("num_warps", "num_stages")}
        places = dict(zip(PLACES, self.places, strict=True))
        sizes = {"D": self.widths[0], "H": self.widths[1], "K": self.widths[-1]}
        kernel: Any = getattr(mlp_triton, name)
        with torch.cuda.device_of(tensors[0]):  # where Triton launches
            kernel[(chains,)](
                inputs, targets, *tensors, self.precision, self.constants, len(x), *numbers,
                P=size, PP=power(size), **sizes, **places, ACTIVATION=self.activation, **how, **settings, **launch,
            )  # fmt: skip

    def settings(self) -> dict[str, Any]:
        """Padded sizes, and how the work is laid out: for ReLU as measured on an H200, else what its registers hold."""
        inputs, first, *_ = self.widths
        width, units, last = power(inputs + (self.places[1] >= 0), 16), power(first, 16), power(self.widths[-1], 16)
        settings = {"DP": width, "HP": units, "KP": last, "num_warps": 8}
        if self.activation == "relu" and len(self.widths) == 2 and width * units <= 1024:  # a copy for each warp fits too
            settings |= {"WARPS": 8, "TILE": 16, "num_stages": 2}
        else:
            room = 4096 if len(self.widths) == 2 else 1024
            settings |= {"WARPS": 0, "TILE": min(room // max(units, last), 64), "num_stages": 1}
        return settings | self.options

    def _padded(self, x: Tensor, y: Tensor, settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The data with zeros up to whole tiles and a column of ones for the bias; made once for the same tensors."""
        rows, width = max(settings["WARPS"], 1) * settings["TILE"], settings["DP"]
        key = (x, y, x._version, y._version, rows, width)
        if not self._read or any(
            a is not b if isinstance(a, Tensor) else a != b for a, b in zip(self._read[0], key, strict=True)
        ):
            n = math.ceil(len(x) / rows) * rows
            inputs, targets = x.new_zeros(n, width), y.new_zeros(n)
            inputs[: len(x), : self.widths[0]], targets[: len(x)] = x, y.reshape(-1)
            if self.places[1] >= 0:
                inputs[: len(x), self.widths[0]] = 1.0
            self._read = key, inputs, targets
        return self._read[1], self._read[2]


@dataclass(eq=False)
class Trajectories(Kernel):
    """What samplers ask of a kernel, for one posterior and its data; `trajectories_cpu` has the same."""

    plan: Plan
    x: Tensor
    y: Tensor
    temperature: float

    def leapfrog(
        self, position: Tensor, velocity: Tensor, gradient: Tensor, log_likelihood: Tensor, log_prior: Tensor,
        *, step: Tensor, left: Tensor, scale: Tensor, steps: int,
    ) -> None:  # fmt: skip
        """`Plan.leapfrog`."""
        point = (position, velocity, gradient, log_likelihood, log_prior)
        self.plan.leapfrog(self.x, self.y, *point, step=step, left=left, scale=scale, steps=steps)

    def minimal_norm(
        self, position: Tensor, velocity: Tensor, gradient: Tensor, *, step: Tensor, scale: Tensor, share: float
    ) -> Moved:
        """One microcanonical step: the new point, and the rise of its kinetic energy [C]."""
        return self.microcanonical(position, velocity, gradient, step=step, count=None, scale=scale, share=share)

    def microcanonical(
        self, position: Tensor, velocity: Tensor, gradient: Tensor,
        *, step: Tensor, count: Tensor | None, scale: Tensor, share: float,
    ) -> Moved:  # fmt: skip
        """`count` [C] of them, or one."""
        energies = position.new_empty(2, len(position), dtype=torch.float64)
        point = (*(leaf.clone(memory_format=torch.contiguous_format) for leaf in (position, velocity, gradient)), *energies)
        steps = 1 if count is None else int(count.max())
        left = torch.ones_like(step, dtype=torch.int32) if count is None else count
        return point, self.plan.microcanonical(
            self.x, self.y, *point, step=step.contiguous(), left=left, scale=scale, steps=steps, share=share
        )

    def langevin(
        self, position: Tensor, velocity: Tensor, gradient: Tensor, log_likelihood: Tensor, log_prior: Tensor,
        *, step: Tensor, scale: Tensor, share: float, length: float, steps: int, generator: torch.Generator,
    ) -> Moved | None:  # fmt: skip
        """`steps` microcanonical steps, after each of which the direction is partly drawn anew.

        The new point, and the error of the energy in the last step [C]; or nothing at all, and the generator as it was, where a chain
        leaves what numbers hold.
        """
        before = generator.get_state()
        kicks = draw_rows(lambda shape: position.new_empty(shape).normal_(generator=generator), (steps, *position.shape), 1)
        fresh = torch.expm1((2 * step / length).clamp(max=60.0)).sqrt().to(position.dtype)
        q, v, g = (leaf.clone(memory_format=torch.contiguous_format) for leaf in (position, velocity, gradient))
        likelihood, prior = log_likelihood.clone(), log_prior.clone()
        left, old, gain = torch.full_like(step, steps, dtype=torch.int32), log_prior, log_prior
        # the last step apart: the error of one step is what is known of their bias
        for part in (kicks[:-1], kicks[-1:]):
            old = likelihood + prior
            if len(part):
                gain = self.plan.microcanonical(
                    self.x, self.y, q, v, g, likelihood, prior, step=step.contiguous(), left=left, scale=scale, steps=len(part),
                    share=share, kicks=part, fresh=fresh,
                )  # fmt: skip
        error = (old - likelihood - prior) / self.temperature + gain
        if not bool(error.isfinite().all()):
            generator.set_state(before)
            return None
        return (q, v, g, likelihood, prior), error


def _stride(scale: Tensor) -> int:
    return scale.shape[1] if scale.ndim == 2 else 0


def _check(
    q: Tensor, v: Tensor, g: Tensor, step: Tensor, scale: Tensor, log_likelihood: Tensor, log_prior: Tensor, left: Tensor
) -> None:
    chains, size = q.shape
    for name, tensor, shape, kind in (
        ("q", q, (chains, size), torch.float32), ("v", v, (chains, size), torch.float32), ("g", g, (chains, size), torch.float32),
        ("step", step, (chains,), torch.float32), ("left", left, (chains,), torch.int32),
        ("scale", scale, (chains, size) if scale.ndim == 2 else (size,), torch.float32),
        ("log_likelihood", log_likelihood, (chains,), torch.float64), ("log_prior", log_prior, (chains,), torch.float64),
    ):  # fmt: skip
        if tensor.shape != shape or tensor.dtype != kind or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is a contiguous {kind} tensor of shape {list(shape)}; got {tensor.dtype} {list(tensor.shape)}"
            )


def power(n: int, least: int = 1) -> int:
    """The next power of two.

    >>> power(13), power(13, 32)
    (16, 32)
    """
    return max(least, 1 << (n - 1).bit_length())
