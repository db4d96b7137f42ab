"""What importing the package loads and makes known, whatever comes first."""

from __future__ import annotations

import subprocess
import sys

import pytest

import lightning_videoscale as vs

LIGHTNING_FIRST = """
import sys
import lightning.pytorch
brought_by_lightning = set(sys.modules)
import lightning_videoscale.kernels, lightning_videoscale.parallel
print(*sys.modules.keys() - brought_by_lightning)
print(*lightning_videoscale.parallel.known_models())
import lightning_videoscale.injection
print("diffusers" in sys.modules)
trainer = lightning.pytorch.Trainer(strategy="ulysses_ddp", accelerator="cpu", devices=1, logger=False)
print(type(trainer.strategy).__name__)
"""

TRAINER = """
{imports}
trainer = lightning.pytorch.Trainer(strategy="ulysses_ddp", accelerator="cpu", devices=1, logger=False)
print(type(trainer.strategy).__name__)
"""

COMMAND_LINE = """
{imports}
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
args = ["--trainer.strategy=usp_fsdp2", "--trainer.accelerator=cpu", "--trainer.logger=false"]
print(type(LightningCLI(BoringModel, args=args, run=False).trainer.strategy).__name__)
"""

EITHER_ORDER = ["import lightning.pytorch, lightning_videoscale", "import lightning_videoscale, lightning.pytorch"]


def printed_by(script: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_plain_pytorch_loads_neither_data_nor_callbacks_and_knows_plans_and_strategies() -> None:
    loaded, known, model_library, strategy = (line.split() for line in printed_by(LIGHTNING_FIRST)[:4])
    heavy = {"webdataset", "scipy", "matplotlib", "torchmetrics", "diffusers", "deepspeed"}
    ours = {f"lightning_videoscale.{room}" for room in ("data", "callbacks", "cost", "metrics", "report", "timing")}
    assert not (heavy | ours).intersection(loaded)
    assert "lightning_videoscale.parallel.ulysses" in loaded
    assert "WanTransformer3DModel" in known
    assert model_library == ["False"], "injection imports no model library"
    assert strategy == ["SequenceParallelDDPStrategy"]


@pytest.mark.parametrize(
    ("script", "imports", "strategy"),
    [
        pytest.param(TRAINER, EITHER_ORDER[1], "SequenceParallelDDPStrategy", marks=pytest.mark.full),
        pytest.param(COMMAND_LINE, EITHER_ORDER[0], "SequenceParallelFSDP2Strategy", marks=pytest.mark.full),
        (COMMAND_LINE, EITHER_ORDER[1], "SequenceParallelFSDP2Strategy"),
    ],
)
def test_strategies_are_known_by_name_in_either_order_of_imports(script: str, imports: str, strategy: str) -> None:
    assert printed_by(script.format(imports=imports))[-1] == strategy


def test_every_public_name_is_there_and_no_other() -> None:
    assert set(vs.__all__) <= set(dir(vs))
    assert all(getattr(vs, name) is not None for name in vs.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = vs.no_such_name
