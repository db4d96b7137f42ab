"""Charts without a script: marks in SVG that stretch to any width, labels in HTML that keep their size.

Colours come from the page's style sheet by class, so that charts follow light and dark. Every function returns markup
whose texts are escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

_SIDE = 1000
_BINS = 48
_GAP = "\N{NO-BREAK SPACE}"
_TIMES = ((2 * 3600, "h"), (120, "min"), (1, "s"))


class Line(NamedTuple):
    """One series: its name, class of colour, points, and whether they are joined."""

    name: str
    style: str
    points: Sequence[tuple[float, float]]
    joined: bool = True


class Sign(NamedTuple):
    """A vertical line at some x, with what happened there."""

    x: float
    text: str


@dataclass(frozen=True)
class Scale:
    """Maps numbers to the unit interval, and says which to label.

    Attributes:
        low: What lies at 0.
        high: What lies at 1.
        unit: What is written behind a label.
        log: Whether equal factors are equally far apart.
        title: What the axis shows.
    """

    low: float
    high: float
    unit: str = ""
    log: bool = False
    title: str = ""

    @classmethod
    def over(
        cls, values: Sequence[float], unit: str = "", log: bool = False, from_zero: bool = False, title: str = ""
    ) -> Scale:
        """A scale with room for all values."""
        low, high = min(values), max(values)
        if log:
            return cls(low / 1.15, high * 1.15, unit, log, title)
        low = min(0.0, low) if from_zero else low
        margin = 0.08 * (high - low) or abs(high) or 1.0
        return cls(low if from_zero or low == high else low - margin / 4, high + margin, unit, title=title)

    def place(self, value: float) -> float:
        """Where a value lies, within [0, 1]."""
        low, high, value = (math.log(v) for v in (self.low, self.high, value)) if self.log else (
            self.low, self.high, value)  # fmt: skip
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def ticks(self, count: int = 5) -> list[tuple[float, str]]:
        """Places and texts of some round numbers."""
        values = _log_ticks(self.low, self.high, count) if self.log else _ticks(self.low, self.high, count)
        return [(self.place(value), number(value) + self.unit) for value in values]


def number(value: float) -> str:
    """Three digits, with k, M, G or T behind."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "∞"
    for factor, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor * 0.9995:
            return f"{value / factor:.3g}{_GAP}{suffix}"
    return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.1e}"


def seconds(value: float) -> str:
    """A time in the unit that fits it."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"), (1e-12, "ps")):
        if abs(value) >= factor * 0.9995:
            return f"{value / factor:.3g}{_GAP}{unit}"
    return f"{value:.2g}{_GAP}s"


def duration(value: float) -> str:
    """A time in two units at most."""
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}{_GAP}h {minutes}{_GAP}min"
    return f"{minutes}{_GAP}min {rest}{_GAP}s" if minutes else f"{value:.3g}{_GAP}s"


def percent(share: float) -> str:
    """A share in percent, to one decimal where that says something."""
    return f"{100 * share:.{0 if abs(share) >= 0.0995 else 1}f}{_GAP}%"


def line_chart(label: str, lines: Sequence[Line], x: Scale, y: Scale, signs: Sequence[Sign] = ()) -> Markup:
    """Lines, or dots where points are not joined, over a grid."""
    marks = [_sign(x.place(sign.x), sign.text) for sign in signs]
    for line in lines:
        places = [(_SIDE * x.place(a), _SIDE * (1 - y.place(b))) for a, b in line.points]
        if line.joined and len(places) > 1:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in _seen_of(places))
            marks.append(Markup('<polyline class="line {}" points="{}"/>').format(line.style, path))
        else:
            dots = "".join(f"M{a:.1f} {b:.1f}h0" for a, b in places)
            marks.append(Markup('<path class="dot {}" d="{}"/>').format(line.style, dots))
    legend = _legend([(line.name, line.style) for line in lines]) if len(lines) > 1 else Markup()
    return Markup('<div class="chart" role="img" aria-label="{}">{}{}</div>').format(
        label, _plot(Markup().join(marks), x, y), legend
    )


def distributions(label: str, rows: Sequence[tuple[str, str, str, Sequence[float]]], title: str) -> Markup:
    """Histograms above one axis of percents: per row a name, what kind of figure, a class of colour and shares.

    The axis is called ``title``.
    """
    everything = np.concatenate([np.asarray(values, np.float64) for *_, values in rows])
    scale = Scale(0.0, max(0.02, float(np.quantile(everything, 0.995)) * 1.1))
    parts = [_distribution(name, how, style, np.asarray(values), scale) for name, how, style, values in rows]
    ticks = _ticks(scale.low, scale.high, 5)
    axis = Markup().join(_tick("left", scale.place(tick), percent(tick) if tick else "0") for tick in ticks)
    return Markup(
        '<div class="ridges" role="img" aria-label="{}">{}<div class="ridge axis"><i class="x">{}</i></div>'
        '<p class="axis-title">{}</p></div>'
    ).format(label, Markup().join(parts), axis, title)


def stacked_bars(
    label: str, rows: Sequence[tuple[str, Sequence[float]]], parts: Sequence[tuple[str, str]], title: str
) -> Markup:
    """One bar of seconds per row, its parts side by side, all to one scale.

    ``parts`` names and colours them, and the axis is called ``title``.
    """
    longest = max((sum(values) for _, values in rows), default=0.0) or 1.0
    drawn = []
    for name, values in rows:
        pieces = Markup().join(
            Markup('<b class="{}" style="width:{:.3f}%" title="{} {}"></b>').format(
                style, 100 * value / longest, title, percent(value / (sum(values) or 1.0))
            )
            for (title, style), value in zip(parts, values, strict=True)
            if value > 0
        )
        drawn.append(Markup('<div class="bar"><span>{}</span><i>{}</i></div>').format(name, pieces))
    factor, unit = next((factor, unit) for factor, unit in _TIMES if longest >= factor or factor == 1)
    scale = Scale(0.0, longest / factor, unit=_GAP + unit)
    axis = Markup().join(_tick("left", place, text) for place, text in scale.ticks(4))
    return Markup(
        '<div class="bars" role="img" aria-label="{}">{}<div class="bar axis"><span></span><i class="x">{}</i></div>'
        '<p class="axis-title">{}</p></div>'
    ).format(label, Markup().join(drawn), axis, title)


def _distribution(name: str, how: str, style: str, values: NDArray[np.float64], scale: Scale) -> Markup:
    counts, edges = np.histogram(np.minimum(values, scale.high), bins=_BINS, range=(scale.low, scale.high))
    heights = counts / counts.max()
    outline = "".join(
        f"L{_SIDE * scale.place(left):.1f} {_SIDE - 940 * height:.1f}H{_SIDE * scale.place(right):.1f}"
        for left, right, height in zip(edges[:-1], edges[1:], heights, strict=True)
    )
    median, high = (float(np.quantile(values, q)) for q in (0.5, 0.9))
    at = _SIDE * scale.place(median)
    figures = Markup("<em>{} <small>median</small>, {} <small>p90</small></em>").format(percent(median), percent(high))
    return Markup(
        '<div class="ridge {}"><span>{} <small>{}</small></span>{}'
        '<svg viewBox="0 0 {} {}" preserveAspectRatio="none"><path class="area" d="M0 {} {}V{}Z"/>'
        '<path class="median" d="M{:.1f} 0V{}"/></svg></div>'
    ).format(style, name, how, figures, _SIDE, _SIDE, _SIDE, outline, _SIDE, at, _SIDE)


def _seen_of(places: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Of more points than a chart can show, the outermost of each column, so that a page stays small."""
    if len(places) <= 2 * _SIDE:
        return places
    columns: dict[int, list[tuple[float, float]]] = {}
    for place in places:
        columns.setdefault(int(place[0]), []).append(place)
    ends = ((c[0], *(f(c, key=lambda place: place[1]) for f in (min, max)), c[-1]) for c in columns.values())
    return [place for column in ends for place in sorted(set(column))]


def _plot(marks: Markup, x: Scale, y: Scale) -> Markup:
    rows, columns = y.ticks(), x.ticks()
    grid = "".join(f"M0 {_SIDE * (1 - place):.1f}H{_SIDE}" for place, _ in rows)
    return Markup(
        '<p class="axis-title y-title">{}</p>'
        '<div class="plot"><i class="y">{}</i><svg viewBox="0 0 {} {}" preserveAspectRatio="none">'
        '<path class="grid" d="{}"/>{}</svg><i class="x">{}</i></div>'
        '<p class="axis-title">{}</p>'
    ).format(
        y.title,
        Markup().join(_tick("bottom", place, text) for place, text in rows),
        _SIDE,
        _SIDE,
        grid,
        marks,
        Markup().join(_tick("left", place, text) for place, text in columns),
        x.title,
    )


def _tick(side: str, place: float, text: str) -> Markup:
    return Markup('<span style="{}:{:.2f}%">{}</span>').format(side, 100 * place, text)


def _sign(place: float, text: str) -> Markup:
    at = _SIDE * place
    return Markup('<path class="sign" d="M{:.1f} 0V{}"><title>{}</title></path>').format(at, _SIDE, text)


def _legend(entries: Sequence[tuple[str, str]]) -> Markup:
    items = (Markup('<li class="{}">{}</li>').format(style, escape(name)) for name, style in entries)
    return Markup('<ul class="legend">{}</ul>').format(Markup().join(items))


def _ticks(low: float, high: float, count: int) -> list[float]:
    step = 10 ** math.floor(math.log10((high - low) / count))
    step = next(step * factor for factor in (1, 2, 2.5, 5, 10, 20) if (high - low) / (step * factor) <= count)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float, count: int) -> list[float]:
    for factors in ((1, 2, 5), (1, 3), (1,)):
        values = [
            f * 10.0**e for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1) for f in factors
        ]
        inside = [value for value in values if low <= value <= high]
        if len(inside) <= count + 1:
            break
    return inside[:: -(-len(inside) // (count + 1))] if len(inside) > 1 else _ticks(low, high, 3)
