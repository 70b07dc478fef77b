"""The metrics of a fitted model on a table, printed on the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from dubito.evaluation.judge.judgement import MEANINGS, rows, score_table


def show(values: Mapping[str, float], errors: Mapping[str, float], title: str) -> None:
    """Print metrics with the standard errors of those that are means, and how to read them."""
    Console().print(score_table(title, rows(values, errors, MEANINGS)))
