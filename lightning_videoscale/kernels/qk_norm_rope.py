"""What happens to q and k between their projections and attention: a norm and a rotation (RoPE), both in one launch.

Inside: `qk_norm_rope` (what one calls) and `rope_per_pair` (the tables it takes, made of the usual ones). The
``torch.library`` ops beneath it are in `qk_norm_rope_ops`; some of them serve tokens whose heads are spread over ranks.

Which arguments a model family wants, and how its eager code (diffusers) rounds in half precision:

| family | norm | per_head | layout | rounding |
|---|---|---|---|---|
| Wan, LTX (its tables differ by head) | "rms" | no | "interleaved" | "fp32_once": n is rounded once, then y |
| LTX-2 (likewise) | "rms" | no | "interleaved" or "half_fma" | "fp32_once" |
| Flux, Mochi (its tables differ by head) | "rms" | yes | "interleaved" | "fp32_once" |
| HunyuanVideo | "rms" | yes | "interleaved" | "eager": x · rstd is rounded, then n, then y |
| Cosmos | "rms" | yes | "half" | "eager" |
| CogVideoX | "layer" | yes | "interleaved" | "fp32_once" |

n is rounded before it is rotated, as eager code does, so that norm without rotation plus rotation without norm give the
same bits as both at once; but with "at_end". Eager code whose norm weight is float32 returns float32 where this op
returns x's dtype.

Autocast changes nothing here: dtypes go in and out as they are. Eager code may differ under it: where autocast runs
``rms_norm`` in float32 (CUDA, torch 2.12 and newer), n stays float32 until y is rounded for attention. So does
"at_end"; rounding n makes the error of q and k 1.4 times as large in bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_videoscale.kernels import qk_norm_rope_ops as ops
from lightning_videoscale.kernels.arguments import check_choice, check_tensors
from lightning_videoscale.kernels.backend import BackendName
from lightning_videoscale.kernels.head_types import (
    HEAD_NORMS,
    HEAD_ROUNDINGS,
    LAYOUTS,
    HeadNorm,
    HeadRounding,
    RopeLayout,
    wide_dtype,
)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    *,
    q_proj_bias: Tensor | None = None,
    k_proj_bias: Tensor | None = None,
    norm: HeadNorm = "rms",
    per_head: bool = False,
    eps: float = 1e-6,
    rope: tuple[Tensor, Tensor] | None = None,
    rope_layout: RopeLayout = "interleaved",
    rope_start: int = 0,
    rounding: HeadRounding = "fp32_once",
    backend: BackendName = "auto",
) -> tuple[Tensor, Tensor]:
    """Normalises q and k, then rotates them.

    H heads of Dh channels, D = H·Dh; k may have fewer heads than q (grouped queries), and another length when nothing
    is rotated (cross-attention). A projection of shape (B, S, D), or a chunk of a fused one, goes in as
    ``x.unflatten(-1, (H, Dh))``: rows at any stride are read where they are.

    Deterministic to the bit, backward too. Beside q and k it keeps float32 statistics for backward: 4 bytes per token
    (per head and token with ``per_head``), twice that for LayerNorm. Differentiable once.

    Args:
        q: (B, S, H, Dh), any floating dtype.
        k: (B, S_k, H_k, Dh) of the same dtype.
        q_weight: (Dh,) with ``per_head``, otherwise (D,), in q's dtype or float32 (float64 beside float64); or None.
        k_weight: Likewise for k; both or neither.
        q_bias: As the weights, which must then be given too.
        k_bias: As the weights.
        q_proj_bias: (D,), any floating dtype: the bias of the projection that q comes from, added there already and
            detached, as in ``q = F.linear(x, weight, q_proj_bias.detach())``. It is not added here and its values are
            not read; its gradient, that of q summed over all tokens, is taken here, where q's is computed.
        k_proj_bias: Likewise of k, (D_k,).
        norm: "rms", "layer" or "none".
        per_head: Whether the norm runs over each head's channels, rather than over all D.
        eps: Added to the variance.
        rope: cos and sin, one entry per pair (see `rope_per_pair`): (T, P) or (B or 1, T, H or 1, P), for T tokens from
            ``rope_start`` on and the first 2P channels of each head. Used in float32 (float64 beside float64). Tables
            of that dtype are read where they are and kept for backward as they are, views of a model's own too: any
            strides, 1 or 2 from pair to pair; others are copied.
        rope_layout: "interleaved": channels 2i and 2i + 1 are pair i; "half": channels i and i + P; "half_fma": the
            same with `torch.addcmul`, whose second product is not rounded. Only plain PyTorch tells the two apart.
        rope_start: The first rotated token: the number of text tokens where those come first.
        rounding: "fp32_once" rounds the norm's result once, and y; "eager" also rounds x · rstd, when the weight is no
            wider than x, as diffusers' own ``RMSNorm`` does, where LayerNorm knows no difference; "at_end" rounds y
            alone. Float32 knows no difference at all.
        backend: "auto", or "cuda", "triton" or "reference", which then run or raise; see `kernels.backend.choose`.

    Returns:
        New contiguous tensors of q's and k's shape and dtype.

    Raises:
        TypeError: If a tensor is not floating.
        ValueError: If shapes, dtypes or devices do not fit, a table requires a gradient, a norm's parameter is given
            without its norm, or a setting has no such value.
        NotImplementedError: If the backend asked for by name cannot run this.
    """
    check_tensors(
        q=q, k=k, q_weight=q_weight, k_weight=k_weight, q_bias=q_bias, k_bias=k_bias, q_proj_bias=q_proj_bias,
        k_proj_bias=k_proj_bias,
    )  # fmt: skip
    check_settings(norm, rope_layout, rounding)
    check_sides(q, k)
    check_parameters(q, k, norm, per_head, q_weight, k_weight, q_bias, k_bias)
    cos, sin = (None, None) if rope is None else rope_tables(q, k, *rope, rope_start)
    round_x_hat = rounding == "eager" and norm == "rms" and q_weight is not None and q_weight.dtype is q.dtype
    for name, x, proj_bias in (("q", q, q_proj_bias), ("k", k, k_proj_bias)):
        if proj_bias is not None and proj_bias.shape != (x.shape[2] * x.shape[3],):
            raise ValueError(
                f"{name}_proj_bias must have shape {(x.shape[2] * x.shape[3],)}; got {tuple(proj_bias.shape)}."
            )
    outputs = ops.forward(
        q, k, q_weight, k_weight, q_bias, k_bias, cos, sin, None, None, q_proj_bias, k_proj_bias, eps,
        norm, per_head, rope_layout, rope_start, round_x_hat, rounding != "at_end", backend,
    )  # fmt: skip
    return outputs[0], outputs[1]


def rope_per_pair(cos: Tensor, sin: Tensor, layout: RopeLayout) -> tuple[Tensor, Tensor]:
    """Tables with one entry per channel, as most models carry them, seen as tables with one entry per pair.

    Args:
        cos: (..., 2P); the two channels of a pair must carry the same value, of which one is kept.
        sin: Likewise.
        layout: Which channels make a pair, as in `qk_norm_rope`.

    Returns:
        cos and sin (..., P): views, which `qk_norm_rope` reads where they are and keeps for backward.

    Raises:
        ValueError: If the last dimension is odd, the shapes differ or there is no such layout.
    """
    check_choice("layout", layout, LAYOUTS)
    if cos.shape != sin.shape or cos.shape[-1] % 2:
        raise ValueError(
            f"cos and sin must have one shape with an even last dimension; got {tuple(cos.shape)} and "
            f"{tuple(sin.shape)}. Tables that already have one entry per pair go into qk_norm_rope as they are."
        )
    kept = slice(0, None, 2) if layout == "interleaved" else slice(0, cos.shape[-1] // 2)
    return cos[..., kept], sin[..., kept]


def check_settings(norm: str, layout: str, rounding: str) -> None:
    """Raises ValueError unless these are names that there are."""
    check_choice("norm", norm, HEAD_NORMS)
    check_choice("rope_layout", layout, LAYOUTS)
    check_choice("rounding", rounding, HEAD_ROUNDINGS)


def check_sides(q: Tensor, k: Tensor) -> None:
    """Raises ValueError unless q and k fit each other."""
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            "q and k must have shapes (B, S, H, Dh) and (B, S_k, H_k, Dh); "
            f"got {tuple(q.shape)} and {tuple(k.shape)}. Split a projection with x.unflatten(-1, (H, Dh))."
        )
    if q.dtype != k.dtype:
        raise ValueError(f"q and k must have one dtype; got {q.dtype} and {k.dtype}.")


def check_parameters(q: Tensor, k: Tensor, norm: str, per_head: bool, *parameters: Tensor | None) -> None:
    """Raises ValueError unless q_weight, k_weight, q_bias and k_bias fit q, k and the norm."""
    q_weight, k_weight, q_bias, k_bias = parameters
    if norm == "none" and any(p is not None for p in parameters):
        raise ValueError('norm="none" has no weight and no bias; leave them out, or name the norm.')
    for name, mine, theirs in (("weight", q_weight, k_weight), ("bias", q_bias, k_bias)):
        if (mine is None) != (theirs is None):
            raise ValueError(f"q_{name} and k_{name} must be given together, or neither.")
    if q_bias is not None and q_weight is None:
        raise ValueError("A bias needs a weight beside it; give a weight of ones if the norm has none.")
    fitting = {q.dtype, wide_dtype(q)}
    dtypes = {p.dtype for p in parameters if p is not None}
    if len(dtypes) > 1 or not dtypes <= fitting:
        raise ValueError(f"Weights and biases must all be {' or all '.join(map(str, fitting))}; got {dtypes}.")
    for side, x, weight, bias in (("q", q, q_weight, q_bias), ("k", k, k_weight, k_bias)):
        expected = (x.shape[3],) if per_head else (x.shape[2] * x.shape[3],)
        for name, parameter in (("weight", weight), ("bias", bias)):
            if parameter is not None and parameter.shape != expected:
                raise ValueError(
                    f"{side}_{name} must have shape {expected} for per_head={per_head} and {side} of shape "
                    f"{tuple(x.shape)}; got {tuple(parameter.shape)}."
                )


def rope_tables(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """The tables as `Rotation` wants them; raises TypeError or ValueError unless they fit q and k."""
    check_tensors(q=q, cos=cos, sin=sin)
    b, s, h, dh = q.shape
    if cos.shape != sin.shape or cos.ndim not in (2, 4):
        raise ValueError(
            f"cos and sin must both have shape (T, P) or (B or 1, T, H or 1, P); got {tuple(cos.shape)} and "
            f"{tuple(sin.shape)}."
        )
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise ValueError(
            "cos and sin require gradients, which this op does not compute. Detach them, or leave a model that learns "
            "its frequencies without this op."
        )
    if cos.ndim == 2:
        cos, sin = cos[None, :, None], sin[None, :, None]
    batches, tokens, heads, pairs = cos.shape
    if batches not in (1, b) or heads not in (1, h) or not 0 < 2 * pairs <= dh:
        raise ValueError(
            f"cos of shape {tuple(cos.shape)} (B or 1, T, H or 1, P) does not fit q of shape {tuple(q.shape)}: "
            f"P counts pairs, at most {dh // 2}. Tables with one entry per channel go through rope_per_pair first."
        )
    if heads > 1 and k.shape[2] != h:
        raise ValueError(f"Tables that differ by head need as many heads of k as of q; got {k.shape[2]} and {h}.")
    if k.shape[1] != s:
        raise ValueError(f"Rotation needs q and k of one length; got {s} and {k.shape[1]} tokens.")
    if start < 0 or start + tokens > s:
        raise ValueError(f"Tables of {tokens} tokens from token {start} on do not fit {s} tokens.")
    wide = wide_dtype(q)
    return cos.to(wide), sin.to(wide)
