"""Shared batches arrive on the device, over a stream of their own, and are whole when the training reads them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_videoscale.parallel import SequenceMesh, SplitPlan
from lightning_videoscale.strategies import SequenceParallelDDPStrategy
from lightning_videoscale.strategies.batches.group_loader import GroupLoader
from lightning_videoscale.strategies.batches.sharing import BatchSharing
from lightning_videoscale.strategies.generators import seed_generators
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]
pytestmark = pytest.mark.gpu


class Clips(Dataset[dict[str, Any]]):
    """Clips whose every element is their number."""

    def __init__(self, count: int, elements: int) -> None:
        self.count = count
        self.elements = elements
        self.read = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read += 1
        x = torch.full((self.elements,), float(index))
        return {"caption": f"clip {index}", "x": x, "mask": x > 0, "half": x.bfloat16()}


def read_while_the_device_is_busy() -> tuple[list[Any], int]:
    device = torch.device("cuda", torch.cuda.current_device())
    mesh = SequenceMesh.create("cuda", ulysses_size=dist.get_world_size(), timeout=timedelta(seconds=30))
    sharing = BatchSharing(mesh, device)
    dataset = Clips(40, 4_000_000)
    loader = GroupLoader(
        DataLoader(dataset, batch_size=1, pin_memory=True),
        sharing,
        lambda *place: seed_generators(0, *place),
        to_device=True,
        ends_together=lambda: True,
    )
    seen, load = [], torch.randn(4096, 4096, device=device)
    for batch in loader:
        for _ in range(10):
            load = torch.nn.functional.normalize(load @ load)  # what the device does while the next batch arrives
        assert all(batch[name].device == device for name in ("x", "mask", "half"))
        seen.append((batch["caption"], batch["x"].min(), batch["x"].max(), batch["mask"].sum(), batch["half"].max()))
    return [(caption, *(float(x) for x in rest)) for caption, *rest in seen], dataset.read


def test_batches_are_whole_on_every_device(gpu_ranks: Ranks) -> None:
    results = gpu_ranks(2).run(read_while_the_device_is_busy)
    expected = [([f"clip {i}"], i, i, 4_000_000 if i else 0, i) for i in range(40)]
    assert all(seen == expected for seen, _ in results)
    assert [read for _, read in results] == [21, 21]  # in turns; the first by both, to compare


class Collecting(Clips):
    """Collects garbage where it is read."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        gc.collect()
        return super().__getitem__(index)


class Node:
    """Refers to itself, and so is garbage when it is let go."""

    def __init__(self, value: Any) -> None:
        self.value, self.itself = value, self


def read_after_garbage() -> list[float]:
    device = torch.device("cuda", torch.cuda.current_device())
    mesh = SequenceMesh.create("cuda", ulysses_size=dist.get_world_size(), timeout=timedelta(seconds=30))
    sharing = BatchSharing(mesh, device)
    seen: list[float] = []
    gc.disable()
    try:
        for epoch in range(2):
            loader = GroupLoader(
                DataLoader(Collecting(4, 1000), batch_size=1, num_workers=1),
                sharing,
                lambda *place, epoch=epoch: seed_generators(epoch, *place),
                to_device=True,
                ends_together=lambda: True,
            )
            for batch in loader:
                seen.append(Node(batch).value["x"].max().item())
    finally:
        gc.enable()
    return seen


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_workers_may_collect_what_the_training_has_let_go() -> None:
    pool = ProcessPool(2, "nccl", timeout=120.0, with_children=True)
    try:
        assert pool.run(read_after_garbage) == [[0.0, 1.0, 2.0, 3.0] * 2] * 2
    finally:
        pool.stop()


class WithHooks(pl.LightningModule):
    def __init__(self, before: bool) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.seen: list[float] = []
        if before:
            self.on_before_batch_transfer = self.on_host  # type: ignore[method-assign]

    def on_host(self, batch: Any, dataloader_idx: int) -> Any:
        assert batch["x"].device.type == "cpu", "as without sequence parallelism"
        return batch | {"x": batch["x"] + torch.rand(1)}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        own = torch.Generator(self.device)
        own.seed()  # on every rank another one
        noise = torch.rand(batch["x"].shape, device=self.device, generator=own)
        return batch | {"x": batch["x"] + noise}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch["x"].double().sum().item())
        return self.net(batch["x"][:, :1]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit_with_hooks(before: bool) -> list[float]:
    plan = SplitPlan({}, {}, {}, lambda model, context: lambda: None)
    module = WithHooks(before)
    pl.Trainer(
        strategy=SequenceParallelDDPStrategy(modules=["net"], plan=plan),
        accelerator="gpu",
        devices=dist.get_world_size(),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    ).fit(module, DataLoader(Clips(8, 1000), batch_size=2))
    return module.seen


@pytest.mark.parametrize("before", [False, True])
def test_what_hooks_make_of_a_batch_is_shared_too(gpu_ranks: Ranks, before: bool) -> None:
    first, second = gpu_ranks(2).run(fit_with_hooks, before)
    assert first == second and len(first) == 4
