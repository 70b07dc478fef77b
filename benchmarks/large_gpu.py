"""What large networks cost on a GPU: predictions over forward passes, fits over epochs, steps over plain steps, in one run.

ResNet-18 for 32-pixel images, ViT-B/16 for 224 pixels, and GPT-2 small, on random data of few examples, so that fixed costs show.
The unit of a prediction is a forward pass of the same inputs; of a fit, a plain training epoch over the same batches (forward,
backward, fused Adam, by hand); of a step, one step of that epoch. A fit is timed twice, over all batches and over half of them, and
a fit of several epochs with one and with three: the difference is what an epoch or a step costs, the rest is a fixed cost, in seconds.
Each case says in which precision it ran: "fp32" is strict, "tf32" allows it in matrix products (convolutions have it by torch's
default), "bf16" is autocast to bfloat16, of the unit too.

Every case has a roofline line: the operations that torch's own counter sees in one run, the time they would take at the rate that a
large matrix product reaches here, and the share of it that is reached; for linearized predictions also the least operations and
bytes by formula (`prediction_work`), at that rate and at the rate of a large copy.

What the result file has already is kept and not run again, so that the cases can be run in parts.

    python benchmarks/large_gpu.py                          # on a GPU, some eight minutes
    python benchmarks/large_gpu.py --device cpu --tiny      # only see that all runs; nothing is written
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from measure import RESULTS, interleaved, ratio, show, write
from networks import ViT, resnet18
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import dubito
from dubito.curvature.layout import layout

Data = list[tuple[Any, Tensor]]


class Study(NamedTuple):
    """A network and its data."""

    network: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, Tensor]]
    rows: int  # of an epoch
    size: int  # of its batches
    predict: int  # inputs of a prediction
    likelihood: dubito.likelihoods.Likelihood


class Case(NamedTuple):
    """What is timed, over what, and its goal."""

    study: str
    name: str
    unit: str  # "forward", "epoch" or "step"
    goal: float | None
    precision: str = "tf32"
    method: Any = None
    how: dict[str, Any] | None = None  # arguments of a prediction


LAPLACE = dict(check=False)
ONE_DRAW = dict(curvature="fisher", draws=1, check=False)
HEAD = dict(subset="last_layer", check=False)
CASES = (
    Case("ResNet-18", "predict, Kronecker", "forward", 60, method=dubito.Laplace(**ONE_DRAW), how={}),
    Case("ResNet-18", "predict, diagonal", "forward", 40, method=dubito.Laplace("diagonal", **ONE_DRAW), how={}),
    Case("ViT-B/16", "predict, Kronecker", "forward", 75, method=dubito.Laplace(**ONE_DRAW), how={}),
    Case("ResNet-18", "fit, Kronecker, one draw", "epoch", 2.5, method=dubito.Laplace(**ONE_DRAW)),
    Case("ViT-B/16", "fit, Kronecker, one draw", "epoch", 2.5, method=dubito.Laplace(**ONE_DRAW)),
    Case("ResNet-18", "fit, Kronecker, exact", "epoch", 8, method=dubito.Laplace(**LAPLACE)),
    Case("ViT-B/16", "fit, Kronecker, exact", "epoch", 12, method=dubito.Laplace(**LAPLACE)),
    Case("ResNet-18", "fit, diagonal, one draw", "epoch", 3, method=dubito.Laplace("diagonal", **ONE_DRAW)),
    Case("ViT-B/16", "fit, diagonal, one draw", "epoch", 3, method=dubito.Laplace("diagonal", **ONE_DRAW)),
    Case("ResNet-18", "step, mean field", "step", 1.4, method=dubito.Variational(epochs=2)),
    Case("ResNet-18", "step, mean field", "step", 1.4, "bf16", dubito.Variational(epochs=2)),
    Case(
        "ResNet-18", "step, mean field, one draw a batch", "step", 1.4, method=dubito.Variational(epochs=2, estimator="weights")
    ),
    Case("ResNet-18", "step, IVON", "step", 1.1, "bf16", dubito.IVON(epochs=2)),
    Case("ViT-B/16", "step, IVON", "step", 1.12, "bf16", dubito.IVON(epochs=2)),
    Case("ResNet-18", "step, MAP", "step", 1.0, method=dubito.MAP(epochs=2)),
    Case(
        "GPT-2", "fit, last layer, diagonal, one draw", "epoch", 1, method=dubito.Laplace("diagonal", "fisher", draws=1, **HEAD)
    ),
    Case("GPT-2, adapters", "fit, Kronecker, one draw", "epoch", None, method=dubito.Laplace(**ONE_DRAW)),
    Case("GPT-2", "step, IVON", "step", 1.15, "bf16", dubito.IVON(epochs=2)),
    Case("GPT-2", "predict, 30 draws of IVON", "forward", 35, "bf16", dubito.IVON(epochs=1), {"draws": 30}),
)


def gpt2(tiny: bool) -> nn.Module:
    """From a configuration; no weights are downloaded."""
    from transformers import GPT2Config, GPT2LMHeadModel

    small = dict(n_layer=1, n_embd=16, n_head=2, vocab_size=101) if tiny else {}
    return GPT2LMHeadModel(GPT2Config(**small, use_cache=False, bos_token_id=0, eos_token_id=0))


def adapted(tiny: bool) -> nn.Module:
    """GPT-2 with adapters of rank 8 at its attention; all else is frozen."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(gpt2(tiny), LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True))  # pyright: ignore


def studies(tiny: bool) -> dict[str, Study]:
    """The networks; tiny ones only see that all runs."""
    words, length, side = (101, 8, 32) if tiny else (50257, 128, 224)
    vit = (lambda: ViT(32, 16, 16, 1, 2)) if tiny else (lambda: ViT(224, 16, 768, 12, 12))

    def images(side: int) -> Callable[[int], tuple[Tensor, Tensor]]:
        return lambda n: (torch.randn(n, 3, side, side), torch.randint(10, (n,)))

    def tokens(n: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(words, (n, length))
        return ids, ids

    classes, text = dubito.Categorical(), dubito.NextToken()
    found = {
        "ResNet-18": Study(lambda: resnet18(4 if tiny else 64), images(32), 12800, 128, 128, classes),
        "ViT-B/16": Study(vit, images(side), 1024, 32, 16, classes),
        "GPT-2": Study(lambda: gpt2(tiny), tokens, 256, 8, 4, text),
        "GPT-2, adapters": Study(lambda: adapted(tiny), tokens, 256, 8, 4, text),
    }
    return {name: study._replace(rows=8, size=4, predict=2) for name, study in found.items()} if tiny else found


def data_of(study: Study, args: argparse.Namespace) -> Data:
    """The batches of an epoch, on the device."""
    torch.manual_seed(0)
    batches = []
    for _ in range(study.rows // study.size):
        x, y = study.batch(study.size)
        batches.append((x.to(args.device), y.to(args.device)))
    return batches


def loss_of(study: Study, network: nn.Module, x: Any, y: Tensor) -> Tensor:
    """As a loop by hand has it."""
    out = network(x)
    logits = out if isinstance(out, Tensor) else out.logits
    if logits.ndim == 3:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), y[:, 1:].flatten())
    return F.cross_entropy(logits, y)


def epoch(study: Study, network: nn.Module, data: Data, half: bool) -> Callable[[], None]:
    """A plain training epoch; its time is that of its steps."""
    network.train()
    optimizer = torch.optim.Adam([p for p in network.parameters() if p.requires_grad], lr=1e-5, fused=True)

    def run() -> None:
        for x, y in data:
            optimizer.zero_grad()
            with torch.autocast(y.device.type, torch.bfloat16, enabled=half):
                loss = loss_of(study, network, x, y)
            loss.backward()
            optimizer.step()

    return run


def prepared(study: Study, args: argparse.Namespace) -> nn.Module:
    """The network on the device."""
    torch.manual_seed(0)
    return study.network().to(args.device)


def measure(case: Case, study: Study, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the case and of its unit, and the roofline line."""
    torch.backends.cuda.matmul.allow_tf32 = case.precision == "tf32"
    data = data_of(study, args)
    network = prepared(study, args)
    model = dubito.Model(network.eval(), study.likelihood)

    half = case.precision == "bf16"

    def fit(method: Any, batches: Data) -> dubito.posteriors.Posterior:
        return dubito.fit(model, method, batches, progress=False, precision="bfloat16" if half else None)

    least: dict[str, float] = {}
    runs: dict[str, Callable[[], object]] = {}
    if case.unit == "forward":
        posterior, x = fit(case.method, data), data[0][0][: study.predict]
        unit = torch.no_grad()(lambda: network(x))
        runs["case"] = lambda: posterior.predict(x, **(case.how or {})).mean
        if isinstance(posterior, dubito.posteriors.Gaussian) and not case.how:
            least = prediction_work(posterior, x)
    else:
        unit = epoch(study, prepared(study, args), data, half)
        if case.unit == "epoch":
            runs = {"half": lambda: fit(case.method, data[: len(data) // 2]), "case": lambda: fit(case.method, data)}
        else:
            runs = {f"{n}": lambda n=n: fit(replace(case.method, epochs=n), data) for n in (1, 3)}
    both = {"unit": synchronized(unit, args), **{name: synchronized(run, args) for name, run in runs.items()}}
    seconds = interleaved(both, args.repeats)
    times, fixed = {"unit": seconds["unit"], "case": seconds.get("case", [])}, 0.0
    if case.unit != "forward":
        (few, first), (many, whole) = ((name, seconds[name]) for name in runs)
        factor = 2.0 if few == "half" else 0.5  # to one epoch, from half of one or from two
        times["case"] = [factor * (b - a) for a, b in zip(first, whole, strict=True)]
        fixed = min(whole) - (1 if few == "half" else 3) * min(times["case"])
    last = runs["case" if "case" in runs else "3"]
    some = (
        last
        if case.unit == "forward"
        else lambda: fit(case.method if many == "case" else replace(case.method, epochs=1), data[:1])
    )
    with FlopCounterMode(display=False) as counter:  # which keeps the graphs of all that it counts
        some()
    return {
        "ratio": ratio(times, "case", "unit"),
        "fixed seconds": fixed,
        "milliseconds": {name: 1e3 * min(each) for name, each in times.items()},
        "operations": counter.get_total_flops() * (1 if case.unit == "forward" else len(data)),
        **least,
        "peak of memory, GB": peak_memory(last, args),
    }


def synchronized(run: Callable[[], object], args: argparse.Namespace) -> Callable[[], None]:
    """The run, until the GPU is done."""

    def whole() -> None:
        run()
        if args.device == "cuda":
            torch.cuda.synchronize()

    return whole


def peak_memory(run: Callable[[], object], args: argparse.Namespace) -> float:
    """How far the memory of the GPU rises."""
    if args.device != "cuda":
        return float("nan")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def affine_layers(posterior: dubito.posteriors.Gaussian, x: Tensor) -> Iterator[tuple[int, int, int]]:
    """(T, O, I) of every layer with a matrix, at these inputs."""
    from dubito.posteriors.predict.linearized import Linearization

    names = tuple(posterior.covariance.shapes)
    known = layout(posterior.model, posterior.params, x, posterior.buffers, names)
    with torch.enable_grad():
        run = Linearization(posterior.model, posterior.params, posterior.buffers, posterior.covariance, x, known, names)
    for layer in run.layers:
        if layer.part.kind == "affine" and layer.part.weight is not None:
            shape = layer.shapes[layer.part.weight]
            yield layer.positions, shape[0], shape[1:].numel()


def prediction_work(posterior: dubito.posteriors.Gaussian, x: Tensor) -> dict[str, float]:
    """Operations and bytes that a linearized prediction cannot do without.

    A forward pass; a pass backwards to the layers for each of C outputs; and for each layer with gradients [C, T, O] and inputs [T, I]:
    in the eigenbasis of a Kronecker product both are rotated, before or after they are multiplied, whichever is less; the rows
    [C, O, I] are made once, and their inner products taken. Gradients and rows are written and read once.
    """
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        posterior.model.network(x)
    forward, n = counter.get_total_flops(), len(x)
    classes = posterior.predict(x[:1], how="point").mean.shape[-1]
    kronecker = "Kronecker" in type(posterior.covariance.independent_blocks[0]).__name__
    operations, moved = forward * (1 + classes), 0.0
    for t, o, i in affine_layers(posterior, x[:2]):
        rotations = min(t * i * i, classes * o * i * i) + min(classes * t * o * o, classes * i * o * o) if kronecker else 0
        operations += 2 * n * (rotations + classes * t * o * i + classes * classes * o * i)
        moved += 4 * n * (2 * classes * t * o + 2 * t * i + 2 * classes * o * i)
    return {"least operations": operations, "least bytes": moved}


def ceilings(args: argparse.Namespace) -> dict[str, float]:
    """Operations a second of large matrix products, and bytes a second of a large copy, on this device."""
    size = 512 if args.tiny else 8192
    found = {}
    for precision in ("fp32", "tf32", "bf16"):
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        a = torch.randn(size, size, device=args.device, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
        times = interleaved({"product": synchronized(lambda a=a: a @ a, args)}, 5)
        found[precision] = 2 * size**3 / min(times["product"])
    a = torch.empty(2**20 if args.tiny else 2**30, device=args.device)
    b = torch.empty_like(a)
    times = interleaved({"copy": synchronized(lambda: b.copy_(a), args)}, 5)
    return {**found, "bytes": 2 * a.nbytes / min(times["copy"])}


def line(case: Case, figure: dict[str, Any], rates: dict[str, float]) -> dict[str, float]:
    """Milliseconds of the floor, by what is counted and by formula, and the share reached."""
    spent, rate = figure["milliseconds"]["case"], rates[case.precision]
    counted = 1e3 * figure["operations"] / rate
    found = {"floor of counted operations, ms": counted, "share reached": counted / spent}
    if "least operations" in figure:
        floor = 1e3 * max(figure["least operations"] / rate, figure["least bytes"] / rates["bytes"])
        found |= {"floor by formula, ms": floor, "share of it reached": floor / spent}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="run also what the result file has already")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of cases, as 'ResNet-18: predict'")
    parser.add_argument("--tiny", action="store_true", help="tiny networks, to see that all runs; nothing is written")
    args, began = parser.parse_args(), time.time()
    warnings.simplefilter("ignore")
    path = RESULTS / "large_gpu.json"
    figures = json.loads(path.read_text())["figures"] if path.exists() and not args.tiny else {}
    rates = ceilings(args)
    for case in CASES:
        name = f"{case.study}: {case.name}, {case.precision}"
        if not any(part in name for part in args.only) or (name in figures and not args.again):
            continue
        try:
            figure = measure(case, studies(args.tiny)[case.study], args)
        except Exception as error:  # told, and the others go on
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        figures[name] = {**figure, **line(case, figure, rates), "goal": case.goal, "unit": case.unit}
        print(name, {key: value for key, value in figures[name].items() if key != "milliseconds"}, flush=True)
        if not args.tiny:
            save(figures, rates, args, time.time() - began)
        gc.collect()
        torch.cuda.empty_cache()
    rows = [
        [name, f["ratio"]["fastest"], f["goal"], f["unit"], f["fixed seconds"], f["share reached"]] for name, f in figures.items()
    ]
    show("Cost over its unit, fastest rounds", ["case", "ratio", "goal", "unit", "fixed, s", "share of the roofline"], rows)


def save(figures: dict[str, Any], rates: dict[str, float], args: argparse.Namespace, seconds: float) -> None:
    """After every case, so that a run that is cut short is not lost."""
    headline = {}
    for name, f in figures.items():
        goal, share = f"<= {f['goal']:g}" if f["goal"] else "none", f"{f['share reached']:.0%}"
        if f["unit"] == "forward":
            headline[f"{name}, over a forward pass (share of the roofline)"] = [f"{f['ratio']['fastest']:.1f} ({share})", goal]
        else:
            value = f"{f['ratio']['fastest']:.2f} ({share}; {f['fixed seconds']:.1f} s)"
            headline[f"{name}, over a plain {f['unit']} (share of the roofline; fixed cost)"] = [value, goal]
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else "none"
    settings = {"gpu": gpu, "rates": rates, "repeats": args.repeats, "data": "random, few rows", "tf32 in convolutions": True}
    write("large_gpu", settings=settings, figures=figures, headline=headline, seconds=seconds)


if __name__ == "__main__":
    main()
