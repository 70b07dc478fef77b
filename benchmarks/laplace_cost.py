"""What a Laplace posterior costs, beside laplace-torch: a fit over one plain training epoch, a prediction over one plain forward pass.

The epoch (forward, backward, fused Adam, by hand) runs over the same few batches of random data as the fits do. laplace-torch runs on
all three of its backends; Curvlinops is its default. Each case first runs once in a process of its own, which measures how far memory
rises and stops what passes a limit of time or memory: a peer's case is then tried again on fewer examples and its time scaled up in
proportion. That flatters what grows with the square of the batch, and wrongs what a fit does only once, such as a dense
factorisation. Such figures carry a ~ and the batch they are from, and are good for their order of magnitude only. What takes seconds
runs once. Its Kronecker structure refuses BatchNorm, so for it (alone) BatchNorm's weights are frozen; BackPACK cannot read a network
with shortcuts, and scales a convolution's Kronecker factors otherwise than the two others, so that its time there is that of another
posterior. (This file is not called laplace.py: the peer's package has that name.)
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import os
import resource
import signal
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import torch.nn.functional as F
from measure import growth, interleaved, ratio, resident, show, write
from networks import lenet, mlp, resnet20
from torch import Tensor, nn

import dubito

Data = list[tuple[Tensor, Tensor]]
OURS = ("dubito", "with .mean")
PEERS = {"Curvlinops": "CurvlinopsGGN", "BackPACK": "BackPackGGN", "ASDL": "AsdlGGN"}  # the first is laplace-torch's default
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {  # network, shape of an example, batches in an epoch
    "MLP": (lambda: mlp(784, 512, 512, 10), (784,), 64),
    "LeNet": (lenet, (1, 28, 28), 32),
    "ResNet-20": (resnet20, (3, 32, 32), 3),
}
# Children are forked from a server that has loaded all this and run nothing, so that a probe starts at once.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["dubito", "laplace", "laplace.curvature"])
FEWER = (None, 1.0, 1 / 4, 1 / 16, 1 / 64)  # on what a peer is tried in turn: all data, or a part of one batch


@dataclass(frozen=True)
class Case:
    name: str
    kind: Literal["fit", "predict"]
    structure: Literal["diagonal", "kronecker", "dense"]
    targets: tuple[float, float, float]  # for the networks in their order
    subset: Literal["all", "last_layer"] = "all"
    sampled: bool = False  # one Monte Carlo draw instead of all classes


CASES = (
    Case("diagonal, exact", "fit", "diagonal", (3, 5, 10)),
    Case("diagonal, one draw", "fit", "diagonal", (1.3, 1.8, 2.5), sampled=True),
    Case("Kronecker, exact", "fit", "kronecker", (5.5, 5, 8)),
    Case("Kronecker, one draw", "fit", "kronecker", (2.2, 2.2, 4.5), sampled=True),
    Case("last layer, dense", "fit", "dense", (25, 0.85, 0.35), subset="last_layer"),
    Case("predict, all Kronecker", "predict", "kronecker", (20, 15, 30)),
    Case("predict, last layer Kronecker", "predict", "kronecker", (2.5, 1.4, 1.1), subset="last_layer"),
)
MEMORY = {("LeNet", "predict, all Kronecker"): 40}  # megabytes, ours at most


class Loader(list):
    """The same batches as laplace-torch wants them, without the cost of a DataLoader."""

    def __init__(self, batches: Iterable[Any]):
        super().__init__(batches)
        self.dataset = range(sum(len(y) for _, y in self))


def problem(name: str, batch: int, batches: int | None = None) -> tuple[nn.Module, Data]:
    make, shape, usual = NETWORKS[name]
    torch.manual_seed(0)
    network = make()
    return network, [(torch.randn(batch, *shape), torch.randint(10, (batch,))) for _ in range(batches or usual)]


def head(rows: Tensor, part: float | None) -> Tensor:
    return rows if part is None else rows[: max(1, round(part * len(rows)))]


def reduced(data: Data, part: float | None) -> Data:
    """All batches, or a part of the first."""
    return data if part is None else [(head(data[0][0], part), head(data[0][1], part))]


def epoch(network: nn.Module, data: Data) -> Callable[[], None]:
    """A plain training epoch."""
    network = copy.deepcopy(network).train()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, fused=True)

    def run() -> None:
        for x, y in data:
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()

    return run


def forward(network: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    network = copy.deepcopy(network).eval()
    return torch.no_grad()(lambda: network(x))


def prepare(who: str, case: Case, network: nn.Module, data: Data, x: Tensor) -> Callable[[], object]:
    """What is timed: for a prediction, the posterior is fitted here, beforehand."""
    return _ours(who, case, network, data, x) if who in OURS else _theirs(who, case, network, data, x)


def _ours(who: str, case: Case, network: nn.Module, data: Data, x: Tensor) -> Callable[[], object]:
    method = dubito.Laplace(
        structure=case.structure,
        curvature="fisher" if case.sampled else "ggn",
        draws=1 if case.sampled else None,
        subset=case.subset,
        optimize_evidence=False,
    )
    model = dubito.Model(network, dubito.Categorical())

    def fit() -> dubito.posteriors.Posterior:
        return dubito.fit(model, method, data, progress=False)

    if case.kind == "fit":
        return fit
    posterior = fit()
    return (lambda: posterior.predict(x)) if who == OURS[0] else (lambda: posterior.predict(x).mean)


def _theirs(who: str, case: Case, network: nn.Module, data: Data, x: Tensor) -> Callable[[], object]:
    import laplace
    import laplace.curvature

    network = copy.deepcopy(network)
    if case.structure == "kronecker" and case.subset == "all":
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.requires_grad_(False)
    posterior = laplace.Laplace(
        network,
        "classification",
        subset_of_weights=case.subset,
        hessian_structure={"diagonal": "diag", "kronecker": "kron", "dense": "full"}[case.structure],
        backend=getattr(laplace.curvature, PEERS[who]),
        backend_kwargs={"stochastic": case.sampled},
    )
    loader = Loader(data)
    if case.kind == "predict":
        posterior.fit(loader)
    return (lambda: posterior.fit(loader)) if case.kind == "fit" else (lambda: posterior(x))


def probe(answer: Connection, who: str, name: str, case: Case, part: float | None, limits: argparse.Namespace) -> None:
    """In a process of its own: time, and rise of memory, of one run; the process dies at the limit of time."""
    network, data = problem(name, limits.batch, limits.batches)
    x = head(data[0][0], part)
    data = reduced(data, part) if case.kind == "fit" else data
    try:
        prepare(who, case, network, reduced(data, 2 / limits.batch), x[:1])()  # code and constants
        run = prepare(who, case, network, data, x)
        room = int((resident("VmSize") + 1024 * limits.gigabytes) * 2**20)
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
        signal.setitimer(signal.ITIMER_REAL, limits.seconds)
        start = time.perf_counter()
        megabytes = growth(run)
        signal.setitimer(signal.ITIMER_REAL, 0)
        answer.send({"seconds": time.perf_counter() - start, "megabytes": megabytes})
    except ModuleNotFoundError as error:
        answer.send({"error": "not installed", "message": str(error)})
    except (NotImplementedError, ValueError, AttributeError) as error:
        answer.send({"error": "unsupported", "message": str(error)[:200]})
    except (RuntimeError, MemoryError) as error:
        memory = isinstance(error, MemoryError) or "alloc" in str(error)
        answer.send({"error": f"> {limits.gigabytes:g} GB" if memory else "fails", "limit": memory, "message": str(error)[:200]})


def probed(who: str, name: str, case: Case, limits: argparse.Namespace) -> dict:
    """The largest part of the batch that keeps within the limits, with its time and rise of memory."""
    figure: dict = {}
    tried: list[dict] = []
    for part in FEWER if who in PEERS else FEWER[:1]:
        if part == 1 and case.kind == "predict":
            continue  # that is all of it
        receiver, sender = PROCESSES.Pipe(duplex=False)
        process = PROCESSES.Process(target=probe, args=(sender, who, name, case, part, limits))
        process.start()
        process.join()
        if receiver.poll():
            figure = receiver.recv()
        elif process.exitcode == -signal.SIGALRM:
            figure = {"error": f"> {limits.seconds:g} s", "limit": True}
        else:
            figure = {"error": "dies", "message": f"exit code {process.exitcode}"}
        figure = {**figure, "part": part, "tried": tried}
        if not figure.get("limit"):
            break
        tried = [*tried, {"part": part, "error": figure["error"]}]
    return figure


def compare(name: str, case: Case, args: argparse.Namespace) -> dict[str, dict]:
    """Time over the plain epoch or forward pass, and rise of memory, of everyone."""
    network, data = problem(name, args.batch, args.batches)
    x = data[0][0]
    plain = epoch(network, data) if case.kind == "fit" else forward(network, x)
    examples = sum(len(y) for _, y in data) if case.kind == "fit" else len(x)
    figures: dict[str, dict] = {}
    runs: dict[str, Callable[[], object]] = {}
    for who in [*(OURS if case.kind == "predict" else OURS[:1]), *args.peers]:
        figure = figures[who] = probed(who, name, case, args)
        if "error" not in figure:
            part = figure["part"]
            some = reduced(data, part) if case.kind == "fit" else data
            rows = head(x, part)
            used = sum(len(y) for _, y in some) if case.kind == "fit" else len(rows)
            figure["batch"], figure["scaled by"] = len(rows), examples / used
            runs[who] = prepare(who, case, network, some, rows)
    # ours and theirs in rounds of their own: a peer that sweeps the caches would make the plain pass beside us look slow
    slow = {who for who in runs if figures[who]["seconds"] > args.seconds / 10}
    groups = [
        ({who for who in runs if who in OURS} - slow, args.repeats),
        ({who for who in runs if who in PEERS} - slow, args.repeats),
        *(({who}, 1) for who in runs if who in slow),
    ]
    seconds: dict[str, list[float]] = {"plain": []}
    for group, repeats in groups:
        if group:
            times = interleaved({"plain": plain, **{who: runs[who] for who in runs if who in group}}, repeats)
            seconds = {**seconds, **times, "plain": seconds["plain"] + times["plain"]}
    for who in runs:
        over = ratio(seconds, who, "plain")
        figures[who]["ratio"] = {key: value * figures[who]["scaled by"] for key, value in over.items()}
        figures[who]["milliseconds"] = {"fastest": 1e3 * min(seconds[who]), "plain": 1e3 * min(seconds["plain"])}
    return figures


def cell(figure: dict | None) -> str:
    """The ratio as people read it; ~ and @8: scaled up from a batch of 8."""
    if figure is None or "error" in figure:
        return "" if figure is None else figure["error"]
    value = figure["ratio"]["fastest"]
    text = f"{value:.2f}" if value < 10 else f"{value:.3g}" if value < 1e3 else f"{value:.0f}"
    return f"~{text} @{figure['batch']}" if figure["scaled by"] > 1 else text


def rise(figure: dict | None) -> str:
    """Megabytes as people read them."""
    if figure is None or "error" in figure:
        return ""
    return f"+{figure['megabytes']:.0f}" + (f" @{figure['batch']}" if figure["scaled by"] > 1 else "")


def both(figure: dict) -> str:
    return cell(figure) + (f" ({rise(figure)} MB)" if rise(figure) else "")


def versions() -> dict[str, str]:
    found = {}
    for package in ("laplace-torch", "curvlinops-for-pytorch", "backpack-for-pytorch", "asdfghjkl"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="networks")
    parser.add_argument("--cases", nargs="+", default=[""], help="parts of the names of cases")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="backends of laplace-torch")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--batches", type=int, help="in an epoch; default: 64, of LeNet 32, of ResNet-20 3")
    parser.add_argument("--seconds", type=float, default=30.0, help="limit of a single run")
    parser.add_argument("--gigabytes", type=float, default=6.0, help="limit of the memory of a single run")
    parser.add_argument("--quick", action="store_true", help="only see that all runs: small batches, nothing is written")
    args, began = parser.parse_args(), time.time()
    # for the server's children: without these the allocator keeps what is freed, and a rise of memory would not be seen
    os.environ.update(MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536", PYTHONWARNINGS="ignore")
    if args.quick:
        args.repeats, args.batch, args.batches, args.seconds, args.gigabytes = 2, 8, 2, 10.0, 2.0
    warnings.simplefilter("ignore")  # of the peer, and of ours, that these networks are not trained
    figures: dict[str, dict] = {}
    headline: dict[str, list[Any]] = {}
    everyone, columns = [*OURS, *args.peers], ["", *OURS, *args.peers, "target"]
    settings = {
        "repeats": args.repeats,
        "batch": args.batch,
        "batches": args.batches or {name: NETWORKS[name][2] for name in args.only},
        "limits": {"seconds": args.seconds, "gigabytes": args.gigabytes},
        "data": "random",
        "peers": versions(),
    }
    for name in args.only:
        times, memory = [], []
        for case in (case for case in CASES if any(part in case.name for part in args.cases)):
            result = figures.setdefault(name, {})[case.name] = compare(name, case, args)
            bound, room = case.targets[list(NETWORKS).index(name)], MEMORY.get((name, case.name))
            times.append([case.name, *(cell(result.get(who)) for who in everyone), f"<= {bound:g}"])
            memory.append([case.name, *(rise(result.get(who)) for who in everyone), f"<= {room}" if room else ""])
            what = f"{name}, {case.name}: " + ("fit over an epoch" if case.kind == "fit" else "over a forward pass")
            ours = "; ".join(f"{who} {both(result[who])}" for who in OURS if who in result)
            headline[what] = [ours, f"<= {bound:g}" + (f" (+{room} MB)" if room else "")]
            headline[f"{what}, laplace-torch"] = ["; ".join(f"{who} {both(result[who])}" for who in args.peers), ""]
        show(f"{name}, batch {args.batch}: fits over an epoch, predictions over a forward pass", columns, times)
        show(f"{name}: rise of memory in MB", columns, memory)
        if not args.quick:  # after every network, so that nothing is lost when it is stopped
            write("laplace_cost", settings=settings, figures=figures, headline=headline, seconds=time.time() - began)
    for name, cases in figures.items():
        for case, result in cases.items():
            for who, figure in result.items():
                if figure.get("error") not in (None, "not installed"):
                    print(f"{name}, {case}, {who}: {figure['error']}: {figure.get('message', '')}")


if __name__ == "__main__":
    main()
