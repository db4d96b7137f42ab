"""`gelu` on a GPU: every backend that runs there, against float64 and eager code."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_videoscale.kernels import gelu, gelu_linear
from lightning_videoscale.kernels.backend import BackendName
from tests.kernels.gelu_cases import assert_close_to_float64, draw, feed_forward, relative_error

pytestmark = pytest.mark.gpu
BACKENDS: list[BackendName] = ["reference", "triton", "cuda"]
FUSED: list[BackendName] = ["triton", "cuda"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("f", [8, 64, 1128, 5120, 8960, 8968, 13824])
def test_against_float64(backend: BackendName, dtype: torch.dtype, f: int) -> None:
    """From one row to more than the blocks take at once."""
    for n in (1, 3, 5, 30_011 if f <= 64 else 1031):
        x, dy = (draw(n, f, dtype=dtype, device="cuda", seed=seed) for seed in (0, 1))
        assert_close_to_float64(x, dy, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_at_a_stride_and_three_dimensions(backend: BackendName) -> None:
    x = torch.stack([draw(2, 77, 96, device="cuda")] * 2, dim=2)[:, :, 1]
    assert_close_to_float64(x, draw(2, 77, 96, device="cuda", seed=1), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_is_eager_code(backend: BackendName, dtype: torch.dtype) -> None:
    """To the bit on the reference; elsewhere the last bit of the sigmoid may flip a rounding here and there."""
    x = draw(4096, 1536, dtype=dtype, device="cuda")
    y, eager = gelu(x, backend=backend), F.gelu(x, approximate="tanh")
    if backend == "reference":
        assert torch.equal(y, eager)
        return
    if dtype is not torch.float32:  # far out on the left eager code has lost its digits to 1 + tanh
        near = x > -3
        assert (y != eager)[near].float().mean() < 0.01
    assert relative_error(y, eager) < (1e-6 if dtype is torch.float32 else 1e-3)
    torch.testing.assert_close(y, eager, atol=1e-5, rtol=1.6e-2 if dtype is torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_far_values_stay_finite(backend: BackendName, dtype: torch.dtype) -> None:
    x = torch.tensor([-6e4, -1e3, -100.0, -20.0, 20.0, 100.0, 1e3, 6e4], device="cuda", dtype=dtype).requires_grad_()
    y = gelu(x, backend=backend)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, x.detach().clamp_min(0)) and torch.equal(dx, (x > 0).to(dtype))


@pytest.mark.parametrize("backend", FUSED)
def test_repeats_to_the_bit(backend: BackendName) -> None:
    x, bias = draw(8193, 8960, dtype=torch.bfloat16, device="cuda"), torch.zeros(8960, device="cuda")
    x, bias = x.requires_grad_(), bias.requires_grad_()
    dy = draw(8193, 8960, dtype=torch.bfloat16, device="cuda", seed=1)
    runs = [torch.autograd.grad(gelu(x, bias, backend=backend), (x, bias), dy) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_bias_gradient_of_a_linear(backend: BackendName) -> None:
    h, weight, bias = (draw(*s, device="cuda", seed=sum(s), spread=0.1) for s in ((3000, 256), (1024, 256), (1024,)))
    dy = draw(3000, 1024, device="cuda", seed=9)
    leaves = [t.bfloat16().requires_grad_() for t in (h, weight, bias)]
    ours = torch.autograd.grad(feed_forward(*leaves, backend), leaves, dy.bfloat16())
    exact = [t.detach().double().requires_grad_() for t in leaves]
    theirs = torch.autograd.grad(F.gelu(F.linear(*exact), approximate="tanh"), exact, dy.bfloat16().double())
    assert all(relative_error(mine, expected) < 0.01 for mine, expected in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_whole_feed_forward(backend: BackendName, compiled: bool) -> None:
    shapes = {"h": (3000, 256), "w": (1024, 256), "b": (1024,), "v": (256, 1024), "c": (256,)}
    leaves = [draw(*s, device="cuda", seed=i, spread=0.1).bfloat16() for i, s in enumerate(shapes.values())]
    leaves = [t.requires_grad_() for t in leaves]
    dz = draw(3000, 256, device="cuda", seed=9).bfloat16()

    def fused(h: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> Tensor:
        return gelu_linear(F.linear(h, w, b.detach()), v, c, x_bias=b, backend=backend)

    function = torch.compile(fused, fullgraph=True) if compiled else fused
    function(*leaves)  # once for the workspaces of the matrix products
    gc.collect()
    torch.cuda.empty_cache()  # a block that other tests left would count whole
    before = torch.cuda.memory_allocated()
    z = function(*leaves)
    kept = torch.cuda.memory_allocated() - before - z.nbytes
    assert 2 * 3000 * 1024 <= kept < 1.1 * 2 * 3000 * 1024  # what the GELU is given
    ours = torch.autograd.grad(z, leaves, dz)
    h, w, b, v, c = exact = [t.detach().double().requires_grad_() for t in leaves]
    expected = F.linear(F.gelu(F.linear(h, w, b), approximate="tanh"), v, c)
    theirs = torch.autograd.grad(expected, exact, dz.double())
    assert relative_error(z, expected) < 0.01
    assert all(relative_error(mine, other) < 0.01 for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("backend", FUSED)
def test_more_than_two_to_the_31_elements(backend: BackendName) -> None:
    n, f = 245_760, 8960
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GiB of device memory")
    x = torch.empty(n, f, device="cuda", dtype=torch.bfloat16).normal_().requires_grad_()
    bias = torch.zeros(f, device="cuda", requires_grad=True)
    y = gelu(x, bias, backend=backend)
    dx, dbias = torch.autograd.grad(y, (x, bias), torch.ones((), device="cuda", dtype=x.dtype).expand_as(y))
    tail = x.detach()[-4:].requires_grad_()
    expected = gelu(tail, backend="reference")
    torch.testing.assert_close(y[-4:], expected)
    torch.testing.assert_close(dx[-4:], torch.autograd.grad(expected.sum(), tail)[0])
    # Of a normal x the mean of the slope is 1/2; the mean of n has a deviation of less than 1 / sqrt(n).
    assert (dbias / n - 0.5).abs().max() < 6 / n**0.5


def test_opcheck() -> None:
    x, bias = draw(7, 64, device="cuda").requires_grad_(), torch.zeros(64, device="cuda", requires_grad=True)
    torch.library.opcheck(torch.ops.lightning_videoscale.gelu.default, (x, bias, "auto"))
