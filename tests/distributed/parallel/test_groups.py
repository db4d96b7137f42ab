"""Process groups: the mesh makes all of them, a run leaves none behind, and nothing waits for a peer that is gone."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from lightning_videoscale.cost.benchmark.ranks import Ranks as BenchmarkRanks
from lightning_videoscale.parallel import SequenceMesh, parallelize
from lightning_videoscale.strategies import SequenceParallelDDPStrategy, SequenceParallelFSDP2Strategy
from tests.distributed.forking import forking
from tests.distributed.pool import ProcessPool
from tests.models import tiny_wan
from tests.strategies.failures.failing_training import Module, split_plan

Ranks = Callable[[int], ProcessPool]
STRATEGIES: dict[str, Any] = {"ddp": SequenceParallelDDPStrategy, "fsdp2": SequenceParallelFSDP2Strategy}


def groups() -> list[str]:
    """The process groups that torch knows on this rank."""
    return sorted(dist.distributed_c10d._world.pg_names.values())


@contextmanager
def leaving(count: int = 0) -> Iterator[None]:
    before = groups()
    yield
    assert len(groups()) == len(before) + count, f"{before} before, {groups()} now"


class Averaged(Module):
    """Keeps a copy of the split network, as for a moving average, and validates with it."""

    def on_fit_start(self) -> None:
        if not hasattr(self, "average") and not isinstance(self.net, FSDPModule):  # which cannot be copied
            self.average = copy.deepcopy(self.net).requires_grad_(False)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        network = getattr(self, "average", self.net)
        self.log("val_loss", (network(batch) - batch).square().mean(), sync_dist=True)


def loader() -> DataLoader[Tensor]:
    return DataLoader(torch.randn(8, 9, 8, generator=torch.Generator().manual_seed(1)))


def trainer_of(strategy: Any, **settings: Any) -> pl.Trainer:
    return pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=dist.get_world_size(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"max_steps": 2} | settings),
    )


def run_loops(strategy: str, folder: Path, sizes: dict[str, int]) -> None:
    module = Averaged()
    trainer = trainer_of(STRATEGIES[strategy](modules=["net"], plan=split_plan(), **sizes))
    kept = 2 if sizes.get("replicas", 1) > 1 else 0  # over which FSDP2's parameters stay sharded
    with leaving(kept):
        trainer.fit(module, loader(), loader())
    with leaving():
        (first,) = trainer.validate(module, loader(), verbose=False)
        assert first["val_loss"] > 0
        trainer.save_checkpoint(folder / "last.ckpt")
        trainer.fit_loop.epoch_loop.max_steps = 4
        trainer.fit(module, loader(), loader())
        assert trainer.global_step == 4
        for parameter in module.parameters():
            if strategy == "fsdp2":
                parameter.full_tensor()
        with pytest.raises(RuntimeError, match=r"with strategy\.mesh"):
            assert trainer.strategy.mesh.sp.group
        with trainer.strategy.mesh as mesh:  # as one samples after training
            ones = torch.ones(1)
            dist.all_reduce(ones, group=mesh.sp.group)
            assert ones.item() == mesh.sp.size
    if kept:
        with leaving(-kept):
            trainer.strategy.mesh.close()


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        pytest.param("ddp", {"ulysses_size": 2}, marks=pytest.mark.full),
        pytest.param("ddp", {"ulysses_size": 2, "ring_size": 2}, marks=pytest.mark.full),
        pytest.param("fsdp2", {"ulysses_size": 2}, marks=pytest.mark.full),
        ("fsdp2", {"ulysses_size": 2, "replicas": 2}),
    ],
)
def test_a_run_closes_its_groups_and_the_next_makes_its_own(
    ranks: Ranks, tmp_path: Path, strategy: str, sizes: dict[str, int]
) -> None:
    ranks(4).run(run_loops, strategy, tmp_path, sizes)


def fail_together() -> None:
    class Failing(Averaged):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 1:
                raise ValueError("the actual cause")
            return super().training_step(batch, batch_idx)

    trainer = trainer_of(SequenceParallelDDPStrategy(modules=["net"], plan=split_plan()))
    with leaving(), pytest.raises(ValueError, match="the actual cause"):
        trainer.fit(Failing(), loader())
    with leaving():
        trainer.fit(Averaged(), loader())


def test_an_exception_closes_the_groups(ranks: Ranks) -> None:
    try:
        ranks(2).run(fail_together)
    finally:
        ranks(2).stop()


def run_plain() -> None:
    model, inputs = tiny_wan(), (torch.ones(1, 4, 1, 4, 4), torch.ones(1), torch.ones(1, 5, 16))
    with torch.no_grad():
        whole = model(*inputs).sample
        with leaving():
            with SequenceMesh.create("cpu", ulysses_size=2) as mesh:
                parallelize(model, mesh)
                torch.testing.assert_close(model(*inputs).sample, whole)
            with pytest.raises(RuntimeError, match="is closed"):
                model(*inputs)
            mesh.close()
            mesh.open()  # what holds the mesh works again
            torch.testing.assert_close(model(*inputs).sample, whole)
            mesh.close()


def test_plain_pytorch_closes_its_mesh(ranks: Ranks) -> None:
    ranks(2).run(run_plain)


def agree_on_the_host(strategy: str) -> list[float]:
    results: list[float] = []

    class Agreeing(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            with leaving():
                ranks = BenchmarkRanks(trainer)
                results.append(ranks.largest(float(dist.get_rank())))
                ranks.close()

    made = DDPStrategy() if strategy == "plain" else STRATEGIES[strategy](modules=["net"], plan=split_plan())
    with leaving():
        trainer_of(made, max_steps=1, callbacks=[Agreeing()]).fit(Averaged(), loader())
    return results


@pytest.mark.parametrize("strategy", ["plain", "ddp"])
def test_a_benchmark_closes_its_group_under_any_strategy(ranks: Ranks, strategy: str) -> None:
    assert ranks(2).run(agree_on_the_host, strategy) == [[1.0], [1.0]]


def close_without_a_peer(rank: int, folder: Path, fault: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    mesh = SequenceMesh.create("cpu", ulysses_size=2, timeout=timedelta(minutes=10))
    messages = mesh.duplicate(mesh.sp, "gloo")
    dist.all_reduce(torch.ones(1), group=mesh.sp.group)
    if rank == 1:
        time.sleep(1)  # in which what the other rank waits for has been sent
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "hang": signal.SIGSTOP}[fault])
    pending = [
        dist.broadcast(torch.ones(10_000), 1, group=group, async_op=True) for group in (mesh.sp.group, messages.group)
    ]
    start = time.monotonic()
    with leaving(-3):
        mesh.close(after_failure=True)
    del pending, mesh, messages
    (folder / "seconds").write_text(str(time.monotonic() - start))


@pytest.mark.timed
@pytest.mark.parametrize("fault", ["kill", "hang"])
def test_closing_does_not_wait_for_a_peer_that_is_gone(tmp_path: Path, fault: str) -> None:
    processes = [forking().Process(target=close_without_a_peer, args=(rank, tmp_path, fault)) for rank in range(2)]
    try:
        for process in processes:
            process.start()
        processes[0].join(100)
        assert float((tmp_path / "seconds").read_text()) < 3
        assert processes[0].exitcode == 0
    finally:
        for process in processes:
            process.kill()
            process.join()


def groups_of_a_mesh() -> int:
    before = len(groups())
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh:
        assert mesh.duplicate(mesh.dp).group is not mesh.dp.group
        return len(groups()) - before


def test_axes_of_the_same_ranks_share_a_group(ranks: Ranks) -> None:
    assert ranks(2).run(groups_of_a_mesh) == [3, 3], "ulysses with sp, dp with ring, and the duplicate"
