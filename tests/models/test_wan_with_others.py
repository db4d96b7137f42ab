"""Fused Wan with what else is done to a model: saving, LoRA, selective activation checkpointing, half precision."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig, MagCacheConfig, WanTransformer3DModel
from diffusers.models.attention_dispatch import attention_backend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_videoscale.injection import inject_fused_kernels
from tests.models import gradient_error, tiny_wan
from tests.models.test_wan import prepared, run, text_to_video


def test_saved_and_loaded(tmp_path: Path) -> None:
    with prepared(text_to_video, torch.float32) as (model, inputs):
        inject_fused_kernels(model)
        output, _ = run(model, inputs)
        model.save_pretrained(tmp_path)
        loaded = WanTransformer3DModel.from_pretrained(tmp_path)
        assert torch.equal(run(loaded, inputs)[0], output)  # no trace of the kernels in what was saved
        inject_fused_kernels(loaded)
        assert torch.equal(run(loaded, inputs)[0], output)


CACHES = [
    pytest.param(lambda: FirstBlockCacheConfig(threshold=10.0), id="FirstBlockCache"),
    pytest.param(lambda: MagCacheConfig(threshold=10.0, num_inference_steps=6, mag_ratios=[1.0] * 6), id="MagCache"),
]


@pytest.mark.parametrize("config", CACHES)
def test_caches_of_diffusers_after_the_injection(config: Callable[[], Any]) -> None:
    found = []
    for fused in (False, True):
        with prepared(text_to_video, torch.float64) as (model, inputs), torch.no_grad():
            model.eval()
            report = inject_fused_kernels(model) if fused else None
            model.enable_cache(config())
            calls: list[str] = []
            model.blocks[1].ffn.register_forward_pre_hook(lambda *_, calls=calls: calls.append("ffn"))
            with model.cache_context("sampling"):
                steps = [model(**inputs).sample for _ in range(6)]
            found.append((torch.stack(steps), len(calls)))
            if report is not None:
                with pytest.raises(RuntimeError, match=r"disable_cache\(\)"):
                    report.undo()
                model.disable_cache()
                report.undo()
                again = model(**inputs).sample
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(again, found[0][0][0], rtol=1e-12, atol=1e-12)
    assert 0 < found[0][1] == found[1][1] < 6  # it did skip blocks, and the same ones


def test_in_float16() -> None:
    with prepared(text_to_video, torch.float16) as (model, inputs):
        output, _ = run(model, inputs)
        inject_fused_kernels(model)
        assert torch.equal(run(model, inputs)[0], output)


@pytest.mark.parametrize("recompute_norms", [False, True])
def test_selective_activation_checkpointing_sees_the_kernels(recompute_norms: bool) -> None:
    seen: set[str] = set()

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.add(str(operation))
        kept = "norm_modulate" in str(operation)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    with prepared(text_to_video, torch.float32) as (model, inputs):
        inject_fused_kernels(model, recompute_norms=recompute_norms)
        output, gradients = run(model, inputs)
        model.enable_gradient_checkpointing(partial(checkpoint, use_reentrant=False, context_fn=contexts))
        again, selective = run(model, inputs)
    assert "lightning_videoscale.norm_modulate.default" in seen
    assert torch.equal(again, output)
    assert all(torch.equal(selective[name], gradient) for name, gradient in gradients.items())


def with_lora(targets: list[str], *, inject_first: bool | None) -> WanTransformer3DModel:
    """A Wan with an adapter that changes something; injected before, after (False) or not at all (None)."""
    import peft

    model = tiny_wan()
    torch.manual_seed(4)
    if inject_first:
        inject_fused_kernels(model)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    if inject_first is False:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # feed-forwards with an adapter are skipped
            inject_fused_kernels(model)
    return model


ATTENTION, EVERYTHING = ["to_q", "to_k", "to_v", "to_out.0"], ["to_q", "to_out.0", "net.0.proj", "net.2"]


@pytest.mark.parametrize("inject_first", [True, False])
@pytest.mark.parametrize("targets", [ATTENTION, EVERYTHING])
def test_lora_before_and_after(targets: list[str], inject_first: bool) -> None:
    with prepared(text_to_video, torch.float32) as (_, inputs):
        output, gradients = run(with_lora(targets, inject_first=None), inputs)
        model = with_lora(targets, inject_first=inject_first)
        fused_output, fused_gradients = run(model, inputs)
        assert torch.equal(fused_output, output)
        assert gradients and all("lora" in name for name in gradients)
        assert gradient_error(fused_gradients, gradients) < 1e-5
        model.fuse_lora()
        merged_output, _ = run(model.requires_grad_(), inputs)
    torch.testing.assert_close(merged_output, output, rtol=1e-4, atol=1e-4)
    assert (merged_output - run(tiny_wan(), inputs)[0]).abs().max() > 1e-2  # the adapter did something


def test_an_adapter_in_the_feed_forward_is_reported() -> None:
    import peft

    model = tiny_wan()
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["net.2"]))
    with pytest.warns(UserWarning, match=r"2 FeedForward .*net\.2 .*peft"):
        report = inject_fused_kernels(model)
    assert {skipped.path for skipped in report.skipped} == {"blocks.0.ffn", "blocks.1.ffn"}


def test_an_adapter_behind_the_attention_is_reported() -> None:
    model = with_lora(["to_out.0"], inject_first=None)
    assert "bias gradients as before: attn1 (to_out.0 is no Linear of its own weight, but peft" in str(
        inject_fused_kernels(model)
    )


@pytest.mark.parametrize("inject_first", [True, False])
def test_layerwise_casting(inject_first: bool) -> None:
    """Weights in float8, cast up by a hook of each layer's own."""
    outputs = []
    for fused in (False, True):
        model = tiny_wan()
        if fused and inject_first:
            inject_fused_kernels(model)
        model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
        if fused and not inject_first:
            with pytest.warns(UserWarning, match="FeedForward"):
                inject_fused_kernels(model)
        assert model.blocks[0].ffn.net[2].weight.dtype is torch.float8_e4m3fn
        with prepared(text_to_video, torch.float32) as (_, inputs), torch.no_grad():
            outputs.append(model(**inputs, return_dict=False)[0])
    assert torch.equal(*outputs)


def test_loaded_with_a_device_map(tmp_path: Path) -> None:
    tiny_wan().save_pretrained(tmp_path, max_shard_size="10KB")
    model = WanTransformer3DModel.from_pretrained(tmp_path, device_map={"": "cpu"})
    with prepared(text_to_video, torch.float32) as (original, inputs):
        output, gradients = run(original, inputs)
        assert not inject_fused_kernels(model).skipped
        fused_output, fused_gradients = run(model.train(), inputs)
    assert torch.equal(fused_output, output)
    assert gradient_error(fused_gradients, gradients) < 1e-5


def test_with_an_attention_backend_of_diffusers() -> None:
    # diffusers makes the backend of a model that of all models; the context takes that back.
    with prepared(text_to_video, torch.float32) as (model, inputs), attention_backend("_native_math"):
        model.set_attention_backend("_native_math")
        output, _ = run(model, inputs)
        inject_fused_kernels(model)
        assert torch.equal(run(model, inputs)[0], output)
        assert {type(processor).__name__ for processor in model.attn_processors.values()} == {"WanAttnProcessor"}
