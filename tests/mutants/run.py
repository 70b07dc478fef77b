"""`make mutants`: break one thing at a time, and see that the contract notices. Exits with 1 if a mutant survives."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, FunctionType

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from contract.tables import run
from mutants.mutate import Mutant, broken_code, find, mutants
from mutants.targets import ELSEWHERE, LEFT_OUT, TARGETS

LIMIT = 90  # seconds that a check of a mutant may take: one that never ends is noticed, too


ROOT = Path(__file__).parents[2]


def checks_of(mutant: Mutant) -> list[str]:
    """The test that a mutant is left to, or else the checks of its function."""
    tests = [test for pattern, test in ELSEWHERE.items() if re.search(pattern, mutant.name)]
    return tests or TARGETS[mutant.address]


def run_check(check: str) -> None:
    """Run a check of the contract, or a test."""
    if "::" in check:
        assert pytest.main(["-x", "-p", "no:cacheprovider", f"--rootdir={ROOT}", f"{ROOT}/{check}"]) == 0
    else:
        run(check)


def survives(checks: list[str], function: FunctionType, code: CodeType) -> bool:
    """Whether all checks pass, in a process of its own, after the code of a function has been replaced."""
    child = os.fork()
    if child == 0:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        signal.alarm(LIMIT)
        outcome = 1
        try:
            warnings.simplefilter("ignore")
            function.__code__ = code
            for check in checks:
                run_check(check)
            outcome = 0
        finally:
            os._exit(outcome)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def main() -> int:
    """Run all mutants, or those whose address holds a word."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="", help="a regular expression of names of mutants")
    options = parser.parse_args()
    torch.set_num_threads(1)
    every = [mutant for address in TARGETS for mutant in mutants(address) if re.search(options.only, mutant.name)]
    left = [mutant for mutant in every if any(re.search(pattern, mutant.name) for pattern in LEFT_OUT)]
    every = [mutant for mutant in every if mutant not in left]
    began = time.perf_counter()
    codes = {mutant: broken_code(mutant) for mutant in every}
    needed = {check: find(mutant.address) for mutant in every for check in checks_of(mutant)}
    with ThreadPoolExecutor(options.workers) as pool:
        # replaced by its own code, a function must pass: otherwise every mutant would seem to be noticed
        sound = pool.map(lambda check: survives([check], needed[check], needed[check].__code__), needed)
        if broken := [check for check, passed in zip(needed, sound, strict=True) if not passed]:
            print("These checks fail without any mutant:", *broken, sep="\n  ")
            return 1
        print(
            f"{len(needed)} checks pass; {len(every)} mutants of {len({mutant.address for mutant in every})} functions",
            flush=True,
        )
        alive = []
        outcomes = pool.map(lambda mutant: survives(checks_of(mutant), find(mutant.address), codes[mutant]), every)
        for mutant, survived in zip(every, outcomes, strict=True):
            if survived:
                alive.append(mutant)
                print(f"SURVIVED  {mutant.name}", flush=True)
    minutes = (time.perf_counter() - began) / 60
    print(f"{len(every) - len(alive)} of {len(every)} mutants were noticed, {len(alive)} survived, in {minutes:.1f} minutes")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
