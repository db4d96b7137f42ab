"""qk_norm_rope: the oracle's values in float64, diffusers' bits in half precision, a well-behaved torch op."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from diffusers.models.transformers.transformer_ltx2 import apply_split_rotary_emb
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_videoscale.kernels import qk_norm_rope_ops as ops
from lightning_videoscale.kernels.qk_norm_rope import qk_norm_rope, rope_per_pair
from tests.gpu.fuzzing.heads_over_ranks import norm_rope_over_ranks
from tests.kernels.qk_checks import check_projection_biases, check_tables_of_channels, gradients, random_like, relative
from tests.kernels.qk_families import FAMILIES as DIFFUSERS
from tests.kernels.qk_families import HEAD_DIM, HEADS, Family, fused, one_rounding_in_each_of_a_pair, watch
from tests.kernels.qk_oracle import FAMILIES, Arguments, Case, cases, oracle

ALL_CASES = pytest.mark.parametrize("case", FAMILIES.values(), ids=FAMILIES)


@settings(max_examples=60, deadline=None)
@given(case=cases(), seed=st.integers(0, 99))
def test_values_and_gradients_in_float64(case: Case, seed: int) -> None:
    arguments = case.arguments(seed=seed)
    ours, theirs = (f(*arguments.tensors, **arguments.options) for f in (qk_norm_rope, oracle))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    # LayerNorm of two channels has next to no variance now and then; rounding grows with rstd.
    torch.testing.assert_close(
        gradients(qk_norm_rope, arguments),
        gradients(oracle, arguments),
        rtol=1e-7,
        atol=1e-7 if case.head_dim > 2 else 1e-3,
    )


@ALL_CASES
def test_gradcheck(case: Case) -> None:
    arguments = case.arguments()
    assert torch.autograd.gradcheck(lambda *t: qk_norm_rope(*t, **arguments.options), arguments.tensors, fast_mode=True)


@ALL_CASES
def test_float32_against_float64(case: Case) -> None:
    arguments = case.arguments(torch.float32)
    exact = oracle(*arguments.double().tensors, **arguments.double().options)
    for y, expected in zip(qk_norm_rope(*arguments.tensors, **arguments.options), exact, strict=True):
        assert relative(y, expected) < 1e-6
    for gradient, expected in zip(
        gradients(qk_norm_rope, arguments), gradients(oracle, arguments.double()), strict=True
    ):
        assert relative(gradient, expected) < 1e-6


HALF_AND_FULL = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])


def parameters(family: Family) -> list[Tensor | None]:
    norms = family.attention.norm_q, family.attention.norm_k
    return [*(norm.weight for norm in norms), *(getattr(norm, "bias", None) for norm in norms)]


@HALF_AND_FULL
@pytest.mark.parametrize("family", DIFFUSERS)
def test_diffusers_hands_the_same_bits_to_attention(
    family: Callable[[], Family], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = family()
    seen = watch(made, dtype, monkeypatch)
    assert seen.after[0].shape[1] == made.tokens
    for y, expected in zip(fused(*seen.before, *parameters(made), **made.options), seen.after, strict=True):
        assert y.dtype is expected.dtype is dtype
        if made.options.get("norm") == "layer":  # PyTorch's kernel folds mean and rstd into one product
            assert (y - expected).abs().le(one_rounding_in_each_of_a_pair(expected)).all()
        else:
            assert torch.equal(y, expected)


@HALF_AND_FULL
@pytest.mark.parametrize("family", DIFFUSERS)
def test_gradients_err_no_more_than_those_of_diffusers(
    family: Callable[[], Family], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = family()
    seen = watch(made, dtype, monkeypatch)
    arguments = Arguments([*seen.before, *parameters(made)], {"rope": None} | made.options)
    dy = [torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(dtype) for y in seen.after]
    theirs = torch.autograd.grad(seen.after, arguments.leaves, dy, retain_graph=True)
    ours = torch.autograd.grad(fused(*arguments.tensors, **arguments.options), arguments.leaves, dy)
    double = arguments.double()
    options = {"norm": "rms", "per_head": False, "rope_layout": "interleaved", "rope_start": 0} | double.options
    heads = [x.unflatten(-1, (HEADS, HEAD_DIM)) for x in double.leaves[:2]]
    exact = torch.autograd.grad(oracle(*heads, *double.tensors[2:], **options), double.leaves, [g.double() for g in dy])
    for mine, eager, expected in zip(ours, theirs, exact, strict=True):
        assert mine.dtype is eager.dtype
        assert relative(mine, expected) <= max(1.05 * relative(eager, expected), 1e-6)


@ALL_CASES
def test_opcheck(case: Case) -> None:
    arguments = case.arguments(torch.bfloat16)
    q, k, *affine = arguments.tensors
    cos, sin = arguments.options["rope"] or (None, None)
    variant = (case.norm, case.per_head, case.layout, case.start, False, True, "auto")
    assert q is not None and k is not None
    proj_biases = [torch.zeros(x.shape[2] * x.shape[3], requires_grad=True) for x in (q, k)]
    inputs = (q, k, *affine, cos, sin, None, None, *proj_biases, 1e-6, *variant)
    torch.library.opcheck(ops.forward, inputs)
    plain = [None if t is None else t.detach() for t in (q, k, *affine, cos, sin)]
    q_out, k_out, *statistics = (t.detach() for t in ops.forward(*inputs))
    of_backward = (q_out, k_out, *plain, *statistics, None, None, *variant)
    in_turn = [(None, None), (torch.float32, None), (torch.bfloat16, torch.float32)]
    torch.library.opcheck(ops.backward, (*of_backward, *in_turn[[*FAMILIES.values()].index(case) % len(in_turn)]))


@ALL_CASES
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_of_the_projections_biases(case: Case, dtype: torch.dtype) -> None:
    check_projection_biases(case, dtype, "reference")


def test_a_bias_that_is_no_projections() -> None:
    arguments = Case().arguments()
    with pytest.raises(ValueError, match=r"k_proj_bias must have shape \(32,\); got \(8,\)"):
        qk_norm_rope(*arguments.tensors, **arguments.options, k_proj_bias=torch.zeros(8))


def test_opcheck_of_the_sums() -> None:
    q, k, q_weight, k_weight, *_ = (None if t is None else t.detach() for t in Case(kv_heads=2).arguments().tensors)
    assert q is not None and k is not None
    torch.library.opcheck(ops.square_sums, (q, k, "auto"))
    rstds = (torch.rand(q.shape[:2]).double(), torch.rand(k.shape[:2]).double())
    torch.library.opcheck(ops.gradient_sums, (q, k, q, k, q_weight, k_weight, None, None, *rstds, "half", 0, "auto"))


@pytest.mark.parametrize(("norm", "per_head", "expected"), [
    ("none", False, 0), ("rms", False, 4), ("rms", True, 4 * 4), ("layer", True, 8 * 4),
])  # fmt: skip
def test_keeps_statistics_only(norm: str, per_head: bool, expected: int) -> None:
    case = Case(norm=norm, per_head=per_head)
    arguments = case.arguments(torch.bfloat16)
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        qk_norm_rope(*arguments.tensors, **arguments.options)
    inputs = {t.data_ptr() for t in [*arguments.leaves, *arguments.options["rope"]]}
    bytes_kept = sum(t.nbytes for pointer, t in kept.items() if pointer not in inputs)
    assert bytes_kept == 2 * expected * case.batch * case.tokens


@ALL_CASES
def test_layouts(case: Case) -> None:
    """Chunks of one projection, tokens and batch swapped, gradients that are expanded: as if all were contiguous."""
    rng = torch.Generator().manual_seed(0)
    channels = (case.heads + 2 * case.kv_heads) * case.head_dim
    qkv = torch.randn(case.tokens, case.batch, channels, generator=rng, dtype=torch.float64, requires_grad=True)
    arguments = case.arguments()

    def grad(contiguous: bool) -> Tensor:
        rows = qkv.transpose(0, 1)
        sizes = [case.heads * case.head_dim, case.kv_heads * case.head_dim]
        parts = rows.split([*sizes, sizes[1]], dim=-1)[:2]
        q, k = (part.unflatten(-1, (-1, case.head_dim)) for part in parts)
        if contiguous:
            q, k = q.contiguous(), k.contiguous()
        outputs = qk_norm_rope(q, k, *arguments.tensors[2:], **arguments.options)
        assert all(y.is_contiguous() for y in outputs)
        return torch.autograd.grad(outputs[0].sum() + 2 * outputs[1].sum(), qkv)[0]

    assert torch.equal(grad(False), grad(True))


@ALL_CASES
def test_repeats_bitwise(case: Case) -> None:
    arguments = case.arguments(torch.bfloat16)
    first, second = (gradients(qk_norm_rope, arguments) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("batch", "tokens"), [(0, 5), (2, 0)])
@pytest.mark.parametrize("norm", ["none", "rms", "layer"])
def test_empty(batch: int, tokens: int, norm: str) -> None:
    arguments = Case(batch=batch, tokens=tokens, pairs=0, norm=norm).arguments()
    outputs = qk_norm_rope(*arguments.tensors, **arguments.options)
    assert [y.shape for y in outputs] == [(batch, tokens, 4, 8)] * 2
    (outputs[0].sum() + outputs[1].sum()).backward()
    for leaf in arguments.leaves:
        assert leaf.grad is not None and not leaf.grad.any()


def test_cross_attention_takes_another_length_of_k() -> None:
    q, _, q_weight, k_weight, *_ = Case(pairs=0).arguments().tensors
    k = torch.randn(2, 9, 4, 8, dtype=torch.float64)
    assert q is not None
    ours = qk_norm_rope(q, k, q_weight, k_weight)
    theirs = oracle(
        q, k, q_weight, k_weight, None, None, norm="rms", per_head=False, rope=None, rope_layout="", rope_start=0
    )
    torch.testing.assert_close(ours, theirs)


def test_frozen_inputs_get_no_gradient_and_an_unused_output_none() -> None:
    arguments = Case().arguments()
    q, k, q_weight, k_weight, *_ = arguments.tensors
    assert q is not None and k is not None and q_weight is not None and k_weight is not None
    q_weight.requires_grad_(False)
    q.requires_grad_(False)
    outputs = qk_norm_rope(*arguments.tensors, **arguments.options)
    outputs[0].sum().backward()  # k's output is not used
    assert q.grad is None and q_weight.grad is None
    assert k.grad is not None and not k.grad.any() and k_weight.grad is not None and not k_weight.grad.any()


def test_autocast_leaves_dtypes_alone() -> None:
    arguments = Case().arguments(torch.float32)
    plain = gradients(qk_norm_rope, arguments)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(y.dtype is torch.float32 for y in qk_norm_rope(*arguments.tensors, **arguments.options))
        assert all(torch.equal(a, b) for a, b in zip(gradients(qk_norm_rope, arguments), plain, strict=True))


def test_rounded_at_the_end_it_is_as_exact_as_norms_that_stay_in_float32() -> None:
    """As eager code's do under autocast on CUDA; to round before the rotation, too, costs two fifths."""
    arguments = Case(head_dim=64, pairs=32).arguments(torch.bfloat16)
    q, k, *parameters = arguments.tensors
    assert q is not None and k is not None
    exact = oracle(*arguments.double().tensors, **arguments.double().options)

    def error(values: tuple[Tensor, Tensor]) -> float:
        return max(relative(value.bfloat16(), expected) for value, expected in zip(values, exact, strict=True))

    eager = error(qk_norm_rope(q.float(), k.float(), *parameters, **arguments.options))
    at_end, once = (
        error(qk_norm_rope(q, k, *parameters, **arguments.options, rounding=rounding))  # type: ignore[arg-type]
        for rounding in ("at_end", "fp32_once")
    )
    assert at_end <= 1.05 * eager < 0.8 * once


def test_compiles_without_a_graph_break() -> None:
    arguments = Case().arguments(torch.float32)
    compiled = torch.compile(qk_norm_rope, fullgraph=True, backend="aot_eager")
    ours, eager = (gradients(f, arguments) for f in (compiled, qk_norm_rope))
    assert all(torch.equal(a, b) for a, b in zip(ours, eager, strict=True))


@pytest.mark.parametrize("case", [Case(kv_heads=2), Case(pairs=0), Case(layout="half", table_heads=True)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_heads_spread_over_ranks_give_what_all_heads_give(case: Case, dtype: torch.dtype) -> None:
    """Two threads are the ranks."""
    arguments = case.arguments(dtype)
    outputs = qk_norm_rope(*arguments.tensors, **arguments.options)
    dy = random_like(outputs)
    expected = [*outputs, *torch.autograd.grad(outputs, arguments.leaves, dy)]
    widths = case.heads * case.head_dim, case.kv_heads * case.head_dim
    message: dict[int, Tensor] = {}
    barrier = threading.Barrier(2, timeout=60)

    def run(rank: int) -> list[Tensor]:
        def mine(x: Tensor) -> Tensor:
            return x.detach().chunk(2, 2 if x.ndim == 4 else 0)[rank].clone().requires_grad_(x.requires_grad)

        def sum_over_ranks(sums: Tensor) -> Tensor:
            message[rank] = sums
            barrier.wait()
            total = message[0] + message[1]
            barrier.wait()
            return total

        leaves = [mine(x) for x in arguments.leaves]
        rope = arguments.options["rope"]
        if case.table_heads:
            rope = tuple(mine(table) for table in rope)
        y = norm_rope_over_ranks(
            *leaves, widths=widths, sum_over_ranks=sum_over_ranks, rope=rope, rope_layout=case.layout
        )
        return [*y, *torch.autograd.grad(y, leaves, [mine(g) for g in dy])]

    with ThreadPoolExecutor(2) as ranks:
        parts = list(ranks.map(run, range(2)))
    for whole, first, second in zip(expected, *parts, strict=True):
        joined = torch.cat([first, second], 2 if whole.ndim == 4 else 0)
        assert relative(joined, whole.double()) < (1e-10 if dtype is torch.float64 else 2**-8)


@pytest.mark.parametrize("case", [Case(), Case(layout="half", table_heads=True, table_batch=True)])
def test_tables_of_channels(case: Case) -> None:
    check_tables_of_channels(case, torch.float32, "reference")


def test_keeps_eight_bytes_per_token_and_the_tables_of_the_model() -> None:
    """As Wan calls it: beside inputs, only the statistics of q and k."""
    q, k, q_weight, k_weight, *_ = Case(tokens=64, rotated=64).arguments(torch.bfloat16).tensors
    angle = torch.randn(1, 64, 1, 4).repeat_interleave(2, -1)
    cos, sin = angle.cos(), angle.sin()
    assert q is not None and k is not None and q_weight is not None and k_weight is not None
    inputs = {t.untyped_storage().data_ptr() for t in (q, k, q_weight, k_weight, cos, sin)}
    kept: dict[int, int] = {}

    def keep(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in inputs:
            kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        qk_norm_rope(q, k, q_weight, k_weight, rope=(cos[..., 0::2], sin[..., 1::2]))
    assert sum(kept.values()) <= 8 * 2 * 64


def test_a_fused_multiply_add_rotates_as_addcmul() -> None:
    """LTX-2's own bits, at any length of its rows."""
    for pairs in (1, 3, 4, 32):
        angle, q = torch.randn(2, 9, 2, pairs), torch.randn(2, 9, 2, 2 * pairs)
        cos, sin = angle.cos(), angle.sin()
        turned, _ = qk_norm_rope(q, q, norm="none", rope=(cos, sin), rope_layout="half_fma")
        expected = apply_split_rotary_emb(q.flatten(2), (cos.transpose(1, 2), sin.transpose(1, 2)))
        assert torch.equal(turned.flatten(2), expected)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_tables_per_pair(layout: str) -> None:
    angle = torch.randn(5, 4)
    channels = angle.repeat_interleave(2, -1) if layout == "interleaved" else torch.cat([angle, angle], -1)
    cos, sin = rope_per_pair(channels.cos(), channels.sin(), layout)  # type: ignore[arg-type]
    assert torch.equal(cos, angle.cos()) and torch.equal(sin, angle.sin())


def test_no_second_derivative() -> None:
    arguments = Case().arguments()
    outputs = qk_norm_rope(*arguments.tensors, **arguments.options)
    (gradient,) = torch.autograd.grad(outputs[0].sum(), arguments.leaves[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        gradient.sum().backward()


def test_rstd_from_outside_has_no_gradient_without_an_exchange() -> None:
    q, k, *_ = Case().arguments().tensors
    rstd = torch.ones(2, 5, dtype=torch.float64)
    none = (None,) * 6
    with pytest.raises(NotImplementedError, match="gradient_sums"):
        ops.forward(q, k, *none, rstd, rstd, None, None, 1e-6, "rms", False, "half", 0, False, True, "auto")


def wrong(**change: object) -> tuple[list[Tensor | None], dict[str, object]]:
    arguments = Case().arguments()
    names = ["q", "k", "q_weight", "k_weight", "q_bias", "k_bias"]
    tensors = [change.pop(name, tensor) for name, tensor in zip(names, arguments.tensors, strict=True)]
    return tensors, arguments.options | change  # type: ignore[return-value]


TABLE, ZEROS = torch.zeros(5, 4), torch.zeros(32).double()


@pytest.mark.parametrize(("change", "message"), [
    ({"q": torch.zeros(2, 5, 32)}, "unflatten"),
    ({"k": torch.zeros(2, 5, 4, 6, dtype=torch.float64)}, "shapes"),
    ({"k": torch.zeros(2, 5, 4, 8)}, "one dtype"),
    ({"k": torch.zeros(2, 6, 4, 8, dtype=torch.float64)}, "one length"),
    ({"norm": "none"}, "no weight"),
    ({"k_weight": None}, "together"),
    ({"q_weight": None, "k_weight": None, "q_bias": ZEROS, "k_bias": ZEROS}, "ones"),
    ({"q_weight": torch.ones(32).half()}, "Weights and biases"),
    ({"q_weight": torch.ones(8).double()}, "per_head"),
    ({"rope": (TABLE, torch.zeros(5, 3))}, "cos and sin"),
    ({"rope": (torch.zeros(5, 8), torch.zeros(5, 8))}, "rope_per_pair"),
    ({"rope": (torch.zeros(3, 5, 1, 4), torch.zeros(3, 5, 1, 4))}, "does not fit"),
    ({"rope": (TABLE.clone().requires_grad_(), TABLE)}, "gradients"),
    ({"rope": (TABLE, TABLE), "rope_start": 1}, "from token 1"),
])  # fmt: skip
def test_errors(change: dict[str, object], message: str) -> None:
    tensors, options = wrong(**change)
    with pytest.raises(ValueError, match=message):
        qk_norm_rope(*tensors, **options)  # type: ignore[arg-type]


def test_tables_by_head_need_as_many_heads_of_k() -> None:
    arguments = Case(kv_heads=2).arguments()
    table = torch.zeros(1, 5, 4, 4)
    with pytest.raises(ValueError, match="as many heads"):
        qk_norm_rope(*arguments.tensors, **arguments.options | {"rope": (table, table)})


def test_odd_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="even"):
        rope_per_pair(torch.zeros(5, 3), torch.zeros(5, 3), "half")
