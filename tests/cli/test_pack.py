"""`videoscale pack`, as a newcomer types it."""

from __future__ import annotations

import errno
import fcntl
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lightning_videoscale.cli import main
from lightning_videoscale.data.packing.one_at_a_time import one_at_a_time
from tests.data.films import film, numbered, picture


def test_from_films_and_a_table_to_an_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my videos").mkdir()
    for number in range(3):
        (tmp_path / "my videos" / f"{number}.mp4").write_bytes(film([numbered(number, 32, 48)] * 5))
    (tmp_path / "my videos" / "3.mp4").write_bytes(b"no film")
    (tmp_path / "captions.csv").write_text("video,caption\n0.mp4,zero\n1.mp4,one\n7.mp4,seven\n")
    arguments = [str(tmp_path / "my videos"), str(tmp_path / "shards"), "--captions", str(tmp_path / "captions.csv")]
    assert main(["pack", *arguments]) == 0
    said = capsys.readouterr().out
    assert "3 samples in 1 shards (1 written now)" in said and "1 samples have none" in said
    assert "3.mp4: it does not decode" in said and "7.mp4" in said
    command = said.partition("next: videoscale ")[2].strip().replace("'", "").split(" ", 1)
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["without_caption"] == 1

    assert main(["pack", *arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["samples"], report["written"], report["strangers"]) == (3, 0, ["7.mp4"])


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", str(tmp_path / "videos"), str(tmp_path / "shards")]) == 1
    assert "videos is no folder" in capsys.readouterr().err


def test_a_table_or_a_video_in_the_place_of_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("captions.csv", "0.mp4"):
        (tmp_path / name).touch()
        assert main(["pack", str(tmp_path / name), "shards"]) == 1
        said = capsys.readouterr().err
        assert f"videoscale pack '{tmp_path}' 'shards'" in said and "--captions" in said


def test_captions_that_nobody_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "0.mp4").write_bytes(film([numbered(0, 32, 48)] * 5))
    (tmp_path / "captions.csv").write_text("video,caption\n0.mp4,zero\n")
    assert main(["pack", str(tmp_path / "videos"), str(tmp_path / "shards")]) == 0
    assert "--captions" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", [["index"], ["encode", "--output", "latents", "--vae", "wan"]], ids=["index", "encode"]
)
def test_videos_where_shards_belong_lead_to_the_right_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    (tmp_path / "0.mp4").write_bytes(film([numbered(0, 32, 48)]))
    name, *options = command
    for wrong in (tmp_path / "0.mp4", tmp_path / "*.mp4"):
        assert main([name, str(wrong), *options]) == 1
        assert f"videoscale pack '{tmp_path}' OUTPUT" in capsys.readouterr().err


def test_a_folder_is_indexed_by_way_of_its_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "videos"
    folder.mkdir()
    (folder / "0.mp4").write_bytes(film([numbered(0, 32, 48)]))
    (tmp_path / "table.csv").write_text("file_name,text\n0.mp4,zero\n")

    def index(*options: str) -> dict[str, Any]:
        assert main(["index", str(folder), "--json", *options]) == 0
        said = capsys.readouterr()
        return {"said": said.err, **json.loads(said.out)}

    first = index()
    assert (first["indexed"], first["without_caption"]) == (1, 1)
    assert str(tmp_path / "videos.packed") in first["said"] and "1 samples have none" in first["said"]
    (folder / "1.mp4").write_bytes(film([numbered(1, 32, 48)]))
    second = index()
    assert second["indexed"] == 2 and second["index"] == first["index"], "what is known of other shards is kept"
    assert "written now" not in index()["said"]
    by_table = index("--captions", str(tmp_path / "table.csv"))
    assert by_table["without_caption"] == 1 and len(list(tmp_path.glob("videos.packed-by-table-*"))) == 1
    assert index()["without_caption"] == 2, "the others are still there"
    assert main(["index", str(tmp_path / "videos.packed"), "--captions", str(tmp_path / "table.csv")]) == 1
    assert "videoscale pack FOLDER OUTPUT --captions" in capsys.readouterr().err


def test_one_that_packs_the_same_folder_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos/0.jpg").write_bytes(picture())
    with ThreadPoolExecutor() as threads:
        with one_at_a_time(tmp_path / "shards"):
            other = threads.submit(main, ["pack", str(tmp_path / "videos"), str(tmp_path / "shards")])
            with pytest.raises(TimeoutError):
                other.result(timeout=2)
            assert not (tmp_path / "shards").exists()
        assert other.result() == 0


def test_without_a_place_for_a_lock_it_packs_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos/0.jpg").write_bytes(picture())
    assert main(["pack", str(tmp_path / "videos"), str(tmp_path / "shards")]) == 0
    assert "No other process may pack" in caplog.text
