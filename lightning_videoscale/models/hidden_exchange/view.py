"""An attention as its own code sees it while it attends for this rank's heads: `seen_by_heads`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_videoscale.compat.torch.modules import with_children
from lightning_videoscale.models.hidden_exchange.groups import Streams


class Received(nn.Module):
    """In a Linear's place: what the ranks' Linears made of all tokens, (B, S, h · D)."""

    def __init__(self, heads: Tensor) -> None:
        super().__init__()
        self._heads = heads

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns it.

        Raises:
            ValueError: If other tokens are projected than were announced.
        """
        if tokens.shape[:2] != self._heads.shape[:2]:
            raise ValueError(
                f"A projection of {tuple(self._heads.shape[:2])} samples and tokens was called with "
                f"{tuple(tokens.shape[:2])}: its split plan describes it wrongly. Use schedule='serial'."
            )
        return self._heads


def seen_by_heads(
    attn: nn.Module, described: Streams, heads: int, received: Mapping[str, Tensor], attributes: Sequence[str]
) -> Any:
    """Returns an attention with the same processor and norms, fewer heads and nothing to project.

    Args:
        attn: The attention.
        described: Its streams.
        heads: Of this rank.
        received: By the name of a Linear, what takes its place, (B, S, h · D).
        attributes: The names of what the attention has.
    """
    children: dict[str, nn.Module] = {name: Received(x) for name, x in received.items()}
    for projection in described.values():
        if projection.across_heads:
            children |= {name: nn.Identity() for name in projection.norms}
        if (output := getattr(attn, projection.output, None)) is not None:
            children[projection.output] = _nothing_like(output)
    width = next(iter(received.values())).shape[2]
    return with_children(
        attn, children, attributes, heads=heads, num_heads=heads, inner_dim=width, fused_projections=False
    )


def _nothing_like(output: nn.Module) -> nn.Module:
    """Identities in the place of a projection and what follows it."""
    if isinstance(output, nn.ModuleList | nn.Sequential):
        return nn.ModuleList([nn.Identity() for _ in output])  # no generator outlives a graph break
    return nn.Identity()
