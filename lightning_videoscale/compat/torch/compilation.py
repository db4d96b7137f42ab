"""What `torch.compile` takes for constant."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from lightning_videoscale.compat.torch import TORCH


def with_integers_that_vary(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Lets compiled code serve all values of integers that modules hold, as it does of the sizes of tensors.

    By default Dynamo takes them for constants and compiles anew for each value, eight times at most; then it runs what
    it does not know without compilation. ``torch.compile`` has no argument for it. There is a switch of the process,
    which is set while the code runs. Integers in tuples are constants all the same, those in lists are not.
    """
    name = "allow_unspec_int_on_nn_module"
    config = TORCH.get("torch._dynamo", "config")
    TORCH.get(config, name)

    @wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        switched: AbstractContextManager[None] = config.patch(**{name: True})
        with switched:
            return compiled(*args, **kwargs)

    return call
