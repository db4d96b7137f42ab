"""Where latents are encoded to: a folder of their own, that knows the samples and captions they were made of."""

from __future__ import annotations

import fcntl
import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.data import ShardError, ShardIndex
from lightning_videoscale.data.encoding.encode_shards import EncodeReport, EncodeSettings, encode_shards
from lightning_videoscale.data.encoding.text import EncodedText
from lightning_videoscale.data.planning.shapes import ShapePolicy
from lightning_videoscale.data.shards.indexing import build_index, index_shards
from lightning_videoscale.data.shards.sample_reader import SampleReader
from tests.data.clips import npy, write_shard
from tests.data.films import picture


class Grey:
    """Stands in for a VAE: one number for every block of pixels."""

    name = "grey"
    geometry = ModelGeometry()

    def encode(self, video: torch.Tensor) -> torch.Tensor:
        return video[:1, :, ::8, ::8].float()


def _encode(index: ShardIndex, output: Path) -> EncodeReport:
    return encode_shards(index, Grey(), output, EncodeSettings(ShapePolicy(areas=(32 * 32,))))


def _shard(file: Path, caption: str) -> list[str]:
    return [str(write_shard(file, [{"__key__": "still", "jpg": picture(), "txt": caption.encode()}]))]


class Ones:
    """Stands in for a text encoder: every token is a one."""

    name, max_length = "ones", 6

    def encode(self, captions: Sequence[str]) -> EncodedText:
        size = len(captions), self.max_length
        return EncodedText(torch.ones(*size, 8), torch.ones(size, dtype=torch.bool))


def test_embeddings_take_the_place_of_those_that_were_there(tmp_path: Path) -> None:
    """Beside them, whatever their format, every sample would have two members of one name, and be refused."""
    members = {"jpg": picture(), "txt": b"a cat", "text_embeds.npy": npy(np.zeros((3, 4), np.float32))}
    source = write_shard(tmp_path / "stills/000.tar", [{"__key__": "still", **members}])
    settings = EncodeSettings(ShapePolicy(areas=(32 * 32,)))
    encode_shards(index_shards([str(source)]), Grey(), tmp_path / "latents", settings, text=Ones())
    index = index_shards([str(tmp_path / "latents/000000.tar")])
    assert len(index) == 1 and not index.refused
    assert SampleReader(index).read(0)["text_embeds"].tolist() == torch.ones(6, 8).tolist()


def test_samples_of_a_folder_that_looks_like_bookkeeping_are_in_the_index(tmp_path: Path) -> None:
    shards = [*_shard(tmp_path / "__clips__/000.tar", "a cat"), *_shard(tmp_path / "more/000.tar", "a dog")]
    _encode(index_shards(shards), tmp_path / "latents")
    index = index_shards([str(tmp_path / "latents/000000.tar")])
    assert sorted(index.samples.keys) == ["_clips__/000.tar/still", "more/000.tar/still"]


def test_a_folder_of_other_files_takes_no_latents(tmp_path: Path) -> None:
    """Also not that of the source, whose shards have the names of pieces: they would be taken for done."""
    source, link = tmp_path / "stills", tmp_path / "link"
    index, other = (index_shards(_shard(folder / "000000.tar", "a cat")) for folder in (source, tmp_path / "other"))
    link.symlink_to(source)
    for output in (source, link, Path(os.path.relpath(source))):
        with pytest.raises(ShardError, match="holds the shards that are to be encoded"):
            _encode(index, output)
    with pytest.raises(ShardError, match=r"1 files \(000000\.tar\) and no encoded\.json"):
        _encode(other, source)
    assert [file.name for file in source.iterdir()] == ["000000.tar"]


def test_other_captions_of_the_same_length_are_seen(tmp_path: Path) -> None:
    shards, output = _shard(tmp_path / "stills/000.tar", "a cat"), tmp_path / "latents"
    _encode(index_shards(shards), output)
    os.utime(shards[0], (0, 0))
    assert _encode(index_shards(shards), output).found == 1, "a copy of the same is the same"
    built = build_index(_shard(tmp_path / "stills/000.tar", "a dog"), tmp_path / "index")
    for index in (built, index_shards(shards)):
        with pytest.raises(ShardError, match=r"begun with {'captions': '.*Its shards hold the captions of then"):
            _encode(index, output)


def test_latents_that_were_made_anew_in_the_sizes_of_before_are_seen(tmp_path: Path) -> None:
    shard, output = tmp_path / "clips/000.tar", tmp_path / "with_text"
    settings = EncodeSettings(ShapePolicy())

    def add_text(value: int) -> EncodeReport:
        latents = npy(np.full((4, 1, 4, 4), value, np.float16))
        write_shard(shard, [{"__key__": "clip", "latents.npy": latents, "txt": b"a cat"}])
        return encode_shards(index_shards([str(shard)]), None, output, settings, text=Ones())

    assert add_text(1).written == 1 and add_text(1).found == 1
    with pytest.raises(ShardError, match=r"was begun with {'latents': .*choose another folder"):
        add_text(2)
    made_by = json.loads((output / "encoded.json").read_text())
    del made_by["latents"]  # as an older release wrote it
    (output / "encoded.json").write_text(json.dumps(made_by))
    assert add_text(1).found == 1


def test_folders_and_indexes_that_know_no_captions_are_gone_on_with(tmp_path: Path) -> None:
    index, output = index_shards(_shard(tmp_path / "stills/000.tar", "a cat")), tmp_path / "latents"
    settings = output / "encoded.json"
    _encode(index, output)
    made_by = json.loads(settings.read_text())
    older = ShardIndex(tuple(replace(shard, captions=None) for shard in index.shards))
    with pytest.warns(UserWarning, match="the index of the shards is of an older release: delete the index"):
        assert _encode(older, output).found == 1
    assert json.loads(settings.read_text()) == made_by

    settings.write_text(json.dumps({name: made_by[name] for name in made_by if name != "captions"}))
    with pytest.warns(UserWarning, match="the folder is of an older release"):
        assert _encode(index, output).found == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _encode(index, output).found == 1
    assert json.loads(settings.read_text()) == made_by


def test_a_damaged_list_of_settings_is_named(tmp_path: Path) -> None:
    index, output = index_shards(_shard(tmp_path / "stills/000.tar", "a cat")), tmp_path / "latents"
    _encode(index, output)
    (output / "encoded.json").write_text("")  # as after a power failure
    with pytest.raises(ShardError, match=r"encoded\.json is damaged .* delete this folder"):
        _encode(index, output)


def test_what_another_process_is_writing_is_left_alone(tmp_path: Path) -> None:
    """Two runs into one folder both end; what a run that was killed has left is removed."""
    index, output = index_shards(_shard(tmp_path / "000.tar", "a cat")), tmp_path / "latents"
    begun, left = (tmp_path / f"latents/.000000.tar.node.{number}" for number in (1, 2))
    output.mkdir()
    left.touch()
    with begun.open("wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        _encode(index, output)
        assert begun.exists() and not left.exists()
    assert len(index_shards([str(output / "000000.tar")])) == 1
