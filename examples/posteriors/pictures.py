"""The pictures and tables of docs/what-posteriors-are-like.md, from the figures in `results/`.

    python examples/posteriors/pictures.py

A table stands on the page below a comment with its name, and is replaced there.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from dubito.report.canvas import BLUE, CYCLE, GREEN, INK, SOFT, VERMILION, grid, render

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
PAGE, IMAGES = DOCS / "what-posteriors-are-like.md", DOCS / "images"


def results(name: str) -> dict[str, Any]:
    return json.loads((HERE / "results" / f"{name}.json").read_text())


def win(figure: Any) -> None:
    """Three scores of four predictions."""
    rows = {label: {**row, "error": 1 - row["accuracy"]} for label, row in results("do_bnns_win")["rows"].items()}
    labels = list(rows)[::-1]
    for axes, key in zip(figure.subplots(1, 3, sharey=True), ("error", "nll", "ece"), strict=True):
        axes.barh(labels, [rows[label][key] for label in labels], color=[BLUE if "HMC" in label else SOFT for label in labels])
        for label in labels:
            axes.annotate(f"{rows[label][key]:.3f}", (rows[label][key], label), (4, 0), textcoords="offset points", va="center")
        axes.set_title({"error": "share of errors", "nll": "NLL", "ece": "ECE"}[key])
        axes.set_xlim(0, 1.25 * max(rows[label][key] for label in labels))
        axes.tick_params(left=False)


def temperature(figure: Any) -> None:
    """Scores against T, with and without augmentation."""
    rows = results("temperature")["rows"]
    left, right = figure.subplots(1, 2)
    for augmented, colour in ((False, BLUE), (True, VERMILION)):
        chosen = {label: row for label, row in rows.items() if label.endswith("augmented") == augmented}
        heat = [float(label.split()[2].rstrip(",")) for label in chosen]
        name = "with augmentation" if augmented else "without"
        left.plot(heat, [row["nll"] for row in chosen.values()], "o-", color=colour, label=name)
        right.plot(heat, [1 - row["accuracy"] for row in chosen.values()], "o-", color=colour, label=name)
    for axes, title, ticks in ((left, "NLL", (0.2, 0.3, 0.5, 1, 2)), (right, "share of errors", (0.05, 0.1, 0.2, 0.5))):
        axes.axvline(1.0, color=SOFT, linewidth=0.8, linestyle=":")
        axes.set(xscale="log", yscale="log", xlabel="temperature T")
        axes.minorticks_off()
        axes.set_xticks(heat, [f"{value:g}" for value in heat])
        axes.set_yticks(ticks, [f"{value:g}" for value in ticks])
        axes.set_title(title)
        grid(axes, "y")
    left.legend()


def corruption(figure: Any) -> None:
    """The size of the weights along the directions of the data, and what noise does."""
    found = results("corruption")
    left, right = figure.subplots(1, 2)
    colours = dict(zip(found["rows"], (BLUE, GREEN, SOFT, VERMILION, CYCLE[3]), strict=True))
    for label, sizes in found["size_of_the_weights"].items():
        if label != "ensemble of 10":
            left.plot(sizes, color=colours[label], label=label)
    left.set(xlabel="direction, from the quietest to the loudest", ylim=(0, None))
    left.set_title("weights of the first layer, rms along it")
    kinds = list(next(iter(found["nll"].values())))[::-1]
    for place, (label, row) in enumerate(found["nll"].items()):
        heights = [i + 0.15 * (2 - place) for i in range(len(kinds))]  # the first on top
        right.plot([row[kind] for kind in kinds], heights, "o", color=colours[label], label=label, markersize=4)
    right.set_yticks(range(len(kinds)), kinds)
    right.set_title("NLL")
    right.tick_params(left=False)
    grid(left, "y")
    grid(right)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=3)


def prior_scale(figure: Any) -> None:
    rows = results("prior_scale")["rows"]
    scale = [float(label.split()[1]) for label in rows]
    for axes, key, title in zip(figure.subplots(1, 2), ("nll", "accuracy"), ("NLL", "accuracy"), strict=True):
        axes.plot(scale, [row[key] for row in rows.values()], "o-", color=BLUE)
        axes.set(xscale="log", xlabel="scale of the prior")
        axes.set_xticks(scale, [f"{value:g}" for value in scale])
        axes.minorticks_off()
        axes.set_title(title)
        grid(axes, "y")


def closeness(figure: Any) -> None:
    """All methods, the closest on top."""
    rows = {label: row for label, row in results("closeness")["rows"].items() if "agreement" in row}
    order = sorted(rows, key=lambda label: -rows[label]["total_variation"])
    for axes, key in zip(figure.subplots(1, 2, sharey=True), ("total_variation", "agreement"), strict=True):
        values = [rows[label][key] for label in order]
        axes.hlines(order, min(0 if key == "total_variation" else min(values) - 0.01, *values), values, color=SOFT, linewidth=0.8)
        axes.plot(values, order, "o", color=BLUE)
        axes.set_title({"total_variation": "total variation from HMC (lower is closer)", "agreement": "agreement with HMC"}[key])
        axes.tick_params(left=False)
        grid(axes, "x")


def symmetries(figure: Any) -> None:
    """Percentiles of R-hat, of weights and of predictions."""
    axes = figure.subplots()
    for (label, values), colour in zip(results("symmetries")["rhat_percentiles"].items(), (VERMILION, BLUE), strict=True):
        axes.plot(values, range(len(values)), color=colour, label=f"of {label}")
    axes.axvline(1.0, color=SOFT, linewidth=0.8, linestyle=":")
    axes.set(xlabel="R-hat", ylabel="% below", ylim=(0, 101))
    axes.legend(loc="lower right")
    grid(axes)


def sparse_mode(figure: Any) -> None:
    """The mode of every weight, and its posterior."""
    found = results("sparse_mode")
    axes = figure.subplots()
    places = range(len(found["mode"]))
    axes.axhline(0, color=SOFT, linewidth=0.8)
    axes.errorbar(
        places, found["mean"], found["std"], fmt="o", color=BLUE, capsize=3, linewidth=1.2, label="posterior, mean ± sd"
    )
    axes.plot(places, found["mode"], "x", color=VERMILION, markersize=8, markeredgewidth=2, label="mode")
    axes.axvline(9.5, color=SOFT, linewidth=0.8, linestyle=":")
    axes.text(9.7, axes.get_ylim()[1], "inputs of pure noise", va="top", color=INK)
    axes.set(xlabel="weight", xticks=list(places)[::2])
    axes.legend()


PICTURES: dict[Callable[[Any], None], tuple[float, float]] = {
    win: (9.0, 2.0),
    temperature: (9.0, 3.0),
    corruption: (9.0, 4.2),
    prior_scale: (9.0, 2.8),
    closeness: (9.0, 5.0),
    symmetries: (6.0, 3.0),
    sparse_mode: (9.0, 2.8),
}


def roomy(draw: Callable[[Any], None]) -> Callable[[Any], None]:
    def drawn(figure: Any) -> None:
        figure.get_layout_engine().set(h_pad=0.08, w_pad=0.08)
        draw(figure)

    return drawn


def table(name: str, columns: dict[str, str], part: str = "rows") -> str:
    """As Markdown; `columns` maps a key of the rows to its heading, with a format after a colon."""
    rows = {label: row for label, row in results(name)[part].items() if not columns.keys().isdisjoint(row)}
    if name == "closeness":  # the closest first
        rows = dict(sorted(rows.items(), key=lambda item: item[1].get("total_variation", 0.0)))
    lines = [["", *(text.split(":")[0] for text in columns.values())], ["---"] * (1 + len(columns))]
    for label, row in rows.items():
        cells = [f"{row[key]:{text.split(':')[1]}}" if key in row else "" for key, text in columns.items()]
        lines.append([label, *(cell.replace("%", " %").replace("-", "−") for cell in cells)])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def tables() -> dict[str, str]:
    scores = {"accuracy": "accuracy:.1%", "nll": "NLL:.3f", "ece": "ECE:.3f", "confidence": "confidence:.1%"}
    trust = {"rhat_99": "R-hat:.3f"}
    apart = {"accuracy - HMC's": "accuracy − HMC's:+.1%", "+- accuracy - HMC's": "±:.1%"}
    kinds = list(next(iter(results("corruption")["nll"].values())))
    weights = {"quiet weights": "weights, quiet:.2f", "loud weights": "loud:.2f"}
    rhats = {"rhat median": "R-hat, median:.3f", "rhat_99": "99 %:.3f", "rhat max": "largest:.3f"}
    moved = {"distance in weights": "distance in weights:.1f", "change of f": "largest change of an output:.0e"}
    close = {"agreement": "agreement:.1%", "total_variation": "total variation:.3f"}
    return {
        "win": table("do_bnns_win", {**scores, **apart, "nll - HMC's": "NLL − HMC's:+.3f", "+- nll - HMC's": "±:.3f", **trust}),
        "temperature": table(
            "temperature", {**scores, "nll - that of T = 1": "NLL − that of T = 1:+.3f", "+-": "±:.3f", **trust}
        ),
        "corruption_nll": table("corruption", {kind: f"{kind}:.2f" for kind in kinds}, "nll"),
        "corruption": table("corruption", {**{kind: f"{kind}:.1%" for kind in kinds}, **weights, **trust}),
        "prior_scale": table("prior_scale", {**scores, **trust}),
        "closeness": table("closeness", {**close, **scores, **trust, "seconds": "seconds:.0f"}),
        "symmetries": table("symmetries", {**rhats, "ess median": "effective draws, median:.0f"}),
        "moved": table("symmetries", {**moved, "log prior": "change of the log prior:.0f"}),
        "norms": table("symmetries", {"in": "in:.1f", "out": "out:.1f", "in - out": "in − out:.1f", "+-": "±:.1f"}),
        "sparse_mode": table(
            "sparse_mode",
            {"exactly zero": "exactly zero:.0%", "|w| below .001": "below .001:.1%", "rhat max": "largest R-hat:.3f"},
        ),
    }


def main() -> None:
    for draw, size in PICTURES.items():
        drawn = Image.open(io.BytesIO(render(roomy(draw), size, kind="png", dpi=110)))
        drawn.convert("RGB").quantize(64).save(IMAGES / f"posteriors_{draw.__name__}.png", optimize=True)
    text = PAGE.read_text()
    for name, content in tables().items():
        text, count = re.subn(rf"(<!-- {name} -->\n)(?:\|.*\n)*", lambda found, new=content: found[1] + new, text)
        assert count == 1, f"{PAGE.name} has no place for the table {name}"
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
