"""Q-learning with a dropout network: Thompson sampling against epsilon-greedy, reward curves over seeds.

- `maze`: four rooms with narrow doors, `dubito.apps.exploration.Maze`; every step costs .02 and the goal pays 1.
- `cartpole`: CartPole-v1 of gymnasium (`pip install dubito[rl]`); left out where gymnasium is not installed.
- `minigrid`: MiniGrid-FourRooms-v0 with its view of seven by seven, where minigrid is installed, if asked for.

All arms have the same network (two hidden layers of 64), replay, optimiser and discount, and a first tenth of the steps at random,
as the published comparison has a burn-in. `thompson` draws a mask of dropout (.1, in CartPole .02) for every step,
`thompson_episode` one for an episode. `epsilon` has no dropout, and epsilon falls from 1 to .05 in a quarter of the steps
(`epsilon_fast`: in a tenth). A curve is the mean return of the episodes that ended in each tenth of the steps. Settings were chosen on
seeds from 100 on, and the figures are of seeds from 0 on.

Every arm and seed is a process, `--jobs` at a time, and the result is written after each; `--folder` keeps agents and goes on with
them. For networks so small a GPU is slower than a core.

    python benchmarks/q_learning.py --seeds 8 --jobs 16 --seconds 420
    python benchmarks/q_learning.py --device cuda --seeds 4 --jobs 16 --seconds 420
    OMP_NUM_THREADS=1 python benchmarks/q_learning.py --environments maze --seeds 2 --steps 3000
    python benchmarks/q_learning.py --picture docs/images/q_learning.png                # draws what results/q_learning.json holds
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, apart, mean_and_error, result, show, write
from torch import nn

import dubito
from dubito.apps.exploration import EpsilonGreedy, Maze, QLearning, Thompson
from dubito.priors import Normal

ARMS = ("thompson", "thompson_episode", "epsilon", "epsilon_fast")
WINDOWS = 10
NEEDS = {"maze": None, "cartpole": "gymnasium", "minigrid": "minigrid"}
STEPS = {"maze": 8000, "cartpole": 8000, "minigrid": 20_000}
HANDED = ("device", "steps", "rate", "initial", "folder")


def environment(name: str) -> tuple[Any, int, int, dict[str, Any]]:
    """The environment, what is seen and can be done in numbers, and settings."""
    if name == "maze":
        maze = Maze(cost=-0.02)
        return maze, len(maze), 4, dict(rate=0.1, discount=0.97, learning_rate=3e-3, noise=0.1, sync=40)
    import gymnasium

    if name == "cartpole":
        return gymnasium.make("CartPole-v1"), 4, 2, dict(rate=0.02, discount=0.99, learning_rate=1e-3, noise=1.0, sync=100)
    import minigrid  # noqa: F401  (registers its environments)

    def look(seen: Any) -> torch.Tensor:
        view = torch.as_tensor(seen["image"], dtype=torch.float32).flatten() / 10
        return torch.cat([view, nn.functional.one_hot(torch.tensor(int(seen["direction"])), 4).float()])

    settings = dict(rate=0.1, discount=0.98, learning_rate=1e-3, noise=0.1, sync=100, observe=look)
    return gymnasium.make("MiniGrid-FourRooms-v0"), 7 * 7 * 3 + 4, 3, settings


def run(name: str, arm: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    env, inputs, actions, settings = environment(name)
    steps = args.steps or STEPS[name]
    torch.manual_seed(seed)
    own = settings.pop("rate")
    rate = (own if args.rate is None else args.rate) if arm.startswith("thompson") else 0.0
    net = nn.Sequential(
        nn.Linear(inputs, 64), nn.ReLU(), nn.Dropout(rate), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(rate), nn.Linear(64, actions)
    )
    model = dubito.Model(net.to(args.device), dubito.Gaussian(scale=settings.pop("noise")), Normal(scale=1.0))
    explore = {
        "thompson": Thompson(hold=1),
        "thompson_episode": Thompson(),
        "epsilon": EpsilonGreedy(1.0, 0.05, steps=steps // 4),
        "epsilon_fast": EpsilonGreedy(1.0, 0.05, steps=steps // 10),
    }[arm]
    kind = dubito.MCDropout if arm.startswith("thompson") else dubito.MAP
    agent = QLearning(
        model,
        kind(learning_rate=settings.pop("learning_rate")),
        actions,
        explore=explore,
        initial=int(steps * args.initial),
        seed=seed,
        **settings,
    )
    file = None if args.folder is None else Path(args.folder) / f"{name}-{arm}-{seed}.safetensors"
    began = time.time()
    history = agent.learn(env, steps, file=file, until=args.until, progress=False)
    return {
        "seed": seed,
        "steps": agent.total,
        "done": agent.total >= steps,
        "episodes": len(history.returns),
        "curve": history.curve(max(1, steps // WINDOWS), steps)[: max(1, WINDOWS * agent.total // steps)],
        "evaluation": statistics.mean(agent.evaluate(env, 10)) if agent.learned else None,
        "seconds": time.time() - began,
    }


def alone(name: str, arm: str, seed: int, args: argparse.Namespace) -> dict[str, Any] | None:
    """`run` in a process of its own; out of time, it hands in what it has."""
    if args.until is not None and time.time() > args.until - 5:
        return None
    settings = {key: getattr(args, key) for key in (*HANDED, "until")}
    found = apart("--run", name, arm, str(seed), settings=settings, until=args.until, grace=60)
    if found is not None:
        print(f"{name} {arm} {seed}: {found['steps']} steps, {[round(v, 2) for v in found['curve']]}, "
              f"{found['seconds']:.0f} s", flush=True)  # fmt: skip
    return found


def report(runs: dict[str, dict[str, list]], args: argparse.Namespace, began: float, *, last: bool) -> None:
    headline: dict[str, list[Any]] = {}
    rows: list[list[object]] = []
    for name, arms in runs.items():
        for arm, found in arms.items():
            whole = [one for one in found if one["done"]]
            if whole:
                # of each seed: the mean over the whole course, and the last tenth
                cells = [
                    f"{mean:.2f} ± {error:.2f}"
                    for mean, error in (
                        mean_and_error([statistics.mean(one["curve"]) for one in whole]),
                        mean_and_error([one["curve"][-1] for one in whole]),
                    )
                ]
                rows.append([name, arm, len(whole), *cells])
                headline[f"{name}, {arm}: mean return over all tenths of the steps / in the last ({len(whole)} seeds)"] = [
                    " / ".join(cells),
                    "Thompson ahead" if arm == "thompson" else "",
                ]
    if last:
        try:
            show("Q-learning", ["environment", "arm", "seeds", "all steps", "last tenth"], rows)
        except ImportError:  # rich is not everywhere
            for row in rows:
                print(" | ".join(map(str, row)))
    settings = {key: value for key, value in vars(args).items() if key not in ("until", "run", "picture", "folder")}
    if args.device != "cpu":
        settings["gpu"] = torch.cuda.get_device_name()
    write("q_learning", settings=settings, figures={"runs": runs}, headline=headline, seconds=time.time() - began)


def draw(path: str) -> None:
    """Return over steps, one panel an environment: mean over seeds, and its standard error."""
    from dubito.report.canvas import grid, render

    content = json.loads((RESULTS / "q_learning.json").read_text())
    runs = {name: arms for name, arms in content["figures"]["runs"].items() if any(arms.values())}

    def panels(figure: Any) -> None:
        from matplotlib import colormaps

        for axes, (name, arms) in zip(figure.subplots(1, len(runs), squeeze=False)[0], runs.items(), strict=True):
            for i, (arm, found) in enumerate(arms.items()):
                curves = [one["curve"] for one in found if one["done"]]
                if not curves:
                    continue
                steps = content["settings"]["steps"] or STEPS[name]
                at = [(k + 1) * steps / WINDOWS for k in range(WINDOWS)]
                pairs = [mean_and_error([curve[k] for curve in curves]) for k in range(WINDOWS)]
                mean, error = [p[0] for p in pairs], [0.0 if p[1] != p[1] else p[1] for p in pairs]
                low, high = ([m + s * e for m, e in zip(mean, error, strict=True)] for s in (-1, 1))
                colour = colormaps["tab10"](i)
                axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
                axes.plot(at, mean, color=colour, label=arm.replace("_", " "))
            axes.set(title=name, xlabel="steps")
            axes.legend(fontsize=7)
            grid(axes, "y")
        figure.axes[0].set_ylabel("return")

    Path(path).write_bytes(render(panels, (3.8 * len(runs), 3.2), kind="png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", default="maze,cartpole", help=f"of {', '.join(NEEDS)}")
    parser.add_argument("--arms", default=",".join(ARMS), help="by commas")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--seconds", type=float, help="runs that are not done by then hand in what they have")
    parser.add_argument("--steps", type=int, help="of the environment; its own number if not given")
    parser.add_argument("--rate", type=float, help="of dropout; by default that of the environment")
    parser.add_argument("--initial", type=float, default=0.1, help="share of the steps that are random at first, for all arms")
    parser.add_argument("--folder", help="where agents are kept")
    parser.add_argument("--picture", help="where to draw the curves")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args, began = parser.parse_args(), time.time()
    if args.run is not None:
        result(run(args.run[0], args.run[1], int(args.run[2]), args))
        return
    if args.picture is not None:
        draw(args.picture)
        return
    args.until = None if args.seconds is None else began + args.seconds
    wanted = [name for name in args.environments.split(",") if NEEDS[name] is None or importlib.util.find_spec(NEEDS[name])]
    if left := set(args.environments.split(",")) - set(wanted):
        print(f"left out, since what they need is not installed: {', '.join(sorted(left))}", flush=True)
    runs: dict[str, dict[str, list]] = {name: {arm: [] for arm in args.arms.split(",")} for name in wanted}
    with ThreadPoolExecutor(args.jobs) as threads:
        waiting = {
            threads.submit(alone, name, arm, seed, args): (name, arm)
            for seed in range(args.first, args.first + args.seeds)
            for name in wanted
            for arm in runs[name]
        }
        for one in as_completed(waiting):
            if (found := one.result()) is not None:
                name, arm = waiting[one]
                runs[name][arm].append(found)
                report(runs, args, began, last=False)
    report(runs, args, began, last=True)


if __name__ == "__main__":
    main()
