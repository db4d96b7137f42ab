"""A training step with a clip split over GPUs, beside a clip on each: by layout, strategy, transport, schedule, mode.

    torchrun --nproc-per-node 2 benchmarks/parallel/strong_scaling.py
    torchrun --nproc-per-node 8 benchmarks/parallel/strong_scaling.py --layouts 8x1 4x2 2x4 4x1 auto

Wan with fused kernels in bf16-mixed with a fused AdamW, trained by a Trainer: one clip a step, all of one length. A
layout is Ulysses x ring; what it leaves of the GPUs is data parallelism. A step's time is what lies between the
beginnings of two on the device, waits for the host included; the median of the steps counts, on the slowest rank. A
combination that the package refuses is a row with the reason.

``per_gpu_over_whole_clips`` is the tokens per second of a GPU that has its part of a clip over those of one that has a
clip of its own, with all else the same but transport and schedule. ``over_best`` is a step's time over that in the best
layout of as many ranks. ``mfu`` is the model's FLOPs, nothing computed twice, over what the data sheet promises.
``--tiny`` tries the script on whatever there is.

In the first 20 calls of a network, ranks that share a clip compare its inputs, for which the host waits. With
``--warm-up-split 21`` none of these steps counts.

A call goes on with the rows of its output file. A cell that ended the process is left for last.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, get_args

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.wan_training import WAN_1_3B
from lightning_videoscale.cost.flops import TransformerFlops, training_flops
from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.parallel.schedules import ScheduleSetting
from lightning_videoscale.parallel.transport import TransportName, what_lacks
from lightning_videoscale.strategies import SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy

FRAMES = {4_680: 3, 14_040: 9, 32_760: 21, 75_600: 21, 151_200: 42}
HEIGHT_WIDTH = {75_600: (90, 160), 151_200: (90, 160)}
WAN_14B = WAN_1_3B | {"num_attention_heads": 40, "ffn_dim": 13824}
MODELS = {  # -8: of so many blocks
    "wan-1.3b": WAN_1_3B,
    "wan-1.3b-6": WAN_1_3B | {"num_layers": 6},
    "wan-14b-4": WAN_14B | {"num_layers": 4},
    "wan-14b-8": WAN_14B | {"num_layers": 8},
}
TINY = {"attention_head_dim": 16, "ffn_dim": 128, "num_layers": 2, "text_dim": 64}  # and a model's own heads
MODES: dict[str, dict[str, Any]] = {
    "eager": {"graphs": False},
    "compiled": {"compile": True, "graphs": False},
    "graphs": {"graphs": True},
}
STRATEGIES = {"ddp": SequenceParallelDDPStrategy, "fsdp2": SequenceParallelFSDP2Strategy}
PEAK_FLOPS = {"h100": 989.4e12, "h200": 989.4e12}  # dense bfloat16 of NVIDIA's data sheets for SXM
BENCHMARK = "parallel/strong_scaling"
Row = dict[str, Any]


class Cell(NamedTuple):
    """What is trained how.

    Attributes:
        model: One of `MODELS`.
        tokens: Of a clip.
        mode: One of `MODES`.
        strategy: One of `STRATEGIES`.
        layout: Ulysses x ring, such as ``4x2``; ``auto``: all GPUs share a clip as the strategy divides them.
        transport: Of the exchange.
        schedule: Likewise.
    """

    model: str
    tokens: int
    mode: str
    strategy: str
    layout: str
    transport: TransportName
    schedule: ScheduleSetting

    @property
    def alone(self) -> Cell:
        """A clip on each GPU, and all else the same."""
        return self._replace(layout="1x1", transport="collective", schedule="serial")

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        """Ranks of a Ulysses group and of a ring; None: left to the strategy."""
        if self.layout == "auto":
            return None, None
        ulysses, ring = map(int, self.layout.split("x"))
        return ulysses, ring


class Clips(pl.LightningDataModule):
    """As many clips as there are steps, all of one size; says how long they are, which ``auto`` chooses a layout by."""

    def __init__(self, tokens: int, steps: int, tiny: bool) -> None:
        super().__init__()
        size = (2, 8, 8) if tiny else (FRAMES[tokens], *HEIGHT_WIDTH.get(tokens, (60, 104)))
        self._tokens, self._sizes = tokens, torch.tensor([size] * steps)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(self._sizes), batch_size=1)

    def clip_lengths(self) -> dict[int, int]:
        return {self._tokens: len(self._sizes)}

    def tokens_per_device(self) -> None:
        return None


class Flow(pl.LightningModule):
    """Rectified flow on latents that are drawn on the device."""

    def __init__(self, config: dict[str, int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        with torch.device(device):
            self.transformer = WanTransformer3DModel(qk_norm="rms_norm_across_heads", cross_attn_norm=True, **config)
        inject_fused_kernels(self.transformer)
        self.register_buffer("text", torch.randn(1, 512, config.get("text_dim", 4096)), persistent=False)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        clean = torch.randn(1, 16, *batch[0][0].tolist(), device=self.device)
        noise = torch.randn_like(clean)
        t = torch.rand(1, device=self.device)
        (velocity,) = self.transformer(torch.lerp(clean, noise, t), t * 1000, self.text, return_dict=False)
        return torch.nn.functional.mse_loss(velocity.float(), noise - clean)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5, fused=self.device.type == "cuda")


class Steps(pl.Callback):
    """When steps begin on the device, and on the host."""

    def __init__(self) -> None:
        self.events: list[torch.cuda.Event] = []
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter())
        if torch.cuda.is_available():
            self.events.append(torch.cuda.Event(enable_timing=True))
            self.events[-1].record()

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.on_train_batch_start()
        self.counts = trainer.strategy.describe_graphs()  # type: ignore[attr-defined]

    def milliseconds(self) -> list[float]:
        """Of each step."""
        if self.events:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in zip(self.events, self.events[1:], strict=False)]
        return [1e3 * (b - a) for a, b in zip(self.seconds, self.seconds[1:], strict=False)]


def strategy_of(cell: Cell, options: argparse.Namespace) -> Any:
    """The strategy of a cell.

    Raises:
        ValueError: If the package refuses the combination, or this machine lacks what it needs.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if lacks := what_lacks(cell.transport, device):
        raise ValueError(f"transport={cell.transport!r}: {lacks}")
    ulysses, ring = cell.sizes
    memory = {"graphs_max_memory": 0.6} if cell.mode == "graphs" and cell.strategy == "ddp" else {}
    return STRATEGIES[cell.strategy](
        ulysses_size=ulysses,
        ring_size=ring,
        transport=cell.transport,
        schedule=cell.schedule,
        attention_backend="sdpa",
        activation_checkpointing=options.checkpointing,
        **MODES[cell.mode],
        **memory,
    )


def train(cell: Cell, strategy: Any, options: argparse.Namespace) -> tuple[list[float], Row]:
    """The milliseconds of the steps that count; and what ran: the layout, graphs, the peak of memory."""
    warm_up = options.warm_up if cell.layout == "1x1" else options.warm_up_split
    count = warm_up + options.steps
    steps = Steps()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    trainer = pl.Trainer(
        accelerator="auto",
        devices=dist.get_world_size(),
        strategy=strategy,
        precision="bf16-mixed",
        use_distributed_sampler=False,  # all ranks have clips of the same size
        max_steps=count,
        callbacks=[steps],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Flow(MODELS[cell.model] | (TINY if options.tiny else {}))
    trainer.fit(module, datamodule=Clips(cell.tokens, count, options.tiny))
    times = _slowest(steps.milliseconds()[warm_up:])
    peak = torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0
    ulysses, ring, dp = (getattr(strategy.mesh, axis).size for axis in ("ulysses", "ring", "dp"))
    ran = {"gpus": dist.get_world_size(), "ulysses": ulysses, "ring": ring, "dp": dp, "sp": ulysses * ring}
    model = TransformerFlops.from_config(module.transformer.config)
    ran["flops_per_gpu"] = training_flops(model, 1, cell.tokens, ulysses * ring)
    return times, ran | {"reserved_gib": round(peak, 2), "graphs": steps.counts}


def _slowest(times: list[float]) -> list[float]:
    """Of each step, on the slowest rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, times)
    return [max(step) for step in zip(*everyone, strict=True)]


def main() -> None:
    parser = provenance.parser(__doc__, output="file to write or to go on with; left out, one of our results")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4_680, 14_040, 32_760], choices=list(FRAMES))
    parser.add_argument("--models", nargs="+", default=["wan-1.3b"], choices=list(MODELS))
    parser.add_argument("--modes", nargs="+", default=["eager", "graphs"], choices=list(MODES))
    parser.add_argument("--strategies", nargs="+", default=["ddp"], choices=list(STRATEGIES))
    parser.add_argument("--layouts", nargs="+", help="such as 4x2: Ulysses x ring, or auto; left out, Ulysses alone")
    parser.add_argument("--transports", nargs="+", default=["collective"], choices=get_args(TransportName))
    parser.add_argument("--schedules", nargs="+", default=["serial"], choices=get_args(ScheduleSetting))
    parser.add_argument("--checkpointing", action="store_true", help="activation checkpointing of every block")
    parser.add_argument("--warm-up", type=int, default=5, help="steps of a cell before; graphs are captured by three")
    parser.add_argument("--warm-up-split", type=int, help="the same where GPUs share a clip; left out, as many")
    parser.add_argument("--steps", type=int, default=12, help="that count, of each cell")
    parser.add_argument("--tiny", action="store_true", help="try the script with a small model")
    options = parser.parse_args()
    if options.tiny:
        options.warm_up, options.warm_up_split, options.steps = 1, 1, 2
    options.warm_up_split = options.warm_up_split or options.warm_up
    commit = options.commit or provenance.commit()
    output = options.output or provenance.path("parallel", "strong_scaling")
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    settings = {
        "dry_run": options.tiny,
        "ranks": dist.get_world_size(),
        "warm_up": options.warm_up,
        "warm_up_split": options.warm_up_split,
        "steps": options.steps,
        "checkpointing": options.checkpointing,
    }
    rows = so_far(output, settings, parser)
    dist.barrier()  # all have read the file before it is written

    def write(rows: list[Row]) -> None:
        if dist.get_rank() == 0:
            provenance.write(output, BENCHMARK, commit, settings, compared(rows))

    for cell in missing(cells(options, dist.get_world_size()), rows):
        rows = [row for row in rows if cell_of(row) != cell]
        write([*rows, cell._asdict() | {"unfinished": True}])
        rows.append(measure(cell, options))
        write(rows)
        if dist.get_rank() == 0:
            print(rows[-1], flush=True)
    dist.destroy_process_group()


def so_far(output: Path, settings: Row, parser: argparse.ArgumentParser) -> list[Row]:
    """The rows of an output file, if there is one; ends the process if they are not of this code and these settings."""
    if not output.exists():
        return []
    found = json.loads(output.read_text())
    if other := provenance.differences(found, BENCHMARK, settings):
        parser.error(f"{output} holds rows of other {', '.join(other)}: name another --output.")
    rows: list[Row] = found["rows"]
    return rows


def cells(options: argparse.Namespace, gpus: int) -> list[Cell]:
    """Every combination, each after the one that has a clip on each GPU."""
    found: dict[Cell, None] = {}
    for combination in itertools.product(
        options.models, options.tokens, options.modes, options.strategies, options.layouts or [f"{gpus}x1"],
        options.transports, options.schedules,
    ):  # fmt: skip
        cell = Cell(*combination)
        found |= {cell.alone: None, cell: None}
    return list(found)


def cell_of(row: Row) -> Cell:
    return Cell(*(row[name] for name in Cell._fields))


def missing(wanted: list[Cell], rows: list[Row]) -> list[Cell]:
    """The cells that no row has, then those that were begun and ended the process."""
    finished = {cell_of(row): "unfinished" not in row for row in rows}
    return [cell for cell in wanted if cell not in finished] + [c for c in wanted if finished.get(c) is False]


def measure(cell: Cell, options: argparse.Namespace) -> Row:
    """The row of a cell, or one with the reason why it cannot run."""
    try:
        strategy = strategy_of(cell, options)
    except ValueError as error:  # on all ranks alike
        return cell._asdict() | {"refused": str(error)}
    times, ran = train(cell, strategy, options)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    milliseconds = statistics.median(times)
    figures: Row = {
        "step_ms": round(milliseconds, 3),
        "quartiles_ms": [round(quartiles[0], 3), round(quartiles[2], 3)],
    }
    seconds = milliseconds / 1e3
    figures["tokens_per_second_per_gpu"] = round(cell.tokens / ran["sp"] / seconds)
    if (peak := PEAK_FLOPS.get(gpu_model())) is not None:
        figures["mfu"] = round(ran["flops_per_gpu"] / seconds / peak, 4)
    return cell._asdict() | ran | figures


def gpu_model() -> str:
    return provenance.model(torch.cuda.get_device_name()) if torch.cuda.is_available() else "cpu"


def compared(rows: list[Row]) -> list[Row]:
    """The rows, each beside the clip on each GPU, beside eager code, and beside the best layout of as many ranks."""
    times = {cell_of(row): row["step_ms"] for row in rows if "step_ms" in row}
    best: dict[tuple[Cell, int], float] = {}
    for row in rows:
        if "step_ms" in row:
            place = cell_of(row)._replace(layout=""), row["sp"]
            best[place] = min(row["step_ms"], best.get(place, row["step_ms"]))

    def beside(row: Row) -> Row:
        if "step_ms" not in row:
            return row
        cell, ms = cell_of(row), row["step_ms"]
        ratios = {"over_best": ms / best[cell._replace(layout=""), row["sp"]]}
        if cell.alone in times:
            ratios["per_gpu_over_whole_clips"] = times[cell.alone] / ms / row["sp"]
        if (eager := cell._replace(mode="eager")) in times:
            ratios["eager_over_this"] = times[eager] / ms
        return row | {name: round(ratio, 4) for name, ratio in ratios.items()}

    return [beside(row) for row in rows]


if __name__ == "__main__":
    main()
