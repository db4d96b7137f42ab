"""Which layout is chosen: Ulysses unless a ring gains enough, and never what cannot run."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_videoscale.parallel.layout import MACHINES, Layout, choose_layout, machine_of, read_machine
from lightning_videoscale.parallel.layout.choice import layouts

H200 = MACHINES["h200"]


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("heads", [12, 24, 40])
def test_heads_that_divide_evenly_stay_with_ulysses(machine, ranks: int, heads: int) -> None:  # type: ignore[no-untyped-def]
    for tokens in (1_000, 8_192, 32_760, 75_600):
        for in_block in (False, True):
            choice = choose_layout(ranks, heads, 128, machine, {tokens: 1}, in_block=in_block)
            assert choice.layout == Layout(ranks, 1)


def test_twelve_heads_on_eight_ranks() -> None:
    """Ulysses alone gives 2, 2, 2, 2, 1, 1, 1, 1 heads: half of the ranks wait for half of attention."""
    choice = choose_layout(8, 12, 128, H200, {75_600: 1})
    assert choice.layout == Layout(4, 2)
    assert list(choice.times) == [Layout(8, 1), Layout(4, 2), Layout(2, 4), Layout(1, 8)]
    assert choice.speed(choice.layout) == pytest.approx(1.18, abs=0.03)
    assert choice.describe().startswith("12 heads on 8 ranks: ulysses 4 x ring 2, predicted 1.1")
    # Where the host needs longer than the device, a ring would only add launches.
    short = choose_layout(8, 12, 128, H200, {14_040: 1})
    assert short.layout == Layout(8, 1) and "host" in short.describe()


@given(st.integers(1, 48), st.integers(1, 16), st.integers(100, 100_000))
def test_every_rank_has_a_head_and_the_loss_is_within_the_margin(heads: int, ranks: int, tokens: int) -> None:
    choice = choose_layout(ranks, heads, 128, H200, {tokens: 1})
    assert choice.layout.ulysses * choice.layout.ring == ranks and choice.layout.ulysses <= heads
    assert choice.seconds[choice.layout] <= 1.03 * min(choice.seconds.values())
    assert all(layout.ulysses <= choice.layout.ulysses or choice.speed(layout) < choice.speed(choice.layout)
               for layout in choice.seconds)  # fmt: skip


def test_a_tie_is_for_ulysses() -> None:
    fast_links = replace(H200, message=0.0, contention=0.0, alone=replace(H200.alone, exchange=0.0, step=0.0))
    choice = choose_layout(8, 16, 128, replace(fast_links, link=1e18, memory=1e18), {65_536: 1}, in_block=False)
    assert choice.speed(Layout(4, 2)) == pytest.approx(1) and choice.layout == Layout(8, 1)


def test_long_clips_outweigh_short_ones_by_their_number() -> None:
    few, many = {75_600: 1, 4_000: 100_000}, {75_600: 1_000, 4_000: 1}
    assert [choose_layout(8, 12, 128, H200, lengths).layout.ring for lengths in ({4_000: 1}, many)] == [1, 2]
    short = choose_layout(8, 12, 128, H200, few)
    assert short.longest == 75_600
    assert short.speed(Layout(4, 2)) < choose_layout(8, 12, 128, H200, many).speed(Layout(4, 2))


def test_fewer_heads_than_ranks_need_a_ring() -> None:
    assert choose_layout(4, 3, 128, H200, {100: 1}).layout == Layout(2, 2)
    assert choose_layout(8, 16, 128, H200, most_ulysses=4).layout == Layout(4, 2)
    with pytest.raises(ValueError, match=r"3 heads.*4 ranks.*compiled"):
        choose_layout(4, 3, 128, H200, ring_objection="blocks are compiled")


def test_a_ring_that_may_not_run_is_not_chosen() -> None:
    choice = choose_layout(8, 12, 128, H200, {75_600: 1}, ring_objection="blocks are compiled")
    assert choice.layout == Layout(8, 1) and list(choice.times) == [Layout(8, 1)]
    assert "no ring, as blocks are compiled" in choice.describe()


def test_where_no_speed_is_known_it_is_ulysses() -> None:
    choice = choose_layout(8, 12, 128, machine_of("cpu"), {75_600: 1})
    assert choice.layout == Layout(8, 1) and "unknown" in choice.describe()
    assert choose_layout(8, 3, 128, machine_of("cpu")).layout == Layout(2, 4)


def test_layouts_across_nodes_keep_ulysses_inside() -> None:
    within, across = (choose_layout(16, 16, 128, H200, {75_600: 1}, devices_per_node=node) for node in (None, 8))
    assert within.layout == Layout(16, 1)
    assert across.layout == Layout(8, 2)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "default"),
        ("cpu", "cpu"),
    ],
)
def test_the_speeds_of_a_device(device: str, name: str) -> None:
    assert machine_of(device).name == name


def test_constants_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "result.json"

    def written(constants: object) -> str:
        file.write_text(json.dumps({"settings": {"machine_constants": constants}}))
        return str(file)

    assert read_machine(written(asdict(H200))) == H200
    partly = read_machine(written({"name": "mine", "link": 1e11}))
    assert (partly.name, partly.link, partly.memory) == ("mine", 1e11, MACHINES["default"].memory)
    for wrong in ({"links": 1}, {"link": -1}, [1], {"alone": {"layer": 1}}):
        with pytest.raises(ValueError, match="machine_constants"):
            read_machine(written(wrong))
    with pytest.raises(ValueError, match=r"b300.*h200"):
        read_machine("b300")


def test_all_divisions_are_tried() -> None:
    assert layouts(12, 5) == [(4, 3), (3, 4), (2, 6), (1, 12)]
    assert layouts(12, 5, devices_per_node=4) == [(4, 3), (2, 6), (1, 12)]
