"""Fine-tunes Wan, whole or by LoRA: `python finetune_wan.py fit --config configs/finetune_wan_1_3b_lora.yaml`.

The shards are those of `videoscale encode --text-encoder`: latents, and embeddings of captions. The objective is Wan's
flow matching: on the line x_t = (1 - σ) x + σ ε, predict ε - x, where σ is uniform time, shifted towards noise.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from lightning.pytorch.cli import LightningCLI
from safetensors.torch import load_file
from torch import Tensor

import lightning_videoscale as vs

TEXT_TOKENS = 512  # Wan has learnt texts that are padded to as many, with zeros
VALIDATION_TIMES = (0.1, 0.3, 0.5, 0.7, 0.9)


class FinetuneWan(pl.LightningModule):
    """A pretrained Wan, and its loss.

    Args:
        weights: Folder of a diffusers pipeline, or its name on the Hugging Face Hub.
        lora_rank: Rank of the adapters; all weights are trained if left out.
        learning_rate: AdamW's.
        shift: How far times move towards noise: 3 for about 480 pixels, 5 for 720.
        empty_prompt: What `videoscale encode` wrote for the empty prompt. Some captions are left out in its favour, so
            that the model can be guided when it samples.
        drop_captions: The share of captions that are left out.
        gradient_checkpointing: Compute blocks again in backward, which saves memory.
    """

    def __init__(
        self,
        weights: str,
        lora_rank: int | None = None,
        learning_rate: float = 1e-5,
        shift: float = 3.0,
        empty_prompt: Path | None = None,
        drop_captions: float = 0.1,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.transformer: Any = None
        empty = torch.zeros(0) if empty_prompt is None else padded(load_file(empty_prompt)["text_embeds"][None])
        self.register_buffer("empty_prompt", empty, persistent=False)

    def configure_model(self) -> None:
        if self.transformer is not None:
            return
        rank = self.hparams.lora_rank
        dtype = torch.float32 if rank is None else torch.bfloat16  # of a base that is only read
        self.transformer = self.load(dtype)
        self.transformer.train()
        if self.hparams.gradient_checkpointing:
            self.transformer.enable_gradient_checkpointing()
        if rank is not None:
            from peft import LoraConfig

            self.transformer.requires_grad_(False)
            layers = ["to_q", "to_k", "to_v", "to_out.0"]
            self.transformer.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=layers))

    def load(self, dtype: torch.dtype) -> WanTransformer3DModel:
        return WanTransformer3DModel.from_pretrained(self.hparams.weights, subfolder="transformer", torch_dtype=dtype)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        latents, text = batch["latents"], padded(batch["text_embeds"])
        if len(self.empty_prompt):
            dropped = torch.rand(len(text), device=self.device) < self.hparams.drop_captions
            text = torch.where(dropped[:, None, None], self.empty_prompt.to(text), text)
        loss = self.loss(latents, text, torch.rand(len(latents), device=self.device), torch.randn_like(latents))
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """The loss at times and noise that are the same in every validation, so that it can be compared."""
        latents, text = batch["latents"], padded(batch["text_embeds"])
        generator = torch.Generator(self.device).manual_seed(batch_idx)
        noise = torch.randn(latents.shape, generator=generator, device=self.device)
        losses = [self.loss(latents, text, latents.new_full((len(latents),), time), noise) for time in VALIDATION_TIMES]
        self.log("val/loss", torch.stack(losses).mean(), batch_size=len(latents), sync_dist=True)

    def loss(self, latents: Tensor, text: Tensor, time: Tensor, noise: Tensor) -> Tensor:
        shift = self.hparams.shift
        sigma = shift * time / (1 + (shift - 1) * time)
        noisy = torch.lerp(latents, noise, sigma[:, None, None, None, None])
        velocity = self.transformer(noisy, 1000 * sigma, text, return_dict=False)[0]
        return F.mse_loss(velocity.float(), noise - latents)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=self.hparams.learning_rate, weight_decay=0.01)


def padded(text: Tensor) -> Tensor:
    """(B, L, D) to (B, 512, D)."""
    return F.pad(text, (0, 0, 0, TEXT_TOKENS - text.shape[1]))


def main(args: list[str] | None = None) -> None:
    LightningCLI(FinetuneWan, vs.VideoDataModule, args=args)


if __name__ == "__main__":
    main()
