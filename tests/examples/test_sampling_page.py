"""The code of docs/sampling.md runs, with smaller numbers, on a tiny Wan in the place of the one that it names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import WanTransformer3DModel

from lightning_videoscale.callbacks import EMA
from lightning_videoscale.cli import main
from lightning_videoscale.cost import BucketBudget
from lightning_videoscale.data import VideoDataModule
from lightning_videoscale.strategies import read_weights
from tests.data.clips import clip, npy, write_shard
from tests.data.training import Witness, trainer_with
from tests.distributed.callbacks.sampling import Drawing, Pipelines, save_parts
from tests.distributed.pool import ProcessPool
from tests.examples.conftest import EXAMPLES
from tests.models import tiny_wan

PAGE = EXAMPLES.parent / "docs" / "sampling.md"

SMALLER = {
    "devices=8": "devices=2, accelerator='cpu', num_sanity_val_steps=0, enable_progress_bar=False",
    "max_steps=5000": "max_steps=2",
    "every_n_steps=500": "every_n_steps=1, num_inference_steps=2",
    "height=480, width=832, num_frames=81": "height=32, width=32, num_frames=5",
    "{000..099}.tar": "000.tar",
    '.tar")': '.tar", budget=BUDGET)',
}


def run_page(folder: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for written, smaller in SMALLER.items():
        assert written in code, written
        code = code.replace(written, smaller)
    home = Path.cwd()
    os.chdir(folder)
    try:
        exec(code, {"BUDGET": BucketBudget(m_mem=64, m_comp=64**2, p=2.0)})
    finally:
        os.chdir(home)


def test_the_code_of_the_page_runs(ranks: Callable[[int], ProcessPool], tmp_path: Path, monkeypatch: Any) -> None:
    module = Drawing()
    module.transformer = tiny_wan(num_layers=1)
    whole = Pipelines(save_parts(tmp_path / "parts"))(module)
    whole.save_pretrained(tmp_path / "Wan-AI/Wan2.1-T2V-1.3B-Diffusers")
    text = npy(np.ones((5, 16), np.float32))
    write_shard(tmp_path / "latents/000.tar", [clip(i, (4, 2, 4, 4)) | {"text_embeds.npy": text} for i in range(8)])
    ranks(2).run(run_page, tmp_path)
    found = sorted(file.name for file in tmp_path.glob("lightning_logs/*/samples/*.mp4"))
    assert found == [f"step-0000000{step}-prompt-0{prompt}.mp4" for step in range(3) for prompt in range(2)]
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"```\nvideoscale (.*?)\n```", PAGE.read_text())
    assert main(command.split()) == 0
    assert main([*command.split()[:-1], "trained", "--no-ema"]) == 0
    for folder, averaged in (("exported", True), ("trained", False)):
        exported = WanTransformer3DModel.from_pretrained(tmp_path / folder).state_dict()
        weights = read_weights(tmp_path / "wan.ckpt", "transformer", averaged=averaged)
        other = read_weights(tmp_path / "wan.ckpt", "transformer", averaged=not averaged)
        assert all(torch.equal(value, weights[name]) for name, value in exported.items())
        assert not all(torch.equal(value, other[name]) for name, value in exported.items())


def test_a_checkpoint_is_validated_as_the_page_says(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    shard = write_shard(tmp_path / "000.tar", [clip(i) for i in range(4)])
    data = VideoDataModule(shard, val_shards=shard, budget=BucketBudget(m_mem=160, m_comp=160**2))
    module, trainer = Witness(), trainer_with(callbacks=[EMA()])
    trainer.fit(module, data)
    trainer.save_checkpoint("wan.ckpt")
    (call,) = re.findall(r"`(trainer\.\w+\(module, data, ckpt_path=.*?\))`", PAGE.read_text())
    module.validated.clear()
    exec(call, {"trainer": trainer, "module": module, "data": data})
    assert sum(len(ids) for ids in module.validated[-1]) == 4
