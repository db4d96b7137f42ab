"""The workers of a loader share the samples of a micro-batch, and nobody can tell from what comes out."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable
from functools import partial
from itertools import chain
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import get_worker_info

from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data import Batch, BatchMeta, MicroBatch, ShardError, VideoDataModule
from lightning_videoscale.data.loading import reader as reader_module
from lightning_videoscale.data.loading.loader import PlannedLoader
from lightning_videoscale.data.loading.parts import in_parts
from lightning_videoscale.data.loading.reader import MicroBatchReader
from lightning_videoscale.data.shards.indexing import index_shards
from lightning_videoscale.data.shards.sample_reader import Cut, SampleReader
from tests.data.clips import npy, write_shard
from tests.data.films import picture
from tests.data.training import Witness, trainer_with
from tests.distributed.forking import forking

META = BatchMeta(1, 48, 64, 12, 3, 1.0, loss_weight=1.0)


def _micro_batch(*samples: int) -> MicroBatch:
    return MicroBatch(samples, META._replace(samples=len(samples)))


class _Plan:
    """Stands for the sampler of an epoch."""

    def __init__(self, *micro_batches: MicroBatch) -> None:
        self._micro_batches = micro_batches

    def __iter__(self) -> Any:
        return iter(self._micro_batches)

    def __len__(self) -> int:
        return len(self._micro_batches)


def _pictures(folder: Path, damaged: tuple[int, ...] = ()) -> Path:
    """Nine pictures: masks, words of two lengths, and a style that few have. The damaged ones do not decode."""
    samples = []
    for i in range(9):
        sample = {"__key__": f"{i:02}", "png": picture(i, "PNG"), "txt": f"picture {i}".encode()}
        sample |= {"mask.npy": npy(np.full((2, 2), i, "u1")), "words.npy": npy(np.full(1 + i // 4, i, "f2"))}
        if i in (3, 8):
            sample["style.json"] = b'{"bright": %d}' % i
        if i in damaged:
            sample["mask.npy"] = b"no array"
        samples.append(sample)
    return write_shard(folder / "000.tar", samples)


def _loaded(shard: Path, *micro_batches: MicroBatch, num_workers: int) -> list[dict[str, Any]]:
    reader, plan = MicroBatchReader(index_shards([str(shard)])), _Plan(*micro_batches)
    return list(PlannedLoader(reader, plan, num_workers))  # type: ignore[arg-type]


def _assert_equal(batch: Any, twin: Any) -> None:
    assert list(batch) == list(twin)
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            other = twin[name]
            assert value.dtype == other.dtype and value.stride() == other.stride() and torch.equal(value, other), name
        elif name == "words":
            assert [x.tolist() for x in value] == [x.tolist() for x in twin[name]]
        else:
            assert value == twin[name], name


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_batches_are_the_same_with_any_number_of_workers(tmp_path: Path, num_workers: int) -> None:
    shard = _pictures(tmp_path)
    plan = [_micro_batch(4, 0, 8, 3, 2), _micro_batch(7), _micro_batch(1, 6, 5), _micro_batch(0, 0)]
    alone = _loaded(shard, *plan, num_workers=0)
    assert [batch["sample_ids"] for batch in alone[1:3]] == [["000.tar/07"], [f"000.tar/0{i}" for i in (1, 6, 5)]]
    assert alone[0]["style"] == [None, None, {"bright": 8}, {"bright": 3}, None]
    assert isinstance(alone[0]["words"], list) and alone[1]["words"].dtype == torch.float16
    assert alone[0]["video"].shape == (5, 3, 1, 48, 64)
    for batch, twin in zip(_loaded(shard, *plan, num_workers=num_workers), alone, strict=True):
        _assert_equal(batch, twin)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_cannot_be_read_of_any_part_is_missing_with_its_weight(tmp_path: Path, num_workers: int) -> None:
    shard = _pictures(tmp_path, damaged=(0, 1, 2, 3))
    plan = [_micro_batch(0, 4, 1, 5), _micro_batch(2, 3, 6, 7), _micro_batch(0, 1, 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = _loaded(shard, *plan, num_workers=num_workers)
    assert [batch["sample_ids"] for batch in batches[:2]] == [
        ["000.tar/04", "000.tar/05"],
        ["000.tar/06", "000.tar/07"],
    ]
    assert [batch["meta"].loss_weight for batch in batches] == [0.5, 0.5, 0.0]
    assert [batch["meta"].samples for batch in batches] == [2, 2, 1] and len(batches[2]["video"]) == 1
    assert batches[1]["mask"][:, 0, 0].tolist() == [6, 7]


def test_nothing_left_of_a_shape_is_an_error_with_workers_too(tmp_path: Path) -> None:
    shard = _pictures(tmp_path, damaged=tuple(range(9)))
    with warnings.catch_warnings(), pytest.raises(ShardError, match=r"others of their shape.*'0\d\.mask\.npy'"):
        warnings.simplefilter("ignore")
        _loaded(shard, _micro_batch(0, 1, 2), num_workers=2)


def test_workers_take_equally_many_samples() -> None:
    micro_batches = [_micro_batch(*range(n)) for n in (3, 3, 1, 8, 2, 5, 7, 3)]
    for workers in (1, 2, 3, 5):
        parts = list(in_parts(micro_batches, workers, lambda _: True))
        rows = [(part.micro_batch, row) for part in parts for row in range(part.begin, part.end)]
        assert rows == [(m, row) for m in micro_batches for row in range(len(m.samples))], "all, in order"
        assert sum(part.is_last for part in parts) == len(micro_batches)
        taken = [sum(part.end - part.begin for part in parts[worker::workers]) for worker in range(workers)]
        assert max(taken) - min(taken) <= 2, "one for samples left over, one for micro-batches of few"
    assert all(part.is_whole for part in in_parts(micro_batches, 4, lambda _: False))


def test_every_worker_decodes_some_of_a_micro_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = SampleReader.read

    def noting(self: SampleReader, number: int, cut: Cut | None = None) -> dict[str, Any]:
        info = get_worker_info()
        assert info is not None
        return read(self, number, cut) | {"worker": info.id}

    monkeypatch.setattr(SampleReader, "read", noting)
    shard = _pictures(tmp_path)
    batches = _loaded(shard, _micro_batch(*range(9)), _micro_batch(0, 1, 2), _micro_batch(5), num_workers=2)
    assert [batch["worker"] for batch in batches] == [[0] * 5 + [1] * 4, [0, 1, 1], [0]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_latents_become_float32_after_they_have_crossed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    values = torch.linspace(-3, 3, 4 * 3 * 8 * 8).reshape(4, 3, 8, 8)
    kinds = [torch.float16, torch.float16, torch.float16, torch.bfloat16, torch.float32, torch.float64]
    samples = [
        {"__key__": str(i), "latents.safetensors": safetensors.torch.save({"latents": (i * values).to(kind)})}
        for i, kind in enumerate(kinds)
    ]
    shard = write_shard(tmp_path / "000.tar", samples)
    crossed: list[list[torch.dtype]] = []
    together = MicroBatchReader.together

    def noting(self: MicroBatchReader, parts: Any, pin: bool = False) -> Any:
        crossed.append([latents.dtype for part in parts for latents in part.columns["latents"]])
        return together(self, parts, pin)

    monkeypatch.setattr(MicroBatchReader, "together", noting)
    meta = BatchMeta(3, 8, 8, 48, 3, 1.0, 1.0)
    plan = [MicroBatch((0, 1, 2), meta), MicroBatch((3, 4, 5), meta), MicroBatch((4,), meta)]
    batches = _loaded(shard, *plan, num_workers=num_workers)
    for batch, micro_batch in zip(batches, plan, strict=True):
        expected = [(i * values).to(kinds[i]).float() for i in micro_batch.samples]
        assert batch["latents"].dtype == torch.float32 and torch.equal(batch["latents"], torch.stack(expected))
    assert crossed == [[kinds[i] for i in micro_batch.samples] for micro_batch in plan]


class _Killing(SampleReader):
    """The worker that reads sample 7 is killed, as by a host that is short of memory."""

    def read(self, number: int, cut: Cut | None = None) -> dict[str, Any]:
        if number == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(number, cut)


class _Losing:
    """Loses the connection to the one worker after its first part, a moment before that is killed."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Any:
        return self._parts(iter(self._loader))

    def _parts(self, received: Any) -> Any:
        yield next(received)
        (worker,) = active_children()
        threading.Timer(0.2, worker.kill).start()
        raise ConnectionResetError


NAMED = r"worker \(pid\(?s?\)? \d+.*\) .*(Killed|exited)"


def _reads_with_a_worker_that_is_killed(shard: Path) -> None:
    torch.multiprocessing.set_start_method("fork", force=True)  # the worker is to find what is replaced here
    reader_module.SampleReader = _Killing  # type: ignore[attr-defined,misc]
    with pytest.raises(RuntimeError, match=NAMED):
        _loaded(shard, _micro_batch(0, 1), _micro_batch(5, 6, 7, 8), num_workers=1)


def _loses_the_connection_before_the_end_is_known(shard: Path, method: str) -> None:
    torch.multiprocessing.set_start_method(method, force=True)
    plan = _Plan(_micro_batch(0), _micro_batch(1))
    loader = PlannedLoader(MicroBatchReader(index_shards([str(shard)])), plan, num_workers=1)  # type: ignore[arg-type]
    loader._loader = _Losing(loader._loader)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=NAMED):
        list(loader)


@pytest.mark.parametrize(
    "read",
    [
        _reads_with_a_worker_that_is_killed,
        partial(_loses_the_connection_before_the_end_is_known, method="fork"),
        partial(_loses_the_connection_before_the_end_is_known, method="forkserver"),  # Python's choice as of 3.14
    ],
    ids=["while reading", "in a connection", "in a connection of a forkserver"],
)
def test_a_worker_that_dies_is_named(tmp_path: Path, read: Callable[[Path], None]) -> None:
    """In a process of its own: torch raises wherever the main thread is when it hears of the end."""
    process = forking().Process(target=read, args=(_pictures(tmp_path),))
    process.start()
    process.join(120)
    assert process.exitcode == 0


class Pixels(Witness):
    """Trains on pixels."""

    def loss(self, batch: Batch) -> torch.Tensor:
        return super().loss({"latents": batch["video"]})


def test_a_checkpoint_that_is_taken_while_workers_are_ahead_goes_on_where_training_stood(tmp_path: Path) -> None:
    shard, modules = str(_pictures(tmp_path)), []
    for resume in (None, "step=1.ckpt", "step=4.ckpt"):
        modules.append(Pixels())
        saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        data = VideoDataModule(shard, budget=BucketBudget(36, 1e9), num_workers=2)
        trainer = trainer_with(max_epochs=2, callbacks=[saver] * (resume is None), enable_checkpointing=resume is None)
        trainer.fit(modules[-1], data, ckpt_path=resume and tmp_path / resume)
    whole, *resumed = modules
    assert [len(batch) for batch in whole.batches[0]] == [3, 3, 3]
    for module, step in zip(resumed, (1, 4), strict=True):
        assert module.gradients == whole.gradients[step:]
        assert [*chain(*module.batches.values())] == [*chain(*whole.batches.values())][step:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_joined_parts_are_in_page_locked_memory(tmp_path: Path) -> None:
    reader, plan = MicroBatchReader(index_shards([str(_pictures(tmp_path))])), _Plan(_micro_batch(0, 1, 2, 3))
    (batch,) = PlannedLoader(reader, plan, num_workers=2, pin_memory=True)  # type: ignore[arg-type]
    assert batch["video"].is_pinned() and batch["mask"].is_pinned()


def test_a_module_with_workers_delivers_what_it_does_without(tmp_path: Path) -> None:
    """From the shards to the batch, over two epochs, as a Trainer asks for them."""
    shard = str(_pictures(tmp_path))
    seen = []
    for num_workers in (0, 2):
        data = VideoDataModule(shard, budget=BucketBudget(60, 1e9), num_workers=num_workers, seed=3)
        data.prepare_data()
        data.setup("fit")
        loader = data.train_dataloader()
        seen.append([])
        for epoch in (0, 1):
            loader.sampler.set_epoch(epoch)
            seen[-1] += list(loader)
    assert len(seen[0]) >= 4 and max(len(batch["sample_ids"]) for batch in seen[0]) > 2
    for batch, twin in zip(*seen, strict=True):
        _assert_equal(batch, twin)
