"""What all tests share."""

import os
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # One thread a worker, or the workers fight for the cores. Set before torch loads, so that processes which a test
    # starts have it too.
    os.environ["OMP_NUM_THREADS"] = "1"

    import torch

    torch.set_num_threads(1)


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
