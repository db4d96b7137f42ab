"""Loss terms of hidden states inside the split region: gathered they are exact, local ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_videoscale.parallel import SequenceMesh, check_loss, gather_sequence, parallelize
from lightning_videoscale.parallel.schedules import ScheduleName
from lightning_videoscale.strategies import SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy
from tests.distributed.pool import ProcessPool
from tests.distributed.summing import sum_over_ranks
from tests.distributed.wan_training import Clips, RectifiedFlow
from tests.models import gradient_error, lifted_float_casts

Ranks = Callable[[int], ProcessPool]
SHAPE = (3, 2, 6)  # nine tokens: uneven over two ranks


class WithAuxiliaryLoss(RectifiedFlow):
    """Pulls the hidden states of the first block together, as a feature loss would; of all tokens or of a slice."""

    def __init__(self, gathered: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.gathered = gathered
        self.hidden = torch.empty(0)
        self.transformer.blocks[0].register_forward_hook(self.keep)

    def keep(self, _: Any, __: Any, output: Tensor) -> None:
        self.hidden = output

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss = super().loss(batch)
        per_token = self.hidden.square().mean(-1)
        if self.gathered:
            per_token = gather_sequence(per_token, 1, self.transformer)
        weights = torch.linspace(0, 1, per_token.shape[1], dtype=loss.dtype)  # tokens count differently
        return loss + (per_token * weights).sum()


def loss_and_gradients(split: bool, gathered: bool) -> tuple[float, dict[str, Tensor]]:
    with lifted_float_casts():
        module = WithAuxiliaryLoss(gathered).double()
        if split:
            parallelize(module.transformer, SequenceMesh.create("cpu", ulysses_size=dist.get_world_size()))
        batch = next(iter(DataLoader(Clips(SHAPE, torch.float64), batch_size=2)))
        loss = module.loss(batch)
        loss.backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    sum_over_ranks(gradients.values(), mean=True)
    return loss.item(), gradients


def test_a_gathered_term_is_exact(ranks: Ranks) -> None:
    whole_loss, whole = ranks(2).run(loss_and_gradients, False, True)[0]
    for loss, gradients in ranks(2).run(loss_and_gradients, True, True):
        assert loss == pytest.approx(whole_loss, rel=1e-12)
        assert gradient_error(gradients, whole) < 1e-10
    _, wrong = ranks(2).run(loss_and_gradients, True, False)[0]
    assert gradient_error(wrong, whole) > 1e-2  # what the check is for


def fit(strategy: str, gathered: bool, checkpointing: bool) -> str:
    kinds = {"ddp": SequenceParallelDDPStrategy, "fsdp2": SequenceParallelFSDP2Strategy}
    trainer = pl.Trainer(
        strategy=kinds[strategy](dist.get_world_size(), activation_checkpointing=checkpointing),
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(WithAuxiliaryLoss(gathered), DataLoader(Clips(SHAPE, torch.float32), batch_size=1))
    except ValueError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(("strategy", "checkpointing"), [("ddp", False), ("ddp", True), ("fsdp2", False)])
def test_strategies_refuse_a_local_term_and_take_a_gathered_one(
    ranks: Ranks, strategy: str, checkpointing: bool
) -> None:
    for message in ranks(2).run(fit, strategy, False, checkpointing):
        assert "inside the region" in message
        assert "gather_sequence(values, dim, network)" in message
    assert ranks(2).run(fit, strategy, True, checkpointing) == ["trained"] * 2


def term_of_frozen_inputs(schedule: ScheduleName) -> str:
    module = WithAuxiliaryLoss(gathered=False)
    for name, parameter in module.named_parameters():  # nothing in front of the blocks, as with LoRA
        parameter.requires_grad_("attn1.to_k" in name)
    mesh = SequenceMesh.create("cpu", ulysses_size=dist.get_world_size())
    parallelize(module.transformer, mesh, schedule=schedule)
    loss = module.loss(next(iter(DataLoader(Clips(SHAPE, torch.float32)))))
    try:
        check_loss(loss)
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("schedule", get_args(ScheduleName))
def test_every_schedule_refuses_a_local_term_where_only_blocks_train(ranks: Ranks, schedule: ScheduleName) -> None:
    for message in ranks(2).run(term_of_frozen_inputs, schedule):
        assert "inside the region" in message


def test_a_whole_model_needs_no_gathering() -> None:
    module = WithAuxiliaryLoss(gathered=True)
    loss = module.loss(next(iter(DataLoader(Clips(SHAPE, torch.float32)))))
    assert gather_sequence(module.hidden, 1, module.transformer) is module.hidden
    check_loss(loss)
