"""What a forward copies from the host to the device while it is captured: `HostConstants`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_videoscale.compat.torch.trees import tree_leaves

_OF_DATA = frozenset({torch.tensor, torch.as_tensor, Tensor.new_tensor})
_OF_TENSOR = frozenset({Tensor.to, Tensor.cuda, Tensor.type_as})
"""Functions that return on the device what is on the host, of numbers and of a tensor."""
_TO_HOST = frozenset({Tensor.to, Tensor.cpu})
_INDEXED = frozenset({Tensor.__getitem__, Tensor.__setitem__})


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

    leaves_attention = True  # see `attention.dispatch`

    def __init__(self, device: torch.device, beside: Callable[[], AbstractContextManager[object]]) -> None:
        super().__init__()
        self._device, self._beside = device, beside
        self.kept: list[Tensor] = []
        self._forward: list[Tensor] | None = None  # what the forward has copied, once it has ended

    def end_forward(self) -> None:
        """From now on a copy is refused unless the forward has made the same.

        A recomputed layer does. Activations that wait on the host would not be copied yet.
        """
        self._forward = list(self.kept)

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
        if func in _TO_HOST and self._is_there(args[0]):
            result = func(*args, **kwargs)
            if _is_on_host(result):
                raise RuntimeError("It copies to the host, which a graph's replay would not wait for.")
            return result
        if func is Tensor.copy_ and len(args) > 1 and _is_on_host(args[0]) and self._is_there(args[1]):
            raise RuntimeError("It copies to the host, which a graph's replay would not wait for.")
        if func is Tensor.copy_ and len(args) > 1 and self._is_there(args[0]) and _is_on_host(args[1]):
            return func(args[0], self._there(args[1]), *args[2:], **kwargs)
        if func in _INDEXED and self._is_there(args[0]):
            indexed, index, *values = args
            return func(indexed, self._index_there(index), *(self._there(x) if _is_on_host(x) else x for x in values))
        return func(*args, **kwargs)

    def _there(self, x: Tensor) -> Any:
        return self._made(Tensor.to, (x, self._device), {})

    def _index_there(self, index: Any) -> Any:
        """The index with its lists and tensors on the device, to which torch would copy them."""
        parts = index if isinstance(index, tuple) else (index,)
        moved: list[Any] = []
        for part in parts:
            chosen = torch.tensor(part) if isinstance(part, list) and _is_of_numbers(part) else part
            if not _is_on_host(chosen) or chosen.ndim == 0:  # a single number is no copy
                moved.append(part)
            elif chosen.dtype is torch.bool:
                moved += [self._there(places) for places in chosen.nonzero(as_tuple=True)]
            else:
                moved.append(self._there(chosen))
        return index if all(map(is_, moved, parts)) else tuple(moved)

    def _made(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._beside():
            result = func(*args, **kwargs)
            if not self._is_there(result):
                return result
            if self._forward is not None and not any(same_contents(result, known) for known in self._forward):
                raise RuntimeError("Its backward copies from the host what its forward has not.")
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


def _is_of_numbers(x: list[Any]) -> bool:
    return bool(x) and all(isinstance(number, int) for number in x)


def _is_on_host(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == "cpu"
