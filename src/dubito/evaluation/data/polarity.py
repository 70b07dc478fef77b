"""rt-polarity: 10,662 sentences of film reviews, half of them in favour of the film and half against it.

Source: Pang and Lee (2005), https://www.cs.cornell.edu/people/pabo/movie-review-data. Licence: as published for research.
Files: `text/rt-polarity.all`, a sentence a line after its label 0 (against) or 1 (in favour), as in
https://github.com/harvardnlp/sent-conv-torch (MIT).
"""

import hashlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dubito.evaluation.data.root import locate
from dubito.evaluation.data.sentences import Vocabulary
from dubito.tensors.checks import require

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
