"""Networks fit labels that mean nothing (Zhang et al. 2017): what that does to training, to test errors, and to a bound.

1. Learning curves of one network on handwritten digits with true labels, a share of random ones, all random, and random images.
2. Slowdown and error growth: epochs until the training set is fitted, and the error on clean test images, over the share of random
   labels.
3. The empirical Rademacher complexity of n images, the mean over random signs s of how well they can be fitted,
   E sup_f 1/n sum_i s_i sign f(x_i): near 1 it bounds nothing. Training finds no supremum, so what comes out is a lower bound of it.
   Beside it a linear model, which has 65 weights.

    python examples/theory/random_labels.py                # minutes on a CPU core
    python examples/theory/random_labels.py --picture      # draws what results/random_labels.json holds
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from record import draw, load, save
from torch import Tensor, nn

import dubito
from dubito import MAP, Bernoulli, Categorical, Model
from dubito.data import digits
from dubito.priors import Normal

SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
SIZES = (25, 50, 100, 200, 400, 800)


def network(hidden: int, outputs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if not hidden:
        return nn.Sequential(nn.Linear(64, outputs))
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def train(
    x: Tensor, y: Tensor, args: argparse.Namespace, seed: int, *, hidden: int, epochs: int, likelihood: Any, faster: float = 1.0
) -> Any:
    """The posterior, and the mean loss of every epoch."""
    outputs = 1 if isinstance(likelihood, Bernoulli) else 10
    model = Model(network(hidden, outputs, seed), likelihood, Normal(scale=100.0))  # hardly any weight decay
    curve: list[float] = []
    batches = -(-len(x) // args.batch_size)
    total = [0.0]

    def note(event: Any) -> None:
        total[0] += float(event.info["log_likelihood"])
        if event.step % batches == 0:
            curve.append(-total[0] / batches)
            total[0] = 0.0

    method = MAP(epochs=epochs, learning_rate=faster * args.learning_rate, schedule="constant")
    posterior = dubito.fit(model, method, (x, y), batch_size=args.batch_size, seed=seed, callbacks=[note], progress=False)
    return posterior, curve


def accuracy(posterior: Any, x: Tensor, y: Tensor) -> float:
    return float((posterior.predict(x).mean.argmax(-1) == y).double().mean())


def noisy(y: Tensor, share: float, source: torch.Generator) -> Tensor:
    """A share of the labels drawn anew, from all classes."""
    chosen = torch.rand(len(y), generator=source) < share
    return torch.where(chosen, torch.randint(0, 10, y.shape, generator=source), y)


def curves(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for share in (*SHARES, "random images"):
        runs = []
        for seed in range(args.seeds):
            data = digits(seed=seed)
            source = torch.Generator().manual_seed(seed)
            x, y = data.x_train[: args.train].flatten(1), data.y_train[: args.train]
            if isinstance(share, str):  # noise with the mean and the spread of the images, and their labels
                x = x.mean() + x.std() * torch.randn(x.shape, generator=source)
            else:
                y = noisy(y, share, source)
            posterior, curve = train(x, y, args, seed, hidden=args.hidden, epochs=args.epochs, likelihood=Categorical())
            fitted = next((i + 1 for i, loss in enumerate(curve) if loss < args.fitted), None)
            runs.append(
                {
                    "curve": [round(loss, 4) for loss in curve],
                    "epochs to fit": fitted,
                    "train accuracy": accuracy(posterior, x, y),
                    "test error": 1 - accuracy(posterior, data.x_test.flatten(1), data.y_test),
                }
            )
        found[str(share)] = runs
        told = [(run["epochs to fit"], round(run["train accuracy"], 4), round(run["test error"], 4)) for run in runs]
        print(f"share of random labels {share}: epochs to fit, training accuracy, test error: {told}", flush=True)
    return found


def rademacher(args: argparse.Namespace) -> dict[str, Any]:
    """Mean agreement with random signs after training on them."""
    data = digits(seed=0)
    x = data.x_train.flatten(1)
    found: dict[str, Any] = {}
    for name, hidden in (("network", args.hidden), ("linear", 0)):
        rows: dict[str, list[float]] = {}
        for n in SIZES:
            rows[str(n)] = []
            for seed in range(args.signs):
                source = torch.Generator().manual_seed(seed)
                chosen = x[torch.randperm(len(x), generator=source)[:n]]
                sign = torch.randint(0, 2, (n, 1), generator=source).float()
                epochs = args.sign_steps // -(-n // args.batch_size)  # as many steps for few images as for many
                options = {"hidden": hidden, "epochs": epochs, "likelihood": Bernoulli(), "faster": 1.0 if hidden else 20.0}
                posterior, _ = train(chosen, sign, args, seed, **options)
                said = (posterior.predict(chosen).mean > 0.5).float()
                rows[str(n)].append(float((2 * (said == sign).double() - 1).mean()))
            print(f"{name}, {n} images: agreement with random signs {statistics.mean(rows[str(n)]):.3f}", flush=True)
        found[name] = rows
    return found


def picture() -> None:
    from dubito.report.canvas import BLUE, CYCLE, SOFT, VERMILION, grid

    found = load("random_labels")

    def panels(figure: Any) -> None:
        first, second, third = figure.subplots(1, 3)
        for i, (share, runs) in enumerate(found["curves"].items()):
            label = share if share == "random images" else f"{float(share):.0%} random labels"
            style = "--" if share == "random images" else "-"
            colour = SOFT if share == "random images" else CYCLE[i % len(CYCLE)]
            losses = torch.tensor([run["curve"] for run in runs]).mean(0).clamp_min(1e-4)
            first.plot(range(1, len(losses) + 1), losses, style, color=colour, label=label, linewidth=1.4)
        first.set(title="Training loss", xlabel="epoch", xscale="log", yscale="log")
        first.legend(fontsize=7)
        grid(first)
        shares = [share for share in found["curves"] if share != "random images"]
        values = [float(share) for share in shares]
        steps = [statistics.mean([run["epochs to fit"] or float("nan") for run in found["curves"][share]]) for share in shares]
        errors = [statistics.mean([run["test error"] for run in found["curves"][share]]) for share in shares]
        second.plot(values, [step / steps[0] for step in steps], "o-", color=BLUE, label="time to fit, over that of true labels")
        second.set(title="Slowdown and error growth", xlabel="share of random labels", ylim=(0, None))
        other = second.twinx()
        other.plot(values, errors, "s-", color=VERMILION, label="error on clean test images")
        other.set_ylim(0, 1)
        other.spines["right"].set_visible(True)
        handles = second.get_legend_handles_labels()[0] + other.get_legend_handles_labels()[0]
        second.legend(handles=handles, fontsize=7, loc="lower right")
        grid(second, "y")
        for (name, rows), colour in zip(found["rademacher"].items(), (BLUE, VERMILION), strict=True):
            sizes = [int(n) for n in rows]
            third.plot(sizes, [statistics.mean(rows[str(n)]) for n in sizes], "o-", color=colour, label=name)
        third.set(title="Empirical Rademacher complexity", xlabel="images", xscale="log", ylim=(0, 1.05))
        third.set_xticks(SIZES, [str(n) for n in SIZES])
        third.minorticks_off()
        third.legend(fontsize=8)
        grid(third, "y")

    draw("random_labels", panels, (11.0, 3.2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, default=500, help="images")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--sign-steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--fitted", type=float, default=0.1, help="training loss at which labels count as fitted")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--signs", type=int, default=4, help="draws of random signs")
    parser.add_argument(
        "--signs-only", action="store_true", help="keep the learning curves of an earlier run with these settings"
    )
    parser.add_argument("--picture", action="store_true", help="draw only")
    args = parser.parse_args()
    if not args.picture:
        settings = {key: value for key, value in vars(args).items() if key not in ("picture", "signs_only")}
        found = {"curves": load("random_labels")["curves"] if args.signs_only else curves(args)}
        save("random_labels", settings, found)
        found["rademacher"] = rademacher(args)
        save("random_labels", settings, found)
    picture()


if __name__ == "__main__":
    main()
