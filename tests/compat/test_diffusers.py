"""What diffusers' models declare, in the installed version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from torch import nn

from lightning_videoscale.compat.diffusers import (
    CLASS_NAME,
    block_classes,
    dispatch_settings,
    kept_in_float32,
)
from lightning_videoscale.compat.names import MissingNameError
from tests.models import tiny_wan


def test_wan_declares_its_blocks_and_what_stays_in_float32() -> None:
    wan = tiny_wan()
    assert {type(block).__name__ for block in wan.blocks} == block_classes(wan)
    assert "scale_shift_table" in kept_in_float32(wan)
    assert "norm2" in kept_in_float32(wan)


def test_another_network_declares_nothing() -> None:
    assert block_classes(nn.Linear(1, 1)) == kept_in_float32(nn.Linear(1, 1)) == set()


def test_a_processor_tells_the_backend_that_was_chosen() -> None:
    wan = tiny_wan()
    assert dispatch_settings(wan.blocks[0].attn1.processor) == (None, None)
    wan.set_attention_backend("native")
    assert dispatch_settings(wan.blocks[0].attn1.processor) == (AttentionBackendName.NATIVE, None)
    with pytest.raises(MissingNameError, match=r"0\.37"):
        dispatch_settings(torch.nn.Identity())


def test_a_configuration_file_names_the_class(tmp_path: Path) -> None:
    tiny_wan().save_config(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())[CLASS_NAME] == "WanTransformer3DModel"
