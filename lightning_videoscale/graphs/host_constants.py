"""What a forward copies from the host to the device while it is captured: `HostConstants`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_videoscale.compat.torch.trees import tree_leaves

_OF_DATA = frozenset({torch.tensor, torch.as_tensor, Tensor.new_tensor})
_OF_TENSOR = frozenset({Tensor.to, Tensor.cuda, Tensor.type_as})
"""Functions that return on the device what is on the host, of numbers and of a tensor."""


class HostConstants(TorchFunctionMode):
    """Inside, copies from the host are made beside the capture, once for all replays.

    Tables of rotations and lists of sizes are examples. They follow from shapes and attributes, which a graph holds
    constant anyway: no input is on the host, and a forward that draws numbers there is not captured. Each replay reads
    copies of them, as the forward may write into what it has made.

    Args:
        device: To which is copied.
        beside: In which copies are made; they are complete when it ends.

    Attributes:
        kept: What was copied, in this order; to be kept as long as the graphs that read it.
    """

    def __init__(self, device: torch.device, beside: Callable[[], AbstractContextManager[object]]) -> None:
        super().__init__()
        self._device, self._beside = device, beside
        self.kept: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OF_DATA:
            data = args[1:] if func is Tensor.new_tensor else args
            is_of_host = not any(map(self._is_there, tree_leaves((data, kwargs))))
            return self._made(func, args, kwargs) if is_of_host else func(*args, **kwargs)
        if func in _OF_TENSOR and _is_on_host(args[0]):
            return self._made(func, args, kwargs)
        if func is Tensor.copy_ and len(args) > 1 and self._is_there(args[0]) and _is_on_host(args[1]):
            return func(args[0], self._made(Tensor.to, (args[1], self._device), {}), *args[2:], **kwargs)
        return func(*args, **kwargs)

    def _made(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._beside():
            result = func(*args, **kwargs)
        if not self._is_there(result):
            return result
        self.kept.append(result.detach())
        return result.clone()

    def _is_there(self, x: Any) -> bool:
        if isinstance(x, Tensor):
            return x.device.type == self._device.type
        return hasattr(x, "__cuda_array_interface__")  # another library's, which is taken where it lies


def differ(first: HostConstants, second: HostConstants) -> bool:
    """Whether two captures of one forward have copied something else."""
    return len(first.kept) != len(second.kept) or not all(map(same_contents, first.kept, second.kept))


def same_contents(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors on one device have the same dtype, shape and bytes; so NaN equals itself."""
    return (x.dtype, x.shape) == (y.dtype, y.shape) and torch.equal(_bytes(x), _bytes(y))


def _bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().flatten().view(torch.uint8)


def _is_on_host(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == "cpu"
