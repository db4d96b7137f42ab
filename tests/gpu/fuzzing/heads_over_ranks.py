"""The ops for tokens whose heads are spread over ranks, put together as the schedules of the exchange do, and checked.

RMS over all heads of a token lacks the sum of squares of the others' heads in forward, and their part of the sum of
dx̂ · x̂ in backward: one float32 each per token of q and k. Everything else is local.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.kernels import qk_norm_rope_ops as ops
from lightning_videoscale.kernels.backend import BackendName
from lightning_videoscale.kernels.head_types import HeadRounding, RopeLayout
from lightning_videoscale.kernels.qk_norm_rope import check_parameters, check_sides, rope_tables

SumOverRanks = Callable[[Tensor], Tensor]


def norm_rope_over_ranks(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    *,
    widths: tuple[int, int],
    sum_over_ranks: SumOverRanks,
    eps: float = 1e-6,
    rope: tuple[Tensor, Tensor] | None = None,
    rope_layout: RopeLayout = "interleaved",
    rope_start: int = 0,
    rounding: HeadRounding = "fp32_once",
    backend: BackendName = "auto",
) -> tuple[Tensor, Tensor]:
    """RMS over all heads of q and k, of which this rank has some, then RoPE; else as `qk_norm_rope`.

    Args:
        q: (B, S, H, Dh), this rank's heads.
        k: (B, S_k, H_k, Dh), this rank's heads.
        q_weight: (H·Dh,), this rank's slice; or None.
        k_weight: (H_k·Dh,), this rank's slice; or None. Both or neither.
        widths: Channels of q and of k over all ranks.
        sum_over_ranks: The sum over the ranks that share the tokens, of (B·S + B·S_k,) float32 (float64 beside
            float64). Called once in forward and once in backward; must return a new tensor.
        eps: As in `qk_norm_rope`.
        rope: As in `qk_norm_rope`; tables that differ by head are those of this rank's heads.
        rope_layout: As in `qk_norm_rope`.
        rope_start: As in `qk_norm_rope`.
        rounding: As in `qk_norm_rope`.
        backend: As in `qk_norm_rope`.
    """
    check_sides(q, k)
    check_parameters(q, k, "rms", False, q_weight, k_weight, None, None)
    cos, sin = (None, None) if rope is None else rope_tables(q, k, *rope, rope_start)
    round_x_hat = rounding == "eager" and q_weight is not None and q_weight.dtype is q.dtype
    variant = ("rms", False, rope_layout, rope_start, round_x_hat, rounding != "at_end", backend)
    outputs: tuple[Tensor, Tensor] = _OverRanks.apply(  # type: ignore[no-untyped-call]
        q, k, q_weight, k_weight, cos, sin, widths, sum_over_ranks, eps, variant
    )
    return outputs


class _OverRanks(torch.autograd.Function):
    """The two ops of each direction with the exchange between them."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        widths: tuple[int, int],
        sum_over_ranks: SumOverRanks,
        eps: float,
        variant: tuple[Any, ...],
    ) -> tuple[Tensor, Tensor]:
        means = _exchanged(ops.square_sums(q, k, variant[-1]), widths, sum_over_ranks)
        rstds = [torch.rsqrt(mean + eps) for mean in means]
        outputs = ops.forward(q, k, q_weight, k_weight, None, None, cos, sin, *rstds, None, None, eps, *variant)
        ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin, *rstds)
        ctx.widths, ctx.sum_over_ranks, ctx.variant = widths, sum_over_ranks, variant
        return outputs[0], outputs[1]

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        q, k, q_weight, k_weight, cos, sin, q_rstd, k_rstd = ctx.saved_tensors
        _, _, layout, start, *_, backend = ctx.variant
        sums = ops.gradient_sums(dq, dk, q, k, q_weight, k_weight, cos, sin, q_rstd, k_rstd, layout, start, backend)
        means = _exchanged(sums, ctx.widths, ctx.sum_over_ranks)
        none = q_rstd.new_empty(0)
        gradients = ops.backward(
            dq, dk, q, k, q_weight, k_weight, None, None, cos, sin, none, none, q_rstd, k_rstd, *means, *ctx.variant,
            None, None,
        ) + [None] * (2 if q_weight is None else 0)  # fmt: skip
        needed = zip(gradients, ctx.needs_input_grad[:4], strict=True)
        return *(g if needs else None for g, needs in needed), *(None,) * 6


def _exchanged(sums: tuple[Tensor, Tensor], widths: tuple[int, int], sum_over_ranks: SumOverRanks) -> list[Tensor]:
    """Row by row, the mean over all ranks' channels: both sides in one message."""
    flat = sum_over_ranks(torch.cat([s.flatten() for s in sums]))
    parts = flat.split([s.numel() for s in sums])
    return [part.view_as(s) / width for part, s, width in zip(parts, sums, widths, strict=True)]
