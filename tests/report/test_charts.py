"""Scales, labels and marks of the charts."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_videoscale.report.charts import (
    Line,
    Scale,
    distributions,
    duration,
    line_chart,
    number,
    percent,
    seconds,
    stacked_bars,
)


def plain(text: str) -> str:
    """Units are never parted from their numbers by the end of a line."""
    return text.replace("\N{NO-BREAK SPACE}", " ")


values = st.lists(st.floats(1e-6, 1e12), min_size=1, max_size=20)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.00012, "1.2e-04"),
        (0.5, "0.5"),
        (999.4, "999"),
        (999.9, "1 k"),
        (32_760, "32.8 k"),
        (2.2e9, "2.2 G"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert plain(number(value)) == text


def test_times() -> None:
    assert [plain(seconds(value)) for value in (0.0, 3.2e-5, 2.4e-9, 0.25, 0.9994, 0.9996, 16.2)] == [
        "0 s",
        "32 µs",
        "2.4 ns",
        "250 ms",
        "999 ms",
        "1 s",
        "16.2 s",
    ]
    assert [plain(duration(value)) for value in (0.31, 61, 3 * 3600 + 59)] == ["0.31 s", "1 min 1 s", "3 h 0 min"]


def test_percents() -> None:
    assert [plain(percent(share)) for share in (0.0, 0.0312, 0.0999, 0.5)] == ["0.0 %", "3.1 %", "10 %", "50 %"]


def test_ticks_are_round_and_where_they_belong() -> None:
    assert Scale(0, 100).ticks(5) == [(n / 5, str(20 * n)) if n < 6 else None for n in range(6)]
    assert [plain(text) for _, text in Scale(900, 80_000, log=True).ticks()] == [
        "1 k",
        "2 k",
        "5 k",
        "10 k",
        "20 k",
        "50 k",
    ]


@settings(deadline=None, max_examples=40)
@given(values, st.booleans())
def test_any_values_lie_on_their_scale(found: list[float], log: bool) -> None:
    scale = Scale.over(found, log=log, from_zero=not log)
    assert all(0 <= scale.place(value) <= 1 for value in found)
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= 8 and all(0 <= place <= 1 for place, _ in ticks)
    chart = line_chart("any", [Line("a", "own", list(enumerate(found)))], Scale(0, len(found)), scale)
    assert "nan" not in chart and "inf" not in chart


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_any_shares_have_a_distribution(shares: list[float]) -> None:
    chart = distributions("any", [("this run", "measured", "own", shares)], "share")
    heights = [float(y) for y in re.findall(r"L[\d.]+ (-?[\d.]+)H", chart)]
    assert min(heights) == 60.0 and max(heights) <= 1000 and not math.isnan(sum(heights))


def test_bars_share_one_scale() -> None:
    chart = stacked_bars(
        "times", [("rank 0", [1.0, 1.0]), ("rank 1", [4.0, 0.0])], [("a", "own"), ("b", "fit")], "time"
    )
    assert re.findall(r"width:([\d.]+)%", chart) == ["25.000", "25.000", "100.000"]


def test_a_line_of_very_many_points_stays_small_and_keeps_its_spikes() -> None:
    points = [(float(n), 1.0) for n in range(100_000)]
    points[31_234] = (31_234.0, 9.0)
    chart = line_chart("loss", [Line("training", "own", points)], Scale(0, 100_000), Scale(0, 10))
    [line] = re.findall(r'points="([^"]*)"', chart)
    places = [tuple(map(float, place.split(","))) for place in line.split(" ")]
    assert len(places) <= 4_001 and places[0] == (0.0, 900.0) and places[-1] == (1000.0, 900.0)
    assert places == sorted(places, key=lambda place: place[0])
    assert [place for place in places if place[1] != 900] == [(312.3, 100.0)]
