"""A training's memory lies in segments that grow, unless the environment says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

TRAINS = """
import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_videoscale  # registers the strategies

pl.Trainer(strategy="ulysses_ddp", accelerator="cuda", devices=1, max_steps=2, logger=False,
           enable_checkpointing=False, enable_progress_bar=False, limit_val_batches=0).fit(BoringModel())
print("growing:", [segment["is_expandable"] for segment in torch.cuda.memory_snapshot()])
"""


@pytest.mark.parametrize(("setting", "grow"), [(None, True), ("expandable_segments:False", False)])
def test_segments_grow_unless_the_environment_says_otherwise(setting: str | None, grow: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    if setting is not None:
        environment["PYTORCH_ALLOC_CONF"] = setting
    done = subprocess.run(
        [sys.executable, "-c", TRAINS], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("growing:")]
    assert ("True" in line, "False" in line) == (grow, not grow), done.stdout
    assert ("expandable segments" in done.stderr) == grow, done.stderr
