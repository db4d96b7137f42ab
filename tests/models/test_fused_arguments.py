"""Optional arguments of blocks and attentions, and processors of one's own: with fused kernels as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend
from diffusers.models.transformers import transformer_kandinsky
from diffusers.models.transformers.transformer_cosmos import CosmosTransformerBlock
from diffusers.models.transformers.transformer_mochi import MochiTransformerBlock
from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock
from torch import nn

from lightning_videoscale.injection import inject_fused_kernels
from tests.models import gradient_error
from tests.models.test_fused_families import assert_same, first_block, inputs_of, model_of, run

HALF_PERTURBED = {"spatio_temporal_guidance_blocks": [0], "perturbation_mask": torch.tensor([0.0, 1.0])}
ALL_PERTURBED = {"spatio_temporal_guidance_blocks": [1]}
TOKENS = 27

OF_MODELS: list[tuple[str, int, dict[str, Any]]] = [
    ("ltx2", 2, HALF_PERTURBED),
    ("ltx2", 3, ALL_PERTURBED),
    ("ltx2", 1, {"video_self_attention_mask": torch.ones(2, TOKENS, TOKENS).tril()}),
    ("ltx2", 0, {"isolate_modalities": True}),
    ("cosmos", 0, {"attention_mask": torch.arange(7).lt(torch.tensor([[4], [7]]))}),
]

OF_BLOCKS: list[tuple[str, int, dict[str, Any]]] = [
    ("ltx2", 2, {"use_v2a_cross_attention": False, "perturbation_mask": torch.rand(2, 1, 1), "all_perturbed": None}),
    ("ltx2", 1, {"use_a2v_cross_attention": False, "audio_self_attention_mask": torch.randn(2, 5, 5)}),
    ("ltx2", 0, {"a2v_cross_attention_mask": torch.randn(2, 1, 5), "v2a_cross_attention_mask": torch.randn(2, 1, 27)}),
]


@pytest.mark.parametrize(("name", "place", "arguments"), OF_MODELS)
def test_arguments_of_models(name: str, place: int, arguments: dict[str, Any]) -> None:
    model, inputs = model_of(name, place), inputs_of(name, place)
    before = run(model, inputs)
    expected = run(model, inputs | arguments)
    assert not torch.equal(expected[0][0], before[0][0])  # they matter
    assert not inject_fused_kernels(model).skipped
    assert_same(model, inputs | arguments, expected)


def test_arguments_that_only_an_attention_of_ones_own_knows() -> None:
    model, inputs = model_of("cogvideox", 1), inputs_of("cogvideox", 1) | {"attention_kwargs": {"strength": 1.0}}
    expected = run(model, inputs)
    inject_fused_kernels(model)
    with pytest.warns(UserWarning, match=r"CogVideoXBlock runs without .*with attention_kwargs \['strength'\]"):
        assert_same(model, inputs, expected)


ONE_TEMB = torch.randn(1, 64)
ROTARY = torch.polar(torch.ones(1, 8, 8), torch.rand(1, 8, 8))
OF_Z_IMAGE = {"x": torch.randn(2, 8, 64), "attn_mask": None, "freqs_cis": ROTARY}
OF_MOCHI = {"hidden_states": torch.randn(2, 9, 64), "encoder_hidden_states": torch.randn(2, 5, 32)}
OF_MOCHI |= {"temb": ONE_TEMB, "encoder_attention_mask": torch.ones(2, 5)}


@pytest.mark.parametrize(
    ("block", "inputs"),
    [
        (ZImageTransformerBlock(0, 64, 4, 4, 1e-5, True), OF_Z_IMAGE | {"adaln_input": ONE_TEMB}),
        (
            ZImageTransformerBlock(0, 64, 4, 4, 1e-5, True),
            OF_Z_IMAGE
            | {"noise_mask": torch.arange(16).view(2, 8) % 3, "adaln_noisy": ONE_TEMB, "adaln_clean": 2 * ONE_TEMB},
        ),
        (MochiTransformerBlock(64, 4, 16, 32), OF_MOCHI),
        (MochiTransformerBlock(64, 4, 16, 32, context_pre_only=True), OF_MOCHI),
    ],
    ids=["z_image", "z_image with a mask", "mochi", "last of mochi"],
)
def test_one_timestep_for_all_samples(block: nn.Module, inputs: dict[str, Any]) -> None:
    expected = block(**inputs)
    assert not inject_fused_kernels(block).skipped
    torch.testing.assert_close(block(**inputs), expected, rtol=0, atol=0)


WITH_ONE_TEXT = ("wan", "skyreels_v2", "cosmos", "kandinsky", "sd3", "flux", "flux2", "chroma")
WITH_ONE_CLIP = ("wan", "chronoedit", "cosmos", "mochi", "hunyuan_video", "qwen_image", "sd3", "flux", "flux2")


@pytest.mark.parametrize(
    ("name", "shared"),
    [(name, "encoder_hidden_states") for name in WITH_ONE_TEXT] + [(name, "hidden_states") for name in WITH_ONE_CLIP],
)
def test_one_text_or_one_clip_for_all_samples(name: str, shared: str) -> None:
    """Attention then is another kernel of torch's, hence not the same bits."""
    model, inputs = model_of(name, 0), inputs_of(name, 0)
    inputs[shared] = inputs[shared][:1]
    expected, gradients = run(model, inputs)
    assert not inject_fused_kernels(model, recompute_norms=True).skipped
    outputs, fused_gradients = run(model, inputs)
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)
    assert gradient_error(fused_gradients, gradients) < (1e-3 if name == "kandinsky" else 1e-5)  # see ROUNDED_GRADIENTS


@pytest.mark.parametrize(("name", "place", "arguments"), OF_BLOCKS)
def test_arguments_of_blocks(name: str, place: int, arguments: dict[str, Any]) -> None:
    model, inputs = model_of(name, place), inputs_of(name, place)
    before = run(model, inputs)
    for module in model.modules():
        if type(module) is type(first_block(model)[1]):
            module.register_forward_pre_hook(lambda _, args, named: (args, named | arguments), with_kwargs=True)
    expected = run(model, inputs)
    assert any(not torch.equal(one, other) for one, other in zip(expected[0], before[0], strict=True))
    assert not inject_fused_kernels(model).skipped
    assert_same(model, inputs, expected)


def test_kandinskys_sparse_attention_sees_the_same_queries_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mask is made of them. On a CPU torch neither differentiates it nor leaves anything out."""
    model, inputs = model_of("kandinsky", 0), inputs_of("kandinsky", 0, frames=4, side=8, batch=1)
    sparse = {"to_fractal": True, "sta_mask": torch.eye(4, dtype=torch.bool)[None, None], "P": 0.1}
    seen: list[Any] = []
    nabla = transformer_kandinsky.nablaT_v2

    def noting(*args: Any, **named: Any) -> Any:
        seen.append((*args, named["thr"]))
        return nabla(*args, **named)

    monkeypatch.setattr(transformer_kandinsky, "nablaT_v2", noting)
    with torch.no_grad(), attention_backend("flex"):
        expected = model(**inputs, sparse_params=sparse).sample
        inject_fused_kernels(model)
        assert torch.equal(model(**inputs, sparse_params=sparse).sample, expected)
    assert len(seen) == 4
    for before, after in zip(seen[:2], seen[2:], strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("side", ["of the network", "of its ControlNet"])
def test_the_blocks_of_cosmos_and_its_controlnet(side: str) -> None:
    controls = side == "of its ControlNet"
    torch.manual_seed(0)
    made = CosmosTransformerBlock(4, 8, 16, adaln_lora_dim=4, out_bias=True, before_proj=controls, after_proj=controls)
    blocks = nn.ModuleList([made])
    tables = torch.randn(9, 4).repeat(1, 2)
    inputs = {
        "hidden_states": torch.randn(2, 9, 32, requires_grad=True),
        "encoder_hidden_states": torch.randn(2, 5, 16),
        "embedded_timestep": torch.randn(2, 32),
        "temb": torch.randn(2, 96),
        "image_rotary_emb": (tables.cos(), tables.sin()),
        "extra_pos_emb": torch.randn(2, 9, 32),
        "latents" if controls else "controlnet_residual": torch.randn(2, 9, 32),
    }

    def outputs_and_gradients() -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
        found = blocks[0](**inputs)
        outputs = found if controls else (found,)
        loss = sum(output.square().mean() for output in outputs)
        assert isinstance(loss, torch.Tensor)
        return outputs, list(torch.autograd.grad(loss, [inputs["hidden_states"], *blocks.parameters()]))

    expected, gradients = outputs_and_gradients()
    assert len(inject_fused_kernels(blocks).replaced) == 3
    got, fused_gradients = outputs_and_gradients()
    assert all(map(torch.equal, got, expected))
    torch.testing.assert_close(fused_gradients, gradients, rtol=1e-5, atol=1e-6)


class Halved:
    """A processor of one's own around diffusers'."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(self, attn: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = self.processor(attn, *args, **kwargs)
        return found / 2 if isinstance(found, torch.Tensor) else tuple(each / 2 for each in found)


@pytest.mark.parametrize("name", ["ltx2", "mochi", "kandinsky", "cosmos", "hunyuan_video"])
@pytest.mark.parametrize("later", [False, True])
def test_processors_of_ones_own_are_called_and_named(name: str, later: bool) -> None:
    model, inputs = model_of(name, 0), inputs_of(name, 0)
    path, block = first_block(model)
    child, attention = next((child, each) for child, each in block.named_children() if hasattr(each, "processor"))
    if later:
        assert not inject_fused_kernels(model).skipped
    attention.processor = Halved(attention.processor)
    if later:
        plain = model_of(name, 0)
        plain.get_submodule(f"{path}.{child}").processor = attention.processor
        assert_same(model, inputs, run(plain, inputs))
        return
    expected = run(model, inputs)
    with pytest.warns(UserWarning, match=r"its processor is a .*\.Halved, "):
        report = inject_fused_kernels(model)
    assert [entry.path for entry in report.skipped] == [f"{path}.{child}"]
    assert path in {entry.path for entry in report.replaced}
    assert_same(model, inputs, expected)


def test_arguments_that_are_gathered_are_checked_as_a_signature_does() -> None:
    model, inputs = model_of("ltx2", 0), inputs_of("ltx2", 0)
    calls: list[Any] = []
    block: Any = model.get_submodule("transformer_blocks.0")
    block.register_forward_pre_hook(lambda _, args, named: calls.append(named), with_kwargs=True)
    run(model, inputs)
    inject_fused_kernels(model)
    (named,) = calls
    positional = tuple(named.values())
    for got, wanted in zip(block.forward(*positional), block.forward(**named), strict=True):
        assert torch.equal(got, wanted)
    without = {name: value for name, value in named.items() if name != "temb"}
    with pytest.raises(TypeError, match="temb"):
        block.forward(**without)
    with pytest.raises(TypeError, match="tmeb"):
        block.forward(**named, tmeb=named["temb"])
    with pytest.raises(TypeError, match="hidden_states"):
        block.forward(positional[0], **named)
