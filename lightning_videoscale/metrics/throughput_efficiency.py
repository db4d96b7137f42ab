"""Throughput efficiency Θ: how many latent tokens a rank gets through per second."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_videoscale.metrics.ratio import Ratio


class ThroughputEfficiency(Ratio):
    """Θ = B · [(F − 1) / λ + 1] · (W / γ) · (H / η) / T, latent tokens per second of one rank.

    AdaptiveLoad's metric (section on metrics). Its tokens are the cells of the latent video, before the model cuts them
    into patches; B samples of F frames of H × W pixels are made in T seconds. Over several steps, and over several
    ranks when synced, it is all latent tokens over all seconds, so that a long step counts for more than a short one
    and the result stays that of one rank.

    Example:
        >>> efficiency = ThroughputEfficiency(temporal_stride=4, height_stride=8, width_stride=8)
        >>> efficiency.update(batch_size=2, frames=81, height=480, width=832, seconds=10.0)
        >>> efficiency.compute().item()  # 2 * 21 * 60 * 104 / 10
        26208.0
    """

    sums = ("tokens", "seconds")
    higher_is_better = True

    tokens: Tensor
    seconds: Tensor

    def __init__(self, temporal_stride: int = 4, height_stride: int = 8, width_stride: int = 8, **kwargs: Any) -> None:
        """Creates an empty metric.

        The strides are those of the model's VAE; `data.GEOMETRIES` lists those of several families.

        Args:
            temporal_stride: λ, frames that the VAE makes into one latent frame, the first frame standing alone.
            height_stride: η, rows of pixels per latent cell.
            width_stride: γ, columns of pixels per latent cell.
            **kwargs: See `Ratio`.

        Raises:
            ValueError: A stride is below 1.
        """
        super().__init__(**kwargs)
        strides = (temporal_stride, height_stride, width_stride)
        if min(strides) < 1:
            raise ValueError(f"the strides of the VAE must be at least 1; got (time, height, width) = {strides}.")
        self.temporal_stride, self.height_stride, self.width_stride = strides

    def update(self, batch_size: int, frames: int, height: int, width: int, seconds: float) -> None:
        """Adds one micro-batch of this rank.

        Args:
            batch_size: B, samples.
            frames: F, frames of the video that the latents were made of.
            height: H, rows of pixels.
            width: W, columns of pixels.
            seconds: T, the time of the micro-batch, above zero.

        Raises:
            ValueError: A size is below 1, or ``seconds`` is not positive.
        """
        sizes = (batch_size, frames, height, width)
        if min(sizes) < 1 or not seconds > 0:
            raise ValueError(
                "sizes must be at least 1 and seconds above zero; got (batch_size, frames, height, width) = "
                f"{sizes} in {seconds} s."
            )
        latent_frames = (frames - 1) / self.temporal_stride + 1
        self.tokens += batch_size * latent_frames * (height / self.height_stride) * (width / self.width_stride)
        self.seconds += seconds
