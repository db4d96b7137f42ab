"""What the benchmarks of balances train on: disjoint draws of the standard mix, up to a length."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.wan_training import latents_of
from lightning_videoscale.cost.geometry import GEOMETRIES
from lightning_videoscale.data.planning import SampleTable
from lightning_videoscale.data.planning.shapes import STANDARD_POLICY, Clips, ClipShape, standard_mix

DRAWS = 2
TINY_POLICY = replace(STANDARD_POLICY, areas=(64 * 64, 96 * 96, 128 * 128), max_frames=17, crop_min_frames=5)


def table_of_draw(
    clips: Clips, samples: int, draw: int | None = None, longest: int | None = None, tiny: bool = False
) -> SampleTable:
    """Draws of the standard mix, without those that are too short to train on.

    Args:
        clips: The table of clips.
        samples: That are drawn. Fewer remain.
        draw: Below `DRAWS`: only every so many-th clip is drawn from, so that no two draws share a clip; None: all are.
        longest: Tokens; longer samples are left out.
        tiny: Whether the shapes are those of a dry run.
    """
    own = clips if draw is None else clips.take(np.arange(draw, len(clips), DRAWS))
    drawn = standard_mix(own, samples, seed=draw or 0)
    table = SampleTable.of_clips(drawn, TINY_POLICY if tiny else STANDARD_POLICY, GEOMETRIES["wan2.1"])
    shape_id = table.shape_id[table.shape_id >= 0]
    if longest is not None:
        shape_id = shape_id[table.sequence_lengths[shape_id] <= longest]
    kept, numbers = np.unique(shape_id, return_inverse=True)
    shapes = [table.shapes[number] for number in kept]
    return SampleTable.create(shapes, table.sequence_lengths[kept], numbers.astype(np.int32))


def latents_of_draw(table: SampleTable) -> list[ClipShape]:
    """The latents of every sample, in their order."""
    shapes = [latents_of(shape) for shape in table.shapes]
    return [shapes[number] for number in table.shape_id]


def mix(file: Path, samples: int, tiny: bool) -> list[ClipShape]:
    """Latents of one draw from all clips of a table, of any length."""
    return latents_of_draw(table_of_draw(Clips.from_csv(file), samples, tiny=tiny))
