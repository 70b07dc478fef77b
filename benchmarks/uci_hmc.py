"""UCI regression by reference HMC, and by MCLMC, on the standard splits: do the chains converge, and what do they predict?

One hidden layer of 50 ReLU units, learned noise, inputs and targets standardised on the training part. The scale of the prior is
chosen for every set on a fifth of the training part of its first split, by HMC's own log likelihood; the test parts are seen once, at
the end. R-hat (rank-normalised, split) is that of the predictions at the test points.

    python benchmarks/uci_hmc.py --device cuda --chains 64 --draws 150 --burn-in 200
    python benchmarks/uci_hmc.py --sets yacht --splits 1          # on a CPU
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import torch
from measure import mean_and_error, show, write
from networks import mlp

import dubito
from dubito.data import standardize, uci
from dubito.data.examples import Split
from dubito.diagnostics import ess_bulk, rhat
from dubito.metrics import nll, rmse
from dubito.posteriors import Samples

SCALES = (0.3, 0.6, 1.2)
PUBLISHED = {
    "concrete": (4.48, -2.67),
    "yacht": (0.67, 0.57),
    "boston": (3.7, -2.39),
    "energy": (0.36, -1.1),
}  # Izmailov et al. 2021


def sampled(method: Any, s: Any, scale: float, device: str, seed: int = 0) -> tuple[Samples, float]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = mlp(s.x_train.shape[1], 50, 1).to(device)
    model = dubito.Model(network, dubito.Gaussian(), dubito.priors.Normal(scale))
    data = (s.x_train.to(device), s.y_train.to(device))
    start = time.perf_counter()
    found = dubito.fit(model, method, data, seed=seed, batch_size=10**6, progress=False)
    if device == "cuda":
        torch.cuda.synchronize()
    assert isinstance(found, Samples)
    return found, time.perf_counter() - start


def judged(found: Samples, seconds: float, s: Any, device: str) -> dict[str, float]:
    x, y, unit = s.x_test.to(device), s.y_test.to(device), float(s.y_scale)
    p = found.predict(x)
    f = p.means.squeeze(-1).unflatten(0, (found.chains, -1)).cpu()  # [chains, draws, B]
    moments = torch.distributions.Normal(p.mean, p.uncertainty.total.sqrt())
    r, n, gradients = rhat(f), ess_bulk(f), float(found.trace["gradients"].sum())
    return {
        "rmse": float(rmse(p, y)) * unit,
        "log_likelihood": -float(nll(p, y)) - math.log(unit),
        "log_likelihood_of_moments": float(moments.log_prob(y).mean()) - math.log(unit),
        "rhat_max": float(r.max()),
        "rhat_share_below_1.01": float((r <= 1.01).float().mean()),
        "ess_median": float(n.median()),
        "ess_per_1000_gradients": 1000 * float(n.median()) / gradients,
        "acceptance": float(found.trace["acceptance"].mean()) if "acceptance" in found.trace else math.nan,
        "divergent": float(found.trace["divergent"].sum()),
        "step_size": float(found.trace["step_size"].mean()),
        "gradients_a_draw": float(found.trace["gradients"].mean()),
        "noise": float(found.params["likelihood:log_scale"].exp().mean()),
        "seconds": seconds,
    }


def inside(split: Split) -> Split:
    """A fifth of the training part in the place of the test part."""
    order = torch.randperm(len(split.x_train), generator=torch.Generator().manual_seed(0))
    held, kept = order.split([len(order) // 5, len(order) - len(order) // 5])
    return Split(split.x_train[kept], split.y_train[kept], split.x_train[held], split.y_train[held])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sets", nargs="+", default=list(PUBLISHED))
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--chains", type=int, default=8)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--burn-in", type=int, default=300)
    parser.add_argument("--steps", type=int, default=1000, help="at most in a trajectory")
    parser.add_argument("--mclmc", type=int, default=1, help="splits on which MCLMC runs too")
    args = parser.parse_args()
    start, figures, headline = time.perf_counter(), {}, {}
    hmc = dubito.HMC(chains=args.chains, draws=args.draws, burn_in=args.burn_in, max_steps=args.steps)
    short = dubito.HMC(chains=args.chains, draws=max(20, args.draws // 4), burn_in=args.burn_in, max_steps=args.steps)
    mclmc = dubito.MCLMC(chains=args.chains, draws=args.draws, burn_in=args.burn_in)
    for name in args.sets:
        inner = standardize(inside(uci(name, 0)))
        tried = [sampled(short, inner, scale, args.device)[0] for scale in SCALES]
        scores = [float(nll(one.predict(inner.x_test.to(args.device)), inner.y_test.to(args.device))) for one in tried]
        scale = SCALES[scores.index(min(scores))]

        def one(index: int, name: str = name, scale: float = scale) -> dict[str, float]:
            s = standardize(uci(name, index))
            return judged(*sampled(hmc, s, scale, args.device, index), s, args.device)

        rows = {"HMC": [one(index) for index in range(args.splits)], "MCLMC": []}
        for index in range(min(args.mclmc, args.splits)):
            s = standardize(uci(name, index))
            rows["MCLMC"].append(judged(*sampled(mclmc, s, scale, args.device, index), s, args.device))
        figures[name] = {"prior_scale": scale, "inner": dict(zip(map(str, SCALES), scores, strict=True)), "splits": rows}
        keys = rows["HMC"][0]
        summary = {key: mean_and_error([row[key] for row in rows["HMC"]]) for key in keys}
        worst = max(row["rhat_max"] for row in rows["HMC"])
        published = PUBLISHED[name]
        (a, ea), (b, eb) = summary["rmse"], summary["log_likelihood"]
        headline[f"{name}: HMC, RMSE"] = [f"{a:.2f} ± {ea:.2f}", f"{published[0]} published"]
        headline[f"{name}: HMC, log likelihood"] = [f"{b:.2f} ± {eb:.2f}", f"{published[1]} published"]
        headline[f"{name}: R-hat of predictions, worst of all splits and points"] = [f"{worst:.4f}", "1.01"]
        share = summary["rhat_share_below_1.01"][0]
        headline[f"{name}: share of test points with R-hat at most 1.01"] = [f"{share:.3f}", "1"]
        if rows["MCLMC"]:
            m = rows["MCLMC"][0]
            headline[f"{name}, split 0: effective draws per 1,000 gradients, MCLMC / HMC"] = [
                f"{m['ess_per_1000_gradients']:.2f} / {rows['HMC'][0]['ess_per_1000_gradients']:.2f}", ""
            ]  # fmt: skip
            headline[f"{name}, split 0: R-hat max, RMSE and log likelihood of MCLMC"] = [
                f"{m['rhat_max']:.4f}, {m['rmse']:.2f}, {m['log_likelihood']:.2f}", ""
            ]  # fmt: skip
        show(name, ["", *keys], [[label, *r.values()] for label, many in rows.items() for r in many])
        settings = {**vars(args), "prior scales": SCALES}
        write("uci_hmc", settings=settings, figures=figures, headline=headline, seconds=time.perf_counter() - start)


if __name__ == "__main__":
    main()
