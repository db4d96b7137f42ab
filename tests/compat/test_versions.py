"""What differs between versions of torch is so in the installed one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_videoscale.compat.torch import versions


class Square(torch.autograd.Function):
    """Its backward fills a tensor in place, part by part, as that of ring attention does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        [x] = ctx.saved_tensors
        result = torch.zeros_like(x)
        for part in (slice(2), slice(2, None)):
            result[part].add_(2 * x[part] * gradients[0][part])
        return result


@pytest.mark.skipif(not versions.ring_attention_is_traced(), reason="torch says so from 2.13 on")
def test_gradients_that_are_filled_in_place_are_right_in_compiled_code() -> None:
    def program(x: Tensor) -> Tensor:
        result: Tensor = Square.apply(x).sum()
        return result

    x = torch.arange(4.0, requires_grad=True)
    torch.compile(program, backend="aot_eager", fullgraph=True)(x).backward()
    assert x.grad is not None and x.grad.tolist() == [0, 2, 4, 6]
