"""Bias gradients without a pass of their own: taken once, by the kernels that write what is to be summed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.injection.branch_bias import branch_and_bias, last_linear
from tests.models import gradient_error
from tests.models.test_wan import TOKENS, prepared, run, text_to_video

WIDTH = 48
PROJECTIONS = ("attn1.to_q", "attn1.to_k", "attn2.to_q")  # of as many rows as there are tokens
ENDS = ("attn1.to_out.0", "attn2.to_out.0", "ffn.net.2")


class CountedSums(TorchDispatchMode):
    """Counts the sums over all rows of something as large as the tokens' hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.sum.dim_IntList and args[0].shape == (2 * TOKENS, WIDTH) and args[1] == [0]:
            self.count += 1
        return func(*args, **(kwargs or {}))


def counted(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[int, dict[str, Tensor]]:
    with CountedSums() as sums:
        _, gradients = run(model, inputs)
    return sums.count, gradients


def test_six_sums_less_per_block() -> None:
    with prepared(text_to_video, torch.float32) as (model, inputs):
        before, gradients = counted(model, inputs)
        report = inject_fused_kernels(model)
        after, fused_gradients = counted(model, inputs)
        report.undo()
        assert counted(model, inputs)[0] == before
    assert before - after == 2 * len(ENDS + PROJECTIONS)
    assert gradient_error(fused_gradients, gradients) < 1e-5
    assert {f"blocks.{i}.{name}.bias" for i in range(2) for name in ENDS + PROJECTIONS} < set(fused_gradients)


def test_half_precision_rounds_a_bias_gradient_once() -> None:
    """At most 1.05 times the error that eager has, over all of them: most of it comes from what is upstream."""
    with prepared(text_to_video, torch.float64) as (model, inputs):
        _, exact = run(model, inputs)
    with prepared(text_to_video, torch.bfloat16) as (model, inputs):
        _, eager = run(model, inputs)
        inject_fused_kernels(model)
        _, fused = run(model, inputs)

    def error(gradients: dict[str, Tensor]) -> float:
        names = [f"blocks.{i}.{linear}.bias" for i in range(2) for linear in ENDS + PROJECTIONS]
        return sum(float((gradients[n].double() - exact[n]).norm() / exact[n].norm()) for n in names)

    assert error(fused) <= 1.05 * error(eager)


def test_a_frozen_bias_gets_none() -> None:
    with prepared(text_to_video, torch.float32) as (model, inputs):
        inject_fused_kernels(model)
        frozen = model.get_parameter("blocks.0.attn1.to_out.0.bias").requires_grad_(False)
        _, gradients = run(model, inputs)
    assert frozen.grad is None and "blocks.0.attn2.to_out.0.bias" in gradients


def test_what_is_changed_keeps_its_own_and_is_reported() -> None:
    with prepared(text_to_video, torch.float32) as (model, inputs):
        projection = model.get_submodule("blocks.0.attn1.to_out.0")
        projection.register_forward_hook(lambda module, args, output: 2 * output)
        before, gradients = counted(model, inputs)
        report = inject_fused_kernels(model)
        after, fused_gradients = counted(model, inputs)
    assert before - after == 2 * len(ENDS + PROJECTIONS) - 1
    assert gradient_error(fused_gradients, gradients) < 1e-5
    notes = {entry.path: entry.what for entry in report.replaced if entry.class_name == "WanTransformerBlock"}
    assert "bias gradients as before: attn1 (to_out.0 has hooks" in notes["blocks.0"]
    assert "as before" not in notes["blocks.1"]


def test_a_block_by_itself_is_reported_as_one_in_a_model() -> None:
    with prepared(text_to_video, torch.float32) as (model, _):
        block = model.get_submodule("blocks.0")
        (alone,) = (entry for entry in inject_fused_kernels(block).replaced if entry.path == "")
    assert "as before" not in alone.what


def test_alone_a_fused_module_keeps_its_bias() -> None:
    """Nobody but a caller that asks for it is given the bias's gradient."""
    with prepared(text_to_video, torch.float32) as (model, _):
        inject_fused_kernels(model)
        ffn = model.get_submodule("blocks.0.ffn")
        x = torch.ones(1, 2, WIDTH)
        bias = ffn.get_parameter("net.2.bias")
        (gradient,) = torch.autograd.grad(ffn(x).sum(), bias)
        assert torch.equal(gradient, torch.full_like(bias, 2.0))
        output, given = branch_and_bias(ffn, x)
        assert given is bias and torch.equal(output, ffn(x))
        assert torch.autograd.grad(output.sum(), bias, allow_unused=True) == (None,)
    plain = nn.Linear(3, 3)
    assert branch_and_bias(plain, torch.ones(1, 3))[1] is None
    assert last_linear(plain) == "torch.nn.modules.linear.Linear is not fused"


def test_a_changed_projection_keeps_its_own() -> None:
    with prepared(text_to_video, torch.float32) as (model, inputs):
        model.get_submodule("blocks.1.attn1.to_k").register_forward_hook(lambda module, args, output: 2 * output)
        before, gradients = counted(model, inputs)
        inject_fused_kernels(model)
        after, fused_gradients = counted(model, inputs)
    assert before - after == 2 * len(ENDS + PROJECTIONS) - 2  # to_q and to_k go together
    assert gradient_error(fused_gradients, gradients) < 1e-5


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


@pytest.mark.parametrize("path", ["attn1", "attn2", "ffn", "attn1.to_out.1", "attn2.norm_q"])
def test_a_branch_whose_output_somebody_changes_keeps_its_own(path: str) -> None:
    """Else the bias would get the gradient of what comes after the hook, not of what the Linear returned."""
    with prepared(text_to_video, torch.float32) as (model, inputs):
        part = model.get_submodule(f"blocks.1.{path}")
        inject_fused_kernels(model)
        part.register_forward_hook(doubled)
        output, fused_gradients = run(model, inputs)
    with prepared(text_to_video, torch.float32) as (model, inputs):
        model.get_submodule(f"blocks.1.{path}").register_forward_hook(doubled)
        expected, gradients = run(model, inputs)
    assert torch.equal(output, expected)
    assert gradient_error(fused_gradients, gradients) < 1e-5


def test_a_loss_on_a_branch_s_output_reaches_its_bias() -> None:
    def gradients_of(fused: bool) -> dict[str, Tensor]:
        outputs: list[Tensor] = []
        with prepared(text_to_video, torch.float32) as (model, inputs):
            if fused:
                inject_fused_kernels(model)
            model.get_submodule("blocks.0.attn1").register_forward_hook(lambda *a: outputs.append(a[-1]))
            (output,) = model(**inputs, return_dict=False)
            (output.square().mean() + outputs[0].square().mean()).backward()
            return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    assert gradient_error(gradients_of(fused=True), gradients_of(fused=False)) < 1e-5


def test_a_subclass_that_came_later_is_not_asked() -> None:
    with prepared(text_to_video, torch.float32) as (model, _):
        inject_fused_kernels(model)
        ffn: Any = model.get_submodule("blocks.0.ffn")
        ffn.__class__ = type(
            "Doubled", (type(ffn),), {"forward": lambda self, x: 2 * super(type(self), self).forward(x)}
        )
        output, bias = branch_and_bias(ffn, torch.ones(1, 2, WIDTH))
    assert bias is None and output.shape == (1, 2, WIDTH)


@pytest.mark.parametrize("part", ["attn1", "attn2", "ffn"])
def test_dropout_in_training_keeps_its_own(part: str) -> None:
    with prepared(text_to_video, torch.float32) as (model, _):
        inject_fused_kernels(model)
        module: Any = model.get_submodule(f"blocks.0.{part}")
        (module.net[1] if part == "ffn" else module.to_out[1]).p = 0.5
        assert "drops 0.5" in str(last_linear(module))
        module.eval()
        assert isinstance(last_linear(module), nn.Linear)
