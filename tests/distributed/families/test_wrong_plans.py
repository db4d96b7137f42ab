"""A plan with a mistake is an error on all ranks, when it is applied or at the first call; nothing waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from lightning_videoscale.parallel import SplitPlan, find_plan
from tests.distributed.families.harness import Case, complaints
from tests.distributed.families.test_parity import FAMILIES
from tests.distributed.families.wrong_plans import plans_with_another_stream, plans_without_an_entry
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]
Mistakes = Callable[[SplitPlan], dict[str, SplitPlan]]

UNEVEN = {"text": 7, "frames": 3, "side": 3}  # no two streams have equal lengths, and ranks have more or less


def wrong_plans(case: Case, mistakes: Mistakes) -> dict[str, SplitPlan]:
    plan = find_plan(FAMILIES[case.family].model(case))
    assert plan is not None
    return mistakes(plan)


def said(case: Case, mistakes: Mistakes, names: list[str]) -> dict[str, str]:
    """What a rank says of some of the wrong plans."""
    plans = wrong_plans(case, mistakes)
    return complaints(case, FAMILIES[case.family], {name: plans[name] for name in names})


def accepted(ranks: Ranks, cases: list[Case], mistakes: Mistakes) -> list[str]:
    """The mistakes of which nobody says anything in any case; all ranks must say the same."""
    seen: Counter[str] = Counter()
    for case in cases:
        names = [*wrong_plans(case, mistakes)]
        for some in (names[first : first + 12] for first in range(0, len(names), 12)):  # a run has its timeout
            of_ranks = ranks(case.ranks).run(said, case, mistakes, some)
            for name in some:
                complaining = [bool(of_rank[name]) for of_rank in of_ranks]
                assert len(set(complaining)) == 1, (name, case, [of_rank[name] for of_rank in of_ranks])
                seen[name] += complaining[0]
    return [name for name, count in seen.items() if not count]


def test_an_entry_is_left_out(ranks: Ranks) -> None:
    settings = UNEVEN | {"condition": "token_replace"}
    assert accepted(ranks, [Case("hunyuan_video", (1, 1, 2), settings)], plans_without_an_entry) == []


@pytest.mark.full
@pytest.mark.parametrize("mesh", [(1, 1, 2), (1, 2, 2)])
@pytest.mark.parametrize("mistakes", [plans_without_an_entry, plans_with_another_stream])
@pytest.mark.parametrize("family", FAMILIES)
def test_mistakes_in_a_plan(ranks: Ranks, family: str, mistakes: Mistakes, mesh: tuple[int, int, int]) -> None:
    """Each is seen in one of the variants, if not in all: some have nothing of what an entry names."""
    cases = [Case(family, mesh, UNEVEN | variant) for variant in FAMILIES[family].variants]
    assert accepted(ranks, cases, mistakes) == []


@pytest.mark.full
@pytest.mark.parametrize("mistakes", [plans_without_an_entry, plans_with_another_stream])
@pytest.mark.parametrize("family", FAMILIES)
def test_nobody_waits_where_ranks_have_one_token(ranks: Ranks, family: str, mistakes: Mistakes) -> None:
    """Which broadcasts, and is an error on some ranks only. Of no tokens of text, a mistake may say nothing."""
    accepted(ranks, [Case(family, (1, 1, 4), {"text": 1, "batch": 1, "frames": 1, "side": 2})], mistakes)
