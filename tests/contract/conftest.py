import pytest

from contract.methods import QUICK


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "method" in metafunc.fixturenames:
        metafunc.parametrize("method", list(QUICK.values()), ids=list(QUICK))
