"""A picture at the end of training: frames of a clip, and those that the model makes of its caption and noise."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from latent_codec import load_codec
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

COLUMNS = 5
FRAME_HEIGHT = 200  # pixels in the picture
MARGIN = 12
TEXT_HEIGHT = 20


class SampleFigure(pl.Callback):
    """Draws `sample.png` into the run's folder when training ends.

    The caption and the size are those of the longest and largest clip that was trained on.

    Args:
        vae: The codec that made the latents, as in `prepare_videos.py --vae`; None for the patch codec.
        steps: Of Euler's method from noise to latents.
    """

    def __init__(self, vae: str | None = None, steps: int = 24) -> None:
        self.vae = vae
        self.steps = steps
        self.path: Path | None = None
        self._clip: tuple[Tensor, str] | None = None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        latents = batch["latents"]
        if self._clip is None or _extent(latents) > _extent(self._clip[0]):
            self._clip = latents[:1].clone(), batch["caption"][0]

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._clip is None:
            return
        clean, caption = self._clip
        noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0)).to(clean.device)
        # All ranks take part: a split model's forward pass is made by its ranks together.
        with trainer.precision_plugin.forward_context():
            sampled = pl_module.sample(noise, [caption], self.steps)
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        if trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            self.path = folder / "sample.png"
            self._draw({f"trained on: {caption}": clean, f"made of noise in {self.steps} steps": sampled}).save(
                self.path
            )

    def _draw(self, rows: dict[str, Tensor]) -> Image.Image:
        codec = load_codec(self.vae)
        strips = {title: _as_images(codec.decode(latents.cpu().float())[0]) for title, latents in rows.items()}
        width, height = next(iter(strips.values()))[0].size
        columns = max(len(images) for images in strips.values())
        row_height = TEXT_HEIGHT + height + MARGIN
        canvas = Image.new(
            "RGB", (MARGIN + columns * (width + MARGIN), MARGIN + len(strips) * row_height), color="white"
        )
        draw = ImageDraw.Draw(canvas)
        for row, (title, images) in enumerate(strips.items()):
            top = MARGIN + row * row_height
            draw.text((MARGIN, top), title, fill="black", font=ImageFont.load_default(14))
            for column, image in enumerate(images):
                canvas.paste(image, (MARGIN + column * (width + MARGIN), top + TEXT_HEIGHT))
        return canvas


def _extent(latents: Tensor) -> tuple[int, int]:
    """Orders clips by their frames, then by the area of a frame."""
    frames, height, width = latents.shape[2:]
    return frames, height * width


def _as_images(pixels: Tensor) -> list[Image.Image]:
    """Picks frames, evenly spread, of pixels (3, F, H, W) in [-1, 1] and enlarges them."""
    frames, height, width = pixels.shape[1:]
    picked = torch.linspace(0, frames - 1, min(frames, COLUMNS)).round().long()
    bytes_FHWC = ((pixels[:, picked] + 1) * 127.5).round().clamp(0, 255).byte().permute(1, 2, 3, 0).contiguous()
    size = (round(width * FRAME_HEIGHT / height), FRAME_HEIGHT)
    return [Image.fromarray(frame.numpy()).resize(size, Image.Resampling.BICUBIC) for frame in bytes_FHWC]
