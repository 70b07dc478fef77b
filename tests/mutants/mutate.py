"""Break one thing at a time in a function: the mutants that its syntax tree gives.

Functions are found by public names, such as "dubito.MALA.move", and what such a function calls by a name of its module, as in
"dubito.HMC.move>leapfrog", so that files may move. A mutant replaces the code of the function in place, so that everyone who holds the
function sees it; run it in a process of its own.
"""

from __future__ import annotations
import __future__

import ast
import copy
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from types import CodeType, FunctionType
from typing import Any

SWAPPED: dict[type, Callable[[], ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
}
TURNED: dict[type, Callable[[], ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
DROPPED = {"sqrt", "exp", "log", "square", "rsqrt", "reciprocal", "abs", "log1p", "expm1", "sigmoid", "cumsum", "flip"}


def find(address: str) -> FunctionType:
    """The function that an address names."""
    path, *inner = address.split(">")
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        break
    else:
        raise LookupError(f"no module in {address!r}")
    try:
        for name in parts[cut:]:
            found = inspect.getattr_static(found, name) if inspect.isclass(found) else getattr(found, name)
        for name in inner:
            found = bare(found).__globals__[name]
    except (AttributeError, KeyError) as error:
        raise LookupError(f"{address!r} names nothing ({error}): give the new name in tests/mutants/targets.py") from None
    return bare(found)


def bare(found: Any) -> FunctionType:
    """The plain function inside a property, a static method or a wrapper."""
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, cached_property):
        found = found.func
    elif isinstance(found, staticmethod | classmethod):
        found = found.__func__
    found = inspect.unwrap(found)
    if not isinstance(found, FunctionType):
        raise LookupError(f"{found!r} is no function")
    return found


@dataclass(frozen=True)
class Mutant:
    """A function, and the place in its syntax tree that is changed."""

    address: str
    number: int
    before: str
    after: str

    @property
    def name(self) -> str:
        """One line that tells it from all others."""
        return f"{self.address}: {self.before} -> {self.after}"


def tree_of(address: str) -> ast.FunctionDef:
    """The definition of a function, without its decorators and docstring."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(find(address)))).body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    if ast.get_docstring(definition) is not None and len(definition.body) > 1:
        definition.body = definition.body[1:]
    return definition


def places(definition: ast.FunctionDef) -> Iterator[tuple[ast.AST, Callable[[], ast.AST]]]:
    """Every node that can be broken, with what takes its place; checks that raise, and nested signatures, are left alone."""
    silent: set[int] = set()
    for node in ast.walk(definition):
        if isinstance(node, ast.If) and any(isinstance(inner, ast.Raise) for inner in ast.walk(node)):
            silent |= {id(inner) for inner in ast.walk(node.test)}
        if isinstance(node, ast.Raise | ast.Assert | ast.arguments | ast.JoinedStr | ast.AnnAssign):
            keep = {id(inner) for inner in ast.walk(node.value)} if isinstance(node, ast.AnnAssign) and node.value else set()
            silent |= {id(inner) for inner in ast.walk(node)} - keep
    for statement in definition.body:
        for node in ast.walk(statement):
            if id(node) not in silent:
                yield from changes(node)


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, Callable[[], ast.AST]]]:
    """What can be done to one node."""
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        yield node, lambda: ast.BinOp(node.left, SWAPPED[type(node.op)](), node.right)
        for side in ("left", "right"):
            number = getattr(node, side)
            if isinstance(number, ast.Constant) and isinstance(number.value, int | float) and not isinstance(number.value, bool):
                twice = ast.Constant(2 * number.value if number.value else 1)
                yield (
                    node,
                    lambda side=side, twice=twice: ast.BinOp(
                        **{"left": node.left, "op": node.op, "right": node.right, side: twice}
                    ),
                )
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in TURNED:
        yield node, lambda: ast.Compare(node.left, [TURNED[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield node, lambda: node.operand
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in DROPPED:
        receiver = node.func.value
        inside = receiver if not (isinstance(receiver, ast.Name) and receiver.id in ("torch", "math", "F")) else node.args[0]
        yield node, lambda: inside


def mutants(address: str) -> list[Mutant]:
    """All mutants of a function."""
    found, seen = [], set()
    for number, (node, make) in enumerate(places(tree_of(address))):
        before, after = ast.unparse(node), ast.unparse(ast.fix_missing_locations(copy.deepcopy(make())))
        if before != after and (before, after) not in seen:
            seen.add((before, after))
            found.append(Mutant(address, number, before, after))
    return found


class _Swap(ast.NodeTransformer):
    def __init__(self, node: ast.AST, other: ast.AST):
        self.node, self.other = node, other

    def visit(self, node: ast.AST) -> ast.AST:
        return self.other if node is self.node else super().generic_visit(node)


def broken_code(mutant: Mutant) -> CodeType:
    """The code of the function with one thing broken."""
    function, definition = find(mutant.address), tree_of(mutant.address)
    node, make = list(places(definition))[mutant.number]
    broken = _Swap(node, make()).visit(definition)
    free = function.__code__.co_freevars
    if set(free) - {"__class__"}:
        raise LookupError(f"{mutant.address} closes over {free}: mutate the function around it")
    body: list[ast.stmt] = [broken]
    if free:
        body = [ast.ClassDef("Holder", [], [], body, [])]
    module = ast.fix_missing_locations(ast.Module(body, []))
    space: dict[str, Any] = {}
    flags = __future__.annotations.compiler_flag
    exec(compile(module, mutant.address, "exec", flags=flags, dont_inherit=True), dict(function.__globals__), space)
    made = inspect.getattr_static(space["Holder"], definition.name) if free else space[definition.name]
    return made.__code__
