"""Several methods, one after the other, each from where the one before has come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dubito.inference.fit import fit_with
from dubito.inference.method import Method, traits_of
from dubito.inference.options import FitOptions
from dubito.model import Model
from dubito.posteriors import Posterior

# one method; several; or a function of the number of examples that says which
Methods = Method | Sequence[Method] | Callable[[int], Method | Sequence[Method]]


def chain(methods: Methods, n: int) -> list[Method]:
    """The methods to run one after another for n examples.

    >>> import dubito
    >>> [type(one).__name__ for one in chain(lambda n: [dubito.MAP(epochs=n), dubito.Laplace()], 5)]
    ['MAP', 'Laplace']
    """
    if callable(methods) and not hasattr(methods, "init"):
        methods = methods(n)
    return list(methods) if isinstance(methods, Sequence) else [methods]  # pyright: ignore[reportReturnType]


def fit_in_turn(model: Model, methods: Methods, data: tuple[Any, Any], options: FitOptions) -> Posterior:
    """The posterior of the last of the methods. `options.start` is where the first begins, unless it starts anew."""
    posterior: Posterior | None = None
    for method in chain(methods, len(data[1])):
        begin = options.start if posterior is None else posterior
        posterior = fit_with(model, method, data, replace(options, start=None if traits_of(method).starts_anew else begin))
    if posterior is None:
        raise ValueError("there is no method: give one, or a list of at least one")
    return posterior
