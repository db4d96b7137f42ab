"""The call by which diffusers' processors attend: `Dispatched`."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from lightning_videoscale.compat.diffusers import attends_by_torch, dispatch_settings


class Dispatched:
    """The attention of diffusers, with the backend that its processor was told to use.

    No dataclass: torch 2.11 cannot trace a frozen one.

    Args:
        processor: diffusers' own.
        mask: As torch's attention takes it, or None.
        parallel: Whether diffusers' own context parallelism, if it is on, concerns this call.
    """

    def __init__(self, processor: Any, mask: Tensor | None = None, parallel: bool = True) -> None:
        self.processor, self.mask, self.parallel = processor, mask, parallel

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attends from (B, S, H, D/H) to (B, T, H, D/H)."""
        backend, parallel_config = dispatch_settings(self.processor)
        attended: Tensor = self._dispatch(
            query,
            key,
            value,
            attn_mask=self.mask,
            dropout_p=0.0,
            is_causal=False,
            backend=backend,
            parallel_config=parallel_config if self.parallel else None,
        )
        return attended

    @property
    def is_torchs(self) -> bool:
        """Whether a call is one of torch's function, and nothing else."""
        backend, parallel_config = dispatch_settings(self.processor)
        return parallel_config is None and attends_by_torch(self._dispatch, backend)

    @property
    def _dispatch(self) -> Any:
        """From the processor's own module, since kernels of one's own are put in its place there."""
        home: Any = sys.modules[type(self.processor).__module__]
        return home.dispatch_attention_fn
