"""A folder of videos as users have them, packed; and captions as the common trainers keep them."""

from __future__ import annotations

import csv
import json
import os
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lightning_videoscale.data import ShardError, ShardIndex
from lightning_videoscale.data.packing import pack_folder as module
from lightning_videoscale.data.packing.pack_folder import PackReport, pack_folder
from lightning_videoscale.data.shards.indexing import index_shards
from lightning_videoscale.data.shards.sample_reader import SampleReader
from tests.data.films import film, numbered, picture

FILES = ["a/ride.mp4", "a/walk.v1.0.mp4", "b/ride.mp4", "höhe.mp4", "still.jpg"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Films of three frames that say their place in FILES, and a photograph that says 4."""
    for number, name in enumerate(FILES):
        file = tmp_path / "videos" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        is_film = name.endswith("mp4")
        file.write_bytes(film([numbered(number, 32, 48)] * 3) if is_film else picture(number))
    return tmp_path / "videos"


def contents(report: PackReport) -> dict[str, tuple[str, dict[str, Any]]]:
    """Captions and fields of all samples by their source, read as training reads them."""
    reader = SampleReader(index_shards([str(shard) for shard in report.shards]))
    assert isinstance(reader.index, ShardIndex) and not reader.index.refused
    found = {}
    for number in range(len(reader.index)):
        beside = reader.beside(number)
        fields = json.loads(beside["json"])
        found[fields.pop("source")] = beside.get("txt", b"").decode(), fields
    return found


def test_texts_beside_the_files(folder: Path, tmp_path: Path) -> None:
    (folder / "a/ride.txt").write_text("a ride\n")
    (folder / "höhe.txt").write_text("von oben 🏔")
    (folder / "notes.pdf").write_bytes(b"")
    report = pack_folder(folder, tmp_path / "shards")
    assert (report.samples, report.without_caption, report.written, len(report.shards)) == (5, 3, 1, 1)
    assert report.ignored == {"pdf": 1} and "beside" in report.captions_from
    expected = dict.fromkeys(FILES, ("", {})) | {"a/ride.mp4": ("a ride", {}), "höhe.mp4": ("von oben 🏔", {})}
    assert contents(report) == expected


def test_names_in_capitals_and_names_that_webdataset_leaves_out(tmp_path: Path) -> None:
    for name in ("CLIP.JPG", "__clips__/a.jpg", "____/a.jpg"):
        (tmp_path / "videos" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "videos" / name).write_bytes(picture())
    (tmp_path / "videos/CLIP.TXT").write_text("of a camera")
    found = contents(pack_folder(tmp_path / "videos", tmp_path / "shards"))
    assert found == {"CLIP.JPG": ("of a camera", {}), "__clips__/a.jpg": ("", {}), "____/a.jpg": ("", {})}


def test_photographs_of_more_than_a_few_bytes(tmp_path: Path) -> None:
    """FFmpeg takes a JPEG that is longer than its first look for a series of files, where it knows the name."""
    (tmp_path / "photos").mkdir()
    noise = np.random.default_rng(0).integers(256, size=(64, 96, 3), dtype=np.uint8)
    names = ["a.jpg", "b.jpeg", "c.JPG", "d.png", "e.webp", "f.bmp", "g.gif", "h.tif", "i%03d.jpg"]
    for name in names:
        Image.fromarray(noise).save(tmp_path / "photos" / name)
    report = pack_folder(tmp_path / "photos", tmp_path / "shards")
    assert report.left_out == ()
    assert sorted(contents(report)) == names


def table_of(kind: str, file: Path, rows: dict[str, str]) -> None:
    """Writes captions in the way of a trainer."""
    paths = list(rows)
    with file.open("w", encoding="utf-8") as stream:
        if kind == "diffusers":
            stream.writelines(json.dumps({"file_name": path, "text": rows[path], "fps": 24}) + "\n" for path in paths)
        elif kind == "musubi":
            stream.writelines(
                json.dumps({"video_path": str(file.parent / p), "caption": rows[p]}) + "\n" for p in paths
            )
        elif kind == "FastVideo":
            json.dump([{"path": path.rpartition("/")[2], "cap": [rows[path], "another"]} for path in paths], stream)
        elif kind == "by file":
            json.dump(rows, stream, ensure_ascii=False)
        else:
            write = csv.writer(stream, delimiter="\t" if kind == "tsv" else ",")
            write.writerows([["Video", "Prompt"], *([path.removesuffix(".mp4"), rows[path]] for path in paths)])


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [
        ("csv", "csv"),
        ("tsv", "tsv"),
        ("diffusers", "jsonl"),
        ("musubi", "jsonl"),
        ("FastVideo", "json"),
        ("by file", "json"),
    ],
)
def test_tables_of_captions(folder: Path, tmp_path: Path, kind: str, suffix: str) -> None:
    rows = {"a/walk.v1.0.mp4": 'says "go",\u2028then\nwalks', unicodedata.normalize("NFD", "höhe.mp4"): "von oben"}
    (folder / "höhe.txt").write_text("not this one")
    table = folder / f"captions.{suffix}"
    table_of(kind, table, rows)
    found = contents(pack_folder(folder, tmp_path / "shards", table))
    fields = {"diffusers": {"fps": 24}}.get(kind, {})
    for (name, text), file in zip(rows.items(), ("a/walk.v1.0.mp4", "höhe.mp4"), strict=True):
        more = {"cap": [text, "another"]} if kind == "FastVideo" else fields
        assert found[file] == (text, more), name
    assert found["a/ride.mp4"] == ("", {})


def test_a_table_in_the_folder_is_found(folder: Path, tmp_path: Path) -> None:
    table_of("csv", folder / "metadata.csv", {"a/ride.mp4": "a ride", "gone.mp4": "gone"})
    report = pack_folder(folder, tmp_path / "shards")
    assert report.captions_from == str(folder / "metadata.csv") and report.strangers == ("gone",)
    assert contents(report)["a/ride.mp4"] == ("a ride", {})


def test_a_number_names_a_file_also_if_it_is_zero(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / "stills").mkdir(exist_ok=True)
        (tmp_path / "stills" / f"{number}.jpg").write_bytes(picture(number))
    rows = [{"id": 0, "caption": "zero"}, {"id": 1, "caption": "one"}, {"id": None, "caption": "of no file"}]
    (tmp_path / "table.json").write_text(json.dumps(rows))
    report = pack_folder(tmp_path / "stills", tmp_path / "shards", tmp_path / "table.json")
    assert contents(report) == {"0.jpg": ("zero", {}), "1.jpg": ("one", {})} and report.strangers == ("",)


def test_a_link_has_the_caption_of_its_own_row(tmp_path: Path) -> None:
    """Whether it leads to a file beside it, out of the folder, or is named by a path with links in it."""
    (tmp_path / "store").mkdir()
    for number in range(2):
        (tmp_path / "store" / f"blob{number}").write_bytes(picture(number))
    stills, link = tmp_path / "stills", tmp_path / "link"
    (stills / "d").mkdir(parents=True)
    link.symlink_to(stills)
    (stills / "b.jpg").write_bytes(picture(2))
    for name, target in {"a.jpg": "b.jpg", "c.jpg": "b.jpg", "d/0.jpg": "../../store/blob0"}.items():
        (stills / name).symlink_to(target)
    rows = {"a.jpg": "a", "d/0.jpg": "d/0", str(link / "c.jpg"): "c"}
    table_of("by file", tmp_path / "captions.json", rows)
    found = contents(pack_folder(stills, tmp_path / "shards", tmp_path / "captions.json"))
    assert found == {"a.jpg": ("a", {}), "b.jpg": ("", {}), "c.jpg": ("c", {}), "d/0.jpg": ("d/0", {})}


def test_a_row_of_another_folder_says_nothing_of_a_file_of_the_same_name(folder: Path, tmp_path: Path) -> None:
    """But a path from where the folder lay before does."""
    (folder / "b/only.mp4").write_bytes((folder / "b/ride.mp4").read_bytes())
    rows = "c/only.mp4,another\nc/still.jpg,another\n/elsewhere/videos/a/ride.mp4,a ride\nhöhe.webm,another\n"
    (tmp_path / "table.csv").write_text("file_name,text\n" + rows)
    report = pack_folder(folder, tmp_path / "shards", tmp_path / "table.csv")
    assert report.strangers == ("c/only.mp4", "c/still.jpg", "höhe.webm")
    captions = {name: text for name, (text, _) in contents(report).items() if text}
    assert captions == {"a/ride.mp4": "a ride"}


def test_a_table_that_is_not_there(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=rf"no table of captions .*caption.csv.*{Path.cwd()}"):
        pack_folder(folder, tmp_path / "shards", tmp_path / "caption.csv")


def test_other_files_of_the_output_are_left_alone(folder: Path, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    pack_folder(folder, shards, samples_per_shard=1)
    for name in ("000009.tar", "2024-films.tar"):
        (shards / name).write_bytes(b"someone's")
    os.remove(folder / "still.jpg")
    report = pack_folder(folder, shards, samples_per_shard=1)
    kept = {path.name for path in shards.glob("*.tar")} - {path.name for path in report.shards}
    assert kept == {"000009.tar", "2024-films.tar"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("file_name,text\nzebra.mp4,x\n", "zebra.mp4"),
        ("a/ride.mp4,a ride\n", "--file-column"),
        ("file_name,wording\na/ride.mp4,x\n", "--caption-column"),
        ("file_name,text\na/ride.mp4,x\na/ride,y\n", "a/ride.mp4"),
        ("file_name,text\nride.mp4,x\n", "ride.mp4"),
        ("", "is empty"),
        ("file_name,text\na/ride.mp4,a ride, by bike\n", "more cells than columns .* line 2, .* by bike"),
        ('file_name, text\na/ride.mp4, "a ride, by bike"\n', "more cells than columns"),
        ('file_name,text\na/ride.mp4,"a ride\nb/ride.mp4,x\n', "line 2 on: unexpected end"),
        ('file_name,text\na/ride.mp4,"Go" it says\n', "line 2 on: .* doubled"),
    ],
    ids=[
        *("no such file", "no names of columns", "no caption", "twice", "two files of that name", "empty"),
        *("a comma without quotes", "a blank before quotes", "an open quote", "quotes within"),
    ],
)
def test_a_table_that_does_not_fit(folder: Path, tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "table.csv").write_text(content)
    with pytest.raises(ShardError, match=says):
        pack_folder(folder, tmp_path / "shards", tmp_path / "table.csv")
    assert not (tmp_path / "shards").exists()


def test_cells_without_a_column_may_be_empty(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text('file_name,text,\na/ride.mp4,"a ride, ""by bike""",,,\n')
    report = pack_folder(folder, tmp_path / "shards", tmp_path / "table.csv")
    assert contents(report)["a/ride.mp4"] == ('a ride, "by bike"', {})


@pytest.mark.parametrize("column", ["text", "other"])
def test_half_of_a_character_is_named(folder: Path, tmp_path: Path, column: str) -> None:
    row = {"file": "a/ride.mp4", "text": "a ride", column: "on a bike \ud83d"}
    (folder / "metadata.jsonl").write_text(json.dumps(row))
    with pytest.raises(ShardError, match=r"metadata\.jsonl .* 'a/ride.mp4', at the end of .*on a bike"):
        pack_folder(folder, tmp_path / "shards")


def test_what_pandas_writes_for_nothing_is_no_caption(folder: Path, tmp_path: Path) -> None:
    rows = [{"file": "a/ride.mp4", "text": float("nan")}, {"file": "b/ride.mp4", "text": [None, float("nan"), "x"]}]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = contents(pack_folder(folder, tmp_path / "shards"))
    assert (found["a/ride.mp4"], found["b/ride.mp4"]) == (("", {}), ("x", {"text": ["", "", "x"]}))


def test_files_that_cannot_be_opened_are_listed(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "a/ride.mp4").read_bytes()
    (folder / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    (folder / "page.mp4").write_text("<html>404</html>")
    (folder / "gone.mp4").symlink_to("nowhere.mp4")
    (folder / "a/again").symlink_to(folder)
    report = pack_folder(folder, tmp_path / "shards")
    assert report.samples == 5
    assert {name for name, _ in report.left_out} == {"cut.mp4", "page.mp4", "gone.mp4"}
    again = pack_folder(folder, tmp_path / "shards")
    assert again.written == 0 and again.left_out == report.left_out


def test_a_run_that_was_stopped_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = module._write, []

    def fails(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise OSError("No space left on device")
        return write(*args)

    monkeypatch.setattr(module, "_write", fails)
    with pytest.raises(OSError, match="No space"):
        pack_folder(folder, tmp_path / "shards", samples_per_shard=1)
    monkeypatch.undo()
    report = pack_folder(folder, tmp_path / "shards", samples_per_shard=1, workers=3)
    assert (report.written, len(report.shards)) == (3, 5) and set(contents(report)) == set(FILES)
    assert not [
        path for path in (tmp_path / "shards").iterdir() if path.suffix != ".tar" and path.name != "packed.json"
    ]


def test_only_what_changed_is_packed_again(folder: Path, tmp_path: Path) -> None:
    first = pack_folder(folder, tmp_path / "shards", samples_per_shard=2)
    before = {shard: shard.stat().st_mtime_ns for shard in first.shards}
    (folder / "höhe.txt").write_text("von oben")
    os.remove(folder / "still.jpg")
    report = pack_folder(folder, tmp_path / "shards", samples_per_shard=2)
    assert report.written == 1 and set(contents(report)) == set(FILES[:4])
    assert report.shards[0].stat().st_mtime_ns == before[report.shards[0]]
    assert sorted((tmp_path / "shards").glob("*.tar")) == list(report.shards), "the third shard is gone"


def test_shards_keep_within_their_bytes(folder: Path, tmp_path: Path) -> None:
    largest = max((folder / name).stat().st_size for name in FILES)
    report = pack_folder(folder, tmp_path / "shards", bytes_per_shard=largest)
    assert len(report.shards) > 1 and set(contents(report)) == set(FILES)


def test_what_is_not_its_own_is_left_alone(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"packed\.json"):
        pack_folder(folder, tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ShardError, match="no video or image"):
        pack_folder(tmp_path / "empty", tmp_path / "shards")
    shards = tmp_path / "shards"
    pack_folder(folder, shards)
    with pytest.raises(ShardError, match="videoscale index"):
        pack_folder(shards, tmp_path / "again")


def test_a_damaged_list_of_shards_is_named(folder: Path, tmp_path: Path) -> None:
    pack_folder(folder, tmp_path / "shards")
    (tmp_path / "shards/packed.json").write_text("")  # as after a power failure
    with pytest.raises(ShardError, match=r"packed\.json is damaged .* delete .*shards"):
        pack_folder(folder, tmp_path / "shards")
    assert (tmp_path / "shards/000000.tar").exists()
