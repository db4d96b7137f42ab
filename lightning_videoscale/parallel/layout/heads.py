"""The heads of a network's attention: `attention_sizes`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from lightning_videoscale.families import known
from lightning_videoscale.parallel.plan import SplitPlan, matching_modules


class AttentionSize(NamedTuple):
    """Of one attention module."""

    heads: int
    head_dim: int


def attention_sizes(network: nn.Module, plan: SplitPlan) -> list[AttentionSize]:
    """Returns the sizes of the attention that exchanges, one for each module; empty if they cannot be told.

    Of a plan whose attention is a function they are told only if tests hold it to one device (`SplitPlan.exact`):
    another function may exchange over a Ulysses group alone.

    They are read off the modules that the plan names, or the network's family: ``heads`` (or ``num_heads``), and
    ``inner_dim``, as diffusers' have it, or what the first linear layer takes. Where none has them, the network's
    ``config`` tells.
    """
    said: Callable[[nn.Module], Iterable[str]] | None = known("PROJECTIONS", type(network))
    named: Iterable[str] = ()
    if isinstance(plan.attention, Mapping):
        named = plan.attention
    elif not plan.exact:
        return []
    elif said is not None:
        named = said(network)
    modules = {module: None for pattern in named for module in matching_modules(network, pattern).values()}
    found = [size for module in modules if (size := _of_module(module)) is not None]
    if found:
        return found
    config = getattr(network, "config", None)
    if isinstance(config, Mapping) and config.get("num_attention_heads") and config.get("attention_head_dim"):
        return [AttentionSize(int(config["num_attention_heads"]), int(config["attention_head_dim"]))]
    return []


def _of_module(module: nn.Module) -> AttentionSize | None:
    heads: Any = getattr(module, "heads", getattr(module, "num_heads", None))
    linear = next((child for child in module.children() if hasattr(child, "in_features")), None)
    width: Any = getattr(module, "inner_dim", getattr(linear, "in_features", None))
    if not isinstance(heads, int) or not isinstance(width, int) or heads < 1 or width % heads:
        return None
    return AttentionSize(heads, width // heads)
