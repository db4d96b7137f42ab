"""Which part of the memory traffic of a model's blocks is that of fused kernels: a model of bytes, from their modules.

Norms, modulations, gates, rotations and activations wait for memory. Each is counted by what PyTorch's own operations
read and write for it. Nothing runs, so a model on the meta device will do. Not counted are Linears, attention, copies,
and what is done once for a sample or for the text alone. `tests/injection/test_traffic.py` holds the share to what the
operations of a forward move.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from lightning_videoscale.injection.fused_block import fused_block_of

LAYER_NORM, RMS_NORM = 2, 7
"""Reads and writes of a token: one operation, or a square, its mean, and products with that and the weight."""
MODULATION = 3
"""Of each shift, scale and gate: a product or a sum, and for each gate the sum with the residual stream."""
ROTATION = 10
"""Of each of queries and keys: two products with tables, the rotated copy and their sum."""
ACTIVATION = 2

_TABLES = ("rotary", "rope", "freqs")
_MODULATED = ("norm", "mod", "ada")
_MODULATIONS = ("temb", "mod")
_TEXT = ("context", "caption", "text")
_MOST_VECTORS = 16
_GIVEN = 3
"""Vectors of modulation for each norm of a block that is given them, as it makes none: shift, scale and gate."""


class Traffic(NamedTuple):
    """What one module has moved.

    Attributes:
        owner: The attention, the feed-forward or the block whose forward moves it.
        kind: ``"norm"``, ``"modulation"``, ``"rotation"`` or ``"activation"``.
        elements: Elements read and written for each token.
    """

    owner: nn.Module
    kind: str
    elements: int


def fused_share(model: nn.Module) -> float | None:
    """Returns which part of the traffic of a model's blocks is moved by fused forwards.

    A fused forward counts whole, though it may leave a rotation to PyTorch.

    Args:
        model: The model; it may be on the meta device.

    Returns:
        Between 0 and 1; None where no transformer block is found.
    """
    moved = list(traffic(model))
    whole = sum(each.elements for each in moved)
    fused = sum(each.elements for each in moved if fused_block_of(each.owner) is not None)
    return fused / whole if whole else None


def traffic(model: nn.Module) -> Iterator[Traffic]:
    """Yields what the modules of a model's transformer blocks move."""
    for block in blocks(model).values():
        width = _width(block)
        moved = list(_of_modules(block, width))
        norms = sum(each.owner is block and each.kind == "norm" for each in moved)
        given = _GIVEN * norms if _takes(block, _MODULATIONS) else 0
        yield Traffic(block, "modulation", MODULATION * width * (_vectors(block, width) or given))
        yield from moved


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost members of lists that hold an attention, by path; without those that refine the text alone."""
    found: dict[str, nn.Module] = {}
    for path, modules in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found) or any(word in path for word in _TEXT)
        if isinstance(modules, nn.ModuleList) and not inside:
            members = modules.named_children()
            found |= {f"{path}.{name}": block for name, block in members if any(map(_is_attention, block.modules()))}
    return found


def _of_modules(block: nn.Module, width: int) -> Iterator[Traffic]:
    owners = {f"{name}.": each for name, each in block.named_modules() if name and _is_owner(each)} | {"": block}
    for name, module in block.named_modules():
        owner = owners[max((path for path in owners if f"{name}.".startswith(path)), key=len)]
        if _is_norm(module):
            each = RMS_NORM if "RMS" in type(module).__name__ else LAYER_NORM
            yield Traffic(owner, "norm", each * (_inner(owner) if _is_attention(owner) else width))
        elif _is_activation(module) and not any(word in name for word in _MODULATED):
            yield Traffic(owner, "activation", ACTIVATION * _widest(owner))
        elif _is_attention(module):
            if _is_rotated(name, module):
                yield Traffic(owner, "rotation", 2 * ROTATION * _inner(module))
        elif name and _is_owner(module) and not any(map(_is_activation, module.modules())):
            yield Traffic(owner, "activation", ACTIVATION * _gated(module))


def _is_attention(module: nn.Module) -> bool:
    return any(word in type(module).__name__ for word in ("Attention", "Attn")) and any(map(_sizes, module.children()))


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """Channels in and out of a Linear, or of what an adapter has made of one."""
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return sizes if all(isinstance(size, int) for size in sizes) else None  # type: ignore[return-value]


def _linears(module: nn.Module, path: str = "") -> Iterator[tuple[str, tuple[int, int]]]:
    """Paths and sizes of the Linears inside; of those with adapters as one."""
    for name, child in module.named_children():
        if (sizes := _sizes(child)) is not None:
            yield f"{path}{name}", sizes
        else:
            yield from _linears(child, f"{path}{name}.")


def _is_owner(module: nn.Module) -> bool:
    name = type(module).__name__
    return _is_attention(module) or "FeedForward" in name or name.lower().endswith("mlp")


def _is_norm(module: nn.Module) -> bool:
    """Adaptive norms have one inside, beside the Linear of their modulation."""
    return type(module).__name__.endswith("Norm") and not any(True for _ in module.children())


def _is_activation(module: nn.Module) -> bool:
    return any(word in type(module).__name__ for word in ("GELU", "SiLU", "SwiGLU", "GEGLU", "Activation"))


def _is_rotated(name: str, attention: nn.Module) -> bool:
    """Whether queries and keys are: what attends to another sequence has no positions in common with it."""
    if "cross" in name or name.endswith("attn2") or getattr(attention, "is_cross_attention", False):
        return False
    return _takes(getattr(attention, "processor", None) or attention, _TABLES)


def _takes(called: object, words: tuple[str, ...]) -> bool:
    """Whether a module or processor has an argument of such a name."""
    function = called.forward if isinstance(called, nn.Module) else called
    return any(word in name for name in inspect.signature(function).parameters for word in words)  # type: ignore[arg-type]


def _width(block: nn.Module) -> int:
    """Channels of the tokens: what the first attention projects."""
    attention = next(each for each in block.modules() if _is_attention(each))
    return next(sizes[0] for sizes in map(_sizes, attention.children()) if sizes)


def _inner(attention: nn.Module) -> int:
    """Channels of all heads."""
    return next(sizes[1] for sizes in map(_sizes, attention.children()) if sizes)


def _widest(owner: nn.Module) -> int:
    """Channels between the two Linears of a feed-forward; none where it has no Linears."""
    return max((out for _, (_, out) in _linears(owner)), default=0)


def _gated(feed_forward: nn.Module) -> int:
    """Channels of all Linears into the widest, for one that calls its activation: a gate has a Linear for itself."""
    widest = _widest(feed_forward)
    return sum(out for _, (_, out) in _linears(feed_forward) if out == widest)


def _vectors(block: nn.Module, width: int) -> int:
    """Shifts, scales and gates of a block: rows of its table, or what the Linears of its modulation return."""
    tables = [p.numel() // width for name, p in block.named_parameters() if name.endswith("scale_shift_table")]
    made = [
        out // width
        for name, (_, out) in _linears(block)
        if any(word in name for word in _MODULATED) and out % width == 0 and 1 < out // width <= _MOST_VECTORS
    ]
    return sum(tables) + sum(made)
