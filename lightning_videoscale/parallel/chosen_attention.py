"""Attention of a network that is not split: computed by the kernel that is chosen for the run.

`choose_attention`      has a network ask for its kernels
`choices_of_diffusers`  what a user has chosen by diffusers' ``set_attention_backend`` instead

Calls of torch's `scaled_dot_product_attention` are redirected, as in `redirection`, in the modules that attend: those
that the split plan names, and those with a processor, as diffusers has them. What else they call, such as a backend
that was set by diffusers' ``set_attention_backend``, stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_videoscale.attention import AttentionChoices, as_autocast, as_choices, attention
from lightning_videoscale.compat.diffusers import KERNELS_OF_BACKENDS, own_attention_backend
from lightning_videoscale.compat.patching import only_redirects, own_forward
from lightning_videoscale.compat.torch.attention import with_gradient_in_order
from lightning_videoscale.parallel.pickling import refuse_pickling
from lightning_videoscale.parallel.plan import SplitPlan, matching_modules
from lightning_videoscale.parallel.redirection import RedirectingMode
from lightning_videoscale.undo import Undo


def choices_of_diffusers(backend: str) -> AttentionChoices:
    """Returns what computes attention as a backend of diffusers' ``set_attention_backend`` would.

    Raises:
        ValueError: If no kernel here is that backend's.
    """
    if backend not in KERNELS_OF_BACKENDS:
        raise ValueError(
            f"Attention over a split sequence has no kernel for diffusers' backend {backend!r}. Set one of "
            f"{[*KERNELS_OF_BACKENDS]}, or name a kernel by attention_backend= of the strategy and set none."
        )
    return as_choices(KERNELS_OF_BACKENDS[backend])


def choose_attention(model: nn.Module, plan: SplitPlan, choices: AttentionChoices) -> Undo:
    """Makes a network, which runs whole, ask for its kernel in attention, where its plan says it attends."""
    if choices.leaves_all_to_torch:
        return Undo()
    named = plan.attention if isinstance(plan.attention, Mapping) else ()
    modules = {module for pattern in named for module in matching_modules(model, pattern).values()}
    modules |= {module for module in model.modules() if hasattr(module, "processor")}
    undo = refuse_pickling(model) if modules else Undo()
    for module in modules:
        forward = only_redirects(_asking_forward(module.forward, choices), own_forward(module))
        undo.set(module, "forward", MethodType(forward, module))
    return undo


def _asking_forward(original: Callable[..., Any], choices: AttentionChoices) -> Callable[..., Any]:
    unbound = original.__func__ if isinstance(original, MethodType) else None

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if own_attention_backend(getattr(self, "processor", None)) is not None:
            return original(*args, **kwargs) if unbound is None else unbound(self, *args, **kwargs)
        with _Asking(choices):
            return original(*args, **kwargs) if unbound is None else unbound(self, *args, **kwargs)

    return forward


class _Asking(RedirectingMode):
    """Inside, attention that a chosen kernel can compute is computed by it."""

    def __init__(self, choices: AttentionChoices) -> None:
        super().__init__()
        self._choices = choices

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        plain = attn_mask is None and not dropout_p and not is_causal
        if not plain or query.ndim != 4 or key.shape != value.shape or query.shape[:2] != key.shape[:2]:
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            return out if torch.compiler.is_compiling() else with_gradient_in_order(out)
        scale = scale if scale is not None else query.shape[3] ** -0.5
        query, key, value = as_autocast(query, key, value)
        return attention(self._choices, query, key, value, scale)
