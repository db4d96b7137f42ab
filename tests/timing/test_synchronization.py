"""Which calls of real strategies are timed, and what happens where an installed framework lacks one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_videoscale.compat.names import MissingNameError
from lightning_videoscale.timing.synchronization import synchronizing_calls
from tests.callbacks.toy import Meta, Slope, batches_of, trainer_with
from tests.distributed.pool import ProcessPool
from tests.distributed.zero import needs_deepspeed
from tests.timing.slow_training import Pace, train

Ranks = Callable[[int], ProcessPool]
BUFFERS = {("DistributedDataParallel", "_sync_buffers", "wait")}
GATHERS = {("FSDPParamGroup", name, "wait") for name in ("pre_forward", "pre_backward", "post_backward")}
REDUCTIONS = {("DeepSpeedZeroOptimizer", "reduce_ipg_grads", "wait")}
EXCHANGES = {("CollectiveTransport", name, "exchange") for name in ("exchange", "wait", "all_gather")}


class Listing(pl.Callback):
    """Keeps the calls of the strategy, each with the class that has it, once it is set up."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.calls = {
            (type(call.owner).__name__, call.name, call.phase) for call in synchronizing_calls(trainer.strategy)
        }


def calls_of(strategy: str) -> set[tuple[str, str, str]]:
    listing = Listing()
    train(strategy, [Pace()], micro_batches=1, callbacks=(listing,))
    return listing.calls


def test_a_single_device_waits_for_nobody() -> None:
    listing = Listing()
    trainer_with(listing).fit(Slope(), batches_of([Meta(1, 10)]))
    assert listing.calls == set()


@pytest.mark.parametrize(
    ("strategy", "calls"),
    [
        ("plain_ddp", BUFFERS),
        ("ddp", BUFFERS | EXCHANGES),
        ("fsdp2", GATHERS | EXCHANGES),
        pytest.param("zero2", REDUCTIONS | EXCHANGES, marks=needs_deepspeed),
    ],
)
def test_calls_by_strategy(ranks: Ranks, strategy: str, calls: set[tuple[str, str, str]]) -> None:
    assert ranks(1).run(calls_of, strategy) == [calls]


def error_without(owner: str, name: str, strategy: str) -> str:
    """What a training says where a framework's class has no such method."""
    module, _, owner_name = owner.rpartition(".")
    with pytest.MonkeyPatch.context() as patched:
        owner_class: Any = getattr(importlib.import_module(module), owner_name)
        patched.delattr(owner_class, name)
        with pytest.raises(MissingNameError) as raised:
            calls_of(strategy)
    return str(raised.value)


def test_a_framework_without_the_calls_is_an_error_that_names_them(ranks: Ranks) -> None:
    ddp = "torch.nn.parallel.DistributedDataParallel"
    [said] = ranks(1).run(error_without, ddp, "_sync_buffers", "plain_ddp")
    assert "DistributedDataParallel has no _sync_buffers in torch" in said
