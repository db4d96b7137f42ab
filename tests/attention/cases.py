"""Calls of attention, and measurements of them, for tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_videoscale.attention import KERNELS
from lightning_videoscale.attention.case import AttentionCase, AttentionKey, length_class
from lightning_videoscale.attention.records import AttentionRecord
from lightning_videoscale.attention.trial import Timing

CPU = torch.device("cpu")


def tensors(queries: int = 1024, keys: int = 1024, dtype: torch.dtype = torch.float32, heads: int = 2) -> list[Tensor]:
    """Query, key and value that require gradients, (B, H, S, D) with tokens first in memory."""
    generator = torch.Generator().manual_seed(0)
    lengths = queries, keys, keys
    return [
        torch.randn(1, n, heads, 16, generator=generator, dtype=dtype).transpose(1, 2).requires_grad_() for n in lengths
    ]


def case_of(q: Tensor, k: Tensor) -> AttentionCase:
    return AttentionCase.of(q, k, masked=False, with_lse=False)


def gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]


def record(**milliseconds: float | tuple[float, float]) -> AttentionRecord:
    pairs = {name: ms if isinstance(ms, tuple) else (ms, 0.0) for name, ms in milliseconds.items()}
    return AttentionRecord({name: Timing(ms / 1e3, first / 1e3) for name, (ms, first) in pairs.items()}, {})


def key(queries: int, rows: int = 12, **changes: Any) -> AttentionKey:
    lengths = length_class(queries)
    return AttentionKey("cpu", "float32", 16, rows, lengths, lengths, False, False, False)._replace(**changes)


def calls_of_math(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the queries that the kernel `math` is called with from here on."""
    seen: list[int] = []

    def counted(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        seen.append(q.shape[2])
        return products.forward(q, *others)

    products = KERNELS["math"]
    monkeypatch.setitem(KERNELS, "math", products._replace(forward=counted))
    return seen
