"""Which kernel is chosen: measured, checked, agreed, kept on disk, and overridden. With the kernels that CPUs have."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_videoscale.attention import KERNELS, AttentionChoices, attention
from lightning_videoscale.attention.attend import kernel_of_torch
from lightning_videoscale.attention.case import AttentionCase, AttentionKey, length_class, length_of
from lightning_videoscale.attention.measuring import Measuring
from lightning_videoscale.attention.records import SDPA, Record, RecordFile, slowest_of_ranks
from lightning_videoscale.attention.trial import Timing, check, exact_enough, shortened
from tests.distributed.pool import ProcessPool

CPU = torch.device("cpu")
Ranks = Callable[[int], ProcessPool]


def tensors(queries: int = 1024, keys: int = 1024, dtype: torch.dtype = torch.float32, heads: int = 2) -> list[Tensor]:
    """Query, key and value that require gradients, (B, H, S, D) with tokens first in memory."""
    generator = torch.Generator().manual_seed(0)
    lengths = queries, keys, keys
    return [
        torch.randn(1, n, heads, 16, generator=generator, dtype=dtype).transpose(1, 2).requires_grad_() for n in lengths
    ]


def case_of(q: Tensor, k: Tensor) -> AttentionCase:
    return AttentionCase.of(q, k, masked=False, with_lse=False)


def gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]


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


def record(**milliseconds: float | tuple[float, float]) -> Record:
    pairs = {name: ms if isinstance(ms, tuple) else (ms, 0.0) for name, ms in milliseconds.items()}
    return Record({name: Timing(ms / 1e3, first / 1e3) for name, (ms, first) in pairs.items()}, {})


@pytest.mark.parametrize(
    ("times", "calls", "fastest"),
    [
        (record(sdpa=10.0, flash=9.0), 1000, "flash"),
        (record(sdpa=10.0, flash=9.95), 1000, SDPA),  # within the spread of a measurement
        (record(sdpa=10.0, flash=10.0), 1000, SDPA),
        (record(sdpa=10.0), 1000, SDPA),
        # cuDNN's plan of half a second is worth it in 1000 calls of a shape, and not in 50.
        (record(sdpa=(10.0, 500.0), flash=18.0), 1000, SDPA),
        (record(sdpa=(10.0, 500.0), flash=18.0), 50, "flash"),
    ],
)
def test_the_fastest_over_all_calls_of_a_shape_is_chosen(times: Record, calls: float, fastest: str) -> None:
    assert times.fastest(calls) == fastest


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


def test_what_was_late_on_one_rank_is_late_on_all() -> None:
    of_one = Record(record(sdpa=10.0, math=9.0, flash=9.0).timings, {})
    of_other = Record(record(sdpa=12.0).timings, {"math": "its turn", "flash": "wrong"}, ("math",))
    merged = slowest_of_ranks([of_one, of_other])
    assert merged.late == ("math",) and set(merged.reasons) == {"math", "flash"}
    # The second time the device took twice as long for all: what counts is the ratio.
    again = Record(record(sdpa=24.0, math=6.0).timings, {})
    assert again.after(merged).timings["math"].steady == pytest.approx(3e-3)
    assert again.after(merged).late == ()


def test_of_several_ranks_the_slowest_counts_and_what_one_lacks_is_out() -> None:
    merged = slowest_of_ranks([record(sdpa=10.0, flash=8.0, math=7.0), record(sdpa=9.0, flash=11.0)])
    assert merged.timings == record(sdpa=10.0, flash=11.0).timings


def key(queries: int, rows: int = 12, **changes: Any) -> AttentionKey:
    lengths = length_class(queries)
    return AttentionKey("cpu", "float32", 16, rows, lengths, lengths, False, False, False)._replace(**changes)


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


def test_a_kernel_that_is_wrong_is_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def inexact(*arguments: Any) -> tuple[Tensor, Tensor]:
        out, lse = KERNELS["math"].forward(*arguments)
        return out * 1.001, lse

    monkeypatch.setitem(KERNELS, "efficient", KERNELS["math"]._replace(name="efficient", forward=inexact))
    lines: list[str] = []
    choices = AttentionChoices(candidates=["efficient"], folder=tmp_path, log=lines.append)
    choices.prepare(CPU)
    q, k, _ = tensors()
    choices.choose(case_of(q, k))
    choices.settle()
    assert [*choices.chosen.values()] == [SDPA]
    assert "efficient: errors of output" in lines[-1]


def test_a_kernel_that_fails_is_left_out_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> tuple[Tensor, Tensor]:
        raise TypeError("unexpected keyword argument of another version")

    monkeypatch.setitem(KERNELS, "efficient", KERNELS["math"]._replace(name="efficient", forward=broken))
    lines: list[str] = []
    choices = AttentionChoices(candidates=["efficient"], folder=tmp_path, log=lines.append)
    choices.prepare(CPU)
    q, k, _ = tensors()
    choices.choose(case_of(q, k))
    choices.settle()
    assert [*choices.chosen.values()] == [SDPA]
    assert "efficient: TypeError: unexpected keyword argument of another version" in lines[-1]


# -- by name, and overridden ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flash", "math"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_kernel_by_name_computes_attention(name: Any, masked: bool) -> None:
    q, k, v = tensors(37, 53, torch.float64)
    mask = torch.rand(1, 53) < 0.5 if masked else None
    mine = gradients(attention(AttentionChoices(name), q, k, v, 0.3, mask), [q, k, v])
    bias = None if mask is None else mask[:, None, None]
    theirs = gradients(F.scaled_dot_product_attention(q, k, v, bias, scale=0.3), [q, k, v])
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_name_that_there_is_not_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"flash_attn_5.*flash_attn_4"):
        AttentionChoices("flash_attn_5")  # type: ignore[arg-type]


def test_a_kernel_by_name_that_cannot_run_is_an_error_with_the_reason() -> None:
    choices = AttentionChoices("flash_attn_4")
    q, k, v = tensors(8, 8)
    with pytest.raises(NotImplementedError, match=r"flash_attn_4.*cpu.*auto"):
        choices.prepare(CPU)
    with pytest.raises(NotImplementedError, match=r"flash_attn_4.*cpu.*auto"):
        attention(choices, q, k, v, 1.0)


def test_sdpa_kernel_overrides_a_choice() -> None:
    choices = AttentionChoices("math")
    q, k, v = tensors(64, 64)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        mine = attention(choices, q, k, v, 0.25)
        theirs = F.scaled_dot_product_attention(q, k, v, scale=0.25)
    assert torch.equal(mine, theirs)
    assert not torch.equal(attention(choices, q, k, v, 0.25), theirs)


def test_second_derivatives_are_refused_unless_torchs_math_is_asked_for() -> None:
    q, k, v = tensors(8, 8, torch.float64)
    (first,) = torch.autograd.grad(attention(AttentionChoices("math"), q, k, v, 1.0).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="sdpa_kernel"):
        first.sum().backward()
    with sdpa_kernel(SDPBackend.MATH):
        (first,) = torch.autograd.grad(attention(AttentionChoices("math"), q, k, v, 1.0).sum(), q, create_graph=True)
    first.sum().backward()
    assert q.grad is not None


def test_fake_tensors_go_through_the_op() -> None:
    with FakeTensorMode():
        q, k, v = tensors(16, 24)
        out = attention(AttentionChoices("math"), q, k, v, 1.0)
        (gradient,) = torch.autograd.grad(out.sum(), k)
    assert out.shape == q.shape and gradient.shape == k.shape


def test_autocast_around_backward_does_not_change_it() -> None:
    inputs = tensors(33, 17)
    expected = gradients(attention(AttentionChoices("math"), *inputs, 0.3), inputs)
    out = attention(AttentionChoices("math"), *inputs, 0.3)
    with torch.autocast("cpu", torch.bfloat16):
        mine = gradients(out, inputs)
    assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))


def test_compiled_code_serves_every_length_and_kernel() -> None:
    choices = AttentionChoices("math")
    compiled = torch.compile(lambda q, k, v: attention(choices, q, k, v, 0.25), fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (48, 96, 131):
            q, k, v = tensors(length, length, torch.float64)
            mine = gradients(compiled(q, k, v), [q, k, v])
            theirs = gradients(F.scaled_dot_product_attention(q, k, v, scale=0.25), [q, k, v])
            for a, b in zip(mine, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_only_deterministic_kernels_are_asked_for_by_deterministic_algorithms() -> None:
    q, k, _ = tensors()
    before = case_of(q, k)
    torch.use_deterministic_algorithms(True)
    try:
        case = case_of(q, k)
    finally:
        torch.use_deterministic_algorithms(False)
    assert case.deterministic and not before.deterministic
    assert case.key.distance(before.key) is None  # what was measured of one says nothing of the other


# -- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{", "[]", '{"records": [{}]}', '{"records": [{"key": [1], "timings": {}}]}'])
def test_a_file_that_cannot_be_read_is_measured_anew(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = RecordFile("cpu", tmp_path)
    file.path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert file.read() == {}
    assert str(file.path) in caplog.text and "<class" not in caplog.text
    file.add({key(4096): record(sdpa=1.0)})
    assert file.read() == {key(4096): record(sdpa=1.0)}


def test_a_file_that_cannot_be_written_is_said_and_leaves_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = RecordFile("cpu", tmp_path)
    file.path.mkdir()  # which no file can replace
    with caplog.at_level(logging.WARNING):
        file.add({key(4096): record(sdpa=1.0)})
    assert "is not kept for the next run" in caplog.text
    assert list(tmp_path.iterdir()) == [file.path]


def test_files_of_other_versions_are_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = RecordFile("cpu", tmp_path)
    before.add({key(4096): record(sdpa=1.0)})
    before.add({key(8192): record(sdpa=2.0)})
    assert len(json.loads(before.path.read_text())["records"]) == 2
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert RecordFile("cpu", tmp_path).read() == {}


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
