"""CUDA graphs: kernels that have not run yet can be neither compiled nor loaded while one is captured."""

from __future__ import annotations

import torch


def is_capturing() -> bool:
    """Whether the current stream is recorded into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def not_while_capturing(what: str) -> RuntimeError:
    """Returns the error for what would be compiled, loaded or tried out while a CUDA graph is captured."""
    return RuntimeError(
        f"{what} has not run yet for these dtypes and widths, and nothing can be compiled or loaded while a CUDA graph "
        "is captured. Run the same forward and backward once before the capture."
    )
