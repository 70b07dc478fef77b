"""The process that runs a command: the threads that torch uses, warnings, and further processes that share its work."""

from __future__ import annotations

import multiprocessing
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")
T = TypeVar("T")


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: faster for small networks, and much faster on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def print_warnings(say: Callable[[str], object] = print) -> Iterator[None]:
    """Print each warning of the block once, as a note without the line of code that gave it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        say(f"Note: {text}")


def in_processes(work: Callable[[Item], T], items: Sequence[Item], jobs: int) -> Iterator[T]:
    """What `work` makes of every item, in order, by so many processes of this machine, to which both are pickled. An error or an
    interrupt here ends them; if one of them is killed, `BrokenProcessPool` is raised."""
    threads, others = max(1, torch.get_num_threads() // jobs), multiprocessing.active_children()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(items)), context, initializer=_begin, initargs=(threads,)) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            for future in futures:
                yield future.result()
        except BaseException:
            for process in set(multiprocessing.active_children()) - set(others):
                process.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _begin(threads: int) -> None:
    """Begin a process: Ctrl-C goes to all of them, but it is for the one that waits for them."""
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
