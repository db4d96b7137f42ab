"""A training step with a clip split over GPUs, beside a clip on each: by layout, strategy, transport, schedule, mode.

    torchrun --nproc-per-node 2 benchmarks/parallel/strong_scaling.py
    torchrun --nproc-per-node 8 benchmarks/parallel/strong_scaling.py --layouts 8x1 4x2 2x4 4x1 auto

Wan with fused kernels in bf16-mixed with a fused AdamW, trained by a Trainer: one clip a step, at several lengths one
after the other. A layout is Ulysses x ring; what it leaves of the GPUs is data parallelism. A step's time is what lies
between the beginnings of two on the device, waits for the host included; the median of the steps of a length counts,
on the slowest rank. A combination that the package refuses is a row with the reason.

``per_gpu_over_whole_clips`` is the tokens per second of a GPU that has its part of a clip over those of one that has a
clip of its own, with all else the same but transport and schedule. ``--tiny`` tries the script on whatever there is.
"""

from __future__ import annotations

import argparse
import gc
import itertools
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
from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.parallel.schedules import ScheduleName
from lightning_videoscale.parallel.transport import TransportName, what_lacks
from lightning_videoscale.strategies import SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy

FRAMES = {4_680: 3, 14_040: 9, 32_760: 21, 75_600: 21, 151_200: 42}
HEIGHT_WIDTH = {75_600: (90, 160), 151_200: (90, 160)}
MODELS = {
    "wan-1.3b": WAN_1_3B,
    "wan-14b-8": WAN_1_3B | {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 8},
}
TINY = {"num_attention_heads": 8, "attention_head_dim": 16, "ffn_dim": 128, "num_layers": 2, "text_dim": 64}
MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "compiled": {"compile": True},
    "graphs": {"graphs": True},
}
STRATEGIES = {"ddp": SequenceParallelDDPStrategy, "fsdp2": SequenceParallelFSDP2Strategy}
SKIPPED = 5  # steps of a length that warm up and capture
Row = dict[str, Any]


class Cell(NamedTuple):
    """What is trained how.

    Attributes:
        model: One of `MODELS`.
        mode: One of `MODES`.
        strategy: One of `STRATEGIES`.
        ulysses: Ranks of a Ulysses group; None: all GPUs share a clip as ``auto`` has it.
        ring: Ranks of a ring; None likewise.
        transport: Of the exchange.
        schedule: Likewise.
    """

    model: str
    mode: str
    strategy: str
    ulysses: int | None
    ring: int | None
    transport: str
    schedule: str

    @property
    def alone(self) -> Cell:
        """A clip on each GPU, and all else the same."""
        return self._replace(ulysses=1, ring=1, transport="collective", schedule="serial")


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
    if "graphs" in MODES[cell.mode] and cell.ring not in (None, 1):
        raise ValueError(f"no CUDA graph captures a ring of {cell.ring}")  # setup says so too, when ranks have met
    memory = {"graphs_max_memory": 0.6} if "graphs" in MODES[cell.mode] else {}
    return STRATEGIES[cell.strategy](
        ulysses_size=cell.ulysses,
        ring_size=cell.ring,
        transport=cell.transport,
        schedule=cell.schedule,
        attention_backend="sdpa",
        activation_checkpointing=options.checkpointing,
        **MODES[cell.mode],
        **memory,
    )


def train(cell: Cell, strategy: Any, options: argparse.Namespace) -> tuple[dict[int, list[float]], dict[str, Any]]:
    """The milliseconds of the steps that count, by tokens; and what ran: the layout, graphs, the peak of memory."""
    count = SKIPPED + options.steps
    sizes = [_size(tokens, options.tiny) for tokens in options.tokens for _ in range(count)]
    steps = Steps()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    trainer = pl.Trainer(
        accelerator="auto",
        devices=dist.get_world_size(),
        strategy=strategy,
        precision="bf16-mixed",
        use_distributed_sampler=False,  # all ranks have clips of the same sizes in the same order
        max_steps=len(sizes),
        callbacks=[steps],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Flow(TINY if options.tiny else MODELS[cell.model])
    trainer.fit(module, DataLoader(TensorDataset(torch.tensor(sizes)), batch_size=1))
    times = steps.milliseconds()
    peak = torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0
    by_tokens = {
        tokens: _slowest(times[place * count + SKIPPED : (place + 1) * count])
        for place, tokens in enumerate(options.tokens)
    }
    ran = {"ulysses": strategy.mesh.ulysses.size, "ring": strategy.mesh.ring.size, "dp": strategy.mesh.dp.size}
    return by_tokens, ran | {"reserved_gib": round(peak, 2), "graphs": steps.counts}


def _size(tokens: int, tiny: bool) -> tuple[int, int, int]:
    return (2, 8, 8) if tiny else (FRAMES[tokens], *HEIGHT_WIDTH.get(tokens, (60, 104)))


def _slowest(times: list[float]) -> list[float]:
    """Of each step, on the slowest rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, times)
    return [max(step) for step in zip(*everyone, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4_680, 14_040, 32_760], choices=list(FRAMES))
    parser.add_argument("--models", nargs="+", default=["wan-1.3b"], choices=list(MODELS))
    parser.add_argument("--modes", nargs="+", default=["eager", "graphs"], choices=list(MODES))
    parser.add_argument("--strategies", nargs="+", default=["ddp"], choices=list(STRATEGIES))
    parser.add_argument("--layouts", nargs="+", help="such as 4x2: Ulysses x ring, or auto; left out, Ulysses alone")
    parser.add_argument("--transports", nargs="+", default=["collective"], choices=get_args(TransportName))
    parser.add_argument("--schedules", nargs="+", default=["serial"], choices=get_args(ScheduleName))
    parser.add_argument("--checkpointing", action="store_true", help="activation checkpointing of every block")
    parser.add_argument("--steps", type=int, default=12, help="that count, of each length")
    parser.add_argument("--output", type=Path, help="file to write; left out, one under benchmarks/results")
    parser.add_argument("--commit", help="the commit that is measured, where the folder is no git checkout")
    parser.add_argument("--tiny", action="store_true", help="try the script with a small model")
    options = parser.parse_args()
    commit = options.commit or provenance.commit()
    output = options.output or provenance.path("parallel", "strong_scaling")
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    settings = {"dry_run": options.tiny, "steps": options.steps, "checkpointing": options.checkpointing}
    rows: list[Row] = []
    for cell in cells(options, dist.get_world_size()):
        rows += measure(cell, rows, options)
        if dist.get_rank() == 0:
            provenance.write(output, "parallel/strong_scaling", commit, settings, rows)
    dist.destroy_process_group()


def cells(options: argparse.Namespace, gpus: int) -> list[Cell]:
    """Every combination, each after the one that has a clip on each GPU."""
    found: dict[Cell, None] = {}
    for model, mode, strategy, layout, transport, schedule in itertools.product(
        options.models, options.modes, options.strategies, options.layouts or [f"{gpus}x1"], options.transports,
        options.schedules,
    ):  # fmt: skip
        ulysses, ring = (None, None) if layout == "auto" else map(int, layout.split("x"))
        cell = Cell(model, mode, strategy, ulysses, ring, transport, schedule)
        found |= {cell.alone: None, cell: None}
    return list(found)


def measure(cell: Cell, rows: list[Row], options: argparse.Namespace) -> list[Row]:
    """The rows of a cell, one for each length, or one with the reason why it cannot run."""
    asked = cell._asdict() | {"layout": "auto" if cell.ulysses is None else f"{cell.ulysses}x{cell.ring}"}
    try:
        strategy = strategy_of(cell, options)
    except ValueError as error:  # on all ranks alike
        found = [asked | {"refused": str(error)}]
    else:
        times, ran = train(cell, strategy, options)
        found = [asked | ran | describe(tokens, steps) for tokens, steps in times.items()]
        for row in found:
            _compare(row, [*rows, *found])
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        for row in found:
            print(row, flush=True)
    return found


def describe(tokens: int, steps: list[float]) -> Row:
    """What was measured of a length."""
    quartiles = statistics.quantiles(steps, n=4) if len(steps) > 1 else [steps[0]] * 3
    return {
        "gpus": dist.get_world_size(),
        "tokens": tokens,
        "step_ms": round(statistics.median(steps), 3),
        "quartiles_ms": [round(quartiles[0], 3), round(quartiles[2], 3)],
    }


def _compare(row: Row, rows: list[Row]) -> None:
    """Adds what a row is beside the clip on each GPU, and beside eager code."""

    def time(**changed: Any) -> float | None:
        wanted = {name: row[name] for name in (*Cell._fields, "layout", "tokens")} | changed
        found = [other["step_ms"] for other in rows if "step_ms" in other and wanted.items() <= other.items()]
        return float(found[0]) if found else None

    row["sp"] = row["ulysses"] * row["ring"]
    alone = time(layout="1x1", ulysses=1, ring=1, transport="collective", schedule="serial")
    if alone is not None:
        row["per_gpu_over_whole_clips"] = round(alone / row["step_ms"] / row["sp"], 4)
    if (eager := time(mode="eager")) is not None:
        row["eager_over_this"] = round(eager / row["step_ms"], 4)


if __name__ == "__main__":
    main()
