"""`qkv_linear`: three Linears of PyTorch, and the gradient of their input without passes of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_videoscale.kernels import qkv_linear
from tests.kernels.gelu_cases import draw

CHANNELS = 16
OPS = torch.ops.lightning_videoscale


def leaves(dtype: torch.dtype = torch.float64, with_grad: str = "xqkvabc", sizes: Any = (24, 16, 8)) -> list[Tensor]:
    """x, the three weights and the three biases."""
    shapes = [(2, 9, CHANNELS), *((size, CHANNELS) for size in sizes), *((size,) for size in sizes)]
    drawn = [draw(*shape, dtype=dtype, seed=i, spread=0.5) for i, shape in enumerate(shapes)]
    return [t.requires_grad_(name in with_grad) for t, name in zip(drawn, "xqkvabc", strict=True)]


def ours(x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
    return qkv_linear(x, parameters[:3], parameters[3:])  # type: ignore[arg-type]


def theirs(x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, w, b) for w, b in zip(parameters[:3], parameters[3:], strict=True))  # type: ignore[arg-type]


def loss(made: tuple[Tensor, ...]) -> Tensor:
    q, k, v = (t.float() if t.dtype is not torch.float64 else t for t in made)
    return q.sin().sum() + k.cos().sum() + v.square().sum()


@pytest.mark.parametrize("with_grad", ["xqkvabc", "x", "qkv", "abc", "xv", "kb", "xqc"])
def test_the_gradients_are_those_of_pytorch(with_grad: str) -> None:
    """In float64, whatever is frozen; what is frozen gets none."""
    given = leaves(with_grad=with_grad)
    wanted = [t for t in given if t.requires_grad]
    made = ours(*given), theirs(*given)
    assert all(torch.equal(mine, expected) for mine, expected in zip(*made, strict=True))
    for mine, expected in zip(*(torch.autograd.grad(loss(m), wanted) for m in made), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(0, 40), channels=st.integers(1, 40), sizes=st.tuples(*[st.integers(1, 40)] * 3))
def test_random_shapes_without_biases(rows: int, channels: int, sizes: tuple[int, int, int]) -> None:
    x = draw(rows, channels, dtype=torch.float64).requires_grad_()
    weights = [draw(e, channels, dtype=torch.float64, seed=e).requires_grad_() for e in sizes]
    made = ours(x, *weights, None, None, None), theirs(x, *weights, None, None, None)
    for mine, expected in zip(*(torch.autograd.grad(loss(m), [x, *weights]) for m in made), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


def test_half_precision_has_at_most_the_error_of_eager_code() -> None:
    given = [t.bfloat16().detach().requires_grad_() for t in leaves()]
    exact = [t.detach().double().requires_grad_() for t in given]
    dx, eager, reference = (
        torch.autograd.grad(loss(made), inputs[0])[0].double()
        for made, inputs in ((ours(*given), given), (theirs(*given), given), (theirs(*exact), exact))
    )
    assert (dx - reference).norm() <= 1.05 * (eager - reference).norm()


def test_nothing_of_the_size_of_x_is_added_or_kept_again() -> None:
    given = leaves(torch.float32)
    kept: set[int] = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.add(t.data_ptr()), t)[1], lambda t: t):
        made = ours(*given)
    assert kept == {t.data_ptr() for t in given[:4]}

    added: list[torch.Size] = []

    class Additions(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor):
                added.append(args[0].shape)
            return func(*args, **(kwargs or {}))

    with Additions():
        torch.autograd.backward(made, [torch.ones_like(t) for t in made])
    assert given[0].shape not in added and given[0].grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype: torch.dtype) -> None:
    given = leaves(torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        made = ours(*given), theirs(*given)
    assert all(torch.equal(mine, expected) and mine.dtype is dtype for mine, expected in zip(*made, strict=True))
    for mine, expected in zip(*(torch.autograd.grad(loss(m), given) for m in made), strict=True):
        assert mine.dtype is torch.float32
        assert (mine - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_without_a_graph_break(checkpointed: bool) -> None:
    given = leaves(torch.float32)

    def run(*arguments: Tensor) -> Any:
        return checkpoint(ours, *arguments, use_reentrant=False) if checkpointed else ours(*arguments)

    compiled = torch.compile(run, backend="aot_eager_decomp_partition", fullgraph=True)
    for mine, eager in zip(*(torch.autograd.grad(loss(f(*given)), given) for f in (compiled, run)), strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-4, atol=1e-4)


def test_opcheck() -> None:
    _, q, k, v, *_ = leaves(torch.float32, with_grad="")
    dq, dk, dv = (torch.ones(5, w.shape[0]) for w in (q, k, v))
    torch.library.opcheck(OPS.sum_of_products.default, (dq, q, dk, k, dv, v))


def test_what_is_refused() -> None:
    x, q, k, v, *biases = leaves(torch.float32)
    for message, weights, given_biases in [
        (r"Weights must be \(E, 16\) .* got \(16, 24\)", (q.t(), k, v), biases),
        (r"and biases \(E,\); got \(16, 16\) and \(24,\)", (q, k, v), (biases[0], biases[0], None)),
        (r"x's dtype torch.float32; got \[torch.float64\]", (q, k.double(), v), biases),
        ("one device", (q, k, v.to("meta")), (None, None, None)),
    ]:
        with pytest.raises(ValueError, match=message):
            qkv_linear(x, weights, tuple(given_biases))
    (first,) = torch.autograd.grad(loss(ours(x, q, k, v, *biases)), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="qkv_linear has no second derivative"):
        first.sum().backward()
