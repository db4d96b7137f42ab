"""What users do to image models that fused blocks must leave to diffusers, or say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_videoscale.injection import inject_fused_kernels
from tests.models.test_fused_families import assert_same, inputs_of, model_of, run


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_arguments_of_attention_are_not_dropped(name: str) -> None:
    """As IP-adapters and others pass them: the original block gets them, and says that it ran."""
    model, inputs = model_of(name, 0), inputs_of(name, 0) | {"joint_attention_kwargs": {"mine": torch.ones(1)}}
    seen: list[Any] = []
    expected = run(model, inputs)
    inject_fused_kernels(model)
    block: Any = model.get_submodule("transformer_blocks.0")
    block.attn.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    with pytest.warns(UserWarning, match=r"without its fused kernels: .*joint_attention_kwargs \['mine'\]"):
        assert_same(model, inputs, expected)
    assert all("mine" in kwargs and "detach_bias" not in kwargs for kwargs in seen) and seen


def test_a_feed_forward_in_chunks_is_left_to_the_original() -> None:
    model, inputs = model_of("sd3", 0), inputs_of("sd3", 0)
    inject_fused_kernels(model)
    model.enable_forward_chunking(1, 1)  # type: ignore[operator]
    plain = model_of("sd3", 0)
    plain.load_state_dict(model.state_dict())
    plain.enable_forward_chunking(1, 1)  # type: ignore[operator]
    expected = run(plain, inputs)
    with pytest.warns(UserWarning, match="feed-forward was told to run in chunks"):
        assert_same(model, inputs, expected)


class Own:
    """A processor of a user."""

    def __init__(self, before: Any) -> None:
        self.before = before

    def __call__(self, attn: nn.Module, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return self.before(attn, 2 * hidden_states, *args, **kwargs)


@pytest.mark.parametrize("name", ["sd3", "flux", "qwen_image"])
@pytest.mark.parametrize("later", [False, True])
def test_processors_of_users_are_called(name: str, later: bool) -> None:
    model, inputs = model_of(name, 0), inputs_of(name, 0)
    plain = model_of(name, 0)
    plain.load_state_dict(model.state_dict())
    plain.set_attn_processor(Own(plain.transformer_blocks[0].attn.processor))  # type: ignore[operator, index, union-attr]
    expected = run(plain, inputs)
    own = Own(model.transformer_blocks[0].attn.processor)  # type: ignore[index, union-attr]
    if later:
        inject_fused_kernels(model)
    model.set_attn_processor(own)  # type: ignore[operator]
    if not later:
        report = inject_fused_kernels(model)
        assert "Attention" not in {entry.class_name for entry in report.replaced}
    assert_same(model, inputs, expected)


def test_a_modulation_that_was_replaced_is_called() -> None:
    """Before the injection and after it."""
    for later in (False, True):
        model, inputs = model_of("qwen_image", 0), inputs_of("qwen_image", 0)
        block: Any = model.get_submodule("transformer_blocks.0")
        original = block._modulate
        if later:
            inject_fused_kernels(model)
        block._modulate = lambda x, *args, original=original: original(2 * x, *args)
        if not later:
            expected = run(model, inputs)
            with pytest.warns(UserWarning, match="its _modulate was replaced on the instance"):
                report = inject_fused_kernels(model)
            assert [entry.path for entry in report.skipped] == ["transformer_blocks.0"]
            assert_same(model, inputs, expected)
        else:
            with pytest.warns(UserWarning, match="its _modulate was replaced on the instance"):
                run(model, inputs)
