import pytest
import torch
from dubito.data.sentences import PADDING, UNKNOWN, words

from dubito.data import Vocabulary


def test_words_and_marks():
    assert words("Can't you see? It's _fine_ -- 2nd-rate.") == [
        "ca", "n't", "you", "see", "?", "it", "'s", "_fine_", "-", "-", "2nd", "-", "rate", "."
    ]  # fmt: skip
    assert words("  \n") == []


def test_the_most_frequent_words_come_first_and_ties_by_name():
    vocabulary = Vocabulary.of(["b a c", "b a", "B d"])
    assert vocabulary.words[2:] == ("b", "a", "c", "d")
    assert Vocabulary.of(["b a c", "b a", "b d"], most=1).words[2:] == ("b",)
    assert Vocabulary.of(["b a c", "b a", "b d"], least=2).words[2:] == ("b", "a")


def test_ids_end_in_padding_and_decode():
    vocabulary = Vocabulary.of(["a b c", "a b", "a"])
    ids = vocabulary.encode(["c b a a", "", "a <unknown> x"], length=3)
    assert ids.dtype == torch.int64
    assert ids.tolist() == [[4, 3, 2], [UNKNOWN, PADDING, PADDING], [2, UNKNOWN, UNKNOWN]]  # the special names are no words
    assert vocabulary.encode(["a"], width=4).tolist() == [[2, 0, 0, 0]]
    assert vocabulary.decode(ids[0]) == "c b a"


def test_what_cannot_be_is_refused_in_words():
    with pytest.raises(ValueError, match="no word occurs 3 times or oftener"):
        Vocabulary.of(["a a", "b"], least=3)
    with pytest.raises(ValueError, match="most=0"):
        Vocabulary.of(["a"], most=0)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        Vocabulary.of(["a"]).encode(["a"], length=0)
    with pytest.raises(ValueError, match=r"has 3 words, and width=2 .* length=2"):
        Vocabulary.of(["a"]).encode(["a a a"], width=2)


def test_one_string_is_no_list_of_sentences():
    with pytest.raises(TypeError, match="list of sentences"):
        Vocabulary.of("a b")
    with pytest.raises(TypeError, match="list of sentences"):
        Vocabulary.of(["a b"]).encode("a b")
