"""The folder that `dubito fit` writes: created, locked while the run goes on, and tidied when it is cut short."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from dubito.cli.commands.errors import UsageError, error_text, usage_errors
from dubito.cli.commands.fitted import CHECKPOINT
from dubito.cli.commands.recipe import NAME, Recipe
from dubito.tensors import store


def open_folder(folder: Path, recipe: Recipe, *, resume: bool) -> None:
    """Create the folder, or check that it holds the beginning of this very run."""
    started = folder / CHECKPOINT / NAME
    if resume and (folder / NAME).exists():
        raise UsageError(f"{folder}: this fit is finished; there is nothing to resume")
    if resume and started.exists():
        changed = recipe.difference(Recipe.read(started))
        if changed:
            raise UsageError(f"{folder} was started by another command; different: {'; '.join(changed)}")
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        hint = ", or continue the run in it with --resume" if started.exists() else ""
        raise UsageError(f"{folder} exists: give another folder for --out{hint}")
    try:
        recipe.write(started)
    except OSError:  # a full disk: leave no empty folder for a later run to stumble over
        shutil.rmtree(folder)
        raise


@contextmanager
def fit_folder(folder: Path, recipe: Recipe, *, resume: bool) -> Iterator[None]:
    """Hold the folder for this run alone. After an error or an interrupt, tidy it and say what is left."""
    open_folder(folder, recipe, resume=resume)
    with ExitStack() as lock:
        with usage_errors(FileExistsError):  # another process works here, and the folder is not ours to tidy
            lock.enter_context(store.lock_folder(folder))
        try:
            yield
        except (UsageError, store.WriteError, KeyboardInterrupt) as end:
            message = close_folder(folder)
            lock.close()  # the lock is a file in the folder
            with suppress(OSError):
                folder.rmdir()  # fails, as it should, where something is left
            if isinstance(end, KeyboardInterrupt):
                raise KeyboardInterrupt(message) from end
            if isinstance(end, store.WriteError):
                raise UsageError(error_text(end).replace("resume=True", "--resume")) from end
            raise


def close_folder(folder: Path) -> str:
    """After a run that was cut short: remove everything unless there is a checkpoint. Returns a message for the user."""
    if (folder / NAME).exists():
        return f"but the fit in {folder} is finished"
    if any((folder / CHECKPOINT).rglob("*.safetensors")):
        return f"the same command with --resume continues from the last checkpoint in {folder}"
    shutil.rmtree(folder / CHECKPOINT, ignore_errors=True)
    return f"nothing was saved yet, so {folder} is removed (--checkpoint-every sets how often to save)"
