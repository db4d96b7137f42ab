"""Pairwise coverage of a table of factors."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pairwise import pairwise_cases


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 5), min_size=2, max_size=6))
def test_every_pair_occurs(sizes: list[int]) -> None:
    table = {f"factor{i}": list(range(size)) for i, size in enumerate(sizes)}
    cases = pairwise_cases(table)
    for (first, values), (second, others) in itertools.combinations(table.items(), 2):
        assert {(case[first], case[second]) for case in cases} == set(itertools.product(values, others))
    assert all(list(case) == list(table) for case in cases)
    assert cases == pairwise_cases(table)


def test_far_fewer_than_the_product() -> None:
    table = {"backend": list(range(5)), "mesh": list(range(6))} | {f"switch{i}": [False, True] for i in range(6)}
    assert 30 <= len(pairwise_cases(table)) <= 36
