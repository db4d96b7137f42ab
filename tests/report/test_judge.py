"""What the report advises to do about memory and bottlenecks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_videoscale.report.findings import Findings
from lightning_videoscale.report.reading import read_run
from lightning_videoscale.report.records import plan_record
from tests.report import simulated

LONG = [shape for shape in simulated.SHAPES if shape[3] > 20_000]


@pytest.mark.parametrize(
    ("shapes", "m_mem", "fits", "largest", "advice"),
    [
        (LONG, 300_000, 450_000, 202_800, []),  # M_comp limits all batches
        (LONG, 300_000, 120_000, 202_800, ["Set m_mem to 120,000 tokens"]),
        (simulated.SHAPES, 151_200, 200_000, 151_200, ["Raise m_mem to 200,000 tokens"]),
        (simulated.SHAPES, 151_200, 200_000, 75_600, ["Raise m_mem to 200,000 tokens"]),  # what fits in all counts
        (simulated.SHAPES, 151_200, 155_000, 151_200, []),  # too little to be worth it
        (simulated.SHAPES, 60_000, 70_000, 75_600, []),  # one clip alone is too large, and larger batches no help
        (simulated.SHAPES, 151_200, 0, 151_200, []),  # no m_mem makes room
    ],
)
def test_m_mem_is_advised_to_be_what_fits_where_that_changes_batches(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shapes: list[tuple[int, int, int, int, int]],
    m_mem: int,
    fits: int,
    largest: int,
    advice: list[str],
) -> None:
    monkeypatch.setattr(simulated, "SHAPES", shapes)
    log = simulated.log_run(tmp_path, steps=20, slowdown=1.0)
    log.append("plan", 20, plan_record(simulated.planner(m_mem=m_mem)))
    gib = {"allocated_gib": 1.0, "reserved_gib": 1.0, "peak_gib": 1.0, "fragmentation": 0.0}
    log.append("memory", 20, gib | {"fits_tokens": fits, "headroom_tokens": fits - largest})
    assert [each.what for each in Findings(read_run(tmp_path)).advice if "m_mem" in each.what] == advice


@pytest.mark.parametrize(
    ("planned", "found", "headroom", "advice"),
    [
        (900.0, None, 0, "Raise m_mem to 200,000 tokens"),
        (900.0, 900.0, -10, None),  # more would fit than m_mem, and batches of that are too large: no figure helps
        (0.0, 900.0, -10, "Set m_mem to 200,000 and overhead_tokens to 900 tokens"),  # short clips do not fit
        (0.0, 900.0, 10, "Raise m_mem to 200,000 and overhead_tokens to 900 tokens"),
    ],
)
def test_m_mem_is_advised_with_the_overhead_that_it_was_found_beside(
    tmp_path: Path, planned: float, found: float | None, headroom: int, advice: str | None
) -> None:
    log = simulated.log_run(tmp_path, steps=20, slowdown=1.0)
    planner = simulated.planner()
    log.append("plan", 20, plan_record(replace(planner, budget=replace(planner.budget, overhead_tokens=planned))))
    gib = {"allocated_gib": 1.0, "reserved_gib": 1.0, "peak_gib": 1.0, "fragmentation": 0.0}
    beside = {} if found is None else {"overhead_tokens": found}
    log.append("memory", 20, gib | beside | {"fits_tokens": 200_000, "headroom_tokens": headroom})
    said = [each.what for each in Findings(read_run(tmp_path)).advice if "m_mem" in each.what]
    assert said == ([] if advice is None else [advice])


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        (["data", "optimizer", "optimizer", "data"], "stop data 3"),  # as often: the later one
        (["kernels", "kernels", "kernels", "data"], None),  # the rest of a run, of a step or two
        (["data", "data", "kernels"], "stop data 1"),
        (["optimizer"] * 20 + ["kernels"] * 10, None),  # it was mended
    ],
)
def test_what_is_advised_is_against_the_usual_bottleneck(tmp_path: Path, names: list[str], advice: str | None) -> None:
    log = simulated.log_run(tmp_path, steps=20, slowdown=1.0)
    for number, name in enumerate(names):
        log.append("bottleneck", 20, {"name": name, "share": 0.2, "figure": "", "advice": f"stop {name} {number}"})
    assert [each.what for each in Findings(read_run(tmp_path)).advice] == ([] if advice is None else [advice])
