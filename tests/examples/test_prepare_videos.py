"""Shards of latents from a folder of footage, written once and whole."""

import shutil

import numpy as np
import pytest
import torch
import webdataset
from patch_codec import PatchCodec
from PIL import Image
from prepare_videos import main

from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data import VideoDataModule
from tests.examples.footage import moving_square, write_video


def samples_of(folder):
    shards = sorted(str(path) for path in folder.glob("*.tar"))
    return list(webdataset.WebDataset(shards, shardshuffle=False, empty_check=False).decode())


def test_a_folder_becomes_shards(tmp_path, footage, capsys):
    mixed = tmp_path / "mixed"
    shutil.copytree(footage, mixed)
    Image.fromarray(moving_square(1, 80, 80)[0]).save(mixed / "a_photo-of mine.png")
    (mixed / "landscape.txt").write_text("a square goes right\n", encoding="utf-8")
    (mixed / "broken.mp4").write_bytes(b"no video at all")
    main(["--output", str(tmp_path / "shards"), "--videos", str(mixed), "--clips", "48", "--side", "48"])

    printed = capsys.readouterr().out
    assert "broken.mp4: Invalid data" in printed.replace("\n", " ")
    samples = samples_of(tmp_path / "shards")
    shapes = {sample["latents.npy"].shape[1:] for sample in samples}
    assert len(samples) == 49
    assert len(shapes) >= 6
    assert {shape[0] for shape in shapes} == {1, 3, 5}
    for sample in samples:
        latents = sample["latents.npy"]
        assert latents.dtype == np.float16
        assert latents.shape[0] == PatchCodec().channels
        assert [sample["json"][side] for side in ("frames", "height", "width")] == list(latents.shape[1:])
    captions = {sample["json"]["source"]: sample["txt"] for sample in samples}
    assert captions["landscape.mp4"] == "a square goes right"
    assert captions["a_photo-of mine.png"] == "a photograph of a photo of mine"
    assert f"{len(samples)} clips and stills of {len(shapes)} shapes" in printed
    assert "4 files (63 frames decoded), 1 skipped" in printed


def test_clips_begin_where_they_are_told(tmp_path, footage):
    main(["--output", str(tmp_path / "shards"), "--videos", str(footage), "--clips", "12", "--start", "4"])
    pixels = [sample["json"]["pixels"] for sample in samples_of(tmp_path / "shards")]
    # square.webm has 18 frames, so that 17 of them begin at the second at the latest.
    assert {(made["frames"], made["start"]) for made in pixels} >= {(1, 4), (9, 4), (17, 1)}


def test_the_latents_are_those_of_the_clip(tmp_path, footage):
    main(["--output", str(tmp_path / "shards"), "--videos", str(footage), "--clips", "12", "--frames", "9"])
    sample = next(s for s in samples_of(tmp_path / "shards") if s["json"]["source"] == "square.webm")
    pixels = PatchCodec().decode(torch.from_numpy(sample["latents.npy"]).float()[None])[0]
    made = sample["json"]["pixels"]
    top, left, height, width = made["window"]
    original = np.stack(moving_square(18, 64, 64)[made["start"] : made["start"] + 9])
    window = torch.from_numpy(original[:, top : top + height, left : left + width]).permute(0, 3, 1, 2) / 127.5 - 1
    resized = torch.nn.functional.interpolate(window, pixels.shape[2:], mode="bilinear", antialias=True)
    assert (pixels - resized.transpose(0, 1)).abs().mean() < 0.06


def test_the_datamodule_reads_them(tmp_path, footage):
    main(["--output", str(tmp_path / "shards"), "--videos", str(footage), "--clips", "24", "--side", "32"])
    data = VideoDataModule(str(tmp_path / "shards" / "*.tar"), budget=BucketBudget(m_mem=500, m_comp=60_000))
    data.setup("fit")
    batches = list(data.train_dataloader())
    assert sum(len(batch["sample_ids"]) for batch in batches) == 24
    assert max(batch["meta"].samples for batch in batches) > 1
    everything = torch.cat([batch["latents"].flatten() for batch in batches])
    assert 0.5 < everything.std() < 2


def test_it_is_done_once_per_settings(tmp_path, footage, capsys):
    arguments = ["--output", str(tmp_path / "shards"), "--videos", str(footage), "--clips", "6", "--frames", "5"]
    main(arguments)
    first = {path.name: path.read_bytes() for path in (tmp_path / "shards").iterdir()}
    main(arguments)
    assert "already prepared" in capsys.readouterr().out
    (tmp_path / "shards.partial").mkdir()  # an interrupted run leaves its draft behind
    main([*arguments, "--side", "32"])
    again = {path.name: path.read_bytes() for path in (tmp_path / "shards").iterdir()}
    assert first.keys() == again.keys()
    assert first["000.tar"] != again["000.tar"]
    assert not (tmp_path / "shards.partial").exists()


def test_a_caption_that_was_edited_is_read_again(tmp_path, footage):
    videos = shutil.copytree(footage, tmp_path / "videos")
    for text in ("a square goes right", "a square goes left"):
        (videos / "landscape.txt").write_text(text, encoding="utf-8")
        main(["--output", str(tmp_path / "shards"), "--videos", str(videos), "--clips", "6", "--frames", "5"])
        captions = {sample["json"]["source"]: sample["txt"] for sample in samples_of(tmp_path / "shards")}
        assert captions["landscape.mp4"] == text


def test_equal_settings_give_equal_bytes(tmp_path, footage):
    for name in ("one", "two"):
        main(["--output", str(tmp_path / name), "--videos", str(footage), "--clips", "6", "--frames", "5"])
    assert (tmp_path / "one" / "002.tar").read_bytes() == (tmp_path / "two" / "002.tar").read_bytes()


def test_a_folder_of_something_else_is_left_alone(tmp_path, footage):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(SystemExit, match="not written by this script"):
        main(["--output", str(tmp_path), "--videos", str(footage)])
    assert (tmp_path / "thesis.txt").exists()


def test_nothing_readable_is_an_error(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "broken.mp4").write_bytes(b"no video at all")
    with pytest.raises(SystemExit, match="decoded"):
        main(["--output", str(tmp_path / "out"), "--videos", str(tmp_path / "in")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [["--frames", "8"], ["--shards", "0"]])
def test_settings_that_cannot_be_met_are_refused(tmp_path, arguments):
    with pytest.raises(SystemExit, match="2"):
        main(["--output", str(tmp_path / "out"), *arguments])


def test_wans_vae_takes_the_place_of_the_codec(tmp_path):
    from diffusers import AutoencoderKLWan

    torch.manual_seed(0)
    scales = {"latents_mean": [0.1] * 4, "latents_std": [2.0] * 4}
    vae = AutoencoderKLWan(base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **scales)
    vae.save_pretrained(tmp_path / "vae")
    write_video(tmp_path / "clip.mp4", moving_square(9, 48, 64))
    options = ["--vae", str(tmp_path / "vae"), "--clips", "4", "--frames", "1", "9", "--side", "48"]
    main(["--output", str(tmp_path / "shards"), "--videos", str(tmp_path), *options])

    for sample in samples_of(tmp_path / "shards"):
        made = sample["json"]["pixels"]
        assert sample["latents.npy"].shape == (
            4,
            (made["frames"] - 1) // 4 + 1,
            made["height"] // 8,
            made["width"] // 8,
        )

    from wan_vae_codec import WanVaeCodec

    codec = WanVaeCodec(tmp_path / "vae")
    pixels = torch.rand(1, 3, 5, 32, 48) * 2 - 1
    expected = (vae.eval().encode(pixels).latent_dist.mode() - 0.1) / 2
    torch.testing.assert_close(codec.encode(pixels), expected)
    assert codec.decode(codec.encode(pixels)).shape == pixels.shape
