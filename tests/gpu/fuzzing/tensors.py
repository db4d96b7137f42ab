"""Tensors of a case: random values in any layout, between guards that nobody may write and whose reading shows."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

_GUARD = 64  # elements on either side: NaN, of integers 0
LAYOUTS = ("contiguous", "contiguous", "offset", "columns", "chunk", "tokens", "transposed", "channels", "expanded")


class Tensors:
    """Draws the tensors of one case, the same ones for the same seed and device.

    Args:
        seed: Of the case.
        device: Where they lie.
    """

    def __init__(self, seed: int, device: str) -> None:
        self.device = device
        self.layouts = random.Random(seed)
        self._generator = torch.Generator(device).manual_seed(seed)
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def normal(self, *shape: int, dtype: torch.dtype, scale: float = 1.0, offset: float = 0.0) -> Tensor:
        """Normal numbers in one of `LAYOUTS`."""
        values = torch.randn(shape, generator=self._generator, device=self.device) * scale + offset
        return self.placed(values.to(dtype))

    def integers(self, below: int, *shape: int, dtype: torch.dtype) -> Tensor:
        """Integers in [0, below) in one of `LAYOUTS`."""
        return self.placed(torch.randint(below, shape, generator=self._generator, device=self.device).to(dtype))

    def angles(self, *shape: int) -> Tensor:
        """Float32 in [-π, π)."""
        return (torch.rand(shape, generator=self._generator, device=self.device) - 0.5) * 2 * torch.pi

    def placed(self, values: Tensor) -> Tensor:
        """The values in a layout that is drawn, between guards; an expanded one repeats the first of them."""
        kind, shape = self.layouts.choice(LAYOUTS), tuple(values.shape)
        if kind == "expanded" and len(shape) > 1:
            values = values[:1]
        view = self._view(kind, tuple(values.shape), values.dtype)
        view.copy_(values)
        return view.expand(shape)

    def placed_as(self, values: Tensor, stride: int, phase: int) -> Tensor:
        """The values at every ``stride``-th element of a last dimension, ``phase`` elements behind its begin."""
        wide = self._buffer((*values.shape[:-1], values.shape[-1] * stride), values.dtype, 0)
        view = wide[..., phase::stride]
        view.copy_(values)
        return view

    def remember(self) -> None:
        """Notes what is in all buffers."""
        self._buffers = [(buffer, buffer.clone()) for buffer, _ in self._buffers]

    def changed(self) -> Tensor:
        """Whether anything in them, guards included, is not what was noted: 0 or 1."""
        changes = [(_bits(buffer) != _bits(before)).any() for buffer, before in self._buffers]
        return torch.stack(changes).any()

    def _view(self, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        pad = self.layouts.choice((16, 16, 8, 1))
        if len(shape) == 1:
            return (
                self._buffer((2 * shape[0],), dtype, 0)[::2] if kind == "columns" else self._offset(kind, shape, dtype)
            )
        if kind == "columns":
            return self._buffer((*shape[:-1], shape[-1] + pad), dtype, 0)[..., : shape[-1]]
        if kind == "chunk":  # of several projections or modulations made at once
            parts = self._buffer((*shape[:-1], 6, shape[-1]), dtype, 0) if len(shape) < 4 else None
            if parts is None:
                return self._buffer((*shape[:2], 3, *shape[2:]), dtype, 0)[:, :, self.layouts.randrange(3)]
            return parts[..., self.layouts.randrange(6), :]
        if kind == "tokens" and len(shape) > 2:
            return self._buffer((shape[0], shape[1] + 3, *shape[2:]), dtype, 0)[:, 2 : 2 + shape[1]]
        if kind in ("transposed", "channels"):
            a, b = (0, 1) if kind == "transposed" else (-2, -1)
            swapped = list(shape)
            swapped[a], swapped[b] = swapped[b], swapped[a]
            return self._buffer(swapped, dtype, 0).transpose(a, b)
        return self._offset(kind, shape, dtype)

    def _offset(self, kind: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._buffer(shape, dtype, int(kind == "offset"))

    def _buffer(self, shape: Sequence[int], dtype: torch.dtype, offset: int) -> Tensor:
        """A contiguous view of so many elements that begins ``offset`` elements behind a multiple of 16 bytes."""
        size = 1
        for extent in shape:
            size *= extent
        filling = float("nan") if dtype.is_floating_point else 0
        buffer = torch.full((_GUARD + offset + size + _GUARD,), filling, dtype=dtype, device=self.device)
        self._buffers.append((buffer, buffer))
        return buffer[_GUARD + offset : _GUARD + offset + size].view(*shape)


def _bits(x: Tensor) -> Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
