"""torch's private kernels of attention take what we hand them and return what we say."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_videoscale.compat.torch import attention
from tests.compat.attention_products import (
    CASES,
    KERNELS,
    SCALE,
    assert_as_products,
    gradient_handed_over,
    hiding,
    inputs,
)


@pytest.mark.parametrize("masked", [False, True])
def test_flash_on_a_cpu_is_as_products_are(masked: bool) -> None:
    bias = hiding(53, "cpu", torch.float32) if masked else None
    assert_as_products("flash_cpu", "cpu", torch.float32, 53, bias)


@pytest.mark.parametrize(("kernel", "masked"), CASES)
def test_kernels_of_gpus_take_our_arguments_and_return_our_shapes(kernel: str, masked: bool) -> None:
    """By what torch says of them without running any."""
    forward, backward = KERNELS[kernel]
    q, k, v, grad = inputs("meta", 53, torch.float16)
    bias = hiding(53, "meta", torch.float16) if masked else None
    out, lse = forward(q, k, v, SCALE, bias)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    gradients = backward(grad, q, k, v, out, lse, SCALE, bias)
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in (q, k, v)]


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        (SDPBackend.CUDNN_ATTENTION, "cudnn"),
        (SDPBackend.FLASH_ATTENTION, "flash"),
        (SDPBackend.EFFICIENT_ATTENTION, "efficient"),
        (SDPBackend.MATH, "math"),
    ],
)
def test_kernels_that_are_left_on_are_told(backend: SDPBackend, name: str) -> None:
    assert attention.sdpa_choice() is None
    with sdpa_kernel(backend):
        assert attention.sdpa_choice() == {name}
    with sdpa_kernel([backend, SDPBackend.MATH]):
        assert attention.sdpa_choice() == {name, "math"}
    assert attention.sdpa_choice() is None


def test_hidden_keys_are_added_to_a_mask_only() -> None:
    k, v = torch.ones(2, 1, 1, 64, 8)
    assert attention.to_whole_tiles(k, v, None) == (k, v, None)
    wide_k, wide_v, mask = attention.to_whole_tiles(k, v, torch.ones(1, 1, 1, 64, dtype=torch.bool))
    assert mask is not None and mask.flatten().tolist() == [True] * 64 + [False] * 64
    assert wide_k.shape == wide_v.shape == (1, 1, 128, 8)
    assert torch.equal(attention.flash_cpu(k, wide_k, wide_v, 1.0, torch.log(mask.float()))[0], v)


def test_a_gradient_on_a_cpu_is_left_as_it_lies() -> None:
    assert gradient_handed_over(torch.ones(1, 2, 3, 4)).is_contiguous()
