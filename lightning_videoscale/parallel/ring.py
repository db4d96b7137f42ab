"""Ring attention: keys and values go from rank to rank, queries stay (Liu et al., Ring Attention, 2023).

Shapes: B batch, S tokens of this rank, K tokens of the block at hand, H heads, D head dim.
Tensors are (B, H, S, D) with tokens before heads in memory; a block is sent as it lies there, (2, B, K, h, D).

Every rank holds one block of keys and values. In as many steps as there are ranks each block visits each rank, while
the rank works on the block before it; the parts of the softmax are merged by their log-sum-exps. In backward the blocks
go round once more, and each one's gradient follows it, one step behind, until it is at its owner. The two messages of a
step in backward are the block (in its dtype) and the gradient (in fp32).

Rounding, with unit roundoff u of the dtype, over the single rounding of attention on one rank: the kernel rounds each
part once more before the parts are added up in fp32. The error of the output grows by at most u · Σ wᵢ|oᵢ| (weights wᵢ
that add up to 1), that of the gradients of query, key and value by at most u · Σ|gᵢ|. In float64 nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.attention import AttentionChoices
from lightning_videoscale.attention.attend import with_whole_rows
from lightning_videoscale.attention.dispatch import attention_part, attention_part_backward
from lightning_videoscale.compat.torch.versions import ring_attention_is_traced
from lightning_videoscale.parallel.derivatives import without_second_derivative
from lightning_videoscale.parallel.mesh import Axis
from lightning_videoscale.parallel.transport import Transport
from lightning_videoscale.parallel.ulysses import repeat_heads, sum_heads
from lightning_videoscale.parallel.words import by_words

SECOND_DERIVATIVE = (
    "Ring attention has no second derivative, as a penalty on gradients of inputs needs it. Take ring_size=1, and "
    "attention that has one: torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
)


@dataclass(frozen=True)
class Ring:
    """What the ranks of a ring know of each other, and how they attend.

    Attributes:
        axis: The ranks.
        lengths: Keys of each rank.
        repeats: How many query heads each key/value head serves, in their order.
        scale: Factor on the logits.
        transport: What sends messages.
        choices: What chooses the kernel.
    """

    axis: Axis
    lengths: tuple[int, ...]
    repeats: tuple[int, ...]
    scale: float
    transport: Transport
    choices: AttentionChoices


def ring_attention(query: Tensor, key: Tensor, value: Tensor, ring: Ring, mask: Tensor | None = None) -> Tensor:
    """Attention from this rank's queries to the keys of all ranks of the ring.

    Only ``query``, ``key``, ``value``, the output and its log-sum-exp are kept for backward.

    Args:
        query: (B, H, S, D).
        key: (B, h, T, D) with ``T = ring.lengths[rank]`` and ``h = len(ring.repeats)``.
        value: As ``key``.
        ring: The ring, of two ranks or more.
        mask: (B, tokens of all ranks) bool, equal on all ranks, True where a key may be attended.

    Returns:
        (B, H, S, D); zeros for a sample of which no key may be attended.
    """
    return _apply(query, key, value, mask, ring)


def _apply(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, ring: Ring) -> Tensor:
    out: Tensor = _RingAttention.apply(query, key, value, mask, ring)  # type: ignore[no-untyped-call]
    return out


if not ring_attention_is_traced():  # a graph break there, rather than gradients of zero
    _apply = torch.compiler.disable(_apply)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, ring: Ring) -> Tensor:
        out, lse = attend_to_blocks(query, key, value, mask, ring)
        ctx.ring, ctx.returns = ring, "slice"
        ctx.save_for_backward(query, key, value, mask, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, mask, out, lse = ctx.saved_tensors
        with torch.no_grad():
            gradients = gradients_of_blocks(grad_out, query, key, value, mask, out, lse, ctx.ring)
        dq, dk, dv = without_second_derivative(gradients, (grad_out, query, key, value), SECOND_DERIVATIVE)
        return dq, dk, dv, None, None


def attend_to_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, ring: Ring
) -> tuple[Tensor, Tensor]:
    """Returns output and log-sum-exp, see `ring_attention`."""
    so_far: tuple[Tensor, Tensor] | None = None
    query = with_whole_rows(query)  # once, and not for every block
    for owner, k, v in _blocks(key, value, ring):
        k, v = repeat_heads(k, ring.repeats), repeat_heads(v, ring.repeats)
        part = attention_part(ring.choices, query, k, v, ring.scale, _mask_of(owner, mask, ring))
        so_far = part if so_far is None else _merge(so_far, part, mask is not None)
    assert so_far is not None
    return so_far[0].to(query.dtype), so_far[1]


def gradients_of_blocks(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    ring: Ring,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value, given that of the output."""
    dq: Tensor | None = None
    gradient: Any = None  # of the block at hand, on its way here
    grad_out, query = with_whole_rows(grad_out), with_whole_rows(query)
    for owner, k, v in _blocks(key, value, ring):
        k, v = repeat_heads(k, ring.repeats), repeat_heads(v, ring.repeats)
        mask_of_block = _mask_of(owner, mask, ring)
        part, dk, dv = attention_part_backward(ring.choices, grad_out, query, k, v, out, lse, ring.scale, mask_of_block)
        dq = part.to(lse.dtype) if dq is None else dq.add_(part)
        dk, dv = (sum_heads(x, ring.repeats, lse.dtype).transpose(1, 2) for x in (dk, dv))
        if gradient is None:
            total = lse.new_empty(2, *dk.shape)
            total[0].copy_(dk)
            total[1].copy_(dv)
        else:
            total = ring.transport.wait(gradient).view(2, *dk.shape)
            total[0].add_(dk)
            total[1].add_(dv)
        # What arrives belongs to the block that arrives next; after the last step that is this rank's own.
        gradient = _pass_on(total.view(-1), _elements(key, owner - 1, ring), ring)
    assert dq is not None
    batch, heads, tokens, dim = key.shape
    total = ring.transport.wait(gradient).view(2, batch, tokens, heads, dim).to(key.dtype)
    dk, dv = total.transpose(2, 3)
    return dq.to(query.dtype), dk, dv


def _blocks(key: Tensor, value: Tensor, ring: Ring) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields every rank's keys and values (B, h, K, D) with their owner, this rank's own first.

    While the caller works on a block, the next is under way.
    """
    block = by_words(torch.stack, [key.transpose(1, 2), value.transpose(1, 2)])
    message = block.contiguous().view(-1)  # torch.stack leaves what lies channels first as it lies
    batch, heads, _, dim = key.shape
    for step in range(ring.axis.size):
        owner = (ring.axis.rank - step) % ring.axis.size
        last = step == ring.axis.size - 1
        arriving = None if last else _pass_on(message, _elements(key, owner - 1, ring), ring)
        k, v = message.view(2, batch, ring.lengths[owner], heads, dim).transpose(2, 3)
        yield owner, k, v
        if not last:
            message = ring.transport.wait(arriving)


def _pass_on(message: Tensor, receive: int, ring: Ring) -> Any:
    """Starts sending ``message`` to the next rank and receiving ``receive`` elements from the previous one.

    An all-to-all in which all other pieces are empty: gloo and NCCL then exchange with the two neighbours only.
    """
    axis = ring.axis
    sizes_sent, sizes_received = [0] * axis.size, [0] * axis.size
    sizes_sent[(axis.rank + 1) % axis.size] = message.numel()
    sizes_received[(axis.rank - 1) % axis.size] = receive
    return ring.transport.all_to_all(message, sizes_sent, sizes_received, axis)


def _elements(key: Tensor, owner: int, ring: Ring) -> int:
    """Elements of the keys and values of one rank."""
    batch, heads, _, dim = key.shape
    return 2 * batch * heads * dim * ring.lengths[owner % ring.axis.size]


def _mask_of(owner: int, mask: Tensor | None, ring: Ring) -> Tensor | None:
    if mask is None:
        return None
    start = sum(ring.lengths[:owner])
    return mask[:, start : start + ring.lengths[owner]]


def _merge(so_far: tuple[Tensor, Tensor], part: tuple[Tensor, Tensor], masked: bool) -> tuple[Tensor, Tensor]:
    """Returns attention over two sets of keys, from their outputs (B, H, S, D) and log-sum-exps (B, H, S).

    The output is fp32 (fp64 for fp64), as the log-sum-exps are.
    """
    (out, lse), (part_out, part_lse) = so_far, part
    weights = torch.stack([lse, part_lse]).softmax(0)
    if masked:
        weights.nan_to_num_(0.0)  # where neither had a key
    weight, part_weight = weights[..., None]
    return (out * weight).addcmul_(part_out, part_weight), torch.logaddexp(lse, part_lse)
