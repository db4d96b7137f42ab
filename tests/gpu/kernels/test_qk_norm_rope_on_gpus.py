"""qk_norm_rope's kernels on a GPU: accuracy, bits and layouts of both backends, at models' sizes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import pytest
import torch

from lightning_videoscale.kernels.qk_norm_rope import qk_norm_rope
from tests.gpu.fuzzing.heads_over_ranks import norm_rope_over_ranks
from tests.kernels.qk_checks import (
    check_accuracy,
    check_parts,
    check_projection_biases,
    check_repeats,
    check_tables_of_channels,
    gradients,
    relative,
)
from tests.kernels.qk_oracle import FAMILIES, Arguments, Case

pytestmark = pytest.mark.gpu
BACKENDS = pytest.mark.parametrize("backend", ["triton", "cuda"])
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ACCURACY = [(name, BF16) for name in FAMILIES] + [
    (name, dtype) for name in ("Wan", "Cosmos", "CogVideoX") for dtype in (FP16, FP32)
]
# A family, heads, Dh.
SIZES = [("Wan", 12, 128), ("Wan", 24, 128), ("Wan", 40, 128), ("Wan", 6, 256), ("HunyuanVideo", 24, 128),
         ("Cosmos", 16, 128), ("CogVideoX", 30, 64)]  # fmt: skip
ALL_CASES = pytest.mark.parametrize("case", FAMILIES.values(), ids=FAMILIES)


def at_size(case: Case, head_dim: int, heads: int, tokens: int) -> Case:
    """A family's case at another size, in proportion."""
    return replace(
        case, head_dim=head_dim, heads=heads, kv_heads=heads * case.kv_heads // case.heads,
        pairs=32 if case.pairs not in (0, 4) else case.pairs * head_dim // case.head_dim, tokens=tokens,
        start=tokens * case.start // case.tokens, rotated=tokens * case.rotated // case.tokens,
    )  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Machine code of most of CUDA's variants, compiled side by side; what fails here, fails in its test."""
    with ThreadPoolExecutor(16) as pool:
        small = [pool.submit(accuracy, name, dtype, "cuda") for name, dtype in ACCURACY]
        wait(small + [pool.submit(accuracy_at_size, *size, "cuda") for size in SIZES])


def accuracy(name: str, dtype: torch.dtype, backend: str) -> None:
    check_accuracy(at_size(FAMILIES[name], 64, 4, 300), dtype, backend, "cuda")


def accuracy_at_size(name: str, heads: int, head_dim: int, backend: str) -> None:
    check_accuracy(at_size(FAMILIES[name], head_dim, heads, 1000), BF16, backend, "cuda")


@BACKENDS
@pytest.mark.parametrize(("name", "dtype"), ACCURACY)
def test_accuracy(name: str, dtype: torch.dtype, backend: str) -> None:
    accuracy(name, dtype, backend)


@BACKENDS
@pytest.mark.parametrize(("name", "heads", "head_dim"), SIZES)
def test_accuracy_at_sizes_of_models(name: str, heads: int, head_dim: int, backend: str) -> None:
    accuracy_at_size(name, heads, head_dim, backend)


@BACKENDS
@pytest.mark.parametrize("case", [Case(), Case(layout="half", per_head=True), Case(table_heads=True)])
def test_tables_of_channels(case: Case, backend: str) -> None:
    check_tables_of_channels(at_size(case, 64, 4, 300), BF16, backend, "cuda")


@BACKENDS
@ALL_CASES
def test_repeats_bitwise(case: Case, backend: str) -> None:
    check_repeats(at_size(case, 64, 4, 4096), BF16, backend, "cuda", times=5)


@BACKENDS
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(Case(), BF16), (Case(), FP32), (Case(kv_heads=2), BF16), (Case(pairs=0), BF16),
     (Case(layout="half", table_heads=True), FP16)],
)  # fmt: skip
def test_parts_of_rows(case: Case, dtype: torch.dtype, backend: str) -> None:
    check_parts(at_size(case, 64, 4, 300), dtype, backend, "cuda")


@BACKENDS
@pytest.mark.parametrize("tokens", [1, 300, 4096])
@ALL_CASES
def test_gradients_of_the_projections_biases(case: Case, tokens: int, backend: str) -> None:
    if case.start < tokens:
        check_projection_biases(at_size(case, 64, 4, tokens), BF16, backend, "cuda")


@pytest.mark.parametrize(("name", "heads", "head_dim"), SIZES)
def test_gradients_of_the_projections_biases_at_sizes_of_models(name: str, heads: int, head_dim: int) -> None:
    check_projection_biases(at_size(FAMILIES[name], head_dim, heads, 1000), BF16, "cuda", "cuda")


@BACKENDS
@ALL_CASES
def test_rows_of_a_fused_projection(case: Case, backend: str) -> None:
    """Chunks are read where they are, transposed tokens are copied: bits as if all were contiguous."""
    made = at_size(case, 64, 4, 130)
    arguments = made.arguments(torch.bfloat16, device="cuda")
    widths = [made.heads * 64, made.kv_heads * 64, made.kv_heads * 64]
    qkv = torch.randn(made.batch, made.tokens, sum(widths), device="cuda", dtype=torch.bfloat16)
    swapped = qkv.transpose(0, 1).contiguous().transpose(0, 1)
    results = []
    for rows, contiguous in ((qkv, False), (swapped, False), (qkv, True)):
        leaf = rows.detach().requires_grad_()
        q, k, _ = (part.unflatten(-1, (-1, 64)) for part in leaf.split(widths, -1))
        if contiguous:
            q, k = q.contiguous(), k.contiguous()
        y = qk_norm_rope(q, k, *arguments.tensors[2:], **arguments.options, backend=backend)
        (gradient,) = torch.autograd.grad(y[0].float().sum() + y[1].float().square().sum(), leaf)
        results.append((*y, gradient))
    for result in results[:2]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[2], strict=True))


@BACKENDS
def test_parameters_anywhere_in_memory(backend: str) -> None:
    """A shard's view may begin on any element."""
    arguments = at_size(Case(), 64, 4, 130).arguments(torch.bfloat16, device="cuda")
    flat = torch.randn(1 + 2 * 256, device="cuda", dtype=torch.bfloat16)
    moved = [*arguments.tensors[:2], flat[1:257].detach(), flat[257:].detach(), None, None]
    straight = [*arguments.tensors[:2], moved[2].clone(), moved[3].clone(), None, None]  # type: ignore[union-attr]
    results = [qk_norm_rope(*t, **arguments.options, backend=backend) for t in (moved, straight)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@BACKENDS
@pytest.mark.parametrize(("batch", "tokens"), [(0, 8), (2, 0)])
def test_empty(batch: int, tokens: int, backend: str) -> None:
    arguments = Case(batch=batch, tokens=tokens, pairs=0, head_dim=64).arguments(torch.bfloat16, device="cuda")
    y = qk_norm_rope(*arguments.tensors, **arguments.options, backend=backend)
    (y[0].sum() + y[1].sum()).backward()
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in arguments.leaves)


@BACKENDS
def test_cross_attention_of_unequal_lengths(backend: str) -> None:
    q = torch.randn(2, 700, 12, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k = torch.randn(2, 77, 12, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights = [torch.randn(1536, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    options = {"norm": "rms", "per_head": False, "rope": None, "rope_layout": "interleaved", "rope_start": 0}
    arguments = Arguments([q, k, *weights, None, None], options)
    ours, reference = (
        gradients(qk_norm_rope, Arguments(arguments.tensors, options | {"backend": name}))
        for name in (backend, "reference")
    )
    for value, expected in zip(ours, reference, strict=True):
        assert relative(value, expected.double()) < 2**-8


@BACKENDS
def test_one_rank_with_all_heads_is_the_whole(backend: str) -> None:
    arguments = at_size(Case(), 64, 4, 130).arguments(torch.bfloat16, device="cuda")
    whole = gradients(qk_norm_rope, Arguments(arguments.tensors, arguments.options | {"backend": backend}))

    def over_ranks(*tensors: torch.Tensor | None, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        return norm_rope_over_ranks(  # type: ignore[misc]
            *tensors[:4], widths=(256, 256), sum_over_ranks=torch.clone, rope=options["rope"], backend=backend
        )

    for value, expected in zip(gradients(over_ranks, arguments), whole, strict=True):
        assert relative(value, expected.double()) < 2**-8


@BACKENDS
def test_more_than_two_to_the_31_elements(backend: str) -> None:
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GiB of GPU memory")
    tokens = 2**31 // 5120 + 8
    q = torch.zeros(1, tokens, 40, 128, device="cuda", dtype=torch.bfloat16)
    k = torch.zeros(1, tokens, 1, 128, device="cuda", dtype=torch.bfloat16)
    tail = torch.randn(8, 40, 128, device="cuda", dtype=torch.bfloat16)
    q[0, -8:] = tail
    angle = torch.randn(tokens, 64, device="cuda")
    rope = angle.cos(), angle.sin()
    y, _ = qk_norm_rope(q, k, rope=rope, backend=backend)
    ends = tuple(table[-8:] for table in rope)
    expected, _ = qk_norm_rope(tail[None], k[:, :8], rope=ends, backend="reference")
    assert relative(y[:, -8:], expected.double()) < 2**-8
