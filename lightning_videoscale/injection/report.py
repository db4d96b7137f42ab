"""What an injection did, and the way back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torch import nn

from lightning_videoscale.families import class_path
from lightning_videoscale.injection.fused_block import fused_block_of
from lightning_videoscale.undo import Undo

OF_WHAT = "of what norms, modulations, gates, rotations and activations of the blocks read and write"


class Replaced(NamedTuple):
    """A block that now uses fused kernels: its path in the model, its class, and what was fused."""

    path: str
    class_name: str
    what: str


class Skipped(NamedTuple):
    """A block that was left as it is: its path in the model, its class, and why."""

    path: str
    class_name: str
    reason: str


@dataclass
class InjectionReport:
    """What `inject_fused_kernels` did to a model; ``str()`` gives a short text.

    Attributes:
        model: Name of the model's class.
        kernels: What runs the kernels, and why nothing faster does.
        replaced: The blocks that now use fused kernels.
        skipped: The blocks that were left as they are, and why.
        fused_share: Which part of what norms, modulations, gates, rotations and activations of the blocks read and
            write is moved by fused kernels now, by the count of `injection.traffic`; None where no block is found.
    """

    model: str
    kernels: str = ""
    replaced: list[Replaced] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    fused_share: float | None = None
    _fused: dict[str, nn.Module] = field(default_factory=dict, repr=False)
    _undo: Undo = field(default_factory=Undo, repr=False)

    def replace(
        self,
        path: str,
        module: nn.Module,
        fused: type[nn.Module],
        what: str,
        backend: str,
        recompute_norms: bool,
    ) -> None:
        """Gives ``module`` the class ``fused`` and the settings of its kernels, and notes it."""
        self.replaced.append(Replaced(path, type(module).__name__, what))
        self._fused[path] = module
        self._undo.add(partial(setattr, module, "__class__", type(module)))
        module.__class__ = fused
        self._undo.set(module, "kernel_backend", backend)
        self._undo.set(module, "recompute_norms", recompute_norms)

    def sort(self, paths: list[str]) -> None:
        """Lists what was replaced and skipped in the order of ``paths``."""
        place = {path: i for i, path in enumerate(paths)}
        self.replaced.sort(key=lambda entry: place[entry.path])
        self.skipped.sort(key=lambda entry: place[entry.path])

    def undo(self) -> None:
        """Gives every replaced block its original class back; a second call finds nothing to do.

        Raises:
            RuntimeError: If a block has got yet another class meanwhile (from ``fully_shard``, for example), or a
                forward of its own (from a cache of diffusers). Nothing is undone then.
        """
        for path, module in self._fused.items():
            if fused_block_of(module) is None:
                raise RuntimeError(
                    f"{path} is a {class_path(type(module))} with bases {[b.__name__ for b in type(module).__bases__]} "
                    "now, no longer the fused class: undo what changed it since, then call undo() again."
                )
            if not _is_own_forward(module):
                raise RuntimeError(
                    f"{path} has got a forward of its own since, which calls the fused one: take it away first (caches "
                    "of diffusers by disable_cache()), then call undo() again."
                )
        for module in self._fused.values():
            vars(module).pop("forward", None)
        self._undo()
        self._fused.clear()

    def __str__(self) -> str:
        """One line per kind of replacement and per reason."""
        if not self.replaced and not self.skipped:
            return f"Fused kernels: no block of a known class in {self.model}."
        lines = [f"Fused kernels in {self.model}: {len(self.replaced)} blocks replaced, {len(self.skipped)} skipped."]
        lines += [f"  kernels: {self.kernels}"] if self.kernels else []
        if self.fused_share is not None:
            lines.append(f"  fused: about {self.fused_share:.0%} {OF_WHAT}")
        lines += [f"  replaced {line}" for line in _grouped(self.replaced)]
        lines += [f"  skipped {line}" for line in _grouped(self.skipped)]
        return "\n".join(lines)


def _is_own_forward(module: nn.Module) -> bool:
    """Whether a module's forward is its class's; a cache of diffusers, once disabled, leaves just that behind."""
    own = vars(module).get("forward")
    return own is None or getattr(own, "__func__", None) is type(module).forward


def _grouped(entries: Iterable[tuple[str, str, str]]) -> list[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for path, class_name, text in entries:
        groups.setdefault((class_name, text), []).append(path)
    return [
        f"{len(paths)} {class_name} ({' … '.join(dict.fromkeys((paths[0], paths[-1])))}): {text}"
        for (class_name, text), paths in groups.items()
    ]
