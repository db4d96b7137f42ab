"""Other libraries' attention over a split sequence, as functions of (query, key, value), each (1, s, H, D).

`yunchang`    its USP. Its torch kernels have no backward (0.6.4 raises there) and its own needs the flash-attn package,
              so it is handed the kernel that ours uses; the exchanges, the ring and the merging are its own.
`diffusers`   its context parallelism, by its attention dispatch with the given backend.

None is a dependency: a baseline that cannot be imported or run is reported as such.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_videoscale.attention.attend import attend, attend_backward, kernel_of_torch
from lightning_videoscale.attention.case import AttentionCase
from lightning_videoscale.attention.kernel import AttentionKernel

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def yunchang(ring: int, ulysses: int) -> Attention:
    """yunchang's USP over all ranks, with our kernel."""
    import yunchang
    from yunchang import globals as groups
    from yunchang.kernels import AttnType

    yunchang.set_seq_parallel_pg(ulysses, ring, dist.get_rank(), dist.get_world_size())
    if ring == 1:
        layer = yunchang.UlyssesAttention(groups.PROCESS_GROUP.ULYSSES_PG, attn_type=AttnType.TORCH_FLASH)
        layer.attn_fn = _dense
        return layer
    layer = yunchang.LongContextAttention(ring_impl_type="basic", attn_type=AttnType.TORCH_FLASH)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return layer(query, key, value)

    # For good: it is looked up again in backward.
    patch("yunchang.ring.ring_flash_attn.select_flash_attn_impl", _kernel_of_yunchang).start()
    return attention


def diffusers(ring: int, ulysses: int, backend: str, device_type: str) -> Attention:
    """diffusers' context parallelism over all ranks."""
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    mesh = init_device_mesh(device_type, (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    config = ParallelConfig(ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses))
    config.setup(dist.get_rank(), dist.get_world_size(), device_type, mesh=mesh)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return dispatch_attention_fn(query, key, value, backend=backend, parallel_config=config)

    return attention


def _dense(query: Tensor, key: Tensor, value: Tensor, softmax_scale: float, **_: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, scale=softmax_scale).transpose(1, 2)


def _kernel_of_yunchang(attn_type: object, stage: str, **_: Any) -> Callable[..., Any]:
    return {"fwd-only": _part, "bwd-only": _part_backward}[stage]


def _part(query: Tensor, key: Tensor, value: Tensor, softmax_scale: float, **_: Any) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse = attend(_kernel(q, k), q, k, v, softmax_scale)
    return out.transpose(1, 2), lse


def _kernel(query: Tensor, key: Tensor) -> AttentionKernel:
    return kernel_of_torch(AttentionCase.of(query, key, masked=False, with_lse=True))


def _part_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout: float,
    scale: float,
    *_: Any,
    **__: Any,
) -> None:
    grad, q, k, v, out = (x.transpose(1, 2) for x in (grad, query, key, value, out))
    gradients = attend_backward(_kernel(q, k), grad, q, k, v, out, lse, scale)
    for buffer, gradient in zip((dq, dk, dv), gradients, strict=True):
        buffer.set_(gradient.transpose(1, 2))  # no copy: a kernel of its own would write into the buffer
