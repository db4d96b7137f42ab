"""A small Wan trained on 1, 2 and 4 GPUs that share its sequences: one loss curve.

    python benchmarks/parallel/loss_overlay.py

Every run trains on the same clips with the same noise, one sequence-parallel group of all its ranks. A run on one GPU
in float32 shows by how much the rounding of bfloat16 alone moves the curve.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.launch import finish, launch, task_of_worker
from lightning_videoscale.strategies import SequenceParallelDDPStrategy

# (ring, ulysses, precision)
RUNS = [(1, 1, "bf16-mixed"), (1, 1, "32-true"), (1, 2, "bf16-mixed"), (1, 4, "bf16-mixed"), (2, 2, "bf16-mixed")]
BATCH_SIZE, LEARNING_RATE, WARM_UP, SEED = 4, 5e-4, 20, 7
WAN = {"num_attention_heads": 8, "attention_head_dim": 64, "ffn_dim": 2048, "num_layers": 6, "text_dim": 256}
TINY_WAN = WAN | {"num_attention_heads": 4, "attention_head_dim": 24, "ffn_dim": 64, "num_layers": 2}


class TravellingWaves(Dataset[dict[str, Tensor]]):
    """Latents (16, F, H, W) of unit variance: waves of few frequencies that travel, seen through 16 mixed channels.

    The text is a function of the waves, so that there is something to condition on.
    """

    WAVES = 4

    def __init__(self, shape: tuple[int, int, int], length: int) -> None:
        self.grid = torch.stack(torch.meshgrid(*(torch.arange(n) / n for n in shape), indexing="ij"))
        self.length = length
        generator = torch.Generator().manual_seed(SEED)
        self.mixing = torch.randn(16, self.WAVES, generator=generator) / self.WAVES**0.5
        self.words = torch.randn(4, WAN["text_dim"], generator=generator)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        frequencies = torch.randint(-3, 4, (self.WAVES, 3), generator=generator).float()
        phases = torch.rand(self.WAVES, 1, generator=generator)
        angles = torch.einsum("wd,d...->w...", frequencies, self.grid)
        waves = torch.sin(2 * math.pi * (angles + phases.view(-1, 1, 1, 1))) * 2**0.5
        latents = torch.einsum("cw,w...->c...", self.mixing, waves)
        return {
            "latents": latents + 0.1 * torch.randn(latents.shape, generator=generator),
            "text": torch.cat([frequencies, phases], 1) @ self.words,
        }


class RectifiedFlow(pl.LightningModule):
    """Of a Wan; a subclass builds and calls another model."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.transformer = self.build(config)

    def build(self, config: dict[str, Any]) -> nn.Module:
        return WanTransformer3DModel(
            in_channels=16, out_channels=16, freq_dim=256, qk_norm="rms_norm_across_heads", **config
        )

    def velocity(self, noisy: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        velocity: Tensor = self.transformer(noisy, timestep, text, return_dict=False)[0]
        return velocity

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        clean = batch["latents"]
        noise, time = torch.randn_like(clean), torch.sigmoid(torch.randn(len(clean), device=self.device))
        noisy = torch.lerp(clean, noise, time.view(-1, 1, 1, 1, 1))
        velocity = self.velocity(noisy, time * 1000, batch["text"])
        return F.mse_loss(velocity.float(), noise - clean)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm_up, "interval": "step"}}


class Record(Callback):
    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].detach())


def train(ring_size: int, ulysses_size: int, precision: str, steps: int, tiny: bool) -> list[float]:
    """The losses of all steps; collective over the ranks."""
    pl.seed_everything(SEED, verbose=False)
    torch.set_float32_matmul_precision("highest")
    record = Record()
    trainer = pl.Trainer(
        strategy=SequenceParallelDDPStrategy(ulysses_size=ulysses_size, ring_size=ring_size, graphs=False),
        accelerator="cpu" if tiny else "cuda",
        devices=int(os.environ["WORLD_SIZE"]),
        precision=precision,
        max_steps=steps,
        callbacks=[record],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    clips = TravellingWaves((2, 8, 8) if tiny else (5, 32, 32), steps * BATCH_SIZE)
    workers = 0 if tiny else 2
    trainer.fit(RectifiedFlow(TINY_WAN if tiny else WAN), DataLoader(clips, batch_size=BATCH_SIZE, num_workers=workers))
    return [float(loss) for loss in record.losses]


def compare(losses: list[float], reference: list[float]) -> dict[str, float]:
    differences = [abs(a - b) for a, b in zip(losses, reference, strict=True)]
    relative = [difference / b for difference, b in zip(differences, reference, strict=True)]
    return {
        "largest_difference": max(differences),
        "mean_difference": sum(differences) / len(differences),
        "largest_relative_difference": max(relative),
    }


def main() -> None:
    parser = provenance.parser(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tiny", action="store_true", help="dry run on CPUs: another, tiny model; nothing to publish")
    arguments = parser.parse_args()
    commit = arguments.commit or provenance.commit()
    rows: list[dict[str, Any]] = []
    print(f"{'ring x ulysses':>14} {'precision':>10} {'last loss':>10} {'largest difference':>18} {'mean':>9}")
    for ring, ulysses, precision in RUNS:
        setting = {"ring_size": ring, "ulysses_size": ulysses, "precision": precision}
        losses = launch(__file__, ring * ulysses, **setting, steps=arguments.steps, tiny=arguments.tiny)
        row = setting | compare(losses, rows[0]["losses"] if rows else losses) | {"losses": losses}
        rows.append(row)
        print(
            f"{f'{ring} x {ulysses}':>14} {precision:>10} {losses[-1]:>10.5f} {row['largest_difference']:>18.2e} "
            f"{row['mean_difference']:>9.2e}"
        )
    settings = {
        "dry_run": arguments.tiny,
        "compared_with": "ring 1 x ulysses 1, bf16-mixed",
        "steps": arguments.steps,
        "batch_size": BATCH_SIZE,
        "learning_rate": LEARNING_RATE,
        "seed": SEED,
        "model": TINY_WAN if arguments.tiny else WAN,
    }
    output = arguments.output or provenance.path("parallel", "loss_overlay")
    provenance.write(output, "parallel/loss_overlay", commit, settings, rows)
    print(f"written to {output}")


if __name__ == "__main__":
    if (task := task_of_worker()) is not None:
        finish(train(**task))
    else:
        main()
