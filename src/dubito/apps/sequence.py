"""Several methods one after another, each starting from the posterior of the one before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dubito.inference.fit import fit_with
from dubito.inference.method import Method, traits_of
from dubito.inference.options import FitOptions
from dubito.model import Model
from dubito.posteriors import Posterior

# a method, several of them, or a function of the number of examples that returns either
Methods = Method | Sequence[Method] | Callable[[int], Method | Sequence[Method]]


def chain(methods: Methods, n: int) -> list[Method]:
    """The methods to run one after another for n examples.

    >>> import dubito
    >>> [type(method).__name__ for method in chain(lambda n: [dubito.MAP(epochs=n), dubito.Laplace()], 5)]
    ['MAP', 'Laplace']
    """
    if callable(methods) and not hasattr(methods, "init"):
        methods = methods(n)
    return list(methods) if isinstance(methods, Sequence) else [methods]  # pyright: ignore[reportReturnType]


def fit_in_turn(model: Model, methods: Methods, data: tuple[Any, Any], options: FitOptions) -> Posterior:
    """Fit the methods one after another; the posterior of the last. The first starts at `options.start`, if it uses a start."""
    posterior: Posterior | None = None
    for method in chain(methods, len(data[1])):
        begin = options.start if posterior is None else posterior
        posterior = fit_with(model, method, data, replace(options, start=None if traits_of(method).starts_anew else begin))
    if posterior is None:
        raise ValueError("the list of methods is empty: give at least one method")
    return posterior
