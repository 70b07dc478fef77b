"""docs/zoo.md, from the results of the cells: `python tests/zoo/page.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).parent / "results.json"
PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
PACKAGES = (
    *("torch", "transformers", "peft", "timm", "segmentation-models-pytorch", "x-transformers", "torch_geometric", "lightning"),
    *("skorch", "gpytorch", "onnxruntime"),
)
OTHERS = ("linearized", "sampled", "streamlined", "adjoint", "as_module", "ONNX")
HEAD = """# The zoo

Networks of other people's libraries in tiny configurations, and odd modules in plain torch, each by every method and every way to
predict. `make zoo` builds the environment, runs all cells and writes this page.

- **methods**: each is fitted, predicts, is judged, saved and loaded. The user's network must stay as it was, bit for bit, and the
  network at the center of the posterior must give what the network itself gives with these weights. They are {methods}.
- **Laplace**: the structures of the covariance ({structures}). Variances of the linearized outputs are compared with J C Jᵀ, with
  gradients by autograd alone, to 1e-6 in float64; for classes the diagonal curvature as well.
- **linearized**, **sampled**: the same for independent weights by hand. Draws are compared with the network run with these weights.
- **streamlined**, **adjoint**: the mean variance is compared with that of 400 draws, up to a factor of 2 and of 1.3.
- **as_module**, **ONNX**: the exported module says what `predict` says.

A number says how many passed; the notes below the table say why others were refused. "–": not tried, too large or of no use.

Versions: {versions}.

"""


def read() -> dict[str, dict[str, str]]:
    """What each cell gave, by network and column."""
    return json.loads(RESULTS.read_text())["cells"] if RESULTS.exists() else {}


def add(found: Mapping[tuple[str, str], str]) -> None:
    """Keep what some cells gave, and write the page."""
    cells = read()
    for (name, column), outcome in found.items():
        cells.setdefault(name, {})[column] = outcome
    RESULTS.write_text(json.dumps({"versions": _versions(), "cells": _sorted(cells)}, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(text(read()))


def _sorted(cells: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Networks and columns in the order in which the zoo has them; those that it no longer has are left out."""
    from zoo.cells import COLUMNS
    from zoo.networks import NETWORKS

    return {
        name: {column: cells[name][column] for column in COLUMNS if column in cells[name]} for name in NETWORKS if name in cells
    }


def _versions() -> dict[str, str]:
    installed = {dist.metadata["Name"].lower().replace("_", "-"): dist.version for dist in metadata.distributions()}
    return {name: version for name in PACKAGES if (version := installed.get(name.replace("_", "-")))}


def text(cells: dict[str, dict[str, str]]) -> str:
    """The page."""
    versions = json.loads(RESULTS.read_text())["versions"] if RESULTS.exists() else {}
    methods = [column for column in next(iter(cells.values()), {}) if not column.startswith("Laplace, ") and column not in OTHERS]
    structures = [column for column in next(iter(cells.values()), {}) if column.startswith("Laplace, ")]
    groups = {"methods": methods, "Laplace": structures, **{name: [name] for name in OTHERS}}
    notes: dict[str, int] = {}
    lines = ["| network | " + " | ".join(groups) + " |", "|---|" + "---|" * len(groups)]
    for name, outcomes in cells.items():
        entries = [
            _entry([(column, outcomes[column]) for column in group if column in outcomes], notes) for group in groups.values()
        ]
        lines.append(f"| {name} | " + " | ".join(entries) + " |")
    listed = [f"{number}. {note}" for note, number in notes.items()]
    head = HEAD.format(
        methods=", ".join(f"`{name}`" for name in methods),
        structures=", ".join(name.removeprefix("Laplace, ") for name in structures),
        versions=", ".join(f"{name} {version}" for name, version in versions.items()),
    )
    return head + "\n".join(lines) + "\n\n## Notes\n\n" + "\n".join(listed) + "\n"


def _entry(outcomes: list[tuple[str, str]], notes: dict[str, int]) -> str:
    """ok, or how many were, and the numbers of the notes on the others."""
    tried = [(column, outcome) for column, outcome in outcomes if not outcome.startswith("not tried")]
    refused = [(column, outcome) for column, outcome in tried if outcome != "ok"]
    if not tried:
        return "–"
    if not refused:
        return "ok" if len(outcomes) == 1 else f"{len(tried)}"
    several = len(outcomes) > 1
    numbers = sorted(
        {notes.setdefault((f"{column}: " if several else "") + outcome, len(notes) + 1) for column, outcome in refused}
    )
    count = (
        f"{len(tried) - len(refused)} of {len(tried)}" if several else "refused" if "raised" not in refused[0][1] else "raised"
    )
    return f"{count} ({', '.join(map(str, numbers))})"


if __name__ == "__main__":
    PAGE.write_text(text(read()))
