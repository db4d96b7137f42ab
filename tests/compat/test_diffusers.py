"""What diffusers' models declare, in the installed version."""

from __future__ import annotations

import json
import pkgutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import FirstBlockCacheConfig, MagCacheConfig
from diffusers.hooks._helpers import TransformerBlockRegistry
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn
from torch import nn

from lightning_videoscale.compat.diffusers import (
    CLASS_NAME,
    active_attention_backend,
    attends_by_torch,
    block_classes,
    cache_by_values,
    declare_as,
    dispatch_settings,
    kept_in_float32,
    projection_functions,
)
from lightning_videoscale.compat.names import MissingNameError
from tests.models import tiny_wan

TRANSFORMERS = "diffusers.models.transformers.transformer"


def test_wan_declares_its_blocks_and_what_stays_in_float32() -> None:
    wan = tiny_wan()
    assert {type(block).__name__ for block in wan.blocks} == block_classes(wan)
    assert "scale_shift_table" in kept_in_float32(wan)
    assert "norm2" in kept_in_float32(wan)


@pytest.mark.parametrize("model", ["flux", "flux2"])
def test_projection_functions_are_in_the_modules_of_flux(model: str) -> None:
    assert all(callable(pkgutil.resolve_name(path)) for path in projection_functions(f"{TRANSFORMERS}_{model}"))


def test_another_network_declares_nothing() -> None:
    assert block_classes(nn.Linear(1, 1)) == kept_in_float32(nn.Linear(1, 1)) == set()


def test_a_processor_tells_the_backend_that_was_chosen() -> None:
    wan = tiny_wan()
    assert dispatch_settings(wan.blocks[0].attn1.processor) == (None, None)
    wan.set_attention_backend("native")
    assert dispatch_settings(wan.blocks[0].attn1.processor) == (AttentionBackendName.NATIVE, None)
    with pytest.raises(MissingNameError, match=r"0\.37"):
        dispatch_settings(torch.nn.Identity())


def test_the_backend_of_processors_that_name_none() -> None:
    assert active_attention_backend() == "native"
    with attention_backend("_native_math"):
        assert active_attention_backend() == "_native_math"
    assert active_attention_backend() == "native"


def test_torch_attends_by_the_native_backend_alone() -> None:
    assert attends_by_torch(dispatch_attention_fn, None)  # the active one
    assert attends_by_torch(dispatch_attention_fn, AttentionBackendName.NATIVE)
    assert not attends_by_torch(dispatch_attention_fn, AttentionBackendName.FLEX)
    assert not attends_by_torch(lambda *args, **kwargs: dispatch_attention_fn(*args, **kwargs), None)
    with attention_backend("_native_math"):
        assert not attends_by_torch(dispatch_attention_fn, None)


def test_a_subclass_of_a_block_is_declared_as_the_block_is() -> None:
    block = type(tiny_wan().blocks[0])
    subclass, unknown = type("Subclass", (block,), {}), type("Unknown", (nn.Identity,), {})
    declare_as(subclass, block)
    declare_as(unknown, nn.Identity)
    assert TransformerBlockRegistry.get(subclass) == replace(TransformerBlockRegistry.get(block), _cls=subclass)
    with pytest.raises(ValueError, match="Unknown"):
        TransformerBlockRegistry.get(unknown)


def test_a_configuration_file_names_the_class(tmp_path: Path) -> None:
    tiny_wan().save_config(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())[CLASS_NAME] == "WanTransformer3DModel"


def test_a_cache_that_decides_by_values_is_known() -> None:
    wan = tiny_wan()
    assert cache_by_values(wan) is None
    wan.enable_cache(MagCacheConfig(num_inference_steps=4, mag_ratios=[1.0] * 4))
    assert cache_by_values(wan) is None
    wan.disable_cache()
    wan.enable_cache(FirstBlockCacheConfig())
    assert cache_by_values(wan) == "FirstBlockCacheConfig"
