"""`videoscale index`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from lightning_videoscale.cli import main
from lightning_videoscale.data import ShardIndex
from tests.data.clips import clip, write_shard
from tests.examples.footage import moving_square, write_video


def _shards(folder: Path) -> str:
    video = write_video(folder / "a.mp4", moving_square(12, 48, 80)).read_bytes()
    write_shard(folder / "000.tar", [clip(0), {"__key__": "film", "mp4": video, "txt": b"a square"}])
    write_shard(folder / "001.tar", [{"__key__": "cut", "mp4": video[: len(video) // 2]}, clip(2, flac=b"")])
    return f"{folder}/{{000..001}}.tar"


def test_what_is_there_and_what_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = _shards(tmp_path)
    assert main(["index", shards, "--json", "--workers", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["indexed"] == 3 and report["media"] == {"image": 0, "video": 1, "latents": 2}
    [refused] = report["refused"]
    assert refused["shard"] == "001.tar" and refused["member"] == "cut.mp4" and "does not decode" in refused["reason"]
    assert report["ignored"] == ["flac"]

    clips = ShardIndex.load(Path(report["index"])).samples.clips
    assert clips.num_frames.tolist() == [3, 12, 3] and clips.width.tolist() == [8, 80, 8]
    assert np.allclose(clips.fps, [0, 25, 0]) and np.allclose(clips.duration, [0, 12 / 25, 0])

    assert main(["index", shards]) == 0
    out = capsys.readouterr().out
    assert "3 samples (1 video, 2 latents) in 2 shards" in out and "001.tar: 'cut.mp4': it does not decode" in out


def test_brackets_in_a_path_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder := tmp_path / "[v1]").mkdir()
    write_shard(folder / "000.tar", [clip(0)])
    assert main(["index", str(folder)]) == 0
    assert str(folder) in capsys.readouterr().out


def test_nothing_that_can_be_used_is_status_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = write_shard(tmp_path / "000.tar", [{"__key__": "a", "mp4": b""}])
    assert main(["index", str(shard), "--json", "--index", str(tmp_path / "elsewhere" / "table")]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["indexed"] == 0
    assert report["refused"] == [{"shard": "000.tar", "member": "a.mp4", "reason": "it is empty"}]
    assert report["index"] == str(tmp_path / "elsewhere" / "table.arrow") and Path(report["index"]).is_dir()

    assert main(["index", str(tmp_path / "none.tar")]) == 1
    assert "No shards found" in capsys.readouterr().err
    assert main(["index", str(shard), "--index", str(shard / "table")]) == 1
    said = capsys.readouterr().err
    assert f"No index can be kept in {shard}: " in said and "another place: --index FILE" in said
    shutil.copy(shard, tmp_path / "table")
    assert main(["index", str(shard), "--index", str(tmp_path / "table")]) == 1
    assert "is not a shard index" in capsys.readouterr().err.replace("\n", " ")
