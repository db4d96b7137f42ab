"""Where there is no GPU, networks run as without graphs, and say so."""

from __future__ import annotations

import logging
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_videoscale.callbacks import RunReport
from lightning_videoscale.report.findings import Findings
from lightning_videoscale.report.reading import read_run
from lightning_videoscale.report.sections import setup
from lightning_videoscale.strategies import SequenceParallelDDPStrategy
from tests.distributed.wan_training import Clips, RectifiedFlow


def test_a_network_on_cpus_runs_eagerly(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO)
    strategy = SequenceParallelDDPStrategy(ulysses_size=1, graphs=True)
    module = RectifiedFlow(num_layers=2)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=4,
        callbacks=[RunReport(tmp_path, every_n_steps=2)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(Clips((2, 4, 4), torch.float32), batch_size=1))
    assert trainer.global_step == 4
    assert "WanTransformer3DModel runs without CUDA graphs" in caplog.text
    assert "forward" not in vars(module.transformer)  # taken back
    counts = read_run(tmp_path).last("graphs")
    assert counts is not None and (counts["eager"], counts["bytes"]) == (4, 0)
    figures = dict(setup(Findings(read_run(tmp_path))))["CUDA graphs"]
    assert figures["forward passes by graph"] == "0.0\N{NO-BREAK SPACE}% of 4"
