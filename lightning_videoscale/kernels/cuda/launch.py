"""Machine code to a function that runs on the current stream, with little to do on the host per launch."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Mapping
from typing import Any

import torch

from lightning_videoscale.kernels.cuda import toolkit
from lightning_videoscale.kernels.cuda.compile import cubin

_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: this thread has not used the device yet.


class Kernel:
    """One kernel of one cubin, loaded on one device. Make it once, with `load`, and keep it.

    The CUDA function takes one struct by value. ``layout`` describes that struct in the codes of Python's `struct`
    module with native alignment: "P" a pointer, "q" a 64-bit and "i" a 32-bit integer, "f" a float.

    Args:
        code: The cubin.
        name: The function's, declared extern "C".
        layout: Of its one argument.
        device: Index of the CUDA device.
        shared_bytes: Dynamic shared memory per block, above 48 KiB too.
    """

    def __init__(self, code: bytes, name: str, layout: str, device: int, shared_bytes: int = 0) -> None:
        self._driver = toolkit.driver()
        self._device = device
        self._shared_bytes = shared_bytes
        # "0P" pads the end to the alignment of pointers, as a C compiler does.
        self._pack = struct.Struct(f"@{layout}0P").pack
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # The device's context exists and is current from here on.
            self._context = toolkit.check(self._driver.cuCtxGetCurrent(), "Asking for the CUDA context")
            module = toolkit.check(self._driver.cuModuleLoadData(code), f"Loading the CUDA kernel {name}")
            self._function = toolkit.check(
                self._driver.cuModuleGetFunction(module, name.encode()), f"Finding the CUDA kernel {name}"
            )
            if shared_bytes > 48 * 1024:
                attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                toolkit.check(
                    self._driver.cuFuncSetAttribute(self._function, attribute, shared_bytes),
                    f"Reserving {shared_bytes} bytes of shared memory for the CUDA kernel {name}",
                )

    def attribute(self, name: str) -> int:
        """One of the function's attributes, such as "NUM_REGS" or "LOCAL_SIZE_BYTES" (CUfunction_attribute)."""
        which = getattr(self._driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        return int(toolkit.check(self._driver.cuFuncGetAttribute(which, self._function), f"Asking for {name}"))

    def __call__(self, grid: tuple[int, int, int], block: tuple[int, int, int], *arguments: Any) -> None:
        """Launches on the device's current stream.

        Args:
            grid: Blocks along x, y and z; an empty grid launches nothing.
            block: Threads along x, y and z.
            arguments: The struct's members in order, pointers as integers.

        Raises:
            CudaUnavailableError: If the driver refuses the launch.
        """
        if 0 in grid:
            return
        if torch.cuda.current_device() == self._device:
            self._launch(grid, block, arguments)
        else:
            with torch.cuda.device(self._device):
                self._launch(grid, block, arguments)

    def _launch(self, grid: tuple[int, int, int], block: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
        # A buffer per launch: the driver copies from it while other threads run.
        packed = ctypes.create_string_buffer(self._pack(*arguments))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(packed))
        stream = torch.cuda.current_stream(self._device).cuda_stream
        call = (self._function, *grid, *block, self._shared_bytes, stream, ctypes.addressof(pointers), 0)
        result = self._driver.cuLaunchKernel(*call)
        if int(result[0]) == _INVALID_CONTEXT:
            toolkit.check(self._driver.cuCtxSetCurrent(self._context), "Making the CUDA context current")
            result = self._driver.cuLaunchKernel(*call)
        toolkit.check(result, f"Launching a CUDA kernel with grid {grid}, block {block}, arguments {arguments}")


def load(
    source: str,
    name: str,
    layout: str,
    constants: Mapping[str, str | int],
    device: int,
    *,
    shared_bytes: int = 0,
) -> Kernel:
    """The kernel ``name`` of ``csrc/<source>``, compiled for a device (or taken from the cache) and loaded there.

    Args:
        source: File of ``csrc``.
        name: Of the function.
        layout: Of its argument, see `Kernel`.
        constants: Macros.
        device: Index of the CUDA device.
        shared_bytes: Dynamic shared memory per block.

    Raises:
        CudaUnavailableError: If NVRTC or its headers are missing, or the driver refuses.
        CompilationError: If the source does not compile.
    """
    return Kernel(cubin(source, constants, arch(device)), name, layout, device, shared_bytes)


@functools.cache
def arch(device: int) -> str:
    """Architecture of a device, such as "sm_90"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
