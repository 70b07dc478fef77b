"""The demo: every method on handwritten digits, two classes of which are left out of the training, and on a curve with a gap."""

from __future__ import annotations

import math
import os
import platform
import time
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from dubito.cli.demo import curve, digits
from dubito.cli.process import one_thread, print_warnings
from dubito.inference.presets import preset, suiting
from dubito.inference.registry import METHODS
from dubito.model.likelihoods import Categorical, HeteroscedasticGaussian
from dubito.report import Report, check_writable
from dubito.report.content import join_words


@one_thread()
def demo(out: str | Path = "reports/demo.html", *, seed: int = 0, effort: float = 1.0) -> Report:
    """Fit every method to handwritten digits and to a curve; print a table and write a web page.

    Args:
        out: the HTML file to write; the numbers go into a JSON file beside it.
        seed: seed of everything random; the same seed gives the same result.
        effort: factor of the epochs; small values are fast and give poor fits.
    """
    from rich.console import Console
    from rich.text import Text

    if not (effort > 0 and math.isfinite(effort)):
        raise ValueError(f"effort must be positive and finite; got {effort}")
    path, begin, console = check_writable(out), time.monotonic(), Console()

    def say(words: str) -> None:
        """Print a line of progress."""
        console.print(Text(words, style="dim"))

    with print_warnings(say):
        problem, outcome = digits.run(seed=seed, effort=effort, say=say)
        curves = curve.run(seed=seed, effort=effort, say=say)
    report = Report(
        "What does the network not know?",
        (*digits.sections(problem, outcome), curve.section(curves, seed=seed)),
        summary=(
            f"{join_words([result.key.label for result in outcome.results])}, with the same networks on the same data: handwritten "
            "digits with two classes left out of the training, and a curve with a gap in its data. A good method is accurate, "
            "calibrated, and uncertain about what it has not seen."
        ),
        facts=_facts(seed, effort, time.monotonic() - begin),
    )
    report.print(console)
    report.write(path)
    console.print(Text(f"Report: {path} (numbers: {path.with_suffix('.json')})"))
    return report


def _facts(seed: int, effort: float, seconds: float) -> dict[str, str]:
    packages = ("dubito", "torch", "numpy", "scikit-learn", "matplotlib")
    shown = {*suiting(METHODS, Categorical), *suiting(METHODS, HeteroscedasticGaussian)}
    others = [preset(name) for name in METHODS if name not in shown]
    left_out, long = ([method.label for method in others if method.shown == kind] for kind in (True, False))
    reasons = [f"{join_words(left_out)}: for other likelihoods than those of these problems"] if left_out else []
    reasons += [f"{join_words(long)}: they take longer than a demo, or need unlabelled data"] if long else []
    return {
        "Made": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "Duration": f"{seconds:.0f} s for {len(shown)} methods on both problems",
        **({"Not here": "; ".join(reasons)} if reasons else {}),
        "Seed": str(seed) + ("" if effort == 1 else f", effort {effort:g}"),
        "Versions": ", ".join(f"{name} {version(name)}" for name in packages) + f", Python {platform.python_version()}",
        "Machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, one thread used",
        "Data": "Optical Recognition of Handwritten Digits (Alpaydin and Kaynak, 1998), CC BY 4.0, from scikit-learn",
    }
