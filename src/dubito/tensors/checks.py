"""Checks of arguments, which raise a `ValueError` (of types a `TypeError`) that names the argument and the value it got.

Arguments are passed by keyword, several at a time if the same rule holds for them. None passes, but for types: the argument was not
given.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

from torch import Tensor

Number = float | Tensor


def require(condition: object, message: str) -> None:
    """Raise `ValueError(message)` unless `condition` holds. Where the message costs time, write `if ...: raise` instead.

    >>> require(1 < 2, "never raised")
    """
    if not condition:
        raise ValueError(message)


def positive(**arguments: Number | None) -> None:
    """Every number must be above 0; NaN is not.

    >>> positive(scale=-1.0)
    Traceback (most recent call last):
        ...
    ValueError: scale must be positive; got -1.0
    """
    for name, value in arguments.items():
        require(value is None or _all(value > 0), f"{name} must be positive; got {value}")


def at_least(minimum: float, **arguments: Number | None) -> None:
    """Every number must be `minimum` or more.

    >>> at_least(1, draws=0)
    Traceback (most recent call last):
        ...
    ValueError: draws must be at least 1; got 0
    """
    for name, value in arguments.items():
        require(value is None or _all(value >= minimum), f"{name} must be at least {minimum}; got {value}")


def counts(**arguments: object) -> None:
    """Every value must be a whole number, 1 or more.

    >>> counts(draws=2.5)
    Traceback (most recent call last):
        ...
    ValueError: draws must be a whole number; got 2.5
    """
    for name, value in arguments.items():
        require(value is None or hasattr(value, "__index__"), f"{name} must be a whole number; got {value!r}")
        at_least(1, **{name: value})  # pyright: ignore[reportArgumentType]


def between(low: float, high: float, *, include: str = "", **arguments: Number | None) -> None:
    """Every number must lie between `low` and `high`; `include` is "low", "high" or "both" for bounds that are allowed themselves.

    >>> between(0, 1, level=1.0)
    Traceback (most recent call last):
        ...
    ValueError: level must be above 0 and below 1; got 1.0
    >>> between(0, 1, include="low", momentum=0.0)
    """
    lowest, highest = include in ("low", "both"), include in ("high", "both")
    words = f"{'at least' if lowest else 'above'} {low} and {'at most' if highest else 'below'} {high}"
    for name, value in arguments.items():
        if value is not None:
            inside = _all(value >= low if lowest else value > low) and _all(value <= high if highest else value < high)
            require(inside, f"{name} must be {words}; got {value}")


def one_of(choices: Collection[object], **arguments: object) -> None:
    """Every value must be among the choices. A choice of None is listed only if `choices` holds it, but None always passes.

    >>> one_of(("probit", "bridge"), link="logit")
    Traceback (most recent call last):
        ...
    ValueError: link must be one of 'probit', 'bridge'; got 'logit'
    """
    for name, value in arguments.items():
        listed = ", ".join(map(repr, choices))
        require(value is None or value in choices, f"{name} must be one of {listed}; got {value!r}")


def of_type(kind: type, words: str, **arguments: object) -> None:
    """Raise a `TypeError` unless every value, None too, is a `kind`, which the words describe.

    >>> of_type(dict, "a dict of weights", start=3)
    Traceback (most recent call last):
        ...
    TypeError: start must be a dict of weights; got int
    """
    for name, value in arguments.items():
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be {words}; got {type_of(value)}")


def type_of(value: object) -> str:
    """The type of a value in words, as "dict"; "the class dict" if it is a class.

    >>> type_of({}), type_of(dict)
    ('dict', 'the class dict')
    """
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def suggestion(name: str, choices: Collection[str]) -> str:
    """What to write instead of an unknown name: the nearest of the choices, if one is near, and the first twenty of them.

    >>> suggestion("entropi", ("entropy", "margin"))
    "did you mean 'entropy'? choose from entropy, margin"
    """
    if not choices:
        return "there is none"
    near = difflib.get_close_matches(name, choices, n=1)
    names, more = list(choices)[:20], len(choices) - 20
    others = f" and {more} more" if more > 0 else ""
    return f"{f'did you mean {near[0]!r}? ' if near else ''}choose from {', '.join(names)}{others}"


def _all(holds: bool | Tensor) -> bool:
    return bool(holds.all()) if isinstance(holds, Tensor) else bool(holds)
