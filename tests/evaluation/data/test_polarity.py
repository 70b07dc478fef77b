import pytest
import torch
from dubito.data.sentences import UNKNOWN

from dubito.data import polarity

SENTENCES = [
    f"{i % 2} the film is {word} ."
    for i, word in enumerate(("bad", "good", "dull", "fine", "poor", "great", "weak", "bold", "vain", "wise"))
]


@pytest.fixture
def root(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "rt-polarity.all").write_bytes("\n".join([*SENTENCES, "", ""]).encode("cp1252"))
    return tmp_path


def pairs(data, part):
    x, y = getattr(data, f"x_{part}"), getattr(data, f"y_{part}")
    return {(data.vocabulary.decode(row), int(label)) for row, label in zip(x, y, strict=True)}


def test_three_parts_hold_every_sentence_with_its_label(root):
    data = polarity(root=root, least=1, valid=0.2, test=0.3)
    assert (len(data.y_train), len(data.y_valid), len(data.y_test)) == (5, 2, 3)
    known = {sentence[2:] for sentence in SENTENCES}
    train = pairs(data, "train")
    assert {f"{label} {text}" for text, label in train} <= set(SENTENCES)
    rest = pairs(data, "valid") | pairs(data, "test")
    assert rest == {("the film is <unknown> .", 0), ("the film is <unknown> .", 1)}, "their one own word is not in the vocabulary"
    assert {text for text, _ in train} <= known
    assert len(data.vocabulary) == 2 + 4 + 5, "words of the training part alone"
    assert polarity(root=root, least=2).x_train.eq(UNKNOWN).sum() == len(polarity(root=root).y_train)


def test_the_cut_follows_from_the_split_and_the_sentence_alone(root):
    first, other = polarity(root=root, least=1), polarity(1, root=root, least=1)
    assert torch.equal(first.x_train, polarity(root=root, least=1).x_train)
    assert pairs(first, "train") != pairs(other, "train")
    path = root / "text" / "rt-polarity.all"
    path.write_text("\n".join(reversed(SENTENCES)))
    assert torch.equal(polarity(root=root, least=1).x_train, first.x_train), "whatever the order of the file"


def test_sentences_are_cut_and_padded(root):
    path = root / "text" / "rt-polarity.all"
    path.write_text("\n".join([*SENTENCES, "1 " + "film " * 30]))
    assert polarity(root=root).x_train.shape[1] == 30
    assert polarity(root=root, length=4).x_test.shape[1] == 4


def test_marks_of_windows_do_not_end_a_line(root):
    path = root / "text" / "rt-polarity.all"
    path.write_bytes("\n".join(["1 so… long", *SENTENCES]).encode("cp1252"))
    data = polarity(root=root)
    assert sum(map(len, (data.y_train, data.y_valid, data.y_test))) == len(SENTENCES) + 1


def test_bad_files_and_shares_are_refused_in_words(root):
    path = root / "text" / "rt-polarity.all"
    with pytest.raises(ValueError, match="leave some to train"):
        polarity(root=root, valid=0.5, test=0.5)
    with pytest.raises(ValueError, match="too few for three parts"):
        polarity(root=root, valid=0.01)
    path.write_text("1 good\nbad film\n")
    with pytest.raises(ValueError, match="line 2: a line begins with its label"):
        polarity(root=root)
    path.write_text("1 good\n1 fine\n")
    with pytest.raises(ValueError, match="both labels"):
        polarity(root=root)


def test_no_folder_or_no_file(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="put the published file in that place"):
        polarity(root=tmp_path)
    monkeypatch.delenv("DUBITO_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="set the environment variable DUBITO_DATA"):
        polarity()


def test_published_file(data_root):
    data = polarity(root=data_root)
    assert (data.x_train.shape, data.x_valid.shape, data.x_test.shape) == ((7464, 62), (1066, 62), (2132, 62))
    y = torch.cat([data.y_train, data.y_valid, data.y_test])
    assert y.bincount().tolist() == [5331, 5331]
    assert data.x_train.max() == len(data.vocabulary) - 1 == 8171
    assert data.x_train[:, 0].min() > 0, "every sentence begins with a word"
    assert float((data.x_test == UNKNOWN).sum() / (data.x_test > 0).sum()) < 0.1
