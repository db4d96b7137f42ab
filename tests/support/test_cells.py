"""Every cell of docs/support.md, tried: what is found is what is recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from lightning_videoscale.families import AllFamilies
from lightning_videoscale.parallel import SequenceMesh, parallelize
from tests.distributed.families.test_parity import FAMILIES
from tests.distributed.families.test_refusals import unbuilt
from tests.distributed.pool import ProcessPool
from tests.distributed.zero import needs_deepspeed
from tests.support.cells import cell
from tests.support.record import COLUMNS, SPLIT, Cell, recorded

Ranks = Callable[[int], ProcessPool]
Note = Callable[[Cell], None]

REFUSED = [path.rpartition(".")[2] for path in AllFamilies[str]("REFUSALS")]


def hold(found: Cell, note: Note | None) -> None:
    """Records it, or holds it against the record."""
    if note is not None:
        note(found)
        assert found.outcome != "fails", found.reason
    else:
        of_page = recorded().get((found.family, found.column))
        assert of_page is not None, "it is not recorded: make support"
        same = replace(found, gradients=of_page.gradients, provenance=of_page.provenance)
        assert same == of_page, "it is recorded otherwise: make support"


@pytest.mark.full
@pytest.mark.parametrize(
    "column", [pytest.param(name, marks=needs_deepspeed if name == "ZeRO-3" else ()) for name in COLUMNS]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cell(ranks: Ranks, note: Note | None, family: str, column: str) -> None:
    hold(cell(ranks, family, column), note)


@pytest.mark.full
@pytest.mark.parametrize("name", REFUSED)
def test_a_class_that_is_refused(ranks: Ranks, note: Note | None, name: str) -> None:
    said = ranks(2).run(why_refused, name)
    assert said[0] == said[1]
    hold(Cell(name, name, SPLIT, "refused", reason=said[0]), note)


def why_refused(name: str) -> str:
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh:
        try:
            parallelize(unbuilt(name), mesh)
        except ValueError as error:
            return str(error).partition("cannot be split: ")[2]
    raise AssertionError(f"{name} was split")
