"""Which kernel is chosen: measured, checked, agreed, and said. With the kernels that CPUs have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_videoscale.attention import KERNELS, AttentionChoices, attention
from lightning_videoscale.attention.attend import kernel_of_torch
from lightning_videoscale.attention.case import AttentionCase, length_class, length_of
from lightning_videoscale.attention.measuring import Measuring
from lightning_videoscale.attention.records import SDPA, RecordFile
from lightning_videoscale.attention.trial import check, exact_enough, shortened
from tests.attention.cases import CPU, case_of, gradients, key, record, tensors
from tests.distributed.pool import ProcessPool

Ranks = Callable[[int], ProcessPool]


# -- the default on CPUs -------------------------------------------------------------------------------------------


def test_on_a_cpu_auto_is_torchs_own_function_to_the_bit_and_says_so() -> None:
    lines: list[str] = []
    choices = AttentionChoices(log=lines.append)
    choices.prepare(CPU)
    q, k, v = tensors()
    mine = gradients(attention(choices, q, k, v, 0.25), [q, k, v])
    theirs = gradients(F.scaled_dot_product_attention(q, k, v, scale=0.25), [q, k, v])
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    choices.settle()
    assert choices.chosen == {}
    assert len(lines) == 1 and "cpu" in lines[0]


def test_kernels_of_gpus_say_why_they_do_not_run_here() -> None:
    gpus = {"cudnn", "efficient", "flash_attn_2", "flash_attn_3", "flash_attn_4"}
    assert {name for name, kernel in KERNELS.items() if kernel.unusable(CPU) is not None} == gpus


# -- measuring -----------------------------------------------------------------------------------------------------


def test_what_is_asked_for_is_measured_later_and_answered_from_then_on(tmp_path: Path) -> None:
    lines: list[str] = []
    choices = AttentionChoices(candidates=["math", "flash"], folder=tmp_path, log=lines.append)
    choices.prepare(CPU)
    q, k, _ = tensors()
    case = case_of(q, k)
    assert choices.choose(case) == SDPA  # the first call does not wait
    choices.settle()
    (kind,) = choices.chosen
    assert choices.choose(case) == choices.chosen[kind] in (SDPA, "math")
    assert "flash" not in choices.chosen.values()  # it is what torch runs
    assert "float32" in lines[-1] and "ms" in lines[-1]
    choices.settle()  # nothing new
    assert len(lines) == 2
    # A run on the same machine knows it without measuring.
    again = AttentionChoices(candidates=["math", "flash"], folder=tmp_path, log=lines.append)
    again.prepare(CPU)
    assert again.chosen == choices.chosen


def test_short_attention_is_left_to_torch() -> None:
    choices = AttentionChoices(candidates=["math"])
    with pytest.raises(RuntimeError, match="prepare"):
        choices.settle()
    choices.prepare(CPU)
    q, k, _ = tensors(queries=1023)
    choices.choose(case_of(q, k))
    choices.settle()
    assert choices.chosen == {}


def test_how_often_shapes_come_decides_whether_a_plan_is_earned(tmp_path: Path) -> None:
    lines: list[str] = []
    RecordFile("cpu", tmp_path).add({key(4096): record(sdpa=(10.0, 500.0), math=18.0)})
    choices = AttentionChoices(candidates=["math"], folder=tmp_path, log=lines.append)
    choices.prepare(CPU)
    q, k, _ = tensors(4096, 4096, heads=12)
    assert choices.name_for(q, k, False, False) == SDPA
    choices.expect(1.5)
    assert choices.name_for(q, k, False, False) == "math" and "1.5" in lines[-1]
    choices.expect(10.0)
    assert choices.name_for(q, k, False, False) == SDPA and len(lines) == 3


def test_a_kernel_whose_turn_did_not_come_in_time_has_it_the_next_time(tmp_path: Path) -> None:
    lines: list[str] = []
    choices = AttentionChoices(candidates=["math"], folder=tmp_path, log=lines.append)
    choices.prepare(CPU)
    choices._measuring = Measuring(0.0)
    q, k, _ = tensors(dtype=torch.bfloat16)
    choices.choose(case_of(q, k))
    choices.settle()
    assert "math: not measured yet" in lines[-1]
    (kept,) = RecordFile("cpu", tmp_path).read().values()
    assert kept.late == ("math",)
    choices._measuring = Measuring(2.0)
    choices.settle()  # nobody has asked again
    assert "math: not" not in lines[-1] and "ms" in lines[-1]
    (kept,) = RecordFile("cpu", tmp_path).read().values()
    assert kept.late == () and ("math" in kept.timings) != ("math" in kept.reasons)
    choices.settle()
    assert len(lines) == 3


def test_a_new_kind_of_call_goes_by_the_nearest_that_was_measured(tmp_path: Path) -> None:
    far, near = record(sdpa=10.0, math=20.0), record(sdpa=10.0, math=5.0)
    other = record(sdpa=10.0, flash=1.0)
    known = {key(65536): far, key(4096): near, key(2048, dtype="float64"): other}
    RecordFile("cpu", tmp_path).add(known)
    choices = AttentionChoices(candidates=["math"], folder=tmp_path)
    choices.prepare(CPU)
    q, k, _ = tensors(2048, 2048, heads=12)
    assert choices.choose(case_of(q, k)) == "math"
    q, k, _ = tensors(2048, 2048, dtype=torch.bfloat16)
    assert choices.choose(case_of(q, k)) == SDPA  # nothing is known of this dtype


def test_lengths_of_half_an_octave_share_a_class() -> None:
    assert length_class(32760) == length_class(27555) == length_class(38967) != length_class(38968)
    assert [length_of(length_class(n)) for n in (1024, 32768, 65536)] == [1024, 32768, 65536]


def test_long_calls_are_measured_at_shorter_lengths() -> None:
    long = AttentionCase(CPU, torch.bfloat16, 128, 40, 75600, 37800, False, False, False)
    short = shortened(long)
    assert short.queries < 2000 and short.rows == 40
    assert short.queries / short.keys == pytest.approx(2.0, rel=0.01)


# -- exactness -----------------------------------------------------------------------------------------------------


def wrong(query: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(query * 1.01, k, v, scale=scale)


@pytest.mark.parametrize("masked", [False, True])
def test_a_kernel_is_checked_against_float64(masked: bool) -> None:
    from lightning_videoscale.attention.attend import torch_attention

    case = AttentionCase(CPU, torch.bfloat16, 64, 4, 4096, 4096, masked, False, False)
    right = check(torch_attention, case)
    assert all(1e-4 < error < 1e-2 for error in right)
    assert exact_enough(right, right)
    assert not exact_enough((right[0], 1.06 * right[1], *right[2:]), right)
    if not masked:
        assert not exact_enough(check(wrong, case), right)


def inexact(*arguments: Any) -> tuple[Tensor, Tensor]:
    out, lse = KERNELS["math"].forward(*arguments)
    return out * 1.001, lse


def broken(*arguments: Any) -> tuple[Tensor, Tensor]:
    raise TypeError("unexpected keyword argument of another version")


@pytest.mark.parametrize(
    ("forward", "reason"),
    [(inexact, "errors of output"), (broken, "TypeError: unexpected keyword argument of another version")],
)
def test_a_kernel_that_is_wrong_or_fails_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forward: Any, reason: str
) -> None:
    monkeypatch.setitem(KERNELS, "efficient", KERNELS["math"]._replace(name="efficient", forward=forward))
    lines: list[str] = []
    choices = AttentionChoices(candidates=["efficient"], folder=tmp_path, log=lines.append)
    choices.prepare(CPU)
    q, k, _ = tensors()
    choices.choose(case_of(q, k))
    choices.settle()
    assert [*choices.chosen.values()] == [SDPA]
    assert f"efficient: {reason}" in lines[-1]


# -- ranks ---------------------------------------------------------------------------------------------------------


def choose_on_two_ranks(folder: Path) -> tuple[dict[str, str], str, bool]:
    """Each rank asks for another length; rank 1 lacks a kernel."""
    rank, lines = dist.get_rank(), []
    choices = AttentionChoices(candidates=["math", "flash_attn_4"], folder=folder / str(rank), log=lines.append)
    choices.prepare(CPU)
    q, k, _ = tensors(1024 if rank == 0 else 2048)
    case = case_of(q, k)
    choices.choose(case)
    choices.settle()
    choices.settle()
    return choices.chosen, choices.choose(case), bool(lines) == (rank == 0)


def test_ranks_choose_alike_whatever_each_has_met(ranks: Ranks, tmp_path: Path) -> None:
    (first, mine, said), (second, other, silent) = ranks(2).run(choose_on_two_ranks, tmp_path)
    assert first == second and len(first) == 2
    assert {mine, other} <= {SDPA, "math"} and said and silent
    assert (tmp_path / "0").exists() and not (tmp_path / "1").exists()  # rank 0 keeps it


# -- checkpoints ---------------------------------------------------------------------------------------------------


def test_a_change_after_a_checkpoint_is_said(tmp_path: Path) -> None:
    RecordFile("cpu", tmp_path / "a").add({key(4096): record(sdpa=2.0, math=1.0)})
    RecordFile("cpu", tmp_path / "b").add({key(4096): record(sdpa=1.0, math=2.0)})
    lines: list[str] = []
    first = AttentionChoices(candidates=["math"], folder=tmp_path / "a")
    first.prepare(CPU)
    second = AttentionChoices(candidates=["math"], folder=tmp_path / "b", log=lines.append)
    second.load_state_dict(first.state_dict())
    second.prepare(CPU)
    assert "sdpa" in lines[-1] and "math" in lines[-1] and "checkpoint" in lines[-1]
    AttentionChoices("math", log=lines.append).load_state_dict(first.state_dict())
    assert "'math'" in lines[-1] and "'auto'" in lines[-1]


def test_torchs_own_pick_on_a_cpu() -> None:
    q, k, _ = tensors(4, 4)
    assert kernel_of_torch(case_of(q, k)).name == "flash"
