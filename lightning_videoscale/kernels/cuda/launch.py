"""Machine code to a function that runs on the current stream, with little to do on the host per launch."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.compat.torch.cuda import current_raw_stream
from lightning_videoscale.kernels.capture import is_capturing, not_while_capturing
from lightning_videoscale.kernels.cuda import toolkit
from lightning_videoscale.kernels.cuda.compile import cubin

_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # CUlaunchAttributeID
_CONFIG = "7I4xPPI4x"  # CUlaunchConfig: grid, block, shared bytes, stream, attributes and how many
_CONFIG_BYTES = struct.calcsize(f"@{_CONFIG}")
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
        early: Launch while the kernel before it still runs, where the device can (compute capability 9.0). The source
            must then wait for that one (``await_previous_kernel``) before it touches what that one reads or writes.
    """

    def __init__(
        self, code: bytes, name: str, layout: str, device: int, shared_bytes: int = 0, *, early: bool = False
    ) -> None:
        self._driver = toolkit.driver()
        self._launch_kernel = toolkit.launch_kernel()
        self._device = device
        self._shared_bytes = shared_bytes
        self._early = early and torch.cuda.get_device_capability(device) >= (9, 0)
        # One buffer per launch: the configuration, the address of the argument, the argument. "0P" pads its end to the
        # alignment of pointers, as a C compiler does.
        packed = struct.Struct(f"@{_CONFIG}P{layout}0P")
        self._pack_into, self._buffer = packed.pack_into, ctypes.c_char * packed.size
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # The device's context exists and is current from here on.
            self._context = toolkit.check(self._driver.cuCtxGetCurrent(), "Asking for the CUDA context")
            module = toolkit.check(self._driver.cuModuleLoadData(code), f"Loading the CUDA kernel {name}")
            self._function = toolkit.check(
                self._driver.cuModuleGetFunction(module, name.encode()), f"Finding the CUDA kernel {name}"
            )
            self._handle = int(self._function)
            if shared_bytes:  # With the kernel's own static shared memory, 48 KiB may be passed by less than that.
                attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                toolkit.check(
                    self._driver.cuFuncSetAttribute(self._function, attribute, shared_bytes),
                    f"Reserving {shared_bytes} bytes of shared memory for the CUDA kernel {name}",
                )

    def attribute(self, name: str) -> int:
        """One of the function's attributes, such as "NUM_REGS" or "LOCAL_SIZE_BYTES" (CUfunction_attribute)."""
        which = getattr(self._driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        return int(toolkit.check(self._driver.cuFuncGetAttribute(which, self._function), f"Asking for {name}"))

    def most_clusters(self, threads: int, cluster: int) -> int:
        """How many clusters of so many blocks, of so many threads each, the device runs at once."""
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = cluster, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = self._shared_bytes
        attribute = self._driver.CUlaunchAttribute()
        attribute.id = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attribute.value.clusterDim
        size.x, size.y, size.z = cluster, 1, 1
        config.attrs, config.numAttrs = [attribute], 1
        what = f"Asking how many clusters of {cluster} blocks fit"
        return int(toolkit.check(self._driver.cuOccupancyMaxActiveClusters(self._function, config), what))

    def __call__(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], *arguments: Any, cluster: int = 1
    ) -> None:
        """Launches on the device's current stream.

        Args:
            grid: Blocks along x, y and z; an empty grid launches nothing.
            block: Threads along x, y and z.
            arguments: The struct's members in order, pointers as integers.
            cluster: Blocks along x that run side by side and may read each other's shared memory (compute capability
                9.0 and newer); divides the grid.

        Raises:
            CudaUnavailableError: If the driver refuses the launch.
        """
        if 0 in grid:
            return
        if torch.cuda.current_device() == self._device:
            self._launch(grid, block, arguments, cluster)
        else:
            with torch.cuda.device(self._device):
                self._launch(grid, block, arguments, cluster)

    def _launch(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], arguments: tuple[Any, ...], cluster: int
    ) -> None:
        buffer = self._buffer()  # Of this launch alone: the driver reads it while other threads run.
        config = ctypes.addressof(buffer)
        pointers = config + _CONFIG_BYTES
        stream = current_raw_stream(self._device)
        attributes, count = _attributes(self._early, cluster)
        address = ctypes.addressof(attributes)
        self._pack_into(buffer, 0, *grid, *block, self._shared_bytes, stream, address, count, pointers + 8, *arguments)
        status = self._launch_kernel(config, self._handle, pointers, None)
        if status == _INVALID_CONTEXT:
            toolkit.check(self._driver.cuCtxSetCurrent(self._context), "Making the CUDA context current")
            status = self._launch_kernel(config, self._handle, pointers, None)
        if status:
            what = (
                f"grid {grid} in clusters of {cluster}, block {block}, {self._shared_bytes} bytes of shared memory, "
                f"arguments {arguments}"
            )
            toolkit.check((self._driver.CUresult(status),), f"Launching a CUDA kernel with {what}")


@functools.cache
def _attributes(early: bool, cluster: int) -> tuple[ctypes.Array[ctypes.c_char], int]:
    """Array of a launch's CUlaunchAttributes, and how many: each its number, padding and a value of 64 bytes."""
    packed = struct.pack("=i4xi60x", _PROGRAMMATIC_STREAM_SERIALIZATION, 1) if early else b""
    if cluster > 1:
        packed += struct.pack("=i4x3I52x", _CLUSTER_DIMENSION, cluster, 1, 1)
    return ctypes.create_string_buffer(packed), len(packed) // 72


def load(
    source: str,
    name: str,
    layout: str,
    constants: Mapping[str, str | int],
    device: int,
    *,
    shared_bytes: int = 0,
    early: bool = False,
) -> Kernel:
    """The kernel ``name`` of ``csrc/<source>``, compiled for a device (or taken from the cache) and loaded there.

    Args:
        source: File of ``csrc``.
        name: Of the function.
        layout: Of its argument, see `Kernel`.
        constants: Macros.
        device: Index of the CUDA device.
        shared_bytes: Dynamic shared memory per block.
        early: See `Kernel`.

    Raises:
        CudaUnavailableError: If NVRTC or its headers are missing, or the driver refuses.
        CompilationError: If the source does not compile.
        RuntimeError: If a CUDA graph is being captured.
    """
    if is_capturing():
        raise not_while_capturing(f"The CUDA kernel {name}")
    return Kernel(cubin(source, constants, arch(device)), name, layout, device, shared_bytes, early=early)


@functools.cache
def arch(device: int) -> str:
    """Architecture of a device, such as "sm_90"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def address_of(x: Tensor | None) -> int:
    """Returns the pointer that a kernel takes for a tensor, or for none."""
    return 0 if x is None else x.data_ptr()


def rows_at(x: Tensor | None) -> tuple[int, int]:
    """Returns the pointer and the bytes from row to row that a kernel takes for (N, …), or for none."""
    return (0, 0) if x is None else (x.data_ptr(), x.stride(0) * x.element_size())
