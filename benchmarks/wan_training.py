"""Wan-1.3B with random weights, trained as users do: what benchmarks of whole training steps share."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_videoscale.data.planning.shapes import ClipShape
from lightning_videoscale.strategies import SequenceParallelDDPStrategy

WAN_1_3B = {"num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "num_layers": 30, "text_dim": 4096}
TINY_WAN = {"num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 64, "num_layers": 1, "text_dim": 16}

ATTENTION = {
    # SDPA's own order puts cuDNN first on H200, which builds a plan of hundreds of milliseconds for every new shape.
    "default": None,
    "flash": SDPBackend.FLASH_ATTENTION,
}


class RectifiedFlow(pl.LightningModule):
    """Rectified flow on latents, every sample with the same 512 text tokens.

    Args:
        config: Of the transformer.
        attention: A key of `ATTENTION`.
    """

    def __init__(self, config: dict[str, int], attention: str = "default") -> None:
        super().__init__()
        self.transformer = WanTransformer3DModel(
            in_channels=16,
            out_channels=16,
            freq_dim=256,
            qk_norm="rms_norm_across_heads",
            cross_attn_norm=True,
            **config,
        )
        self.register_buffer("text", torch.randn(1, 512, config["text_dim"]), persistent=False)
        self._backend = ATTENTION[attention]

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        clean = batch["latents"]
        noise, time = torch.randn_like(clean), torch.sigmoid(torch.randn(len(clean), device=self.device))
        noisy = torch.lerp(clean, noise, time.view(-1, 1, 1, 1, 1))
        text = self.text.expand(len(clean), -1, -1)
        with self._attention():
            velocity = self.transformer(noisy, time * 1000, text, return_dict=False)[0]
        return F.mse_loss(velocity.float(), noise - clean)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with self._attention():  # checkpointed blocks compute their forward pass again in here
            super().backward(loss, *args, **kwargs)

    def _attention(self) -> AbstractContextManager[None]:
        return nullcontext() if self._backend is None else sdpa_kernel(self._backend)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5, fused=self.device.type == "cuda")


def trainer_with(devices: int, tiny: bool, **settings: Any) -> pl.Trainer:
    """Data parallelism by our strategy with activation checkpointing, unless another is given; bf16-mixed; quiet."""
    default: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    if "strategy" not in settings:
        default["strategy"] = SequenceParallelDDPStrategy(ulysses_size=1, activation_checkpointing=True, graphs=False)
    return pl.Trainer(
        accelerator="cpu" if tiny else "cuda",
        devices=devices,
        precision="bf16-mixed",
        enable_model_summary=False,
        use_distributed_sampler=False,
        **(default | settings),
    )


def latents_of(shape: ClipShape) -> ClipShape:
    """The latents of Wan's VAE of a clip of these pixels."""
    return ClipShape((shape.frames - 1) // 4 + 1, shape.height // 8, shape.width // 8, latents=True)
