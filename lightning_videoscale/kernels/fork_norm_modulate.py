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

from lightning_videoscale.compat.torch.autograd import unsafe_view
from lightning_videoscale.kernels.autograd import each_once, refuse_transforms
from lightning_videoscale.kernels.backend import BackendName
from lightning_videoscale.kernels.norm_modulate import check_norm_modulate
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
    refuse_transforms("fork_norm_modulate", x, *operands)
    alone = [None if t is None else t.detach() for t in (x, *operands)]
    _, scale_, shift_, weight_, bias_, scale_table_, shift_table_ = alone
    outputs = torch.ops.lightning_videoscale.norm_modulate(
        alone[0], None, None, scale_, shift_, weight_, bias_, None, scale_table_, shift_table_, None, index, eps, norm,
        "identity", False, rounding, backend,
    )  # fmt: skip
    forked: tuple[Tensor, Tensor] = _Fork.apply(*each_once(x, *operands), index, *outputs, norm, backend)  # type: ignore[no-untyped-call]
    return forked


class _Fork(torch.autograd.Function):
    """The gradients alone, and no op, since no op may return what it is given.

    y is computed outside: of what is computed in here, torch 2.11 would not see that a checkpoint around it says to
    compute it again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        scale, _, weight, bias, scale_table, shift_table, index, y, mean, rstd, norm, backend = others
        ctx.save_for_backward(x, scale, weight, bias, scale_table, shift_table, index, mean, rstd)
        ctx.norm, ctx.backend = norm, backend
        return x.view_as(x), unsafe_view(y, y.shape)  # y is nobody else's: no view of it

    @staticmethod
    def backward(ctx: Any, dh: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, weight, bias, scale_table, shift_table, index, mean, rstd = ctx.saved_tensors
        needs_x, *affine, needs_scale_table, needs_shift_table = ctx.needs_input_grad[:7]
        wanted = [True, False, False, *affine, False, needs_scale_table, needs_shift_table, False]
        gradients = iter(
            torch.ops.lightning_videoscale.norm_modulate_backward(
                dh, dy, x, None, None, scale, weight, bias, None, scale_table, shift_table, index, mean, rstd, 0.0,
                ctx.norm, "identity", False, ctx.backend, wanted, None,
            )
        )  # fmt: skip
        dx = next(gradients)
        others = (next(gradients) if needed else None for needed in ctx.needs_input_grad[1:7])
        return dx if needs_x else None, *others, *(None,) * 6
