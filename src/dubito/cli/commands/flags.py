"""Command-line flags from dataclass fields, by tyro: several dataclasses side by side, each under its own heading."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import redirect_stderr
from inspect import Parameter, Signature, cleandoc
from typing import Annotated, Any

import tyro
from tyro.conf import OmitArgPrefixes, SuppressFixed, arg
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from dubito.cli.commands.errors import UsageError
from dubito.posteriors.families import FAMILIES, Family


def parse(kind: Any, args: Sequence[str], *, prog: str, about: str) -> Any:
    """A dataclass, or the result of a function, from the command line. Input that cannot be parsed is a UsageError of one line."""
    output = io.StringIO()
    try:
        with redirect_stderr(output):
            config = (SuppressFixed,)
            return tyro.cli(kind, prog=prog, description=cleandoc(about), args=list(args), config=config, registry=_registry())
    except SystemExit as end:
        if not end.code:
            raise  # after --help
        raise UsageError(f"{_one_line(output.getvalue())} (see {prog} --help)") from None


def _registry() -> ConstructorRegistry:
    """A registry in which fields with a variational family take its name, and a number or None is a number."""
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def family(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        """A variational family by its name."""
        if info.type is not Family:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="FAMILY",
            instance_from_str=lambda words: FAMILIES[words[0]](),
            is_instance=lambda value: isinstance(value, Family),
            str_from_instance=lambda value: [type(value).__name__],
        )

    @registry.primitive_rule
    def optional_number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        """A number, or the word None."""
        number = next((kind for kind in (int, float) if info.type == kind | None), None)
        if number is None:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar=number.__name__.upper(),
            instance_from_str=lambda words: None if words[0] == "None" else number(words[0]),
            is_instance=lambda value: value is None or isinstance(value, number),
            str_from_instance=lambda value: [str(value)],
        )

    return registry


def combine(groups: Mapping[str, Any], *, prefixed: Container[str] = ()) -> Callable[..., dict[str, Any]]:
    """Several dataclasses to `parse` as one, each under its name. A group is a dataclass, or an instance that gives the defaults.

    The flags of the groups in `prefixed` begin with the name of the group, as --start.epochs.
    """
    parameters = []
    for name, group in groups.items():
        kind = group if isinstance(group, type) else type(group)
        default = Parameter.empty if isinstance(group, type) else group
        heading = Annotated[kind, arg(help=headline(kind))]
        heading = heading if name in prefixed else Annotated[heading, OmitArgPrefixes]
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, annotation=heading, default=default))
    return arguments_of(Signature(parameters))


def arguments_of(signature: Signature, docs: str | None = None) -> Callable[..., dict[str, Any]]:
    """A function that returns its arguments as a dict and has this signature; `docs` may describe them."""

    def gather(**values: Any) -> dict[str, Any]:
        """The arguments."""
        return values

    gather.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    gather.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
    gather.__doc__ = docs
    return gather


def _one_line(box: str) -> str:
    """The error and the suggestion, if any, from the box in which tyro explains an error."""
    _, *lines = re.sub(r"\x1b\[[0-9;]*m", "", box).translate(str.maketrans("│╭╮╰╯─", "     -")).splitlines() or [""]
    parts: list[list[str]] = [[]]
    for line in lines:
        if re.fullmatch(r" *-+ *", line):
            parts.append([])
        elif not line.startswith(" " * 10):  # lines indented this far are the help text of a flag
            parts[-1].append(line.strip())
    error, *more = [text for part in parts if (text := " ".join(part).strip())] or [" ".join(box.split())]
    return "; ".join([error.rstrip("."), *(text for text in more if text.startswith("Perhaps"))])


def headline(documented: Any) -> str:
    r"""The first paragraph of a docstring in one line, with formulas in plain letters.

    >>> def mode(): r":math:`\theta` of the largest :math:`\log p(\theta \mid D)`."
    >>> headline(mode)
    'theta of the largest log p(theta | D).'
    """
    paragraph = " ".join(cleandoc(documented.__doc__ or "").partition("\n\n")[0].split())
    sentence = re.sub(r"[,:]?$", ".", paragraph.removesuffix("."), count=1)  # also where it goes on with a formula
    return re.sub(r":math:`(.*?)`", lambda found: _plain(found[1]), sentence)


def _plain(formula: str) -> str:
    formula = re.sub(r"\\(?:mathrm|mathbf|text)\{(.*?)\}", r"\1", formula)
    formula = formula.replace(r"\mid", "|").replace(r"\,", "").replace(r"\;", "")
    return re.sub(r"\\([A-Za-z]+)", r"\1", formula)
