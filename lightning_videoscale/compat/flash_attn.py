"""FlashAttention 2, 3 and 4: forward with the log-sum-exp, and backward, which their public functions hide.

Read in flash-attn 2.8 (module ``flash_attn.flash_attn_interface``), the source of FlashAttention 3 of its repository's
folder ``hopper`` (module ``flash_attn_interface``), and flash-attn-4 4.0.0b36 (module ``flash_attn.cute.interface``).
Their packages are imported when they are first needed.

Shapes and conventions are those of `compat.torch.attention`; none takes a bias. The kernels want tokens before heads.
Their backward is deterministic where `torch.use_deterministic_algorithms` is on, at some cost.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.compat.names import Package
from lightning_videoscale.compat.torch.attention import Gradients

_PACKAGES = {
    2: (Package("flash-attn", "2.8"), "flash_attn.flash_attn_interface", "pip install flash-attn"),
    3: (Package("flash-attn-3", "3.0"), "flash_attn_interface", "it is built from source, see its repository"),
    4: (
        Package("flash-attn-4", "4.0.0b36"),
        "flash_attn.cute.interface",
        "pip install 'lightning-videoscale[flash]'",
    ),
}


@functools.cache
def missing(generation: int) -> str | None:
    """Returns why FlashAttention of a generation (2, 3 or 4) cannot be imported, or None if it can."""
    package, module, remedy = _PACKAGES[generation]
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module.startswith(error.name):
            return f"{package.name} is not installed ({remedy})"
        return f"{package.name} lacks a package that it needs: {error}"
    except Exception as error:  # built for another torch, say: whatever its import raises
        return f"{package.name} cannot be imported ({type(error).__name__}: {error})"
    return None


@functools.cache
def _function(generation: int, name: str) -> Any:
    package, module, _ = _PACKAGES[generation]
    return package.get(module, name)


def _tokens_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """(B, S, H, D); detached, since tensors that require gradients cannot be handed to kernels by DLPack."""
    return tuple((x.detach() if x.requires_grad else x).transpose(1, 2) for x in tensors)


def _empty_gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors)


def flash_attn_2(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """FlashAttention 2."""
    forward = _function(2, "_wrapped_flash_attn_forward")
    # Dropout, scale, causal, window, softcap, ALiBi, whether to return probabilities.
    out, lse, *_ = forward(*_tokens_first(q, k, v), 0.0, scale, False, -1, -1, 0.0, None, False)
    return out.transpose(1, 2), lse


def flash_attn_2_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, bias: Tensor | None
) -> Gradients:
    """Gradients of `flash_attn_2`."""
    backward, inputs = _function(2, "_wrapped_flash_attn_backward"), _tokens_first(q, k, v)
    gradients = _empty_gradients(*inputs)
    deterministic = torch.are_deterministic_algorithms_enabled()
    tensors = (*_tokens_first(grad), *inputs, *_tokens_first(out), lse.contiguous(), *gradients)
    backward(*tensors, 0.0, scale, False, -1, -1, 0.0, None, deterministic, None)
    dq, dk, dv = _tokens_first(*gradients)
    return dq, dk, dv


def flash_attn_3(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """FlashAttention 3."""
    forward = _function(3, "flash_attn_func")
    with torch.no_grad():
        out, lse, *_ = forward(*_tokens_first(q, k, v), softmax_scale=scale, return_attn_probs=True)
    return out.transpose(1, 2), lse


def flash_attn_3_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, bias: Tensor | None
) -> Gradients:
    """Gradients of `flash_attn_3`."""
    backward, inputs = _function(3, "_flash_attn_backward"), _tokens_first(q, k, v)
    gradients = _empty_gradients(*inputs)
    deterministic = torch.are_deterministic_algorithms_enabled()
    named = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    tensors = (*_tokens_first(grad), *inputs, *_tokens_first(out), lse.contiguous())
    backward(*tensors, **named, softmax_scale=scale, deterministic=deterministic)
    dq, dk, dv = _tokens_first(*gradients)
    return dq, dk, dv


def flash_attn_4(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """FlashAttention 4; compiles for seconds the first time that a variant (dtype, head dim) is called."""
    out, lse, *_ = _function(4, "_flash_attn_fwd")(*_tokens_first(q, k, v), softmax_scale=scale, return_lse=True)
    return out.transpose(1, 2), lse


def flash_attn_4_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, bias: Tensor | None
) -> Gradients:
    """Gradients of `flash_attn_4`."""
    inputs = *_tokens_first(q, k, v, out, grad), lse.contiguous()
    deterministic = torch.are_deterministic_algorithms_enabled()
    gradients = _function(4, "_flash_attn_bwd")(*inputs, softmax_scale=scale, deterministic=deterministic)
    dq, dk, dv = _tokens_first(*gradients[:3])
    return dq, dk, dv
