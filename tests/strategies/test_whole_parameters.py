"""Networks of sharded parameters are saved as any other, by their own methods or within `whole_parameters`."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import peft
import pytest
import torch
from diffusers import WanTransformer3DModel
from lightning.pytorch.strategies import Strategy
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_videoscale.strategies import SequenceParallelDeepSpeedStrategy
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import RectifiedFlow
from tests.distributed.zero import deepspeed_on_cpu, needs_deepspeed
from tests.models import tiny_wan
from tests.strategies.fsdp2.training import clips, ddp, fsdp2, trainer

Ranks = Callable[[int], ProcessPool]


class Adapted(RectifiedFlow):
    """Trains an adapter of diffusers' way, of peft's way, or the network itself."""

    def __init__(self, adapter: str | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["to_q", "net.2"], init_lora_weights=False)
        if adapter == "diffusers":
            self.transformer.requires_grad_(False)
            self.transformer.add_adapter(config)
        elif adapter == "peft":
            self.transformer = peft.get_peft_model(self.transformer, config)


def zero3() -> SequenceParallelDeepSpeedStrategy:
    return SequenceParallelDeepSpeedStrategy(stage=3)


def save_after_fit(strategy: Callable[..., Strategy], adapter: str | None, folder: Path) -> dict[str, Tensor]:
    """Returns the weights by the names that one device gives them."""
    module = Adapted(adapter)
    with deepspeed_on_cpu():
        runner = trainer(strategy())
        runner.fit(module, clips())
        save = module.transformer.save_lora_adapter if adapter == "diffusers" else module.transformer.save_pretrained
        save(folder)
    assert isinstance(module.transformer, FSDPModule) == (strategy is fsdp2 and adapter != "peft"), "sharded as before"
    return {name: x.detach().clone() for name, x in module.state_dict().items()}


def load_saved(adapter: str | None, folder: Path) -> dict[str, Tensor]:
    """The state of a new module that loads what was saved, as a user would."""
    module = RectifiedFlow()
    if adapter == "diffusers":
        module.transformer.load_lora_adapter(folder, prefix=None, adapter_name="default")
    elif adapter == "peft":
        module.transformer = peft.PeftModel.from_pretrained(module.transformer, folder)
    else:
        module.transformer = WanTransformer3DModel.from_pretrained(folder)
        assert '"WanTransformer3DModel"' in (folder / "config.json").read_text(), "not FSDP2's class"
    return module.state_dict()


@pytest.mark.parametrize("adapter", ["diffusers", "peft", None])
@pytest.mark.parametrize("strategy", [fsdp2, pytest.param(zero3, marks=needs_deepspeed)])
def test_networks_save_themselves_after_fit(
    ranks: Ranks, tmp_path: Path, adapter: str | None, strategy: Callable[..., Strategy]
) -> None:
    expected = ranks(1).run(save_after_fit, ddp, adapter, tmp_path / "ddp")[0]
    ranks(2).run(save_after_fit, strategy, adapter, tmp_path / "sharded")
    for folder in (tmp_path / "ddp", tmp_path / "sharded"):
        loaded = load_saved(adapter, folder)
        assert loaded.keys() == expected.keys()
        for name, value in loaded.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=2e-5 if folder.name == "sharded" else 0)
