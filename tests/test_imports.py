"""What importing the package loads and makes known, whatever comes first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lightning_videoscale as vs

LIGHTNING_FIRST = """
import sys
import lightning.pytorch
brought_by_lightning = set(sys.modules)
import lightning_videoscale.kernels, lightning_videoscale.parallel
print(*sorted(set(sys.modules) - brought_by_lightning))
print(*lightning_videoscale.parallel.known_models())  # which reads the files of all families
print(*sorted(set(sys.modules) - brought_by_lightning))
import lightning_videoscale.injection
print("diffusers" in sys.modules)
trainer = lightning.pytorch.Trainer(strategy="ulysses_ddp", accelerator="cpu", devices=1, logger=False)
print(type(trainer.strategy).__name__)
"""

SPLIT_WAN = """
import os, sys
import torch, torch.distributed as dist
from diffusers import WanTransformer3DModel
from lightning_videoscale.parallel import SequenceMesh, parallelize
child = os.fork()  # two ranks import once
dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(child > 0), world_size=2)
torch.manual_seed(0)
model = WanTransformer3DModel(
    num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=16, ffn_dim=32,
    num_layers=1,
)
inputs = torch.randn(1, 4, 2, 4, 4), torch.tensor([500.0]), torch.randn(1, 3, 16)
(whole,) = model(*inputs, return_dict=False)
undo = parallelize(model, SequenceMesh.create("cpu", ulysses_size=2))
sys.stdout.write(type(model.blocks[0].attn1.processor).__name__ + "\\n")
torch.testing.assert_close(model(*inputs, return_dict=False)[0], whole)
undo()
sys.stdout.write(type(model.blocks[0].attn1.processor).__name__ + "\\n")
dist.destroy_process_group()
if not child:
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
assert "lightning" not in sys.modules
from lightning.pytorch.cli import LightningCLI  # after our package; the other order has a test of its own
from lightning.pytorch.demos.boring_classes import BoringModel
args = ["--trainer.strategy=usp_fsdp2", "--trainer.accelerator=cpu", "--trainer.logger=false"]
sys.stdout.write(type(LightningCLI(BoringModel, args=args, run=False).trainer.strategy).__name__ + "\\n")
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
    imported, known, then_imported, model_library, strategy = (line.split() for line in printed_by(LIGHTNING_FIRST)[:5])
    heavy = {"webdataset", "scipy", "matplotlib", "torchmetrics", "diffusers", "deepspeed"}
    rooms = {f"lightning_videoscale.{room}" for room in ("data", "callbacks", "metrics", "report", "timing")}
    assert not (heavy | rooms).intersection(then_imported)
    assert not {"lightning_videoscale.cost", "lightning_videoscale.models"}.intersection(imported)
    assert "lightning_videoscale.parallel.ulysses" in imported and "lightning_videoscale.models.wan" in then_imported
    assert "WanTransformer3DModel" in known
    assert model_library == ["False"], "injection imports no model library"
    assert strategy == ["SequenceParallelDDPStrategy"]


def test_a_wan_is_split_by_who_imports_nothing_but_parallel_and_a_strategy_is_known_then(tmp_path: Path) -> None:
    store = f"file://{tmp_path / 'store'}"
    arguments = [sys.executable, "-c", SPLIT_WAN, store]
    done = subprocess.run(arguments, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *processors, strategy = done.stdout.split()
    assert sorted(processors) == ["SequenceParallelWanAttention"] * 2 + ["WanAttnProcessor"] * 2
    assert strategy == "SequenceParallelFSDP2Strategy"


@pytest.mark.full  # one of each in `make test`, above
@pytest.mark.parametrize("imports", EITHER_ORDER)
@pytest.mark.parametrize(
    ("script", "strategy"),
    [(TRAINER, "SequenceParallelDDPStrategy"), (COMMAND_LINE, "SequenceParallelFSDP2Strategy")],
)
def test_strategies_are_known_by_name_in_either_order_of_imports(script: str, imports: str, strategy: str) -> None:
    assert printed_by(script.format(imports=imports))[-1] == strategy


FIRST = """
import importlib, os, sys
import torch, torch._dynamo, torchmetrics  # most of what importing Lightning takes
for module in sys.argv[1:]:
    if not (child := os.fork()):  # each imports Lightning by itself
        importlib.import_module(f"lightning_videoscale.{module}")
        from lightning.pytorch.strategies import StrategyRegistry
        assert "ulysses_ddp" in StrategyRegistry
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, module
"""


@pytest.mark.full  # `parallel` and `kernels` in `make test`, above
def test_any_room_may_be_the_first_to_import_lightning() -> None:
    first = ["strategies.ddp", "compat.lightning", "trained_weights", "callbacks.ema"]
    done = subprocess.run([sys.executable, "-c", FIRST, *first], text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_package_alone_loads_nothing() -> None:
    script = "import sys, lightning_videoscale\nprint(*sorted({'torch', 'lightning', 'numpy'} & set(sys.modules)))"
    assert printed_by(script) == [""]


def test_every_public_name_is_there_and_no_other() -> None:
    assert set(vs.__all__) <= set(dir(vs))
    assert all(getattr(vs, name) is not None for name in vs.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = vs.no_such_name
