"""CUDA graphs of the operations: captured once they have run, refused by name before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_videoscale import kernels
from lightning_videoscale.kernels import norm_modulate

pytestmark = pytest.mark.gpu
# That no other test of this process has.
SHAPES = {
    "norm_modulate": ((2, 8, 1048), (2, 1, 1048), (2, 1, 1048)),
    "gelu": ((16, 1064), (1064,)),
    "qk_norm_rope": ((1, 8, 5, 64), (1, 8, 5, 64)),
}


def step(name: str, inputs: list[Tensor], backend: str) -> tuple[Tensor, ...]:
    result: Any = getattr(kernels, name)(*inputs, backend=backend)
    out = torch.cat(result) if isinstance(result, tuple) else result
    noise = torch.rand_like(out)  # a generator in the graph: where a capture breaks, it hears of it last
    return out.detach(), noise, *torch.autograd.grad((out * out).sum(), inputs)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("name", SHAPES)
def test_an_operation_that_has_not_run_is_refused_and_runs_afterwards(name: str, backend: str) -> None:
    inputs = [torch.randn(shape, device="cuda", requires_grad=True) for shape in SHAPES[name]]
    torch.cuda.synchronize()
    refused = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="before the capture"), torch.cuda.graph(refused):
        step(name, inputs, backend)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = step(name, inputs, backend)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(name, inputs, backend)
    graph.replay()
    torch.cuda.synchronize()
    for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if place != 1:  # the noise
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_backward_that_has_not_run_is_refused(backend: str) -> None:
    x = torch.randn(2, 8, 1080, device="cuda", requires_grad=True)
    norm_modulate(x, backend=backend)  # type: ignore[arg-type]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="before the capture"), torch.cuda.graph(graph):
        norm_modulate(x, backend=backend).sum().backward()  # type: ignore[arg-type]
