"""What a forward copies from the host to the device while it is captured: `HostConstants`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_MAKES = frozenset({torch.tensor, torch.as_tensor, Tensor.new_tensor, Tensor.to, Tensor.cuda, Tensor.type_as})
"""Functions that return a copy on the device of what is on the host."""


class HostConstants(TorchFunctionMode):
    """Inside, copies from the host are made beside the capture, once for all replays.

    Tables of rotations and lists of sizes are examples. They follow from shapes and attributes, which a graph holds
    constant anyway: no input is on the host, and a forward that draws numbers there is not captured.

    Args:
        device: To which is copied.
        beside: In which copies are made; they are complete when it ends.

    Attributes:
        kept: The copies, to be kept as long as the graphs that read them.
    """

    def __init__(self, device: torch.device, beside: Callable[[], AbstractContextManager[object]]) -> None:
        super().__init__()
        self._device, self._beside = device, beside
        self.kept: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _MAKES:
            return self._made(func, args, kwargs)
        if func is Tensor.copy_ and self._is_there(args[0]) and _is_on_host(args[1]):
            source = self._made(Tensor.to, (args[1], self._device), {})
            return func(args[0], source, *args[2:], **kwargs)
        return func(*args, **kwargs)

    def _made(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Beside the capture if it copies from the host, and where it is otherwise."""
        if isinstance(args[0], Tensor) and func is not Tensor.new_tensor and not _is_on_host(args[0]):
            return func(*args, **kwargs)
        with self._beside():
            result = func(*args, **kwargs)
        if self._is_there(result):
            self.kept.append(result)
        return result

    def _is_there(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.device.type == self._device.type


def _is_on_host(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == "cpu"
