"""Fused Wan with what else is done to a model: saving, LoRA, selective activation checkpointing, half precision."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_videoscale.injection import inject_fused_kernels
from tests.injection.test_wan_blocks import prepared, run, text_to_video
from tests.models import tiny_wan


def test_saved_and_loaded(tmp_path: Path) -> None:
    with prepared(text_to_video, torch.float32) as (model, inputs):
        inject_fused_kernels(model)
        output, _ = run(model, inputs)
        model.save_pretrained(tmp_path)
        loaded = WanTransformer3DModel.from_pretrained(tmp_path)
        assert torch.equal(run(loaded, inputs)[0], output)  # no trace of the kernels in what was saved
        inject_fused_kernels(loaded)
        assert torch.equal(run(loaded, inputs)[0], output)


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


def test_lora() -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    model = tiny_wan()
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    with prepared(text_to_video, torch.float32) as (_, inputs):
        output, gradients = run(model, inputs)
        inject_fused_kernels(model)
        fused_output, fused_gradients = run(model, inputs)
    assert torch.equal(fused_output, output)
    assert gradients and all("lora" in name for name in gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(fused_gradients[name], gradient, rtol=1e-4, atol=1e-6)
