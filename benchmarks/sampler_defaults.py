"""The default settings of each method against a long run of HMC, on small posteriors of different kinds.

For every problem the reference is `HMC` with 1,000 draws in each of eight chains, which the defaults of NUTS check independently;
where its R-hat of f is above 1.05 the problem is left out of the headline. For each method at its defaults: the mean epistemic standard
deviation of f over the test inputs as a ratio to that of the reference, and the mean distance of the two means of f in reference
standard deviations. `--sets tune` are the problems on which defaults may be chosen, `--sets report` the others.
"""

from __future__ import annotations

import argparse
import math
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import torch
from measure import show, write
from torch import Tensor, nn

import dubito
from dubito.diagnostics import rhat

Data = tuple[Tensor, Tensor, Tensor]


def _net(inputs: int, width: int, outputs: int, activation: type[nn.Module], depth: int = 1) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(inputs, width), activation()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), activation()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def _table(name: str, rows: int) -> Data:
    """The first rows of a table of scikit-learn in random order, standardized, and 200 others as test inputs."""
    from sklearn import datasets

    x, y = map(torch.as_tensor, getattr(datasets, f"load_{name}")(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x = ((x - x.mean(0)) / x.std(0)).float()[order]
    y = y[order]
    y = y.long() if name != "diabetes" else ((y - y.double().mean()) / y.double().std()).float().unsqueeze(1)
    return x[:rows], y[:rows], x[rows : rows + 200]


def _curve(rows: int, noise: float, seed: int) -> Data:
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, 1, generator=g) * 4 - 2
    x = x[(x.abs() > 0.4).squeeze(1)]
    return x, torch.sin(2 * x) + noise * torch.randn(x.shape, generator=g), torch.linspace(-2.5, 2.5, 100).unsqueeze(1)


def _surface(rows: int, inputs: int, seed: int, kind: str) -> Data:
    g = torch.Generator().manual_seed(seed)
    x, new = torch.randn(rows, inputs, generator=g), torch.randn(200, inputs, generator=g)
    f = x[:, 0] * x[:, 1] + x[:, 2:].sum(1) / math.sqrt(inputs)
    if kind == "numbers":
        return x, ((f - f.mean()) / f.std()).unsqueeze(1) + 0.3 * torch.randn(rows, 1, generator=g), new
    return x, (f + 0.5 * torch.randn(rows, generator=g) > 0).long(), new


PROBLEMS: dict[str, dict[str, tuple[Any, Any, Any]]] = {  # set: name: data, network, likelihood
    "tune": {
        "line": (lambda: _surface(80, 5, 1, "numbers"), lambda: nn.Linear(5, 1), lambda: dubito.Gaussian(scale=0.5)),
        "curve, 20 tanh": (lambda: _curve(60, 0.1, 2), lambda: _net(1, 20, 1, nn.Tanh), lambda: dubito.Gaussian(scale=0.1)),
        "surface, 20 SiLU, learned noise": (lambda: _surface(200, 4, 3, "numbers"), lambda: _net(4, 20, 1, nn.SiLU), dubito.Gaussian),
        "two classes, 10 tanh": (lambda: _surface(150, 3, 4, "classes"), lambda: _net(3, 10, 2, nn.Tanh), dubito.Categorical),
        "wine, logistic": (lambda: _table("wine", 100), lambda: nn.Linear(13, 3), dubito.Categorical),
    },
    "report": {
        "line, learned noise": (lambda: _surface(60, 3, 11, "numbers"), lambda: nn.Linear(3, 1), dubito.Gaussian),
        "diabetes, linear": (lambda: _table("diabetes", 240), lambda: nn.Linear(10, 1), dubito.Gaussian),
        "diabetes, 10 tanh": (lambda: _table("diabetes", 240), lambda: _net(10, 10, 1, nn.Tanh), dubito.Gaussian),
        "curve, 30 ReLU": (lambda: _curve(40, 0.2, 12), lambda: _net(1, 30, 1, nn.ReLU), lambda: dubito.Gaussian(scale=0.2)),
        "curve, 2 x 10 tanh": (lambda: _curve(80, 0.2, 13), lambda: _net(1, 10, 1, nn.Tanh, 2), lambda: dubito.Gaussian(scale=0.2)),
        "surface, 20 tanh": (lambda: _surface(120, 6, 4, "numbers"), lambda: _net(6, 20, 1, nn.Tanh), lambda: dubito.Gaussian(0.3)),
        "surface, 16 ReLU, learned noise": (lambda: _surface(300, 4, 15, "numbers"), lambda: _net(4, 16, 1, nn.ReLU), dubito.Gaussian),
        "iris, logistic": (lambda: _table("iris", 100), lambda: nn.Linear(4, 3), dubito.Categorical),
        "iris, 8 tanh": (lambda: _table("iris", 100), lambda: _net(4, 8, 3, nn.Tanh), dubito.Categorical),
        "cancer, 5 tanh": (lambda: _table("breast_cancer", 200), lambda: _net(30, 5, 2, nn.Tanh), dubito.Categorical),
        "two classes, 16 SiLU": (lambda: _surface(250, 5, 16, "classes"), lambda: _net(5, 16, 2, nn.SiLU), dubito.Categorical),
    },
}  # fmt: skip
METHODS: dict[str, Any] = {
    "HMC": dubito.HMC, "SGHMC": dubito.SGHMC, "SGLD": dubito.SGLD, "Variational": dubito.Variational, "IVON": dubito.IVON,
    "SWAG": dubito.SWAG, "Laplace": dubito.Laplace, "MCLMC": dubito.MCLMC, "NUTS": dubito.NUTS,
}  # fmt: skip


def centered(f: Tensor) -> Tensor:
    """Logits up to the constant that classes do not tell."""
    return f - f.mean(-1, keepdim=True) if f.shape[-1] > 1 else f


def evaluate(group: str, problem: str, method: str, scale: float) -> dict[str, Any]:
    """A reference, or a method at its defaults: mean and deviation of f, and seconds."""
    torch.set_num_threads(1)
    make, network, likelihood = PROBLEMS[group][problem]
    x, y, new = make()
    torch.manual_seed(0)
    model, began = dubito.Model(network(), likelihood()), time.process_time()
    if method == "reference":
        sampler = dubito.HMC(chains=8, draws=int(1000 * scale), burn_in=int(500 * scale), units="posterior")
        found = dubito.fit(model, sampler, (x, y), seed=1, progress=False)
    else:
        start = dubito.fit(model, dubito.MAP(), (x, y), progress=False) if method in ("SWAG", "Laplace") else None
        kind = METHODS[method]
        found = dubito.fit(model, kind(), (x, y), start=start, progress=False)
    if method == "Laplace":  # predictions are linearized
        f = found.sample_functions(new, 400)
    else:
        f = (
            found.predict(new, "sampled", draws=400).means
            if method in ("Variational", "IVON", "SWAG")
            else found.predict(new).means
        )
    f = centered(f.double())  # [S, B, C]
    out: dict[str, Any] = {"mean": f.mean(0).tolist(), "sd": f.std(0).tolist(), "seconds": time.process_time() - began}
    if method == "reference":
        chains = f.reshape(8, -1, f[0].numel())  # draws come chain after chain
        out["rhat"] = max(float(rhat(chains[..., k])) for k in range(0, chains.shape[-1], 7))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--scale", type=float, default=1.0, help="length of the reference")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=None, help="stop after so long, and report what is done")
    options, began = parser.parse_args(), time.time()
    pool = ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"))
    cases = [(g, p, m, options.scale) for m in ("reference", *options.methods) for g in options.sets for p in PROBLEMS[g]]
    jobs, results = {pool.submit(evaluate, *case): case[:3] for case in cases}, {}
    try:
        for job in as_completed(jobs, timeout=options.seconds):
            try:
                results[jobs[job]] = job.result()
            except Exception as problem:  # one case that fails does not end the others
                print(jobs[job], type(problem).__name__, str(problem)[:300], flush=True)
    except TimeoutError:
        print(f"{len(results)} of {len(jobs)} cases are done in time")
    for process in list((pool._processes or {}).values()):
        process.kill()
    report(results, options, began)


def report(results: dict[tuple[str, str, str], dict[str, Any]], options: argparse.Namespace, began: float) -> None:
    """Ratios of epistemic standard deviations and distances of means."""
    figures: dict[str, Any] = {}
    for group in options.sets:
        for problem in PROBLEMS[group]:
            reference = results.get((group, problem, "reference"))
            if reference is None:
                continue
            figures[f"{group}: {problem}, reference"] = {"rhat": reference["rhat"], "seconds": reference["seconds"]}
            mean, sd = torch.tensor(reference["mean"]), torch.tensor(reference["sd"])
            for method in options.methods:
                if (found := results.get((group, problem, method))) is not None:
                    shift = (torch.tensor(found["mean"]) - mean).abs() / sd
                    ratio = float(torch.tensor(found["sd"]).mean() / sd.mean())
                    figures[f"{group}: {problem}, {method}"] = {
                        "ratio": ratio,
                        "shift": float(shift.mean()),
                        "seconds": found["seconds"],
                    }
    sound = {case for case, figure in figures.items() if case.endswith("reference") and figure["rhat"] < 1.05}
    headline: dict[str, list[Any]] = {}
    for method in options.methods:
        cases = [case.removesuffix("reference") + method for case in sound if case.startswith("report")]
        done = [figures[case]["ratio"] for case in cases if case in figures]
        if done:
            headline[f"{method}: posteriors on which the epistemic deviation is .8 to 1.25 times that of HMC"] = [
                f"{sum(0.8 <= ratio <= 1.25 for ratio in done)} of {len(done)}", f"all of {len(cases)}"
            ]  # fmt: skip
    write("sampler_defaults", settings=vars(options), figures=figures, headline=headline, seconds=time.time() - began)
    rows = [[c, f.get("ratio", f.get("rhat")), f.get("shift", ""), f["seconds"]] for c, f in figures.items()]
    show("Defaults beside a long run of HMC", ["case", "ratio of sd", "shift / sd", "seconds"], rows)


if __name__ == "__main__":
    main()
