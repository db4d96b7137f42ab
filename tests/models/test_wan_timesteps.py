"""Timesteps per token that repeat: the same results, and no modulation per token."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.injection.modulation import GroupedModulation
from tests.models import gradient_error, tiny_wan
from tests.models.test_wan import TOKENS, Case, distance, prepared, run

FIRST_FRAME = TOKENS // 3


def image_to_video(batch: int) -> tuple[Any, dict[str, Tensor]]:
    """TI2V: the first frame is given, the others of a sample share a timestep."""
    timestep = torch.linspace(300, 900, batch)[:, None].repeat(1, TOKENS)
    timestep[:, :FIRST_FRAME] = 0
    return tiny_wan(), {"timestep": timestep}


def checkpointed(batch: int) -> tuple[Any, dict[str, Tensor]]:
    model, inputs = image_to_video(batch)
    model.enable_gradient_checkpointing()
    return model, inputs


CASES = [image_to_video, checkpointed]


class Allocations(TorchDispatchMode):
    """Notes how many elements the tensors have that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.sizes.add(tensor.numel())
        return result


@pytest.mark.parametrize("case", CASES)
def test_same_output_and_gradients_in_float64(case: Case) -> None:
    with prepared(case, torch.float64) as (model, inputs):
        output, gradients = run(model, inputs)
        inject_fused_kernels(model, recompute_norms=case is checkpointed)
        fused_output, fused_gradients = run(model, inputs)
    torch.testing.assert_close(fused_output, output, rtol=1e-12, atol=1e-12)
    assert gradient_error(fused_gradients, gradients) < 1e-10


def test_in_bfloat16_the_gradients_are_as_exact_as_without() -> None:
    with prepared(image_to_video, torch.float64) as (model, inputs):
        _, exact = run(model, inputs)
    with prepared(image_to_video, torch.bfloat16) as (model, inputs):
        _, gradients = run(model, inputs)
        inject_fused_kernels(model)
        _, fused_gradients = run(model, inputs)
    assert distance(fused_gradients, exact) <= 1.05 * distance(gradients, exact)


def test_no_tensor_has_the_size_of_a_modulation_per_token() -> None:
    seen = []
    with prepared(image_to_video, torch.float32) as (model, inputs):
        for fused in (False, True):
            if fused:
                inject_fused_kernels(model)
            with Allocations() as allocations:
                run(model, inputs)
            seen.append(2 * TOKENS * 6 * 48 in allocations.sizes)
    assert seen == [True, False]


def test_compiled_blocks_read_the_index_without_a_graph_break() -> None:
    with prepared(image_to_video, torch.float32) as (model, inputs):
        inject_fused_kernels(model)
        output, gradients = run(model, inputs)
        compiled = copy.deepcopy(model)
        compiled.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
        compiled_output, compiled_gradients = run(compiled, inputs)
    torch.testing.assert_close(compiled_output, output, rtol=1e-5, atol=1e-5)
    assert gradient_error(compiled_gradients, gradients) < 1e-4


@pytest.mark.parametrize("repeated", [False, True])
def test_only_repeated_timesteps_are_grouped(repeated: bool) -> None:
    model, inputs = image_to_video(2)
    timestep = inputs["timestep"] if repeated else torch.linspace(0, 900, 2 * TOKENS)
    inject_fused_kernels(model)
    temb, modulation, *_ = model.condition_embedder(timestep.flatten(), torch.randn(2, 7, 16), timestep_seq_len=TOKENS)
    assert temb.shape == (2, TOKENS, 48)
    if repeated:
        assert isinstance(modulation, GroupedModulation)
        assert modulation.unflatten(2, (6, -1)).values.shape == (3, 6, 48)  # zero and one for each sample
        assert modulation.which.shape == (2, TOKENS)
        with pytest.raises(ValueError, match="Only the channels"):
            modulation.unflatten(1, (6, -1))
    else:
        assert modulation.shape == (2, TOKENS, 6 * 48)


def test_it_stays_as_it_is_beside_a_block_that_is_not_fused() -> None:
    with prepared(image_to_video, torch.float32) as (model, inputs):
        model.blocks[1].norm1.register_forward_hook(lambda *_: None)
        with pytest.warns(UserWarning, match=r"WanTransformerBlock.*blocks\.1\b"):
            report = inject_fused_kernels(model)
        assert "condition_embedder" not in [replaced.path for replaced in report.replaced]
        run(model, inputs)


def test_a_hook_that_computes_with_the_modulation_is_given_that_of_every_token() -> None:
    """As TeaCache does, which compares it from step to step."""
    seen: list[Tensor] = []
    with prepared(image_to_video, torch.float64) as (model, inputs):
        model.condition_embedder.register_forward_hook(lambda *call: seen.append((call[-1][1] * 2).abs().mean()))
        output, gradients = run(model, inputs)
        inject_fused_kernels(model)
        with pytest.warns(UserWarning, match="WanTimeTextImageEmbedding"):
            fused_output, fused_gradients = run(model, inputs)
    torch.testing.assert_close(seen[0], seen[-1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fused_output, output, rtol=1e-12, atol=1e-12)
    assert gradient_error(fused_gradients, gradients) < 1e-10
