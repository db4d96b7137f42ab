"""Every config trains; the demo in the processes and with the command that a user would start."""

import re
from pathlib import Path

from PIL import Image
from prepare_videos import main as prepare_videos
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.examples.conftest import EXAMPLES
from tests.scripts import run_forked

CONFIGS = EXAMPLES / "configs"
SMALL_MODEL = ["--model.config.num_layers=1", "--model.config.ffn_dim=64"]


CLIPS = ["--clips", "16", "--side", "32"]


def test_the_demo_trains_in_two_processes(tmp_path, run_example, footage):
    run_example("prepare_videos.py", "--output", "demo_data/shards", "--videos", footage, *CLIPS)
    short = ["--trainer.max_steps=8", "--trainer.log_every_n_steps=2", "--model.warmup_steps=1"]
    validate = ["--trainer.val_check_interval=4", "--trainer.limit_val_batches=1"]
    printed = run_example("train_wan.py", "fit", "--config", CONFIGS / "demo.yaml", *short, *validate, *SMALL_MODEL)

    table = dict(re.findall(r"│ (\S[^│]*?) +│ (\S[^│]*?) +│", printed))
    assert float(table["loss, mean of the first tenth"]) > float(table["loss, mean of the last tenth"]) > 0
    assert table["batch streams x ranks per sequence"] == "1 x 2"
    assert int(table["samples seen"]) >= 8
    assert {"last / first", "wall time", "tokens/s", "CV_step", "Compute CV"} < table.keys()
    paths = {name: tmp_path / path for name, path in re.findall(r"^(\w+): (demo_runs/.*?)\s*$", printed, re.MULTILINE)}
    assert paths["checkpoint"].suffix == ".ckpt"
    assert (paths["checkpoint"] / "meta.pt").is_file()
    with Image.open(paths["picture"]) as picture:
        assert min(picture.size) > 500
    assert "8 steps in" in paths["report"].read_text()
    events = EventAccumulator(str(paths["TensorBoard"])).Reload()
    assert {"train/loss", "val/loss", "balance/cv_step", "throughput/tokens_per_second"} <= set(
        events.Tags()["scalars"]
    )


def test_wan_1_3b_trains(tmp_path, footage):
    prepare_videos(["--output", str(tmp_path / "data" / "shards"), "--videos", str(footage), *CLIPS])
    on_this_machine = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy.ulysses_size=1"]
    patch_codec = ["--model.config.in_channels=48", "--model.config.out_channels=48"]
    shrunk = ["--trainer.fast_dev_run=2", "--data.num_workers=0", "--model.config.num_attention_heads=2", *SMALL_MODEL]
    config = ["--config", str(CONFIGS / "wan_1_3b.yaml")]
    options = [*on_this_machine, *patch_codec, *shrunk]
    printed = run_forked(tmp_path, EXAMPLES / "train_wan.py", "fit", *config, *options)
    assert "WanRectifiedFlow after 1 steps" in printed.stdout


def test_every_config_is_tested():
    tested = Path(__file__).read_text()
    assert all(f'"{config.name}"' in tested for config in CONFIGS.glob("*.yaml"))
