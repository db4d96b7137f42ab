"""`ulysses_ddp` as a Trainer uses it: places, batches, random numbers, weights, messages."""

from __future__ import annotations

import pickle
import random
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_videoscale.parallel import Split, SplitPlan, Whole
from lightning_videoscale.strategies import SequenceParallelDDPStrategy
from lightning_videoscale.topology import topology_of
from tests.distributed.pool import ProcessPool
from tests.models import tiny_wan

Ranks = Callable[[int], ProcessPool]
NOTHING_TO_SPLIT = SplitPlan({}, {}, {}, lambda model, context: lambda: None)


def trainer(strategy: Any, **kwargs: Any) -> pl.Trainer:
    defaults = {"max_steps": 2, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        enable_model_summary=False,
        **(defaults | kwargs),
    )


class Recorder(pl.LightningModule):
    """Notes what it sees; computes next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.net.weight)
        self.seen: list[Any] = []

    def note(self, batch: Any) -> None:
        x = batch["x"] if isinstance(batch, dict) else batch
        self.seen.append((x.flatten().tolist(), torch.rand(()).item(), np.random.rand(), random.random()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.note(batch)
        if self.global_rank == 0:
            torch.rand(5)  # what only one rank draws must not tear the ranks apart
        x = batch["x"] if isinstance(batch, dict) else batch
        return self.net(x.view(-1, 1)).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def strategy(ulysses_size: int) -> SequenceParallelDDPStrategy:
    return SequenceParallelDDPStrategy(ulysses_size=ulysses_size, modules=["net"], plan=NOTHING_TO_SPLIT)


# -- selecting -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ulysses_size"), [("ulysses_ddp", None), ("usp_ddp", 4)])
def test_the_name_is_registered(name: str, ulysses_size: int | None) -> None:
    assert name in StrategyRegistry.available_strategies()
    built = pl.Trainer(strategy=name, accelerator="cpu").strategy
    assert isinstance(built, SequenceParallelDDPStrategy)
    assert built._settings.sizes(devices_per_node=8) == (8, ulysses_size)


def test_lightning_cli_takes_the_name_and_the_class() -> None:
    def parse(*args: str) -> Any:
        return LightningCLI(BoringModel, BoringDataModule, run=False, args=list(args)).trainer.strategy

    accelerator = "--trainer.accelerator=cpu"
    assert isinstance(parse(accelerator, "--trainer.strategy=ulysses_ddp"), SequenceParallelDDPStrategy)
    built = parse(
        accelerator,
        "--trainer.strategy=lightning_videoscale.SequenceParallelDDPStrategy",
        "--trainer.strategy.ulysses_size=2",
        "--trainer.strategy.modules=[net]",
    )
    assert built._settings.ulysses_size == 2
    assert built._settings.modules == ["net"]
    built = parse(accelerator, "--trainer.strategy=usp_fsdp2")
    assert (built._settings.ulysses_size, built._settings.ring_size) == (None, 2)
    sizes = {"ulysses_size": 2, "ring_size": "auto", "sp_size": 4}
    named = [f"--trainer.strategy.{name}={size}" for name, size in sizes.items()]
    built = parse(accelerator, "--trainer.strategy=lightning_videoscale.SequenceParallelFSDP2Strategy", *named)
    assert {name: getattr(built._settings, name) for name in sizes} == sizes


def test_a_plan_needs_the_network_it_describes() -> None:
    with pytest.raises(ValueError, match=r"plan=.*modules=None"):
        SequenceParallelDDPStrategy(plan=NOTHING_TO_SPLIT)


def test_the_mesh_is_not_there_before_setup() -> None:
    with pytest.raises(RuntimeError, match=r"mesh.*setup"):
        _ = SequenceParallelDDPStrategy().data_parallel_rank


# -- places, batches, random numbers -------------------------------------------------------------------------------


def fit_and_validate(ulysses_size: int) -> tuple[int, int, int, list[Any], list[Any]]:
    torch.manual_seed(100 + dist.get_rank())  # unseeded ranks start anywhere
    module = Recorder()
    runner = trainer(strategy(ulysses_size), num_sanity_val_steps=0, limit_val_batches=2, val_check_interval=1)
    loader = DataLoader(torch.arange(16.0), batch_size=2)
    runner.fit(module, loader, DataLoader(torch.arange(16.0), batch_size=2))
    topology = topology_of(runner)
    place = (topology.data_parallel_rank, topology.data_parallel_size, topology.sequence_parallel_size)
    return *place, module.seen, list(module.device_mesh.shape)


class Staggered(Recorder):
    """Rank 0's first micro-batch lasts until rank 1 has come to the last one of the same step."""

    def __init__(self, folder: Path, micro_batches: int) -> None:
        super().__init__()
        self.folder, self.micro_batches = folder, micro_batches

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        step, micro_batch = divmod(batch_idx, self.micro_batches)
        here = self.folder / str(step)
        if dist.get_rank() == 1 and micro_batch == self.micro_batches - 1:
            here.touch()
        if dist.get_rank() == 0 and micro_batch == 0:
            wait_until(here.exists, 30.0, f"rank 1 has not come to the end of step {step}: it waits for rank 0")
        return super().training_step(batch, batch_idx)


def wait_until(holds: Callable[[], bool], timeout: float, otherwise: str) -> None:
    end = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < end, otherwise
        time.sleep(0.01)


def train_staggered(folder: Path) -> int:
    runner = trainer(strategy(1), max_steps=2, accumulate_grad_batches=3)
    runner.fit(Staggered(folder, 3), DataLoader(torch.arange(24.0), batch_size=2))
    return runner.global_step


def test_ranks_wait_for_each_other_once_a_step(ranks: Ranks, tmp_path: Path) -> None:
    """Lightning lets all ranks wait for rank 0 before every micro-batch."""
    assert ranks(2).run(train_staggered, tmp_path) == [2, 2]


def test_a_group_shares_its_batch_and_its_random_numbers(ranks: Ranks) -> None:
    first, second, third, fourth = ranks(4).run(fit_and_validate, ulysses_size=2)
    assert [result[:3] for result in (first, second, third, fourth)] == [(0, 2, 2), (0, 2, 2), (1, 2, 2), (1, 2, 2)]
    assert first[4] == [2, 1, 2]
    assert first[3] == second[3]
    assert third[3] == fourth[3]
    drawn = [value for _, *values in first[3] + third[3] for value in values]
    assert len(drawn) == len(set(drawn)) == 2 * 6 * 3, "streams, batches and validation draw different numbers"
    trained_on = {value for result in (first, third) for batch, *_ in result[3][::3] for value in batch}
    assert len(trained_on) == 2 * 2 * 2, "data-parallel ranks read different samples"


class GroupNumbers(IterableDataset[Tensor]):
    """A user's stream, another one in each group of two ranks."""

    def __iter__(self) -> Any:
        return iter(torch.full((8, 1), float(dist.get_rank() // 2)))


def fit_stream() -> list[Any]:
    module = Recorder()
    trainer(strategy(2)).fit(module, DataLoader(GroupNumbers(), batch_size=2))
    return [batch for batch, *_ in module.seen]


def test_a_users_own_stream_is_shared_too(ranks: Ranks) -> None:
    results = ranks(4).run(fit_stream)
    assert results[0] == results[1] == [[0.0, 0.0]] * 2
    assert results[2] == results[3] == [[1.0, 1.0]] * 2


class Weight:
    def __init__(self, loss_weight: float) -> None:
        self.loss_weight = loss_weight


class TakesVideosOut(Recorder):
    """Makes another batch of what is on the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch["x"]


def fit_weighted(reader: type[Recorder]) -> float:
    def batches() -> Any:
        weight = [0.5, 1.0][dist.get_rank() // 2]
        return [{"x": torch.ones(2), "meta": Weight(weight), "caption": ["a", "b"]}]

    module = reader()
    trainer(strategy(2), max_steps=1).fit(module, DataLoader(batches(), batch_size=None))
    return float(module.net.weight)


@pytest.mark.parametrize("reader", [Recorder, TakesVideosOut])
def test_the_loss_weight_of_the_plan_is_applied_once(ranks: Ranks, reader: type[Recorder]) -> None:
    # d loss / d weight = 1 on every rank, so the step is the mean of the weights, 0.5 and 1.
    assert ranks(4).run(fit_weighted, reader) == [0.25] * 4


def fit_nested() -> tuple[float, int]:
    module = Recorder()
    batches = [{"x": torch.ones(2), "videos": [{"meta": Weight(0.5)}]}] * 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(strategy(2), max_steps=1).fit(module, DataLoader(batches, batch_size=None))
    return float(module.net.weight), sum("loss_weight" in str(warning.message) for warning in caught)


def test_loss_weights_within_a_batch_of_batches_are_said_to_be_left_out(ranks: Ranks) -> None:
    assert ranks(2).run(fit_nested) == [(0.0, 1), (0.0, 0)]


def fit_transformed() -> tuple[list[str], str]:
    module, order = Recorder(), []
    selected = strategy(2)
    selected.add_model_transform(lambda m: order.append(f"first on {type(m).__name__}"))
    selected.add_model_transform(lambda m: order.append("second"))

    class Late(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            try:
                selected.add_model_transform(lambda m: None)
            except RuntimeError as error:
                order.append(str(error))

    trainer(selected, callbacks=[Late()]).fit(module, DataLoader(torch.arange(8.0), batch_size=2))
    return order[:2], order[2]


def test_transforms_run_once_in_order_before_wrapping(ranks: Ranks) -> None:
    for order, message in ranks(4).run(fit_transformed):
        assert order == ["first on Recorder", "second"]
        assert "transforms" in message and "before" in message


# -- messages ------------------------------------------------------------------------------------------------------


class TwoNetworks(Recorder):
    def __init__(self, **nets: nn.Module) -> None:
        super().__init__()
        for name, net in nets.items():
            setattr(self, name, net)


def setup_messages() -> list[str]:
    messages = []
    for module, selected in (
        (TwoNetworks(net=tiny_wan()), SequenceParallelDDPStrategy(ulysses_size=3)),
        (TwoNetworks(net=tiny_wan(num_attention_heads=3)), SequenceParallelDDPStrategy(ulysses_size=4)),
        (TwoNetworks(), SequenceParallelDDPStrategy()),
        (TwoNetworks(student=tiny_wan(), teacher=tiny_wan()), SequenceParallelDDPStrategy()),
        (TwoNetworks(student=tiny_wan()), SequenceParallelDDPStrategy(modules=["pupil"])),
    ):
        try:
            trainer(selected).fit(module, DataLoader(torch.arange(8.0), batch_size=2))
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_setup_says_what_does_not_fit_and_the_way_out(ranks: Ranks) -> None:
    devices, heads, no_plan, several, unknown = ranks(4).run(setup_messages)[0]
    assert "4 devices" in devices and "groups of 3" in devices
    assert "one of [1, 2, 4]" in devices
    assert "3 heads" in heads and "ulysses_size=4" in heads
    assert "Use ulysses_size <= 3" in heads
    assert "{'net': 'Linear'}" in no_plan
    assert "modules=[...] and plan=SplitPlan(...)" in no_plan
    assert "['student', 'teacher']" in several
    assert "['pupil']" in unknown and "['net', 'student']" in unknown


def fit_with_different_settings(of_plan: bool) -> str:
    size, plan = (2 if dist.get_rank() else 4), NOTHING_TO_SPLIT
    if of_plan:
        size, plan = 2, replace(plan, whole={"": Whole({}, {0: Split(1)})} if dist.get_rank() else {})
    selected = SequenceParallelDDPStrategy(ulysses_size=size, modules=["net"], plan=plan)
    try:
        trainer(selected).fit(Recorder(), DataLoader(torch.arange(8.0), batch_size=2))
    except ValueError as error:
        return str(error)
    return "no error"


def test_ranks_with_different_settings_stop_and_name_the_difference(ranks: Ranks) -> None:
    for message in ranks(4).run(fit_with_different_settings, False):
        assert (
            "different values of ulysses_size= for the strategy: rank 0: 4, rank 1: 2, rank 2: 2, rank 3: 2" in message
        )
    for message in ranks(4).run(fit_with_different_settings, True):
        assert "different values of plan= for the strategy: rank 0: " in message and "{'': Whole(" in message


def compiled_message() -> str:
    module = TwoNetworks(net=tiny_wan())
    module.net.blocks[1].compile()
    try:
        trainer(SequenceParallelDDPStrategy()).fit(module, DataLoader(torch.arange(8.0), batch_size=2))
    except ValueError as error:
        return str(error)
    return "no error"


def test_blocks_that_are_compiled_already_are_refused(ranks: Ranks) -> None:
    assert "['net.blocks.1']" in ranks(4).run(compiled_message)[0]


class GoesBackwardItself(pl.LightningModule):
    """Manual optimization by Lightning's rule, as it is written without Lightning, or with averages of its own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.net, self.way, self.automatic_optimization = tiny_wan(), way, False

    def training_step(self, batch: Tensor) -> None:
        loss = self.net(batch, torch.ones(1), torch.ones(1, 5, 16)).sample.square().mean()
        if self.way == "manual_backward":
            self.manual_backward(loss)
        elif self.way == "backward":
            loss.backward()
        else:
            self.average_gradients(loss)
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()

    def average_gradients(self, loss: Tensor) -> None:
        parameters = list(self.net.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            dist.all_reduce(gradient)
            parameter.grad = gradient / dist.get_world_size()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def go_backward(way: str) -> str:
    data = DataLoader(torch.ones(4, 4, 1, 4, 6), batch_size=1)
    try:
        trainer(SequenceParallelDDPStrategy(ulysses_size=2)).fit(GoesBackwardItself(way), data)
    except RuntimeError as error:
        return str(error)
    return ""


def test_gradients_that_nobody_averages_are_an_error(ranks: Ranks) -> None:
    assert ranks(2).run(go_backward, "manual_backward") == ["", ""]
    assert ranks(2).run(go_backward, "averages of its own") == ["", ""]
    assert all("self.manual_backward(loss)" in message for message in ranks(2).run(go_backward, "backward"))


def test_ranks_may_be_spawned() -> None:
    strategy = SequenceParallelDDPStrategy(ulysses_size=2, start_method="spawn")
    sent = pickle.loads(pickle.dumps(strategy))  # as it is for its processes
    assert sent._settings == strategy._settings and sent._start_method == "spawn"
