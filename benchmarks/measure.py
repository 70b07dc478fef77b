"""Shared by all benchmarks: interleaved timing, and result files with the commit, the machine and the versions that made them."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import page
import torch

import dubito

RESULTS = Path(os.environ.get("BENCH_RESULTS") or Path(__file__).parent / "results")
MADE_BY = ("date", "command", "commit", "machine", "versions")  # what a result file says of the run that made it
# On a machine that is busy with other things: BENCH_CLOCK=cpu OMP_NUM_THREADS=1 counts this process's own time only.
CLOCK = time.process_time if os.environ.get("BENCH_CLOCK") == "cpu" else time.perf_counter


def interleaved(cases: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each case in each round, A B C A B C ...: what else the machine does then falls on all alike."""
    for case in cases.values():  # warm-up
        case()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, case in cases.items():
            start = CLOCK()
            case()
            seconds[name].append(CLOCK() - start)
    return seconds


def ratio(seconds: Mapping[str, list[float]], name: str, reference: str) -> dict[str, float]:
    """How many times as long, of the fastest rounds (other work on the machine only adds time) and of the median rounds."""
    a, b = seconds[name], seconds[reference]
    return {"fastest": min(a) / min(b), "median": statistics.median(a) / statistics.median(b)}


def per_step(seconds: Mapping[str, list[float]], steps: int) -> dict[str, dict[str, float]]:
    """Microseconds a step of each case, of its fastest round and of the median one."""
    return {name: {"fastest": 1e6 * min(s) / steps, "median": 1e6 * statistics.median(s) / steps} for name, s in seconds.items()}


def resident(what: str) -> float:
    """VmRSS or its peak, VmHWM, of this process in megabytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(what))


def growth(run: Callable[[], object]) -> float:
    """How far the resident memory of this process rises while `run` runs, in megabytes: best in a process of its own."""
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that the allocator still holds would hide as much of the rise
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean and standard error."""
    return statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")


def machine() -> dict[str, Any]:
    model = platform.processor()
    if (info := Path("/proc/cpuinfo")).exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].split(":")[1].strip() if lines else model
    threads = torch.get_num_threads()
    return {"cpu": model, "cores": os.cpu_count(), "threads": threads, "system": platform.system(), "clock": CLOCK.__name__}


def commit() -> str:
    """The commit of the code that runs, with `-dirty` where tracked files were changed, or "unknown" outside a git repository.

    The environment variable BENCH_COMMIT overrides it: set it where the benchmark runs in a copy of the tree without its history."""
    if given := os.environ.get("BENCH_COMMIT"):
        return given
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git on this machine
        return "unknown"
    return done.stdout.strip() or "unknown"


def show(title: str, columns: list[str], rows: list[list[object]]) -> None:
    """Print a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console().print(table)


def result(value: Any) -> None:
    """Print what `apart` in another process reads."""
    print("RESULT " + json.dumps(value), flush=True)


def apart(
    *which: str, settings: Mapping[str, Any], until: float | None = None, grace: float = 0.0, threads: str | None = None
) -> Any:
    """The last `result` of this script in a process of its own, with arguments `which` and `--name value` of the settings that are not
    None. What is not done `grace` seconds after the time `until` is stopped; if it had no result yet, None, and what went wrong is
    printed."""
    command, label = [sys.executable, "-u", sys.argv[0], *which], " ".join(one for one in which if not one.startswith("--"))
    for key, value in settings.items():
        if value is not None and value is not False:
            values = value if isinstance(value, list | tuple) else [] if value is True else [value]
            command += [f"--{key.replace('_', '-')}", *map(str, values)]
    left = None if until is None else max(1.0, until - time.time() + grace)
    environment = {**os.environ, "OMP_NUM_THREADS": threads or os.environ.get("OMP_NUM_THREADS", "1")}
    try:
        done = subprocess.run(command, capture_output=True, timeout=left, env=environment, check=False)
        said, problem = done.stdout, done.stderr.decode()[-1500:]
    except subprocess.TimeoutExpired as late:
        said, problem = late.stdout or b"", "not done in time"
    lines = [line[7:] for line in said.decode().splitlines() if line.startswith("RESULT ")]
    if not lines:
        print(f"{label}: {problem}", flush=True)
    return json.loads(lines[-1]) if lines else None


def earlier(name: str, besides: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of cases that are not in `besides`, what an earlier call has written: their figures, and how each was made."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return {}, {}
    found, skipped = json.loads(path.read_text()), set(besides)
    figures = {case: figure for case, figure in found["figures"].items() if case not in skipped}
    known, now = found["settings"].get("earlier", {}), {key: found[key] for key in MADE_BY}
    return figures, {case: known.get(case, now) for case in figures}


def write(name: str, *, settings: Mapping[str, Any], figures: Any, headline: Mapping[str, list[Any]], seconds: float) -> None:
    """Write `results/<name>.json`, then docs/benchmarks.md and the figures in README.md from all result files.

    `headline` is what docs/benchmarks.md lists of the file: {what: [figure, target]}."""
    result = {
        "benchmark": name,
        "date": date.today().isoformat(),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commit": commit(),
        "versions": {"dubito": dubito.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": machine(),
        "seconds": round(seconds, 1),
        "settings": settings,
        "headline": headline,
        "figures": figures,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1, default=float) + "\n")
    if "BENCH_RESULTS" not in os.environ:
        page.write()
    print(f"wrote {path.name}")
