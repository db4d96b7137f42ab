"""With how many bits libraries multiply, and by which of their kernels.

Precisions of float32 have had new names since torch 2.9. The older ones, such as ``get_float32_matmul_precision`` and
``allow_tf32``, are an error once somebody has set a new one; the new ones can always be read. torch declares some of
them for no type checker.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

_BACKENDS: Any = torch.backends


def product_settings() -> tuple[Hashable, ...]:
    """Returns what decides how cuBLAS and cuDNN multiply on a GPU."""
    blas, cudnn = _BACKENDS.cuda.matmul, _BACKENDS.cudnn
    return (
        blas.fp32_precision,
        blas.allow_bf16_reduced_precision_reduction,
        blas.allow_fp16_reduced_precision_reduction,
        blas.allow_fp16_accumulation,
        cudnn.conv.fp32_precision,
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
    )


def float32_products_are_coarse(device_type: str) -> bool:
    """Whether matrix products of float32 may be computed with fewer bits."""
    matmul = _BACKENDS.cuda.matmul if device_type == "cuda" else _BACKENDS.mkldnn.matmul
    return matmul.fp32_precision not in ("none", "ieee")
