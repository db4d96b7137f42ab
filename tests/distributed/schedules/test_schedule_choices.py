"""Which schedule is chosen: measured in turns, alike on all ranks, kept on disk, within bounds of time, and exact."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_videoscale.attention import AttentionChoices
from lightning_videoscale.callbacks import RunReport
from lightning_videoscale.parallel import CollectiveTransport, SequenceMesh, SplitPlan, parallelize
from lightning_videoscale.parallel.layout import MACHINES
from lightning_videoscale.parallel.schedules import ScheduleName
from lightning_videoscale.parallel.schedules.choices import ScheduleChoices
from lightning_videoscale.parallel.schedules.records import ScheduleFile, ScheduleRecord
from lightning_videoscale.parallel.schedules.table import LayerPlacement, LayerShape, ScheduleKey
from lightning_videoscale.strategies import SequenceParallelDDPStrategy
from tests.distributed.pool import ProcessPool
from tests.distributed.schedules import trial_clock
from tests.distributed.summing import sum_over_ranks
from tests.distributed.wan_training import Clips, RectifiedFlow
from tests.models import gradient_error, lifted_float_casts, tiny_wan

Ranks = Callable[[int], ProcessPool]
SHAPE = LayerShape(batch=1, tokens=64, width=16, heads=4, kv_heads=4, head_dim=4, across_heads=True, dtype="float32")
TRANSPORT = CollectiveTransport()


def place(size: int = 2) -> LayerPlacement:
    return LayerPlacement("cpu", "collective", size, 1, 1)


def clock_of(*trials: tuple[float, float]) -> Callable[[], float]:
    """As `trial_clock.clock_of`, of (serial, sliced); "overlap" takes as long as "serial"."""
    return trial_clock.clock_of(*((serial, serial, sliced) for serial, sliced in trials))


def prepared(mesh: SequenceMesh, *args: Any, **kwargs: Any) -> ScheduleChoices:
    schedules = ScheduleChoices(*args, **{"seconds": (3.0, 30.0)} | kwargs)
    schedules.prepare(mesh, TRANSPORT, AttentionChoices("sdpa"))
    return schedules


def ask(schedules: ScheduleChoices, shape: LayerShape = SHAPE) -> ScheduleName:
    return schedules.choose(shape, schedules.table)


# -- deciding ------------------------------------------------------------------------------------------------------


def decide(folder: Path, *seconds: tuple[float, float]) -> tuple[ScheduleName, ScheduleName, list[str], str]:
    """Each rank has a clock of its own, by which a pass takes (serial, sliced) seconds."""
    lines: list[str] = []
    with SequenceMesh.create("cpu", ulysses_size=dist.get_world_size()) as mesh:
        rank = dist.get_rank()
        schedules = prepared(mesh, folder=folder / str(rank), clock=clock_of(seconds[rank]), log=lines.append)
        before = ask(schedules)
        schedules.settle()
        schedules.settle()  # nothing new
        return before, ask(schedules), lines, "".join(schedules.describe().values())


@pytest.mark.parametrize(
    ("first", "second", "chosen", "gain"),
    [
        ((0.050, 0.025), (0.050, 0.060), "serial", None),  # the first rank alone would take the other one
        ((0.050, 0.0525), (0.065, 0.055), "sliced", "1.18"),  # likewise
        ((0.060, 0.0597), (0.060, 0.0597), "serial", None),  # within the spread of a measurement
    ],
)
def test_ranks_agree_by_the_slowest_whatever_each_has_measured(
    ranks: Ranks, tmp_path: Path, first: Any, second: Any, chosen: str, gain: str | None
) -> None:
    (before, mine, lines, described), other = ranks(2).run(decide, tmp_path, first, second)
    assert before == "serial"  # on a CPU nothing is predicted
    assert mine == other[1] == chosen
    assert len(lines) == 1 and other[2] == []  # once, on rank 0
    slowest = [f"{max(pair) * 1e3:.2f} ms" for pair in zip(first, second, strict=True)]
    assert all(time in lines[0] and time in described for time in slowest)
    assert gain is None or f"{gain} x serial" in described
    assert (tmp_path / "0").exists() and not (tmp_path / "1").exists()  # rank 0 keeps it


def measured(sliced: float) -> ScheduleRecord:
    return ScheduleRecord.of_turns({"serial": [1.0] * 3, "sliced": [sliced] * 3})


def cached(folder: Path, whose: int) -> tuple[ScheduleName, int]:
    """One node knows the layer from an earlier run; its measurement says "sliced", and a new one would say "serial"."""
    rank, calls = dist.get_rank(), 0
    tell = clock_of((0.04, 0.08))

    def clock() -> float:
        nonlocal calls
        calls += 1
        return tell()

    if rank == whose:
        ScheduleFile("cpu", folder / str(rank)).add({ScheduleKey.of(SHAPE, place()): measured(0.5)})
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh:
        schedules = prepared(mesh, folder=folder / str(rank), clock=clock, log=lambda _: None)
        ask(schedules)
        schedules.settle()
        return ask(schedules), calls


def test_a_measurement_on_disk_counts_for_all_if_rank_0_has_it_and_else_for_none(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(cached, tmp_path / "a", 0) == [("sliced", 0)] * 2
    again = ranks(2).run(cached, tmp_path / "b", 1)
    assert [name for name, _ in again] == ["serial"] * 2 and all(calls > 0 for _, calls in again)


def fail_on_one_rank(folder: Path) -> tuple[ScheduleName, list[str], bool]:
    """Rank 1 lacks a kernel of attention, as a GPU of another kind may."""
    lines: list[str] = []
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh:
        attention = AttentionChoices("sdpa" if dist.get_rank() == 0 else "cudnn")
        schedules = ScheduleChoices(folder=folder, log=lines.append)
        schedules.prepare(mesh, TRANSPORT, attention)
        ask(schedules)
        schedules.settle()
        return ask(schedules), lines, bool(ScheduleFile("cpu", folder).read())


def test_a_trial_that_fails_on_one_rank_is_serial_for_all_with_the_reason(ranks: Ranks, tmp_path: Path) -> None:
    (first, lines, kept), (second, *_) = ranks(2).run(fail_on_one_rank, tmp_path)
    assert first == second == "serial" and not kept
    assert "rank 1: NotImplementedError" in lines[0] and "cudnn" in lines[0]


def spend(folder: Path, seconds: tuple[float, float], *trials: tuple[float, float]) -> tuple[list[str], list[str]]:
    """Asks for four lengths, and tells what was said and chosen; the clocks of both ranks are the same."""
    lines: list[str] = []
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh:
        schedules = prepared(mesh, folder=folder, clock=clock_of(*trials), seconds=seconds, log=lines.append)
        shapes = [SHAPE._replace(tokens=tokens) for tokens in (16, 64, 256, 1024)]
        for _ in range(2):
            for shape in shapes:
                ask(schedules, shape)
            schedules.settle()
        return lines, [ask(schedules, shape) for shape in shapes]


def test_measuring_ends_with_its_time_and_the_nearest_serves_for_the_rest(ranks: Ranks, tmp_path: Path) -> None:
    """A trial takes 10 rounds of 0.19 or 0.17 s: the first two take 3.6 of 3 s."""
    (lines, chosen), other = ranks(2).run(spend, tmp_path, (2.0, 3.0), (0.07, 0.05), (0.05, 0.07))
    assert chosen == other[1] == ["sliced", "serial", "serial", "serial"]
    assert sum("ms" in line for line in lines) == 2
    assert any("2 kinds" in line and "3 s" in line for line in lines)
    assert sum("1 x 64 tokens, the nearest" in line for line in lines) == 2


def test_a_layer_too_slow_for_its_time_is_not_chosen_by_one_pass(ranks: Ranks, tmp_path: Path) -> None:
    """Two seconds hold no three rounds of 1.4 s; what was tried once and again is not tried for ever."""
    (lines, chosen), other = ranks(2).run(spend_slowly, tmp_path)
    assert chosen == other[1] == "serial"
    assert not any("ms" in line for line in lines) and "neither measured" in lines[0]
    assert any("5 s" in line for line in lines)


def spend_slowly(folder: Path) -> tuple[list[str], ScheduleName]:
    lines: list[str] = []
    times = accumulate(chain.from_iterable([(0.0, 0.0, 0.0, 0.5, 0.0, 0.5, 0.0, 0.4, 0.0)] * 9))
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh:
        schedules = prepared(mesh, folder=folder, clock=lambda: next(times), seconds=(2.0, 5.0), log=lines.append)
        for _ in range(9):
            ask(schedules)
            schedules.settle()
        return lines, ask(schedules)


def ask_for_close_ones(folder: Path) -> tuple[list[str], list[ScheduleName]]:
    lines: list[str] = []
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh:
        schedules = prepared(mesh, folder=folder, clock=clock_of((0.05, 0.025)), log=lines.append)
        shapes = [SHAPE._replace(tokens=tokens) for tokens in (60, 64, 70)]
        for shape in shapes:
            ask(schedules, shape)
        schedules.settle()
        return lines, [ask(schedules, shape) for shape in shapes]


def test_of_sizes_close_to_each_other_one_is_measured_as_it_is(ranks: Ranks, tmp_path: Path) -> None:
    (lines, chosen), other = ranks(2).run(ask_for_close_ones, tmp_path)
    assert chosen == other[1] == ["sliced"] * 3 and len(lines) == 3
    assert "60 tokens" in lines[0] and " ms" in lines[0]
    assert all("1 x 60 tokens, the nearest" in line for line in lines[1:])


def of_two_groups(folder: Path) -> tuple[list[str], dict[str, ScheduleName]]:
    """Two groups of two ranks train on clips of different lengths; clocks are the same on all ranks."""
    lines: list[str] = []
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh:
        schedules = prepared(mesh, folder=folder, clock=clock_of((0.05, 0.025), (0.025, 0.05)), log=lines.append)
        ask(schedules, SHAPE._replace(tokens=16 if mesh.dp.rank == 0 else 64))
        with torch.inference_mode():
            schedules.settle()
        ask(schedules, SHAPE._replace(tokens=16))
        return lines, schedules.chosen


def test_all_groups_of_the_job_measure_what_any_has_met(ranks: Ranks, tmp_path: Path) -> None:
    (lines, chosen), *others = ranks(4).run(of_two_groups, tmp_path)
    assert [*chosen.values()] == ["sliced", "serial"] and len(lines) == 2
    assert all(silent == [] and theirs == chosen for silent, theirs in others)


def predicted() -> list[tuple[ScheduleName, str]]:
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh:
        found = []
        for link in (4e11, 2e10):
            machine = replace(MACHINES["h200"], link=link)
            schedules = prepared(mesh, machine=machine, log=lambda _: None)
            shape = SHAPE._replace(tokens=32_768, heads=40, kv_heads=40, head_dim=128, width=5120, dtype="bfloat16")
            found.append((ask(schedules, shape), "".join(schedules.describe().values())))
        return found


def test_what_was_not_measured_goes_by_a_prediction_that_is_called_one(ranks: Ranks) -> None:
    for (fast, why), (slow, because) in ranks(2).run(predicted):
        assert fast == "serial" and slow == "sliced"  # the slower the links, the more there is to hide
        assert all("predicted" in text and "h200" in text and "not measured" in text for text in (why, because))


# -- exactness -----------------------------------------------------------------------------------------------------


def train(schedule: Any, folder: Path, checkpointed: bool) -> tuple[list[Tensor], dict[str, Tensor], set[str]]:
    """Losses and gradients over clips of two lengths, with a settling after the second of four steps.

    Backward of a pass that began before it comes after it.
    """
    model, seen = tiny_wan(num_attention_heads=5).double(), set()
    if checkpointed:
        model.enable_gradient_checkpointing()
    generator = torch.Generator().manual_seed(3)
    clips = [torch.randn(1, 4, frames, 4, 6, generator=generator, dtype=torch.float64) for frames in (1, 5)]
    text = torch.randn(1, 5, 16, generator=generator, dtype=torch.float64)
    losses = []
    with SequenceMesh.create("cpu", ulysses_size=dist.get_world_size()) as mesh:
        undo = parallelize(model, mesh, schedule=schedule, transport=TRANSPORT)
        for step in range(4):
            outputs = [model(clip, torch.tensor([100.0]), text).sample for clip in clips]
            if step == 1 and schedule != "serial":
                seen |= {*schedule.chosen.values()}
                schedule.settle()
                seen |= {f"then {name}" for name in schedule.chosen.values()}
            loss = sum((out.square().mean() for out in outputs), torch.zeros((), dtype=torch.float64))
            loss.backward()
            losses.append(loss.detach())
            with torch.no_grad():
                trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
                sum_over_ranks(parameter.grad for parameter in trained)
                for parameter in trained:
                    parameter -= 1e-2 * parameter.grad
                    parameter.grad = None if step < 3 else parameter.grad
        undo()
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, seen


def train_both(folder: Path, checkpointed: bool) -> tuple[float, float, set[str]]:
    """One length is known to be faster serial; the other is measured to be faster sliced in the middle of the run."""
    place = LayerPlacement("cpu", "collective", dist.get_world_size(), 1, 1)
    shape = LayerShape(1, 6, 60, 5, 5, 12, True, "float64")
    if dist.get_rank() == 0:
        ScheduleFile("cpu", folder).add({ScheduleKey.of(shape, place): measured(2.0)})
    dist.barrier()
    schedules = ScheduleChoices(folder=folder, clock=clock_of((0.05, 0.025)), log=lambda _: None)
    with lifted_float_casts():
        expected, gradients, _ = train("serial", folder, checkpointed)
        losses, mine, seen = train(schedules, folder, checkpointed)
    difference = max(float((a - b).abs() / a.abs()) for a, b in zip(expected, losses, strict=True))
    return difference, gradient_error(mine, gradients), {*seen, *schedules.chosen.values()}


@pytest.mark.parametrize("checkpointed", [pytest.param(False, marks=pytest.mark.full), True])
def test_losses_are_serials_also_where_the_schedule_changes_within_a_run(
    ranks: Ranks, tmp_path: Path, checkpointed: bool
) -> None:
    for losses, gradients, seen in ranks(3).run(train_both, tmp_path, checkpointed):
        assert losses < 1e-12 and gradients < 1e-10
        assert seen == {"serial", "then serial", "then sliced", "sliced"}


# -- where there is nothing to choose ------------------------------------------------------------------------------


def without_choice(folder: Path) -> tuple[list[str], list[str], list[ScheduleName]]:
    """A plan without another schedule, a group that exchanges no heads, and a norm with a hook on rank 1 only."""
    model, plain, hooked, ran = tiny_wan(), [], [], []
    shape = LayerShape(1, 6, 48, 4, 4, 12, True, "float32")
    if dist.get_rank() == 0:
        ScheduleFile("cpu", folder).add({ScheduleKey.of(shape, place()): measured(0.5)})
    inputs = torch.ones(1, 4, 1, 4, 6), torch.ones(1), torch.ones(1, 5, 16)
    with SequenceMesh.create("cpu", ulysses_size=1, ring_size=2) as mesh:
        parallelize(model, mesh, schedule="auto", log=plain.append)()
    with SequenceMesh.create("cpu", ulysses_size=2) as mesh:
        parallelize(
            nn.Linear(2, 2), mesh, SplitPlan({}, {}, {}, lambda *_: lambda: None), schedule="auto", log=plain.append
        )
        hook = None
        if dist.get_rank() == 1:
            hook = model.blocks[1].attn1.norm_q.register_forward_hook(lambda *_: None)
        schedules = ScheduleChoices(folder=folder, log=hooked.append)
        undo = parallelize(model, mesh, schedule=schedules, transport=TRANSPORT)
        for _ in range(2):
            model(*inputs)
            ran += schedules.chosen.values()
            if hook is not None:
                hook.remove()
            schedules.settle()
        model(*inputs)
        undo()
        assert not schedules._objections
    return plain, hooked, ran


def test_auto_is_serial_where_nothing_else_can_run_and_says_so_once(ranks: Ranks, tmp_path: Path) -> None:
    (plain, hooked, ran), (quiet, silent, other) = ranks(2).run(without_choice, tmp_path)
    assert quiet == silent == []
    assert len(plain) == 2 and all("'auto'" in line for line in plain)
    assert "exchanges no heads" in plain[0] and "Linear" in plain[1] and "'serial'" in plain[1]
    assert ran == other == ["serial", "sliced"]  # the hook goes before the second pass
    assert sum("blocks.1.attn1" in line for line in hooked) == 1 and "norm_q" in hooked[0]


# -- in a Trainer --------------------------------------------------------------------------------------------------


def fit(folder: Path, steps: int, **settings: Any) -> tuple[SequenceParallelDDPStrategy, pl.Trainer, list[str]]:
    """Trains on clips of 8 tokens, with measurements in the folder; also what was said."""
    said: list[str] = []
    path = settings.pop("ckpt_path", None)
    with (
        mock.patch.dict(os.environ, {"LIGHTNING_VIDEOSCALE_CACHE": str(folder)}),
        mock.patch("lightning_videoscale.strategies.choices.rank_zero_info", said.append),
    ):
        strategy = SequenceParallelDDPStrategy(ulysses_size=2, **settings)
        trainer = pl.Trainer(
            strategy=strategy, accelerator="cpu", devices=2, logger=False, enable_progress_bar=False, max_steps=steps,
            enable_checkpointing=False, enable_model_summary=False, callbacks=[RunReport(folder, every_n_steps=1)],
        )  # fmt: skip
        trainer.fit(
            RectifiedFlow(), DataLoader(Clips((2, 4, 4), torch.float32, length=8), batch_size=1), ckpt_path=path
        )
    return strategy, trainer, said


def train_and_resume(folder: Path) -> tuple[dict[str, str], list[str], list[str], list[str]]:
    strategy, trainer, said = fit(folder / "first", 3, schedule="auto")
    found, chosen = strategy.describe_schedules(), strategy.schedule_choices.chosen
    assert strategy.describe()["schedule"] == "auto" and found.keys() == chosen.keys()
    trainer.save_checkpoint(folder / "checkpoint")
    kept = strategy.load_checkpoint(folder / "checkpoint")["lightning_videoscale"]["schedules"]
    assert kept == {"schedule": "auto", "chosen": chosen}
    # Another machine measured the contrary.
    (key,) = ScheduleFile("cpu", folder / "first").read() if dist.get_rank() == 0 else [None]
    if key is not None:
        contrary = measured(0.5 if chosen[str(key)] == "serial" else 2.0)
        ScheduleFile("cpu", folder / "other").add({key: contrary})
    resumed, _, changes = fit(folder / "other", 4, schedule="auto", ckpt_path=folder / "checkpoint")
    assert resumed.schedule_choices.chosen != chosen
    compiled, _, other = fit(folder / "first", 1, schedule="auto", compile={"backend": "eager"})
    assert compiled.describe()["schedule"] == "serial" and compiled.describe_schedules() == {}
    return found, said, changes, other


def test_a_trainer_measures_reports_and_keeps_what_it_chose(ranks: Ranks, tmp_path: Path) -> None:
    (found, said, changes, compiled), *_ = ranks(2).run(train_and_resume, tmp_path)
    ((kind, chosen),) = found.items()
    assert "float32" in kind and "8 tokens" in kind and "ms" in chosen
    assert [line for line in said if "Schedule" in line] == [f"Schedule of {kind}: {chosen}."]
    assert any("before the checkpoint" in line and kind in line for line in changes)
    assert len(compiled) >= 1 and any("'auto'" in line and "compile=" in line for line in compiled)
    records = [json.loads(line) for line in (tmp_path / "first" / "run_log.jsonl").read_text().splitlines()]
    assert [row["chosen"] for row in records if row["kind"] == "schedules"] == [{kind: chosen}]
    assert "Schedules" in (tmp_path / "other" / "report.html").read_text()
