"""Triton kernels compiled for a GPU that need not be there, with the arguments of a launch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64", torch.int32: "i32"}
_OPTIONS = {"num_warps", "num_stages", "debug", "sanitize_overflow", "enable_fp_fusion"}


def shared_memory(kernel: Any, arch: int, *arguments: Any, **constants: Any) -> int:
    """Bytes of shared memory that a launch with these arguments takes per program, on compute capability ``arch``."""
    given = dict(zip(kernel.arg_names, arguments, strict=False)) | constants
    signature, values, attributes = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        value = given[name]
        constant = kernel.params[place].is_constexpr
        signature[name] = "constexpr" if constant else _signature(value, (place,), values, attributes)
        if constant:
            values[(place,)] = value
    source = ASTSource(kernel, signature, values, attributes)
    options = {name: value for name, value in constants.items() if name in _OPTIONS}
    return int(triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).metadata.shared)


def _signature(value: Any, path: tuple[int, ...], values: dict[Any, Any], attributes: dict[Any, Any]) -> Any:
    if isinstance(value, tuple):
        return tuple(_signature(each, (*path, i), values, attributes) for i, each in enumerate(value))
    if value is None:
        values[path] = None
        return "constexpr"
    if isinstance(value, Tensor):
        attributes[path] = [["tt.divisibility", 16]]
        return f"*{_TYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


@contextmanager
def compiled_for(arch: int, shared_bytes: int, *modules: Any) -> Iterator[dict[str, int]]:
    """Has the launches of these modules compiled for a GPU instead of run, and tells their shared memory by kernel.

    Args:
        arch: Such as 90.
        shared_bytes: What the GPU offers a program.
        modules: Of `kernels.triton`.
    """
    taken: dict[str, int] = {}

    def compile_only(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        name = f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"
        taken[name] = max(taken.get(name, 0), shared_memory(kernel, arch, *arguments, **constants))

    with ExitStack() as patches:
        for module in modules:
            patches.enter_context(patch.object(module, "run_kernel", compile_only))
        launch = "lightning_videoscale.kernels.triton.launch.shared_bytes"
        patches.enter_context(patch(launch, lambda device: shared_bytes))
        yield taken
