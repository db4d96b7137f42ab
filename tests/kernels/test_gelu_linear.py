"""`gelu_linear`: the feed-forward of PyTorch, with one activation kept instead of two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_videoscale.kernels import gelu_linear
from tests.kernels.gelu_cases import draw

ROWS, INNER, CHANNELS = 9, 32, 16


def leaves(dtype: torch.dtype = torch.float64, with_grad: str = "hwbvc") -> dict[str, Tensor]:
    """h, and weights and biases of both Linears: w, b and v, c."""
    shapes = {"h": (2, ROWS, CHANNELS), "w": (INNER, CHANNELS), "b": (INNER,), "v": (CHANNELS, INNER), "c": (CHANNELS,)}
    return {
        name: draw(*shape, dtype=dtype, seed=i, spread=0.5).requires_grad_(name in with_grad)
        for i, (name, shape) in enumerate(shapes.items())
    }


def ours(h: Tensor, w: Tensor, b: Tensor | None, v: Tensor, c: Tensor | None) -> Tensor:
    return gelu_linear(F.linear(h, w, None if b is None else b.detach()), v, c, x_bias=b)


def theirs(h: Tensor, w: Tensor, b: Tensor | None, v: Tensor, c: Tensor | None) -> Tensor:
    return F.linear(F.gelu(F.linear(h, w, b), approximate="tanh"), v, c)


def kept_elements(function: Any, *arguments: Tensor | None) -> int:
    """Elements that autograd keeps beside the arguments."""
    kept: dict[int, int] = {}
    held: list[Tensor] = []

    def note(saved: Tensor) -> Tensor:
        held.append(saved)
        kept[saved.untyped_storage().data_ptr()] = saved.numel()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        held.append(function(*arguments))
    for given in arguments:
        if given is not None:
            kept.pop(given.untyped_storage().data_ptr(), None)
    return sum(kept.values())


@pytest.mark.parametrize("with_grad", ["hwbvc", "wbvc", "bv", "b", "v", "c", "h", "wv"])
def test_the_gradients_are_those_of_pytorch(with_grad: str) -> None:
    """In float64, whatever is frozen; what is frozen gets none."""
    given = leaves(with_grad=with_grad)
    wanted = [given[name] for name in with_grad]
    outputs = ours(*given.values()), theirs(*given.values())
    assert torch.equal(*outputs)
    for mine, expected in zip(*(torch.autograd.grad(z.sin().sum(), wanted) for z in outputs), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


def test_without_biases() -> None:
    h, w, _, v, _ = leaves().values()
    outputs = ours(h, w, None, v, None), theirs(h, w, None, v, None)
    gradients = [torch.autograd.grad(z.sin().sum(), (h, w, v)) for z in outputs]
    for mine, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


def test_one_activation_is_kept_instead_of_two() -> None:
    given = leaves(torch.bfloat16).values()
    assert kept_elements(theirs, *given) == 2 * kept_elements(ours, *given) == 2 * 2 * ROWS * INNER


def test_nothing_is_computed_again_for_a_frozen_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_videoscale.kernels.reference import gelu as reference

    asked: list[tuple[bool, bool]] = []
    backward = reference.backward

    def spy(dy: Tensor, x: Tensor, *, sums: bool, again: bool) -> Any:
        asked.append((sums, again))
        return backward(dy, x, sums=sums, again=again)

    monkeypatch.setattr(reference, "backward", spy)
    for with_grad in ("hwbvc", "hwb", "h", "v"):
        ours(*leaves(with_grad=with_grad).values()).sum().backward()
    assert asked == [(True, True), (True, False), (False, False), (False, True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype: torch.dtype) -> None:
    given = leaves(torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        outputs = ours(*given.values()), theirs(*given.values())
    assert torch.equal(*outputs) and outputs[0].dtype is dtype
    gradients = [torch.autograd.grad(z.float().square().sum(), list(given.values())) for z in outputs]
    for mine, expected in zip(*gradients, strict=True):
        assert mine.dtype is torch.float32
        assert (mine - expected).norm() < 0.01 * expected.norm()


def test_compiled_without_a_graph_break_it_keeps_as_little(monkeypatch: pytest.MonkeyPatch) -> None:
    untraceable = torch.compiler.disable(torch.amp.is_autocast_available)  # as torch 2.11's is, in any version
    monkeypatch.setattr(torch.amp, "is_autocast_available", untraceable)
    given = list(leaves(torch.float32).values())
    compiled = torch.compile(ours, backend="aot_eager_decomp_partition", fullgraph=True)
    z, expected = compiled(*given), ours(*given)
    torch.testing.assert_close(z, expected)
    for mine, eager in zip(*(torch.autograd.grad(out.square().sum(), given) for out in (z, expected)), strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-4, atol=1e-4)
    assert kept_elements(compiled, *given) == kept_elements(ours, *given)


def test_compiled_under_autocast_and_checkpointed() -> None:
    given = list(leaves(torch.float32).values())

    def checkpointed(*arguments: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return checkpoint(ours, *arguments, use_reentrant=False)

    compiled = torch.compile(checkpointed, backend="aot_eager_decomp_partition", fullgraph=True)
    gradients = [torch.autograd.grad(f(*given).float().square().sum(), given) for f in (checkpointed, compiled)]
    for eager, mine in zip(*gradients, strict=True):
        assert (mine - eager).norm() < 0.01 * eager.norm()
    assert kept_elements(checkpointed, *given) < 2 * ROWS * INNER


def test_strides_and_empty_tensors() -> None:
    h, w, b, v, c = leaves().values()
    strided = torch.stack([F.linear(h, w, b)] * 2, dim=2)[:, :, 1].detach().requires_grad_()
    z = gelu_linear(strided, v, c)
    (dx,) = torch.autograd.grad(z, strided, torch.ones((), dtype=z.dtype).expand_as(z))
    plain = strided.detach().clone().requires_grad_()
    (expected,) = torch.autograd.grad(gelu_linear(plain, v, c).sum(), plain)
    torch.testing.assert_close(dx, expected)
    empty = torch.zeros(0, INNER, dtype=torch.float64, requires_grad=True)
    z = gelu_linear(empty, v, c, x_bias=b)
    assert z.shape == (0, CHANNELS)
    assert not any(g.any() for g in torch.autograd.grad(z.sum(), (empty, b, v, c)))


def test_what_is_refused() -> None:
    x, v = draw(3, INNER).requires_grad_(), draw(CHANNELS, INNER)
    for message, arguments, settings in [
        (r"weight must be \(D, 32\) .* got \(32, 16\)", (x, v.t()), {}),
        (r"and bias \(D,\); got .* and \(3,\)", (x, v, draw(3)), {}),
        ("bias must be that of the Linear", (x, v), {"x_bias": draw(3)}),
        (r"x's dtype torch.float32; got \[torch.bfloat16\]", (x, v.bfloat16()), {}),
        ("one device", (x, v.to("meta")), {}),
        ("backend must be", (x, v), {"backend": "metal"}),
    ]:
        with pytest.raises(ValueError, match=message):
            gelu_linear(*arguments, **settings)  # type: ignore[arg-type]
    (first,) = torch.autograd.grad(gelu_linear(x, v).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="gelu has no second derivative"):
        first.sum().backward()
