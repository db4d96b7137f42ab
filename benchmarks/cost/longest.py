"""Whether the longest clip that the memory model predicts is the longest that trains.

    python benchmarks/cost/longest.py    # on two GPUs
    python benchmarks/cost/longest.py --cells 0 3 5 6    # those of one GPU, on one

Wan-1.3B's blocks in bf16-mixed with a fused AdamW, one clip a step, which all GPUs of a cell share. A cell is one of
half of the combinations of DDP or FSDP2, with or without activation checkpointing, fused kernels or not, and 1 or 2
GPUs: each of these and each pair of them is in equally many cells.

The model is fitted to steps at short lengths as ``budget="auto"`` fits it, by `benchmark_shapes` and `MemoryModel`, and
says how many tokens a cap of memory holds, with no share of it kept free. Then new processes, whose allocator is held
to that cap, take three steps at 0.95 and at 1.05 of this length: ``as_predicted`` is where the first trains and the
second is out of memory. ``with_reserve`` is what ``budget="auto"`` would take, which keeps a share free. What lies
beside the allocator, such as the CUDA context, is not under the cap.

Cells run beside each other, three to a GPU, as only memory is measured. Every finished cell is in the output file at
once; a call goes on with the others. ``--tiny`` tries the script on CPUs, where memory has no such end and nothing is
predicted.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.launch import finish, launch, say, task_of_worker
from benchmarks.parallel.activation_memory import GIB, TINY_WAN, WAN_1_3B, RectifiedFlow
from benchmarks.wan_training import trainer_with
from lightning_videoscale import benchmark_shapes
from lightning_videoscale.callbacks import FusedKernels
from lightning_videoscale.cost import MemoryModel
from lightning_videoscale.cost.benchmark.grid import Cell as MeasuredCell
from lightning_videoscale.data.loading.synthetic_batches import RandomBatches
from lightning_videoscale.data.planning.shapes import ClipShape
from lightning_videoscale.strategies import SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy

BENCHMARK = "cost/longest"
STRATEGIES = {"ddp": SequenceParallelDDPStrategy, "fsdp2": SequenceParallelFSDP2Strategy}
SIDE = 16  # latents of 16 x 16, so that lengths are fine: 64 tokens to a frame
TOKENS_PER_FRAME = (SIDE // 2) ** 2
ROPE = {"rope_max_seq_len": 8192}  # frames that the rotary table has
FITTED = {False: (1024, 2048, 3072, 4096), True: (2048, 4096, 8192, 12288)}  # tokens of a GPU, by checkpointing
TINY_FITTED = (128, 256, 512)
ATTEMPTS = {
    "at_0.95": ("predicted_tokens", 0.95),
    "at_1.05": ("predicted_tokens", 1.05),
    "with_reserve": ("tokens_with_reserve", 1.0),
}
"""A share of which length."""
EXPECTED = {"at_0.95": "trained", "at_1.05": "out_of_memory"}
GPUS, CELLS_OF_A_GPU = 2, 3
STEPS = 3  # AdamW's states are made at the end of the first
Row = dict[str, Any]


class Cell(NamedTuple):
    """What is trained how."""

    strategy: str
    checkpointing: bool
    fused: bool
    gpus: int


COMBINATIONS = list(itertools.product(STRATEGIES, (False, True), (False, True), (1, 2)))
CELLS = [Cell(*c) for c in COMBINATIONS if sum((c[0] == "fsdp2", c[1], c[2], c[3] == 2)) % 2 == 0]


class TellsOutOfMemory(pl.Callback):
    """Ends the process with this outcome, as the other ranks may wait for this one in the middle of a step."""

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, torch.OutOfMemoryError):
            held = {"allocated_bytes": torch.cuda.memory_allocated(), "reserved_bytes": torch.cuda.memory_reserved()}
            outcome = {"outcome": "out_of_memory", "in_step": trainer.global_step} | held
            finish(outcome | {"message": str(exception).split(" See ")[0]}, any_rank=True)
            os._exit(1)


def trainer_of(cell: Cell, tiny: bool) -> pl.Trainer:
    strategy = STRATEGIES[cell.strategy](
        ulysses_size=cell.gpus,
        activation_checkpointing=cell.checkpointing,
        attention_backend="sdpa",
        graphs=False,
        timeout=timedelta(seconds=90),
    )
    callbacks = [TellsOutOfMemory(), *([FusedKernels()] if cell.fused else [])]
    return trainer_with(cell.gpus, tiny, strategy=strategy, max_steps=STEPS, callbacks=callbacks)


def batches_of(config: Row) -> RandomBatches:
    return RandomBatches(members={"text": (512, config["text_dim"])})


def clip_of(tokens: int) -> ClipShape:
    return ClipShape(tokens // TOKENS_PER_FRAME, SIDE, SIDE, latents=True)


def fit(cell: Cell, config: Row, cap_bytes: float, tiny: bool) -> Row:
    """What the memory model says after steps at short lengths; collective."""
    lengths = [tokens * cell.gpus for tokens in (TINY_FITTED if tiny else FITTED[cell.checkpointing])]
    matrix = benchmark_shapes(
        trainer_of(cell, tiny),
        RectifiedFlow(config),
        [clip_of(tokens) for tokens in lengths],
        batches=batches_of(config),
        max_tokens=lengths[-1],
        seconds=0.05,
        progress=False,
    )
    if tiny:
        return {
            "longest_fitted_tokens": lengths[-1],
            "predicted_tokens": lengths[-1],
            "tokens_with_reserve": lengths[-1],
        }
    model = MemoryModel.fit(matrix.measurements, accumulates=False)
    peaks = ("peak_bytes", "first_peak_bytes", "start_bytes")
    return {
        "fitted_peaks": [
            {"tokens": m.samples * m.sequence_length} | {name: getattr(m, name) for name in peaks}
            for m in matrix.measurements
        ],
        "longest_fitted_tokens": lengths[-1],
        "fixed_bytes": round(model.fixed),
        "bytes_per_token": round(model.per_token, 1),
        "at_start": model.at_start,
        "bytes_per_sample": round(model.per_sample),
        "worst_excess": round(model.worst_excess, 5),
        "predicted_tokens": model.longest(cap_bytes, reserve=0),
        "tokens_with_reserve": model.longest(cap_bytes),
    }


def attempt(cell: Cell, config: Row, tokens: int, cap_bytes: float, tiny: bool) -> Row:
    """Trains at a length under the cap; a process that is out of memory ends here with that outcome."""
    if torch.cuda.is_available():
        device = int(os.environ["LOCAL_RANK"])
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(cap_bytes / total, device)
    batch = batches_of(config)(MeasuredCell(clip_of(tokens), tokens, 1))
    trainer = trainer_of(cell, tiny)
    trainer.fit(RectifiedFlow(config), DataLoader([batch] * STEPS, batch_size=None))
    peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
    most = torch.tensor(peaks, device=trainer.strategy.root_device)
    dist.all_reduce(most, dist.ReduceOp.MAX)  # so that rank 0 does not speak for one that is out of memory
    return {"outcome": "trained", "peak_bytes": int(most[0]), "reserved_bytes": int(most[1])}


def work(cell: list[Any], tokens: int | None, **task: Any) -> None:
    """Finishes with the fit of a cell, or with what came of a length."""
    finish(fit(Cell(*cell), **task) if tokens is None else attempt(Cell(*cell), tokens=tokens, **task))


def measure(cell: Cell, gpus: list[int], **task: Any) -> Row:
    """The row of a cell, on these GPUs."""
    say(str(cell))
    row = cell._asdict() | launch(__file__, cell.gpus, gpus, cell=cell, tokens=None, **task)
    for name, (length, factor) in ATTEMPTS.items():
        tokens = round(factor * row[length] / TOKENS_PER_FRAME) * TOKENS_PER_FRAME
        row[name] = {"tokens": tokens} | launch(__file__, cell.gpus, gpus, cell=cell, tokens=tokens, **task)
    is_as_expected = {name: row[name]["outcome"] == outcome for name, outcome in EXPECTED.items()}
    row["as_predicted"] = None if task["tiny"] else all(is_as_expected.values())
    return row


def rows_of(cells: list[Cell], **task: Any) -> Iterator[Row]:
    """The rows of cells, as they are finished: those of one GPU first."""
    present = torch.cuda.device_count() or GPUS
    for gpus in (1, GPUS):
        mine = [cell for cell in cells if cell.gpus == gpus]
        with ThreadPoolExecutor(CELLS_OF_A_GPU * present // gpus) as pool:
            runs = [
                pool.submit(measure, cell, [number % present] if gpus == 1 else list(range(GPUS)), **task)
                for number, cell in enumerate(mine)
            ]
            for done in as_completed(runs):
                yield done.result()


def main() -> None:
    parser = provenance.parser(__doc__, output="file to write, or to go on with")
    parser.add_argument("--layers", type=int, default=10, help="of Wan-1.3B's 30")
    parser.add_argument("--cap-gib", type=float, default=20.0, help="that a process may take")
    parser.add_argument("--cells", type=int, nargs="+", default=list(range(len(CELLS))), help="their numbers, from 0")
    parser.add_argument("--tiny", action="store_true", help="dry run on CPUs: nothing to publish")
    options = parser.parse_args()
    commit = options.commit or provenance.commit()
    output = options.output or provenance.path("cost", "longest")
    config = (TINY_WAN if options.tiny else WAN_1_3B | {"num_layers": options.layers}) | ROPE
    settings = {
        "dry_run": options.tiny,
        "model": config,
        "cap_gib": options.cap_gib,
        "cap": "torch.cuda.set_per_process_memory_fraction",
        "attempts": {name: list(attempt) for name, attempt in ATTEMPTS.items()},
        "precision": "bf16-mixed",
        "optimizer": "AdamW, fused",
        "attention": "sdpa",
        "batch_size": 1,
        "steps": STEPS,
    }
    done = json.loads(output.read_text()) if output.exists() else {"rows": [], "settings": {}}
    if done["settings"] and (other := provenance.differences(done, BENCHMARK, settings)):
        parser.error(f"{output} holds cells of other {', '.join(other)}: name another --output.")
    rows = done["rows"]
    found = {Cell(*(row[name] for name in Cell._fields)) for row in rows}
    cells = [CELLS[number] for number in options.cells if CELLS[number] not in found]
    for row in rows_of(cells, config=config, cap_bytes=options.cap_gib * GIB, tiny=options.tiny):
        rows.append(row)
        provenance.write(output, BENCHMARK, commit, settings, rows)
        say(str(row))
    print(
        f"{len(rows)} of {len(CELLS)} cells are in {output}; as predicted: {sum(bool(r['as_predicted']) for r in rows)}"
    )


if __name__ == "__main__":
    if (task := task_of_worker()) is not None:
        work(**task)
    else:
        main()
