"""`Transport.exchange` for eager and for compiled code: `exchange`.

Collectives are traced. A transport that compilers cannot trace is called by an op, which takes tensors and plain values
only, see `group_numbers`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_videoscale.compat.torch.compilation import keep_order
from lightning_videoscale.kernels.autograd import NAMESPACE, define_op, refuse_derivative
from lightning_videoscale.parallel.group_numbers import group_of
from lightning_videoscale.parallel.mesh import Axis
from lightning_videoscale.parallel.transport import Transport


def exchange(
    message: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis, transport: Transport, number: int | None
) -> Tensor:
    """As `Transport.exchange`.

    Args:
        message: See there.
        send: See there.
        receive: See there.
        axis: Of the mesh of the group.
        transport: Of the group.
        number: Of the group; None where compiled code is to trace the transport.
    """
    if number is None or transport.traceable or not torch.compiler.is_compiling():
        return transport.exchange(message, send, receive, axis)
    received: Tensor = _op(message, list(send), list(receive), axis.name, number)
    return received


def _run(message: Tensor, send: list[int], receive: list[int], axis: str, number: int) -> Tensor:
    group = group_of(number)
    return group.transport.exchange(message, send, receive, getattr(group.mesh, axis))


def _fake(message: Tensor, send: list[int], receive: list[int], axis: str, number: int) -> Tensor:
    return message.new_empty(sum(receive))


_NAME = f"{NAMESPACE}::exchange"
define_op(_NAME, "(Tensor message, SymInt[] send, SymInt[] receive, str axis, SymInt group) -> Tensor", _run, _fake)
keep_order(_NAME)
_op = refuse_derivative(_NAME, "An exchange is differentiated by what calls it.")
