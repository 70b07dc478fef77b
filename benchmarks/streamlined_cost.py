"""What a prediction in one pass costs, as a ratio to the plain network's forward pass in the same run.

An MLP with all weights random; a small vision transformer, and with `--device cuda` a ViT-Base in bfloat16, with the value matrices of
the last two blocks and the head random. "Taylor" takes functions at their mean, as SUQ does. These are the traced network alone,
what `dubito.as_module` deploys; "predict" is `posterior.predict`, which also makes the predictive. Beside them sampling, the
linearised network, and for the MLP laplace-torch where it is installed. SUQ's own code cannot be installed; its figures, in the
targets' column, were measured elsewhere.

Memory is how far the peak rises during one call, each in a process of its own (on a GPU, of what is allocated there), over that of a
plain pass that keeps its activations, as for training. A plain pass without gradients frees them as it goes; its rise is shown too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from measure import growth, interleaved, ratio, show, write
from networks import ViT, last_values, mlp
from torch import Tensor, nn

import dubito
from dubito.posteriors import Gaussian

TARGETS = {
    ("MLP", "forward, Taylor"): {1: 2.3, 64: 2.5, 256: 2.6},
    ("MLP", "forward, exact moments"): {1: 2.9, 64: 2.7, 256: 3.0},
    ("MLP", "adjoint"): {1: 3.3, 64: 7, 256: 9},
    ("ViT", "forward, Taylor"): {1: 1.15, 8: 1.2, 32: 1.12},
    ("ViT", "forward, exact moments"): {1: 1.45, 8: 1.6, 32: 1.45},
    ("ViT", "adjoint"): {1: 4, 8: 4, 32: 4},
    ("ViT-Base", "forward, Taylor"): {1: 1.1, 64: 1.1},
    ("ViT-Base", "forward, exact moments"): {1: 1.3, 64: 1.3},
    ("ViT-Base", "adjoint"): {1: 3, 64: 3},
}
SUQ = {"MLP": "7.1-8.7 / 4.6-5.3 / 3.8", "ViT": "1.45 / 1.6 / 1.5", "ViT-Base": "1.16 (paper)"}


def posterior_of(network: nn.Module, only: str, variance: float) -> Gaussian:
    model = dubito.Model(network, dubito.Categorical(), only=only)
    mean = model.parameters()
    return Gaussian.diagonal(model, mean, {name: torch.full_like(leaf, variance) for name, leaf in mean.items()})


def laplace_torch(network: nn.Module, x: Tensor) -> Callable[[], object] | None:
    """The peer's linearised prediction with a diagonal posterior over all weights."""
    try:
        import laplace
        from laplace.curvature import AsdlGGN
    except ImportError:
        return None
    posterior = laplace.Laplace(network, "classification", subset_of_weights="all", hessian_structure="diag", backend=AsdlGGN)
    data = torch.utils.data.TensorDataset(x[:8], torch.randint(10, (len(x[:8]),)))
    posterior.fit(torch.utils.data.DataLoader(data, batch_size=8))
    return lambda: posterior(x[:4])


def synchronised(run: Callable[[], object]) -> Callable[[], None]:
    def both() -> None:
        run()
        torch.cuda.synchronize()

    return both


def cases(posterior: Gaussian, x: Tensor, precision: torch.dtype | None, draws: int) -> dict[str, Callable[[], object]]:
    network, engine = posterior.model.network.eval(), posterior.streamlined
    x = engine.prepare(x) if precision is None else x.to(precision)
    weights, first_order = engine.given(engine.trace(x)), engine.given(engine.trace(x), taylor=True)
    taylor, exact = engine.program(x, taylor=True), engine.program(x)
    quiet = torch.no_grad()
    return {
        "plain": quiet(lambda: network(x)),
        "forward, Taylor": quiet(lambda: taylor(x, *first_order)),
        "forward, exact moments": quiet(lambda: exact(x, *weights)),
        "forward, predict": lambda: posterior.predict(x, "streamlined", rank=0),
        "adjoint": lambda: posterior.predict(x, "adjoint"),
        "linearised": lambda: posterior.predict(x, "linearized"),
        f"sampled, {draws} draws": lambda: posterior.predict(x, "sampled", draws=draws),
    }


def measure(name: str, posterior: Gaussian, x: Tensor, args: argparse.Namespace, precision: torch.dtype | None = None) -> dict:
    runs = cases(posterior, x, precision, args.draws)
    repeats = args.repeats * (10 if len(x) == 1 else 1)
    if args.device == "cuda":
        runs = {key: synchronised(run) for key, run in runs.items()}
    compiled: dict[str, dict] = {}
    if args.compile:
        compiled = _compiled(posterior, x, precision, repeats)
    slow = {key for key in runs if key.startswith(("sampled", "linearised"))}
    seconds = interleaved({key: run for key, run in runs.items() if key not in slow}, repeats)
    others = interleaved({key: run for key, run in runs.items() if key in slow or key == "plain"}, max(3, args.repeats // 10))
    found = {key: ratio(seconds, key, "plain") for key in runs if key not in slow and key != "plain"}
    found |= {key: ratio(others, key, "plain") for key in slow}
    if name == "MLP" and args.device == "cpu" and (peer := laplace_torch(posterior.model.network, x)) is not None and len(x) >= 4:
        times = interleaved({"plain": runs["plain"], "peer": peer}, 2)
        over = ratio(times, "peer", "plain")
        found["laplace-torch, diagonal, linearised (4 inputs, scaled up)"] = {k: v * len(x) / 4 for k, v in over.items()}
    return {"plain milliseconds": 1e3 * min(seconds["plain"]), **found, **compiled}


def _compiled(posterior: Gaussian, x: Tensor, precision: torch.dtype | None, repeats: int) -> dict[str, dict]:
    """The same with torch.compile, over the plain network with torch.compile."""
    network, engine = posterior.model.network.eval(), posterior.streamlined
    x = engine.prepare(x) if precision is None else x.to(precision)
    trace = engine.trace(x)
    programs = {"Taylor": engine.program(x, taylor=True), "exact moments": engine.program(x)}
    given = {"Taylor": engine.given(trace, taylor=True), "exact moments": engine.given(trace)}
    runs: dict[str, Callable[[], object]] = {}
    with torch.no_grad():
        plain = torch.compile(network, fullgraph=True)
        runs["plain"] = torch.no_grad()(lambda: plain(x))
        for key, program in programs.items():
            weights = given[key]
            fast = torch.compile(lambda x, program=program, weights=weights: program(x, *weights), fullgraph=True)
            runs[key] = torch.no_grad()(lambda fast=fast: fast(x))
    if x.is_cuda:
        runs = {key: synchronised(run) for key, run in runs.items()}
    seconds = interleaved(runs, repeats)
    return {f"forward, {key}, both compiled": ratio(seconds, key, "plain") for key in programs}


def conversion(device: str) -> float:
    """Milliseconds from a posterior to its first program, of a network of 670,000 weights."""
    times = []
    for _ in range(7):
        posterior = posterior_of(mlp(784, 512, 512, 10).to(device), "", 1e-4)
        x = torch.randn(8, 784, device=device)
        start = time.perf_counter()
        posterior.streamlined.program(x)
        times.append(time.perf_counter() - start)
    return 1e3 * sorted(times)[len(times) // 2]


def study(name: str) -> tuple[Gaussian, Callable[[int], Tensor], torch.dtype | None, tuple[int, ...]]:
    """A posterior, its inputs, their precision if it is not the usual one, and the numbers of examples."""
    if name == "MLP":
        return posterior_of(mlp(784, 512, 512, 10), "", 1e-4), lambda n: torch.randn(n, 784), None, (1, 64, 256)
    if name == "ViT":
        posterior = posterior_of(ViT(32, 4, 192, 6, 3), last_values(6), 1e-4)
        return posterior, lambda n: torch.randn(n, 3, 32, 32), None, (1, 8, 32)
    posterior = posterior_of(ViT(224, 16, 768, 12, 12).to("cuda", torch.bfloat16), last_values(12), 1e-4)
    return posterior, lambda n: torch.randn(n, 3, 224, 224, device="cuda", dtype=torch.bfloat16), torch.bfloat16, (1, 64)


MEASURED = ("plain", "plain, activations kept", "forward, predict", "adjoint")


def peak(name: str, batch: int, way: str) -> None:
    """In a process of its own: how far memory rises during one call, in megabytes."""
    warnings.simplefilter("ignore")
    posterior, inputs, precision, _ = study(name)
    network = posterior.model.network.eval().requires_grad_()

    def run(x: Tensor) -> object:
        return network(x) if way == MEASURED[1] else cases(posterior, x, precision, 1)[way]()

    x = inputs(batch)
    run(inputs(2))  # what is made once
    if not x.is_cuda:
        print(json.dumps(growth(lambda: run(x))))
        return
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(x)
    print(json.dumps((torch.cuda.max_memory_allocated() - before) / 2**20))


def peaks(name: str, batch: int) -> dict[str, float]:
    # without these the allocator keeps what is freed, and a rise of memory would not be seen
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    call = [sys.executable, __file__, "--peak", name, str(batch)]
    return {way: json.loads(subprocess.check_output([*call, way], env=env)) for way in MEASURED}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--compile", action="store_true", help="also with torch.compile")
    parser.add_argument(
        "--peak", nargs=3, metavar=("NAME", "BATCH", "WAY"), help="the rise of memory of one case, for this file's own use"
    )
    parser.add_argument("--quick", action="store_true", help="only see that all runs; nothing is written")
    args, began = parser.parse_args(), time.time()
    if args.peak:
        peak(args.peak[0], int(args.peak[1]), args.peak[2])
        return
    if args.quick:
        args.repeats, args.draws = 2, 4
    if args.threads:
        torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    figures: dict[str, Any] = {"conversion of a 670k-parameter network, ms": conversion(args.device)}
    print(f"conversion {figures['conversion of a 670k-parameter network, ms']:.1f} ms")
    headline: dict[str, list[Any]] = {
        "conversion of a 670k-parameter network": [f"{next(iter(figures.values())):.1f} ms", "<= 10 ms"]
    }
    for name in ("MLP", "ViT") if args.device == "cpu" else ("ViT-Base",):
        posterior, inputs, precision, batches = study(name)
        found = {n: measure(name, posterior, inputs(n), args, precision) for n in batches}
        figures[name] = found
        rows = []
        for key in dict.fromkeys(key for one in found.values() for key in one if key != "plain milliseconds"):
            cells = [found[n][key]["fastest"] if key in found[n] else None for n in batches]
            text = ["" if c is None else f"{c:.2f}" if c < 10 else f"{c:.0f}" for c in cells]
            bound = TARGETS.get((name, key), {})
            target = " / ".join(f"{bound[n]:g}" for n in batches if n in bound)
            rows.append([key, *text, target])
            headline[f"{name}, {key}, batch {' / '.join(map(str, batches))}"] = [" / ".join(text), target and f"<= {target}"]
        show(f"{name}: ratio to the plain forward pass (SUQ: {SUQ[name]})", ["", *map(str, batches), "target"], rows)
        largest = batches[-1]
        rise = figures[f"{name}, batch {largest}, rise of memory in MB"] = peaks(name, largest)
        kept = rise[MEASURED[1]]
        show(f"{name}, batch {largest}: rise of memory", ["", "MB", "share"], [[way, mb, mb / kept] for way, mb in rise.items()])
        for way in MEASURED[2:]:
            told = f"{rise[way] / kept:.2f} ({rise[way]:.0f} MB; plain pass without gradients {rise['plain']:.0f} MB)"
            headline[f"{name}, {way}, batch {largest}: memory over the plain pass's activations"] = [told, "<= 3"]
    if args.quick:
        return
    settings = {
        "device": args.device,
        "repeats": args.repeats,
        "draws": args.draws,
        "threads": torch.get_num_threads(),
        "compile": args.compile,
        "suq": SUQ,
    }
    if args.device == "cuda":
        settings["gpu"] = torch.cuda.get_device_name()
    name = "streamlined_cost" if args.device == "cpu" else "streamlined_cost_gpu"
    write(name, settings=settings, figures=figures, headline=headline, seconds=time.time() - began)


if __name__ == "__main__":
    main()
