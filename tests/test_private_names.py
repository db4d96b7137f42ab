"""Outside of ``compat/``, the package touches no private name of torch, Lightning, diffusers or DeepSpeed.

A name is private where a part of it begins with one underscore. It is foreign where we import it from one of these
packages, where nothing in our package defines it, or where a class of theirs that we know or derive from has it too.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loops import _FitLoop
from torch.utils.data import DataLoader

PACKAGE = "lightning_videoscale"
ROOT = Path(__file__).parents[1]
THEIRS = ("torch", "lightning", "diffusers", "deepspeed")
NAMEDTUPLE = {"_asdict", "_fields", "_make", "_replace"}
ON_THEIR_MODULES = {"_fused_block", "_original_forward", "_sequence_context"}
"""Attributes that we give to modules of theirs."""

KNOWN = (torch.nn.Module, torch.Tensor, DataLoader, pl.LightningModule, pl.LightningDataModule, pl.Trainer, _FitLoop)
"""Classes whose objects we hold everywhere."""

FILES = {
    file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8")
    for folder in (PACKAGE, "callbacks")
    for file in sorted((ROOT / folder).rglob("*.py"))
    if not file.is_relative_to(ROOT / PACKAGE / "compat") and not file.is_relative_to(ROOT / PACKAGE / "callbacks")
}


def is_private(name: str) -> bool:
    return any(re.match(r"_(?!_)\w", part) for part in name.split("."))


def is_theirs(module: str) -> bool:
    return module.partition(".")[0] in THEIRS


def definitions(tree: ast.AST) -> Iterator[str]:
    """What a file defines: functions, classes, arguments, variables and attributes of ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node.attr


def is_self(node: ast.AST) -> bool:
    is_super = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    return is_super or (isinstance(node, ast.Name) and node.id in ("self", "cls"))


@functools.cache
def private_names_of(cls: type) -> frozenset[str]:
    """The private attributes and methods that a class's own body defines."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):  # written in C
        return frozenset(filter(is_private, vars(cls)))
    return frozenset(filter(is_private, (*vars(cls), *definitions(ast.parse(source)))))


@functools.cache
def known_names() -> frozenset[str]:
    return frozenset().union(*(private_names_of(base) for cls in KNOWN for base in cls.__mro__ if base is not object))


def inherited_names(module: str, name: str) -> frozenset[str]:
    """The private names of the bases that a class of ours has from these packages."""
    cls = getattr(importlib.import_module(module), name)
    theirs = [base for base in cls.__mro__ if is_theirs(base.__module__)]
    return frozenset().union(*map(private_names_of, theirs)) if theirs else frozenset()


def is_foreign(name: str, ours: Set[str]) -> bool:
    return name not in ours or name in known_names()


def formatted_names(string: ast.JoinedStr) -> Iterator[str]:
    """The private names that follow a dot in the fixed parts of an f-string."""
    for part in string.values:
        if isinstance(part, ast.Constant):
            yield from re.findall(r"\.(_[A-Za-z]\w*)", str(part.value))


def touched(source: str, ours: Iterable[str], module: str | None = None) -> list[str]:
    """The private names of others in a file, with their lines.

    Args:
        source: The file.
        ours: What our package defines.
        module: The file's module, to look up the bases of its classes.
    """
    tree, ours = ast.parse(source), frozenset(ours) | NAMEDTUPLE | ON_THEIR_MODULES
    found: list[tuple[int, str]] = []
    others, prose = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            others |= {
                alias.asname or alias.name.partition(".")[0] for alias in node.names if not is_theirs(alias.name)
            }
            found += [(node.lineno, a.name) for a in node.names if is_theirs(a.name) and is_private(a.name)]
        elif isinstance(node, ast.ImportFrom) and is_theirs(node.module or ""):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(node.lineno, name) for name in names if is_private(name)]
        elif isinstance(node, ast.Expr):
            prose.add(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_self(node.value):
            of_another = isinstance(node.value, ast.Name) and node.value.id in others
            if not of_another and is_foreign(node.attr, ours):
                found.append((node.lineno, ast.unparse(node)))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in ours:
            found.append((node.lineno, ast.unparse(node)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
            text = node.value
            is_name = re.fullmatch(r"_[A-Za-z]\w*", text) and is_foreign(text, ours)
            if is_name or re.search(rf"\b({'|'.join(THEIRS)})(\.\w+)*\._[a-z]|\[_\w+\]", text):
                found.append((node.lineno, repr(text)))
        elif isinstance(node, ast.JoinedStr):
            found += [(node.lineno, f"'.{name}'") for name in formatted_names(node) if is_foreign(name, ours)]
        elif isinstance(node, ast.ClassDef) and module is not None and node in tree.body:
            inherited = inherited_names(module, node.name)
            used = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and is_self(n.value)}
            defined = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
            found += [(node.lineno, f"{node.name}.{name}") for name in sorted((used | defined) & inherited)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "object.__setattr__":
            found += [(node.lineno, ast.unparse(node))] if not is_self(node.args[0]) else []
    lines = enumerate(source.splitlines(), 1)
    found += [(number, line.strip()) for number, line in lines if "type: ignore[method-assign]" in line]
    return [f"{line}: {name}" for line, name in sorted(set(found))]


@functools.cache
def ours() -> frozenset[str]:
    """What our package defines; not while tests are collected, which every worker does."""
    return frozenset(name for source in FILES.values() for name in definitions(ast.parse(source)))


@pytest.mark.parametrize("file", FILES)
def test_no_private_name_of_another_package(file: str) -> None:
    path = file if file.startswith(PACKAGE) else f"{PACKAGE}/{file}"
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    assert not touched(FILES[file], ours(), module), "put a documented function into compat/, and call that"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from torch._C import _x", ["1: torch._C._x"]),
        ("from lightning.pytorch.loops import _FitLoop as Loop", ["1: lightning.pytorch.loops._FitLoop"]),
        ("def f():\n    import torch._dynamo as dynamo", ["2: torch._dynamo"]),
        ("import torch\ntorch._assert_async(x)", ["2: torch._assert_async"]),
        ("module._forward_hooks", ["1: module._forward_hooks"]),
        ("self._never_defined_here", ["1: self._never_defined_here"]),
        ("module._modules = {}\nself._modules = {}", ["1: module._modules"]),
        ("getattr(model, '_cp_plan', None)", ["1: '_cp_plan'"]),
        ("{**vars(module), '_modules': None}", ["1: '_modules'"]),
        ("name = 'torch.nn._reduction'", ["1: 'torch.nn._reduction'"]),
        ("path = f'{home}._get_projections'", ["1: '._get_projections'"]),
        ("def _own(): ...\npath = f'{home}._own'", []),
        ("object.__setattr__(loader, 'sampler', x)", ["1: object.__setattr__(loader, 'sampler', x)"]),
        ("m.log = f  # type: ignore[method-assign]", ["1: m.log = f  # type: ignore[method-assign]"]),
        ("import os\nos._exit(1)", []),
        ("class A:\n    def __init__(self, other):\n        self._x = other._x", []),
        ("kind._asdict()", []),
        ("from torch.nn import functional", []),
    ],
)
def test_a_private_name_is_found(source: str, found: list[str]) -> None:
    assert touched(source, definitions(ast.parse(source))) == found


def test_what_a_base_class_defines_is_theirs() -> None:
    """``_timeout`` is ours elsewhere, and Lightning's in a strategy."""
    inherited = inherited_names("lightning.pytorch.strategies", "DDPStrategy")
    assert {"_timeout", "_ddp_kwargs", "_setup_model"} <= inherited
