"""Sentences as numbers: words, a vocabulary of them, and rows of ids of one length."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dubito.tensors.checks import require

PADDING, UNKNOWN = 0, 1  # ids that no word has
SPECIAL = ("<padding>", "<unknown>")
_WORD = re.compile(r"\w+(?=n't\b)|n't\b|'\w+|\w+|[^\w\s]")


def words(sentence: str) -> list[str]:
    """Words and marks in lower case; n't, 's and the like are words of their own.

    >>> words("It isn't Ozu's best, alas...")
    ['it', 'is', "n't", 'ozu', "'s", 'best', ',', 'alas', '.', '.', '.']
    """
    return _WORD.findall(sentence.lower())


@dataclass(frozen=True)
class Vocabulary:
    """The words that have an id: the place in `words`, of which the first two stand for padding and for every other word.

    >>> vocabulary = Vocabulary.of(["a fine film", "a film", "fine , fine"], least=2)
    >>> vocabulary.words
    ('<padding>', '<unknown>', 'fine', 'a', 'film')
    >>> vocabulary.encode(["a fine mess", "film"])
    tensor([[3, 2, 1],
            [4, 0, 0]])
    """

    words: tuple[str, ...]

    @staticmethod
    def of(sentences: Iterable[str], *, most: int = 20_000, least: int = 1) -> "Vocabulary":
        """The `most` frequent words of some sentences, the most frequent first, that occur `least` times or oftener.

        With `least=2` the words that occur once stand in for those that never do: the id of the unknown gets to be trained.
        """
        if most < 1 or least < 1:
            raise ValueError(f"a vocabulary has at least one word that occurs at least once; got most={most}, least={least}")
        _check_many(sentences)
        counts = Counter(word for sentence in sentences for word in words(sentence))
        kept = sorted((word for word, count in counts.items() if count >= least), key=lambda word: (-counts[word], word))
        require(kept, f"no word occurs {least} times or oftener in these sentences: give more of them, or a smaller `least`")
        return Vocabulary((*SPECIAL, *kept[:most]))

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words) if i >= len(SPECIAL)}

    def encode(self, sentences: Sequence[str], *, length: int = 200, width: int | None = None) -> Tensor:
        """Ids [N, T]: the first `length` words of each, then padding up to `width`, or up to the longest.

        A sentence without a word becomes one unknown word, since networks want something to read.
        """
        require(length >= 1, f"length is the largest number of words that is kept of a sentence, at least 1, not {length}")
        _check_many(sentences)
        rows = [[self._ids.get(word, UNKNOWN) for word in words(one)[:length]] or [UNKNOWN] for one in sentences]
        longest = max(map(len, rows), default=1)
        width = longest if width is None else width
        if width < longest:
            raise ValueError(f"a sentence has {longest} words, and width={width} has no room for it: give length={width}, too")
        ids = torch.full((len(rows), width), PADDING)
        for row, one in zip(ids, rows, strict=True):
            row[: len(one)] = torch.tensor(one)
        return ids

    def decode(self, ids: Tensor) -> str:
        """The words of one row [T], without its padding."""
        return " ".join(self.words[i] for i in ids.tolist() if i != PADDING)


def _check_many(sentences: Iterable[str]) -> None:
    if isinstance(sentences, str):
        raise TypeError("sentences are several strings, and one string would be read as its letters: give a list of sentences")
