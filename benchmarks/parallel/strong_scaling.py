"""A step of Wan-1.3B with a clip split over all GPUs, beside a clip on each: eagerly, compiled and by CUDA graphs.

    torchrun --nproc-per-node 2 benchmarks/parallel/strong_scaling.py

The whole model with fused kernels under ``ulysses_ddp`` in bf16-mixed, with a fused AdamW, trained by a Trainer: one
clip a step, at several lengths one after the other. A step's time is what lies between the beginnings of two on the
device, waits for the host included; the median of the steps of a length counts, on the slowest rank.

``per_gpu_over_whole_clips`` is the tokens per second of a GPU that has its part of a clip over those of one that has a
clip of its own, in the same mode. ``--tiny`` tries the script on whatever there is.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

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
from lightning_videoscale.strategies import SequenceParallelDDPStrategy

FRAMES = {4_680: 3, 14_040: 9, 32_760: 21, 75_600: 21}
HEIGHT_WIDTH = {75_600: (90, 160)}
TINY = {"num_attention_heads": 2, "attention_head_dim": 32, "ffn_dim": 128, "num_layers": 2, "text_dim": 64}
MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "compiled": {"compile": True},
    "graphs": {"graphs": True},
}
SKIPPED = 5  # steps of a length that warm up and capture
Row = dict[str, Any]


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


def train(mode: str, sp: int, options: argparse.Namespace) -> tuple[dict[int, list[float]], dict[str, int], float]:
    """The milliseconds of the steps that count, by tokens; what ran by graphs; and the peak of memory in GiB."""
    count = SKIPPED + options.steps
    sizes = [_size(tokens, options.tiny) for tokens in options.tokens for _ in range(count)]
    steps = Steps()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    trainer = pl.Trainer(
        accelerator="auto",
        devices=dist.get_world_size(),
        strategy=SequenceParallelDDPStrategy(
            ulysses_size=sp, attention_backend="sdpa", graphs_max_memory=0.6, **MODES[mode]
        ),
        precision="bf16-mixed",
        use_distributed_sampler=False,  # all ranks have clips of the same sizes in the same order
        max_steps=len(sizes),
        callbacks=[steps],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Flow(TINY if options.tiny else WAN_1_3B), DataLoader(TensorDataset(torch.tensor(sizes)), batch_size=1))
    times = steps.milliseconds()
    peak = torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0
    by_tokens = {
        tokens: _slowest(times[place * count + SKIPPED : (place + 1) * count])
        for place, tokens in enumerate(options.tokens)
    }
    return by_tokens, steps.counts, peak


def _size(tokens: int, tiny: bool) -> tuple[int, int, int]:
    return (2, 8, 8) if tiny else (FRAMES[tokens], *HEIGHT_WIDTH.get(tokens, (60, 104)))


def _slowest(times: list[float]) -> list[float]:
    """Of each step, on the slowest rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, times)
    return [max(step) for step in zip(*everyone, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4_680, 14_040, 32_760])
    parser.add_argument("--modes", nargs="+", default=["eager", "graphs"], choices=list(MODES))
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
    gpus = dist.get_world_size()
    rows: list[Row] = []
    whole: dict[tuple[str, int], float] = {}
    for mode in options.modes:
        for sp in sorted({1, gpus}):
            times, counts, peak = train(mode, sp, options)
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
            for tokens, steps in times.items():
                row = describe(mode, sp, tokens, steps) | {"gpus": gpus, "reserved_gib": round(peak, 2)}
                whole.setdefault((mode, tokens), row["step_ms"])
                row["per_gpu_over_whole_clips"] = round(whole[mode, tokens] / row["step_ms"] / sp, 4)
                row["eager_over_this"] = round(_eager(rows, sp, tokens, row["step_ms"]) / row["step_ms"], 4)
                rows.append(row)
                if dist.get_rank() == 0:
                    print(row, counts, flush=True)
            if dist.get_rank() == 0:
                provenance.write(output, "parallel/strong_scaling", commit, {"steps": options.steps}, rows)
    dist.destroy_process_group()


def describe(mode: str, sp: int, tokens: int, steps: list[float]) -> Row:
    """A row of the table."""
    quartiles = statistics.quantiles(steps, n=4) if len(steps) > 1 else [steps[0]] * 3
    return {
        "mode": mode,
        "sp": sp,
        "tokens": tokens,
        "step_ms": round(statistics.median(steps), 3),
        "quartiles_ms": [round(quartiles[0], 3), round(quartiles[2], 3)],
    }


def _eager(rows: list[Row], sp: int, tokens: int, default: float) -> float:
    return next(
        (row["step_ms"] for row in rows if (row["mode"], row["sp"], row["tokens"]) == ("eager", sp, tokens)), default
    )


if __name__ == "__main__":
    main()
