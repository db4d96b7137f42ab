"""The validation loss of a training: over steps, samples and seconds, at fixed times and with fixed noise.

Each point has the loss of the weights as they are, and of their exponential moving average, which is less noisy.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from rectified_flow import interpolate

from benchmarks.launch import say

TIMES = (0.1, 0.3, 0.5, 0.7, 0.9)
DECAY = 0.99  # of the moving average, a step


class Curve(pl.Callback):
    """The validation loss over steps, samples and seconds of training.

    Args:
        clips: Batches of one clip to validate on.
        every: Steps from one validation to the next.
        warm_up: Steps before the clock runs.
        sp: Ranks that share a batch.
    """

    def __init__(self, clips: list[Any], every: int, warm_up: int, sp: int) -> None:
        self.clips, self.every, self.warm_up, self.sp = clips, every, warm_up, sp
        self.step, self.samples, self.seconds = 0, 0, 0.0
        self.started: float | None = None
        self.points: list[tuple[int, int, float, list[float], list[float]]] = []
        self.averages: list[torch.Tensor] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.averages = [parameter.detach().clone() for parameter in pl_module.parameters()]
        self.validate(trainer, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.samples += batch["meta"].samples if batch["meta"].loss_weight else 0
        if trainer.global_step == self.step:
            return  # within a step of several micro-batches
        self.step = trainer.global_step
        with torch.no_grad():
            for average, parameter in zip(self.averages, pl_module.parameters(), strict=True):
                average.lerp_(parameter, 1 - DECAY)
        if self.step == self.warm_up:
            self.started = now()
        if self.step % self.every == 0:
            self.validate(trainer, pl_module)

    def validate(self, trainer: pl.Trainer, module: Any) -> None:
        samples = torch.tensor(self.samples, device=module.device)
        dist.all_reduce(samples)
        if self.started is not None:
            self.seconds += now() - self.started
        losses = losses_of(trainer, module, self.clips)
        self.swap(module)
        averaged = losses_of(trainer, module, self.clips)
        self.swap(module)
        self.points.append((self.step, int(samples) // self.sp, self.seconds, losses, averaged))
        if trainer.is_global_zero:
            say(f"  step {self.step}, {self.seconds:.1f} s: loss {mean(losses):.5f}, averaged {mean(averaged):.5f}")
        if self.started is not None:
            self.started = now()

    @torch.no_grad()
    def swap(self, module: Any) -> None:
        """Exchanges the weights and their averages, where they are."""
        for average, parameter in zip(self.averages, module.parameters(), strict=True):
            weights = parameter.clone()
            parameter.copy_(average)
            average.copy_(weights)

    def row(self) -> dict[str, Any]:
        """The columns of the curve, and the last losses by time."""
        steps, samples, seconds, losses, averaged = zip(*self.points, strict=True)
        return {
            "steps": steps,
            "samples": samples,
            "seconds": [round(value, 3) for value in seconds],
            "losses": [round(mean(by_time), 6) for by_time in losses],
            "averaged_losses": [round(mean(by_time), 6) for by_time in averaged],
            "last_losses_by_time": [round(value, 6) for value in losses[-1]],
        }


def now() -> float:
    """Seconds, when the device has done what was asked of it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.no_grad()
def losses_of(trainer: pl.Trainer, module: Any, clips: list[Any]) -> list[float]:
    """The error of the clean latents at each of `TIMES`, the mean over the clips; all ranks take part."""
    module.eval()
    times, total = torch.tensor(TIMES, device=module.device), torch.zeros(len(TIMES), device=module.device)
    for number, clip in enumerate(clips):
        noise = torch.randn(clip["latents"].shape, generator=torch.Generator().manual_seed(number))
        clean, noise = (x.to(module.device).expand(len(times), -1, -1, -1, -1) for x in (clip["latents"], noise))
        with trainer.precision_plugin.forward_context():
            velocity = module(interpolate(clean, noise, times), times, clip["caption"] * len(times))
        error = (velocity.float() - (noise - clean)).square().flatten(1).mean(dim=1)
        total += error * times.square()
    module.train()
    return (total / len(clips)).tolist()
