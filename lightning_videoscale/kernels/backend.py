"""Which backend computes a row operation: CUDA or Triton on a GPU, plain PyTorch on CPU, or the one asked for by name.

What is asked for by name runs or raises; "auto" takes the first that can and says once which one it is and why not
another.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any, Literal, cast, get_args

from torch import Tensor

from lightning_videoscale.kernels.arguments import check_choice
from lightning_videoscale.kernels.row_types import Operand, RowBackend, RowMap, RowOp

BackendName = Literal["auto", "cuda", "triton", "reference"]
_NAMES = get_args(BackendName)
_log = logging.getLogger(__name__)


def choose_backend(
    asked: str,
    operation: str,
    op: RowOp,
    x: Tensor,
    branch: Tensor | None,
    operands: tuple[Operand, ...],
    affine: tuple[Tensor, ...],
    rows: RowMap,
) -> RowBackend:
    """Returns the module that runs ``operation`` on tensors like these, forward and backward alike.

    Args:
        asked: "auto": CUDA where it supports the variant, else Triton, else the reference, and on CPU the reference;
            or the name of one of them.
        operation: The operation's name, for messages.
        op: The variant.
        x: (N, D), what the operation reads first.
        branch: (N, D), or None.
        operands: Gate, scale and shift, as far as the variant has them.
        affine: The norm's weight and bias, likewise.
        rows: Their map.

    Raises:
        ValueError: If there is no backend of that name.
        NotImplementedError: If the one asked for by name cannot run this; the message says why.
    """
    chosen = first_able(
        asked, operation, "rows", x.is_cuda, lambda b: b.objection(op, x, branch, operands, affine, rows)
    )
    return cast(RowBackend, chosen)


def first_able(asked: str, operation: str, module: str, on_gpu: bool, objection: Callable[[Any], str | None]) -> Any:
    """Returns the backend's module that runs an operation; `choose_backend` says what is taken when.

    Args:
        asked: "auto" or a backend's name.
        operation: The operation's name, for messages.
        module: What the operation's module is called in every backend's folder.
        on_gpu: Whether its tensors are on a GPU.
        objection: Asks a module why it cannot run this.

    Raises:
        ValueError: If there is no backend of that name.
        NotImplementedError: If the one asked for by name cannot run this; the message says why.
    """
    check_choice("backend", asked, _NAMES)
    candidates = [asked]
    if asked == "auto":
        candidates = ["cuda", "triton", "reference"] if on_gpu else ["reference"]
    objections = []
    for name in candidates:
        backend = _load(name, module)
        reason = backend if isinstance(backend, str) else objection(backend)
        if reason is not None:
            objections.append(f"{name}: {reason}")
            continue
        _log_once(operation, name, "; ".join(objections))
        return backend
    raise NotImplementedError(
        f"{operation} cannot run on the backend asked for ({objections[0]}). "
        'backend="auto" takes one that can, or name another.'
    )


@functools.cache
def _load(name: str, module: str) -> Any:
    """Imports a backend when it is first needed; returns why it cannot be imported where that is so."""
    try:
        return importlib.import_module(f"lightning_videoscale.kernels.{name}.{module}")
    except ImportError as error:
        return f"it cannot be imported ({error})"


@functools.cache
def _log_once(operation: str, name: str, passed_over: str) -> None:
    _log.info("%s runs on the %s backend%s", operation, name, f" (not on {passed_over})" if passed_over else "")
