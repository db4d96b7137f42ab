"""The fused Wan block: the same outputs and gradients as diffusers' own, in every way that Wan is called."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_videoscale.injection import inject_fused_kernels, source_hash
from lightning_videoscale.injection.fused_block import fused_block_of
from lightning_videoscale.models.wan import FUSED_BLOCKS
from tests.models import distance, gradient_error, lifted_float_casts, tiny_wan

FRAMES, HEIGHT, WIDTH = 3, 4, 6
TOKENS = FRAMES * (HEIGHT // 2) * (WIDTH // 2)


def text_to_video(batch: int) -> tuple[WanTransformer3DModel, dict[str, Tensor]]:
    """Wan 2.1 / 2.2: one timestep per sample."""
    return tiny_wan(), {"timestep": torch.linspace(50, 900, batch)}


def one_timestep_for_all(batch: int) -> tuple[WanTransformer3DModel, dict[str, Tensor]]:
    """A single timestep, which Wan broadcasts over the batch."""
    return tiny_wan(), {"timestep": torch.tensor([500.0])}


def per_token(batch: int) -> tuple[WanTransformer3DModel, dict[str, Tensor]]:
    """Wan 2.2 TI2V: one timestep per token."""
    return tiny_wan(), {"timestep": torch.linspace(0, 900, batch * TOKENS).reshape(batch, TOKENS)}


def image_to_video(batch: int) -> tuple[WanTransformer3DModel, dict[str, Tensor]]:
    """Wan 2.1 I2V: image tokens beside the text (512 tokens, as the attention takes for granted)."""
    model = tiny_wan(added_kv_proj_dim=48, image_dim=8)
    return model, {
        "timestep": torch.linspace(50, 900, batch),
        "encoder_hidden_states": draw(batch, 512, 16, seed=3),
        "encoder_hidden_states_image": draw(batch, 5, 8, seed=4),
    }


def no_cross_attention_norm(batch: int) -> tuple[WanTransformer3DModel, dict[str, Tensor]]:
    """norm2 is an identity."""
    return tiny_wan(cross_attn_norm=False), {"timestep": torch.linspace(50, 900, batch)}


def checkpointed(batch: int) -> tuple[WanTransformer3DModel, dict[str, Tensor]]:
    """Gradient checkpointing: each block runs again in backward."""
    model = tiny_wan()
    model.enable_gradient_checkpointing()
    return model, {"timestep": torch.linspace(50, 900, batch)}


CASES = [text_to_video, one_timestep_for_all, per_token, image_to_video, no_cross_attention_norm, checkpointed]
Case = Callable[[int], tuple[WanTransformer3DModel, dict[str, Tensor]]]


def draw(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the output and every gradient of a loss that weighs each output differently."""
    model.zero_grad()
    (output,) = model(**inputs, return_dict=False)
    loss = (output.double() * draw(*output.shape, seed=9)).mean()
    loss.backward()
    return output.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@contextlib.contextmanager
def prepared(case: Case, dtype: torch.dtype) -> Iterator[tuple[nn.Module, dict[str, Tensor]]]:
    """The model and all its inputs in one dtype; in float64 nothing on the way may be float32."""
    model, inputs = case(2)
    defaults = {
        "hidden_states": draw(2, 4, FRAMES, HEIGHT, WIDTH, seed=1),
        "encoder_hidden_states": draw(2, 7, 16, seed=2),
    }
    with lifted_float_casts() if dtype is torch.float64 else contextlib.nullcontext():
        model.to(dtype)
        if dtype.itemsize == 2:  # the rotary tables stay as they are, as they do when a Wan is loaded
            model.rope = type(model)(**model.config).rope
        yield model, {name: x.to(dtype) for name, x in (defaults | inputs).items()}


@pytest.mark.parametrize("case", CASES)
def test_same_output_and_gradients_in_float64(case: Case) -> None:
    with prepared(case, torch.float64) as (model, inputs):
        output, gradients = run(model, inputs)
        report = inject_fused_kernels(model)
        assert len(report.replaced) == 9 and not report.skipped  # two blocks with three parts each, and timesteps
        fused_output, fused_gradients = run(model, inputs)
    assert output.dtype is torch.float64
    torch.testing.assert_close(fused_output, output, rtol=1e-12, atol=1e-12)
    assert gradient_error(fused_gradients, gradients) < 1e-10


@pytest.mark.parametrize("case", CASES)
def test_same_output_to_the_bit_and_gradients_to_the_rounding(case: Case) -> None:
    with prepared(case, torch.float32) as (model, inputs):
        output, gradients = run(model, inputs)
        inject_fused_kernels(model)
        fused_output, fused_gradients = run(model, inputs)
    assert torch.equal(fused_output, output)
    assert gradient_error(fused_gradients, gradients) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_in_bfloat16_the_gradients_are_as_exact_as_without(case: Case) -> None:
    with prepared(case, torch.float64) as (model, inputs):
        _, exact = run(model, inputs)
    with prepared(case, torch.bfloat16) as (model, inputs):
        output, gradients = run(model, inputs)
        inject_fused_kernels(model)
        fused_output, fused_gradients = run(model, inputs)
    assert torch.equal(fused_output, output)
    assert distance(fused_gradients, exact) <= 1.05 * distance(gradients, exact)


def test_same_under_autocast() -> None:
    with prepared(text_to_video, torch.float32) as (model, inputs), torch.autocast("cpu", dtype=torch.bfloat16):
        output, gradients = run(model, inputs)
        inject_fused_kernels(model)
        fused_output, fused_gradients = run(model, inputs)
    assert torch.equal(fused_output, output)
    assert gradient_error(fused_gradients, gradients) < 0.02


def test_undo_is_exact() -> None:
    model = tiny_wan()
    classes = [type(module) for module in model.modules()]
    report = inject_fused_kernels(model)
    assert [type(module) for module in model.modules()] != classes
    report.undo()
    assert [type(module) for module in model.modules()] == classes
    report.undo()  # nothing left to do
    assert [type(module) for module in model.modules()] == classes


def test_nothing_but_the_forward_changes() -> None:
    model = tiny_wan()
    original: Any = type(model.blocks[0])
    state = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    called: list[str] = []
    model.blocks[0].register_forward_hook(lambda *_: called.append("hook"))
    inject_fused_kernels(model)

    fused: Any = type(model.blocks[0])
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == state
    assert issubclass(fused, original) and fused.__name__ == "WanTransformerBlock"
    assert type(model.blocks[0]) is type(model.blocks[1])  # one class, so that the compiler sees one block
    assert list(inspect.signature(fused.forward).parameters) == list(inspect.signature(original.forward).parameters)
    with prepared(text_to_video, torch.float32) as (_, inputs):
        run(model, inputs)
    assert called == ["hook"]


def test_copies_and_pickles_stay_fused() -> None:
    model = tiny_wan()
    inject_fused_kernels(model)
    with prepared(text_to_video, torch.float32) as (_, inputs):
        expected, _ = run(model, inputs)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert fused_block_of(twin.blocks[0]) is not None
            assert torch.equal(run(twin, inputs)[0], expected)


def test_compiled_blocks_have_no_graph_break() -> None:
    model = tiny_wan()
    inject_fused_kernels(model)
    with prepared(text_to_video, torch.float32) as (_, inputs):
        expected, gradients = run(model, inputs)
        model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
        output, compiled_gradients = run(model, inputs)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    assert gradient_error(compiled_gradients, gradients) < 1e-4


def test_the_forward_it_stands_for_is_the_installed_one() -> None:
    block: Any = type(tiny_wan().blocks[0])
    known = FUSED_BLOCKS[f"{block.__module__}.{block.__qualname__}"].known_forwards
    assert known is not None and source_hash(block.forward) in known


def test_an_unknown_forward_is_skipped_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(
        self: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor, rotary_emb: Tensor
    ) -> Tensor:
        return hidden_states

    model = tiny_wan()
    monkeypatch.setattr(type(model.blocks[0]), "forward", forward)
    with pytest.warns(UserWarning, match="2 WanTransformerBlock .*forward"):
        report = inject_fused_kernels(model)
    assert {replaced.class_name for replaced in report.replaced} == {"WanAttention", "FeedForward"}
    assert [skipped.path for skipped in report.skipped] == ["blocks.0", "blocks.1", "condition_embedder"]


def test_a_block_that_someone_changed_is_skipped_with_the_reason() -> None:
    model = tiny_wan(num_layers=3)
    model.blocks[0].norm1 = nn.LayerNorm(48)
    model.blocks[1].norm3.register_forward_hook(lambda *_: None)
    model.blocks[2].forward = model.blocks[2].forward
    with pytest.warns(UserWarning):
        report = inject_fused_kernels(model)
    assert {replaced.class_name for replaced in report.replaced} == {"WanAttention", "FeedForward"}
    reasons = [skipped.reason for skipped in report.skipped]
    assert (
        "norm1 is not diffusers' FP32LayerNorm" in reasons[0]
        and "torch.nn.modules.normalization.LayerNorm" in reasons[0]
    )
    assert "norm3 has hooks" in reasons[1]
    assert "replaced on the instance" in reasons[2]


def test_an_attention_that_someone_changed_is_skipped_with_the_reason() -> None:
    model = tiny_wan()
    model.blocks[0].attn1.norm_q = nn.LayerNorm(48)
    model.blocks[0].attn2.norm_k.register_forward_hook(lambda *_: None)
    model.blocks[1].attn1.set_processor(copy.deepcopy)  # any callable of one's own
    with pytest.warns(UserWarning):
        report = inject_fused_kernels(model)
    reasons = {skipped.path: skipped.reason for skipped in report.skipped}
    assert list(reasons) == ["blocks.0.attn1", "blocks.0.attn2", "blocks.1.attn1"]
    assert "norm_q is not a RMSNorm" in reasons["blocks.0.attn1"]
    assert "norm_k has hooks" in reasons["blocks.0.attn2"]
    assert "its processor is a builtins.function" in reasons["blocks.1.attn1"]


def test_a_processor_set_later_is_called() -> None:
    model = tiny_wan()
    inject_fused_kernels(model)
    model.blocks[0].attn1.set_processor(lambda attn, hidden_states, *_: hidden_states + 1)
    x = torch.randn(1, 3, 48)
    assert torch.equal(model.blocks[0].attn1(x), x + 1)


def test_fused_projections_stay_fused() -> None:
    with prepared(image_to_video, torch.float32) as (model, inputs):
        for block in model.blocks:
            block.attn1.fuse_projections()
            block.attn2.fuse_projections()
        output, gradients = run(model, inputs)
        inject_fused_kernels(model)
        fused_output, fused_gradients = run(model, inputs)
    assert torch.equal(fused_output, output)
    assert "blocks.0.attn1.to_qkv.weight" in fused_gradients
    assert gradient_error(fused_gradients, gradients) < 1e-5


def test_the_gradients_of_query_key_and_value_are_added_in_the_products() -> None:
    """Where all three are plain Linears of one input; one with LoRA or hooks is called, and the sum is as before."""
    called: list[int] = []

    class CountedProducts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func is torch.ops.lightning_videoscale.sum_of_products.default)
            return func(*args, **(kwargs or {}))

    with prepared(text_to_video, torch.float32) as (model, inputs):
        _, gradients = run(model, inputs)
        inject_fused_kernels(model)
        model.get_submodule("blocks.0.attn1.to_v").register_forward_hook(lambda module, args, output: output * 1)
        with CountedProducts():
            _, fused_gradients = run(model, inputs)
    assert sum(called) == 1  # of two blocks
    assert gradient_error(fused_gradients, gradients) < 1e-5
