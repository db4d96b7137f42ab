"""A plan with a mistake is an error on all ranks, when it is applied or at the first call; nothing waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_videoscale.parallel import SplitPlan, find_plan
from tests.distributed.families.harness import Case, complaints
from tests.distributed.families.test_parity import FAMILIES
from tests.distributed.families.wrong_plans import plans_with_another_stream, plans_without_an_entry
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]


def wrong_plans(case: Case) -> dict[str, SplitPlan]:
    plan = find_plan(FAMILIES[case.family].model(case))
    assert plan is not None
    return plans_without_an_entry(plan) | plans_with_another_stream(plan)

def said(case: Case, part: slice) -> dict[str, str]:
    """What a rank says of some of the wrong plans."""
    plans = dict([*wrong_plans(case).items()][part])
    return complaints(case, FAMILIES[case.family], plans)
