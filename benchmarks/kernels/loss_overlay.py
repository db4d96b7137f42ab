"""A small Wan and a small HunyuanVideo trained with and without fused kernels: one loss curve each.

    python benchmarks/kernels/loss_overlay.py

Every run trains on the same clips with the same noise on one GPU. The runs in float32 show by how much the rounding of
bfloat16 alone moves the curve. Wan and the clips are those of ``benchmarks/parallel/loss_overlay.py``; HunyuanVideo
stands for the families that attend to text and video together.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from diffusers import HunyuanVideoTransformer3DModel
from torch import Tensor, nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import provenance
from benchmarks.parallel.loss_overlay import (
    BATCH_SIZE,
    LEARNING_RATE,
    SEED,
    TINY_WAN,
    WAN,
    Record,
    RectifiedFlow,
    TravellingWaves,
    compare,
)
from lightning_videoscale.callbacks import FusedKernels

RUNS = [(False, "bf16-mixed"), (False, "32-true"), (True, "bf16-mixed"), (True, "32-true")]
HUNYUAN = {"num_attention_heads": 8, "num_layers": 2, "num_single_layers": 4}
TINY_HUNYUAN = HUNYUAN | {"num_attention_heads": 2, "num_layers": 1, "num_single_layers": 1}


class JointRectifiedFlow(RectifiedFlow):
    """Of a HunyuanVideo with heads of 64 channels."""

    def build(self, config: dict[str, Any]) -> nn.Module:
        return HunyuanVideoTransformer3DModel(
            attention_head_dim=64,
            rope_axes_dim=(16, 24, 24),
            num_refiner_layers=1,
            guidance_embeds=False,
            text_embed_dim=WAN["text_dim"],
            pooled_projection_dim=WAN["text_dim"],
            **config,
        )

    def velocity(self, noisy: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        mask = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
        velocity: Tensor = self.transformer(noisy, timestep, text, mask, text.mean(1), return_dict=False)[0]
        return velocity


MODELS: dict[str, tuple[type[RectifiedFlow], dict[str, Any], dict[str, Any]]] = {
    "Wan": (RectifiedFlow, WAN, TINY_WAN),
    "HunyuanVideo": (JointRectifiedFlow, HUNYUAN, TINY_HUNYUAN),
}
"""How each is trained, and its configuration, small and tiny."""


def train(model: str, fused: bool, precision: str, steps: int, tiny: bool) -> list[float]:
    """The losses of all steps."""
    pl.seed_everything(SEED, verbose=False)
    torch.set_float32_matmul_precision("highest")
    record = Record()
    trainer = pl.Trainer(
        accelerator="cpu" if tiny else "cuda",
        devices=1,
        precision=precision,  # type: ignore[arg-type]
        max_steps=steps,
        callbacks=[record, FusedKernels()] if fused else [record],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    clips = TravellingWaves((2, 8, 8) if tiny else (5, 32, 32), steps * BATCH_SIZE)
    workers = 0 if tiny else 4
    flow, small, tiny_config = MODELS[model]
    module = flow(tiny_config if tiny else small)
    trainer.fit(module, DataLoader(clips, batch_size=BATCH_SIZE, num_workers=workers))
    return [float(loss) for loss in record.losses]


def main() -> None:
    parser = provenance.parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tiny", action="store_true", help="dry run on a CPU: another, tiny model; nothing to publish")
    arguments = parser.parse_args()
    commit = arguments.commit or provenance.commit()
    rows: list[dict[str, Any]] = []
    for model in arguments.models:
        reference: list[float] = []
        for fused, precision in RUNS:
            losses = train(model, fused, precision, arguments.steps, arguments.tiny)
            reference = reference or losses
            row = {"model": model, "fused": fused, "precision": precision} | compare(losses, reference)
            rows.append(row | {"losses": losses})
            print(
                f"{model} {'fused' if fused else 'plain':>6} {precision:>10}: last loss {losses[-1]:.5f}, largest "
                f"relative difference {row['largest_relative_difference']:.2e}",
                flush=True,
            )
    settings = {
        "dry_run": arguments.tiny,
        "compared_with": "plain, bf16-mixed",
        "steps": arguments.steps,
        "batch_size": BATCH_SIZE,
        "learning_rate": LEARNING_RATE,
        "seed": SEED,
        "models": {name: MODELS[name][2 if arguments.tiny else 1] for name in arguments.models},
    }
    output = arguments.output or provenance.path("kernels", "loss_overlay")
    provenance.write(output, "kernels/loss_overlay", commit, settings, rows)
    print(f"written to {output}")


if __name__ == "__main__":
    main()
