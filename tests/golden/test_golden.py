"""What version 0.1.0 wrote to disk still loads, resumes and predicts the same.

The files were made by `make.py` before the package was rearranged. A test that fails here means that users lose what they have on
disk: mend the code that reads, not the file. The numbers are compared up to the rounding of another machine or version of torch.
"""

from __future__ import annotations

import csv
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

import dubito
from dubito import Categorical, Model, recalibrate
from dubito.apps import bandits, compression
from dubito.apps.failure import Confidence
from dubito.evaluation import problems
from dubito.inference import presets
from dubito.labelling import Session, task
from dubito.methods import Laplace
from golden import applications as apps
from golden import cases

HERE = Path(__file__).parent
EXPECTED: dict[str, Any] = json.loads((HERE / "expected.json").read_text())
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def few_nodes(monkeypatch) -> None:
    """The class probabilities of Gaussian logits by the 128 nodes of version 0.1; today their number follows the spread."""
    monkeypatch.setattr("dubito.posteriors.predictive.classes.WIDEST", 0)


def stem(name: str) -> str:
    """A name as the file is called."""
    return name.replace(", ", "-").replace("/", "-").replace(" ", "_")


def same(found: Any, expected: Any, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Equal up to rounding, name by name."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for name, values in expected.items():
            same(found[name], values, rtol, atol)
    else:
        assert found == pytest.approx(expected, rel=rtol, abs=atol, nan_ok=True)


def loaded(name: str) -> Any:
    """A posterior of the golden files."""
    plain = HERE / "posteriors" / stem(name)
    return dubito.load(plain if plain.is_dir() else f"{plain}.safetensors", cases.POSTERIORS[name].model())


@pytest.mark.parametrize("name", EXPECTED["posteriors"])
def test_posteriors_load_and_predict_the_same(name):
    case = cases.POSTERIORS[name]
    same(cases.numbers(loaded(name).predict(case.x), case.y), EXPECTED["posteriors"][name])


@pytest.mark.parametrize("name", [name for name in EXPECTED["posteriors"] if name.startswith("laplace/")])
def test_the_evidence_of_a_loaded_posterior_can_be_computed(name):
    posterior = loaded(name)
    assert torch.isfinite(posterior.log_evidence()).all()
    assert torch.isfinite(posterior.with_prior(3.0).predict(cases.FRESH).mean).all()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """The folders of all archives."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for path in sorted(HERE.glob("checkpoints-*.tar.xz")):
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("name", EXPECTED["checkpoints"])
def test_runs_resume_to_the_same_result(name, checkpoints):
    case, steps = cases.CHECKPOINTS[name], []
    resumed = case.run(checkpoint=checkpoints / stem(name), resume=True, callbacks=[lambda event: steps.append(event.step)])
    assert steps[0] == case.after + 1, "it goes on, and does not begin again"
    same(cases.numbers(resumed.predict(case.fresh)), EXPECTED["checkpoints"][name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", EXPECTED["recalibration"])
def test_recalibration_maps_load(name):
    _, posterior = apps.MAPS[name]
    fitted = recalibrate.load(HERE / "recalibration" / f"{stem(name)}.safetensors")
    same(apps.applied(fitted, loaded(posterior).predict(cases.UNLABELED)), EXPECTED["recalibration"][name])


@pytest.mark.parametrize("name", EXPECTED["bandits"])
def test_bandit_runs_go_on(name, tmp_path):
    path = Path(shutil.copy(HERE / "bandits" / f"{stem(name)}.safetensors", tmp_path))
    agent, acts = apps.AGENTS[name](), []
    act = agent.act
    agent.act = lambda context: acts.append(0) or act(context)
    run = bandits.simulate(apps.BANDIT, agent, file=path, progress=False)
    assert run.actions.tolist() == EXPECTED["bandits"][name]
    assert len(acts) == 7


@pytest.mark.parametrize("name", EXPECTED["exploration"])
def test_q_learning_goes_on(name, tmp_path):
    expected, agent = EXPECTED["exploration"][name], apps.learner(name)
    agent.load(shutil.copy(HERE / "exploration" / f"{stem(name)}.safetensors", tmp_path))
    assert agent.total == expected["total"]
    agent.learn(apps.maze(), steps=50)
    assert agent.history.lengths == expected["lengths"]
    same(agent.history.returns, expected["returns"])
    same(agent.posterior.predict(torch.eye(5)).mean.double().flatten().tolist(), expected["values"], rtol=1e-3, atol=1e-4)


def test_a_search_goes_on():
    search, expected = apps.search(), EXPECTED["others"]["search"]
    search.load(HERE / "others" / "search.safetensors")
    same(search.x.flatten().tolist(), expected["x"])
    same(search.y.tolist(), expected["y"])
    same(search.ask(2).flatten().tolist(), expected["next"], rtol=1e-3, atol=1e-3)


def test_active_learning_goes_on(tmp_path):
    expected = EXPECTED["others"]["active"]
    shutil.copytree(HERE / "others" / "active", tmp_path, dirs_exist_ok=True)
    learning = apps.active(tmp_path)
    assert learning.labelled.tolist() == expected["labelled"]
    assert learning.pending.tolist() == expected["pending"]
    assert learning.skipped.tolist() == expected["skipped"]
    same(cases.numbers(learning.posterior.predict(cases.FRESH)), expected["predicted"], rtol=1e-3, atol=1e-4)
    assert [[one.labels, *one.asked] for one in learning.history] == expected["history"]
    learning.tell(learning.pending, cases.CLASSES[learning.pending])  # it can be written, too


def test_a_learned_confidence_loads():
    confidence = Confidence.load(HERE / "others" / "confidence.safetensors", Model(cases.dropping(3), Categorical()))
    same(confidence(cases.FRESH).double().tolist(), EXPECTED["others"]["confidence"])


@pytest.mark.parametrize("name", ["cut", "compressed"])
def test_compressed_networks_load(name):
    network = compression.load(HERE / "others" / f"{name}.dubito", apps.wide())
    with torch.no_grad():
        same(network(apps.EDGES).flatten().tolist(), EXPECTED["others"]["compressed"][name])


def test_a_labelling_session_goes_on(tmp_path):
    expected = EXPECTED["labelling"]
    shutil.copytree(HERE / "others" / "labels", tmp_path, dirs_exist_ok=True)
    session = Session(task(str(HERE / "tables" / "pictures.npz"), classes=("bright", "dark")), tmp_path, batch=4, draws=4)
    assert [[index, label] for index, label in session.journal.standing.items()] == expected["standing"]
    assert sorted(session.learning.pending.tolist()) == expected["queue"]
    assert [one.labels for one in session.learning.history] == expected["rounds"]
    session.answer(session.queue[0], 1)
    session.close()
    labels = [[index, label] for index, label in session.journal.standing.items() if label is not None]
    with (tmp_path / "labels.csv").open(newline="") as file:
        assert [row["class"] for row in csv.DictReader(file)] == [("bright", "dark")[label] for _, label in labels]


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    """A copy of the tables, as the current folder."""
    shutil.copytree(HERE / "tables", tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def predicted(name: str, *more: str) -> list[list[str]]:
    """The lines that `dubito predict` writes."""
    apps.command("predict", "fitted", apps.TABLES[name], "--out", "predicted.csv", *more)
    with open("predicted.csv", newline="") as file:
        return list(csv.reader(file))


def same_table(found: list[list[str]], expected: list[list[str]], tolerance: float) -> None:
    """The same header and, line by line, the same numbers up to rounding."""
    assert found[0] == expected[0]
    assert len(found) == len(expected)
    numeric = [name != "class" for name in expected[0]]
    for line, other in zip(found[1:], expected[1:], strict=True):
        values, others = ([float(cell) for cell, number in zip(row, numeric, strict=True) if number] for row in (line, other))
        assert values == pytest.approx(others, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("name", apps.FITS)
def test_fitted_folders_predict_the_same(name, workplace, capsys):
    shutil.copytree(HERE / "fitted" / stem(name), "fitted")
    own = ["--network", "own:build"] if name == "own network" else []
    same_table(predicted(name, *own), EXPECTED["fitted"][name], 1e-4)
    apps.command("evaluate", "fitted", apps.TABLES[name], *own)
    assert "nll" in capsys.readouterr().out


def test_a_fitted_folder_of_a_sampler_can_be_diagnosed(workplace, capsys):
    shutil.copytree(HERE / "fitted" / "hmc", "fitted")
    apps.command("diagnose", "fitted", "classes.csv", "--out", "report.html")
    assert Path("report.html").exists()


@pytest.mark.parametrize("name", apps.INTERRUPTED)
def test_interrupted_fits_of_the_command_line_resume(name, workplace):
    fit, _ = apps.INTERRUPTED[name]
    shutil.copytree(HERE / "interrupted" / stem(name), "fitted")
    defaults = ["--learning-rate", "0.003"] if fit != "hmc" else []  # of version 0.1, where this run began
    apps.command("fit", *apps.FITS[fit], *defaults, "--out", "fitted", "--resume")
    same_table(predicted(fit), EXPECTED["fitted"][f"interrupted/{name}"], 1e-3)


def test_compared_cells_are_taken_as_they_are(workplace, monkeypatch):
    """With the settings that version 0.1.0 had for tables. Where the data are standardized to other last bits, on another machine, a
    cell is made again; nothing else may differ."""
    monkeypatch.setattr(problems, "table_training", lambda rows, **_: problems.TABLES._replace(prior_scale=1.0))
    damped = presets.Preset("Laplace", lambda t: Laplace(damping=100.0, check=False), after_map=True)
    monkeypatch.setitem(presets.PRESETS, "laplace", damped)
    shutil.copytree(HERE / "compared" / "cells", "compared/cells")
    before = {path.name: json.loads(path.read_text()) for path in Path("compared/cells").glob("*.json")}
    assert {name: {"scores": cell["scores"], "error": cell["error"]} for name, cell in before.items()} == EXPECTED["compared"]
    apps.command(*apps.COMPARED, "--out", "compared")
    after = {path.name: json.loads(path.read_text()) for path in Path("compared/cells").glob("*.json")}
    assert all(after[name] == cell for name, cell in before.items()), "no cell is made again under its name"
    settings = {(cell["method"], cell["seed"]): cell["settings"] for cell in before.values()}
    for name in after.keys() - before.keys():
        cell = after[name]
        known = settings[cell["method"], cell["seed"]]
        changed = [key for key in {**known, **cell["settings"]} if known.get(key) != cell["settings"].get(key)]
        assert changed == ["data"], name
