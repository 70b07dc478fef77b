"""Makes the golden files: `python tests/golden/make.py`, with `src` and `tests` on the Python path.

The files were made with version 0.1.0, before any module moved, and tests hold every later version to them: what users have on disk
still loads, resumes and predicts the same. DO NOT run this again to make a failing test pass. It adds what is not there yet, for new
forms of files, and never touches a file that is there.
"""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import tarfile
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import dubito
from dubito import Categorical, Model, recalibrate
from dubito.apps import bandits, compression
from dubito.apps.failure import ConfidNet
from dubito.labelling import Session, task
from golden import applications as apps
from golden import cases

HERE = Path(__file__).parent
EXPECTED = HERE / "expected.json"


def seeded() -> None:
    """The same global generators for every run: their states are in every checkpoint, and are then compressed to one."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (it is this generator whose state is kept)
    torch.manual_seed(0)


def file(area: str, name: str) -> Path:
    """Where a golden file is kept."""
    path = HERE / area / name.replace(", ", "-").replace("/", "-").replace(" ", "_")
    path.parent.mkdir(exist_ok=True)
    return path


def make_posteriors(expected: dict[str, Any]) -> None:
    """Saved posteriors of every form, covariance, family and likelihood."""
    for name, case in cases.POSTERIORS.items():
        if name in expected:
            continue
        seeded()
        model = case.model()
        if case.make is not None:
            path = file("posteriors", f"{name}.safetensors")
            dubito.save(case.make(model), path)
        else:
            method, options = cases.STORED[name]
            path = file("posteriors", name)
            with tempfile.TemporaryDirectory() as folder:
                dubito.fit(model, method, (cases.X, cases.NUMBERS), batch_size=8, progress=False, checkpoint=folder, **options)
                dubito.save(dubito.load(folder, model), path)
        expected[name] = cases.numbers(dubito.load(path, case.model()).predict(case.x), case.y)


def make_checkpoints(expected: dict[str, Any]) -> None:
    """Folders of runs that were stopped, in one archive: the states of generators fill most of them, and are all alike."""
    missing = {name: case for name, case in cases.CHECKPOINTS.items() if name not in expected}
    if not missing:
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, case in missing.items():
            seeded()
            place = Path(folder, file("checkpoints", name).name)
            case.run(checkpoint=place, callbacks=[lambda event, after=case.after: event.step == after])
            with tempfile.TemporaryDirectory() as copy:
                shutil.copytree(place, copy, dirs_exist_ok=True)
                resumed = cases.numbers(case.run(checkpoint=copy, resume=True).predict(case.fresh))
            expected[name] = cases.numbers(case.run().predict(case.fresh))
            assert resumed == expected[name], name
        with tarfile.open(HERE / f"checkpoints-{dubito.__version__}.tar.xz", "x:xz") as archive:
            for path in sorted(Path(folder).rglob("*")):
                archive.add(path, str(path.relative_to(folder)), recursive=False, filter=_anonymous)
    (HERE / "checkpoints").rmdir()


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.mtime, info.uid, info.gid, info.uname, info.gname = 0, 0, 0, "", ""
    return info


def make_recalibration(expected: dict[str, Any]) -> None:
    """Fitted maps of predictives."""
    for name, (settings, posterior) in apps.MAPS.items():
        if name in expected:
            continue
        case = cases.POSTERIORS[posterior]
        loaded = dubito.load(file("posteriors", f"{posterior}.safetensors"), case.model())
        y = cases.CLASSES if isinstance(case.model().likelihood, Categorical) else cases.NUMBERS
        fitted = settings.fit(loaded.predict(cases.X), y)
        recalibrate.save(fitted, file("recalibration", f"{name}.safetensors"))
        expected[name] = apps.applied(fitted, loaded.predict(cases.UNLABELED))


def make_bandits(expected: dict[str, Any]) -> None:
    """Runs of agents that were broken off."""
    for name, make in apps.AGENTS.items():
        if name in expected:
            continue
        agent, path = make(), file("bandits", f"{name}.safetensors")
        act, left = agent.act, [17]

        def counted(context: torch.Tensor, act: Any = act, left: list[int] = left) -> int:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return act(context)

        with patch.object(agent, "act", counted), suppress(KeyboardInterrupt):
            bandits.simulate(apps.BANDIT, agent, file=path, save_every=0.0, progress=False)
        expected[name] = bandits.simulate(apps.BANDIT, make(), progress=False).actions.tolist()


def make_exploration(expected: dict[str, Any]) -> None:
    """Agents in a maze."""
    for name in apps.LEARNERS:
        if name in expected:
            continue
        path = file("exploration", f"{name}.safetensors")
        apps.learner(name).learn(apps.maze(), steps=30, file=path)
        agent = apps.learner(name)
        agent.load(path)
        total = agent.total
        agent.learn(apps.maze(), steps=50)
        values = agent.posterior.predict(torch.eye(5)).mean.double().flatten().tolist()
        expected[name] = {"total": total, "returns": agent.history.returns, "lengths": agent.history.lengths, "values": values}


def make_others(expected: dict[str, Any]) -> None:
    """A search, a session of active learning, a learned confidence and compressed networks."""
    if "search" not in expected:
        found = apps.search()
        for _ in range(4):
            x = found.ask()
            found.tell(x, x[:, 0] - x[:, 0] ** 2)
        found.save(file("others", "search.safetensors"))
        expected["search"] = {"x": found.x.flatten().tolist(), "y": found.y.tolist(), "next": found.ask(2).flatten().tolist()}
    if "active" not in expected:
        folder = file("others", "active")
        learning = apps.active(folder, new=True)
        for _ in range(2):
            asked = learning.ask(4)
            learning.tell(asked, cases.CLASSES[asked])
        asked = learning.ask(4)
        learning.tell(asked[:2], cases.CLASSES[asked[:2]])
        learning.skip(asked[2:3])
        state = {
            "labelled": learning.labelled.tolist(),
            "pending": learning.pending.tolist(),
            "skipped": learning.skipped.tolist(),
        }
        with tempfile.TemporaryDirectory() as copy:
            shutil.copytree(folder, copy, dirs_exist_ok=True)
            again = apps.active(Path(copy))
            predicted = cases.numbers(again.posterior.predict(cases.FRESH))
            history = [[one.labels, *one.asked] for one in again.history]
        expected["active"] = {**state, "predicted": predicted, "history": history}
    if "confidence" not in expected:
        model = Model(cases.dropping(3), Categorical())
        data = (cases.X, cases.CLASSES)
        learned = ConfidNet((4,), epochs=2, tune_epochs=1).fit(model, data, validation=data, seed=3)
        learned.save(file("others", "confidence.safetensors"))
        expected["confidence"] = learned(cases.FRESH).double().tolist()
    if "compressed" not in expected:
        small = compression.cut(apps.wide(), apps.EDGES)
        compression.save(small, file("others", "cut.dubito"))
        model = Model(apps.wide(), dubito.Gaussian(scale=0.25))
        centre = {name: leaf.detach().clone() for name, leaf in model.parameters().items()}
        spread = {name: torch.full_like(leaf, 2.0**-10) for name, leaf in centre.items()}
        rounded = dubito.compress(
            dubito.posteriors.Gaussian.diagonal(model, centre, spread), apps.EDGES, threshold=0.25, repeats=1
        )
        compression.save(rounded, file("others", "compressed.dubito"))
        with torch.no_grad():
            expected["compressed"] = {
                "cut": small(apps.EDGES).flatten().tolist(),
                "compressed": rounded(apps.EDGES).flatten().tolist(),
            }


def make_labelling(expected: dict[str, Any]) -> None:
    """A session of `dubito label`."""
    if expected:
        return
    folder = file("others", "labels")
    given = task(str(HERE / "tables" / "pictures.npz"), classes=("bright", "dark"))
    session = Session(given, folder, batch=4, draws=4)
    session.start()

    def wait() -> None:
        for _ in range(600):
            if session.queue and not session.busy:
                return
            session.wait(session.version, 0.1)

    for label in (0, 1, None, 0, 1):
        wait()
        session.answer(session.queue[0], label)
    session.undo()
    wait()
    session.close()
    expected["standing"] = [[index, label] for index, label in session.journal.standing.items()]
    expected["queue"] = sorted(session.learning.pending.tolist())
    expected["rounds"] = [one.labels for one in session.learning.history]


def make_tables() -> None:
    """The data of the command line: numbers, texts and a missing cell."""
    folder = HERE / "tables"
    if (folder / "numbers.csv").exists():
        return
    x = cases.lattice(32, 3, seed=11)
    with (folder / "numbers.csv").open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["size", "age", "kind", "price", "cost"])
        for i, (a, b, c) in enumerate(x.tolist()):
            writer.writerow([a, "" if i == 5 else b, "house" if c > 0 else "flat", 100 + 8 * a - 4 * b + c, 3 + a / 2 + b])
    with (folder / "classes.csv").open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["length", "width", "species"])
        writer.writerows([a, b, "ab"[a > 0] + "xy"[b > 0.5]] for a, b, _ in x.tolist())
    pixels = ((cases.lattice(12, 1, 4, 4, seed=12) + 2) * 60).numpy().astype(np.uint8)
    np.savez_compressed(folder / "pictures.npz", x=pixels)


@contextmanager
def workplace() -> Iterator[Path]:
    """A copy of the tables, as the current folder."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(HERE / "tables", folder, dirs_exist_ok=True)
        with chdir(folder):
            yield Path(folder)


def make_fitted(expected: dict[str, Any]) -> None:
    """Folders of `dubito fit`, finished and interrupted."""
    from dubito.inference.descent import Descent
    from dubito.inference.full_batch import Chains

    for name, words in apps.FITS.items():
        if name in expected:
            continue
        with workplace():
            own = ["--network", "own:build"] if name == "own network" else []
            apps.command("fit", *words, "--out", "fitted")
            apps.command("predict", "fitted", apps.TABLES[name], "--out", "predicted.csv", *own)
            expected[name] = table(Path("predicted.csv"))
            shutil.copytree("fitted", file("fitted", name))
    for name, (fit, after) in apps.INTERRUPTED.items():
        if f"interrupted/{name}" in expected:
            continue
        with workplace():
            left = [after]

            def interrupted(step: Any, left: list[int] = left) -> Any:
                def counted(*args: Any) -> Any:
                    left[0] -= 1
                    if not left[0]:
                        raise KeyboardInterrupt
                    return step(*args)

                return counted

            with (
                patch.object(Descent, "step", interrupted(Descent.step)),
                patch.object(dubito.Laplace, "step", interrupted(dubito.Laplace.step)),
                patch.object(Chains, "step", interrupted(Chains.step)),
                suppress(RuntimeError),
            ):
                apps.command("fit", *apps.FITS[fit], "--out", "fitted", "--checkpoint-every", "0")
            assert Path("fitted/checkpoint").exists()
            shutil.copytree("fitted", file("interrupted", name))
            apps.command("fit", *apps.FITS[fit], "--out", "fitted", "--resume")
            apps.command("predict", "fitted", apps.TABLES[fit], "--out", "predicted.csv")
            assert table(Path("predicted.csv")) == expected[fit], name
            expected[f"interrupted/{name}"] = expected[fit]


def table(path: Path) -> list[list[str]]:
    """The cells of a CSV file."""
    with path.open(newline="") as stream:
        return list(csv.reader(stream))


def make_compared(expected: dict[str, Any]) -> None:
    """A folder of `dubito compare`."""
    if expected:
        return
    with workplace():
        apps.command(*apps.COMPARED, "--out", "compared")
        shutil.copytree("compared/cells", file("compared", "cells"))
        for path in sorted(Path("compared/cells").glob("*.json")):
            cell = json.loads(path.read_text())
            expected[path.name] = {"scores": cell["scores"], "error": cell["error"]}


def main() -> None:
    """Make all that is missing."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["COLUMNS"] = "120"
    known: dict[str, Any] = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    make_tables()
    parts = {
        "posteriors": make_posteriors, "checkpoints": make_checkpoints, "recalibration": make_recalibration,
        "bandits": make_bandits, "exploration": make_exploration, "others": make_others, "labelling": make_labelling,
        "fitted": make_fitted, "compared": make_compared,
    }  # fmt: skip
    for area, make in parts.items():
        make(known.setdefault(area, {}))
        EXPECTED.write_text(json.dumps(known, indent=0) + "\n")
        print(area, len(known[area]))


if __name__ == "__main__":
    main()
