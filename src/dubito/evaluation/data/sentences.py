"""Sentences as numbers: words, a vocabulary of them, rows of ids of one length; and rt-polarity, 10,662 sentences of film reviews.

Half of the reviews are in favour of the film and half against it. Source: Pang and Lee (2005),
https://www.cs.cornell.edu/people/pabo/movie-review-data. Licence: as published for research. Files: `text/rt-polarity.all`, a sentence
a line after its label 0 (against) or 1 (in favour), as in https://github.com/harvardnlp/sent-conv-torch (MIT).
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dubito.evaluation.data.examples import locate
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


CLASSES = ("negative", "positive")


class Reviews(NamedTuple):
    """Sentences as rows of word ids, of one length T, cut into three parts; the vocabulary knows the words of the first only."""

    x_train: Tensor  # [N, T] int64: ids of words, then zeros
    y_train: Tensor  # [N] int64
    x_valid: Tensor  # to choose hyperparameters by
    y_valid: Tensor
    x_test: Tensor
    y_test: Tensor
    vocabulary: Vocabulary


def polarity(
    split: int = 0,
    *,
    valid: float = 0.1,
    test: float = 0.2,
    vocabulary: int = 20_000,
    least: int = 2,
    length: int = 200,
    root: str | Path | None = None,
) -> Reviews:
    """A random cut of the reviews, the same everywhere: a hash of `split` and of the sentence itself decides.

    The sets have no published test part; `valid` and `test` are shares of all sentences. Words are those of the training part that
    occur there `least` times or oftener, at most `vocabulary` of them; of a sentence the first `length` words are kept. Rows are
    padded with zeros, at the end, to the longest sentence of all parts. `CLASSES` names the labels.

    >>> data = polarity()  # doctest: +SKIP
    >>> data.x_train.shape, data.x_valid.shape, data.x_test.shape, len(data.vocabulary)  # doctest: +SKIP
    (torch.Size([7464, 62]), torch.Size([1066, 62]), torch.Size([2132, 62]), 8172)
    >>> data.vocabulary.decode(data.x_test[9]), CLASSES[data.y_test[9]]  # doctest: +SKIP
    ('only two - <unknown> of a satisfying movie experience .', 'negative')
    """
    if not (valid > 0 and test > 0 and valid + test < 1):
        raise ValueError(f"valid and test are shares of the sentences and leave some to train; got valid={valid}, test={test}")
    sentences, labels = _read(locate("text", "rt-polarity.all", root=root))
    keys = [hashlib.sha256(f"{split} {sentence}".encode()).digest() for sentence in sentences]
    order = sorted(range(len(sentences)), key=keys.__getitem__)
    sizes = [round(test * len(order)), round(valid * len(order))]
    if not all(sizes) or sum(sizes) >= len(order):
        raise ValueError(f"{len(order)} sentences are too few for three parts with valid={valid} and test={test}")
    held, chosen, rest = order[: sizes[0]], order[sizes[0] : sum(sizes)], order[sum(sizes) :]
    known = Vocabulary.of((sentences[i] for i in rest), most=vocabulary, least=least)
    ids, y = known.encode(sentences, length=length), torch.tensor(labels)
    parts = [leaf[torch.tensor(part)] for part in (rest, chosen, held) for leaf in (ids, y)]
    return Reviews(*parts, vocabulary=known)


def _read(path: Path) -> tuple[list[str], list[int]]:
    sentences, labels = [], []
    # The files hold Windows' dashes and dots; Python's own idea of a line would end at some of these.
    for number, line in enumerate(path.read_bytes().decode("cp1252").split("\n"), 1):
        label, _, sentence = line.strip().partition(" ")
        if not label:
            continue
        if label not in ("0", "1"):
            raise ValueError(f"{path}, line {number}: a line begins with its label, 0 or 1, and a space; got {line[:20]!r}")
        sentences.append(sentence.strip())
        labels.append(int(label))
    require(len(set(labels)) >= 2, f"{path}: sentences of both labels, 0 and 1, are expected")
    return sentences, labels
