"""What the cells gave is kept, and the page written."""

from __future__ import annotations

from zoo import page


def pytest_terminal_summary(terminalreporter) -> None:
    """After a run in one process or in several."""
    reports = [report for group in terminalreporter.stats.values() for report in group if hasattr(report, "user_properties")]
    found = {}
    for report in reports:
        for name, value in report.user_properties:
            if name == "zoo":
                found[value[0], value[1]] = value[2]
    if found:
        page.add(found)
        terminalreporter.write_line(f"wrote {len(found)} cells to {page.PAGE.name}")
