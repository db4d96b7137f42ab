"""Compiled transformer blocks: one compilation for all of them, the same gradients, alone and under a strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_videoscale.strategies import SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy, compilation
from lightning_videoscale.strategies.blocks import checkpoint_activations
from lightning_videoscale.strategies.compilation import compile_blocks
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import Record, RectifiedFlow
from tests.models import gradient_error, tiny_wan
from tests.strategies.fsdp2.training import clips, trainer

Ranks = Callable[[int], ProcessPool]


def gradient(model: nn.Module) -> Tensor:
    torch.manual_seed(1)
    inputs = (torch.randn(1, 4, 3, 8, 8), torch.tensor([7.0]), torch.randn(1, 3, 16))
    model.zero_grad()
    model(*inputs).sample.square().mean().backward()
    return model.get_submodule("patch_embedding").weight.grad.clone()


def test_all_blocks_share_one_compilation_also_when_checkpointed() -> None:
    model = tiny_wan(num_layers=10)
    eager = gradient(model)
    compiler = CompileCounterWithBackend("aot_eager")
    undo_compilation = compile_blocks(model, {"backend": compiler})
    compiled = gradient(model)
    undo_checkpointing = checkpoint_activations(model)
    recomputed = gradient(model)
    assert compiler.frame_count == 1
    assert torch.equal(compiled, eager)
    assert torch.equal(recomputed, eager)

    undo_checkpointing()
    undo_compilation()
    assert torch.equal(gradient(model), eager)
    assert compiler.frame_count == 1
    assert not any("forward" in vars(block) for block in model.blocks)


def test_a_backend_of_the_users_own_is_not_told_what_inductor_must_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = CompileCounterWithBackend("aot_eager")  # which takes no options
    model = tiny_wan()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(compilation, "mix_order_reduction_is_wrong", lambda: True)
        compile_blocks(model, {"backend": compiler})
    gradient(model)
    assert compiler.frame_count == 1


def fit(strategy: type, compiled: bool, checkpointing: bool) -> tuple[list[float], list[dict[str, Tensor]], int]:
    torch.manual_seed(0)
    record, module = Record(), RectifiedFlow()
    compiler = CompileCounterWithBackend("aot_eager")
    options: dict[str, Any] = {"compile": {"backend": compiler}} if compiled else {}
    trainer(strategy(activation_checkpointing=checkpointing, **options), callbacks=[record]).fit(module, clips())
    return record.losses, record.gradients, compiler.frame_count


@pytest.mark.parametrize(
    ("strategy", "checkpointing"),
    [
        pytest.param(SequenceParallelDDPStrategy, False, marks=pytest.mark.full),
        (SequenceParallelFSDP2Strategy, True),
        pytest.param(SequenceParallelDDPStrategy, True, marks=pytest.mark.full),
        pytest.param(SequenceParallelFSDP2Strategy, False, marks=pytest.mark.full),
    ],
)
def test_a_split_and_compiled_model_trains_as_a_split_one(ranks: Ranks, strategy: type, checkpointing: bool) -> None:
    (losses, gradients, none), (compiled_losses, compiled_gradients, graphs) = (
        ranks(2).run(fit, strategy, compiled, checkpointing)[0] for compiled in (False, True)
    )
    assert none == 0 < graphs
    assert compiled_losses == pytest.approx(losses, rel=1e-6)
    for eager, compiled in zip(gradients, compiled_gradients, strict=True):
        assert gradient_error(compiled, eager) < 1e-5
