"""What the experiments share: results with the versions that made them, and pictures of them."""

from __future__ import annotations

import io
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

import dubito
from dubito.report.canvas import render

HERE = Path(__file__).parent
IMAGES = HERE.parents[1] / "docs" / "images"


def commit() -> str:
    """The commit of the code that runs, with `-dirty` where tracked files were changed, or "unknown" outside a git repository."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def save(name: str, settings: dict[str, Any], figures: dict[str, Any]) -> None:
    """Write `results/<name>.json`; called after every part, so that a run that is stopped leaves what it has."""
    versions = {"dubito": dubito.__version__, "torch": torch.__version__, "python": platform.python_version()}
    command = " ".join(["python", f"examples/theory/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    content = {
        "date": date.today().isoformat(),
        "command": command,
        "commit": commit(),
        "versions": versions,
        "settings": settings,
        "figures": figures,
    }
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


def load(name: str) -> dict[str, Any]:
    return json.loads((HERE / "results" / f"{name}.json").read_text())["figures"]


def draw(name: str, panels: Callable[[Any], None], size: tuple[float, float]) -> None:
    """Write `docs/images/theory_<name>.png`."""
    from PIL import Image

    image = Image.open(io.BytesIO(render(panels, size, kind="png", dpi=144))).convert("RGB")
    image.quantize(128).save(IMAGES / f"theory_{name}.png", optimize=True)
    print(f"wrote theory_{name}.png")
