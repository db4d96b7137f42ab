"""Sizes that are left out, in a Trainer: what is chosen, when it is known, and that training does not change by it."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_videoscale.cost import BucketBudget, MatrixRow, ShapeMatrix
from lightning_videoscale.cost.auto_budget import AutoBudget
from lightning_videoscale.data import VideoDataModule
from lightning_videoscale.parallel import SplitPlan
from lightning_videoscale.strategies import SequenceParallelDDPStrategy
from lightning_videoscale.strategies.mesh import division, of_run
from lightning_videoscale.strategies.settings import SequenceParallelSettings
from tests.data.clips import write_shards
from tests.data.training import Witness
from tests.distributed.pool import ProcessPool
from tests.distributed.wan_training import Clips, RectifiedFlow
from tests.strategies.fsdp2.training import clips, ddp, fsdp2, trainer

Ranks = Callable[[int], ProcessPool]

STRATEGIES = {"ddp": ddp, "fsdp2": fsdp2}


class Data(pl.LightningDataModule):
    """Clips of 8 tokens, and notes what of the mesh there is when it is set up."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: tuple[Any, ...] = ()

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        if stage != "fit":  # divided by then
            return
        strategy: Any = self.trainer.strategy
        with pytest.raises(RuntimeError, match="not divided"):
            _ = strategy.mesh.ulysses
        names = self.trainer.lightning_module.device_mesh.mesh_dim_names
        self.seen = strategy.data_parallel_rank, strategy.data_parallel_size, names

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Clips((2, 4, 4), torch.float32, length=16), batch_size=1)


def weights_of(module: RectifiedFlow) -> list[Tensor]:
    return [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in module.parameters()]


def fit_beside_named(kind: str) -> dict[str, Any]:
    """One head on two ranks: no Ulysses group can run."""
    results, said = {}, []
    with patch.object(of_run, "rank_zero_info", said.append):
        for name, sizes in {"chosen": {}, "named": {"ulysses_size": 1, "ring_size": 2}}.items():
            torch.manual_seed(0)
            module, data = RectifiedFlow(num_attention_heads=1), Data()
            strategy = STRATEGIES[kind](**sizes)
            runner = trainer(strategy)
            source = {"datamodule": data} if name == "chosen" else {"train_dataloaders": data.train_dataloader()}
            runner.fit(module, **source)
            results[name] = weights_of(module), repr(strategy.mesh), module.device_mesh.mesh_dim_names
            if name == "chosen":
                runner.test(module, data.train_dataloader(), verbose=False)  # opens the mesh again, as it is divided
                results["again"], results["seen"] = repr(strategy.mesh), data.seen
    (mine, *place), (theirs, *other) = results["chosen"], results["named"]
    return {
        "same": all(map(torch.equal, mine, theirs)),
        "places": [place, other],
        "again": results["again"],
        "seen": results["seen"],
        "said": said,
    }


@pytest.mark.parametrize("kind", STRATEGIES)
def test_what_is_chosen_trains_as_what_is_named(ranks: Ranks, kind: str) -> None:
    for rank, result in enumerate(ranks(2).run(fit_beside_named, kind)):
        assert result["same"], "the same bits"
        mesh = "SequenceMesh(dp=1, ring=2, ulysses=1)"
        assert result["places"] == [[mesh, ("dp", "ring", "ulysses")]] * 2 and result["again"] == mesh
        assert result["seen"] == (0, 1, ("dp", "sp")), "batch streams are known before the heads are"
        if rank == 0:
            assert [line for line in result["said"] if line.startswith("1 heads on 2 ranks: ulysses 1 x ring 2")]


def go_on(folder: str, sizes: dict[str, int]) -> tuple[str, list[float]]:
    """Two steps of a run whose third, from its checkpoint, is made under another layout."""
    torch.manual_seed(0)
    file, losses = Path(folder) / "checkpoint", []
    for number, own in enumerate(({"ulysses_size": 1, "ring_size": 2}, sizes)):
        module, strategy = RectifiedFlow(num_attention_heads=3), ddp(**own)
        runner = trainer(strategy, max_steps=2 + number)
        runner.fit(module, clips(), ckpt_path=file if number else None)
        runner.save_checkpoint(file)
        losses.append(runner.callback_metrics["loss"].item())
    return repr(strategy.mesh), losses


def test_a_layout_may_change_on_resume(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "same").mkdir()
    (named, before), *_ = ranks(2).run(go_on, str(tmp_path / "same"), {"ulysses_size": 1, "ring_size": 2})
    (chosen, after), *_ = ranks(2).run(go_on, str(tmp_path), {})
    assert (named, chosen) == ("SequenceMesh(dp=1, ring=2, ulysses=1)", "SequenceMesh(dp=1, ring=1, ulysses=2)")
    assert before == pytest.approx(after, rel=1e-5) and before[0] != before[1]


# -- lengths -------------------------------------------------------------------------------------------------------


class Flow(Witness):
    """Computes next to nothing, in a network that has nothing to split."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Identity()


def fit_shards(shards: str, sizes: dict[str, Any], budget: Any) -> tuple[str, str, int]:
    """The mesh, or why there is none, what was said, and the tokens of the longest clip."""
    said: list[str] = []
    plan = SplitPlan({}, {}, {}, lambda model, context: lambda: None)
    strategy = SequenceParallelDDPStrategy(modules=["net"], plan=plan, **sizes)
    data = VideoDataModule(shards, budget=budget)
    with ExitStack() as patches:
        for place in (of_run, division):
            patches.enter_context(patch.object(place, "rank_zero_info", said.append))
        try:
            trainer(strategy, accumulate_grad_batches=3, max_steps=1).fit(Flow(), data)
        except ValueError as error:
            return str(error), "", 0
    return repr(strategy.mesh), "\n".join(said), max(data.clip_lengths())


def test_sp_size_auto_is_as_small_as_the_longest_clip_allows(ranks: Ranks, tmp_path: Path) -> None:
    shards = write_shards(tmp_path, 12)
    pool, auto = ranks(2), {"sp_size": "auto"}

    def fit(m_mem: float) -> tuple[str, str, int]:
        results = pool.run(fit_shards, shards, auto, BucketBudget(m_mem, 1e9))
        assert len({mesh for mesh, _, _ in results}) == 1
        return results[0]

    mesh, said, longest = fit(1e9)
    assert mesh == "SequenceMesh(dp=2, ring=1, ulysses=1)" and "global batch is 6 micro-batches" in said
    assert fit(longest)[0] == mesh
    mesh, said, _ = fit(longest - 1)
    assert mesh == "SequenceMesh(dp=1, ring=1, ulysses=2)"
    assert f"{longest} tokens" in said and "global batch is 3 micro-batches" in said and "too little" not in said
    mesh, said, _ = fit(longest / 3)
    assert mesh == "SequenceMesh(dp=1, ring=1, ulysses=2)" and "too little" in said
    for problem, _, _ in pool.run(fit_shards, shards, auto, "auto"):  # of which nothing was measured
        assert "budget=BucketBudget(m_mem=...)" in problem and "benchmark-shapes" in problem


def test_sp_size_auto_leaves_no_size_to_name() -> None:
    with pytest.raises(ValueError, match=r"sp_size='auto'.*ulysses_size=2"):
        SequenceParallelDDPStrategy(2, sp_size="auto")
    with pytest.raises(RuntimeError, match=r"sp_size='auto'"):
        _ = SequenceParallelDDPStrategy(sp_size="auto").mesh


def test_a_measured_matrix_tells_the_tokens_of_a_device(tmp_path: Path) -> None:
    """Peaks of 10 GiB and 1 MiB per token on groups of two, and 20 GiB of memory less a reserve of 5 %."""
    peaks = [10 * 2**30 + 2**20 * tokens for tokens in (1000, 2000, 4000)]
    rows = [MatrixRow(1, 8, 8, 1, n, seconds=1.0, peak_bytes=p) for n, p in zip((1000, 2000, 4000), peaks, strict=True)]
    matrix = ShapeMatrix(tuple(rows), {"sequence_parallel_size": 2}, capacity_bytes=20 * 2**30)
    matrix.save(tmp_path / "matrix.json")
    shards = write_shards(tmp_path, 4)
    data = VideoDataModule(shards, budget=AutoBudget(tmp_path / "matrix.json"))
    assert data.tokens_per_device() == pytest.approx((19 - 10) * 1024 / 2, abs=1)
    assert data.clip_lengths() == {}
    data.prepare_data()
    data.setup("fit")
    assert sum(data.clip_lengths().values()) == 4
    assert VideoDataModule(shards).tokens_per_device() is None


def test_a_matrix_that_does_not_tell_the_tokens_of_a_device_says_why(tmp_path: Path) -> None:
    """And nobody is told to measure what was measured."""
    row, shards = MatrixRow(1, 8, 8, 1, 1000, seconds=1.0, peak_bytes=2.0**40), write_shards(tmp_path, 4)
    full = [replace(row, sequence_length=n, peak_bytes=2.0**40 + 1e6 * n) for n in (10**6, 2 * 10**6, 4 * 10**6)]
    data = VideoDataModule(shards, budget=AutoBudget(tmp_path / "matrix.json"))
    for rows, why in ((None, "No such file"), ([row], "needs 3 measured peaks"), (full, "before the first token")):
        if rows is not None:
            ShapeMatrix(tuple(rows), capacity_bytes=20e9).save(tmp_path / "matrix.json")
        with pytest.raises(ValueError, match=rf"matrix\.json.*{why}"):
            data.tokens_per_device()
    beside = VideoDataModule(shards)
    beside.matrix_file.write_text("{")
    with pytest.raises(ValueError, match=re.escape(str(beside.matrix_file))):
        beside.tokens_per_device()


def test_a_device_that_text_fills_holds_no_token(tmp_path: Path) -> None:
    data = VideoDataModule(write_shards(tmp_path, 4), budget=BucketBudget(1000, 1e9, overhead_tokens=1600))
    assert data.tokens_per_device() == 0


# -- what may not run ----------------------------------------------------------------------------------------------


def test_a_torch_that_cannot_compile_rings_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def settings(compile: bool) -> SequenceParallelSettings:
        return SequenceParallelSettings(None, None, None, None, False, compile=compile)

    monkeypatch.setattr(division, "ring_attention_is_traced", lambda: False)
    assert division.objection_to_rings(settings(False)) is None
    assert "compile" in str(division.objection_to_rings(settings(True)))
    monkeypatch.setattr(division, "ring_attention_is_traced", lambda: True)
    assert division.objection_to_rings(settings(True)) is None
