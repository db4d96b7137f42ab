"""Where a branch leaves the residual stream: `norm_modulate` for the branch, and the stream itself to go on with.

Both get gradients, which PyTorch adds in a pass of its own, reading both and writing a third tensor of their size. The
norm's backward writes that very tensor: given the other gradient it adds the two before it rounds, for a third of that
traffic::

    x, y = fork_norm_modulate(x, scale, shift)
    x = gate_residual(x, branch(y), gate)

Shapes: B samples, S tokens, D channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.kernels.autograd import refuse_forward_mode
from lightning_videoscale.kernels.backend import BackendName
from lightning_videoscale.kernels.norm_modulate import check_norm_modulate
from lightning_videoscale.kernels.row_ops import none_where_unneeded
from lightning_videoscale.kernels.row_types import Norm, Rounding


def fork_norm_modulate(
    x: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    norm: Norm = "layer",
    eps: float = 1e-6,
    scale_table: Tensor | None = None,
    shift_table: Tensor | None = None,
    index: Tensor | None = None,
    rounding: Rounding = "fp32_once",
    backend: BackendName = "auto",
) -> tuple[Tensor, Tensor]:
    """``x, norm_modulate(x, ...)``, whose gradients are added inside the norm's backward.

    The gradient is right whatever becomes of the two, and costs least where both are used and x is not used otherwise.
    Arguments and errors are those of `norm_modulate`; it keeps the same for backward.

    Returns:
        x, a view of it to use in its place, and y; both (B, S, D).
    """
    check_norm_modulate(x, scale, shift, weight, bias, norm, scale_table, shift_table, index, rounding)
    operands = (scale, shift, weight, bias, scale_table, shift_table)
    refuse_forward_mode("fork_norm_modulate", x, *operands)
    alone = [None if t is None else t.detach() for t in (x, *operands)]
    outputs = torch.ops.lightning_videoscale.norm_modulate(*alone[:5], eps, *alone[5:], index, norm, rounding, backend)
    forked: tuple[Tensor, Tensor] = _Fork.apply(x, *operands, index, *outputs, norm, backend)  # type: ignore[no-untyped-call]
    return forked


class _Fork(torch.autograd.Function):
    """The gradients alone, and no op, since no op may return what it is given.

    y is computed outside: of what is computed in here, torch 2.11 would not see that a checkpoint around it says to
    compute it again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor | None,
        shift: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        scale_table: Tensor | None,
        shift_table: Tensor | None,
        index: Tensor | None,
        y: Tensor,
        mean: Tensor,
        rstd: Tensor,
        norm: Norm,
        backend: str,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, scale, weight, bias, mean, rstd, scale_table, shift_table, index)
        ctx.norm, ctx.backend = norm, backend
        return x.view_as(x), torch.ops.aten._unsafe_view.default(y, y.shape)  # y is nobody else's: no view of it

    @staticmethod
    def backward(ctx: Any, dh: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, *needs = ctx.needs_input_grad[:7]
        dx, *gradients = torch.ops.lightning_videoscale.norm_modulate_backward(
            dh, dy, *ctx.saved_tensors, ctx.norm, ctx.backend, needs
        )
        return dx if needs_x else None, *none_where_unneeded(gradients, needs), *(None,) * 6
