"""UCI regression by HMC and MCLMC, run until their chains agree, beside the HMC figures of Izmailov et al. (2021).

One hidden layer of 50 ReLU units, inputs and targets standardised on the training part, a normal prior of scale 0.5 on all weights
and a learned noise. Given several `--scales`, one is chosen for every split by the log likelihood of a fifth of its training part, with
short chains: on the first split of boston, concrete and yacht this chose 0.5 of 0.2, 0.3 and 0.5. The test part is seen once, at the
end. Chains start from networks initialised anew and go on, each time by half of what they have, until rank-normalised split R-hat is at
most 1.01 for the predictions at all test inputs, or rounds or seconds are over.

Splits and samplers are processes of their own, `--jobs` at a time: a network of this size fills a small part of a GPU
(`nvidia-cuda-mps-control -d` lets them run there side by side).

The noise has a prior, Gamma(1, 0.01) of its precision: yacht and energy were computed, not measured, networks of this size can fit them
as closely as they like, and under a flat prior there is no posterior, only a noise that falls for ever.

Log likelihoods are in the original units, of the mixture of all draws, and, since the study had it so, of a Gaussian with the mixture's
mean and variance. Gradients are evaluations over all training data, of all chains together, the burn-in included; effective draws
(bulk, median over the test inputs) are given per 1,000 of those after the burn-in. The study's figures were read off a plot, and are of
networks that predict a noise for every input.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from dubito.data.uci import Standardized
from measure import apart, mean_and_error, result, show, write
from networks import mlp
from torch import Tensor
from torch.distributions import Gamma
from uci import inside

import dubito
from dubito.data import standardize, uci
from dubito.diagnostics import ess_bulk, rhat
from dubito.metrics import nll, rmse
from dubito.posteriors import Samples
from dubito.priors import Normal
from dubito.tensors import tree

PUBLISHED = {
    "yacht": (0.67, 0.57),
    "boston": (3.7, -2.39),
    "concrete": (4.48, -2.67),
    "energy": (0.36, -1.1),
}  # RMSE, log likelihood
NOISE = (1.0, 0.01)  # shape and rate of the prior of its precision: a tenth of the targets' spread, give or take much
AGREED, THIN = 1.01, 100  # R-hat; steps of MCLMC in a draw


def model(width: int, scale: float) -> dubito.Model:
    torch.manual_seed(0)
    return dubito.Model(mlp(width, 50, 1), dubito.Gaussian(prior=Gamma(*NOISE)), Normal(scale=scale))


def method(name: str, chains: int, burn_in: int, draws: int, step: float | None = None, path: float = math.pi / 2) -> Any:
    """A sampler; with `step`, one that goes on."""
    same = {"chains": chains, "draws": draws, "burn_in": burn_in, "step_size": step, "tune": step is None}
    return dubito.HMC(path_length=path, max_steps=4000, **same) if name == "HMC" else dubito.MCLMC(thin=THIN, **same)


def fitted(
    sampler: Any, which: dubito.Model, data: tuple[Tensor, Tensor], *, seed: int, start: Any = None, device: str
) -> tuple[Samples, float]:
    """The draws, and the gradients that the burn-in took, of all chains."""
    spent = 0.0

    def count(event: Any) -> None:
        nonlocal spent
        if event.step <= sampler.burn_in:
            spent += float(event.state.notes["gradients"].sum())

    found = dubito.fit(
        which, sampler, data, seed=seed, start=start, device=device, progress=False, callbacks=[count] if sampler.burn_in else []
    )
    assert isinstance(found, Samples)
    return found, spent


def latent(draws: Samples, x: Tensor) -> Tensor:
    """f [chains, n, T] at inputs x, in float64."""
    f = draws.predict(x.to(draws.model.device)).means.squeeze(-1).double()
    return f.view(draws.chains, -1, f.shape[-1])


def joined(parts: list[Samples]) -> Samples:
    """The draws of chains that went on, chain after chain."""
    first, chains = parts[0], parts[0].chains

    def together(leaves: list[Tensor]) -> Tensor:
        return torch.cat([leaf.unflatten(0, (chains, -1)) for leaf in leaves], 1).flatten(0, 1)

    params = {name: together([part.params[name] for part in parts]) for name in first.params}
    trace = {name: together([part.trace[name] for part in parts]) for name in first.trace}
    return Samples(first.model, params, first.buffers, chains=chains, trace=trace, sampler=first.sampler)


def last(draws: Samples) -> Samples:
    """Where each chain has come to."""
    which = torch.arange(1, draws.chains + 1) * (len(draws) // draws.chains) - 1
    return Samples(draws.model, tree.select(draws.params, which), draws.buffers, chains=draws.chains)


def rounds(name: str, which: dubito.Model, s: Standardized, args: argparse.Namespace) -> Iterator[tuple[Samples, dict[str, Any]]]:
    """Chains that go on until they agree: all draws, and figures of them, after every round."""
    began, data = time.perf_counter(), (s.x_train, s.y_train)
    draws = args.draws * (1 if name == "HMC" else 2)
    part, spent = fitted(method(name, args.chains, args.burn_in, draws), which, data, seed=0, device=args.device)
    parts, history, step = [part], [], float(part.trace["step_size"].median())
    while True:
        whole = joined(parts)
        f = latent(whole, s.x_test)
        between = rhat(f)
        used = float(whole.trace["gradients"].sum())
        history.append(
            {
                "draws": len(whole) // whole.chains,
                "gradients": spent + used,
                "R-hat": float(between.max()),
                "share of inputs": float((between <= AGREED).double().mean()),
                "seconds": time.perf_counter() - began,
            }
        )
        bulk = ess_bulk(f)
        yield (
            whole,
            {
                **history[-1],
                "rounds": history,
                "effective": float(bulk.median()),
                "effective, least": float(bulk.min()),
                "effective per 1,000 gradients": float(bulk.median()) / used * 1000,
                "acceptance": float(whole.trace["acceptance"].mean()) if "acceptance" in whole.trace else None,
                "divergent": float(whole.trace["divergent"].sum()),
                "step size": step,
                "gradients a draw": used / len(whole),
            },
        )
        if history[-1]["R-hat"] <= AGREED or len(history) >= args.rounds:
            return
        more = method(name, args.chains, 0, len(whole) // whole.chains // 2, step)
        parts.append(fitted(more, which, data, seed=len(history), start=last(parts[-1]), device=args.device)[0])


def scores(draws: Samples, s: Standardized) -> dict[str, float]:
    """In the original units."""
    p, y, scale = draws.predict(s.x_test.to(draws.model.device)), s.y_test.to(draws.model.device), float(s.y_scale)
    f = p.means.squeeze(-1).double()
    noise = draws.params["likelihood:log_scale"].double().exp()
    variance = f.var(0) + noise.square().mean()
    gaussian = torch.distributions.Normal(f.mean(0), variance.sqrt()).log_prob(y.squeeze(-1).double()).mean()
    return {
        "rmse": float(rmse(p, y)) * scale,
        "log likelihood": -float(nll(p, y)) - math.log(scale),
        "log likelihood, moments": float(gaussian) - math.log(scale),
        "noise": float(noise.mean()) * scale,
    }


def choose(inner: Standardized, args: argparse.Namespace) -> tuple[float, dict[float, float]]:
    """The prior's scale that predicts a fifth of the training part best, after short chains on the rest."""
    found = {}
    for scale in args.scales:
        sampler = method("HMC", min(args.chains, 16), args.short, args.short, path=0.3)
        draws, _ = fitted(
            sampler, model(inner.x_train.shape[1], scale), (inner.x_train, inner.y_train), seed=0, device=args.device
        )
        found[scale] = scores(draws, inner)["log likelihood"]
    return max(found, key=lambda scale: found[scale]), found


def evaluate(name: str, index: int, args: argparse.Namespace) -> None:
    """One split, by the first of the methods; what is known is printed after every round."""
    split = uci(name, index)
    s = standardize(split)
    scale, tried = choose(inside(split), args) if len(args.scales) > 1 else (args.scales[0], {})
    chosen = {"prior scale": scale, "tried": {str(key): value for key, value in tried.items()}}
    for draws, figures in rounds(args.methods[0], model(s.x_train.shape[1], scale), s, args):
        result(figures | scores(draws, s) | chosen)


def alone(name: str, index: int, sampler: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """`evaluate` in a process of its own, as far as it comes."""
    if args.until is not None and time.time() > args.until - 1:
        return None
    settings = {key: getattr(args, key) for key in ("device", "chains", "burn_in", "draws", "rounds", "short", "scales")}
    which = ("--case", str(index), "--sets", name, "--methods", sampler)
    if (found := apart(*which, settings=settings, until=args.until, threads="1")) is not None:
        words = ", ".join(f"{key} {found[key]:.4g}" for key in ("draws", "R-hat", "rmse", "log likelihood", "seconds"))
        print(f"{name} {index} {sampler}: {words}", flush=True)
    return found


def report(found: dict[str, dict[int, dict[str, Any]]], args: argparse.Namespace, began: float) -> None:
    """Print and write all that there is so far."""
    figures, headline, rows = {}, {}, []
    for name, splits in found.items():
        figures[name] = {"published": PUBLISHED[name], "by split": {str(i): one for i, one in splits.items()}}
        for sampler in args.methods:
            runs = [one[sampler] for one in splits.values() if sampler in one]
            if not runs:
                continue
            ends = [
                f"{m:.3f} ± {e:.3f}"
                for m, e in (
                    mean_and_error([r[key] for r in runs]) for key in ("rmse", "log likelihood", "log likelihood, moments")
                )
            ]
            done, share = sum(r["R-hat"] <= AGREED for r in runs), sum(r["share of inputs"] for r in runs) / len(runs)
            gradients = sum(r["gradients"] for r in runs) / len(runs)
            effective = sum(r["effective per 1,000 gradients"] for r in runs) / len(runs)
            worst = max(r["R-hat"] for r in runs)
            rows.append(
                [
                    name,
                    len(runs),
                    sampler,
                    *ends,
                    f"{done}/{len(runs)}",
                    worst,
                    f"{100 * share:.1f} %",
                    f"{gradients:.3g}",
                    effective,
                ]
            )
            what = f"{name}, {len(runs)} splits, {sampler}: RMSE; log likelihood; of the moments"
            headline[what] = ["; ".join(ends), "published {} / {}".format(*PUBLISHED[name])]
            words = f"{done} of {len(runs)}, {100 * share:.1f} %, {worst:.3f}; {gradients:.2g}; {effective:.2f}"
            what = f"{name}, {sampler}: splits with R-hat <= 1.01, inputs, worst; gradients; effective draws per 1,000"
            headline[what] = [words, "R-hat <= 1.01"]
    columns = [
        "set",
        "splits",
        "sampler",
        "RMSE",
        "log lik.",
        "of moments",
        "agreed",
        "R-hat",
        "inputs",
        "gradients",
        "ESS/1,000",
    ]
    show("UCI regression by sampling", columns, rows)
    settings: dict[str, Any] = {
        "network": "1 x 50 ReLU", "prior scales": args.scales, "prior of the noise": f"Gamma{NOISE} of the precision",
        "chains": args.chains, "burn-in": args.burn_in, "draws of the first round": args.draws, "rounds": args.rounds,
        "steps of MCLMC a draw": THIN, "device": args.device, "seconds": args.seconds, "jobs": args.jobs,
    }  # fmt: skip
    if args.device != "cpu":
        settings["accelerator"] = torch.cuda.get_device_name(args.device)
    write("uci_sampling", settings=settings, figures=figures, headline=headline, seconds=time.time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="+", default=list(PUBLISHED), choices=list(PUBLISHED))
    parser.add_argument("--splits", type=int, default=1, help="of each set, of 20")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", nargs="+", default=["HMC", "MCLMC"], choices=["HMC", "MCLMC"])
    parser.add_argument("--chains", type=int, default=16)
    parser.add_argument("--burn-in", type=int, default=100, help="trajectories of HMC, or draws of MCLMC")
    parser.add_argument("--draws", type=int, default=200, help="of the first round, a chain; MCLMC makes twice as many")
    parser.add_argument("--rounds", type=int, default=6, help="at most; each adds half of the draws so far")
    parser.add_argument("--scales", type=float, nargs="+", default=[0.5], help="of the prior, to choose from")
    parser.add_argument("--short", type=int, default=60, help="burn-in and draws of the chains that choose the prior's scale")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--seconds", type=float, help="for all; what is not done then is reported as far as it came")
    parser.add_argument("--case", type=int, help="this split alone, in this process")
    args, began = parser.parse_args(), time.time()
    if args.case is not None:
        evaluate(args.sets[0], args.case, args)
        return
    args.until = began + args.seconds if args.seconds else None
    found: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in args.sets}
    with ThreadPoolExecutor(args.jobs) as pool:
        cases = list(itertools.product(range(args.splits), args.sets, args.methods))
        for (index, name, sampler), one in zip(cases, pool.map(lambda c: alone(c[1], c[0], c[2], args), cases), strict=True):
            if one is not None:
                found[name].setdefault(index, {})[sampler] = one
    report({name: splits for name, splits in found.items() if splits}, args, began)


if __name__ == "__main__":
    main()
