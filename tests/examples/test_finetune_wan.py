"""Every config of the fine-tuning script trains a small Wan from encoded shards."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from finetune_wan import FinetuneWan, padded
from finetune_wan import main as finetune
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from lightning_videoscale.cli import main
from lightning_videoscale.strategies import read_weights
from tests.data.clips import clip, npy, write_shard
from tests.distributed.pool import ProcessPool
from tests.examples.conftest import EXAMPLES
from tests.models import tiny_wan

CONFIGS = sorted((EXAMPLES / "configs").glob("finetune_wan_*.yaml"))
ROOT = EXAMPLES.parent
MEASURED = (ROOT / "docs" / "measured.md").read_text()
PREDICTED = (ROOT / "docs" / "scaling.md").read_text().replace("\N{MULTIPLICATION SIGN}", "times")
HERE = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.max_steps=2", "--trainer.val_check_interval=1"]
HERE += ["--trainer.log_every_n_steps=1", "--trainer.enable_progress_bar=false", "--data.num_workers=0"]
HERE += ["--data.budget={m_mem: 64, m_comp: 4096, p: 2}"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With shards of latents, and Wan's names as folders of small weights."""
    text = npy(np.ones((5, 16), np.float32))
    for shard in range(2):
        samples = [clip(i, (4, 2, 4, 4)) | {"text_embeds.npy": text} for i in range(4)]
        write_shard(tmp_path / f"latents/{shard:06}.tar", samples)
    save_file({"text_embeds": torch.ones(1, 16)}, tmp_path / "latents/empty_prompt.safetensors")
    for size in ("1.3B", "14B"):
        tiny_wan(num_layers=1).save_pretrained(tmp_path / f"Wan-AI/Wan2.1-T2V-{size}-Diffusers/transformer")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "config",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.full] if "14b" in path.stem else []) for path in CONFIGS],
)
def test_a_config_trains_and_exports(folder: Path, config: Path) -> None:
    finetune(["fit", "--config", str(config), *HERE])
    check_files(folder, config)


def finetune_in(folder: Path, *arguments: str) -> None:
    os.chdir(folder)
    finetune([*arguments])


def test_ranks_share_every_sequence(folder: Path, ranks: Callable[[int], ProcessPool]) -> None:
    """As on several GPUs: parameters, states and averages are sharded, validated with, saved and exported."""
    (config,) = (path for path in CONFIGS if path.stem == "finetune_wan_1_3b")
    ranks(2).run(finetune_in, folder, "fit", "--config", str(config), *HERE, "--trainer.devices=2")
    check_files(folder, config)


def check_files(folder: Path, config: Path) -> None:
    """What a run leaves: losses, a checkpoint of what trains, and averages that are exported."""
    (checkpoint,) = folder.glob("runs/*/last.ckpt")
    kept = read_weights(checkpoint, "transformer")
    assert all("lora_" in name for name in kept) == ("lora" in config.stem)
    events = EventAccumulator(str(next(folder.glob("runs/*/version_0")))).Reload()
    assert {"train/loss", "val/loss"} <= set(events.Tags()["scalars"])
    assert main(["export", str(checkpoint), "exported"]) == 0
    written = "pytorch_lora_weights.safetensors" if "lora" in config.stem else "diffusion_pytorch_model.safetensors"
    exported = load_file(folder / "exported" / written)
    averages = read_weights(checkpoint, "transformer", averaged=True)
    named = {name.replace(".default.", ".").removeprefix("transformer."): value for name, value in averages.items()}
    assert any(not torch.equal(averages[name], kept[name]) for name in kept)
    for name, value in exported.items():
        assert torch.equal(value, named[name.removeprefix("transformer.")]), name


def test_validation_losses_can_be_compared(folder: Path) -> None:
    module = FinetuneWan("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", learning_rate=0.0)
    batch: dict[str, Any] = {"latents": torch.randn(2, 4, 2, 4, 4), "text_embeds": torch.randn(2, 5, 16)}
    loader = DataLoader([batch], batch_size=None)  # type: ignore[arg-type]
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    first, second = (trainer.validate(module, loader, verbose=False)[0]["val/loss"] for _ in range(2))
    assert first == second


def test_times_are_shifted_towards_noise_and_captions_are_as_long_as_wans() -> None:
    seen: list[torch.Tensor] = []

    class Network(torch.nn.Module):
        def forward(self, noisy: Any, time: Any, text: Any, return_dict: bool) -> Any:
            seen.extend([time, text])
            return (noisy,)

    module = FinetuneWan("", shift=3.0)
    module.transformer = Network()
    latents = torch.ones(1, 4, 1, 2, 2)
    # At half of the way, shifted by 3: sigma = 1.5 / 2. The network's answer is the noisy latents themselves.
    loss = module.loss(latents, padded(torch.zeros(1, 5, 16)), torch.tensor([0.5]), torch.zeros_like(latents))
    assert seen[0].tolist() == [750.0] and seen[1].shape == (1, 512, 16)
    assert loss.item() == pytest.approx((0.25 + 1.0) ** 2)


def results(name: str, config: str) -> list[dict[str, Any]]:
    found = json.loads((ROOT / "benchmarks" / "results" / f"{name}-h200.json").read_text())["rows"]
    return [row for row in found if row["config"] == config and row.get("kind") != "check"]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_what_a_config_takes_is_what_files_say(config: Path) -> None:
    """Measured on one GPU, predicted on four and eight: in the config, in the table of examples, and in the docs."""
    header, examples = config.read_text(), (EXAMPLES / "README.md").read_text()
    one = "too large"
    for row in results("examples/finetuning", config.stem):
        seconds, gib = f"{row['step_ms'] / 1e3:.2f}", f"{row['peak_allocated_gib']:.1f}"
        one = f"{seconds} s, {gib} GiB"
        assert f"{seconds} s and {gib} GiB measured on one H200" in header
        assert f" | {seconds} | {gib} |" in MEASURED
    predicted = {(row["gpus"], row["tokens"]): row for row in results("predictions/finetuning", config.stem)}
    if one == "too large":
        assert predicted[1, 32_760]["peak_gib"] > 140 and "too large for one GPU" in header
    said = {place: f"{row['step_ms'] / 1e3:.2f} s, {row['peak_gib']:.1f} GiB" for place, row in predicted.items()}
    four, eight = said[4, 32_760], said[8, 32_760]
    assert f"| {one} | *{four}* | *{eight}* |" in examples
    four, eight = four.replace(",", " and"), eight.replace(",", " and")
    assert f"Predicted, not measured: {four} on four H200s, {eight} on eight" in header
    for tokens in (32_760, 75_600):
        cells = [f"{said[n, tokens]} ({{ulysses}} times {{ring}})".format(**predicted[n, tokens]) for n in (4, 8)]
        length = f"{tokens:_}".replace("_", " ")
        assert f"| `{config.name}` | {length} | {cells[0]} | {cells[1]} |" in PREDICTED
