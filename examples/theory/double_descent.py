"""Double descent, with and without a Bayesian average.

Random features of handwritten digits: 64 pixels, p random ReLU units that are not trained, and a linear layer fitted to n images, a
share of whose labels is random. Least squares (the least of all solutions where there are several) does worst where p comes to n: it
can just fit all labels, wrong ones too, in only one way. Past that there are many ways, and the smallest is smooth again: the error
falls a second time.

- least squares, one draw of the features, as plain training by gradient descent from zero would end;
- the same averaged over several draws of the features, an ensemble;
- the Bayesian average over the last layer, exactly, with the weight decay and the noise that the evidence chooses (`NeuralLinear`).

The targets are -1 and 1, one output a class. Nothing is chosen on the test images.

    python examples/theory/double_descent.py                # minutes on a CPU core
    python examples/theory/double_descent.py --picture      # draws what results/double_descent.json holds
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from record import draw, load, save
from torch import Tensor, nn

import dubito
from dubito import Gaussian, Model, NeuralLinear
from dubito.data import digits
from dubito.metrics import nll

WIDTHS = (10, 20, 40, 80, 120, 160, 180, 190, 200, 210, 220, 240, 280, 340, 420, 560, 800, 1200, 2000)


def features(width: int, seed: int) -> nn.Sequential:
    """Random units with weights of about unit norm, and the linear layer that is to be fitted."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10, bias=False)).double()
    with torch.no_grad():
        net[0].weight.normal_(0.0, 64**-0.5)
        net[0].bias.normal_(0.0, 0.1)
    return net


def least_squares(net: nn.Sequential, x: Tensor, target: Tensor) -> Tensor:
    """The weights of the last layer, [width, 10], of least norm among those of least error."""
    with torch.no_grad():
        return torch.linalg.pinv(net[:2](x), rtol=1e-10) @ target


def run(width: int, seed: int, args: argparse.Namespace) -> dict[str, float]:
    data = digits(seed=seed)
    source = torch.Generator().manual_seed(seed)
    x, y = data.x_train[: args.train].flatten(1).double(), data.y_train[: args.train]
    x_test, y_test = data.x_test.flatten(1).double(), data.y_test
    chosen = torch.rand(len(y), generator=source) < args.noise
    y = torch.where(chosen, torch.randint(0, 10, y.shape, generator=source), y)
    target, truth = (2.0 * nn.functional.one_hot(one, 10).double() - 1 for one in (y, y_test))

    def judged(f: Tensor) -> tuple[float, float]:
        return float((f.argmax(-1) != y_test).double().mean()), float((f - truth).pow(2).mean())

    outputs, fitted, sizes = [], [], []
    for draw_ in range(args.draws):
        net = features(width, 1000 * seed + draw_)
        weights = least_squares(net, x, target)
        sizes.append(float(weights.norm()))
        with torch.no_grad():
            outputs.append(net[:2](x_test) @ weights)
            fitted.append(float((net[:2](x) @ weights - target).pow(2).mean()))
    found = dict(zip(("error", "squares"), judged(outputs[0]), strict=True))
    found |= {"train squares": fitted[0], "norm": sizes[0]}
    found |= dict(zip(("error, ensemble", "squares, ensemble"), judged(torch.stack(outputs).mean(0)), strict=True))
    model = Model(features(width, 1000 * seed), Gaussian(), only="^2")
    p = dubito.fit(model, NeuralLinear(), (x, target), batch_size=args.train, progress=False).predict(x_test)
    found |= dict(zip(("error, Bayes", "squares, Bayes"), judged(p.mean), strict=True))
    found["nll, Bayes"] = float(nll(p, truth))
    found["epistemic, Bayes"] = float(p.uncertainty.epistemic.mean())
    return found


def picture() -> None:
    from dubito.report.canvas import BLUE, GREEN, SOFT, VERMILION, grid

    found = load("double_descent")
    widths = [int(width) for width in found]

    def middle(key: str) -> list[float]:  # near the peak, single runs are off the scale
        return [statistics.median(run[key] for run in found[str(width)]) for width in widths]

    def panels(figure: Any) -> None:
        first, second = figure.subplots(1, 2)
        for key, label, colour in (
            ("", "least squares", VERMILION),
            (", ensemble", "average over draws of the features", GREEN),
            (", Bayes", "Bayesian average", BLUE),
        ):
            first.plot(widths, middle("error" + key), "o-", markersize=3, color=colour, label=label)
            second.plot(widths, middle("squares" + key), "o-", markersize=3, color=colour, label=label)
        second.plot(
            widths, [max(1e-4, value) for value in middle("train squares")], ":", color=SOFT, label="least squares, training"
        )
        first.set(title="Test error", xlabel="random features", xscale="log", ylim=(0, 1.1))
        second.set(title="Mean squared error", xlabel="random features", xscale="log", yscale="log", ylim=(1e-3, 1e4))
        for axes in (first, second):
            axes.axvline(200, color=SOFT, linewidth=0.6)
            grid(axes, "y")
            axes.legend(fontsize=7, loc="upper left")

    draw("double_descent", panels, (8.2, 3.3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, default=200, help="images; the line in the picture stands at 200")
    parser.add_argument("--noise", type=float, default=0.2, help="share of random labels")
    parser.add_argument("--draws", type=int, default=10, help="of the features, for the ensemble")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--picture", action="store_true", help="draw only")
    args = parser.parse_args()
    if not args.picture:
        settings = {key: value for key, value in vars(args).items() if key != "picture"}
        found: dict[str, list[dict[str, float]]] = {}
        for width in WIDTHS:
            found[str(width)] = [run(width, seed, args) for seed in range(args.seeds)]
            means = {key: round(statistics.mean(one[key] for one in found[str(width)]), 4) for key in found[str(width)][0]}
            print(width, means, flush=True)
            save("double_descent", settings, found)
    picture()


if __name__ == "__main__":
    main()
