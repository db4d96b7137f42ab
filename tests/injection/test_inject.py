"""inject_fused_kernels on a block of one's own: how to register it, what is refused, what the report says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_videoscale.injection import FusedBlock, inject_fused_kernels, source_hash
from lightning_videoscale.kernels import norm_modulate


class MyBlock(nn.Module):
    """A DiT-style block without attention: modulation from a condition, then an MLP."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.modulation = nn.Linear(dim, 3 * dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(c).unsqueeze(1).chunk(3, dim=-1)
        return x + gate * self.mlp(self.norm(x) * (1 + scale) + shift)


def fused_forward(self: Any, x: Tensor, c: Tensor) -> Tensor:
    shift, scale, gate = self.modulation(c).unsqueeze(1).chunk(3, dim=-1)
    return x + gate * self.mlp(norm_modulate(x, scale, shift, eps=self.norm.eps, backend=self.kernel_backend))


MY_BLOCK = FusedBlock(f"{MyBlock.__module__}.MyBlock", fused_forward, what="norm: norm_modulate")


def two_blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(MyBlock(), MyBlock())


def test_your_own_block_is_registered_in_one_line() -> None:
    model = two_blocks().double()
    x, c = torch.randn(2, 5, 8, dtype=torch.float64), torch.randn(2, 8, dtype=torch.float64)
    expected = model[1](model[0](x, c), c)

    report = inject_fused_kernels(model, extra_blocks=[MY_BLOCK])

    first, kernels, replaced = str(report).splitlines()
    assert first == "Fused kernels in Sequential: 2 blocks replaced, 0 skipped."
    assert kernels.startswith("  kernels: ")  # which may be decided, if others have called them
    assert replaced == "  replaced 2 MyBlock (0 … 1): norm: norm_modulate"
    torch.testing.assert_close(model[1](model[0](x, c), c), expected, rtol=1e-12, atol=1e-12)
    report.undo()
    assert type(model[0]) is MyBlock


def test_somebody_elses_block_is_gated_on_its_source() -> None:
    known = FusedBlock(MY_BLOCK.class_path, fused_forward, "norm", frozenset({str(source_hash(MyBlock.forward))}))
    other = FusedBlock(MY_BLOCK.class_path, fused_forward, "norm", frozenset({"0123456789abcdef"}))
    assert len(inject_fused_kernels(two_blocks(), extra_blocks=[known]).replaced) == 2
    with pytest.warns(UserWarning, match="is not one that the fused forward was written for"):
        assert not inject_fused_kernels(two_blocks(), extra_blocks=[other]).replaced


def test_a_second_injection_finds_nothing_to_do(recwarn: pytest.WarningsRecorder) -> None:
    model = two_blocks()
    inject_fused_kernels(model, extra_blocks=[MY_BLOCK])
    again = inject_fused_kernels(model, extra_blocks=[MY_BLOCK])
    assert not again.replaced
    assert [skipped.reason for skipped in again.skipped] == ["uses fused kernels already"] * 2
    assert not recwarn.list


def test_the_backend_asked_for_runs_or_raises() -> None:
    model = two_blocks()
    inject_fused_kernels(model, "triton", [MY_BLOCK])
    with pytest.raises(NotImplementedError, match=r"norm_modulate .*backend"):
        model[0](torch.randn(2, 5, 8), torch.randn(2, 8))
    with pytest.raises(ValueError, match="tritn"):
        inject_fused_kernels(two_blocks(), "tritn")  # type: ignore[arg-type]


def test_what_is_no_module_is_named() -> None:
    with pytest.raises(TypeError, match=r"SimpleNamespace is no nn.Module: .*pipeline.transformer"):
        inject_fused_kernels(SimpleNamespace(transformer=two_blocks()))  # type: ignore[arg-type]


def test_a_subclass_is_skipped() -> None:
    class Variant(MyBlock):
        pass

    with pytest.warns(UserWarning, match=r"skipped 1 Variant \(0\): is a subclass of .*MyBlock"):
        report = inject_fused_kernels(nn.Sequential(Variant(), MyBlock()), extra_blocks=[MY_BLOCK])
    assert [replaced.path for replaced in report.replaced] == ["1"]


@pytest.mark.parametrize("which", ["whole", "block", "wrapped"])
def test_compiled_blocks_are_an_error(which: str) -> None:
    model = two_blocks()
    if which == "whole":
        model.compile(backend="eager")
    elif which == "block":
        model[0].compile(backend="eager")
    else:
        model[0] = torch.compile(model[0], backend="eager")
    with pytest.raises(RuntimeError, match="compiled already"):
        inject_fused_kernels(model, extra_blocks=[MY_BLOCK])


def test_a_forward_with_other_parameter_names_is_an_error() -> None:
    wrong = FusedBlock(MY_BLOCK.class_path, lambda self, x, condition: x, "nothing")
    with pytest.raises(TypeError, match=r"\['self', 'x', 'condition'\].*\['self', 'x', 'c'\]"):
        inject_fused_kernels(two_blocks(), extra_blocks=[wrong])


def test_undo_refuses_when_something_else_took_the_class() -> None:
    model = two_blocks()
    report = inject_fused_kernels(model, extra_blocks=[MY_BLOCK])
    fused = type(model[1])
    model[1].__class__ = type("Sharded", (fused,), {})
    with pytest.raises(RuntimeError, match=r"1 is a .*Sharded with bases \['MyBlock'\] now"):
        report.undo()
    assert type(model[0]) is fused
    model[1].__class__ = fused
    report.undo()
    assert [type(block) for block in model] == [MyBlock, MyBlock]


def test_a_model_without_known_blocks() -> None:
    report = inject_fused_kernels(nn.Linear(2, 2))
    assert str(report) == "Fused kernels: no block of a known class in Linear."
    assert not report.replaced and not report.skipped
