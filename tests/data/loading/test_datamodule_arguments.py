"""What may be given to the DataModule, and what is refused at once."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.cli import LightningCLI
from PIL import Image

from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data import ShardIndex, VideoDataModule
from tests.data.clips import clip, write_shard, write_shards
from tests.data.training import Witness, trainer_with

BUDGET = BucketBudget(m_mem=160, m_comp=160 * 80)
SAMPLES = 50


@pytest.fixture
def shards(tmp_path: Path) -> str:
    return write_shards(tmp_path / "train", SAMPLES)


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter", "ignore:No seed found", "ignore:\n")
@pytest.mark.parametrize("encoder", ["lightning_videoscale.data.OnlineEncoder", "torch.nn.Identity"])
def test_every_argument_can_be_given_on_the_command_line(shards: str, tmp_path: Path, encoder: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        f"""
trainer: {{accelerator: cpu, max_epochs: 1, accumulate_grad_batches: 2, logger: false, enable_checkpointing: false,
  enable_progress_bar: false, callbacks: [{{class_path: lightning_videoscale.callbacks.LossWeighting}}]}}
data:
  shards: {shards}
  val_shards: null
  predict_shards: null
  budget: {{m_mem: 160, m_comp: 12800.0, p: 2.0}}
  index: {tmp_path}/index.json
  balance: dual_constraint
  geometry: wan2.1
  shape_policy: {{areas: [399360], fps: 16.0}}
  step_time: null
  loss_weighting: token
  loss_normalization: epoch
  shard_window: 8
  min_diversity: 0.9
  encode: {{class_path: {encoder}}}
  seed: 3
  num_workers: 0
"""
    )
    arguments = ["fit", "--config", str(config), "--data.micro_batches=2", "--data.budget.m_mem=80"]
    cli = LightningCLI(Witness, VideoDataModule, args=arguments, save_config_callback=None)
    assert sorted(chain(*cli.model.batches[0])) == sorted(f"{i % 2:03}.tar/clip{i:05}" for i in range(SAMPLES))
    assert max(meta.samples * meta.sequence_length for meta in cli.model.metas) <= 80
    assert isinstance(cli.trainer, pl.Trainer)
    assert cli.datamodule.planner.min_diversity == 0.9


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_positive_number_is_refused_at_once(shards: str, weight: float) -> None:
    with pytest.raises(ValueError, match=r"'b\.tar' has the weight"):
        VideoDataModule({shards: 1.0, "b.tar": weight}, budget=BUDGET)


def test_a_dataset_of_which_nothing_can_be_trained_on_is_named(shards: str, tmp_path: Path) -> None:
    broken = write_shard(tmp_path / "broken.tar", [{"__key__": "a", "mp4": b"no video"}])
    for weights in ({str(broken): 1.0, shards: 1.0}, {shards: 1.0, str(broken): 1.0}):
        number = list(weights).index(str(broken)) + 1
        with pytest.raises(ValueError, match=rf"datasets \[{number}\] of 2"):
            trainer_with().fit(Witness(), VideoDataModule(weights, budget=BUDGET))


@pytest.mark.parametrize("shards", [lambda file: file, lambda file: file.parent.glob("*.tar")])
def test_shards_may_be_paths(tmp_path: Path, shards: Callable[[Path], Any]) -> None:
    file = write_shard(tmp_path / "000.tar", [clip(i) for i in range(4)])
    module = Witness()
    trainer_with().fit(module, VideoDataModule(shards(file), budget=BUDGET, val_shards=shards(file)))
    assert len(list(chain(*module.batches[0]))) == len(list(chain(*module.validated[-1]))) == 4


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"balance": "plan"}, "balance='plan'"),
        ({"loss_weighting": "samples"}, "loss_weighting='samples'"),
        ({"loss_normalization": "steps"}, "loss_normalization='steps'"),
        ({"seed": -1}, "seed=-1 .* at least 0"),
        ({"seed": 1.5}, r"seed=1\.5 .* whole"),
        ({"micro_batches": 0}, "micro_batches=0 .* at least 1"),
        ({"shard_window": -64}, "shard_window=-64 .* at least 1"),
        ({"window": 1.5}, r"window=1\.5 .* whole"),
        ({"window": float("inf")}, "window=inf .* whole"),
        ({"window": "1000"}, "window='1000' .* whole"),
        ({"min_diversity": 80}, "min_diversity=80 .* between 0 and 1"),
        ({"min_diversity": "much"}, "min_diversity='much' .* between 0 and 1"),
        ({"val_shards": {"a.tar": 1.0, "b.tar": 2.0}}, r"val_shards=.* 2\.0.* val_shards=\['a\.tar', 'b\.tar'\]"),
        ({"predict_shards": {"a.tar": 1.0}}, r"predict_shards=\['a\.tar'\]"),
        ({"budget": 4096}, "budget=4096 .*'auto'.*BucketBudget.*AutoBudget"),
    ],
)
def test_wrong_settings_are_said_before_anything_is_read(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VideoDataModule("none.tar", **({"budget": BUDGET} | setting))


@pytest.mark.parametrize("budget", ["auto", BUDGET])
def test_shards_of_nothing_but_too_small_pictures_are_refused(tmp_path: Path, budget: Any) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (4, 4)).save(picture, "PNG")
    shard = write_shard(tmp_path / "0.tar", [{"__key__": "tiny", "png": picture.getvalue(), "txt": b""}])
    with pytest.raises(ValueError, match=r"1 samples .*'0.tar/tiny' of 4x4"):
        trainer_with().fit(Witness(), VideoDataModule(str(shard), budget=budget))


def test_counts_are_whole_numbers_of_any_type(shards: str) -> None:
    module = Witness()
    trainer_with().fit(module, VideoDataModule(shards, budget=BUDGET, shard_window=8.0, window=16.0))  # type: ignore[arg-type]
    assert len(list(chain(*module.batches[0]))) == SAMPLES


def test_a_path_that_begins_at_home_leads_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It made a folder called `~`."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write_shards(tmp_path / "home" / "clips", 8)
    data = VideoDataModule("~/clips/*.tar", "~/kept/clips.arrow", budget=BUDGET)
    data.prepare_data()
    data.setup("fit")
    assert len(data.index) == len(ShardIndex.load(tmp_path / "home/kept/clips.arrow")) == 8
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize("argument", ["index", "captions"])
def test_tables_behind_a_url_are_refused(argument: str) -> None:
    """An index made a local folder called `s3:`."""
    with pytest.raises(ValueError, match=f"{argument}='s3://bucket/table'"):
        VideoDataModule("none.tar", budget=BUDGET, **{argument: "s3://bucket/table"})  # type: ignore[arg-type]


def test_one_without_validation_is_the_same_in_another_process(tmp_path: Path) -> None:
    """As `ddp_spawn` and clusters that pickle it make it."""
    data = VideoDataModule(write_shards(tmp_path / "train", 8, shards=1), budget=BucketBudget(160, 160 * 80))
    again = pickle.loads(pickle.dumps(data))
    trainer_with(max_steps=1).fit(Witness(), again)
