"""The metrics of a fitted model on a table, printed on the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from dubito.evaluation.judge.judgement import MEANINGS, rows, score_table


def show(values: Mapping[str, float], errors: Mapping[str, float], title: str, *, departure: str = "") -> None:
    """Print metrics with the standard errors of those that are means, and how to read them.

    `departure` is the label of the posterior, see `Posterior.label`; if it has one, a line below the table says so.
    """
    Console().print(score_table(title, rows(values, errors, MEANINGS)))
    if departure:
        print(f"{departure.capitalize()}: this is not the posterior of Bayes' rule.")
