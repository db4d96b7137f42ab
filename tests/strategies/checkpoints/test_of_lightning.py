"""Checkpoints of Lightning's own strategies that shard, which ours go on from."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_videoscale.strategies import (
    SequenceParallelDDPStrategy,
    SequenceParallelFSDP2Strategy,
    read_weights,
)
from lightning_videoscale.strategies.checkpoints.errors import CheckpointError
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import all_assembled
from tests.strategies.checkpoints.checkpointing import NOTHING_TO_SPLIT
from tests.strategies.fsdp2.training import trainer

Ranks = Callable[[int], ProcessPool]


class Net(pl.LightningModule):
    """Its optimizer takes parameters in another order than the module has them, in groups, or leaves some out."""

    def __init__(self, groups: int, frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        self.net[0].requires_grad_(not frozen)
        self.groups = groups

    def training_step(self, batch: Tensor) -> Tensor:
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        taken = [parameter for parameter in self.parameters() if parameter.requires_grad][::-1]
        groups = [{"params": taken[part :: self.groups], "lr": 0.01 * (part + 1)} for part in range(self.groups)]
        return torch.optim.AdamW(groups)


class Sharded(Net):
    """For Lightning's ModelParallelStrategy."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def train(module: Net, strategy: Strategy | str, steps: int, start: Path | None = None) -> pl.Trainer:
    runner = trainer(strategy, max_steps=steps)
    data = torch.randn(3, generator=torch.Generator().manual_seed(1)).expand(8, 3)  # one sample, on all ranks
    runner.fit(module, DataLoader(data, batch_size=1), ckpt_path=start)
    return runner


def save_and_go_on(folder: Path, groups: int, frozen: bool) -> list[dict[str, Tensor]]:
    train(expected := Net(groups, frozen), "ddp", 4)
    file, shards = folder / "file.ckpt", folder / "shards.ckpt"
    train(Sharded(groups, frozen), ModelParallelStrategy(save_distributed_checkpoint=False), 2).save_checkpoint(file)
    paths = [file, consolidated(shards, groups, frozen)] if groups > 1 else [file]
    found = [expected]
    for path in paths:
        for strategy in (SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy):
            train(module := Net(groups, frozen), strategy(modules=["net"], plan=NOTHING_TO_SPLIT), 4, path)
            found.append(module)
    return [all_assembled(module.named_parameters()) for module in found]


def consolidated(shards: Path, groups: int, frozen: bool) -> Path:
    """Saves shards, which are refused, and makes a file of them as the error says."""
    train(Sharded(groups, frozen), ModelParallelStrategy(save_distributed_checkpoint=True), 2).save_checkpoint(shards)
    with pytest.raises(CheckpointError, match="fabric consolidate"):
        train(Net(groups, frozen), SequenceParallelDDPStrategy(modules=["net"], plan=NOTHING_TO_SPLIT), 4, shards)
    if torch.distributed.get_rank() == 0:
        fabric = "from lightning.fabric.cli import _main; _main()"  # what the command of this name runs
        subprocess.run([sys.executable, "-c", fabric, "consolidate", str(shards)], check=True)
    torch.distributed.barrier()
    return shards.with_name("shards.ckpt.consolidated")


@pytest.mark.parametrize(("groups", "frozen"), [pytest.param(1, False, marks=pytest.mark.full), (2, True)])
def test_states_go_to_the_parameters_that_they_are_of(ranks: Ranks, tmp_path: Path, groups: int, frozen: bool) -> None:
    expected, *found = ranks(2).run(save_and_go_on, tmp_path, groups, frozen)[0]
    for weights in found:
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-7)
    weights = read_weights(tmp_path / "file.ckpt", "net")
    assert weights.keys() == {name.removeprefix("net.") for name in expected}
