"""Gradients and whole trajectories written by hand, for fully connected networks that are common and small.

Starting an operation takes longer than doing it in such networks, so fewer and larger operations win: on a CPU a leapfrog step of
a small network takes 77 us instead of 442, and a GPU runs whole trajectories without leaving its chip. What takes over is compared with
autograd at two places first (`log_density.Density`), and everything else takes the ordinary way.

- `mlp_cpu`, `trajectories_cpu`: the gradient of many chains at once on a CPU, and trajectories made of it
- `mlp`, `mlp_triton`: trajectories on a GPU, one thread block a chain; Triton is imported at first use
- `kernel`: what samplers ask of both, and how a posterior is recognized

The door is here: `cpu_field`, `cpu_kernel`, `gpu_plan` and `gpu_kernel`. May import `model`, `network` and `tensors`.
"""

from __future__ import annotations

from dubito.inference.kernels import mlp, mlp_cpu, trajectories_cpu
from dubito.inference.kernels.kernel import Kernel as Kernel
from dubito.model import Target
from dubito.network.examples import Batch
from dubito.tensors.tree import Params


def cpu_field(target: Target, batch: Batch, like: Params) -> mlp_cpu.Field | None:
    """The log likelihood of `batch` and its gradient, derived by hand, or None for a network that is not known."""
    return mlp_cpu.field(target, batch, like)


def cpu_kernel(field: mlp_cpu.Field, target: Target, like: Params) -> Kernel | None:
    """Trajectories with the gradients of a field, or None for a prior that is not known."""
    prior = trajectories_cpu.Prior.of(target, like)
    return None if prior is None else trajectories_cpu.Trajectories(field, prior, target.temperature)


def gpu_plan(target: Target, batch: Batch, like: Params) -> mlp.Plan | None:
    """How a GPU runs trajectories on the posterior of `batch`, or None for one that is not known."""
    return mlp.recognize(target, batch, like)


def gpu_kernel(plan: mlp.Plan, target: Target, batch: Batch) -> Kernel:
    """Trajectories on a GPU."""
    return mlp.Trajectories(plan, *target.model.split(batch), target.temperature)
