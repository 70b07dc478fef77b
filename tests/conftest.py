"""What all tests share."""

import os
import zlib
from collections import defaultdict
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # One thread a worker, or the workers fight for the cores. Set before torch loads, so that processes which a test
    # starts have it too.
    os.environ["OMP_NUM_THREADS"] = "1"

    import torch

    torch.set_num_threads(1)


def pytest_addoption(parser) -> None:
    parser.addoption("--quick", action="store_true", help="one case of each test that is not listed in tests/not_quick.txt")


def pytest_collection_modifyitems(config, items) -> None:
    """With --quick: one case of each test function, and none of the slow ones. Its name decides which, so that methods vary."""
    if not config.getoption("--quick"):
        return
    slow = set((Path(__file__).parent / "not_quick.txt").read_text().split())
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    kept = {
        tests[zlib.crc32(_name(case).encode()) % len(tests)].nodeid for case, tests in cases.items() if _name(case) not in slow
    }
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]


def _name(case: str) -> str:
    """The function's name: it stays when files move."""
    return case.rpartition("::")[2]


def pytest_runtest_setup() -> None:
    """Every test starts from the same random state, so that one that fails once fails always."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of the published data sets; a test that asks for it is skipped where there is none."""
    folder = os.environ.get("DUBITO_DATA")
    if not folder:
        pytest.skip("DUBITO_DATA does not name a folder of data sets")
    return Path(folder)
