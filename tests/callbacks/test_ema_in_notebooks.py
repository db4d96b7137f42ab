"""From a notebook `fit` trains in processes that end with it, and averages with them: no weights are taken for them."""

from __future__ import annotations

from pathlib import Path

from tests.scripts import run_forked

NOTEBOOK = """
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_videoscale.callbacks import EMA
from lightning_videoscale.strategies import read_weights
from tests.callbacks.test_ema import DATA, Line, trainer


class Logging(Line):
    def test_step(self, batch, batch_idx):
        self.log("slope", self.line.weight.item())


module, ema = Logging(), EMA(0.5)
runner = trainer(ema, ModelCheckpoint(".", "fit"), strategy="ddp_notebook", enable_checkpointing=True)
runner.fit(module, DATA)
try:
    with ema.average_weights():
        print("average_weights: showed the weights")
except RuntimeError as error:
    print("average_weights:", error)
(found,) = runner.test(module, DATA, ckpt_path="best", verbose=False)
averaged = read_weights("fit.ckpt", averaged=True)["line.weight"].item()
print("averaged:", found["slope"] == averaged != module.line.weight.item())
try:
    print("test:", runner.test(module, DATA, verbose=False))
except Exception as error:
    print("test:", error)
"""


def test_averages_are_in_checkpoints_of_a_notebook_alone(tmp_path: Path) -> None:
    script = tmp_path / "notebook.py"
    script.write_text(NOTEBOOK)
    printed = run_forked(tmp_path, script).stdout.splitlines()
    said = [line for line in printed if line.startswith(("average_weights:", "RuntimeError:"))]
    assert len(said) == 2 and all("ckpt_path=" in line and "read_weights" in line for line in said)
    assert "averaged: True" in printed
