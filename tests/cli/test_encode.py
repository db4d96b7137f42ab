"""`videoscale encode`: latents that a model can train on, the same however often the run was stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import load_file

from lightning_videoscale.cli import main
from lightning_videoscale.cost.budget import BucketBudget
from lightning_videoscale.cost.geometry import GEOMETRIES, ModelGeometry
from lightning_videoscale.data import ShardError, VideoDataModule
from lightning_videoscale.data.encoding.encode_sample import SampleEncoder
from lightning_videoscale.data.encoding.encode_shards import EncodeReport, EncodeSettings, encode_shards
from lightning_videoscale.data.encoding.text import EncodedText, TransformersText
from lightning_videoscale.data.encoding.vae import DiffusersVae
from lightning_videoscale.data.planning.shapes import ClipShape, ShapePolicy
from lightning_videoscale.data.shards import storage
from lightning_videoscale.data.shards.index import ShardIndex
from lightning_videoscale.data.shards.indexing import index_shards
from lightning_videoscale.data.shards.sample_reader import Cut, SampleReader
from tests.data.clips import clip, npy, write_shard
from tests.data.encoders import MAX_LENGTH, save_pipeline
from tests.data.films import film, numbered
from tests.data.servers import serving

POLICY = ShapePolicy(areas=(32 * 48,), fps=25.0, max_frames=9, crop_min_frames=1)


@pytest.fixture(scope="module")
def vae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Wan VAE of random weights whose latents need normalising."""
    torch.manual_seed(0)
    scales = {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [0.5, 1.0, 2.0, 4.0]}
    model = AutoencoderKLWan(base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **scales)
    folder = tmp_path_factory.mktemp("pipeline")
    model.save_pretrained(folder / "vae")
    return folder


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Seven films of 9 frames, one of 2, one too small, in two shards."""
    folder = tmp_path_factory.mktemp("films")
    films = [film([numbered(i + k, 32, 48) for k in range(9)]) for i in range(7)]
    films += [film([numbered(40, 32, 48)] * 2), film([numbered(1, 4, 4)] * 3)]
    samples: list[dict[str, Any]] = [
        {"__key__": f"film{i}", "mp4": data, "txt": f"film {i}".encode()} for i, data in enumerate(films)
    ]
    samples[1]["json"] = b'{"height": 32, "tags": ["grey"]}'
    return [str(write_shard(folder / f"{i:03}.tar", samples[i::2])) for i in range(2)]


class Averages:
    """Stands in for a VAE: latents are means of blocks of pixels."""

    name = "averages"
    geometry = ModelGeometry()

    def __init__(self, stop_after: int = 99) -> None:
        self.left = stop_after

    def encode(self, video: torch.Tensor) -> torch.Tensor:
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        frames = video[:, ::4].float()
        return torch.nn.functional.avg_pool2d(frames.transpose(0, 1), 8).transpose(0, 1)


def _encode(
    shards: list[str] | ShardIndex, output: Path, encoder: Averages | None = None, **kwargs: Any
) -> EncodeReport:
    index = shards if isinstance(shards, ShardIndex) else index_shards(shards)
    return encode_shards(index, encoder or Averages(), output, EncodeSettings(POLICY, samples_per_shard=2), **kwargs)


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_latents_are_those_of_the_vae_normalised(
    shards: list[str], vae: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--vae", str(vae), "--subfolder", "vae", "--sizes", "32x48", "--fps", "25", "--max-frames", "9"]
    out = tmp_path / "latents"
    assert main(["encode", *shards, "--output", str(out), *arguments, "--workers", "0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["written"] == 1 and [refused["sample"] for refused in report["refused"]] == ["000.tar/film8"]
    assert "4 x 4 pixels are fewer" in report["refused"][0]["reason"]

    index = index_shards([str(out / "000000.tar")])
    assert index.refused == () and len(index) == 8
    assert index.samples.keys[:2] == ("000.tar/film0", "000.tar/film2")
    row = index.samples.keys.index("001.tar/film1")
    read = SampleReader(index).read(row)
    assert read["caption"] == "film 1"
    pixels = {"frames": 9, "height": 32, "width": 48, "fps": 25.0, "start": 0.0}
    assert read["json"] == {"source_height": 32, "tags": ["grey"], "pixels": pixels}

    source = index_shards(shards)
    film1 = next(i for i in range(len(source)) if source.sample_id(i) == "001.tar/film1")
    video = SampleReader(source).read(film1, Cut(ClipShape(9, 32, 48), fps=25.0))["video"]
    model = AutoencoderKLWan.from_pretrained(vae / "vae")
    with torch.no_grad():
        raw = model.encode(video[None].float() / 127.5 - 1).latent_dist.mode()[0]
    mean, std = (torch.tensor(model.config[name]).view(4, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    assert read["latents"].shape == (4, 3, 4, 6)
    assert torch.allclose(read["latents"].float(), (raw - mean) / std, atol=2e-3)
    short = index.samples[index.samples.keys.index("001.tar/film7")]
    assert short.shape == (4, 1, 4, 6), "of two frames the model takes one"


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_run_that_was_stopped_goes_on_with_any_number_of_ranks(
    shards: list[str], tmp_path: Path, world_size: int
) -> None:
    whole = _encode(shards, tmp_path / "whole")
    assert (whole.written, whole.found) == (5, 0)
    parts = tmp_path / "parts"
    with pytest.raises(KeyboardInterrupt):
        _encode(shards, parts, Averages(stop_after=3), rank=0, world_size=2)
    assert [path.name for path in sorted(parts.glob("*.tar"))] == ["000000.tar", "000002.tar"]

    reports = [_encode(shards, parts, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert sum(report.written for report in reports) == 3 and sum(report.found for report in reports) == 2
    assert _content(parts) == _content(tmp_path / "whole")
    assert _encode(shards, parts).written == 0


def test_a_folder_of_other_settings_is_left_alone(shards: list[str], tmp_path: Path) -> None:
    _encode(shards, tmp_path)
    before = _content(tmp_path)
    other = EncodeSettings(POLICY, seed=1, samples_per_shard=2)
    with pytest.raises(ShardError, match=r"{'seed': 0}.*{'seed': 1}"):
        encode_shards(index_shards(shards), Averages(), tmp_path, other)
    with pytest.raises(ShardError, match=r"{'samples':"):
        _encode(shards[:1], tmp_path)
    assert _content(tmp_path) == before


def test_the_captions_that_were_indexed_are_encoded(
    vae: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And those of another field if it is named; on several ranks the index must have them."""
    fields = json.dumps({"caption": "usual", "long": "long", "short": "short"}).encode()
    shard = str(
        write_shard(tmp_path / "000.tar", [{"__key__": "film", "mp4": film([numbered(0, 32, 48)]), "json": fields}])
    )
    options = ["--vae", str(vae), "--subfolder", "vae", "--sizes", "32x48", "--workers", "0"]
    read: list[str] = []
    monkeypatch.setattr(SampleEncoder, "__call__", lambda _, sample: read.append(sample.caption) or {})

    def encode(number: int, *more: str) -> int:
        return main(["encode", shard, "--output", str(tmp_path / str(number)), *options, *more])

    assert main(["index", shard, "--caption-key", "long"]) == 0
    assert encode(0) == 0 and "captions are the field 'long'" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert encode(1) == 0
    assert encode(2, "--caption-key", "short") == 1 and "--caption-key 'short'" in capsys.readouterr().err
    monkeypatch.delenv("WORLD_SIZE")
    assert encode(2, "--caption-key", "short") == 0
    assert encode(3, "--caption-key", "none") == 1 and "caption_key='none'" in capsys.readouterr().err
    assert read == ["long", "long", "short"]


@pytest.mark.parametrize("setting", [["--seed", "-1"], ["--samples-per-shard", "0"]])
def test_settings_that_cannot_be_begin_no_folder(
    shards: list[str], vae: Path, tmp_path: Path, setting: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "latents"
    arguments = ["--output", str(output), "--vae", str(vae), "--subfolder", "vae", "--workers", "0"]
    assert main(["encode", *shards, *arguments, *setting]) == 1
    assert "seed >= 0 and samples_per_shard >= 1" in capsys.readouterr().err and not output.exists()


def test_workers_read_ahead_and_change_nothing(shards: list[str], tmp_path: Path) -> None:
    _encode(shards, tmp_path / "a")
    _encode(shards, tmp_path / "b", workers=2)
    assert _content(tmp_path / "a") == _content(tmp_path / "b")


def test_latents_are_not_encoded_again(shards: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    latents = str(write_shard(tmp_path / "000.tar", [clip(0)]))
    with pytest.raises(ShardError, match="latents already"):
        _encode([latents], tmp_path / "out")
    for given, options, option in (
        ([latents], ["--vae", "wan"], "--text-encoder"),
        ([latents], [], "--text-encoder"),
        (shards, ["--text-encoder", "wan"], "--vae"),
        ([latents, *shards], ["--vae", "wan"], "1 latents"),
    ):
        index = ["--index", str(tmp_path / "index")]
        assert main(["encode", *given, "--output", str(tmp_path / "out"), "--workers", "0", *options, *index]) == 1
        assert option in capsys.readouterr().err and not (tmp_path / "out").exists()


class StopsAfter:
    """A text encoder that is stopped after some captions."""

    def __init__(self, text: TransformersText, captions: int) -> None:
        self._text, self._left = text, captions
        self.name, self.max_length = text.name, text.max_length

    def encode(self, captions: Sequence[str]) -> EncodedText:
        if not self._left:
            raise KeyboardInterrupt
        self._left -= 1
        return self._text.encode(captions)


def test_embeddings_are_added_to_latents_which_stay_as_they_are(tmp_path: Path) -> None:
    pipeline = save_pipeline(tmp_path / "pipeline")
    old = npy(np.ones((2, 3), np.float32))
    clips = [clip(n, txt=str(n % 10).encode(), mask_npy=old) for n in range(4)]
    clips.append(clip(4, txt=b"4", text_embeds_npy=old, text_mask_npy=npy(np.ones(9, bool))))
    shard, output = write_shard(tmp_path / "latents.tar", clips), tmp_path / "with_text"
    options = ["--text-encoder", str(pipeline), "--max-length", str(MAX_LENGTH), "--samples-per-shard", "2"]
    command = ["encode", str(shard), "--output", str(output), *options, "--workers", "0"]
    text, index = TransformersText(str(pipeline), MAX_LENGTH), index_shards([str(shard)])
    with pytest.raises(KeyboardInterrupt):  # the first caption is the empty one
        encode_shards(index, None, output, EncodeSettings(POLICY, samples_per_shard=2), text=StopsAfter(text, 4))
    assert [path.name for path in sorted(output.glob("*.tar"))] == ["000000.tar"]
    assert main(command) == 0 and main(command) == 0

    before, after = SampleReader(index), SampleReader(index_shards(sorted(map(str, output.glob("*.tar")))))
    assert len(after.index) == 5 and (output / "empty_prompt.safetensors").is_file()
    expected = text.encode(["0", "1", "2", "3", "4"])
    for number in range(5):
        was, now = before.members(number), after.members(number)
        assert {e: now[e] for e in was if not e.startswith("text_")} == {
            e: content for e, content in was.items() if not e.startswith("text_")
        }
        read = after.read(number)
        assert read["text_embeds"].dtype == torch.bfloat16 and torch.equal(read["text_embeds"], expected.embeds[number])
        assert torch.equal(read["text_mask"], expected.mask[number]) and read["caption"] == str(number)
    with pytest.raises(ShardError, match="samples_per_shard"):
        encode_shards(index, None, output, EncodeSettings(POLICY, samples_per_shard=3), text=text)


def test_a_folder_of_films_is_packed_and_encoded(
    vae: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "films").mkdir()
    (tmp_path / "films/0.mp4").write_bytes(film([numbered(0, 32, 48)]))
    (tmp_path / "captions.csv").write_text("file,caption\n0.mp4,grey\n")
    command = ["encode", str(tmp_path / "films"), "--captions", str(tmp_path / "captions.csv"), "--vae", str(vae)]
    options = ["--subfolder", "vae", "--sizes", "32x48", "--workers", "0", "--output", str(out := tmp_path / "[v1]")]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*command, *options]) == 1
    assert "videoscale index" in capsys.readouterr().err and not out.exists()
    monkeypatch.delenv("WORLD_SIZE")
    assert main([*command, *options]) == 0
    assert f"-> {out}\n" in capsys.readouterr().out
    reader = SampleReader(index_shards([str(out / "000000.tar")]))
    assert reader.read(0)["caption"] == "grey"


def test_a_folder_whose_vae_lies_deeper_is_named(vae: Path) -> None:
    with pytest.raises(OSError, match=r"subfolder None: .*'vae'"):
        DiffusersVae(str(vae), GEOMETRIES["wan2.1"])


def test_a_vae_of_another_model_is_named(vae: Path) -> None:
    encoder = DiffusersVae(str(vae), GEOMETRIES["wan2.2-ti2v-5b"], "vae")
    with pytest.raises(ValueError, match=r"\(1, 8, 8\).*\(1, 64, 64\).*\(1, 4, 4\)"):
        encoder.encode(torch.zeros(3, 1, 64, 64, dtype=torch.uint8))


def test_scaling_factors_of_other_families(tmp_path: Path) -> None:
    from diffusers import AutoencoderKLCogVideoX

    torch.manual_seed(0)
    blocks = {"down_block_types": ("CogVideoXDownBlock3D",) * 4, "up_block_types": ("CogVideoXUpBlock3D",) * 4}
    sizes = {"block_out_channels": (4,) * 4, "latent_channels": 2, "layers_per_block": 1, "norm_num_groups": 2}
    model = AutoencoderKLCogVideoX(scaling_factor=0.25, **sizes, **blocks)
    model.save_pretrained(tmp_path)
    video = torch.randint(0, 256, (3, 5, 16, 16), dtype=torch.uint8)
    with torch.no_grad():
        raw = model.eval().encode(video[None].float() / 127.5 - 1).latent_dist.mode()[0]
    latents = DiffusersVae(str(tmp_path), GEOMETRIES["cogvideox"]).encode(video)
    assert latents.shape == (2, 2, 2, 2) and torch.allclose(latents, raw * 0.25, atol=1e-5)


def test_several_ranks_want_an_index_first(
    shards: list[str], vae: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    command = ["encode", *shards, "--output", str(tmp_path / "out"), "--vae", str(vae), "--subfolder", "vae"]
    assert main([*command, "--index", str(tmp_path / "none")]) == 1
    assert "2 of the shards" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_under_torchrun(shards: list[str], vae: Path, tmp_path: Path) -> None:
    table = tmp_path / "table"
    assert main(["index", *shards, "--index", str(table)]) == 0
    program = "import sys; from lightning_videoscale.cli import main; sys.exit(main())"
    (tmp_path / "videoscale.py").write_text(program)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    options = ["--samples-per-shard", "2", "--output", str(tmp_path / "out")]
    command = ["encode", *shards, "--index", str(table), "--vae", str(vae), "--subfolder", "vae", "--sizes", "32x48"]
    for _ in range(2):
        subprocess.run([*launch, str(tmp_path / "videoscale.py"), *command, *options], check=True, timeout=240, env=env)
    index: ShardIndex = index_shards(sorted(map(str, (tmp_path / "out").glob("*.tar"))))
    assert len(index) == 8 and np.unique(index.samples.keys).size == 8


def test_what_a_server_did_not_send_is_not_left_out_for_good(
    shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage.open_shard, "__defaults__", ((0.01,),))
    _encode(shards, tmp_path / "here")
    with serving({Path(shard).name: Path(shard).read_bytes() for shard in shards}) as server:
        index = index_shards([f"{server.url}/{name}" for name in server.files])
        server.broken = ("001.tar", index.samples[6].members["mp4"].offset)
        with pytest.raises(ShardError, match=r"001\.tar .*2 attempts"):
            _encode(index, tmp_path / "there")
        assert {"000000.tar", "000001.tar"} < set(_content(tmp_path / "there"))
        server.broken = None
        _encode(index, tmp_path / "there")
    assert _content(tmp_path / "there") == _content(tmp_path / "here")


def test_embeddings_beside_the_latents(tmp_path: Path) -> None:
    """As `OnlineEncoder` makes them, but stored without what fills them up."""
    pipeline, captions = save_pipeline(tmp_path / "pipeline"), ["1 2 3", "", "1 2 3 4 5 6 7"]
    films = [film([numbered(i, 32, 48)]) for i in range(3)]
    samples: list[dict[str, Any]] = [
        {"__key__": f"film{i}", "mp4": data, "json": json.dumps({"prompt": caption}).encode()}
        for i, (data, caption) in enumerate(zip(films, captions, strict=True))
    ]
    shard, output = write_shard(tmp_path / "films/000.tar", samples), tmp_path / "latents"
    arguments = ["--vae", str(pipeline), "--subfolder", "vae", "--sizes", "32x48", "--workers", "0"]
    text_arguments = ["--text-encoder", str(pipeline), "--max-length", str(MAX_LENGTH)]
    assert main(["encode", str(shard), "--output", str(output), *arguments, *text_arguments]) == 0

    text = TransformersText(str(pipeline), MAX_LENGTH)
    expected, empty = text.encode(captions), text.encode([""])
    data = VideoDataModule(str(output / "*.tar"), budget=BucketBudget(m_mem=10_000, m_comp=1e9))
    data.prepare_data()
    data.setup("fit")
    (batch,) = data.train_dataloader()
    order = [int(name[-1]) for name in batch["sample_ids"]]
    assert batch["text_embeds"].dtype == torch.bfloat16 and torch.equal(batch["text_embeds"], expected.embeds[order])
    assert torch.equal(batch["text_mask"], expected.mask[order])
    saved = load_file(output / "empty_prompt.safetensors")
    assert torch.equal(saved["text_embeds"], empty.embeds[0]) and torch.equal(saved["text_mask"], empty.mask[0])
    with pytest.raises(ShardError, match="text_encoder"):
        latents = DiffusersVae(str(pipeline), GEOMETRIES["wan2.1"], subfolder="vae")
        encode_shards(index_shards([str(shard)]), latents, output, EncodeSettings(POLICY))
