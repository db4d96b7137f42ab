"""A video transformer of one's own whose blocks attend jointly over text and video, and the plan that splits it.

    python joint_dit.py --strategy ulysses_ddp --devices 2

The model knows nothing of sequence parallelism: it calls `torch.nn.functional.scaled_dot_product_attention` in a module
of its own, and gets rotary tables and text as arguments. `SPLIT_PLAN` says the rest. docs/your-model.md explains it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import lightning_videoscale as vs
from lightning_videoscale.parallel import Attention, Split, SplitPlan

# The model: ordinary PyTorch.


class JointAttention(nn.Module):
    """Attention over text and video together; video tokens are rotated by their positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.video_qkv, self.text_qkv = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)

    def forward(
        self, text: Tensor, video: Tensor, mask: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        q, k, v = self.video_qkv(video).unflatten(-1, (3, self.heads, -1)).unbind(2)
        text_q, text_k, text_v = self.text_qkv(text).unflatten(-1, (3, self.heads, -1)).unbind(2)
        pairs = (text_q, rotate(q, *rotary)), (text_k, rotate(k, *rotary)), (text_v, v)
        q, k, v = (torch.cat(pair, 1).transpose(1, 2) for pair in pairs)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None]).transpose(1, 2).flatten(2)
        text_out, video_out = out.split([text.shape[1], video.shape[1]], 1)
        return text_out, video_out


class Branch(nn.Module):
    """What a block does to the tokens of one stream around the attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, 4 * width)
        self.norm, self.out = nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def before(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale, _, _ = self.modulation(time)[:, None].chunk(4, -1)
        return self.norm(x) * (1 + scale) + shift

    def after(self, x: Tensor, attended: Tensor, time: Tensor) -> Tensor:
        _, _, gate, feed_forward_gate = self.modulation(time)[:, None].chunk(4, -1)
        x = x + gate * self.out(attended)
        return x + feed_forward_gate * self.feed_forward(x)


class JointBlock(nn.Module):
    """Joint attention and a feed-forward for each stream; nobody reads the text behind the last block."""

    def __init__(self, width: int, heads: int, last: bool) -> None:
        super().__init__()
        self.last = last
        self.attention, self.video = JointAttention(width, heads), Branch(width)
        self.text = nn.LayerNorm(width) if last else Branch(width)

    def forward(
        self, text: Tensor, video: Tensor, time: Tensor, mask: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        before = self.text(text) if self.last else self.text.before(text, time)
        text_out, video_out = self.attention(before, self.video.before(video, time), mask, rotary)
        video = self.video.after(video, video_out, time)
        return (text if self.last else self.text.after(text, text_out, time)), video


class JointDiT(nn.Module):
    """Predicts the velocity of latents (B, C, F, H, W), given text (B, T, D) with a mask (B, T) and times (B,)."""

    def __init__(
        self, channels: int = 4, width: int = 64, heads: int = 4, layers: int = 2, text_width: int = 16
    ) -> None:
        super().__init__()
        self.embed, self.embed_text = nn.Linear(channels, width), nn.Linear(text_width, width)
        self.embed_time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.rotary = Rotary(width // heads)
        self.blocks = nn.ModuleList(JointBlock(width, heads, last=layer == layers - 1) for layer in range(layers))
        self.head = nn.Linear(width, channels)

    def forward(self, latents: Tensor, time: Tensor, text: Tensor, text_mask: Tensor) -> Tensor:
        video = self.embed(latents.flatten(2).mT)
        rotary = self.rotary(video.shape[1], latents.device)
        text, time = self.embed_text(text), self.embed_time(time[:, None])
        mask = torch.cat([text_mask, text_mask.new_ones(video.shape[:2])], 1)
        for block in self.blocks:
            text, video = block(text, video, time, mask, rotary)
        return self.head(video).mT.unflatten(2, latents.shape[2:])


class Rotary(nn.Module):
    """Cosines and sines (S, head dim / 2) of positions; a module, so that a plan can split what it returns."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        frequencies = 10_000.0 ** -torch.linspace(0, 1, self.head_dim // 2, device=device)
        angles = torch.arange(tokens, device=device)[:, None] * frequencies
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


# How it is split: 15 lines.

TEXT, JOINT = ("text",), ("text", "video")

SPLIT_PLAN = SplitPlan(
    inputs={
        "blocks.0": {"text": Split(1, TEXT), "video": Split(1)},
        "blocks.*": {"mask": Split(1, JOINT)},
    },
    outputs={"rotary": {0: Split(0), 1: Split(0)}},
    gathers={"head": {0: Split(1)}},
    attention={"blocks.*.attention": Attention(JOINT)},
)

vs.parallel.register_plan(f"{JointDiT.__module__}.JointDiT", lambda model: SPLIT_PLAN)

# Training: an ordinary LightningModule.


class JointRectifiedFlow(pl.LightningModule):
    """Rectified flow on latents."""

    def __init__(self, learning_rate: float = 1e-3, **sizes: Any) -> None:
        super().__init__()
        self.transformer, self.learning_rate = JointDiT(**sizes), learning_rate

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        latents, time = batch["latents"], torch.rand(len(batch["latents"]), device=self.device)
        noise = torch.randn_like(latents)
        mixed = torch.lerp(latents, noise, time.view(-1, 1, 1, 1, 1))
        predicted = self.transformer(mixed, time, batch["text"], batch["text_mask"])
        loss = F.mse_loss(predicted, noise - latents)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.learning_rate)


class Waves(IterableDataset[dict[str, Tensor]]):
    """Latents that are waves of a direction, and captions that name it; clips of several lengths, texts of several."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        while True:
            frames, text = (int(torch.randint(low, high, (), generator=generator)) for low, high in ((1, 6), (1, 9)))
            direction = torch.randn(3, generator=generator)
            grid = torch.stack(torch.meshgrid(*map(torch.arange, (frames, 6, 5)), indexing="ij"), -1)
            wave = (grid.float() @ direction).sin().expand(4, -1, -1, -1)
            mask = torch.ones(text, dtype=torch.bool)
            mask[text // 2 + 1 :] = False
            yield {"latents": wave[None], "text": direction.repeat(1, text, 6)[..., :16], "text_mask": mask[None]}


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="ulysses_ddp")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(args)
    trainer = pl.Trainer(
        strategy=options.strategy,
        accelerator=options.accelerator,
        devices=options.devices,
        max_steps=options.steps,
        log_every_n_steps=10,
        default_root_dir="joint_dit_runs",
    )
    trainer.fit(JointRectifiedFlow(), DataLoader(Waves(), batch_size=None))


if __name__ == "__main__":
    main()
