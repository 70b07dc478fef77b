"""The same posterior by our samplers and by NumPyro's and BlackJAX's: do they agree, and how many effective draws does a second give?

A network of 50 rectified units on UCI boston and yacht (split 0, standardised), prior N(0, 0.1) on all weights, known noise. Step size
and trajectory length are tuned once, by ours, and then the same for all samplers of a kind, as is where the chains start: in the
posterior. What is compared are predictions at the test inputs: means and standard deviations, as z scores of their Monte Carlo errors,
and bulk effective draws (median and least over the inputs) per second.

Time is that of a long run less that of a short one, so that setting up and compiling, reported apart, do not count. JAX runs chains
vectorised, or in turn with an equal share on each core (a device for each): both are tried, and the faster counts. Then the time of a
leapfrog step alone, for some numbers of chains, also of the operations that autograd makes of the network, which ours replaces.
On a machine that is busy, `BENCH_CLOCK=cpu OMP_NUM_THREADS=1` counts this process's time on one core, for all alike.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from measure import CLOCK, interleaved, show, write
from networks import mlp
from torch import Tensor

import dubito
from dubito.data import standardize, uci
from dubito.diagnostics import ess_bulk, ess_mean, rhat
from dubito.inference.integrators import Point, leapfrog
from dubito.inference.log_density import Density
from dubito.model import Target
from dubito.posteriors import Samples
from dubito.priors import Normal
from dubito.tensors import tree

CORES = 1 if os.environ.get("OMP_NUM_THREADS") == "1" else min(2, os.cpu_count() or 1)
# JAX reads these when it is imported, which is further down
os.environ.setdefault(
    "XLA_FLAGS",
    f"--xla_force_host_platform_device_count={CORES}"
    + (" --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1" if CORES == 1 else ""),
)
UNITS, SCALE, THIN, TREE = 50, math.sqrt(0.1), 20, 10
NOISE = {"boston": 0.3, "yacht": 0.1}
STEPS = ("autograd's operations", "dubito", "JAX, vectorised", "JAX, in turn")

Sampler = Callable[[int], Tensor]  # draws a chain -> positions [chains, draws, P]


@dataclass(frozen=True)
class Problem:
    """A posterior, where its chains start, and the settings that all samplers share. Lengths are in prior standard deviations."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    noise: float
    start: Samples
    step: float  # of HMC
    turn: float  # the step of MCLMC

    @property
    def positions(self) -> Tensor:
        return tree.flatten(self.start.params, stacked=True)

    @property
    def steps(self) -> int:
        return math.ceil(math.pi / 2 / self.step)


def problem(name: str, chains: int, burn_in: int) -> Problem:
    s = standardize(uci(name, 0))
    torch.manual_seed(0)
    model = dubito.Model(mlp(s.x_train.shape[1], UNITS, 1), dubito.Gaussian(scale=NOISE[name]), Normal(scale=SCALE))
    data = s.x_train, s.y_train
    settled = dubito.fit(model, dubito.HMC(chains=chains, burn_in=burn_in, draws=1), data, progress=False)
    turning = dubito.fit(model, dubito.MCLMC(chains=chains, burn_in=burn_in, draws=1), data, start=settled, progress=False)
    assert isinstance(settled, Samples)
    assert isinstance(turning, Samples)
    step, turn = (float(one.trace["step_size"].median()) for one in (settled, turning))
    return Problem(*data, s.x_test, NOISE[name], settled, step, turn)


# ---- ours


def ours(p: Problem) -> dict[str, Sampler]:
    chains, same = p.start.chains, {"burn_in": 0, "tune": False}

    def sampler(method: Callable[[int], Any]) -> Sampler:
        def run(draws: int) -> Tensor:
            found = dubito.fit(p.start.model, method(draws), (p.x, p.y), start=p.start, progress=False, seed=1)
            assert isinstance(found, Samples)
            return tree.flatten(found.params, stacked=True).view(chains, draws, -1)

        return run

    return {
        "HMC": sampler(lambda n: dubito.HMC(step_size=p.step, jitter=0.0, chains=chains, draws=n, **same)),
        "NUTS": sampler(lambda n: dubito.NUTS(step_size=p.step, max_depth=TREE, chains=chains, draws=n, **same)),
        "MCLMC": sampler(lambda n: dubito.MCLMC(step_size=p.turn, chains=chains, draws=n, thin=THIN, **same)),
    }


# ---- theirs


def jax_density(p: Problem) -> Callable[[Any], Any]:
    """The log density of a flat vector of weights, in the order of ours."""
    import jax
    import jax.numpy as jnp

    x, y, width = jnp.asarray(p.x.numpy()), jnp.asarray(p.y[:, 0].numpy()), p.x.shape[1]
    inner = UNITS * width

    def log_density(q: Any) -> Any:
        w, b = q[:inner].reshape(UNITS, width), q[inner : inner + UNITS]
        f = jax.nn.relu(x @ w.T + b) @ q[inner + UNITS : inner + 2 * UNITS] + q[-1]
        return -0.5 * jnp.sum(((y - f) / p.noise) ** 2) - 0.5 * jnp.sum((q / SCALE) ** 2)

    return log_density


def theirs(p: Problem) -> dict[str, dict[str, Sampler]]:
    """{sampler: {how its chains are run: sampler}}, of NumPyro and BlackJAX."""
    import blackjax
    import jax
    import jax.numpy as jnp
    import numpyro.infer

    start, log_density = jnp.asarray(p.positions.numpy()), jax_density(p)
    chains, size = start.shape

    def on_all_cores(one: Callable) -> Callable:
        """A function of one chain, for all chains: in turn, with an equal share on each core."""
        every = jax.pmap(lambda args: jax.lax.map(lambda a: one(a), args))

        def run(args: Any) -> Any:
            cut = jax.tree.map(lambda leaf: leaf.reshape(CORES, chains // CORES, *leaf.shape[1:]), args)
            return jax.tree.map(lambda leaf: leaf.reshape(chains, *leaf.shape[2:]), every(cut))

        return run

    ways: dict[str, Callable] = {"vectorised": lambda one: jax.jit(jax.vmap(one)), "in turn": on_all_cores}

    def numpyro_(kernel: Callable[[], Any], way: Callable) -> Sampler:
        def run(draws: int) -> Tensor:
            mcmc = numpyro.infer.MCMC(
                kernel(), num_warmup=0, num_samples=draws, num_chains=chains, chain_method=way, progress_bar=False
            )
            mcmc.run(jax.random.key(1), init_params=start)
            return torch.from_numpy(np.array(mcmc.get_samples(group_by_chain=True)))

        return run

    def blackjax_(init: Callable, step: Callable, way: Callable, inside: int) -> Sampler:
        def run(draws: int) -> Tensor:
            def one(args: Any) -> Any:
                key, q = args

                def draw(state: Any, key: Any) -> Any:
                    state = jax.lax.fori_loop(0, inside, lambda i, s: step(jax.random.fold_in(key, i), s)[0], state)
                    return state, state.position

                return jax.lax.scan(draw, init(q, key), jax.random.split(key, draws))[1]

            keys = jax.random.split(jax.random.key(1), chains)
            return torch.from_numpy(np.array(way(one)((keys, start))))

        return run

    def potential(q: Any) -> Any:
        return -log_density(q)

    length = p.step * SCALE
    fixed = {"potential_fn": potential, "step_size": length, "adapt_step_size": False, "adapt_mass_matrix": False}
    hmc = blackjax.hmc(log_density, length, jnp.ones(size), p.steps)
    reach = SCALE * math.sqrt(size)  # its particle has speed 1, and ours sqrt(P)
    mclmc = blackjax.mclmc(log_density, L=1.0 * reach, step_size=p.turn * reach)
    found: dict[str, dict[str, Sampler]] = {}
    for name, way in ways.items():
        found.setdefault("NumPyro HMC", {})[name] = numpyro_(
            lambda: numpyro.infer.HMC(trajectory_length=(p.steps - 0.5) * length, **fixed), way
        )
        found.setdefault("NumPyro NUTS", {})[name] = numpyro_(lambda: numpyro.infer.NUTS(max_tree_depth=TREE, **fixed), way)
        found.setdefault("BlackJAX HMC", {})[name] = blackjax_(lambda q, key: hmc.init(q), hmc.step, way, 1)
        found.setdefault("BlackJAX MCLMC", {})[name] = blackjax_(lambda q, key: mclmc.init(q, key), mclmc.step, way, THIN)
    return found


# ---- measured


def predictions(p: Problem, positions: Tensor) -> Tensor:
    """f at the test inputs, [chains, draws, T], in float64."""
    like = tree.select(p.start.params, 0)
    flat = tree.unflatten(positions.flatten(0, 1).double(), like)
    w, b, u, c = flat.values()
    f = torch.relu(torch.einsum("td,shd->sth", p.x_test.double(), w) + b.unsqueeze(1)) @ u.mT + c.unsqueeze(1)
    return f.view(*positions.shape[:2], -1)


def moments(f: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Means and standard deviations [T], and the Monte Carlo standard errors of both."""
    flat = f.flatten(0, 1)
    mean, sd = flat.mean(0), flat.std(0)
    squares = (f - mean).square()
    return mean, sd, sd / ess_mean(f).sqrt(), squares.flatten(0, 1).std(0) / ess_mean(squares).sqrt() / (2 * sd)


def compared(one: Tensor, two: Tensor) -> dict[str, tuple[float, float]]:
    """z scores of the differences, root mean square and largest over the inputs."""
    a, b = moments(one), moments(two)
    z = {"mean": (a[0] - b[0]) / (a[2] ** 2 + b[2] ** 2).sqrt(), "sd": (a[1] - b[1]) / (a[3] ** 2 + b[3] ** 2).sqrt()}
    return {name: (float(score.square().mean().sqrt()), float(score.abs().max())) for name, score in z.items()}


def timed(run: Sampler, draws: int, short: int) -> tuple[Tensor, float, float]:
    """Positions; the seconds that `draws` take; those that everything else takes."""
    start = CLOCK()
    run(short)
    middle = CLOCK()
    found = run(draws)
    end = CLOCK()
    each = max(1e-9, (end - middle) - (middle - start)) / (draws - short)
    return found, each * draws, (middle - start) - each * short


def measured(p: Problem, run: Sampler, draws: int) -> tuple[Tensor, dict[str, float]]:
    found, seconds, apart = timed(run, draws, max(2, draws // 20))
    f = predictions(p, found)
    bulk = ess_bulk(f)
    return f, {
        "draws": draws,
        "seconds": seconds,
        "setting up, s": apart,
        "effective, median": float(bulk.median()),
        "effective, least": float(bulk.min()),
        "a second, median": float(bulk.median()) / seconds,
        "a second, least": float(bulk.min()) / seconds,
        "R-hat": float(rhat(f).max()),
    }


def one_set(name: str, args: argparse.Namespace) -> dict[str, Any]:
    p = problem(name, args.chains, args.burn_in)
    count = {"HMC": args.draws, "NUTS": max(20, args.draws // 4), "MCLMC": args.draws * 2}
    found: dict[str, Tensor] = {}
    figures: dict[str, Any] = {"step of HMC": p.step, "leapfrog steps": p.steps, "step of MCLMC": p.turn, "samplers": {}}
    for sampler, run in ours(p).items():
        found[f"dubito {sampler}"], figures["samplers"][f"dubito {sampler}"] = measured(p, run, count[sampler])
    try:
        peers = theirs(p)
    except ImportError as error:
        print(f"no peers: {error}")
        peers = {}
    best = ""
    for sampler, ways in peers.items():
        draws = count[sampler.split()[1]]
        if sampler != "NumPyro NUTS":  # which does as NumPyro's HMC
            tried = {way: timed(run, max(8, draws // 20), 2)[1] for way, run in ways.items()}
            best = min(tried, key=lambda way: tried[way])
        found[sampler], figures["samplers"][sampler] = measured(p, ways[best], draws)
        figures["samplers"][sampler] |= {"chains are run": best}
        print(f"{name}: {sampler}, {best}", flush=True)
    pairs = [("dubito HMC", other) for other in found if other not in ("dubito HMC", "BlackJAX MCLMC")]
    pairs += [("dubito MCLMC", "BlackJAX MCLMC")] if "BlackJAX MCLMC" in found else []
    figures["leapfrog step, us"] = step_costs(p, args.repeats)
    figures["z scores"] = {f"{a} and {b}": compared(found[a], found[b]) for a, b in pairs}
    return figures


def step_costs(p: Problem, repeats: int) -> dict[str, dict[str, float]]:
    """Microseconds of a leapfrog step of all chains, in trajectories of 100, by the number of chains."""
    model, figures = p.start.model, {}
    for chains in (1, 4, 8, 32):
        cases: dict[str, Callable[[], object]] = {}
        start = p.positions[torch.arange(chains) % p.start.chains]
        options = {
            "step": torch.full((chains,), p.step),
            "count": torch.full((chains,), 100, dtype=torch.int32),
            "scale": torch.full((start.shape[1],), SCALE),
        }
        for name in ("autograd's operations", "dubito"):
            density = Density(Target(model, len(p.x)), [(p.x, p.y)], model.parameters(), model.buffers())
            if name == "dubito":
                density.fit_chunks(chains)
            here = Point(start, torch.randn_like(start), *density(start))
            cases[name] = lambda density=density, here=here, options=options: leapfrog(density, here, **options)
        with suppress(ImportError):
            cases |= jax_steps(p, start)
        seconds = interleaved(cases, repeats)
        figures[str(chains)] = {name: min(times) * 1e4 for name, times in seconds.items()}
    return figures


def jax_steps(p: Problem, start: Tensor) -> dict[str, Callable[[], object]]:
    """100 leapfrog steps in JAX, compiled."""
    import jax
    import jax.numpy as jnp

    log_density, length = jax_density(p), p.step * SCALE

    def trajectory(slope: Callable) -> Callable:
        def run(q: Any, v: Any) -> Any:
            def step(_: int, state: Any) -> Any:
                q, v, g, _ = state
                v = v + 0.5 * length * g
                q = q + length * v
                value, g = slope(q)
                return q, v + 0.5 * length * g, g, value

            value, g = slope(q)
            return jax.lax.fori_loop(0, 100, step, (q, v, g, value))

        return run

    one = jax.value_and_grad(log_density)
    vectorised = jax.jit(trajectory(jax.vmap(one)))
    in_turn = jax.jit(lambda q, v: jax.lax.map(lambda args: trajectory(one)(*args), (q, v)))
    given = jnp.asarray(start.numpy()), jnp.asarray(torch.randn_like(start).numpy())
    return {
        "JAX, vectorised": lambda: jax.block_until_ready(vectorised(*given)),
        "JAX, in turn": lambda: jax.block_until_ready(in_turn(*given)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="+", default=list(NOISE), choices=list(NOISE))
    parser.add_argument("--chains", type=int, default=8)
    parser.add_argument(
        "--draws", type=int, default=300, help="of HMC, a chain; NUTS makes a quarter as many, MCLMC twice as many"
    )
    parser.add_argument("--burn-in", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=20, help="of 100 leapfrog steps")
    args, began = parser.parse_args(), time.time()
    figures, headline, speeds, agreement, steps = {}, {}, [], [], []
    for name in args.sets:
        figures[name] = one_set(name, args)
        for sampler, one in figures[name]["samplers"].items():
            words = f"{one['a second, median']:.0f} ({one['a second, least']:.0f})"
            speeds.append(
                [name, sampler, one["draws"], one["R-hat"], one["effective, median"], one["seconds"], words, one["setting up, s"]]
            )
            kind, reference = sampler.split()[1], figures[name]["samplers"]
            target = max(
                (other["a second, median"] for key, other in reference.items() if key.split()[1] == kind and "dubito" not in key),
                default=math.nan,
            )
            headline[f"{name}, {sampler}: effective draws of predictions a second, median (least); setting up, s"] = [
                f"{words}; {one['setting up, s']:.1f}",
                f">= {target:.0f}" if "dubito" in sampler and target == target else "",
            ]
        for chains, times in figures[name]["leapfrog step, us"].items():
            steps.append([name, chains, *(f"{times[key]:.0f}" if key in times else "" for key in STEPS)])
            headline[f"{name}, {chains} chains: a leapfrog step, us: {'; '.join(times)}"] = [
                "; ".join(f"{t:.0f}" for t in times.values()),
                "",
            ]
        for pair, z in figures[name]["z scores"].items():
            words = [f"{rms:.2f}, {most:.2f}" for rms, most in (z["mean"], z["sd"])]
            agreement.append([name, pair, *words])
            headline[f"{name}, {pair}: z scores, rms and largest, of means; of standard deviations"] = [
                "; ".join(words),
                "about 1, 3",
            ]
    show(
        "effective draws of predictions", ["set", "sampler", "draws", "R-hat", "effective", "s", "a second", "set-up, s"], speeds
    )
    show("a leapfrog step of all chains, us", ["set", "chains", *STEPS], steps)
    show("agreement: z scores, rms and largest", ["set", "samplers", "means", "standard deviations"], agreement)
    settings = {"network": f"1 x {UNITS} ReLU", "prior variance": SCALE**2, "noise": NOISE, "chains": args.chains, "cores": CORES,
                "path of HMC": "pi/2 prior sd", "path of MCLMC": "1 prior sd", "MCLMC steps a draw": THIN}  # fmt: skip
    try:
        import blackjax
        import jax
        import numpyro

        settings["versions"] = {one.__name__: one.__version__ for one in (jax, numpyro, blackjax)}
    except ImportError:
        pass
    write("sampling_peers", settings=settings, figures=figures, headline=headline, seconds=time.time() - began)


if __name__ == "__main__":
    main()
