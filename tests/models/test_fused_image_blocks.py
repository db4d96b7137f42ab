"""What users do to image models that fused blocks must leave to diffusers, or say."""

from __future__ import annotations

import copy
import re
import sys
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import nn

from lightning_videoscale.injection import inject_fused_kernels
from tests.models.test_fused_families import assert_same, inputs_of, model_of, run


@pytest.mark.parametrize("name", ["sd3", "flux", "flux2", "chroma"])
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


def give_own_processors(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "set_processor"):
            module.set_processor(Own(module.processor))


@pytest.mark.parametrize("name", ["sd3", "flux", "flux2", "chroma", "z_image", "qwen_image"])
@pytest.mark.parametrize("later", [False, True])
def test_processors_of_users_are_called(name: str, later: bool) -> None:
    model, inputs = model_of(name, 0), inputs_of(name, 0)
    plain = model_of(name, 0)
    plain.load_state_dict(model.state_dict())
    give_own_processors(plain)
    expected = run(plain, inputs)
    if later:
        inject_fused_kernels(model)
    give_own_processors(model)
    if not later:
        report = inject_fused_kernels(model)
        assert not [entry.class_name for entry in report.replaced if entry.class_name.endswith("Attention")]
    assert_same(model, inputs, expected)


@pytest.mark.parametrize(("name", "helper"), [("flux2", "Flux2Modulation.split"), ("z_image", "select_per_token")])
def test_a_helper_that_was_replaced_is_called(name: str, helper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused forwards do the work of these functions, and must know that it is still theirs."""
    model, inputs = model_of(name, 1), inputs_of(name, 1)
    home = sys.modules[type(model).__module__]
    original = attrgetter(helper)(home)
    monkeypatch.setattr(f"{home.__name__}.{helper}", lambda first, *others: original(2 * first, *others))
    expected = run(model, inputs)
    with pytest.warns(UserWarning, match=rf"{re.escape(helper)}, which its forward calls, is not the one"):
        report = inject_fused_kernels(model)
    assert not [entry for entry in report.replaced if entry.class_name.endswith("Block")]
    assert_same(model, inputs, expected)


def test_blocks_of_flux2_take_modulation_of_each_token_and_text_beside_the_image() -> None:
    """As its cache of reference tokens makes it, and as its blocks may be called by themselves."""
    plain: Any = model_of("flux2", 0).get_submodule("single_transformer_blocks.0")
    fused = copy.deepcopy(plain)
    inject_fused_kernels(fused)
    given = {"hidden_states": torch.randn(2, 5, 32), "encoder_hidden_states": torch.randn(2, 3, 32)}
    given |= {"temb_mod": torch.randn(2, 8, 96), "split_hidden_states": True}
    for got, wanted in zip(fused(**given), plain(**given), strict=True):
        assert torch.equal(got, wanted)


def test_rotary_tables_of_other_lengths_are_refused() -> None:
    block: Any = model_of("z_image", 0).get_submodule("layers.0")
    inject_fused_kernels(block)
    with pytest.raises(ValueError, match=r"\(2, 5, 128\); got \(2, 4, 16\)"):
        block(torch.randn(2, 5, 128), None, torch.ones(2, 4, 16, dtype=torch.complex64), torch.randn(2, 128))


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
