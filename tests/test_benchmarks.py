"""The pages with figures match the result files, and every result file says what made it."""

import importlib.util
import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = sorted([*ROOT.glob("benchmarks/results/*.json"), *ROOT.glob("examples/*/results/*.json")])
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def page():
    spec = importlib.util.spec_from_file_location("page", ROOT / "benchmarks" / "page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_up_to_date(page):
    assert page.stale() == [], "run `python benchmarks/page.py`"


def test_a_changed_figure_makes_the_pages_stale(page, tmp_path, monkeypatch):
    for folder in page.FOLDERS:
        (tmp_path / folder).mkdir(parents=True)
        for path in (ROOT / folder).glob("*.json"):
            (tmp_path / folder / path.name).write_text(path.read_text())
    changed = tmp_path / "benchmarks" / "results" / "leapfrog_cost.json"
    result = json.loads(changed.read_text())
    result["figures"]["our kernel"]["128"]["fastest"] += 1.0
    changed.write_text(json.dumps(result))
    monkeypatch.setattr(page, "ROOT", tmp_path)
    assert page.stale() == ["benchmarks.md", "README.md"]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_result_files_name_their_commit(path):
    result = json.loads(path.read_text())
    assert re.fullmatch(r"(recorded in )?[0-9a-f]{7,40}(-dirty)?|unknown", result["commit"])
    assert {"date", "versions"} <= set(result)


@pytest.mark.parametrize("given", ["", "0123456789-dirty"])
def test_a_benchmark_records_its_commit(given, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("BENCH_RESULTS", str(tmp_path))
    monkeypatch.setenv("BENCH_COMMIT", given)
    measure = runpy.run_path(str(ROOT / "benchmarks" / "measure.py"))
    measure["write"]("trial", settings={}, figures={"a": 1.0}, headline={"a": [1.0, ""]}, seconds=1.0)
    recorded = json.loads((tmp_path / "trial.json").read_text())["commit"]
    assert recorded == given if given else re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?|unknown", recorded)


def test_readme_has_no_figures_outside_the_generated_table(page):
    """Percentages, decimals and factors belong to the table, which is written from the result files."""
    text = page.README.read_text()
    head, rest = text.split(page.BEGIN)
    prose = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", head + rest.split(page.END)[1], flags=re.DOTALL)
    prose = re.sub(r"Python 3\.\d+|torch 2\.\d+|Apache-2\.0", "", prose)
    assert re.findall(r"\d*\.\d+|\d+ %|\d+x\b", prose) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_result_files_that_pages_name_exist(page):
    known = {path.name for path in RESULTS}
    assert [name for name in re.findall(r"results/(\w+\.json)", page.read_text()) if name not in known] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_that_quote_a_benchmark_name_its_result_file(page):
    """A page that says which script made its figures links the file that holds them."""
    text = page.read_text()
    scripts = set(re.findall(r"benchmarks/(\w+)\.py", text)) - {"page", "networks", "measure"}
    quoted = {name for name in scripts if f"measure it by `benchmarks/{name}.py" not in text}
    assert sorted(name for name in quoted if not re.search(rf"results/{name}\w*\.json", text)) == []
