"""Tensors of a checkpoint by name, read when asked for, whole or as this rank holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from typing_extensions import override


@dataclass(frozen=True)
class StoredTensor:
    """Stands for a tensor that has not been read.

    Attributes:
        shape: Of the whole tensor.
        read: Reads it, in the dtype it was saved in: on the device of the given tensor and sharded like it, if that has
            the same shape, else whole and on the CPU.
        held: Whether the model holds the value already, as that of a parameter which the checkpoint leaves out.
    """

    shape: torch.Size
    read: Callable[[Tensor | None], Tensor]
    held: bool = False


class SavedTensors(MutableMapping[str, Any]):
    """Values by name, among them tensors that are read when asked for, whole and on the CPU.

    Behaves like the dict that it stands for, so that hooks such as ``on_load_checkpoint`` can look and change.

    Args:
        entries: Values, or `StoredTensor` in the place of a tensor.
    """

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._entries: dict[str, Any] = dict(entries)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SavedTensors:
        """Returns ``values`` itself if it is of this class, else what holds the same values."""
        return values if isinstance(values, cls) else cls(values)

    def shape(self, name: str) -> torch.Size | None:
        """Returns a tensor's shape without reading it; None for what is no tensor."""
        value = self._entries[name]
        return value.shape if isinstance(value, StoredTensor | Tensor) else None

    def is_held(self, name: str) -> bool:
        """Whether the model holds the value already, so that it need not be loaded."""
        value = self._entries[name]
        return isinstance(value, StoredTensor) and value.held

    def read(self, name: str, like: Tensor | None) -> Any:
        """Returns a value; a tensor of the shape of ``like`` comes on its device and is sharded like it."""
        value = self._entries[name]
        if isinstance(value, StoredTensor):
            return value.read(like)
        whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
        if whole and isinstance(like, DTensor) and value.shape == like.shape:
            # Every rank has the whole tensor: nothing needs to be sent.
            return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
        return value

    def put(self, name: str, value: StoredTensor) -> None:
        """Sets what stands for a tensor."""
        self._entries[name] = value

    def copy(self) -> SavedTensors:
        """Returns another of the same entries."""
        return SavedTensors(self._entries)

    def __or__(self, other: Mapping[str, Any]) -> SavedTensors:
        return self.copy().__ior__(other)

    def __ior__(self, other: Mapping[str, Any]) -> SavedTensors:
        self._entries |= other._entries if isinstance(other, SavedTensors) else dict(other)  # what is not read stays so
        return self

    @override
    def __getitem__(self, name: str) -> Any:
        return self.read(name, None)

    @override
    def __setitem__(self, name: str, value: Any) -> None:
        self._entries[name] = value

    @override
    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    @override
    def __len__(self) -> int:
        return len(self._entries)
