"""What exchanges keep beside CUDA graphs, and schedules that are measured as graphs run them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader

from lightning_videoscale.attention import AttentionChoices
from lightning_videoscale.graphs import Recorder
from lightning_videoscale.parallel import SequenceMesh
from lightning_videoscale.parallel.schedules import PENDING
from lightning_videoscale.parallel.schedules.choices import ScheduleChoices
from lightning_videoscale.parallel.schedules.records import ScheduleFile, ScheduleRecord
from lightning_videoscale.parallel.schedules.table import LayerShape
from lightning_videoscale.parallel.transport import TransportName, create_transport
from lightning_videoscale.strategies import SequenceParallelDDPStrategy
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import Clips, RectifiedFlow

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
Ranks = Callable[[int], ProcessPool]
SHORT, LONG = (2, 64, 64), (6, 64, 64)  # latents of 2 048 and 6 144 tokens
SHAPE = LayerShape(
    batch=1, tokens=512, width=512, heads=4, kv_heads=4, head_dim=128, across_heads=True, dtype="bfloat16"
)


def kept_after(*shapes: tuple[int, int, int]) -> tuple[int, int]:
    """Bytes of messages after four steps of each shape, one shape after the other, and how many calls were replayed."""
    pl.seed_everything(1, verbose=False)
    strategy = SequenceParallelDDPStrategy(
        2, 1, transport="symmetric", schedule="sliced", attention_backend="sdpa", graphs=True
    )
    found = []

    class Look(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            assert strategy.transport is not None
            found.append((strategy.transport.memory_bytes, strategy.describe_graphs()["replayed"]))

    trainer = pl.Trainer(
        accelerator="gpu",
        devices=2,
        strategy=strategy,
        precision="bf16-mixed",
        max_steps=4 * len(shapes),
        callbacks=[Look()],
        use_distributed_sampler=False,  # which would shuffle
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    clips = ConcatDataset([Clips(shape, torch.float32, length=4) for shape in shapes])
    trainer.fit(RectifiedFlow(num_layers=2, num_attention_heads=4, attention_head_dim=64), DataLoader(clips))
    return found[0]


def test_messages_keep_no_memory_of_shorter_clips_whose_graphs_are_gone(gpu_ranks: Ranks) -> None:
    pool = gpu_ranks(2)
    for (alone, _), (both, replayed) in zip(pool.run(kept_after, LONG), pool.run(kept_after, SHORT, LONG), strict=True):
        assert both == alone > 0
        assert replayed == 2 * 2


def measured(folder: Path, transport: TransportName) -> tuple[ScheduleRecord, ScheduleRecord, list[str]]:
    """What is measured of a small layer, as calls and by graphs."""
    lines: list[str] = []
    device = torch.device("cuda", torch.cuda.current_device())
    with SequenceMesh.create("cuda", ulysses_size=2) as mesh:
        messages = create_transport(transport, mesh, device, timedelta(seconds=60), PENDING)
        for recorder in (None, Recorder):
            schedules = ScheduleChoices(folder=folder, recorder=recorder, log=lines.append)
            schedules.prepare(mesh, messages, AttentionChoices("sdpa"))
            schedules.choose(SHAPE, schedules.table)
            for _ in range(4):  # the first time, kernels take longer to compile than a kind of layer may take
                schedules.settle()
        torch.distributed.barrier()  # rank 0 has written
        name = torch.cuda.get_device_name(device)
        kept = [ScheduleFile(name, folder, by_graphs=by_graphs).read() for by_graphs in (False, True)]
        messages.close()
    assert all(len(found) == 1 for found in kept), lines
    (as_calls,), (by_graphs,) = (found.values() for found in kept)
    return as_calls, by_graphs, lines


@pytest.mark.parametrize("transport", ["collective", "symmetric"])
def test_schedules_are_measured_by_graphs_where_steps_run_by_them(
    gpu_ranks: Ranks, tmp_path: Path, transport: TransportName
) -> None:
    for as_calls, by_graphs, lines in gpu_ranks(2).run(measured, tmp_path, transport):
        assert not any("without CUDA graphs" in line for line in lines)
        assert by_graphs.seconds.keys() == as_calls.seconds.keys() == {"serial", "overlap", "sliced"}
        # The host has little to launch.
        assert all(seconds < 0.7 * as_calls.seconds[name] for name, seconds in by_graphs.seconds.items())
