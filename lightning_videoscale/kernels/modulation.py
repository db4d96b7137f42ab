"""From what one calls an operation with, (B, S, D) and its modulation, to the rows, operands and map of the backends.

Modulation comes as (B, R, D) with R dividing S, an entry for each S / R consecutive tokens (R = 1 per sample, frames
per frame, S per token), or as (G, D) with an index (B, R) that names the entry of each S / R tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_videoscale.kernels.row_types import Operand, RowMap


def check_modulation(
    x: Tensor, values: dict[str, Tensor | None], tables: dict[str, Tensor | None], index: Tensor | None
) -> None:
    """Checks gate, scale and shift (by name, those that are given), their tables and the index against x (B, S, D).

    Raises:
        ValueError: If shapes, dtypes or devices do not fit.
    """
    given = [value for value in values.values() if value is not None]
    if not given and (index is not None or any(table is not None for table in tables.values())):
        raise ValueError(f"index and tables belong to {' and '.join(values)}, none of which is given.")
    _check_tables(x, values, tables)
    if not given:
        return
    (b, s, d), first = x.shape, given[0]
    fits = all(value.shape == first.shape for value in given)
    names = " and ".join(name for name, value in values.items() if value is not None)
    if index is not None:
        if not fits or first.ndim != 2 or first.shape[1] != d:
            raise ValueError(
                f"With an index, {names} must have shape (G, {d}), G entries of D channels; got {_shapes(given)}."
            )
        _check_index(x, index)
    elif not fits or first.ndim != 3 or first.shape[0] != b or first.shape[2] != d or not _divides(first, s):
        raise ValueError(
            f"{names} must have one shape {(b, 1, d)} (per sample) or {(b, s, d)} (per token) or (B, R, D) with R "
            f"dividing S (per frame) to fit x of shape {(b, s, d)}; got {_shapes(given)}. Other maps go through index."
        )
    if any(value.dtype is not first.dtype for value in given):
        raise ValueError(f"{names} must have one dtype; got {' and '.join(str(v.dtype) for v in given)}.")


def _check_tables(x: Tensor, values: dict[str, Tensor | None], tables: dict[str, Tensor | None]) -> None:
    dtype = None
    for name, table in tables.items():
        if table is None:
            continue
        if table.shape != x.shape[2:] or values[name] is None:
            raise ValueError(
                f"{name}_table must have shape {_shape(x)[2:]} and needs {name} beside it; got {_shape(table)}."
            )
        if dtype not in (None, table.dtype):
            raise ValueError(
                f"All tables must have one dtype; got {[t.dtype for t in tables.values() if t is not None]}."
            )
        dtype = table.dtype


def check_branch(residual: Tensor, branch: Tensor, branch_bias: Tensor | None) -> None:
    """Checks that both are (B, S, D), and the bias (D,).

    Raises:
        ValueError: If they are not.
    """
    if residual.ndim != 3 or branch.shape != residual.shape:
        raise ValueError(
            f"residual and branch must have one shape (B, S, D); got {_shape(residual)} and {_shape(branch)}."
        )
    if branch_bias is not None and branch_bias.shape != branch.shape[-1:]:
        raise ValueError(
            f"branch_bias must be that of the Linear that the branch comes from, {_shape(branch)[-1:]}; got "
            f"{_shape(branch_bias)}."
        )


def as_rows(x: Tensor) -> Tensor:
    """Returns (..., D) as (N, D); copied where rows do not begin on 16 bytes or are not contiguous themselves."""
    rows = x.reshape(-1, x.shape[-1])
    bytes_apart = rows.stride(0) * rows.element_size()
    begins_well = rows.data_ptr() % 16 == 0 and (bytes_apart % 16 == 0 or rows.is_contiguous())
    if begins_well and (rows.stride(1) == 1 or rows.shape[1] == 1):
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def contiguous(parameter: Tensor | None) -> Tensor | None:
    """Returns a parameter whose values lie in a row, as backends read them."""
    return None if parameter is None else parameter.contiguous()


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As `Tensor.to`, without its way through PyTorch's dispatcher where there is nothing to do."""
    return x if x.dtype is dtype else x.to(dtype)


def gradient_rows(gradient: Tensor | None, like: Tensor) -> Tensor | None:
    """Returns a gradient as `as_rows`, in the dtype of ``like``, in which the kernels read it."""
    return None if gradient is None else as_rows(in_dtype(gradient, like.dtype))


def row_map(x: Tensor, values: Tensor | None, index: Tensor | None) -> RowMap:
    """Returns the map for x (B, S, D), which has elements, and one of its operands (None: all rows are one group).

    Raises:
        IndexError: If an entry of the index is out of range; on CPU only. On a GPU, where the host would have to wait,
            it is the kernel that reads the index which stops with an assertion, as PyTorch's own indexing does.
    """
    b, s, _ = x.shape
    if values is None:
        return RowMap(groups=1, rows_per_group=b * s)
    if index is None:
        return RowMap(groups=b * values.shape[1], rows_per_group=s // values.shape[1])
    if not index.is_cuda and not 0 <= int(index.min()) <= int(index.max()) < values.shape[0]:
        raise IndexError(f"index must lie in [0, {values.shape[0]}); got [{int(index.min())}, {int(index.max())}].")
    if index.dtype is not torch.int32:  # what does not fit into 32 bits must not become an entry that there is
        index = index.clamp(-1, values.shape[0]).to(torch.int32)
    return RowMap(values.shape[0], s // index.shape[1], index.reshape(-1).contiguous())


def operand(values: Tensor | None, table: Tensor | None) -> Operand | None:
    """Returns (B, R, D) or (G, D) and its table as an operand; without a copy where rows have a single stride."""
    if values is None:
        return None
    flat = values.reshape(-1, values.shape[-1])
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    return Operand(flat, None if table is None else table.contiguous())


def _check_index(x: Tensor, index: Tensor) -> None:
    if index.device != x.device:
        raise ValueError(f"All arguments must lie on one device; got {x.device}, but index on {index.device}.")
    fits = index.ndim == 2 and index.shape[0] == x.shape[0] and _divides(index, x.shape[1])
    if not fits or index.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"index must be int32 or int64 of shape (B, R) with R dividing S, (B, S) for one entry per token, to fit x "
            f"of shape {_shape(x)}; got {index.dtype} of shape {_shape(index)}."
        )


def _divides(x: Tensor, s: int) -> bool:
    """Whether R = x.shape[1] entries share S tokens evenly."""
    return x.shape[1] == s or (x.shape[1] > 0 and s % x.shape[1] == 0)


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _shapes(tensors: list[Tensor]) -> str:
    return " and ".join(str(_shape(x)) for x in tensors)
