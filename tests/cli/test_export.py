"""`videoscale export`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import peft
import pytest
import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_videoscale.cli import main
from lightning_videoscale.strategies import SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy
from lightning_videoscale.strategies.checkpoints.folder import CheckpointError, read_weights
from tests.distributed.pool import ProcessPool
from tests.models import tiny_wan

Ranks = Callable[[int], ProcessPool]


# -- export --------------------------------------------------------------------------------------------------------


class Video(pl.LightningModule):
    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.transformer = tiny_wan(**config)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.transformer(batch, torch.full((len(batch),), 500.0), torch.ones(len(batch), 5, 16)).sample.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train_video(folder: Path) -> Tensor:
    module = Video()
    strategy = SequenceParallelDDPStrategy(activation_checkpointing=True)
    runner = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=dist.get_world_size(), max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    runner.fit(module, DataLoader(torch.ones(2, 4, 2, 4, 4), batch_size=1))
    runner.save_checkpoint(folder / "video.ckpt")
    return look(module.transformer)


@torch.no_grad()
def look(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    clip, text = torch.randn(1, 4, 2, 4, 4, generator=generator), torch.randn(1, 5, 16, generator=generator)
    return model.eval()(clip, torch.tensor([300.0]), text).sample


def test_export_for_from_pretrained(ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = ranks(1).run(train_video, tmp_path)[0]
    assert main(["export", str(tmp_path / "video.ckpt"), str(tmp_path / "wan")]) == 0
    assert "transformer ->" in capsys.readouterr().out
    model = WanTransformer3DModel.from_pretrained(tmp_path / "wan")
    assert torch.equal(look(model), expected)
    assert not torch.equal(look(tiny_wan()), expected)
    assert main(["export", str(tmp_path / "video.ckpt"), str(tmp_path / "vae"), "--module", "vae"]) == 1
    assert "['transformer']" in capsys.readouterr().err.replace("\n", " ")
    assert main(["export", str(tmp_path / "video.ckpt"), str(tmp_path / "averaged"), "--ema"]) == 1
    assert "EMA" in capsys.readouterr().err
    fresh = tiny_wan()
    fresh.load_state_dict(read_weights(tmp_path / "video.ckpt", "transformer"))
    assert torch.equal(look(fresh), expected)
    with pytest.raises(CheckpointError, match=r"'vae'.*\['transformer'\]"):
        read_weights(tmp_path / "video.ckpt", "vae")


# -- adapters --------------------------------------------------------------------------------------------------------


class Adapted(Video):
    def __init__(self, way: str, dora: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["to_q", "net.2"], use_dora=dora, init_lora_weights=False)
        if way == "diffusers":
            self.transformer.requires_grad_(False)
            self.transformer.add_adapter(config, "style")
        elif way == "peft":
            self.transformer = peft.get_peft_model(self.transformer, config)
        else:  # in a module of the user's, of which nobody knows how to build it
            peft.inject_adapter_in_model(config, self.transformer)
            del self.transformer.peft_config


def train_adapted(way: str, dora: bool, folder: Path) -> Tensor:
    module, strategy = Adapted(way, dora), SequenceParallelFSDP2Strategy()
    runner = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=dist.get_world_size(), max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    runner.fit(module, DataLoader(torch.ones(2, 4, 2, 4, 4), batch_size=1))
    runner.save_checkpoint(folder / "video.ckpt")
    return look(module.transformer)


@pytest.mark.parametrize(("way", "dora"), [("diffusers", False), ("peft", True)])
def test_adapters_are_merged_or_exported_alone(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str], way: str, dora: bool
) -> None:
    expected = ranks(2).run(train_adapted, way, dora, tmp_path)[0]
    command = ["export", str(tmp_path / "video.ckpt")]
    assert main([*command, str(tmp_path / "wan")]) == 1
    message = " ".join(capsys.readouterr().err.split())
    assert "--adapters merge" in message and "--adapters alone" in message and len(message) < 400
    assert ("['style']" if way == "diffusers" else "['default']") in message

    assert main([*command, str(tmp_path / "merged"), "--adapters", "merge"]) == 0
    merged = look(WanTransformer3DModel.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(merged, expected, rtol=0, atol=1e-5)

    assert main([*command, str(tmp_path / "alone"), "--adapters", "alone"]) == 0
    if way == "diffusers":
        model = tiny_wan()
        model.load_lora_adapter(tmp_path / "alone", prefix=None, weight_name="pytorch_lora_weights.safetensors")
    else:
        model = peft.PeftModel.from_pretrained(tiny_wan(), tmp_path / "alone")
    torch.testing.assert_close(look(model), expected, rtol=0, atol=1e-5)
    assert not torch.allclose(look(tiny_wan()), expected, atol=1e-3), "the adapter does something"


def test_what_the_checkpoint_does_not_describe_is_said_shortly(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks(2).run(train_adapted, "own", False, tmp_path)
    for options in ([], ["--adapters", "merge"]):
        assert main(["export", str(tmp_path / "video.ckpt"), str(tmp_path / "wan"), *options]) == 1
        message = " ".join(capsys.readouterr().err.split())
        assert len(message) < 600 and ("leave out --adapters" if options else "read_weights") in message
