"""The package as a user gets it: built, installed on its own, imported, and light to import."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parent.parent
USE = """
import json, tempfile, torch, dubito
x = torch.randn(4, 3)
model = dubito.Model(torch.nn.Linear(3, 2), dubito.Categorical())
posterior = dubito.fit(model, dubito.Ensemble(dubito.MCDropout(epochs=2, at="", draws=3), 2), (x, torch.tensor([0, 1, 0, 1])))
with tempfile.TemporaryDirectory() as folder:
    dubito.save(posterior, folder + "/p.safetensors")
    p = dubito.load(folder + "/p.safetensors", model).predict(x)
print(json.dumps([dubito.__file__, dubito.__version__, list(p.mean.shape)]))
"""


def run(*arguments: str, **environment: str) -> str:
    """The standard output of this Python with these arguments."""
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env={**os.environ, **environment}, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(command: str, *arguments: str) -> None:
    """pip without an index: nothing can be downloaded."""
    run("-m", "pip", command, "--quiet", "--no-deps", *arguments, PIP_NO_INDEX="1", PIP_DISABLE_PIP_VERSION_CHECK="1")


def sources(root: Path) -> set[str]:
    """All files of the package: modules, and the HTML, CSS and JavaScript of its pages."""
    files = [path for path in (root / "dubito").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {str(path.relative_to(root)) for path in files}


def test_the_built_wheel_works_on_its_own(tmp_path):
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(PROJECT))
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    pip("install", "--target", str(installed), str(wheel))
    assert sources(installed) == sources(PROJECT / "src")
    assert {path.suffix for path in (installed / "dubito").rglob("*") if path.parent.name == "assets"} == {".html", ".css", ".js"}
    assert list(installed.glob("dubito-*.dist-info/licenses/LICENSE"))

    file, version, shape = json.loads(run("-W", "error", "-c", USE, PYTHONPATH=str(installed)))
    assert Path(file) == installed / "dubito" / "__init__.py"
    assert wheel.name.startswith(f"dubito-{version}-")
    assert shape == [4, 2]


def loaded(statement: str) -> set[str]:
    """The packages from outside the standard library that a statement loads."""
    code = f"{statement}; import sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    names = set(run("-W", "error", "-c", code, PYTHONPATH=str(PROJECT / "src")).split())
    return {name for name in names if name not in sys.stdlib_module_names and not name.startswith("_")}


def test_import_loads_torch_numpy_and_safetensors_only():
    ours = loaded("import dubito")
    # torch brings packages of its own along; what counts is what comes on top.
    theirs = loaded("import torch, numpy, safetensors.torch")
    assert ours - theirs == {"dubito"}
    assert not ours & {"rich", "tyro", "matplotlib", "sklearn", "scipy", "torchmetrics", "PIL"}
