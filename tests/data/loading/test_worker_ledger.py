"""What workers tell of themselves, across processes."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data import VideoDataModule
from lightning_videoscale.data.loading.worker_ledger import LeftOut, WorkerFigures
from tests.data.clips import clip, npy, write_shard


def _loaded(folder: Path, workers: int, unlink: bool = False) -> VideoDataModule:
    """Twelve clips are read, one of which is damaged; or its whole shard is gone."""
    for number in range(2):
        mask = [npy(np.ones(2)) if i != 7 else b"" for i in range(12)]
        clips = [clip(i, mask_npy=mask[i]) for i in range(6 * number, 6 * number + 6)]
        write_shard(folder / f"{number:03}.tar", clips)
    data = VideoDataModule(str(folder / "{000..001}.tar"), budget=BucketBudget(96, 1e9), num_workers=workers)
    data.prepare_data()
    data.setup("fit")
    if unlink:
        (folder / "001.tar").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in data.train_dataloader():
            pass
    return data


@pytest.mark.parametrize("workers", [0, 2])
def test_figures_of_every_worker_reach_the_process_that_trains(tmp_path: Path, workers: int) -> None:
    data = _loaded(tmp_path, workers)
    figures = data.ledger.figures(workers)
    assert len(figures) == max(workers, 1)
    total = WorkerFigures(*map(sum, zip(*figures, strict=True)))
    assert total.samples == 11 and total.left_out == 1
    assert all(each.samples > 0 and each.reading > 0 and each.decoding > 0 for each in figures)
    assert data.ledger.left_out() == [LeftOut(7, None, 1)]
    assert data.index.sample_id(7) == "001.tar/clip00007"


def test_a_shard_that_is_gone_is_named_as_a_whole(tmp_path: Path) -> None:
    data = _loaded(tmp_path, 1, unlink=True)
    assert data.ledger.left_out() == [LeftOut(None, 1, 2)]
    assert data.index.shard_name(1) == "001.tar"
    [figures] = data.ledger.figures(1)
    assert figures.left_out >= 6
