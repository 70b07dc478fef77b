"""What a person said is on disk before it counts."""

import os

import pytest

from dubito.labelling import Answer, Journal
from dubito.tensors import store


def test_what_stands_after_changes_of_mind(tmp_path):
    journal = Journal(tmp_path / "a.jsonl")
    for answer in (Answer(5, 2), Answer(1, 0), Answer(5, undone=True), Answer(7), Answer(5, 1), Answer(1, undone=True)):
        journal.add(answer)
    assert journal.standing == {7: None, 5: 1}
    assert list(journal.standing) == [7, 5], "in the order in which they were last said"
    again = Journal(journal.path)
    assert again.standing == journal.standing
    assert list(again.standing) == [7, 5]
    assert again.answers == journal.answers
    assert all(answer.time for answer in again.answers)


def test_agreement_counts_guesses_of_labels_only(tmp_path):
    journal = Journal(tmp_path / "a.jsonl")
    for answer in (Answer(0, 2, guess=2), Answer(1, 2, guess=0), Answer(2, 1), Answer(3, None, guess=1), Answer(4, 0, guess=0)):
        journal.add(answer)
    assert journal.agreement() == (2, 3)
    assert journal.agreement(last=2) == (1, 2)


def test_a_line_that_was_never_finished_is_swept_away(tmp_path):
    path = tmp_path / "a.jsonl"
    Journal(path).add(Answer(3, 1))
    with path.open("ab") as file:
        file.write(b'{"index": 4, "la')
    journal = Journal(path)
    assert journal.standing == {3: 1}
    journal.add(Answer(4, 0))
    assert Journal(path).standing == {3: 1, 4: 0}


def test_a_full_disk_takes_no_answer_and_spoils_nothing(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "a.jsonl")
    journal.add(Answer(3, 1))

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(store.WriteError, match="make room"):
        journal.add(Answer(4, 0))
    assert journal.standing == {3: 1}
    assert Journal(journal.path).standing == {3: 1}


def test_half_a_line_that_stays_does_not_spoil_the_next(tmp_path, monkeypatch):
    """A disk so broken that the line cannot be taken back, either."""
    journal = Journal(tmp_path / "a.jsonl")
    journal.add(Answer(3, 1))

    def broken(*args):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        patch.setattr(os, "truncate", broken)
        with pytest.raises(store.WriteError, match="Input/output"):
            journal.add(Answer(4, 0))
    journal.add(Answer(5, 2))
    assert Journal(journal.path).standing == journal.standing == {3: 1, 5: 2}


def test_a_file_that_was_deleted_meanwhile_is_written_again(tmp_path):
    journal = Journal(tmp_path / "a.jsonl")
    journal.add(Answer(3, 1))
    journal.path.unlink()
    journal.add(Answer(4, 0))
    assert Journal(journal.path).answers == journal.answers


def test_a_last_line_without_its_end_is_whole_if_it_can_be_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"index": 1, "label": 0}\n{"index": 2, "label": 1}')
    journal = Journal(path)
    assert journal.standing == {1: 0, 2: 1}
    journal.add(Answer(3, 0))
    assert Journal(path).standing == {1: 0, 2: 1, 3: 0}


def test_input_0_and_class_0_are_read_again(tmp_path):
    journal = Journal(tmp_path / "a.jsonl")
    for answer in (Answer(0, 3, guess=0), Answer(4, 0), Answer(0, undone=True)):
        journal.add(answer)
    assert Journal(journal.path).answers == journal.answers


def test_lines_of_version_0_1_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"label": 3, "time": "2026-01-01"}\n{"index": 4, "label": null, "guess": 2, "time": "2026-01-01"}\n')
    assert Journal(path).answers == [Answer(0, 3, time="2026-01-01"), Answer(4, None, guess=2, time="2026-01-01")]


@pytest.mark.parametrize("content", [b"\0" * 40, b"hello", b'{"index": 1, "label": 0}\x0b', b'{"index": 1, "label": 0}\n\0\0'])
def test_a_damaged_file_stays_as_it_is(content, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(store.FileError, match="or damaged; put back a copy"):
        Journal(path)
    assert path.read_bytes() == content


def test_every_changed_bit_is_noticed(tmp_path):
    journal = Journal(tmp_path / "a.jsonl")
    for answer in (Answer(0, 3), Answer(12, 0, guess=1)):
        journal.add(answer)
    content = journal.path.read_bytes()
    for bit in range(0, 8 * len(content), 7):
        journal.path.write_bytes(content[: bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1 :])
        with pytest.raises(store.FileError, match="not an answer"):
            Journal(journal.path)


@pytest.mark.parametrize(
    "line", ["hello", "", "[1]", '{"index": "1"}', '{"index": 1, "label": 1.5}', '{"index": null}', "\udcff"]
)
def test_another_file_is_refused_with_its_line(line, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(f'{{"index": 1, "label": 0}}\n{line}\n'.encode(errors="surrogateescape"))
    with pytest.raises(store.FileError, match="line 2: not an answer"):
        Journal(path)
