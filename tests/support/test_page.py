"""docs/support.md is what the record says, which has every family, every refused class and every reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_videoscale.families import AllFamilies, class_path
from tests.distributed.families.harness import Case
from tests.distributed.families.test_parity import FAMILIES
from tests.support.cells import cell, fused_parts, model_name
from tests.support.page import PAGE, page
from tests.support.record import COLUMNS, SPLIT, Cell, add, confirm, recorded

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_record_gives() -> None:
    assert (ROOT / PAGE).read_text() == page(recorded()), "write it: python -m tests.support"


def test_every_class_has_its_row() -> None:
    tried = {family for family, column in recorded() if column != SPLIT}
    assert tried == {*FAMILIES}, "record the others: make support FAMILY=name"
    planned = {path for path in AllFamilies[object]("SPLIT_PLANS") if path.startswith("diffusers.")}
    assert planned <= {class_path(type(family.model(Case(name)))) for name, family in FAMILIES.items()}
    for path, reason in AllFamilies[str]("REFUSALS").items():
        assert recorded()[path.rpartition(".")[2], SPLIT].reason == reason


def test_every_gap_has_its_reason() -> None:
    names = {family: model_name(family) for family in FAMILIES}
    for (family, column), of_page in recorded().items():
        assert column in (*COLUMNS, SPLIT)
        assert of_page.outcome == "exact" or of_page.reason, (family, column)
        assert (of_page.gradients is None) == (of_page.outcome != "exact")
        assert {"commit", "date", "torch", "diffusers"} <= of_page.provenance.keys()
        assert of_page.model == (family if column == SPLIT else names[family])


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_fused_is_what_the_page_says(family: str) -> None:
    of_page = recorded()[family, "fused parts"]
    assert (of_page.said, of_page.reason) == fused_parts(family), f"record it: make support FAMILY={family}"


@pytest.mark.parametrize("column", ["key mask", "per-token timesteps", "image conditions"])
def test_what_models_lack_they_lack(column: str) -> None:
    lacking = [key for key, of_page in recorded().items() if key[1] == column and of_page.outcome == "lacks"]
    assert lacking
    for family, _ in lacking:
        assert cell(no_ranks, family, column) == replace(recorded()[family, column], provenance={})


def no_ranks(size: int) -> None:
    raise AssertionError("a model that lacks something is not run on ranks")


def test_a_page_says_what_was_not_tried_and_what_fails(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    where = {"commit": "a" * 40, "date": "2026-01-02", "torch": "2.11"}
    found = [
        Cell("mine", "Mine", "ring", "fails", reason="it is off by 1e-3", provenance=where),
        Cell("mine", "Mine", "Ulysses", "exact", gradients=2e-15, provenance=where),
        Cell("mine", "Mine", "compile", "exact", gradients=3e-7, dtype="float32", provenance=where),
    ]
    add(found, results)
    assert dict(recorded(results)) == {cell.key: cell for cell in found}
    text = page(recorded(results))
    rest = " | ".join(["not tried"] * 3)
    assert f"| Mine | yes | **fails** [1] | {rest} | not tried | yes | {rest} | not tried |" in text
    assert "2e-15 in float64, 3e-07 in float32" in text and "\n1. It is off by 1e-3.\n" in text
    add([replace(found[0], outcome="exact", reason="", gradients=1e-15)], results)
    assert "| Mine | yes | yes |" in page(recorded(results))


def test_a_test_that_contradicts_the_record_fails() -> None:
    with pytest.raises(AssertionError, match="nobody has just been exact with ring"):
        confirm("nobody", "ring")
