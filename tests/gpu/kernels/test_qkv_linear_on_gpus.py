"""`qkv_linear` on a GPU: as exact as eager code, alone and inside a compiled function."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.gelu_cases import draw
from tests.kernels.test_qkv_linear import ours, theirs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("rows", "channels"), [(1000, 64), (8192, 1536), (3001, 5120)])
def test_as_exact_as_eager_code(rows: int, channels: int, compiled: bool) -> None:
    sizes = [(1, rows, channels), *[(channels, channels)] * 3, *[(channels,)] * 3]
    given = [draw(*size, device="cuda", seed=i, spread=0.1).bfloat16() for i, size in enumerate(sizes)]
    gradients = [draw(1, rows, channels, device="cuda", seed=9 + i).bfloat16() for i in range(3)]

    def run(function: object, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in given]
        outputs = function(*leaves)  # type: ignore[operator]
        return [t.double() for t in torch.autograd.grad(outputs, leaves, [g.to(dtype) for g in gradients])]

    mine = run(torch.compile(ours, fullgraph=True, dynamic=False) if compiled else ours, torch.bfloat16)
    for ours_, eager, exact in zip(mine, run(theirs, torch.bfloat16), run(theirs, torch.float64), strict=True):
        assert (ours_ - exact).norm() <= 1.05 * (eager - exact).norm() + 1e-6 * exact.norm()
