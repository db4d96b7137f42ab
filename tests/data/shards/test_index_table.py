"""The index on disk: Arrow files that are added to, read by all processes where they lie, and indexes of before."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from lightning_videoscale.data import ShardError, ShardIndex
from lightning_videoscale.data.loading.consistency import contents_of
from lightning_videoscale.data.planning.shapes import Media
from lightning_videoscale.data.shards import index_table, indexing
from lightning_videoscale.data.shards.film import Seek
from lightning_videoscale.data.shards.index import default_index_file
from lightning_videoscale.data.shards.index_table import IndexTable
from lightning_videoscale.data.shards.indexing import build_index, index_shards, known_shards
from lightning_videoscale.data.shards.location import ByteRange
from lightning_videoscale.data.shards.sample_reader import SampleReader
from lightning_videoscale.data.shards.samples import Sample, Samples
from lightning_videoscale.data.shards.shard_entry import ShardEntry
from lightning_videoscale.data.shards.tars import Refusal
from tests.data.clips import clip, expand_shards, write_shard, write_shards

# As release 0.1 wrote it, of `write_shards(folder, 4)`.
OLDER = """{"version": 3}
{"path":"000.tar","size":20480,"stamp":"1000000000000000000","samples":{"keys":["clip00000","clip00002"],"extensions":["latents.npy","json","txt"],"channels":[4,4],"width":[8,4],"height":[8,4],"num_frames":[1,1],"fps":[0.0,0.0],"duration":[0.0,0.0],"media":[2,2],"caption_length":[15,15],"member_counts":[3,3],"extension":[0,1,2,0,1,2],"offset":[3584,1536,6144,10240,8192,12288],"size":[640,49,16,256,49,16],"seek_counts":[0,0],"seek_stamp":[],"seek_begin":[]},"refused":[],"ignored":[],"unread":[],"caption_key":null,"caption_fields":[]}
{"path":"001.tar","size":20480,"stamp":"1000000000000000000","samples":{"keys":["clip00001","clip00003"],"extensions":["latents.npy","json","txt"],"channels":[4,4],"width":[4,4],"height":[4,4],"num_frames":[1,1],"fps":[0.0,0.0],"duration":[0.0,0.0],"media":[2,2],"caption_length":[15,15],"member_counts":[3,3],"extension":[0,1,2,0,1,2],"offset":[3584,1536,5632,9728,7680,11776],"size":[256,49,16,256,49,16],"seek_counts":[0,0],"seek_stamp":[],"seek_begin":[]},"refused":[],"ignored":[],"unread":[],"caption_key":null,"caption_fields":[]}
"""
CONTENTS = {
    "000.tar": "b77b0f8a5e411be83efed202f10a60bcc86954f6a636da5fa817d92099deca87",
    "001.tar": "28b92305d26eb2550390fd50611e686ae6ef86af912e4df3bc64f5162533d2b9",
}
DIGEST = "1c98e3a64dc3da74615161422cc17252f202b2159a3050fc67a0d7665c23b7a0"


def _parts(file: Path) -> dict[str, tuple[int, int]]:
    """The files of a table, as what they are and when they were written."""
    stats = {part.name: part.stat() for part in IndexTable(file).folder.glob("*.arrow")}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


def _shards(folder: Path, samples: int, shards: int = 2) -> list[str]:
    return expand_shards(write_shards(folder, samples, shards))


def _nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing, "list_members", lambda *_: pytest.fail("a shard was looked at again"))


@pytest.mark.parametrize("name", ["table.jsonl", "table", "table.arrow", "table.json"])
def test_an_index_of_lines_is_converted_and_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also what checkpoints and encoded folders keep of it."""
    paths = _shards(tmp_path, 4)
    for path in paths:
        os.utime(path, ns=(10**18, 10**18))
    older = tmp_path / ("table.jsonl" if name == "table.arrow" else name)
    older.write_text(OLDER)
    before = ShardIndex.load(tmp_path / name)
    _nobody_looks(monkeypatch)
    with pytest.warns(UserWarning, match=rf"{older.name} is of an older release.*table\.arrow"):
        index = build_index(paths, tmp_path / name)
    assert list(index.samples) == list(before.samples) and len(index) == 4
    for each in (before, index, ShardIndex.load(tmp_path / name)):
        assert contents_of(each) == CONTENTS and each.digest == DIGEST

    older.unlink()
    assert ShardIndex.load(tmp_path / name).digest == build_index(paths, tmp_path / name).digest == DIGEST


def test_a_default_index_of_lines_is_found(tmp_path: Path) -> None:
    paths = _shards(tmp_path, 4)
    default_index_file(paths).with_suffix(".jsonl").write_text(OLDER)
    assert [entry.stamp for entry in known_shards(default_index_file(paths))] == ["1" + "0" * 18] * 2


def test_new_and_changed_shards_are_added_and_nothing_is_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, file = _shards(tmp_path, 12, shards=4), tmp_path / "index"
    build_index(paths[1:3], file)
    first = _parts(file)
    assert len(first) == 1
    build_index(paths, file)
    second = _parts(file)
    assert len(second) == 2 and first.items() <= second.items()
    assert [shard.url for shard in ShardIndex.load(file).shards] == paths

    write_shard(Path(paths[2]), [clip(50)])
    index = build_index(paths[::-1], file)
    assert len(_parts(file)) == 3 and second.items() <= _parts(file).items()
    assert index.digest == ShardIndex.load(file).digest == index_shards(paths[::-1]).digest
    assert index.samples.keys[3] == "clip00050" and list(index.samples) == list(index_shards(paths[::-1]).samples)

    _nobody_looks(monkeypatch)
    third = _parts(file)
    for some in (paths[:1], paths[::-1], [paths[3], paths[0]]):
        assert build_index(some, file).digest == index_shards(some, known_shards(file)).digest
        assert [shard.url for shard in ShardIndex.load(file).shards] == some, "no others belong to it now"
    assert _parts(file) == third


def test_what_another_table_beside_the_shards_holds_is_not_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of the default table is made from all shards: with one more, or one less, it is another table."""
    paths, others = _shards(tmp_path / "train", 12, shards=4), _shards(tmp_path / "val", 6)
    for some in (paths[:3], others):
        build_index(some, default_index_file(some))
    mine = default_index_file(paths + others)
    real, looked = indexing.describe, []
    monkeypatch.setattr(indexing, "describe", lambda shard, *about: looked.append(shard.url) or real(shard, *about))
    write_shard(Path(paths[0]), [clip(50)])
    index = build_index(paths + others, mine)
    assert set(looked) == {paths[0], paths[3]}
    assert index.digest == ShardIndex.load(mine).digest == index_shards(paths + others).digest
    shutil.rmtree(default_index_file(others))
    assert list(ShardIndex.load(mine).samples) == list(index_shards(paths + others).samples)


def test_a_long_build_is_kept_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in a part is not noted elsewhere, and is there for the next build."""
    paths, file, list_members = _shards(tmp_path, 20, shards=10), tmp_path / "index", indexing.list_members
    monkeypatch.setattr(index_table, "_PART", 5)
    looks = iter(range(10))

    def until_the_sixth(*about: Any) -> Any:
        if next(looks) == 5:
            raise KeyboardInterrupt
        return list_members(*about)

    monkeypatch.setattr(indexing, "list_members", until_the_sixth)
    with pytest.raises(KeyboardInterrupt):
        build_index(paths, file)
    assert len(_parts(file)) == 1 and not IndexTable(file).exists
    [journal] = IndexTable(file).journals()
    assert len(journal.read_text().splitlines()) == 1 + 2, "its first three shards are in the part"
    assert {entry.url for entry in known_shards(file)} == set(paths[:5])

    monkeypatch.setattr(indexing, "list_members", list_members)
    index = build_index(paths, file)
    assert len(_parts(file)) == 4 and IndexTable(file).journals() == []
    assert index.digest == index_shards(paths).digest
    assert list(index.samples) == list(index_shards(paths).samples)
    assert index.samples.clips.width.tolist() == index_shards(paths).samples.clips.width.tolist()


SAMPLES = [
    Sample(
        "a", Media.LATENTS, 16, 3, 4, 5, 0.0, 0.0, 7, {"latents.npy": ByteRange(512, 2**40), "txt": ByteRange(0, 7)}
    ),
    Sample("", Media.IMAGE, 3, 1, 9, 9, 0.0, 0.0, 0, {"jpg": ByteRange(2**50, 1)}),
    Sample(
        *("b\udcff/é 日本", Media.VIDEO, 3, 2**31 - 1, 1, 2, 23.976, 1e9, 0, {"mp4": ByteRange(1, 2)}),
        (Seek(-5, 0), Seek(9, 2**60)),
    ),
]


@pytest.mark.parametrize("rows", [[], [0], [1], [0, 1], [1, 2, 1], [2, 0, 1, 2]])
def test_every_row_comes_back_as_it_was(tmp_path: Path, rows: list[int]) -> None:
    samples = [SAMPLES[row] for row in rows]
    texts = {
        "refused": (Refusal("a\udcff", "why"),),
        "ignored": ("flac",),
        "caption_fields": ("text",),
        "captions": "hash",
    }
    entries = (
        ShardEntry("s3://bucket/a.tar", 5, "etag", Samples.of(samples), **texts),
        ShardEntry("s3://bucket/none.tar", 0, "", Samples.of([]), unread=(Refusal("", "gone"),), caption_key="long"),
        ShardEntry("s3://bucket/b.tar", 5, "etag", Samples.of(samples[::-1])),
    )
    index = ShardIndex(entries)
    index.save(tmp_path / "table")
    read = ShardIndex.load(tmp_path / "table")
    assert list(read.samples) == list(index.samples) == samples + samples[::-1]
    assert read.samples.keys == tuple(sample.key for sample in read.samples)
    assert (read.refused, read.unread, read.digest) == (index.refused, index.unread, index.digest)
    assert contents_of(read) == contents_of(index) == {
        name: ShardIndex((entry,)).digest for name, entry in zip(("a.tar", "none.tar", "b.tar"), entries, strict=True)
    }  # fmt: skip
    assert [shard.caption_key for shard in read.shards] == [None, "long", None]
    assert [shard.captions for shard in read.shards] == ["hash", None, None] and read.captions is None
    assert read.without_caption == tuple(sum(not s.caption_length for s in shard.samples) for shard in entries)
    assert read.shard_numbers.tolist() == [0] * len(rows) + [2] * len(rows)
    assert [read.shard_number(i) for i in range(len(read))] == read.shard_numbers.tolist()
    if any(read.without_caption):
        assert read.samples[read.first_without_caption].caption_length == 0
        assert all(sample.caption_length for sample in list(read.samples)[: read.first_without_caption])


def test_text_embeds_stand_for_a_caption() -> None:
    members = {"latents.npy": ByteRange(0, 1), "text_embeds.safetensors": ByteRange(1, 1)}
    bare = Sample("a", Media.LATENTS, 4, 1, 1, 1, 0.0, 0.0, 0, {"latents.npy": ByteRange(0, 1)})
    facts = ShardEntry("a.tar", 0, "", Samples.of([bare._replace(members=members), bare])).facts
    assert (facts.without_caption, facts.first_without_caption, facts.latent_channels) == (1, 1, ((4, 0),))


def test_columns_are_not_copied_and_a_reader_is_sent_without_them(tmp_path: Path) -> None:
    """Whatever the size of an index, a worker that is started anew receives names, and maps the same file."""
    paths, file = _shards(tmp_path, 400), tmp_path / "index"
    index = build_index(paths, file)
    clips = index.samples.clips
    for name in ("width", "height", "num_frames", "fps", "duration", "media", "caption_length", "source"):
        assert not getattr(clips, name).flags.owndata and not getattr(clips, name).flags.writeable, name
    content = pickle.dumps(SampleReader(index))
    assert len(content) < 4000
    reader = pickle.loads(content)
    assert torch.equal(reader.read(301)["latents"], SampleReader(index_shards(paths)).read(301)["latents"])
    in_memory = pickle.loads(pickle.dumps(index_shards(paths)))
    assert in_memory.digest == index.digest


def test_who_reads_a_table_goes_on_while_another_adds_to_it(tmp_path: Path) -> None:
    paths, file = _shards(tmp_path, 12, shards=3), tmp_path / "index"
    index = build_index(paths, file)
    expected = list(index_shards(paths).samples)
    write_shard(Path(paths[0]), [clip(99)])
    build_index(paths[:1], file)
    assert list(index.samples) == expected


def test_a_table_moves_with_its_shards(tmp_path: Path) -> None:
    paths = _shards(tmp_path / "here", 6)
    build_index(paths, tmp_path / "here" / "index")
    (tmp_path / "here").rename(tmp_path / "there")
    moved = ShardIndex.load(tmp_path / "there" / "index")
    assert [shard.url for shard in moved.shards] == [str(tmp_path / "there" / f"{i:03}.tar") for i in range(2)]


@pytest.mark.parametrize("content", [b"", b"ARROW1\0\0", b"half", b"another schema", b"later version", b"gone"])
def test_a_damaged_table_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "index"
    build_index(_shards(tmp_path, 6), file)
    [part] = IndexTable(file).folder.glob("*.arrow")
    named = part
    if content == b"half":
        content = part.read_bytes()[: part.stat().st_size // 2]
    if content == b"another schema":
        table = pa.table({"a": np.arange(3)})
        with pa.OSFile(str(part), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    elif content == b"later version":
        named = part.with_name("index.json")
        named.write_text(json.dumps({"version": 5, "shards": []}))
    elif content == b"gone":
        part.unlink()
    else:
        part.write_bytes(content)
    with pytest.raises(ShardError) as caught:
        ShardIndex.load(file)
    assert str(named) in str(caught.value)


def test_no_table_at_all_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.arrow"):
        ShardIndex.load(tmp_path / "none")
    assert known_shards(tmp_path / "none") == []
