"""The loop from observed times to budgets on real GPUs: wrong costs at the start, beside right ones.

    python benchmarks/callbacks/recalibration_on_gpus.py --shapes clips.csv

Some of Wan-1.3B's blocks with random weights, trained under `ulysses_ddp` with ulysses_size = 1 on shards of zeros by a
Trainer with `BudgetRecalibrator`, three times:

1. from costs by FLOPs, to find the true ones: their power law is the oracle's, and the time of the longest sample the
   target that a micro-batch may take;
2. from costs whose b * S^p is wrong by a factor of 2 for the longest sample, and p by 0.3;
3. from the oracle's costs, to see which balance they lead to, and whether the loop leaves them alone.

M_comp has the unit tokens^p, so that one of another p looks more wrong than it is: beside the plain ratio to the
oracle's there is that of how many samples of the longest length the budgets have room for.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.callbacks.recalibration import power_law
from benchmarks.data.sparse_shards import write_sparse_shards
from benchmarks.launch import finish, launch, say, task_of_worker
from benchmarks.wan_training import TINY_WAN, WAN_1_3B, RectifiedFlow, latents_of, trainer_with
from lightning_videoscale import VideoDataModule
from lightning_videoscale.callbacks import BudgetRecalibrator
from lightning_videoscale.cost import BucketBudget, StepTimeModel, TimeBudget, TransformerFlops
from lightning_videoscale.cost.budget import Budget
from lightning_videoscale.cost.geometry import GEOMETRIES
from lightning_videoscale.data.planning import SampleTable
from lightning_videoscale.data.planning.shapes import STANDARD_POLICY, Clips, ClipShape, standard_mix
from lightning_videoscale.timing import StepWindow, subscribe_to_steps

RANKS, LAYERS, SAMPLES = 4, 3, 8_000
EVERY_N_STEPS, STEPS, STEPS_OF_ORACLE = 10, 100, 60
SAY_EVERY = 20
FACTOR, P_ERROR = 2.0, 0.3
# Without the largest tier: a step then takes a third of a second.
POLICY = replace(STANDARD_POLICY, areas=STANDARD_POLICY.areas[:2], weights=(0.4, 0.6))
TINY_POLICY = replace(POLICY, areas=(64 * 64, 128 * 128), max_frames=17, crop_min_frames=5)


def mix(file: Path, samples: int, tiny: bool) -> list[ClipShape]:
    """Latents of the draws of the mix, in their order."""
    table = SampleTable.of_clips(
        standard_mix(Clips.from_csv(file), samples), TINY_POLICY if tiny else POLICY, GEOMETRIES["wan2.1"]
    )
    shapes = [latents_of(shape) for shape in table.shapes]
    return [shapes[number] for number in table.shape_id if number >= 0]


class Record(pl.Callback):
    """After every step, this rank's seconds of work and budget."""

    def __init__(self, recalibrator: BudgetRecalibrator, longest: int) -> None:
        self.recalibrator = recalibrator
        self.longest = longest
        self.budgets: list[tuple[str, float, float]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        def receive(window: StepWindow) -> None:
            self.seconds = window.column("work")[trainer.global_rank].tolist()

        subscribe_to_steps(trainer, sys.maxsize, receive)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        calibration = self.recalibrator.calibration
        assert calibration is not None
        self.budgets.append((calibration.version, calibration.budget.room(self.longest), calibration.budget.p))
        if trainer.is_global_zero and len(self.budgets) % SAY_EVERY == 0:
            say(f"  {len(self.budgets)} steps")


def train(
    module: RectifiedFlow,
    shards: str,
    budget: Budget,
    first: StepTimeModel,
    target_sync: float | None,
    longest: int,
    **run: Any,
) -> dict[str, Any]:
    """Trains some steps; figures of each, and the last fit."""
    data = VideoDataModule(
        shards, budget=budget, step_time=first, num_workers=0 if run["tiny"] else 2, seed=run["seed"]
    )
    recalibrator = BudgetRecalibrator(EVERY_N_STEPS, target_sync)
    record = Record(recalibrator, longest)
    devices = int(os.environ["WORLD_SIZE"])
    trainer_with(devices, run["tiny"], max_steps=run["steps"], callbacks=[recalibrator, record]).fit(module, data)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (record.seconds, [version for version, _, _ in record.budgets]))
    seconds = np.array([of_rank for of_rank, _ in everyone])
    if dist.get_rank() == 0:
        say(f"  CV {np.median(seconds.std(axis=0) / seconds.mean(axis=0)):.4f}, changes: {recalibrator.history}")
    fitted = recalibrator.state_dict()["recalibration"]["fitted"]
    assert fitted is not None, f"no fit in {run['steps']} steps: {recalibrator.history}"
    return {
        "cv": (seconds.std(axis=0) / seconds.mean(axis=0)).tolist(),
        "room": [room for _, room, _ in record.budgets],
        "p": [p for _, _, p in record.budgets],
        "equal_on_all_ranks": all(versions == everyone[0][1] for _, versions in everyone),
        "changes": recalibrator.history,
        "speeds": recalibrator.state_dict()["recalibration"]["observed"]["speeds"],
        "fitted": fitted,
        "step_seconds": float(np.median(seconds.max(axis=0))),
    }


def measure(shards: str, longest: int, layers: int, tiny: bool) -> None:
    """The three runs in one process group."""
    config = TINY_WAN if tiny else WAN_1_3B | {"num_layers": layers}
    module = RectifiedFlow(config, attention="default" if tiny else "flash")
    flops = TransformerFlops.from_config(module.transformer.config)
    by_flops = StepTimeModel.analytic(flops, longest=longest)

    def run(first: StepTimeModel, target_sync: float | None, **settings: Any) -> dict[str, Any]:
        alone = BucketBudget(2 * longest, longest**first.power_law.p, first.power_law.p)
        budget = TimeBudget(2 * longest, target_sync, first) if target_sync else alone
        if os.environ["RANK"] == "0":
            say(f"{settings['steps']} steps from {budget}")
        return train(module, shards, budget, first, target_sync, longest, tiny=tiny, **settings)

    found = run(by_flops, None, steps=STEPS_OF_ORACLE, seed=0)
    truth = StepTimeModel.from_dict(found["fitted"])
    target_sync = float(truth.predict(1, longest))
    law, p = truth.power_law, truth.power_law.p + P_ERROR
    wrong = power_law(law.a, FACTOR * law.b * longest ** (law.p - p), p)
    loop = run(wrong, target_sync, steps=STEPS, seed=1)
    oracle = run(truth, target_sync, steps=STEPS_OF_ORACLE, seed=1)
    finish({"truth": found["fitted"], "target_sync": target_sync, "found": found, "loop": loop, "oracle": oracle})


def row_of(result: dict[str, Any], longest: int) -> dict[str, Any]:
    """The figures of the loop beside the oracle's, by windows of steps."""
    truth, loop, oracle = StepTimeModel.from_dict(result["truth"]), result["loop"], result["oracle"]
    right = TimeBudget(2 * longest, result["target_sync"], truth)
    again = replace(right, step_time=StepTimeModel.from_dict(oracle["fitted"]))
    cv, of_oracle = (np.array(run["cv"]).reshape(-1, EVERY_N_STEPS).mean(axis=1) for run in (loop, oracle))
    room, p = (np.array(loop[name][EVERY_N_STEPS - 1 :: EVERY_N_STEPS]) for name in ("room", "p"))
    return {
        "p": right.p,
        "p_error": P_ERROR,
        "factor": FACTOR,
        "steps": list(range(EVERY_N_STEPS, STEPS + 1, EVERY_N_STEPS)),
        "room_over_oracle": np.round(room / right.room(longest), 4).tolist(),
        "p_by_step": np.round(p, 4).tolist(),
        "cv": np.round(cv, 5).tolist(),
        "oracle_cv": np.round([*of_oracle, *[of_oracle[2:].mean()] * (len(cv) - len(of_oracle))], 5).tolist(),
        "cv_over_oracle_in_the_end": round(float(cv[-3:].mean() / of_oracle[2:].mean()), 3),
        "equal_on_all_ranks": loop["equal_on_all_ranks"] and oracle["equal_on_all_ranks"],
        "oracle_measured_again": round(again.room(longest) / right.room(longest), 4),
        "changes": loop["changes"],
        "changes_of_oracle": oracle["changes"],
        "speeds": loop["speeds"],
        "truth": result["truth"],
        "target_sync": result["target_sync"],
        "step_seconds": loop["step_seconds"],
    }


def main() -> None:
    parser = provenance.parser(__doc__, output="file to write")
    parser.add_argument("--shapes", type=Path, required=True, help="table of clips")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--layers", type=int, default=LAYERS, help="of Wan-1.3B's 30")
    parser.add_argument("--tiny", action="store_true", help="dry run on CPUs: nothing to publish")
    options = parser.parse_args()
    commit = options.commit or provenance.commit()
    shapes = mix(options.shapes, SAMPLES // 4 if options.tiny else SAMPLES, options.tiny)
    longest = max(int(GEOMETRIES["wan2.1"].sequence_length(*shape[:3], latents=True)) for shape in set(shapes))
    with tempfile.TemporaryDirectory() as folder:
        shards = write_sparse_shards(Path(folder), shapes, shards=16)
        VideoDataModule(shards).prepare_data()
        result = launch(
            __file__, options.ranks, shards=shards, longest=longest, layers=options.layers, tiny=options.tiny
        )
    row = row_of(result, longest)
    for name in ("room_over_oracle", "p_by_step", "cv", "oracle_cv"):
        print(f"{name:20} {row[name]}")
    for name, value in row.items():
        if not isinstance(value, (list, dict)):
            print(f"{name:28} {value}")
    settings = {
        "dry_run": options.tiny,
        "ranks": options.ranks,
        "model": TINY_WAN if options.tiny else WAN_1_3B | {"num_layers": options.layers},
        "precision": "bf16-mixed",
        "activation_checkpointing": True,
        "longest": longest,
        "table": provenance.table(options.shapes),
        "micro_batches": 1,
        "every_n_steps": EVERY_N_STEPS,
        "steps_of_oracle": STEPS_OF_ORACLE,
    }
    output = options.output or provenance.path("callbacks", "recalibration_on_gpus")
    provenance.write(output, "callbacks/recalibration_on_gpus", commit, settings, [row])


if __name__ == "__main__":
    if (task := task_of_worker()) is not None:
        measure(**task)
    else:
        main()
