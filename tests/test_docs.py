"""Every Python example in the README and the docs runs, page by page, as a reader would run it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dubito._moved import JOINED, MOVED
from dubito.inference.registry import METHODS

ROOT = Path(__file__).parents[1]
PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if "```python" in page.read_text()]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_examples_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "example"}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(block, str(page), "exec", dont_inherit=True), namespace)


def test_links_between_pages_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_readme_has_a_row_for_every_method():
    rows = re.findall(r"^\| \[`(\w+)`\]\(docs/methods/(\w+)\.md\)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted((method.__name__, name) for name, method in METHODS.items())
    assert f"**{len(METHODS)} methods" in (ROOT / "README.md").read_text()


def test_changelog_lists_every_moved_path():
    listed = re.findall(r"`([\w.]+)` →\s+`([\w.]+)`", (ROOT / "CHANGELOG.md").read_text())
    moved = {(old, new) for old, new in MOVED.items() if new not in JOINED}  # those that were joined are told of together
    assert moved <= set(listed)
