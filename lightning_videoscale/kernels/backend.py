"""Which backend computes an operation: decided once per process and device, from facts that no shape changes.

| kind | operations | on a GPU, fastest first |
|---|---|---|
| rows | norms, gates and both in one | cuda, triton, reference |
| gelu | `gelu`, `gelu_linear` | cuda, triton, reference |
| heads | `qk_norm_rope` | cuda, triton, reference |

On a CPU all run on the reference. What a device, its driver or its file system rules out is left out of the order
(`resolve`), and what another rank lacks too (`settle`). The first that remains runs every call within its limits. What
lies beyond them, by dtype or width, is known from the call alone and alike on all ranks: such calls run on the next of
the order, and the log says so the first time. A backend asked for by name runs or raises.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, get_args

import torch

from lightning_videoscale.kernels.arguments import check_choice
from lightning_videoscale.ranks import gather_over_ranks, rank_in_world

BackendName = Literal["auto", "cuda", "triton", "reference"]
OpKind = Literal["rows", "gelu", "heads"]
_NAMES = get_args(BackendName)
_MODULES: dict[OpKind, str] = {"rows": "rows", "gelu": "gelu", "heads": "qk_norm_rope"}
_ON_GPUS: dict[OpKind, tuple[str, ...]] = {
    "rows": ("cuda", "triton", "reference"),
    "gelu": ("cuda", "triton", "reference"),
    "heads": ("cuda", "triton", "reference"),
}
_log = logging.getLogger(__name__)


class KernelBackends(NamedTuple):
    """The backends of every kind of operation, fastest first, and why others are not among them.

    ``str()`` is a text for people; `setting` is what operations take as ``backend``.
    """

    rows: tuple[str, ...]
    gelu: tuple[str, ...]
    heads: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    @property
    def setting(self) -> str:
        """Such as "rows=cuda,triton,reference gelu=cuda,triton,reference heads=cuda,triton,reference"."""
        return " ".join(f"{kind}={','.join(getattr(self, kind))}" for kind in _MODULES)

    def __str__(self) -> str:
        """Such as "norms, gates and GELU on cuda, qk_norm_rope on reference (cuda: …)"."""
        parts = [("norms and gates", self.rows), ("GELU", self.gelu), ("qk_norm_rope", self.heads)]
        text = ", ".join(f"{what} on {order[0]}" for what, order in parts)
        return text + (f" ({'; '.join(self.left_out)})" if self.left_out else "")


@functools.cache
def resolve(device: int) -> KernelBackends:
    """Returns what can run on a GPU of this index (-1: the CPU) in this process; asked once, it stays so.

    Raises:
        RuntimeError: If a CUDA graph is being captured, since kernels are tried out.
    """
    if device < 0:
        return KernelBackends(("reference",), ("reference",), ("reference",))
    orders, left_out = {}, dict[str, None]()
    for kind, names in _ON_GPUS.items():
        reasons = {name: unusable(name, kind, device) for name in names}
        orders[kind] = tuple(name for name in names if reasons[name] is None)
        left_out |= {f"{name}: {reason}": None for name, reason in reasons.items() if reason is not None}
    backends = KernelBackends(**orders, left_out=tuple(left_out))
    _log.info("Kernels of GPU %d: %s.", device, backends)
    return backends


def settle(backend: BackendName, device: torch.device | None = None) -> tuple[str, str]:
    """Decides at setup what a model's kernels run on, for the whole run and for all ranks alike.

    Under an initialised process group it is a collective over all ranks. Ranks that can run different backends agree on
    those that all have.

    Args:
        backend: As operations take it. A name stands.
        device: Where the model will run. None where that is not known yet: "auto" then stays, and what it means is
            decided at the first call on a device.

    Returns:
        The ``backend`` to call operations with, and a text that says what it means.

    Raises:
        ValueError: If there is no backend of that name.
    """
    check_choice("backend", backend, _NAMES)
    if backend != "auto":
        return backend, f"everything on {backend}, as asked for"
    if device is None:
        return "auto", "decided at the first call on a device"
    mine = resolve(torch.empty(0, device=device).get_device() if device.type == "cuda" else -1)
    every = gather_over_ranks(mine)
    if len(every) > 1:
        mine = common(every)
        if rank_in_world() == 0:
            _log.info("Kernels of %d ranks: %s.", len(every), mine)
    return mine.setting, str(mine)


def common(every: Iterable[KernelBackends]) -> KernelBackends:
    """Returns what all of several ranks can run; the first is rank 0's."""
    first, *others = every
    orders = {
        kind: tuple(name for name in getattr(first, kind) if all(name in getattr(other, kind) for other in others))
        for kind in _MODULES
    }
    left_out = {reason: None for backends in (first, *others) for reason in backends.left_out}
    return KernelBackends(**orders, left_out=tuple(left_out))


@functools.cache
def choose(kind: OpKind, backend: str, operation: str, variant: Any, device: int) -> Any:
    """Returns the backend's module that runs an operation's variant on a device.

    Args:
        kind: Of the operation.
        backend: "auto", a name, or a `KernelBackends.setting`.
        operation: Its name, for messages.
        variant: What the kind's modules take as such.
        device: Of the tensors: a GPU's index, or -1.

    Raises:
        ValueError: If there is no backend of that name.
        NotImplementedError: If the one asked for by name cannot run this; the message says why.
    """
    passed_over: list[str] = []
    for name in _order(kind, backend, device):
        reason = unusable(name, kind, device)
        if reason is None:
            module = importlib.import_module(f"lightning_videoscale.kernels.{name}.{_MODULES[kind]}")
            reason = module.limit(variant, device)
            if reason is None:
                if passed_over:
                    _log_once(f"{operation} runs on {name} where a call is beyond {'; '.join(passed_over)}.")
                return module
        passed_over.append(f"{name}: {reason}")
    raise NotImplementedError(
        f"{operation} cannot run on the backend asked for ({'; '.join(passed_over)}). "
        'backend="auto" takes one that can, or name another.'
    )


def _order(kind: OpKind, backend: str, device: int) -> tuple[str, ...]:
    if "=" in backend:
        return tuple(dict(part.split("=") for part in backend.split())[kind].split(","))
    if backend == "auto":
        order: tuple[str, ...] = getattr(resolve(device), kind)
        return order
    check_choice("backend", backend, _NAMES)
    return (backend,)


@functools.cache
def unusable(name: str, kind: OpKind, device: int) -> str | None:
    """Returns why a backend cannot run a kind of operation on a device at all, or None if it can."""
    if name == "reference":
        return None
    try:
        package = importlib.import_module(f"lightning_videoscale.kernels.{name}")
    except ImportError as error:
        return f"it cannot be imported ({error})"
    reason: str | None = package.unusable(kind, device)
    return reason


@functools.cache
def _log_once(message: str) -> None:
    _log.info(message)
