"""Methods that somebody has replaced, on a class or on an instance: what runs is theirs, and the report says so."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.transformers import transformer_wan
from torch import Tensor, nn

from lightning_videoscale.injection import FusedBlock, inject_fused_kernels, source_hash
from tests.injection.test_inject import MY_BLOCK, MyBlock, fused_forward, two_blocks
from tests.models import gradient_error, tiny_wan
from tests.models.test_dit import MINE, a_block
from tests.models.test_wan import prepared, run, text_to_video

Patch = Callable[[Any], Any]


def doubled(output: Any) -> Any:
    """Twice the tensors that a module returns."""
    return 2 * output if isinstance(output, Tensor) else tuple(2 * x for x in output[:2]) + tuple(output[2:])


def wrapped(original: Any) -> Any:
    @functools.wraps(original)
    def twice(*args: Any, **kwargs: Any) -> Any:
        return doubled(original(*args, **kwargs))

    return twice


def wrapped_and_disguised(original: Any) -> Any:
    twice = wrapped(original)
    del twice.__wrapped__
    return twice


def a_partial_method(original: Any) -> Any:
    return functools.partialmethod(wrapped(original))


CLASSES = [
    (transformer_wan.WanTransformerBlock, "forward", "WanTransformerBlock"),
    (transformer_wan.WanAttention, "forward", "WanAttention"),
    (transformer_wan.WanAttnProcessor, "__call__", "WanAttention"),
    (transformer_wan.WanTimeTextImageEmbedding, "forward", "WanTimeTextImageEmbedding"),
    (FP32LayerNorm, "forward", "WanTransformerBlock"),
    (nn.RMSNorm, "forward", "WanAttention"),
    (nn.Linear, "forward", "FeedForward"),
    (nn.Linear, "__call__", "FeedForward"),
    (nn.Dropout, "forward", "FeedForward"),
    (FeedForward, "forward", "FeedForward"),
    (GELU, "forward", "FeedForward"),
    (GELU, "gelu", "FeedForward"),
]


OTHER_WAYS = [(*case, patch) for case in CLASSES[:5:2] for patch in (wrapped_and_disguised, a_partial_method)]


@pytest.mark.parametrize(("cls", "method", "skipped", "patch"), [(*case, wrapped) for case in CLASSES] + OTHER_WAYS)
def test_a_class_patched_before(
    cls: type, method: str, skipped: str, patch: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cls, method, patch(getattr(cls, method)))
    with prepared(text_to_video, torch.float32) as (model, inputs):
        expected, gradients = run(model, inputs)
        with pytest.warns(UserWarning, match=f"skipped . {skipped}.*replaced by (.*twice|a functools.partialm)"):
            report = inject_fused_kernels(model)
        output, fused_gradients = run(model, inputs)
    assert skipped not in {replaced.class_name for replaced in report.replaced}
    assert torch.equal(output, expected)
    assert gradient_error(fused_gradients, gradients) < 1e-5


@pytest.mark.parametrize(("cls", "method", "skipped"), [case for case in CLASSES if case[2] != case[0].__name__])
def test_a_part_s_class_patched_afterwards(
    cls: type, method: str, skipped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a fused forward does itself, without calling it, is looked at in every call."""
    with prepared(text_to_video, torch.float32) as (model, inputs):
        inject_fused_kernels(model)
        monkeypatch.setattr(cls, method, wrapped(getattr(cls, method)))
        expected, _ = run(tiny_wan(), inputs)
        has_warned = method == "__call__" and cls is not nn.Linear  # a processor is called, as others are
        with contextlib.nullcontext() if has_warned else pytest.warns(UserWarning, match="twice"):
            output, _ = run(model, inputs)
    assert torch.equal(output, expected)


def a_method(module: nn.Module) -> Any:
    return types.MethodType(wrapped(type(module).forward), module)


PARTS = ["blocks.0" + part for part in ("", ".norm1", ".norm2", ".attn1", ".attn2.norm_q", ".ffn", ".ffn.net.2")]


@pytest.mark.parametrize("path", PARTS)
@pytest.mark.parametrize("patch", [lambda m: wrapped(m.forward), a_method, lambda m: functools.partial(m.forward)])
def test_an_instance_patched_before(path: str, patch: Patch) -> None:
    with prepared(text_to_video, torch.float32) as (model, inputs):
        part: Any = model.get_submodule(path)
        part.forward = patch(part)
        expected, _ = run(model, inputs)
        with pytest.warns(UserWarning, match="forward .*instance"):
            inject_fused_kernels(model)
        assert torch.equal(run(model, inputs)[0], expected)


def test_a_linear_patched_on_its_instance_is_called() -> None:
    with prepared(text_to_video, torch.float32) as (model, inputs):
        linear: Any = model.get_submodule("blocks.0.attn1.to_q")
        linear.forward = wrapped(linear.forward)
        expected, _ = run(model, inputs)
        assert not inject_fused_kernels(model).skipped
        assert torch.equal(run(model, inputs)[0], expected)


class Low(nn.Linear):
    """A LoRA-like wrapper that gives itself out for the layer it wraps."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.mean(-1, keepdim=True)


Low.__module__, Low.__qualname__ = nn.Linear.__module__, nn.Linear.__qualname__


class Norm(nn.RMSNorm):
    """Likewise a norm."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


Norm.__module__, Norm.__qualname__ = nn.RMSNorm.__module__, nn.RMSNorm.__qualname__


class Processor(transformer_wan.WanAttnProcessor):
    """Likewise a processor."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super().__call__(*args, **kwargs)


Processor.__module__ = transformer_wan.WanAttnProcessor.__module__
Processor.__qualname__ = transformer_wan.WanAttnProcessor.__qualname__


def change(model: Any, what: str) -> None:
    block = model.blocks[0]
    if what == "linear":
        block.ffn.net[2].__class__ = Low
    elif what == "norm":
        block.attn1.norm_q.__class__ = Norm
    elif what == "processor":
        block.attn1.set_processor(Processor())
    else:
        wan_block = transformer_wan.WanTransformerBlock
        members = {"forward": wrapped(wan_block.forward), "__module__": wan_block.__module__}
        block.__class__ = type(wan_block.__name__, (wan_block,), members)


@pytest.mark.parametrize("what", ["linear", "norm", "processor", "block"])
def test_classes_under_another_s_name(what: str) -> None:
    with prepared(text_to_video, torch.float32) as (model, inputs):
        change(model, what)
        expected, _ = run(model, inputs)
        with pytest.warns(UserWarning, match="skipped 1"):
            inject_fused_kernels(model)
        assert torch.equal(run(model, inputs)[0], expected)


@pytest.mark.parametrize("what", ["linear", "norm", "processor"])
def test_parts_that_take_another_s_name_afterwards(what: str) -> None:
    with prepared(text_to_video, torch.float32) as (model, inputs):
        change(model, what)
        expected, _ = run(model, inputs)
        model = tiny_wan()
        inject_fused_kernels(model)
        change(model, what)
        with contextlib.nullcontext() if what == "processor" else pytest.warns(UserWarning, match="fused"):
            output, _ = run(model, inputs)
    assert torch.equal(output, expected)


def test_what_diffusers_calls_to_attend_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those do who bring an attention kernel of their own."""
    original = transformer_wan.dispatch_attention_fn
    monkeypatch.setattr(transformer_wan, "dispatch_attention_fn", lambda *args, **kwargs: 2 * original(*args, **kwargs))
    with prepared(text_to_video, torch.float32) as (model, inputs):
        expected, _ = run(model, inputs)
        assert not inject_fused_kernels(model).skipped
        assert torch.equal(run(model, inputs)[0], expected)


def test_the_norms_of_a_dit_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.LayerNorm, "forward", wrapped(nn.LayerNorm.forward))
    block = a_block(torch.float32)
    x, c = torch.randn(2, 5, 32), torch.randn(2, 32)
    expected = block(x, c)
    with pytest.warns(UserWarning, match="norm1 .*twice"):
        assert not inject_fused_kernels(block, extra_blocks=[MINE]).replaced
    assert torch.equal(block(x, c), expected)


def test_your_own_block_patched_by_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any forward of a class you own is meant, as its body has it; a wrapped one where you name it."""
    monkeypatch.setattr(MyBlock, "forward", wrapped(MyBlock.forward))
    with pytest.warns(UserWarning, match="wrapped.*known_forwards"):
        assert not inject_fused_kernels(two_blocks(), extra_blocks=[MY_BLOCK]).replaced
    named = FusedBlock(MY_BLOCK.class_path, fused_forward, "norm", frozenset({str(source_hash(MyBlock.forward))}))
    assert len(inject_fused_kernels(two_blocks(), extra_blocks=[named]).replaced) == 2


def test_a_wrapper_has_another_hash_than_what_it_wraps() -> None:
    original = MyBlock.forward
    once, twice = wrapped(original), wrapped(wrapped(original))
    assert len({source_hash(f) for f in (original, once, twice)}) == 3
    assert source_hash(once) == source_hash(wrapped(original))
    cyclic = wrapped(original)
    cyclic.__wrapped__ = cyclic
    assert source_hash(cyclic) is None
