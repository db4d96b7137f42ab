"""Attention on one device with its log-sum-exp: parts of the keys add up to dense attention."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_videoscale.attention import KERNELS, AttentionChoices, attention
from lightning_videoscale.attention.attend import attend, attend_backward, kernel_of_torch
from lightning_videoscale.attention.backends import products
from lightning_videoscale.attention.case import AttentionCase
from lightning_videoscale.attention.kernel import AttentionKernel
from lightning_videoscale.compat.torch.attention import to_whole_tiles

# Relative errors that a kernel may have against float64, by dtype.
TOLERANCES = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exp as the formula says, of (B, H, S, D) tensors."""
    logits = torch.einsum("bhqd,bhkd->bhqk", q, k) * scale
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None, None], -torch.inf)
    lse = logits.logsumexp(-1)
    return torch.einsum("bhqk,bhkd->bhqd", logits.softmax(-1), v), lse


def of_torch(q: Tensor, k: Tensor, masked: bool) -> AttentionKernel:
    return kernel_of_torch(AttentionCase.of(q, k, masked=masked, with_lse=True))


def errors(
    seed: int,
    shape: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    device: str,
    masked: bool,
    kernel: AttentionKernel | None = None,
) -> list[float]:
    """Relative errors of `attend` over all keys, and of the gradients of its two halves, against float64."""
    batch, queries, keys, heads, dim = shape
    generator = torch.Generator().manual_seed(seed)

    def random(length: int) -> Tensor:
        return torch.randn(batch, length, heads, dim, generator=generator).to(dtype).transpose(1, 2)

    q, k, v, cotangent = random(queries), random(keys), random(keys), random(queries)
    mask = torch.rand(batch, keys, generator=generator) < 0.6 if masked else None
    if mask is not None:
        mask[:, 0] = True
    scale = 0.7 * dim**-0.5
    exact = [x.double().clone().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = dense(exact[0], exact[1], exact[2], scale, mask)
    expected_gradients = torch.autograd.grad(expected, exact, cotangent.double())

    q, k, v, cotangent = (x.to(device) for x in (q, k, v, cotangent))
    mask = mask.to(device) if mask is not None else None
    kernel = kernel or of_torch(q, k, masked)
    out, lse = attend(kernel, q, k, v, scale, mask)
    assert lse.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    dq, parts = torch.zeros_like(q, dtype=torch.float64), []
    for part in (slice(0, keys // 2), slice(keys // 2, keys)):
        if part.stop > part.start:
            part_mask = mask[:, part] if mask is not None else None
            grads = attend_backward(kernel, cotangent, q, k[:, :, part], v[:, :, part], out, lse, scale, part_mask)
            assert all(grad.dtype is dtype for grad in grads)
            dq += grads[0]
            parts.append(grads[1:])
    dk, dv = (torch.cat(part, 2) for part in zip(*parts, strict=True))
    # Gradients may vanish (of a single key: dq = dk = 0): then the error is relative to what came in.
    floor = cotangent.double().norm().item()
    exact = [expected.detach(), expected_lse.detach(), *expected_gradients]
    pairs = zip((out, lse, dq, dk, dv), exact, strict=True)
    return [float((got.cpu() - e).norm()) / max(float(e.norm()), floor) for got, e in pairs]


shapes = st.tuples(
    st.integers(1, 3), st.integers(1, 40), st.integers(1, 70), st.integers(1, 4), st.sampled_from([1, 8, 12, 64])
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 99), shapes, st.sampled_from(list(TOLERANCES)), st.booleans())
def test_parts_add_up_to_dense_attention(
    seed: int, shape: tuple[int, int, int, int, int], dtype: torch.dtype, masked: bool
) -> None:
    assert max(errors(seed, shape, dtype, "cpu", masked)) <= TOLERANCES[dtype]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 99), shapes, st.booleans())
def test_matrix_products_are_dense_attention(seed: int, shape: tuple[int, int, int, int, int], masked: bool) -> None:
    """The way of GPUs that have no kernel for a dtype or head dim, in slices of a few queries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "_LOGITS_BYTES", 3000)
        assert max(errors(seed, shape, torch.float64, "cpu", masked, KERNELS["math"])) <= 1e-13


@pytest.mark.parametrize("name", ["flash", "math"])
def test_a_sample_without_keys_has_zeros_and_no_influence(name: str) -> None:
    kernel = KERNELS[name]
    q, k, v = (torch.randn(2, 3, length, 8, dtype=torch.float64) for length in (5, 7, 7))
    mask = torch.tensor([[True] * 7, [False] * 7])
    out, lse = attend(kernel, q, k, v, 1.0, mask)
    assert not out[1].any() and (lse[1] == -torch.inf).all()
    assert torch.equal(out[:1], attend(kernel, q[:1], k[:1], v[:1], 1.0)[0])
    for gradient in attend_backward(kernel, torch.ones_like(out), q, k, v, out, lse, 1.0, mask):
        assert gradient[0].isfinite().all() and not gradient[1].any()


@pytest.mark.parametrize("backend", ["sdpa", "flash", "math"])
def test_a_mask_that_is_known_to_be_open_gives_the_same(backend: Any) -> None:
    choices, results = AttentionChoices(backend), []
    mask = torch.tensor([[True] * 3 + [False] * 4, [False] * 6 + [True]])
    for is_open in (False, True):
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64, requires_grad=True) for n in (5, 7, 7))
        out = attention(choices, q, k, v, 0.4, mask, is_open=is_open)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    assert all(map(torch.equal, *results))


def test_backward_of_one_kernel_fits_forward_of_another() -> None:
    """Log-sum-exps are natural logarithms everywhere: a choice may change between forward and backward."""
    q, k, v, grad = (torch.randn(1, 2, 9, 8, dtype=torch.float64) for _ in range(4))
    flash, math = KERNELS["flash"], KERNELS["math"]
    out, lse = attend(flash, q, k, v, 0.4)
    for mine, other in zip(
        attend_backward(math, grad, q, k, v, out, lse, 0.4),
        attend_backward(flash, grad, q, k, v, out, lse, 0.4),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["flash", "math"])
def test_channels_may_lie_behind_one_another_in_memory(name: str) -> None:
    """As those of a convolution's output do; the output and its gradient may, too."""
    kernel = KERNELS[name]
    q, k, v, grad = (torch.randn(2, 3, 8, n, dtype=torch.float64).mT for n in (9, 5, 5, 9))
    in_rows = [x.contiguous() for x in (q, k, v)]
    out, lse = attend(kernel, q, k, v, 0.4)
    assert all(map(torch.equal, (out, lse), attend(kernel, *in_rows, 0.4)))
    gradients = attend_backward(kernel, grad, q, k, v, out.mT.contiguous().mT, lse, 0.4)
    assert all(map(torch.equal, gradients, attend_backward(kernel, grad.contiguous(), *in_rows, out, lse, 0.4)))


@pytest.mark.parametrize("keys", [64, 65, 128, 192])
@pytest.mark.parametrize("additive", [False, True])
def test_hidden_keys_that_fill_a_tile_change_nothing(keys: int, additive: bool) -> None:
    torch.manual_seed(keys)
    q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64, requires_grad=True) for n in (5, keys, keys))
    mask = torch.rand(2, 1, 1, keys) < 0.7
    given = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf) if additive else mask
    wide_k, wide_v, wide_mask = to_whole_tiles(k, v, given)
    assert wide_k.shape[2] == wide_v.shape[2] == keys + 64 * (keys in (64, 192))
    got = F.scaled_dot_product_attention(q, wide_k, wide_v, attn_mask=wide_mask)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=given)
    torch.testing.assert_close(got, expected)
    gradients = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (got, expected))
    for mine, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, exact)


def test_an_unknown_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        pass

    monkeypatch.setattr(torch.ops, "aten", Nothing())
    q = torch.ones(1, 1, 2, 8)
    with pytest.raises(RuntimeError, match=r"aten::_scaled_dot_product_flash_attention_for_cpu.*2\.11"):
        attend(of_torch(q, q, False), q, q, q, 1.0)


def test_an_unknown_device_is_named() -> None:
    q = torch.ones(1, 1, 2, 8, device="meta")
    with pytest.raises(RuntimeError, match=r"\bmeta\b"):
        of_torch(q, q, False)


def on_gpu(test: Any) -> Any:
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(skip(test))


CUDA_SHAPES: list[Any] = [(2, 37, 53, 3, 64), (1, 128, 256, 2, 128), (3, 1, 5, 2, 8), (1, 300, 17, 1, 40)]


@on_gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("shape", CUDA_SHAPES)
def test_kernels_on_a_gpu(shape: tuple[int, int, int, int, int], dtype: torch.dtype, masked: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert max(errors(0, shape, dtype, "cuda", masked)) <= TOLERANCES[dtype]


@on_gpu
def test_an_odd_head_dim_in_half_precision_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="head dim 12"):
        assert max(errors(0, (2, 9, 9, 2, 12), torch.bfloat16, "cuda", False)) <= TOLERANCES[torch.bfloat16]
