"""Which budget counts: given, found or adopted, now and in a run that goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_videoscale.cost import BucketBudget, Calibration
from lightning_videoscale.data import AutoBudget
from lightning_videoscale.data.budgets import Budgets
from tests.data.planning.tables import LENGTHS, WAN_14B, table_of

GIVEN, FOUND, ADOPTED = BucketBudget(80, 6400.0), BucketBudget(160, 12800.0), BucketBudget(240, 19200.0)


@dataclass
class Search:
    """Finds `FOUND`, and costs of Wan-14B."""

    auto: AutoBudget

    def run(self, trainer: Any) -> Calibration:
        return Calibration(FOUND, WAN_14B)


def test_a_budget_that_is_given_counts_and_nothing_is_searched() -> None:
    budgets = Budgets(GIVEN, None)
    assert budgets.find(Search, None) is None and budgets.training == GIVEN  # type: ignore[arg-type]
    assert budgets.of(table_of([0, 3]), None, is_training=False) == (GIVEN, None)
    assert budgets.state_dict() == {}


def test_a_budget_is_found_once_and_only_for_training() -> None:
    budgets = Budgets("auto", None)
    assert budgets.find(Search, None) == FOUND and budgets.find(Search, None) is None  # type: ignore[arg-type]
    table = table_of([0, 4])
    assert budgets.of(table, None, is_training=True) == (FOUND, WAN_14B)
    longest, p = max(LENGTHS), WAN_14B.power_law.p
    assert budgets.of(table, None, is_training=False) == (BucketBudget(longest, longest**p, p), WAN_14B)


def test_what_was_adopted_goes_before_what_was_found_when_a_run_goes_on() -> None:
    before = Budgets("auto", None)
    before.find(Search, None)  # type: ignore[arg-type]
    found_only = before.state_dict()
    before.adopt(Calibration(ADOPTED))
    again = Budgets("auto", None)
    again.load_state_dict(before.state_dict())
    assert again.training == ADOPTED and again.state_dict() == before.state_dict()

    explicit = Budgets(GIVEN, None)
    explicit.load_state_dict(found_only)
    assert explicit.training == GIVEN, "an argument goes before what another run found"
    named = Budgets(AutoBudget("matrix.json"), None)
    named.load_state_dict(found_only)
    assert named.training is None, "a matrix that is named is read again"
