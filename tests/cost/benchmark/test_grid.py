"""Which micro-batches a benchmark measures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_videoscale.cost.benchmark.grid import LONG, spread_over_shapes
from lightning_videoscale.data.planning.shapes import ClipShape


def _shapes(lengths: list[int]) -> list[ClipShape]:
    return [ClipShape(1, 2, 2 * s, True) for s in lengths]


def test_short_sequences_come_alone_and_in_large_batches_long_ones_in_many_sizes() -> None:
    lengths = [256, 4096, 32_760]
    cells = spread_over_shapes(_shapes(lengths), lengths, max_tokens=4 * 32_760)
    sizes = {s: [cell.samples for cell in cells if cell.sequence_length == s] for s in lengths}
    assert sizes == {256: [1, 4, 16, 64, 511], 4096: [1, 4, 31], 32_760: [1, 2, 3, 4]}
    assert [cell.tokens for cell in cells] == sorted(cell.tokens for cell in cells)
    assert {(cell.sequence_length, cell.shape) for cell in cells} == set(zip(lengths, _shapes(lengths), strict=True))


@given(
    lengths=st.lists(st.integers(1, 100_000), min_size=1, max_size=40),
    max_shapes=st.integers(2, 12),
    max_tokens=st.none() | st.integers(1, 400_000),
)
def test_any_data_gives_a_grid(lengths: list[int], max_shapes: int, max_tokens: int | None) -> None:
    cells = spread_over_shapes(_shapes(lengths), lengths, max_shapes, max_tokens)
    chosen = {cell.sequence_length for cell in cells}
    assert chosen <= set(lengths) and {min(lengths), max(lengths)} <= chosen
    assert min(len(set(lengths)), 2) <= len(chosen) <= max_shapes
    assert len({(cell.sequence_length, cell.samples) for cell in cells}) == len(cells)
    limit = max_tokens if max_tokens is not None else 2 * max(lengths)
    assert all(cell.samples == 1 or cell.tokens <= limit for cell in cells)
    assert {cell.sequence_length for cell in cells if cell.samples == 1} == chosen
    long = [cell.samples for cell in cells if cell.sequence_length >= LONG]
    assert all(b in (1, 2, 3, 4, 6, 8) for b in long)


def test_tokens_may_be_written_as_a_float() -> None:
    """Then short sequences came in, say, 1000.0 samples, which no batch can be made of."""
    lengths = [100, 30_000]
    cells = spread_over_shapes(_shapes(lengths), lengths, max_tokens=1e5)  # type: ignore[arg-type]
    assert cells == spread_over_shapes(_shapes(lengths), lengths, max_tokens=100_000)
    assert all(type(cell.samples) is int for cell in cells)


def test_no_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="0 shapes, max_shapes=12"):
        spread_over_shapes([], [])
