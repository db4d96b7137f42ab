"""A training that is killed at some point of some rank, and a parent that starts the next one from what was kept.

The module keeps a list of what it has trained on in its checkpoints: the lineage. Whatever happened to a run, the
lineage of its last checkpoint must hold every sample of an epoch once.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn

from lightning_videoscale.callbacks import LossWeighting
from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data import Batch, VideoDataModule

BUDGET = BucketBudget(m_mem=160, m_comp=160 * 80)


@dataclass(frozen=True)
class Leg:
    """One start of the run.

    Attributes:
        ranks: Data-parallel ranks.
        workers: Processes per rank that read ahead.
        micro_batches: Micro-batches of a step.
        balance: The plan's.
        every_n_steps: Steps between checkpoints.
        kill: Rank, hook and how often it was called, when that rank dies; None trains to the end of the epoch.
    """

    ranks: int
    workers: int
    micro_batches: int
    balance: str
    every_n_steps: int
    kill: tuple[int, str, int] | None


class Lineage(pl.LightningModule):
    """Keeps the samples that every optimizer step was made of, of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.steps: list[list[str]] = []
        self.within: list[str] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch["meta"].loss_weight:
            self.within += batch["sample_ids"]
        return ((self.slope * batch["latents"].double().mean(dim=(1, 2, 3, 4)) / 100 - 1) ** 2).mean()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        of_ranks: list[list[str]] = [self.within]
        if dist.is_initialized():
            of_ranks = [[]] * dist.get_world_size()
            dist.all_gather_object(of_ranks, self.within)
        self.steps.append([name for names in of_ranks for name in names])
        self.within = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["lineage"] = self.steps

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.steps = checkpoint["lineage"]


class Killer(Callback):
    """Ends its process, as an operating system does that has no memory left."""

    def __init__(self, hook: str, count: int) -> None:
        self.hook, self.count = hook, count

    def _pass(self, hook: str) -> None:
        self.count -= hook == self.hook
        if self.count == 0 and hook == self.hook:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_start(self, *_: Any) -> None:
        self._pass("on_train_batch_start")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._pass("on_before_optimizer_step")

    def on_save_checkpoint(self, *_: Any) -> None:
        self._pass("on_save_checkpoint")

    def on_train_batch_end(self, *_: Any) -> None:
        self._pass("on_train_batch_end")


HOOKS = ("on_train_batch_start", "on_before_optimizer_step", "on_save_checkpoint", "on_train_batch_end")


def train(leg: Leg, rank: int, meeting: str, shards: str, folder: Path) -> None:
    """One rank of one leg: from the newest checkpoint in a folder to the end of the epoch, or to the kill."""
    torch.set_num_threads(1)
    # As in any script; a child of a fork server would start servers of its own for its workers.
    torch.multiprocessing.set_start_method("fork", force=True)
    strategy = "auto"
    if leg.ranks > 1:
        places = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": leg.ranks,
            "LOCAL_WORLD_SIZE": leg.ranks,
            "GROUP_RANK": 0,
        }
        os.environ |= {name: str(value) for name, value in places.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "tests"}
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=leg.ranks)
        strategy = "ddp"
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=leg.every_n_steps, save_top_k=1)
    killer = [Killer(*leg.kill[1:])] if leg.kill is not None and leg.kill[0] == rank else []
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=leg.ranks, max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, accumulate_grad_batches=leg.micro_batches,
        callbacks=[LossWeighting(), *killer, saver],
    )  # fmt: skip
    data = VideoDataModule(
        shards,
        None,
        leg.balance,
        BUDGET,
        micro_batches=leg.micro_batches,
        num_workers=leg.workers,  # type: ignore[arg-type]
    )
    trainer.fit(Lineage(), data, ckpt_path=newest(folder))
    trainer.save_checkpoint(folder / "done.ckpt")


def newest(folder: Path) -> Path | None:
    """The checkpoint of the most steps."""
    found = list(folder.glob("step=*.ckpt"))
    return max(found, key=lambda file: int(file.stem.removeprefix("step=").split("-")[0]), default=None)


class Run:
    """A folder of checkpoints and the processes that write them."""

    def __init__(self, shards: str, folder: Path) -> None:
        self.shards, self.folder = shards, folder
        self.context: ForkServerContext = get_context("forkserver")
        # The server imports everything once, and the ranks are forked from it in a moment.
        self.context.set_forkserver_preload(["tests.data.killing"])

    def start(self, leg: Leg, timeout: float = 100.0) -> bool:
        """Trains until the end of the epoch (True), or until any rank is dead, and then kills the others (False)."""
        meeting = str(Path(tempfile.mkdtemp(prefix="ranks-")) / "store")
        ranks = [
            self.context.Process(target=train, args=(leg, rank, meeting, self.shards, self.folder))
            for rank in range(leg.ranks)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + timeout
        while any(process.is_alive() for process in ranks) and all(p.exitcode in (None, 0) for p in ranks):
            assert time.monotonic() < deadline, f"{leg} hangs"
            time.sleep(0.01)
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
            process.join()
        assert all(code in (None, 0, -signal.SIGKILL) for code in codes), f"{leg} failed: exit codes {codes}"
        return codes == [0] * leg.ranks

    def lineage(self) -> list[list[str]]:
        """The samples of every step of the finished run."""
        steps: list[list[str]] = torch.load(self.folder / "done.ckpt", weights_only=False)["lineage"]
        return steps
