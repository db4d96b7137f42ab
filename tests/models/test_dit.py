"""Blocks built like DiT's: modulation per sample from a condition, everything rounded in the modules' dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.models.dit import FUSED_BLOCKS, dit_block


class Attention(nn.Module):
    """What timm calls attention: (B, S, D) to the same."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        result: Tensor = self.proj(attended.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    """adaLN-Zero with DiT's names."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(dim, 4)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(approximate="tanh"), nn.Linear(2 * dim, dim))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        attention, mlp = self.adaLN_modulation(c)[:, None].unflatten(-1, (2, 3, -1)).unbind(2)
        for norm, (shift, scale, gate), branch in (
            (self.norm1, attention.unbind(2), self.attn),
            (self.norm2, mlp.unbind(2), self.mlp),
        ):
            x = x + gate * branch(norm(x) * (1 + scale) + shift)
        return x


MINE = dit_block(f"{Block.__module__}.Block")


def gradients(block: nn.Module, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    rng = torch.Generator().manual_seed(1)
    x, c, weight = (torch.randn(*n, 32, generator=rng, dtype=torch.float64).to(dtype) for n in ((2, 9), (2,), (2, 9)))
    x.requires_grad_()
    output = block(x, c)
    return output, list(torch.autograd.grad((output * weight).sum(), [x, *block.parameters()]))


def a_block(dtype: torch.dtype) -> Block:
    torch.manual_seed(0)
    return Block().to(dtype)


@pytest.mark.parametrize("recompute_norms", [False, True])
def test_same_output_and_gradients(recompute_norms: bool) -> None:
    expected, exact = gradients(a_block(torch.float64), torch.float64)
    block = a_block(torch.float64)
    report = inject_fused_kernels(block, extra_blocks=[MINE], recompute_norms=recompute_norms)
    assert len(report.replaced) == 1
    output, got = gradients(block, torch.float64)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got, exact, rtol=1e-9, atol=1e-11)


def test_in_bfloat16_the_same_bits_forward_and_as_exact_backward() -> None:
    # Weights that bfloat16 holds, so that both precisions compute the same function.
    _, exact = gradients(a_block(torch.bfloat16).double(), torch.float64)
    expected, eager = gradients(a_block(torch.bfloat16), torch.bfloat16)
    block = a_block(torch.bfloat16)
    inject_fused_kernels(block, extra_blocks=[MINE])
    output, fused = gradients(block, torch.bfloat16)
    assert torch.equal(output, expected)

    def error(got: list[Tensor]) -> float:
        return float(torch.stack([(g.double() - e).norm() for g, e in zip(got, exact, strict=True)]).norm())

    assert error(fused) <= 1.05 * error(eager)


def test_a_norm_that_is_something_else_is_skipped() -> None:
    block: Any = a_block(torch.float32)
    block.norm2 = nn.RMSNorm(32)
    with pytest.warns(UserWarning, match=r"norm2 is not a LayerNorm, but torch\.nn\..*RMSNorm"):
        assert not inject_fused_kernels(block, extra_blocks=[MINE]).replaced


def test_a_block_without_a_norm_is_told_what_to_do() -> None:
    block = a_block(torch.float32)
    block.norm1 = None  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="elementwise_affine=False"):
        report = inject_fused_kernels(block, extra_blocks=[dit_block(f"{__name__}.Block")])
    assert "norm1" in report.skipped[0].reason and "NoneType" not in report.skipped[0].reason


def test_the_published_one_is_known_by_its_source() -> None:
    published = FUSED_BLOCKS["models.DiTBlock"]
    assert published.known_forwards  # its module is called "models" like many others
    Block.__module__, before = "models", Block.__module__
    Block.__qualname__ = "DiTBlock"
    try:
        with pytest.warns(UserWarning, match="is not one that the fused forward was written for"):
            assert not inject_fused_kernels(a_block(torch.float32)).replaced
    finally:
        Block.__module__, Block.__qualname__ = before, "Block"
