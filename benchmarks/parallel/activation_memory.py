"""Activation memory of Wan-1.3B under `ulysses_ddp`, and the longest sequence that trains under a cap per GPU.

    python benchmarks/parallel/activation_memory.py

On 1, 2 and 4 GPUs, one sequence-parallel group each, whole training steps run at several lengths: bf16-mixed, so that
weights, gradients and AdamW's states are float32. Peaks are those of torch's allocator over forward, backward and the
optimizer's step, plus the memory that the symmetric transport takes beside it. The activation memory of a step is its
peak less what is allocated before its forward. A line through the lengths gives what a token costs and what does not
depend on the length (autocast's bfloat16 copies of the weights, the text), and with the cap the longest sequence. Where
a step at that length is short, a last run tries it, with the process held to the cap.
"""

from __future__ import annotations

import gc
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.launch import finish, launch, task_of_worker
from lightning_videoscale.strategies import SequenceParallelDDPStrategy

GIB = 2**30
WAN_1_3B = {
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "ffn_dim": 8960,
    "num_layers": 30,
    "text_dim": 4096,
    "freq_dim": 256,
}
TINY_WAN = WAN_1_3B | {"num_attention_heads": 4, "attention_head_dim": 12, "ffn_dim": 64, "num_layers": 2}
SIDE = 64  # latents of 64 x 64: 32 x 32 tokens to a frame
TOKENS_PER_FRAME = (SIDE // 2) ** 2
# Frames that each rank holds. Without checkpointing the cap is reached at about five, with it at about sixty.
FRAMES = {False: (2, 3, 4, 6, 8), True: (4, 8, 12, 16, 20)}
COMMON_FRAMES = {False: 8, True: 16}  # of the whole sequence: measured on every number of ranks
RUNS = ((1, "collective"), (2, "collective"), (4, "collective"), (4, "symmetric"))  # ranks, transport


class Clips(Dataset[dict[str, Tensor]]):
    """One clip for each number of frames."""

    def __init__(self, frames: list[int], text_dim: int) -> None:
        self.frames, self.text_dim = frames, text_dim

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {
            "latents": torch.randn(16, self.frames[index], SIDE, SIDE, generator=generator),
            "text": torch.randn(512, self.text_dim, generator=generator),
        }


class RectifiedFlow(pl.LightningModule):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config

    def configure_model(self) -> None:
        with self.trainer.strategy.root_device:
            self.transformer = WanTransformer3DModel(
                in_channels=16, out_channels=16, qk_norm="rms_norm_across_heads", **self.config
            )

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        clean = batch["latents"]
        noise = torch.randn_like(clean)
        time = torch.rand(len(clean), device=self.device)
        noisy = torch.lerp(clean, noise, time.view(-1, 1, 1, 1, 1))
        velocity = self.transformer(noisy, time * 1000, batch["text"], return_dict=False)[0]
        return torch.nn.functional.mse_loss(velocity.float(), noise - clean)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5, fused=True)  # unfused, it would take temporary memory


class Watch(Callback):
    """Bytes before the forward, at the peak, and beside torch's allocator, in every step."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, int]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        transport = trainer.strategy.transport
        beside = transport.memory_bytes if transport is not None else 0
        self.steps.append((self.before, torch.cuda.max_memory_allocated(), beside))

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        # Lightning would bring it all to the host.
        for optimizer in trainer.optimizers:
            optimizer.state.clear()
        for parameter in module.parameters():
            parameter.grad = None
            parameter.data = parameter.data.new_empty(0)


def train(frames: list[int], checkpointing: bool, transport: str, tiny: bool) -> list[tuple[int, int, int]]:
    """One optimizer step for each number of frames, and what it took on the rank that took most."""
    pl.seed_everything(0, verbose=False)
    config = TINY_WAN if tiny else WAN_1_3B
    watch = Watch()
    trainer = pl.Trainer(
        strategy=SequenceParallelDDPStrategy(
            ulysses_size=int(os.environ["WORLD_SIZE"]),
            activation_checkpointing=checkpointing,
            transport=transport,  # type: ignore[arg-type]
            graphs=False,
            timeout=timedelta(seconds=90),
            gradient_as_bucket_view=True,  # else DDP keeps the gradients twice
        ),
        accelerator="cpu" if tiny else "cuda",
        devices=int(os.environ["WORLD_SIZE"]),
        precision="bf16-mixed",
        max_steps=len(frames),
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # it shuffles, and the steps are told apart by their order
    )
    trainer.fit(RectifiedFlow(config), DataLoader(Clips(frames, config["text_dim"]), batch_size=1))
    steps = torch.tensor(watch.steps, device=trainer.strategy.root_device)
    dist.all_reduce(steps, dist.ReduceOp.MAX)
    return [(before, peak, beside) for before, peak, beside in steps.tolist()]


def measure(cap_gib: float, transport: str, tiny: bool) -> None:
    """Finishes with the rows and the fits of these ranks, without and with checkpointing; collective over them."""
    ranks = int(os.environ["WORLD_SIZE"])
    rows, fits = [], []
    for checkpointing in (False, True):
        lengths = [frames * ranks for frames in ((1, 2) if tiny else FRAMES[checkpointing])]
        # Two steps to begin with: the first makes AdamW's states, and in the second DDP arranges its buckets anew.
        steps = train([lengths[0], lengths[0], *lengths], checkpointing, transport, tiny)[2:]
        mine = [
            {
                "ranks": ranks,
                "activation_checkpointing": checkpointing,
                "transport": transport,
                "tokens": frames * TOKENS_PER_FRAME,
                "before_bytes": before,
                "symmetric_bytes": beside,
                "peak_bytes": peak + beside,
                "activation_bytes": peak + beside - before,
            }
            for frames, (before, peak, beside) in zip(lengths, steps, strict=True)
        ]
        rows += mine
        fits.append(fit(mine, cap_gib))
    finish((rows, fits))  # what comes now may end in an error
    if fits[0]["longest_tokens"]:
        # Two in a hundred less, as an allocator cannot use every byte.
        fits[0] |= try_tokens(int(0.98 * fits[0]["longest_tokens"]), cap_gib, transport)
    finish((rows, fits))


def try_tokens(tokens: int, cap_gib: float, transport: str) -> dict[str, Any]:
    """Trains without checkpointing at a length with the allocator held to the cap."""
    frames = tokens // TOKENS_PER_FRAME
    tried: dict[str, Any] = {"tried_tokens": frames * TOKENS_PER_FRAME}
    gc.collect()
    torch.cuda.empty_cache()
    tried["left_bytes"] = torch.cuda.memory_allocated()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction((cap_gib * GIB + tried["left_bytes"]) / total)
    try:
        steps = train([frames] * 3, False, transport, tiny=False)
    except torch.OutOfMemoryError as error:
        return tried | {"tried": f"out of memory: {str(error)[:200]}"}
    return tried | {"tried": "trained", "tried_peak_bytes": max(peak + beside for _, peak, beside in steps)}


def fit(rows: list[dict[str, Any]], cap_gib: float) -> dict[str, Any]:
    """The line through one setting's peaks, and where it meets the cap."""
    tokens, peaks = (np.array([row[name] for row in rows], dtype=np.float64) for name in ("tokens", "peak_bytes"))
    per_token, at_zero = np.polyfit(tokens, peaks, 1)
    residual = np.abs(peaks - (at_zero + per_token * tokens)).max()
    before = rows[-1]["before_bytes"]
    return {
        **{name: rows[0][name] for name in ("ranks", "activation_checkpointing", "transport")},
        "fit": "peak_bytes = before_bytes + constant_bytes + bytes_per_token * tokens",
        "before_bytes": before,
        "constant_bytes": round(at_zero - before),
        "bytes_per_token": round(float(per_token), 1),
        "largest_residual_bytes": round(float(residual)),
        "longest_tokens": int((cap_gib * GIB - at_zero) / per_token) if per_token > 0 else None,
    }


def compare(rows: list[dict[str, Any]], fits: list[dict[str, Any]]) -> None:
    """Adds to each fit what it is beside that of one rank; a fall as 1/ranks is a ratio of 1."""
    for line in fits:
        ranks, checkpointing = line["ranks"], line["activation_checkpointing"]
        alone = next(f for f in fits if f["ranks"] == 1 and f["activation_checkpointing"] is checkpointing)
        if not alone["longest_tokens"]:
            continue
        line["longest_over_one_rank"] = round(line["longest_tokens"] / alone["longest_tokens"], 3)
        per_token = line["bytes_per_token"] * ranks / alone["bytes_per_token"]
        line["bytes_per_token_times_ranks_over_one_rank"] = round(per_token, 3)
        # At one length, as measured, without what does not depend on the length.
        tokens = COMMON_FRAMES[checkpointing] * TOKENS_PER_FRAME
        here, one = (
            next(row["activation_bytes"] for row in rows if row["tokens"] == tokens and _same(row, f))
            - f["constant_bytes"]
            for f in (line, alone)
        )
        line["compared_at_tokens"] = tokens
        line["activation_bytes_times_ranks_over_one_rank"] = round(here * ranks / one, 3)


def _same(row: dict[str, Any], line: dict[str, Any]) -> bool:
    return all(row[name] == line[name] for name in ("ranks", "activation_checkpointing", "transport"))


def main() -> None:
    parser = provenance.parser(__doc__)
    parser.add_argument("--cap-gib", type=float, default=40.0)
    parser.add_argument("--tiny", action="store_true", help="dry run on CPUs, where nothing is measured")
    arguments = parser.parse_args()
    commit = arguments.commit or provenance.commit()
    rows: list[dict[str, Any]] = []
    fits: list[dict[str, Any]] = []
    for ranks, transport in RUNS[: 3 if arguments.tiny else None]:
        mine = launch(__file__, ranks, cap_gib=arguments.cap_gib, transport=transport, tiny=arguments.tiny)
        rows += mine[0]
        fits += mine[1]
    compare(rows, fits)
    show(rows, fits)
    settings = {
        "dry_run": arguments.tiny,
        "model": TINY_WAN if arguments.tiny else WAN_1_3B,
        "precision": "bf16-mixed",
        "optimizer": "AdamW, fused",
        "batch_size": 1,
        "cap_gib": arguments.cap_gib,
    }
    output = arguments.output or provenance.path("parallel", "activation_memory")
    provenance.write(output, "parallel/activation_memory", commit, settings, rows + fits)
    print(f"written to {output}")


def show(rows: list[dict[str, Any]], fits: list[dict[str, Any]]) -> None:
    print(
        f"{'ranks':>5} {'checkpointing':>13} {'tokens':>8} {'before GiB':>10} {'activations GiB':>15} {'peak GiB':>8}"
    )
    for row in rows:
        print(
            f"{row['ranks']:>5} {row['activation_checkpointing']!s:>13} {row['tokens']:>8} "
            f"{row['before_bytes'] / GIB:>10.2f} {row['activation_bytes'] / GIB:>15.2f} {row['peak_bytes'] / GIB:>8.2f}"
        )
    for line in fits:
        print({name: value for name, value in line.items() if name != "fit"})


if __name__ == "__main__":
    if (task := task_of_worker()) is not None:
        measure(**task)
    else:
        main()
