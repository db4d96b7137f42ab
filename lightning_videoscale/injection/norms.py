"""The norms that fused forwards do the work of, as torch and diffusers have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_videoscale.injection.parts import KnownClass

TRIED = "diffusers 0.37 to 0.42.1"
_DIFFUSERS = "diffusers.models.normalization"


def _layer_norm(norm: Any) -> str | None:
    if len(norm.normalized_shape) != 1:
        return f"is not over the channels, but over the last dimensions {tuple(norm.normalized_shape)}"
    return "has a weight, but no bias" if (norm.weight is None) != (norm.bias is None) else None


def _torch_rms_norm(norm: Any) -> str | None:
    if len(norm.normalized_shape) != 1:
        return f"is not over the channels, but over the last dimensions {tuple(norm.normalized_shape)}"
    return "has no eps" if norm.eps is None else None


def _diffusers_rms_norm(norm: Any) -> str | None:
    if len(norm.dim) != 1:
        return f"is not over the channels, but has a weight of {tuple(norm.dim)}"
    return None if norm.bias is None else "has a bias"


def _mochi_rms_norm(norm: Any) -> str | None:
    return None if len(norm.dim) == 1 else f"is not over the channels, but has a weight of {tuple(norm.dim)}"


def without_labels(norm: Any) -> str | None:
    """What an adaptive norm of diffusers must not have: embeddings of its own."""
    return None if norm.emb is None else "embeds timesteps and labels itself"


LAYER_NORM = KnownClass("torch.nn.modules.normalization.LayerNorm", "a LayerNorm", misfit=_layer_norm)
RMS_NORM = KnownClass("torch.nn.modules.normalization.RMSNorm", "torch's RMSNorm", misfit=_torch_rms_norm)
IDENTITY = KnownClass("torch.nn.modules.linear.Identity", "an Identity")
FP32_LAYER_NORM = KnownClass(
    f"{_DIFFUSERS}.FP32LayerNorm", "diffusers' FP32LayerNorm", {"4b00d355c071d03e-bd14f7415": TRIED}, _layer_norm
)
DIFFUSERS_RMS_NORM = KnownClass(
    f"{_DIFFUSERS}.RMSNorm",
    "diffusers' RMSNorm",
    {"3c9ee223183affad-5bf8dd44c": "diffusers 0.37 to 0.40", "4aed9a2692862eec-5bf4e944c": "diffusers 0.41 to 0.42.1"},
    _diffusers_rms_norm,
)
MOCHI_RMS_NORM = KnownClass(
    f"{_DIFFUSERS}.MochiRMSNorm",
    "diffusers' MochiRMSNorm",
    {"943b491cd417d5a9-5bf8237c4d7205a74744c": TRIED},
    _mochi_rms_norm,
)
ADA_LAYER_NORM_ZERO = KnownClass(
    f"{_DIFFUSERS}.AdaLayerNormZero",
    "diffusers' AdaLayerNormZero",
    {"fce0db0cb7df22ad-5dd4a32628f1a29db4": TRIED},
    without_labels,
)
ADA_LAYER_NORM_CONTINUOUS = KnownClass(
    f"{_DIFFUSERS}.AdaLayerNormContinuous",
    "diffusers' AdaLayerNormContinuous",
    {"92e4cc263fff68db-dad9e563b6ca0cf": TRIED},
)
ADA_LAYER_NORM_ZERO_TWICE = KnownClass(
    f"{_DIFFUSERS}.SD35AdaLayerNormZeroX",
    "diffusers' SD35AdaLayerNormZeroX",
    {"b139efce2c3617bc-e85262c111b080508db68": TRIED},
)
ADA_LAYER_NORM_ZERO_SINGLE = KnownClass(
    f"{_DIFFUSERS}.AdaLayerNormZeroSingle",
    "diffusers' AdaLayerNormZeroSingle",
    {"950e8579644eff88-cb0262459a29701": TRIED},
)


def of_norm(norm: Any) -> dict[str, Any]:
    """What `norm_modulate` takes of a LayerNorm or a RMSNorm of one of these kinds."""
    affine: dict[str, Tensor | None] = {"weight": norm.weight}
    if isinstance(norm, nn.LayerNorm):
        return affine | {"bias": norm.bias, "norm": "layer", "eps": norm.eps}
    return affine | {"norm": "rms", "eps": norm.eps}


def of_one_dtype(dtype: torch.dtype, parameters: Sequence[Tensor]) -> list[Tensor]:
    """The parameters of a call's norms of queries and keys, in one dtype that `qk_norm_rope` takes.

    A model may keep some of them in another dtype than others, and autocast may have chosen another for the queries.

    Args:
        dtype: Of queries and keys.
        parameters: Of both norms. They stay as they are if all have that dtype, or all the one that it is computed in.
    """
    wide = torch.promote_types(dtype, torch.float32)
    return [*parameters] if all(p.dtype is dtype for p in parameters) else [p.to(wide) for p in parameters]
