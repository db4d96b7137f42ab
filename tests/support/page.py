"""docs/support.md from the record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.record import COLUMNS, SPLIT, Cell

PAGE = Path("docs") / "support.md"
NOT_TRIED = "not tried"

ABOUT = """\
# What works with which model

Each cell is the result of a test. A tiny random model of the class runs on two ranks, and outputs, loss and gradients
are compared with one device. `make support` runs the tests, records what they find, and writes this page.

| word | what it says |
|---|---|
| yes | equal to one device: gradients to 1e-10 in float64, or to 1e-5 in float32 where compiled and under ZeRO-3 |
| no | the model, or the package for it, has no such thing |
| refused | a call with it is an error on all ranks that says why |
| **fails** | it should work and does not |
| not tried | nobody has recorded it |

Numbers in brackets lead to the reasons below the table. `videoscale doctor --model package.module:make` says of your
own model what is split, exchanged and fused, and what is not. `JointDiT` is
[an example](../examples/joint_dit.py) of one.

- **Ulysses**, **ring**: all variants of the family, with lengths that the ranks do not divide.
- **Key mask**, **per-token timesteps**, **image conditions**: by Ulysses and by ring.
- **Checkpointing**: of activations, all variants; the model's own where it has one.
- **Compile**: of every block, forward and backward at two lengths, without Inductor.
- **FSDP2**, **ZeRO-3**: losses, gradients and parameters of two steps of a Trainer.
- **LoRA**: adapters in every linear layer of the blocks, all else frozen; all variants.
- **Fused parts**: classes of modules that are replaced; all variants are exact with them, in PyTorch's reference.
- **Largest error**: of gradients, over the cells of the row: ‖g - r‖ / max(‖r‖, 1e-3 · norm of all r).
"""


def page(record: Mapping[tuple[str, str], Cell]) -> str:
    """The page as text."""
    reasons: dict[str, int] = {}
    rows = "\n".join(_rows(record, reasons))
    listed = "\n".join(f"{number}. {_sentence(reason)}" for reason, number in reasons.items())
    refused = "\n".join(
        f"| {cell.model} | {cell.reason} |" for cell in _by_model(record).values() if cell.column == SPLIT
    )
    return (
        f"{ABOUT}\n## Models with a split plan\n\n{rows}\n\n## Reasons\n\n{listed}\n\n"
        f"## Models that are refused\n\n| model | why it cannot be split |\n|---|---|\n{refused}\n\n"
        f"## Recorded with\n\n{chr(10).join(_provenance(record))}\n"
    )


def _by_model(record: Mapping[tuple[str, str], Cell]) -> dict[tuple[str, str], Cell]:
    return dict(sorted(record.items(), key=lambda entry: entry[1].model.lower()))


def _rows(record: Mapping[tuple[str, str], Cell], reasons: dict[str, int]) -> Iterator[str]:
    yield f"| model | {' | '.join(COLUMNS)} | largest error |"
    yield "|---" * (len(COLUMNS) + 2) + "|"
    models = {cell.family: cell.model for cell in _by_model(record).values() if cell.column != SPLIT}
    for family, model in models.items():
        cells = [record.get((family, column)) for column in COLUMNS]
        texts = [_text(cell, reasons) for cell in cells]
        yield f"| {model} | {' | '.join(texts)} | {_largest([cell for cell in cells if cell is not None])} |"


def _text(cell: Cell | None, reasons: dict[str, int]) -> str:
    if cell is None:
        return NOT_TRIED
    said = cell.said or {"exact": "yes", "lacks": "no", "refused": "refused", "fails": "**fails**"}[cell.outcome]
    return f"{said} [{reasons.setdefault(cell.reason, len(reasons) + 1)}]" if cell.reason else said


def _largest(cells: list[Cell]) -> str:
    found = []
    for dtype in ("float64", "float32"):
        errors = [cell.gradients for cell in cells if cell.gradients is not None and cell.dtype == dtype]
        found += [f"{max(errors):.0e} in {dtype}"] if errors else []
    return ", ".join(found) or NOT_TRIED


def _sentence(reason: str) -> str:
    return reason[0].upper() + reason[1:].rstrip(".") + "."


def _provenance(record: Mapping[tuple[str, str], Cell]) -> Iterator[str]:
    yield "| commit | date | versions | cells |\n|---|---|---|---|"
    runs: dict[tuple[tuple[str, str], ...], int] = {}
    for cell in record.values():
        run = tuple(cell.provenance.items())
        runs[run] = runs.get(run, 0) + 1
    for run, count in sorted(runs.items()):
        where = dict(run)
        versions = ", ".join(f"{name} {value}" for name, value in run if name not in ("commit", "date"))
        yield f"| {where['commit'][:10]} | {where['date']} | {versions} | {count} |"
