"""Gated residual in one op: h = residual + act(gate) · branch.

Shapes: B samples, S tokens, D channels.
"""

from __future__ import annotations

from torch import Tensor

from lightning_videoscale.kernels import row_ops
from lightning_videoscale.kernels.arguments import check_choice, check_tensors
from lightning_videoscale.kernels.backend import BackendName
from lightning_videoscale.kernels.modulation import check_branch, check_modulation
from lightning_videoscale.kernels.row_types import ACTIVATIONS, ROUNDINGS, Activation, Rounding


def gate_residual(
    residual: Tensor,
    branch: Tensor,
    gate: Tensor,
    *,
    gate_table: Tensor | None = None,
    branch_bias: Tensor | None = None,
    index: Tensor | None = None,
    gate_activation: Activation = "identity",
    branch_norm: bool = False,
    eps: float = 1e-6,
    rounding: Rounding = "fp32_once",
    backend: BackendName = "auto",
) -> Tensor:
    """Adds a gated branch to the residual stream: ``residual + act(gate + gate_table) * branch``.

    With "fp32_once" and a float32 gate it equals Wan's ``(residual.float() + branch * gate).type_as(residual)``. Keeps
    nothing for backward beside its inputs, of which the residual is not needed, nor the branch where gate and table are
    frozen. Differentiable once. Autocast leaves it as it is: h has the residual's dtype.

    Args:
        residual: (B, S, D), any floating dtype.
        branch: Of the same shape; another dtype, such as a Linear's under autocast, is allowed.
        gate: (B, R, D) with R dividing S, or with an index (G, D), as scale in `norm_modulate`.
        gate_table: (D,), added to every entry of ``gate`` inside; any dtype.
        branch_bias: (D,), any floating dtype: the bias of the Linear that the branch comes from, added there already
            and detached, as in ``branch = F.linear(x, weight, branch_bias.detach())``. It is not added here and its
            values are not read; its gradient, the sum of the branch's over all rows, is taken here from what is not
            rounded yet, in a fixed order, instead of in a pass of its own over what is. Without the ``detach`` it would
            be counted twice. A frozen bias costs nothing.
        index: (B, R) integers in [0, G): which entry belongs to each S / R consecutive tokens.
        gate_activation: "identity" or "tanh".
        branch_norm: RMS-normalise the branch before it is gated, as Mochi does.
        eps: Added to the branch's mean square; used with ``branch_norm`` only.
        rounding: "fp32_once" or "eager", as in `norm_modulate`; Mochi is "eager".
        backend: "auto", or "cuda", "triton" or "reference", which then runs or raises.

    Returns:
        h, (B, S, D) in the residual's dtype, contiguous.

    Raises:
        TypeError: If a tensor is not floating.
        ValueError: If shapes, dtypes or devices do not fit, or a setting has no such value.
        NotImplementedError: If the backend asked for by name cannot run this.
    """
    check_tensors(residual=residual, branch=branch, gate=gate, gate_table=gate_table, branch_bias=branch_bias)
    check_choice("gate_activation", gate_activation, ACTIVATIONS)
    check_choice("rounding", rounding, ROUNDINGS)
    check_branch(residual, branch, branch_bias)
    check_modulation(residual, {"gate": gate}, {"gate": gate_table}, index)
    h: Tensor = row_ops.gate_residual(
        residual, branch, gate, None, None, None, None, gate_table, None, None, branch_bias, index, eps, None,
        gate_activation, branch_norm, rounding, backend,
    )  # fmt: skip
    return h
