"""Run a function on several processes of this machine, for tests: `on_ranks(3, function)`."""

import io
import multiprocessing
import os
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

DEAD = "ended without a word"


def _run(rank: int, size: int, path: str, function: Callable, pipe: Any) -> None:
    """One process: its result, or its error in words, goes into the pipe."""
    torch.set_num_threads(1)
    result = None
    try:
        distributed.init_process_group(
            "gloo", init_method=f"file://{path}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
        )
        result = (True, function(rank))
        distributed.destroy_process_group()
    except BaseException as error:
        result = (False, f"{type(error).__name__}: {error}", traceback.format_exc())
    memory = io.BytesIO()
    torch.save(result, memory)
    pipe.send_bytes(memory.getvalue())
    pipe.close()
    os._exit(0)  # nothing of the parent's is torn down here


def outcomes(size: int, function: Callable[[int], Any], *, seconds: float = 40.0) -> list[tuple]:
    """(True, result) or (False, error, traceback) of `function(rank)` on every process."""
    context = multiprocessing.get_context("fork")  # torch is loaded already
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, of a fork beside threads
        pipes, started = [], []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(rank, size, f"{folder}/store", function, theirs))
            process.start()
            theirs.close()
            pipes.append(ours)
            started.append(process)
        until, results = time.monotonic() + seconds, []
        for pipe in pipes:
            try:
                ready = pipe.poll(max(0.0, until - time.monotonic()))
                results.append(torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False) if ready else (False, "timeout", ""))
            except EOFError:
                results.append((False, DEAD, ""))
        for process in started:
            process.join(5)
            process.kill()
        return results


def on_ranks(size: int, function: Callable[[int], Any], *, seconds: float = 40.0) -> list[Any]:
    """What `function(rank)` gives on every process; an error of one is an error here."""
    results = outcomes(size, function, seconds=seconds)
    for rank, (ok, *rest) in enumerate(results):
        assert ok, f"process {rank}: {rest[-1] or rest[0]}"
    return [result for _, result in results]


def errors(size: int, function: Callable[[int], Any], *, seconds: float = 40.0) -> list[str]:
    """The errors of all processes, as "Type: words"; an empty text where there was none."""
    return ["" if result[0] else result[1] for result in outcomes(size, function, seconds=seconds)]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return chosen.getsockname()[1]
