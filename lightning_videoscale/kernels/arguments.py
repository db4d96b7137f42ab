"""What every operation checks of its arguments before a kernel runs: attributes alone, no tensor's values."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_tensors(**tensors: Tensor | None) -> None:
    """Checks that those which are given are floating and lie on the first one's device, as no kernel would notice.

    Raises:
        TypeError: If one has another dtype.
        ValueError: If one lies on another device.
    """
    device = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype not in FLOATING:
            raise TypeError(f"{name} must be floating, of {[*FLOATING]}; got {tensor.dtype}.")
        if device is None:
            device = tensor.device
        elif tensor.device != device:
            raise ValueError(f"All arguments must lie on one device; got {device}, but {name} on {tensor.device}.")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Checks a setting that is one of a few names.

    Raises:
        ValueError: If it is not.
    """
    if value not in choices:
        *others, last = (f'"{choice}"' for choice in choices)
        raise ValueError(f"{name} must be {', '.join(others)} or {last}; got {value!r}.")
