"""One owner for every process group, and one folder that knows transports by class: held against all code."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_videoscale"
FILES = {file.relative_to(PACKAGE).as_posix(): file for file in PACKAGE.glob("**/*.py")} | {
    file.relative_to(PACKAGE.parent).as_posix(): file for file in (PACKAGE.parent / "callbacks").glob("**/*.py")
}
TRANSPORTS = "parallel/transport/"

MAKERS = {
    "DeviceMesh",
    "DeviceMesh.from_group",
    "ProcessGroup",
    "init_device_mesh",
    "init_process_group",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "split_group",
}
OWNERS = {
    "parallel/mesh.py": MAKERS,
    # Names the ranks that exchange handles of memory: it has no backend, and the transport unregisters it.
    f"{TRANSPORTS}symmetric_memory.py": {"ProcessGroup"},
}


def made_groups(source: str) -> set[str]:
    """What a file calls that makes process groups or device meshes."""
    called = {ast.unparse(node.func) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)}
    return {maker for maker in MAKERS if any(f".{name}".endswith(f".{maker}") for name in called)}


@functools.cache
def transport_classes() -> set[str]:
    """The transports there are, by class."""
    trees = [ast.parse(file.read_text()) for name, file in FILES.items() if name.startswith(TRANSPORTS)]
    classes = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return {name for name in classes if name.endswith("Transport")} - {"Transport"}


def named_transports(source: str) -> Iterator[str]:
    """The transports, or files of their folder, that a file names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(
            "lightning_videoscale.parallel.transport."
        ):
            yield from {alias.name for alias in node.names} & transport_classes()
            if node.module != "lightning_videoscale.parallel.transport":
                yield str(node.module)
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            yield from {name} & transport_classes()


def test_only_the_mesh_makes_process_groups() -> None:
    found = {
        name: made - OWNERS.get(name, set()) for name, file in FILES.items() if (made := made_groups(file.read_text()))
    }
    assert {name for name in found if not found[name]} == set(OWNERS)
    assert not any(found.values()), f"groups that nobody closes: make them with SequenceMesh; {found}"


def test_transports_are_reached_through_their_protocol() -> None:
    assert transport_classes() == {"CollectiveTransport", "SymmetricTransport"}
    found = {
        name: names
        for name, file in FILES.items()
        if not name.startswith(TRANSPORTS) and (names := list(named_transports(file.read_text())))
    }
    assert found == {"parallel/__init__.py": ["CollectiveTransport"]}, "a public name, and no other"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("dist.new_group([0])", {"new_group"}),
        ("torch.distributed.device_mesh.init_device_mesh('cpu', (2,))", {"init_device_mesh"}),
        ("DeviceMesh.from_group(group, 'cpu')", {"DeviceMesh.from_group"}),
        ("device_mesh.DeviceMesh('cpu', [0])", {"DeviceMesh"}),
        ("def f(group: ProcessGroup) -> DeviceMesh: ...", set()),
    ],
)
def test_a_group_of_another_is_found(source: str, found: set[str]) -> None:
    assert made_groups(source) == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("isinstance(x, parallel.CollectiveTransport)", ["CollectiveTransport"]),
        ("from lightning_videoscale.parallel.transport import Transport", []),
        (
            "from lightning_videoscale.parallel.transport.symmetric import SymmetricTransport",
            ["SymmetricTransport", "lightning_videoscale.parallel.transport.symmetric"],
        ),
    ],
)
def test_a_transport_by_class_is_found(source: str, found: list[str]) -> None:
    assert list(named_transports(source)) == found
