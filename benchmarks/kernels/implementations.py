"""What `row_ops.py` compares: for each op its inputs, the bytes it must move, and who can compute it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_videoscale.kernels import gate_residual, gate_residual_norm_modulate, gelu, norm_modulate, qk_norm_rope

EPS = 1e-6
HEAD = 128
Function = Callable[..., Any]


@dataclass(frozen=True)
class Op:
    """One op of a Wan block.

    Attributes:
        inputs: Draws its arguments for n tokens and d channels; those that need gradients say so.
        eager: What diffusers computes, in PyTorch.
        fused: Ours, given a backend.
        forward_bytes: Device memory that a forward must read and write.
        backward_bytes: Likewise a backward.
    """

    inputs: Callable[[int, int], tuple[Tensor, ...]]
    eager: Function
    fused: Callable[[str], Function]
    forward_bytes: Callable[[int, int], int]
    backward_bytes: Callable[[int, int], int]


def _tokens(n: int, d: int) -> Tensor:
    return torch.randn(1, n, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def _modulation(d: int) -> Tensor:
    return torch.randn(1, 1, d, device="cuda", requires_grad=True)


def _normed(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return (F.layer_norm(x.float(), x.shape[-1:], eps=EPS) * (1 + scale) + shift).type_as(x)


def _gated(residual: Tensor, branch: Tensor, gate: Tensor) -> Tensor:
    return (residual.float() + branch * gate).type_as(residual)


def _gated_and_normed(
    residual: Tensor, branch: Tensor, gate: Tensor, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    h = _gated(residual, branch, gate)
    return h, _normed(h, scale, shift)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.unflatten(-1, (-1, HEAD)).unflatten(-1, (-1, 2)).unbind(-1)
    out = torch.empty(*even.shape[:-1], HEAD, device=x.device, dtype=x.dtype)
    out[..., 0::2] = even * cos[..., 0::2] - odd * sin[..., 1::2]
    out[..., 1::2] = even * sin[..., 1::2] + odd * cos[..., 0::2]
    return out


def _normed_and_rotated(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    q, k = (F.rms_norm(x, x.shape[-1:], weight, EPS) for x, weight in ((q, q_weight), (k, k_weight)))
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _qk_inputs(n: int, d: int) -> tuple[Tensor, ...]:
    weights = (torch.randn(d, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    angles = torch.rand(1, n, 1, HEAD // 2, device="cuda").mul(6.28).repeat_interleave(2, -1)
    return _tokens(n, d), _tokens(n, d), *weights, angles.cos(), angles.sin()


def _fused_qk(backend: str) -> Function:
    def run(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = (x.unflatten(-1, (-1, HEAD)) for x in (q, k))
        rope = cos[..., 0::2], sin[..., 0::2]
        return qk_norm_rope(q, k, q_weight, k_weight, eps=EPS, rope=rope, backend=backend)

    return run


class _LinearBias(torch.autograd.Function):
    """What a bias costs a Linear: in forward nothing, the matrix product adds it; in backward a pass for its sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return dx, dx.flatten(0, -2).sum(0)


def _biased_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(_LinearBias.apply(x, bias), approximate="tanh")


def _gelu_inputs(n: int, d: int) -> tuple[Tensor, ...]:
    return _tokens(n, d), torch.zeros(d, device="cuda", dtype=torch.bfloat16, requires_grad=True)


OPS = {
    "norm_modulate": Op(
        lambda n, d: (_tokens(n, d), _modulation(d), _modulation(d)),
        _normed,
        lambda backend: lambda x, scale, shift: norm_modulate(x, scale, shift, eps=EPS, backend=backend),
        lambda n, d: 2 * 2 * n * d + 8 * n,
        lambda n, d: 3 * 2 * n * d + 8 * n,
    ),
    "gate_residual_norm_modulate": Op(
        lambda n, d: (_tokens(n, d), _tokens(n, d), _modulation(d), _modulation(d), _modulation(d)),
        _gated_and_normed,
        lambda backend: (
            lambda residual, branch, gate, scale, shift: gate_residual_norm_modulate(
                residual, branch, gate, scale, shift, eps=EPS, backend=backend
            )
        ),
        lambda n, d: 4 * 2 * n * d + 8 * n,
        lambda n, d: 6 * 2 * n * d + 8 * n,
    ),
    "gate_residual": Op(
        lambda n, d: (_tokens(n, d), _tokens(n, d), _modulation(d)),
        _gated,
        lambda backend: lambda residual, branch, gate: gate_residual(residual, branch, gate, backend=backend),
        lambda n, d: 3 * 2 * n * d,
        lambda n, d: 3 * 2 * n * d,
    ),
    "gelu": Op(  # d: channels inside the feed-forward
        _gelu_inputs,
        _biased_gelu,
        lambda backend: lambda x, bias: gelu(x, bias, backend=backend),
        lambda n, d: 2 * 2 * n * d,
        lambda n, d: 3 * 2 * n * d,
    ),
    "qk_norm_rope": Op(
        _qk_inputs,
        _normed_and_rotated,
        _fused_qk,
        lambda n, d: 4 * 2 * n * d + 4 * n * HEAD + 8 * n,
        lambda n, d: 6 * 2 * n * d + 4 * n * HEAD + 8 * n,
    ),
}


def implementations(op: str, backends: list[str], compiled: bool) -> dict[str, Function]:
    """Returns who computes an op, by name.

    Args:
        op: Its name.
        backends: Of ours.
        compiled: Also eager under ``torch.compile``, as torch comes and without its mix-order reduction.
    """
    here = OPS[op]
    backends = [backend for backend in backends if (op, backend) != ("qk_norm_rope", "triton")]  # which has none
    found: dict[str, Function] = {f"ours ({backend})": here.fused(backend) for backend in backends}
    found["eager"] = here.eager
    if compiled:
        for name, mix in (("compiled", True), ("compiled, mix-order off", False)):
            found[name] = torch.compile(here.eager, dynamic=False, options={"triton.mix_order_reduction": mix})
    if op == "norm_modulate":
        found |= _liger()
    return found


def _liger() -> dict[str, Function]:
    """Liger-Kernel's only modulated norm, a RMSNorm; its statistics cost less and its bytes are the same."""
    try:
        from liger_kernel.transformers.functional import liger_modulated_rms_norm
    except ImportError:
        return {}
    return {
        "Liger-Kernel (RMSNorm)": lambda x, scale, shift: liger_modulated_rms_norm(
            x, None, scale, shift, EPS, 0.0, "gemma", in_place=False
        )
    }
