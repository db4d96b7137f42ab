"""Every operation on a GPU at its edges: dtypes in every pair, entries that there are not, another device.

Most of the time kernels are compiled, by the host: ``pytest -n 12 --dist worksteal`` makes use of its cores.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_videoscale.kernels import norm_modulate, qk_norm_rope
from lightning_videoscale.kernels.backend import BackendName
from tests.kernels.dtype_pairs import HEADS, check_gelu, check_heads, check_rows, every_pair, row_cases
from tests.kernels.op_calls import CALLS, gradients
from tests.kernels.row_cases import Case
from tests.kernels.row_cases import gradients as of_case

pytestmark = pytest.mark.gpu
BACKENDS: list[BackendName] = ["reference", "triton", "cuda"]


@pytest.mark.parametrize("operation", ["norm_modulate", "gate_residual", "gate_residual_norm_modulate"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("part", range(5))
def test_rows_in_every_pair_of_dtypes(operation: str, backend: BackendName, part: int) -> None:
    for case in row_cases(operation)[part::5]:
        if case.branch_dtype not in (None, case.dtype):
            check_rows(case, "auto", "cuda")
            if backend == "cuda":
                with pytest.raises(NotImplementedError, match=f"one dtype.*{case.dtype}, {case.branch_dtype}"):
                    check_rows(case, backend, "cuda")
                case = replace(case, branch_dtype=None)
        check_rows(case, backend, "cuda")


@pytest.mark.parametrize("case", HEADS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_in_every_pair_of_dtypes(case: Any, backend: BackendName) -> None:
    for dtypes in every_pair(3):
        check_heads(case, dtypes, backend, "cuda")


@pytest.mark.parametrize("backend", BACKENDS)
def test_gelu_in_every_pair_of_dtypes(backend: BackendName) -> None:
    for dtype, bias_dtype in every_pair(2):
        check_gelu(dtype, bias_dtype, backend, "cuda")


@pytest.mark.parametrize("unused", [None, 0, 1])
def test_a_float32_stream_with_a_half_precision_branch_at_a_models_size(unused: int | None) -> None:
    """As a DiT block under bf16 autocast has it, h or y unused too; and the same bits again."""
    case = Case(s=4096, d=1536, tables=True, branch_dtype=torch.bfloat16, branch_bias=True)
    t = case.tensors("cuda")
    runs = []
    for _ in range(2):
        outputs = case.run(t)
        used = tuple(output for i, output in enumerate(outputs) if i != unused)
        kept = {n: x for n, x in t.items() if unused != 1 or n in ("residual", "branch", "branch_bias") or "gate" in n}
        runs.append(of_case(used, kept))
    assert all(map(torch.equal, *runs)) and all(g.isfinite().all() for g in runs[0])
    if unused is None:
        check_rows(replace(case, s=64), "auto", "cuda")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_has_the_dtypes_of_forward(name: str, backend: BackendName) -> None:
    call, tensors = CALLS[name], CALLS[name].tensors("cuda")
    expected = gradients(call, tensors, backend=backend)
    assert all(map(torch.equal, gradients(call, tensors, under_autocast=True, backend=backend), expected))


def test_arguments_on_the_host_are_refused() -> None:
    """A kernel would read their addresses on the device."""
    q, table = torch.randn(2, 6, 4, 16, device="cuda"), torch.ones(6, 8)
    for rope in ((table, table), (table.cuda(), table)):
        with pytest.raises(ValueError, match=r"one device; got cuda:0, but .* on cpu"):
            qk_norm_rope(q, q, rope=rope)
    x, values, index = torch.ones(2, 6, 64, device="cuda"), torch.ones(5, 64, device="cuda"), torch.zeros(2, 3).long()
    with pytest.raises(ValueError, match="one device; got cuda:0, but index on cpu"):
        norm_modulate(x, values, index=index)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_layer_norm_of_one_channel_has_no_gradient(backend: BackendName) -> None:
    x, scale = torch.randn(2, 300, 1, device="cuda", requires_grad=True), torch.randn(2, 1, 1, device="cuda")
    norm_modulate(x, scale, backend=backend).backward(torch.randn(2, 300, 1, device="cuda"))
    assert x.grad is not None and not x.grad.any()


_OUT_OF_RANGE = """
import sys, torch
from lightning_videoscale.kernels import gate_residual
x, gate = torch.ones(2, 6, 64, device="cuda"), torch.ones(5, 64, device="cuda")
index = torch.tensor([[0, 4, 1], [3, int(sys.argv[2]), 2]], device="cuda")
gate_residual(x, x, gate, index=index.clamp(0, 4), backend=sys.argv[1])
torch.cuda.synchronize()
print("in range", flush=True)
gate_residual(x, x, gate, index=index, backend=sys.argv[1])
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("entry", [5, -1, 2**32])
def test_entries_that_there_are_not_stop_the_device(entry: int) -> None:
    """As PyTorch's own indexing does, without a wait of the host; in processes of their own, whose device is lost."""
    root = Path(__file__).parents[3]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _OUT_OF_RANGE, backend, str(entry)],
            cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for backend in BACKENDS
    ]  # fmt: skip
    for backend, process in zip(BACKENDS, processes, strict=True):
        said, _ = process.communicate(timeout=120)
        assert process.returncode and "in range" in said and "device-side assert triggered" in said, (backend, said)
        assert backend == "reference" or "index out of range" in said, (backend, said)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_run_on_the_tensors_device(backend: BackendName) -> None:
    """Not on the current one."""
    for operation in ("norm_modulate", "gate_residual", "gate_residual_norm_modulate"):
        check_rows(Case(operation, tables=True, affine=True), backend, "cuda:1")
    check_heads(HEADS[0], (torch.float32,) * 3, backend, "cuda:1")
    check_gelu(torch.float32, torch.float32, backend, "cuda:1")
