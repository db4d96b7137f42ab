"""MemoryMonitor on a device whose allocator it really reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_videoscale.callbacks import MemoryMonitor
from tests.callbacks.toy import MemoryLogger, Meta, Slope, batches_of, trainer_with

pytestmark = pytest.mark.gpu

MIB = 2**20


class Hungry(Slope):
    """Takes one MiB per token while it computes."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        meta = batch["meta"]
        activations = torch.empty(meta.samples * meta.sequence_length * MIB, dtype=torch.uint8, device=self.device)
        loss = super().training_step(batch, batch_idx)
        del activations
        return loss


def test_peaks_and_headroom_are_the_devices() -> None:
    monitor, logger = MemoryMonitor(every_n_steps=1), MemoryLogger()
    metas = [Meta(1, 64), Meta(1, 64), Meta(2, 128), Meta(4, 128), Meta(1, 64)]
    trainer_with(monitor, logger=logger, accelerator="gpu").fit(Hungry(), batches_of(metas))

    rows = [row for _, row in logger.rows if "memory/peak_gib" in row]
    already = rows[0]["memory/peak_gib"] * 1024 - metas[0].samples * metas[0].sequence_length
    assert -1 < already < 256  # a model of one weight, and what matrix products took for themselves
    for row, meta in zip(rows, metas, strict=True):
        tokens = meta.samples * meta.sequence_length
        assert row["memory/peak_gib"] * 1024 == pytest.approx(already + tokens, abs=32)  # reset between the steps
        assert row["memory/allocated_gib"] < row["memory/peak_gib"] <= row["memory/reserved_gib"]
        assert 0.0 <= row["memory/fragmentation"] <= 1.0
    assert set(monitor.peaks) == {64, 256, 512}
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    headroom_mib = rows[-1]["memory/headroom_tokens"] + 64
    assert 0.5 * free_bytes / MIB < headroom_mib < total_bytes / MIB
