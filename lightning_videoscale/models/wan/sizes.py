"""Sizes of Wan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_videoscale.cost.flops import TransformerFlops
from lightning_videoscale.cost.geometry import ModelGeometry

GEOMETRIES = {
    "wan2.1": ModelGeometry(),
    "wan2.2": ModelGeometry(),
    "wan2.2-ti2v-5b": ModelGeometry(spatial_stride=16),
}

TRANSFORMERS = {
    "wan2.1-1.3b": TransformerFlops(30, 1536, 8960),
    "wan2.1-14b": TransformerFlops(40, 5120, 13824),
    "wan2.2-ti2v-5b": TransformerFlops(30, 3072, 14336),
}


def flops(config: Mapping[str, Any]) -> TransformerFlops:
    """Reads the configuration of a Wan, or of a model with Wan's blocks."""
    return TransformerFlops(
        config["num_layers"], config["num_attention_heads"] * config["attention_head_dim"], config["ffn_dim"]
    )
