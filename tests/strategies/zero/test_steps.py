"""Under ZeRO, what has no gradient in a step stays as it is, and its states and count of steps too, as under torch."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_videoscale.compat.deepspeed import FlatPiece
from lightning_videoscale.parallel import SplitPlan
from lightning_videoscale.strategies import SequenceParallelDDPStrategy, SequenceParallelDeepSpeedStrategy
from lightning_videoscale.strategies.checkpoints.zero_partitions import assemble
from lightning_videoscale.strategies.zero import steps as zero_steps
from tests.distributed.pool import ProcessPool
from tests.distributed.zero import deepspeed_on_cpu, needs_deepspeed

Ranks = Callable[[int], ProcessPool]
NOTHING_TO_SPLIT = SplitPlan({}, {}, {}, lambda model, context: lambda: None)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),  # multiplies something up over its steps
}


def fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    """DeepSpeed's own, with its CUDA kernel in Python."""
    from deepspeed.ops.adam import fused_adam

    def kernel(chunk: int, overflow: Any, tensors: Any, lr: float, beta1: float, beta2: float, *rest: Any) -> None:
        eps, step, _, _, weight_decay = rest
        for gradient, x, mean, square in zip(*tensors, strict=True):
            x.mul_(1 - lr * weight_decay)
            mean.lerp_(gradient, 1 - beta1)
            square.lerp_(gradient.square(), 1 - beta2)
            x.addcdiv_(mean / (1 - beta1**step), (square / (1 - beta2**step)).sqrt() + eps, value=-lr)

    with patch.object(fused_adam, "FusedAdamBuilder") as builder:
        builder().load().multi_tensor_adam = kernel
        return fused_adam.FusedAdam(parameters, lr=0.1, weight_decay=0.1)


# The layers that each micro-batch calls; a capital one is frozen.
FROZEN_LATER = ("abc", "Abc", "Abc", "Abc")
FROZEN_FOR_A_WHILE = ("abc", "aBc", "Bc", "abc", "abc")
EXPERTS = ("ab", "ac", "ac", "ab", "ac", "ab")
ORDERS_AND_OPTIMIZERS = [  # in `make test` each optimizer with one order or two
    pytest.param(called, name, marks=[pytest.mark.full] if (i + j) % 2 else [])
    for i, called in enumerate((FROZEN_LATER, FROZEN_FOR_A_WHILE, EXPERTS))
    for j, name in enumerate(OPTIMIZERS)
]


class Layers(pl.LightningModule):
    """Three layers, of which a micro-batch calls some. Two ranks hold one and a half of them each."""

    def __init__(self, called: tuple[str, ...], optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.ModuleDict({name: nn.Linear(3, 3) for name in "abc"})
        self.register_buffer("micro_batches", torch.zeros((), dtype=torch.int64))
        self.called, self.optimizer = called, optimizer

    def training_step(self, batch: Tensor) -> Tensor:
        names = self.called[int(self.micro_batches)]
        self.micro_batches += 1
        for name, layer in self.net.items():
            layer.requires_grad_(name.upper() not in names)
        return torch.stack([self.net[name.lower()](batch) for name in names]).sum(0).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return (OPTIMIZERS | {"fused": fused_adamw})[self.optimizer](self.parameters())


def alone(called: tuple[str, ...], optimizer: str, accumulation: int = 1) -> dict[str, Tensor]:
    """The weights after a training by torch."""
    module = Layers(called, optimizer)
    stepping = module.configure_optimizers()
    for index in range(len(called)):
        (module.training_step(torch.ones(1, 3)) / accumulation).backward()
        if (index + 1) % accumulation == 0:
            stepping.step()
            stepping.zero_grad()
    return {name: p.detach() for name, p in module.named_parameters()}


def train(
    stage: int,
    called: tuple[str, ...],
    optimizer: str,
    steps: int,
    start: Path | None = None,
    end: Path | None = None,
    **settings: Any,
) -> dict[str, Tensor]:
    """The weights after a training by ZeRO, or by DDP as stage 0; on the way from a checkpoint to another."""
    shared: dict[str, Any] = {"ulysses_size": 1, "modules": ["net"], "plan": NOTHING_TO_SPLIT}
    settings |= {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    module = Layers(called, optimizer)
    with deepspeed_on_cpu():
        runner = pl.Trainer(
            strategy=SequenceParallelDeepSpeedStrategy(stage, **shared)
            if stage
            else SequenceParallelDDPStrategy(find_unused_parameters=True, **shared),
            accelerator="cpu",
            devices=dist.get_world_size(),
            max_steps=steps,
            use_distributed_sampler=False,
            enable_model_summary=False,
            **settings,
        )
        runner.fit(module, DataLoader(torch.ones(len(called), 3)), ckpt_path=start)
        if end is not None:
            runner.save_checkpoint(end)
        return {name: assemble(p, p.device) if stage else p.detach() for name, p in module.named_parameters()}


def check(everyone: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for theirs in everyone:
        torch.testing.assert_close(theirs, expected, rtol=0, atol=1e-6)


@needs_deepspeed
@pytest.mark.parametrize(("called", "optimizer"), ORDERS_AND_OPTIMIZERS, ids=str)
def test_only_what_has_a_gradient_is_stepped(ranks: Ranks, called: tuple[str, ...], optimizer: str) -> None:
    for stage in (1, 2, 3):
        check(ranks(2).run(train, stage, called, optimizer, len(called)), alone(called, optimizer))


@needs_deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeeds_own_optimizers_count_the_steps_of_each(ranks: Ranks, stage: int) -> None:
    for called in (FROZEN_FOR_A_WHILE, EXPERTS):
        check(ranks(2).run(train, stage, called, "fused", len(called)), alone(called, "adamw"))


def accumulate(stage: int) -> dict[str, Tensor]:
    return train(stage, EXPERTS, "adamw", 3, accumulate_grad_batches=2)


@needs_deepspeed
def test_a_gradient_of_one_micro_batch_is_one_of_the_step(ranks: Ranks) -> None:
    for stage in (1, 3):
        check(ranks(2).run(accumulate, stage), alone(EXPERTS, "adamw", accumulation=2))


@needs_deepspeed
@pytest.mark.parametrize(("first", "second"), [((2, 2), (3, 2)), ((3, 2), (0, 1)), ((0, 1), (1, 2))], ids=str)
def test_a_checkpoint_keeps_the_steps_of_each(
    ranks: Ranks, tmp_path: Path, first: tuple[int, int], second: tuple[int, int]
) -> None:
    """First and second are a stage and a number of ranks; the first has not stepped one layer yet."""
    called = ("ab", "b", "ac", "abc")
    ranks(first[1]).run(train, first[0], called, "adamw", 2, None, tmp_path / "two.ckpt")
    check(
        ranks(second[1]).run(train, second[0], called, "adamw", 4, tmp_path / "two.ckpt"),
        alone(called, "adamw"),
    )


@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2])
def test_a_rank_that_has_stepped_nothing_takes_part_in_a_checkpoint(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    """The second rank holds nothing of the first layer."""
    called = ("a", "ab", "abc")
    ranks(2).run(train, stage, called, "adamw", 1, None, tmp_path / "one.ckpt")
    check(ranks(2).run(train, stage, called, "adamw", 3, tmp_path / "one.ckpt"), alone(called, "adamw"))


# -- what a step and a checkpoint cost -----------------------------------------------------------------------------


def two_in_a_piece(monkeypatch: pytest.MonkeyPatch) -> tuple[zero_steps.ZeroSteps, list[nn.Parameter], Tensor, Any]:
    """Its parameters, the piece and what steps it, without DeepSpeed."""
    first, second = parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    flat = torch.ones(4)
    base = torch.optim.AdamW([flat])
    monkeypatch.setattr(zero_steps, "flat_pieces", lambda _: [FlatPiece(parameters, flat, 0)])
    monkeypatch.setattr(zero_steps, "ranges", lambda _: {first: range(2), second: range(2, 4)})
    monkeypatch.setattr(zero_steps, "stepping_optimizers", lambda _: [base])
    return zero_steps.ZeroSteps(None, torch.device("cpu")), parameters, flat, base


def test_the_states_of_a_piece_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, (first, _), flat, base = two_in_a_piece(monkeypatch)
    flat.grad = torch.ones(4)
    zeros_like = Mock(wraps=torch.zeros_like)
    monkeypatch.setattr(torch, "zeros_like", zeros_like)
    for _ in range(3):
        steps.begin()
        first.sum().backward()
        base.step()
    assert [call.args[0].shape for call in zeros_like.call_args_list].count(flat.shape) == 2  # the two of AdamW


class OnAnotherGPU(Tensor):
    """Would be unpickled there, by every rank."""

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        return self.as_subclass(Tensor)

    def __reduce_ex__(self, _: Any) -> Any:
        raise AssertionError("pickled on a GPU")


def test_histories_are_told_to_other_ranks_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, (first, second), flat, _ = two_in_a_piece(monkeypatch)
    shared = {"step": torch.tensor(3.0).as_subclass(OnAnotherGPU)}
    steps.set_common(flat, {first: shared, second: shared})
    monkeypatch.setattr(zero_steps, "gather_over_ranks", lambda held: [pickle.loads(pickle.dumps(held))])
    told = steps.common(flat)
    assert told is not None
    assert told[first] == {"step": 3.0}
    assert told[second] is told[first]


def test_flags_are_sent_to_a_gpu_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    on_host, gpu = Mock(), torch.device("cuda")
    monkeypatch.setattr(torch, "tensor", on_host)
    monkeypatch.setattr(zero_steps, "data_parallel_group", Mock())
    monkeypatch.setattr(dist, "all_reduce", Mock())
    zero_steps.ZeroSteps(None, gpu).agree()
    on_host.assert_called_once_with([], dtype=torch.uint8, pin_memory=True)
    on_host().to.assert_called_once_with(gpu, non_blocking=True)
