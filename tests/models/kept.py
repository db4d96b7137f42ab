"""What one Wan block keeps for backward, in every way it can be run: ``python -m tests.models.kept``."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor, nn

from lightning_videoscale.injection import inject_fused_kernels
from lightning_videoscale.kernels.recompute import _Pack

TOKENS, CHANNELS, HEADS, FEED_FORWARD, TEXT_TOKENS = 64, 128, 4, 744, 1  # the proportions of Wan-1.3B
ACTIVATION = 2 * TOKENS * CHANNELS  # bytes of (1, S, D) in bfloat16

Run = tuple[Callable[..., Tensor], Sequence[Any]]
MODES: dict[str, dict[str, Any]] = {
    "eager": {"fused": False},
    "compiled": {"fused": False, "compiled": True},
    "fused": {},
    "fused, compiled": {"compiled": True},
    "fused, norms recomputed": {"recompute_norms": True},
    "fused, compiled, norms recomputed": {"compiled": True, "recompute_norms": True},
}


class Kept(NamedTuple):
    """A storage that autograd keeps: its bytes, and the first tensor in it that was saved."""

    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    made_by: str


def wan_block(
    *, fused: bool = True, compiled: bool = False, recompute_norms: bool = False, frozen: bool = False
) -> Run:
    """Returns a block's forward, partitioned as Inductor does it if compiled, and its arguments."""
    torch.manual_seed(0)
    block = WanTransformerBlock(CHANNELS, FEED_FORWARD, HEADS, cross_attn_norm=True).to(torch.bfloat16)
    block.scale_shift_table.data = block.scale_shift_table.data.float()
    if fused:
        inject_fused_kernels(nn.Sequential(block), recompute_norms=recompute_norms)
    x, text, temb = (
        torch.randn(1, n, CHANNELS, dtype=torch.bfloat16, requires_grad=True) for n in (TOKENS, TEXT_TOKENS, 6)
    )
    angles = torch.randn(1, TOKENS, 1, CHANNELS // HEADS // 2).repeat_interleave(2, -1)
    if frozen:
        block.scale_shift_table.requires_grad_(False)
        temb.requires_grad_(False)
    forward: Any = block.forward
    if compiled:
        torch._dynamo.reset()
        forward = torch.compile(forward, backend="aot_eager_decomp_partition", fullgraph=True)
    return forward, (x, text, temb, (angles.cos(), angles.sin()))


def kept_bytes(run: Run) -> int:
    """Bytes that a forward leaves allocated beside its output, by the allocator's own account."""
    forward, arguments = run
    forward(*arguments)  # compiles
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        output = forward(*arguments)
    return int(sum(e.self_cpu_memory_usage for e in profile.key_averages())) - output.untyped_storage().nbytes()


def kept_storages(run: Run) -> list[Kept]:
    """What autograd keeps beside parameters and arguments, one entry for each storage, the largest first."""
    forward, (*tensors, rope) = run
    found: dict[int, Kept] = {}
    held: list[Tensor] = []  # so that no address is used twice

    def note(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        made_by = "" if saved.grad_fn is None else saved.grad_fn.name()
        held.append(saved)
        found.setdefault(storage.data_ptr(), Kept(storage.nbytes(), tuple(saved.shape), saved.dtype, made_by))
        return saved

    # A hook of `recomputed`'s own kind, inside which it goes on working.
    with torch.autograd.graph.saved_tensors_hooks(_Pack((), None, note), lambda packed: packed):  # type: ignore[arg-type]
        forward(*tensors, rope)
    block = getattr(forward, "_torchdynamo_orig_callable", forward).__self__
    for given in (*tensors, *rope, *block.parameters()):
        found.pop(given.untyped_storage().data_ptr(), None)
    return sorted(found.values(), key=lambda kept: -kept.nbytes)


def table() -> str:
    """All modes and the larger things that each keeps."""
    lines = []
    for name, options in MODES.items():
        run = wan_block(**options)
        lines.append(f"{name}: {kept_bytes(run) / ACTIVATION:.2f} activations of (1, S, D)")
        large = [kept for kept in kept_storages(run) if kept.nbytes >= ACTIVATION // 4]
        lines += [f"    {kept.nbytes / ACTIVATION:5.2f}  {kept.shape} {kept.dtype} {kept.made_by}" for kept in large]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
