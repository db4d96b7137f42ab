"""`gelu`: against float64, eager PyTorch's bits and the bias gradient that autograd gives a Linear; every backend."""

from __future__ import annotations

import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_videoscale.kernels import gelu
from lightning_videoscale.kernels.cuda import compile as nvrtc
from lightning_videoscale.kernels.cuda import toolkit
from lightning_videoscale.kernels.cuda.gelu import constants, threads_for
from tests.kernels.gelu_cases import assert_close_to_float64, draw, feed_forward, relative_error
from tests.kernels.op_calls import assert_no_graph_break

OPS = torch.ops.lightning_videoscale
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@settings(max_examples=30, deadline=None)
@given(
    leading=st.lists(st.integers(1, 5), max_size=3),
    f=st.sampled_from([1, 7, 8, 64, 1121, 8960]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_random_shapes_against_float64(leading: list[int], f: int, dtype: torch.dtype, seed: int) -> None:
    x, dy = (draw(*leading, f, dtype=dtype, seed=2 * seed + i) for i in range(2))
    assert_close_to_float64(x, dy, "reference")


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_has_the_bits_of_eager_code(dtype: torch.dtype) -> None:
    x = draw(3, 500, 64, dtype=dtype)
    assert torch.equal(gelu(x), F.gelu(x, approximate="tanh"))
    assert torch.equal(gelu(x, torch.ones(64)), gelu(x))  # the bias's values are not read


@pytest.mark.parametrize("with_grad", ["hwb", "wb", "b", "h", "hw"])
def test_the_gradients_are_those_of_linear_and_gelu(with_grad: str) -> None:
    """In float64, whatever is frozen; what is frozen gets none."""
    leaves = {"h": draw(2, 9, 16), "w": draw(32, 16, seed=1), "b": draw(32, seed=2)}
    leaves = {name: x.double().requires_grad_(name in with_grad) for name, x in leaves.items()}
    wanted = [leaves[name] for name in with_grad]
    ours = feed_forward(*leaves.values(), "auto")
    theirs = F.gelu(F.linear(*leaves.values()), approximate="tanh")
    assert torch.equal(ours, theirs)
    for mine, expected in zip(*(torch.autograd.grad(y.sin().sum(), wanted) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


def test_the_bias_gradient_is_added_up_in_float32_and_cast_once() -> None:
    """4096 ones in bf16 would stop at 256; and dx is not rounded before it is added."""
    bias = torch.zeros(8, dtype=torch.bfloat16, requires_grad=True)
    gelu(torch.full((4096, 8), 20.0, dtype=torch.bfloat16), bias).sum().backward()
    assert bias.grad is not None and bias.grad.dtype is torch.bfloat16 and (bias.grad == 4096).all()
    x, wide = draw(512, 8, dtype=torch.bfloat16).requires_grad_(), torch.zeros(8, requires_grad=True)
    dx, dbias = torch.autograd.grad(gelu(x, wide).sum(), (x, wide))
    exact = torch.ops.aten.gelu_backward(torch.ones(512, 8).double(), x.detach().double(), approximate="tanh").sum(0)
    assert relative_error(dbias, exact) < 1e-6 < relative_error(dx.float().sum(0), exact)


def test_only_x_is_kept_for_backward() -> None:
    x, bias = draw(4, 8).requires_grad_(), draw(8).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        gelu(x, bias)
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]


def test_layouts_change_nothing() -> None:
    """Rows at a stride, transposed, off 16 bytes; an expanded dy."""
    plain, bias = draw(6, 5, 24), draw(24)
    strange = [
        torch.stack([plain, plain], dim=-2)[..., 0, :],
        plain.transpose(0, 1).contiguous().transpose(0, 1),
        plain.transpose(0, 2).contiguous().transpose(0, 2),
        torch.cat([plain.new_zeros(1), plain.flatten()])[1:].view(6, 5, 24),
    ]

    def run(x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        x, b = x.detach().requires_grad_(), bias.detach().requires_grad_()
        y = gelu(x, b)
        return y, *torch.autograd.grad(y, (x, b), dy)

    expected = run(plain, torch.ones_like(plain))
    for x in strange:
        assert all(torch.equal(a, b) for a, b in zip(run(x, torch.ones(()).expand_as(x)), expected, strict=True))


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)])
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    x, bias = torch.zeros(shape, requires_grad=True), torch.ones(shape[-1], dtype=torch.bfloat16, requires_grad=True)
    y = gelu(x, bias)
    y.sum().backward()
    assert y.shape == shape and x.grad is not None and x.grad.shape == shape
    assert bias.grad is not None and bias.grad.dtype is torch.bfloat16 and not bias.grad.any()


def test_what_is_refused() -> None:
    x = torch.ones(2, 8, requires_grad=True)
    for message, arguments in [
        (r"x must have shape \(..., F\)", (torch.ones(()),)),
        (r"comes from, \(8,\); got \(2,\)", (x, torch.ones(2))),
    ]:
        with pytest.raises(ValueError, match=message):
            gelu(*arguments)
    with pytest.raises(ValueError, match="backend must be"):
        gelu(x, backend="metal")  # type: ignore[arg-type]
    for name in ("triton", "cuda"):
        with pytest.raises(NotImplementedError, match=rf"gelu cannot run .*{name}: .*cpu"):
            gelu(x, backend=name)  # type: ignore[arg-type]
    (first,) = torch.autograd.grad(gelu(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="gelu has no second derivative"):
        first.sum().backward()


def test_autocast_leaves_it_and_the_bias_keeps_its_dtype() -> None:
    h, weight, bias = draw(4, 16), draw(8, 16, seed=1), draw(8, seed=2).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gelu(h).dtype is torch.float32
        y = feed_forward(h, weight, bias, "auto")
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()
    assert bias.grad is not None and bias.grad.dtype is torch.float32


@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16])
def test_opcheck(bias: torch.dtype | None) -> None:
    x = draw(2, 3, 8, dtype=torch.bfloat16).requires_grad_()
    b = None if bias is None else torch.zeros(8, dtype=bias, requires_grad=True)
    torch.library.opcheck(OPS.gelu.default, (x, b, "auto"))
    torch.library.opcheck(OPS.gelu_backward.default, (torch.ones_like(x), x.detach(), bias, True, "auto"))


def test_no_graph_break() -> None:
    leaves = [draw(2, 5, 16), draw(32, 16, seed=1), draw(32, seed=2)]
    assert_no_graph_break(partial(feed_forward, backend="auto"), [x.requires_grad_() for x in leaves])


@pytest.mark.parametrize(("f", "threads"), [(8960, 224), (13824, 192), (5120, 160), (8, 32)])
def test_cuda_blocks_leave_few_threads_idle(f: int, threads: int) -> None:
    assert threads_for(f, torch.bfloat16) == threads


@pytest.mark.skipif(NVCC is None, reason="no nvcc here")
@pytest.mark.parametrize(
    ("arch", "f", "dtype"),
    [
        ("sm_80", 64, torch.float16),
        ("sm_90", 8960, torch.bfloat16),
        ("sm_90", 8968, torch.float32),
        ("sm_100", 8960, torch.bfloat16),
    ],
)
def test_the_cuda_source_compiles(arch: str, f: int, dtype: torch.dtype, tmp_path: Path) -> None:
    assert NVCC is not None
    if arch not in subprocess.run([NVCC, "--list-gpu-code"], capture_output=True, text=True).stdout:
        pytest.skip(f"this nvcc does not know {arch}")
    (tmp_path / "gelu.cu").write_text('#include "gelu.cuh"\n')
    defines = [f"-D{macro}={value}" for macro, value in constants(f, dtype).items()]
    command = [
        NVCC,
        "-std=c++17",
        f"-arch={arch}",
        "-cubin",
        f"-I{nvrtc.sources()}",
        *defines,
        "-o",
        "gelu.cubin",
        "gelu.cu",
    ]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_nvrtc_compiles_what_nvcc_does(tmp_path: Path) -> None:
    try:
        toolkit.nvrtc_version(), toolkit.include_folder()
    except toolkit.CudaUnavailableError as reason:
        pytest.skip(str(reason))
    assert nvrtc.cubin("gelu.cuh", constants(8960, torch.bfloat16), "sm_90", folder=tmp_path)


def test_a_gradient_that_nobody_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen bias costs no sums."""
    from lightning_videoscale.kernels.reference import gelu as reference

    asked: list[bool] = []
    backward = reference.backward

    def spy(dy: Tensor, x: Tensor, *, sums: bool, again: bool) -> Any:
        asked.append(sums)
        return backward(dy, x, sums=sums, again=again)

    monkeypatch.setattr(reference, "backward", spy)
    x = draw(4, 8).requires_grad_()
    for bias in (None, torch.zeros(8), torch.zeros(8, requires_grad=True)):
        gelu(x, bias).sum().backward()
    assert asked == [False, False, True]
