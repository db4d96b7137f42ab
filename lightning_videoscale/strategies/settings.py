"""What a user asks of a sequence-parallel strategy, checked and agreed on by all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

import torch

from lightning_videoscale.attention import AttentionBackend
from lightning_videoscale.graphs import GraphOptions
from lightning_videoscale.parallel import SplitPlan
from lightning_videoscale.parallel.layout import SequenceSizes, Size, SizeOfGroup, resolve_sizes
from lightning_videoscale.parallel.schedules import ScheduleSetting
from lightning_videoscale.parallel.transport import TransportName
from lightning_videoscale.ranks import gather_over_ranks
from lightning_videoscale.strategies.compilation import CompileOptions


@dataclass(frozen=True)
class SequenceParallelSettings:
    """The arguments that all sequence-parallel strategies share; `SequenceParallelDDPStrategy` documents them."""

    ulysses_size: Size
    ring_size: Size
    modules: list[str] | None
    plan: SplitPlan | None
    activation_checkpointing: bool | float
    compile: CompileOptions = field(default=False, kw_only=True)
    transport: TransportName = field(default="collective", kw_only=True)
    schedule: ScheduleSetting = field(default="serial", kw_only=True)
    sp_size: SizeOfGroup = field(default=None, kw_only=True)
    verify_plan: bool = field(default=True, kw_only=True)
    save_frozen: bool | None = field(default=None, kw_only=True)
    attention_backend: AttentionBackend = field(default="auto", kw_only=True)
    graphs: GraphOptions = field(default=GraphOptions(), kw_only=True)

    def __post_init__(self) -> None:
        self._check_types()
        if self.transport not in get_args(TransportName):
            raise ValueError(f"transport={self.transport!r} is not one of {get_args(TransportName)}.")
        if self.schedule not in get_args(ScheduleSetting):
            raise ValueError(f"schedule={self.schedule!r} is not one of {get_args(ScheduleSetting)}.")
        if self.sp_size == "auto" and any(isinstance(size, int) for size in (self.ulysses_size, self.ring_size)):
            raise ValueError(
                f"sp_size='auto' chooses all sizes, and ulysses_size={self.ulysses_size!r} and "
                f"ring_size={self.ring_size!r} name some: leave them out, or give sp_size a number."
            )
        if self.plan is not None and (self.modules is None or len(self.modules) != 1):
            raise ValueError(f"plan= describes one network: name it with modules=[...] (got modules={self.modules}).")

    def _check_types(self) -> None:
        """What is given in Python; LightningCLI does this by itself. A string would else count as True."""
        share = self.activation_checkpointing
        if not isinstance(share, int | float):
            raise TypeError(f"activation_checkpointing={share!r} must be True, False or a share of the blocks.")
        if not 0 <= share <= 1:
            raise ValueError(f"activation_checkpointing={share!r} must be a share of the blocks, from 0 to 1.")
        for name in ("verify_plan", "save_frozen"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "save_frozen" and value is None):
                raise TypeError(f"{name}={value!r} must be True or False.")
        for name in ("ulysses_size", "ring_size", "sp_size"):
            size: Any = getattr(self, name)
            if not isinstance(size, int) and size not in (None, "auto"):
                raise ValueError(f"{name}={size!r} must be a whole number, or 'auto'.")
        if not isinstance(self.compile, bool | Mapping):
            raise TypeError(
                f"compile={self.compile!r} must be True, False or keyword arguments of torch.compile, such as "
                'compile={"mode": "max-autotune-no-cudagraphs"}.'
            )
        check_paths("modules", self.modules)

    @property
    def only_serial(self) -> str | None:
        """The setting beside which ``"auto"`` is ``"serial"``; None if there is none."""
        return f"compile={self.compile!r}" if self.compile else None

    def graphs_on(self, device: torch.device) -> GraphOptions:
        """When graphs are used on a device; ``"auto"`` is off on CPUs, and for compiled blocks."""
        is_off = self.graphs.mode == "auto" and (device.type != "cuda" or bool(self.compile))
        return replace(self.graphs, mode=False) if is_off else self.graphs

    def sizes(self, devices_per_node: int) -> SequenceSizes:
        """Returns the sizes that are known before the model is; one group spans the devices of a node by default.

        Raises:
            ValueError: If the sizes that were named contradict each other or the devices of a node.
        """
        assert self.sp_size != "auto"  # which needs the data
        return resolve_sizes(self.ulysses_size, self.ring_size, self.sp_size, usual=devices_per_node)

    def check_agreement(self) -> None:
        """Raises a ``ValueError`` on every rank, with the difference, if ranks were given different settings.

        Collective over all ranks. Ranks that disagree would otherwise wait for each other in different collectives.
        """
        mine = {field.name: _comparable(getattr(self, field.name)) for field in fields(self)}
        everyone = gather_over_ranks(mine)
        for name in mine:
            values = [theirs[name] for theirs in everyone]
            if any(value != values[0] for value in values):
                listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
                raise ValueError(f"The ranks were given different values of {name}= for the strategy: {listed}.")


def check_paths(name: str, paths: Any) -> None:
    """Raises a ``TypeError`` if paths of modules are no list of strings: a single string is none."""
    if paths is not None and (isinstance(paths, str) or not all(isinstance(path, str) for path in paths)):
        instead = f": {name}=[{paths!r}]" if isinstance(paths, str) else ""
        raise TypeError(f"{name}={paths!r} must be a list of paths within the LightningModule{instead}.")


def _comparable(value: Any) -> Any:
    """Comparable form of a setting; for a SplitPlan, all that is no function."""
    if isinstance(value, SplitPlan):
        attention = value.attention if isinstance(value.attention, Mapping) else {}
        attend = {path: (each.queries, each.key_streams, each.padded_rows) for path, each in attention.items()}
        return repr((value.inputs, value.outputs, value.gathers, value.gathers_inside, value.whole, attend))
    if isinstance(value, Mapping):  # of torch.compile's arguments, the backend may be any callable
        return {name: type(option).__name__ if callable(option) else repr(option) for name, option in value.items()}
    return value
