"""The code of pages of docs/ runs as it stands, on small things in the place of large ones.

Other tests run the other pages: `RUN_BY` in tests/test_docs.py says which.
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_videoscale as vs
from lightning_videoscale.cli import main
from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.injection import FusedBlock
from tests.data.clips import clip, write_shard
from tests.data.training import Witness, trainer_with
from tests.distributed.callbacks.sampling import Pipelines, save_parts
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import Clips as Latents
from tests.distributed.wan_training import RectifiedFlow
from tests.models import tiny_wan
from tests.newcomer import blocks, commands, make_newcomers_folder, replaced
from tests.strategies.checkpoints.adapted import Adapted, Look, fit, look

Ranks = Callable[[int], ProcessPool]
DOCS = Path(__file__).parents[1] / "docs"
BUDGET = BucketBudget(m_mem=64, m_comp=64**2, p=2.0)


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text()


def run(script: str, **names: Any) -> dict[str, Any]:
    exec(script, names)
    return names


# -- data ------------------------------------------------------------------------------------------------------------

SMALLER = {
    "{000..099}": "*",
    " --sizes 480x832 720x1280": " --sizes 32x48 --fps 25 --max-frames 9 --workers 0",
    "train.yaml": "train.yaml --seconds 0.001 --max-shapes 2",
}


def test_the_page_on_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_newcomers_folder(tmp_path / "newcomer")
    monkeypatch.chdir(folder)
    trainer = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_checkpointing": False}
    content = {"trainer": trainer, "model": {"class_path": "tests.cost.benchmark.flow.Flow"}}
    (folder / "train.yaml").write_text(yaml.safe_dump(content | {"data": {"shards": "latents/*.tar"}}))
    done = []
    for command in commands(page("data")):
        for old, new in SMALLER.items():
            command = command.replace(old, new)
        words = shlex.split(command)
        assert words[0] == "videoscale" and main(words[1:]) == 0, command
        done.append(words[1])
    assert done == ["pack", "index", "encode", "benchmark-shapes", "plan"]
    assert "planned" in capsys.readouterr().out
    packed, online, _ = blocks(page("data"), "python")
    for script in (replaced(packed, {'.csv")': '.csv", budget=BUDGET)'}), made_smaller(online)):
        data = run(script, vs=vs, BUDGET=BUDGET)["data"]
        data.prepare_data()
        data.setup("fit")
        batches = list(data.train_dataloader())
        assert sorted(caption for batch in batches for caption in batch["caption"]) == [f"{i} {i}" for i in range(10)]
    encoded = run(script, vs=vs, BUDGET=BUDGET)["encode"](batches[0])
    assert encoded["latents"].ndim == 5 and encoded["text_embeds"].ndim == 3


def made_smaller(script: str) -> str:
    return replaced(script, {"{000..099}": "*", "encode=encode)": "encode=encode, budget=BUDGET)"})


def test_the_validation_sets_of_the_page_on_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, folder in enumerate(("films", "short", "long")):
        write_shard(tmp_path / folder / "000.tar", [clip(i) for i in range(3 + number)])
    script = replaced(blocks(page("data"), "python")[-1], {'"long/*.tar"]': '"long/*.tar"], budget=BUDGET'})
    module, names = Sets(), run(script, vs=vs, BUDGET=BUDGET)
    trainer_with(num_sanity_val_steps=0).fit(module, names["data"])
    assert module.samples == {0: 4, 1: 5} and len(module.batches[0]) == 3


class Sets(Witness):
    """Counts the samples of each validation set."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: Counter[int] = Counter()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.samples[dataloader_idx] += len(batch["sample_ids"])


# -- kernels -----------------------------------------------------------------------------------------------------------


MODEL = """
from torch import nn


class MyBlock(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.modulation, self.norm = nn.Linear(dim, 3 * dim), nn.LayerNorm(dim, elementwise_affine=False)
        self.mlp = nn.Linear(dim, dim)

    def forward(self, x, c):
        shift, scale, gate = self.modulation(c).unsqueeze(1).chunk(3, dim=-1)
        return x + gate * self.mlp(self.norm(x) * (1 + scale) + shift)


class TwoBranches(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.modulation, self.attn, self.mlp = nn.Linear(dim, 6 * dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.norm1, self.norm2 = (nn.LayerNorm(dim, elementwise_affine=False) for _ in range(2))

    def forward(self, x, c):
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(c).unsqueeze(1).chunk(6, dim=-1)
        x = x + gate * self.attn(self.norm1(x) * (1 + scale) + shift)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)
"""


def test_the_page_on_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    injected, own, branches = blocks(page("kernels"), "python")
    wan = tiny_wan()
    before = look(wan)
    found = run(injected.partition("report.undo()")[0], vs=vs, model=wan)
    torch.testing.assert_close(look(wan), before)
    assert found["report"].replaced and "WanTransformerBlock" in capsys.readouterr().out
    run("report.undo()" + injected.partition("report.undo()")[2], report=found["report"])
    assert torch.equal(look(wan), before)

    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("my_package.model")
    MyBlock = mine.MyBlock
    blocks_of_mine = nn.Sequential(MyBlock(), MyBlock())
    x, c = torch.randn(2, 5, 16), torch.randn(2, 16)
    expected = blocks_of_mine[0](x, c)
    assert len(run(own, model=blocks_of_mine)["report"].replaced) == 2
    torch.testing.assert_close(blocks_of_mine[0](x, c), expected)

    two = mine.TwoBranches()
    expected = two(x, c)
    fused = FusedBlock("my_package.model.TwoBranches", run(branches)["two_branches"], what="both norms")
    assert len(vs.inject_fused_kernels(nn.Sequential(two), extra_blocks=[fused]).replaced) == 1
    torch.testing.assert_close(two(x, c), expected)


# -- LoRA --------------------------------------------------------------------------------------------------------------


def train_adapter(folder: Path) -> Tensor:
    seen = Look()
    fit(Adapted(), "ddp", 1, None, folder / "last.ckpt", [seen])
    return seen.seen


def test_the_page_on_lora(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import PeftModel

    expected = ranks(1).run(train_adapter, tmp_path)[0]
    monkeypatch.chdir(tmp_path)
    tiny_wan().save_pretrained("Wan2.1-T2V-1.3B/transformer")
    for command in commands(page("lora")):
        assert main(shlex.split(command)[1:]) == 0, command
    torch.testing.assert_close(look(type(tiny_wan()).from_pretrained("merged")), expected, rtol=0, atol=2e-6)

    (script,) = blocks(page("lora"), "python")
    module = ModuleType("module")
    module.transformer = tiny_wan()  # type: ignore[attr-defined]
    pipeline = Pipelines(save_parts(tmp_path / "parts"))(module)  # type: ignore[arg-type]
    model = run(script, pipeline=pipeline, transformer=tiny_wan(), PeftModel=PeftModel)["model"]
    for loaded in (pipeline.transformer, model):
        torch.testing.assert_close(look(loaded), expected, rtol=0, atol=2e-6)


# -- checkpoints -------------------------------------------------------------------------------------------------------

HERE = (
    'accelerator="cpu", devices=1, max_steps=2, enable_progress_bar=False, callbacks=['
    'ModelCheckpoint(filename="last", every_n_train_steps=2)]'
)


def save_as_the_page_does(folder: Path) -> None:
    os.chdir(folder)
    background, whole = blocks(page("checkpoints"), "python")
    script = replaced(background, {"max_steps=10_000": HERE})
    trainer = run(script, ModelCheckpoint=ModelCheckpoint)["trainer"]
    module = RectifiedFlow(num_layers=1)
    trainer.fit(module, DataLoader(Latents((1, 4, 4), torch.float32), batch_size=1))
    run(whole, trainer=trainer, module=module, torch=torch)


def test_the_page_on_checkpoints(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(1).run(save_as_the_page_does, tmp_path)
    monkeypatch.chdir(tmp_path)
    (command,) = commands(page("checkpoints"))
    assert main(shlex.split(command)[1:]) == 0
    exported = load_file("exported/diffusion_pytorch_model.safetensors")
    gathered = torch.load("transformer.pt", weights_only=True)
    assert exported.keys() == gathered.keys()
    assert all(torch.equal(gathered[name], value) for name, value in exported.items())


# -- strategies --------------------------------------------------------------------------------------------------------


def train_by(name: str) -> Tensor:
    """What a network says of a clip after a step with the strategy of a page."""
    (script,) = blocks(page(name), "python")
    trainer = pl.Trainer(
        strategy=run(script)["strategy"], accelerator="cpu", devices=2, max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = RectifiedFlow(num_layers=1)
    trainer.fit(module, DataLoader(Latents((1, 4, 4), torch.float32), batch_size=1))
    return look(module.transformer)


def test_the_pages_on_graphs_and_schedules(ranks: Ranks) -> None:
    (first, _), (second, _) = (ranks(2).run(train_by, name) for name in ("schedules", "graphs"))
    torch.testing.assert_close(first, second)
    assert not torch.allclose(first, look(RectifiedFlow(num_layers=1).transformer))


def test_the_layouts_of_the_page_on_clusters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands, and the line of the log that the page shows; test_cluster.py and test_nodes.py run the rest."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer/config.json").write_text(json.dumps(dict(tiny_wan().config)))
    write_shard(tmp_path / "shards/000000.tar", [clip(i, (4, 2, 4, 4)) for i in range(2)])
    assert main(["index", "shards/000000.tar"]) == 0
    shown, of_clips = commands(page("cluster"))
    capsys.readouterr()
    assert main(shlex.split(shown)[1:]) == 0
    (line,) = blocks(page("cluster"), "text")
    assert capsys.readouterr().out.splitlines()[-1] == line.strip()
    command = replaced(of_clips, {"--ranks 4": "--ranks 2"})
    assert main(shlex.split(command)[1:]) == 0
    assert "clips of up to 8 tokens" in capsys.readouterr().out


# -- the report --------------------------------------------------------------------------------------------------------


def test_the_page_on_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with_report, recorded = blocks(page("report"), "python")

    class Records(Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            run(recorded, trainer=trainer)

    short = {"RunReport()]": 'RunReport(), Records()], max_epochs=1, accelerator="cpu", enable_progress_bar=False'}
    trainer = run(replaced(with_report, short), pl=pl, vs=vs, Records=Records)["trainer"]
    trainer.fit(RectifiedFlow(num_layers=1), DataLoader(Latents((1, 4, 4), torch.float32), batch_size=1))
    drawn = tmp_path / "lightning_logs/version_0/report.html"
    assert '"fvd": 312.5' in (drawn.parent / "run_log.jsonl").read_text()
    drawn.unlink()
    (command,) = commands(page("report"))
    assert main(shlex.split(replaced(command, {"version_7": "version_0"}))[1:]) == 0
    assert drawn.exists()
