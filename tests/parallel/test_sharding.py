"""Split tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_videoscale.parallel import check_heads, split_sizes
from lightning_videoscale.parallel.mesh import check_sizes


@given(st.integers(1, 10_000), st.integers(1, 64))
def test_shares_are_even_to_a_token_and_lose_none(length: int, parts: int) -> None:
    if length < parts:
        with pytest.raises(ValueError, match=f"{length} tokens .*{parts} ranks"):
            split_sizes(length, parts)
        return
    sizes = split_sizes(length, parts)
    assert sum(sizes) == length
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1


def test_too_few_heads() -> None:
    check_heads(4, 4)
    with pytest.raises(ValueError, match=r"3 heads .* ulysses_size=4 .* Use ulysses_size <= 3"):
        check_heads(3, 4)


def test_devices_that_do_not_form_groups() -> None:
    check_sizes(12, 6, 2)
    with pytest.raises(ValueError, match=r"12 devices .*5.*\[1, 2, 3, 4, 6, 12\]"):
        check_sizes(12, 5, 5)
