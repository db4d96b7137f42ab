"""Captions in ``.txt`` and in the fields of ``.json``: found, asked for by name, counted where there are none."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_videoscale.cli import main
from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data import ShardError, VideoDataModule
from lightning_videoscale.data.encoding.encode_sample import _fields
from lightning_videoscale.data.shards import indexing
from lightning_videoscale.data.shards.captions import find_caption
from lightning_videoscale.data.shards.indexing import build_index, index_shards
from lightning_videoscale.data.shards.sample_reader import SampleReader
from tests.data.clips import clip, npy, write_shard


def _with(number: int, txt: str | None = None, **fields: Any) -> dict[str, Any]:
    sample = clip(number) | {"json": json.dumps(fields).encode()}
    return {k: v for k, v in sample.items() if k != "txt"} | ({} if txt is None else {"txt": txt.encode()})


def _module(shard: Path, caption_key: str | None = None) -> VideoDataModule:
    data = VideoDataModule(str(shard), shard.parent / "index", budget=BucketBudget(480, 1e9), caption_key=caption_key)
    data.prepare_data()
    data.setup("fit")
    return data


def _trained(data: VideoDataModule) -> dict[str, str]:
    return {
        name.rpartition("/")[2]: caption
        for batch in data.train_dataloader()
        for name, caption in zip(batch["sample_ids"], batch["caption"], strict=True)
    }


@pytest.mark.parametrize(
    ("text", "fields", "key", "found"),
    [
        ("", {"caption": "a"}, None, ("a", "caption")),
        ("", {"caption": "cut within \ud83d"}, None, ("cut within \ufffd", "caption")),  # as JSON may hold an emoji
        ("a", {"alt": "whole \ud83d\ude00"}, "alt", ("whole \U0001f600", "alt")),
        ("", {"text": "b", "Caption": "a"}, None, ("a", "Caption")),
        ("", {"prompt": "p", "caption": None, "text": "  "}, None, ("p", "prompt")),
        ("t", {"caption": "a"}, None, ("t", "")),
        (" \n", {"caption": "a"}, None, ("a", "caption")),
        ("t", {"caption": "a", "recaption": "r"}, "recaption", ("r", "recaption")),
        ("t", {"caption": "a"}, "recaption", ("t", "")),
        ("", {"caption": "a"}, "recaption", ("", "")),
        ("", {"caption": ["a", "b"]}, None, ("", "")),
        ("", ["caption"], None, ("", "")),
        (" \n", {"title": "a"}, None, ("", "")),
        ("\n", {"caption": "a"}, "recaption", ("", "")),
        ("", None, "caption", ("", "")),
    ],
)
def test_where_a_caption_is_found(text: str, fields: Any, key: str | None, found: tuple[str, str]) -> None:
    assert find_caption(text, fields, key) == found


def test_captions_of_video2dataset_are_trained_on_with_or_without_txt(tmp_path: Path) -> None:
    samples = [_with(0, caption="in json"), _with(1, "in txt", caption="other"), _with(2, "", text="beside empty txt")]
    data = _module(write_shard(tmp_path / "000.tar", samples))
    expected = {"clip00000": "in json", "clip00001": "in txt", "clip00002": "beside empty txt"}
    assert _trained(data) == expected
    lengths = data._shards.index("shards").samples.clips.caption_length
    assert lengths.tolist() == [len(text) for text in expected.values()], "as the plan counts them"


def test_capitals_and_byte_order_marks_are_of_windows_and_not_of_captions(tmp_path: Path) -> None:
    latents = {name: clip(0)[name] for name in ("__key__", "latents.npy")}
    marked = json.dumps({"text": "in json"}).encode("utf-8-sig")
    samples = [
        latents | {"__key__": "A", "TXT": "in txt".encode("utf-8-sig")},
        latents | {"__key__": "B", "JSON": marked},
        {"__key__": "C.V1", "LATENTS.NPY": latents["latents.npy"], "Txt": b"of C.V1", "Mask.NPY": npy(np.ones(2))},
    ]
    shard = write_shard(tmp_path / "000.tar", samples)
    reader = SampleReader(index_shards([str(shard)]))
    assert [reader.read(i)["caption"] for i in range(3)] == ["in txt", "in json", "of C.V1"]
    assert reader.index.samples.keys == ("A", "B", "C.V1") and reader.index.samples[0].caption_length == 6
    assert len(reader.read(2)["Mask"]) == 2, "names in a batch stay as they are"
    assert _fields(reader.members(1)) == {"text": "in json"}, "encoding reads them, too"


def test_a_field_that_is_asked_for_goes_before_txt(tmp_path: Path) -> None:
    samples = [_with(0, "short", long="a long one"), _with(1, "short alone"), _with(2, None, long="long alone")]
    data = _module(write_shard(tmp_path / "000.tar", samples), "long")
    assert _trained(data) == {"clip00000": "a long one", "clip00001": "short alone", "clip00002": "long alone"}


def test_a_field_that_no_sample_has_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = write_shard(tmp_path / "000.tar", [_with(0, "t", caption="c"), _with(1, long=["no", "text"])])
    for name in ("Caption", "long"):
        with pytest.raises(ShardError, match=f"caption_key='{name}'"):
            _module(shard, name)
        assert main(["index", str(shard), "--caption-key", name]) == 1
        assert f"caption_key='{name}'" in capsys.readouterr().err


def test_another_field_costs_no_second_look_at_the_media(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = write_shard(tmp_path / "000.tar", [_with(i, "t", long="a long one") for i in range(3)])
    first = build_index([str(shard)], tmp_path / "index")
    known: list[Any] = []
    describe = indexing.describe
    monkeypatch.setattr(indexing, "describe", lambda *about: known.append(about[4]) or describe(*about))
    index = build_index([str(shard)], tmp_path / "index", caption_key="long")
    assert known == list(first.samples)
    assert index.samples.clips.caption_length.tolist() == [10] * 3
    assert SampleReader(index).read(0)["caption"] == "a long one"
    build_index([str(shard)], tmp_path / "index", caption_key="long")
    assert len(known) == 3
    assert index.digest == index_shards([str(shard)], caption_key="long").digest


def test_samples_without_a_caption_are_told_of_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    embedded = {"text_embeds.npy": npy([[0.0]])}
    samples = [
        _with(0, title="no caption"),
        _with(1, "t"),
        _with(2, "\n", a=1),
        _with(3) | embedded,
        _with(4, prompt="p"),
    ]
    shard = write_shard(tmp_path / "000.tar", samples)
    with pytest.warns(UserWarning, match=r"2 of 5 samples .*'000\.tar/clip00000'"):
        data = _module(shard)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.setup("fit")
        assert len(list(data.train_dataloader())) > 0
    assert main(["index", str(shard), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["without_caption"], report["caption_fields"]) == (2, ["prompt"])
    assert main(["index", str(shard)]) == 0
    assert "2 samples have no caption" in capsys.readouterr().out


def test_a_dataset_without_any_text_is_meant_to_be_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = [{k: v for k, v in clip(i).items() if k in ("__key__", "latents.npy")} for i in range(3)]
    with warnings.catch_warnings(), caplog.at_level(logging.INFO):
        warnings.simplefilter("error")
        data = _module(write_shard(tmp_path / "000.tar", plain))
    assert _trained(data) == {f"clip0000{i}": "" for i in range(3)}
    assert caplog.text.count("3 of 3 samples have no caption") == 1


def test_fields_that_cannot_be_read_are_listed(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "000.tar", [_with(0, "t"), _with(1) | {"json": b'{"caption": '}])
    [(_, refusal)] = index_shards([str(shard)]).refused
    assert refusal.member == "clip00001.json" and "it cannot be read" in refusal.reason
