"""What img2dataset, video2dataset and `datasets` write, in the layouts that their writers have."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_videoscale.cli import main
from lightning_videoscale.data import ClipShape, ShardError
from lightning_videoscale.data.packing.on_the_way import pack_on_the_way
from lightning_videoscale.data.packing.pack_folder import pack_folder
from lightning_videoscale.data.shards.indexing import index_shards
from lightning_videoscale.data.shards.sample_reader import Cut, SampleReader
from tests.data.clips import write_shard
from tests.data.films import film, numbered, numbers, picture


def meta(number: int, status: str = "success") -> dict[str, Any]:
    """The fields that both write of every sample."""
    fields = {"url": f"https://example.org/{number}", "caption": f"n° {number}", "key": f"{number:09}"}
    return fields | {"status": status, "error_message": None, "width": 64, "height": 48, "sha256": "0"}


def table(file: Path, rows: list[dict[str, Any]], group: int = 100) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=group)


def captions(shards: list[str]) -> dict[str, str]:
    """Captions by the name of the sample, of all that can be read."""
    reader = SampleReader(index_shards(shards))
    assert not reader.index.refused
    samples = reader.index.samples
    return {samples.keys[n]: reader.caption(n, reader.beside(n)) for n in range(len(reader.index))}


@pytest.mark.parametrize("kind", ["mp4", "jpg"])
def test_webdataset(tmp_path: Path, kind: str) -> None:
    """A tar with a table beside it, which also has the samples that failed."""
    content = film([numbered(1, 32, 48)] * 2) if kind == "mp4" else picture(1)
    samples = []
    for number in range(2):
        fields = json.dumps(meta(number), indent=4).encode()
        samples.append({"__key__": f"{number:09}", kind: content, "txt": f"n° {number}".encode(), "json": fields})
    write_shard(tmp_path / "00000.tar", samples)
    (tmp_path / "00000_stats.json").write_text("{}")
    table(tmp_path / "00000.parquet", [meta(0), meta(1), meta(2, "failed_to_download")])
    found = pack_on_the_way([str(tmp_path)], say=print)
    assert found.shards == [str(tmp_path / "00000.tar")]
    assert captions(found.shards) == {"000000000": "n° 0", "000000001": "n° 1"}


def test_files(tmp_path: Path) -> None:
    """A folder for each table, with a text and the fields beside every file."""
    folder = tmp_path / "data/00000"
    folder.mkdir(parents=True)
    for number in range(2):
        (folder / f"{number:09}.jpg").write_bytes(picture(number))
        (folder / f"{number:09}.txt").write_text(f"n° {number}")
        (folder / f"{number:09}.json").write_text(json.dumps(meta(number)))
    table(tmp_path / "data/00000.parquet", [meta(0), meta(1)])
    report = pack_folder(tmp_path / "data", tmp_path / "shards")
    assert report.ignored == {"json": 2, "parquet": 1} and report.without_caption == 0
    assert captions([str(s) for s in report.shards]) == {"00000/000000000": "n° 0", "00000/000000001": "n° 1"}


def test_parquet_of_img2dataset(tmp_path: Path) -> None:
    """Bytes in the column ``jpg``, none of them where the download failed."""
    rows = [{**meta(n), "jpg": picture(n), "txt": f"text {n}"} for n in range(5)]
    rows.insert(2, {**meta(9, "failed_to_download"), "jpg": None, "txt": None})
    table(tmp_path / "data/00000.parquet", rows, group=2)
    table(tmp_path / "data/00001.parquet", [{**meta(7), "jpg": b"no picture", "txt": "x"}])
    report = pack_folder(tmp_path / "data", tmp_path / "shards", samples_per_shard=3)
    assert (report.samples, report.without_caption, len(report.shards)) == (5, 0, 3)
    assert [name for name, _ in report.left_out] == ["00000.parquet#2", "00001.parquet#0"]
    reader = SampleReader(index_shards([str(shard) for shard in report.shards]))
    assert [reader.caption(n, reader.beside(n)) for n in range(5)] == [f"text {n}" for n in range(5)]
    last = reader.read(4, Cut(ClipShape(1, 48, 64)))
    assert last["json"]["url"] == "https://example.org/4" and "jpg" not in last["json"]
    assert numbers(last["video"]) == [4]
    again = pack_folder(tmp_path / "data", tmp_path / "shards", samples_per_shard=3)
    assert (again.written, again.samples) == (0, 5)
    table(tmp_path / "data/00001.parquet", [{**meta(7), "jpg": picture(7), "txt": "x"}])
    assert pack_folder(tmp_path / "data", tmp_path / "shards", samples_per_shard=3).written == 1


def test_parquet_of_datasets(tmp_path: Path) -> None:
    """``bytes`` and ``path`` in a column ``video``."""
    videos = [{"bytes": film([numbered(n, 32, 48)]), "path": f"{n}.mp4"} for n in range(2)]
    table(tmp_path / "data/train-00000-of-00001.parquet", [{"video": v, "prompt": "one"} for v in videos])
    found = pack_on_the_way([str(tmp_path / "data")], say=print)
    assert list(captions(found.shards).values()) == ["one", "one"]


def test_tables_of_captions(tmp_path: Path) -> None:
    """As `--captions`, and as ``metadata.parquet`` of a videofolder."""
    folder = tmp_path / "videos"
    folder.mkdir()
    (folder / "0.mp4").write_bytes(film([numbered(0, 32, 48)]))
    for place in (tmp_path / "captions.parquet", folder / "metadata.parquet"):
        table(place, [{"file_name": "0.mp4", "text": place.stem, "thumb": b"1", "score": 0.5}])
    for given, text in ((tmp_path / "captions.parquet", "captions"), (None, "metadata")):
        report = pack_folder(folder, tmp_path / text, given)
        assert captions([str(shard) for shard in report.shards]) == {"0": text}


def test_captions_in_the_folder_of_each_split_are_not_overlooked(tmp_path: Path) -> None:
    (tmp_path / "data/train").mkdir(parents=True)
    (tmp_path / "data/train/0.jpg").write_bytes(picture())
    (tmp_path / "data/train/metadata.jsonl").write_text('{"file_name": "0.jpg", "text": "zero"}\n')
    with pytest.raises(ShardError, match=r"videoscale pack '.*/data/train' OUTPUT"):
        pack_folder(tmp_path / "data", tmp_path / "shards")
    assert pack_folder(tmp_path / "data/train", tmp_path / "shards").without_caption == 0


def test_what_does_not_fit_is_named_with_its_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table(tmp_path / "data/0.parquet", [{"path": "0.mp4", "wording": "zero"}])
    with pytest.raises(ShardError, match=r"path \(string\), wording \(string\).*--captions"):
        pack_folder(tmp_path / "data", tmp_path / "shards")
    table(tmp_path / "data/0.parquet", [{"jpg": picture(), "wording": "zero"}])
    with pytest.raises(ShardError, match=r"'words'; it has \['jpg', 'wording'\]"):
        pack_folder(tmp_path / "data", tmp_path / "shards", caption_column="words")
    assert pack_folder(tmp_path / "data", tmp_path / "a", caption_column="wording").without_caption == 0
    (tmp_path / "data/0.parquet").write_bytes(b"PAR1 is not enough")
    with pytest.raises(ShardError, match=r"0\.parquet is no Parquet file"):
        pack_folder(tmp_path / "data", tmp_path / "b")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/data-00000-of-00001.arrow").touch()
    with pytest.raises(ShardError, match="to_parquet"):
        pack_folder(tmp_path / "saved", tmp_path / "c")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=r"lightning-videoscale\[parquet\]"):
        pack_folder(tmp_path / "data", tmp_path / "d")
    assert main(["pack", str(tmp_path / "data"), str(tmp_path / "d")]) == 1
