"""When graphs are used: `GraphOptions`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

GraphMode = bool | Literal["auto"]


@dataclass(frozen=True)
class GraphOptions:
    """When a network runs by CUDA graphs.

    Attributes:
        mode: True for every call that can be captured; ``"auto"`` for those of them whose forward waits for the host.
        max_memory: Share of a device's memory that graphs may take.
        segments: Into how many graphs backward is cut at most, so that finished gradients are averaged beside the rest.
        gradients_are_copied: Whether whoever waits for a gradient copies it at once, as DDP does into its buckets.
    """

    mode: GraphMode = False
    max_memory: float = 0.05
    segments: int = 4
    gradients_are_copied: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.mode, bool) and self.mode != "auto":  # 1 equals True, and is not what others ask for
            raise ValueError(f'graphs={self.mode!r} is neither True, False nor "auto".')
        share: Any = self.max_memory
        if not isinstance(share, int | float) or not 0 < share <= 1:
            raise ValueError(f"graphs_max_memory={share!r} is a share of the device's memory, between 0 and 1.")


def no_graphs(mode: GraphMode, strategy: str) -> GraphOptions:
    """Returns the options of a strategy that has its parameters elsewhere in every step.

    Args:
        mode: What the user asks for; ``"auto"`` is off.
        strategy: For the message.

    Raises:
        ValueError: If it is True, or none of the modes.
    """
    if GraphOptions(mode).mode is True:
        raise ValueError(
            f"graphs=True cannot hold under {strategy}: parameters are gathered to other memory in every step, and a "
            "graph repeats what it did at the addresses of its capture. Leave it out, or take a strategy that keeps "
            "parameters in place: ulysses_ddp, ulysses_deepspeed_stage_1 or ulysses_deepspeed_stage_2."
        )
    return GraphOptions()
