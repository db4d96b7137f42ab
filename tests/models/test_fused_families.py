"""Every family's blocks with fused kernels: diffusers' outputs, and gradients as exact."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig
from torch import Tensor, nn

from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.injection.fused_block import fused_block_of
from tests.distributed.families.harness import Case, Family, lifted_casts
from tests.distributed.families.harness import run as outputs_and_loss
from tests.distributed.families.models import (
    chroma,
    cogvideox,
    cosmos,
    easyanimate,
    flux,
    flux2,
    hunyuan_video,
    kandinsky,
    ltx,
    mochi,
    qwen_image,
    sd3,
    wan,
    z_image,
)
from tests.models import distance, gradient_error

FAMILIES: dict[str, Family] = {
    **cogvideox.FAMILIES,
    **chroma.FAMILIES,
    **flux.FAMILIES,
    **flux2.FAMILIES,
    **hunyuan_video.FAMILIES,
    **ltx.FAMILIES,
    **mochi.FAMILIES,
    **kandinsky.FAMILIES,
    **cosmos.FAMILIES,
    **qwen_image.FAMILIES,
    **sd3.FAMILIES,
    **wan.FAMILIES,
    **z_image.FAMILIES,
}
CASES = [(name, place) for name, family in FAMILIES.items() for place in range(len(family.variants))]
FIRST = [(name, 0) for name in FAMILIES]


def mostly_full(cases: list[tuple[str, int]], kept: list[tuple[str, int]]) -> list[Any]:
    """Cases of which `make test` runs some."""
    return [case if case in kept else pytest.param(*case, marks=pytest.mark.full) for case in cases]


BLOCKS = {
    "cogvideox": {"CogVideoXBlock": 2, "Attention": 2},
    "consisid": {"ConsisIDBlock": 2, "Attention": 2},
    "ltx": {"LTXVideoTransformerBlock": 2, "LTXAttention": 4},
    "ltx2": {"LTX2VideoTransformerBlock": 2, "LTX2Attention": 12},
    "hunyuan_video": {"HunyuanVideoTransformerBlock": 1, "HunyuanVideoSingleTransformerBlock": 2, "Attention": 3},
    "hunyuan_video_framepack": {
        "HunyuanVideoTransformerBlock": 1,
        "HunyuanVideoSingleTransformerBlock": 2,
        "Attention": 3,
    },
    "hunyuan_video_15": {"HunyuanVideo15TransformerBlock": 2, "Attention": 2},
    "mochi": {"MochiTransformerBlock": 2, "MochiAttention": 2},
    "kandinsky": {
        "Kandinsky5TransformerEncoderBlock": 1,
        "Kandinsky5TransformerDecoderBlock": 2,
        "Kandinsky5Attention": 5,
    },
    "cosmos": {"CosmosTransformerBlock": 2, "Attention": 4},
    "flux": {"FluxTransformerBlock": 2, "FluxSingleTransformerBlock": 2, "FluxAttention": 4},
    "chroma": {"ChromaTransformerBlock": 2, "ChromaSingleTransformerBlock": 2, "FluxAttention": 4},
    "flux2": {
        "Flux2TransformerBlock": 2,
        "Flux2SingleTransformerBlock": 2,
        "Flux2Attention": 2,
        "Flux2ParallelSelfAttention": 2,
    },
    "qwen_image": {"QwenImageTransformerBlock": 2, "Attention": 2},
    "sd3": {"JointTransformerBlock": 3, "Attention": 5},
    "z_image": {"ZImageTransformerBlock": 4, "Attention": 4},
    "wan": {"WanTransformerBlock": 2, "WanAttention": 4, "WanTimeTextImageEmbedding": 1},
    "wan_vace": {
        "WanVACETransformerBlock": 2,
        "WanTransformerBlock": 2,
        "WanAttention": 8,
        "WanTimeTextImageEmbedding": 1,
    },
    "chronoedit": {"WanTransformerBlock": 2, "WanAttention": 4, "WanTimeTextImageEmbedding": 1},
    "skyreels_v2": {"SkyReelsV2TransformerBlock": 2, "SkyReelsV2Attention": 4},
    "wan_animate": {"WanTransformerBlock": 3, "WanAttention": 6},
}
"""What is replaced in the first variant, beside feed-forwards."""


@pytest.fixture(autouse=True)
def loud() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs without its fused kernels")
        yield


def cast(inputs: Any, dtype: torch.dtype) -> Any:
    if isinstance(inputs, Mapping):
        return {name: cast(x, dtype) for name, x in inputs.items()}
    if isinstance(inputs, tuple | list):
        return type(inputs)(cast(x, dtype) for x in inputs)
    return inputs.to(dtype) if isinstance(inputs, Tensor) and inputs.is_floating_point() else inputs


def test_gradients_of_what_is_rounded_to_bfloat16() -> None:
    """Without these casts gradients agree as those of other models."""
    for place in (0, 1):
        model, inputs = model_of("kandinsky", place), inputs_of("kandinsky", place)
        with lifted_casts(torch.float32):
            _, expected = run(model, inputs)
            inject_fused_kernels(model)
            assert gradient_error(run(model, inputs)[1], expected) < 1e-5


def model_of(name: str, place: int, **settings: Any) -> nn.Module:
    family = FAMILIES[name]
    return family.model(Case(name, settings=family.variants[place] | settings, float32=True))


def inputs_of(name: str, place: int, **settings: Any) -> dict[str, Any]:
    family = FAMILIES[name]
    return dict(family.inputs(Case(name, settings=family.variants[place] | settings, float32=True), 0))


def run(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    model.zero_grad()
    outputs, loss = outputs_and_loss(model, inputs)
    loss.backward()
    return outputs, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


ROUNDED_GRADIENTS = ("Kandinsky5Transformer3DModel",)
"""Models that round queries, keys and their gradients to bfloat16 in any dtype, now and then to another side."""


def assert_same(model: nn.Module, inputs: Mapping[str, Any], expected: Any) -> None:
    outputs, gradients = run(model, inputs)
    for got, wanted in zip(outputs, expected[0], strict=True):
        assert torch.equal(got, wanted)
    bound = 1e-3 if type(model).__name__ in ROUNDED_GRADIENTS else 1e-5
    assert gradient_error(gradients, expected[1]) < bound


OTHERS = [
    ("cogvideox", 1),
    ("hunyuan_video", 2),
    ("ltx", 2),
    ("skyreels_v2", 1),
    ("wan_vace", 2),
    *(("ltx2", place) for place in (1, 2, 3)),
    ("kandinsky", 1),
    ("cosmos", 2),
]
"""With rotated queries, a first frame of another timestep, timesteps of tokens and of frames, an image, gates."""

LATER = [("ltx2", 2), ("mochi", 0), ("kandinsky", 0), ("cosmos", 2)]
"""A variant of each of the families that round or rotate in a way of their own."""


@pytest.mark.parametrize(("name", "place"), mostly_full(CASES, FIRST + OTHERS))
def test_same_output_to_the_bit_and_gradients_to_the_rounding(name: str, place: int) -> None:
    model, inputs = model_of(name, place), inputs_of(name, place)
    expected = run(model, inputs)
    report = inject_fused_kernels(model)
    assert_same(model, inputs, expected)
    if place == 0:
        assert not report.skipped
        names = [entry.class_name for entry in report.replaced]
        assert {each: names.count(each) for each in names if each != "FeedForward"} == BLOCKS[name]


def half(model: nn.Module) -> nn.Module:
    """In bfloat16 but for what diffusers keeps in float32 when it loads a model, and for rotary tables."""
    kept = ("rope", *(getattr(model, "_keep_in_fp32_modules", None) or ()))
    before = {n: p.clone() for n, p in [*model.named_parameters(), *model.named_buffers()] if any(k in n for k in kept)}
    model.to(torch.bfloat16)
    for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if path in before:
            tensor.data = before[path].to(torch.bfloat16).to(before[path].dtype)
    return model


ROUNDED_ONCE = ("mochi",)
"""Whose gates round less often than diffusers', so that outputs in half precision are nearer, and not the same."""


@contextmanager
def layer_norms_in_float32() -> Iterator[None]:
    """On a CPU, torch's LayerNorm in bfloat16 rounds some of ten thousand channels to the other side of float32's."""
    layer_norm = F.layer_norm

    def wide(x: Tensor, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
        affine = (None if p is None else p.float() for p in (weight, bias))
        return layer_norm(x.float(), shape, *affine, eps).to(x.dtype)

    with patch.object(F, "layer_norm", wide):
        yield


def errors(name: str, place: int, *, autocast: bool, batches: int = 6) -> tuple[float, float]:
    """Of fused and eager gradients, over batches enough for their ratio to mean something."""
    family, case = FAMILIES[name], Case(name, settings=FAMILIES[name].variants[place], float32=True)
    eager = model_of(name, place) if autocast else half(model_of(name, place))
    fused, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    inject_fused_kernels(fused)
    squares, of_outputs = [0.0, 0.0], [0.0, 0.0]
    for batch in range(batches):
        inputs = cast(family.inputs(case, batch), torch.float32 if autocast else torch.bfloat16)
        with lifted_casts():
            exact_outputs, right = run(exact, cast(inputs, torch.float64))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            (outputs, gradients), (fused_outputs, fused_gradients) = run(eager, inputs), run(fused, inputs)
        if not autocast and name not in ROUNDED_ONCE:
            with layer_norms_in_float32(), torch.no_grad():
                assert all(map(torch.equal, outputs_and_loss(fused, inputs)[0], outputs_and_loss(eager, inputs)[0]))
        for got, wanted, correct in zip(fused_outputs, outputs, exact_outputs, strict=True):
            assert got.dtype is wanted.dtype
            of_outputs[0] += float((got - correct).square().sum())
            of_outputs[1] += float((wanted - correct).square().sum())
        squares[0] += distance(fused_gradients, right) ** 2
        squares[1] += distance(gradients, right) ** 2
    assert autocast or of_outputs[0] <= 1.05**2 * of_outputs[1]
    return squares[0] ** 0.5, squares[1] ** 0.5


@pytest.mark.parametrize(("name", "place"), mostly_full(CASES, [("hunyuan_video", 2), ("ltx", 2), *LATER]))
def test_in_bfloat16_the_same_bits_and_gradients_as_exact(name: str, place: int) -> None:
    fused, eager = errors(name, place, autocast=False)
    assert fused <= 1.05 * eager


@pytest.mark.parametrize(("name", "place"), mostly_full(CASES, [("hunyuan_video", 2), ("ltx", 2), *LATER]))
def test_under_autocast_gradients_as_exact(name: str, place: int) -> None:
    """Of a batch alone, the ratio is 0.8 to 1.2: where six say too much, ten times as many decide."""
    fused, eager = errors(name, place, autocast=True)
    if fused > 1.05 * eager:
        fused, eager = errors(name, place, autocast=True, batches=60)
    assert fused <= 1.05 * eager


@pytest.mark.parametrize(("name", "place"), mostly_full(CASES, [("hunyuan_video", 0), ("ltx", 0), *LATER]))
def test_everything_else_stays(name: str, place: int) -> None:
    model, inputs = model_of(name, place), inputs_of(name, place)
    expected = run(model, inputs)
    model.enable_gradient_checkpointing()  # type: ignore[operator]
    checkpointed = run(model, inputs)  # not the same of Chroma, whose later blocks then get no mask
    model.disable_gradient_checkpointing()  # type: ignore[operator]
    classes = [type(module) for module in model.modules()]
    state = {path: tensor.data_ptr() for path, tensor in model.state_dict().items()}
    report = inject_fused_kernels(model, recompute_norms=True)
    assert {path: tensor.data_ptr() for path, tensor in model.state_dict().items()} == state
    assert_same(model, inputs, expected)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        fused = [
            (fused_block_of(mine), fused_block_of(theirs))
            for mine, theirs in zip(model.modules(), twin.modules(), strict=True)
        ]
        assert all(mine == theirs for mine, theirs in fused)
        assert [type(module) for module in twin.modules()] == [type(module) for module in model.modules()]
        assert_same(twin, inputs, expected)
    model.enable_gradient_checkpointing()  # type: ignore[operator]
    assert_same(model, inputs, checkpointed)
    model.disable_gradient_checkpointing()  # type: ignore[operator]
    report.undo()
    assert [type(module) for module in model.modules()] == classes
    assert_same(model, inputs, expected)


def first_block(model: nn.Module) -> tuple[str, nn.Module]:
    names = {name for names in BLOCKS.values() for name in names if name.endswith("Block")}
    return next((path, module) for path, module in model.named_modules() if type(module).__name__ in names)


@pytest.mark.parametrize(("name", "place"), FIRST)
def test_a_block_whose_forward_was_wrapped_is_skipped(name: str, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = model_of(name, place), inputs_of(name, place)
    cls: Any = type(first_block(model)[1])
    forward = cls.forward

    @functools.wraps(forward)
    def doubled(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(self, 2 * hidden_states, *args, **kwargs)

    monkeypatch.setattr(cls, "forward", doubled)
    expected = run(model, inputs)
    with pytest.warns(UserWarning, match=f"{cls.__name__} .*its forward was replaced by .*doubled"):
        inject_fused_kernels(model)
    assert_same(model, inputs, expected)


@pytest.mark.parametrize(("name", "place"), FIRST)
def test_hooks_on_norms_are_called(name: str, place: int) -> None:
    model, inputs = model_of(name, place), inputs_of(name, place)
    plain = copy.deepcopy(model)
    inject_fused_kernels(model)
    path, block = first_block(model)
    fused = fused_block_of(block)
    assert fused is not None
    for each in (plain, model):
        last = next(part for part in reversed(fused.parts) if not part.optional)
        norm = each.get_submodule(f"{path}.{last.path}")
        norm.register_forward_hook(lambda module, args, output: 2 * output)
    expected = run(plain, inputs)
    with pytest.warns(UserWarning, match=f"{last.path} has hooks, which would not be called"):
        assert_same(model, inputs, expected)


@pytest.mark.parametrize(
    ("name", "place"), mostly_full(FIRST, [("hunyuan_video", 0), ("cogvideox", 0), *((name, 0) for name, _ in LATER)])
)
def test_adapters_train_as_without(name: str, place: int) -> None:
    """LoRA in every second Linear that fused forwards do the work of."""
    model, inputs = model_of(name, place), inputs_of(name, place)
    model.requires_grad_(False)
    adapted = ["to_k", "to_v", "to_out.0", "proj", "proj_out", "add_q_proj", "to_key", "self_attention.out_layer"]
    model.add_adapter(LoraConfig(r=2, target_modules=adapted, init_lora_weights=False))  # type: ignore[operator]
    expected = run(model, inputs)
    assert expected[1]
    report = inject_fused_kernels(model)
    assert {entry.class_name for entry in report.replaced} >= BLOCKS[name].keys() - {"FeedForward"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # feed-forwards with an adapter run as they are, and say so
        assert_same(model, inputs, expected)


@pytest.mark.parametrize(("name", "place"), mostly_full(FIRST, [("ltx", 0)]))
def test_compiled_blocks_have_no_graph_break(name: str, place: int) -> None:
    model, inputs = model_of(name, place), inputs_of(name, place)
    output, gradients = run(model, inputs)
    inject_fused_kernels(model)
    for module in model.modules():
        if type(module).__name__ in BLOCKS[name] and type(module).__name__.endswith("Block"):
            module.compile(fullgraph=True, backend="aot_eager")
    compiled_output, compiled_gradients = run(model, inputs)
    for got, wanted in zip(compiled_output, output, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    for unused in compiled_gradients.keys() - gradients.keys():  # of a last block's text: zeros when compiled
        assert not compiled_gradients.pop(unused).any()
    assert gradient_error(compiled_gradients, gradients) < 1e-4


def test_blocks_that_nobody_knows_are_skipped() -> None:
    case = Case("easyanimate", float32=True)
    with pytest.warns(UserWarning, match="2 EasyAnimateTransformerBlock .*no fused forward is known"):
        report = inject_fused_kernels(easyanimate.FAMILIES["easyanimate"].model(case))
    assert [entry.path for entry in report.skipped] == ["transformer_blocks.0", "transformer_blocks.1"]
    assert {entry.class_name for entry in report.replaced} == {"FeedForward"}


def test_a_norm_of_queries_that_is_another_is_not_taken_for_diffusers() -> None:
    model, inputs = model_of("hunyuan_video", 0), inputs_of("hunyuan_video", 0)
    attention: Any = model.get_submodule("transformer_blocks.0.attn")
    attention.norm_q = nn.LayerNorm(8)
    expected = run(model, inputs)
    with pytest.warns(UserWarning, match=r"norm_q is not diffusers' RMSNorm, but torch\.nn\..*LayerNorm"):
        report = inject_fused_kernels(model)
    assert [entry.path for entry in report.skipped] == ["transformer_blocks.0.attn"]
    assert_same(model, inputs, expected)


def test_rotary_tables_of_other_lengths_are_refused() -> None:
    model, inputs = model_of("cogvideox", 1), inputs_of("cogvideox", 1)
    inject_fused_kernels(model)
    inputs["image_rotary_emb"] = tuple(table[:5] for table in inputs["image_rotary_emb"])
    with pytest.raises(ValueError, match=r"27 tokens .*\(5, 8\)"):
        model(**inputs)
