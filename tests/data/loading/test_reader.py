"""From a planned micro-batch to a batch."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch._utils import ExceptionWrapper

from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data import BatchMeta, MicroBatch, ShardError, VideoDataModule
from lightning_videoscale.data.loading.reader import MicroBatchReader
from lightning_videoscale.data.planning.shapes import ClipShape, Media
from lightning_videoscale.data.shards.indexing import index_shards
from lightning_videoscale.data.shards.sample_reader import Cut, OpenShards, SampleReader
from tests.data.clips import clip, npy, write_shard
from tests.data.films import film, numbered, numbers


def _sample(shard: Path, number: int) -> dict[str, object]:
    return SampleReader(index_shards([str(shard)])).read(number)


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


def test_a_sample_that_is_drawn_twice_counts_twice(tmp_path: Path) -> None:
    """As of a small dataset that is mixed in with a large weight."""
    batch = _read(write_shard(tmp_path / "000.tar", [clip(i) for i in range(5)]), 3, 1, 3)
    assert batch["sample_ids"] == [f"000.tar/clip0000{i}" for i in (3, 1, 3)]
    meta, latents = batch["meta"], batch["latents"]
    assert isinstance(meta, BatchMeta) and meta.samples == 3 and meta.loss_weight == 1.0
    assert isinstance(latents, torch.Tensor) and latents.mean(dim=(1, 2, 3, 4)).tolist() == [3.0, 1.0, 3.0]


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
    _sample(shard, 0)
    with pytest.raises(ShardError, match=r"000\.tar.*'clip00001\.mask\.npy' .*no \.npy"):
        _sample(shard, 1)
    with pytest.raises(ShardError, match=r"'clip00002\.notes\.txt' .*'utf-8'"):
        _sample(shard, 2)


def test_a_damaged_sample_costs_its_own_weight(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "000.tar", [clip(i, mask_npy=npy(np.ones(2)) if i % 3 else b"") for i in range(6)])
    reader = MicroBatchReader(index_shards([str(shard)]))
    meta = BatchMeta(3, 8, 8, 48, 3, 1.0, loss_weight=1.5)
    with pytest.warns(UserWarning, match=r"clip00003\.mask\.npy' .*weight 0"):
        batch = reader[MicroBatch((1, 3, 5), meta)]
    assert batch["sample_ids"] == ["000.tar/clip00001", "000.tar/clip00005"]
    assert batch["meta"] == meta._replace(samples=2, loss_weight=1.0)
    assert batch["latents"].shape[0] == 2 and batch["mask"].shape == (2, 2)
    with pytest.warns(UserWarning, match="clip00000") as caught:
        alone = reader[MicroBatch((3, 0), meta._replace(samples=2))]
    assert len(caught) == 1, "of clip 3 it was warned before"
    assert alone["sample_ids"] == ["000.tar/clip00001"], "another one of the same shape, so that the step can go on"
    assert alone["meta"].samples == 1 and alone["meta"].loss_weight == 0.0


@pytest.mark.parametrize("member", ["latents", "text_embeds"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_cost_their_sample(tmp_path: Path, member: str, value: float) -> None:
    array = np.ones((4, 3, 8, 8) if member == "latents" else (5, 8), np.float16)
    array.flat[7] = value
    embeds = npy(np.full((5, 8), 60_000, np.float16))
    samples = [clip(i, text_embeds_npy=embeds) for i in range(2)]
    samples[1][f"{member}.npy"] = npy(array)
    shard = write_shard(tmp_path / "000.tar", samples)
    with pytest.warns(UserWarning, match=rf"{member} of 'clip00001' hold NaN or infinity.*weight 0"):
        batch = _read(shard, 0, 1)
    meta = batch["meta"]
    assert batch["sample_ids"] == ["000.tar/clip00000"]
    assert isinstance(meta, BatchMeta) and meta.loss_weight == 0.5


def test_a_shard_that_is_deleted_costs_the_weight_of_its_samples(tmp_path: Path) -> None:
    shards = [write_shard(tmp_path / f"{i:03}.tar", [clip(5 * i + j) for j in range(5)]) for i in range(2)]
    reader = MicroBatchReader(index_shards([str(shard) for shard in shards]))
    meta = BatchMeta(3, 8, 8, 48, 2, 1.0, 1.0)
    shards[1].unlink()
    with pytest.warns(UserWarning, match=r"001\.tar cannot be read") as caught:
        batches = [reader[MicroBatch((i, i + 5), meta)] for i in range(5)] + [reader[MicroBatch((6, 7), meta)]]
    assert len(caught) == 1, [str(warning.message) for warning in caught]
    assert [batch["meta"].loss_weight for batch in batches] == [0.5] * 5 + [0.0]
    assert [batch["sample_ids"] for batch in batches[:5]] == [[f"000.tar/clip{i:05}"] for i in range(5)]
    shards[0].unlink()
    with pytest.raises(ShardError, match=r"others of their shape.*001\.tar"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pickle.loads(pickle.dumps(reader))[MicroBatch((6, 7), meta)]


def test_videos_are_read_as_the_plan_says(tmp_path: Path) -> None:
    video = film([numbered(i) for i in range(50)])
    mask = npy(np.ones(3, np.uint8))
    photo = {"__key__": "b", "png": _png(), "first.png": _png(), "txt": b"a photo"}
    shard = write_shard(tmp_path / "000.tar", [{"__key__": "a", "mp4": video, "mask.npy": mask}, photo])
    index = index_shards([str(shard)])
    assert [Media(kind) for kind in index.samples.clips.media] == [Media.VIDEO, Media.IMAGE]
    reader = SampleReader(index)
    read = reader.read(0, Cut(ClipShape(5, 32, 48), start=1.0, fps=5.0))
    assert numbers(read["video"]) == [25, 30, 35, 40, 45] and read["video"].shape == (3, 5, 32, 48)
    assert read["mask"].tolist() == [1, 1, 1] and read["caption"] == ""
    assert numbers(reader.read(0, Cut(ClipShape(3, 32, 48), fps=60.0))["video"]) == [0, 1, 2], "at its own rate"
    still = reader.read(1, Cut(ClipShape(1, 16, 16)))
    assert still["video"].shape == (3, 1, 16, 16) and still["caption"] == "a photo"
    assert still["first"].shape == (3, 48, 64) and still["first"].dtype == torch.uint8


def _png() -> bytes:
    file = io.BytesIO()
    Image.fromarray(numbered(7)).save(file, "PNG")
    return file.getvalue()


def test_an_error_keeps_its_words_on_the_way_out_of_a_worker(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "000.tar", [clip(0, notes_txt=b"\xff")])
    try:
        _sample(shard, 0)
    except ShardError:
        wrapped = pickle.loads(pickle.dumps(ExceptionWrapper(where="in DataLoader worker process 0")))
    with pytest.raises(ShardError, match=r"000\.tar.*'clip00000\.notes\.txt'"):
        wrapped.reraise()


def test_a_shard_that_changes_under_the_reader_is_named(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "000.tar", [clip(0), clip(1)])
    index = index_shards([str(shard)])
    reader = SampleReader(index)
    reader.read(1)
    os.truncate(shard, 1000)
    for either in (reader, SampleReader(index)):
        with pytest.raises(ShardError, match=r"000\.tar .*\b1000 bytes"):
            either.read(1)
    shard.unlink()
    with pytest.raises(ShardError, match=r"000\.tar .*No such file"):
        SampleReader(index).read(1)


def test_a_shard_that_is_replaced_by_one_of_its_size_is_never_mistaken_for_it(tmp_path: Path) -> None:
    shard, other = (write_shard(tmp_path / f"{i:03}.tar", [clip(i), clip(i + 1)]) for i in range(2))
    index = index_shards([str(shard)])
    reader = SampleReader(index)
    assert reader.read(0)["latents"].mean() == 0
    at_hand = tmp_path / "moved.tar"
    shard.rename(at_hand)
    shutil.copyfile(other, shard)
    assert reader.read(1)["latents"].mean() == 1, "the open file is the one that was indexed"
    with pytest.raises(ShardError, match=r"000\.tar .*\(version \d+, indexed"):
        SampleReader(index).read(1)
    shutil.copyfile(other, at_hand)
    with pytest.raises(ShardError, match=r"000\.tar was written again"):
        reader.read(1)


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


def test_each_sample_is_warned_of_once_whichever_workers_read_it_in_however_many_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = (1, 4, 6)
    clips = [clip(i, mask_npy=b"" if i in broken else npy(np.ones(2))) for i in range(8)]
    data = VideoDataModule(str(write_shard(tmp_path / "000.tar", clips)), budget=BucketBudget(96, 1e9), num_workers=2)
    data.prepare_data()
    data.setup("fit")

    def note(message: Warning | str, *_: object) -> None:
        with (tmp_path / "said").open("a") as file:  # of all processes
            file.write(f"{message}\n")

    monkeypatch.setattr(warnings, "showwarning", note)
    for epoch in range(3):
        loader = data.train_dataloader()
        loader.sampler.set_epoch(epoch)
        assert sum(batch["meta"].loss_weight < 1 for batch in loader) >= 2
    said = (tmp_path / "said").read_text()
    assert [said.count(f"'clip{i:05}.mask.npy' cannot be decoded") for i in range(8)] == [i in broken for i in range(8)]
