"""One leapfrog step of a 13-50-1 ReLU network on 455 points, on one GPU: one gradient over all data, and the updates.

The same trajectory from the same start with one chain and with many: by `Target.gradient` step after step, by our kernel, which makes
whole trajectories in one launch, and in JAX (`jit` of a `scan` over steps, `vmap` over chains), in float32 as Metropolis needs
it and with the shorter matrix products that JAX takes by default. Where each ends is held against a float64 trajectory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the GPU's memory is for both

import torch
from measure import write
from torch import Tensor, nn

import dubito
from dubito.inference.kernels import mlp
from dubito.model import Target
from dubito.tensors import tree

INPUTS, HIDDEN, POINTS, PRIOR, NOISE, STEP = 13, 50, 455, 0.3, 0.3, 2e-3
TARGETS = {1: 25, 128: 40}
Run = Callable[[int], Tensor]  # so many steps from the start; gives the weights at the end, [C, P]


def problem(chains: int) -> tuple[Target, tuple[Tensor, Tensor], Tensor, Tensor]:
    """Target, data, weights and momenta [C, P]."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)).cuda()
    model = dubito.Model(network, dubito.Gaussian(scale=NOISE), prior=dubito.priors.Normal(scale=PRIOR))
    x = torch.randn(POINTS, INPUTS, device="cuda")
    y = (x[:, :1] * x[:, 1:2]).tanh() + NOISE * torch.randn(POINTS, 1, device="cuda")
    size = tree.size(model.parameters())
    return (
        Target(model, POINTS, members=chains),
        (x, y),
        PRIOR * torch.randn(chains, size).cuda(),
        torch.randn(chains, size).cuda(),
    )


def plain(target: Target, data: tuple[Tensor, Tensor], q: Tensor, v: Tensor) -> Run:
    """Step after step in PyTorch."""
    like = target.model.parameters()

    def gradient(q: Tensor) -> Tensor:
        return tree.flatten(target.gradient(tree.unflatten(q, like), [data], {}).gradient, stacked=True)

    def run(steps: int) -> Tensor:
        here, speed = q.clone(), v.clone()
        g = gradient(here)
        for _ in range(steps):
            speed = speed + STEP / 2 * g
            here = here + STEP * speed
            g = gradient(here)
            speed = speed + STEP / 2 * g
        return here

    return run


def fused(target: Target, data: tuple[Tensor, Tensor], q: Tensor, v: Tensor) -> Run:
    """Our kernel."""
    plan = mlp.recognize(target, data, target.model.parameters())
    if plan is None:
        raise SystemExit("the kernel does not know this posterior, or Triton is not there")
    chains, size = q.shape
    step, left = torch.full((chains,), STEP, device="cuda"), torch.full((chains,), 2**30, dtype=torch.int32, device="cuda")
    scale = torch.ones(size, device="cuda")

    def run(steps: int) -> Tensor:
        here, speed = q.clone(), v.clone()
        g, log_likelihood, log_prior = plan.gradient(*data, here)
        plan.leapfrog(*data, here, speed, g, log_likelihood, log_prior, step=step, left=left, scale=scale, steps=steps)
        return here

    return run


def by_jax(precision: str) -> Callable[..., Run]:
    import jax
    import jax.numpy as jnp

    def way(target: Target, data: tuple[Tensor, Tensor], q: Tensor, v: Tensor) -> Run:
        x, y = (jnp.asarray(t.cpu().numpy()) for t in data)
        ends = [INPUTS * HIDDEN, INPUTS * HIDDEN + HIDDEN, INPUTS * HIDDEN + 2 * HIDDEN]

        def leaves(flat: Tensor) -> tuple[Any, ...]:  # as one would write it in JAX: a tuple of arrays, x @ w
            w, b, u, c = (jnp.asarray(part.cpu().numpy()) for part in flat.tensor_split(ends, 1))
            return w.reshape(-1, HIDDEN, INPUTS).swapaxes(1, 2), b, u, c

        here, speed = leaves(q), leaves(v)

        def log_joint(q: Any) -> Any:
            w, b, u, c = q
            f = jax.nn.relu(x @ w + b) @ u + c
            return -0.5 * jnp.sum((y[:, 0] - f) ** 2) / NOISE**2 - 0.5 * sum(jnp.sum(p**2) for p in q) / PRIOR**2

        gradient = jax.grad(log_joint)

        def add(a: Any, b: Any, factor: float) -> Any:
            return jax.tree.map(lambda a, b: a + factor * b, a, b)

        def trajectory(q: Any, v: Any, steps: int) -> Any:
            def step(state: Any, _: Any) -> Any:
                q, v, g = state
                v = add(v, g, STEP / 2)
                q = add(q, v, STEP)
                g = gradient(q)
                return (q, add(v, g, STEP / 2), g), None

            return jax.lax.scan(step, (q, v, gradient(q)), None, length=steps)[0][0]

        compiled: dict[int, Any] = {}

        def run(steps: int) -> Tensor:
            with jax.default_matmul_precision(precision):
                if steps not in compiled:
                    compiled[steps] = jax.jit(jax.vmap(lambda q, v: trajectory(q, v, steps)))
                w, *rest = jax.block_until_ready(compiled[steps](here, speed))
            return torch.cat([torch.from_dlpack(part).flatten(1) for part in (w.swapaxes(1, 2), *rest)], 1)

        return run

    return way


def measure(run: Run, steps: int, repeats: int) -> dict[str, float]:
    """Microseconds a step, over whole trajectories."""
    run(steps)
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run(steps)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {"fastest": 1e6 * min(seconds) / steps, "median": 1e6 * statistics.median(seconds) / steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chains", type=int, nargs="*", default=[1, 128])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=15)
    args, began = parser.parse_args(), time.time()
    if not torch.cuda.is_available():
        raise SystemExit("this needs an NVIDIA GPU")
    ways: dict[str, tuple[Callable[..., Run], int]] = {"PyTorch, step after step": (plain, 20), "our kernel": (fused, args.steps)}
    versions = {}
    try:
        import jax

        versions["jax"] = jax.__version__
        ways["JAX, float32"] = by_jax("highest"), args.steps
        ways["JAX, its default (tf32)"] = by_jax("default"), args.steps
    except ImportError:
        print("JAX is not there: only our own figures")
    figures: dict[str, Any] = {}
    for chains in args.chains:
        target, data, q, v = problem(chains)
        x, y = data
        exact = replace(target, model=replace(target.model, network=target.model.network.double()))
        truth = plain(exact, (x.double(), y.double()), q.double(), v.double())(20)
        target.model.network.float()
        for name, (way, steps) in ways.items():
            run = way(target, data, q, v)
            error = float((run(20).double() - truth).norm() / truth.norm())
            if error > (1e-2 if "default" in name else 1e-5):
                raise AssertionError(f"{name} with {chains} chains ends {error:.2g} away from the float64 trajectory")
            found = measure(run, steps, args.repeats if steps > 20 else 5)
            figures.setdefault(name, {})[str(chains)] = {**found, "relative error after 20 steps": error}
            print(
                f"{name:28} {chains:4} chains {found['fastest']:9.2f} us a step (median {found['median']:.2f}), error {error:.1e}"
            )
    headline = {
        f"a leapfrog step with {chains} chains, µs: {name}": [
            figures[name][str(chains)]["fastest"],
            f"<= {TARGETS[chains]}" if name.startswith("our") and chains in TARGETS else "",
        ]
        for chains in args.chains
        for name in ways
    }
    settings = {
        "network": "13-50-1, ReLU",
        "points": POINTS,
        "steps": args.steps,
        "gpu": torch.cuda.get_device_name(),
        **versions,
    }
    write("leapfrog_cost", settings=settings, figures=figures, headline=headline, seconds=time.time() - began)


if __name__ == "__main__":
    main()
