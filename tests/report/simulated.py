"""Runs that never happened, logged as real ones are: planned by the real planner, timed by a model and noise."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from lightning_videoscale.cost import TRANSFORMERS, BucketBudget, StepTimeModel
from lightning_videoscale.data.planning import Balance, BucketPlanner, SampleTable
from lightning_videoscale.data.planning.shapes import ClipShape
from lightning_videoscale.report import LOG_NAME, RunLog
from lightning_videoscale.report.records import plan_record, window_record
from lightning_videoscale.timing import MicroBatchLoad, StepTimes, load_of
from tests.timing.windows import window_of

# frames, height, width (pixels), tokens of Wan 2.1, how often
SHAPES = [
    (1, 480, 832, 1560, 4000),
    (1, 720, 1280, 3600, 3000),
    (17, 480, 832, 7800, 3000),
    (33, 256, 256, 2304, 3000),
    (49, 480, 832, 20280, 1500),
    (81, 256, 256, 5376, 3000),
    (81, 480, 832, 32760, 1200),
    (81, 720, 1280, 75600, 300),
]
MEMORY = {"NVIDIA H200": 139.8, "NVIDIA A100": 79.3}
MODEL = StepTimeModel.analytic(TRANSFORMERS["wan2.1-1.3b"])


def planner(balance: Balance = "planned", dp_size: int = 8, m_mem: float = 151_200) -> BucketPlanner:
    """Plans the clips of `SHAPES`."""
    table = SampleTable.create(
        [ClipShape(*shape) for *shape, _, _ in SHAPES],
        np.array([tokens for *_, tokens, _ in SHAPES]),
        np.repeat(np.arange(len(SHAPES)), [often for *_, often in SHAPES]).astype(np.int32),
    )
    p = MODEL.power_law.p
    return BucketPlanner(table, BucketBudget(m_mem, 75600**p, p), balance, dp_size, micro_batches=2, step_time=MODEL)


def start_fields(ranks: int = 8, **overrides: Any) -> dict[str, Any]:
    """The fields of a `start` record."""
    fields: dict[str, Any] = {
        "module": "WanRectifiedFlow",
        "parameters": 1_418_996_800,
        "callbacks": ["RunReport", "MemoryMonitor", "FusedKernels", "BudgetRecalibrator", "BottleneckAnalyzer"],
        "settings": {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "max_steps": 1000},
        "exchange": {
            "strategy": "SequenceParallelDDPStrategy",
            "data-parallel ranks": ranks,
            "transport": "collective",
        },
        "machine": {"ranks": ranks, "nodes": 1, "device": "NVIDIA H200", "memory_gib": MEMORY["NVIDIA H200"]},
        "versions": {"python": "3.12.3", "torch": "2.11.0", "lightning": "2.6.6"},
    }
    return fields | overrides


def log_run(
    folder: Path,
    balance: Balance = "planned",
    dp_size: int = 8,
    steps: int = 150,
    every: int = 10,
    seed: int = 0,
    slowdown: float = 1.03,
    noise: float = 0.01,
    device: str = "NVIDIA H200",
    pace: float = 1.0,
) -> RunLog:
    """Logs the beginning of an epoch, from start to end; rank 5 is slower. Work takes ``pace`` times the time."""
    plans, log, random = planner(balance, dp_size), RunLog(folder), np.random.default_rng(seed)
    plan = plans.plan(epoch=0)
    steps = min(steps, plan.steps)
    start = start_fields(dp_size)
    if device == "cpu":
        start["machine"] = {"ranks": dp_size, "nodes": 1, "device": "cpu (x86_64)"}
    else:
        start["machine"] |= {"device": device, "memory_gib": MEMORY[device]}
    log.append("start", 0, start)
    log.append("plan", 0, {"epoch": 0, **plan_record(plans)})
    metas = [[batch.meta for batch in plan.micro_batches_of(rank)] for rank in range(dp_size)]
    for first in range(0, steps, every):
        count = min(every, steps - first)
        shown = [of_rank[2 * first : 2 * (first + count)] for of_rank in metas]
        speeds = [pace * (slowdown if rank == 5 else 1.0) for rank in range(dp_size)]
        times = [[_times(meta.predicted_cost, speed, noise, random) for meta in part]
                 for speed, part in zip(speeds, shown, strict=True)]  # fmt: skip
        loads = [[load_of({"meta": meta}) or MicroBatchLoad() for meta in part] for part in shown]
        log.append("window", first + count, window_record(window_of(times, loads, [2] * count)))
    log.append("end", steps, {"status": "completed"})
    return log


def resume(folder: Path, later: Path, steps: int) -> None:
    """Appends the log in another folder, as of a run that goes on after some steps."""
    records = [json.loads(line) for line in (later / LOG_NAME).read_text().splitlines()]
    with (folder / LOG_NAME).open("a") as log:
        log.writelines(json.dumps(record | {"step": record["step"] + steps}) + "\n" for record in records)


def _times(cost: float, speed: float, noise: float, random: np.random.Generator) -> StepTimes:
    seconds = (0.04 + 1.3 * cost * random.lognormal(0.0, noise)) * speed
    return StepTimes(
        0.002 * random.random(), seconds / 3, 2 * seconds / 3, 0.01 + 0.02 * random.random(), 0.0, 0.01, 0.004
    )


def add_findings(log: RunLog, steps: int = 150, every: int = 10) -> None:
    """What the other callbacks would hand in."""
    random = np.random.default_rng(1)
    for step in itertools.chain(range(every, steps + 1, every)):
        peak = 96 + 6 * random.random()
        fields = {"allocated_gib": 40.0, "reserved_gib": peak + 12, "peak_gib": peak, "fragmentation": 0.04}
        headroom = 21_000 - 100 * step / every
        log.append("memory", step, fields | {"headroom_tokens": headroom, "fits_tokens": 151_200 + headroom})
        name = "straggler" if step % 30 == 0 else "kernels"
        found = {"name": name, "share": 0.11, "figure": f"{name}: 11 % of the time", "advice": "look at rank 5"}
        log.append("bottleneck", step, found)
    for step, adopted in ((20, False), (50, True), (70, False)):
        reason = "p from 1.80 to 1.87 by 61 shapes" if adopted else "within 3 % of what holds"
        log.append("budget", step, {"adopted": adopted, "reason": reason, "m_mem": 151_200, "m_comp": 1.3e9, "p": 1.87})
    blocks = [[f"transformer.blocks.{n}", "WanTransformerBlock", "norms, gates and modulation"] for n in range(30)]
    log.append("injection", 0, {"model": "WanTransformer3DModel", "replaced": blocks, "skipped": []})
