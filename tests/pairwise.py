"""Few cases in which every pair of settings occurs together: most faults take one setting or two to show."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Setting = tuple[str, Any]


def pairwise_cases(table: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Covers every pair of values of two factors, greedily and always in the same way.

    Args:
        table: The values of every factor; of two factors at least.

    Returns:
        Cases, each with one value for every factor. There are at least as many as the two longest factors have pairs.
    """
    settings = {factor: [(factor, value) for value in values] for factor, values in table.items()}
    missing = dict.fromkeys(
        pair
        for first, second in itertools.combinations(settings.values(), 2)
        for pair in itertools.product(first, second)
    )
    cases = []
    while missing:
        case = dict(next(iter(missing)))
        for factor in sorted(settings.keys() - case.keys(), key=lambda name: (-len(table[name]), name)):
            best = max(settings[factor], key=lambda setting: len(_pairs(setting, case, missing)))
            case[factor] = best[1]
        for pair in [pair for pair in missing if set(pair) <= set(case.items())]:
            del missing[pair]
        cases.append({factor: case[factor] for factor in table})
    return cases


def _pairs(setting: Setting, case: dict[str, Any], missing: Mapping[tuple[Setting, Setting], None]) -> list[Setting]:
    """The settings of the case that have not met this one yet."""
    return [other for other in case.items() if (setting, other) in missing or (other, setting) in missing]
