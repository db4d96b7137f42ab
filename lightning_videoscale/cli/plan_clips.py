"""The clips that `videoscale plan` plans: all of a table, or an index in windows."""

from __future__ import annotations

import argparse
import shlex
import tarfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightning_videoscale.cost.geometry import GEOMETRIES
from lightning_videoscale.data.packing.on_the_way import already_packed
from lightning_videoscale.data.planning import SampleTable
from lightning_videoscale.data.planning.shapes import STANDARD_POLICY, Clips, ShapePolicy, standard_mix
from lightning_videoscale.data.planning.windows import EpochWindows
from lightning_videoscale.data.shards.errors import ShardError
from lightning_videoscale.data.shards.index import ShardIndex
from lightning_videoscale.data.shards.index_table import IndexTable


class PlanClips(NamedTuple):
    """What is planned.

    Attributes:
        table: The samples, in the shapes that they would be trained in; of windows a sample of them.
        windows: Cuts them into windows; None: they are planned as a whole.
    """

    table: SampleTable
    windows: EpochWindows | None = None


def read_clips(options: argparse.Namespace) -> PlanClips:
    """Reads the clips that the options name.

    Raises:
        ValueError: If there are none, or none that can be trained on.
        OSError: If a file cannot be read.
    """
    found = _of_table(options) if options.window is None else _of_windows(options)
    if not (found.table.shape_id >= 0).any():
        total = len(found.table) if found.windows is None else found.windows.total
        raise ValueError(f"None of the {total} clips can be trained on: all are smaller than one patch, or empty.")
    return found


def _of_table(options: argparse.Namespace) -> PlanClips:
    shard = None
    if options.shapes is not None:
        clips = Clips.from_csv(options.shapes)
    else:
        index = _index(options)
        clips, shard = index.samples.clips, index.shard_numbers
    policy = ShapePolicy()
    if options.standard_mix:
        clips, shard, policy = standard_mix(clips, options.samples, options.seed), None, STANDARD_POLICY
    return PlanClips(SampleTable.of_clips(clips, policy, GEOMETRIES[options.geometry], options.seed, shard))


def _of_windows(options: argparse.Namespace) -> PlanClips:
    index = _index(options)
    source = np.zeros(len(index.shards), np.int32)
    geometry = GEOMETRIES[options.geometry]
    policy = ShapePolicy()
    windows = EpochWindows(options.window, index.samples, index.shard_ends, source, policy, geometry, options.seed)
    return PlanClips(windows.sample, windows)


def _index(options: argparse.Namespace) -> ShardIndex:
    named: list[str] = options.index
    file = Path(named[0]).absolute()  # "." has no name
    is_shard = file.is_file() and tarfile.is_tarfile(file)
    if len(named) == 1 and IndexTable(file).exists and not is_shard:
        return ShardIndex.load(file)
    try:
        file = already_packed([named]).index_file
    except ShardError as error:
        raise ValueError(f"No index at {' '.join(named)}, and no shards that have one: {error}") from None
    if not IndexTable(file).exists:
        raise ValueError(f"{' '.join(named)} has no index yet. Run: videoscale index {shlex.join(named)}")
    return ShardIndex.load(file)
