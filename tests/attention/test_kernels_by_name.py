"""A kernel that is asked for by name, in eager and compiled code, and what overrides it. On CPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_videoscale.attention import AttentionChoices, attention
from tests.attention.cases import CPU, case_of, gradients, tensors


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
