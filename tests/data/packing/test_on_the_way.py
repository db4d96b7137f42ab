"""Folders of videos where shards are asked for: what training reads of them, and who packs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data import Batch, ShapePolicy, ShardError, VideoDataModule
from lightning_videoscale.data.packing.on_the_way import already_packed, pack_on_the_way, packed_folder
from lightning_videoscale.data.packing.one_at_a_time import one_at_a_time
from tests.data.films import film, numbered, picture
from tests.data.training import trainer_with
from tests.distributed.pool import ProcessPool

POLICY = ShapePolicy(areas=(32 * 48,), fps=25.0, max_frames=1, crop_min_frames=1)
BUDGET = BucketBudget(1_000, 1e9)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three films of one frame with their captions beside them, and a photograph without."""
    videos = tmp_path / "videos"
    videos.mkdir()
    for number in range(3):
        (videos / f"{number}.mp4").write_bytes(film([numbered(number, 32, 48)]))
        (videos / f"{number}.txt").write_text(f"film {number}")
    (videos / "3.jpg").write_bytes(picture())
    return videos


class Keeper(pl.LightningModule):
    """Keeps the captions of all batches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.captions: list[str] = []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        if batch["meta"].loss_weight:
            self.captions += batch["caption"]
        return self.weight * batch["video"].float().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _fit(folder: str, **settings: Any) -> list[str]:
    module, given = Keeper(), {"budget": BUDGET, "shape_policy": POLICY}
    trainer_with(max_epochs=1, **settings).fit(module, VideoDataModule(folder, **given))  # type: ignore[arg-type]
    return module.captions


def _captions(data: VideoDataModule) -> list[str]:
    data.prepare_data()
    data.setup("fit")
    return sorted(text for batch in data.train_dataloader() for text in batch["caption"])


def test_a_folder_that_has_changed_is_packed_again(folder: Path) -> None:
    given: dict[str, Any] = {"budget": BUDGET, "shape_policy": POLICY}
    assert _captions(VideoDataModule(folder, **given)) == ["", "film 0", "film 1", "film 2"]
    (folder / "1.txt").write_text("another")
    os.remove(folder / "3.jpg")
    assert _captions(VideoDataModule(folder, **given)) == ["another", "film 0", "film 2"]
    table = folder.parent / "table.csv"
    table.write_text("file_name,text\n0.mp4,by table\n1.mp4,\n2.mp4,two\n")
    mixed = VideoDataModule({str(folder): 1.0}, captions=table, val_shards=str(folder), **given)
    assert _captions(mixed) == ["", "by table", "two"] and list(mixed.passes()) == [str(folder)]


def test_tables_of_one_name_have_shards_of_their_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [folder.parent / name for name in ("v1/captions.csv", "v2/captions.csv", "v2/captions.json")]
    for table in tables:
        table.parent.mkdir(exist_ok=True)
        rows = {f"{i}.mp4": f"{i} by {table.name}" for i in range(3)}
        lines = [f"{file},{text}" for file, text in rows.items()]
        table.write_text(json.dumps(rows) if table.suffix == ".json" else "\n".join(["file_name,text", *lines]))
    found = [pack_on_the_way([str(folder)], table, say=print) for table in tables]
    assert len({shard for each in found for shard in each.shards}) == len({each.index_file for each in found}) == 3
    assert found == [already_packed([str(folder)], table) for table in tables], "none was packed anew"
    monkeypatch.chdir(folder.parent)
    assert already_packed(["videos"], Path("v1/captions.csv")).shards == found[0].shards, "by another path to it"


def test_without_packing_nothing_is_read(folder: Path) -> None:
    with pytest.raises(ShardError, match=r"videoscale index '.*/videos'"):
        VideoDataModule(folder, budget=BUDGET).setup("fit")
    with pytest.raises(ShardError, match=r"table\.csv .*videoscale pack"):
        pack_on_the_way(["memory://no/000.tar"], Path("table.csv"), say=print)


def test_a_folder_of_someone_elses_is_left_alone(folder: Path) -> None:
    packed_folder(folder).mkdir()
    (packed_folder(folder) / "notes.txt").write_text("mine")
    with pytest.raises(ShardError, match=r"packed\.json.*videos\.packed"):
        pack_on_the_way([str(folder)], say=print)
    assert (packed_folder(folder) / "notes.txt").read_text() == "mine"


_HOLDER = """
import fcntl, os, sys, time
with open(sys.argv[1], "a+") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    lock.write(f"process {os.getpid()} on another node")
    lock.flush()
    print("holds", flush=True)
    time.sleep(60)
"""


def test_others_wait_for_the_one_that_packs_until_it_stands_still_or_ends(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = packed_folder(folder)
    lock = output.parent / f".{output.name}.lock"
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER, str(lock)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "holds\n"
        with pytest.raises(TimeoutError, match=rf"process {holder.pid} on .*0 seconds"), one_at_a_time(output, 0.0):
            pass
        assert f"process {holder.pid}" in caplog.text
        threading.Timer(0.7, holder.send_signal, [signal.SIGKILL]).start()
        begin = time.monotonic()
        found = pack_on_the_way([str(folder)], say=print)
        assert time.monotonic() - begin > 0.5, "it has waited"
    finally:
        holder.kill()
        holder.wait()
    assert already_packed([str(folder)]) == found and len(found.shards) == 1


def test_two_ranks_train_on_a_folder_that_one_has_packed(folder: Path, ranks: Callable[[int], ProcessPool]) -> None:
    captions = ranks(2).run(_fit, str(folder), strategy="ddp", devices=2)
    assert sorted(text for each in captions for text in each) == ["", "film 0", "film 1", "film 2"]
