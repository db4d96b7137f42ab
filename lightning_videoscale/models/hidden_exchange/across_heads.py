"""Norms over all heads of a token, which are computed as the heads arrive, together with the rotation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_videoscale.compat.torch.versions import autocast_widens_norms
from lightning_videoscale.families import class_path
from lightning_videoscale.injection.bypassed import changed
from lightning_videoscale.injection.norms import DIFFUSERS_RMS_NORM, RMS_NORM, of_one_dtype
from lightning_videoscale.models.hidden_exchange.arguments import tables_of_all
from lightning_videoscale.models.hidden_exchange.groups import HeadPlacement
from lightning_videoscale.parallel import Projection
from lightning_videoscale.parallel.schedules.across_heads import NormAcrossHeads, NormTensors
from lightning_videoscale.parallel.schedules.input_projections import QueryKeyNorm

_KINDS = {kind.class_path for kind in (RMS_NORM, DIFFUSERS_RMS_NORM)}
_AUTOCAST_WIDENS_NORMS = autocast_widens_norms()


def changed_norm(attn: Any, projection: Projection) -> str | None:
    """Returns which norm over all heads is not as diffusers makes it, since none is called; None if all are."""
    norms = [getattr(attn, name) for name in projection.norms]
    for name, norm in zip(projection.norms, norms, strict=True):
        if class_path(type(norm)) not in _KINDS or norm.eps is None or norm.weight is None:
            return f"{name} is not a RMSNorm with a weight and an eps, as known here, but {class_path(type(norm))}"
        if getattr(norm, "bias", None) is not None:
            return f"{name} has a bias"
        if (change := changed(norm)) is not None:
            return f"{name} {change}"
    return None if norms[0].eps == norms[1].eps else f"{' and '.join(projection.norms)} have different eps"


def norm_across(
    attn: Any, projection: Projection, tables: Any, stream: str, place: HeadPlacement, x: Tensor
) -> QueryKeyNorm:
    """Returns the norm, with what it reads of this rank's heads and of the Ulysses group's tokens.

    Args:
        attn: The attention.
        projection: Of its one stream.
        tables: The rotary tables that it was called with, or None.
        stream: The stream's name.
        place: Where tokens and heads are.
        x: Its tokens, (B, s, C).
    """
    norm_q, norm_k = (getattr(attn, name) for name in projection.norms)
    width, mine = norm_q.weight.shape[0], place.mine
    channels = slice(mine.start * (width // place.heads), mine.stop * (width // place.heads))
    widened = _AUTOCAST_WIDENS_NORMS and x.is_cuda and torch.is_autocast_enabled("cuda")
    across_heads = NormAcrossHeads(
        width,
        norm_q.eps,
        "at_end" if widened else "fp32_once",
        getattr(attn, "kernel_backend", "auto"),
        "half" if projection.halves else "interleaved",
    )
    weights = of_one_dtype(x.dtype, (norm_q.weight[channels], norm_k.weight[channels]))
    if tables is None:
        return QueryKeyNorm(across_heads, NormTensors(weights, (None, None)))
    wide = torch.promote_types(x.dtype, torch.float32)
    pairs = _pairs(tables_of_all(tables, stream, projection, place), projection.layout, len(mine))
    return QueryKeyNorm(across_heads, NormTensors(weights, [_rows(table, x.shape[0], wide) for table in pairs]))


def _pairs(tables: Any, layout: str, heads: int) -> tuple[Tensor, Tensor]:
    """Cos and sin of each pair of channels, (1 or B, S, 1 or h, P)."""
    if layout == "dict":  # query's and key's are one
        turns = tables["query"].transpose(1, 2)
        return turns.real, turns.imag
    cos, sin = tables
    if layout == "bhsd":
        return cos.transpose(1, 2), sin.transpose(1, 2)
    if layout == "bsc":
        return cos.unflatten(2, (heads, -1))[..., ::2], sin.unflatten(2, (heads, -1))[..., ::2]
    return cos[..., ::2], sin[..., 1::2]


def _rows(table: Tensor, batch: int, dtype: torch.dtype) -> Tensor:
    """(1, S · B, 1 or h, P) of (1 or B, S, 1 or h, P): tokens first, with all samples of each."""
    return table.to(dtype).expand(batch, -1, -1, -1).transpose(0, 1).flatten(0, 1)[None].contiguous()
