"""A user's own WebDataset behind a WebLoader, under our strategy: read by one rank of a group, trained on by both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset as wds

from tests.data.clips import clip, write_shard
from tests.distributed.loading.test_read_once import Recorder, trainer
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]


def fit(shard: str) -> Any:
    # WebDataset refuses to run on several ranks without a word on how shards are split between them.
    dataset = wds.WebDataset(shard, shardshuffle=False, nodesplitter=lambda shards: shards)
    samples = dataset.decode().map(lambda sample: {"latents": torch.tensor(sample["latents.npy"]).float()})
    loader = wds.WebLoader(samples, batch_size=2)
    module = Recorder()
    trainer(max_epochs=2, limit_val_batches=0).fit(module, loader)
    return module.seen


@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_both_ranks_of_a_group_see_every_batch_once(tmp_path: Path, ranks: Ranks) -> None:
    shard = str(write_shard(tmp_path / "000.tar", [clip(i) for i in range(8)]))
    first, second = ranks(2).run(fit, shard)
    assert first == second, "one batch, one noise"
    assert [batch for batch, _ in first["train", 0]] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [batch for batch, _ in first["train", 1]] == [batch for batch, _ in first["train", 0]]
