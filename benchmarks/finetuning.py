"""Time and memory of the fine-tuning examples: `examples/finetune_wan.py` with the settings of its configs.

    torchrun --nproc-per-node 2 benchmarks/finetuning.py

Wan with random weights of the real sizes, whole or by LoRA, on latents of zeros and embeddings of 512 tokens, with
fused kernels, EMA and the model's own gradient checkpointing, as the configs have them. One clip a step, shared by all
GPUs. ``finetune_wan_14b`` is too large for one: name the others there (``--configs``). ``--tiny`` tries the script on
CPUs.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from finetune_wan import FinetuneWan

from benchmarks import provenance
from benchmarks.parallel.strong_scaling import Steps
from benchmarks.wan_training import WAN_1_3B
from lightning_videoscale.callbacks import EMA, FusedKernels

WAN_14B = WAN_1_3B | {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}
TINY = {"num_attention_heads": 2, "attention_head_dim": 32, "ffn_dim": 128, "num_layers": 2}
CONFIGS: dict[str, tuple[dict[str, int], int | None, str]] = {  # as in examples/configs
    "finetune_wan_1_3b_lora": (WAN_1_3B, 32, "ulysses_ddp"),
    "finetune_wan_1_3b": (WAN_1_3B, None, "ulysses_fsdp2"),
    "finetune_wan_14b_lora": (WAN_14B, 32, "ulysses_fsdp2"),
    "finetune_wan_14b": (WAN_14B, None, "ulysses_fsdp2"),
}
SIZES = {14_040: (9, 60, 104), 32_760: (21, 60, 104), 75_600: (21, 90, 160)}  # latents of Wan's VAE, by tokens
SKIPPED = 3


class RandomWan(FinetuneWan):
    """The example with random weights."""

    def __init__(self, config: dict[str, int], lora_rank: int | None) -> None:
        super().__init__("random", lora_rank, gradient_checkpointing=True)
        self.config = config

    def load(self, dtype: torch.dtype) -> WanTransformer3DModel:
        with self.trainer.strategy.root_device:
            model = WanTransformer3DModel(qk_norm="rms_norm_across_heads", cross_attn_norm=True, **self.config)
            return model.to(dtype)


class Clips(Dataset[dict[str, Tensor]]):
    """Always the same clip."""

    def __init__(self, size: tuple[int, int, int], length: int) -> None:
        self.size, self.length = size, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, _: int) -> dict[str, Tensor]:
        return {"latents": torch.zeros(16, *self.size), "text_embeds": torch.ones(512, 4096)}


def train(name: str, tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """A row: the slowest rank's median step, and the largest peak of memory."""
    config, rank, strategy = CONFIGS[name]
    cuda, steps = torch.cuda.is_available(), Steps()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    trainer = pl.Trainer(
        accelerator="auto",
        devices=dist.get_world_size(),
        strategy=strategy,
        precision="bf16-mixed",
        max_steps=SKIPPED + options.steps,
        gradient_clip_val=1.0,
        callbacks=[FusedKernels(), EMA(0.99), steps],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    size = (2, 8, 8) if options.tiny else SIZES[tokens]
    count = (SKIPPED + options.steps) * dist.get_world_size()
    trainer.fit(RandomWan(TINY if options.tiny else config, rank), DataLoader(Clips(size, count), batch_size=1))
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (statistics.median(steps.milliseconds()[SKIPPED:]), peak))
    times, peaks = zip(*everyone, strict=True)
    return {
        "config": name,
        "gpus": dist.get_world_size(),
        "tokens": tokens,
        "step_ms": round(max(times), 1),
        "peak_allocated_gib": round(max(peaks), 2),
    }


def main() -> None:
    parser = provenance.parser(__doc__)
    parser.add_argument("--configs", nargs="+", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[32_760, 75_600], choices=list(SIZES))
    parser.add_argument("--steps", type=int, default=8, help="that count")
    parser.add_argument("--tiny", action="store_true", help="try the script with a small model")
    options = parser.parse_args()
    commit = options.commit or provenance.commit()
    output = options.output or provenance.path("examples", "finetuning")
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    rows: list[dict[str, Any]] = []
    for name in options.configs:
        for tokens in options.tokens:
            rows.append(train(name, tokens, options))
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
            if dist.get_rank() == 0:
                print(rows[-1], flush=True)
                provenance.write(output, "finetuning", commit, {"steps": options.steps, "tiny": options.tiny}, rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
