"""Adapters on a base whose weights are quantized, as by torchao: tensors that consist of numbers and their scales."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_videoscale.strategies.checkpoints.errors import CheckpointError
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import RectifiedFlow, all_assembled
from tests.models import gradient_error
from tests.strategies.fsdp2.training import clips, ddp, fsdp2, trainer

Ranks = Callable[[int], ProcessPool]
EACH = [(ddp, {"schedule": "sliced", "activation_checkpointing": True}), (fsdp2, {"schedule": "overlap"})]


class Int8Weight(Tensor):
    """A matrix in 8 bits, which knows how to be multiplied by, and little else."""

    numbers: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scales: Tensor) -> Int8Weight:
        weight: Int8Weight = Tensor._make_wrapper_subclass(
            cls, numbers.shape, dtype=scales.dtype, device=numbers.device
        )
        weight.numbers, weight.scales = numbers, scales
        return weight

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weight:
        scales = weight.detach().abs().amax(1, keepdim=True) / 127
        return cls((weight.detach() / scales).round().to(torch.int8), scales)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], *_: Any) -> Int8Weight:
        return cls(**parts)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.linear:
            x, weight, *bias = args
            return function(x, weight.numbers * weight.scales, *bias, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scales)
        if op is torch.ops.aten.copy_.default:
            args[0].numbers.copy_(args[1].numbers)
            args[0].scales.copy_(args[1].scales)
            return args[0]
        raise NotImplementedError(f"{op} of quantized weights")


class Quantized(RectifiedFlow):
    """LoRA in float32 on linear layers in 8 bits."""

    shift = 0.0

    def build(self) -> None:
        super().build()
        if dist.get_rank():
            self.shift += 1.0  # which is gone when all ranks have the first one's numbers
        for linear in [x for x in self.transformer.blocks.modules() if isinstance(x, nn.Linear)]:
            linear.weight = nn.Parameter(Int8Weight.of(linear.weight + self.shift), requires_grad=False)
        self.transformer.requires_grad_(False)
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["to_q", "net.2"], init_lora_weights=False)
        self.transformer = peft.get_peft_model(self.transformer, config)


class OtherBase(Quantized):
    shift = 0.5


def fit(
    strategy: Any, options: dict[str, Any], module_class: type[Quantized] = Quantized, steps: int = 2, **paths: Path
) -> dict[str, Tensor] | str:
    module, start = module_class(), paths.get("start")
    # Two epochs of a step each: a run that goes on begins with the second one.
    runner = trainer(strategy(**options), max_steps=steps, limit_train_batches=1)
    try:
        runner.fit(module, clips(batch_size=2), ckpt_path=start)
    except CheckpointError as error:
        return str(error)
    if "end" in paths:
        runner.save_checkpoint(paths["end"])
    return all_assembled((name, parameter) for name, parameter in module.named_parameters() if "lora" in name)


@pytest.mark.parametrize(("strategy", "options"), EACH)
def test_adapters_train_as_on_one_device(ranks: Ranks, strategy: Any, options: dict[str, Any]) -> None:
    (expected,) = ranks(1).run(fit, ddp, {})
    for adapters in ranks(2).run(fit, strategy, options):
        assert gradient_error(adapters, expected) < 1e-5


@pytest.mark.parametrize("save_frozen", [None, True])
def test_checkpoints_leave_out_what_is_quantized(ranks: Ranks, tmp_path: Path, save_frozen: bool | None) -> None:
    (expected,) = ranks(1).run(fit, ddp, {})
    path, options = tmp_path / "one.ckpt", {"save_frozen": save_frozen}
    ranks(2).run(fit, fsdp2, options, steps=1, end=path)
    for adapters in ranks(2).run(fit, ddp, options, start=path):
        assert gradient_error(adapters, expected) < 1e-5
    message = ranks(2).run(fit, ddp, options, OtherBase, start=path)[0]
    assert isinstance(message, str)
    assert ".blocks.0.attn1.to_q.base_layer.weight has other values" in message
