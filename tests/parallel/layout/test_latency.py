"""The latency model: what it must grow with, and the layers that were measured."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.parallel import layouts
from lightning_videoscale.parallel.layout import MACHINES, Layer, Layout, predict

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
H200 = MACHINES["h200"]

layers = st.builds(
    Layer, st.integers(8, 48), st.sampled_from([64, 128]), st.integers(64, 100_000), st.integers(1, 3), st.booleans()
)
some_layouts = st.builds(Layout, st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 3, 4]))


@given(layers, some_layouts)
def test_more_of_anything_takes_no_less_time(layer: Layer, layout: Layout) -> None:
    time = predict(layer, layout, H200)
    for more in (
        replace(layer, tokens=layer.tokens + 999),
        replace(layer, heads=layer.heads + 1),
        replace(layer, batch=layer.batch + 1),
        replace(layer, in_block=True),
    ):
        assert predict(more, layout, H200).total >= time.total
    for slower in ("matmul", "attention", "memory", "link"):
        worse = replace(H200, **{slower: getattr(H200, slower) / 2})
        assert predict(layer, layout, worse).total >= time.total
    assert predict(layer, layout, H200, devices_per_node=2).total >= time.total
    assert min(time) >= 0


@given(st.integers(1, 48), st.sampled_from([2, 4, 8]))
def test_the_rank_with_the_most_heads_decides_over_attention(heads: int, ulysses: int) -> None:
    if heads < ulysses:
        with pytest.raises(ValueError, match=f"{heads} heads.*ulysses {ulysses}"):
            predict(Layer(heads, 128, 4096), Layout(ulysses, 1), H200)
        return
    most = ulysses * math.ceil(heads / ulysses)
    uneven, even = (predict(Layer(each, 128, 32_768), Layout(ulysses, 1), H200) for each in (heads, most))
    assert uneven.attention == even.attention


def test_one_rank_exchanges_nothing() -> None:
    time = predict(Layer(12, 128, 32_760, in_block=False), Layout(1, 1), H200)
    assert time.exchange == time.ring == 0
    # 14 * S^2 * W operations of attention and 24 * S * W^2 of the projections, at the rates of the machine.
    assert time.attention == pytest.approx(14 * 32_760**2 * 1536 / H200.attention, rel=0.05)
    assert time.projections == pytest.approx(24 * 32_760 * 1536**2 / H200.matmul)


def test_a_hop_is_hidden_by_long_attention_and_not_by_short() -> None:
    """Over a slow network the first hop of a ring shows where attention is short."""
    slow = replace(H200, network=1e9)

    def added_by(tokens: int) -> float:
        layer = Layer(12, 128, tokens, in_block=False)
        near, far = predict(layer, Layout(1, 2), slow), predict(layer, Layout(1, 2), slow, devices_per_node=1)
        return (far.ring - near.ring) / (2 * tokens / 2 * 12 * 128 * 4 / slow.network)  # in times of a gradient

    assert added_by(1_024) == pytest.approx(3, rel=0.15)  # keys twice, at half the bytes, and gradients twice
    assert added_by(4_000_000) == pytest.approx(1, rel=0.05)  # the last gradient, which nothing hides


def test_the_constants_of_the_h200_are_those_that_the_benchmark_fits() -> None:
    files = [RESULTS / f"parallel/attention_layer-h200x{gpus}.json" for gpus in (2, 4)]
    fitted = layouts.fit(row for file in files for row in json.loads(file.read_text())["rows"])
    numbers = {name: value for name, value in asdict(H200).items() if isinstance(value, float)}
    assert {name: getattr(fitted, name) for name in numbers} == pytest.approx(numbers, rel=0.02)
    assert asdict(fitted.alone) == pytest.approx(asdict(H200.alone), rel=0.02)


def test_layers_that_were_measured_are_predicted() -> None:
    errors, best = [], []
    for gpus in (2, 4):
        rows = json.loads((RESULTS / f"parallel/attention_layer-h200x{gpus}.json").read_text())["rows"]
        cells: dict[tuple[int, int], dict[Layout, tuple[float, float]]] = {}
        for row in rows:
            if row["variant"] == "ours, collective":
                layer = Layer(row["heads"], row["head_dim"], row["tokens_per_rank"] * gpus, in_block=False)
                layout = Layout(row["ulysses_size"], row["ring_size"])
                predicted = 1e3 * predict(layer, layout, H200).total
                errors.append(abs(predicted / row["median_ms"] - 1))
                cells.setdefault((layer.heads, layer.tokens), {})[layout] = predicted, row["median_ms"]
        for cell in cells.values():
            chosen = min(cell, key=lambda layout: cell[layout][0])
            best.append(cell[chosen][1] / min(measured for _, measured in cell.values()))
    assert len(errors) == 30 and sorted(errors)[-3] < 0.055 and max(errors) < 0.08
    assert len(best) == 12 and max(best) < 1.03
