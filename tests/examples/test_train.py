"""Every config trains; the demo in the processes and with the command that a user would start."""

import re
from contextlib import chdir
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
import yaml
from diffusers.pipelines.ltx.pipeline_ltx import LTXPipeline
from PIL import Image
from prepare_videos import main as prepare_videos
from rectified_flow import PLACES, HashedWords, RectifiedFlow, places
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from train import main as train
from video_transformers import build, from_tokens, to_tokens

from lightning_videoscale.cost.geometry import ModelGeometry
from lightning_videoscale.report.reading import read_run
from tests.examples.conftest import EXAMPLES
from tests.scripts import run_forked

CONFIGS = EXAMPLES / "configs"
SMALL_MODEL = ["--model.config.num_layers=1", "--model.config.ffn_dim=64"]


CLIPS = ["--clips", "16", "--side", "32"]


def test_the_demo_compares_three_runs_in_two_processes(tmp_path, run_example, footage):
    prepare_videos(["--output", str(tmp_path / "demo_data/shards"), "--videos", str(footage), *CLIPS])
    short = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--trainer.log_every_n_steps=1"]
    printed = run_example("demo.py", "--config", CONFIGS / "demo.yaml", *short, *SMALL_MODEL)

    table = printed.partition("The same clips")[2]
    rows = {name: figures for name, *figures in re.findall("│ (\\w+) +" + "│ *([^│]+?) *" * 5 + "│", table)}
    assert list(rows) == ["equal_token", "planned", "split"]
    paths = {
        name: tmp_path / path for name, path in re.findall(r"^([a-z_ ]+): (demo_runs/.*?)\s*$", printed, re.MULTILINE)
    }
    for name, (rate, spread, waiting, exchange, loss) in rows.items():
        run = read_run(paths[f"report of {name}"].parent)
        tokens, seconds = (sum(window[key] for window in run.of("window")) for key in ("tokens", "seconds"))
        assert float(rate.replace(",", "")) == pytest.approx(tokens / seconds, abs=1)
        assert float(loss) == pytest.approx(run.last("window")["loss"], abs=1e-3)
        balanced = [run.last("plan")["balance"], run.last("plan")["dp_size"]]
        assert balanced == ([name, 2] if name != "split" else ["planned", 1])
        assert (spread == waiting == "-") == (name == "split") and (exchange == "-") == (name != "split")
        assert f"{6 if name == 'split' else 2} steps in" in paths[f"report of {name}"].read_text()
    with Image.open(paths["picture"]) as picture:
        assert min(picture.size) > 400
    events = EventAccumulator(str(paths["report of split"].parent)).Reload()
    assert {"train/loss", "balance/cv_step", "throughput/tokens_per_second"} <= set(events.Tags()["scalars"])
    assert list(paths["report of split"].parent.parent.glob("**/*.ckpt/meta.pt"))


def test_wan_1_3b_trains(tmp_path, footage):
    prepare_videos(["--output", str(tmp_path / "data" / "shards"), "--videos", str(footage), *CLIPS])
    on_this_machine = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy.ulysses_size=1"]
    patch_codec = ["--model.config.in_channels=192", "--model.config.out_channels=192"]
    shrunk = ["--trainer.fast_dev_run=2", "--data.num_workers=0", "--model.config.num_attention_heads=2", *SMALL_MODEL]
    config = ["--config", str(CONFIGS / "wan_1_3b.yaml")]
    printed = run_forked(tmp_path, EXAMPLES / "train.py", "fit", *config, *on_this_machine, *patch_codec, *shrunk)
    assert "RectifiedFlow after 1 steps" in printed.stdout


class Losses(pl.Callback):
    """Of this rank's training steps, in order."""

    found: ClassVar[list[float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self.found.append(float(outputs["loss"]))


def losses(config: Path, folder: Path, devices: int, *others: str) -> list[float]:
    Losses.found = []
    run = [f"--trainer.devices={devices}", f"--trainer.default_root_dir={mkdtemp(dir=folder)}"]
    callbacks = "--trainer.callbacks=[{class_path: tests.examples.test_train.Losses}]"
    quiet = ["--trainer.logger=false", "--trainer.enable_progress_bar=false", "--trainer.enable_checkpointing=false"]
    steps = ["--trainer.max_steps=2", "--trainer.limit_val_batches=0", "--model.warmup_steps=1"]
    with chdir(folder):
        train(["fit", "--config", str(config), callbacks, *run, *quiet, *steps, *others])
    return Losses.found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, footage):
    folder = tmp_path_factory.mktemp("prepared")
    prepare_videos(["--output", str(folder / "demo_data/shards"), "--videos", str(footage), *CLIPS])
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "demo_ltx.yaml",
        pytest.param("demo_hunyuan_video.yaml", marks=pytest.mark.full),
        pytest.param("demo_cogvideox.yaml", marks=pytest.mark.full),
    ],
)
def test_a_family_trains_on_two_ranks_as_on_one(ranks, prepared, name):
    alone = ranks(1).run(losses, CONFIGS / name, prepared, 1)
    assert len(alone[0]) == 2
    assert alone[0][0] != alone[0][1]
    split = ranks(2).run(losses, CONFIGS / name, prepared, 2)
    if name == "demo_cogvideox.yaml":
        split += ranks(2).run(losses, CONFIGS / name, prepared, 2, "--trainer.strategy=ulysses_fsdp2")
    for rank in split:
        assert rank == pytest.approx(alone[0], rel=1e-5)


@pytest.mark.parametrize("name", ["demo", "demo_hunyuan_video", "demo_ltx", "demo_cogvideox"])
def test_the_planner_counts_the_tokens_that_attend(name, monkeypatch):
    attend = torch.nn.functional.scaled_dot_product_attention
    keys = []

    def counted(query, key, *args, **kwargs):
        keys.append(key.shape[-2])
        return attend(query, key, *args, **kwargs)

    config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    module = RectifiedFlow(**config["model"])
    module.configure_model()
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    velocity = module(torch.randn(2, 192, 3, 8, 12), torch.rand(2), ["a dog runs", ""])
    assert velocity.shape == (2, 192, 3, 8, 12)
    geometry = ModelGeometry(**config["data"].get("geometry", {}))
    assert geometry.sequence_length(3, 8, 12, latents=True) == max(keys)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_sampling_goes_to_what_the_model_predicts(monkeypatch, shift):
    clean, seen = torch.randn(2, 3, 2, 4, 4), []

    def known(name, transformer, noisy, timestep, text):
        assert noisy.shape == (2, 3 + PLACES, 2, 4, 4)
        seen.append(timestep[0].item())
        return clean

    monkeypatch.setattr("rectified_flow.predict", known)
    config = yaml.safe_load((CONFIGS / "demo.yaml").read_text())["model"]
    module = RectifiedFlow(**config | {"shift": shift})
    module.configure_model()
    sampled = module.sample(torch.randn_like(clean), ["", ""], steps=4)
    # Above t = 0.1 the velocity is exact, so that every step stays on the line from the noise to the latents.
    assert torch.allclose(sampled, clean, atol=1e-5)
    assert seen == pytest.approx([1000 * shift * t / (1 + (shift - 1) * t) for t in (1, 0.75, 0.5, 0.25)])


def test_places_are_told_apart():
    channels = places(torch.zeros(2, 3, 5, 12, 20))
    assert channels.shape == (2, PLACES, 5, 12, 20)
    cells = channels[0].flatten(1).T
    distances = torch.cdist(cells, cells) + 1e9 * torch.eye(len(cells))
    assert distances.min() > 1


def test_a_family_that_is_not_written_is_named():
    with pytest.raises(ValueError, match=r"UNet.*WanTransformer3DModel, HunyuanVideoTransformer3DModel"):
        build("UNet3DConditionModel", {})


def test_tokens_are_those_of_ltx():
    latents = torch.randn(2, 3, 4, 6, 8)
    for patch in [(1, 2, 2), (2, 2, 2), (1, 1, 1)]:
        tokens = to_tokens(latents, patch)
        assert torch.equal(tokens, LTXPipeline._pack_latents(latents, patch[1], patch[0]))
        assert torch.equal(from_tokens(tokens, patch, latents.shape), latents)


def test_a_caption_without_words_has_a_token():
    text = HashedWords(4)(["", "two words"])
    assert text.mask.sum(1).tolist() == [1, 2]
    assert torch.equal(text.pooled[1], text.embeddings[1, :2].mean(0))


def test_every_config_is_tested():
    tested = Path(__file__).read_text()
    others = set(CONFIGS.glob("finetune_*.yaml"))  # test_finetune_wan.py
    assert all(f'"{config.name}"' in tested for config in {*CONFIGS.glob("*.yaml")} - others)
