"""Import paths: rooms, short names, paths of version 0.1, and names that are loaded when they are first used."""

import ast
import importlib
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import dubito
from dubito import _moved

ROOMS = [
    "tensors",
    "network",
    "model",
    "curvature",
    "posteriors",
    "inference",
    "evaluation",
    "apps",
    "report",
    "web",
    "cli",
    "testing",
]


def test_the_root_holds_the_rooms_and_nothing_else():
    root = Path(dubito.__file__).parent
    folders = {path.parent.name for path in root.glob("*/__init__.py")}
    assert folders <= set(ROOMS)
    assert {path.stem for path in root.glob("*.py")} == {"__init__", "__main__", "_moved"}
    assert {path.stem for path in root.glob("*.pyi")} == set(_moved.SHORT), "type checkers see the short names"


@pytest.mark.parametrize("name", _moved.SHORT)
def test_a_short_name_is_the_module_itself(name):
    assert importlib.import_module(f"dubito.{name}") is importlib.import_module(f"dubito.{_moved.SHORT[name]}")
    assert getattr(dubito, name) is sys.modules[f"dubito.{name}"]


def test_a_part_of_a_short_name_is_not_loaded_twice():
    assert importlib.import_module("dubito.priors.normal").Normal is dubito.priors.Normal
    assert dubito.priors.__spec__.name == "dubito.model.priors"


@pytest.mark.parametrize("name", _moved.MOVED)
def test_a_path_of_version_0_1_warns_and_works(name, monkeypatch):
    monkeypatch.delitem(sys.modules, f"dubito.{name}", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a parent that has moved warns too
        importlib.import_module(f"dubito.{name}".rpartition(".")[0])
    if name.split(".")[0] in _moved.SHORT:
        old = importlib.import_module(f"dubito.{name}")
    else:
        with pytest.warns(DeprecationWarning, match=f"dubito.{_moved.MOVED[name]}"):
            old = importlib.import_module(f"dubito.{name}")
    assert old is importlib.import_module(f"dubito.{_moved.MOVED[name]}")


def test_a_module_does_not_hide_the_function_of_its_name():
    sys.modules.pop("dubito.judge", None)
    with pytest.warns(DeprecationWarning, match="evaluation.judge"):
        importlib.import_module("dubito.judge")
    assert callable(dubito.judge)
    importlib.import_module("dubito.priors.matching")
    assert callable(dubito.priors.matching)


@pytest.mark.parametrize(
    "path", ["dubito.compare.judging.people", "dubito.integrators.refreshed", "dubito.compare.problem.problem"]
)
def test_names_that_docs_and_benchmarks_of_version_0_1_import_still_work(path):
    module, name = path.rsplit(".", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("model.priors", "concerned", "prior_params"),
        ("model.likelihoods", "own", "likelihood_params"),
        ("tensors.randomness", "forked", "fork_rng"),
        ("tensors.store", "locked", "lock_folder"),
    ],
)
def test_a_helper_of_version_0_1_warns_and_works(module, old, new):
    module = importlib.import_module(f"dubito.{module}")
    with pytest.warns(DeprecationWarning, match=new):
        assert getattr(module, old) is getattr(module, new)


def test_scripts_import_names_that_exist():
    root = Path(__file__).parents[1]
    scripts = [path for folder in ("benchmarks", "examples", "docs/images") for path in (root / folder).rglob("*.py")]
    nodes = [node for path in scripts for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    wanted = {(node.module, alias.name) for node in nodes if (node.module or "").startswith("dubito.") for alias in node.names}
    assert len(wanted) > 50
    missing = [pair for pair in sorted(wanted) if not _exists(*pair)]
    assert not missing


def _exists(module, name):
    try:
        return hasattr(importlib.import_module(module), name) or bool(importlib.import_module(f"{module}.{name}"))
    except ModuleNotFoundError:
        return False


def test_what_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("dubito.nothing")
    with pytest.raises(AttributeError, match="nothing"):
        _ = dubito.nothing


def test_type_checkers_see_what_is_loaded_later():
    parsed = ast.parse(Path(dubito.__file__).read_text())
    block = next(node for node in parsed.body if isinstance(node, ast.If))
    seen = {alias.asname for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == set(dubito.__all__)
    assert set(dubito.__all__) <= set(dir(dubito))
    assert all(getattr(dubito, name) is not None for name in dubito.__all__)


def test_import_dubito_loads_no_room():
    code = "import sys, dubito; print([m for m in sys.modules if m.startswith('dubito.') and m != 'dubito._moved'])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
