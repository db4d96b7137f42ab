"""Small real models for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor


def tiny_wan(**overrides: Any) -> WanTransformer3DModel:
    """A Wan transformer of a few thousand parameters, with every part of the large one; seeded."""
    config: dict[str, Any] = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 4,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 16,
        "freq_dim": 16,
        "ffn_dim": 64,
        "num_layers": 2,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 32,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return WanTransformer3DModel(**(config | overrides)).train()


@contextmanager
def lifted_float_casts() -> Iterator[None]:
    """Lets float64 through the `.float()` casts that diffusers' Wan has in its norms and residuals.

    Without it a float64 model computes in float32 at heart, and nothing could be compared to 1e-10.
    """
    original = Tensor.float

    def lifted(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x if x.dtype is torch.float64 else original(x, *args, **kwargs)

    with patch.object(Tensor, "float", lifted):
        yield


def gradient_error(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Largest ‖g - r‖ / max(‖r‖, 1e-3 · global norm of r) over all parameters."""
    assert gradients.keys() == reference.keys()
    global_norm = torch.stack([r.norm() for r in reference.values()]).norm()
    errors = [
        float((gradients[name] - r).norm() / torch.maximum(r.norm(), 1e-3 * global_norm))
        for name, r in reference.items()
    ]
    return float(torch.tensor(errors, dtype=torch.float64).max())  # which, unlike max(), is NaN where one of them is


def distance(gradients: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """‖g - exact‖ / ‖exact‖ over all parameters together."""
    off = torch.stack([(gradients[name] - g).norm() for name, g in exact.items()])
    return float(off.norm() / torch.stack([g.norm() for g in exact.values()]).norm())
