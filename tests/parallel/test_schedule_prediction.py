"""What is predicted of schedules where nobody has measured, and what a table makes of it."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_videoscale.parallel.layout import MACHINES, Host, Layer, Layout, predict
from lightning_videoscale.parallel.schedules.prediction import predict_schedules
from lightning_videoscale.parallel.schedules.records import ScheduleRecord
from lightning_videoscale.parallel.schedules.table import LayerPlacement, LayerShape, ScheduleKey, ScheduleTable

H200 = replace(MACHINES["h200"], alone=replace(MACHINES["h200"].alone, layer=0.0, exchange=0.0))  # of the device alone
layers = st.builds(
    Layer, st.integers(8, 48), st.sampled_from([64, 128]), st.integers(2048, 300_000), st.integers(1, 3), st.just(False)
)
groups = st.sampled_from([2, 4, 8])


@given(layers, groups, st.booleans())
def test_a_schedule_takes_no_less_than_its_compute_and_serial_what_the_layout_model_says(
    layer: Layer, ulysses: int, by_pieces: bool
) -> None:
    seconds = predict_schedules(layer, Layout(ulysses, 1), H200, by_pieces=by_pieces)
    whole = predict(layer, Layout(ulysses, 1), H200)
    assert min(seconds.values()) >= whole.projections + whole.attention
    if layer.heads % ulysses == 0:  # else that model counts the rank with the most heads
        assert seconds["serial"] == pytest.approx(whole.device)


@given(layers, groups, st.booleans())
def test_slower_links_make_slicing_gain_more_seconds_until_nothing_is_left_to_hide_behind(
    layer: Layer, ulysses: int, by_pieces: bool
) -> None:
    def gained(link: float) -> float:
        seconds = predict_schedules(layer, Layout(ulysses, 1), replace(H200, link=link), by_pieces=by_pieces)
        return seconds["serial"] - seconds["sliced"]

    assert gained(1e12) <= gained(3e11) + 1e-9 <= gained(1e11) + 2e-9
    nodes = replace(H200, network=3e11, link=1e12)
    between = predict_schedules(layer, Layout(ulysses, 1), nodes, by_pieces=by_pieces, between_nodes=True)
    assert between == predict_schedules(layer, Layout(ulysses, 1), replace(nodes, link=3e11), by_pieces=by_pieces)


def test_fewer_heads_of_keys_leave_less_to_exchange() -> None:
    layer, layout = Layer(40, 128, 32_768, 1, False), Layout(8, 1)
    many, few = (predict_schedules(layer, layout, H200, kv_heads=heads)["serial"] for heads in (40, 8))
    whole = predict(layer, layout, H200)
    assert many - few == pytest.approx(0.4 * (many - whole.projections - whole.attention - 4 * H200.message))


def test_pieces_hide_the_output_which_whole_messages_do_not() -> None:
    layer, slow = Layer(40, 128, 131_072, 1, False), replace(H200, link=2e10)
    whole, pieces = (predict_schedules(layer, Layout(4, 1), slow, by_pieces=each)["sliced"] for each in (False, True))
    message = 3 / 4 * (131_072 / 4) * 5120 * 2 / slow.link
    assert whole - pieces > 0.7 * message


def test_overlap_copies_what_slices_spare_and_computes_nothing_in_slices() -> None:
    layer, layout = Layer(40, 128, 32_768, 1, False), Layout(8, 1)  # five heads each fill a GPU badly in slices
    seconds = predict_schedules(layer, layout, H200)
    assert seconds["overlap"] < seconds["sliced"]
    layer, layout = Layer(40, 128, 131_072, 1, False), Layout(2, 1)
    seconds = predict_schedules(layer, layout, H200, by_pieces=True)
    assert seconds["sliced"] < seconds["overlap"]


def test_text_with_weights_of_its_own_costs_messages_and_an_output_that_is_not_projected_hides_less() -> None:
    layer, layout = Layer(40, 128, 32_768, 1, False), Layout(4, 1)
    one, two = (predict_schedules(layer, layout, H200, groups=groups) for groups in (1, 2))
    assert two["serial"] == one["serial"]
    for name in ("overlap", "sliced"):
        assert two[name] - one[name] == pytest.approx(7 * H200.message)  # type: ignore[index]
    without = predict_schedules(layer, layout, H200, is_projected=False)
    assert without["serial"] < one["serial"]
    assert without["serial"] - without["sliced"] < one["serial"] - one["sliced"]


def test_the_page_shows_what_the_model_predicts() -> None:
    page = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+), (\S+) \| (\S+) \| (\S+) \| (\S+) \|$", page, re.MULTILINE)
    assert len(rows) == 4
    for gpus, link, *shown in rows:
        machine = replace(MACHINES["h200"], link=float(link))
        for tokens, gain in zip((14_040, 32_760, 75_600), shown, strict=True):
            seconds = predict_schedules(Layer(40, 128, tokens, 1, False), Layout(int(gpus), 1), machine)
            assert f"{seconds['serial'] / seconds['sliced']:.2f}" == gain


# -- what a table makes of it --------------------------------------------------------------------------------------

SHAPE = LayerShape(1, 32_768, 5120, 40, 40, 128, True, "bfloat16")
PLACE = LayerPlacement("NVIDIA H200", "collective", 4, 1, 1)
KEY = ScheduleKey.of(SHAPE, PLACE)


def test_what_was_measured_goes_before_a_checkpoint_and_that_before_the_nearest_and_a_prediction() -> None:
    slow = replace(MACHINES["h200"], link=2e10)
    longer = ScheduleKey.of(SHAPE._replace(tokens=131_072), PLACE)
    elsewhere = ScheduleKey.of(SHAPE, PLACE._replace(transport="symmetric"))
    sliced, serial = {"serial": 1.0, "sliced": 1.2}, {"serial": 1.0, "sliced": 0.7}
    decided = [
        ScheduleTable({}, {}, slow, None),
        ScheduleTable({longer: serial, elsewhere: sliced}, {}, slow, None),
        ScheduleTable({longer: serial}, {str(KEY): "sliced"}, slow, None),
        ScheduleTable({longer: sliced, KEY: serial}, {str(KEY): "sliced"}, slow, None),
        ScheduleTable({KEY: sliced}, {str(KEY): "sliced"}, slow, "a hook"),
    ]
    found = [table.explain(KEY) for table in decided]
    assert [name for name, _ in found] == ["sliced", "serial", "sliced", "serial", "serial"]
    whys = [why for _, why in found]
    assert "predicted" in whys[0] and "131072 tokens" in whys[1] and "checkpoint" in whys[2]
    assert whys[3:] == ["measured", "a hook"]


def test_a_gain_within_the_machines_margin_is_no_reason() -> None:
    machine = MACHINES["h200"]
    seconds = KEY.predict(machine)
    gain = seconds["serial"] / seconds["sliced"]
    assert 1 < gain < 1 + machine.margin
    assert ScheduleTable({}, {}, machine, None).choose(KEY) == "serial"
    assert ScheduleTable({}, {}, replace(machine, margin=gain - 1.001), None).choose(KEY) == "sliced"
    assert ScheduleTable({}, {}, replace(machine, margin=math.inf), None).choose(KEY) == "serial"


def test_layers_with_fewer_heads_of_keys_are_serial() -> None:
    key = ScheduleKey.of(SHAPE._replace(kv_heads=8), PLACE)
    sliced = {"serial": 1.0, "sliced": 1.2}
    assert ScheduleTable({key: sliced}, {}, replace(MACHINES["h200"], link=1e9), None).choose(key) == "serial"


def test_of_the_nearest_sizes_a_gain_changes_as_it_is_predicted_to() -> None:
    """With 6 heads, half of 14 040 queries take three waves of processors, and all five; of 16 384, three and six."""
    machine = replace(MACHINES["h200"], alone=Host(0.0, 0.0, 0.0))
    shape = SHAPE._replace(tokens=16_384, width=1536, heads=12, kv_heads=12)
    measured = ScheduleKey.of(shape, PLACE._replace(ulysses=2, transport="symmetric"))
    shorter, as_long = measured._replace(tokens=14_040), measured._replace(tokens=15_600)
    gains = {"serial": 1.0, "overlap": 1.005, "sliced": 1.037}
    table = ScheduleTable({measured: gains}, {}, machine, None)
    assert [table.choose(key) for key in (measured, as_long, shorter)] == ["sliced", "sliced", "serial"]
    assert "16384 tokens, the nearest" in table.explain(shorter)[1]
    unknown = ScheduleTable({measured: gains}, {}, replace(machine, margin=math.inf), None)
    assert unknown.choose(shorter) == "sliced"


def test_one_measurement_stands_for_sizes_a_quarter_of_an_octave_apart() -> None:
    near, far = KEY._replace(tokens=38_000), KEY._replace(tokens=40_000)
    assert KEY.is_like(near) and near.is_like(KEY) and not KEY.is_like(far)
    assert not KEY.is_like(KEY._replace(apart=100)) and not KEY.is_like(KEY._replace(width=4096))
    assert KEY._replace(apart=400).is_like(KEY._replace(apart=410))


def test_a_description_tells_all_kinds_apart() -> None:
    """A checkpoint keeps choices by it."""
    shapes = [SHAPE, SHAPE._replace(across_heads=False), SHAPE._replace(width=4096), SHAPE._replace(dtype="float16")]
    places = [PLACE, PLACE._replace(hosts=2), PLACE._replace(ring=2), PLACE._replace(transport="symmetric")]
    keys = {ScheduleKey.of(shape, place) for shape in shapes for place in places}
    assert len({str(key) for key in keys}) == len(keys) == 16


def test_turns_are_compared_one_by_one() -> None:
    record = ScheduleRecord.of_turns({"serial": [1.0, 2.0, 4.0], "sliced": [0.9, 1.8, 4.4]})
    assert record.gains["sliced"] == pytest.approx(1 / 0.9) and record.fastest == "sliced"
    assert ScheduleRecord.of_turns({"serial": [1.0], "sliced": [0.995]}).fastest == "serial"
