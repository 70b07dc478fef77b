"""Write docs/benchmarks.md, and the figures in README.md, from the result files.

    python benchmarks/page.py            # write both
    python benchmarks/page.py --check    # fail if either is out of date

No figure on these pages is typed by hand. `tests/test_benchmarks.py` fails when they do not match the result files.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
BEGIN, END = "<!-- figures: written by benchmarks/page.py -->", "<!-- end of figures -->"
FOLDERS = ("benchmarks/results", "examples/posteriors/results", "examples/theory/results")


INTRODUCTION = """# Benchmarks

<!-- Written by benchmarks/page.py from the result files: do not edit. -->

All figures come from the result files in [`benchmarks/results`](../benchmarks/results),
[`examples/posteriors`](../examples/posteriors) and [`examples/theory`](../examples/theory).
[benchmarks/README.md](../benchmarks/README.md) says what each script measures and how to run it.

Each file names its commit. "recorded in X" means that the figures were committed with X and that the state of the code which made
them was
not recorded. Newer files have the commit of the code that ran, with `-dirty` if it had uncommitted changes."""


def load(name: str, folder: str = "benchmarks/results") -> dict[str, Any]:
    """A result file as a dict."""
    return json.loads((ROOT / folder / f"{name}.json").read_text())


def figures(name: str) -> Any:
    """The figures of a result file of `benchmarks/`."""
    return load(name)["figures"]


def number(value: float | None, digits: int = 3) -> str:
    """`value` with so many significant digits, a thousands separator and a true minus sign; an empty cell for None."""
    if value is None:
        return ""
    if abs(value) >= 10**digits:
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}".rstrip(".").replace("-", "−") if abs(value) >= 1e-3 else f"{value:.0e}".replace("-", "−")


def fixed(value: float, places: int) -> str:
    """`value` with so many decimal places."""
    return f"{value:.{places}f}".replace("-", "−")


def percent(value: float, places: int = 1) -> str:
    """A share as a percentage."""
    return f"{100 * value:.{places}f} %"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def source(*names: str, base: str = "../", folder: str = "benchmarks/results") -> str:
    """Links to result files; `base` is the way from the page to the root of the repository."""
    return ", ".join(f"[`{name}.json`]({base}{folder}/{name}.json)" for name in names)


def made(result: dict[str, Any]) -> str:
    """One line on the run behind a result file: commit, date, versions, machine."""
    parts = [f"commit: {result['commit']}", result["date"], f"torch {result['versions']['torch']}"]
    if "command" in result:
        parts.append(f"`{result['command']}`")
    if host := result.get("machine"):
        parts.append(f"{host['cpu']}, {host['cores']} cores, {host['threads']} threads, clock `{host['clock']}`")
    if gpu := result.get("settings", {}).get("gpu"):
        parts.append(str(gpu))
    return "; ".join(parts)


# ---- README


def headlines() -> str:
    """The five figures in README.md."""
    leapfrog, laplace, cost = figures("leapfrog_cost"), figures("laplace_cost")["MLP"], figures("streamlined_cost")["MLP"]["64"]
    exact = figures("streamlined_accuracy")["ReLU 8-50-50-1, mean-field VI (concrete)"]["ways"]
    online, given, calibrated = figures("online_evidence"), figures("cifar10"), figures("recalibration")

    def step(name: str) -> str:
        return number(leapfrog[name]["128"]["fastest"])

    def fit(name: str) -> str:
        return number(laplace["Kronecker, exact"][name]["ratio"]["fastest"], 2)

    def row(name: str, digits: int = 3) -> str:
        return f"NLL {fixed(online[name]['nll'][0], digits)}, AUROC {fixed(online[name]['unknown'][0], digits)}"

    rows = [
        (
            "**HMC on a GPU.** One leapfrog step of 128 chains, a 13-50-1 network, all 455 data points, H200",
            f"{step('our kernel')} µs; JAX {step('JAX, float32')} µs; PyTorch without our kernel {step('PyTorch, step after step')} µs",
            source("leapfrog_cost", base=""),
        ),
        (
            "**Laplace.** Time of a Kronecker fit with the exact GGN, in training epochs, MLP 784-512-512-10, one CPU core",
            f"{fit('dubito')}; laplace-torch with BackPACK {fit('BackPACK')}",
            source("laplace_cost", base=""),
        ),
        (
            '**Prediction without sampling** (`how="adjoint"`). KL divergence from the output distribution of 200,000 weight draws, '
            "two hidden layers; time in forward passes, MLP 784-512-512-10, batch 64",
            f"KL {number(exact['adjoint']['kl'], 1)}, {number(cost['adjoint']['fastest'], 2)} passes; "
            f"100 draws: KL {fixed(exact['100 draws']['kl'], 2)}; 20 draws: {number(cost['sampled, 20 draws']['fastest'])} passes",
            source("streamlined_accuracy", "streamlined_cost", base=""),
        ),
        (
            "**Unfamiliar inputs.** Fashion-MNIST, small CNN, one seed: test NLL, and AUROC of detecting MNIST digits by entropy",
            f"`OnlineLaplace`: {row('online, kronecker')}; the better of two MAP fits: {row('map, scale 0.1')}",
            source("online_evidence", base=""),
        ),
        (
            "**Calibration.** CIFAR-10, ResNet-20: test NLL. Held-out images are test images that are not scored",
            f"plain network {fixed(calibrated['ResNet-20, 500']['none']['nll'][0], 3)}; with a temperature fitted to 500 held-out "
            f"images {fixed(calibrated['ResNet-20, 500']['temperature']['nll'][0], 3)}; Laplace tuned on 2,000 held-out images "
            f"{fixed(given['laplace, tuned']['nll'], 3)}",
            source("cifar10", "recalibration", base=""),
        ),
    ]
    return table(["what", "result", "file"], rows)


# ---- docs/benchmarks.md, section by section


def training() -> str:
    steps, masks, members = figures("training_step"), figures("prefix"), figures("ensemble")["13-50-1, batch 32"]
    rows = []
    for name, target in (("784-512-512-10, batch 128", "1.1"), ("13-50-1, batch 32, fixed noise", "1.2")):
        for adam in ("default Adam", "fused Adam"):
            what = f"one training step of `fit` with `MAP`, {name}, relative to a hand-written loop with torch's {adam}"
            rows.append((what, fixed(steps[name][f"ratio to {adam}"]["fastest"], 2), target, source("training_step")))
    for name, label, target in (
        ("consistent masks", "the same masks for the whole batch", "1.5"),
        ("independent masks", "a mask for each example", "4"),
        ("loop of 100 passes", "a Python loop of 100 passes", ""),
    ):
        what = f"100 dropout draws of LeNet's last layer, batch 256, {label}, relative to one forward pass"
        rows.append((what, number(masks[name]["ratio"]["fastest"]), target, source("prefix")))
    ratio = members["vectorised over separate"]["fastest"]
    rows.append(("ensemble of 5 networks 13-50-1, relative to 5 separate fits", fixed(ratio, 2), "", source("ensemble")))
    return f"""## Cost of training and dropout

Ratios of the fastest of several interleaved repeats on two CPU cores. Below 1 is faster than the reference. The target is the most that
we accept. Compared with a loop that uses torch's fused Adam, small networks miss it: Python takes most of a step of half a millisecond.

{table(["what", "ratio", "target", "file"], rows)}"""


def laplace() -> str:
    costs, headline = figures("laplace_cost"), load("laplace_cost")["headline"]
    nets = list(costs)

    def cell(net: str, case: str, who: str) -> str:
        value = costs[net][case][who]
        if "error" in value:
            return value["error"]
        return ("~" if value.get("scaled by", 1.0) != 1.0 else "") + number(value["ratio"]["fastest"])

    def target(net: str, case: str) -> str:
        return next(value[1] for key, value in headline.items() if key.startswith(f"{net}, {case}:")).removeprefix("<= ")

    rows = [
        [case, *(" / ".join(get(net, case) for net in nets) for get in columns)]
        for columns in [(lambda n, c: cell(n, c, "dubito"), lambda n, c: cell(n, c, "BackPACK"), target)]
        for case in costs["MLP"]
    ]
    return f"""## Cost of a Laplace approximation

Fits relative to one training epoch, predictions relative to one forward pass; batch 128, 10 classes, one thread, CPU time. Three
networks: {" / ".join(nets)}. "~": scaled up from a part of the data. "> 20 s": stopped at the limit of a single run. "unsupported":
laplace-torch cannot do it. The rows "exact" use the exact GGN, "one draw" a Monte Carlo estimate with one label per example. From
{source("laplace_cost")}.

{table(["what", "dubito", "laplace-torch 0.3, BackPACK", "target"], rows)}

A target is missed where our figure is above it, and where there is no figure."""


def uci() -> str:
    names = {"MAP": "MAP", "Laplace": "Laplace", "neural linear": "neural linear", "SWAG": "SWAG", "MC dropout": "MC dropout"}
    names |= {"ensemble": "ensemble of 5", "ensemble, heteroscedastic": "ensemble of 5, heteroscedastic"}

    def cell(value: dict[str, Any]) -> str:
        rmse, score = ((v if isinstance(v, list) else [v]) for v in (value["rmse"], value["log likelihood"]))
        error = f" ± {fixed(score[1], 2)}" if len(score) > 1 else ""
        return f"{fixed(rmse[0], 2)}, {fixed(score[0], 2)}{error}"

    sets = figures("uci")
    rows = [[name, *(cell(value["methods"][key]) for value in sets.values())] for key, name in names.items()]
    rows += [
        [f"published: {key}", *(cell(value["published"][key]) for value in sets.values())] for key in ("MC dropout", "ensemble")
    ]
    return f"""## UCI regression

RMSE and test log likelihood (± standard error) over the 20 standard splits; one hidden layer of 50 units. All settings are chosen on an
inner split of the training part. Laplace, neural linear and SWAG start from the networks of the MAP row. Published figures: MC dropout
(4,000 epochs, repository yaringal/DropoutUncertaintyExps) and deep ensembles (Lakshminarayanan et al. 2017, 40 epochs).
These runs are older than a change of how the noise is learned. From {source("uci")}.

{table(["method", *sets], rows)}"""


def images() -> str:
    maps, online = figures("recalibration"), figures("online_evidence")
    names = {
        "map": "MAP",
        "laplace, last layer": "Laplace, last layer",
        "laplace, last layer, dense empirical Fisher": "Laplace, last layer, dense, empirical Fisher",
        "laplace": "Laplace, all weights, prior set by the evidence",
        "laplace, tuned": "Laplace, all weights, tuned on 2,000 held-out images",
        "swag": "SWAG",
        "mc_dropout": "MC dropout",
        "ensemble": "ensemble of 5",
    }

    def value(result: Any) -> float:
        return result[0] if isinstance(result, list) else result

    def published(name: str, key: str) -> str:
        labels = [label for label in load(name)["headline"] if label.startswith(f"{key}: mean confidence")]
        found = re.search(r"published: ([^)]*)", labels[0]) if labels else None
        return f" ({found[1]})" if found else ""

    def cells(name: str, key: str) -> list[str]:
        if key not in (rows := figures(name)):
            return ["", ""]
        score = [fixed(value(rows[key][name]), places) for name, places in (("nll", 4), ("ece", 3))]
        other = [fixed(100 * value(rows[key][f"others, {name}"]), 1) for name in ("confidence", "predictive_entropy")]
        return [", ".join(score), ", ".join(other) + published(name, key)]

    main = table(
        ["method", "MNIST: NLL, ECE", "other images", "CIFAR-10: NLL, ECE", "other images"],
        [[name, *cells("mnist", key), *cells("cifar10", key)] for key, name in names.items()],
    )
    scaled = table(
        ["network", "held-out images", "NLL before", "NLL with temperature", "ECE before", "ECE with temperature"],
        [
            (
                name,
                held,
                *(fixed(maps[f"{name}, {held}"][key]["nll"][0], 3) for key in ("none", "temperature")),
                *(fixed(maps[f"{name}, {held}"][key]["ece"][0], 3) for key in ("none", "temperature")),
            )
            for name in ("ResNet-20", "last-layer Laplace", "HMC (published)")
            for held in ("500", "5000")
        ],
    )
    small = figures("temperatures")
    labels = [name for name in small if not name.endswith(", temperature")]
    digits = table(
        ["method", "NLL", "NLL with temperature", "ECE", "ECE with temperature"],
        [
            (name, *(fixed(small[row][key][0], 3) for key in ("nll", "ece") for row in (name, f"{name}, temperature")))
            for name in labels
        ],
    )
    evidence = table(
        ["method", "test log likelihood", "accuracy", "AUROC of MNIST by entropy"],
        [
            (key, fixed(-row["nll"][0], 3), percent(row["accuracy"][0]), fixed(row["unknown"][0], 3))
            for key, row in online.items()
        ],
    )
    return f"""## Images

MNIST: LeNet, three seeds. CIFAR-10: one given ResNet-20. "Other images": mean confidence in % (lower is better) and AUROC in % by
entropy, over Fashion-MNIST, KMNIST and notMNIST; in parentheses the published figures (Daxberger et al. 2021), with other
networks and partly other images. From {source("mnist", "cifar10")}.

{main}

The row "tuned" uses held-out labels, so compare it with a temperature fitted to held-out labels (next table), not with plain MAP. The
held-out images of CIFAR-10 are test images that are left out of the score, because the given network was trained on all training
images. With the prior set by the evidence, the Laplace approximation over all weights is underconfident on familiar images.

Temperature scaling on CIFAR-10, mean over 10 random splits of the test set into held-out and scored images. A temperature on the
plain network is as good as Laplace plus temperature, and no worse than the tuned Laplace above (which is scored on other test images).
From {source("recalibration")}.

{scaled}

The same on the bundled digits, with an ensemble and a tuned Laplace approximation beside: 600 images to train on, 300 held-out images
that temperatures and precisions are fitted to, 897 to score, mean over 10 seeds. With so few held-out images, of which about ten are
misread, a temperature helps only a method that is far from calibrated. From {source("temperatures")}.

{digits}

Fashion-MNIST, small CNN, one seed: the evidence sets the weight decay during training (`OnlineLaplace`). Rows "its mean" predict with
the network at the posterior mean. From {source("online_evidence")}.

{evidence}"""


def one_pass() -> str:
    cost, gpu, exact = figures("streamlined_cost"), figures("streamlined_cost_gpu")["ViT-Base"], figures("streamlined_accuracy")
    columns = {
        "forward, Taylor": "Taylor",
        "forward, exact moments": "exact moments",
        "adjoint": "adjoint",
        "sampled, 20 draws": "20 draws",
    }

    def ratios(rows: dict[str, Any], key: str) -> str:
        return " / ".join(number(row[key]["fastest"]) for row in rows.values() if key in row)

    suq = load("streamlined_cost")["settings"]["suq"]
    costs = [
        [f"{net}, batch {' / '.join(cost[net])}", suq[net], *(ratios(cost[net], key) for key in columns)]
        for net in ("MLP", "ViT")
    ]
    compiled = [ratios(gpu, f"{key}, both compiled") for key in list(columns)[:2]]
    costs.append([f"ViT-Base, H200, batch {' / '.join(gpu)}", suq["ViT-Base"], *compiled, ratios(gpu, "adjoint"), ""])
    ways = {"SUQ's rules": "SUQ's rules", "forward": "variances only", "rank 64": "64 directions", "adjoint": "adjoint"}
    ways["100 draws"] = "100 draws"

    def cell(value: dict[str, Any]) -> str:
        return f"{number(value['kl'], 2)} ({value['sd']:+.1f} %)".replace("-", "−") if value.get("kl") is not None else ""

    accuracy = [[name, f"{row['draws']:,}", *(cell(row["ways"].get(way, {})) for way in ways)] for name, row in exact.items()]
    vit, resnet = figures("streamlined_data_vit")["CIFAR-10, ViT"], figures("streamlined_data")["CIFAR-10, ResNet-20"]
    kinds = {
        "MAP": "MAP",
        "diagonal, streamlined": "one pass, variances only",
        "diagonal, streamlined, rank 64": "one pass, 64 directions",
        "diagonal, adjoint": "adjoint",
        "diagonal, linearised": "linearized",
        "diagonal, sampled": "weight draws",
    }

    def score(rows: dict[str, Any], key: str, prior: str) -> str:
        row = rows.get(key) or rows[f"{key}, {prior}"]
        return f"{fixed(row['nll'][0], 3)}, {fixed(row['ece'][0], 3)}"

    data = [[label, score(vit, key, "evidence"), score(resnet, key, "tuned")] for key, label in kinds.items()]
    return f"""## Prediction in one pass, without sampling

Time relative to one forward pass of the plain network. SUQ is the published method (figures measured elsewhere); "Taylor" are its rules
in our code. MLP 784-512-512-10: all weights are random. ViT (width 192, 6 blocks, 65 tokens) and ViT-Base: value projections of the
last two blocks, and the head. On the H200 both networks are compiled, except for the adjoint. From
{source("streamlined_cost", "streamlined_cost_gpu")}.

{table(["network", "SUQ", *columns.values()], costs)}

Accuracy: mean KL divergence of each output's distribution from that of weight draws (and error of the standard deviation). The column
"reference" is the number of weight draws compared with; n draws have a KL of about 1/n themselves. From
{source("streamlined_accuracy")}.

{table(["network and posterior", "reference", *ways.values()], accuracy)}

On CIFAR-10 with a diagonal Laplace posterior, one seed: NLL, ECE. The ViT uses the prior set by the evidence. For the ResNet-20 the
prior precision is tuned on 2,000 held-out images, which are test images that are not scored. From
{source("streamlined_data_vit", "streamlined_data")}.

{table(["prediction", "ViT", "ResNet-20, tuned"], data)}"""


def sampling() -> str:
    leapfrog, peers, gradient = figures("leapfrog_cost"), figures("sampling_peers"), figures("resnet_gradient")
    names = {"our kernel": "dubito, one kernel for a trajectory", "JAX, float32": "JAX (jit, scan, vmap), float32"}
    names |= {"JAX, its default (tf32)": "JAX, default precision (tf32)", "PyTorch, step after step": "PyTorch, step by step"}
    steps = [[label, *(f"{number(leapfrog[key][n]['fastest'])} µs" for n in ("1", "128"))] for key, label in names.items()]
    samplers = list(peers["boston"]["samplers"])
    rates = [
        [name, *(f"{peers[data]['samplers'][name]['a second, median']:.0f}" for data in ("boston", "yacht"))] for name in samplers
    ]

    def milliseconds(key: str) -> str:
        return f"{min(value for name, value in gradient[key].items() if name.startswith('ms')):.0f} ms"

    closest = load("closeness", "examples/posteriors/results")["rows"]
    rows = sorted((row for row in closest.items() if "agreement" in row[1]), key=lambda row: row[1]["total_variation"])
    close = [
        (name, percent(row["agreement"]), fixed(row["total_variation"], 3), fixed(row["rhat_99"], 2) if "rhat_99" in row else "")
        for name, row in rows
    ]
    large = [
        (name, percent(row["accuracy"]), fixed(row["nll"], 3), percent(row["agreement"]), fixed(row["total variation"], 3))
        for name, row in figures("cifar10_sampling").items()
        if "agreement" in row
    ]
    for key, (value, _) in load("cifar10_sampling")["headline"].items():
        if key.startswith("published"):
            agreement, _, distance = value.partition(", ")
            large.append((key.split(":")[0], "", "", f"{agreement} %", distance))
    return f"""## Sampling

One leapfrog step of HMC with the gradient over all 455 points, 13-50-1 ReLU network, H200. From {source("leapfrog_cost")}.

{table(["", "1 chain", "128 chains"], steps)}

The gradient of ResNet-20-FRN (274,042 weights) over 40,960 images, bfloat16, H200: dubito {milliseconds("density")},
JAX {milliseconds("jax")}, PyTorch in eager mode {milliseconds("eager")}. From {source("resnet_gradient")}.

Effective draws of predictions per second on one CPU core, 50-unit networks, with the same step sizes, path lengths and starts.
MCLMC has no accept step: its number of effective draws says nothing about its bias. From {source("sampling_peers")}.

{table(["sampler", "boston", "yacht"], rates)}

Agreement with a long HMC run on handwritten digits (64-24-10 network, 400 training images): share of test images with the same most
probable class, and total variation between the class probabilities. HMC is asymptotically exact; "HMC, another seed" shows the Monte
Carlo error of the comparison. R-hat is the 99th percentile over predictions: the chains of ULA, MALA and Metropolis had not
converged. The settings of SGLD and SGHMC were chosen by this figure. From {source("closeness", folder="examples/posteriors/results")}.

{table(["method", "agreement", "total variation", "R-hat"], close)}

CIFAR-10 with ResNet-20-FRN: agreement with the published predictions of HMC, after seven minutes on an H200. The rows
"published" are those of the authors, partly with other networks and more compute. From {source("cifar10_sampling")}.

{table(["method", "accuracy", "NLL", "agreement with HMC", "total variation"], large)}"""


def variational() -> str:
    peers, mnist = figures("variational_peers"), load("variational_mnist")["headline"]
    rows = [
        [name, *(number(peers[net]["ratio to plain Adam"][name]["fastest"]) for net in peers)]
        for name in peers["LeNet"]["ratio to plain Adam"]
    ]
    compressed = [[name, *(str(value) for value in values)] for name, values in mnist.items() if "lenet" in name]
    return f"""## Variational inference and compression

One step at batch 128 on two CPU cores, relative to a step of torch's fused Adam on the same network. From
{source("variational_peers")}.

{table(["method", *peers], rows)}

Compression of LeNet-5 and LeNet-300-100 on MNIST: test error (before compression), factor of fewer weights, factor of fewer bits with
rounded weights, factor of a smaller file after entropy coding, and speed. From {source("variational_mnist")}.

{table(["prior", "measured", "published"], compressed)}"""


def human_doubt() -> str:
    rows = [
        [
            name,
            *(
                fixed(row[key], 3) if key in row else ""
                for key in ("aleatoric, spearman", "epistemic, spearman", "total, spearman")
            ),
        ]
        for name, row in figures("cifar10h").items()
    ]
    return f"""## The split into aleatoric and epistemic uncertainty

Rank correlation (Spearman) of each part with the entropy of about 51 people's answers to each CIFAR-10 test image. If the split told
noise in the images from lack of data, the aleatoric part would correlate much better than the epistemic one. It does not. From
{source("cifar10h")}.

{table(["method", "aleatoric", "epistemic", "total"], rows)}"""


def everything() -> str:
    parts = ["## All result files\n\nOne entry per file, with the run that made it. The labels are those that the scripts write."]
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).glob("*.json")):
            result = json.loads(path.read_text())
            lines = [f"### {path.stem}", "", f"[`{folder}/{path.name}`](../{folder}/{path.name}); {made(result)}."]
            if rows := result.get("headline"):
                cells = [[_cell(x) for x in (what, *(v if isinstance(v, list) else (v, "")))] for what, v in rows.items()]
                lines += [
                    "",
                    "<details><summary>Figures</summary>",
                    "",
                    table(["what", "figure", "target"], cells),
                    "",
                    "</details>",
                ]
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _cell(value: Any) -> str:
    return fixed(value, 2) if isinstance(value, float) else str(value).replace("|", "\\|")


def page() -> str:
    """The text of docs/benchmarks.md."""
    sections = (training, laplace, uci, images, one_pass, sampling, variational, human_doubt, everything)
    return "\n\n".join([INTRODUCTION, *(section() for section in sections)]) + "\n"


def readme(text: str) -> str:
    """README.md with its figures."""
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{headlines()}\n{END}{rest.split(END)[1]}"


def write() -> None:
    """Write both pages."""
    PAGE.write_text(page())
    README.write_text(readme(README.read_text()))


def stale() -> list[str]:
    """The names of the pages that are out of date."""
    expected = {PAGE: page(), README: readme(README.read_text())}
    return [path.name for path, text in expected.items() if not path.exists() or path.read_text() != text]


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(f"out of date: {', '.join(stale())}; run python benchmarks/page.py" if stale() else 0)
    write()
