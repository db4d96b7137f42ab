"""Who has which heads, and how much goes from whom to whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_videoscale.parallel.ulysses import assign_heads


@st.composite
def groups(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """Tokens of each rank, query heads, and key/value heads."""
    lengths = draw(st.lists(st.integers(1, 99), min_size=1, max_size=8))
    kv_heads = draw(st.integers(1, 12))
    group = draw(st.integers(-(-len(lengths) // kv_heads), 16))
    return tuple(lengths), kv_heads * group, kv_heads


@given(groups())
def test_every_query_head_is_on_one_rank_with_its_key_value_head(problem: tuple[tuple[int, ...], int, int]) -> None:
    lengths, heads, kv_heads = problem
    assignments = [assign_heads(rank, lengths, lengths, heads, kv_heads) for rank in range(len(lengths))]
    assert assignments[0].qkv is not None
    query, key, value = assignments[0].qkv.heads
    assert [head for share in query for head in share] == list(range(heads))
    assert key == value and assignments[0].out.heads == (query,)
    for rank, assignment in enumerate(assignments):
        served = [head for head, times in zip(key[rank], assignment.repeats, strict=True) for _ in range(times)]
        assert served == [head * kv_heads // heads for head in query[rank]]


@given(groups())
def test_what_one_rank_sends_another_receives(problem: tuple[tuple[int, ...], int, int]) -> None:
    lengths, heads, kv_heads = problem
    assignments = [assign_heads(rank, lengths, lengths, heads, kv_heads) for rank in range(len(lengths))]
    for sender, theirs in enumerate(assignments):
        for reader, mine in enumerate(assignments):
            assert theirs.qkv.by_heads[reader] == mine.qkv.by_tokens[sender]
            assert theirs.out.by_heads[reader] == mine.out.by_tokens[sender]


@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "even"),
    [((8, 8), 4, 4, True), ((9, 8), 4, 4, True), ((8, 8), 5, 5, False), ((8, 8), 4, 2, False), ((8, 8), 2, 1, False)],
)
def test_what_is_even(lengths: tuple[int, ...], heads: int, kv_heads: int, even: bool) -> None:
    assignment = assign_heads(0, lengths, lengths, heads, kv_heads)
    assert assignment.qkv.even is even
    assert assignment.out.even is (heads % 2 == 0)
    assert assign_heads(0, lengths, lengths, heads, kv_heads) is assignment  # made once for all layers
