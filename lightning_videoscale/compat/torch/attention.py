"""The kernels of scaled dot product attention, which return the log-sum-exp.

torch's public attention hides the log-sum-exp and takes none for its backward, both of which a ring needs. Read in
torch 2.11 and 2.13.

Shapes: B batch, H heads, S queries, K keys, D head dim; tensors are (B, H, S, D), log-sum-exps (B, H, S), an additive
bias (B, 1, 1, K). A forward returns the output and the log-sum-exp. A backward takes the gradient of the output, what
the forward took, and output and log-sum-exp over *all* keys; it returns the gradients of queries, keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.compat.names import MissingNameError

Gradients = tuple[Tensor, Tensor, Tensor]


def _op(name: str) -> Any:
    try:
        return getattr(torch.ops.aten, name).default
    except AttributeError:
        raise MissingNameError(
            f"torch {torch.__version__} has no operator aten::{name}, on which ring attention relies; it was tried "
            "with torch 2.11 and 2.13. Use one of these, or ring_size=1."
        ) from None


def sdpa_choice() -> frozenset[str] | None:
    """Returns which kernels `torch.nn.attention.sdpa_kernel`, or a switch of torch's, leaves on; None: all of them.

    The public functions are those of `torch.backends.cuda`, whatever the device.
    """
    switches = torch.backends.cuda
    cudnn, flash = switches.cudnn_sdp_enabled(), switches.flash_sdp_enabled()
    efficient, math = switches.mem_efficient_sdp_enabled(), switches.math_sdp_enabled()
    if cudnn and flash and efficient and math:  # nearly always, and asked in every call
        return None
    on = {"cudnn": cudnn, "flash": flash, "efficient": efficient, "math": math}
    return frozenset(name for name, is_on in on.items() if is_on)


# -- flash on CPUs -------------------------------------------------------------------------------------------------


def flash_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Flash attention on CPUs."""
    op = _op("_scaled_dot_product_flash_attention_for_cpu")
    out, lse = op(q, k, v, attn_mask=bias, scale=scale)
    return out, lse


def flash_cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, bias: Tensor | None
) -> Gradients:
    """Gradients of `flash_cpu`."""
    op = _op("_scaled_dot_product_flash_attention_for_cpu_backward")
    dq, dk, dv = op(grad, q, k, v, out, lse, 0.0, False, attn_mask=bias, scale=scale)
    return dq, dk, dv


# -- flash, cuDNN and efficient on GPUs ----------------------------------------------------------------------------


def _random_state(x: Tensor) -> Tensor:
    """What the kernels would need to repeat a dropout that is never used here."""
    return torch.empty((), dtype=torch.int64, device=x.device)


def flash(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Flash attention on GPUs, which takes no bias."""
    out, lse, *_ = _op("_scaled_dot_product_flash_attention")(q, k, v, scale=scale)
    return out, lse


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, bias: Tensor | None
) -> Gradients:
    """Gradients of `flash`."""
    op, state = _op("_scaled_dot_product_flash_attention_backward"), _random_state(q)
    sizes = (None, None, q.shape[2], k.shape[2])
    dq, dk, dv = op(grad, q, k, v, out, lse.contiguous(), *sizes, 0.0, False, state, state, scale=scale)
    return dq, dk, dv


_OWN_PLANS = -0.0
"""The dropout that cuDNN is told: none, and yet not the zero of torch's own function.

torch keeps cuDNN's plans by the layouts of query, key and value. Those of the output and of its gradient are part of a
plan too, but not of what it is looked up by (`MHAParams` in `ATen/native/cudnn/MHA.cpp`): a gradient that lies another
way is read wrongly, without an error. So here both always lie with tokens first. Plans of torch's own function, whose
gradients lie any way, must not be taken either. Keys are compared bit by bit, and minus zero is another key.
"""


def tokens_first(x: Tensor) -> Tensor:
    """Returns (B, H, S, D) that lies in memory with tokens before heads."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def with_gradient_in_order(out: Tensor) -> Tensor:
    """Has the gradient of what torch's own function returned lie with tokens first, whatever hands it over.

    Where torch picks cuDNN, that is what the plans it keeps are then made for (`_OWN_PLANS`). A single block that joins
    attention with its MLP, as Flux's does, hands over rows of a wider tensor, and a double block does not: with torch
    2.11, diffusers' Flux ends in an illegal access of memory.
    """
    if out.is_cuda and out.requires_grad:
        out.register_hook(tokens_first)
    return out


def to_whole_tiles(k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Adds hidden keys where cuDNN's backward would look beyond the last one; ``mask`` is boolean or added to scores.

    On Hopper it takes scores of the second half of a tile of 128 keys for zero where there is none. Of a row whose
    log-sum-exp is below -88 that is infinite, and its gradient NaN (pytorch/pytorch#196678, cuDNN 9.20). Without a mask
    nothing is done, as a mask may cost another kernel: docs/limits.md.
    """
    if mask is None or k.shape[2] % 128 != 64:
        return k, v, mask
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, 64)) for x in (k, v))
    return k, v, torch.nn.functional.pad(mask, (0, 64), value=False if mask.dtype is torch.bool else -torch.inf)


def cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """CuDNN's attention."""
    k, v, bias = to_whole_tiles(k, v, bias)
    out, lse, *_ = _op("_scaled_dot_product_cudnn_attention")(q, k, v, bias, True, _OWN_PLANS, scale=scale)
    return out, lse.view(q.shape[:3])


def cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, bias: Tensor | None
) -> Gradients:
    """Gradients of `cudnn`."""
    op, state, keys = _op("_scaled_dot_product_cudnn_attention_backward"), _random_state(q), k.shape[2]
    k, v, bias = to_whole_tiles(k, v, bias)
    lse, sizes = lse.contiguous()[..., None], (None, None, q.shape[2], k.shape[2])
    grad, out = tokens_first(grad), tokens_first(out)
    dq, dk, dv = op(grad, q, k, v, out, lse, state, state, bias, *sizes, _OWN_PLANS, False, scale=scale)
    return dq, dk[:, :, :keys], dv[:, :, :keys]


def efficient(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Memory-efficient attention, which takes a bias of which each row starts on 16 elements."""
    op, bias = _op("_scaled_dot_product_efficient_attention"), _expanded(bias, q)
    out, lse, *_ = op(q, k, v, bias, True, scale=scale)
    return out, lse[..., : q.shape[2]]


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, bias: Tensor | None
) -> Gradients:
    """Gradients of `efficient`."""
    op, state = _op("_scaled_dot_product_efficient_attention_backward"), _random_state(q)
    # The kernel reads whole tiles of 32 rows; rows that do not exist have probability exp(-inf) = 0.
    lse = torch.nn.functional.pad(lse, (0, -q.shape[2] % 32), value=torch.inf).contiguous()
    wanted = [True, True, True, False]
    # In half precision the kernel reads some of them as if tokens came first in memory, however they lie.
    grad, q, k, v, out = map(tokens_first, (grad, q, k, v, out))
    dq, dk, dv, _ = op(grad, q, k, v, _expanded(bias, q), out, lse, state, state, 0.0, wanted, scale=scale)
    return dq, dk, dv


def _expanded(bias: Tensor | None, q: Tensor) -> Tensor | None:
    return bias.expand(*q.shape[:3], bias.shape[-1]) if bias is not None else None
