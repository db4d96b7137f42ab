"""From what a clip is to what the model sees of it: size, length and place in time after all transformations.

- `Clips`: the columns that planning needs to know of every sample, taken from an index or a table.
- `ClipShape`: frames, height and width of what is read.
- `ShapePolicy`: which shape each clip gets this epoch. Arrays in, arrays out: a million clips take a fraction of a
  second.
- `standard_mix`: the mix that the simulations of this repository run on.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, fields
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.data.planning.seeded_random import RandomOfRows, SeededRandom

_SHAPE_STREAM = 1


class Media(IntEnum):
    """What a sample is made of."""

    IMAGE = 0
    VIDEO = 1
    LATENTS = 2


class ClipShape(NamedTuple):
    """What is read of a clip: pixels, or cells where the shard holds latents."""

    frames: int
    height: int
    width: int
    latents: bool = False


@dataclass(frozen=True)
class Clips:
    """What is known of N samples before one is read, one array of shape (N,) per column.

    Attributes:
        width: Columns of pixels after rotation, or of latents.
        height: Rows likewise.
        num_frames: Frames; 1 for an image; latent frames for latents.
        fps: Frames per second, 0 where there is no rate (images, latents).
        duration: Seconds, 0 where there is none.
        media: `Media`.
        caption_length: Characters of the caption.
        source: Number of the dataset that the sample belongs to.
    """

    width: NDArray[np.int32]
    height: NDArray[np.int32]
    num_frames: NDArray[np.int32]
    fps: NDArray[np.float64]
    duration: NDArray[np.float64]
    media: NDArray[np.uint8]
    caption_length: NDArray[np.int32]
    source: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.width)

    def take(self, rows: NDArray[np.int64]) -> Clips:
        """Returns the samples of these rows, which may repeat."""
        return Clips(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    @classmethod
    def from_csv(cls, file: str | Path) -> Clips:
        """Reads videos from a table with the columns source, width, height, fps and num_frames; others are ignored.

        Raises:
            ValueError: If it is not UTF-8, lacks a column, has no rows, or a row is not made of positive numbers.
        """
        with Path(file).open(newline="", encoding="utf-8-sig") as stream:  # spreadsheets put a mark in front
            needed = ("source", "width", "height", "fps", "num_frames")
            try:
                table = csv.DictReader(stream)
                if missing := [name for name in needed if name not in (table.fieldnames or ())]:
                    raise ValueError(f"{file} lacks the columns {missing}; it has {table.fieldnames}.")
                rows = [tuple(row[name] for name in needed) for row in table]
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is not UTF-8 text: {error}.") from error
        if not rows:
            raise ValueError(f"{file} has no rows.")
        try:
            numbers = np.array([row[1:] for row in rows], dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{file} has a row whose width, height, fps and num_frames are no numbers: {error}."
            ) from error
        if not (sound := ((numbers > 0) & (numbers < 2**31)).all(axis=1)).all():
            row = int(np.flatnonzero(~sound)[0])
            raise ValueError(f"{file}: row {row + 1} has width, height, fps, num_frames = {numbers[row].tolist()}.")
        width, height, fps, num_frames = numbers.T
        names = {name: number for number, name in enumerate(dict.fromkeys(row[0] for row in rows))}
        return cls(
            width=width.astype(np.int32),
            height=height.astype(np.int32),
            num_frames=num_frames.astype(np.int32),
            fps=fps,
            duration=num_frames / fps,
            media=np.full(len(rows), Media.VIDEO, np.uint8),
            caption_length=np.zeros(len(rows), np.int32),
            source=np.array([names[row[0]] for row in rows], np.int32),
        )


class ShapedClips(NamedTuple):
    """The shape that each of N samples gets.

    Attributes:
        shapes: The different shapes, sorted.
        shape_id: (N,) int32, each sample's number in ``shapes``; -1 for a sample that has no shape (smaller than one
            patch, no frames).
        start: (N,) float64, where in the clip reading begins, in seconds.
    """

    shapes: tuple[ClipShape, ...]
    shape_id: NDArray[np.int32]
    start: NDArray[np.float64]


class TablePart(NamedTuple):
    """Some samples of a table of ``total``: their numbers, (n,) int64, ascending."""

    rows: NDArray[np.int64]
    total: int


@dataclass(frozen=True)
class ShapePolicy:
    """Which shape a clip gets: aspect-preserving area tiers, a frame rate, crops in time, single images.

    Nothing is ever upscaled, in space or time: a clip smaller than its tier keeps its size, one with fewer frames per
    second keeps its frames. Sides are rounded down to what the model can cut into patches (the reader crops the
    remainder), frames to ``temporal_stride * k + 1``. Latents keep the shape that they have.

    Args:
        areas: Pixels of the tiers.
        weights: How often each tier is drawn, in any unit. None: equally often.
        fps: Frames per second.
        max_frames: Frames that a sample has at most.
        crop_share: Share of the clips that are cropped in time to a random number of frames.
        crop_min_frames: Frames that such a crop leaves at least (where the clip has them); only with ``crop_share``.
        image_share: Share of the clips of which one frame is taken, as an image.

    Raises:
        ValueError: If a share is not in [0, 1], or areas, weights and frames are not positive or do not match.
    """

    areas: tuple[int, ...] = (480 * 832,)
    weights: tuple[float, ...] | None = None
    fps: float = 16.0
    max_frames: int = 81
    crop_share: float = 0.0
    crop_min_frames: int = 17
    image_share: float = 0.0

    def __post_init__(self) -> None:
        weights = self.weights if self.weights is not None else (1.0,) * len(self.areas)
        are_positive = all(area > 0 for area in self.areas) and all(0 < weight < math.inf for weight in weights)
        if not self.areas or len(weights) != len(self.areas) or not are_positive:
            raise ValueError(f"ShapePolicy needs one positive weight per area, got {self.areas} and {self.weights}.")
        if not (0 <= self.crop_share <= 1 and 0 <= self.image_share <= 1):
            raise ValueError(f"Shares lie in [0, 1]; got crop_share={self.crop_share}, image_share={self.image_share}.")
        if not (self.crop_min_frames >= 1 and self.max_frames >= 1 and 0 < self.fps < math.inf):
            raise ValueError(
                f"ShapePolicy needs crop_min_frames >= 1, max_frames >= 1 and fps > 0, got {self.crop_min_frames}, "
                f"{self.max_frames} and {self.fps}."
            )
        if self.crop_share > 0 and not self.crop_min_frames <= self.max_frames < math.inf:
            raise ValueError(
                f"With crop_share={self.crop_share}, ShapePolicy needs crop_min_frames <= max_frames, got "
                f"{self.crop_min_frames} and {self.max_frames}: give a smaller crop_min_frames, a finite max_frames."
            )

    @property
    def draws_shapes(self) -> bool:
        """Whether the shape of a video or an image is drawn, so that it differs between epochs."""
        return len(self.areas) > 1 or self.crop_share > 0 or self.image_share > 0

    def is_usable(self, clips: Clips, geometry: ModelGeometry) -> NDArray[np.bool_]:
        """(N,) which clips `shape` gives a shape, in every epoch."""
        least = np.where(clips.media == Media.LATENTS, 1, geometry.side_multiple)
        return (clips.num_frames > 0) & (clips.height >= least) & (clips.width >= least)

    def shape(
        self, clips: Clips, geometry: ModelGeometry, seed: int = 0, epoch: int = 0, part: TablePart | None = None
    ) -> ShapedClips:
        """Gives every clip its shape, as seed and epoch draw it.

        Args:
            clips: N samples.
            geometry: Decides what sides and frames are rounded to.
            seed: Seed of all draws.
            epoch: Every epoch draws anew.
            part: Which samples of a table the clips are: they draw as if the table were drawn for. None: all.
        """
        stream = SeededRandom(seed, epoch, _SHAPE_STREAM)
        draws = stream if part is None else RandomOfRows(stream, *part)
        is_latents = clips.media == Media.LATENTS
        frames, start = self._frames(clips, geometry, draws)
        height, width = self._sides(clips, geometry, draws)
        table = np.stack([frames, height, width, is_latents], axis=1).astype(np.int64)
        table[is_latents, :3] = np.stack([clips.num_frames, clips.height, clips.width], axis=1)[is_latents]
        usable = (table[:, :3] > 0).all(axis=1)
        # One number per shape sorts much faster than rows do.
        keys = np.ravel_multi_index(tuple(table[usable].T), tuple(table.max(axis=0, initial=1) + 1))
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        shape_id = np.full(len(clips), -1, np.int32)
        shape_id[usable] = inverse
        shapes = tuple(ClipShape(f, h, w, bool(latent)) for f, h, w, latent in table[usable][first].tolist())
        return ShapedClips(shapes, shape_id, np.where(is_latents, 0.0, start))

    def _frames(
        self, clips: Clips, geometry: ModelGeometry, draws: SeededRandom | RandomOfRows
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Frames of every clip, and the second at which they begin."""
        is_cropped, cropped, is_image, place = (draws.uniform(len(clips)) for _ in range(4))
        slower = np.minimum(1.0, self.fps / np.where(clips.fps > 0, clips.fps, self.fps))
        # 1e-9: a rate such as 29.97 must not lose a frame to rounding.
        available = np.floor(clips.num_frames * slower + 1e-9).astype(np.int64)
        available = np.maximum(available, np.minimum(clips.num_frames, 1))
        span = max(0, self.max_frames - self.crop_min_frames) + 1
        crop = self.crop_min_frames + np.floor(cropped * span).astype(np.int64)
        limit = np.where(is_cropped < self.crop_share, crop, self.max_frames)
        limit = np.where((is_image < self.image_share) | (clips.media == Media.IMAGE), 1, limit)
        frames = geometry.whole_frames(np.minimum(available, limit))
        frames = np.where(available > 0, frames, 0)
        return frames, place * clips.duration * (1 - frames / np.maximum(available, 1))

    def _sides(
        self, clips: Clips, geometry: ModelGeometry, draws: SeededRandom | RandomOfRows
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Height and width of every clip in its tier."""
        weights = np.asarray(self.weights if self.weights is not None else [1.0] * len(self.areas))
        tier = np.searchsorted(np.cumsum(weights / weights.sum())[:-1], draws.uniform(len(clips)), side="right")
        pixels = clips.height.astype(np.float64) * clips.width
        scale = np.minimum(1.0, np.sqrt(np.asarray(self.areas)[tier] / np.maximum(pixels, 1.0)))
        multiple = geometry.side_multiple
        # 1e-9: a clip that is as large as its tier must not lose a row to rounding. A clip much longer than wide keeps
        # one patch, so that whether it is trained on does not depend on the tier that an epoch draws.
        height, width = (
            np.maximum(np.floor(side * scale / multiple + 1e-9).astype(np.int64), np.minimum(side // multiple, 1))
            for side in (clips.height, clips.width)
        )
        return height * multiple, width * multiple


STANDARD_POLICY = ShapePolicy(
    areas=(256 * 256, 480 * 832, 720 * 1280), weights=(0.3, 0.4, 0.3), crop_share=0.5, image_share=0.3
)
"""Tiers, crops and images of the mix on which balances are compared."""


def standard_mix(clips: Clips, samples: int, seed: int = 0) -> Clips:
    """Draws N samples from a table, each source with equal weight; `STANDARD_POLICY` gives them shapes.

    "Every clip once" means every draw of this list once.
    """
    draws = SeededRandom(seed)
    sources, sizes = np.unique(clips.source, return_counts=True)
    by_source = np.argsort(clips.source, kind="stable")
    starts = np.cumsum(sizes) - sizes
    chosen = np.floor(draws.uniform(samples) * len(sources)).astype(np.int64)
    place = starts[chosen] + np.floor(draws.uniform(samples) * sizes[chosen]).astype(np.int64)
    return clips.take(by_source[place])
