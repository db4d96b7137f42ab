"""What the backends of `qk_norm_rope` have in common: the variant, one of its two sides, and the rotation.

For every token and head of q, and likewise of k (H heads of Dh channels, D = H·Dh):

    n = norm(x) · weight + bias     over all D channels of the token, or over each head's Dh
    y = n rotated pair by pair      on the first 2P channels of each head, for some tokens

Every backend computes exactly this; the PyTorch reference is the oracle.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from lightning_videoscale.kernels import modulation

HeadNorm = Literal["none", "rms", "layer"]
RopeLayout = Literal["interleaved", "half", "half_fma"]
HeadRounding = Literal["fp32_once", "eager", "at_end"]
HEAD_NORMS, LAYOUTS, HEAD_ROUNDINGS = get_args(HeadNorm), get_args(RopeLayout), get_args(HeadRounding)


class HeadOp(NamedTuple):
    """One variant, a constant at compile time.

    Attributes:
        norm: "rms", "layer", or "none".
        per_head: Statistics, weight and bias belong to each head's Dh channels rather than to all D.
        layout: Which channels of a head make pair i of P: "interleaved" (2i, 2i + 1), or "half" and "half_fma"
            (i, i + P), whose second product the reference adds without rounding it.
        round_x_hat: Round x · rstd to the activations' dtype before the weight multiplies it.
        round_normed: Round n to the activations' dtype before it is rotated.
    """

    norm: HeadNorm
    per_head: bool
    layout: RopeLayout
    round_x_hat: bool
    round_normed: bool = True

    @property
    def channels(self) -> tuple[int, ...]:
        """The dimensions of (B, S, H, Dh) that the norm's statistics run over."""
        return (-1,) if self.per_head else (-2, -1)

    def statistics_shape(self, x: Tensor) -> tuple[int, ...]:
        """(B, S, H) per head, (B, S) otherwise."""
        return tuple(x.shape[: 3 if self.per_head else 2])


class Side(NamedTuple):
    """q or k, and what belongs to it.

    Attributes:
        x: (B, S, H, Dh), the last two dimensions contiguous.
        weight: (Dh,) per head, otherwise (D,); x's dtype or the wide one (float32; float64 beside float64); or None.
        bias: As the weight, or None.
        mean: (B, S[, H]) wide, LayerNorm's; None where there is none or before it is known.
        rstd: (B, S[, H]) wide; in forward, None unless it comes from outside.
    """

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor | None = None
    rstd: Tensor | None = None


class Rotation(NamedTuple):
    """cos and sin of every pair, for the tokens [start, start + T).

    Attributes:
        cos: (B or 1, T, H or 1, P), wide, 1 or 2 elements from pair to pair, any other strides.
        sin: Likewise, as far from pair to pair.
        start: The first rotated token.
    """

    cos: Tensor
    sin: Tensor
    start: int

    @property
    def in_words(self) -> bool:
        """Whether a token's row of both tables is whole words of 16 bytes, as kernels read them."""
        return self.cos.stride(3) == self.sin.stride(3) and _in_words(self.cos) and _in_words(self.sin)

    def readable(self) -> Rotation:
        """Itself, or a copy that is in words."""
        if self.in_words:
            return self
        cos, sin = (t.clone(memory_format=torch.contiguous_format) for t in (self.cos, self.sin))
        return Rotation(cos, sin, self.start)

    def table_layout(self) -> tuple[int, tuple[int, int]]:
        """Of `readable`: floats from pair to pair, and between 16 bytes and the first pair, of cos and of sin."""
        if not self.in_words:
            return 1, (0, 0)
        return self.cos.stride(3), (self.cos.data_ptr() % 16 // 4, self.sin.data_ptr() % 16 // 4)


def _in_words(table: Tensor) -> bool:
    sample, token, head, pair = table.stride()
    packed = table.shape[2] == 1 or head == table.shape[3] * pair
    return pair in (1, 2) and packed and sample % 4 == token % 4 == 0 and table.data_ptr() % 16 < 4 * pair


class SideOutputs(NamedTuple):
    """What forward returns of a side.

    Attributes:
        y: (B, S, H, Dh) in x's dtype, new and contiguous.
        mean: (B, S[, H]) wide; None where the variant has none.
        rstd: (B, S[, H]) wide; None where the variant has none or it came from outside.
    """

    y: Tensor
    mean: Tensor | None
    rstd: Tensor | None


class SideGradients(NamedTuple):
    """What backward returns of a side.

    Attributes:
        dx: (B, S, H, Dh) in x's dtype, new and contiguous.
        dweight: The weight's shape and dtype; None without a weight.
        dbias: Likewise.
        dx_sum: (H·Dh,) wide, dx over all rows before it is rounded: the gradient of the projection's bias; None unless
            asked for.
    """

    dx: Tensor
    dweight: Tensor | None
    dbias: Tensor | None
    dx_sum: Tensor | None = None


class HeadVariant(NamedTuple):
    """Everything that a kernel is specialised on, and all that decides whether a backend can run a call.

    Attributes:
        op: The variant of the operation.
        direction: Forward or backward.
        activation: Dtype of x, y and their gradients.
        parameter: Dtype of weight and bias, or None without.
        bias: Whether there is a bias.
        heads: Of q and of k.
        head_dim: Dh.
        pairs: Rotated pairs per head; 0 rotates nothing.
        table_heads: Whether the tables differ by head.
        pair_stride: Floats from pair to pair in the tables, 1 or 2.
        phases: Floats before the first pair in a row of cos and of sin, that begins on 16 bytes.
        outside: Whether rstd (forward) or the rows' means (backward) come from outside.
        sums_only: Whether a row's sum is all that leaves.
        dx_sums: Whether backward leaves parts of the sum of dx over all rows.
    """

    op: HeadOp
    direction: Literal["forward", "backward"]
    activation: torch.dtype
    parameter: torch.dtype | None
    bias: bool
    heads: tuple[int, int]
    head_dim: int
    pairs: int
    table_heads: bool
    pair_stride: int = 1
    phases: tuple[int, int] = (0, 0)
    outside: bool = False
    sums_only: bool = False
    dx_sums: bool = False


def variant_of(
    op: HeadOp,
    direction: Literal["forward", "backward"],
    sides: tuple[Side, Side],
    rotation: Rotation | None,
    *,
    outside: bool = False,
    sums_only: bool = False,
    dx_sums: bool = False,
) -> HeadVariant:
    """Returns the variant of a call."""
    (q, k), pairs, table_heads, tables = sides, 0, False, (1, (0, 0))
    if rotation is not None:
        pairs, table_heads, tables = rotation.cos.shape[3], rotation.cos.shape[2] > 1, rotation.table_layout()
    return HeadVariant(
        op, direction, q.x.dtype, None if q.weight is None else q.weight.dtype, q.bias is not None,
        (q.x.shape[2], k.x.shape[2]), q.x.shape[3], pairs, table_heads, *tables, outside, sums_only, dx_sums,
    )  # fmt: skip


class HeadBackend(Protocol):
    """A module with these functions is a backend; q's part of every pair comes first."""

    def limit(self, variant: HeadVariant, device: int) -> str | None:
        """Returns why this variant cannot run, forward or backward, on this GPU (-1: the CPU), or None if it can."""

    def forward(
        self, variant: HeadVariant, sides: tuple[Side, Side], rotation: Rotation | None, eps: float
    ) -> tuple[SideOutputs, SideOutputs]:
        """Normalises, then rotates. A side whose rstd is given (RMS only) is normalised by that.

        Args:
            variant: Of the call.
            sides: q and k.
            rotation: None rotates nothing.
            eps: Added to the variance.
        """

    def backward(
        self,
        variant: HeadVariant,
        gradients: tuple[Tensor, Tensor],
        sides: tuple[Side, Side],
        rotation: Rotation | None,
        row_means: tuple[Tensor, Tensor] | None,
    ) -> tuple[SideGradients, SideGradients]:
        """Computes the gradients of x, weight and bias.

        Args:
            variant: Of the call.
            gradients: (B, S, H, Dh) of each y, in its dtype.
            sides: With the statistics of forward.
            rotation: As in forward.
            row_means: (B, S) each, `gradient_sums` over a whole row divided by its width, where x has only part of the
                row's heads; None where it has them all.
        """

    def square_sums(self, variant: HeadVariant, xs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Sums the squares of the heads at hand: (B, S, H, Dh) to (B, S), wide."""

    def gradient_sums(
        self,
        variant: HeadVariant,
        gradients: tuple[Tensor, Tensor],
        sides: tuple[Side, Side],
        rotation: Rotation | None,
    ) -> tuple[Tensor, Tensor]:
        """Sums dx̂ · x̂ over the heads at hand, (B, S) wide: what `backward` needs of other heads (RMS over all D)."""


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype that x is computed in: float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def as_rows(x: Tensor) -> Tensor:
    """(B, S, H, Dh) as (B·S, H·Dh): a view where its rows are contiguous and begin on 16 bytes, otherwise a copy."""
    if x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x.view(x.shape[0] * x.shape[1], x.shape[2] * x.shape[3])
    return modulation.as_rows(x.flatten(2))
