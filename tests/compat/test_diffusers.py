"""What diffusers' models declare, in the installed version."""

from __future__ import annotations

import json
import pkgutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig, MagCacheConfig
from diffusers.hooks._helpers import TransformerBlockRegistry
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_videoscale.compat.diffusers import (
    CLASS_NAME,
    KERNELS_OF_BACKENDS,
    HearsOfBackends,
    active_attention_backend,
    attends_by_torch,
    block_classes,
    cache_by_values,
    chunk_of_feed_forward,
    declare_as,
    dispatch_settings,
    joins_text_masks,
    keep_caches,
    kept_in_float32,
    modulation_method,
    own_attention_backend,
    projection_functions,
)
from lightning_videoscale.compat.names import MissingNameError
from lightning_videoscale.compat.torch.attention import sdpa_choice
from tests.distributed.families.models import qwen_image, sd3
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


def test_what_caches_keep_is_put_back() -> None:
    wan = tiny_wan().eval()
    wan.enable_cache(MagCacheConfig(num_inference_steps=9, mag_ratios=torch.full((9,), 0.9), threshold=0.4))

    def outputs(steps: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        inputs = torch.randn(1, 4, 1, 4, 4), torch.tensor([7.0]), torch.randn(1, 3, 16)
        with torch.no_grad():
            return [wan(inputs[0] + n, *inputs[1:]).sample for n in range(steps)]

    outputs(3)
    put_back = keep_caches(wan)  # with a ratio that steps multiply in place
    first = outputs(4)
    put_back()
    assert all(map(torch.equal, outputs(4), first))
    assert not all(map(torch.equal, outputs(4), first))


def test_a_processor_tells_what_it_was_set_to() -> None:
    wan = tiny_wan()
    processor = wan.blocks[0].attn1.processor
    assert own_attention_backend(processor) is None
    with attention_backend("native"):  # which the model's method else changes for the whole process
        wan.set_attention_backend("_native_math")
        assert own_attention_backend(processor) == "_native_math"
        wan.reset_attention_backend()
        assert own_attention_backend(processor) is None


def test_how_many_tokens_a_block_feeds_forward_at_once() -> None:
    model = sd3.build()
    assert chunk_of_feed_forward(model.transformer_blocks[0]) is None
    model.enable_forward_chunking(5, dim=1)
    assert chunk_of_feed_forward(model.transformer_blocks[0]) == 5
    model.disable_forward_chunking()
    assert chunk_of_feed_forward(model.transformer_blocks[0]) is None


def test_the_mask_that_qwen_image_hands_to_its_blocks() -> None:
    """By what they are called with, of a text of which a part is masked."""
    model, masks = qwen_image.build(), []
    given = qwen_image.inputs(batch=1, text=7)
    given["encoder_hidden_states_mask"][:, 4:] = 0

    def note(block: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        tensors = [kwargs.get("encoder_hidden_states_mask"), *(kwargs.get("joint_attention_kwargs") or {}).values()]
        masks.append([tuple(mask.shape) for mask in tensors if isinstance(mask, torch.Tensor)])

    model.transformer_blocks[0].register_forward_pre_hook(note, with_kwargs=True)
    model(**given)
    tokens = given["hidden_states"].shape[1]
    assert masks == [[(1, 7 + tokens)] if joins_text_masks(model) else [(1, 7)]]


def test_the_method_that_modulates_qwen_images_blocks() -> None:
    block = qwen_image.build().transformer_blocks[0]
    x, values = torch.randn(2, 3, 128), torch.randn(2, 3 * 128)
    shifted, gate = getattr(block, modulation_method())(x, values)
    shift, scale, expected = values.chunk(3, -1)
    torch.testing.assert_close(shifted, x * (1 + scale[:, None]) + shift[:, None])
    torch.testing.assert_close(gate, expected[:, None])


class Hearing(HearsOfBackends):
    def __init__(self) -> None:
        self.heard: list[str | None] = []

    def on_backend(self, name: str | None) -> None:
        self.heard.append(name)


def test_a_processor_hears_of_the_backend_that_is_set() -> None:
    wan, processor = tiny_wan(), Hearing()
    wan.blocks[0].attn1.set_processor(processor)
    with attention_backend("native"):
        wan.set_attention_backend("_native_math")
        assert own_attention_backend(processor) == "_native_math"
        wan.reset_attention_backend()
    assert processor.heard == ["_native_math", None]
    assert own_attention_backend(processor) is None


class Kernels(TorchFunctionMode):
    """Notes which kernels torch's attention may take, and leaves it out."""

    def __init__(self) -> None:
        super().__init__()
        self.left_on: list[frozenset[str] | None] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.left_on.append(sdpa_choice())
        return args[0] if args else kwargs["query"]


@pytest.mark.parametrize("backend", [name for name in KERNELS_OF_BACKENDS if "native" in name])
def test_backends_of_torch_take_the_kernels_that_we_name(backend: str) -> None:
    kernels, x = Kernels(), torch.ones(1, 5, 2, 8)
    with attention_backend(backend), kernels:
        dispatch_attention_fn(x, x, x)
    kernel = KERNELS_OF_BACKENDS[backend]
    assert kernels.left_on == [None if kernel == "sdpa" else {kernel}]


def test_all_backends_that_we_name_can_be_set() -> None:
    assert KERNELS_OF_BACKENDS.keys() < {backend.value for backend in AttentionBackendName}
