"""How torchmetrics' metrics follow the module that they are in; read in 1.9.0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override


class MetricOfFixedDtype(Metric):
    """A metric whose states stay in their dtype when the module that it is in changes its own.

    torchmetrics leaves states alone in ``half()`` and its like, and casts them in ``to(dtype)``, by which Lightning
    converts modules for ``precision="bf16-true"``: a count in bfloat16 stops at 256. There is no public way, as
    ``to`` of a module calls a private method of what it holds. ``set_dtype`` still changes them.
    """

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> Any:
        def moving(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(fn if self._dtype_convert else moving, exclude_state)
