"""A launch hands the driver configuration and argument as C lays them out: a kernel writes down what it was given."""

from __future__ import annotations

import pytest
import torch

from lightning_videoscale.kernels.cuda import toolkit
from lightning_videoscale.kernels.cuda.launch import Kernel, arch

pytestmark = pytest.mark.gpu

SOURCE = b"""
struct Argument { long long* out; long long q; int i; float f; };

extern "C" __global__ void write_down(const __grid_constant__ Argument a) {
    unsigned cluster, shared;
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(cluster));
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(shared));
    const bool last = blockIdx.x == gridDim.x - 1 && blockIdx.y == gridDim.y - 1 && blockIdx.z == gridDim.z - 1;
    if (!last || threadIdx.x != blockDim.x - 1 || threadIdx.y != blockDim.y - 1) return;
    const long long values[] = {gridDim.x, gridDim.y, gridDim.z, blockDim.x, blockDim.y, blockDim.z, shared, cluster,
                                a.q, a.i, (long long)(a.f * 1024)};
    for (int j = 0; j < 11; ++j) a.out[j] = values[j];
}
"""


@pytest.fixture(scope="module")
def code() -> bytes:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters need compute capability 9.0")
    nvrtc, check = toolkit.nvrtc(), toolkit.check
    program = check(nvrtc.nvrtcCreateProgram(SOURCE, b"write_down.cu", 0, [], []), "Creating a program")
    options = [f"--gpu-architecture={arch(0)}".encode(), b"--std=c++17"]
    check(nvrtc.nvrtcCompileProgram(program, len(options), options), "Compiling")
    cubin = bytearray(check(nvrtc.nvrtcGetCUBINSize(program), "Asking for the size of a cubin"))
    check(nvrtc.nvrtcGetCUBIN(program, cubin), "Reading a cubin")
    return bytes(cubin)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("cluster", [1, 4])
@pytest.mark.parametrize("shared_bytes", [0, 1024, 200 * 1024])
def test_the_kernel_gets_what_was_meant(code: bytes, early: bool, cluster: int, shared_bytes: int) -> None:
    kernel = Kernel(code, "write_down", "Pqif", 0, shared_bytes, early=early)
    for _ in range(3):
        out = torch.zeros(11, dtype=torch.int64, device="cuda")
        kernel((8, 2, 1), (32, 4, 1), out.data_ptr(), -3 << 40, 7, 0.5, cluster=cluster)
        assert out.tolist() == [8, 2, 1, 32, 4, 1, shared_bytes, cluster, -3 << 40, 7, 512]


def test_launches_run_on_the_current_stream_of_the_kernels_device(code: bytes) -> None:
    kernel, out = Kernel(code, "write_down", "Pqif", 0), torch.zeros(11, dtype=torch.int64, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        kernel((1, 1, 1), (32, 1, 1), out.data_ptr(), 1, 1, 1.0)
        assert not stream.query()
    stream.synchronize()
    assert out.tolist()[0] == 1


def test_an_empty_grid_launches_nothing_and_a_refusal_raises(code: bytes) -> None:
    kernel, out = Kernel(code, "write_down", "Pqif", 0), torch.zeros(11, dtype=torch.int64, device="cuda")
    kernel((0, 1, 1), (32, 1, 1), out.data_ptr(), 1, 1, 1.0)
    assert not out.any()
    with pytest.raises(toolkit.CudaUnavailableError, match=r"block \(4096, 1, 1\)"):
        kernel((1, 1, 1), (4096, 1, 1), out.data_ptr(), 1, 1, 1.0)
