"""The mutants themselves: that there are enough, that each is another function, and that breaking something is noticed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dubito
from contract.tables import TABLES, run
from dubito.testing import KNOWN
from mutants.mutate import broken_code, find, mutants
from mutants.targets import ELSEWHERE, LEFT_OUT, TARGETS

EVERY = [mutant for address in TARGETS for mutant in mutants(address)]


def test_there_are_enough_and_every_address_names_a_function():
    assert len(EVERY) >= 200
    assert len({mutant.name for mutant in EVERY}) == len(EVERY)


def test_what_is_left_out_is_still_there():
    for pattern in (*ELSEWHERE, *LEFT_OUT):
        assert any(re.search(pattern, mutant.name) for mutant in EVERY), f"no mutant is {pattern} any more: remove it"


def test_tests_that_notice_a_mutant_are_there():
    for test in ELSEWHERE.values():
        path, name = test.split("::")
        assert f"\ndef {name}(" in (Path(__file__).parents[2] / path).read_text(), test


def test_every_check_is_one_of_the_contract():
    known = {f"method/{name}/{which}" for name, cases in KNOWN.items() for which in cases}
    known |= {f"{group}/{name}" for group, table in TABLES.items() for name in table}
    assert {check for checks in TARGETS.values() for check in checks} <= known


def test_every_mutant_is_another_function():
    for mutant in EVERY:
        assert broken_code(mutant) != find(mutant.address).__code__, mutant.name


def test_a_mutant_is_noticed(monkeypatch):
    (mutant, *_) = mutants("dubito.priors.Normal.log_prob")
    run("prior/Normal")
    monkeypatch.setattr(dubito.priors.Normal.log_prob, "__code__", broken_code(mutant))
    with pytest.raises(AssertionError):
        run("prior/Normal")


def test_an_address_that_names_nothing_says_so():
    with pytest.raises(LookupError, match="give the new name in tests/mutants/targets.py"):
        find("dubito.MAP.nothing")
