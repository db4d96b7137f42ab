"""norm_modulate: bitwise diffusers' expression forward, autograd's gradient backward, a well-behaved torch op."""

from __future__ import annotations

import itertools

import pytest
import torch
from diffusers.models.normalization import FP32LayerNorm
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_videoscale.kernels import norm_modulate
from lightning_videoscale.kernels.row_ops import RowCall

OPS = torch.ops.lightning_videoscale
VARIANTS = list(itertools.product([False, True], repeat=2))
SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 7), st.integers(1, 24))


def inputs(
    shape: tuple[int, int, int], *, per_token: bool, affine: bool, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """x of ``dtype``; the rest float32, or float64 beside float64; all require gradients."""
    b, s, d = shape
    wide = torch.promote_types(dtype, torch.float32)
    rng = torch.Generator().manual_seed(seed)

    def draw(*size: int, dtype: torch.dtype = wide) -> Tensor:
        return torch.randn(*size, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()

    rows = s if per_token else 1
    x, scale, shift = draw(b, s, d, dtype=dtype), draw(b, rows, d), draw(b, rows, d)
    return (x, scale, shift, draw(d), draw(d)) if affine else (x, scale, shift, None, None)


def eager(x: Tensor, scale: Tensor, shift: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The same in plain PyTorch, in the dtype of the arguments."""
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-6) * (1 + scale) + shift


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("affine", [False, True])
@settings(max_examples=20, deadline=None)
@given(shape=SHAPES, per_token=st.booleans(), seed=st.integers(0, 99))
def test_forward_is_bitwise_the_expression_of_diffusers(
    dtype: torch.dtype, affine: bool, shape: tuple[int, int, int], per_token: bool, seed: int
) -> None:
    x, scale, shift, weight, bias = inputs(shape, per_token=per_token, affine=affine, dtype=dtype, seed=seed)
    norm = FP32LayerNorm(shape[-1], eps=1e-6, elementwise_affine=affine)
    if weight is not None and bias is not None:
        norm.load_state_dict({"weight": weight, "bias": bias})
    expected = (norm(x.float()) * (1 + scale) + shift).type_as(x)
    assert torch.equal(norm_modulate(x, scale, shift, weight, bias, eps=1e-6), expected)


@pytest.mark.parametrize("d", [64, 1152, 1536, 1920, 5120])
def test_forward_is_bitwise_the_expression_of_diffusers_at_real_widths(d: int) -> None:
    x, scale, shift, *_ = inputs((2, 9, d), per_token=False, affine=False, dtype=torch.bfloat16)
    norm = FP32LayerNorm(d, eps=1e-6, elementwise_affine=False)
    assert torch.equal(norm_modulate(x, scale, shift), (norm(x.float()) * (1 + scale) + shift).type_as(x))


@settings(max_examples=30, deadline=None)
@given(shape=SHAPES, per_token=st.booleans(), affine=st.booleans(), seed=st.integers(0, 99))
def test_gradients_in_float64(shape: tuple[int, int, int], per_token: bool, affine: bool, seed: int) -> None:
    arguments = inputs(shape, per_token=per_token, affine=affine, seed=seed)
    leaves = [a for a in arguments if a is not None]
    dy = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ours = torch.autograd.grad(norm_modulate(*arguments), leaves, dy)
    theirs = torch.autograd.grad(eager(*arguments), leaves, dy)
    for gradient, expected in zip(ours, theirs, strict=True):
        # One channel has no variance: rstd is 1000 there, and rounding grows with it.
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-10 if shape[-1] > 1 else 1e-6)


@pytest.mark.parametrize(("per_token", "affine"), VARIANTS)
def test_gradcheck(per_token: bool, affine: bool) -> None:
    assert torch.autograd.gradcheck(norm_modulate, inputs((2, 3, 5), per_token=per_token, affine=affine))


@pytest.mark.parametrize(("per_token", "affine"), VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_of_the_gradients_against_a_float64_oracle(per_token: bool, affine: bool, dtype: torch.dtype) -> None:
    arguments = inputs((3, 40, 96), per_token=per_token, affine=affine, dtype=dtype)
    leaves = [a for a in arguments if a is not None]
    oracle = [None if a is None else a.detach().double().requires_grad_() for a in arguments]
    dy = torch.randn(3, 40, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours = torch.autograd.grad(norm_modulate(*arguments), leaves, dy)
    exact = torch.autograd.grad(eager(*oracle), [a for a in oracle if a is not None], dy.double())  # type: ignore[arg-type]
    for leaf, gradient, expected in zip(leaves, ours, exact, strict=True):
        bound = 1e-6 if leaf.dtype is torch.float32 else 2**-8
        assert gradient.dtype is leaf.dtype
        assert (gradient.double() - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize(("per_token", "affine"), VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(per_token: bool, affine: bool, dtype: torch.dtype) -> None:
    x, scale, shift, weight, bias = inputs((2, 3, 8), per_token=per_token, affine=affine, dtype=dtype)
    call = RowCall(x, scale=scale, shift=shift, weight=weight, bias=bias, norm="layer")
    torch.library.opcheck(OPS.norm_modulate.default, call)
    _, mean, rstd = OPS.norm_modulate(*call)
    x, scale, weight, bias = (None if a is None else a.detach() for a in (x, scale, weight, bias))
    needs = [True, False, False, scale is not None, scale is not None, affine, affine, *[False] * 4]
    settings = (0.0, "layer", "identity", False, "auto", needs, None)
    saved = (x, None, None, scale, weight, bias, None, None, None, None, mean, rstd)
    backward = (None, torch.randn_like(x).detach(), *saved, *settings)
    torch.library.opcheck(OPS.norm_modulate_backward.default, backward)
    torch.library.opcheck(OPS.norm_modulate_backward.default, (torch.randn_like(x).detach(), *backward[1:]))


def test_keeps_eight_bytes_per_token_beside_its_inputs() -> None:
    x, scale, shift, *_ = inputs((2, 5, 64), per_token=False, affine=False, dtype=torch.bfloat16)
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        norm_modulate(x, scale, shift)
    extra = [t for pointer, t in kept.items() if pointer not in {x.data_ptr(), scale.data_ptr()}]
    assert sum(t.nbytes for t in extra) == 8 * 2 * 5


def test_layouts() -> None:
    """Transposed x, one chunk of a (B, 6, D) modulation, an expanded dy: the results are those of contiguous ones."""
    x, *_ = inputs((4, 3, 8), per_token=False, affine=False)
    modulation = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scale, shift = modulation.requires_grad_().chunk(6, dim=1)[1:3]
    y = norm_modulate(x.transpose(0, 1), scale, shift)
    assert y.is_contiguous()
    leaves = [x, modulation]
    ours = torch.autograd.grad(y.sum(), leaves)
    theirs = torch.autograd.grad(eager(x.transpose(0, 1).contiguous(), scale, shift, None, None).sum(), leaves)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8)])
def test_empty(shape: tuple[int, int, int]) -> None:
    x, scale, shift, weight, bias = inputs(shape, per_token=False, affine=True)
    y = norm_modulate(x, scale, shift, weight, bias)
    assert y.shape == shape
    y.sum().backward()
    for leaf in (x, scale, shift, weight, bias):
        assert leaf is not None and leaf.grad is not None and not leaf.grad.any()


def test_frozen_inputs_get_no_gradient() -> None:
    x, scale, shift, weight, bias = inputs((2, 3, 8), per_token=False, affine=True)
    assert weight is not None and bias is not None
    frozen = [x.requires_grad_(False), weight.requires_grad_(False), bias.requires_grad_(False)]
    norm_modulate(x, scale, shift, weight, bias).sum().backward()
    assert all(tensor.grad is None for tensor in frozen)
    assert scale.grad is not None and shift.grad is not None


def test_repeats_bitwise() -> None:
    arguments = inputs((2, 300, 64), per_token=False, affine=True, dtype=torch.bfloat16)
    runs = [torch.autograd.grad(norm_modulate(*arguments).float().square().sum(), arguments) for _ in range(3)]  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_second_derivative_is_refused() -> None:
    x, scale, shift, *_ = inputs((2, 3, 8), per_token=False, affine=False)
    (gradient,) = torch.autograd.grad(norm_modulate(x, scale, shift).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()


def test_is_one_node_for_the_compiler_and_needs_no_autocast_rule() -> None:
    x, scale, shift, *_ = inputs((2, 3, 8), per_token=False, affine=False, dtype=torch.float32)
    expected = norm_modulate(x, scale, shift)
    compiled = torch.compile(norm_modulate, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, scale, shift), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(norm_modulate(x, scale, shift), expected)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((3, 8), (3, 8), (3, 8)), r"x must have shape \(B, S, D\); got \(3, 8\)"),
        (((2, 3, 8), (2, 8), (2, 8)), r"shape \(2, 1, 8\) \(per sample\) or \(2, 3, 8\) .* got \(2, 8\)"),
        (((2, 3, 8), (2, 1, 8), (2, 3, 8)), r"got \(2, 1, 8\) and \(2, 3, 8\)"),
        (((2, 3, 8), (2, 1, 8), (2, 1, 8), (8,)), "given together"),
        (((2, 3, 8), (2, 1, 8), (2, 1, 8), (7,), (7,)), r"both have shape \(8,\)"),
    ],
)
def test_refuses_shapes_that_do_not_fit(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        norm_modulate(*(torch.ones(shape) for shape in shapes))


def test_refuses_two_dtypes_of_modulation() -> None:
    with pytest.raises(ValueError, match=r"one dtype; got torch.float32 and torch.bfloat16"):
        norm_modulate(torch.ones(2, 3, 8), torch.ones(2, 1, 8), torch.ones(2, 1, 8, dtype=torch.bfloat16))
