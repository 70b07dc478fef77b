"""Contextual bandits: regret relative to uniform choice (= 100) of Thompson sampling by every kind of posterior, beside the published.

As published (Riquelme, Tucker & Snoek 2018): one hidden layer of 50, two pulls of each arm to begin with, training every 50 rounds
for 100 mini-batches of 512, neural linear with a0 = b0 = 6 and a prior precision of 1/4, dropout of .2. Other than there: Adam at .01,
and networks see standardised rewards, with a noise of .3 and a prior of scale .3. No setting was tuned to any of the problems.

Problems are generated as published (wheel, linear), made of data that come with scikit-learn (digits; tumours: the mushroom game with
tumours), or of MNIST in DUBITO_DATA. The mushroom, shuttle, financial and jester data are not at hand: "mushroom_like" has the rewards
of the first and its shape, and not its mushrooms. `cost` is the time of a step of the exact regressions over the number of features.

Every agent on every problem with every seed is a process, `--jobs` at a time, and the result is written after each. `--folder` keeps
what is done, and goes on with what was broken off. For networks so small a GPU is slower than a core.

    python benchmarks/bandits.py --runs 10 --jobs 15 --seconds 420
    python benchmarks/bandits.py --device cuda --runs 3 --jobs 12 --seconds 420
    OMP_NUM_THREADS=1 python benchmarks/bandits.py --problems tumours,wheel --runs 3 --rounds 1000 --agents linear,dropout,uniform
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from measure import apart, interleaved, mean_and_error, result, show, write
from torch import nn

import dubito
from dubito.apps.bandits import (
    PROBLEMS,
    Bandit,
    Linear,
    NeuralLinear,
    Regressions,
    Thompson,
    UnfinishedRun,
    Uniform,
    epochs,
    simulate,
)
from dubito.priors import Normal

PUBLISHED = {  # BatchEnsemble (Wen, Tran & Ba 2020), 30 runs; which delta the wheel had is not said
    ("wheel", "greedy"): "84.02",
    ("wheel", "dropout"): "73.86",
    ("wheel", "ensemble"): "68.63",
    ("wheel", "linear"): "42.94",
    ("mushroom_like", "greedy"): "16.31 (real mushrooms)",
    ("mushroom_like", "dropout"): "15.05 (real mushrooms)",
    ("mushroom_like", "ensemble"): "13.44 (real mushrooms)",
    ("mushroom_like", "linear"): "97.42 (real mushrooms)",
}
HANDED = ("device", "rounds", "steps", "learning_rate", "noise", "scale", "every", "folder")


def model(bandit: Bandit, args: argparse.Namespace, rate: float = 0.0) -> dubito.Model:
    layers = [nn.Linear(bandit.contexts.shape[1], 50), nn.ReLU(), nn.Dropout(rate), nn.Linear(50, bandit.arms)]
    return dubito.Model(nn.Sequential(*layers).to(args.device), dubito.Gaussian(scale=args.noise), Normal(scale=args.scale))


def agents(args: argparse.Namespace) -> dict[str, Callable[[Bandit, int], Any]]:
    def training(n: int) -> dict[str, Any]:
        return dict(epochs=epochs(args.steps, n), learning_rate=args.learning_rate)

    def thompson(method: Any, rate: float = 0.0, **more: Any) -> Callable[[Bandit, int], Thompson]:
        return lambda bandit, seed: Thompson(model(bandit, args, rate), method, bandit.arms, every=args.every, seed=seed, **more)

    return {
        "uniform": lambda bandit, seed: Uniform(bandit.arms, seed=seed),
        "linear": lambda bandit, seed: Linear(bandit.arms, bandit.contexts.shape[1], seed=seed),
        "neural_linear": lambda bandit, seed: NeuralLinear(
            model(bandit, args), lambda n: dubito.MAP(**training(n)), bandit.arms, every=args.every, seed=seed
        ),
        "greedy": thompson(lambda n: dubito.MAP(**training(n))),
        "dropout": thompson(lambda n: dubito.MCDropout(**training(n)), rate=0.2),
        "ensemble": thompson(lambda n: dubito.Ensemble(dubito.MAP(**training(n)), 4)),
        "ensemble_further": thompson(lambda n: dubito.MAP(**training(n)), members=4),
        "variational": thompson(lambda n: dubito.Variational(**training(n), init_scale=0.05)),
        "laplace": thompson(lambda n: [dubito.MAP(**training(n)), dubito.Laplace(check=False)]),
    }


def run(problem: str, agent: str, seed: int, args: argparse.Namespace) -> dict[str, Any] | None:
    bandit = PROBLEMS[problem](args.rounds, seed)
    torch.manual_seed(seed)
    file = None if args.folder is None else Path(args.folder) / f"{problem}-{agent}-{seed}.safetensors"
    try:
        done = simulate(bandit, agents(args)[agent](bandit, seed), file=file, until=args.until, progress=False)
    except UnfinishedRun:
        return None
    curve = (100 * done.regret.cumsum(0) / done.uniform)[:: max(1, len(bandit) // 50)]
    return {
        "seed": seed,
        "rounds": len(bandit),
        "relative": done.relative,
        "last quarter": 400 * float(done.regret[-len(bandit) // 4 :].sum()) / done.uniform,
        "curve": [round(value, 3) for value in curve.tolist()],
        "seconds": done.seconds,
    }


def cost() -> dict[str, dict[str, float]]:
    """Microseconds of a step, a draw and an observation, of the fastest of some rounds, over the number of features."""
    found = {}
    for width in (25, 50, 100, 200, 400, 800):
        arms, source = Regressions.prior(5, width), torch.Generator().manual_seed(0)
        phi = torch.randn(50, width, dtype=torch.float64, generator=source)

        def update(arms: Regressions = arms, phi: torch.Tensor = phi) -> None:
            for i in range(50):
                arms.update(i % 5, phi[i], 1.0)

        def draw(arms: Regressions = arms, source: torch.Generator = source, phi: torch.Tensor = phi) -> None:
            for i in range(50):
                (arms.sample(source) @ phi[i]).argmax()

        def anew(width: int = width, phi: torch.Tensor = phi) -> None:
            Regressions.prior(1, width).observe(phi, torch.zeros(50, dtype=torch.long), phi[:, 0])

        seconds = interleaved({"update": update, "draw": draw, "anew": anew}, 5)
        found[str(width)] = {
            "update": 1e6 * min(seconds["update"]) / 50,
            "draw": 1e6 * min(seconds["draw"]) / 50,
            "posterior made anew": 1e6 * min(seconds["anew"]),
        }
        print(f"cost, {width} features: {found[str(width)]}", flush=True)
    return found


def alone(problem: str, agent: str, seed: int, args: argparse.Namespace) -> dict[str, Any] | None:
    """`run` in a process of its own."""
    if args.until is not None and time.time() > args.until - 5:
        return None
    settings = {key: getattr(args, key) for key in (*HANDED, "until")}
    found = apart("--run", problem, agent, str(seed), settings=settings, until=args.until, grace=60)
    told = "no result" if found is None else f"{found['relative']:.2f} ({found['seconds']:.0f} s)"
    print(f"{problem} {agent} {seed}: {told}", flush=True)
    return found


def report(runs: dict[str, dict[str, list]], costs: Any, args: argparse.Namespace, began: float, *, last: bool) -> None:
    headline: dict[str, list[Any]] = {}
    rows: list[list[object]] = []
    for problem, by_agent in runs.items():
        for agent, found in by_agent.items():
            if found:
                mean, error = mean_and_error([one["relative"] for one in found])
                late = statistics.mean([one["last quarter"] for one in found])
                figure = f"{mean:.1f} ± {error:.1f}" if len(found) > 1 else f"{mean:.1f}"
                beside = PUBLISHED.get((problem, agent), "")
                rows.append([problem, agent, len(found), figure, late, beside])
                headline[f"{problem}, {agent}: regret, uniform choice = 100 ({len(found)} runs)"] = [
                    figure,
                    f"published {beside}" if beside else "",
                ]
    if costs:
        growth = costs["800"]["update"] / costs["200"]["update"]
        headline["an observation of 800 features over one of 200 (d^2: 16)"] = [growth, ""]
    if last:
        columns = ["problem", "agent", "runs", "regret", "last quarter", "published"]
        try:
            show("Regret relative to uniform choice", columns, rows)
        except ImportError:  # rich is not everywhere
            for row in rows:
                print(" | ".join(map(str, row)))
    settings = {key: value for key, value in vars(args).items() if key not in ("until", "run", "folder")}
    if args.device != "cpu":
        settings["gpu"] = torch.cuda.get_device_name()
    write("bandits", settings=settings, figures={"runs": runs, "cost": costs}, headline=headline, seconds=time.time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", default="wheel,mushroom_like,tumours,digits,linear", help=f"of {', '.join(PROBLEMS)}")
    parser.add_argument("--agents", help="by commas; all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=3, help="seeds")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--seconds", type=float, help="runs that are not done by then are left out")
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--every", type=int, default=50, help="rounds between two trainings")
    parser.add_argument("--steps", type=int, default=100, help="of a training")
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--noise", type=float, default=0.3, help="of standardised rewards")
    parser.add_argument("--scale", type=float, default=0.3, help="of the prior")
    parser.add_argument("--folder", help="where runs are kept")
    parser.add_argument("--no-cost", action="store_true")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args, began = parser.parse_args(), time.time()
    if args.run is not None:
        result(run(args.run[0], args.run[1], int(args.run[2]), args))
        return
    args.until = None if args.seconds is None else began + args.seconds
    chosen = list(agents(args)) if args.agents is None else args.agents.split(",")
    runs: dict[str, dict[str, list]] = {problem: {agent: [] for agent in chosen} for problem in args.problems.split(",")}
    costs = {} if args.no_cost else cost()
    with ThreadPoolExecutor(args.jobs) as threads:
        waiting = {
            threads.submit(alone, problem, agent, seed, args): (problem, agent)
            for seed in range(args.runs)
            for problem in runs
            for agent in chosen
        }
        for one in as_completed(waiting):
            if (found := one.result()) is not None:
                problem, agent = waiting[one]
                runs[problem][agent].append(found)
                report(runs, costs, args, began, last=False)
    report(runs, costs, args, began, last=True)


if __name__ == "__main__":
    main()
