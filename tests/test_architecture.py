"""The order of the house: who imports whom, what classes are called, how long signatures and folders are.

The table of rooms in docs/architecture.md is held against every import in the package.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Set
from pathlib import Path

import pytest

PACKAGE = "lightning_videoscale"
ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| `(?P<room>[\w/]+)` \|(?P<rooms>[^|]*)\| (?P<lightning>yes|no) \|$", re.MULTILINE)
TABLE = list(ROW.finditer((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")))

ALLOWED = {row["room"]: set(re.findall(r"`(\w+)`", row["rooms"])) for row in TABLE}
"""By room, the other rooms that it may import."""

PLAIN = {row["room"] for row in TABLE if row["lightning"] == "no"}
"""Rooms that know nothing of Lightning."""

MOST_PARAMETERS = 12
MOST_FILES = 25


def imported(source: str) -> Iterator[str]:
    """The dotted name of everything that a file imports, at its top, in functions and for type checkers."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def violations(source: str, folder: str) -> list[str]:
    """What a file in a folder of the package must not import; of several rows, the nearest holds."""
    rows = sorted((room for room in ALLOWED if f"{folder}/".startswith(f"{room}/")), key=len)[-1:]
    own = folder.partition("/")[0]
    found = []
    for name in imported(source):
        package, room, *_ = *name.split("."), ""
        if package == PACKAGE and room != own and any(room not in ALLOWED[row] for row in rows):
            found.append(name)
        speaks_lightning = package in ("lightning", "pytorch_lightning") or name.startswith(
            f"{PACKAGE}.compat.lightning"
        )
        if speaks_lightning and not PLAIN.isdisjoint(rows):
            found.append(name)
    return found


def rooms() -> list[str]:
    """The folders of the package, and the modules beside them."""
    entries = [
        entry for entry in (ROOT / PACKAGE).iterdir() if entry.name not in ("csrc", "__init__.py", "__pycache__")
    ]
    return sorted(entry.stem for entry in entries if entry.is_dir() or entry.suffix == ".py")


def files_of(room: str) -> list[Path]:
    """The source files of a room, a folder or a module."""
    home = ROOT / PACKAGE / room
    return sorted(home.glob("**/*.py")) or [home.with_suffix(".py")]


def names_in_all(file: Path) -> set[str]:
    """What a module lists in ``__all__``."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def long_signatures(source: str, public_ops: Set[str] = frozenset()) -> dict[str, int]:
    """Functions of a file with too many parameters, ``self`` not counted, and with how many.

    Left out are public constructors, public ops, what implements an op, see `define_op`, whose parameters are those
    of the op's schema, and Triton's functions. A kernel's parameters are a schema too, as a CUDA kernel's are: each
    pointer, stride and constant is typed, specialised and passed by itself, and compiled code is found by them.
    """
    tree, found = ast.parse(source), {}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "define_op"]
    exempt = public_ops | {ast.unparse(arg) for call in calls for arg in call.args[-2:]}
    for owner in ast.walk(tree):
        is_public_class = isinstance(owner, ast.ClassDef) and not owner.name.startswith("_")
        for node in ast.iter_child_nodes(owner):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                given = node.args
                names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                names += [each.arg for each in (given.vararg, given.kwarg) if each is not None]
                count = len(names) - (isinstance(owner, ast.ClassDef) and names[:1] in (["self"], ["cls"]))
                is_triton = any(ast.unparse(line).startswith("triton.jit") for line in node.decorator_list)
                is_exempt = is_triton or node.name in exempt or (is_public_class and node.name == "__init__")
                if count > MOST_PARAMETERS and not is_exempt:
                    found[node.name] = count
    return found


def test_the_table_names_every_room() -> None:
    assert sorted(room for room in ALLOWED if "/" not in room) == rooms()
    assert set.union(*ALLOWED.values()) <= set(rooms())


@pytest.mark.parametrize("room", rooms())
def test_a_room_imports_what_the_table_allows(room: str) -> None:
    home = ROOT / PACKAGE / room
    folders = {
        file: file.relative_to(home.parent).parent.as_posix() if home.is_dir() else room for file in files_of(room)
    }
    found = {str(file): names for file, folder in folders.items() if (names := violations(file.read_text(), folder))}
    assert not found, "correct these imports, or the table in docs/architecture.md"


@pytest.mark.parametrize("room", rooms())
def test_no_function_takes_too_many_parameters(room: str) -> None:
    ops = names_in_all(ROOT / PACKAGE / "kernels" / "__init__.py") if room == "kernels" else frozenset()
    found = {str(file): names for file in files_of(room) if (names := long_signatures(file.read_text(), ops))}
    assert not found, "put what belongs together into one object"


@pytest.mark.parametrize("home", ["benchmarks", "csrc", "docs", "examples", PACKAGE, "tests"])
def test_no_folder_holds_too_many_files(home: str) -> None:
    folders = [folder for folder in (ROOT / home).glob("**/") if folder.name != "__pycache__"]
    counts = {str(folder): sum(entry.is_file() for entry in folder.iterdir()) for folder in folders}
    assert not {folder: count for folder, count in counts.items() if count > MOST_FILES}, "divide by what things are"


def type_names(source: str) -> Iterator[str]:
    """The classes that a file defines, and the aliases of types at its top, also those for type checkers."""
    tree = ast.parse(source)
    yield from (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    yield from aliases(tree.body)


def aliases(lines: list[ast.stmt]) -> Iterator[str]:
    """The names that stand for other types: for generic ones with arguments, unions and what is marked as an alias."""
    for line in lines:
        if isinstance(line, (ast.If, ast.Try)):
            yield from aliases([*line.body, *line.orelse])
        elif isinstance(line, ast.Assign) and isinstance(line.value, (ast.Subscript, ast.BinOp)):
            yield from filter(is_capitalised, map(ast.unparse, line.targets))
        elif isinstance(line, ast.AnnAssign) and ast.unparse(line.annotation).endswith("TypeAlias"):
            yield ast.unparse(line.target)


def is_capitalised(name: str) -> bool:
    """Whether a name is written as those of types are."""
    return re.fullmatch(r"_*[A-Z]\w*", name) is not None and not name.isupper()


def test_the_name_of_a_type_has_one_meaning() -> None:
    files = [file for room in rooms() for file in files_of(room)]
    names = [(name, file.name) for file in files for name in type_names(file.read_text())]
    counts = Counter(name for name, _ in names)
    assert not [(name, file) for name, file in names if counts[name] > 1], "name each by what it is"


def test_names_of_types_are_found() -> None:
    source = """
class Class:
    class Inner: ...
Shape = tuple[int, int]
_Run = Callable[[], None]
Size = int | None
Named: TypeAlias = Size
if TYPE_CHECKING:
    Checked = Mapping[str, int]
else:
    Checked = dict
SIZES, first = SHAPES[0], [1][0]
SIZE = SIZES[0]
_Value = TypeVar("_Value")
def function():
    Local = tuple[int]
"""
    assert sorted(type_names(source)) == ["Checked", "Class", "Inner", "Named", "Shape", "Size", "_Run"]


@pytest.mark.parametrize(
    ("folder", "source", "found"),
    [
        ("data", "def f():\n    from lightning_videoscale.callbacks import LossWeighting", ["callbacks.LossWeighting"]),
        ("metrics", "if TYPE_CHECKING:\n    import lightning_videoscale.data.geometry", ["data.geometry"]),
        ("cost", "from lightning_videoscale import data", ["data"]),
        ("parallel/transport", "from lightning_videoscale import VideoDataModule", ["VideoDataModule"]),
        ("data/planning", "from lightning_videoscale.timing import StepTimer", ["timing.StepTimer"]),
        ("data/loading", "from lightning_videoscale.timing import StepTimer", []),
        ("cost", "from lightning_videoscale.timing import StepTimer", ["timing.StepTimer"]),
        ("cost/benchmark", "from lightning_videoscale.timing import StepTimer", []),
        ("cost/benchmark", "from lightning_videoscale.data import VideoDataModule", ["data.VideoDataModule"]),
        ("kernels/triton", "from lightning_videoscale.kernels import head_types", []),
    ],
)
def test_a_forbidden_import_is_found(folder: str, source: str, found: list[str]) -> None:
    assert violations(source, folder) == [f"{PACKAGE}.{name}" for name in found]


PARTS = ("planning", "shards", "packing", "encoding", "loading")
"""Of the room ``data``; each imports those before it."""


@pytest.mark.parametrize("part", PARTS)
def test_parts_of_data_import_those_before_them(part: str) -> None:
    later = tuple(f"{PACKAGE}.data.{other}." for other in PARTS[PARTS.index(part) + 1 :])
    files = (ROOT / PACKAGE / "data" / part).glob("**/*.py")
    assert not [name for file in files for name in imported(file.read_text()) if later and name.startswith(later)]


def test_plain_cost_never_imports_the_part_that_knows_lightning() -> None:
    names = (name for file in (ROOT / PACKAGE / "cost").glob("*.py") for name in imported(file.read_text()))
    assert not [name for name in names if name.startswith(f"{PACKAGE}.cost.benchmark")]


def test_lightning_stays_at_the_rim() -> None:
    assert violations("import lightning.pytorch as pl", "cost") == ["lightning.pytorch"]
    assert violations("import lightning.pytorch as pl", "cost/benchmark") == []
    assert violations("import lightning.pytorch as pl", "data/planning") == ["lightning.pytorch"]
    assert violations("import lightning.pytorch as pl", "data") == []
    ours = f"{PACKAGE}.compat.lightning.transferred"
    assert violations("from lightning_videoscale.compat.lightning import transferred", "kernels") == [ours]
    assert violations("from lightning_videoscale.compat.lightning import transferred", "strategies") == []


def test_a_long_signature_is_found() -> None:
    many = ", ".join(f"x{i}" for i in range(MOST_PARAMETERS))
    source = f"""
class Public:
    def __init__(self, {many}, one_more): ...
    def fits(self, {many}): ...
    def method(self, {many}, *, one_more): ...

class _Private:
    def __init__(self, {many}, **more): ...

def op({many}, *more): ...
def schema({many}, one_more): ...
def outer():
    def inner({many}, one_more): ...
@triton.jit
def device_function({many}, one_more): ...
@triton.jit(do_not_specialize=["x1"])
def kernel({many}, one_more): ...
@functools.cache
def cached({many}, one_more): ...

define_op("library::op", "() -> ()", schema, fake)
"""
    assert long_signatures(source, {"op"}) == {"method": 13, "__init__": 13, "inner": 13, "cached": 13}
