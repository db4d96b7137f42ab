"""Whether a class's method is still the one it was written with, and which version of it.

`source_hash`      names a version of a method, and of what is wrapped around it
`source_hash_at`   that of the function which a path names
`replacement_of`   says what took a method's place after its class was written
`difference`       says how a method differs from the versions that a fused forward was written for
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from operator import attrgetter
from types import FunctionType
from typing import Any, NamedTuple

import torch

_DIGITS = 3  # for each statement: they only say where versions differ, and not whether


@functools.cache
def source_hash(function: Callable[..., Any]) -> str | None:
    """Names what a function computes, by its signature and its statements.

    Comments, docstrings, annotations and line breaks do not count. A function that wraps others (``functools.wraps``)
    is hashed with all of them, outermost first.

    Returns:
        16 hexadecimal digits of the SHA-256 of the syntax tree, a hyphen, and 3 digits for the signature and for each
        statement. None where there is no source.
    """
    try:
        forms = [_form(statement.node) for statement in _statements(function)]
    except (AttributeError, OSError, SyntaxError, TypeError, ValueError):
        return None
    return f"{_sha256(repr(forms))[:16]}-{''.join(_sha256(form)[:_DIGITS] for form in forms)}"


def source_hash_at(path: str) -> str | None:
    """Returns the `source_hash` of the function that a dotted path names now."""
    module, _, name = path.rpartition(".")
    return source_hash(getattr(import_module(module), name))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def replacement_of(cls: type, name: str) -> str | None:
    """Returns what took the place of a method after its class was written, and where it is; None if nothing did.

    A decorator in the class's own body looks the same as a wrapper put around the method later.
    """
    return _replacement(cls, name, getattr(cls, name))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def replacement_among(cls: type, names: tuple[str, ...]) -> str | None:
    """Returns the first of a class's methods that was replaced, and by what, see `replacement_of`; None if none was."""
    return _among(cls, names, _getter(names)(cls))  # by what they are now: fused forwards ask in every call


def difference(cls: type, name: str, known: Collection[str]) -> str | None:
    """Returns how a method differs from all known versions; None if it is one, and its names mean what they mean there.

    Args:
        cls: The class.
        name: Of the method.
        known: `source_hash` of each version; as a mapping, each with the releases that have it.
    """
    method, home = getattr(cls, name), _owner(cls, name).__module__
    found = source_hash(method)
    if found in known and _module(inspect.unwrap(method)) == home:
        return None
    package = home.partition(".")[0]
    version = getattr(sys.modules.get(package), "__version__", "of unknown version")
    tried = f" ({', '.join(known.values())})" if isinstance(known, Mapping) else ""
    where = "" if found is None or found in known else _first_difference(method, found, known)
    return f"in {package} {version} is not one that the fused forward was written for{tried}{where}"


def _first_difference(method: Any, found: str, known: Collection[str]) -> str:
    """Compares with the version that begins alike for longest; empty if there is nothing to compare with."""
    marks, *others = (version.partition("-")[2] for version in (found, *known))
    if not any(others):
        return ""
    statements = _statements(method)
    lengths = range(len(statements) + 1)
    alike = max(n for n in lengths if any(other.startswith(marks[: n * _DIGITS]) for other in others))
    if alike == len(statements):
        return f": it ends after line {statements[-1].line}"
    statement = statements[alike]
    return f": it differs first in line {statement.line}, `{ast.unparse(statement.node).partition(chr(10))[0]}`"


class _Statement(NamedTuple):
    line: int
    node: ast.AST


def _statements(function: Callable[..., Any]) -> list[_Statement]:
    """The signature and the statements of a function, and of all that it wraps."""
    layers: list[Any] = [function]
    inspect.unwrap(function, stop=lambda outer: layers.append(inspect.getattr_static(outer, "__wrapped__")))
    found = []
    for layer in layers:
        code = layer.__code__  # since `getsource` of a function skips what is wrapped around it
        (definition,) = _Bare().visit(ast.parse(textwrap.dedent(inspect.getsource(code)))).body
        body: list[ast.stmt] = []
        if isinstance(definition, ast.FunctionDef):
            body, definition.body = definition.body, body
        found += [_Statement(code.co_firstlineno - 1 + node.lineno, node) for node in (definition, *body)]
    return found


class _Bare(ast.NodeTransformer):
    """Drops what changes nothing of what is computed."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if node.value is None:
            return None
        return self.generic_visit(ast.copy_location(ast.Assign([node.target], node.value), node))

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else self.generic_visit(node)


def _form(node: Any) -> str:
    """As ``ast.dump``, which writes the same tree differently in another version of Python."""
    if isinstance(node, list):
        return f"[{', '.join(map(_form, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, value) for name, value in ast.iter_fields(node) if name not in ("kind", "type_params")]
    return f"{type(node).__name__}({', '.join(f'{n}={_form(x)}' for n, x in fields if x is not None and x != [])})"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


_getter = functools.cache(lambda names: attrgetter(*names))


@functools.cache
def _among(cls: type, names: tuple[str, ...], methods: tuple[Any, ...]) -> str | None:
    replaced = {name: _replacement(cls, name, method) for name, method in zip(names, methods, strict=True)}
    return next((f"{name} that was replaced by {what}" for name, what in replaced.items() if what is not None), None)


@functools.cache
def _replacement(cls: type, name: str, found: Any) -> str | None:
    owner = _owner(cls, name)
    method = owner.__dict__[name]
    if not isinstance(method, FunctionType):
        return f"a {type(method).__module__}.{type(method).__qualname__}"
    code = method.__code__  # which functools.wraps does not rename
    if code.co_qualname.rpartition(".")[0] == owner.__qualname__ and _module(method) == owner.__module__:
        return None
    return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"


def _owner(cls: type, name: str) -> type:
    for base in cls.__mro__:
        if name in base.__dict__:
            return base
    raise AttributeError(f"{cls.__qualname__} has no {name}.")


def _module(function: FunctionType) -> str:
    name: str = function.__globals__["__name__"]
    return name
