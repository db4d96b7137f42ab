"""What NVRTC needs from the machine: the Python bindings and the headers of the CUDA toolkit."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

_HEADERS = ("cuda_bf16.h", "cuda_bf16.hpp", "cuda_fp16.h", "cuda_fp16.hpp")


class CudaUnavailableError(RuntimeError):
    """CUDA kernels cannot be compiled or run here; the message says what is missing and how to get it."""


@functools.cache
def nvrtc() -> Any:
    """The module ``cuda.bindings.nvrtc``, its library loaded.

    Raises:
        CudaUnavailableError: If it is not installed.
    """
    return _load("nvrtc", "nvrtcVersion")


@functools.cache
def driver() -> Any:
    """The module ``cuda.bindings.driver``, its library loaded.

    Raises:
        CudaUnavailableError: If it is not installed.
    """
    return _load("driver", "cuDriverGetVersion")


@functools.cache
def launch_kernel() -> Any:
    """The driver's ``cuLaunchKernelEx(config, function, parameters, extra)`` on plain addresses, returning its status.

    The bindings' own function takes several microseconds to read the objects that it is called with.

    Raises:
        CudaUnavailableError: If the driver's library does not load.
    """
    try:
        function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError) as error:
        raise CudaUnavailableError(f"The CUDA driver's cuLaunchKernelEx was not found ({error}); update it.") from error
    function.argtypes, function.restype = [ctypes.c_void_p] * 4, ctypes.c_int
    return function


def _load(name: str, first_call: str) -> Any:
    try:
        module = importlib.import_module(f"cuda.bindings.{name}")
        getattr(module, first_call)()
    except (ImportError, RuntimeError) as error:
        raise CudaUnavailableError(
            f"cuda.bindings.{name} does not load here ({error}), so no CUDA kernel can be compiled. "
            "The packages cuda-bindings and nvidia-cuda-nvrtc come with PyTorch's CUDA wheels; otherwise install them "
            "in the version of torch.version.cuda, or ask for the Triton backend."
        ) from error
    return module


def check(result: tuple[Any, ...], what: str) -> Any:
    """Returns what a call of the bindings returned beside its status.

    Raises:
        CudaUnavailableError: If the status is an error; ``what`` says what was attempted.
    """
    status, *values = result
    if int(status) != 0:
        raise CudaUnavailableError(f"{what} failed: {status!r}.")
    return values[0] if len(values) == 1 else tuple(values)


@functools.cache
def nvrtc_version() -> str:
    """Such as "13.0"."""
    major, minor = check(nvrtc().nvrtcVersion(), "Asking NVRTC for its version")
    return f"{major}.{minor}"


def check_architecture(arch: str) -> None:
    """Checks that NVRTC compiles for an architecture such as "sm_90".

    Raises:
        CudaUnavailableError: If it does not know it, or is not installed.
    """
    known = check(nvrtc().nvrtcGetSupportedArchs(), "Asking NVRTC for its architectures")
    if int(arch.removeprefix("sm_")) not in known:
        raise CudaUnavailableError(
            f"NVRTC {nvrtc_version()} does not know {arch}; it knows {', '.join(f'sm_{number}' for number in known)}."
        )


@functools.cache
def include_folder() -> Path:
    """The folder that holds the toolkit's ``cuda_bf16.h`` and ``cuda_fp16.h``.

    Looked for in the ``nvidia`` wheels, then under ``CUDA_HOME``, ``CUDA_PATH`` and ``/usr/local/cuda``.

    Raises:
        CudaUnavailableError: If none has them; the message lists the folders tried.
    """
    candidates = _include_candidates()
    for folder in candidates:
        if all((folder / name).is_file() for name in _HEADERS):
            return folder
    tried = "\n  ".join(map(str, candidates))
    raise CudaUnavailableError(
        f"The CUDA toolkit's headers {', '.join(_HEADERS)} were found in none of\n  {tried}\n"
        "Install the package nvidia-cuda-runtime in torch's CUDA version, or set CUDA_HOME to a toolkit."
    )


def _include_candidates() -> list[Path]:
    folders: list[Path] = []
    nvidia = importlib.util.find_spec("nvidia")
    for root in (nvidia.submodule_search_locations or ()) if nvidia else ():
        # cu13/include, or cuda_runtime/include in the wheels of CUDA 12.
        folders += sorted(Path(root).glob("*/include"))
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    return folders + [Path(home) / "include" for home in [*homes, "/usr/local/cuda"]]


@functools.cache
def headers_digest() -> str:
    """Hash of the toolkit's headers that kernels include."""
    digest = hashlib.sha256()
    for name in _HEADERS:
        digest.update((include_folder() / name).read_bytes())
    return digest.hexdigest()
