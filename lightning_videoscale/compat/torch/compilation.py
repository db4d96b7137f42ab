"""What `torch.compile` takes for constant, and what it may reorder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from lightning_videoscale.compat.torch import TORCH


def with_integers_that_vary(compiled: Callable[..., Any], *, stays_compiled: bool = False) -> Callable[..., Any]:
    """Lets compiled code serve all values of integers that modules hold, as it does of the sizes of tensors.

    By default Dynamo takes them for constants and compiles anew for each value, eight times at most; then it runs what
    it does not know without compilation. ``torch.compile`` has no argument for it. There is a switch of the process,
    which is set while the code runs. Integers in tuples are constants all the same, those in lists are not.

    Args:
        compiled: What ``torch.compile`` returned.
        stays_compiled: Makes it an error where Dynamo would go on without compilation. It logs a warning then, and has
            another switch for it, which is as little an argument.

    Returns:
        What takes its place. It raises a ``RuntimeError`` where code that stays compiled would have to be compiled more
        often than Dynamo's limit allows.
    """
    config = TORCH.get("torch._dynamo", "config")
    switches = {"allow_unspec_int_on_nn_module": True}
    if stays_compiled:
        switches["fail_on_recompile_limit_hit"] = True
    for name in switches:
        TORCH.get(config, name)
    limit_hit = TORCH.get("torch._dynamo.exc", "FailOnRecompileLimitHit")

    @wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        switched: AbstractContextManager[None] = config.patch(**switches)
        with switched:
            try:
                return compiled(*args, **kwargs)
            except limit_hit as error:
                raise RuntimeError(
                    f"A block was compiled {config.recompile_limit} times, for a length, layout or mode each, and "
                    "this call has another one. Leave out 'dynamic': False, which compiles each length for itself, or "
                    "set torch._dynamo.config.recompile_limit. TORCH_LOGS=recompiles prints what differs."
                ) from error

    return call


def keep_order(op: str) -> None:
    """Has compiled code run an op as often and in the order, among such ops, as the program does.

    Else compilers are free to reorder what does not depend on each other. In public that is not to be had for an op
    that is defined by its schema.
    """
    effects = "torch._higher_order_ops.effects"
    TORCH.get(effects, "_register_effectful_op")(op, TORCH.get(effects, "_EffectType").ORDERED)
