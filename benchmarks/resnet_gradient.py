"""The gradient of the log posterior of ResNet-20-FRN over 40,960 images of CIFAR-10's size, on one GPU: ours, torch's and JAX's.

All in bfloat16 with weights in float32, one process each, so that none can slow down or stop another. `density` is the library's own
way to it, what HMC calls: `Density` of a network whose convolutions and normalisations are our kernels. Errors are those of
the gradient of 1,024 images, relative to float32.

    python benchmarks/resnet_gradient.py                            # all, some minutes; each is stopped after --limit seconds
    python benchmarks/resnet_gradient.py --only density,kernel
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import show, write
from torch import Tensor

from dubito import Categorical, Model
from dubito.inference.log_density import Density
from dubito.model import Target
from dubito.priors import Normal
from dubito.tensors import tree

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from resnet20_frn import ResNet20FRN

CASES = {
    "kernel": "ours: fused normalisation, our convolutions, a CUDA graph",
    "density": "ours: Density of that network",
    "fused": "ours: fused normalisation, torch's convolutions, a CUDA graph",
    "eager": "torch, eager",
    "compile": "torch.compile",
    "jax": "JAX",
}
TARGETS = {"kernel": "<= 170", "density": "<= 170"}
CHUNKS = {"kernel": (4096, 8192), "fused": (8192,), "eager": (4096,), "compile": (4096,), "jax": (4096,)}
PRECISION = 5.0  # of the prior
DEVICE, FEW = "cuda", 1024  # images on which errors are measured


def images(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    x = torch.randn(n, 3, 32, 32, device=DEVICE, generator=generator)
    y = torch.randint(10, (n,), device=DEVICE, generator=generator)
    return x.bfloat16().contiguous(memory_format=torch.channels_last), y


def network(case: str) -> ResNet20FRN:
    torch.manual_seed(0)
    how: Any = {"kernel": "kernel", "density": "kernel"}.get(case, "plain")
    return ResNet20FRN(fused=case in ("kernel", "density", "fused"), convolutions=how).to(DEVICE)


def milliseconds(function: Callable[[], object], repeats: int) -> float:
    function()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def score(net: Callable, x: Tensor, y: Tensor) -> Tensor:
    return -F.cross_entropy(net(x).float(), y, reduction="sum")


def gradient(net: ResNet20FRN, value: Callable, data: tuple[Tensor, Tensor], chunk: int) -> list[Tensor]:
    """Of the log posterior: summed over chunks in float32, and the prior's."""
    leaves = list(net.parameters())
    total: Any = [-PRECISION * leaf.detach() for leaf in leaves]
    for x, y in zip(*(part.split(chunk) for part in data), strict=True):
        with torch.autocast(DEVICE, torch.bfloat16):
            likelihood = value(net, x, y)
        total = torch._foreach_add(total, torch.autograd.grad(likelihood, leaves))
    return total


def flat(leaves: Any) -> Tensor:
    return torch.cat([leaf.flatten().float() for leaf in leaves])


def played(function: Callable[[], object]) -> Callable[[], object]:
    """Recorded once as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def exact(n: int = FEW) -> Tensor:
    """In float32, written with torch's operations."""
    net, (x, y) = network("eager"), images(n)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return (
            flat(torch.autograd.grad(score(net, x.float(), y), list(net.parameters())))
            - PRECISION * flat(net.parameters()).detach()
        )


def torch_case(case: str, args: argparse.Namespace) -> dict[str, float]:
    torch.backends.cudnn.benchmark = True
    net, data, found = network(case), images(args.images), {}
    value: Callable = score
    if case == "compile":
        net = net.to(memory_format=torch.channels_last)
        value = torch.compile(score, dynamic=False, mode="max-autotune-no-cudagraphs")
    few = images(FEW)
    if case == "density":
        model = Model(net, Categorical(), Normal(scale=PRECISION**-0.5))
        where = tree.flatten(model.parameters()).unsqueeze(0)

        def density(n_data: int, x: Tensor, y: Tensor) -> Density:
            made = Density(Target(model, n_data, precision=torch.bfloat16), [(x, y)], model.parameters(), {})
            made.chunks = list(zip(x.split(args.chunk), y.split(args.chunk), strict=True))
            return made

        found["error"] = float((density(FEW, *few)(where).gradient[0] - exact()).norm() / exact().norm())
        whole = density(args.images, *data)
        with torch.no_grad():
            found[f"ms, chunks of {args.chunk}"] = milliseconds(played(lambda: whole(where)), args.repeats)
        return found
    found["error"] = float((flat(gradient(net, value, few, FEW)) - exact()).norm() / exact().norm())
    for chunk in CHUNKS[case]:
        run = lambda chunk=chunk: gradient(net, value, data, chunk)  # noqa: E731
        ready = run if case in ("eager", "compile") else played(run)
        found[f"ms, chunks of {chunk}"] = milliseconds(ready, args.repeats)
        print(case, found, flush=True)
    return found


def jax_case(args: argparse.Namespace) -> dict[str, float]:
    """The same network, with the same weights, in JAX's own words."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    import jax.numpy as jnp

    net = network("eager")
    weights = {name: jnp.asarray(leaf.detach().cpu().numpy()) for name, leaf in net.named_parameters()}
    data = images(args.images)
    x = jnp.asarray(data[0].float().permute(0, 2, 3, 1).cpu().numpy()).astype(jnp.bfloat16)  # [B, H, W, C]
    y = jnp.asarray(data[1].cpu().numpy())

    def layer(w, name, x, stride, skip=None, swish=True):
        kernel = w[f"{name}.weight"].transpose(2, 3, 1, 0).astype(jnp.bfloat16)
        dims = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=dims)
        x = x.astype(jnp.float32) + w[f"{name}.bias"]
        x = x * jax.lax.rsqrt(jnp.mean(x * x, (1, 2), keepdims=True) + 1e-6)
        z = jnp.maximum(w[f"{name}.gamma"] * x + w[f"{name}.beta"], w[f"{name}.tau"])
        z = z if skip is None else skip.astype(jnp.float32) + z
        return (jax.nn.swish(z) if swish else z).astype(jnp.bfloat16)

    def likelihood(w, x, y):
        x = layer(w, "stem", x, 1)
        for i in range(9):
            halves = i in (3, 6)
            skip = layer(w, f"blocks.{i}.shortcut", x, 2, swish=False) if halves else x
            x = layer(w, f"blocks.{i}.second", layer(w, f"blocks.{i}.first", x, 2 if halves else 1), 1, skip)
        f = x.astype(jnp.float32).mean((1, 2)) @ w["head.weight"].T + w["head.bias"]
        return jnp.take_along_axis(jax.nn.log_softmax(f), y[:, None], 1).sum()

    def total(w, x, y):
        """Chunk after chunk, as the whole does not fit."""
        start = jax.tree.map(lambda leaf: -PRECISION * leaf, w)
        return jax.lax.scan(
            lambda sums, part: (jax.tree.map(jnp.add, sums, jax.grad(likelihood)(w, *part)), None), start, (x, y)
        )[0]

    compiled, found = jax.jit(total), {}
    few = images(FEW)
    pixels = jnp.asarray(few[0].float().permute(0, 2, 3, 1).cpu().numpy()).astype(jnp.bfloat16)
    slope = compiled(weights, pixels[None], jnp.asarray(few[1].cpu().numpy())[None])
    mine = torch.cat([torch.from_numpy(jax.device_get(slope[name]).copy()).flatten() for name in weights])
    expected = exact().cpu()
    found["error"] = float((mine - expected).norm() / expected.norm())
    for chunk in CHUNKS["jax"]:
        parts = x.reshape(-1, chunk, 32, 32, 3), y.reshape(-1, chunk)
        jax.block_until_ready(compiled(weights, *parts))
        times = []
        for _ in range(args.repeats):
            start = time.perf_counter()
            jax.block_until_ready(compiled(weights, *parts))
            times.append(1e3 * (time.perf_counter() - start))
        found[f"ms, chunks of {chunk}"] = statistics.median(times)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=40_960)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=8192, help="images at once, of `density`")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for each")
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--case", help="one, in this process")
    args, began = parser.parse_args(), time.time()
    if args.case:
        found = jax_case(args) if args.case == "jax" else torch_case(args.case, args)
        print("RESULT " + json.dumps(found), flush=True)
        return
    figures: dict[str, Any] = {}
    for case in args.only.split(","):
        command = [sys.executable, __file__, "--case", case, "--images", str(args.images), "--repeats", str(args.repeats)]
        try:
            done = subprocess.run(
                [*command, "--chunk", str(args.chunk)], capture_output=True, text=True, timeout=args.limit, check=False
            )
        except subprocess.TimeoutExpired:
            figures[case] = {"failed": f"not done after {args.limit:.0f} s"}
        else:
            lines = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            figures[case] = json.loads(lines[-1]) if lines else {"failed": done.stderr.strip().splitlines()[-1:]}
        print(f"[{time.time() - began:.0f} s]", case, figures[case], flush=True)
        headline = {}
        for name, found in figures.items():
            times = [value for key, value in found.items() if key.startswith("ms")]
            figure = f"{min(times):.0f} ms, error {found['error']:.1%}" if times else str(found.get("failed"))
            headline[CASES[name]] = [figure, TARGETS.get(name, "")]
        settings = {**vars(args), "gpu": torch.cuda.get_device_name()}
        write("resnet_gradient", settings=settings, figures=figures, headline=headline, seconds=time.time() - began)
    show(f"Gradient over {args.images:,} images", ["how", "time", "target"], [[what, *row] for what, row in headline.items()])


if __name__ == "__main__":
    main()
