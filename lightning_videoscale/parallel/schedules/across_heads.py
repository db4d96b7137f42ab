"""RMS norm over all heads of a token, where its heads are spread over ranks, then rotation.

Who projected a token knows its whole row, and sends the sum of its squares, rounded values as eager code has them, with
the heads. Backward needs one number of each token from every rank: its heads' part of the sum of dx̂ · x̂.

Rows, (N, h, D), are the tokens of all ranks of a Ulysses group with all samples of each; see `messages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_videoscale.kernels import qk_norm_rope_ops as ops
from lightning_videoscale.kernels.backend import BackendName
from lightning_videoscale.kernels.head_types import HeadRounding, RopeLayout


class BeforeNorm(NamedTuple):
    """What is normalised: query and key, (N, h, D), and 1 / RMS of their rows, (2, 1, N)."""

    query: Tensor
    key: Tensor
    rstds: Tensor


class NormTensors(NamedTuple):
    """What a norm reads beside query and key.

    Attributes:
        weights: (h · D,) of query and of key, of this rank's heads.
        tables: cos and sin, (1, N, 1 or h, D / 2), or two times None where nothing is rotated.
    """

    weights: Sequence[Tensor]
    tables: Sequence[Tensor | None]


@dataclass(frozen=True)
class NormAcrossHeads:
    """How query and key are normalised and rotated.

    Attributes:
        width: Channels of all heads.
        eps: Added to the mean of squares.
        rounding: As in `kernels.qk_norm_rope`; not ``"eager"``.
        backend: Of the kernels.
        layout: Which channels form a pair.
    """

    width: int
    eps: float
    rounding: HeadRounding
    backend: BackendName = "auto"
    layout: RopeLayout = "interleaved"

    def square_sums(self, query: Sequence[Tensor], key: Sequence[Tensor]) -> Tensor:
        """Returns the sums of squares over all heads, (N, 2) in float32 (or float64), of the heads of each rank."""
        pairs = zip(query, key, strict=True)
        total, *others = (torch.stack(ops.square_sums(q[None], k[None], self.backend), 2)[0] for q, k in pairs)
        for each in others:
            total += each
        return total

    def rstds(self, square_sums: Tensor) -> Tensor:
        """Returns 1 / RMS, (2, 1, N), of the sums of squares, (N, 2)."""
        return torch.rsqrt(square_sums.t()[:, None] / self.width + self.eps).contiguous()

    def forward(self, before: BeforeNorm, tensors: NormTensors) -> tuple[Tensor, Tensor]:
        """Returns query and key normalised and rotated."""
        query, key = before.query[None], before.key[None]
        given = *tensors.weights, None, None, *tensors.tables, *before.rstds, None, None
        outputs = ops.forward(query, key, *given, self.eps, *self._variant)
        return outputs[0][0], outputs[1][0]

    def gradient_sums(self, dq: Tensor, dk: Tensor, before: BeforeNorm, tensors: NormTensors) -> Tensor:
        """Returns this rank's part of the sums that `backward` needs, (2, 1, N)."""
        rows = (t[None] for t in (dq, dk, before.query, before.key))
        given = *tensors.weights, *tensors.tables, *before.rstds
        return torch.stack(ops.gradient_sums(*rows, *given, self.layout, 0, self.backend))

    def backward(
        self, dq: Tensor, dk: Tensor, before: BeforeNorm, sums: Tensor, tensors: NormTensors
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the gradients of query, key and the two weights, given the sums over all ranks."""
        rows = (t[None] for t in (dq, dk, before.query, before.key))
        none = before.rstds.new_empty(0)
        given = *tensors.weights, None, None, *tensors.tables, none, none, *before.rstds, *(sums / self.width)
        query, key, *of_weights = ops.backward(*rows, *given, *self._variant, None, None)
        return query[0], key[0], *of_weights

    @property
    def _variant(self) -> tuple[Any, ...]:
        return "rms", False, self.layout, 0, False, self.rounding != "at_end", self.backend
