"""What the columns of a table are, and how their cells become inputs of a network.

`Encoder.fit` looks at the training rows once and gives every column a `Column`; all it keeps is plain numbers and words, which go into
a JSON file. `encode` never fails on a cell: what was not there in training is answered, and named in a note.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from dubito.apps.tables.cells import Raw, date_format, missing, mostly, numbers, seconds, words
from dubito.evaluation.data.cells import listed

LEVELS = 64  # different words of a column that have an input of their own
BUCKETS = 32  # inputs that all words share by their hash, where there are more of them
KNOTS = 33  # quantiles of a column that are kept
FEWEST = 20  # rows from which an ID can be told
FAR = 1.0  # how far outside the training range a number is far, in widths of that range
DAY, YEAR = 86400.0, 365.2425 * 86400.0
PERIODS = {"hour": DAY, "weekday": 7 * DAY, "season": YEAR}
ID = re.compile(r"(?i)(^|[_ ])(id|key|uuid|guid|index|row|rownum|nr|no)$|^unnamed")
TIME = re.compile(r"(?i)year|time|date|day|month|age")

Kind = Literal["number", "date", "words"]
Frame = Mapping[str, Raw]


@dataclass(frozen=True)
class Column:
    """What is known of one column from the training rows."""

    name: str
    kind: Kind
    knots: tuple[float, ...] = ()  # quantiles of a number or a date, from the least to the greatest
    levels: tuple[str, ...] = ()  # words with an input of their own, the most frequent first
    hashed: bool = False  # there are more words, which share inputs by their hash
    gaps: bool = False  # cells were missing in training: an input says so
    form: str = ""  # how a date is written
    periods: tuple[str, ...] = ()  # of a date

    @property
    def width(self) -> int:
        """Inputs other than the number itself."""
        return self.gaps + len(self.levels) + BUCKETS * self.hashed + 2 * len(self.periods)

    @property
    def numeric(self) -> bool:
        """Whether it has a number."""
        return self.kind != "words"


class Encoded(NamedTuple):
    """Rows as inputs."""

    x: np.ndarray  # [N, F] float32: first the numbers, then the indicators
    notes: list[str]  # of every row; "" where there is nothing odd

    @property
    def odd(self) -> np.ndarray:
        """Which rows have a note, [N]."""
        return np.array([bool(note) for note in self.notes], dtype=bool)


@dataclass(frozen=True)
class Encoder:
    """The inputs that a table becomes."""

    columns: tuple[Column, ...]
    left_out: dict[str, str] = field(default_factory=dict)  # column: why it is no input
    commas: dict[str, bool] = field(default_factory=dict)  # column with commas in its numbers: whether decimals follow

    @staticmethod
    def fit(frame: Frame) -> Encoder:
        """Look at every column of the training rows."""
        columns, left_out, before = [], {}, dict[bytes, str]()
        for name, raw in frame.items():
            why, column = _useless(name, raw), describe(name, raw)
            same = name if column is None else before.setdefault(_digest(column, raw), name)
            if column is None or same != name or why:
                left_out[name] = why or ("every row has the same value" if column is None else f"the same as {same}")
            else:
                columns.append(column)
        if not columns:
            reasons = "; ".join(f"{name}: {why}" for name, why in list(left_out.items())[:5])
            raise ValueError(f"no column is left for the inputs ({reasons or 'the table has none but the target'})")
        return Encoder(tuple(columns), left_out)

    @property
    def n_numbers(self) -> int:
        """How many of the inputs are numbers."""
        return sum(column.numeric for column in self.columns)

    @property
    def width(self) -> int:
        """All inputs."""
        return self.n_numbers + sum(column.width for column in self.columns)

    def encode(self, frame: Frame) -> Encoded:
        """Rows with the same columns, in any order; a column that is not there is an error."""
        absent = [column.name for column in self.columns if column.name not in frame]
        if absent:
            raise ValueError(f"the table has no column {listed(absent)}; needed are {listed([c.name for c in self.columns])}")
        rows = len(frame[self.columns[0].name])
        notes: list[list[str]] = [[] for _ in range(rows)]
        values, indicators = [], []
        for column in self.columns:
            value, indicator = _encode(column, frame[column.name], notes)
            values += value
            indicators += indicator
        x = np.stack(values + indicators, axis=1) if rows else np.zeros((0, self.width))
        return Encoded(x.astype(np.float32), ["; ".join(note) for note in notes])

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        return asdict(self)

    @staticmethod
    def from_json(content: dict[str, Any]) -> Encoder:
        """What `to_json` gave."""
        columns: list[dict[str, Any]] = [
            {key: tuple(value) if isinstance(value, list) else value for key, value in c.items()} for c in content["columns"]
        ]
        return Encoder(tuple(Column(**column) for column in columns), dict(content["left_out"]), dict(content.get("commas", {})))


def describe(name: str, raw: Raw) -> Column | None:
    """What a column is; None if it has one value only.

    >>> describe("day", ["2024-01-01", "2024-06-30"]).kind, describe("city", ["Rome", "", "Oslo"]).levels
    ('date', ('oslo', 'rome'))
    """
    gone, values = missing(raw), numbers(raw)
    if gone.all():
        return None
    if mostly(values, gone):
        knots = _knots(values)
        gaps = bool((~np.isfinite(values)).any())
        return Column(name, "number", knots, gaps=gaps) if knots[0] < knots[-1] or gaps else None
    form = date_format(raw)
    if form is not None:
        times = seconds(raw, form)
        knots = _knots(times)
        gaps = bool((~np.isfinite(times)).any())
        constant = knots[0] == knots[-1] and not gaps
        return None if constant else Column(name, "date", knots, gaps=gaps, form=form, periods=_periods(times))
    found = Counter(word for word in words(raw) if word)
    if len(found) + bool(gone.any()) < 2:
        return None
    often = [word for word, _ in sorted(found.items(), key=lambda item: (-item[1], item[0]))]
    hashed = len(often) > LEVELS
    levels = [word for word in often[:LEVELS] if not hashed or found[word] > 1]
    return Column(name, "words", levels=tuple(levels), hashed=hashed, gaps=bool(gone.any()))


def _knots(values: np.ndarray) -> tuple[float, ...]:
    there = values[np.isfinite(values)]
    return tuple(np.quantile(there, np.linspace(0, 1, KNOTS)).tolist())


def _periods(times: np.ndarray) -> tuple[str, ...]:
    """The cycles that the dates go through: those of which there is more than one phase, and as long as the dates reach."""
    there = times[np.isfinite(times)]
    reach = there.max() - there.min()
    return tuple(name for name, length in PERIODS.items() if reach >= length / 2 and len(np.unique(there % length)) > 1)


def _useless(name: str, raw: Raw) -> str:
    """Why a column says nothing of rows to come, or ""; whether it is constant, `describe` says."""
    gone, rows = missing(raw), len(raw)
    if gone.all():
        return "every cell is empty"
    if gone.any() or rows < FEWEST or TIME.search(name):
        return ""
    values = numbers(raw)
    if np.isfinite(values).all():
        counted = bool((np.diff(values) == 1).all())
        named = ID.search(name) is not None and bool((values == np.round(values)).all()) and len(np.unique(values)) == rows
        return "an ID: the number of the row" if counted else "an ID: every row has another one" if named else ""
    found = words(raw)
    codes = len(set(found)) == rows and not any(" " in word for word in found) and date_format(raw) is None
    return "an ID: every row has another one" if codes and not mostly(values, gone) else ""


def _digest(column: Column, raw: Raw) -> bytes:
    """The same for columns that say the same."""
    content = numbers(raw).tobytes() if column.kind == "number" else "\0".join(words(raw)).encode()
    return hashlib.blake2b(content, digest_size=16).digest()


def _encode(column: Column, raw: Raw, notes: list[list[str]]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The number of a column, if it has one, and its indicators, [N] each; adds to the notes."""
    if column.kind == "words":
        return [], _encode_words(column, words(raw), notes)
    values = numbers(raw) if column.kind == "number" else seconds(raw, column.form)
    gone = ~np.isfinite(values)
    low, high = column.knots[0], column.knots[-1]
    if not column.gaps:
        _note(notes, gone, f"{column.name} is missing or unreadable, which never happened in training")
    reach = FAR * (high - low)
    far = (values < low - reach) | (values > high + reach)
    _note(notes, far, f"{column.name} is far outside the training rows' {_short(column, low)} to {_short(column, high)}")
    values = np.where(gone, column.knots[KNOTS // 2], values)
    indicators = [gone.astype(np.float64)] if column.gaps else []
    for name in column.periods:
        angle = 2 * math.pi * (values % PERIODS[name]) / PERIODS[name]
        indicators += [np.sin(angle), np.cos(angle)]
    return [values_scaled(values, column.knots)], indicators


def _short(column: Column, value: float) -> str:
    return str(np.datetime64(int(value), "s"))[:10] if column.kind == "date" else f"{value:.6g}"


def values_scaled(values: np.ndarray, knots: Sequence[float]) -> np.ndarray:
    """Numbers shifted by the median, divided by the distance of the quartiles, and clipped smoothly to at most 3 from 0.

    >>> values_scaled(np.array([0.0, 5.0, 1e9]), np.linspace(0, 10, KNOTS))
    array([-0.9486833,  0.       ,  3.       ])
    """
    middle, quarter = knots[KNOTS // 2], KNOTS // 4
    spread = knots[-1 - quarter] - knots[quarter] or (knots[-1] - knots[0]) / 2 or 1.0
    z = (values - middle) / spread
    return z / np.sqrt(1 + (z / 3) ** 2)


def _encode_words(column: Column, found: list[str], notes: list[list[str]]) -> list[np.ndarray]:
    position = {word: i for i, word in enumerate(column.levels)}
    places = np.array([position.get(word, -1) for word in found], dtype=np.int64)
    gone = np.array([not word for word in found], dtype=bool)
    if not column.gaps:
        _note(notes, gone, f"{column.name} is missing or unreadable, which never happened in training")
    if not column.hashed:
        for row in np.flatnonzero((places < 0) & ~gone):
            notes[row].append(f"{column.name} {found[row]!r} is new")
    indicators = [gone.astype(np.float64)] if column.gaps else []
    indicators += [(places == i).astype(np.float64) for i in range(len(column.levels))]
    return indicators + (_hash(found) if column.hashed else [])


def _hash(found: list[str]) -> list[np.ndarray]:
    """Every cell and each of its words adds 1 or -1 to one of the buckets."""
    table = np.zeros((len(found), BUCKETS))
    seen = dict[str, np.ndarray]()
    for row, cell in enumerate(found):
        if cell not in seen:
            total = np.zeros(BUCKETS)
            for word in {cell, *cell.split()} - {""}:
                code = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest())
                total[code % BUCKETS] += 1 if code >> 63 else -1
                total[(code >> 16) % BUCKETS] += 1 if (code >> 62) & 1 else -1
            seen[cell] = total
        table[row] = seen[cell]
    return list(table.T)


def _note(notes: list[list[str]], rows: np.ndarray, text: str) -> None:
    for row in np.flatnonzero(rows):
        notes[row].append(text)
