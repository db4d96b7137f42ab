"""What watching costs: Wan-1.3B on one GPU, with the clock, `LoadBalanceMonitor` and `BottleneckAnalyzer`, and without.

    python benchmarks/callbacks/clock_overhead.py

One training, in which rounds of steps with and without take turns; a round's report is part of it. Under `ulysses_ddp`
a micro-batch has a handful of marks; under `ulysses_fsdp2` there are six for every transformer block, as many as any
strategy sets. The sequence is short, as the marks of a long one are the same, but not so short that the host would be
slower than the device.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
from diffusers import WanTransformer3DModel
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.launch import say
from lightning_videoscale.callbacks import BottleneckAnalyzer, LoadBalanceMonitor
from lightning_videoscale.data.batch import BatchMeta
from lightning_videoscale.strategies import SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy

WAN_1_3B = {
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "ffn_dim": 8960,
    "num_layers": 30,
    "text_dim": 4096,
    "freq_dim": 256,
}
TINY_WAN = WAN_1_3B | {"num_attention_heads": 4, "attention_head_dim": 12, "ffn_dim": 64, "num_layers": 2}
LATENT = (60, 104)  # 480 x 832 pixels: 1560 tokens to a frame
STRATEGIES = {"ulysses_ddp": SequenceParallelDDPStrategy, "ulysses_fsdp2": SequenceParallelFSDP2Strategy}
STEPS_BETWEEN_REPORTS = 10
Row = dict[str, Any]


class Clips(Dataset[dict[str, Any]]):
    """Clips of one shape, with the ``meta`` that the callbacks read."""

    def __init__(self, length: int, shape: tuple[int, int, int], text_dim: int) -> None:
        self.length = length
        tokens = shape[0] * shape[1] * shape[2] // 4
        self.clip = {"latents": torch.randn(1, 16, *shape), "text": torch.randn(1, 512, text_dim)}
        self.meta = BatchMeta(*shape, sequence_length=tokens, samples=1, predicted_cost=1.0, loss_weight=1.0)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.clip, "meta": self.meta}


class RectifiedFlow(pl.LightningModule):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config

    def configure_model(self) -> None:
        with self.trainer.strategy.root_device:
            self.transformer = WanTransformer3DModel(
                in_channels=16, out_channels=16, qk_norm="rms_norm_across_heads", **self.config
            )

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        clean = batch["latents"]
        noise = torch.randn_like(clean)
        time = torch.rand(len(clean), device=self.device)
        noisy = torch.lerp(clean, noise, time.view(-1, 1, 1, 1, 1))
        velocity = self.transformer(noisy, time * 1000, batch["text"], return_dict=False)[0]
        return torch.nn.functional.mse_loss(velocity.float(), noise - clean)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-6, fused=True)


class TakingTurns(pl.Callback):
    """Lets other callbacks watch every second round, and times the rounds.

    Attributes:
        seconds: Per step, of the rounds without and with.
    """

    def __init__(self, watching: list[pl.Callback], steps: int, warm_up: int) -> None:
        self.watching = watching
        self.steps = steps
        self.warm_up = warm_up
        self.seconds: dict[bool, list[float]] = {False: [], True: []}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        number, step = divmod(trainer.global_step - self.warm_up, self.steps)
        is_on = number % 2 == 1
        if number > 0 and step == 0:  # this step is the last of the round before
            self._end_round(trainer, pl_module, was_on=not is_on, args=(outputs, batch, batch_idx))
        elif number >= 0 and is_on:
            for callback in self.watching:
                callback.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if number >= 0 and step == 0:
            self._begin = time.perf_counter()
            if is_on:
                for callback in self.watching:
                    callback.on_train_start(trainer, pl_module)

    def _end_round(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, was_on: bool, args: tuple[Any, Any, int]
    ) -> None:
        if was_on:
            for callback in self.watching:
                callback.on_train_batch_end(trainer, pl_module, *args)
                callback.on_train_end(trainer, pl_module)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[was_on].append((time.perf_counter() - self._begin) / self.steps)
        say(f"  {'watched' if was_on else 'without'}: {1e3 * self.seconds[was_on][-1]:.3f} ms a step")


def measure(strategy: str, frames: int, rounds: int, steps: int, tiny: bool, folder: str) -> Row:
    """Trains under a strategy and returns what watching costs."""
    config, shape = (TINY_WAN, (1, 8, 8)) if tiny else (WAN_1_3B, (frames, *LATENT))
    monitor, analyzer = LoadBalanceMonitor(STEPS_BETWEEN_REPORTS), BottleneckAnalyzer(STEPS_BETWEEN_REPORTS)
    turns = TakingTurns([monitor, analyzer], steps, warm_up=3)
    count = 3 + 2 * rounds * steps
    trainer = pl.Trainer(
        strategy=STRATEGIES[strategy](ulysses_size=1, activation_checkpointing=True),
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=count,
        callbacks=[turns],
        logger=CSVLogger(folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(RectifiedFlow(config), DataLoader(Clips(count, shape, config["text_dim"]), batch_size=None))
    without, watched = turns.seconds[False], turns.seconds[True]
    ratios = sorted(on / off - 1 for off, on in zip(without, watched, strict=True))
    return {
        "strategy": strategy,
        "tokens": shape[0] * shape[1] * shape[2] // 4,
        "rounds": rounds,
        "step_without_ms": round(1e3 * statistics.median(without), 3),
        "step_watched_ms": round(1e3 * statistics.median(watched), 3),
        "overhead_percent": round(100 * statistics.median(ratios), 3),
        "overhead_of_rounds_percent": [round(100 * ratio, 3) for ratio in ratios],
        "named": [finding["name"] for finding in analyzer.history][-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=5, help="latent frames of a clip, 1560 tokens each")
    parser.add_argument("--rounds", type=int, default=6, help="pairs of rounds")
    parser.add_argument("--steps", type=int, default=20, help="steps of a round")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=list(STRATEGIES))
    parser.add_argument("--tiny", action="store_true", help="a model of two layers, on a CPU too: tries the script")
    parser.add_argument("--output", type=Path, help="file to write; left out, one under benchmarks/results")
    parser.add_argument("--commit", help="the commit that is measured, where the folder is no git checkout")
    options = parser.parse_args()
    commit = "not measured" if options.tiny else options.commit or provenance.commit()
    output = options.output or provenance.path("callbacks", "clock_overhead")
    settings = {
        "dry_run": options.tiny,
        "model": TINY_WAN if options.tiny else WAN_1_3B,
        "precision": "bf16-mixed",
        "activation_checkpointing": True,
        "steps_per_round": options.steps,
        "steps_between_reports": STEPS_BETWEEN_REPORTS,
    }
    rows = []
    with TemporaryDirectory() as folder:
        for strategy in options.strategies:
            say(strategy)
            row = measure(strategy, options.frames, options.rounds, options.steps, options.tiny, folder)
            rows.append(row)
            provenance.write(output, "callbacks/clock_overhead", commit, settings, rows)
            say(
                f"{strategy}, {row['tokens']} tokens: {row['step_without_ms']} ms without, "
                f"{row['step_watched_ms']} ms watched, {row['overhead_percent']:+.3f} % (median of rounds)"
            )
    print(f"written to {output}")


if __name__ == "__main__":
    main()
