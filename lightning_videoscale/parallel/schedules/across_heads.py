"""RMS norm over all heads of a token, where its heads are spread over ranks, then rotation.

Who projected a token knows its whole row, and sends the sum of its squares, rounded values as eager code has them, along
with the heads. Backward needs one number of each token from every rank: its heads' part of the sum of dx̂ · x̂.

Rows: the tokens of all ranks of a Ulysses group, each with all samples of the batch, as messages have them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.kernels import qk_norm_rope_ops as ops
from lightning_videoscale.kernels.backend import BackendName
from lightning_videoscale.kernels.head_types import HeadRounding


@dataclass(frozen=True)
class NormAcrossHeads:
    """How query and key are normalised and rotated; the tensors that this takes are `NormTensors`.

    Attributes:
        width: Channels of all heads.
        eps: Added to the mean of squares.
        rounding: As in `kernels.qk_norm_rope`; not ``"eager"``.
        backend: Of the kernels.
    """

    width: int
    eps: float
    rounding: HeadRounding
    backend: BackendName = "auto"

    @property
    def _variant(self) -> tuple[Any, ...]:
        return "rms", False, "interleaved", 0, False, self.rounding != "at_end", self.backend

    def square_sums(self, query: Tensor, key: Tensor) -> Tensor:
        """Returns the sums of squares over some heads of (1, N, h, D) each, as (N, 2), in float32 (or float64)."""
        return torch.stack([sums[0] for sums in ops.square_sums(query, key, self.backend)], 1)

    def rstds(self, square_sums: Tensor) -> Tensor:
        """Returns (2, 1, N) of the (N, 2) sums over all heads."""
        return torch.rsqrt(square_sums.T[:, None] / self.width + self.eps).contiguous()

    def forward(self, query: Tensor, key: Tensor, rstds: Tensor, tensors: NormTensors) -> tuple[Tensor, Tensor]:
        """Normalises and rotates (1, N, h, D) each."""
        arguments = query, key, *tensors.weights, None, None, *tensors.tables, *rstds, None, None
        outputs = ops.forward(*arguments, self.eps, *self._variant)
        return outputs[0], outputs[1]

    def gradient_sums(self, grads: tuple[Tensor, Tensor], qk: tuple[Tensor, Tensor], rstds: Tensor, tensors: NormTensors) -> Tensor:
        """Returns this rank's part of the sums that `backward` needs, (2, 1, N)."""
        arguments = *grads, *qk, *tensors.weights, *tensors.tables, *rstds
        return torch.stack(ops.gradient_sums(*arguments, "interleaved", 0, self.backend))

    def backward(
        self,
        grads: tuple[Tensor, Tensor],
        qk: tuple[Tensor, Tensor],
        rstds: Tensor,
        sums: Tensor,
        tensors: NormTensors,
    ) -> list[Tensor]:
        """Returns the gradients of query, key and their weights, given the sums over all ranks."""
        none = rstds.new_empty(0)
        means = sums / self.width
        arguments = *grads, *qk, *tensors.weights, None, None, *tensors.tables, none, none, *rstds, *means
        gradients: list[Tensor] = ops.backward(*arguments, *self._variant, None, None)
        return gradients


@dataclass(frozen=True)
class NormTensors:
    """What a norm reads beside query and key.

    Attributes:
        weights: (h · D,) of query and of key, of this rank's heads.
        tables: cos and sin, (1, N, 1, D / 2), or two times None where nothing is rotated.
    """

    weights: tuple[Tensor, Tensor]
    tables: tuple[Tensor, Tensor] | tuple[None, None]
