"""The CUDA row kernels on a device: equal to float64 over random variants, layouts and sizes, and to themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_videoscale.kernels.cuda import rows as cuda_rows
from lightning_videoscale.kernels.cuda.row_kernels import RowKernels
from lightning_videoscale.kernels.cuda.row_tuning import RowTuning
from lightning_videoscale.kernels.row_types import Operand, RowGradients, RowMap, RowOp, RowOutputs, RowVariant
from tests.kernels.random_rows import EPS, RowCase, check_gradients, check_outputs, draw_case

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CHANNELS = (64, 1152, 1536, 1920, 2240, 2432, 3072, 5120, 5376)


def poison() -> None:
    """Leaves NaN in the memory that the allocator hands out next, small and large."""
    blocks = [torch.full((size,), float("nan"), device="cuda") for size in (1 << 8, 1 << 12, 1 << 16, 1 << 20, 1 << 24)]
    del blocks


def same(mine: Tensor | None, again: Tensor | None) -> bool:
    """Bitwise."""
    return mine is again or (mine is not None and again is not None and torch.equal(mine, again))


@pytest.mark.parametrize("seed", range(48))
def test_any_variant_equals_float64_and_repeats(seed: int) -> None:
    case = draw_case(seed, "cuda", DTYPES, CHANNELS)
    reason = cuda_rows.limit(case.forward_arguments[0], 0)
    if reason is not None:
        assert "shared memory" in reason
        return
    poison()
    outputs = cuda_rows.forward(*case.forward_arguments)
    check_outputs(case, outputs)

    h = case.x if outputs.h is None else outputs.h
    arguments = case.backward_arguments(h, outputs.mean, outputs.rstd)
    poison()
    gradients = cuda_rows.backward(*arguments)
    check_gradients(case, h, gradients)

    assert all(map(same, outputs, cuda_rows.forward(*case.forward_arguments)))
    assert all(map(same, gradients, cuda_rows.backward(*arguments)))


@pytest.mark.parametrize("bulk", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("stages", [2, 4])
def test_any_launch_equals_float64(stages: int, rows: int, bulk: bool) -> None:
    if bulk and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("bulk copies need compute capability 9.0")
    n, d = 3 * 1009, 1536
    x, branch, dh, dy = (torch.randn(n, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    op = RowOp("layer", residual=True, gate="identity", branch_sum=True)
    # 224: the last threads own no column. One group: blocks take turns, or a share each.
    for threads, groups, in_turns in ((192, 3, True), (64, 1, True), (224, 1, False)):
        gate, scale, shift = (Operand(torch.randn(groups, d, device="cuda")) for _ in range(3))
        frames = RowMap(groups, n // groups)
        case = RowCase(op, x, branch, gate, scale, shift, None, None, frames, dh, dy)
        tuning = RowTuning(threads, stages, rows, 1 if stages * rows > 8 else 2, bulk, in_turns)
        poison()
        variant, inputs = case.forward_arguments
        outputs = cuda_rows.run_forward(RowKernels(variant, "forward", 0, tuning), variant, inputs)
        check_outputs(case, outputs)
        assert outputs.h is not None
        arguments = case.backward_arguments(outputs.h, outputs.mean, outputs.rstd)
        poison()
        kernels = RowKernels(arguments[0], "backward", 0, tuning)
        check_gradients(case, outputs.h, cuda_rows.run_backward(kernels, *arguments))


@pytest.mark.parametrize("in_turns", [True, False])
@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "op",
    [
        RowOp("layer"),
        RowOp("layer", True, "tanh", branch_sum=True),
        RowOp("layer", True, branch_sum=True),
        RowOp(None, True, "identity", sums=False, branch_sum=True),
    ],
)
def test_clusters_add_the_same_sums(op: RowOp, cluster: int, in_turns: bool) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters need compute capability 9.0")
    d = 1920
    # Many rows; blocks without any; several groups, where clusters are not used.
    for n, groups in ((8192, 1), (3, 1), (3027, 3)):
        x, branch, dh, dy = (torch.randn(n, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        operands = [Operand(torch.randn(groups, d, device="cuda")) for _ in range(3)]
        gate, scale, shift = (
            o if wanted else None for o, wanted in zip(operands, (op.gate, op.norm, op.norm), strict=True)
        )
        with_branch = (branch, dh) if op.residual else (None, None)
        frames = RowMap(groups, n // groups)
        case = RowCase(
            op, x, with_branch[0], gate, scale, shift, None, None, frames, with_branch[1], dy if op.norm else None
        )
        outputs = cuda_rows.forward(*case.forward_arguments)
        h = x if outputs.h is None else outputs.h
        arguments = case.backward_arguments(h, outputs.mean, outputs.rstd)
        kernels = RowKernels(arguments[0], "backward", 0, RowTuning(128, 2, 1, 2, True, in_turns, cluster))
        assert (kernels.shape(n, frames)[2] > 1) == (groups == 1 < cluster)
        poison()
        gradients = cuda_rows.run_backward(kernels, *arguments)
        check_gradients(case, h, gradients)
        assert all(map(same, gradients, cuda_rows.run_backward(kernels, *arguments)))


@pytest.mark.parametrize("groups", [16, 17, 100, 3000])
def test_images_by_the_hundred_have_a_group_each(groups: int) -> None:
    """Shares of the groups are added up side by side, and then together: repeatable to the bit."""
    n, d = 4 * groups, 1536
    branch, dh, dy, x = (torch.randn(n, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    op, rows = RowOp("layer", residual=True, gate="identity", branch_sum=True), RowMap(groups, 4)
    gate, scale, shift = (Operand(torch.randn(groups, d, device="cuda")) for _ in range(3))
    weight, bias = (torch.randn(d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    case = RowCase(op, x, branch, gate, scale, shift, weight, bias, rows, dh, dy)
    outputs = cuda_rows.forward(*case.forward_arguments)
    assert outputs.h is not None
    arguments = case.backward_arguments(outputs.h, outputs.mean, outputs.rstd)
    poison()
    gradients = cuda_rows.backward(*arguments)
    check_gradients(case, outputs.h, gradients)
    assert all(map(same, gradients, cuda_rows.backward(*arguments)))


def test_sums_of_a_step_under_load_are_the_same_to_the_bit() -> None:
    """Many times over: the finalize is launched while backward runs, and a sum that is taken too early would differ."""
    n, d = 32760, 1536
    branch, dh, dy, h = (torch.randn(n, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    op, rows = RowOp("layer", residual=True, gate="identity", branch_sum=True), RowMap(1, n)
    gate, scale = (Operand(torch.randn(1, d, device="cuda")) for _ in range(2))
    weight, bias = (torch.randn(d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    mean, rstd = h.float().mean(1), torch.rsqrt(h.float().var(1, correction=0) + EPS)
    case = RowCase(op, h, branch, gate, scale, None, weight, bias, rows, dh, dy)

    def run() -> RowGradients:
        poison()
        return cuda_rows.backward(*case.backward_arguments(h, mean, rstd))

    expected, other = run(), torch.cuda.Stream()
    for _ in range(50):
        with torch.cuda.stream(other):  # so that multiprocessors are taken at any time
            torch.mm(h.t(), h)
        assert all(map(same, run(), expected))


@pytest.mark.parametrize("d", [1536, 3072, 5120])
def test_a_gradient_from_elsewhere_is_added_inside(d: int) -> None:
    """As `fork_norm_modulate` runs it, in the launch of a backward that moves as much."""
    n, op, rows = 8200, RowOp("layer"), RowMap(1, 8200)
    x, dh, dy = (torch.randn(n, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    scale, shift = (Operand(torch.randn(1, d, device="cuda")) for _ in range(2))
    case = RowCase(op, x, None, None, scale, shift, None, None, rows, dh, dy)
    outputs = cuda_rows.forward(*case.forward_arguments)
    poison()
    gradients = cuda_rows.backward(*case.backward_arguments(x, outputs.mean, outputs.rstd))
    check_gradients(case, x, gradients)


def test_more_elements_than_a_32_bit_integer_counts() -> None:
    n, d = 420_001, 5120  # 2.15e9 elements
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB")
    x = torch.randn(n, d, device="cuda", dtype=torch.bfloat16)
    scale, shift = (Operand(torch.randn(1, d, device="cuda")) for _ in range(2))
    op, rows = RowOp("layer"), RowMap(1, n)
    case = RowCase(op, x, None, None, scale, shift, None, None, rows, None, None)
    _, y, mean, rstd = cuda_rows.forward(*case.forward_arguments)
    assert y is not None
    for part in (slice(0, 100), slice(n - 100, n)):
        some = RowCase(op, x[part], None, None, scale, shift, None, None, RowMap(1, 100), None, None)
        assert mean is not None and rstd is not None
        check_outputs(some, RowOutputs(None, y[part], mean[part], rstd[part]))
    gradients = cuda_rows.backward(*replace(case, dy=y).backward_arguments(x, mean, rstd))
    assert gradients.dshift is not None
    expected = sum(chunk.double().sum(0) for chunk in y.split(20_000))
    torch.testing.assert_close(gradients.dshift[0].double(), expected, rtol=1e-5, atol=1e-2)
    assert gradients.dx is not None and not gradients.dx[-100:].isnan().any()


def test_what_cannot_run_says_why() -> None:
    variant = RowVariant(RowOp("layer"), 64, torch.float32)
    assert cuda_rows.limit(variant, 0) is None
    assert "multiple of 8" in str(cuda_rows.limit(variant._replace(channels=60), 0))
    assert "one dtype" in str(cuda_rows.limit(variant._replace(activation=torch.float64), 0))
    assert "one dtype" in str(cuda_rows.limit(variant._replace(branch=torch.bfloat16), 0))
    assert "shared memory" in str(cuda_rows.limit(variant._replace(channels=65536), 0))


def test_a_launch_costs_the_host_little() -> None:
    x = torch.randn(64, 1536, device="cuda", dtype=torch.bfloat16)
    scale, shift = (Operand(torch.randn(1, 1536, device="cuda")) for _ in range(2))
    case = RowCase(RowOp("layer"), x, None, None, scale, shift, None, None, RowMap(1, 64), None, None)
    arguments = case.forward_arguments
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(20):
        cuda_rows.forward(*arguments)
    begin.record()
    for _ in range(1000):
        cuda_rows.forward(*arguments)
    end.record()
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) / 1000 < 0.1  # milliseconds per call, the kernel's own few µs included
