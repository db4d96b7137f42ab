"""From a planned micro-batch to a batch."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._utils import ExceptionWrapper

from lightning_videoscale.data import BatchMeta, MicroBatch, ShardError
from lightning_videoscale.data.indexing import index_shards
from lightning_videoscale.data.reader import MicroBatchReader, OpenShards
from tests.data.clips import clip, npy, write_shard


def _read(shard: Path, *samples: int) -> dict[str, object]:
    meta = BatchMeta(3, 8, 8, 48, len(samples), 1.0, 1.0)
    return MicroBatchReader(index_shards([str(shard)]))[MicroBatch(samples, meta)]


def test_a_batch_holds_its_samples_in_the_order_of_the_plan(tmp_path: Path) -> None:
    batch = _read(write_shard(tmp_path / "000.tar", [clip(i) for i in range(5)]), 3, 1)
    assert list(batch) == ["sample_ids", "meta", "json", "caption", "latents"]
    assert batch["sample_ids"] == ["000.tar/clip00003", "000.tar/clip00001"]
    assert batch["caption"] == ["a caption, n° 3", "a caption, n° 1"]
    assert batch["json"] == [{"frames": 3, "height": 8, "width": 8, "fps": 24}] * 2
    latents = batch["latents"]
    assert isinstance(latents, torch.Tensor)
    assert latents.shape == (2, 4, 3, 8, 8) and latents.dtype == torch.float32
    assert latents.mean(dim=(1, 2, 3, 4)).tolist() == [3.0, 1.0]


def test_further_members_pass_through(tmp_path: Path) -> None:
    members = [
        {"mask_npy": npy(np.full((2, 2), i, "u1")), "words_npy": npy(np.zeros(i + 1, "f4")), "prompt_txt": b"p"}
        for i in range(3)
    ]
    extra = {"style_json": json.dumps({"a": 1}).encode()}
    shard = write_shard(tmp_path / "000.tar", [clip(i, **members[i], **(extra if i == 1 else {})) for i in range(3)])
    batch = _read(shard, 0, 1, 2)
    mask, words = batch["mask"], batch["words"]
    assert isinstance(mask, torch.Tensor) and mask.shape == (3, 2, 2) and mask.dtype == torch.uint8
    assert isinstance(words, list) and [len(w) for w in words] == [1, 2, 3]
    assert batch["prompt"] == ["p"] * 3
    assert batch["style"] == [None, {"a": 1}, None]
    assert list(batch)[-1] == "words", "tensors of unequal shapes come last, so that none is taken for the batch size"


def test_a_damaged_member_is_named(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "000.tar", [clip(0), clip(1, mask_npy=b"no array"), clip(2, notes_txt=b"\xff\xfe")])
    _read(shard, 0)
    with pytest.raises(ShardError, match=r"000\.tar: the member 'clip00001\.mask\.npy' cannot be decoded: no \.npy"):
        _read(shard, 1)
    with pytest.raises(ShardError, match=r"'clip00002\.notes\.txt' cannot be decoded: 'utf-8' codec"):
        _read(shard, 2)


def test_an_error_keeps_its_words_on_the_way_out_of_a_worker(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "000.tar", [clip(0, notes_txt=b"\xff")])
    try:
        _read(shard, 0)
    except ShardError:
        wrapped = pickle.loads(pickle.dumps(ExceptionWrapper(where="in DataLoader worker process 0")))
    with pytest.raises(ShardError, match=r"000\.tar: the member 'clip00000\.notes\.txt' cannot be decoded"):
        wrapped.reraise()


def test_a_shard_that_changes_under_the_reader_is_named(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "000.tar", [clip(0), clip(1)])
    index = index_shards([str(shard)])
    micro_batch = MicroBatch((1,), BatchMeta(3, 8, 8, 48, 1, 1.0, 1.0))
    reader = MicroBatchReader(index)
    reader[micro_batch]
    os.truncate(shard, 1000)
    with pytest.raises(ShardError, match=r"000\.tar ends before byte \d+; it was cut after indexing"):
        reader[micro_batch]
    with pytest.raises(ShardError, match=r"000\.tar has 1000 bytes and had \d+ when it was indexed"):
        MicroBatchReader(index)[micro_batch]
    shard.unlink()
    with pytest.raises(ShardError, match=r"000\.tar cannot be read: .*No such file"):
        MicroBatchReader(index)[micro_batch]


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_few_shards_are_open_at_a_time(tmp_path: Path) -> None:
    index = index_shards([str(write_shard(tmp_path / f"{i:03}.tar", [clip(i)])) for i in range(9)])
    before, shards = _open_files(), OpenShards(max_open=4)
    for _ in range(2):
        for i in range(9):
            assert shards[index.shards[i]].read(index.samples[i].members["txt"]) == f"a caption, n° {i}".encode()
    assert _open_files() == before + 4
    del shards
    assert _open_files() == before


def test_a_reader_travels_to_another_process_without_open_files(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "000.tar", [clip(0), clip(1)])
    reader = MicroBatchReader(index_shards([str(shard)]))
    micro_batch = MicroBatch((1,), BatchMeta(3, 8, 8, 48, 1, 1.0, 1.0))
    here, before = reader[micro_batch], _open_files()
    there = pickle.loads(pickle.dumps(reader))
    assert _open_files() == before
    assert there[micro_batch]["sample_ids"] == here["sample_ids"]


def test_a_fork_while_shards_are_open_disturbs_nobody(tmp_path: Path) -> None:
    count = 40
    index = index_shards([str(write_shard(tmp_path / "000.tar", [clip(i) for i in range(count)]))])
    shards = OpenShards()

    def read_all() -> bool:
        texts = [shards[index.shards[0]].read(sample.members["txt"]) for sample in index.samples for _ in range(20)]
        return texts == [f"a caption, n° {i}".encode() for i in range(count) for _ in range(20)]

    assert read_all()
    child = os.fork()
    if child == 0:
        os._exit(0 if read_all() else 1)
    assert read_all()
    assert os.waitpid(child, 0)[1] == 0
    assert read_all()
